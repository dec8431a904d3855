"""Chapter 6: attention without the matrix of scores, in PyTorch and in Triton."""

import math

import torch
from device import DEVICE, check  # before triton
from torch import Tensor

# isort: split
import triton
import triton.language as tl

import flashattn


def attention_blocked(q: Tensor, k: Tensor, v: Tensor, block: int = 16) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, headdim) and lse (seqlen_q,) of one head: FlashAttention-2, algorithm 1."""
    out, lse = torch.empty_like(q), q.new_empty(len(q))
    for rows in torch.arange(len(q)).split(block):
        q_block = q[rows] * q.shape[1] ** -0.5
        m = q.new_full((len(rows),), -math.inf)
        total = q.new_zeros(len(rows))
        acc = q.new_zeros(len(rows), v.shape[1])
        for keys in torch.arange(len(k)).split(block):
            s = q_block @ k[keys].T
            m_new = torch.maximum(m, s.amax(1))
            p = (s - m_new[:, None]).exp()
            alpha = (m - m_new).exp()
            total = alpha * total + p.sum(1)
            acc = alpha[:, None] * acc + p @ v[keys]
            m = m_new
        out[rows] = acc / total[:, None]
        lse[rows] = m + total.log()
    return out, lse


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seqlen_q, seqlen_k, scale,
    HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, col = tl.program_id(1).to(tl.int64), tl.arange(0, HEADDIM)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_exists = rows[:, None] < seqlen_q
    q_block = head * seqlen_q * HEADDIM + rows[:, None] * HEADDIM + col[None, :]
    q = tl.load(q_ptr + q_block, mask=row_exists, other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEADDIM], tl.float32)
    for first_key in range(0, seqlen_k, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_block = head * seqlen_k * HEADDIM + keys[:, None] * HEADDIM + col[None, :]
        k = tl.load(k_ptr + k_block, mask=keys[:, None] < seqlen_k, other=0.0)
        v = tl.load(v_ptr + k_block, mask=keys[:, None] < seqlen_k, other=0.0)
        s = tl.dot(q, k.T) * scale
        s = tl.where(keys[None, :] < seqlen_k, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        total = alpha * total + tl.sum(p, 1)
        acc = alpha[:, None] * acc + tl.dot(p.to(v.dtype), v)
        m = m_new
    tl.store(out_ptr + q_block, acc / total[:, None], mask=row_exists)
    tl.store(lse_ptr + head * seqlen_q + rows, m + tl.log(total), mask=rows < seqlen_q)


def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q, k, v (heads, seqlen, headdim), contiguous, headdim a power of two from 16 on."""
    check(q, k, v)
    heads, seqlen_q, headdim = q.shape
    out, lse = torch.empty_like(q), q.new_empty((heads, seqlen_q), dtype=torch.float32)
    block_m, block_n = 64, 32
    forward_kernel[(triton.cdiv(seqlen_q, block_m), heads)](
        q, k, v, out, lse, seqlen_q, k.shape[1], headdim**-0.5,
        HEADDIM=headdim, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    return out, lse


def reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """flashattn.reference in fp64, with heads first as here."""
    q, k, v = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    out, lse = flashattn.reference.attention(q, k, v, return_lse=True)
    return out[0].transpose(0, 1), lse[0]


def main() -> None:
    q = torch.randn(2, 100, 32, device=DEVICE)
    k, v = torch.randn(2, 2, 75, 32, device=DEVICE)
    expected_out, expected_lse = reference(q, k, v)
    for head in range(2):
        out, lse = attention_blocked(q[head].double(), k[head].double(), v[head].double())
        torch.testing.assert_close(out, expected_out[head])
        torch.testing.assert_close(lse, expected_lse[head])
    q, k, v = q.half(), k.half(), v.half()
    expected_out, expected_lse = reference(q, k, v)
    out, lse = attention(q, k, v)
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
    print("the blocked loop and the kernel agree with flashattn.reference")


if __name__ == "__main__":
    main()
