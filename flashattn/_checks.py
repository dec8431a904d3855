"""Refusals: every argument is checked on the host, before anything runs.

The common case passes one short test; only when that fails is the argument at fault looked for.
TypeError: not a tensor, a wrong dtype. ValueError: a wrong value, shape or device.
NotImplementedError: an option or device that this build lacks.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from flashattn import _ops, _plan

MAX_HEADDIM = 256
MAX_WINDOW = 2**30  # csrc/common/mask.h keeps bounds below this; no sequence is longer
_WHOLE_NUMBERS = (int, torch.SymInt, numbers.Integral)
_REAL_NUMBERS = (float, torch.SymFloat, numbers.Real, *_WHOLE_NUMBERS)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def later_options(dropout_p: float, softcap: float, **tensors: Tensor | None) -> None:
    """Refuses options of the contract that no kernel has yet."""
    _real("dropout_p", dropout_p)
    _real("softcap", softcap)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: needs 0 <= dropout_p < 1, got {dropout_p}")
    if dropout_p > 0.0:
        _not_implemented("dropout_p", f"got {dropout_p}; pass 0.0 (in evaluation too)")
    if not softcap >= 0.0:
        raise ValueError(f"softcap: needs 0 (off) or a positive number, got {softcap}")
    if softcap > 0.0:
        _not_implemented("softcap", f"got {softcap}; pass 0.0")
    for name, value in tensors.items():
        if value is not None:
            _not_implemented(name, "pass None")


def _not_implemented(name: str, what_to_do: str) -> NoReturn:
    # Pages are how a cache is stored, not what is computed: the reference takes plain tensors.
    otherwise = (
        "" if name == "block_table" else ", or use flashattn.reference.attention, which has it"
    )
    raise NotImplementedError(
        f"{name}: this build of flashattn has no kernel for it: {what_to_do}{otherwise}."
    )


def window_bounds(window_size: Sequence[int | None], causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for no bound; causal sets right to 0."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(f"window_size: needs (left, right), got {window_size!r}") from None
    left, right = _bound(left, window_size), _bound(right, window_size)
    return left, 0 if causal else right


def _bound(bound: int | None, window_size: Sequence[int | None]) -> int:
    if bound is None:
        return -1
    if not isinstance(bound, _WHOLE_NUMBERS):
        raise TypeError(f"window_size: needs whole numbers or None, got {window_size!r}")
    bound = int(bound)
    if bound < -1:
        raise ValueError(
            "window_size: a bound is the number of keys visible on that side, 0 or more, or -1 or "
            f"None for all of them; got {tuple(window_size)!r}"
        )
    return min(bound, MAX_WINDOW)


def scale(softmax_scale: float) -> float:
    return _real("softmax_scale", softmax_scale)


def _real(name: str, value: float) -> float:
    if not isinstance(value, _REAL_NUMBERS):
        kind = type(value).__name__
        raise TypeError(f"{name}: needs a real Python number, got a {kind}")
    return value


def fixed(q: Tensor, k: Tensor, v: Tensor) -> int:
    """q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv). Returns D."""
    try:
        batch, _, heads, headdim = q.shape
        batch_k, seqlen_k, heads_k, headdim_k = k.shape
        batch_v, seqlen_v, heads_v, headdim_v = v.shape
    except (AttributeError, ValueError):
        _explain_qkv(q, k, v, FIXED)
        raise
    if not (
        batch == batch_k == batch_v
        and seqlen_k == seqlen_v
        and heads_k == heads_v
        and headdim == headdim_k
        and _heads_ok(heads, heads_k, headdim, headdim_v)
        and _kind_ok(q, k, v)
    ):
        _explain_qkv(q, k, v, FIXED)
    return headdim


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> int:
    """q (total_q, H, D), k (total_k, Hk, D), v (total_k, Hk, Dv), cu_seqlens_* (B + 1,).

    Returns D.
    """
    try:
        _, heads, headdim = q.shape
        total_k, heads_k, headdim_k = k.shape
        total_v, heads_v, headdim_v = v.shape
    except (AttributeError, ValueError):
        _explain_qkv(q, k, v, PACKED)
        raise
    if not (
        total_k == total_v
        and heads_k == heads_v
        and headdim == headdim_k
        and _heads_ok(heads, heads_k, headdim, headdim_v)
        and _kind_ok(q, k, v)
    ):
        _explain_qkv(q, k, v, PACKED)
    sequences(q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return headdim


def sequences(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> None:
    """Which rows belong to which sequence: int32 vectors on q's device."""
    _integers("cu_seqlens_q", cu_seqlens_q, q)
    _integers("cu_seqlens_k", cu_seqlens_k, q)
    entries = cu_seqlens_q.shape[0]
    if entries == 0 or cu_seqlens_k.shape[0] != entries:
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k: need the same length, sequences + 1, got "
            f"{entries} and {cu_seqlens_k.shape[0]}"
        )
    if seqused_q is not None:
        _seqused("seqused_q", seqused_q, entries - 1, q)
    if seqused_k is not None:
        _seqused("seqused_k", seqused_k, entries - 1, q)


def _heads_ok(heads: int, heads_k: int, headdim: int, headdim_v: int) -> bool:
    return (
        heads > 0
        and heads_k > 0
        and heads % heads_k == 0
        and 0 < headdim <= MAX_HEADDIM
        and 0 < headdim_v <= MAX_HEADDIM
    )


