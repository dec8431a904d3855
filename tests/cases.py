"""Attention problems, their inputs, and how to run them: through flashattn, and through the
reference one sequence at a time."""

import contextlib
import ctypes
import itertools
from dataclasses import dataclass, fields, replace

import torch

import flashattn
from flashattn import reference

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# fp32 has no CUDA kernel yet: test_refusals.py holds what a caller is told.
DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}


@dataclass(frozen=True)
class Problem:
    """Lengths are one a sequence. A packed problem may give each sequence more rows than it uses
    (`slots`, told to the op by seqused) and rows behind the last sequence (`spare`)."""

    seqlens_q: tuple[int, ...] = (64, 64)
    seqlens_k: tuple[int, ...] | None = None  # None: as seqlens_q
    heads: int = 2
    heads_k: int | None = None  # None: as heads
    headdim: int = 64
    headdim_v: int | None = None  # None: as headdim
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softmax_scale: float | None = None
    packed: bool = False
    slots_q: tuple[int, ...] | None = None
    slots_k: tuple[int, ...] | None = None
    spare_q: int = 0
    spare_k: int = 0
    values: str = "normal"

    def __post_init__(self):
        for name, fallback in (
            ("seqlens_k", self.seqlens_q),
            ("heads_k", self.heads),
            ("headdim_v", self.headdim),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, fallback)
        assert len(self.seqlens_q) == len(self.seqlens_k)
        assert self.packed or (len(set(self.seqlens_q)) <= 1 and len(set(self.seqlens_k)) <= 1)

    @property
    def options(self):
        return {
            "softmax_scale": self.softmax_scale,
            "causal": self.causal,
            "window_size": self.window,
        }

    def __str__(self):
        """Reads like causal-d128-gqa4-packed."""
        parts = []
        if self.causal:
            parts.append("causal")
        if self.window != (-1, -1):
            parts.append("window{}_{}".format(*self.window))
        if self.softmax_scale is not None:
            parts.append(f"scale{self.softmax_scale:g}")
        parts.append(f"d{self.headdim}")
        if self.headdim_v != self.headdim:
            parts.append(f"dv{self.headdim_v}")
        if self.heads != self.heads_k:
            parts.append("mqa" if self.heads_k == 1 else f"gqa{self.heads // self.heads_k}")
        parts.append("q" + "_".join(map(str, sorted(set(self.seqlens_q), reverse=True))))
        if self.seqlens_k != self.seqlens_q:
            parts.append("k" + "_".join(map(str, sorted(set(self.seqlens_k), reverse=True))))
        if self.packed:
            parts.append("packed")
        if self.slots_q or self.slots_k or self.spare_q or self.spare_k:
            parts.append("gaps")
        if self.values != "normal":
            parts.append(self.values)
        return "-".join(parts)


def fixed(batch, seqlen_q, seqlen_k=None, **rest):
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    return Problem((seqlen_q,) * batch, (seqlen_k,) * batch, **rest)


def packed(seqlens_q, seqlens_k=None, **rest):
    seqlens_k = None if seqlens_k is None else tuple(seqlens_k)
    return Problem(tuple(seqlens_q), seqlens_k, packed=True, **rest)


@dataclass
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None

    def replace(self, **changes):
        return replace(self, **changes)


