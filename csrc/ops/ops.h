// Every op as a C++ function; registration.cpp binds them to their schemas. NAME returns the
// result, NAME_fwd also what training saves, NAME_bwd the gradients whose bit is set in grad_mask
// (bit i for result i; the others have size 0).
#pragma once

#include "ops/tensor.h"

namespace ikbo {

using OptDtype = std::optional<ScalarType>;

inline bool wants(int64_t grad_mask, int result) { return (grad_mask >> result) & 1; }

// group_candidates.cpp
Tensors2 group_candidates(const Tensor& cand_to_user, int64_t n_users);

// linear_compression.cpp
Tensor linear_compression(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                          const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                          const OptTensor& user_offsets, const OptTensor& order,
                          const std::string& activation);
void linear_compression_out(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                            const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                            const OptTensor& user_offsets, const OptTensor& order,
                            const std::string& activation, const Tensor& out);
Tensors2 linear_compression_fwd(const Tensor& e_cand, const Tensor& e_user, const Tensor& w_cand,
                                const Tensor& w_user, const OptTensor& bias,
                                const Tensor& cand_to_user, const OptTensor& user_offsets,
                                const OptTensor& order, const std::string& activation);
Tensors5 linear_compression_bwd(const Tensor& grad_out, const Tensor& e_cand, const Tensor& e_user,
                                const Tensor& w_cand, const Tensor& w_user, const Tensor& saved,
                                const Tensor& cand_to_user, const OptTensor& user_offsets,
                                const OptTensor& order, const std::string& activation,
                                int64_t grad_mask);
Tensor linear_compression_add(const Tensor& e_cand, const Tensor& w_cand, const Tensor& user_part,
                              const OptTensor& bias, const Tensor& cand_to_user,
                              const OptTensor& user_offsets, const OptTensor& order,
                              const std::string& activation);
Tensors2 linear_compression_add_fwd(const Tensor& e_cand, const Tensor& w_cand,
                                    const Tensor& user_part, const OptTensor& bias,
                                    const Tensor& cand_to_user, const OptTensor& user_offsets,
                                    const OptTensor& order, const std::string& activation);
Tensors4 linear_compression_add_bwd(const Tensor& grad_out, const Tensor& e_cand,
                                    const Tensor& w_cand, const Tensor& user_part,
                                    const Tensor& saved, const Tensor& cand_to_user,
                                    const OptTensor& user_offsets, const OptTensor& order,
                                    const std::string& activation, int64_t grad_mask);

// concat_linear.cpp
Tensor concat_linear(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                     const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                     const OptTensor& user_offsets, const OptTensor& order,
                     const std::string& activation);
void concat_linear_out(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                       const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                       const OptTensor& user_offsets, const OptTensor& order,
                       const std::string& activation, const Tensor& out);
Tensors2 concat_linear_fwd(const Tensor& x_cand, const Tensor& x_user, const Tensor& w_cand,
                           const Tensor& w_user, const OptTensor& bias, const Tensor& cand_to_user,
                           const OptTensor& user_offsets, const OptTensor& order,
                           const std::string& activation);
Tensors5 concat_linear_bwd(const Tensor& grad_out, const Tensor& x_cand, const Tensor& x_user,
                           const Tensor& w_cand, const Tensor& w_user, const Tensor& saved,
                           const Tensor& cand_to_user, const OptTensor& user_offsets,
                           const OptTensor& order, const std::string& activation,
                           int64_t grad_mask);
Tensor concat_linear_add(const Tensor& x_cand, const Tensor& w_cand, const Tensor& user_part,
                         const OptTensor& bias, const Tensor& cand_to_user,
                         const OptTensor& user_offsets, const OptTensor& order,
                         const std::string& activation);
Tensors2 concat_linear_add_fwd(const Tensor& x_cand, const Tensor& w_cand, const Tensor& user_part,
                               const OptTensor& bias, const Tensor& cand_to_user,
                               const OptTensor& user_offsets, const OptTensor& order,
                               const std::string& activation);
Tensors4 concat_linear_add_bwd(const Tensor& grad_out, const Tensor& x_cand, const Tensor& w_cand,
                               const Tensor& user_part, const Tensor& saved,
                               const Tensor& cand_to_user, const OptTensor& user_offsets,
                               const OptTensor& order, const std::string& activation,
                               int64_t grad_mask);

// candidate_attention.cpp
Tensor candidate_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                           const OptTensor& kv_start, const OptTensor& kv_len,
                           const Tensor& cand_to_user, const OptTensor& user_offsets,
                           const OptTensor& order, std::optional<double> scale);
void candidate_attention_out(const Tensor& q, const Tensor& k, const Tensor& v,
                             const OptTensor& kv_start, const OptTensor& kv_len,
                             const Tensor& cand_to_user, const OptTensor& user_offsets,
                             const OptTensor& order, std::optional<double> scale,
                             const Tensor& out);
Tensors2 candidate_attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const OptTensor& kv_start, const OptTensor& kv_len,
                                 const Tensor& cand_to_user, const OptTensor& user_offsets,
                                 const OptTensor& order, std::optional<double> scale);
Tensors3 candidate_attention_bwd(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& out, const Tensor& lse,
                                 const OptTensor& kv_start, const OptTensor& kv_len,
                                 const Tensor& cand_to_user, const OptTensor& user_offsets,
                                 const OptTensor& order, std::optional<double> scale,
                                 int64_t grad_mask);

// norm.cpp
Tensor rms_norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                double weight_offset, OptDtype out_dtype, int64_t normalized_ndim);
void rms_norm_out(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                  double weight_offset, OptDtype out_dtype, int64_t normalized_ndim,
                  const Tensor& out);
