// Every op of ikbo: its schema and its implementation. The first file to read.
//
// NAME is for inference. NAME_fwd returns what training saves too, and carries autograd; NAME_bwd
// computes the gradients whose bit is set in grad_mask. Schemas are a contract with stored
// programs: arguments are only appended (tests/schemas.txt holds them). Fakes, autograd and
// autocast are registered from Python (python/ikbo/ops).

#include "ops/ops.h"

namespace {

#define MAP_ARGS "Tensor cand_to_user, Tensor? user_offsets=None, Tensor? order=None"
#define MAP_ARGS_BWD "Tensor cand_to_user, Tensor? user_offsets, Tensor? order"

// Defines NAME and NAME_fwd, which share arguments.
#define DEF_INFER_AND_FWD(name, args, result, fwd_results) \
  m.def(name "(" args ") -> " result);                     \
  m.def(name "_fwd(" args ") -> " fwd_results)

// The out variant returns nothing: functionalisation under torch.compile demands it.
#define DEF_OUT(name, args) m.def(name ".out(" args ", *, Tensor(a!) out) -> ()")

}  // namespace

STABLE_TORCH_LIBRARY(ikbo, m) {
  m.def("group_candidates(Tensor cand_to_user, SymInt n_users) -> "
        "(Tensor order, Tensor user_offsets)");

  // ---- products with a shared user side ------------------------------------------------------
#define LINEAR_COMPRESSION                                                              \
  "Tensor e_cand, Tensor e_user, Tensor w_cand, Tensor w_user, Tensor? bias, " MAP_ARGS \
  ", str activation=\"none\""
  DEF_INFER_AND_FWD("linear_compression", LINEAR_COMPRESSION, "Tensor",
                    "(Tensor out, Tensor preact)");
  DEF_OUT("linear_compression", LINEAR_COMPRESSION);
  m.def("linear_compression_bwd(Tensor grad_out, Tensor e_cand, Tensor e_user, Tensor w_cand, "
        "Tensor w_user, Tensor saved, " MAP_ARGS_BWD ", str activation, int grad_mask) -> "
        "(Tensor e_cand, Tensor e_user, Tensor w_cand, Tensor w_user, Tensor bias)");
#define LINEAR_COMPRESSION_ADD                                              \
  "Tensor e_cand, Tensor w_cand, Tensor user_part, Tensor? bias, " MAP_ARGS \
  ", str activation=\"none\""
  DEF_INFER_AND_FWD("linear_compression_add", LINEAR_COMPRESSION_ADD, "Tensor",
                    "(Tensor out, Tensor preact)");
  m.def("linear_compression_add_bwd(Tensor grad_out, Tensor e_cand, Tensor w_cand, "
        "Tensor user_part, Tensor saved, " MAP_ARGS_BWD ", str activation, int grad_mask) -> "
        "(Tensor e_cand, Tensor w_cand, Tensor user_part, Tensor bias)");

#define CONCAT_LINEAR                                                                   \
  "Tensor x_cand, Tensor x_user, Tensor w_cand, Tensor w_user, Tensor? bias, " MAP_ARGS \
  ", str activation=\"none\""
  DEF_INFER_AND_FWD("concat_linear", CONCAT_LINEAR, "Tensor", "(Tensor out, Tensor preact)");
  DEF_OUT("concat_linear", CONCAT_LINEAR);
  m.def("concat_linear_bwd(Tensor grad_out, Tensor x_cand, Tensor x_user, Tensor w_cand, "
        "Tensor w_user, Tensor saved, " MAP_ARGS_BWD ", str activation, int grad_mask) -> "
        "(Tensor x_cand, Tensor x_user, Tensor w_cand, Tensor w_user, Tensor bias)");
#define CONCAT_LINEAR_ADD                                                   \
  "Tensor x_cand, Tensor w_cand, Tensor user_part, Tensor? bias, " MAP_ARGS \
  ", str activation=\"none\""
  DEF_INFER_AND_FWD("concat_linear_add", CONCAT_LINEAR_ADD, "Tensor",
                    "(Tensor out, Tensor preact)");
  m.def("concat_linear_add_bwd(Tensor grad_out, Tensor x_cand, Tensor w_cand, Tensor user_part, "
        "Tensor saved, " MAP_ARGS_BWD ", str activation, int grad_mask) -> "
        "(Tensor x_cand, Tensor w_cand, Tensor user_part, Tensor bias)");

  // ---- attention over the user's history -----------------------------------------------------
#define CANDIDATE_ATTENTION \
  "Tensor q, Tensor k, Tensor v, Tensor? kv_start, Tensor? kv_len, " MAP_ARGS ", float? scale=None"
  DEF_INFER_AND_FWD("candidate_attention", CANDIDATE_ATTENTION, "Tensor",
                    "(Tensor out, Tensor lse)");
  DEF_OUT("candidate_attention", CANDIDATE_ATTENTION);
  m.def("candidate_attention_bwd(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, "
        "Tensor lse, Tensor? kv_start, Tensor? kv_len, " MAP_ARGS_BWD ", float? scale, "
        "int grad_mask) -> (Tensor q, Tensor k, Tensor v)");

  // ---- norms ---------------------------------------------------------------------------------
#define NORM(eps)                                                    \
  "Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=" eps \
  ", float weight_offset=0., ScalarType? out_dtype=None, int normalized_ndim=1"
#define ADD_NORM(eps)                                                                       \
  "Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, float eps=" eps       \
  ", float weight_offset=0., ScalarType? out_dtype=None, ScalarType? residual_dtype=None, " \
  "int normalized_ndim=1"
  DEF_INFER_AND_FWD("rms_norm", NORM("1e-06"), "Tensor", "(Tensor y, Tensor rstd)");
  DEF_OUT("rms_norm", NORM("1e-06"));
  m.def("rms_norm_bwd(Tensor grad_y, Tensor x, Tensor? weight, Tensor? bias, Tensor rstd, "
        "float weight_offset, int normalized_ndim, int grad_mask) -> "
        "(Tensor x, Tensor weight, Tensor bias)");
  DEF_INFER_AND_FWD("layer_norm", NORM("1e-05"), "Tensor", "(Tensor y, Tensor mean, Tensor rstd)");
  DEF_OUT("layer_norm", NORM("1e-05"));
  m.def("layer_norm_bwd(Tensor grad_y, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, "
        "Tensor rstd, float weight_offset, int normalized_ndim, int grad_mask) -> "
        "(Tensor x, Tensor weight, Tensor bias)");
  DEF_INFER_AND_FWD("add_rms_norm", ADD_NORM("1e-06"), "(Tensor y, Tensor residual_out)",
                    "(Tensor y, Tensor residual_out, Tensor rstd)");
  m.def("add_rms_norm_bwd(Tensor grad_y, Tensor? grad_residual_out, Tensor residual_out, "
        "Tensor? weight, Tensor? bias, Tensor rstd, float weight_offset, ScalarType x_dtype, "
        "ScalarType residual_dtype, int normalized_ndim, int grad_mask) -> "
        "(Tensor x, Tensor residual, Tensor weight, Tensor bias)");
  DEF_INFER_AND_FWD("add_layer_norm", ADD_NORM("1e-05"), "(Tensor y, Tensor residual_out)",
                    "(Tensor y, Tensor residual_out, Tensor mean, Tensor rstd)");
  m.def("add_layer_norm_bwd(Tensor grad_y, Tensor? grad_residual_out, Tensor residual_out, "
        "Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, float weight_offset, "
        "ScalarType x_dtype, ScalarType residual_dtype, int normalized_ndim, int grad_mask) -> "
        "(Tensor x, Tensor residual, Tensor weight, Tensor bias)");
  DEF_INFER_AND_FWD("head_norm", "Tensor x, Tensor weight, float eps=1e-06, float weight_offset=0.",
                    "Tensor", "(Tensor y, Tensor rstd)");
  m.def("head_norm_bwd(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd, float weight_offset, "
        "int grad_mask) -> (Tensor x, Tensor weight)");

  // fp8 e4m3 out: a scale a row is returned, or one scale for the tensor is given.
#define NORM_QUANT(eps)                                                                  \
  "Tensor x, Tensor? weight=None, Tensor? bias=None, Tensor? scale=None, float eps=" eps \
  ", float weight_offset=0., int normalized_ndim=1"
#define ADD_NORM_QUANT(eps)                                                                 \
  "Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, Tensor? scale=None, " \
  "float eps=" eps ", float weight_offset=0., ScalarType? residual_dtype=None, "            \
  "int normalized_ndim=1"
  m.def("rms_norm_quant(" NORM_QUANT("1e-06") ") -> (Tensor y_q, Tensor scale, Tensor rstd)");
  m.def("layer_norm_quant(" NORM_QUANT(
      "1e-05") ") -> "
               "(Tensor y_q, Tensor scale, Tensor mean, Tensor rstd)");
  m.def("add_rms_norm_quant(" ADD_NORM_QUANT(
      "1e-06") ") -> "
               "(Tensor y_q, Tensor scale, Tensor residual_out, Tensor rstd)");
  m.def("add_layer_norm_quant(" ADD_NORM_QUANT(
      "1e-05") ") -> "
               "(Tensor y_q, Tensor scale, Tensor residual_out, Tensor mean, Tensor rstd)");

  // ---- gated MLPs ----------------------------------------------------------------------------
#define GATED_LINEAR                                                               \
  "Tensor x, Tensor w_gate, Tensor w_up, Tensor? b_gate=None, Tensor? b_up=None, " \
  "str activation=\"silu\""
  DEF_INFER_AND_FWD("gated_linear", GATED_LINEAR, "Tensor", "(Tensor out, Tensor gate, Tensor up)");
  DEF_OUT("gated_linear", GATED_LINEAR);
  m.def("gated_linear_bwd(Tensor grad_out, Tensor x, Tensor w_gate, Tensor w_up, Tensor gate, "
        "Tensor up, str activation, int grad_mask) -> "
        "(Tensor x, Tensor w_gate, Tensor w_up, Tensor b_gate, Tensor b_up)");
#define GATED_MLP                                                                       \
  "Tensor x, Tensor w_gate, Tensor w_up, Tensor? b_gate, Tensor? b_up, Tensor w_down, " \
  "Tensor? b_down=None, str activation=\"silu\""
  DEF_INFER_AND_FWD("gated_mlp", GATED_MLP, "Tensor", "(Tensor out, Tensor gate, Tensor up)");
  DEF_OUT("gated_mlp", GATED_MLP);
  m.def("gated_mlp_bwd(Tensor grad_out, Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, "
        "Tensor gate, Tensor up, str activation, int grad_mask) -> (Tensor x, Tensor w_gate, "
        "Tensor w_up, Tensor b_gate, Tensor b_up, Tensor w_down, Tensor b_down)");
  DEF_INFER_AND_FWD("linear_act", "Tensor x, Tensor w, Tensor? b=None, str activation=\"none\"",
                    "Tensor", "(Tensor out, Tensor preact)");
  m.def("linear_act_bwd(Tensor grad_out, Tensor x, Tensor w, Tensor saved, str activation, "
        "int grad_mask) -> (Tensor x, Tensor w, Tensor b)");
}

