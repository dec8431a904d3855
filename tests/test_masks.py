"""Which keys a row sees, counted exactly, and the rows that see none."""

import math

import pytest
import torch
from cases import attend, expected, fixed, make_inputs, packed
from tolerance import check_problem, same_result

import flashattn

INF = float("inf")


def visible_keys(seqlen_q, seqlen_k, device, **options):
    """How many keys each row sees, and which: q = 0 makes every visible key weigh the same, one-hot
    values tell them apart."""
    q = torch.zeros(1, seqlen_q, 1, 32, device=device, dtype=torch.float16)
    k = torch.randn(1, seqlen_k, 1, 32, device=device, dtype=torch.float16)
    v = torch.eye(seqlen_k, device=device, dtype=torch.float16)[None, :, None]
    out, lse = flashattn.flash_attn_func(q, k, v, return_lse=True, **options)
    counts = lse[0, 0].double().exp().round().int()
    return counts, out[0, :, 0] > 0


def brute_force(seqlen_q, seqlen_k, left, right):
    row = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        visible &= key >= row - left
    if right >= 0:
        visible &= key <= row + right
    return visible


LENGTHS = [(5, 2), (1, 8), (64, 64), (65, 200), (200, 65), (129, 32), (130, 131)]
WINDOWS = [
    (-1, -1),
    (0, 0),
    (7, 0),
    (8, 0),
    (8, 8),
    (32, 64),
    (-1, 5),
    (5, -1),
    (1000, 0),
    (63, 1),
    (1 << 31, 1 << 40),
]


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: "q{}-k{}".format(*x))
def test_visible_keys(lengths, device):
    for left, right in WINDOWS:
        for causal in (False, True):
            wanted = brute_force(*lengths, left, 0 if causal else right)
            counts, seen = visible_keys(*lengths, device, causal=causal, window_size=(left, right))
            assert torch.equal(counts.cpu(), wanted.sum(1).int()), (left, right, causal)
            assert torch.equal(seen.cpu(), wanted), (left, right, causal)


def test_none_in_a_window_is_unbounded(device):
    for window, same in (((None, 3), (-1, 3)), ((3, None), (3, -1)), ((None, None), (-1, -1))):
        _, seen = visible_keys(20, 30, device, window_size=window)
        _, wanted = visible_keys(20, 30, device, window_size=same)
        assert torch.equal(seen, wanted)


@pytest.mark.parametrize(("window", "most"), [((7, 0), 8), ((8, 0), 9), ((8, 8), 17)])
def test_window_bounds_are_inclusive(window, most, device):
    counts, _ = visible_keys(64, 64, device, window_size=window)
    assert counts.max() == most


def test_causal_and_the_windows_that_equal_it(device, dtype):
    """(-1, 0) has causal's bits, (S, 0) and (S - 1, 0) agree with it to rounding."""
    problem = fixed(2, 64, causal=True)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    same_result(attend(fixed(2, 64, window=(-1, 0)), inputs, deterministic=True), wanted)
    for window in ((-1, 0), (64, 0), (63, 0)):
        check_problem(problem, inputs, attend(fixed(2, 64, window=window), inputs))


@pytest.mark.parametrize(
    ("problem", "empty"),
    [
        (fixed(1, 5, 2, causal=True), slice(0, 3)),
        (fixed(1, 150, 20, causal=True, heads=4, heads_k=2), slice(0, 130)),
        (fixed(2, 129, 32, window=(32, 64)), slice(0, 33)),
        (fixed(1, 200, 40, window=(-1, 3)), slice(0, 157)),
    ],
    ids=str,
)
def test_rows_that_see_nothing(problem, empty, device, dtype):
    got = check_problem(problem, make_inputs(problem, device, dtype), any_rows=True)
    assert (got.lse[..., empty] == -INF).all()
    assert torch.isfinite(got.lse[..., empty.stop :]).all()
    assert (got.out[:, empty] == 0).all()
    assert (got.dq[:, empty] == 0).all()


