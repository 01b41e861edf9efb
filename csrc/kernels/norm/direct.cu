#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/norm/direct.h"
#include "kernels/norm/forward_direct_sm90.cuh"
#include "launch/launch.h"

namespace ikbo::norm {
namespace {

struct Compiled {
  ElementType type;
  int lanes, vectors, rows;
  DirectKernel kernel[2][2][2];  // layer, early, plain
};

template <class T, int kLanes, int kVectors, int kRows>
constexpr Compiled compiled(ElementType type) {
  // Of 64 for 1024 threads, weight and bias of four vectors leave none.
  constexpr bool kRegisters = kLanes * kVectors < 4096;
  return {type,
          kLanes,
          kVectors,
          kRows,
          {{{norm_forward_direct_sm90<T, kLanes, kVectors, kRows, false, false, false>,
             norm_forward_direct_sm90<T, kLanes, kVectors, kRows, false, false, true>},
            {norm_forward_direct_sm90<T, kLanes, kVectors, kRows, false, true, false>,
             norm_forward_direct_sm90<T, kLanes, kVectors, kRows, false, true, true>}},
           {{norm_forward_direct_sm90<T, kLanes, kVectors, kRows, true, false, false>,
             norm_forward_direct_sm90<T, kLanes, kVectors, kRows, true, false, true>},
            {norm_forward_direct_sm90<T, kLanes, kVectors, kRows, true, kRegisters, false>,
             norm_forward_direct_sm90<T, kLanes, kVectors, kRows, true, kRegisters, true>}}}};
}

constexpr ElementType kBf16 = ElementType::kBfloat16, kFp32 = ElementType::kFloat32;
using B = __nv_bfloat16;

// Of a layout the first is what "1" takes.
const Compiled kCompiled[] = {
    compiled<B, 8, 2, 2>(kBf16),        // 128
    compiled<B, 8, 2, 1>(kBf16),        //
    compiled<B, 16, 1, 2>(kBf16),       //
    compiled<B, 16, 1, 4>(kBf16),       //
    compiled<B, 8, 4, 1>(kBf16),        // 256
    compiled<B, 32, 1, 2>(kBf16),       //
    compiled<B, 32, 1, 4>(kBf16),       //
    compiled<B, 16, 3, 1>(kBf16),       // 384
    compiled<B, 16, 3, 2>(kBf16),       //
    compiled<B, 16, 4, 1>(kBf16),       // 512
    compiled<B, 32, 2, 1>(kBf16),       //
    compiled<B, 32, 2, 2>(kBf16),       //
    compiled<B, 16, 5, 1>(kBf16),       // 640
    compiled<B, 32, 3, 1>(kBf16),       // 768
    compiled<B, 32, 3, 2>(kBf16),       //
    compiled<B, 96, 1, 1>(kBf16),       //
    compiled<B, 32, 4, 1>(kBf16),       // 1024
    compiled<B, 64, 2, 1>(kBf16),       //
    compiled<B, 128, 1, 1>(kBf16),      //
    compiled<B, 128, 1, 2>(kBf16),      //
    compiled<B, 64, 4, 1>(kBf16),       // 2048
    compiled<B, 128, 2, 1>(kBf16),      //
    compiled<B, 256, 1, 1>(kBf16),      //
    compiled<B, 128, 4, 1>(kBf16),      // 4096
    compiled<B, 256, 2, 1>(kBf16),      //
    compiled<B, 512, 1, 1>(kBf16),      //
    compiled<B, 256, 4, 1>(kBf16),      // 8192
    compiled<B, 512, 2, 1>(kBf16),      //
    compiled<B, 1024, 1, 1>(kBf16),     //
    compiled<B, 512, 4, 1>(kBf16),      // 16384
    compiled<B, 1024, 2, 1>(kBf16),     //
    compiled<B, 1024, 4, 1>(kBf16),     // 32768
    compiled<float, 256, 4, 1>(kFp32),  // 4096
    compiled<float, 512, 2, 1>(kFp32),  //
};

struct Choice {
  int lanes = 0, vectors = 0, rows = 0, threads = 256;
  bool early = false, plain = false;
};

bool read_choice(const NormMapping& m, Choice& c) {
  const char* text = std::getenv("IKBO_NORM_DIRECT");
  if (text == nullptr || *text == 0 || *text == '0') return false;
  c.early = std::strchr(text, 'e') != nullptr;
  c.plain = std::strchr(text, 'p') != nullptr;
  if (const char* threads = std::strchr(text, ':')) c.threads = std::atoi(threads + 1);
  if (std::sscanf(text, "%dx%dx%d", &c.lanes, &c.vectors, &c.rows) == 3) return true;
  c.lanes = m.cluster == 1 ? m.lanes : 0;
  c.vectors = m.thread_vectors;
  c.rows = 0;
  return true;
}

bool is_aligned(const NormMatrix& m, int64_t rows) {
  return m.data == nullptr ||
         (reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && (rows <= 1 || m.row_bytes % 16 == 0));
}

}  // namespace

bool run_direct(const NormForward& p, const NormConfig& config, cudaStream_t stream) {
  Choice choice;
  if (!read_choice(config.mapping, choice)) return false;
  const auto has_type = [&](const NormMatrix& m) {
    return m.data == nullptr || m.type == p.x.type;
  };
  if (config.groups != 1 || p.weight_offset != 0.0f || (!p.layer && p.bias.data) || p.quantizes() ||
      p.residual.data || p.residual_out.data || !has_type(p.weight) || !has_type(p.bias) ||
      !has_type(p.y) || !is_aligned(p.x, p.rows) || !is_aligned(p.y, p.rows) ||
      !is_aligned(p.weight, 1) || !is_aligned(p.bias, 1)) {
    return false;
  }
  for (const Compiled& c : kCompiled) {
    if (c.type != p.x.type || c.lanes != choice.lanes || c.vectors != choice.vectors ||
        (choice.rows > 0 && c.rows != choice.rows) ||
        int64_t{c.lanes} * c.vectors * (16 / bytes_of(c.type)) != config.mapping.columns) {
      continue;
    }
    const int threads = c.lanes <= 32 ? choice.threads : c.lanes;
    const int64_t rows_per_cta = int64_t{threads} / c.lanes * c.rows;
    LaunchShape shape{static_cast<unsigned>((p.rows + rows_per_cta - 1) / rows_per_cta),
                      static_cast<unsigned>(threads)};
    shape.overlaps_previous = true;
    const DirectForward direct{static_cast<const char*>(p.x.data),
                               static_cast<const char*>(p.weight.data),
                               static_cast<const char*>(p.bias.data),
                               static_cast<char*>(p.y.data),
                               p.x.row_bytes,
                               p.y.row_bytes,
                               p.mean,
                               p.rstd,
                               static_cast<uint32_t>(p.rows),
                               p.eps};
    launch(c.kernel[p.layer][choice.early][choice.plain], shape, stream, direct);
    return true;
  }
  return false;
}

void load_direct() {
  for (const Compiled& c : kCompiled) {
    for (const auto& of_layer : c.kernel) {
      for (const auto& early : of_layer) {
        for (const DirectKernel kernel : early) load_kernel(kernel);
      }
    }
  }
}

}  // namespace ikbo::norm
