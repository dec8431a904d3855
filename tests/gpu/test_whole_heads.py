"""The backward for sm_90a where a CTA takes all key blocks of a head, with heads for all SMs:
it sums the queries' gradients by itself, in order."""

import pytest
import torch
from cases import attend, fixed, make_inputs, wide_rows
from tolerance import check_problem, same_bits, same_result

from flashattn import _plan

DTYPES = [torch.bfloat16, torch.float16]
PROBLEMS = [
    fixed(20, 200, 260, heads=6, headdim=64),
    fixed(20, 300, 300, heads=6, headdim=64, causal=True),
    fixed(30, 150, 280, heads=8, heads_k=4, headdim=40, headdim_v=64, causal=True),
    fixed(20, 260, 390, heads=6, headdim=128, causal=True),
    fixed(30, 130, 200, heads=8, heads_k=4, headdim=96),
    fixed(20, 140, 300, heads=6, headdim=192, headdim_v=128, causal=True),
    fixed(20, 140, 200, heads=6, headdim=256),
    fixed(20, 200, 200, heads=6, headdim=136, causal=True),
    fixed(20, 70, 65, heads=6, headdim=64),  # one block of keys
    fixed(50, 200, 300, heads=6, headdim=64, causal=True),  # a CTA takes more than one head
    fixed(50, 150, 260, heads=12, heads_k=6, headdim=128),
]


def takes_whole_heads(problem):
    plan = _plan.make_backward_plan(
        _plan.Problem(
            batch=len(problem.seqlens_q),
            seqlen_q=problem.seqlens_q[0],
            seqlen_k=problem.seqlens_k[0],
            heads_q=problem.heads,
            heads_k=problem.heads_k,
            headdim=problem.headdim,
            headdim_v=problem.headdim_v,
            window_right=0 if problem.causal else -1,
            deterministic=True,
        ),
        _plan.device_by_name("h200"),
    )
    return plan.whole_heads


@pytest.fixture(params=PROBLEMS, ids=str)
def problem(request):
    gpu = torch.cuda.get_device_properties()
    if (gpu.major, gpu.minor, gpu.multi_processor_count) != (9, 0, 132):
        pytest.skip("another GPU than these problems are made for")
    assert takes_whole_heads(request.param)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_close_and_repeated(problem, dtype):
    inputs = make_inputs(problem, "cuda", dtype)
    got = attend(problem, inputs, deterministic=True)
    check_problem(problem, inputs, got)
    for _ in range(10):
        same_result(attend(problem, inputs, deterministic=True), got)


def test_any_strides(problem):
    """What TMA can't reach is copied element by element."""
    inputs = make_inputs(problem, "cuda", DTYPES[0])
    wanted = attend(problem, inputs, deterministic=True)
    for names in (("q",), ("k",), ("v",), ("dout",), ("q", "k", "v", "dout")):
        odd = {name: wide_rows(getattr(inputs, name)) for name in names}
        same_result(attend(problem, inputs.replace(**odd), deterministic=True), wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("is_odd", [False, True], ids=["aligned", "odd strides"])
@pytest.mark.parametrize("is_late", [False, True], ids=["first block", "last block"])
def test_special_values_stay_with_those_who_see_them(problem, name, value, is_odd, is_late):
    inputs = make_inputs(problem, "cuda", DTYPES[0])
    wanted = attend(problem, inputs, deterministic=True)
    by_row = name in ("q", "dout")
    length = (problem.seqlens_q if by_row else problem.seqlens_k)[0]
    batch, at = 3, length - 3 if is_late else 61
    tensor = getattr(inputs, name).clone()
    tensor[batch, at, 0, 5] = value
    inputs = inputs.replace(**{name: tensor})
    if is_odd:
        inputs = inputs.replace(q=wide_rows(inputs.q), k=wide_rows(inputs.k))
    got = attend(problem, inputs, deterministic=True)

    heads = 1 if by_row else problem.heads // problem.heads_k
    affected = {key: torch.zeros_like(x, dtype=torch.bool) for key, x in got.items()}
    for key in ("dk", "dv"):
        affected[key][batch, :, 0] = True
    # A causal mask hides the key from the first rows.
    shift = problem.seqlens_k[0] - problem.seqlens_q[0]
    first_row = max(0, at - shift) if problem.causal else 0
    rows = slice(at, at + 1) if by_row else slice(first_row, None)
    affected["dq"][batch, rows, :heads] = True
    for key in ("dq", "dk", "dv"):
        untouched = ~affected[key]
        same_bits(key, getattr(got, key)[untouched], getattr(wanted, key)[untouched])
    if name in ("q", "k") and value != value:
        assert got.dq[batch, rows, :heads].isnan().all()
    if name == "k":  # dS K: a probability of 0 times Inf, if not NaN already
        assert got.dq[batch, rows, :heads, 5].isnan().all()
