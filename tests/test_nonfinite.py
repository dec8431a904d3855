"""NaN and Inf go where they are seen and nowhere else; what nothing sees may hold anything.

Backward runs are deterministic ones: bits are compared."""

import pytest
import torch
from cases import attend, fixed, make_inputs, outside_filled, packed, sequences
from tolerance import same_bits, same_result

NAN, INF = float("nan"), float("inf")
POISONS = pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])

# Each hides keys from every row: keys too old for the window, and too new for it.
HIDING = [
    fixed(2, 10, 200, window=(5, 0), heads=4, heads_k=2),
    fixed(1, 70, 260, window=(100, -1), causal=True, headdim=128),
    fixed(1, 200, 300, window=(-1, 0)),
    packed((10, 90), (200, 150), window=(5, 3)),
]


def visibility(problem, device):
    """Per sequence, the boolean (Sq, Sk) of what sees what."""
    left, right = problem.window
    right = 0 if problem.causal else right
    for length_q, length_k in zip(problem.seqlens_q, problem.seqlens_k, strict=True):
        row = torch.arange(length_q, device=device)[:, None] + length_k - length_q
        key = torch.arange(length_k, device=device)[None]
        visible = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
        if left >= 0:
            visible &= key >= row - left
        if right >= 0:
            visible &= key <= row + right
        yield visible


@POISONS
@pytest.mark.parametrize("problem", HIDING[:2] + HIDING[3:], ids=str)
def test_keys_that_no_row_sees(problem, poison, device, dtype):
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    k, v = inputs.k.clone(), inputs.v.clone()
    places = zip(sequences(problem, inputs), visibility(problem, device), strict=True)
    hidden_keys = 0
    for (_, rows_k, _), visible in places:
        hidden = ~visible.any(0)
        hidden_keys += int(hidden.sum())
        for x in (k, v):
            part = x[rows_k] if problem.packed else x[rows_k][0]
            part[hidden] = poison
    assert hidden_keys > 20
    same_result(attend(problem, inputs.replace(k=k, v=v), deterministic=True), wanted)


@POISONS
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_rows_outside_every_sequence(is_causal, poison, device, dtype):
    """Beyond seqused and behind the last sequence: the same bits as with zeros there."""
    problem = packed(
        (2, 1, 2, 70),
        (1, 3, 107, 60),
        slots_q=(3, 4, 2, 90),
        slots_k=(3, 3, 256, 64),
        spare_q=9,
        spare_k=30,
        heads=4,
        heads_k=1,
        causal=is_causal,
        headdim=128,
    )
    inputs = make_inputs(problem, device, dtype)
    wanted, got = (
        attend(problem, outside_filled(problem, inputs, value), deterministic=True)
        for value in (0.0, poison)
    )
    same_result(got, wanted)
    for name, side in (("out", 0), ("dq", 0), ("dk", 1), ("dv", 1)):
        tensor = getattr(got, name)
        unused = torch.ones(tensor.shape[0], dtype=torch.bool)
        for places in sequences(problem, inputs):
            unused[places[side]] = False
        assert (tensor[unused.to(device)] == 0).all(), name
    assert (got.lse[:, 2] == -INF).all()