def _kind_ok(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Tensors of one supported dtype on one device that has a kernel for them."""
    dtype = q.dtype
    if not (dtype in _DTYPES and k.dtype == dtype and v.dtype == dtype):
        return False
    device = q.device
    if not (k.device == device and v.device == device):
        return False
    return not q.is_cuda or (_ops.has_cuda and dtype != torch.float32)


def _integers(name: str, value: Tensor, q: Tensor) -> None:
    """A vector of int32 on q's device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: needs an int32 tensor, got {type(value).__name__}")
    if value.dtype != torch.int32:
        raise TypeError(f"{name}: needs dtype torch.int32, got {value.dtype}")
    if value.dim() != 1:
        raise ValueError(f"{name}: needs one dimension, got shape {tuple(value.shape)}")
    if value.device != q.device:
        raise ValueError(f"{name}: needs to be on the device of q, {q.device}, got {value.device}")


def _seqused(name: str, value: Tensor, batch: int, q: Tensor) -> None:
    _integers(name, value, q)
    if value.shape[0] != batch:
        raise ValueError(
            f"{name}: needs one entry for each of the {batch} sequences, got {value.shape[0]}"
        )


def max_seqlens(max_seqlen_q: int | Tensor | None, max_seqlen_k: int | Tensor | None) -> None:
    """Hints: whole numbers, tensors or None."""
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if value is not None and not isinstance(value, (*_WHOLE_NUMBERS, Tensor)):
            raise TypeError(
                f"{name}: needs a whole number, a tensor or None, got {type(value).__name__}"
            )


def stacked(name: str, value: Tensor, dims: int, count: int) -> None:
    """qkv or kv: (..., count, heads, headdim) of `dims` dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: needs a torch.Tensor, got {type(value).__name__}")
    if value.dim() != dims or value.shape[-3] != count:
        layout = "(batch, seqlen, " if dims == 5 else "(total, "
        raise ValueError(
            f"{name}: needs shape {layout}{count}, heads, headdim), got {tuple(value.shape)}"
        )


FIXED = {
    "q": "(batch, seqlen_q, heads, headdim)",
    "k": "(batch, seqlen_k, heads_k, headdim)",
    "v": "(batch, seqlen_k, heads_k, headdim_v)",
}
PACKED = {
    "q": "(total_q, heads, headdim)",
    "k": "(total_k, heads_k, headdim)",
    "v": "(total_k, heads_k, headdim_v)",
}


def _explain_qkv(q: Tensor, k: Tensor, v: Tensor, layout: dict[str, str]) -> None:
    """Raises for the first thing that is wrong: kind, dtype, device, shape, kernel."""
    same_layout(q, k, v, layout)
    if q.is_cuda and not _ops.has_cuda:
        raise NotImplementedError(
            "q: is on a CUDA device, and this build of flashattn has CPU kernels only; build it "
            "where nvcc is found, or move the tensors to the CPU"
        )
    if q.is_cuda and q.dtype == torch.float32:
        raise NotImplementedError(
            "q: this build has no float32 kernel for CUDA; use float16 or bfloat16 (autocast "
            "does), or flashattn.reference.attention"
        )


def gpu(q: Tensor) -> None:
    """Whether the build has code for q's GPU: only after a failure, not in every call."""
    if not q.is_cuda:
        return
    major, minor = torch.cuda.get_device_capability(q.device)
    archs = _ops.build_info["archs"]
    if not _plan.kernel_image_available(archs, 10 * major + minor):
        message = (
            f"q: is on {torch.cuda.get_device_name(q.device)}, compute capability {major}.{minor}, "
            f"and this build of flashattn is for {archs}"
        )
        if major >= 8:
            own = f"{major}{minor}{'a' if (major, minor) == (9, 0) else ''}"
            message += f"; build it with FLASHATTN_CUDA_ARCHS={own}"
        raise NotImplementedError(message)


def same_layout(q: Tensor, k: Tensor, v: Tensor, layout: dict[str, str]) -> None:
    """Everything that does not depend on the device: what explain() needs too."""
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: needs a torch.Tensor, got {type(x).__name__}")
    for name, x in named.items():
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: needs dtype float16, bfloat16 or float32, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: needs the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: needs to be on the device of q, {q.device}, got {x.device}")
    _explain_shapes(named, layout)


def _explain_shapes(named: dict[str, Tensor], layout: dict[str, str]) -> None:
    for name, x in named.items():
        if x.dim() != layout[name].count(",") + 1:
            raise ValueError(f"{name}: needs shape {layout[name]}, got {tuple(x.shape)}")
        if not 0 < x.shape[-1] <= MAX_HEADDIM:
            raise ValueError(
                f"{name}: needs a head dimension of 1 to {MAX_HEADDIM}, got {x.shape[-1]} in shape "
                f"{tuple(x.shape)}"
            )
    q, k, v = (tuple(x.shape) for x in named.values())
    if k[:-1] != v[:-1]:
        raise ValueError(f"v: needs the shape of k but for the head dimension, {k}, got {v}")
    if len(q) == 4 and q[0] != k[0]:
        raise ValueError(f"k: needs the batch size of q, {q[0]}, got {k[0]}")
    if q[-1] != k[-1]:
        raise ValueError(f"k: needs the head dimension of q, {q[-1]}, got {k[-1]}")
    if q[-2] == 0:
        raise ValueError(f"q: needs at least one head, got shape {q}")
    if k[-2] == 0 or q[-2] % k[-2] != 0:
        raise ValueError(
            f"k: needs a number of heads that divides the {q[-2]} heads of q, got {k[-2]}"
        )
