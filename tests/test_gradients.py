"""What gets a gradient, through out and through lse, for which subset of the inputs."""

import itertools

import pytest
import torch
from cases import attend, call, expected, fixed, make_inputs, packed
from tolerance import check, same_bits

import flashattn

NAMES = ("q", "k", "v")
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(NAMES, n)]
PROBLEMS = [
    fixed(2, 90, 70, heads=4, heads_k=2, causal=True),
    packed((90, 20), (40, 130), heads=2, headdim=128),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("subset", SUBSETS, ids="".join)
def test_any_subset_of_the_inputs(subset, problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in subset}
    options = problem.options | {"deterministic": True, "return_lse": True}
    out, lse = call(inputs.replace(**leaves), **options)
    gradients = torch.autograd.grad((out, lse), [*leaves.values()], (inputs.dout, inputs.dlse))
    for name, gradient in zip(subset, gradients, strict=True):
        same_bits("d" + name, gradient, getattr(wanted, "d" + name))


def test_no_gradient_where_none_is_asked(device, dtype):
    inputs = make_inputs(PROBLEMS[0], device, dtype)
    assert not call(inputs).requires_grad
    with torch.no_grad():
        q = inputs.q.clone().requires_grad_()
        assert not call(inputs.replace(q=q)).requires_grad
    with torch.inference_mode():
        assert torch.equal(call(inputs), call(inputs))


def test_unneeded_work_is_skipped(device, dtype):
    """The op returns nothing for what is not needed."""
    problem = PROBLEMS[0]
    inputs = make_inputs(problem, device, dtype)
    out, lse = call(inputs, causal=True, return_lse=True)
    tensors = (inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse, None, None, None, None)
    rest = (64**-0.5, -1, 0, True)
    backward = torch.ops.flashattn.backward
    whole = backward(*tensors, *rest, True, True)
    dq, dk, dv = backward(*tensors, *rest, True, False)
    same_bits("dq", dq, whole[0])
    assert dk.shape == dv.shape == (0,)
    dq, dk, dv = backward(*tensors, *rest, False, True)
    assert dq.shape == (0,)
    same_bits("dk", dk, whole[1])
    same_bits("dv", dv, whole[2])


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_loss_of_lse_alone(problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    inputs.dout.zero_()
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    _, lse = call(inputs.replace(q=q, k=k, v=v), return_lse=True, **problem.options)
    dq, dk, dv = torch.autograd.grad(lse, (q, k, v), inputs.dlse, allow_unused=True)
    exact, eager = expected(problem, inputs), expected(problem, inputs, dtype)
    check("dq", dq, exact.dq, eager.dq)
    check("dk", dk, exact.dk, eager.dk)
    assert dv is None or (dv == 0).all()


def test_lse_gradient_of_empty_rows(device, dtype):
    """N = 100 causal with empty rows; their dlse, whatever it is, reaches nothing."""
    problem = fixed(1, 100, 60, causal=True)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    for filler in (0.0, 1e30, float("inf"), float("nan")):
        dlse, dout = inputs.dlse.clone(), inputs.dout.clone()
        dlse[..., :40] = filler
        dout[:, :40] = filler
        got = attend(problem, inputs.replace(dlse=dlse, dout=dout), deterministic=True)
        for name in ("dq", "dk", "dv"):
            same_bits(name, getattr(got, name), getattr(wanted, name))


def test_rows_without_part_in_the_loss(device, dtype):
    """The loss uses every other row only: dout holds exact zeros there."""
    problem = fixed(1, 64, causal=True)
    inputs = make_inputs(problem, device, dtype)
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = call(inputs.replace(q=q, k=k, v=v), **problem.options)
    out[:, ::2].float().square().sum().backward()
    assert (q.grad[:, 1::2] == 0).all()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_finite_differences(name, problem, device):
    """The backward belongs to this forward: a step along a random direction changes the loss by
    what the gradient says. No reference takes part."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    inputs = make_inputs(problem, device, dtype)
    gradient = getattr(attend(problem, inputs), "d" + name).double()
    start = getattr(inputs, name)
    direction = torch.randn_like(start)

    def loss(step):
        moved = inputs.replace(**{name: start + step * direction})
        result = attend(problem, moved, backward=False)
        lse = torch.where(result.lse.isinf(), 0, result.lse)
        weighed = (result.out.double() * inputs.dout.double()).sum()
        return weighed + (lse.double() * inputs.dlse.double()).sum()

    step = 2.0**-5
    slope = (loss(step) - loss(-step)) / (2 * step)
    changes = gradient * direction.double()
    assert (slope - changes.sum()).abs() < 0.05 * changes.square().sum().sqrt()


def test_gradients_accumulate(device, dtype):
    inputs = make_inputs(PROBLEMS[0], device, dtype)
    q = inputs.q.clone().requires_grad_()
    for _ in range(2):
        call(inputs.replace(q=q), deterministic=True).backward(inputs.dout)
    once = q.grad / 2
    (wanted,) = torch.autograd.grad(call(inputs.replace(q=q), deterministic=True), q, inputs.dout)
    same_bits("dq", once, wanted)


def test_the_same_tensor_thrice(device, dtype):
    """q, k and v are one tensor: its gradient is the sum of the three."""
    problem = fixed(1, 60)
    inputs = make_inputs(problem, device, dtype)
    inputs = inputs.replace(k=inputs.q, v=inputs.q)
    wanted = attend(problem, inputs, dlse=False)
    x = inputs.q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(flashattn.flash_attn_func(x, x, x), x, inputs.dout)
    total = wanted.dq.double() + wanted.dk.double() + wanted.dv.double()
    size = total.abs().max().item()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(gradient.double(), total, rtol=0, atol=4 * eps * size)


def test_return_values(device, dtype):
    """return_lse gives a pair, return_attn_probs flash-attn's triple."""
    inputs = make_inputs(fixed(1, 20), device, dtype)
    out = call(inputs)
    pair = call(inputs, return_lse=True)
    triple = call(inputs, return_attn_probs=True)
    assert isinstance(out, torch.Tensor)
    assert len(pair) == 2
    assert len(triple) == 3
    for result in (pair, triple):
        same_bits("out", result[0], out)
        same_bits("lse", result[1], pair[1])
