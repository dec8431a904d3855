"""Streams, CUDA graphs, and that nothing waits for the device."""

import threading
import warnings

import pytest
import torch
from cases import attend, call, fixed, make_inputs, packed
from tolerance import check_problem, same_bits

import flashattn
from flashattn import _checks

DTYPE = torch.bfloat16
PROBLEMS = [
    fixed(2, 200, heads=4, heads_k=2, headdim=128, causal=True),
    packed((100, 0, 150), heads=4, heads_k=2, headdim=64, causal=True),  # an empty sequence
]


def step(inputs, **options):
    """Forward and backward into tensors that a graph can keep."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    q, k, v = leaves
    out, lse = call(inputs.replace(q=q, k=k, v=v), return_lse=True, **options)
    gradients = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    return out.detach(), lse.detach(), *gradients


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_graph_replayed_with_new_data(problem):
    """Captured once, forward and backward; replayed with other values, and other lengths too."""
    inputs = make_inputs(problem, "cuda", DTYPE)
    options = problem.options | {"deterministic": True}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(inputs, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(inputs, **options)

    for seed in (1, 2):
        new = make_inputs(problem, "cuda", DTYPE, seed)
        if problem.packed:
            lengths = torch.tensor([0, 30 * seed, 90, 250], dtype=torch.int32)
            new = new.replace(cu_seqlens_q=lengths.cuda(), cu_seqlens_k=lengths.cuda())
        for name, tensor in vars(inputs).items():
            if tensor is not None:
                tensor.copy_(getattr(new, name))
        graph.replay()
        for got, wanted in zip(results, step(new, **options), strict=True):
            same_bits("replayed", got, wanted)


def test_graph_with_hostile_lengths():
    """Offsets that turn bad between replays: defined results, and the next good replay is right."""
    problem = PROBLEMS[1]
    inputs = make_inputs(problem, "cuda", DTYPE)
    wanted = step(inputs, **problem.options, deterministic=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(inputs, **problem.options, deterministic=True)
    good = inputs.cu_seqlens_k.clone()
    for bad in ([0, 10**9, -5, 250], [250, 0, 250, 0], [-(2**31), 2**31 - 1, 3, 7]):
        inputs.cu_seqlens_k.copy_(torch.tensor(bad, dtype=torch.int32))
        graph.replay()
        for x in results:
            assert not x.isnan().any()
    inputs.cu_seqlens_k.copy_(good)
    graph.replay()
    for got, right in zip(results, wanted, strict=True):
        same_bits("replayed", got, right)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_current_stream(problem):
    """Launched behind the work of the current stream, not behind the default one's."""
    inputs = make_inputs(problem, "cuda", DTYPE)
    wanted = attend(problem, inputs, deterministic=True)
    late = inputs.replace(q=torch.zeros_like(inputs.q), dout=torch.zeros_like(inputs.dout))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(late, **problem.options, deterministic=True)  # fills this stream's pool of memory
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)  # some 30 ms in which the inputs are not there yet
        late.q.copy_(inputs.q)
        late.dout.copy_(inputs.dout)
        out, lse, *gradients = step(late, **problem.options, deterministic=True)
        assert not stream.query(), "the call waited for the device"
    stream.synchronize()
    same_bits("out", out, wanted.out)
    same_bits("lse", lse, wanted.lse)
    for got, name in zip(gradients, ("dq", "dk", "dv"), strict=True):
        same_bits(name, got, getattr(wanted, name))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_no_synchronisation(problem):
    inputs = make_inputs(problem, "cuda", DTYPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step(inputs, **problem.options)
        step(inputs, **problem.options, deterministic=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_from_another_thread():
    problem = PROBLEMS[0]
    inputs = make_inputs(problem, "cuda", DTYPE)
    wanted = attend(problem, inputs, deterministic=True)
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(step(inputs, **problem.options, deterministic=True))
    )
    thread.start()
    thread.join()
    same_bits("out", results[0], wanted.out)
    same_bits("dq", results[2], wanted.dq)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_other_device_than_the_current_one(problem):
    inputs = make_inputs(problem, "cuda:1", DTYPE)
    assert torch.cuda.current_device() == 0
    check_problem(problem, inputs)
    assert torch.cuda.current_device() == 0
    thread = threading.Thread(target=check_problem, args=(problem, inputs))
    thread.start()
    thread.join()


@pytest.mark.multi_gpu
def test_tensors_on_two_devices():
    q, k = (torch.zeros(1, 4, 2, 64, device=f"cuda:{i}", dtype=DTYPE) for i in (0, 1))
    with pytest.raises(ValueError, match=r"cuda:0.*cuda:1"):
        flashattn.flash_attn_func(q, k, k)


def test_float32_is_refused_with_the_way_out():
    x = torch.zeros(1, 4, 2, 64, device="cuda")
    with pytest.raises(NotImplementedError, match=r"float32.*bfloat16"):
        flashattn.flash_attn_func(x, x, x)


def test_tensors_on_cpu_and_gpu():
    q = torch.zeros(1, 4, 2, 64, device="cuda", dtype=DTYPE)
    with pytest.raises(ValueError, match=r"k.*cuda:0.*cpu"):
        flashattn.flash_attn_func(q, q.cpu(), q.cpu())


def test_busy_gpu_determinism():
    """Other work beside it changes the order in which blocks run, and no bit."""
    problem = fixed(2, 700, heads=8, heads_k=2, headdim=64, causal=True)
    inputs = make_inputs(problem, "cuda", torch.float16)
    wanted = step(inputs, **problem.options, deterministic=True)
    noise = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(30):
        with torch.cuda.stream(side):
            noise @ noise
        for got, right in zip(
            step(inputs, **problem.options, deterministic=True), wanted, strict=True
        ):
            same_bits("repeated", got, right)
    torch.cuda.synchronize()


def test_a_gpu_that_the_build_is_not_for(monkeypatch):
    """The refusal names the GPU, what the build is for, and how to build for it."""
    x = torch.zeros(1, 4, 1, 64, dtype=DTYPE, device="cuda")
    _checks.gpu(x)
    monkeypatch.setattr(_checks._plan, "kernel_image_available", lambda archs, capability: False)
    major, minor = torch.cuda.get_device_capability()
    with pytest.raises(NotImplementedError, match=f"FLASHATTN_CUDA_ARCHS={major}{minor}"):
        _checks.gpu(x)
