"""Head dims 1..256, grouped heads, empty tensors."""

import pytest
import torch
from cases import Problem, attend, fixed, make_inputs, packed
from tolerance import check_problem

import flashattn

INF = float("inf")

# Around every multiple of 8 that a tile or a vector load might end at, and odd ones between.
HEADDIMS = (
    *range(1, 10),
    *(15, 16, 17, 24, 31, 32, 33, 40, 47, 48, 56, 63, 64, 65, 71, 72, 73, 80, 88, 95, 96, 97),
    *(104, 111, 112, 120, 121, 127, 128, 129, 136, 143, 144, 160, 176, 191, 192, 193, 200, 208),
    *(224, 240, 247, 248, 255, 256),
)


def run(problem, device, dtype, any_rows=False):
    check_problem(problem, make_inputs(problem, device, dtype), any_rows=any_rows)


@pytest.mark.parametrize("part", range(4))
def test_every_headdim(part, device, dtype):
    for headdim in HEADDIMS[part::4]:
        run(fixed(1, 70, 90, headdim=headdim, causal=True), device, dtype)


@pytest.mark.parametrize("is_packed", [False, True], ids=["fixed", "packed"])
def test_headdims_that_differ(is_packed, device, dtype):
    pairs = [(192, 128), (128, 192), (64, 256), (256, 64), (1, 256), (256, 1), (72, 104), (33, 65)]
    pairs += [(96, 64), (64, 96), (5, 3), (130, 100), (100, 130), (200, 250)]
    for headdim, headdim_v in pairs:
        dims = {"headdim": headdim, "headdim_v": headdim_v, "heads": 4, "heads_k": 2}
        if is_packed:
            run(packed((50, 41), (40, 70), **dims), device, dtype)
        else:
            run(fixed(1, 50, 66, **dims), device, dtype)


@pytest.mark.parametrize("headdim", [72, 104])
@pytest.mark.parametrize("lengths", [(256,), (250, 262)], ids=["one", "two"])
def test_headdims_between_tiles_packed(headdim, lengths, device, dtype):
    """Columns and rows beyond a tile's edge belong to the next head or sequence."""
    run(packed(lengths, headdim=headdim, heads=3), device, dtype)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_latent_attention_shape(is_causal, device, dtype):
    run(fixed(1, 130, heads=4, headdim=192, headdim_v=128, causal=is_causal), device, dtype)
    run(packed((147,), heads=4, headdim=192, headdim_v=128, causal=is_causal), device, dtype)


@pytest.mark.parametrize("heads", [(16, 2), (6, 6), (7, 1), (12, 4), (9, 3)], ids=str)
def test_grouped_heads(heads, device, dtype):
    heads, heads_k = heads
    run(fixed(2, 60, heads=heads, heads_k=heads_k, headdim=32, causal=True), device, dtype)
    run(packed((30, 61), heads=heads, heads_k=heads_k, headdim=128), device, dtype)


def test_heads_read_their_own_group(device, dtype):
    """Query head h reads KV head h // (H // Hk): told apart by values."""
    q = torch.randn(1, 5, 6, 16, device=device).to(dtype)
    k = torch.randn(1, 9, 3, 16, device=device).to(dtype)
    v = torch.arange(3.0).view(1, 1, 3, 1).expand(1, 9, 3, 8).to(device, dtype)
    out = flashattn.flash_attn_func(q, k, v)
    wanted = torch.tensor([0.0, 0, 1, 1, 2, 2], device=device)
    torch.testing.assert_close(out[0, 0, :, 0].float(), wanted, rtol=0, atol=4e-3)


@pytest.mark.parametrize("seqlen", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 257])
def test_lengths_around_tiles(seqlen, device, dtype):
    for causal in (False, True):
        few = seqlen < 15
        run(fixed(1, seqlen, headdim=64, causal=causal, heads=1), device, dtype, few)
        run(fixed(1, seqlen, 131, headdim=128, causal=causal, heads=1), device, dtype, few)
        run(fixed(1, 131, seqlen, headdim=32, causal=causal, heads=1), device, dtype, few)


EMPTY = [
    fixed(0, 0, heads=10),  # batch 0: make_inputs gives 5 queries and 7 keys
    fixed(2, 0, 64, heads=4, heads_k=2),
    fixed(2, 0, 64, causal=True, headdim=128),
    fixed(2, 70, 0, heads=4, heads_k=2),
    fixed(2, 70, 0, causal=True, headdim=256),
    fixed(2, 70, 0, window=(3, 4), headdim_v=16),
    fixed(2, 0, 0),
    packed((0, 0), (0, 0)),
    packed((0, 0), (33, 70), heads=4, heads_k=2),
    packed((33, 70), (0, 0), causal=True),
    packed((), ()),
    packed((), (), spare_q=7, spare_k=9),
]


@pytest.mark.parametrize("problem", EMPTY, ids=lambda p: f"batch{len(p.seqlens_q)}-{p}")
def test_empty(problem, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    got = attend(problem, inputs)
    assert got.out.shape == inputs.dout.shape
    assert got.lse.shape == inputs.dlse.shape
    assert got.lse.dtype == torch.float32
    assert (got.out == 0).all()
    assert (got.lse == -INF).all()
    for name in ("q", "k", "v"):
        gradient = getattr(got, "d" + name)
        assert gradient.shape == getattr(inputs, name).shape
        assert gradient.dtype == dtype
        assert (gradient == 0).all()


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_keys_whose_sequence_has_no_query(is_deterministic, device, dtype):
    problem = packed(
        (0, 151, 105, 0), (317, 218, 105, 384), heads=4, heads_k=1, headdim=256, causal=True
    )
    inputs = make_inputs(problem, device, dtype)
    got = attend(problem, inputs, deterministic=is_deterministic)
    check_problem(problem, inputs, got)
    for gradient in (got.dk, got.dv):
        assert (gradient[:317] == 0).all()
        assert (gradient[640:] == 0).all()


def test_many_sequences_and_heads(device, dtype):
    """More blocks than any machine has processors, most of them tiny."""
    lengths = tuple(i % 5 for i in range(300))
    run(packed(lengths, heads=3, headdim=16, causal=True), device, dtype)
    run(fixed(64, 3, heads=8, headdim=8), device, dtype)


def test_output_is_contiguous_and_typed(device, dtype):
    problem = Problem((30,), (20,), headdim=24, headdim_v=40, heads=4, heads_k=2)
    inputs = make_inputs(problem, device, dtype)
    inputs.q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    got = attend(problem, inputs)
    for name, tensor in got.items():
        assert tensor.is_contiguous(), name
        assert tensor.dtype == (torch.float32 if name == "lse" else dtype), name
