"""strict(): checks of the integers that live on the device, at the price of a synchronisation."""

from __future__ import annotations

import itertools

from torch import Tensor

_enabled = False


class strict:
    """Turns the checks of device-side integers on or off; as a context manager, for its body.

    Without it, kernels bound ``cu_seqlens_*`` and ``seqused_*`` themselves: a bad value never reads
    or writes outside of the tensors, and costs no synchronisation, but no error tells of it. With
    ``strict(True)`` every packed call copies them to the host and raises ValueError where
    ``cu_seqlens`` does not start at 0, decreases or does not end at the number of rows, where a
    ``seqused`` is negative or beyond its sequence's length, or where a length is over the
    ``max_seqlen`` that was given. Compiled code and vmap do not run these checks.

    >>> flashattn.strict(True)                      # from here on
    >>> with flashattn.strict(): ...                # for a block
    """

    def __init__(self, enabled: bool = True) -> None:
        global _enabled
        self._previous = _enabled
        _enabled = bool(enabled)

    def __enter__(self) -> strict:
        return self

    def __exit__(self, *error: object) -> None:
        global _enabled
        _enabled = self._previous

    def __repr__(self) -> str:
        return f"flashattn.strict({_enabled})"


def enabled() -> bool:
    return _enabled


def check_lengths(
    side: str,
    rows: int,
    cu_seqlens: Tensor,
    seqused: Tensor | None,
    max_seqlen: int | Tensor | None,
) -> None:
    """The integers of one side, "q" or "k", whose tensors have `rows` rows."""
    offsets = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens_{side}: needs to start at 0, got {offsets[0]}")
    for b, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens_{side}: needs to be non-decreasing, got {offsets[b]} then "
                f"{offsets[b + 1]} for sequence {b}"
            )
    if offsets[-1] != rows:
        raise ValueError(
            f"cu_seqlens_{side}: needs to end at the {rows} rows of its tensor, got {offsets[-1]}"
        )
    if max_seqlen is not None and lengths and max(lengths) > int(max_seqlen):
        raise ValueError(
            f"max_seqlen_{side}: got {int(max_seqlen)}, less than the longest sequence, "
            f"{max(lengths)}"
        )
    for b, used in enumerate([] if seqused is None else seqused.tolist()):
        if not 0 <= used <= lengths[b]:
            raise ValueError(
                f"seqused_{side}: needs 0 to {lengths[b]}, the length of sequence {b}, got {used}"
            )
