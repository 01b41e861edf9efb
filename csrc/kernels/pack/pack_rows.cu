#include <algorithm>

#include "kernels/pack/pack_rows.h"
#include "launch/launch.h"

namespace ikbo {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // elements a thread writes at once, 16 bytes
constexpr int64_t kMaxCtas = 1024;

struct Matrices {
  PackRows of[kMaxPackedMatrices];
};

// Neighbouring threads take neighbours along the source's nearer dimension.
__global__ void __launch_bounds__(kThreads)
    pack_rows_sm90(const __grid_constant__ Matrices matrices) {
  const PackRows& m = matrices.of[blockIdx.y];
  const auto* source = static_cast<const uint16_t*>(m.source);
  const int64_t chunks = m.destination_stride / kChunk;
  const bool along_rows = m.row_stride < m.column_stride;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < m.rows * chunks;
       i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = along_rows ? i % m.rows : i / chunks;
    const int64_t chunk = along_rows ? i / m.rows : i % chunks;
    const uint16_t* from = source + row * m.row_stride + chunk * kChunk * m.column_stride;
    uint32_t elements[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      elements[e] = chunk * kChunk + e < m.columns ? from[e * m.column_stride] : 0;
    }
    const uint4 packed{elements[0] | elements[1] << 16, elements[2] | elements[3] << 16,
                       elements[4] | elements[5] << 16, elements[6] | elements[7] << 16};
    static_cast<uint4*>(m.destination)[row * chunks + chunk] = packed;
  }
}

}  // namespace

void pack_rows(const PackRows* matrices, int count, cudaStream_t stream) {
  Matrices params{};
  std::copy_n(matrices, count, params.of);
  int64_t chunks = 0;
  for (int i = 0; i < count; ++i) {
    chunks = std::max(chunks, matrices[i].rows * matrices[i].destination_stride / kChunk);
  }
  const int64_t ctas = std::min((chunks + kThreads - 1) / kThreads, kMaxCtas);
  launch(pack_rows_sm90, {{static_cast<unsigned>(ctas), static_cast<unsigned>(count)}, kThreads},
         stream, params);
}

void load_pack_rows() { load_kernel(pack_rows_sm90); }

}  // namespace ikbo
