"""In a training step: autocast, activation checkpointing, data parallelism, a model that learns."""

import pytest
import torch
from cases import DTYPES, call, fixed, make_inputs, packed
from tolerance import same_bits
from torch.utils.checkpoint import checkpoint

import flashattn


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("problem", [fixed(2, 40), packed((40, 30))], ids=str)
def test_autocast(problem, autocast_dtype, device):
    """Runs in autocast's dtype; each input's gradient comes in the input's own."""
    inputs = make_inputs(problem, device, torch.float32)
    mixed = inputs.replace(
        q=inputs.q.requires_grad_(),
        k=inputs.k.requires_grad_(),
        v=inputs.v.to(autocast_dtype).requires_grad_(),
    )
    with torch.autocast(device, dtype=autocast_dtype):
        out = call(mixed, deterministic=True)
    assert out.dtype == autocast_dtype
    rounded = inputs.replace(
        **{name: getattr(inputs, name).detach().to(autocast_dtype) for name in "qkv"}
    )
    same_bits("out", out, call(rounded))
    out.float().sum().backward()
    for name in "qkv":
        assert getattr(mixed, name).grad.dtype == getattr(mixed, name).dtype
        assert getattr(mixed, name).grad.abs().sum() > 0


def test_autocast_elsewhere_changes_nothing(device):
    other = "cpu" if device == "cuda" else "cuda"
    if other == "cuda" and not torch.cuda.is_available():
        pytest.skip("autocast of the other device needs a CUDA device")
    inputs = make_inputs(fixed(1, 20), device, torch.float16)
    with torch.autocast(other, dtype=torch.bfloat16):
        assert call(inputs).dtype == torch.float16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant, device, dtype):
    inputs = make_inputs(fixed(2, 50, heads=4, heads_k=2), device, dtype)

    def run(q, k, v):
        return flashattn.flash_attn_func(q, k, v, causal=True, deterministic=True)

    results = []
    for recompute in (False, True):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = checkpoint(run, *leaves, use_reentrant=use_reentrant) if recompute else run(*leaves)
        out.backward(inputs.dout)
        results.append((out, *(leaf.grad for leaf in leaves)))
    for got, wanted in zip(*results, strict=True):
        same_bits("checkpointed", got, wanted)


class Block(torch.nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        return x + self.proj(flashattn.flash_attn_qkvpacked_func(qkv, causal=True).flatten(-2))


@pytest.fixture
def one_process_group(device, tmp_path):
    backend = "gloo" if device == "cpu" else "nccl"
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    torch.distributed.init_process_group(
        backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def step(model, x):
    model(x).float().square().mean().backward()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.filterwarnings("ignore")  # torch's own, about one process and its backends
def test_data_parallel(one_process_group, kind, device):
    dtype = DTYPES[device][-1]
    plain = Block().to(device, dtype)
    wrapped = Block().to(device, dtype)
    wrapped.load_state_dict(plain.state_dict())
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(wrapped)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(wrapped, mesh=init_device_mesh(device, (1,)))
    x = torch.randn(2, 30, 64).to(device, dtype)
    step(plain, x)
    step(model, x)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        gradient = other.grad.full_tensor() if kind == "fsdp" else other.grad
        torch.testing.assert_close(one.grad, gradient, rtol=2e-2, atol=1e-3)


def test_a_model_learns(device):
    """Recalling the token two places back: attention alone can do it."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    embedding = torch.nn.Embedding(16, 64, device=device)
    position = torch.nn.Parameter(0.1 * torch.randn(32, 64, device=device))
    block = Block().to(device)
    head = torch.nn.Linear(64, 16, device=device)
    parameters = [*embedding.parameters(), position, *block.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for _ in range(120):
        tokens = torch.randint(16, (16, 32), device=device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = head(block(embedding(tokens) + position))
        loss = torch.nn.functional.cross_entropy(
            logits[:, 2:].flatten(0, 1).float(), tokens[:, :-2].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
