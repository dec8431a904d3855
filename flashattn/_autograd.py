"""Attention as a differentiable function: from checked tensors to torch.ops.flashattn and back.

The gradients are those of FlashAttention-2 (Dao 2023), Algorithm 2, with the gradient of lse added:
delta = rowsum(dout * out) - dlse. Scores are computed again from q, k and lse, nothing of size
seqlen_q x seqlen_k is saved.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashattn import _ops

_functorch_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled

SECOND_ORDER = (
    "flashattn has no second derivative: its backward was called with create_graph=True, or inside "
    "another derivative. Use flashattn.reference.attention where one is needed."
)
IN_COMPILED_TRANSFORM = (
    "flashattn runs inside torch.func's transforms (grad, vmap, ...) in eager code only, not in "
    "compiled code: use torch.autograd.grad there."
)
FORWARD_MODE = (
    "flashattn has no forward-mode derivative (jvp). Use reverse mode (torch.func.vjp, grad), or "
    "flashattn.reference.attention."
)


def attention(q: Tensor, k: Tensor, v: Tensor, deterministic: bool, *rest) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked arguments, by the cheapest way that keeps the gradients.

    rest: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softmax_scale, window_left,
    window_right.
    """
    if _functorch_active() or forward_ad._current_level >= 0:
        return _in_transform(q, k, v, *rest, deterministic)
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        if torch.compiler.is_compiling():
            return FlashAttention.apply(q, k, v, *rest, deterministic)
        return _apply_eager(q, k, v, deterministic, rest)
    return _ops.forward(q, k, v, *rest)


def _in_transform(q: Tensor, k: Tensor, v: Tensor, *rest) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        # The compiler takes tensors inside a transform for ones without grad: it would drop their
        # gradients, in frames that it leaves to eager code too.
        torch._check(False, lambda: IN_COMPILED_TRANSFORM)
    # A jvp method could say this too, but torch.compile refuses every Function that has one.
    if forward_ad._current_level >= 0 and any(map(_has_tangent, (q, k, v))):
        raise NotImplementedError(FORWARD_MODE)
    return FlashAttention.apply(q, k, v, *rest)


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


class FlashAttention(torch.autograd.Function):
    """attention() with its backward; the same arguments, `deterministic` last."""

    @staticmethod
    def forward(*args):
        return _ops.forward(*args[:-1])

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:7], *output)
        ctx.options = inputs[7:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        # torch.func has contexts of its own, and always differentiates with create_graph on: there
        # FlashAttentionBackward refuses, if it is differentiated at all.
        in_transform = not (torch.compiler.is_compiling() or isinstance(ctx, _CONTEXTS))
        if torch.is_grad_enabled() and isinstance(ctx, _CONTEXTS):
            raise NotImplementedError(SECOND_ORDER)
        no_grads = (None,) * 8
        if dout is None and dlse is None:
            return None, None, None, *no_grads
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        softmax_scale, window_left, window_right, deterministic = ctx.options
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
        run = FlashAttentionBackward.apply if in_transform else _ops.backward
        dq, dk, dv = run(
            dout,
            dlse,
            q,
            k,
            v,
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            softmax_scale,
            window_left,
            window_right,
            deterministic or torch.are_deterministic_algorithms_enabled(),
            needs_dq,
            needs_dk or needs_dv,
        )
        return (
            dq if needs_dq else None,
            dk if needs_dk else None,
            dv if needs_dv else None,
            *no_grads,
        )

    @staticmethod
    def vmap(info, in_dims, q, k, v, *rest):
        tensors, options = (q, k, v, *rest[:4]), rest[4:]
        run = _over_batch if q.dim() - (in_dims[0] is not None) == 4 else _one_by_one
        return run(FlashAttention.apply, info.batch_size, in_dims[:7], tensors, options)


class FlashAttentionBackward(torch.autograd.Function):
    """The backward as a function of its own, so that torch.func's transforms reach it."""

    @staticmethod
    def forward(*args):
        return _ops.backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(SECOND_ORDER)

    @staticmethod
    def vmap(info, in_dims, dout, *rest):
        tensors, options = (dout, *rest[:10]), rest[10:]
        run = _over_batch if dout.dim() - (in_dims[0] is not None) == 4 else _one_by_one
        return run(FlashAttentionBackward.apply, info.batch_size, in_dims[:11], tensors, options)


class EagerFlashAttention(FlashAttention):
    """The same in less host time, outside of torch.func and torch.compile.

    Each argument of a Function costs, so what needs no gradient comes as one tuple; and so does a
    setup_context, so forward has the context.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, deterministic: bool, rest: tuple):
        out, lse = _ops.forward(q, k, v, *rest)
        ctx.save_for_backward(q, k, v, *rest[:4], out, lse)
        ctx.options = (*rest[4:], deterministic)
        ctx.set_materialize_grads(False)
        return out, lse

    setup_context = torch.autograd.Function.setup_context  # torch's mark of a Function without one

    @staticmethod
    def backward(ctx, dout: Tensor | None, dlse: Tensor | None):
        return *FlashAttention.backward(ctx, dout, dlse)[:3], None, None


_CONTEXTS = (FlashAttention._backward_cls, EagerFlashAttention._backward_cls)

# Function.apply inspects the signature of forward() and unwraps what torch.func left behind, at
# every call: this goes past both.
_apply_eager = super(torch.autograd.Function, EagerFlashAttention).apply


def _over_batch(apply, size: int, in_dims, tensors, options):
    """vmap of the fixed-length layout: the mapped dimension becomes a part of the batch."""

    def fold(x: Tensor | None, dim: int | None) -> Tensor | None:
        if x is None:
            return None
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    def unfold(x: Tensor) -> Tensor:
        # A gradient that is not needed comes as an empty vector.
        return x.expand(size, 0) if x.dim() == 1 else x.unflatten(0, (size, -1))

    results = apply(*map(fold, tensors, in_dims), *options)
    return tuple(map(unfold, results)), (0,) * len(results)


def _one_by_one(apply, size: int, in_dims, tensors, options):
    """vmap of the packed layout, whose rows have no batch to grow: one call for each element."""

    def element(x: Tensor | None, dim: int | None, index: int) -> Tensor | None:
        return x if x is None or dim is None else x.select(dim, index)

    results = [
        apply(*(element(x, dim, index) for x, dim in zip(tensors, in_dims, strict=True)), *options)
        for index in range(size)
    ]
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])