namespace {

// One function per op serves both devices: it looks at its tensors and settles on a path.
void bind_all(torch::stable::detail::StableLibrary& m) {
#define BIND(name) m.impl(#name, TORCH_BOX(&ikbo::name))
#define BIND_OUT(name) m.impl(#name ".out", TORCH_BOX(&ikbo::name##_out))
  BIND(group_candidates);
  BIND(linear_compression);
  BIND_OUT(linear_compression);
  BIND(linear_compression_fwd);
  BIND(linear_compression_bwd);
  BIND(linear_compression_add);
  BIND(linear_compression_add_fwd);
  BIND(linear_compression_add_bwd);
  BIND(concat_linear);
  BIND_OUT(concat_linear);
  BIND(concat_linear_fwd);
  BIND(concat_linear_bwd);
  BIND(concat_linear_add);
  BIND(concat_linear_add_fwd);
  BIND(concat_linear_add_bwd);
  BIND(candidate_attention);
  BIND_OUT(candidate_attention);
  BIND(candidate_attention_fwd);
  BIND(candidate_attention_bwd);
  BIND(rms_norm);
  BIND_OUT(rms_norm);
  BIND(rms_norm_fwd);
  BIND(rms_norm_bwd);
  BIND(layer_norm);
  BIND_OUT(layer_norm);
  BIND(layer_norm_fwd);
  BIND(layer_norm_bwd);
  BIND(add_rms_norm);
  BIND(add_rms_norm_fwd);
  BIND(add_rms_norm_bwd);
  BIND(add_layer_norm);
  BIND(add_layer_norm_fwd);
  BIND(add_layer_norm_bwd);
  BIND(head_norm);
  BIND(head_norm_fwd);
  BIND(head_norm_bwd);
  BIND(rms_norm_quant);
  BIND(layer_norm_quant);
  BIND(add_rms_norm_quant);
  BIND(add_layer_norm_quant);
  BIND(gated_linear);
  BIND_OUT(gated_linear);
  BIND(gated_linear_fwd);
  BIND(gated_linear_bwd);
  BIND(gated_mlp);
  BIND_OUT(gated_mlp);
  BIND(gated_mlp_fwd);
  BIND(gated_mlp_bwd);
  BIND(linear_act);
  BIND(linear_act_fwd);
  BIND(linear_act_bwd);
#undef BIND
#undef BIND_OUT
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ikbo, CPU, m) { bind_all(m); }
STABLE_TORCH_LIBRARY_IMPL(ikbo, CUDA, m) { bind_all(m); }
