"""Few and small problems that visit every branch of the kernels: what tools/sanitize.sh runs, where
each launch costs a hundred times what it does elsewhere."""

import pytest
import torch
from cases import attend, fixed, make_inputs, packed, wide_rows
from tolerance import check_problem

DTYPE = torch.bfloat16
PROBLEMS = [
    fixed(1, 130, 131, heads=4, heads_k=2, headdim=64, causal=True),
    fixed(1, 70, 140, headdim=33, headdim_v=65, window=(40, 10)),  # element-wise loads
    fixed(1, 140, 70, headdim=96),
    fixed(1, 130, headdim=128, causal=True),
    packed((65, 0, 3), (1, 64, 130), headdim=128, slots_q=(70, 2, 9), spare_k=5, heads_k=1),
    # Enough steps to use every buffer of the backward again.
    fixed(1, 150, 140, headdim=192, headdim_v=128, causal=True, heads=4, heads_k=2),
    fixed(1, 150, 130, headdim=192, heads=4, heads_k=2),
    packed((64, 70), (130, 70), headdim=256, causal=True, heads=4, heads_k=1),
    # More tiles than SMs; the deterministic backward of Hopper takes whole heads.
    fixed(17, 70, 260, heads=8, headdim=64, causal=True),
    fixed(17, 70, 140, heads=8, headdim=256, causal=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_sanitized_bf16(problem):
    inputs = make_inputs(problem, "cuda", DTYPE)
    check_problem(problem, inputs)
    check_problem(problem, inputs, attend(problem, inputs, deterministic=True))


@pytest.mark.parametrize("batch", [1, 70], ids=["few", "whole heads"])
@pytest.mark.parametrize("headdim", [64, 256])
def test_sanitized_bf16_special_values(headdim, batch):
    """NaN and Inf send tiles through the kernels' second way."""
    problem = fixed(batch, 140, headdim=headdim, causal=True)
    inputs = make_inputs(problem, "cuda", DTYPE)
    inputs.v[0, 100, 0, 3] = float("nan")
    inputs.q[0, 50, 1, 0] = float("inf")
    inputs.k[0, 120, 1, 0] = float("inf")
    if batch > 1:
        inputs = inputs.replace(k=wide_rows(inputs.k))
    got = attend(problem, inputs, deterministic=batch > 1)
    assert torch.isfinite(got.out[:, :50]).all()
    assert got.out[0, 120, 0].isnan().any()


@pytest.mark.parametrize("offsets", [(10, 500, -3), (40, 0, 40), (-(2**31), 2**31 - 1, 7)], ids=str)
def test_sanitized_bf16_hostile_lengths(offsets):
    problem = packed((20, 20), headdim=64)
    inputs = make_inputs(problem, "cuda", DTYPE)
    bad = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    inputs = inputs.replace(cu_seqlens_q=bad, cu_seqlens_k=bad.flip(0), seqused_k=bad[:2] * 3)
    for deterministic in (False, True):
        got = attend(problem, inputs, deterministic=deterministic)
        for name, tensor in got.items():
            assert not tensor.isnan().any(), name
