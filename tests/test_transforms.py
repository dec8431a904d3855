"""torch.func: grad, vmap, jvp; and derivatives of derivatives, which are refused clearly."""

import pytest
import torch
from cases import fixed, make_inputs, packed
from tolerance import same_bits

import flashattn


def attention(q, k, v):
    return flashattn.flash_attn_func(q, k, v, causal=True, deterministic=True)


def loss(q, k, v):
    return (attention(q, k, v).float() ** 2).sum()


def reverse_mode(q, k, v):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(loss(*leaves), leaves)


@pytest.fixture
def qkv(device, dtype):
    inputs = make_inputs(fixed(3, 40, 50, heads=4, heads_k=2), device, dtype)
    return inputs.q, inputs.k, inputs.v


def test_grad(qkv):
    for got, wanted in zip(
        torch.func.grad(loss, argnums=(0, 1, 2))(*qkv), reverse_mode(*qkv), strict=True
    ):
        same_bits("gradient", got, wanted)


def test_grad_of_one_argument(qkv):
    same_bits("dk", torch.func.grad(loss, argnums=1)(*qkv), reverse_mode(*qkv)[1])


def test_vjp(qkv):
    out, pull = torch.func.vjp(attention, *qkv)
    wanted = attention(*qkv)
    same_bits("out", out, wanted)
    leaves = [x.detach().requires_grad_() for x in qkv]
    expected = torch.autograd.grad(attention(*leaves), leaves, torch.ones_like(wanted))
    for got, gradient in zip(pull(torch.ones_like(out)), expected, strict=True):
        same_bits("gradient", got, gradient)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, 0), (None, 0, 2)], ids=str)
def test_vmap(in_dims, device, dtype):
    single = make_inputs(fixed(2, 20, 30, heads=2), device, dtype)
    mapped = []
    for x, dim in zip((single.q, single.k, single.v), in_dims, strict=True):
        mapped.append(x if dim is None else torch.stack([x, x * 2, x * 0.5], dim=dim))
    got = torch.func.vmap(attention, in_dims=in_dims)(*mapped)

    def element(x, dim, index):
        return x if dim is None else x.select(dim, index)

    for index in range(3):
        parts = [element(x, dim, index) for x, dim in zip(mapped, in_dims, strict=True)]
        same_bits("out", got[index], attention(*parts))


def test_vmap_of_grad(device, dtype):
    """Per-sample gradients."""
    inputs = make_inputs(fixed(3, 20, 30, heads=2), device, dtype)
    q, k, v = (x.unsqueeze(1) for x in (inputs.q, inputs.k, inputs.v))  # samples of batch 1
    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for index in range(3):
        for x, y in zip(got, reverse_mode(q[index], k[index], v[index]), strict=True):
            same_bits("gradient", x[index], y)


def test_grad_of_vmap(qkv):
    def total(q, k, v):
        return (torch.func.vmap(attention)(q, k, v).float() ** 2).sum()

    batched = [x.unsqueeze(1) for x in qkv]
    got = torch.func.grad(total, argnums=(0, 1, 2))(*batched)
    for x, y in zip(got, reverse_mode(*qkv), strict=True):
        same_bits("gradient", x.squeeze(1), y)


def test_vmap_of_packed(device, dtype):
    inputs = make_inputs(packed((20, 30)), device, dtype)

    def run(q):
        return flashattn.flash_attn_varlen_func(
            q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k
        )

    mapped = torch.stack([inputs.q, inputs.q * 2])
    got = torch.func.vmap(run)(mapped)
    for x, q in zip(got, mapped, strict=True):
        same_bits("out", x, run(q))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp's own
def test_forward_mode_is_refused(qkv):
    tangents = tuple(map(torch.ones_like, qkv))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(attention, qkv, tangents)


def test_second_order_is_refused(qkv):
    """At the first create_graph, not later and not with a wrong number."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(loss(*leaves), leaves, create_graph=True)


def test_second_order_by_transforms_is_refused(qkv):
    def squared_gradient(q, k, v):
        return (torch.func.grad(loss)(q, k, v).float() ** 2).sum()

    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(squared_gradient)(*qkv)
