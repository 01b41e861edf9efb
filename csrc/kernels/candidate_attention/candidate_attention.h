// Host entry of the candidate attention kernels. No tensors: raw pointers, checked by the op layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "config/candidate_attention.h"
#include "launch/tensor_map.h"

namespace ikbo {

// Strides in elements, multiples of 8 but for heads' elements, which lie side by side; bases
// 16-byte aligned; out and lse contiguous.
struct AttentionOperands {
  ElementType type;  // of q, k, v and out; kBfloat16 or kFloat16
  int64_t B, S, H, Hk, D, Dv, U;
  const void* q;  // [B * S, H, D]
  int64_t q_row_stride, q_head_stride;
  const void* k;  // [kv_batches, kv_rows, Hk, D]
  const void* v;  // [kv_batches, kv_rows, Hk, Dv]
  int64_t kv_batches, kv_rows;
  int64_t k_batch_stride, k_row_stride, k_head_stride;
  int64_t v_batch_stride, v_row_stride, v_head_stride;
  const int32_t* cand_to_user;  // [B]
  const int32_t* order;         // [B] candidates grouped by user, or null where they are
  const int32_t* user_offsets;  // [U + 1]
  const int32_t* kv_start;  // where k and v are flat, [U] with kv_len and [U + 1] without; or null
  const int32_t* kv_len;    // [U] or null
  void* out;                // [B, S, H, Dv]
  float* lse;               // [B, H, S] or null
  float scale;
  uint32_t* ticket;  // where config.tickets; or null
  void* kept;        // attention_kept_bytes(config); or null
};

void run_candidate_attention(const AttentionOperands& operands, const AttentionConfig& config,
                             cudaStream_t stream);
int64_t attention_kept_bytes(const AttentionConfig& config);
void load_candidate_attention();

}  // namespace ikbo
