"""The public functions' names, parameters and defaults, word for word."""

import inspect

import pytest
import torch

import flashattn

OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
FIXED = OPTIONS + ", *, attn_mask=None, learnable_sink=None, return_lse=False"
VARLEN_END = ", *, seqused_q=None, seqused_k=None, learnable_sink=None, return_lse=False"
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None"
SIGNATURES = {
    "flash_attn_func": f"(q, k, v, {FIXED})",
    "flash_attn_qkvpacked_func": f"(qkv, {FIXED})",
    "flash_attn_kvpacked_func": f"(q, kv, {FIXED})",
    "flash_attn_varlen_func": f"(q, k, v, {LENGTHS}, {OPTIONS}, block_table=None{VARLEN_END})",
    "flash_attn_varlen_qkvpacked_func": (
        f"(qkv, cu_seqlens, max_seqlen=None, {OPTIONS}{VARLEN_END})"
    ),
    "flash_attn_varlen_kvpacked_func": f"(q, kv, {LENGTHS}, {OPTIONS}{VARLEN_END})",
    "flash_attn_with_kvcache": (
        "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, *, "
        "learnable_sink=None)"
    ),
    "flash_attn_combine": "(out_partial, lse_partial, out_dtype=None)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    signature = inspect.signature(getattr(flashattn, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]
    assert name in flashattn.__all__


def test_explain_takes_the_options_of_flash_attn_func():
    parameters = inspect.signature(flashattn.explain).parameters
    for name, parameter in inspect.signature(flashattn.flash_attn_func).parameters.items():
        assert parameters[name].default == parameter.default
        assert parameters[name].kind == parameter.kind
    assert parameters["device"].default is None
    assert parameters["device"].kind is inspect.Parameter.KEYWORD_ONLY


def test_everything_public_exists_and_is_documented():
    for name in flashattn.__all__:
        assert getattr(flashattn, name).__doc__, name


def test_op_schemas():
    """What compiled graphs and other languages see."""
    lengths = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
    numbers = "float softmax_scale, int window_left, int window_right"
    assert str(torch.ops.flashattn.forward.default._schema) == (
        f"flashattn::forward(Tensor q, Tensor k, Tensor v, {lengths}, {numbers}) "
        "-> (Tensor out, Tensor lse)"
    )
    assert str(torch.ops.flashattn.backward.default._schema) == (
        "flashattn::backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
        f"Tensor lse, {lengths}, {numbers}, bool deterministic, bool need_dq, bool need_dkv) "
        "-> (Tensor dq, Tensor dk, Tensor dv)"
    )


def test_build_info_names_the_architectures():
    info = flashattn.build_info()
    assert flashattn.__version__ in info
    assert "CUDA" in info
