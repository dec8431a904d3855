"""Chapter 8: the gradients of attention in PyTorch: by the formulas, and block by block.

The Triton form is in triton_attention.py.
"""

import torch
from torch import Tensor

from flashattn import reference


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of one head, (seqlen_q, headdim) and (seqlen_q,)."""
    one_head = (x[None, :, None] for x in (q, k, v))
    out, lse = reference.attention(*one_head, causal=causal, return_lse=True)
    return out[0, :, 0], lse[0, 0]


def probabilities(q: Tensor, k: Tensor, lse: Tensor, hidden: Tensor) -> Tensor:
    """P again, from what the forward has saved: neither its maximum nor its sum is needed."""
    return (q @ k.T * q.shape[1] ** -0.5 - lse[:, None]).exp().masked_fill(hidden, 0.0)


def backward(q, k, v, out, lse, dout, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv with the whole of P: FlashAttention-2, algorithm 2, as one block."""
    rows, keys = torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    hidden = (keys > rows + len(k) - len(q)) & causal
    p = probabilities(q, k, lse, hidden)
    delta = (dout * out).sum(1)
    dp = dout @ v.T
    ds = p * (dp - delta[:, None]) * q.shape[1] ** -0.5
    return ds @ k, ds.T @ q, p.T @ dout


def backward_blocked(q, k, v, out, lse, dout, causal: bool, block: int = 16):
    """The same with no more than a block of P at a time: one loop for dk and dv, one for dq."""
    scale, delta = q.shape[1] ** -0.5, (dout * out).sum(1)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    blocks_q, blocks_k = torch.arange(len(q)).split(block), torch.arange(len(k)).split(block)

    def p_and_ds(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        hidden = (keys[None, :] > rows[:, None] + len(k) - len(q)) & causal
        p = probabilities(q[rows], k[keys], lse[rows], hidden)
        return p, p * (dout[rows] @ v[keys].T - delta[rows, None]) * scale

    for keys in blocks_k:  # keys and values stay
        for rows in blocks_q:
            p, ds = p_and_ds(rows, keys)
            dv[keys] += p.T @ dout[rows]
            dk[keys] += ds.T @ q[rows]
    for rows in blocks_q:  # queries stay
        for keys in blocks_k:
            _, ds = p_and_ds(rows, keys)
            dq[rows] += ds @ k[keys]
    return dq, dk, dv


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out, lse = forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        return *backward_blocked(*ctx.saved_tensors, dout, ctx.causal), None


def main() -> None:
    torch.manual_seed(0)
    for causal in (False, True):
        q, dout = torch.randn(2, 40, 8, dtype=torch.float64)
        k, v = torch.randn(2, 50, 8, dtype=torch.float64)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        expected = torch.autograd.grad(forward(*leaves, causal)[0], leaves, dout)
        with torch.no_grad():
            saved = (q, k, v, *forward(q, k, v, causal))
            for gradients in (backward, backward_blocked):
                torch.testing.assert_close(gradients(*saved, dout, causal), expected)
        short = [x[:6].detach().requires_grad_() for x in leaves]
        assert torch.autograd.gradcheck(Attention.apply, (*short, causal))
    print("the formulas agree with autograd and with finite differences, in fp64")


if __name__ == "__main__":
    main()
