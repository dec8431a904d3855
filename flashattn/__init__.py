"""Exact attention for PyTorch on the CPU and on CUDA, forward and backward, in linear memory.

The functions have flash-attn 2's names and signatures: ``import flashattn as flash_attn`` works.
"""

from flashattn import reference
from flashattn._explain import Plan, build_info, explain
from flashattn._strict import strict
from flashattn.interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "0.1.0"

__all__ = [
    "Plan",
    "build_info",
    "explain",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "reference",
    "strict",
]
