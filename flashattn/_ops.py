"""The compiled operators torch.ops.flashattn.* and their fakes (shapes, dtypes and strides alone).

    forward(q, k, v, cu_seqlens_q?, cu_seqlens_k?, seqused_q?, seqused_k?,
            softmax_scale, window_left, window_right) -> (out, lse)
    backward(dout, dlse?, q, k, v, out, lse, cu_seqlens_q?, cu_seqlens_k?, seqused_q?, seqused_k?,
             softmax_scale, window_left, window_right, deterministic, need_dq, need_dkv)
            -> (dq, dk, dv)

Four dimensions are the fixed-length layout, three the packed one. Results are contiguous. The
operators check what memory safety needs; flashattn's functions check the rest and say it better.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor


def _load_library() -> None:
    folder = Path(__file__).parent
    libraries = sorted(folder.glob("_C*.so"))
    if not libraries:
        raise ImportError(
            f"flashattn's compiled library is missing from {folder}: build and install it with "
            "`pip install .` in the source tree (and import it from another folder), or build it "
            "in place with `python setup.py build_ext --inplace`."
        )
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        raise ImportError(
            f"flashattn's compiled library {libraries[0].name} does not load into torch "
            f"{torch.__version__}: {error}"
        ) from error


_load_library()

forward = torch.ops.flashattn.forward.default
backward = torch.ops.flashattn.backward.default
build_info: dict[str, str] = json.loads(torch.ops.flashattn.build_info())
has_cuda = build_info["archs"] != ""


@torch.library.register_fake("flashattn::forward")
def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    *batch, rows, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, rows), dtype=torch.float32)
    return out, lse


@torch.library.register_fake("flashattn::backward")
def _backward_fake(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    deterministic: bool,
    need_dq: bool,
    need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = q.new_empty(q.shape if need_dq else (0,))
    dk = k.new_empty(k.shape if need_dkv else (0,))
    dv = v.new_empty(v.shape if need_dkv else (0,))
    return dq, dk, dv
