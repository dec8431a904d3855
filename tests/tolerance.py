"""How close is close enough: CONTRACT "Numbers", in one place."""

import torch
from cases import attend, expected

LSE_ABSOLUTE, LSE_RELATIVE = 1e-5, 1e-6
# A root mean square of few elements is a draw, not a measure: below this maxima are judged alone
# (fp32: one rounding step is granted).
RMS_MIN_ELEMENTS = 512


def same_nonfinite(name, got, exact):
    """NaN, +inf and -inf stand where they should, before any number is compared."""
    for kind, at in (
        ("NaN", torch.isnan),
        ("+inf", lambda x: x == float("inf")),
        ("-inf", lambda x: x == float("-inf")),
    ):
        wrong = at(got) != at(exact)
        assert not wrong.any(), (
            f"{name}: {kind} differs at {int(wrong.sum())} of {wrong.numel()} places, "
            f"first {tuple(wrong.nonzero()[0].tolist())}"
        )


def check(name, got, exact, eager, noise=0.0, floor=0.0):
    """`got` against fp64 `exact`, allowed what `eager` (the formula in got's dtype) errs by.

    Where exact and eager both are within `noise` of zero, all that is left is the fp32 rounding of
    terms that cancel (one visible key: dq = dk = 0), and that is allowed. `floor` is allowed on
    top: for problems in which some rows are of that kind and others are not."""
    assert got.shape == exact.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    same_nonfinite(name, got, exact)
    finite = torch.isfinite(exact)
    if not finite.any():
        return
    wanted = exact[finite]
    error = (got[finite].double() - wanted).abs()
    eager_error = (eager[finite].double() - wanted).abs()
    assert torch.isfinite(eager_error).all(), f"{name}: eager overflows, choose tamer inputs"
    if max(wanted.abs().max(), eager_error.max()) <= noise:
        assert error.max() <= noise, f"{name}: {error.max():.3e} where 0 up to rounding is right"
        return

    info = torch.finfo(got.dtype)
    step = info.eps * wanted.abs() + info.smallest_normal * info.eps
    rms, eager_rms = (float(e.square().mean().sqrt()) for e in (error, eager_error))
    if got.dtype == torch.float32:
        allowed = 2 * eager_rms + floor
        if error.numel() < RMS_MIN_ELEMENTS:
            allowed += float(step.max())
        assert rms <= allowed, f"{name}: RMS error {rms:.3e}, eager's {eager_rms:.3e}"
        return
    over = error - 2 * eager_error.max() - step - floor
    assert over.max() <= 0, (
        f"{name}: max error {error.max():.3e}, eager's {eager_error.max():.3e}; "
        f"{int((over > 0).sum())} of {over.numel()} elements beyond 2x that and one rounding"
    )
    if error.numel() >= RMS_MIN_ELEMENTS:
        # Where rounding P to 16 bits is all that either errs by, the two are equal: a mean of N
        # squares tells equals apart to 1 / sqrt(2 N).
        allowed = eager_rms * (1 + 3 / (2 * error.numel()) ** 0.5) + floor
        assert rms <= allowed, f"{name}: RMS error {rms:.3e} is over eager's {eager_rms:.3e}"


def check_lse(got, exact, noise=0.0):
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    same_nonfinite("lse", got, exact)
    finite = torch.isfinite(exact)
    error = (got.double() - exact)[finite].abs()
    allowed = (LSE_RELATIVE * exact[finite].abs()).clamp(min=max(LSE_ABSOLUTE, noise))
    if error.numel():
        assert (error <= allowed).all(), f"lse: max error {error.max():.3e}"


def cancellation_noise(problem, inputs):
    """fp32 rounding of dP - delta, carried into dq and dk: what is left of an exact zero."""
    if not (inputs.q.numel() and inputs.k.numel()):
        return 0.0
    dout, v = (x.double().norm(dim=-1).max() for x in (inputs.dout, inputs.v))
    largest = max(inputs.q.abs().max(), inputs.k.abs().max())
    return 16 * torch.finfo(torch.float32).eps * _scale(problem) * float(dout * v * largest)


def score_noise(problem, inputs):
    """fp32 rounding of q.k: more than LSE_ABSOLUTE where large terms cancel to a small score."""
    if not (inputs.q.numel() and inputs.k.numel()):
        return 0.0
    q, k = (x.double().norm(dim=-1).max() for x in (inputs.q, inputs.k))
    return 4 * torch.finfo(torch.float32).eps * _scale(problem) * float(q * k)


def _scale(problem):
    return problem.headdim**-0.5 if problem.softmax_scale is None else abs(problem.softmax_scale)


def check_result(got, exact, eager, noise=0.0, lse_noise=0.0, floor=0.0):
    check_lse(got.lse, exact.lse, lse_noise)
    triples = zip(got.items(), exact.items(), eager.items(), strict=True)
    for (name, tensor), (_, wanted), (_, rough) in triples:
        if name != "lse":
            cancels = name in ("dq", "dk")
            spread = floor if name != "out" else 0.0
            check(name, tensor, wanted, rough, noise * cancels, spread)


def check_problem(problem, inputs, got=None, *, any_rows=False, **parts):
    """Runs the problem (unless `got` is given) and judges everything that it returns.

    `any_rows`: rows that see one key and rows that see many may be mixed, and keys may be seen by a
    row or two alone. Then fp32's 2 x eager asks too much: terms cancel, and P = exp(s - lse) has
    the rounding of an lse in fp32, which averages out over rows. `parts` are attend's and
    expected's: backward, dlse."""
    if got is None:
        got = attend(problem, inputs, **parts)
    exact = expected(problem, inputs, **parts)
    eager = expected(problem, inputs, inputs.q.dtype, **parts)
    noise = cancellation_noise(problem, inputs)
    floor = noise if any_rows else 0.0
    check_result(got, exact, eager, noise, score_noise(problem, inputs), floor)
    return got


def _bits(tensor):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def same_bits(name, got, wanted):
    assert got.dtype == wanted.dtype and got.shape == wanted.shape
    wrong = _bits(got) != _bits(wanted)
    assert not wrong.any(), (
        f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ in their bits, "
        f"first {tuple(wrong.nonzero()[0].tolist())}"
    )


def same_result(got, wanted):
    for (name, tensor), (_, other) in zip(got.items(), wanted.items(), strict=True):
        same_bits(name, tensor, other)
