"""Scores that leave every comfortable range: rising, falling, spikes, huge ones. The forward keeps
its reference for the softmax where it can, and must notice where it cannot."""

import math

import pytest
import torch
from cases import attend, expected, fixed, make_inputs, packed
from tolerance import same_bits, same_nonfinite, same_result, score_noise

KINDS = ["rising", "falling", "spikes", "40"]
PROBLEMS = [
    fixed(1, 300, 1100, heads=2, headdim=64),
    fixed(1, 500, heads=2, headdim=64, causal=True),
    fixed(1, 400, 700, heads=2, heads_k=1, headdim=128, causal=True),
    fixed(1, 300, 600, heads=1, headdim=128, window=(200, 30)),
    fixed(1, 300, 500, heads=1, headdim=96),
    fixed(1, 200, 600, heads=1, headdim=192, headdim_v=128, causal=True),
    fixed(1, 200, 600, heads=1, headdim=256),
    packed((300, 40, 129), (500, 90, 129), heads=2, headdim=128, causal=True),
]


def of_kind(problem, kind):
    return type(problem)(**vars(problem) | {"values": kind})


def check_wild(problem, inputs, got):
    """Plain PyTorch in 16 bits is no measure here, it overflows. What fp32 scores err by changes P
    by that factor, and rounding P or the output is a step; no row is larger than v."""
    exact = expected(problem, inputs, backward=False)
    noise = 4 * score_noise(problem, inputs)
    allowed = (4 * torch.finfo(got.out.dtype).eps + noise) * float(inputs.v.abs().max())
    for name, bound in (("out", allowed), ("lse", max(1e-5, noise))):
        tensor, wanted = getattr(got, name), getattr(exact, name)
        same_nonfinite(name, tensor, wanted)
        finite = torch.isfinite(wanted)
        error = (tensor.double() - wanted)[finite].abs().max()
        assert error <= bound, f"{name}: max error {error:.3e}, allowed {bound:.3e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forward(problem, kind, device, dtype):
    problem = of_kind(problem, kind)
    inputs = make_inputs(problem, device, dtype)
    got = attend(problem, inputs, backward=False)
    check_wild(problem, inputs, got)
    same_result(attend(problem, inputs, backward=False), got)


@pytest.mark.parametrize("magnitude", [1e3, 1e6, 1e9])
def test_equal_scores_of_any_size(magnitude, device, dtype):
    """However large: equal scores are the mean of v."""
    if dtype == torch.float16 and magnitude > 1e3:
        pytest.skip("beyond float16")
    problem = fixed(1, 70, 400, headdim=64, values="equal")
    inputs = make_inputs(problem, device, dtype)
    for sign in (1, -1):
        q, k = inputs.q.abs() * magnitude, inputs.k.abs() * sign * magnitude
        out = attend(problem, inputs.replace(q=q, k=k), backward=False).out
        mean = inputs.v.double().mean(dim=1, keepdim=True).expand_as(out)
        torch.testing.assert_close(out.double(), mean, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("keys", [1, 100])  # 100: sums above the limit that no row's score is above
@pytest.mark.parametrize("octaves", [14.5, 15.5, 16.5, 39.5, 40.5])
def test_scores_at_the_edge_of_the_room(octaves, keys, device, dtype):
    """A reference of the keys that come first, the last ones, and scores above it by as much as a
    kernel may leave it, or a little more."""
    problem = fixed(1, 70, 400, heads=1, headdim=64)
    inputs = make_inputs(problem, device, dtype)
    q, k = torch.zeros_like(inputs.q), torch.zeros_like(inputs.k)
    q[..., 0] = 8  # by the scale, 1 / 8: a score is k[0]
    k[:, :keys, :, 0] = octaves * math.log(2)
    wild = inputs.replace(q=q, k=k)
    check_wild(problem, wild, attend(problem, wild, backward=False))


def test_wild_neighbours(device, dtype):
    """A packed sequence's bits do not depend on the scores of the one behind it."""
    problem = packed((70, 300), heads=2, headdim=128, causal=True)
    inputs = make_inputs(problem, device, dtype)
    wild = make_inputs(of_kind(problem, "spikes"), device, dtype)
    mixed = {}
    for name in ("q", "k", "v"):
        mixed[name] = torch.cat((getattr(inputs, name)[:70], 10 * getattr(wild, name)[70:]))
    wanted = attend(problem, inputs, backward=False)
    got = attend(problem, inputs.replace(**mixed), backward=False)
    same_bits("out", got.out[:70], wanted.out[:70])
    same_bits("lse", got.lse[:, :70], wanted.lse[:, :70])
