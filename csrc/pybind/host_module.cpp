// ikbo._host: the pure host side (configs) for tests, docs and tools. No tensors, no torch, no
// CUDA.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "config/candidate_attention.h"
#include "config/concat_linear.h"
#include "config/gated.h"
#include "config/gemm.h"
#include "config/group_candidates.h"
#include "config/linear_compression.h"
#include "config/norm.h"
#include "config/norm_backward.h"

namespace py = pybind11;

namespace {

using Tile = std::tuple<int32_t, int32_t, int32_t>;  // batch, m_tile, n_tile

Tile tile_of(const ikbo::TileOrder& order, int32_t tile) {
  if (tile < 0 || tile >= order.tiles()) throw py::index_error("no such tile");
  const ikbo::TileCoordinates at = order.at(tile);
  return {at.batch, at.m_tile, at.n_tile};
}

std::vector<Tile> tiles_of(const ikbo::GemmConfig& config, ikbo::TileSchedule schedule) {
  std::vector<Tile> tiles;
  for (; schedule.has_tile(); schedule.next()) {
    tiles.push_back(tile_of(config.order, schedule.tile()));
  }
  return tiles;
}

void bind_tile_order(py::module_& m) {
  m.def(
      "fast_divide",
      [](int32_t dividend, int32_t divisor) { return ikbo::FastDivisor(divisor).divide(dividend); },
      py::arg("dividend"), py::arg("divisor"));
  py::class_<ikbo::TileOrder>(m, "TileOrder")
      .def(py::init([](int32_t m_tiles, int32_t n_tiles, int32_t batch, int cluster_m,
                       bool groups_along_n, int group) {
             return ikbo::TileOrder({m_tiles, n_tiles, batch, cluster_m}, {groups_along_n, group});
           }),
           py::arg("m_tiles"), py::arg("n_tiles"), py::arg("batch"), py::arg("cluster_m"),
           py::arg("groups_along_n"), py::arg("group"))
      .def_property_readonly("tiles", &ikbo::TileOrder::tiles)
      .def("tile_of", &tile_of, py::arg("tile"));
}

void bind_gemm(py::module_& m) {
  using ikbo::GemmConfig;
  using ikbo::GemmKernel;
  py::class_<ikbo::DeviceLimits>(m, "DeviceLimits")
      .def(py::init<int, int64_t, int>(), py::arg("sm_count"), py::arg("l2_bytes"),
           py::arg("max_shared_bytes_per_cta"))
      .def_readonly("sm_count", &ikbo::DeviceLimits::sm_count)
      .def_readonly("l2_bytes", &ikbo::DeviceLimits::l2_bytes)
      .def_readonly("max_shared_bytes_per_cta", &ikbo::DeviceLimits::max_shared_bytes_per_cta);
  py::class_<GemmKernel>(m, "GemmKernel")
      .def_readonly("tile_m", &GemmKernel::tile_m)
      .def_readonly("tile_n", &GemmKernel::tile_n)
      .def_readonly("stages", &GemmKernel::stages)
      .def_readonly("cluster_m", &GemmKernel::cluster_m)
      .def_property_readonly("schedule",
                             [](const GemmKernel& kernel) { return ikbo::name(kernel.schedule); })
      .def_property_readonly("accumulators", &GemmKernel::accumulators)
      .def_property_readonly("shared_bytes", &GemmKernel::shared_bytes)
      .def("__repr__", [](const GemmKernel& kernel) { return ikbo::name(kernel); });
  py::class_<GemmConfig>(m, "GemmConfig")
      .def_property_readonly(
          "kernel", [](const GemmConfig& config) { return ikbo::kGemmKernels[config.kernel]; })
      .def_readonly("grid", &GemmConfig::grid)
      .def_readonly("m_tiles", &GemmConfig::m_tiles)
      .def_readonly("n_tiles", &GemmConfig::n_tiles)
      .def_readonly("k_steps", &GemmConfig::k_steps)
      .def_readonly("waves", &GemmConfig::waves)
      .def_readonly("clocks", &GemmConfig::clocks)
      .def_readonly("utilisation", &GemmConfig::utilisation)
      .def_readonly("order", &GemmConfig::order)
      .def_property_readonly("groups_along_n",
                             [](const GemmConfig& config) { return config.raster.groups_along_n; })
      .def_property_readonly("group", [](const GemmConfig& config) { return config.raster.group; })
      .def(
          "tiles_of_cta",
          [](const GemmConfig& config, int cta) {
            return tiles_of(config,
                            ikbo::TileSchedule::of_cta(cta, config.grid, config.order.tiles()));
          },
          py::arg("cta"))
      .def(
          "tiles_of_consumer",
          [](const GemmConfig& config, int cta, int consumer) {
            return tiles_of(config, ikbo::TileSchedule::of_consumer(cta, consumer, config.grid,
                                                                    config.order.tiles()));
          },
          py::arg("cta"), py::arg("consumer"))
      .def("__repr__", [](const GemmConfig& config) { return ikbo::to_json(config); });
  m.def("gemm_kernels", [] {
    return std::vector<GemmKernel>(std::begin(ikbo::kGemmKernels), std::end(ikbo::kGemmKernels));
  });
  m.def(
      "gemm_config",
      [](int64_t M, int64_t N, int64_t K, int64_t batch, const ikbo::DeviceLimits& device) {
        return ikbo::gemm_config({M, N, K, batch}, device);
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("batch"), py::arg("device"));
  m.def(
      "gemm_decline_reason",
      [](int64_t M, int64_t N, int64_t K, int64_t batch, const ikbo::DeviceLimits& device) {
        return ikbo::gemm_decline_reason({M, N, K, batch}, device);
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("batch"), py::arg("device"));
}

void bind_concat_linear(py::module_& m) {
  using Config = ikbo::ConcatLinearConfig;
  py::class_<Config>(m, "ConcatLinearConfig")
      .def_readonly("candidates", &Config::candidates)
      .def_property_readonly("users",
                             [](const Config& config) -> std::optional<ikbo::GemmConfig> {
                               if (config.user_product != ikbo::UserProduct::kGemm) return {};
                               return config.users;
                             })
      .def_property_readonly(
          "few_users",
          [](const Config& config) { return config.user_product == ikbo::UserProduct::kFewRows; })
      .def_property_readonly("launches", &Config::launches)
      .def("__repr__", [](const Config& config) { return ikbo::to_json(config); });
  m.def(
      "concat_linear_config",
      [](int64_t B, int64_t U, int64_t N, int64_t Kc, int64_t Ku,
         const ikbo::DeviceLimits& device) {
        if (B < 1 || N < 1 ||
            ikbo::concat_linear_decline_reason({B, U, N, Kc, Ku}, device) != nullptr) {
          throw py::value_error("a problem without an output, or one that is declined");
        }
        return ikbo::concat_linear_config({B, U, N, Kc, Ku}, device);
      },
      py::arg("B"), py::arg("U"), py::arg("N"), py::arg("Kc"), py::arg("Ku"), py::arg("device"));
  m.def(
      "concat_linear_decline_reason",
      [](int64_t B, int64_t U, int64_t N, int64_t Kc, int64_t Ku,
         const ikbo::DeviceLimits& device) {
        return ikbo::concat_linear_decline_reason({B, U, N, Kc, Ku}, device);
      },
      py::arg("B"), py::arg("U"), py::arg("N"), py::arg("Kc"), py::arg("Ku"), py::arg("device"));
}

void require_kernel(const ikbo::LinearProblem& problem, const char* decline_reason) {
  if (problem.M < 1 || problem.N < 1 || decline_reason != nullptr) {
    throw py::value_error("a problem without an output, or one that is declined");
  }
}

// A GemmConfig or a WeightStreamConfig; None for the narrow kernel, which has nothing to configure.
py::object product_of(const ikbo::ProductConfig& config) {
  if (config.kernel == ikbo::ProductKernel::kGemm) return py::cast(config.gemm);
  if (config.kernel == ikbo::ProductKernel::kWeightStream) return py::cast(config.stream);
  return py::none();
}

void bind_weight_stream(py::module_& m) {
  using Config = ikbo::WeightStreamConfig;
  py::class_<Config>(m, "WeightStreamConfig")
      .def_readonly("tokens", &Config::tokens)
      .def_readonly("weights", &Config::weights)
      .def_readonly("features", &Config::features)
      .def_readonly("split", &Config::split)
      .def_readonly("tiles", &Config::tiles)
      .def_readonly("token_tiles", &Config::token_tiles)
      .def_readonly("k_steps", &Config::k_steps)
      .def_readonly("weights_stay", &Config::weights_stay)
      .def_readonly("clocks", &Config::clocks)
      .def_property_readonly("ctas", &Config::ctas)
      .def("__repr__", [](const Config& config) { return ikbo::to_json(config); });
}

void bind_gated(py::module_& m) {
  using ikbo::DeviceLimits;
  using ikbo::GatedLinearConfig;
  using ikbo::GatedMlpConfig;
  using ikbo::LinearActConfig;
  py::class_<LinearActConfig>(m, "LinearActConfig")
      .def_property_readonly(
          "product", [](const LinearActConfig& config) { return product_of(config.product); })
      .def_property_readonly("launches", &LinearActConfig::launches)
      .def("__repr__", [](const LinearActConfig& config) { return ikbo::to_json(config); });
  py::class_<GatedLinearConfig>(m, "GatedLinearConfig")
      .def_property_readonly(
          "product", [](const GatedLinearConfig& config) { return product_of(config.product); })
      .def_property_readonly("launches", &GatedLinearConfig::launches)
      .def("__repr__", [](const GatedLinearConfig& config) { return ikbo::to_json(config); });
  py::class_<GatedMlpConfig>(m, "GatedMlpConfig")
      .def_property_readonly("hidden",
                             [](const GatedMlpConfig& config) { return product_of(config.hidden); })
      .def_property_readonly("down",
                             [](const GatedMlpConfig& config) { return product_of(config.down); })
      .def_property_readonly("launches", &GatedMlpConfig::launches)
      .def("__repr__", [](const GatedMlpConfig& config) { return ikbo::to_json(config); });
  const auto bind_one = [&m](const std::string& op, auto decline_reason, auto config) {
    m.def((op + "_decline_reason").c_str(),
          [=](int64_t M, int64_t N, int64_t K, const DeviceLimits& device) {
            return decline_reason({M, N, K}, device);
          },
          py::arg("M"), py::arg("N"), py::arg("K"), py::arg("device"));
    m.def((op + "_config").c_str(),
          [=](int64_t M, int64_t N, int64_t K, const DeviceLimits& device) {
            require_kernel({M, N, K}, decline_reason({M, N, K}, device));
            return config({M, N, K}, device);
          },
          py::arg("M"), py::arg("N"), py::arg("K"), py::arg("device"));
  };
  bind_one("linear_act", &ikbo::linear_act_decline_reason, &ikbo::linear_act_config);
  bind_one("gated_linear", &ikbo::gated_linear_decline_reason, &ikbo::gated_linear_config);
  using ikbo::GatedGradConfig;
  py::class_<GatedGradConfig>(m, "GatedGradConfig")
      .def_property_readonly("hidden",
                             [](const GatedGradConfig& config) {
                               return config.has_hidden ? std::optional(config.hidden)
                                                        : std::nullopt;
                             })
      .def_property_readonly("input",
                             [](const GatedGradConfig& config) {
                               return config.has_input ? std::optional(config.input) : std::nullopt;
                             })
      .def("__repr__", [](const GatedGradConfig& config) { return ikbo::to_json(config); });
  m.def(
      "gated_grad_config",
      [](int64_t M, int64_t N, int64_t K, int64_t out_features, bool wants_input,
         const DeviceLimits& device) {
        require_kernel({M, N, K}, ikbo::gated_grad_decline_reason({M, N, K}));
        return ikbo::gated_grad_config({M, N, K}, out_features, wants_input, device);
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("out_features"), py::arg("wants_input"),
      py::arg("device"));
  m.def(
      "gated_mlp_decline_reason",
      [](int64_t M, int64_t N, int64_t K, int64_t out_features, const DeviceLimits& device) {
        return ikbo::gated_mlp_decline_reason({M, N, K}, out_features, device);
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("out_features"), py::arg("device"));
  m.def(
      "gated_mlp_config",
      [](int64_t M, int64_t N, int64_t K, int64_t out_features, const DeviceLimits& device) {
        require_kernel({M, N, K}, ikbo::gated_mlp_decline_reason({M, N, K}, out_features, device));
        return ikbo::gated_mlp_config({M, N, K}, out_features, device);
      },
      py::arg("M"), py::arg("N"), py::arg("K"), py::arg("out_features"), py::arg("device"));
}

void bind_column_schedule(py::module_& m) {
  using Schedule = ikbo::ColumnSchedule;
  py::class_<Schedule>(m, "ColumnSchedule")
      .def(py::init([](int32_t units, int32_t workers, int32_t consumers, int32_t k_blocks) {
             if (std::min({units, workers, consumers, k_blocks}) < 1) {
               throw py::value_error("a schedule of nothing, or for nobody");
             }
             return Schedule(units, workers, consumers, k_blocks);
           }),
           py::arg("units"), py::arg("workers"), py::arg("consumers"), py::arg("k_blocks"))
      .def_readonly("units", &Schedule::units)
      .def_readonly("workers", &Schedule::workers)
      .def_readonly("consumers", &Schedule::consumers)
      .def_readonly("k_blocks", &Schedule::k_blocks)
      .def_readonly("full_rounds", &Schedule::full_rounds)
      .def_readonly("leftover", &Schedule::leftover)
      .def("tiles", &Schedule::tiles, py::arg("worker"), py::arg("consumer"))
      .def("unit", &Schedule::unit, py::arg("worker"), py::arg("consumer"), py::arg("tile"))
      .def("first_step", &Schedule::first_step, py::arg("consumer"))
      .def("end_step", &Schedule::end_step, py::arg("worker"), py::arg("consumer"))
      .def("steps", &Schedule::steps, py::arg("worker"));
}

void bind_linear_compression(py::module_& m) {
  using Kernel = ikbo::LinearCompressionKernel;
  using Config = ikbo::LinearCompressionConfig;
  using Plan = ikbo::LinearCompressionPlan;
  py::class_<Kernel>(m, "LinearCompressionKernel")
      .def_readonly("tile_m", &Kernel::tile_m)
      .def_readonly("tile_k", &Kernel::tile_k)
      .def_readonly("w_stages", &Kernel::w_stages)
      .def_readonly("e_stages", &Kernel::e_stages)
      .def_readonly("staging_buffers", &Kernel::staging_buffers)
      .def_property_readonly("sums", &Kernel::sums)
      .def_property_readonly("shared_bytes", &Kernel::shared_bytes)
      .def("__repr__", [](const Kernel& kernel) { return ikbo::name(kernel); });
  py::class_<Config>(m, "LinearCompressionConfig")
      .def_property_readonly(
          "kernel",
          [](const Config& config) { return ikbo::kLinearCompressionKernels[config.kernel]; })
      .def_property_readonly("grid", &Config::grid)
      .def_readonly("m_tiles", &Config::m_tiles)
      .def_readonly("units_per_row", &Config::units_per_row)
      .def_readonly("schedule", &Config::schedule)
      .def_readonly("clocks", &Config::clocks)
      .def_readonly("utilisation", &Config::utilisation)
      .def("__repr__", [](const Config& config) { return ikbo::to_json(config); });
  py::class_<Plan>(m, "LinearCompressionPlan")
      .def_readonly("users", &Plan::users)
      .def_readonly("candidates", &Plan::candidates)
      .def("__repr__", [](const Plan& plan) { return ikbo::to_json(plan); });
  m.def("linear_compression_kernels", [] {
    return std::vector<Kernel>(std::begin(ikbo::kLinearCompressionKernels),
                               std::end(ikbo::kLinearCompressionKernels));
  });
  m.def(
      "linear_compression_config_of",
      [](int kernel, int64_t rows, int64_t M, int64_t N, int64_t K, bool adds_part,
         const ikbo::DeviceLimits& device) {
        if (kernel < 0 || kernel >= ikbo::kLinearCompressionKernelCount) {
          throw py::index_error("no such kernel");
        }
        if (std::min({rows, M, N}) < 1 ||
            ikbo::linear_compression_decline_reason({rows, M, N, K}, device) != nullptr) {
          throw py::value_error("a problem without an output, or one that is declined");
        }
        return ikbo::linear_compression_config_of(kernel, {rows, M, N, K}, adds_part, device);
      },
      py::arg("kernel"), py::arg("rows"), py::arg("M"), py::arg("N"), py::arg("K"),
      py::arg("adds_part"), py::arg("device"));
  m.def(
      "linear_compression_plan",
      [](int64_t B, int64_t U, int64_t M, int64_t N, int64_t Kc, int64_t Ku,
         const ikbo::DeviceLimits& device) {
        return ikbo::linear_compression_plan({B, M, N, Kc}, {U, M, N, Ku}, device);
      },
      py::arg("B"), py::arg("U"), py::arg("M"), py::arg("N"), py::arg("Kc"), py::arg("Ku"),
      py::arg("device"));
  m.def(
      "linear_compression_decline_reason",
      [](int64_t rows, int64_t M, int64_t N, int64_t K, const ikbo::DeviceLimits& device) {
        return ikbo::linear_compression_decline_reason({rows, M, N, K}, device);
      },
      py::arg("rows"), py::arg("M"), py::arg("N"), py::arg("K"), py::arg("device"));
}

void bind_candidate_attention(py::module_& m) {
  using Kernel = ikbo::AttentionKernel;
  using Config = ikbo::AttentionConfig;
  using Problem = ikbo::AttentionProblem;
  py::class_<Kernel>(m, "AttentionKernel")
      .def_readonly("head_qk", &Kernel::head_qk)
      .def_readonly("head_v", &Kernel::head_v)
      .def_readonly("tile_n", &Kernel::tile_n)
      .def_readonly("q_slots", &Kernel::q_slots)
      .def_readonly("stages", &Kernel::stages)
      .def_readonly("consumers", &Kernel::consumers)
      .def_readonly("q_in_registers", &Kernel::q_in_registers)
      .def_property_readonly("tile_m", &Kernel::tile_m)
      .def_property_readonly("shared_bytes", &Kernel::shared_bytes)
      .def("__repr__", [](const Kernel& kernel) { return ikbo::name(kernel); });
  py::class_<Problem>(m, "AttentionProblem")
      .def(py::init([](int64_t B, int64_t S, int64_t H, int64_t D, int64_t Dv, int64_t U, int64_t L,
                       bool lengths_differ, bool ordered) {
             return Problem{B, S, H, D, Dv, U, L, lengths_differ, ordered};
           }),
           py::arg("B"), py::arg("S"), py::arg("H"), py::arg("D"), py::arg("Dv"), py::arg("U"),
           py::arg("L"), py::arg("lengths_differ") = false, py::arg("ordered") = false);
  py::class_<Config>(m, "AttentionConfig")
      .def_property_readonly(
          "kernel", [](const Config& config) { return ikbo::kAttentionKernels[config.kernel]; })
      .def_readonly("parts", &Config::parts)
      .def_readonly("ctas", &Config::ctas)
      .def_readonly("rows_together", &Config::rows_together)
      .def_readonly("tickets", &Config::tickets)
      .def_readonly("expected_tiles", &Config::expected_tiles)
      .def_readonly("most_tiles", &Config::most_tiles)
      .def("__repr__", [](const Config& config) { return ikbo::to_json(config); });
  m.def("attention_kernels", [] {
    return std::vector<Kernel>(std::begin(ikbo::kAttentionKernels),
                               std::end(ikbo::kAttentionKernels));
  });
  m.def(
      "attention_config",
      [](const Problem& problem, const ikbo::DeviceLimits& device) {
        if (ikbo::attention_decline_reason(problem, device) != nullptr) {
          throw py::value_error("a problem that is declined");
        }
        return ikbo::attention_config(problem, device);
      },
      py::arg("problem"), py::arg("device"));
  m.def("attention_decline_reason", &ikbo::attention_decline_reason, py::arg("problem"),
        py::arg("device"));
}

ikbo::NormPass norm_pass(bool backward) {
  return backward ? ikbo::NormPass::kBackward : ikbo::NormPass::kForward;
}

void bind_norm(py::module_& m) {
  using ikbo::NormConfig;
  using ikbo::NormMapping;
  py::class_<NormMapping>(m, "NormMapping")
      .def_readonly("looped", &NormMapping::looped)
      .def_readonly("interleaved", &NormMapping::interleaved)
      .def_readonly("vector", &NormMapping::vector)
      .def_readonly("cluster", &NormMapping::cluster)
      .def_readonly("warps", &NormMapping::warps)
      .def_readonly("lanes", &NormMapping::lanes)
      .def_readonly("thread_vectors", &NormMapping::thread_vectors)
      .def_readonly("cta_columns", &NormMapping::cta_columns)
      .def_property_readonly("in_warp", &NormMapping::in_warp)
      .def_property_readonly("idle_slots", &NormMapping::idle_slots)
      .def("column", &NormMapping::column, py::arg("cta"), py::arg("thread"), py::arg("v"),
           py::arg("e"));
  m.def(
      "norm_mapping",
      [](int64_t columns, int element_bytes, bool backward) {
        if (columns < 1) throw py::value_error("rows without elements");
        return ikbo::norm_mapping(norm_pass(backward), columns, element_bytes);
      },
      py::arg("columns"), py::arg("element_bytes"), py::arg("backward"));
  m.def(
      "norm_max_threads",
      [](bool backward, int vectors, bool in_warp, bool full) {
        const int compiled = ikbo::norm_compiled_vectors(vectors, in_warp, full);
        return ikbo::norm_max_threads(norm_pass(backward), compiled, in_warp);
      },
      py::arg("backward"), py::arg("vectors"), py::arg("in_warp"), py::arg("full"));
  py::class_<NormConfig>(m, "NormConfig")
      .def_readonly("mapping", &NormConfig::mapping)
      .def_readonly("groups", &NormConfig::groups)
      .def_readonly("whole", &NormConfig::whole)
      .def_readonly("wide", &NormConfig::wide)
      .def_readonly("direct", &NormConfig::direct)
      .def_readonly("rows_per_stage", &NormConfig::rows_per_stage)
      .def_readonly("blocks", &NormConfig::blocks)
      .def_readonly("owners", &NormConfig::owners)
      .def_readonly("stages", &NormConfig::stages)
      .def_readonly("stage_bytes", &NormConfig::stage_bytes)
      .def_readonly("pitches", &NormConfig::pitches)
      .def_readonly("rings", &NormConfig::rings)
      .def_readonly("grid", &NormConfig::grid)
      .def_readonly("partials", &NormConfig::partials)
      .def_readonly("by_ticket", &NormConfig::by_ticket)
      .def_readonly("paced", &NormConfig::paced)
      .def_readonly("lead", &NormConfig::lead)
      .def_readonly("keeps_parameters", &NormConfig::keeps_parameters)
      .def_property_readonly("parameter_bytes", &NormConfig::parameter_bytes)
      .def_property_readonly("sum_bytes", &NormConfig::sum_bytes)
      .def_property_readonly("ring_bytes", &NormConfig::ring_bytes)
      .def_property_readonly("shared_bytes", &NormConfig::shared_bytes)
      .def("__repr__", [](const NormConfig& config) { return ikbo::to_json(config); });
  m.def(
      "norm_config",
      [](int64_t rows, int64_t columns, const std::array<int, NormConfig::kMaxStaged>& staged,
         bool bias_sums, bool backward, const ikbo::DeviceLimits& device, int groups, bool aligned,
         bool usual, bool layer) {
        if (columns < 1 || groups < 1 || staged[0] < 1)
          throw py::value_error("nothing to normalise");
        return ikbo::norm_config(norm_pass(backward),
                                 {rows, columns, groups, staged, bias_sums, aligned, usual, layer},
                                 device);
      },
      py::arg("rows"), py::arg("columns"), py::arg("staged"), py::arg("bias_sums"),
      py::arg("backward"), py::arg("device"), py::arg("groups") = 1, py::arg("aligned") = true,
      py::arg("usual") = true, py::arg("layer") = true);
  using ikbo::NormBackwardConfig;
  using ikbo::NormWhole;
  py::class_<NormWhole>(m, "NormWhole")
      .def_readonly("lanes", &NormWhole::lanes)
      .def_readonly("vectors", &NormWhole::vectors)
      .def_readonly("rows", &NormWhole::rows)
      .def_readonly("warps", &NormWhole::warps)
      .def_readonly("stages", &NormWhole::stages)
      .def_readonly("wide", &NormWhole::wide)
      .def_readonly("cluster", &NormWhole::cluster)
      .def_readonly("teams", &NormWhole::teams)
      .def_readonly("grid", &NormWhole::grid)
      .def_readonly("lead", &NormWhole::lead)
      .def_readonly("evict_last", &NormWhole::evict_last)
      .def_readonly("ordinary_from", &NormWhole::ordinary_from)
      .def_readonly("apart", &NormWhole::apart)
      .def_property_readonly("has_kernel", &NormWhole::has_kernel)
      .def_property_readonly("has_slots", &NormWhole::has_slots)
      .def_property_readonly("turn_rows", &NormWhole::turn_rows)
      .def_property_readonly("partials", &NormWhole::partials)
      .def_property_readonly("stage_bytes", &NormWhole::stage_bytes)
      .def_property_readonly("sum_bytes", &NormWhole::sum_bytes)
      .def_property_readonly("static_bytes", &NormWhole::static_bytes)
      .def_property_readonly("shared_bytes", &NormWhole::shared_bytes);
  py::class_<NormBackwardConfig>(m, "NormBackwardConfig")
      .def_readonly("rings", &NormBackwardConfig::rings)
      .def_readonly("whole", &NormBackwardConfig::whole)
      .def_property_readonly("partials", &NormBackwardConfig::partials)
      .def("__repr__", [](const NormBackwardConfig& config) { return ikbo::to_json(config); });
  m.def(
      "norm_backward_config",
      [](int64_t rows, int64_t columns, const std::array<int, NormConfig::kMaxStaged>& staged,
         bool layer, bool bias_sums, const ikbo::DeviceLimits& device, int groups) {
        if (columns < 1 || groups < 1 || staged[0] < 1)
          throw py::value_error("nothing to normalise");
        return ikbo::norm_backward_config(
            {rows, columns, groups, staged, bias_sums, true, false, layer}, device);
      },
      py::arg("rows"), py::arg("columns"), py::arg("staged"), py::arg("layer"),
      py::arg("bias_sums"), py::arg("device"), py::arg("groups") = 1);
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "Host side of ikbo's kernels: which configuration a problem gets.";
  bind_tile_order(m);
  bind_gemm(m);
  bind_concat_linear(m);
  bind_weight_stream(m);
  bind_gated(m);
  bind_column_schedule(m);
  bind_linear_compression(m);
  bind_candidate_attention(m);
  bind_norm(m);
  using Config = ikbo::GroupCandidatesConfig;
  py::class_<Config>(m, "GroupCandidatesConfig")
      .def_readonly("passes", &Config::passes)
      .def_readonly("single_cta", &Config::single_cta)
      .def_readonly("tiles", &Config::tiles)
      .def_property_readonly("launches", &Config::launches)
      .def("scratch_words", &Config::scratch_words, py::arg("rows"))
      .def("__repr__", [](const Config& config) { return ikbo::to_json(config); });
  m.def("group_candidates_config", &ikbo::group_candidates_config, py::arg("rows"),
        py::arg("n_users"));
}
