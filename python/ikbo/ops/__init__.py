"""The ops as Python functions: documentation, fakes, autograd, autocast. One file a function."""

from .candidate_map import CandidateMap, candidate_map
from .concat_linear import concat_linear, concat_linear_add
from .gated import gated_linear, gated_mlp, linear_act
from .group_candidates import group_candidates
from .linear_compression import linear_compression, linear_compression_add

__all__ = [
    "CandidateMap",
    "candidate_map",
    "concat_linear",
    "concat_linear_add",
    "gated_linear",
    "gated_mlp",
    "group_candidates",
    "linear_act",
    "linear_compression",
    "linear_compression_add",
]
