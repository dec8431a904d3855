"""The oracle itself, against scalar loops, torch's attention and numerical derivatives."""

import math

import pytest
import torch

from flashattn import reference

pytestmark = pytest.mark.cpu

INF = float("inf")


def by_loops(q, k, v, scale, softcap, window, slopes, mask, sink):
    """One score at a time, in Python's floats."""
    batch, seqlen_q, heads, headdim = q.shape
    seqlen_k, heads_k, headdim_v = v.shape[1:]
    out = torch.zeros(batch, seqlen_q, heads, headdim_v, dtype=torch.float64)
    lse = torch.full((batch, heads, seqlen_q), -INF, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            kv_head = h // (heads // heads_k)
            for i in range(seqlen_q):
                center = i + seqlen_k - seqlen_q
                total, row = 0.0, [0.0] * headdim_v
                if sink is not None:
                    total += math.exp(sink[h])
                for j in range(seqlen_k):
                    if window[0] >= 0 and j < center - window[0]:
                        continue
                    if window[1] >= 0 and j > center + window[1]:
                        continue
                    s = scale * sum(
                        float(q[b, i, h, d]) * float(k[b, j, kv_head, d]) for d in range(headdim)
                    )
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if slopes is not None:
                        s -= float(slopes[b, h] if slopes.dim() == 2 else slopes[h]) * abs(
                            center - j
                        )
                    if mask is not None:
                        entry = mask.expand(batch, heads, seqlen_q, seqlen_k)[b, h, i, j]
                        if mask.dtype == torch.bool:
                            if not entry:
                                continue
                        else:
                            s += float(entry)
                    weight = math.exp(s)
                    total += weight
                    for d in range(headdim_v):
                        row[d] += weight * float(v[b, j, kv_head, d])
                if total > 0:
                    lse[b, h, i] = math.log(total)
                    out[b, i, h] = torch.tensor(row, dtype=torch.float64) / total
    return out, lse


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


# Options by name; those that depend on the lengths are made of (seqlen_q, seqlen_k).
SLOPES = torch.tensor([0.1, 0.5, 1.0, 2.0], dtype=torch.float64)
SINK = torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
CASES = {
    "plain": lambda m, n: {},
    "scale": lambda m, n: {"softmax_scale": -0.3},
    "causal": lambda m, n: {"causal": True},
    "window": lambda m, n: {"window_size": (2, 1)},
    "softcap": lambda m, n: {"softcap": 0.7},
    "alibi": lambda m, n: {"alibi_slopes": SLOPES},
    "alibi-per-batch": lambda m, n: {"alibi_slopes": randn(2, 4).abs()},
    "bool-mask": lambda m, n: {"attn_mask": randn(2, 1, m, n) > 0},
    "float-mask": lambda m, n: {"attn_mask": randn(4, m, n)},
    "sink": lambda m, n: {"learnable_sink": SINK},
    "all": lambda m, n: {
        "softmax_scale": 0.4,
        "causal": True,
        "window_size": (3, -1),
        "softcap": 1.5,
        "alibi_slopes": SLOPES,
        "attn_mask": randn(1, n),
        "learnable_sink": SINK,
    },
}


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_against_loops(name, lengths):
    options = CASES[name](*lengths)
    q, k, v = randn(2, lengths[0], 4, 3), randn(2, lengths[1], 2, 3), randn(2, lengths[1], 2, 4)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    left, right = options.get("window_size", (-1, -1))
    wanted = by_loops(
        q,
        k,
        v,
        options.get("softmax_scale", 3**-0.5),
        options.get("softcap", 0.0),
        (left, 0 if options.get("causal") else right),
        options.get("alibi_slopes"),
        options.get("attn_mask"),
        options.get("learnable_sink"),
    )
    torch.testing.assert_close(out, wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_against_torch(dtype):
    q, k, v = (torch.randn(2, 33, 4, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    out = reference.attention(q, k, v, causal=True)
    assert out.dtype == dtype
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    tolerance = (
        {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.05}
    )
    torch.testing.assert_close(out, wanted, **tolerance)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), dout)
    expected = torch.autograd.grad(wanted, (q, k, v), dout)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name):
    """Numerical ones, through out and lse both. Every row sees a key: -inf has no difference."""
    options = CASES[name](5, 7)
    if name == "bool-mask":
        options["attn_mask"][..., 0] = True
    q, k, v = (
        x.requires_grad_() for x in (randn(2, 5, 4, 3), randn(2, 7, 2, 3), randn(2, 7, 2, 4))
    )

    def run(q, k, v):
        return reference.attention(q, k, v, return_lse=True, **options)

    assert torch.autograd.gradcheck(run, (q, k, v))


def test_empty_rows():
    leaves = [randn(1, n, 1, 8).requires_grad_() for n in (5, 2, 2)]
    out, lse = reference.attention(*leaves, causal=True, return_lse=True)
    assert (out[:, :3] == 0).all()
    assert (lse[..., :3] == -INF).all()
    dlse = torch.ones_like(lse)
    gradients = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), dlse))
    assert all(torch.isfinite(x).all() for x in gradients)
    assert (gradients[0][:, :3] == 0).all()


def test_packed_is_sequence_by_sequence():
    q, k, v = (randn(n, 2, 8) for n in (10, 12, 12))
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(x) for x in ([0, 4, 9], [0, 5, 11]))
    out, lse = reference.attention(
        q,
        k,
        v,
        causal=True,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=torch.tensor([5, 2]),
        return_lse=True,
    )
    for rows_q, rows_k in ((slice(0, 4), slice(0, 5)), (slice(4, 9), slice(5, 7))):
        one, one_lse = reference.attention(
            q[None, rows_q], k[None, rows_k], v[None, rows_k], causal=True, return_lse=True
        )
        torch.testing.assert_close(out[rows_q], one[0], rtol=0, atol=1e-14)
        torch.testing.assert_close(lse[:, rows_q], one_lse[0], rtol=0, atol=1e-14)
    assert (out[9:] == 0).all()
    assert (lse[:, 9:] == -INF).all()


def test_nonfinite_values_stay_with_their_rows():
    q, k, v = (randn(1, 6, 1, 4) for _ in range(3))
    wanted = reference.attention(q, k, v, causal=True)
    v[0, 4, 0, 2] = float("nan")
    k[0, 5, 0, 0] = INF
    out = reference.attention(q, k, v, causal=True)
    assert torch.equal(out[:, :4], wanted[:, :4])
    assert out[0, 4, 0].isnan().tolist() == [False, False, True, False]
    assert out[0, 5].isnan().any()


@pytest.mark.parametrize("softcap", [-1.0, float("nan")])
def test_bad_softcap(softcap):
    q = torch.randn(1, 3, 1, 8)
    with pytest.raises(ValueError, match="softcap"):
        reference.attention(q, q, q, softcap=softcap)
