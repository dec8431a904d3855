"""explain(): what it says for devices that are not here, and that it runs nothing."""

from pathlib import Path

import pytest
import torch

import flashattn

README = Path(__file__).parent.parent / "README.md"


def tensors(dtype=torch.bfloat16, device="meta", headdim=128):
    q = torch.empty(2, 1024, 8, headdim, dtype=dtype, device=device)
    k = torch.empty(2, 1024, 2, headdim, dtype=dtype, device=device)
    return q, k, k


@pytest.mark.parametrize("name", ["h200", "h100", "a100", "rtx4090"])
def test_named_device(name):
    plan = flashattn.explain(*tensors(), causal=True, device=name)
    assert plan.forward.supported
    kernel = "forward_sm90" if name in ("h200", "h100") else "forward_sm80"
    assert plan.forward.kernel == kernel
    assert plan.forward.smem_bytes > 0
    assert plan.forward.grid > 0
    assert plan.backward.workspace_bytes > 0
    text = str(plan)
    for word in (name, kernel, "causal", "tile", "grid", "FLOPs", "workspace", "why"):
        assert word in text, word
    assert max(map(len, text.splitlines())) <= 160


def test_cpu():
    plan = flashattn.explain(*tensors(torch.float32), device="cpu")
    assert plan.forward.kernel == "forward_cpu"
    assert plan.backward.kernel == "backward_cpu"
    assert "forward_cpu" in str(plan)


def test_counts_of_causal():
    """1024 rows see 1024 * 1025 / 2 keys: that many multiply-adds, 2 FLOPs each, 2 products."""
    full = flashattn.explain(*tensors(), device="h200")
    causal = flashattn.explain(*tensors(), causal=True, device="h200")
    assert full.forward.flops == 4 * 1024 * 1024 * 128 * 16
    assert causal.forward.flops == 2 * 1024 * 1025 * 128 * 16
    assert causal.backward.flops == 2.5 * causal.forward.flops
    assert full.forward.visited_blocks == full.forward.full_blocks == full.forward.all_blocks
    assert causal.forward.visited_blocks < full.forward.visited_blocks
    assert causal.forward.full_blocks < causal.forward.visited_blocks


def test_which_gradients():
    q, k, v = tensors()
    whole = flashattn.explain(q, k, v, device="h200").backward.flops
    assert flashattn.explain(q.requires_grad_(), k, v, device="h200").backward.flops < whole


def test_float32_on_a_gpu_is_explained():
    plan = flashattn.explain(*tensors(torch.float32), device="h200")
    assert not plan.forward.supported
    assert "float32" in " ".join(plan.forward.reasons)
    assert "float32" in str(plan)


def test_alignment_and_copies_are_told():
    q, k, v = tensors(headdim=65)
    assert "element-wise" in str(flashattn.explain(q, k, v, device="h200"))
    q, k, v = tensors()
    assert "16-byte" in str(flashattn.explain(q, k, v, device="a100"))
    assert "TMA" in str(flashattn.explain(q, k, v, device="h200"))
    unaligned = torch.empty(2, 1024, 8, 131, dtype=q.dtype, device="meta")[..., :128]
    assert "element-wise" in str(flashattn.explain(unaligned, k, v, device="h200"))
    q = torch.empty(2, 1024, 128, 8, dtype=q.dtype, device="meta").transpose(2, 3)
    assert "q is copied" in str(flashattn.explain(q, k, v, device="h200"))


def test_packed():
    q, k, v = (x[0] for x in tensors())
    cu_seqlens = torch.tensor([0, 100, 1024], dtype=torch.int32, device="meta")
    plan = flashattn.explain(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, device="a100"
    )
    assert "2 packed sequences" in str(plan)


def test_refuses_as_flash_attn_func_does():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="window_size"):
        flashattn.explain(q, k, v, window_size=(-5, 0), device="h200")
    with pytest.raises(NotImplementedError, match="softcap"):
        flashattn.explain(q, k, v, softcap=1.0, device="h200")
    with pytest.raises(ValueError, match="device"):
        flashattn.explain(q, k, v, device="abacus")
    with pytest.raises(ValueError, match="heads"):
        flashattn.explain(q[:, :, :7], k, v, device="h200")


def test_the_tensors_own_device(device):
    dtype = torch.float16
    plan = flashattn.explain(*tensors(dtype, device))
    kernels = ("forward_cpu",) if device == "cpu" else ("forward_sm80", "forward_sm90")
    assert plan.forward.kernel in kernels
    assert plan.forward.supported
    assert plan.backward.supported


def test_the_readme_shows_what_is_printed():
    q = torch.empty(1, 8192, 32, 128, device="meta", dtype=torch.bfloat16)
    k = torch.empty(1, 8192, 8, 128, device="meta", dtype=torch.bfloat16)
    plan = flashattn.explain(q, k, k, causal=True, device="h200")
    assert f"```\n{plan}\n```" in README.read_text()
