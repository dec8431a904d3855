"""Trains a small character-level GPT on the Python standard library's own source files.

python examples/train_char_gpt.py                      # attention by flashattn
python examples/train_char_gpt.py --attention sdpa     # by torch's scaled_dot_product_attention
python examples/train_char_gpt.py --compare            # both from one seed, losses compared
"""

import argparse
import json
import math
import re
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import flashattn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LOSS_TOLERANCE = 1e-3  # fp32: flashattn against sdpa after COMPARED_STEPS from one seed
COMPARED_STEPS = 100
CORPUS_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    seqlen: int
    batch: int


SIZES = {"cpu": Size(3, 4, 128, 256, 8), "cuda": Size(8, 8, 512, 1024, 32)}


# Attentions: q, k, v of (batch, seqlen, heads, headdim) to out of the same shape, all causal.


def attention_flashattn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flashattn.flash_attn_func(q, k, v, causal=True)


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def attention_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    probabilities = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", probabilities, v)


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "flashattn": attention_flashattn,
    "sdpa": attention_sdpa,
    "math": attention_math,
}


class Block(nn.Module):
    def __init__(self, size: Size, attention: Callable) -> None:
        super().__init__()
        self.heads, self.attention = size.heads, attention
        self.norm_attention = nn.LayerNorm(size.width)
        self.norm_mlp = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.project = nn.Linear(size.width, size.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.project(self.attention(*qkv.unbind(2)).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, size: Size, vocabulary: int, attention: Callable) -> None:
        super().__init__()
        self.seqlen = size.seqlen
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.seqlen, size.width)
        self.blocks = nn.Sequential(*(Block(size, attention) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
        for _ in range(count):
            logits = self(tokens[:, -self.seqlen :])[:, -1].float()
            probabilities = (logits / 0.8).softmax(-1).cpu()
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(tokens.device)], 1)
        return tokens


