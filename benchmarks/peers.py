"""flashattn and the attentions it is measured against, as calls on one layout of the same data.

All inputs are stored as (batch, seqlen, heads, headdim); torch's attentions get the transposed view
that they want, so nobody pays for a copy."""

import contextlib
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from shapes import Cell
from timing import Candidate
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashattn

OURS = "flashattn"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MATH_MAX_SCORES = 2**29  # the plain formula stores them all, several times


class Unsupported(Exception):
    """The peer can't run the cell; the text says why."""


@dataclass
class Call:
    function: Callable[..., torch.Tensor]
    transposed: bool = False  # wants (batch, heads, seqlen, headdim)
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass
class Contender(Candidate):
    """A pass of one attention, ready to be timed."""

    transposed: bool = False

    def results(self) -> list[torch.Tensor]:
        """Runs once; the output or the gradients in flashattn's layout."""
        with self.context():
            got = self.run()
        tensors = [got] if isinstance(got, torch.Tensor) else got
        return [t.transpose(1, 2) for t in tensors] if self.transposed else list(tensors)


class Inputs:
    """q, k, v and the gradient of out, drawn on the device from a fixed seed."""

    def __init__(self, cell: Cell, device: str) -> None:
        self.cell, self.device = cell, device
        generator = torch.Generator(device).manual_seed(0)
        rows = (sum(cell.lengths),) if cell.lengths else (cell.batch, cell.seqlen)

        def draw(heads: int, headdim: int) -> torch.Tensor:
            shape = (*rows, heads, headdim)
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[cell.dtype])

        self.q = draw(cell.heads, cell.headdim)
        self.k = draw(cell.kv_heads, cell.headdim)
        self.v = draw(cell.kv_heads, cell.v_dim)
        self.dout = draw(cell.heads, cell.v_dim)

    @functools.cached_property
    def cu_seqlens(self) -> torch.Tensor:
        lengths = torch.tensor((0, *self.cell.lengths), device=self.device)
        return lengths.cumsum(0).to(torch.int32)


def _flashattn(inputs: Inputs) -> Call:
    cell = inputs.cell
    if not cell.lengths:
        return Call(functools.partial(flashattn.flash_attn_func, causal=cell.causal))
    cu_seqlens = inputs.cu_seqlens
    return Call(
        lambda q, k, v: flashattn.flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, cell.seqlen, cell.seqlen, causal=cell.causal
        )
    )


def _sdpa(inputs: Inputs, backend: SDPBackend | None = None) -> Call:
    cell = inputs.cell
    if cell.lengths:
        raise Unsupported("no packed sequences")
    if backend == SDPBackend.MATH:
        scores = cell.batch * cell.heads * cell.seqlen**2
        if scores > MATH_MAX_SCORES:
            raise Unsupported("the score matrix is too large")
    function = functools.partial(
        F.scaled_dot_product_attention,
        is_causal=cell.causal,
        enable_gqa=cell.kv_heads != cell.heads,
    )
    context = functools.partial(sdpa_kernel, backend) if backend else contextlib.nullcontext
    return Call(function, transposed=True, context=context)


def _fa2(inputs: Inputs) -> Call:
    cell = inputs.cell
    if not cell.lengths:
        return _sdpa(inputs, SDPBackend.FLASH_ATTENTION)
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens, window = inputs.cu_seqlens, (-1, 0 if cell.causal else -1)
    return Call(
        lambda q, k, v: varlen_attn(
            q, k, v, cu_seqlens, cu_seqlens, cell.seqlen, cell.seqlen, window_size=window
        )
    )


def _flex(inputs: Inputs) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    cell = inputs.cell
    if cell.lengths:
        raise Unsupported("packed sequences aren't measured with it")
    block_mask = None
    if cell.causal:
        block_mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, cell.seqlen, cell.seqlen, inputs.device
        )
    function = functools.partial(
        torch.compile(flex_attention, fullgraph=True, dynamic=False),
        block_mask=block_mask,
        enable_gqa=cell.kv_heads != cell.heads,
    )
    return Call(function, transposed=True)


def _triton(inputs: Inputs) -> Call:
    cell = inputs.cell
    if inputs.device != "cuda":
        raise Unsupported("on the CPU Triton only has an interpreter")
    if cell.lengths or cell.kv_heads != cell.heads or cell.v_dim != cell.headdim:
        raise Unsupported("one length, as many key heads as query heads and one head dim only")
    folder = str(Path(__file__).parent.parent / "examples" / "learn")
    if folder not in sys.path:
        sys.path.append(folder)
    from triton_attention import attention

    return Call(functools.partial(attention, causal=cell.causal))


PEERS: dict[str, Callable[[Inputs], Call]] = {
    OURS: _flashattn,
    "sdpa": _sdpa,  # torch's own choice
    "fa2": _fa2,  # FlashAttention-2 in torch
    "cudnn": functools.partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "efficient": functools.partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "math": functools.partial(_sdpa, backend=SDPBackend.MATH),
    "triton": _triton,  # examples/learn/triton_attention.py
    "flex": _flex,  # FlexAttention under torch.compile: minutes of compile time for a long preset
}
DEFAULT_PEERS = {"cuda": ("fa2", "cudnn", "efficient"), "cpu": ("sdpa",)}


def make_contender(name: str, inputs: Inputs, which: str) -> Contender:
    """`which`: "fwd" runs without grad, "fwd_grad" is the same call recording a graph, "bwd" runs
    alone on a graph that is kept, "fwdbwd" is both."""
    call = PEERS[name](inputs)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    *leaves, dout = (t.transpose(1, 2) if call.transposed else t.detach() for t in tensors)
    if which == "fwd":

        @contextlib.contextmanager
        def context():
            with torch.no_grad(), call.context():
                yield

        return Contender(name, lambda: call.function(*leaves), context, call.transposed)

    for leaf in leaves:
        leaf.requires_grad_()
    if which == "bwd":
        with call.context():
            out = call.function(*leaves)
        context = contextlib.nullcontext

        def run():
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)
    else:
        context = call.context

        def run():
            out = call.function(*leaves)
            return out if which == "fwd_grad" else torch.autograd.grad(out, leaves, dout)

    return Contender(name, run, context, call.transposed)


def largest_difference(ours: list[torch.Tensor], peer: list[torch.Tensor]) -> float:
    """The largest |ours - peer| in units of the peer's largest value, over all tensors."""
    return max(
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item()
        for a, b in zip(ours, peer, strict=True)
    )
