"""Attention in plain PyTorch: what every kernel of this package is compared with.

It is written to be read: the whole score matrix is formed, every option is one line, and gradients
are those of plain autograd. It computes in the dtype of its inputs, on their device; give it fp64
copies of 16-bit tensors and it is the truth to within 1e-15, give it the 16-bit tensors themselves
and it is what "eager" code would do.
"""

from __future__ import annotations

import torch
from torch import Tensor

INFINITY = float("inf")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_keep: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    isolate_pairs: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(softmax_scale * q k^T + ...) v, by the formulas of the textbook.

    Fixed length: q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv); returns out (B, Sq, H, Dv)
    and lse (B, H, Sq). Packed, when ``cu_seqlens_q`` and ``cu_seqlens_k`` (B + 1,) are given:
    q (total_q, H, D) and so on; out (total_q, H, Dv), lse (H, total_q). Rows outside of every
    sequence have out 0 and lse -inf. lse is in the dtype of the inputs, natural log.

    For query i and key j of one sequence, query head h reading KV head h // (H // Hk)::

        s = softmax_scale * <q_i, k_j>                  softmax_scale: D ** -0.5 unless given
        s = softcap * tanh(s / softcap)                 if softcap > 0
        s = s - alibi_slopes[(b,) h] * |i + Sk - Sq - j|
        s = s + attn_mask[b, h, i, j]                   boolean mask: True = may attend
        s = -inf where causal, window or mask hide j from i
        lse = log(sum_j exp(s_j) [+ exp(learnable_sink_h)]);  out_i = sum_j exp(s_j - lse) v_j

    Key j is visible when i + Sk - Sq - left <= j <= i + Sk - Sq + right with (left, right) =
    ``window_size``; -1 or None is no bound; ``causal`` sets right to 0. A row that sees no key has
    out 0 and lse -inf (with a sink: lse = sink), and gives no gradient.

    ``dropout_keep``: boolean, broadcasts to (B, H, Sq, Sk), True where dropout with probability
    ``dropout_p`` keeps an entry of the softmax. Fixed length only, as is ``attn_mask``.

    ``isolate_pairs``: with NaN or Inf in the inputs a matrix product spreads them to rows that do
    not see them (0 * NaN). True multiplies pair by pair instead, in forward and backward, with
    memory B * H * Sq * Sk * D; None does so when q, k or v are not finite. Set it to True where
    the gradient that comes in is not finite.
    """
    if not softcap >= 0.0:
        raise ValueError(f"softcap: needs 0 (off) or a positive number, got {softcap}")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    if isolate_pairs is None:
        isolate_pairs = not all(bool(x.isfinite().all()) for x in (q, k, v))
    options = {
        "softmax_scale": softmax_scale,
        "window": _window(window_size, causal),
        "softcap": softcap,
        "learnable_sink": learnable_sink,
        "isolate_pairs": isolate_pairs,
    }
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        if attn_mask is not None or dropout_keep is not None:
            raise ValueError("attn_mask and dropout_keep need the fixed-length layout")
        batch = len(cu_seqlens_q) - 1
    else:
        batch = q.shape[0]

    # One sequence at a time when lengths differ, the whole batch at once when they do not.
    if cu_seqlens_q is None and seqused_q is None and seqused_k is None:
        out, lse = _dense(q, k, v, alibi_slopes, attn_mask, dropout_p, dropout_keep, **options)
        return (out, lse) if return_lse else out

    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    if cu_seqlens_q is not None:
        lse = q.new_full((q.shape[1], q.shape[0]), -INFINITY)
    else:
        lse = q.new_full((batch, q.shape[2], q.shape[1]), -INFINITY)
    for b in range(batch):
        rows_q = _rows(q, b, cu_seqlens_q, seqused_q)
        rows_k = _rows(k, b, cu_seqlens_k, seqused_k)
        part, part_lse = _dense(
            _sequence(q, b, rows_q),
            _sequence(k, b, rows_k),
            _sequence(v, b, rows_k),
            alibi_slopes[b]
            if alibi_slopes is not None and alibi_slopes.dim() == 2
            else alibi_slopes,
            _cut(attn_mask, b, rows_q, rows_k),
            dropout_p,
            _cut(dropout_keep, b, rows_q, rows_k),
            **options,
        )
        if cu_seqlens_q is not None:
            out[rows_q] = part[0]
            lse[:, rows_q] = part_lse[0]
        else:
            out[b, rows_q] = part[0]
            lse[b, :, rows_q] = part_lse[0]
    return (out, lse) if return_lse else out


def visible_pairs(
    seqlen_q: int, seqlen_k: int, left: int, right: int, device: torch.device | None = None
) -> Tensor:
    """(seqlen_q, seqlen_k), True where the window (left, right) lets query i see key j."""
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left >= 0:
        visible = visible & (key >= diagonal - left)
    if right >= 0:
        visible = visible & (key <= diagonal + right)
    return visible


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    attn_mask: Tensor | None,
    dropout_p: float,
    dropout_keep: Tensor | None,
    *,
    softmax_scale: float,
    window: tuple[int, int],
    softcap: float,
    learnable_sink: Tensor | None,
    isolate_pairs: bool,
) -> tuple[Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    q = q.transpose(1, 2)  # (B, H, Sq, D)
    k = k.transpose(1, 2).repeat_interleave(group, dim=1)  # (B, H, Sk, D)
    v = v.transpose(1, 2).repeat_interleave(group, dim=1)  # (B, H, Sk, Dv)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]

    visible = visible_pairs(seqlen_q, seqlen_k, *window, device=q.device)
    if attn_mask is not None:
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -INFINITY)
    visible = visible.expand(q.shape[0], q.shape[1], seqlen_q, seqlen_k)

    scores = softmax_scale * _row_products(q, k, visible if isolate_pairs else None)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        diagonal = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
        distance = (diagonal - torch.arange(seqlen_k, device=q.device)).abs()
        scores = scores - alibi_slopes[..., None, None].to(scores.dtype) * distance
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(scores.dtype)
    scores = scores.masked_fill(~visible, -INFINITY)

    weights, lse = _softmax(scores, learnable_sink)
    # Hidden pairs are cut off from v's gradient too: 0 * NaN is NaN.
    visible = visible & (lse != -INFINITY)[..., None]
    weights = weights.masked_fill(~visible, 0.0)
    if dropout_keep is not None:
        weights = weights * dropout_keep / (1.0 - dropout_p)
    out = _weighted_sum(weights, v, visible if isolate_pairs else None)
    return out.transpose(1, 2), lse


def _softmax(scores: Tensor, learnable_sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights (B, H, Sq, Sk) and lse (B, H, Sq); a row of -inf has weights 0 and lse -inf."""
    seqlen_k = scores.shape[-1]
    if learnable_sink is not None:
        sink = learnable_sink.to(scores.dtype)[:, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], dim=-1)
    empty = (scores == -INFINITY).all(dim=-1)
    # Any finite number will do for the rows that are overwritten below, so that no NaN arises.
    scores = scores.masked_fill(empty[..., None], 0.0)
    weights = torch.softmax(scores, dim=-1)[..., :seqlen_k]
    lse = torch.logsumexp(scores, dim=-1).masked_fill(empty, -INFINITY)
    return weights.masked_fill(empty[..., None], 0.0), lse


