"""Chapter 5: softmax of rows of any length in Triton, one pass for maximum and sum."""

import math

import torch
from device import DEVICE  # before triton
from torch import Tensor

# isort: split
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, cols, BLOCK: tl.constexpr):
    x_ptr += tl.program_id(0).to(tl.int64) * cols
    out_ptr += tl.program_id(0).to(tl.int64) * cols
    m, total = float("-inf"), 0.0
    for first in range(0, cols, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < cols, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x, 0))
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)  # -inf - -inf is NaN
        total = total * tl.exp(m - reference) + tl.sum(tl.exp(x - reference), 0)
        m = m_new
    for first in range(0, cols, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < cols, other=float("-inf"))
        tl.store(out_ptr + i, tl.exp(x - m) / total, mask=i < cols)


def softmax(x: Tensor) -> Tensor:
    """Of the rows of x (rows, cols), contiguous; NaN, as torch's, for a row that is all -inf."""
    out = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=128)
    return out


def main() -> None:
    for cols in (1, 128, 1000):
        x = 100 * torch.randn(5, cols, device=DEVICE)
        torch.testing.assert_close(softmax(x), x.softmax(1))
        x[0, : cols // 2] = -math.inf  # of 1000: nothing in the first blocks
        torch.testing.assert_close(softmax(x), x.softmax(1))
        print(f"rows of {cols}: agree with PyTorch's")


if __name__ == "__main__":
    main()
