"""The compiled operators torch.ops.flashattn.* (their fakes are in _fakes.py).

    forward(q, k, v, cu_seqlens_q?, cu_seqlens_k?, seqused_q?, seqused_k?,
            softmax_scale, window_left, window_right) -> (out, lse)
    backward(dout, dlse?, q, k, v, out, lse, cu_seqlens_q?, cu_seqlens_k?, seqused_q?, seqused_k?,
             softmax_scale, window_left, window_right, deterministic, need_dq, need_dkv)
            -> (dq, dk, dv)

Four dimensions are the fixed-length layout, three the packed one. Results are contiguous. The
operators refuse tensors that do not fit each other, in few words; flashattn's functions say it
better.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch


def _load_library() -> None:
    folder = Path(__file__).parent
    libraries = sorted(folder.glob("_C*.so"))
    if not libraries:
        raise ImportError(
            f"flashattn's compiled library is missing from {folder}: build and install it with "
            "`pip install .` in the source tree (and import it from another folder), or build it "
            "in place with `python setup.py build_ext --inplace`."
        )
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError as error:
        raise ImportError(
            f"flashattn's compiled library {libraries[0].name} does not load into torch "
            f"{torch.__version__}: {error}"
        ) from error


_load_library()

forward = torch.ops.flashattn.forward.default
backward = torch.ops.flashattn.backward.default
build_info: dict[str, str] = json.loads(torch.ops.flashattn.build_info())
has_cuda = build_info["archs"] != ""
