"""What is refused, with which exception, and that the message names the argument."""

import pytest
import torch
from cases import call, fixed, make_inputs, packed

import flashattn


@pytest.fixture
def inputs(device):
    return make_inputs(fixed(2, 20, 30, heads=4, heads_k=2), device, torch.float16)


@pytest.fixture
def pieces(device):
    return make_inputs(packed((20, 30), heads=4, heads_k=2), device, torch.float16)


def raises(kind, *words):
    """Every word is in the message."""
    return pytest.raises(kind, match="".join(f"(?=.*{word})" for word in words))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_not_a_tensor(name, inputs, pieces):
    for some in (inputs, pieces):
        for bad in (None, [[1.0]], 3):
            with raises(TypeError, rf"\b{name}\b"):
                call(some.replace(**{name: bad}))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_wrong_dtype(name, inputs, pieces):
    for some in (inputs, pieces):
        for dtype in (torch.float64, torch.int32, torch.bool, torch.complex64):
            bad = getattr(some, name).to(dtype)
            with raises(TypeError, rf"\b{name}\b", str(dtype).removeprefix("torch.")):
                call(some.replace(**{name: bad}))


def test_mixed_dtypes(inputs, pieces):
    for some in (inputs, pieces):
        for name in ("k", "v"):
            bad = getattr(some, name).bfloat16()
            with raises(TypeError, rf"\b{name}\b", "bfloat16", "float16"):
                call(some.replace(**{name: bad}))


def changed(x, **shape):
    """x's dtype and device in another shape: dimension -> size."""
    sizes = list(x.shape)
    for dim, size in shape.items():
        sizes[int(dim.removeprefix("d"))] = size
    return x.new_zeros(sizes)


def test_wrong_shapes(inputs):
    q, k, v = inputs.q, inputs.k, inputs.v
    for name, bad in (
        ("q", q[0]),
        ("k", k[0]),
        ("v", v[0]),
        ("q", q[None]),
        ("k", changed(k, d0=3)),
        ("v", changed(v, d0=3)),
        ("v", changed(v, d1=31)),
        ("v", changed(v, d2=4)),
        ("k", changed(k, d3=63)),
        ("q", changed(q, d3=0)),
        ("v", changed(v, d3=0)),
        ("v", changed(v, d3=257)),
    ):
        with raises(ValueError, rf"\b{name}\b"):
            call(inputs.replace(**{name: bad}))
    with raises(ValueError, "257|256"):
        call(inputs.replace(q=changed(q, d3=257), k=changed(k, d3=257)))


def test_wrong_shapes_packed(pieces):
    q, k, v = pieces.q, pieces.k, pieces.v
    for name, bad in (
        ("q", q[0]),
        ("k", k[None]),
        ("v", changed(v, d0=51)),
        ("v", changed(v, d1=4)),
        ("k", changed(k, d2=40)),
    ):
        with raises(ValueError, rf"\b{name}\b"):
            call(pieces.replace(**{name: bad}))


@pytest.mark.parametrize("heads", [(7, 2), (2, 4), (9, 7), (4, 0), (3, 2)], ids=str)
def test_heads_that_do_not_divide(heads, device):
    heads, heads_k = heads
    q = torch.zeros(7, 9, heads, 7, device=device, dtype=torch.float16)
    k = torch.zeros(7, 7, heads_k, 7, device=device, dtype=torch.float16)
    with raises(ValueError, "head", str(heads_k)):
        flashattn.flash_attn_func(q, k, k)
    with raises(ValueError, "head"):
        cu_seqlens = torch.tensor([0, 7], dtype=torch.int32, device=device)
        flashattn.flash_attn_varlen_func(q[0], k[0], k[0], cu_seqlens, cu_seqlens)


@pytest.mark.parametrize("name", ["k", "v"])
def test_other_device(name, inputs):
    with raises(ValueError, rf"\b{name}\b", "meta"):
        call(inputs.replace(**{name: getattr(inputs, name).to("meta")}))


