"""Chapter 2: the roofline of this machine: how many FLOPs it can do for each byte it moves."""

import time
from collections.abc import Callable

import torch
from device import DEVICE


def seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of a few runs: what is slower was disturbed."""
    times = []
    for _ in range(repeats + 1):  # the first one warms up
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def bytes_per_second(size: int) -> float:
    """Of a copy, which reads each byte once and writes it once."""
    x = torch.ones(size, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * size / seconds(lambda: y.copy_(x))


def flops_per_second(size: int, dtype: torch.dtype) -> float:
    """Of a square matrix product: 2 FLOPs, a multiplication and an addition, for each of size^3."""
    a, b = torch.randn(2, size, size, device=DEVICE).to(dtype)
    return 2 * size**3 / seconds(lambda: a @ b)


def attention_flops(seqlen: int, headdim: int) -> int:
    """Of the two products of one head, q k^T and p v."""
    return 2 * 2 * seqlen * seqlen * headdim


def attention_bytes(seqlen: int, headdim: int, stores_scores: bool) -> int:
    """What one head moves in 16 bits. Each of four tensors once; and where the scores are stored, s
    is written and read, and so is p."""
    tensors = 4 * seqlen * headdim
    scores = 4 * seqlen * seqlen if stores_scores else 0
    return 2 * (tensors + scores)


def main() -> None:
    gpu = DEVICE == "cuda"
    bandwidth = bytes_per_second(2**30 if gpu else 2**27)
    compute = flops_per_second(8192 if gpu else 1024, torch.bfloat16 if gpu else torch.float32)
    name = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}: copy {bandwidth / 1e9:.0f} GB/s, matmul {compute / 1e9:.0f} GFLOP/s")
    print(f"below {compute / bandwidth:.0f} FLOPs a byte this machine waits for its memory")
    for stores_scores in (True, False):
        intensity = attention_flops(4096, 64) / attention_bytes(4096, 64, stores_scores)
        how = "scores stored" if stores_scores else "scores kept on chip"
        print(f"attention, seqlen 4096, headdim 64, {how}: {intensity:.0f} FLOPs a byte")


if __name__ == "__main__":
    main()
