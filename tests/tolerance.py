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


def check(name, got, exact, eager, noise=0.0):
    """`got` against fp64 `exact`, allowed what `eager` (the formula in got's dtype) errs by.

    Where exact and eager both are within `noise` of zero, all that is left is the fp32 rounding of
    terms that cancel (one visible key: dq = dk = 0), and that is allowed."""
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
        allowed = 2 * eager_rms
        if error.numel() < RMS_MIN_ELEMENTS:
            allowed += float(step.max())
        assert rms <= allowed, f"{name}: RMS error {rms:.3e}, eager's {eager_rms:.3e}"
        return
    over = error - 2 * eager_error.max() - step
    assert over.max() <= 0, (
        f"{name}: max error {error.max():.3e}, eager's {eager_error.max():.3e}; "
        f"{int((over > 0).sum())} of {over.numel()} elements beyond 2x that and one rounding"
    )
    if error.numel() >= RMS_MIN_ELEMENTS:
        assert rms <= eager_rms, f"{name}: RMS error {rms:.3e} is over eager's {eager_rms:.3e}"


def check_lse(got, exact):
    assert got.dtype == torch.float32
    assert got.shape == exact.shape
    same_nonfinite("lse", got, exact)
    finite = torch.isfinite(exact)
    error = (got.double() - exact)[finite].abs()
    allowed = (LSE_RELATIVE * exact[finite].abs()).clamp(min=LSE_ABSOLUTE)
    if error.numel():
        assert (error <= allowed).all(), f"lse: max error {error.max():.3e}"


def cancellation_noise(problem, inputs):
    """fp32 rounding of dP - delta, carried into dq and dk: what is left of an exact zero."""
    if not (inputs.q.numel() and inputs.k.numel()):
        return 0.0
    scale = problem.softmax_scale
    scale = problem.headdim**-0.5 if scale is None else abs(scale)
    dout, v = (x.double().norm(dim=-1).max() for x in (inputs.dout, inputs.v))
    largest = max(inputs.q.abs().max(), inputs.k.abs().max())
    return 16 * torch.finfo(torch.float32).eps * scale * float(dout * v * largest)


def check_result(got, exact, eager, noise=0.0):
    check_lse(got.lse, exact.lse)
    triples = zip(got.items(), exact.items(), eager.items(), strict=True)
    for (name, tensor), (_, wanted), (_, rough) in triples:
        if name != "lse":
            check(name, tensor, wanted, rough, noise if name in ("dq", "dk") else 0.0)


def check_problem(problem, inputs, got=None, **parts):
    """Runs the problem (unless `got` is given) and judges everything that it returns.

    `parts` are attend's and expected's: backward, dlse."""
    if got is None:
        got = attend(problem, inputs, **parts)
    exact = expected(problem, inputs, **parts)
    eager = expected(problem, inputs, inputs.q.dtype, **parts)
    check_result(got, exact, eager, cancellation_noise(problem, inputs))
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
