"""Times tiles of triton_attention.py on the GPU at hand, to choose its TILES by.

python examples/learn/tune_triton_attention.py --headdim 64 --causal
"""

import argparse
import functools
import math

import torch
from triton_attention import Tile, forward, grad_kv, grad_q, row_products

# isort: split
import triton

# (block_m, block_n, num_warps, num_stages): those that keep their accumulators in registers at head
# dim 64 or 128. Larger head dims want smaller blocks.
CANDIDATES = {
    "forward": (
        *((64, block_n, 4, stages) for block_n in (64, 128) for stages in (2, 3)),
        *((128, 64, warps, stages) for warps in (4, 8) for stages in (2, 3)),
        *((128, 128, warps, stages) for warps in (4, 8) for stages in (2, 3)),
        *((256, block_n, 8, stages) for block_n in (64, 128) for stages in (2, 3)),
    ),
    "dkdv": (
        *((32, 64, 4, stages) for stages in (2, 3)),
        *((32, 128, 8, stages) for stages in (2, 3)),
        *((64, 64, warps, stages) for warps in (4, 8) for stages in (2, 3)),
        *((64, 128, 8, stages) for stages in (2, 3)),
        *((128, 64, warps, stages) for warps in (4, 8) for stages in (2, 3)),
    ),
    "dq": (
        *((64, block_n, 4, stages) for block_n in (32, 64, 128) for stages in (2, 3)),
        *((128, 64, 4, stages) for stages in (2, 3)),
        *((128, block_n, 8, stages) for block_n in (32, 64, 128) for stages in (2, 3)),
    ),
}
# FLOPs of each kernel, in units of the forward's: S, dV, dP and dK; S, dP and dQ.
PRODUCTS = {"forward": 1.0, "dkdv": 2.0, "dq": 1.5}


def tune(headdim: int, causal: bool, seqlen: int) -> None:
    """At batch 1 and heads * headdim = 2048, bf16; prints the best tiles of each kernel."""
    shape = (1, seqlen, 2048 // headdim, headdim)
    draw = functools.partial(torch.randn, shape, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = (draw() for _ in range(4))
    scale = headdim**-0.5
    out, lse = forward(q, k, v, scale, causal)
    saved = (dout, lse, row_products(out, dout), scale, causal)
    runs = {
        "forward": lambda tile: forward(q, k, v, scale, causal, tile),
        "dkdv": lambda tile: grad_kv(q, k, v, *saved, tile),
        "dq": lambda tile: grad_q(q, k, v, *saved, tile),
    }
    flops = 4 * math.prod(shape) * seqlen / (2 if causal else 1)
    for kernel, run in runs.items():
        times = {}
        for candidate in CANDIDATES[kernel]:
            tile = Tile(*candidate)
            try:
                times[tile] = triton.testing.do_bench(functools.partial(run, tile))
            except triton.runtime.errors.TritonError as error:
                print(f"{kernel} {tile}: {type(error).__name__}")  # more than an SM has
        for tile, ms in sorted(times.items(), key=lambda item: item[1])[:4]:
            speed = flops * PRODUCTS[kernel] / ms / 1e9
            print(f"{kernel:8} headdim {headdim}{' causal' * causal}: {tile} {speed:.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--headdim", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--causal", action="store_true")
    options = parser.parse_args()
    tune(options.headdim, options.causal, options.seqlen)


if __name__ == "__main__":
    main()
