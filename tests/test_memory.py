"""Memory is linear in the sequence length: nothing of size Sq x Sk is ever allocated."""

import itertools
import subprocess
import sys

import pytest
import torch
from cases import DTYPES

import flashattn

# A process of its own for each length: ru_maxrss is a high-water mark.
CPU_PROGRAM = """
import resource, sys, torch, flashattn
seqlen = int(sys.argv[1])
make = lambda: torch.randn(1, seqlen, 1, 32, requires_grad=True)
q, k, v = make(), make(), make()
def step(n):
    window = (64, 0) if n > 8192 else (-1, -1)  # the longest one takes linear time, too
    out = flashattn.flash_attn_func(q[:, :n], k[:, :n], v[:, :n], window_size=window,
                                    deterministic=sys.argv[2] == "True")
    out.sum().backward()
step(64)  # what libraries take on first use
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(seqlen)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
LENGTHS = (2048, 8192, 32768)


def cpu_kilobytes(seqlen, deterministic):
    run = subprocess.run(
        [sys.executable, "-c", CPU_PROGRAM, str(seqlen), str(deterministic)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.cpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
def test_cpu_memory_is_linear(deterministic):
    used = [cpu_kilobytes(seqlen, deterministic) for seqlen in LENGTHS]
    row = 32 * 4  # bytes of one tensor's row
    for seqlen, kilobytes in zip(LENGTHS, used, strict=True):
        # out, dout, dq, dk, dv, the slices' gradients, some blocks for each thread: 16 rows' worth.
        allowed = 16 * row * seqlen / 1024 + 8192
        assert kilobytes <= allowed, f"{used} KiB at {LENGTHS}: a score matrix of 32k is 4 GiB"


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
def test_cuda_memory_is_linear(deterministic, device):
    if device != "cuda":
        pytest.skip("the CPU's is test_cpu_memory_is_linear")
    dtype = DTYPES[device][0]
    peaks = []
    for seqlen in LENGTHS:
        q, k, v = (
            torch.randn(1, seqlen, 2, 64, device=device, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = flashattn.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del q, k, v, out
    for shorter, longer in itertools.pairwise(peaks):
        assert longer <= 4.2 * shorter + (1 << 20), peaks
