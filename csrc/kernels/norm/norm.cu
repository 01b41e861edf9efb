#include <algorithm>
#include <initializer_list>

#include "hopper/dependent_launch.cuh"
#include "kernels/norm/compiled.h"
#include "kernels/norm/looped_sm90.cuh"
#include "kernels/norm/norm.h"
#include "kernels/norm/sums_sm90.cuh"
#include "launch/launch.h"

namespace ikbo {
namespace norm {
namespace {

// A kernel and not a memset: the next one's CTAs may be there when the kernel before this one ends.
// They wait for this one's end, and so for that of the one before.
__global__ void norm_clear_sm90(uint32_t* counter) {
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  *counter = 0;
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

// pick(zero), of x's type.
template <class Pick>
auto of_type(ElementType type, const Pick& pick) {
  if (type == ElementType::kBfloat16) return pick(__nv_bfloat16{});
  if (type == ElementType::kFloat16) return pick(__half{});
  return pick(float{});
}

ForwardKernel forward_kernel_of(ElementType type, int vectors, bool in_warp, bool full) {
  return of_type(type,
                 [&](auto zero) { return forward_kernel<decltype(zero)>(vectors, in_warp, full); });
}
ForwardKernel forward_wide_kernel_of(ElementType type, int vectors, bool layer) {
  return of_type(type,
                 [&](auto zero) { return forward_wide_kernel<decltype(zero)>(vectors, layer); });
}
ForwardKernel forward_loose_kernel_of(ElementType type, int vectors, int lanes, int sure,
                                      bool cluster, bool plain) {
  return of_type(type, [&](auto zero) {
    return forward_loose_kernel<decltype(zero)>(vectors, lanes, sure, cluster, plain);
  });
}
ForwardKernel forward_whole_kernel_of(ElementType type, int vectors, bool in_warp) {
  return of_type(type,
                 [&](auto zero) { return forward_whole_kernel<decltype(zero)>(vectors, in_warp); });
}
PlainKernel forward_plain_kernel_of(ElementType type, int vectors, int lanes, bool layer,
                                    WholeForm form) {
  return of_type(type, [&](auto zero) {
    return forward_plain_kernel<decltype(zero)>(vectors, lanes, layer, form);
  });
}
BackwardKernel backward_loose_kernel_of(ElementType type, int vectors, int lanes) {
  return of_type(type,
                 [&](auto zero) { return backward_loose_kernel<decltype(zero)>(vectors, lanes); });
}
BackwardKernel backward_rows_kernel_of(ElementType type, int vectors, int lanes, int slots,
                                       bool sums) {
  return of_type(type, [&](auto zero) {
    return backward_rows_kernel<decltype(zero)>(vectors, lanes, slots, sums);
  });
}
BackwardKernel backward_kernel_of(ElementType type, int vectors, bool in_warp, bool full) {
  return of_type(
      type, [&](auto zero) { return backward_kernel<decltype(zero)>(vectors, in_warp, full); });
}
WholeKernel whole_kernel_of(ElementType type, const NormWhole& whole) {
  return of_type(type, [&](auto zero) { return whole_kernel<decltype(zero)>(whole); });
}
using ColumnsKernel = decltype(&norm_columns_sm90<float>);
ColumnsKernel columns_kernel_of(ElementType type) {
  return of_type(type,
                 [](auto zero) -> ColumnsKernel { return norm_columns_sm90<decltype(zero)>; });
}

// Whether rows lie one behind the other.
bool touch(std::initializer_list<NormMatrix> matrices, int64_t rows, const NormConfig& config) {
  return std::all_of(matrices.begin(), matrices.end(), [&](const NormMatrix& m) {
    return rows == 1 || m.row_bytes == config.mapping.columns * bytes_of(m.type);
  });
}

// Rows one behind the other, of one type with weight and bias, and nothing more.
bool is_plain(const NormForward& p, const NormConfig& config) {
  return config.groups == 1 && p.residual.data == nullptr && !p.quantizes() &&
         p.weight_offset == 0.0f && touch({p.x, p.y}, p.rows, config) &&
         all_of_type(p.x.type, {p.weight, p.bias, p.y});
}

// What norm_backward_rows_sm90 takes.
bool is_plain(const NormBackward& p, const NormConfig& config) {
  const NormMapping& m = config.mapping;
  const auto address = [](const NormMatrix& matrix) {
    return reinterpret_cast<uintptr_t>(matrix.data);
  };
  return m.interleaved && m.in_warp() && config.groups == 1 && config.stages >= 3 &&
         !p.grad_residual_out.data && !p.grad_residual.data && p.grad_x.data &&
         all_of_type(p.x.type, {p.grad_y, p.grad_x}) &&
         touch({p.x, p.grad_y, p.grad_x}, p.rows, config) &&
         (address(p.grad_x) - address(p.x)) % 16 == 0;
}

// Few rows are done sooner by a CTA each.
bool takes_pairs(const NormForward& p, const NormConfig& config) {
  const NormMapping& m = config.mapping;
  return p.layer && !m.in_warp() && m.thread_vectors == 4 && m.warps <= kMostPairWarps &&
         !config.keeps_parameters;
}

// Of whole rows.
WholeForm whole_form(const NormForward& p, const NormConfig& config) {
  if (p.is_usual(config.groups)) {
    if (p.row_scales) return takes_pairs(p, config) ? WholeForm::kPairs : WholeForm::kQuant;
    if (!p.quantizes() && p.y.type == p.x.type) {
      if (config.mapping.cluster == 2) return WholeForm::kHalves;
      return config.keeps_parameters ? WholeForm::kEarly : WholeForm::kPlain;
    }
  }
  const bool heads = !p.layer && !p.residual.data && !p.quantizes() &&
                     all_of_type(p.x.type, {p.weight, p.bias, p.y});
  return heads ? WholeForm::kHeads : WholeForm::kGeneral;
}

LaunchShape shape_of(const NormConfig& config) {
  LaunchShape shape{static_cast<unsigned>(config.grid),
                    static_cast<unsigned>(32 * config.mapping.warps)};
  shape.shared_bytes = config.shared_bytes();
  shape.cluster = config.mapping.cluster;
  shape.overlaps_previous = !config.mapping.looped;
  return shape;
}

// Of a form that has such a kernel.
void run_plain(const NormForward& p, const NormConfig& config, WholeForm form, PlainKernel kernel,
               cudaStream_t stream) {
  PlainForward w{};
  w.x = static_cast<const char*>(p.x.data);
  w.weight = static_cast<const char*>(p.weight.data);
  w.bias = static_cast<const char*>(p.bias.data);
  w.y = static_cast<char*>(p.y.data);
  w.mean = p.mean;
  w.rstd = p.rstd;
  w.rows = static_cast<uint32_t>(p.rows);
  w.x_bytes = static_cast<uint32_t>(p.x.row_bytes);
  w.y_bytes = static_cast<uint32_t>(p.y.row_bytes);
  w.eps = p.eps;
  w.per_column = config.per_column;
  w.evict_last = config.evict_last;
  w.ordinary_from = config.ordinary_from;
  w.row_scales = p.row_scales;
  w.x_group_bytes = p.x.group_bytes;
  w.y_group_bytes = p.y.group_bytes;
  w.weight_group_bytes = p.weight.group_bytes;
  w.bias_group_bytes = p.bias.group_bytes;
  w.groups = static_cast<uint32_t>(config.groups);
  w.weight_offset = p.weight_offset == 0.0f ? -0.0f : p.weight_offset;  // -0 changes no weight
  LaunchShape shape = shape_of(config);
  shape.shared_bytes = 0;
  if (form == WholeForm::kHalves) {
    shape.block.x *= 2;
    shape.cluster = 1;
  }
  if (form == WholeForm::kPairs) shape.grid.x = (shape.grid.x + 1) / 2;
  launch(kernel, shape, stream, w);
}

void run_whole(const NormForward& p, const NormConfig& config, cudaStream_t stream) {
  const NormMapping& m = config.mapping;
  const WholeForm form = whole_form(p, config);
  if (form != WholeForm::kGeneral) {
    const PlainKernel kernel =
        forward_plain_kernel_of(p.x.type, m.thread_vectors, m.lanes, p.layer, form);
    if (kernel) return run_plain(p, config, form, kernel, stream);
  }
  launch(forward_whole_kernel_of(p.x.type, m.thread_vectors, m.in_warp()), shape_of(config), stream,
         p, config);
}

void clear(uint32_t* counter, cudaStream_t stream) {
  LaunchShape shape{1, 1};
  shape.overlaps_previous = true;
  launch(norm_clear_sm90, shape, stream, counter);
}

// Of a problem whose rows are full.
bool takes_whole(const NormBackward& p, const NormWhole& whole) {
  const bool takes_weight = !(whole.wide || whole_packs_weight(whole.lanes, whole.vectors)) ||
                            p.weight.data == nullptr ||
                            (p.weight.type == p.x.type && p.weight_offset == 0.0f);
  return whole.has_kernel() && p.grad_x.data != nullptr && p.grad_residual_out.data == nullptr &&
         takes_weight;
}

void run_whole(const NormBackward& p, const NormWhole& whole, cudaStream_t stream) {
  WholeBackward w{};
  w.x = static_cast<const char*>(p.x.data);
  w.grad_y = static_cast<const char*>(p.grad_y.data);
  w.grad_x = static_cast<char*>(p.grad_x.data);
  w.mean = p.mean;
  w.rstd = p.rstd;
  w.weight = static_cast<const char*>(p.weight.data);
  w.weight_partials = p.weight_partials;
  w.bias_partials = p.bias_partials;
  w.turns = p.turns;
  w.x_bytes = static_cast<uint32_t>(p.x.row_bytes);
  w.grad_y_bytes = static_cast<uint32_t>(p.grad_y.row_bytes);
  w.grad_x_bytes = static_cast<uint32_t>(p.grad_x.row_bytes);
  w.rows = static_cast<uint32_t>(p.rows);
  w.cluster = whole.cluster;
  w.lead = whole.lead;
  w.evict_last = whole.evict_last;
  w.ordinary_from = whole.ordinary_from;
  w.weight_offset = p.weight_offset;
  w.weight_type = p.weight.type;
  LaunchShape shape{static_cast<unsigned>(whole.grid), static_cast<unsigned>(32 * whole.warps)};
  shape.shared_bytes = whole.shared_bytes();
  shape.cluster = whole.cluster;
  shape.overlaps_previous = true;
  if (whole.lead > 0) clear(p.turns, stream);
  launch(whole_kernel_of(p.x.type, whole), shape, stream, w);
}

// The sums over rows of `partials` partials.
void finish(const NormBackward& p, int64_t columns, int partials, cudaStream_t stream) {
  const unsigned operands = p.bias_partials ? 2 : 1;
  const auto ctas = [&](int each) { return static_cast<unsigned>((columns + each - 1) / each); };
  LaunchShape shape{{ctas(kFinishColumns), operands}, kFinishColumns * kFinishGroups};
  shape.overlaps_previous = p.rows > 0;
  if (partials > 0 && partials <= kQuadPartials && columns % 4 == 0 && columns >= kQuadColumns) {
    shape.grid = {ctas(4 * kQuadLanes), operands};
    shape.block = kQuadLanes * kQuadGroups;
    launch(norm_finish_quads_sm90, shape, stream, p, columns, partials);
  } else if (partials <= kFewLoads * kFinishGroups) {
    launch(norm_finish_sm90<kFewLoads>, shape, stream, p, columns, partials);
  } else {
    launch(norm_finish_sm90<kManyLoads>, shape, stream, p, columns, partials);
  }
}

// grad_weight and grad_bias of few rows, beside the kernel ahead.
void run_columns(const NormBackward& p, int64_t columns, cudaStream_t stream) {
  const int span = kColumnsLanes * 16 / bytes_of(p.x.type);
  LaunchShape shape{static_cast<unsigned>((columns + span - 1) / span), kColumnsThreads};
  shape.overlaps_previous = true;
  launch(columns_kernel_of(p.x.type), shape, stream, p, columns);
}

}  // namespace
}  // namespace norm

void run_norm_forward(const NormForward& p, const NormConfig& config, cudaStream_t stream) {
  if (config.whole) {
    norm::run_whole(p, config, stream);
    return;
  }
  if (config.mapping.looped) {
    launch(norm::norm_forward_looped_sm90, norm::shape_of(config), stream, p,
           config.mapping.columns, config.groups);
    return;
  }
  const NormMapping& m = config.mapping;
  if (config.has_counter()) norm::clear(p.counter, stream);
  if (config.wide) {
    LaunchShape shape = norm::shape_of(config);
    shape.block.x *= NormConfig::kWideTeams;
    launch(norm::forward_wide_kernel_of(p.x.type, m.thread_vectors, p.layer), shape, stream, p,
           config);
    return;
  }
  if (m.interleaved) {
    const int sure = static_cast<int>(m.cta_columns / m.warps / 32);
    launch(norm::forward_loose_kernel_of(p.x.type, m.thread_vectors, m.lanes, sure, m.cluster > 1,
                                         norm::is_plain(p, config)),
           norm::shape_of(config), stream, p, config);
    return;
  }
  // Aligned rows are here if they are clusters' and not usual.
  const bool full = m.cluster > 1 &&
                    norm::is_full({p.x, p.residual, p.residual_out}, p.rows, config) &&
                    (p.quantizes() || norm::is_full({p.y}, p.rows, config));
  launch(norm::forward_kernel_of(p.x.type, m.thread_vectors, m.in_warp(), full),
         norm::shape_of(config), stream, p, config);
}

void run_norm_backward(const NormBackward& p, const NormBackwardConfig& both, cudaStream_t stream) {
  const NormConfig& config = both.rings;
  const int64_t columns = config.mapping.columns, all_columns = columns * config.groups;
  const bool sums = p.weight_partials != nullptr || p.bias_partials != nullptr;
  int partials = p.rows > 0 ? config.partials : 0;
  if (p.rows > 0 && config.mapping.looped) {
    if (p.grad_x.data != nullptr || p.grad_residual.data != nullptr) {
      launch(norm::norm_backward_looped_sm90, norm::shape_of(config), stream, p, columns,
             config.groups);
    }
    if (sums) {
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
    const bool whole =
        p.grad_residual.data == nullptr &&
        norm::all_of_type(p.x.type, {p.grad_y, p.grad_residual_out, p.grad_x}) &&
        norm::is_full({p.x, p.grad_y, p.grad_residual_out, p.grad_x}, p.rows, config);
    const bool apart = both.whole.apart && whole && sums && p.grad_x.data != nullptr;
    if (!apart && whole && norm::takes_whole(p, both.whole)) {
      norm::run_whole(p, both.whole, stream);
      partials = both.whole.partials();
    } else {
      norm::BackwardKernel kernel = nullptr;
      if (norm::is_plain(p, config)) {
        kernel = norm::backward_rows_kernel_of(p.x.type, m.thread_vectors, m.lanes,
                                               static_cast<int>((columns + m.lanes - 1) / m.lanes),
                                               p.mean != nullptr || config.bias_sums);
      }
      if (!kernel) {
        kernel = m.interleaved ? norm::backward_loose_kernel_of(p.x.type, m.thread_vectors, m.lanes)
                               : norm::backward_kernel_of(p.x.type, m.thread_vectors, m.in_warp(),
                                                          whole && takes_weight);
      }
      if (config.lead > 0) norm::clear(p.turns, stream);
      if (apart) {
        NormBackward of_rows = p;
        of_rows.weight_partials = of_rows.bias_partials = nullptr;
        of_rows.apart = true;
        NormConfig without_sums = config;
        without_sums.bias_sums = false;
        launch(kernel, norm::shape_of(without_sums), stream, of_rows, without_sums);
        norm::run_columns(p, columns, stream);
        return;
      }
      launch(kernel, norm::shape_of(config), stream, p, config);
    }
  }
  if (sums) norm::finish(p, all_columns, partials, stream);
}

void load_norm() {
  for (const ElementType type :
       {ElementType::kBfloat16, ElementType::kFloat16, ElementType::kFloat32}) {
    load_kernel(norm::columns_kernel_of(type));
    for (const NormWhole& layout : norm_detail::kWholeLayouts) {
      for (const bool sums : {false, true}) {
        load_kernel(norm::whole_kernel_of(
            type, norm_whole_layout(layout.lanes, layout.vectors, 16 / bytes_of(type), sums)));
      }
    }
    for (const int vectors : {3, 4}) {
      for (const bool layer : {false, true}) {
        load_kernel(norm::forward_wide_kernel_of(type, vectors, layer));
      }
    }
    for (const int lanes : {8, 16, 32, 64}) {
      for (int vectors = 1; vectors <= NormMapping::kCtaThreadVectors; ++vectors) {
        for (const bool plain : {false, true}) {
          for (const int sure : {0, 32}) {
            load_kernel(norm::forward_loose_kernel_of(type, vectors, lanes, sure, false, plain));
          }
          load_kernel(norm::forward_loose_kernel_of(type, vectors, lanes, 0, true, plain));
        }
        load_kernel(norm::backward_loose_kernel_of(type, vectors, lanes));
        for (const bool sums : {false, true}) {
          const auto kernel = norm::backward_rows_kernel_of(type, vectors, lanes, 0, sums);
          if (lanes <= 32 && kernel) load_kernel(kernel);
        }
      }
    }
    for (const int vectors : NormMapping::kThreadVectors) {
      using enum norm::WholeForm;
      for (const int lanes : {8, 16, 32, 64, 96, 128, 160, 256, 512}) {
        for (const auto form : {kPlain, kEarly, kHeads, kHalves, kQuant, kPairs}) {
          for (const bool layer : {false, true}) {
            const auto kernel = norm::forward_plain_kernel_of(type, vectors, lanes, layer, form);
            if (kernel) load_kernel(kernel);
          }
        }
      }
      for (const bool in_warp : {false, true}) {
        load_kernel(norm::forward_whole_kernel_of(type, vectors, in_warp));
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
  load_kernel(norm::norm_finish_quads_sm90);
  load_kernel(norm::norm_finish_sm90<norm::kFewLoads>);
  load_kernel(norm::norm_finish_sm90<norm::kManyLoads>);
  load_kernel(norm::norm_clear_sm90);
}

}  // namespace ikbo