def _row_products(q: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
    """<q_i, k_j> for every pair, or for visible pairs alone (the others are 0)."""
    if visible is None:
        return q @ k.transpose(-1, -2)
    visible = visible[..., None]
    q_pairs = torch.where(visible, q[..., :, None, :], 0.0)
    k_pairs = torch.where(visible, k[..., None, :, :], 0.0)
    return (q_pairs * k_pairs).sum(dim=-1)


def _weighted_sum(weights: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """sum_j weights_ij v_j over every key, or over visible keys alone."""
    if visible is None:
        return weights @ v
    v_pairs = torch.where(visible[..., None], v[..., None, :, :], 0.0)
    return (weights[..., None] * v_pairs).sum(dim=-2)


def _window(window_size: tuple[int | None, int | None], causal: bool) -> tuple[int, int]:
    left, right = (-1 if bound is None else bound for bound in window_size)
    if left < -1 or right < -1:
        raise ValueError(
            f"window_size: a bound is -1 or None (unbounded) or >= 0, got {window_size}"
        )
    return left, 0 if causal else right


def _rows(x: Tensor, b: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> slice:
    """The rows of sequence b that take part, with device-side integers bounded as kernels do."""
    rows = x.shape[0] if cu_seqlens is not None else x.shape[1]
    begin, end = 0, rows
    if cu_seqlens is not None:
        begin = min(max(int(cu_seqlens[b]), 0), rows)
        end = min(max(int(cu_seqlens[b + 1]), begin), rows)
    if seqused is not None:
        end = begin + min(max(int(seqused[b]), 0), end - begin)
    return slice(begin, end)


def _sequence(x: Tensor, b: int, rows: slice) -> Tensor:
    """One sequence as a batch of one: (1, length, heads, headdim)."""
    return x[rows][None] if x.dim() == 3 else x[b : b + 1, rows]


def _cut(pairs: Tensor | None, b: int, rows_q: slice, rows_k: slice) -> Tensor | None:
    """The part of a mask, broadcastable to (B, H, Sq, Sk), that belongs to one sequence."""
    if pairs is None:
        return None
    pairs = pairs[(None,) * (4 - pairs.dim())]
    if pairs.shape[0] > 1:
        pairs = pairs[b : b + 1]
    if pairs.shape[2] > 1:
        pairs = pairs[:, :, rows_q]
    return pairs[..., rows_k] if pairs.shape[3] > 1 else pairs
