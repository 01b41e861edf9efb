#include <algorithm>
#include <cstdlib>
#include <initializer_list>

#include "hopper/dependent_launch.cuh"
#include "kernels/norm/backward_variants.h"
#include "kernels/norm/compiled.h"
#include "kernels/norm/looped_sm90.cuh"
#include "kernels/norm/norm.h"
#include "launch/launch.h"

namespace ikbo {
namespace norm {
namespace {

constexpr int kFinishColumns = 32, kFinishGroups = 16;
// Loads of a thread at once, by the number of partials: those of an H200's 132 CTAs, or of four
// times as many, in one trip to memory. (Many where few are needed cost a tenth of a small
// backward.)
constexpr int kFewLoads = 9, kManyLoads = 36;

// Adds up the partials of a column, of all groups' columns side by side, in the same order each
// time: sixteen warps take every sixteenth row each, and their sums are added one by one.
template <int kLoads>
__global__ void __launch_bounds__(kFinishColumns* kFinishGroups)
    norm_finish_sm90(const __grid_constant__ NormBackward p, int64_t columns, int partials) {
  __shared__ float sums[kFinishGroups][kFinishColumns];
  // The next kernel's CTAs may set up meanwhile: all of this one's are there, or it couldn't begin.
  hopper::allow_next_kernel();
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  const bool bias = blockIdx.y == 1;
  const float* from = bias ? p.bias_partials : p.weight_partials;
  if (from == nullptr) return;
  const int group = threadIdx.x / kFinishColumns, lane = threadIdx.x % kFinishColumns;
  const int64_t column = int64_t{blockIdx.x} * kFinishColumns + lane;
  float sum = 0.0f;
  if (column < columns) {
    for (int first = group; first < partials; first += kFinishGroups * kLoads) {
      float parts[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int64_t i = first + j * kFinishGroups;
        parts[j] = i < partials ? from[i * columns + column] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) sum += parts[j];
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || column >= columns) return;
  for (int g = 1; g < kFinishGroups; ++g) sum += sums[g][lane];
  const NormMatrix& to = bias ? p.grad_bias : p.grad_weight;
  with_type<float>(to.type, [&](auto zero) {
    using T = decltype(zero);
    static_cast<T*>(to.data)[column] = static_cast<T>(sum);
  });
}

// The same of few partials of many columns, or of many: four columns a thread.
template <int kGroups, int kLanes, int kLoads>
__global__ void __launch_bounds__(kGroups* kLanes)
    norm_finish_wide_sm90(const __grid_constant__ NormBackward p, int64_t columns, int partials) {
  __shared__ float4 sums[kGroups][kLanes];
  hopper::allow_next_kernel();
  hopper::touch(p);
  hopper::wait_for_previous_kernel();
  const bool bias = blockIdx.y == 1 || p.weight_partials == nullptr;
  const float* from = bias ? p.bias_partials : p.weight_partials;
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t quad = int64_t{blockIdx.x} * kLanes + lane, quads = columns / 4;
  float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
  if (quad < quads) {
    for (int first = group; first < partials; first += kGroups * kLoads) {
      float4 parts[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int64_t i = first + j * kGroups;
        parts[j] = i < partials ? reinterpret_cast<const float4*>(from)[i * quads + quad]
                                : float4{0.0f, 0.0f, 0.0f, 0.0f};
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        sum.x += parts[j].x, sum.y += parts[j].y, sum.z += parts[j].z, sum.w += parts[j].w;
      }
    }
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group != 0 || quad >= quads) return;
  for (int g = 1; g < kGroups; ++g) {
    const float4 more = sums[g][lane];
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  const NormMatrix& to = bias ? p.grad_bias : p.grad_weight;
  with_type<float>(to.type, [&](auto zero) {
    using T = decltype(zero);
    T* const first = static_cast<T*>(to.data) + 4 * quad;
    first[0] = static_cast<T>(sum.x), first[1] = static_cast<T>(sum.y);
    first[2] = static_cast<T>(sum.z), first[3] = static_cast<T>(sum.w);
  });
}

// grad_weight and grad_bias of few whole aligned rows, from x and grad_y themselves: beside the
// kernel that computes grad_x, which has waited for what is ahead of both.
template <class T>
__global__ void __launch_bounds__(512)
    norm_columns_sm90(const __grid_constant__ NormBackward p, int64_t columns) {
  constexpr int kVector = 16 / sizeof(T), kLanes = 16, kGroups = 32, kSpan = kLanes * kVector;
  constexpr int kUnroll = 4;
  __shared__ float sums[2][kGroups][kSpan];
  hopper::allow_next_kernel();
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t column = int64_t{blockIdx.x} * kSpan + lane * kVector;
  float weight_sums[kVector] = {}, bias_sums[kVector] = {};
  const int rows = static_cast<int>(p.rows);
  if (column < columns) {
    const char* const x = static_cast<const char*>(p.x.data) + column * sizeof(T);
    const char* const grad = static_cast<const char*>(p.grad_y.data) + column * sizeof(T);
    for (int first = group; first < rows; first += kGroups * kUnroll) {
      Words<4> x_words[kUnroll], grad_words[kUnroll];
      float rstd[kUnroll], mean[kUnroll];
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        const int row = first + j * kGroups;
        x_words[j] = grad_words[j] = Words<4>{};
        rstd[j] = mean[j] = 0.0f;
        if (row >= rows) continue;
        x_words[j] = load_words<4>(x + row * p.x.row_bytes);
        grad_words[j] = load_words<4>(grad + row * p.grad_y.row_bytes);
        rstd[j] = p.rstd[row];
        if (p.mean) mean[j] = p.mean[row];
      }
#pragma unroll
      for (int j = 0; j < kUnroll; ++j) {
        float xhat[kVector], of_grad[kVector];
        unpack_words<T>(x_words[j], xhat);
        unpack_words<T>(grad_words[j], of_grad);
        const float shift = -mean[j] * rstd[j];
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          bias_sums[e] += of_grad[e];
          weight_sums[e] = fmaf(of_grad[e], fmaf(xhat[e], rstd[j], shift), weight_sums[e]);
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e) {
    sums[0][group][lane * kVector + e] = weight_sums[e];
    sums[1][group][lane * kVector + e] = bias_sums[e];
  }
  __syncthreads();
  const int which = threadIdx.x / kSpan, mine = threadIdx.x % kSpan;
  const int64_t at = int64_t{blockIdx.x} * kSpan + mine;
  if (which < 2 && at < columns) {
    const NormMatrix& to = which == 1 ? p.grad_bias : p.grad_weight;
    if (to.data != nullptr) {
      float sum = sums[which][0][mine];
#pragma unroll
      for (int g = 1; g < kGroups; ++g) sum += sums[which][g][mine];
      with_type<float>(to.type, [&](auto zero) {
        using O = decltype(zero);
        static_cast<O*>(to.data)[at] = static_cast<O>(sum);
      });
    }
  }
  // What waits for this kernel counts on the one before as well.
  hopper::wait_for_previous_kernel();
}

// A kernel and not a memset: the next one's CTAs may be there when the kernel before this one ends.
// They wait for this one's end, and so for that of the one before.
__global__ void norm_clear_sm90(uint32_t* counter) {
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  *counter = 0;
}

// To 16 bytes, and so are all rows.
bool is_aligned(const NormMatrix& m, int64_t rows, int groups) {
  return m.data == nullptr ||
         (reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && (rows <= 1 || m.row_bytes % 16 == 0) &&
          (groups <= 1 || m.group_bytes % 16 == 0));
}

// Whether all threads have all of their vectors whole and aligned.
bool is_full(std::initializer_list<NormMatrix> operands, int64_t rows, const NormConfig& config) {
  return config.mapping.idle_slots() == 0 &&
         std::all_of(operands.begin(), operands.end(),
                     [&](const NormMatrix& m) { return is_aligned(m, rows, config.groups); });
}

bool all_of_type(ElementType type, std::initializer_list<NormMatrix> operands) {
  return std::all_of(operands.begin(), operands.end(),
                     [&](const NormMatrix& m) { return m.data == nullptr || m.type == type; });
}

ForwardKernel forward_kernel_of(ElementType type, int vectors, bool in_warp, bool full) {
  if (type == ElementType::kBfloat16) return forward_kernel<__nv_bfloat16>(vectors, in_warp, full);
  if (type == ElementType::kFloat16) return forward_kernel<__half>(vectors, in_warp, full);
  return forward_kernel<float>(vectors, in_warp, full);
}

ForwardKernel forward_overlapped_kernel_of(ElementType type, int vectors) {
  if (type == ElementType::kBfloat16) return forward_overlapped_kernel<__nv_bfloat16>(vectors);
  if (type == ElementType::kFloat16) return forward_overlapped_kernel<__half>(vectors);
  return forward_overlapped_kernel<float>(vectors);
}

ForwardKernel forward_loose_kernel_of(ElementType type, int vectors, int lanes) {
  if (type == ElementType::kBfloat16) return forward_loose_kernel<__nv_bfloat16>(vectors, lanes);
  if (type == ElementType::kFloat16) return forward_loose_kernel<__half>(vectors, lanes);
  return forward_loose_kernel<float>(vectors, lanes);
}

BackwardKernel backward_loose_kernel_of(ElementType type, int vectors, int lanes) {
  if (type == ElementType::kBfloat16) return backward_loose_kernel<__nv_bfloat16>(vectors, lanes);
  if (type == ElementType::kFloat16) return backward_loose_kernel<__half>(vectors, lanes);
  return backward_loose_kernel<float>(vectors, lanes);
}

BackwardKernel backward_kernel_of(ElementType type, int vectors, bool in_warp, bool full) {
  if (type == ElementType::kBfloat16) return backward_kernel<__nv_bfloat16>(vectors, in_warp, full);
  if (type == ElementType::kFloat16) return backward_kernel<__half>(vectors, in_warp, full);
  return backward_kernel<float>(vectors, in_warp, full);
}

// Of a problem whose rows are full.
bool takes_overlapped(const NormForward& p, const NormConfig& config) {
  const NormMapping& m = config.mapping;
  const bool aligned_groups =
      config.groups == 1 || (p.weight.group_bytes % 16 == 0 && p.bias.group_bytes % 16 == 0);
  return m.lanes >= 3 * 32 && m.thread_vectors >= 3 && !config.direct &&
         config.rows_per_stage == 1 && config.keeps_parameters && aligned_groups &&
         p.residual.data == nullptr && all_of_type(p.x.type, {p.weight, p.bias}) &&
         (p.row_scales ? !p.layer && p.bias.data == nullptr : p.scale || p.y.type == p.x.type);
}

LaunchShape shape_of(const NormConfig& config) {
  LaunchShape shape{static_cast<unsigned>(config.grid),
                    static_cast<unsigned>(32 * config.mapping.warps)};
  shape.shared_bytes = config.shared_bytes();
  shape.cluster = config.mapping.cluster;
  shape.overlaps_previous = !config.mapping.looped;
  return shape;
}

void clear(uint32_t* counter, cudaStream_t stream) {
  LaunchShape shape{1, 1};
  shape.overlaps_previous = true;
  launch(norm_clear_sm90, shape, stream, counter);
}

}  // namespace
}  // namespace norm

void run_norm_forward(const NormForward& p, const NormConfig& config, cudaStream_t stream) {
  if (config.mapping.looped) {
    launch(norm::norm_forward_looped_sm90, norm::shape_of(config), stream, p,
           config.mapping.columns, config.groups);
    return;
  }
  const NormMapping& m = config.mapping;
  if (config.has_counter()) norm::clear(p.counter, stream);
  if (m.interleaved) {
    LaunchShape shape = norm::shape_of(config);
    if (!m.in_warp()) shape.block.x += 32;  // the porter
    launch(norm::forward_loose_kernel_of(p.x.type, m.thread_vectors, m.lanes), shape, stream, p,
           config);
    return;
  }
  // Vectors of y in fewer bits need less; rows of whole vectors have it if x's do.
  const bool full = norm::is_full({p.x, p.residual, p.residual_out}, p.rows, config) &&
                    (p.quantizes() || norm::is_full({p.y}, p.rows, config));
  if (full && norm::takes_overlapped(p, config)) {
    LaunchShape shape = norm::shape_of(config);
    shape.block.x += 32;  // exchanges sums
    launch(norm::forward_overlapped_kernel_of(p.x.type, m.thread_vectors), shape, stream, p,
           config);
    return;
  }
  launch(norm::forward_kernel_of(p.x.type, m.thread_vectors, m.in_warp(), full),
         norm::shape_of(config), stream, p, config);
}

void run_norm_backward(const NormBackward& p, const NormConfig& config, cudaStream_t stream) {
  const int64_t columns = config.mapping.columns, all_columns = columns * config.groups;
  int finish_partials = config.partials;
  if (p.rows > 0 && config.mapping.looped) {
    if (p.grad_x.data != nullptr || p.grad_residual.data != nullptr) {
      launch(norm::norm_backward_looped_sm90, norm::shape_of(config), stream, p, columns,
             config.groups);
    }
    if (p.weight_partials != nullptr || p.bias_partials != nullptr) {
      launch(norm::norm_partials_looped_sm90,
             {{static_cast<unsigned>((all_columns + 255) / 256),
               static_cast<unsigned>(config.partials)},
              256},
             stream, p, columns, config.groups);
    }
  } else if (p.rows > 0) {
    const NormMapping& m = config.mapping;
    const bool takes_weight = norm::holds_weight(m.thread_vectors, m.vector, m.in_warp()) ||
                              p.weight.data == nullptr ||
                              (p.weight.type == p.x.type && p.weight_offset == 0.0f);
    const bool full = takes_weight && p.grad_residual.data == nullptr &&
                      norm::all_of_type(p.x.type, {p.grad_y, p.grad_residual_out, p.grad_x}) &&
                      norm::is_full({p.x, p.grad_y, p.grad_residual_out, p.grad_x}, p.rows, config);
    const char* const chosen = std::getenv("IKBO_NORM_BWD");
    const norm::BackwardVariant* const variant = chosen ? norm::backward_variant(chosen) : nullptr;
    const bool apart = std::getenv("IKBO_NORM_APART") && full && config.groups == 1 &&
                       p.grad_residual_out.data == nullptr &&
                       (p.weight_partials || p.bias_partials);
    NormBackward q = p;
    NormConfig dx_config = config;
    if (apart) {
      q.weight_partials = q.bias_partials = nullptr;
      q.apart = true;
      dx_config.bias_sums = false;
    }
    if (variant && full && config.groups == 1 && !p.grad_residual_out.data && p.grad_x.data &&
        p.x.type == variant->type && variant->columns * m.cluster == columns) {
      const bool sums = p.mean || p.bias_partials;
      norm::WideBackward d{};
      d.x = static_cast<const char*>(p.x.data), d.grad_y = static_cast<const char*>(p.grad_y.data);
      d.grad_x = static_cast<char*>(p.grad_x.data), d.mean = p.mean, d.rstd = p.rstd;
      d.weight = static_cast<const char*>(p.weight.data);
      d.weight_partials = q.weight_partials, d.bias_partials = q.bias_partials;
      d.x_bytes = static_cast<uint32_t>(p.x.row_bytes);
      d.grad_y_bytes = static_cast<uint32_t>(p.grad_y.row_bytes);
      d.grad_x_bytes = static_cast<uint32_t>(p.grad_x.row_bytes);
      d.rows = static_cast<uint32_t>(p.rows), d.weight_offset = p.weight_offset;
      d.weight_type = p.weight.type, d.apart = apart;
      d.first_columns = variant->columns;
      d.cluster = m.cluster;
      const char* const lead = std::getenv("IKBO_NORM_LEAD");
      d.lead = lead ? std::atoi(lead) : config.lead;
      if (p.turns == nullptr) d.lead = 0;
      d.turns = p.turns;
      constexpr int kSms = 132;
      const int turn_rows = variant->direct[0] ? (variant->lanes <= 32 ? 32 / variant->lanes : 1) *
                                                     variant->rows
                                               : 1;
      const int blocks = static_cast<int>((p.rows + turn_rows - 1) / turn_rows);
      int resident = kSms / m.cluster;
      if (m.cluster >= 4) resident = 2 * kSms / m.cluster * 10 / 11 / 2;
      if (const char* fewer = std::getenv("IKBO_NORM_GRID")) resident = std::atoi(fewer);
      finish_partials = std::min(resident, apart ? blocks : (blocks + variant->teams - 1) / variant->teams);
      LaunchShape shape{static_cast<unsigned>(finish_partials * m.cluster),
                        static_cast<unsigned>(32 * variant->warps)};
      shape.overlaps_previous = true;
      shape.cluster = m.cluster;
      if (variant->direct[0]) {
        shape.shared_bytes = variant->direct_bytes[sums];
        if (d.lead > 0) norm::clear(p.turns, stream);
        launch(variant->direct[sums], shape, stream, static_cast<norm::DirectBackward>(d));
      } else {
        shape.shared_bytes = variant->wide_bytes;
        if (d.lead > 0) norm::clear(p.turns, stream);
        launch(variant->wide[sums], shape, stream, d);
      }
    } else {
    if (config.lead > 0) norm::clear(p.turns, stream);
    launch(m.interleaved ? norm::backward_loose_kernel_of(p.x.type, m.thread_vectors, m.lanes)
                         : norm::backward_kernel_of(p.x.type, m.thread_vectors, m.in_warp(), full),
           norm::shape_of(dx_config), stream, q, dx_config);
    }
    if (apart) {
      LaunchShape shape{static_cast<unsigned>((columns + 127) / 128), 512};
      shape.overlaps_previous = true;
      launch(norm::norm_columns_sm90<__nv_bfloat16>, shape, stream, p, columns);
      return;
    }
  }
  if (p.weight_partials == nullptr && p.bias_partials == nullptr) return;
  LaunchShape shape{
      {static_cast<unsigned>((all_columns + norm::kFinishColumns - 1) / norm::kFinishColumns), 2},
      norm::kFinishColumns * norm::kFinishGroups};
  shape.overlaps_previous = p.rows > 0;
  const int partials = p.rows > 0 ? finish_partials : 0;
  if (std::getenv("IKBO_NORM_FINISH") && all_columns % 4 == 0 &&
      (partials <= 32 || all_columns >= 4096)) {
    const int lanes = partials <= 32 ? 64 : 32;
    shape.grid = dim3(static_cast<unsigned>((all_columns / 4 + lanes - 1) / lanes),
                      p.weight_partials && p.bias_partials ? 2 : 1);
    shape.block = dim3(partials <= 32 ? 256 : 512);
    if (partials <= 32) {
      launch(norm::norm_finish_wide_sm90<4, 64, 8>, shape, stream, p, all_columns, partials);
    } else {
      launch(norm::norm_finish_wide_sm90<16, 32, 9>, shape, stream, p, all_columns, partials);
    }
    return;
  }
  launch(partials <= norm::kFewLoads * norm::kFinishGroups
             ? norm::norm_finish_sm90<norm::kFewLoads>
             : norm::norm_finish_sm90<norm::kManyLoads>,
         shape, stream, p, all_columns, partials);
}

void load_norm() {
  for (const ElementType type :
       {ElementType::kBfloat16, ElementType::kFloat16, ElementType::kFloat32}) {
    for (const int vectors : {3, 4}) load_kernel(norm::forward_overlapped_kernel_of(type, vectors));
    for (const int lanes : {8, 16, 32, 64}) {
      for (int vectors = 1; vectors <= NormMapping::kCtaThreadVectors; ++vectors) {
        load_kernel(norm::forward_loose_kernel_of(type, vectors, lanes));
        load_kernel(norm::backward_loose_kernel_of(type, vectors, lanes));
      }
    }
    for (const int vectors : NormMapping::kThreadVectors) {
      for (const bool in_warp : {false, true}) {
        for (const bool full : {false, true}) {
          load_kernel(norm::forward_kernel_of(type, vectors, in_warp, full));
          load_kernel(norm::backward_kernel_of(type, vectors, in_warp, full));
        }
      }
    }
  }
  load_kernel(norm::norm_forward_looped_sm90);
  load_kernel(norm::norm_backward_looped_sm90);
  load_kernel(norm::norm_partials_looped_sm90);
  load_kernel(norm::norm_finish_sm90<norm::kFewLoads>);
  load_kernel(norm::norm_finish_sm90<norm::kManyLoads>);
  load_kernel(norm::norm_clear_sm90);
}

}  // namespace ikbo