class Corpus:
    """Printable ASCII of the standard library's modules, in order of their names."""

    def __init__(self, device: str) -> None:
        folder, texts, size = Path(sysconfig.get_path("stdlib")), [], 0
        for path in sorted(folder.glob("*.py")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            texts.append("".join(c for c in text if c == "\n" or " " <= c <= "~"))
            size += len(texts[-1])
            if size > CORPUS_CHARACTERS:
                break
        text = "".join(texts)
        self.files, self.characters = len(texts), sorted(set(text))
        codes = {character: code for code, character in enumerate(self.characters)}
        self.codes = codes
        self.data = torch.tensor([codes[c] for c in text], dtype=torch.uint8, device=device).long()

    def batch(self, size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(
            len(self.data) - size.seqlen - 1, (size.batch, 1), generator=generator
        )
        places = (starts + torch.arange(size.seqlen + 1)).to(self.data.device)
        rows = self.data[places]
        return rows[:, :-1], rows[:, 1:]

    def encode(self, text: str) -> Tensor:
        return torch.tensor([[self.codes[c] for c in text]], device=self.data.device)

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[code] for code in tokens.tolist())


@dataclass
class Run:
    """What one training left behind."""

    attention: str
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    peak_memory_mib: float = 0.0
    sample: str = ""


def peak_memory_mib(device: str) -> float:
    """GPU: torch's allocations. CPU: the process, interpreter and libraries included."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 2**10


def train(attention: str, corpus: Corpus, options: argparse.Namespace) -> Run:
    """The same seed gives the same weights and batches, whatever the attention."""
    size, device, run = options.size, options.device, Run(attention)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    model = GPT(size, len(corpus.characters), ATTENTIONS[attention]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    autocast = torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bf16")
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    losses = []
    start = time.perf_counter()
    interval = 0.2 if sys.stderr.isatty() else 10  # a log gets a line now and then
    with tqdm(total=options.steps, desc=attention, unit="step", mininterval=interval) as bar:
        for step in range(options.steps):
            optimizer.param_groups[0]["lr"] = options.lr * learning_rate(step, options.steps)
            tokens, targets = corpus.batch(size, generator)
            with autocast:
                logits = model(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
            bar.update()
            if step % 10 == 0 or step == options.steps - 1:  # reading a loss waits for the GPU
                bar.set_postfix(loss=f"{loss.item():.4f}")
    run.losses = [loss.item() for loss in losses]
    seconds = time.perf_counter() - start
    run.tokens_per_second = options.steps * size.batch * size.seqlen / seconds
    run.peak_memory_mib = peak_memory_mib(device)
    with autocast:
        prompt = corpus.encode("def ")
        tokens = model.generate(prompt, options.sample, generator)
    run.sample = corpus.decode(tokens[0])
    return run


def learning_rate(step: int, steps: int) -> float:
    """Up over the first tenth, then down by half a cosine to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def describe(run: Run) -> str:
    last = sum(run.losses[-10:]) / len(run.losses[-10:])
    return (
        f"{run.attention:>9}: loss {run.losses[0]:.4f} -> {last:.4f} (mean of the last 10), "
        f"{run.tokens_per_second:,.0f} tokens/s, peak memory {run.peak_memory_mib:,.0f} MiB"
    )


def save(runs: list[Run], options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, run in enumerate(runs):
        style = "-" if number == 0 else "--"  # equal curves lie on each other: both stay visible
        axes.plot(range(1, len(run.losses) + 1), run.losses, style, label=run.attention)
    axes.set_xlabel("step")
    axes.set_ylabel("cross entropy, nats a character")
    axes.set_title(f"GPT on the standard library's sources, {options.device}, {options.dtype}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(options.out / "train_char_gpt.png", dpi=120)
    (options.out / "train_char_gpt.json").write_text(json.dumps([vars(run) for run in runs]))
    print(f"curves: {options.out / 'train_char_gpt.png'}, figures: the .json beside it")


def compare(ours: Run, theirs: Run, dtype: str) -> bool:
    """Prints how far the losses are apart; whether fp32 keeps within the tolerance."""
    step = min(COMPARED_STEPS, len(ours.losses))
    gap = abs(ours.losses[step - 1] - theirs.losses[step - 1])
    largest = max(abs(a - b) for a, b in zip(ours.losses[:step], theirs.losses[:step], strict=True))
    print(
        f"loss at step {step}: {ours.attention} {ours.losses[step - 1]:.6f}, {theirs.attention} "
        f"{theirs.losses[step - 1]:.6f}, {gap:.1e} apart (largest up to there: {largest:.1e})"
    )
    if dtype != "fp32":
        print(f"(no limit in {dtype}: rounding alone moves the losses apart)")
        return True
    agree = gap <= LOSS_TOLERANCE
    print(f"limit {LOSS_TOLERANCE:g}: {'agree' if agree else 'DISAGREE'}")
    return agree


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", choices=ATTENTIONS, default="flashattn")
    parser.add_argument("--compare", action="store_true", help="train with sdpa as well, compare")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="default: fp32 on the CPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=240, help="characters to generate at the end")
    parser.add_argument("--out", type=Path, default=Path("out"))
    options = parser.parse_args()
    options.dtype = options.dtype or ("fp32" if options.device == "cpu" else "bf16")
    options.size = SIZES[options.device]
    return options


def main() -> None:
    options = parse_arguments()
    corpus = Corpus(options.device)
    print(
        f"{len(corpus.data):,} characters of {corpus.files} files; {options.size}; "
        f"{options.device}, {options.dtype}, {options.steps} steps"
    )
    names = [options.attention] + (["sdpa"] if options.compare else [])
    runs = [train(name, corpus, options) for name in names]
    for run in runs:
        print(describe(run))
    save(runs, options)
    print(f"\n{runs[0].sample}\n")
    if options.compare and not compare(*runs, options.dtype):
        sys.exit(1)


if __name__ == "__main__":
    main()
