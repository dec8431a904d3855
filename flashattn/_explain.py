"""explain(): what a call would run, and why, from the planner that every launch asks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from flashattn import _checks, _ops, _plan

DEVICE_NAMES = ("cpu", "a100", "rtx4090", "h100", "h200")


@dataclass(frozen=True)
class Pass:
    """One pass, forward or backward, as the planner decides it."""

    supported: bool
    kernel: str
    block_m: int  # queries a tile
    block_n: int  # keys a tile
    warps: int  # a CTA; 0 on the CPU
    stages: int  # buffers of the tiles that are streamed; 0 on the CPU
    grid: int  # CTAs, or tasks on the CPU
    smem_bytes: int  # shared memory a CTA
    workspace_bytes: int
    flops: float  # of the matmuls, for visible (query, key) pairs
    bytes: float  # every input read once, every output written once
    visited_blocks: int  # (query block, key block) pairs over all heads and sequences,
    full_blocks: int  # of those, pairs without a hidden entry: no masking
    all_blocks: int  # with the pairs that the mask hides and the kernel skips
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What explain() returns. ``print(plan)`` shows a table; every figure is an attribute."""

    problem: str
    device: str
    forward: Pass
    backward: Pass

    def __str__(self) -> str:
        rows = [("", "forward", "backward")]
        for name, show in _ROWS:
            cells = (show(p) if p.supported else "-" for p in (self.forward, self.backward))
            rows.append((name, *cells))
        width = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"flashattn plan: {self.problem}", f"on {self.device}", ""]
        for name, forward, backward in rows:
            lines.append(f"{name:<{width[0]}}  {forward:>{width[1]}}  {backward:>{width[2]}}")
        for name in ("forward", "backward"):
            lines += ["", f"why ({name})"]
            lines += [f"  - {reason}" for reason in getattr(self, name).reasons]
        return "\n".join(lines)


_ROWS = (
    ("kernel", lambda p: p.kernel),
    ("tile (queries x keys)", lambda p: f"{p.block_m} x {p.block_n}"),
    ("warps", lambda p: str(p.warps or "-")),
    ("stages", lambda p: str(p.stages or "-")),
    ("grid (CTAs, CPU tasks)", lambda p: f"{p.grid:,}"),
    ("shared memory a CTA", lambda p: _binary(p.smem_bytes)),
    ("workspace", lambda p: _binary(p.workspace_bytes)),
    ("FLOPs", lambda p: _decimal(p.flops, "FLOP")),
    ("bytes moved at least", lambda p: _decimal(p.bytes, "B")),
    ("blocks visited", lambda p: f"{p.visited_blocks:,}"),
    ("  of them unmasked", lambda p: f"{p.full_blocks:,}"),
    ("  of all", lambda p: f"{p.all_blocks:,}"),
)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    attn_mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    return_lse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    device: str | torch.device | None = None,
) -> Plan:
    """What flash_attn_func with these arguments would run, and why. Runs nothing.

    Args:
        q, k, v and the options: as for flash_attn_func; with ``cu_seqlens_q`` and ``cu_seqlens_k``
            as for flash_attn_varlen_func. Only shapes, dtypes, strides and alignment are read:
            tensors on the "meta" device do. Packed sequences count with their mean length.
        device: None, the device of the tensors (the CPU for meta tensors); a torch device; or a
            name, "cpu", "a100", "rtx4090", "h100" or "h200", which needs no such device.

    Returns:
        A Plan with ``forward`` and ``backward``: kernel, tile, grid, stages, shared memory,
        workspace, FLOPs, bytes, blocks and reasons. A pass that the device has no kernel for has
        ``supported`` False and the reason. The backward is that of the inputs that require grad,
        of all of them when none does.

    Raises:
        As flash_attn_func for its arguments; ValueError for an unknown device.
    """
    _checks.later_options(
        dropout_p,
        softcap,
        alibi_slopes=alibi_slopes,
        attn_mask=attn_mask,
        learnable_sink=learnable_sink,
    )
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    _checks.same_layout(q, k, v, _checks.PACKED if packed else _checks.FIXED)
    if packed:
        _checks.sequences(q, cu_seqlens_q, cu_seqlens_k, None, None)
    left, right = _checks.window_bounds(window_size, causal)
    all_grads = not (q.requires_grad or k.requires_grad or v.requires_grad)
    problem = _plan.Problem(
        dtype=str(q.dtype).removeprefix("torch."),
        packed=packed,
        batch=cu_seqlens_q.shape[0] - 1 if packed else q.shape[0],
        seqlen_q=q.shape[-3],
        seqlen_k=k.shape[-3],
        heads_q=q.shape[-2],
        heads_k=k.shape[-2],
        headdim=q.shape[-1],
        headdim_v=v.shape[-1],
        window_left=left,
        window_right=right,
        aligned16=all(_aligned16(x) for x in (q, k, v)),
        deterministic=bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
        need_dq=all_grads or q.requires_grad,
        need_dkv=all_grads or k.requires_grad or v.requires_grad,
    )
    target = _device(q, device)
    copies = tuple(
        f"{name} is copied first: its last stride is {x.stride(-1)}, not 1"
        for name, x in (("q", q), ("k", k), ("v", v))
        if _is_copied(x)
    )
    return Plan(
        problem=_describe(q, k, v, problem, left, right),
        device=_describe_device(target),
        forward=_pass(_plan.make_forward_plan(problem, target), problem, target, copies),
        backward=_pass(_plan.make_backward_plan(problem, target), problem, target, copies),
    )


