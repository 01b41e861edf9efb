// Copies weights that the copy engine can't read (row strides that are no multiple of 16 bytes,
// transposed ones) to rows that it can.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ikbo {

// A matrix of 16-bit elements; strides in elements. The destination's rows begin at multiples of 16
// bytes and are zero from `columns` to their stride.
struct PackRows {
  const void* source;
  int64_t rows, columns;
  int64_t row_stride, column_stride;
  void* destination;
  int64_t destination_stride;  // a multiple of 8, at least `columns`
};

// Up to three matrices in one launch.
inline constexpr int kMaxPackedMatrices = 3;
void pack_rows(const PackRows* matrices, int count, cudaStream_t stream);
void load_pack_rows();

}  // namespace ikbo
