#include "ops/operands.h"

#include "launch/device.h"

namespace ikbo {
namespace {

constexpr int64_t kAlignedElements = 8;  // 16 bytes
constexpr int64_t kPackedElements = 64;  // 128 bytes: what a kernel reads of a row at once

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

bool is_hopper_16_bit(const Tensor& t) {
  return t.is_cuda() && is_16_bit(t.scalar_type()) &&
         device_properties(t.get_device_index()).is_hopper();
}

DeviceLimits device_limits(int device) {
  const DeviceProperties& properties = device_properties(device);
  return {usable_sm_count(device), properties.l2_bytes, properties.max_shared_bytes_per_block};
}

bool is_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

bool has_aligned_rows(const Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  if (columns > 1 && matrix.stride(1) != 1) return false;
  if (rows > 1 && (matrix.stride(0) % kAlignedElements != 0 || matrix.stride(0) < columns)) {
    return false;
  }
  return is_aligned(matrix);
}

bool has_rows_apart(const Tensor& matrix) {
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  return (columns <= 1 || matrix.stride(1) == 1) && (rows <= 1 || matrix.stride(0) >= columns);
}

bool has_aligned_matrices(const Tensor& batch) {
  const int64_t rows = batch.size(0), height = batch.size(1), columns = batch.size(2);
  if (columns > 1 && batch.stride(2) != 1) return false;
  const auto fits = [](int64_t count, int64_t stride, int64_t least) {
    return count <= 1 || (stride % kAlignedElements == 0 && stride >= least);
  };
  return fits(height, batch.stride(1), columns) && fits(rows, batch.stride(0), columns) &&
         is_aligned(batch);
}

int64_t aligned_row_stride(const Tensor& matrix) {
  return matrix.size(0) > 1 ? matrix.stride(0) : round_up(matrix.size(1), kAlignedElements);
}

Tensor contiguous_copy(const Tensor& t) {
  return t.is_contiguous() ? torch::stable::clone(t) : torch::stable::contiguous(t);
}

Tensor as_kernels_read(const Tensor& t) {
  return t.is_contiguous() && is_aligned(t) ? t : contiguous_copy(t);
}

WeightOperands::Operand WeightOperands::read(const Tensor& weight) {
  if (has_aligned_rows(weight)) return {weight.const_data_ptr(), aligned_row_stride(weight)};
  const int64_t rows = weight.size(0), columns = weight.size(1);
  const int64_t stride = round_up(columns, kPackedElements);
  const Tensor packed = empty({rows, stride}, weight.scalar_type(), weight);
  scratch_[packed_] = packed;
  packs_[packed_++] = {
      weight.const_data_ptr(),   rows,  columns, weight.stride(0), weight.stride(1),
      packed.mutable_data_ptr(), stride};
  return {packed.const_data_ptr(), stride};
}

void WeightOperands::pack(cudaStream_t stream) const {
  if (packed_ > 0) pack_rows(packs_.data(), packed_, stream);
}

}  // namespace ikbo
