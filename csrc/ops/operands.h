// 16-bit matrices as kernels read them: a pointer and a row stride in elements.
#pragma once

#include <cuda_runtime_api.h>

#include "config/device_limits.h"
#include "kernels/pack/pack_rows.h"
#include "ops/tensor.h"

namespace ikbo {

// Whether the library has kernels for the tensor's device and dtype.
bool is_hopper_16_bit(const Tensor& t);

// What a configuration is made for: as many SMs as are to be used.
DeviceLimits device_limits(int device);

bool is_aligned(const Tensor& t);  // to 16 bytes

// Whether the copy engine takes the rows of a matrix as they are: elements side by side, rows at
// multiples of 16 bytes that don't overlap.
bool has_aligned_rows(const Tensor& matrix);

// The same of rows anywhere.
bool has_rows_apart(const Tensor& matrix);

// The row stride of such a matrix. Where there is no second row, torch's may be anything.
int64_t aligned_row_stride(const Tensor& matrix);

// The same of a batch of matrices [rows, K, N]: N side by side, strides of K and of the rows.
bool has_aligned_matrices(const Tensor& batch);

// The tensor, or a contiguous copy of it: what is left of a small operand with odd strides.
Tensor contiguous_copy(const Tensor& t);

// The tensor if it is contiguous and aligned to 16 bytes, or else a copy that is.
Tensor as_kernels_read(const Tensor& t);

// The weights of a call. Those whose rows aren't aligned are packed, all by one launch.
class WeightOperands {
 public:
  struct Operand {
    const void* data;
    int64_t row_stride;
  };

  // At most kMaxPackedMatrices times.
  Operand read(const Tensor& weight);
  // After the last read(), before a kernel reads them.
  void pack(cudaStream_t stream) const;
  int packed() const { return packed_; }

 private:
  std::array<PackRows, kMaxPackedMatrices> packs_;
  std::array<OptTensor, kMaxPackedMatrices> scratch_;
  int packed_ = 0;
};

}  // namespace ikbo
