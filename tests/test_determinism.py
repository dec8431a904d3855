"""Run to run: the forward always, the backward when asked, bit for bit."""

import pytest
import torch
from cases import attend, call, fixed, make_inputs, packed
from tolerance import same_bits, same_result

PROBLEMS = [
    fixed(2, 256, heads=4, headdim=64),
    fixed(2, 192, heads=8, heads_k=1, headdim=128, causal=True),
    fixed(1, 260, heads=4, heads_k=2, headdim=192, headdim_v=128, causal=True),
    fixed(1, 200, heads=2, headdim=256, window=(50, 20)),
    packed((130, 1, 260, 40), heads=4, heads_k=2, headdim=96, causal=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_repeated(problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    for _ in range(30 if device == "cuda" else 3):
        same_result(attend(problem, inputs, deterministic=True), wanted)


@pytest.mark.parametrize("problem", PROBLEMS[:1] + PROBLEMS[-1:], ids=str)
def test_forward_repeats_unasked(problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, backward=False)
    for _ in range(10):
        same_result(attend(problem, inputs, backward=False), wanted)


def test_forward_is_the_same_with_and_without_grad(device, dtype):
    problem = PROBLEMS[1]
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, backward=False)
    got = attend(problem, inputs, backward=True)
    same_bits("out", got.out, wanted.out)
    same_bits("lse", got.lse, wanted.lse)


def test_torch_asks_for_determinism(device, dtype):
    """torch.use_deterministic_algorithms(True) is deterministic=True."""
    problem = PROBLEMS[1]
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, dlse=False, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(10):
            q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
            out = call(inputs.replace(q=q, k=k, v=v), **problem.options)
            gradients = torch.autograd.grad(out, (q, k, v), inputs.dout)
            for got, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
                same_bits(name, got, getattr(wanted, name))
    finally:
        torch.use_deterministic_algorithms(False)


def test_batch_neighbours_do_not_matter(device, dtype):
    """A sequence's results have the same bits whatever else is in the batch (gradients: where the
    plan stays the same)."""
    problem = fixed(3, 100, heads=2, causal=True)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    one = slice(1, 2)
    parts = {name: getattr(inputs, name)[one] for name in ("q", "k", "v", "dout", "dlse")}
    got = attend(fixed(1, 100, heads=2, causal=True), inputs.replace(**parts), deterministic=True)
    for (name, x), (_, y) in zip(got.items(), wanted.items(), strict=True):
        same_bits(name, x, y[one])


@pytest.mark.cpu
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_threads(threads):
    """CPU: which thread does what changes no bit. How many there are changes dq's alone: each of
    them sums it over key blocks of its own."""
    problem = fixed(1, 700, heads=1)
    inputs = make_inputs(problem, "cpu", torch.float32)
    anyhow = attend(problem, inputs, deterministic=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wanted = attend(problem, inputs, deterministic=True)
        for _ in range(5):
            same_result(attend(problem, inputs, deterministic=True), wanted)
    finally:
        torch.set_num_threads(before)
    for name in ("out", "lse", "dk", "dv"):
        same_bits(name, getattr(wanted, name), getattr(anyhow, name))
