"""The public functions: signatures of flash-attn 2, what is new is keyword-only.

Exact attention, tiled so that the score matrix never exists: Dao et al. 2022 (FlashAttention,
Algorithm 1), Dao 2023 (FlashAttention-2, Algorithms 1 and 2), with the online softmax of Milakov &
Gimelshein 2018. What is computed is spelled out in ``flashattn.reference.attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flashattn._fakes  # noqa: F401 (registers the operators' fakes)
from flashattn import _checks, _strict
from flashattn._autograd import attention

_UNBOUNDED = (-1, -1)
_any_autocast = torch._C._is_any_autocast_enabled
_AUTOCAST_FROM = (torch.float16, torch.bfloat16, torch.float32)

Window = tuple[int | None, int | None]
# out; (out, lse) with return_lse; (out, lse, S_dmask) with return_attn_probs
Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """softmax(softmax_scale * q k^T) v, for a batch of sequences of one length.

    Args:
        q: (B, Sq, H, D), float16, bfloat16 or float32 (float32 on the CPU only), D from 1 to 256.
            Any strides; a last stride other than 1 costs a copy of that tensor.
        k: (B, Sk, Hk, D) in q's dtype, on q's device. H is a multiple of Hk: query head h reads
            head h // (H // Hk) (grouped and multi-query attention).
        v: (B, Sk, Hk, Dv), Dv from 1 to 256, different from D too.
        dropout_p: 0.0; others are not implemented yet.
        softmax_scale: factor of q k^T; None is D ** -0.5. Zero and negative numbers are legal.
        causal: query i sees key j when j <= i + Sk - Sq (aligned to the bottom right: the last
            query sees every key). The same as a right window bound of 0.
        window_size: (left, right), both bounds included: query i sees key j when
            i + Sk - Sq - left <= j <= i + Sk - Sq + right. -1 or None is no bound. A "sliding
            window of W tokens" in the sense of Mistral and Hugging Face (the token itself and W - 1
            before it) is ``window_size=(W - 1, 0)``. ``causal=True`` and ``window_size=(-1, 0)``
            are the same computation to the last bit; (Sk, 0) and the like agree to rounding.
        softcap, alibi_slopes, attn_mask, learnable_sink: not implemented yet; 0.0 and None.
        deterministic: gradients that repeat bit by bit, for the same shapes.
            ``torch.use_deterministic_algorithms`` does the same where it is on at the backward. The
            forward always repeats. On the CPU both repeat anyway, for one number of threads.
        return_attn_probs: returns flash-attn 2's (out, lse, S_dmask). S_dmask is what dropout left
            of the softmax; without dropout it is an empty tensor of q's dtype.
        return_lse: returns (out, lse).

    Returns:
        out (B, Sq, H, Dv) in q's dtype, contiguous, and where asked for lse (B, H, Sq), float32,
        natural logarithm of the softmax's denominator. Both are differentiable, once, in reverse
        mode. A query that sees no key has out 0, lse -inf and gives no gradient.

    Under autocast q, k and v are cast to its dtype. Nothing here synchronises with the device.

    Raises:
        TypeError: an argument is not a tensor, or of a wrong dtype.
        ValueError: a wrong shape, a device that differs, a bad window_size or dropout_p.
        NotImplementedError: an option, dtype or device that this build has no kernel for; a second
            derivative or a forward-mode derivative.
    """
    if (
        dropout_p
        or softcap
        or alibi_slopes is not None
        or attn_mask is not None
        or learnable_sink is not None
    ):
        _checks.later_options(
            dropout_p,
            softcap,
            alibi_slopes=alibi_slopes,
            attn_mask=attn_mask,
            learnable_sink=learnable_sink,
        )
    if _any_autocast():
        q, k, v = _autocast(q, k, v)
    left, right = _bounds(window_size, causal)
    if torch.compiler.is_compiling():
        _checks.fixed(q, k, v)
    out, lse = _fixed_length(q, k, v, softmax_scale, bool(deterministic), left, right)
    if return_attn_probs:
        return out, lse, q.new_empty(0)
    return (out, lse) if return_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """flash_attn_func with q, k and v = qkv[:, :, 0], [:, :, 1], [:, :, 2]: qkv (B, S, 3, H, D).

    Nothing is copied on the way in; the gradient of qkv is one tensor. Everything else, errors
    included, is as in :func:`flash_attn_func`.
    """
    _checks.stacked("qkv", qkv, 5, 3)
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_mask=attn_mask,
        learnable_sink=learnable_sink,
        return_lse=return_lse,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """flash_attn_func with k and v = kv[:, :, 0] and kv[:, :, 1]: q (B, Sq, H, D),
    kv (B, Sk, 2, Hk, D).

    Nothing is copied on the way in; the gradient of kv is one tensor. Everything else, errors
    included, is as in :func:`flash_attn_func`.
    """
    _checks.stacked("kv", kv, 5, 2)
    k, v = kv.unbind(-3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        attn_mask=attn_mask,
        learnable_sink=learnable_sink,
        return_lse=return_lse,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """softmax(softmax_scale * q k^T) v for B sequences of any lengths, packed one after the other.

    Args:
        q: (total_q, H, D). k: (total_k, Hk, D). v: (total_k, Hk, Dv). As in flash_attn_func else.
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, on q's device: sequence b is the rows
            cu_seqlens[b] to cu_seqlens[b + 1]. They start at 0 and do not decrease; lengths of 0
            are legal. Kernels bound them: no value reads or writes outside of the tensors
            (:class:`flashattn.strict` raises instead, and synchronises).
        max_seqlen_q, max_seqlen_k: hints, a number, a tensor or None; they never change a result.
        seqused_q, seqused_k: (B,), int32: only the first seqused[b] rows of sequence b take part.
            What the other rows hold changes nothing.
        block_table: not implemented yet; None.
        The others: as in :func:`flash_attn_func`. Causal and window bounds count within each
            sequence, from its used length.

    Returns:
        out (total_q, H, Dv) and where asked for lse (H, total_q), as in :func:`flash_attn_func`.
        Rows outside of every sequence, and unused rows, have out 0, lse -inf and gradient 0.

    Raises:
        As :func:`flash_attn_func`; and TypeError where cu_seqlens or seqused are not int32,
        ValueError where they have a wrong length or are on another device than q.
    """
    if (
        dropout_p
        or softcap
        or alibi_slopes is not None
        or block_table is not None
        or learnable_sink is not None
    ):
        _checks.later_options(
            dropout_p,
            softcap,
            alibi_slopes=alibi_slopes,
            block_table=block_table,
            learnable_sink=learnable_sink,
        )
    if _any_autocast():
        q, k, v = _autocast(q, k, v)
    headdim = _checks.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    _checks.max_seqlens(max_seqlen_q, max_seqlen_k)
    if _strict.enabled() and not torch.compiler.is_compiling():
        _strict.check_lengths("q", q.shape[0], cu_seqlens_q, seqused_q, max_seqlen_q)
        _strict.check_lengths("k", k.shape[0], cu_seqlens_k, seqused_k, max_seqlen_k)
    left, right = _bounds(window_size, causal)
    scale = headdim**-0.5 if softmax_scale is None else _checks.scale(softmax_scale)
    try:
        out, lse = attention(
            q,
            k,
            v,
            bool(deterministic),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            scale,
            left,
            right,
        )
    except RuntimeError:
        _checks.gpu(q)
        raise
    if return_attn_probs:
        return out, lse, q.new_empty(0)
    return (out, lse) if return_lse else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """flash_attn_varlen_func with q, k and v = qkv[:, 0], [:, 1], [:, 2]: qkv (total, 3, H, D).

    Nothing is copied on the way in; the gradient of qkv is one tensor. Everything else, errors
    included, is as in :func:`flash_attn_varlen_func`.
    """
    _checks.stacked("qkv", qkv, 4, 3)
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        learnable_sink=learnable_sink,
        return_lse=return_lse,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """flash_attn_varlen_func with k and v = kv[:, 0] and kv[:, 1]: kv (total_k, 2, Hk, D).

    Nothing is copied on the way in; the gradient of kv is one tensor. Everything else, errors
    included, is as in :func:`flash_attn_varlen_func`.
    """
    _checks.stacked("kv", kv, 4, 2)
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        learnable_sink=learnable_sink,
        return_lse=return_lse,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to a cache of keys and values. Raises NotImplementedError: this
    build has no kernel for it."""
    raise NotImplementedError(
        "flash_attn_with_kvcache: this build of flashattn has no kernel for it; call "
        "flash_attn_varlen_func with the cache's rows packed and seqused_k set to its lengths"
    )


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention to all keys, from those of attention to disjoint parts of them, the
    parts in the leading dimension. Raises NotImplementedError: this build has no kernel for it."""
    raise NotImplementedError(
        "flash_attn_combine: this build of flashattn has no kernel for it; combine with torch: "
        "lse = logsumexp(lse_partial, 0), "
        "out = sum(exp(lse_partial - lse)[..., None] * out_partial, 0)"
    )


def _fixed_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    deterministic: bool,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    """The operator refuses tensors that do not fit before anything runs. Only then are they looked
    at here, to say what is wrong: doing that first takes a tenth of a call's host time."""
    try:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else _checks.scale(softmax_scale)
        return attention(q, k, v, deterministic, None, None, None, None, scale, left, right)
    except Exception as error:
        failure = error
    try:
        _checks.fixed(q, k, v)
        _checks.gpu(q)
        raise failure
    finally:
        del failure  # its traceback holds this frame, and the tensors with it


def _bounds(window_size: Window, causal: bool) -> tuple[int, int]:
    if window_size == _UNBOUNDED:
        return -1, 0 if causal else -1
    return _checks.window_bounds(window_size, causal)


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype where it is on for their device, as torch's matmul does."""
    device = getattr(q, "device", None)  # what is no tensor is refused later, with its name
    if device is None or device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device.type)
    q, k, v = (x.to(dtype) if getattr(x, "dtype", None) in _AUTOCAST_FROM else x for x in (q, k, v))
    return q, k, v
