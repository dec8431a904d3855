"""Same values, same bits, whatever the strides. Deterministic backward: bits are compared."""

import pytest
import torch
from cases import attend, call, fixed, make_inputs, packed, wide_rows
from tolerance import check_problem, same_bits, same_result

import flashattn


def transposed_heads(x):
    """BHSD storage seen as BSHD."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def sliced_from_qkv(x):
    return torch.stack((x, x * 2, x * 3), dim=-3)[..., 0, :, :]


def every_second_row(x):
    doubled = torch.full((*x.shape[:-3], 2 * x.shape[-3], *x.shape[-2:]), 7.0).to(x)
    doubled[..., ::2, :, :] = x
    return doubled[..., ::2, :, :]


def odd_address(x):
    buffer = torch.empty(x.numel() + 1).to(x)
    buffer[1:] = x.flatten()
    return buffer[1:].view(x.shape)


def last_stride_two(x):
    return torch.stack((x, -x), dim=-1)[..., 0]


def headdim_first(x):
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def reversed_storage(x):
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


LAYOUTS = [
    transposed_heads,
    sliced_from_qkv,
    every_second_row,
    wide_rows,
    odd_address,
    last_stride_two,
    headdim_first,
    reversed_storage,
]
PROBLEMS = [
    fixed(2, 100, 70, heads=4, heads_k=2, headdim=64, causal=True),
    fixed(1, 66, headdim=256, heads=2),
    fixed(2, 40, headdim=33, headdim_v=7),
    fixed(1, 50, headdim=192, headdim_v=128),
    packed((40, 70), (90, 33), heads=4, heads_k=1, headdim=128),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_strides(layout, problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    names = ("q", "k", "v", "dout")
    strided = {name: layout(getattr(inputs, name)) for name in names}
    for changed in (*names, "all"):
        some = strided if changed == "all" else {changed: strided[changed]}
        for name, x in some.items():
            assert torch.equal(x, getattr(inputs, name))
        got = attend(problem, inputs.replace(**some), deterministic=True)
        same_result(got, wanted)


def test_expanded_inputs(device, dtype):
    """Stride 0: one key head for all, one value row for all, dout from a sum()."""
    problem = fixed(2, 80, heads=4)
    inputs = make_inputs(problem, device, dtype)
    expanded = {
        "q": inputs.q[:1].expand_as(inputs.q),
        "k": inputs.k[:, :, :1].expand_as(inputs.k),
        "v": inputs.v[:, :1].expand_as(inputs.v),
        "dout": inputs.dout[:1, :1, :1, :1].expand_as(inputs.dout),
    }
    copies = {name: x.contiguous() for name, x in expanded.items()}
    wanted = attend(problem, inputs.replace(**copies), deterministic=True)
    same_result(attend(problem, inputs.replace(**expanded), deterministic=True), wanted)


def test_gradient_of_a_sum(device, dtype):
    q, k, v = (torch.randn(2, 32, 4, 64).to(device, dtype).requires_grad_() for _ in range(3))
    out = flashattn.flash_attn_func(q, k, v, deterministic=True)
    by_sum = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    by_ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for got, wanted in zip(by_sum, by_ones, strict=True):
        same_bits("gradient", got, wanted)


def test_strides_of_size_one_mean_nothing(device, dtype):
    problem = fixed(1, 1, 5, heads=1)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    odd = inputs.replace(
        q=torch.as_strided(inputs.q, inputs.q.shape, (999_999_937, 1 << 40, 13, 1)),
        k=torch.as_strided(inputs.k, inputs.k.shape, (3, 64, 1 << 33, 1)),
        dout=torch.as_strided(inputs.dout, inputs.dout.shape, (1, 7, 3, 1)),
    )
    same_result(attend(problem, odd, deterministic=True), wanted)
    # headdim 1: the last stride means nothing either.
    problem = fixed(2, 3, headdim=1)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    q = torch.as_strided(inputs.q, inputs.q.shape, (*inputs.q.stride()[:3], 17))
    same_result(attend(problem, inputs.replace(q=q), deterministic=True), wanted)


def test_gradients_of_a_slice(device, dtype):
    """k is a slice of a longer buffer: gradients outside of it are exactly zero."""
    problem = fixed(1, 100, 90)
    inputs = make_inputs(problem, device, dtype)
    longer = torch.randn(1, 218, 2, 64).to(device, dtype)
    longer[:, :90] = inputs.k
    longer.requires_grad_()
    out, lse = call(inputs.replace(k=longer[:, :90]), return_lse=True)
    torch.autograd.backward((out, lse), (inputs.dout, inputs.dlse))
    assert (longer.grad[:, 90:] == 0).all()
    got = attend(problem, inputs)
    got.dk = longer.grad[:, :90]
    check_problem(problem, inputs, got)


def test_packed_inputs_and_their_parts(device, dtype):
    """qkv and kv in one tensor: the same bits as three, and a gradient in one piece."""
    problem = fixed(2, 50, heads=4)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, dlse=False, deterministic=True)
    qkv = torch.stack((inputs.q, inputs.k, inputs.v), dim=2).requires_grad_()
    out, lse = flashattn.flash_attn_qkvpacked_func(qkv, deterministic=True, return_lse=True)
    (gradient,) = torch.autograd.grad(out, qkv, inputs.dout)
    same_bits("out", out, wanted.out)
    same_bits("lse", lse, wanted.lse)
    for got, gradient_of_part in zip(
        gradient.unbind(2), (wanted.dq, wanted.dk, wanted.dv), strict=True
    ):
        same_bits("dqkv", got, gradient_of_part)

    kv = torch.stack((inputs.k, inputs.v), dim=2).requires_grad_()
    out = flashattn.flash_attn_kvpacked_func(inputs.q, kv, deterministic=True)
    (gradient,) = torch.autograd.grad(out, kv, inputs.dout)
    same_bits("out", out, wanted.out)
    for got, gradient_of_part in zip(gradient.unbind(2), (wanted.dk, wanted.dv), strict=True):
        same_bits("dkv", got, gradient_of_part)


def test_varlen_packed_inputs_and_their_parts(device, dtype):
    problem = packed((30, 70), heads=4, causal=True)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, backward=False)
    cu = inputs.cu_seqlens_q
    qkv = torch.stack((inputs.q, inputs.k, inputs.v), dim=1)
    out, lse = flashattn.flash_attn_varlen_qkvpacked_func(qkv, cu, 70, causal=True, return_lse=True)
    same_bits("out", out, wanted.out)
    same_bits("lse", lse, wanted.lse)
    kv = torch.stack((inputs.k, inputs.v), dim=1)
    out = flashattn.flash_attn_varlen_kvpacked_func(inputs.q, kv, cu, cu, causal=True)
    same_bits("out", out, wanted.out)


CPU_EVENTS = [torch.profiler.ProfilerActivity.CPU]


def copies(run):
    with torch.profiler.profile(activities=CPU_EVENTS, acc_events=True) as profile:
        run()
    return sum(e.count for e in profile.key_averages() if e.key in ("aten::copy_", "aten::clone"))


def test_only_a_last_stride_costs_a_copy(device, dtype):
    problem = fixed(2, 64)
    inputs = make_inputs(problem, device, dtype)
    for layout in (transposed_heads, sliced_from_qkv, every_second_row, wide_rows, odd_address):
        strided = {name: layout(getattr(inputs, name)) for name in ("q", "k", "v")}
        some = inputs.replace(**strided)
        assert copies(lambda some=some: call(some)) == 0, layout.__name__
    some = inputs.replace(k=last_stride_two(inputs.k))
    assert 1 <= copies(lambda: call(some)) <= 2  # a clone is one copy, counted under both names
