"""Packed sequences: what cu_seqlens, seqused and max_seqlen mean, whatever they hold."""

import pytest
import torch
from cases import attend, call, fixed, make_inputs, packed
from hypothesis import given
from hypothesis import strategies as st
from tolerance import check_problem, same_bits, same_result

import flashattn


def test_padded_slots(device, dtype):
    """Rows q1 q1 pad q2 q2 q2 pad q3 pad."""
    problem = packed((2, 3, 1), slots_q=(3, 4, 2), slots_k=(3, 4, 2), heads=2)
    inputs = make_inputs(problem, device, dtype)
    got = check_problem(problem, inputs)
    pads = [2, 6, 8]
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(got, name)[pads] == 0).all(), name
    assert (got.lse[:, pads] == -float("inf")).all()


@pytest.mark.parametrize(
    "problem",
    [
        packed((130, 70), causal=True),
        packed((3,), (7,), heads=16, headdim=192, causal=True),
        packed((1, 300, 20), (300, 1, 20), causal=True, headdim=128),
        packed((64, 64, 64), (1, 2, 3), window=(0, 0)),
    ],
    ids=str,
)
def test_unequal_lengths(problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    check_problem(problem, inputs, any_rows=min(problem.seqlens_k) < 15)


def test_packed_equals_fixed(device, dtype):
    for causal in (False, True):
        whole = fixed(3, 50, 70, heads=4, heads_k=2, causal=causal)
        inputs = make_inputs(whole, device, dtype)
        wanted = attend(whole, inputs, deterministic=True)
        flat = packed((50,) * 3, (70,) * 3, heads=4, heads_k=2, causal=causal)
        pieces = make_inputs(flat, device, dtype).replace(
            **{name: getattr(inputs, name).flatten(0, 1) for name in ("q", "k", "v", "dout")},
            dlse=inputs.dlse.transpose(0, 1).flatten(1),
        )
        got = attend(flat, pieces, deterministic=True)
        got.lse = got.lse.view(4, 3, 50).transpose(0, 1)
        for (name, x), (_, y) in zip(got.items(), wanted.items(), strict=True):
            same_bits(name, x.reshape(y.shape), y)


def test_max_seqlen_is_a_hint(device, dtype):
    problem = packed((100, 30), (40, 150), causal=True)
    inputs = make_inputs(problem, device, dtype)
    wanted = call(inputs, causal=True, return_lse=True)
    lengths = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    tensor = torch.tensor(100, dtype=torch.int32, device=device)
    for hints in ((100, 150), (None, None), (1, 1), (0, 0), (5000, 10**9), (tensor, tensor)):
        got = flashattn.flash_attn_varlen_func(
            inputs.q, inputs.k, inputs.v, *lengths, *hints, causal=True, return_lse=True
        )
        same_bits("out", got[0], wanted[0])
        same_bits("lse", got[1], wanted[1])


def bounded(offsets, rows):
    """What the kernels make of offsets: begin within the tensor, end behind begin."""
    begins = [min(max(x, 0), rows) for x in offsets[:-1]]
    ends = [min(max(x, begin), rows) for begin, x in zip(begins, offsets[1:], strict=True)]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


INT32 = st.integers(-(2**31), 2**31 - 1)
OFFSETS = st.lists(INT32 | st.integers(-5, 45), min_size=3, max_size=3)


@given(
    offsets_q=OFFSETS,
    offsets_k=OFFSETS,
    used_q=st.none() | st.lists(INT32, min_size=2, max_size=2),
    used_k=st.none() | st.lists(INT32, min_size=2, max_size=2),
    causal=st.booleans(),
)
def test_any_integers_are_safe(device, offsets_q, offsets_k, used_q, used_k, causal):
    """Offsets that decrease, overlap or lead outside: no fault, and finite numbers from the rows
    that were given. (The sanitizer runs this too.)"""
    dtype = torch.float16 if device == "cuda" else torch.float32
    problem = packed((20, 20), (20, 20), headdim=16)
    inputs = make_inputs(problem, device, dtype)

    def ints(values):
        if values is None:
            return None
        return torch.tensor(values, dtype=torch.int32, device=device)

    hostile = inputs.replace(
        cu_seqlens_q=ints(offsets_q),
        cu_seqlens_k=ints(offsets_k),
        seqused_q=ints(used_q),
        seqused_k=ints(used_k),
    )
    got = attend(packed((20, 20), (20, 20), headdim=16, causal=causal), hostile)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.isfinite(getattr(got, name)).all(), name
    assert not got.lse.isnan().any()


@pytest.mark.parametrize(
    "offsets",
    [(0, 20, 30), (10, 20, 40), (0, 90, 40), (-7, 20, 40)],
    ids=lambda x: "_".join(map(str, x)),
)
def test_odd_offsets_mean_what_is_left_of_them(offsets, device, dtype):
    """Not from 0, or not up to the end: rows that no sequence names are zero; the rest is right."""
    lengths = bounded(offsets, 40)
    begin = max(offsets[0], 0)
    inputs = make_inputs(packed((20, 20)), device, dtype)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    got = attend(packed((20, 20)), inputs.replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens))
    if offsets[1] > 40:  # the second sequence begins where the first, bounded, ends: it is empty
        lengths = [40, 0]
    rows = slice(begin, begin + sum(lengths))
    plain = packed(lengths)
    part = make_inputs(plain, device, dtype).replace(
        **{name: getattr(inputs, name)[rows] for name in ("q", "k", "v", "dout")},
        dlse=inputs.dlse[:, rows],
    )
    wanted = attend(plain, part)
    same_bits("out", got.out[rows], wanted.out)
    same_bits("lse", got.lse[:, rows], wanted.lse)
    outside = torch.ones(40, dtype=torch.bool, device=device)
    outside[rows] = False
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(got, name)[outside] == 0).all(), name