def test_one_key_and_many_queries(device, dtype):
    """Bottom right: the last query of each sequence sees the key, the others see nothing."""
    problem = packed((76, 34, 146), (1, 1, 1), causal=True, heads=1, headdim=32, values="3")
    inputs = make_inputs(problem, device, dtype)
    got = check_problem(problem, inputs, any_rows=True)
    last = torch.tensor([75, 109, 255], device=device)
    assert torch.equal(got.dv, inputs.dout[last])
    assert torch.equal(got.out[last], inputs.v)
    hidden = torch.ones(256, dtype=torch.bool, device=device)
    hidden[last] = False
    assert (got.out[hidden] == 0).all()
    assert (got.dq[hidden] == 0).all()


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_one_key_gives_no_score_gradient(scale, device, dtype):
    q, k, v = (scale * torch.randn(1, 1, 1, 16, device=device, dtype=dtype) for _ in range(3))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = flashattn.flash_attn_func(q, k, v)
    assert torch.equal(out, v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    rounding = 1e-5 * scale**2
    assert dq.abs().max() <= rounding
    assert dk.abs().max() <= rounding
    assert (dv == 1).all()


@pytest.mark.parametrize("keys", [1, 3, 70])
@pytest.mark.parametrize("is_packed", [False, True], ids=["fixed", "packed"])
def test_very_low_scores_are_scores(keys, is_packed, device, dtype):
    """A score of -46341 everywhere is a uniform row, not an empty one."""
    build = packed if is_packed else fixed
    shape = ((1,), (keys,)) if is_packed else (1, 1, keys)
    problem = build(*shape, heads=1, headdim=128)
    inputs = make_inputs(problem, device, dtype)
    inputs.q.fill_(64)
    inputs.k.fill_(-64)
    inputs.v.fill_(1)
    got = attend(problem, inputs)
    assert (got.out == 1).all()
    lse = -524288 / math.sqrt(128) + math.log(keys)
    assert got.lse.item() == pytest.approx(lse, rel=1e-6)
    for gradient in (got.dq, got.dk, got.dv):
        assert torch.isfinite(gradient).all()
    weight = inputs.dout.double() / keys
    torch.testing.assert_close(got.dv.double(), weight.expand_as(got.dv), rtol=4e-3, atol=1e-3)


def test_lowest_finite_scores_beside_a_normal_row(device):
    """One row at about -1e38: still the mean of v; its neighbours notice nothing."""
    dtype = torch.bfloat16
    problem = fixed(1, 70, 90, heads=1, headdim=64, softmax_scale=1.0)
    inputs = make_inputs(problem, device, dtype)
    inputs.k[..., 0] = 1.0
    inputs.q[:, 13] = 0
    inputs.q[:, 13, :, 0] = -1e38
    got = attend(problem, inputs, backward=False)
    mean = inputs.v.double().mean(1)[0, 0]
    torch.testing.assert_close(got.out[0, 13, 0].double(), mean, rtol=0, atol=4e-3)
    other = inputs.replace(q=inputs.q.clone())
    other.q[:, 13] = 1
    wanted = attend(problem, other, backward=False)
    rows = torch.arange(70, device=device) != 13
    assert torch.equal(got.out[:, rows], wanted.out[:, rows])
    assert torch.equal(got.lse[..., rows], wanted.lse[..., rows])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_equal_large_keys(causal, device, dtype):
    """Every key the same and large: uniform weights, no gradient through the scores."""
    problem = fixed(4, 50, heads=4, causal=causal)
    inputs = make_inputs(problem, device, dtype)
    inputs.q.fill_(30)
    inputs.k.fill_(30)
    got = attend(problem, inputs, dlse=False)
    counts = torch.arange(1, 51, device=device)[None, :, None, None] if causal else 50
    mean = (inputs.v.double().cumsum(1) if causal else inputs.v.double().sum(1, True)) / counts
    atol = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.out.double(), mean.expand_as(got.out), rtol=0, atol=atol)
    # dq sums ds over equal keys: zero up to what rounding p and ds leaves, times 30.
    bound = 1e-3 if dtype == torch.float32 else 30 * torch.finfo(dtype).eps
    assert got.dq.abs().max() <= bound


def test_lse_is_the_natural_logarithm(device, dtype):
    for problem in (fixed(1, 100), packed((60, 40))):
        inputs = make_inputs(problem, device, dtype)
        got = attend(problem, inputs, backward=False)
        q, k = inputs.q.double(), inputs.k.double()
        if not problem.packed:
            scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
            wanted = scores.logsumexp(-1)
        else:
            halves = (slice(0, 60), slice(60, 100))
            scores = [torch.einsum("qhd,khd->hqk", q[part], k[part]) / 8 for part in halves]
            wanted = torch.cat([s.logsumexp(-1) for s in scores], -1)
        torch.testing.assert_close(got.lse.double(), wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [3e2, 2e4, 1e6, 1e15])
def test_one_key_with_a_score_of_any_size(size, device, dtype):
    """One key has weight 1, however large its score and however the scale rounds it."""
    if size**2 * 32 > torch.finfo(torch.float32).max or size > torch.finfo(dtype).max:
        pytest.skip("the score itself is not finite in fp32")
    problem = fixed(1, 1, 1, heads=1, headdim=32)
    inputs = make_inputs(problem, device, dtype)
    for sign in (1, -1):
        some = inputs.replace(
            q=torch.full_like(inputs.q, size), k=torch.full_like(inputs.k, sign * size)
        )
        got = attend(problem, some, dlse=False)
        assert torch.equal(got.out, inputs.v)
        score = float((some.q.double() * some.k.double()).sum()) * 32**-0.5
        assert abs(float(got.lse) - score) <= 2e-6 * abs(score)
        torch.testing.assert_close(got.dv, inputs.dout, rtol=1e-5, atol=1e-6)


def test_large_random_scores(device):
    """Scores of some 1e10, beside each other in one block: no row is lost, gradients are finite."""
    problem = fixed(1, 64, heads=2, headdim=96)
    inputs = make_inputs(problem, device, torch.bfloat16)
    inputs = inputs.replace(q=inputs.q * 3e4, k=inputs.k * 3e4)
    got = attend(problem, inputs, dlse=False)
    assert not (got.out == 0).all(-1).any()
    for name, tensor in got.items():
        assert torch.isfinite(tensor).all(), name
    torch.testing.assert_close(
        got.out.double(), expected(problem, inputs, dlse=False).out, rtol=1e-2, atol=1e-2
    )
