"""Chapter 9: the Triton kernels as an operator of PyTorch: fake, gradient, torch.compile."""

import functools
import math

import torch
import triton_attention
from torch import Tensor
from triton_attention import DEVICE

import flashattn


@torch.library.custom_op("learn::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = map(triton_attention.aligned, (q, k, v))
    return triton_attention.forward(q, k, v, q.shape[-1] ** -0.5, causal)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


@torch.library.custom_op("learn::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, dout = map(triton_attention.aligned, (q, k, v, dout))
    delta = triton_attention.row_products(out, dout)
    delta -= dlse.masked_fill(lse == -math.inf, 0.0)  # a query that sees no key has no gradient
    rest = (dout, lse, delta, q.shape[-1] ** -0.5, causal)
    dk, dv = triton_attention.grad_kv(q, k, v, *rest)
    return triton_attention.grad_q(q, k, v, *rest), dk, dv


@attention_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, causal) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)


def backward(ctx, dout: Tensor, dlse: Tensor):
    return *attention_backward(dout, dlse, *ctx.saved_tensors, ctx.causal), None


attention.register_autograd(backward, setup_context=setup_context)


def loss(q: Tensor, k: Tensor, v: Tensor, attend=attention) -> Tensor:
    out, lse = attend(q, k, v, causal=True)
    return out.double().square().sum() + lse.double().square().sum()


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, 40, 2, 16, device=DEVICE, dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    torch.library.opcheck(attention, (q, k, v, True))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    plain = functools.partial(flashattn.reference.attention, return_lse=True)
    view = torch.randn(1, 40, 2, 32, device=DEVICE, dtype=torch.float16)[..., ::2]
    for inputs in ((q, k, v), (view.requires_grad_(), k, v)):
        got = compiled(*inputs)
        exact = loss(*(x.double() for x in inputs), plain)
        torch.testing.assert_close(got, exact, rtol=1e-2, atol=0)
        gradients, expected = (torch.autograd.grad(value, inputs) for value in (got, exact))
        torch.testing.assert_close(
            [x.double() for x in gradients], [x.double() for x in expected], rtol=0, atol=2e-2
        )
    print("the operator passes opcheck and runs compiled in one graph, forward and backward")


if __name__ == "__main__":
    main()
