"""The ops as Python functions: documentation, fakes, autograd, autocast. One file a function."""

from .candidate_attention import candidate_attention
from .candidate_map import CandidateMap, candidate_map
from .concat_linear import concat_linear, concat_linear_add
from .gated import gated_linear, gated_mlp, linear_act
from .group_candidates import group_candidates
from .linear_compression import linear_compression, linear_compression_add
from .norms import add_layer_norm, add_rms_norm, head_norm, layer_norm, rms_norm
from .norms_quant import add_layer_norm_quant, add_rms_norm_quant, layer_norm_quant, rms_norm_quant

__all__ = [
    "CandidateMap",
    "add_layer_norm",
    "add_layer_norm_quant",
    "add_rms_norm",
    "add_rms_norm_quant",
    "candidate_attention",
    "candidate_map",
    "concat_linear",
    "concat_linear_add",
    "gated_linear",
    "gated_mlp",
    "group_candidates",
    "head_norm",
    "layer_norm",
    "layer_norm_quant",
    "linear_act",
    "linear_compression",
    "linear_compression_add",
    "rms_norm",
    "rms_norm_quant",
]
