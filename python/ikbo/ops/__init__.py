"""The ops as Python functions: documentation, fakes, autograd, autocast. One file a function."""

from .candidate_attention import candidate_attention
from .candidate_map import CandidateMap, candidate_map
from .concat_linear import concat_linear, concat_linear_add
from .group_candidates import group_candidates
from .linear_compression import linear_compression, linear_compression_add

__all__ = [
    "CandidateMap",
    "candidate_attention",
    "candidate_map",
    "concat_linear",
    "concat_linear_add",
    "group_candidates",
    "linear_compression",
    "linear_compression_add",
]
