"""The ops as torch sees them: schemas and fakes (opcheck), torch.compile, torch.export."""

import os
import shutil

import pytest
import torch
import torch._dynamo.testing
from cases import DTYPES, attend, call, fixed, make_inputs, packed
from tolerance import same_bits

import flashattn

# torch's compiler does what torch deprecates: it instantiates autograd.Function, it uses torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

PROBLEMS = [
    fixed(2, 30, 40, heads=4, heads_k=2, headdim=64, headdim_v=32),
    packed((30, 7), (12, 20), heads=2, slots_k=(14, 20)),
    fixed(2, 0, 5),
    packed((), ()),
]
# The fakes' strides are compared with the real ones: dv's must not follow v's.
STRIDED = fixed(2, 16, 20, heads=4, headdim=64)


def op_arguments(inputs, problem):
    lengths = (
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        inputs.seqused_q,
        inputs.seqused_k,
    )
    return (inputs.q, inputs.k, inputs.v), lengths, (problem.headdim**-0.5, -1, 0)


@pytest.mark.parametrize("problem", [*PROBLEMS, STRIDED], ids=str)
def test_opcheck(problem, device):
    inputs = make_inputs(problem, device, DTYPES[device][-1])
    if problem is STRIDED:
        inputs.v = inputs.v.transpose(1, 2).contiguous().transpose(1, 2)
        inputs.q = torch.stack((inputs.q, inputs.q), dim=-1)[..., 0]
    qkv, lengths, options = op_arguments(inputs, problem)
    forward, backward = torch.ops.flashattn.forward, torch.ops.flashattn.backward
    torch.library.opcheck(forward, (*qkv, *lengths, *options))
    out, lse = forward(*qkv, *lengths, *options)
    for dlse in (None, inputs.dlse):
        for need in ((True, True), (True, False), (False, True)):
            args = (inputs.dout, dlse, *qkv, out, lse, *lengths, *options, True, *need)
            torch.library.opcheck(backward, args)


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="torch.compile's default backend needs a C++ compiler",
)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def train(function, inputs):
    q, k, v = (x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = function(q, k, v)
    return out, lse, *torch.autograd.grad((out, lse), (q, k, v), (inputs.dout, inputs.dlse))


def causal_attention(q, k, v):
    return flashattn.flash_attn_func(q, k, v, causal=True, deterministic=True, return_lse=True)


def test_compiled_with_dynamic_lengths(fresh_compiler, device):
    """S = 128, 129, 300, forward and backward, no graph break, one graph for all."""
    compiled = torch.compile(causal_attention, fullgraph=True, dynamic=True, backend=fresh_compiler)
    dtype = DTYPES[device][-1]
    for seqlen in (128, 129, 300):
        inputs = make_inputs(fixed(1, seqlen, headdim=32), device, dtype)
        for got, wanted in zip(
            train(compiled, inputs), train(causal_attention, inputs), strict=True
        ):
            same_bits("result", got, wanted)
            assert got.stride() == wanted.stride()
    assert fresh_compiler.frame_count == 1


def test_compiled_learns_that_lengths_change(fresh_compiler, device):
    """Without dynamic=True: at most one recompilation."""
    compiled = torch.compile(causal_attention, fullgraph=True, backend=fresh_compiler)
    dtype = DTYPES[device][-1]
    for seqlen in (128, 129, 300, 77):
        inputs = make_inputs(fixed(1, seqlen, headdim=32), device, dtype)
        same_bits("out", train(compiled, inputs)[0], train(causal_attention, inputs)[0])
    assert fresh_compiler.frame_count <= 2


@pytest.mark.parametrize("hint", ["none", "int", "tensor"])
def test_compiled_varlen(fresh_compiler, hint, device):
    dtype = DTYPES[device][-1]

    def run(q, k, v, cu_seqlens_q, cu_seqlens_k, longest):
        return flashattn.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, longest, longest, causal=True, return_lse=True
        )

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=fresh_compiler)
    for lengths in ((60, 70), (128, 1, 5), (300, 2)):
        inputs = make_inputs(packed(lengths, headdim=32), device, dtype)
        longest = {"none": None, "int": max(lengths), "tensor": torch.tensor(max(lengths))}[hint]
        args = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k, longest)
        for got, wanted in zip(compiled(*args), run(*args), strict=True):
            same_bits("result", got, wanted)
    assert fresh_compiler.frame_count <= 2


