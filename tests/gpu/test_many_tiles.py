"""More tiles than SMs: they follow each other in a CTA, whose buffers and barriers go on."""

import pytest
import torch
from cases import attend, fixed, make_inputs, packed, wide_rows
from tolerance import check_problem, same_bits, same_result

DTYPES = [torch.bfloat16, torch.float16]
PROBLEMS = [
    fixed(12, 400, 300, heads=12, heads_k=4, headdim=64),  # 3 tiles a head, rotated
    fixed(12, 1000, heads=6, headdim=64, causal=True),  # 3 pairs a head, rotated
    fixed(9, 300, 210, heads=16, heads_k=2, headdim=128, causal=True),  # some see nothing
    fixed(9, 500, 400, heads=16, heads_k=4, headdim=128, window=(70, 0)),
    fixed(9, 300, 200, heads=16, heads_k=8, headdim=256, window=(40, 30)),  # one buffer of Q
]


def tiles_at_least(problem):
    return len(problem.seqlens_q) * problem.heads * -(-problem.seqlens_q[0] // 192)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward_and_backward(problem, dtype):
    sms = torch.cuda.get_device_properties().multi_processor_count
    assert tiles_at_least(problem) > 2 * sms, "not what this tests, on a GPU of so many SMs"
    inputs = make_inputs(problem, "cuda", dtype)
    check_problem(problem, inputs)
    got = attend(problem, inputs, backward=False)
    same_result(attend(problem, inputs, backward=False), got)


PACKED = packed((300, 65, 700, 200) * 4, heads=8, heads_k=4, headdim=128, causal=True)


@pytest.mark.parametrize("names", ["q", "k", "v", "dout", "q k v dout"])
@pytest.mark.parametrize("problem", [*PROBLEMS, PACKED], ids=str)
def test_odd_strides(problem, names):
    """Copied element by element: the same bits, but for dq, whose sums are in no order."""
    inputs = make_inputs(problem, "cuda", DTYPES[0])
    wanted = attend(problem, inputs)
    odd = inputs.replace(**{name: wide_rows(getattr(inputs, name)) for name in names.split()})
    got = attend(problem, odd)
    for name in ("out", "lse", "dk", "dv"):
        same_bits(name, getattr(got, name), getattr(wanted, name))
    check_problem(problem, odd, got)
