"""Chapter 4: a matrix product by blocks, in PyTorch and in Triton."""

import torch
from device import DEVICE, check  # before triton
from torch import Tensor

# isort: split
import triton
import triton.language as tl


def matmul_blocked(a: Tensor, b: Tensor, block: int) -> Tensor:
    """a (m, k) times b (k, n): a block of c at a time, the sum over blocks of k kept beside it."""
    c = a.new_empty(a.shape[0], b.shape[1])
    for rows in torch.arange(a.shape[0]).split(block):
        for cols in torch.arange(b.shape[1]).split(block):
            total = a.new_zeros(len(rows), len(cols))
            for inner in torch.arange(a.shape[1]).split(block):
                total += a[rows][:, inner] @ b[inner][:, cols]
            c[rows[:, None], cols] = total
    return c


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, a_row, a_col, b_row, b_col, c_row, c_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, k, BLOCK_K):
        inner = first + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + rows[:, None] * a_row + inner[None, :] * a_col,
            mask=(rows[:, None] < m) & (inner[None, :] < k),
            other=0.0,
        )
        b = tl.load(
            b_ptr + inner[:, None] * b_row + cols[None, :] * b_col,
            mask=(inner[:, None] < k) & (cols[None, :] < n),
            other=0.0,
        )
        total += tl.dot(a, b)
    tl.store(
        c_ptr + rows[:, None] * c_row + cols[None, :] * c_col,
        total,
        mask=(rows[:, None] < m) & (cols[None, :] < n),
    )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    check(a, b)
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty(m, n)
    block_m, block_n, block_k = 64, 64, 32
    matmul_kernel[(triton.cdiv(m, block_m), triton.cdiv(n, block_n))](
        a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return c


def main() -> None:
    a, b = torch.randn(100, 70, device=DEVICE), torch.randn(70, 130, device=DEVICE)
    torch.testing.assert_close(matmul_blocked(a, b, 32), a @ b)
    a, b = a.half(), b.half()
    torch.testing.assert_close(matmul(a, b), a @ b, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(matmul(b.T, a.T), (a @ b).T, rtol=1e-2, atol=1e-2)
    print("blocked products agree with PyTorch's, and a transposed view is nothing special")


if __name__ == "__main__":
    main()
