// Host side of candidate_attention_sm90.cuh: tensor maps and the launch of one of its kernels.
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/candidate_attention/candidate_attention.h"
#include "kernels/candidate_attention/candidate_attention_sm90.cuh"
#include "launch/launch.h"

namespace ikbo::attention {

// Neither of the kernels for more tiles than one round takes.
template <class S>
inline constexpr bool kCutsKeys = S::kIndex != k128Jagged && S::kIndex != k128SharesKeys;

template <class S>
void launch_kernel(const AttentionOperands& o, const AttentionConfig& config, cudaStream_t stream) {
  constexpr int64_t kBytes = sizeof(typename S::T);
  const auto keys_map = [&](const void* base, int64_t head_size, int64_t batch_stride,
                            int64_t row_stride, int64_t head_stride, int64_t rows) {
    return make_tensor_map(base, o.type, {head_size, o.Hk, o.kv_rows, o.kv_batches},
                           {head_stride * kBytes, row_stride * kBytes, batch_stride * kBytes},
                           {kBlock, 1, rows, 1}, Swizzle::k128Bytes);
  };
  Params params{};
  params.q = make_tensor_map(o.q, o.type, {o.D, o.H, o.B * o.S},
                             {o.q_head_stride * kBytes, o.q_row_stride * kBytes},
                             {kBlock, 1, config.rows_together}, Swizzle::k128Bytes);
  params.k = keys_map(o.k, o.D, o.k_batch_stride, o.k_row_stride, o.k_head_stride, S::kTileN);
  params.v = keys_map(o.v, o.Dv, o.v_batch_stride, o.v_row_stride, o.v_head_stride, S::kTileN);
  params.v_few_rows =
      keys_map(o.v, o.Dv, o.v_batch_stride, o.v_row_stride, o.v_head_stride, kFewRows);
  params.v_row = keys_map(o.v, o.Dv, o.v_batch_stride, o.v_row_stride, o.v_head_stride, 1);
  params.runs = {o.user_offsets,
                 o.order,
                 o.kv_start,
                 o.kv_len,
                 static_cast<int32_t>(o.U),
                 static_cast<int32_t>(o.B),
                 static_cast<int32_t>(o.H),
                 FastDivisor(static_cast<int32_t>(o.S)),
                 static_cast<int32_t>(o.kv_rows)};
  params.cand_to_user = o.cand_to_user;
  params.out = o.out;
  params.lse = o.lse;
  params.Dv = static_cast<int32_t>(o.Dv);
  params.heads_per_kv = FastDivisor(static_cast<int32_t>(o.H / o.Hk));
  // Keys that one tile reads shouldn't push out what later ones have asked for.
  const bool read_once = config.expected_tiles == 1 && o.H == o.Hk;
  params.keys_hint = read_once ? hopper::L2Hint::kEvictFirst : hopper::L2Hint::kEvictLast;
  params.scale = o.scale;
  params.rows_together = config.rows_together;
  params.parts = FastDivisor(config.parts);
  params.most_parts = config.most_tiles * config.parts;
  if (config.tickets) params.ticket = o.words;
  if (config.expected_tiles > 0) {
    params.guess = {true, FastDivisor(config.expected_tiles),
                    FastDivisor(static_cast<int32_t>(o.H)), static_cast<int32_t>(o.B / o.U)};
  }
  if (config.shared_blocks > 0) {
    params.shared_blocks = {FastDivisor(config.ctas), FastDivisor(config.shared_blocks)};
    params.kept_flags = o.words;
  }
  params.kept = o.kept;
  static_assert(sizeof(Shared<S>) + AttentionKernel::kAlignmentBytes <= S::kConfig.shared_bytes());
  LaunchShape shape{static_cast<unsigned>(config.ctas), S::kConfig.threads()};
  shape.shared_bytes = S::kConfig.shared_bytes();
  shape.overlaps_previous = true;
  launch(candidate_attention_sm90<S>, shape, stream, params);
  if constexpr (kCutsKeys<S>) {
    if (config.parts == 1) return;
    using Added = AddedParts<S>;
    const int ctas = (config.most_tiles * Added::kOfTile + Added::kWarps - 1) / Added::kWarps;
    LaunchShape adds{static_cast<unsigned>(ctas), Added::kWarps * 32};
    adds.overlaps_previous = true;
    launch(add_attention_parts<S>, adds, stream, params);
  }
}

// Calls body(Shape<T, kKernel>) for each kernel of the table.
template <class T, class Body>
void for_each_kernel(Body body) {
  [&]<int... kKernels>(std::integer_sequence<int, kKernels...>) {
    (body.template operator()<Shape<T, kKernels>>(kKernels), ...);
  }(std::make_integer_sequence<int, kAttentionKernelCount>{});
}

}  // namespace ikbo::attention
