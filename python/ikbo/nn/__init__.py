"""Modules over the ops, with torch's names, initialisation and state dicts."""

from .attention import CandidateAttention
from .linear import ConcatLinear, LinearCompression
from .mlp import GatedMLP
from .norms import LayerNorm, RMSNorm

__all__ = [
    "CandidateAttention",
    "ConcatLinear",
    "GatedMLP",
    "LayerNorm",
    "LinearCompression",
    "RMSNorm",
]
