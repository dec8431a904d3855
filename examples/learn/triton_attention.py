"""Exact attention in Triton, forward and backward: where the chapters of docs/learn lead.

The formulas are those of FlashAttention-2 (Dao 2023): algorithm 1 forward, algorithm 2 backward,
but for dQ, which has a kernel of its own here instead of atomic additions. q, k, v are (batch,
seqlen, heads, headdim) as in flashattn, fp16 or bf16 (fp32 too, slowly), headdim a power of two
from 16 to 256; a causal mask is aligned to the bottom right. Blocks of q, k and v are loaded
through tensor descriptors, which are TMA on Hopper: rows beyond the end arrive as zeros, and are
not stored.
"""

import functools
from dataclasses import dataclass

import torch
from device import DEVICE  # before triton
from torch import Tensor

# isort: split
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@dataclass(frozen=True)
class Tile:
    """The queries and keys of a block, and how Triton compiles the loop over them."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def launch_options(self) -> dict:
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n}
        return blocks | {"num_warps": self.num_warps, "num_stages": self.num_stages}


# For each kernel the tile of head dims up to the key, the fastest on an H200 of those that
# tune_triton_attention.py tries (256: not tuned).
TILES = {
    "forward": {64: Tile(64, 128, 4, 2), 128: Tile(128, 64, 4, 2), 256: Tile(128, 64, 8, 2)},
    "dkdv": {64: Tile(128, 64, 4, 2), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 2)},
    "dq": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 32, 8, 2)},
}


def tile_of(kernel: str, headdim: int) -> Tile:
    return next(tile for largest, tile in TILES[kernel].items() if headdim <= largest)


@triton.jit
def dot(a, b):
    """a b, summed in fp32. The interpreter would multiply bf16's bits as integers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load(descriptor, batch, head, first_row, ROWS: tl.constexpr, HEADDIM: tl.constexpr):
    return descriptor.load([batch, head, first_row, 0]).reshape(ROWS, HEADDIM)


@triton.jit
def store(descriptor, batch, head, first_row, x, ROWS: tl.constexpr, HEADDIM: tl.constexpr):
    x = x.to(descriptor.dtype).reshape(1, 1, ROWS, HEADDIM)
    descriptor.store([batch, head, first_row, 0], x)


@triton.jit
def visible_pairs(rows, keys, seqlen_q, seqlen_k, CAUSAL: tl.constexpr):
    """Which keys exist and are visible; rows and keys broadcast against each other."""
    visible = keys < seqlen_k
    if CAUSAL:
        visible = visible & (keys <= rows + seqlen_k - seqlen_q)
    return visible


@triton.jit
def key_range(
    first_row,
    seqlen_q,
    seqlen_k,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """For a block of queries: keys [0, full) come in blocks that every query sees whole, keys
    [full, end) in blocks that need the mask; none sees a key from `end` on."""
    full, end = seqlen_k, seqlen_k
    if CAUSAL:
        first_diagonal = first_row + seqlen_k - seqlen_q
        end = tl.maximum(0, tl.minimum(seqlen_k, first_diagonal + BLOCK_M))
        full = tl.maximum(0, tl.minimum(seqlen_k, first_diagonal + 1))
    return full // BLOCK_N * BLOCK_N, end


@triton.jit
def attend(
    q, k_desc, v_desc, batch, head, rows, begin, end, seqlen_q, seqlen_k, scale_log2, m, total, acc,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, HEADDIM: tl.constexpr,
):  # fmt: skip
    """Passes over keys [begin, end): m is the running maximum of the scores in log2 units, total
    the sum of 2^(score - m), acc the sum of 2^(score - m) v."""
    for first_key in tl.range(begin, end, BLOCK_N):
        k = load(k_desc, batch, head, first_key, BLOCK_N, HEADDIM)
        s = dot(q, k.T)
        if MASK:
            keys = first_key + tl.arange(0, BLOCK_N)
            s = tl.where(
                visible_pairs(rows[:, None], keys[None, :], seqlen_q, seqlen_k, CAUSAL),
                s,
                float("-inf"),
            )
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        reference = m_new
        if MASK:  # -inf - -inf is NaN: a row that has seen no key is taken relative to 0
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * scale_log2 - reference[:, None])
        alpha = tl.exp2(m - reference)
        total = total * alpha + tl.sum(p, 1)
        v = load(v_desc, batch, head, first_key, BLOCK_N, HEADDIM)
        acc = acc * alpha[:, None] + dot(p.to(v_desc.dtype), v)
        m = m_new
    return m, total, acc


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, lse_ptr, heads, seqlen_q, seqlen_k, scale_log2,
    CAUSAL: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The last blocks of a causal problem see most keys: they start first.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = first_row + tl.arange(0, BLOCK_M)
    q = load(q_desc, batch, head, first_row, BLOCK_M, HEADDIM)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEADDIM], tl.float32)
    full, end = key_range(first_row, seqlen_q, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)
    m, total, acc = attend(
        q, k_desc, v_desc, batch, head, rows, 0, full, seqlen_q, seqlen_k, scale_log2, m, total,
        acc, False, CAUSAL, BLOCK_N, HEADDIM,
    )  # fmt: skip
    m, total, acc = attend(
        q, k_desc, v_desc, batch, head, rows, full, end, seqlen_q, seqlen_k, scale_log2, m, total,
        acc, True, CAUSAL, BLOCK_N, HEADDIM,
    )  # fmt: skip
    total = tl.where(
        total == 0.0, 1.0, total
    )  # a row without a key, whose m is -inf: out 0, lse -inf
    store(out_desc, batch, head, first_row, acc / total[:, None], BLOCK_M, HEADDIM)
    lse = (m + tl.log2(total)) / LOG2E
    lse_rows = lse_ptr + tl.program_id(1).to(tl.int64) * seqlen_q + rows
    tl.store(lse_rows, lse, mask=rows < seqlen_q)