@pytest.mark.parametrize(
    "problem",
    [
        fixed(1, 100, causal=True, heads=2, heads_k=1),
        fixed(1, 190, 170, window=(20, 20), headdim=128),
        packed((100, 64), window=(10, 5)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@POISONS
def test_visible_poison_stays_with_those_who_see_it(problem, name, poison, device, dtype):
    """One bad element in head 0. Rows that see it may be anything (a NaN must reach them); all
    other rows keep their bits, and so do the keys that only those rows see."""
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    at = 41
    tensor = getattr(inputs, name).clone()
    tensor.view(-1, *tensor.shape[-2:])[at, 0, 3] = poison
    got = attend(problem, inputs.replace(**{name: tensor}), deterministic=True)

    visible = next(visibility(problem, device))
    length_q, length_k = visible.shape
    by_row = name in ("q", "dout")
    rows = torch.arange(length_q, device=device) == at if by_row else visible[:, at]
    keys = visible[rows].any(0)
    group = problem.heads // problem.heads_k
    heads = 1 if by_row else group

    def first(x, length):
        return x[:length] if problem.packed else x[0]

    affected_q = torch.zeros_like(got.dq, dtype=torch.bool)
    first(affected_q, length_q)[rows, :heads] = True
    affected_k = torch.zeros_like(got.dk, dtype=torch.bool)
    first(affected_k, length_k)[keys, :1] = True
    forward_is_safe = name == "dout"
    for kind, affected in (("out", affected_q), ("dq", affected_q)):
        x, y = getattr(got, kind), getattr(wanted, kind)
        outside = ~affected if kind == "dq" or not forward_is_safe else torch.ones_like(affected)
        same_bits(kind, x[outside], y[outside])
    for kind in ("dk", "dv"):
        same_bits(kind, getattr(got, kind)[~affected_k], getattr(wanted, kind)[~affected_k])
    if name in ("q", "k") and poison != poison:
        seen = first(got.out, length_q)[rows, :heads]
        assert seen.isnan().all()
        assert first(got.dq, length_q)[rows, :heads].isnan().all()
    if name == "v" and poison != poison:
        seen = first(got.out, length_q)[rows, :heads]
        assert seen[..., 3].isnan().all()


def test_all_queries_nan(device, dtype):
    inputs = make_inputs(fixed(2, 4, heads=16, headdim=8), device, dtype)
    inputs.q[:] = NAN
    got = attend(fixed(2, 4, heads=16, headdim=8), inputs)
    for name, tensor in got.items():
        if name not in ("dv",):
            assert tensor.isnan().all(), name


def test_infinite_score(device, dtype):
    """q.k = +inf: NaN in that row (inf - inf) as in the formula; the others keep their bits."""
    problem = fixed(1, 70, heads=1)
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, backward=False)
    q = inputs.q.clone()
    q[0, 5, 0, 0] = INF
    got = attend(problem, inputs.replace(q=q), backward=False)
    rows = torch.arange(70, device=device) != 5
    same_bits("out", got.out[:, rows], wanted.out[:, rows])
    assert got.out[0, 5].isnan().all()


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize(
    "problem",
    [
        fixed(
            1, 600, causal=True, heads=4, heads_k=2, headdim=8
        ),  # several blocks of keys and rows
        fixed(1, 150, 70, window=(0, 0), heads=4, heads_k=2),  # rows that see nothing
    ],
    ids=str,
)
def test_bits_beside_a_poison_of_a_later_block_and_head(problem, name, device, dtype):
    """Sums that have begun when the poison comes go on bit by bit, in each head of a group."""
    inputs = make_inputs(problem, device, dtype)
    wanted = attend(problem, inputs, deterministic=True)
    tensor = getattr(inputs, name).clone()
    at, head = tensor.shape[1] - 11, tensor.shape[2] - 1
    tensor[0, at, head] = NAN
    got = attend(problem, inputs.replace(**{name: tensor}), deterministic=True)
    visible = next(visibility(problem, device))
    by_row = name in ("q", "dout")
    rows = torch.arange(visible.shape[0], device=device) == at if by_row else visible[:, at]
    keys = visible[rows].any(0) if rows.any() else torch.zeros_like(visible[0])
    group = problem.heads // problem.heads_k
    heads = [head] if by_row else list(range(head * group, (head + 1) * group))
    for kind, seen, touched in (
        ("out", rows, heads),
        ("dq", rows, heads),
        ("dk", keys, [heads[0] // group]),
        ("dv", keys, [heads[0] // group]),
    ):
        x, y = getattr(got, kind), getattr(wanted, kind)
        outside = torch.ones(x.shape[1:3], dtype=torch.bool, device=device)
        for one in touched:
            outside[seen, one] = False
        same_bits(kind, x[0][outside], y[0][outside])