Tensors2 rms_norm_fwd(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                      double weight_offset, OptDtype out_dtype, int64_t normalized_ndim);
Tensors3 rms_norm_bwd(const Tensor& grad_y, const Tensor& x, const OptTensor& weight,
                      const OptTensor& bias, const Tensor& rstd, double weight_offset,
                      int64_t normalized_ndim, int64_t grad_mask);
Tensor layer_norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                  double weight_offset, OptDtype out_dtype, int64_t normalized_ndim);
void layer_norm_out(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                    double weight_offset, OptDtype out_dtype, int64_t normalized_ndim,
                    const Tensor& out);
Tensors3 layer_norm_fwd(const Tensor& x, const OptTensor& weight, const OptTensor& bias, double eps,
                        double weight_offset, OptDtype out_dtype, int64_t normalized_ndim);
Tensors3 layer_norm_bwd(const Tensor& grad_y, const Tensor& x, const OptTensor& weight,
                        const OptTensor& bias, const Tensor& mean, const Tensor& rstd,
                        double weight_offset, int64_t normalized_ndim, int64_t grad_mask);
Tensors2 add_rms_norm(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                      const OptTensor& bias, double eps, double weight_offset, OptDtype out_dtype,
                      OptDtype residual_dtype, int64_t normalized_ndim);
Tensors3 add_rms_norm_fwd(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                          const OptTensor& bias, double eps, double weight_offset,
                          OptDtype out_dtype, OptDtype residual_dtype, int64_t normalized_ndim);
Tensors4 add_rms_norm_bwd(const Tensor& grad_y, const OptTensor& grad_residual_out,
                          const Tensor& residual_out, const OptTensor& weight,
                          const OptTensor& bias, const Tensor& rstd, double weight_offset,
                          ScalarType x_dtype, ScalarType residual_dtype, int64_t normalized_ndim,
                          int64_t grad_mask);
Tensors2 add_layer_norm(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                        const OptTensor& bias, double eps, double weight_offset, OptDtype out_dtype,
                        OptDtype residual_dtype, int64_t normalized_ndim);
Tensors4 add_layer_norm_fwd(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                            const OptTensor& bias, double eps, double weight_offset,
                            OptDtype out_dtype, OptDtype residual_dtype, int64_t normalized_ndim);
Tensors4 add_layer_norm_bwd(const Tensor& grad_y, const OptTensor& grad_residual_out,
                            const Tensor& residual_out, const OptTensor& weight,
                            const OptTensor& bias, const Tensor& mean, const Tensor& rstd,
                            double weight_offset, ScalarType x_dtype, ScalarType residual_dtype,
                            int64_t normalized_ndim, int64_t grad_mask);
Tensor head_norm(const Tensor& x, const Tensor& weight, double eps, double weight_offset);
Tensors2 head_norm_fwd(const Tensor& x, const Tensor& weight, double eps, double weight_offset);
Tensors2 head_norm_bwd(const Tensor& grad_y, const Tensor& x, const Tensor& weight,
                       const Tensor& rstd, double weight_offset, int64_t grad_mask);

// norm_quant.cpp
Tensors3 rms_norm_quant(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                        const OptTensor& scale, double eps, double weight_offset,
                        int64_t normalized_ndim);
Tensors4 layer_norm_quant(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                          const OptTensor& scale, double eps, double weight_offset,
                          int64_t normalized_ndim);
Tensors4 add_rms_norm_quant(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                            const OptTensor& bias, const OptTensor& scale, double eps,
                            double weight_offset, OptDtype residual_dtype, int64_t normalized_ndim);
Tensors5 add_layer_norm_quant(const Tensor& x, const Tensor& residual, const OptTensor& weight,
                              const OptTensor& bias, const OptTensor& scale, double eps,
                              double weight_offset, OptDtype residual_dtype,
                              int64_t normalized_ndim);

// gated_linear.cpp
Tensor gated_linear(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                    const OptTensor& b_gate, const OptTensor& b_up, const std::string& activation);
void gated_linear_out(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                      const OptTensor& b_gate, const OptTensor& b_up, const std::string& activation,
                      const Tensor& out);
Tensors3 gated_linear_fwd(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                          const OptTensor& b_gate, const OptTensor& b_up,
                          const std::string& activation);
Tensors5 gated_linear_bwd(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate,
                          const Tensor& w_up, const Tensor& gate, const Tensor& up,
                          const std::string& activation, int64_t grad_mask);

// gated_mlp.cpp
Tensor gated_mlp(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, const OptTensor& b_gate,
                 const OptTensor& b_up, const Tensor& w_down, const OptTensor& b_down,
                 const std::string& activation);
void gated_mlp_out(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                   const OptTensor& b_gate, const OptTensor& b_up, const Tensor& w_down,
                   const OptTensor& b_down, const std::string& activation, const Tensor& out);
Tensors3 gated_mlp_fwd(const Tensor& x, const Tensor& w_gate, const Tensor& w_up,
                       const OptTensor& b_gate, const OptTensor& b_up, const Tensor& w_down,
                       const OptTensor& b_down, const std::string& activation);
Tensors7 gated_mlp_bwd(const Tensor& grad_out, const Tensor& x, const Tensor& w_gate,
                       const Tensor& w_up, const Tensor& w_down, const Tensor& gate,
                       const Tensor& up, const std::string& activation, int64_t grad_mask);

// linear_act.cpp
Tensor linear_act(const Tensor& x, const Tensor& w, const OptTensor& b,
                  const std::string& activation);
Tensors2 linear_act_fwd(const Tensor& x, const Tensor& w, const OptTensor& b,
                        const std::string& activation);
Tensors3 linear_act_bwd(const Tensor& grad_out, const Tensor& x, const Tensor& w,
                        const Tensor& saved, const std::string& activation, int64_t grad_mask);

}  // namespace ikbo