@dataclass
class Result:
    """Fields left out were not asked for."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None

    def items(self):
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, tensor) for name, tensor in pairs if tensor is not None]


def _shape_values(values, q, k, v):
    """Structure that randn lacks: outlier channels and large scores, as trained models have."""
    if values == "normal":
        return
    if values == "outlier":
        q[..., 0] *= 6
        k[..., 0] *= 6
        v[..., -1] *= 30
        k[..., q.shape[-1] // 2] += 4
    elif values == "large":
        q *= 5
        k *= 3
    elif values in ("rising", "falling"):
        # Scores from -10^4 to 10^4 (a little noise beside), or down again.
        ramp = torch.linspace(-1, 1, k.shape[-3])[:, None] * (3000 if values == "rising" else -3000)
        k[..., 0], q[..., 0] = ramp.expand_as(k[..., 0]), 3.5 * q.shape[-1] ** 0.5
    elif values == "spikes":
        # Single keys above all others, each of another height.
        q[..., 0] = q.shape[-1] ** 0.5
        heights = torch.tensor([60.0, 150.0, 400.0, 1000.0, 3000.0, 9000.0])
        keys = (97 * torch.arange(len(heights)) + 31) % k.shape[-3]
        k[..., keys, :, 0] = heights[:, None].expand_as(k[..., keys, :, 0])
    elif values == "equal":
        k[:] = k[(0,) * (k.dim() - 2)].clone()
        q *= 10
    else:
        q *= float(values)
        k *= float(values)
        v *= float(values)


def _offsets(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def make_inputs(problem, device, dtype, seed=0):
    generator = torch.Generator(device="cpu").manual_seed(seed)
    slots_q = problem.slots_q or problem.seqlens_q
    slots_k = problem.slots_k or problem.seqlens_k
    if problem.packed:
        rows_q = (sum(slots_q) + problem.spare_q,)
        rows_k = (sum(slots_k) + problem.spare_k,)
        lse_shape = (problem.heads, *rows_q)
    else:
        batch = len(problem.seqlens_q)
        rows_q = (batch, problem.seqlens_q[0] if batch else 5)
        rows_k = (batch, problem.seqlens_k[0] if batch else 7)
        lse_shape = (rows_q[0], problem.heads, rows_q[1])

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    q = randn(*rows_q, problem.heads, problem.headdim)
    k = randn(*rows_k, problem.heads_k, problem.headdim)
    v = randn(*rows_k, problem.heads_k, problem.headdim_v)
    dout = randn(*rows_q, problem.heads, problem.headdim_v)
    dlse = randn(*lse_shape).to(device)
    if q.numel() and k.numel():
        _shape_values(problem.values, q, k, v)
    q, k, v, dout = (x.to(device=device, dtype=dtype) for x in (q, k, v, dout))
    inputs = Inputs(q, k, v, dout, dlse)
    if problem.packed:
        inputs.cu_seqlens_q = _offsets(slots_q, device)
        inputs.cu_seqlens_k = _offsets(slots_k, device)
        if problem.slots_q:
            inputs.seqused_q = torch.tensor(problem.seqlens_q, dtype=torch.int32, device=device)
        if problem.slots_k:
            inputs.seqused_k = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=device)
    return inputs


def _fill_malloc(byte):
    """mallopt(M_PERTURB): malloc fills with the complement of its argument; 0 turns it off."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc alone has it
    if mallopt is not None:
        mallopt(-6, 0 if byte is None else byte ^ 0xFF)