def test_compiled_slice_of_a_longer_key(fresh_compiler, device):
    """Two runs; the gradient outside of the slice is exactly 0."""
    dtype = DTYPES[device][-1]

    def run(q, k, v):
        return flashattn.flash_attn_func(q, k[:, :-40], v, deterministic=True).float().sum()

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=fresh_compiler)
    for seqlen in (90, 130):
        inputs = make_inputs(fixed(1, 50, seqlen, headdim=32), device, dtype)
        longer = torch.randn(1, seqlen + 40, 2, 32).to(device, dtype)
        gradients = []
        for function in (compiled, run):
            leaf = longer.clone().requires_grad_()
            function(inputs.q, leaf, inputs.v).backward()
            gradients.append(leaf.grad)
        same_bits("dk", *gradients)
        assert (gradients[0][:, seqlen:] == 0).all()


@needs_compiler
def test_compiled_by_inductor(device):
    """The default backend, once: what users run."""
    torch._dynamo.reset()
    dtype = DTYPES[device][-1]

    def block(x, weight):
        qkv = (x @ weight).unflatten(-1, (3, 2, 32))
        out = flashattn.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)
        return out.flatten(-2).float().square().mean()

    x = torch.randn(2, 50, 64).to(device, dtype)
    weight = (torch.randn(64, 192) / 8).to(device, dtype)
    results = []
    for function in (torch.compile(block, fullgraph=True, dynamic=True), block):
        leaf = weight.clone().requires_grad_()
        loss = function(x, leaf)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=5e-2, atol=1e-3)
    torch._dynamo.reset()


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return flashattn.flash_attn_func(q, k, v, causal=True, window_size=(20, 0))


def test_export(device):
    dtype = DTYPES[device][-1]
    inputs = make_inputs(fixed(2, 64, headdim=32), device, dtype)
    seqlen = torch.export.Dim("seqlen", min=2, max=4096)
    shapes = {name: {1: seqlen} for name in "qkv"}
    program = torch.export.export(
        Attention(), (inputs.q, inputs.k, inputs.v), dynamic_shapes=shapes
    )
    assert "flashattn.forward" in str(program.graph)
    other = make_inputs(fixed(2, 150, headdim=32), device, dtype)
    args = (other.q, other.k, other.v)
    same_bits("out", program.module()(*args), Attention()(*args))


def test_fake_tensors_need_no_kernel(device):
    """Shapes, dtypes and strides of a step that would not fit any machine."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(64, 1 << 20, 128, 128, device=device, dtype=torch.float16)
        q.requires_grad_()
        out, lse = flashattn.flash_attn_func(q, q, q, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == (64, 128, 1 << 20)
        assert lse.dtype == torch.float32
        out.sum().backward()
        assert q.grad.shape == q.shape


def test_meta_tensors_are_refused_or_shaped(device):
    """The op itself gives shapes on the meta device."""
    q = torch.empty(2, 30, 4, 64, device="meta", dtype=torch.float16)
    out, lse = torch.ops.flashattn.forward(q, q, q, None, None, None, None, 0.125, -1, -1)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, 30)


def test_attend_helper_agrees_with_call(device, dtype):
    """The suite's own runner adds nothing."""
    problem = PROBLEMS[0]
    inputs = make_inputs(problem, device, dtype)
    same_bits("out", attend(problem, inputs, backward=False).out, call(inputs))