def test_strict_refuses_what_the_kernels_bound(device):
    dtype = torch.float16
    inputs = make_inputs(packed((20, 20)), device, dtype)

    def offsets(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    flashattn.strict(True)
    try:
        call(inputs)
        for bad in (
            offsets(1, 20, 40),
            offsets(0, 30, 20),
            offsets(0, 20, 41),
            offsets(-1, 20, 40),
        ):
            with pytest.raises(ValueError, match="cu_seqlens_q"):
                call(inputs.replace(cu_seqlens_q=bad))
            with pytest.raises(ValueError, match="cu_seqlens_k"):
                call(inputs.replace(cu_seqlens_k=bad))
        for bad in (offsets(-1, 20), offsets(20, 21)):
            with pytest.raises(ValueError, match="seqused_k"):
                call(inputs.replace(seqused_k=bad))
        with pytest.raises(ValueError, match="max_seqlen_q"):
            call(inputs, max_seqlen_q=19)
    finally:
        flashattn.strict(False)
    with flashattn.strict(), pytest.raises(ValueError, match="cu_seqlens_q"):
        call(inputs.replace(cu_seqlens_q=offsets(0, 30, 20)))
    call(inputs.replace(cu_seqlens_q=offsets(0, 30, 20)))


def test_seqused_equals_shorter_sequences(device, dtype):
    problem = packed((13, 40), (50, 9), slots_q=(20, 40), slots_k=(50, 30), causal=True)
    inputs = make_inputs(problem, device, dtype)
    got = attend(problem, inputs, deterministic=True)
    rows_q = [*range(13), *range(20, 60)]
    rows_k = [*range(50), *range(50, 59)]
    plain = packed((13, 40), (50, 9), causal=True)
    part = make_inputs(plain, device, dtype).replace(
        q=inputs.q[rows_q],
        k=inputs.k[rows_k],
        v=inputs.v[rows_k],
        dout=inputs.dout[rows_q],
        dlse=inputs.dlse[:, rows_q],
    )
    wanted = attend(plain, part, deterministic=True)
    got.out, got.dq, got.lse = got.out[rows_q], got.dq[rows_q], got.lse[:, rows_q]
    got.dk, got.dv = got.dk[rows_k], got.dv[rows_k]
    same_result(got, wanted)