@contextlib.contextmanager
def nan_memory():
    """Whatever is allocated inside starts as NaN, so that a row that is never written shows.

    torch does this for its deterministic mode. flashattn is kept from seeing that mode: which
    backward runs is for the test to say. On the CPU, the stable ABI's allocations are not filled by
    torch: glibc's malloc fills them, with 0x7f bytes (fp16 NaN; 3.4e38 in fp32 and bf16)."""
    _fill_malloc(0x7F)
    seen = torch.are_deterministic_algorithms_enabled
    mode, warn = seen(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.are_deterministic_algorithms_enabled = lambda: mode
    try:
        yield
    finally:
        torch.are_deterministic_algorithms_enabled = seen
        torch.use_deterministic_algorithms(mode, warn_only=warn)
        _fill_malloc(None)


def call(inputs, **options):
    """flash_attn_func or flash_attn_varlen_func, whichever the inputs are for."""
    if inputs.cu_seqlens_q is None:
        return flashattn.flash_attn_func(inputs.q, inputs.k, inputs.v, **options)
    return flashattn.flash_attn_varlen_func(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        seqused_q=inputs.seqused_q,
        seqused_k=inputs.seqused_k,
        **options,
    )


def attend(problem, inputs, *, backward=True, dlse=True, deterministic=False):
    """What flashattn computes, forward and backward, in memory that holds NaN."""
    options = problem.options | {"deterministic": deterministic, "return_lse": True}
    with nan_memory():
        if not backward:
            with torch.no_grad():
                return Result(*call(inputs, **options))
        q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        out, lse = call(inputs.replace(q=q, k=k, v=v), **options)
        outputs, grads = (out, lse), (inputs.dout, inputs.dlse)
        if not dlse:
            outputs, grads = (out,), (inputs.dout,)
        dq, dk, dv = torch.autograd.grad(outputs, (q, k, v), grads)
    return Result(out.detach(), lse.detach(), dq, dk, dv)


def sequences(problem, inputs):
    """For each sequence: its index in q (and out, dout), in k and v, and in lse."""
    if not problem.packed:
        for b in range(inputs.q.shape[0]):
            one = slice(b, b + 1)
            yield one, one, one
        return
    slots_q = problem.slots_q or problem.seqlens_q
    slots_k = problem.slots_k or problem.seqlens_k
    begins_q = (0, *itertools.accumulate(slots_q))
    begins_k = (0, *itertools.accumulate(slots_k))
    lengths = zip(problem.seqlens_q, problem.seqlens_k, strict=True)
    for begin_q, begin_k, (used_q, used_k) in zip(begins_q, begins_k, lengths, strict=False):
        rows_q = slice(begin_q, begin_q + used_q)
        rows_k = slice(begin_k, begin_k + used_k)
        yield rows_q, rows_k, (slice(None), rows_q)


def wide_rows(x):
    """Row stride not a multiple of 16 bytes."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan")).to(x)
    wide[..., :-3] = x
    return wide[..., :-3]


def outside_filled(problem, inputs, value):
    """The inputs with `value` wherever no sequence is."""
    used = list(sequences(problem, inputs))
    changed = {}
    for name, side in (("q", 0), ("k", 1), ("v", 1), ("dout", 0), ("dlse", 2)):
        tensor = getattr(inputs, name)
        changed[name] = torch.full_like(tensor, value)
        for places in used:
            changed[name][places[side]] = tensor[places[side]]
    return inputs.replace(**changed)


def expected(problem, inputs, dtype=torch.float64, *, backward=True, dlse=True):
    """The same by the reference in `dtype`: float64 is the truth, the inputs' own is "eager"."""
    leaves = [x.detach().to(dtype).requires_grad_(backward) for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves
    out = torch.zeros(inputs.dout.shape, dtype=dtype, device=q.device)
    lse = torch.full(inputs.dlse.shape, float("-inf"), dtype=torch.float64, device=q.device)
    outputs, grads = [], []
    for rows_q, rows_k, rows_lse in sequences(problem, inputs):
        slices = [q[rows_q], k[rows_k], v[rows_k]]
        if problem.packed:
            slices = [x.unsqueeze(0) for x in slices]
        out_one, lse_one = reference.attention(*slices, return_lse=True, **problem.options)
        if problem.packed:
            out_one, lse_one = out_one[0], lse_one[0]
        out[rows_q] = out_one.detach()
        lse[rows_lse] = lse_one.detach().double()
        outputs.append(out_one)
        grads.append(inputs.dout[rows_q].to(dtype))
        if dlse:
            outputs.append(lse_one)
            grads.append(inputs.dlse[rows_lse].to(lse_one.dtype))
    if not backward:
        return Result(out, lse)
    if not outputs:
        return Result(out, lse, *(torch.zeros_like(x) for x in leaves))
    gradients = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    gradients = [
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)
    ]
    return Result(out, lse, *gradients)
