"""Offsets past 2^31, grids past 65535: results are compared on sampled rows."""

import pytest
import torch
from cases import Inputs, Problem, attend, expected, fixed, packed
from tolerance import cancellation_noise, check, check_lse

pytestmark = pytest.mark.large
DTYPE = torch.bfloat16


def randn(*shape):
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def check_batch_entries(problem, inputs, got, entries):
    """Some sequences of a fixed-length batch, alone, against fp64."""
    alone = Problem(
        **vars(problem) | {"seqlens_q": problem.seqlens_q[:1], "seqlens_k": problem.seqlens_k[:1]}
    )
    for b in entries:
        one = slice(b, b + 1)
        names = ("q", "k", "v", "dout", "dlse")
        part = Inputs(**{name: getattr(inputs, name)[one] for name in names})
        exact, eager = expected(alone, part), expected(alone, part, DTYPE)
        noise = cancellation_noise(alone, part)
        check_lse(got.lse[one], exact.lse)
        for name in ("out", "dq", "dk", "dv"):
            triple = (getattr(result, name) for result in (got, exact, eager))
            mine, right, rough = triple
            check(name, mine[one], right, rough, noise)


def fixed_inputs(problem):
    batch, seqlen_q, seqlen_k = len(problem.seqlens_q), problem.seqlens_q[0], problem.seqlens_k[0]
    return Inputs(
        q=randn(batch, seqlen_q, problem.heads, problem.headdim),
        k=randn(batch, seqlen_k, problem.heads_k, problem.headdim),
        v=randn(batch, seqlen_k, problem.heads_k, problem.headdim_v),
        dout=randn(batch, seqlen_q, problem.heads, problem.headdim_v),
        dlse=torch.randn(batch, problem.heads, seqlen_q, device="cuda"),
    )


def test_many_short_sequences():
    """(1600, 729, 16, 72): 1.3e9 elements a tensor, and the products of strides beyond that."""
    problem = fixed(1600, 729, heads=16, headdim=72)
    inputs = fixed_inputs(problem)
    got = attend(problem, inputs)
    check_batch_entries(problem, inputs, got, (0, 799, 1599))


def test_more_than_2_31_elements():
    """The last sequences of a batch lie beyond element 2^31."""
    problem = fixed(2200, 125, heads=64, headdim=128, causal=True)
    assert 2200 * 125 * 64 * 128 > 2**31
    inputs = fixed_inputs(problem)
    got = attend(problem, inputs)
    check_batch_entries(problem, inputs, got, (0, 2199))


def test_more_than_65535_sequences_and_heads():
    problem = fixed(70_000, 24, heads=2, headdim=16)
    inputs = fixed_inputs(problem)
    check_batch_entries(problem, inputs, attend(problem, inputs), (0, 65_535, 65_536, 69_999))
    problem = fixed(1, 24, heads=70_000, headdim=16)
    inputs = fixed_inputs(problem)
    check_batch_entries(problem, inputs, attend(problem, inputs), (0,))


def test_row_times_stride_beyond_2_31():
    """dout and q are slices of a wide buffer: row 250 000 times stride 9728."""
    rows, stride, lengths = 250_000, 9728, (1000,) * 250
    problem = packed(lengths, heads=1, headdim=128, causal=True)
    wide = torch.empty(rows * stride, device="cuda", dtype=DTYPE)
    inputs = Inputs(
        q=wide.as_strided((rows, 1, 128), (stride, 128, 1)).normal_(),
        k=randn(rows, 1, 128),
        v=wide.as_strided((rows, 1, 128), (stride, 128, 1), 256).normal_(),
        dout=wide.as_strided((rows, 1, 128), (stride, 128, 1), 512).normal_(),
        dlse=torch.randn(1, rows, device="cuda"),
    )
    offsets = torch.arange(0, rows + 1, 1000, dtype=torch.int32, device="cuda")
    inputs = inputs.replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    got = attend(problem, inputs)
    last = slice(rows - 1000, rows)
    alone = fixed(1, 1000, heads=1, headdim=128, causal=True)
    names = ("q", "k", "v", "dout")
    part = Inputs(
        **{name: getattr(inputs, name)[None, last] for name in names},
        dlse=inputs.dlse[None, :, last],
    )
    exact, eager = expected(alone, part), expected(alone, part, DTYPE)
    check_lse(got.lse[None, :, last], exact.lse)
    for name in ("out", "dq", "dk", "dv"):
        check(name, getattr(got, name)[None, last], getattr(exact, name), getattr(eager, name))


def test_one_long_sequence():
    """128k keys: sums over many blocks, one query block checked."""
    rows = 131_072
    problem = fixed(1, 256, rows, heads=2, headdim=64, causal=True)
    inputs = fixed_inputs(problem)
    got = attend(problem, inputs)
    check_batch_entries(problem, inputs, got, (0,))


def test_strides_beyond_2_31():
    """A view whose batch stride is 2^30 and more, as of a large cache."""
    batch, seqlen = 4, 64
    buffer = torch.zeros(3 * 2**30 + 2**20, device="cuda", dtype=DTYPE)
    problem = fixed(batch, seqlen, heads=2, headdim=64)
    inputs = fixed_inputs(problem)
    view = buffer.as_strided(inputs.k.shape, (2**30, *inputs.k.stride()[1:]))
    view.copy_(inputs.k)
    got = attend(problem, inputs.replace(k=view))
    check_batch_entries(problem, inputs, got, range(batch))
