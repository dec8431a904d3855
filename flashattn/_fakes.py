"""Fakes of torch.ops.flashattn.*: shapes, dtypes and strides alone, and the same refusals."""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn import _checks


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
    if cu_seqlens_q is None:
        _checks.fixed(q, k, v)
    else:
        _checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
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
