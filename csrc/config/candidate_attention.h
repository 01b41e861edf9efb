// The compiled kernels of candidate attention.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace ikbo {

// Two consumers x 64 query rows of one user and head by tile_n keys, one CTA an SM.
struct AttentionKernel {
  static constexpr int kConsumers = 2;
  static constexpr int kConsumerRows = 64;  // of one wgmma
  static constexpr int kTileM = kConsumers * kConsumerRows;
  static constexpr int kElementBytes = 2;
  static constexpr int kWarpGroupThreads = 128;
  static constexpr int kThreads = (kConsumers + 1) * kWarpGroupThreads;
  static constexpr int kRegistersPerSm = 65536;
  static constexpr int kOtherRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kSmallBytes = 1024;      // barriers, tile descriptors
  static constexpr int kAlignmentBytes = 1024;  // the 128-byte swizzle repeats every 1024

  int head_qk;  // head size of queries and keys; smaller ones are filled with zeros
  int head_v;
  int tile_n;
  int stages;  // of K and of V
  // Outputs are staged where the consumer's q was, which must then be stored from before the next
  // q comes; else they have room of their own.
  bool stages_in_q;

  constexpr int q_bytes() const { return kTileM * head_qk * kElementBytes; }
  constexpr int k_bytes() const { return tile_n * head_qk * kElementBytes; }  // of a stage
  constexpr int v_bytes() const { return tile_n * head_v * kElementBytes; }
  constexpr int out_bytes() const { return kTileM * head_v * kElementBytes; }
  constexpr int shared_bytes() const {
    return q_bytes() + stages * (k_bytes() + v_bytes()) + (stages_in_q ? 0 : out_bytes()) +
           kSmallBytes + kAlignmentBytes;
  }
  // fp32 scores and outputs, and 16-bit weights, that a consumer thread holds.
  constexpr int scores() const { return tile_n / 2; }
  constexpr int outputs() const { return head_v / 2; }
  constexpr int weights() const { return tile_n / 4; }
};

inline constexpr AttentionKernel kAttentionKernels[] = {
    {64, 64, 128, 2, false},
    {128, 128, 128, 2, false},
    {192, 128, 96, 2, false},
    {256, 256, 64, 2, true},
};
inline constexpr int kAttentionKernelCount = static_cast<int>(std::size(kAttentionKernels));

constexpr bool attention_kernel_is_possible(const AttentionKernel& kernel) {
  constexpr int kMaxSharedBytes = 227 * 1024;
  // Beside them addresses, running maxima and sums.
  constexpr int kOtherRegistersOfConsumers = 40;
  return kernel.head_qk % 64 == 0 && kernel.head_v % 64 == 0 && kernel.tile_n % 16 == 0 &&
         (!kernel.stages_in_q || kernel.head_v <= kernel.head_qk) &&
         kernel.scores() + kernel.outputs() + kernel.weights() + kOtherRegistersOfConsumers <=
             AttentionKernel::kConsumerRegisters &&
         kernel.shared_bytes() <= kMaxSharedBytes;
}
static_assert(std::all_of(std::begin(kAttentionKernels), std::end(kAttentionKernels),
                          attention_kernel_is_possible));
static_assert(AttentionKernel::kWarpGroupThreads *
                  (AttentionKernel::kOtherRegisters +
                   AttentionKernel::kConsumers * AttentionKernel::kConsumerRegisters) <=
              AttentionKernel::kRegistersPerSm);

}  // namespace ikbo
