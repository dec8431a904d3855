"""The backward without `deterministic`: kernels may add dq's parts in any order. Everything else
has one order, and its bits; dq has its NaNs and, to some rounding steps, its values."""

import pytest
import torch
from cases import attend, fixed, make_inputs, outside_filled, packed
from tolerance import same_bits

import flashattn

NAN, INF = float("nan"), float("inf")
PROBLEMS = [
    fixed(2, 150, 200, causal=True, heads=4, heads_k=2, headdim=64),
    fixed(1, 260, 300, window=(100, 20), heads=2, headdim=128),
    fixed(1, 200, 330, causal=True, heads=4, heads_k=2, headdim=192, headdim_v=128),
    fixed(1, 150, 200, window=(60, 20), heads=2, headdim=256),
    packed((90, 200), (200, 150), causal=True, heads=4, heads_k=2, headdim=128),
    packed((90, 200), (200, 150), causal=True, heads=4, heads_k=2, headdim=256),
]
EACH_PROBLEM = pytest.mark.parametrize("problem", PROBLEMS, ids=str)


def close_dq(got, wanted):
    assert torch.equal(got.isnan(), wanted.isnan())
    finite = wanted.isfinite()
    got, wanted = got[finite].double(), wanted[finite].double()
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    step = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(got, wanted, rtol=2 * step, atol=1e-4 * largest)


def same_but_for_dq(got, wanted):
    for (name, x), (_, y) in zip(got.items(), wanted.items(), strict=True):
        close_dq(x, y) if name == "dq" else same_bits(name, x, y)


@EACH_PROBLEM
def test_repeats(problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs)
    for _ in range(3):
        same_but_for_dq(attend(problem, inputs), wanted)


@EACH_PROBLEM
def test_expanded_inputs(problem, device, dtype):
    """Strides of 0 are those of the kernel's copies too."""
    inputs = make_inputs(problem, device, dtype)
    expanded = {name: getattr(inputs, name)[..., :1, :] for name in ("k", "dout")}
    expanded = {name: x.expand_as(getattr(inputs, name)) for name, x in expanded.items()}
    copies = {name: x.contiguous() for name, x in expanded.items()}
    wanted = attend(problem, inputs.replace(**copies))
    same_but_for_dq(attend(problem, inputs.replace(**expanded)), wanted)


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (256, 256)], ids=str)
def test_poison_outside_every_sequence(dims, is_causal, poison, device, dtype):
    problem = packed(
        (150, 70),
        (100, 180),
        slots_q=(160, 90),
        slots_k=(130, 180),
        spare_q=9,
        spare_k=30,
        heads=4,
        heads_k=2,
        causal=is_causal,
        headdim=dims[0],
        headdim_v=dims[1],
    )
    inputs = make_inputs(problem, device, dtype)
    got, wanted = (
        attend(problem, outside_filled(problem, inputs, value)) for value in (poison, 0.0)
    )
    same_but_for_dq(got, wanted)


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@EACH_PROBLEM
def test_poison_reaches_those_who_see_it_alone(problem, name, device, dtype):
    """The first sequence and KV head have a NaN; the last head's results keep their bits."""
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs)
    tensor = getattr(inputs, name).clone()
    tensor.view(-1, *tensor.shape[-2:])[70, 0, 3] = NAN
    got = attend(problem, inputs.replace(**{name: tensor}))
    if name != "dout":
        assert got.out.isnan().any()
    for kind in ("out", "dk", "dv"):
        same_bits(kind, getattr(got, kind)[..., -1, :], getattr(wanted, kind)[..., -1, :])
    close_dq(got.dq[..., -1, :], wanted.dq[..., -1, :])


@pytest.mark.parametrize("problem", [x for x in PROBLEMS if not x.packed], ids=str)
@pytest.mark.parametrize("wanted_names", ["q", "kv", "k"])
def test_subsets_of_the_gradients(problem, wanted_names, device, dtype):
    inputs = make_inputs(problem, device, dtype)

    def gradients(names):
        leaves = {
            name: getattr(inputs, name).detach().clone().requires_grad_(name in names)
            for name in "qkv"
        }
        out = flashattn.flash_attn_func(
            *leaves.values(), causal=problem.causal, window_size=problem.window
        )
        asked = [leaves[name] for name in names]
        return dict(zip(names, torch.autograd.grad(out, asked, inputs.dout), strict=True))

    whole, part = gradients("qkv"), gradients(wanted_names)
    for name, gradient in part.items():
        if name == "q":
            close_dq(gradient, whole[name])
        else:
            same_bits("d" + name, gradient, whole[name])
