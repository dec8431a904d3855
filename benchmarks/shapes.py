"""The named sets of problems that the benchmarks measure."""

import random
from dataclasses import asdict, dataclass

TOKENS = 16384  # batch * seqlen of the training cells
WIDTH = 2048  # heads * headdim of the training cells


@dataclass(frozen=True)
class Cell:
    """One self-attention problem; packed where there are `lengths`, which set batch and seqlen."""

    batch: int
    seqlen: int
    heads: int
    headdim: int
    causal: bool
    heads_k: int = 0  # 0: as many as heads
    headdim_v: int = 0  # 0: headdim
    dtype: str = "bf16"
    lengths: tuple[int, ...] = ()

    @property
    def kv_heads(self) -> int:
        return self.heads_k or self.heads

    @property
    def v_dim(self) -> int:
        return self.headdim_v or self.headdim

    @property
    def name(self) -> str:
        headdim = f"d{self.headdim}" + (f"v{self.headdim_v}" if self.headdim_v else "")
        heads = f"h{self.heads}" + (f"kv{self.heads_k}" if self.heads_k else "")
        mask = "causal" if self.causal else "full"
        packed = "packed-" if self.lengths else ""
        return f"{headdim}-{mask}-{packed}s{self.seqlen}-b{self.batch}-{heads}-{self.dtype}"

    def flops(self, which: str) -> float:
        """Matmul FLOPs as the field counts them: half when causal, backward 2.5 times forward."""
        lengths = self.lengths or (self.seqlen,) * self.batch
        pairs = sum(length * length for length in lengths) / (2 if self.causal else 1)
        forward = 2.0 * self.heads * pairs * (self.headdim + self.v_dim)
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5}[which]

    def as_dict(self) -> dict:
        return {"name": self.name} | asdict(self)


@dataclass(frozen=True)
class Preset:
    cells: tuple[Cell, ...]
    passes: tuple[str, ...]
    about: str
    device: str = "cuda"
    measures: str = "speed"  # or "host" (time until the call returns) or "memory" (peak)
    metric: str = "tflops"  # what tables and plots show


def _training_cells() -> tuple[Cell, ...]:
    return tuple(
        Cell(max(1, TOKENS // seqlen), seqlen, WIDTH // headdim, headdim, causal)
        for headdim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384, 32768)
    )


def _long_tailed_lengths(total: int, seed: int = 0) -> tuple[int, ...]:
    """As the documents of a pre-training corpus: most are short, a few hold most of the tokens."""
    rng, lengths = random.Random(seed), []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, max(16, min(16384, round(rng.lognormvariate(6.0, 1.4))))))
    return tuple(lengths)


def _packed_cell() -> Cell:
    lengths = _long_tailed_lengths(65536)
    return Cell(len(lengths), max(lengths), 16, 128, True, lengths=lengths)


PRESETS = {
    "h200": Preset(_training_cells(), ("fwd", "bwd"), "42 training cells, bf16"),
    "gqa": Preset(
        tuple(
            Cell(batch, seqlen, 64, 128, causal, heads_k=8)
            for causal in (True, False)
            for batch, seqlen in ((4, 2048), (1, 8192), (1, 32768))
        ),
        ("fwd", "bwd"),
        "64 query heads on 8 KV heads, headdim 128",
    ),
    "qk192": Preset(
        tuple(
            Cell(batch, seqlen, 16, 192, causal, headdim_v=128)
            for causal in (True, False)
            for batch, seqlen in ((4, 4096), (1, 16384))
        ),
        ("fwd", "bwd"),
        "headdim 192 for q and k, 128 for v",
    ),
    "triton": Preset(
        tuple(
            Cell(TOKENS // seqlen, seqlen, WIDTH // headdim, headdim, causal)
            for headdim in (64, 128)
            for causal in (False, True)
            for seqlen in (1024, 4096, 16384)
        ),
        ("fwd", "bwd"),
        "for attentions written in Triton: examples/learn, FlexAttention",
    ),
    "packed": Preset((_packed_cell(),), ("fwd", "bwd"), "64k tokens of long-tailed documents"),
    "short": Preset(
        tuple(
            Cell(batch, seqlen, 16, headdim, True)
            for batch, seqlen, headdim in (
                (1, 128, 64),
                (8, 512, 64),
                (8, 512, 128),
                (2, 1024, 128),
            )
        ),
        ("fwd",),
        "short causal sequences, where the launch and the first tiles count",
        metric="us",
    ),
    "host": Preset(
        (Cell(1, 128, 16, 64, True),),
        ("fwd", "fwd_grad"),
        "host time of one call, without and with grad",
        measures="host",
        metric="us",
    ),
    "memory": Preset(
        tuple(Cell(1, seqlen, 16, 128, True) for seqlen in (2048, 8192, 32768)),
        ("fwd", "fwdbwd"),
        "peak memory beyond the inputs, by seqlen",
        measures="memory",
        metric="peak_mib",
    ),
    "cpu": Preset(
        tuple(
            Cell(1, seqlen, 8, 64, causal, dtype="fp32")
            for seqlen in (2048, 8192)
            for causal in (False, True)
        ),
        ("fwd", "fwdbwd"),
        "fp32 on the CPU",
        device="cpu",
    ),
    "cpu-memory": Preset(
        tuple(Cell(1, seqlen, 8, 64, True, dtype="fp32") for seqlen in (2048, 8192, 32768)),
        ("fwd", "fwdbwd"),
        "peak memory beyond the inputs on the CPU, by seqlen",
        device="cpu",
        measures="memory",
        metric="peak_mib",
    ),
}
