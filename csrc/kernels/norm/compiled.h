// The compiled kernels, for each type of x.
//   vectors  that a thread has of a row
//   in_warp  whether its threads are within a warp
//   full     whether all threads have so many, whole and aligned: these are compiled for the very
//            number, the others for 2, 4 or 9 at most
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "kernels/norm/norm.h"

namespace ikbo::norm {

using ForwardKernel = void (*)(NormForward, NormConfig);
using BackwardKernel = void (*)(NormBackward, NormConfig);

// Whether a thread of the backward has registers for the weight of its vectors in float.
constexpr bool holds_weight(int vectors, int elements, bool in_warp) {
  return vectors * elements <= (in_warp ? 32 : 16);
}

// Of the layouts that both passes are compiled for the one of so many vectors: pick(vectors) for
// rows over warps, pick(vectors, lanes) for interleaved columns of rows within a warp, as
// constants.
template <int kValue>
inline constexpr std::integral_constant<int, kValue> kNumber;
template <bool kFull, class Pick>
auto pick_over_warps(int vectors, const Pick& pick) {
  if constexpr (kFull) {
    if (vectors == 1) return pick(kNumber<1>);
    if (vectors == 3) return pick(kNumber<3>);
  }
  return vectors <= 2 ? pick(kNumber<2>) : pick(kNumber<4>);
}
template <class Pick>
auto pick_loose(int vectors, int lanes, const Pick& pick) {
  if (lanes == 8) {
    return vectors == 1 ? pick(kNumber<1>, kNumber<8>) : pick(kNumber<2>, kNumber<8>);
  }
  if (lanes == 16) {
    return vectors == 2 ? pick(kNumber<2>, kNumber<16>) : pick(kNumber<3>, kNumber<16>);
  }
  if (vectors == 2) return pick(kNumber<2>, kNumber<32>);
  return vectors == 3 ? pick(kNumber<3>, kNumber<32>) : pick(kNumber<4>, kNumber<32>);
}

// Of NormForward, what the forward of whole rows reads in forms that take no more.
struct PlainForward {
  const char *x, *weight, *bias;
  char* y;
  float *mean, *rstd;         // may be null
  uint32_t rows;              // of a group
  uint32_t x_bytes, y_bytes;  // from row to row
  float eps, per_column;
  bool evict_last;         // see NormConfig
  uint32_t ordinary_from;  // likewise
  float* row_scales;       // kQuant and kPairs alone
  // kHeads alone.
  int64_t x_group_bytes, y_group_bytes, weight_group_bytes, bias_group_bytes;
  uint32_t groups;
  float weight_offset;
};
using PlainKernel = void (*)(PlainForward);

// Of NormBackward what kernels for whole, aligned rows of one type read.
struct WholeBackward {
  const char *x, *grad_y;
  char* grad_x;
  const float *mean, *rstd;  // mean: LayerNorm only
  const char* weight;        // may be null
  float *weight_partials, *bias_partials;
  uint32_t* turns;                               // a word, where there is a lead
  uint32_t x_bytes, grad_y_bytes, grad_x_bytes;  // from row to row
  uint32_t rows, cluster, lead;
  bool evict_last;         // see NormWhole
  uint32_t ordinary_from;  // likewise
  float weight_offset;
  ElementType weight_type;
};
using WholeKernel = void (*)(WholeBackward);

// Whether a thread of norm_backward_whole_sm90 has its weight packed, in x's type: no offset then.
constexpr bool whole_packs_weight(int lanes, int vectors) { return lanes > 32 && vectors >= 3; }

// Of vectors at any address, up to 2, 4 or 9; `full`, of clusters alone, 3 or 4.
template <class T>
ForwardKernel forward_kernel(int vectors, bool in_warp, bool full);
// Of whole aligned rows in clusters, 3 or 4 vectors: norm_forward_wide_sm90.
template <class T>
ForwardKernel forward_wide_kernel(int vectors, bool layer);
// Of whole aligned rows that lie in a CTA.
enum class WholeForm {
  kGeneral,  // norm_forward_whole_sm90
  kPlain,    // norm_forward_plain_sm90
  kEarly,    // the same where rows are few, or lie within warps: weights are loaded with x
  kHeads,    // without a mean; with groups or a weight_offset
  kHalves,   // without a mean; of a row for a cluster of two, all in one CTA. 4 vectors
  kQuant,    // norm_forward_quant_sm90
  kPairs,    // norm_forward_pairs_sm90, of up to kMostPairWarps warps. 4 vectors
};
inline constexpr int kMostPairWarps = 5;
// kGeneral.
template <class T>
ForwardKernel forward_whole_kernel(int vectors, bool in_warp);
// The other forms. Null where there is none: within warps, of other lanes or vectors than
// norm_mapping() has of whole rows, or of fewer than 8 lanes.
template <class T>
PlainKernel forward_plain_kernel(int vectors, int lanes, bool layer, WholeForm form);
template <class T>
BackwardKernel backward_kernel(int vectors, bool in_warp, bool full);
// Of interleaved columns. `lanes` of a row, 8, 16, 32 or more.
template <class T>
ForwardKernel forward_loose_kernel(int vectors, int lanes, int sure, bool cluster, bool plain);
template <class T>
BackwardKernel backward_loose_kernel(int vectors, int lanes);
// Of rows within warps that need so many slots a lane, with or without sums of grad_y. Null where
// backward_loose_kernel() serves better.
template <class T>
BackwardKernel backward_rows_kernel(int vectors, int lanes, int slots, bool sums);
// A layout's, with or without sums of grad_y.
template <class T>
WholeKernel whole_kernel(const NormWhole& whole);

#define IKBO_NORM_KERNELS(T)                                                               \
  template <>                                                                              \
  ForwardKernel forward_kernel<T>(int vectors, bool in_warp, bool full);                   \
  template <>                                                                              \
  ForwardKernel forward_wide_kernel<T>(int vectors, bool layer);                           \
  template <>                                                                              \
  ForwardKernel forward_whole_kernel<T>(int vectors, bool in_warp);                        \
  template <>                                                                              \
  PlainKernel forward_plain_kernel<T>(int vectors, int lanes, bool layer, WholeForm form); \
  template <>                                                                              \
  ForwardKernel forward_loose_kernel<T>(int vectors, int lanes, int sure, bool cluster,    \
                                        bool plain);                                       \
  template <>                                                                              \
  BackwardKernel backward_kernel<T>(int vectors, bool in_warp, bool full);                 \
  template <>                                                                              \
  BackwardKernel backward_loose_kernel<T>(int vectors, int lanes);                         \
  template <>                                                                              \
  BackwardKernel backward_rows_kernel<T>(int vectors, int lanes, int slots, bool sums);    \
  template <>                                                                              \
  WholeKernel whole_kernel<T>(const NormWhole& whole);
IKBO_NORM_KERNELS(__nv_bfloat16)
IKBO_NORM_KERNELS(__half)
IKBO_NORM_KERNELS(float)
#undef IKBO_NORM_KERNELS

}  // namespace ikbo::norm