@pytest.mark.parametrize(
    "window", [(-8, 0), (-1, -3), (0, -2), (-(2**40), 0), (3,), (1, 2, 3), 5], ids=str
)
def test_bad_window(window, inputs, pieces):
    for some in (inputs, pieces):
        for is_causal in (False, True):
            with raises(ValueError, "window_size"):
                call(some, window_size=window, causal=is_causal)


def test_window_of_fractions(inputs):
    with raises(TypeError, "window_size"):
        call(inputs, window_size=(1.5, 0))


@pytest.mark.parametrize("dropout_p", [-0.1, 1.0, 1.5, float("nan")])
def test_bad_dropout(dropout_p, inputs, pieces):
    for some in (inputs, pieces):
        with raises(ValueError, "dropout_p"):
            call(some, dropout_p=dropout_p)


def test_bad_numbers(inputs, pieces):
    with raises(TypeError, "softmax_scale"):
        call(inputs, softmax_scale=torch.tensor(1.0))
    for name in ("softmax_scale", "dropout_p", "softcap"):
        for value in ("1", 1 + 0j, float):
            with raises(TypeError, name):
                call(inputs, **{name: value})
    with raises(ValueError, "softcap"):
        call(inputs, softcap=-1.0)
    with raises(ValueError, "softcap"):
        call(inputs, softcap=float("nan"))
    with raises(TypeError, "max_seqlen_q"):
        call(pieces, max_seqlen_q="many")


def later_options(device):
    return {
        "dropout_p": 0.1,
        "softcap": 30.0,
        "alibi_slopes": torch.ones(4, device=device),
        "learnable_sink": torch.ones(4, device=device),
        "attn_mask": torch.ones(20, 30, dtype=torch.bool, device=device),
        "block_table": torch.zeros(2, 4, dtype=torch.int32, device=device),
    }


def test_options_without_a_kernel(inputs, pieces, device):
    """Named, before anything runs: never ignored."""
    for name, value in later_options(device).items():
        for some in (inputs, pieces):
            is_packed = some is pieces
            if name == ("attn_mask" if is_packed else "block_table"):
                continue
            with raises(NotImplementedError, name):
                call(some, **{name: value})


def test_options_without_a_kernel_in_stacked_functions(inputs, pieces, device):
    qkv = torch.zeros(2, 20, 3, 4, 16, device=device, dtype=torch.float16)
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32, device=device)
    options = later_options(device)
    del options["block_table"]
    for name, value in options.items():
        with raises(NotImplementedError, name):
            flashattn.flash_attn_qkvpacked_func(qkv, **{name: value})
        with raises(NotImplementedError, name):
            flashattn.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, :2], **{name: value})
        if name == "attn_mask":
            continue
        with raises(NotImplementedError, name):
            flashattn.flash_attn_varlen_qkvpacked_func(qkv[0], cu_seqlens, **{name: value})
        with raises(NotImplementedError, name):
            flashattn.flash_attn_varlen_kvpacked_func(
                qkv[0, :, 0], qkv[0, :, :2], cu_seqlens, cu_seqlens, **{name: value}
            )


def test_functions_of_later_versions(device):
    x = torch.zeros(1, 4, 2, 16, device=device, dtype=torch.float16)
    with raises(NotImplementedError, "flash_attn_with_kvcache"):
        flashattn.flash_attn_with_kvcache(x, x, x)
    with raises(NotImplementedError, "flash_attn_combine"):
        flashattn.flash_attn_combine(x.float(), x[..., 0].float())


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_bad_cu_seqlens(name, pieces):
    good = getattr(pieces, name)
    for kind, bad in (
        (TypeError, None),
        (TypeError, [0, 20, 50]),
        (TypeError, good.long()),
        (TypeError, good.float()),
        (ValueError, good[:-1]),
        (ValueError, good[:0]),
        (ValueError, good[None]),
        (ValueError, good.to("meta")),
    ):
        offsets = {"cu_seqlens_q": good, "cu_seqlens_k": good, name: bad}
        with raises(kind, name):
            flashattn.flash_attn_varlen_func(pieces.q, pieces.k, pieces.v, **offsets)


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
def test_bad_seqused(name, pieces, device):
    good = torch.tensor([3, 4], dtype=torch.int32, device=device)
    call(pieces.replace(**{name: good}))
    for kind, bad in (
        (TypeError, [3, 4]),
        (TypeError, good.long()),
        (ValueError, good[:1]),
        (ValueError, good[None]),
        (ValueError, good.to("meta")),
    ):
        with raises(kind, name):
            call(pieces.replace(**{name: bad}))


