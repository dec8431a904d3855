"""Chapter 7: a causal mask by ranges of blocks: empty ones are skipped, full ones not masked."""

import torch
from device import DEVICE, check  # before triton
from torch import Tensor

# isort: split
import triton
import triton.language as tl

import flashattn


def key_range(
    first_row: int, block_m: int, block_n: int, seqlen_q: int, seqlen_k: int
) -> tuple[int, int]:
    """Blocks of keys [0, full) are visible to every query of a block of queries, blocks [full, end)
    to some, the others to none."""
    diagonal = first_row + seqlen_k - seqlen_q  # the last key that the first query sees
    visible_to_all = max(0, min(seqlen_k, diagonal + 1))
    visible_to_some = max(0, min(seqlen_k, diagonal + block_m))
    return visible_to_all // block_n, -(-visible_to_some // block_n)


@triton.jit
def attend(
    q, k_ptr, v_ptr, rows, first, end, seqlen_q, seqlen_k, scale, m, total, acc,
    MASK: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The loop over keys [first, end) of chapter 6, with the mask only where MASK asks for it."""
    col = tl.arange(0, HEADDIM)
    for first_key in range(first, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_block = keys[:, None] * HEADDIM + col[None, :]
        k = tl.load(k_ptr + k_block, mask=keys[:, None] < seqlen_k, other=0.0)
        v = tl.load(v_ptr + k_block, mask=keys[:, None] < seqlen_k, other=0.0)
        s = tl.dot(q, k.T) * scale
        if MASK:
            visible = keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q
            s = tl.where(visible & (keys[None, :] < seqlen_k), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp(s - reference[:, None])
        alpha = tl.exp(m - reference)
        total = alpha * total + tl.sum(p, 1)
        acc = alpha[:, None] * acc + tl.dot(p.to(v.dtype), v)
        m = m_new
    return m, total, acc


@triton.jit
def causal_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seqlen_q, seqlen_k, scale,
    HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, col = tl.program_id(1).to(tl.int64), tl.arange(0, HEADDIM)
    # The last queries see most keys: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    q_block = head * seqlen_q * HEADDIM + rows[:, None] * HEADDIM + col[None, :]
    q = tl.load(q_ptr + q_block, mask=rows[:, None] < seqlen_q, other=0.0)
    k_ptr += head * seqlen_k * HEADDIM
    v_ptr += head * seqlen_k * HEADDIM
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEADDIM], tl.float32)

    diagonal = first_row + seqlen_k - seqlen_q
    full = tl.maximum(0, tl.minimum(seqlen_k, diagonal + 1)) // BLOCK_N * BLOCK_N
    end = tl.maximum(0, tl.minimum(seqlen_k, diagonal + BLOCK_M))
    m, total, acc = attend(
        q, k_ptr, v_ptr, rows, 0, full, seqlen_q, seqlen_k, scale, m, total, acc,
        False, HEADDIM, BLOCK_N,
    )  # fmt: skip
    m, total, acc = attend(
        q, k_ptr, v_ptr, rows, full, end, seqlen_q, seqlen_k, scale, m, total, acc,
        True, HEADDIM, BLOCK_N,
    )  # fmt: skip
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + q_block, out, mask=rows[:, None] < seqlen_q)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, aligned to the bottom right; q, k, v (heads, seqlen, headdim), contiguous."""
    check(q, k, v)
    heads, seqlen_q, headdim = q.shape
    out = torch.empty_like(q)
    block_m, block_n = 64, 32
    causal_kernel[(triton.cdiv(seqlen_q, block_m), heads)](
        q, k, v, out, seqlen_q, k.shape[1], headdim**-0.5,
        HEADDIM=headdim, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    return out


def main() -> None:
    for seqlen_q, seqlen_k in ((150, 150), (70, 130), (130, 70)):
        q = torch.randn(2, seqlen_q, 32, device=DEVICE).half()
        k, v = torch.randn(2, 2, seqlen_k, 32, device=DEVICE).half()
        exact = flashattn.reference.attention(
            *(x.double().transpose(0, 1)[None] for x in (q, k, v)), causal=True
        )
        out = attention(q, k, v).double()
        torch.testing.assert_close(out, exact[0].transpose(0, 1), rtol=0, atol=2e-3)
        print(f"{seqlen_q} queries, {seqlen_k} keys: agrees with flashattn.reference")


if __name__ == "__main__":
    main()