@triton.jit
def delta_kernel(
    out_desc, dout_desc, delta_ptr, heads, seqlen_q, HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr
):
    """delta_i = <dout_i, out_i>: what the gradient of the softmax subtracts from a row of dP."""
    first_row = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = first_row + tl.arange(0, BLOCK_M)
    out = load(out_desc, batch, head, first_row, BLOCK_M, HEADDIM).to(tl.float32)
    dout = load(dout_desc, batch, head, first_row, BLOCK_M, HEADDIM).to(tl.float32)
    delta_rows = delta_ptr + tl.program_id(1).to(tl.int64) * seqlen_q + rows
    tl.store(delta_rows, tl.sum(out * dout, 1), mask=rows < seqlen_q)


@triton.jit
def add_dk_dv(
    k, v, q_desc, dout_desc, lse_rows, delta_rows, batch, head, keys, begin, end, seqlen_q,
    seqlen_k, scale_log2, dk, dv,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, HEADDIM: tl.constexpr,
):  # fmt: skip
    """Adds what queries [begin, end) give to dK and dV. S and dS are transposed, keys by queries:
    so P and dS are left operands as they stand in registers."""
    for first_row in tl.range(begin, end, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)
        q = load(q_desc, batch, head, first_row, BLOCK_M, HEADDIM)
        # Rows beyond the end get lse = inf, hence P = 0.
        lse = tl.load(lse_rows + rows, mask=rows < seqlen_q, other=float("inf")) * LOG2E
        p = tl.exp2(dot(k, q.T) * scale_log2 - lse[None, :])
        if MASK:
            visible = visible_pairs(rows[None, :], keys[:, None], seqlen_q, seqlen_k, CAUSAL)
            p = tl.where(visible, p, 0.0)
        dout = load(dout_desc, batch, head, first_row, BLOCK_M, HEADDIM)
        dv += dot(p.to(q_desc.dtype), dout)
        delta = tl.load(delta_rows + rows, mask=rows < seqlen_q, other=0.0)
        ds = p * (dot(v, dout.T) - delta[None, :])
        dk += dot(ds.to(q_desc.dtype), q)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, lse_ptr, delta_ptr, heads, seqlen_q,
    seqlen_k, scale, CAUSAL: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of keys and values stays, the queries that see it pass by."""
    first_key = tl.program_id(0) * BLOCK_N
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    keys = first_key + tl.arange(0, BLOCK_N)
    k = load(k_desc, batch, head, first_key, BLOCK_N, HEADDIM)
    v = load(v_desc, batch, head, first_key, BLOCK_N, HEADDIM)
    dk = tl.zeros([BLOCK_N, HEADDIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEADDIM], tl.float32)
    lse_rows = lse_ptr + tl.program_id(1).to(tl.int64) * seqlen_q
    delta_rows = delta_ptr + tl.program_id(1).to(tl.int64) * seqlen_q
    # Queries from `full` on see the whole block, those before `begin` none of it.
    begin, full = 0, 0
    if CAUSAL:
        first_visible = tl.maximum(0, first_key + seqlen_q - seqlen_k)
        begin = first_visible // BLOCK_M * BLOCK_M
        full = tl.cdiv(tl.maximum(0, first_key + BLOCK_N - 1 + seqlen_q - seqlen_k), BLOCK_M)
        full = full * BLOCK_M
        dk, dv = add_dk_dv(
            k, v, q_desc, dout_desc, lse_rows, delta_rows, batch, head, keys, begin,
            tl.minimum(full, seqlen_q), seqlen_q, seqlen_k, scale * LOG2E, dk, dv,
            True, CAUSAL, BLOCK_M, HEADDIM,
        )  # fmt: skip
    dk, dv = add_dk_dv(
        k, v, q_desc, dout_desc, lse_rows, delta_rows, batch, head, keys, full, seqlen_q, seqlen_q,
        seqlen_k, scale * LOG2E, dk, dv, False, CAUSAL, BLOCK_M, HEADDIM,
    )  # fmt: skip
    store(dk_desc, batch, head, first_key, dk * scale, BLOCK_N, HEADDIM)
    store(dv_desc, batch, head, first_key, dv, BLOCK_N, HEADDIM)


@triton.jit
def add_dq(
    q, dout, lse, delta, k_desc, v_desc, batch, head, rows, begin, end, seqlen_q, seqlen_k,
    scale_log2, dq,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, HEADDIM: tl.constexpr,
):  # fmt: skip
    for first_key in tl.range(begin, end, BLOCK_N):
        k = load(k_desc, batch, head, first_key, BLOCK_N, HEADDIM)
        v = load(v_desc, batch, head, first_key, BLOCK_N, HEADDIM)
        p = tl.exp2(dot(q, k.T) * scale_log2 - lse[:, None])
        if MASK:
            keys = first_key + tl.arange(0, BLOCK_N)
            visible = visible_pairs(rows[:, None], keys[None, :], seqlen_q, seqlen_k, CAUSAL)
            p = tl.where(visible, p, 0.0)
        ds = p * (dot(dout, v.T) - delta[:, None])
        dq += dot(ds.to(k_desc.dtype), k)
    return dq


@triton.jit
def dq_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, lse_ptr, delta_ptr, heads, seqlen_q, seqlen_k,
    scale, CAUSAL: tl.constexpr, HEADDIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A block of queries stays, the keys and values that it sees pass by."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = first_row + tl.arange(0, BLOCK_M)
    q = load(q_desc, batch, head, first_row, BLOCK_M, HEADDIM)
    dout = load(dout_desc, batch, head, first_row, BLOCK_M, HEADDIM)
    in_sequence, offset = rows < seqlen_q, tl.program_id(1).to(tl.int64) * seqlen_q
    lse = tl.load(lse_ptr + offset + rows, mask=in_sequence, other=float("inf")) * LOG2E
    delta = tl.load(delta_ptr + offset + rows, mask=in_sequence, other=0.0)
    dq = tl.zeros([BLOCK_M, HEADDIM], tl.float32)
    full, end = key_range(first_row, seqlen_q, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)
    dq = add_dq(
        q, dout, lse, delta, k_desc, v_desc, batch, head, rows, 0, full, seqlen_q, seqlen_k,
        scale * LOG2E, dq, False, CAUSAL, BLOCK_N, HEADDIM,
    )  # fmt: skip
    dq = add_dq(
        q, dout, lse, delta, k_desc, v_desc, batch, head, rows, full, end, seqlen_q, seqlen_k,
        scale * LOG2E, dq, True, CAUSAL, BLOCK_N, HEADDIM,
    )  # fmt: skip
    store(dq_desc, batch, head, first_row, dq * scale, BLOCK_M, HEADDIM)


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Of x (batch, seqlen, heads, headdim): loads and stores `rows` rows of one head."""
    return TensorDescriptor.from_tensor(x.transpose(1, 2), [1, 1, rows, x.shape[-1]])


def forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads, headdim) and lse (batch, heads, seqlen_q), fp32, natural log."""
    batch, seqlen_q, heads, headdim = q.shape
    tile = tile or tile_of("forward", headdim)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    forward_kernel[(triton.cdiv(seqlen_q, tile.block_m), batch * heads)](
        descriptor(q, tile.block_m),
        descriptor(k, tile.block_n),
        descriptor(v, tile.block_n),
        descriptor(out, tile.block_m),
        lse,
        heads,
        seqlen_q,
        k.shape[1],
        softmax_scale * LOG2E.value,
        CAUSAL=causal,
        HEADDIM=headdim,
        **tile.launch_options,
    )
    return out, lse


DELTA_ROWS = 128


def row_products(out: Tensor, dout: Tensor) -> Tensor:
    """delta (batch, heads, seqlen_q)."""
    batch, seqlen_q, heads, headdim = out.shape
    delta = out.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    delta_kernel[(triton.cdiv(seqlen_q, DELTA_ROWS), batch * heads)](
        descriptor(out, DELTA_ROWS),
        descriptor(dout, DELTA_ROWS),
        delta,
        heads,
        seqlen_q,
        HEADDIM=headdim,
        BLOCK_M=DELTA_ROWS,
    )
    return delta


def gradients(
    kernel, of, rows, q, k, v, dout, lse, delta, softmax_scale, causal, tile
) -> tuple[Tensor, ...]:
    """Those of `of`, whose kernel keeps blocks of `rows` rows of them while the others pass by."""
    batch, seqlen_q, heads, headdim = q.shape
    results = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in of)
    kernel[(triton.cdiv(of[0].shape[1], rows), batch * heads)](
        descriptor(q, tile.block_m),
        descriptor(k, tile.block_n),
        descriptor(v, tile.block_n),
        descriptor(dout, tile.block_m),
        *(descriptor(x, rows) for x in results),
        lse,
        delta,
        heads,
        seqlen_q,
        k.shape[1],
        softmax_scale,
        CAUSAL=causal,
        HEADDIM=headdim,
        **tile.launch_options,
    )
    return results


def grad_kv(q, k, v, dout, lse, delta, softmax_scale, causal, tile=None) -> tuple[Tensor, ...]:
    tile = tile or tile_of("dkdv", k.shape[-1])
    inputs = (q, k, v, dout, lse, delta, softmax_scale, causal)
    return gradients(dkdv_kernel, (k, v), tile.block_n, *inputs, tile)


def grad_q(q, k, v, dout, lse, delta, softmax_scale, causal, tile=None) -> Tensor:
    tile = tile or tile_of("dq", q.shape[-1])
    inputs = (q, k, v, dout, lse, delta, softmax_scale, causal)
    return gradients(dq_kernel, (q,), tile.block_m, *inputs, tile)[0]


class TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> Tensor:
        out, lse = forward(q, k, v, softmax_scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale, ctx.causal = softmax_scale, causal
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        dout = aligned(dout)
        rest = (dout, lse, row_products(out, dout), ctx.softmax_scale, ctx.causal)
        dk, dv = grad_kv(q, k, v, *rest)
        return grad_q(q, k, v, *rest), dk, dv, None, None


def aligned(x: Tensor) -> Tensor:
    """x itself where a tensor descriptor can take it: rows in one piece, addresses in 16 bytes."""
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    fits = x.stride(-1) == 1 and all(stride > 0 and stride % 16 == 0 for stride in strides)
    return x if fits and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """softmax(softmax_scale q k^T) v; differentiable."""
    headdim = q.shape[-1]
    if k.shape != v.shape or q.shape[2] != k.shape[2] or headdim != k.shape[-1]:
        raise ValueError("q, k and v need the same heads and head dim, k and v the same shape")
    if headdim & (headdim - 1) or not 16 <= headdim <= 256:
        raise ValueError(f"headdim must be a power of two from 16 to 256, got {headdim}")
    softmax_scale = headdim**-0.5 if softmax_scale is None else softmax_scale
    if softmax_scale <= 0:
        raise ValueError("softmax_scale must be positive: the maximum is taken before it")
    return TritonAttention.apply(aligned(q), aligned(k), aligned(v), softmax_scale, causal)


def check(
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, headdim: int, causal: bool, dtype
) -> float:
    """The largest error of out, dq, dk, dv against fp64, over what plain PyTorch errs by plus one
    rounding step. Up to 2 passes."""
    from flashattn import reference

    def run(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*leaves, causal=causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]

    torch.manual_seed(0)
    draw = functools.partial(torch.randn, device=DEVICE, dtype=dtype)
    q, dout = (draw(batch, seqlen_q, heads, headdim) for _ in range(2))
    k, v = (draw(batch, seqlen_k, heads, headdim) for _ in range(2))
    got, exact = run(attention, dtype), run(reference.attention, torch.float64)
    eager = run(reference.attention, dtype)
    worst = 0.0
    for ours, plain, truth in zip(got, eager, exact, strict=True):
        assert ours.isfinite().all()
        step = torch.finfo(dtype).eps * truth.abs().max()
        unit = (plain.double() - truth).abs().max() + step
        worst = max(worst, float((ours.double() - truth).abs().max() / unit))
    print(
        f"{seqlen_q} x {seqlen_k}, headdim {headdim}, {'causal' if causal else 'full'}, {dtype}: "
        f"{worst:.2f} times (the error of plain PyTorch + a rounding step), 2 is allowed"
    )
    assert worst <= 2.0
    return worst


def main() -> None:
    for causal in (False, True):
        check(1, 200, 200, 1, 64, causal, torch.float16)
        check(1, 100, 150, 2, 64, causal, torch.bfloat16)
    check(2, 130, 70, 1, 32, True, torch.float16)  # queries that see no key
    if DEVICE == "cpu":
        check(1, 100, 100, 1, 128, True, torch.float32)


if __name__ == "__main__":
    main()