def test_bad_stacked(device):
    x = torch.zeros(2, 20, 3, 4, 16, device=device, dtype=torch.float16)
    cu_seqlens = torch.tensor([0, 20], dtype=torch.int32, device=device)
    with raises(ValueError, "qkv"):
        flashattn.flash_attn_qkvpacked_func(x[:, :, :2])
    with raises(ValueError, r"\bkv"):
        flashattn.flash_attn_kvpacked_func(x[:, :, 0], x)
    with raises(TypeError, "qkv"):
        flashattn.flash_attn_qkvpacked_func(None)
    with raises(ValueError, "qkv"):
        flashattn.flash_attn_varlen_qkvpacked_func(x, cu_seqlens)
    with raises(ValueError, r"\bkv"):
        flashattn.flash_attn_varlen_kvpacked_func(x[0, :, 0], x[0], cu_seqlens, cu_seqlens)


def test_strided_integers_are_read_by_their_strides(pieces, device):
    wide = torch.zeros(3, 2, dtype=torch.int32, device=device)
    wide[:, 0] = pieces.cu_seqlens_q
    wide[:, 1] = -1
    got = call(pieces.replace(cu_seqlens_q=wide[:, 0], cu_seqlens_k=wide[:, 0]))
    assert torch.equal(got, call(pieces))


def test_refused_before_anything_runs(inputs):
    """The op itself is never reached."""
    events = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=events, acc_events=True) as profile:
        with pytest.raises(NotImplementedError):
            call(inputs, softcap=1.0)
        call(inputs)
    assert sum(e.count for e in profile.key_averages() if e.key == "flashattn::forward") == 1


def test_the_op_guards_memory_itself(inputs):
    """torch.ops.flashattn may be called without the checks of the Python functions."""
    forward = torch.ops.flashattn.forward
    rest = (None, None, None, None, 1.0, -1, -1)
    q, k, v = inputs.q, inputs.k, inputs.v
    for bad in (
        (q, k[:, :-1], v),
        (q, k[..., :-1], v),
        (q[0], k, v),
        (q, k.float(), v),
        (q[:1], k, v),
        (q[:, :, :3], k, v),
    ):
        with pytest.raises(RuntimeError):
            forward(*bad, *rest)


def test_the_backward_op_guards_memory_itself(inputs, pieces, device):
    backward = torch.ops.flashattn.backward
    for some, causal in ((inputs, False), (pieces, True)):
        out, lse = call(some, causal=causal, return_lse=True)
        lengths = (some.cu_seqlens_q, some.cu_seqlens_k, None, None)
        rest = (1.0, -1, -1, True, True, True)
        good = {"dout": some.dout, "dlse": some.dlse, "q": some.q, "k": some.k, "v": some.v}
        good |= {"out": out, "lse": lse}
        backward(*good.values(), *lengths, *rest)
        for name, tensor in good.items():
            shorter = tensor[..., :-1] if name in ("lse", "dlse") else tensor[..., :-1, :, :]
            for bad in (shorter, tensor[..., :0], tensor.double(), tensor[None]):
                with pytest.raises(RuntimeError):
                    backward(*(good | {name: bad}).values(), *lengths, *rest)
        if some is pieces:
            for bad in (lengths[0][:-1], lengths[0].long(), lengths[0][None], None):
                with pytest.raises(RuntimeError):
                    backward(*good.values(), bad, *lengths[1:], *rest)
                with pytest.raises(RuntimeError):
                    backward(*good.values(), lengths[0], bad, *lengths[2:], *rest)
