"""Chapter 3: a Triton kernel that takes views as they are, by their shapes and strides."""

import torch
from device import DEVICE, check  # before triton
from torch import Tensor

# isort: split
import triton
import triton.language as tl


@triton.jit
def scale_kernel(
    x_ptr, out_ptr, factor, rows, heads,
    x_batch, x_row, x_head, x_col, out_batch, out_row, out_head, out_col,
    HEADDIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    col = tl.arange(0, HEADDIM)
    x_ptr += batch * x_batch + head * x_head
    out_ptr += batch * out_batch + head * out_head
    inside = row[:, None] < rows
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :] * x_col, mask=inside)
    tl.store(out_ptr + row[:, None] * out_row + col[None, :] * out_col, factor * x, mask=inside)


def scale(x: Tensor, factor: float) -> Tensor:
    """factor * x of any view (batch, seqlen, heads, headdim); headdim a power of two."""
    check(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, rows, heads, headdim = x.shape
    block = 16
    grid = (triton.cdiv(rows, block), batch * heads)
    strides = (*x.stride(), *out.stride())
    scale_kernel[grid](x, out, factor, rows, heads, *strides, HEADDIM=headdim, BLOCK=block)
    return out


def views(x: Tensor) -> dict[str, Tensor]:
    """Of x (batch, seqlen, heads, headdim); none of them copies anything."""
    return {
        "itself": x,
        "heads before rows": x.transpose(1, 2).contiguous().transpose(1, 2),
        "a slice of rows": x[:, 3:],
        "every other head": x[:, :, ::2],
        "a column repeated": x[..., :1].expand(x.shape),
        "one batch for all": x[:1].expand(x.shape),
        "cut from a packed tensor": torch.stack([x, -x], dim=2)[:, :, 1],
    }


def main() -> None:
    x = torch.randn(2, 21, 4, 16, device=DEVICE)
    for name, view in views(x).items():
        assert torch.equal(scale(view, 3.0), 3.0 * view)
        print(f"{name}: strides {view.stride()}")


if __name__ == "__main__":
    main()
