// A consumer's results in global memory, L2 in effect, in fp32: of some of a tile's keys, for
// whoever adds up those of all.
#pragma once

#include "kernels/candidate_attention/results.cuh"

namespace ikbo::attention {

// Of one tile. As they lie in registers: whoever reads them is a thread of the same index.
template <class S>
struct KeptResults {
  // Divided by the sum of exponentials.
  float4 outputs[S::kConsumers][S::kHeadV / 8][kGroupThreads];
  float2 lse[S::kConsumers][kGroupThreads];
};

template <class S>
__device__ inline KeptResults<S>& kept_results(const Params& params, int32_t index) {
  return static_cast<KeptResults<S>*>(params.kept)[index];
}

template <class S>
__device__ inline void keep_results(KeptResults<S>& kept, const Outputs<S>& outputs,
                                    const float (&lse)[2], int consumer) {
  const int thread = threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < S::kHeadV / 8; ++i) {
    __stcg(&kept.outputs[consumer][i][thread],
           {outputs[4 * i], outputs[4 * i + 1], outputs[4 * i + 2], outputs[4 * i + 3]});
  }
  __stcg(&kept.lse[consumer][thread], {lse[0], lse[1]});
}

}  // namespace ikbo::attention
