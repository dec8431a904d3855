"""Chapter 1: out = x + y in PyTorch and in Triton."""

import torch
from device import DEVICE, check  # before triton
from torch import Tensor

# isort: split
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside)
    y = tl.load(y_ptr + i, mask=inside)
    tl.store(out_ptr + i, x + y, mask=inside)


def add(x: Tensor, y: Tensor) -> Tensor:
    check(x, y)
    out = torch.empty_like(x)
    n, block = x.numel(), 256
    add_kernel[(triton.cdiv(n, block),)](x, y, out, n, BLOCK=block)
    return out


def main() -> None:
    for n in (1, 256, 1000):
        x, y = torch.randn(2, n, device=DEVICE)
        assert torch.equal(add(x, y), x + y)
        print(f"{n} elements: equal to PyTorch's, in {triton.cdiv(n, 256)} programs")


if __name__ == "__main__":
    main()