def build_info() -> str:
    """One line on what was built: version, CUDA architectures (or none), compiler."""
    info = _ops.build_info
    cuda = f"CUDA {info['cuda']} for {info['archs']}" if _ops.has_cuda else "CPU only, without CUDA"
    return f"flashattn {info['version']}: {cuda}; compiler {info['compiler']}"


def _pass(plan: _plan.Plan, problem: _plan.Problem, device: _plan.Device, copies) -> Pass:
    report = _plan.report(plan, problem, device)
    values = {}
    for field in fields(Pass):
        source = plan if hasattr(plan, field.name) else report
        values[field.name] = getattr(source, field.name)
    return Pass(**values | {"reasons": (*report.reasons, *copies)})


def _device(q: Tensor, device: str | torch.device | None) -> _plan.Device:
    if device is None:
        device = "cpu" if q.device.type == "meta" else q.device
    named = _plan.device_by_name(device) if isinstance(device, str) else None
    if named is not None:
        return named
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device: needs a torch device or one of {', '.join(DEVICE_NAMES)}, got {device!r}"
        ) from None
    if device.type == "cpu":
        return _plan.device_by_name("cpu")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(
            f"device: {device} is not at hand; give a name instead: {', '.join(DEVICE_NAMES)}"
        )
    card = torch.cuda.get_device_properties(device)
    return _plan.Device(
        name=card.name,
        compute_capability=10 * card.major + card.minor,
        sm_count=card.multi_processor_count,
        smem_per_block=card.shared_memory_per_block_optin,
        smem_per_sm=card.shared_memory_per_multiprocessor,
        archs=_ops.build_info["archs"] or None,
    )


def _is_copied(x: Tensor) -> bool:
    return x.shape[-1] > 1 and x.stride(-1) != 1


def _aligned16(x: Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time, as csrc/ops judges it."""
    size = x.element_size()
    if x.shape[-1] * size % 16:
        return False
    if _is_copied(x):
        return True
    start = x.storage_offset() * size if x.is_meta else x.data_ptr()
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return start % 16 == 0 and all(n == 1 or stride * size % 16 == 0 for n, stride in outer)


def _describe(
    q: Tensor, k: Tensor, v: Tensor, problem: _plan.Problem, left: int, right: int
) -> str:
    parts = [f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v))]
    parts.append(problem.dtype)
    if problem.packed:
        parts.append(f"{problem.batch} packed sequences")
    if (left, right) == (-1, 0):
        parts.append("causal")
    elif (left, right) != (-1, -1):
        parts.append(f"window ({left}, {right})")
    if problem.deterministic:
        parts.append("deterministic")
    return ", ".join(parts)


def _describe_device(device: _plan.Device) -> str:
    if device.compute_capability == 0:
        return f"{device.name} ({device.sm_count} threads)"
    major, minor = divmod(device.compute_capability, 10)
    return f"{device.name} (compute capability {major}.{minor}, {device.sm_count} SMs)"


def _binary(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}" if count else "-"
        count /= 1024
    return f"{count:.4g} GiB"


def _decimal(count: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.4g} {prefix}{unit}"
        count /= 1000
    return f"{count:.4g} P{unit}"
