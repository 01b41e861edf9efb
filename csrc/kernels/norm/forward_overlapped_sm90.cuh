// The exchange of sums where two rows overlap: a CTA's warps take the sums of the row ahead before
// they finish a row, and one warp more merges them.
//
//   of a row  warps:     its sums -> of_warp, arrive partial[b]
//             exchanger: wait partial[b], merge, st.async to the cluster's CTAs; wait ready[b],
//                        merge, mean and rstd -> result[b], arrive done[b]
//             warps:     (sums of the row ahead) wait done[b], y
//
// Of what `b` numbers there are two. Written for row r + 2, they have been read for row r: a warp's
// sums of r + 2 follow its wait for done of r; the exchanger's result of r + 2 follows the sums of
// r + 2 by all warps; and a CTA's sums of r + 2 are sent after all CTAs have sent those of r + 1,
// so they have merged those of r.
#pragma once

#include "kernels/norm/forward_row.cuh"

namespace ikbo::norm {

struct OverlappedExchange {
  float4 of_warp[2][kMaxWarps];
  float4 of_cta[2][kMaxWarps];
  float4 result[2];  // mean, rstd, 1 / scale; or, where rows are scaled early, 0, rstd / scale, 1
  hopper::Barrier partial[2], ready[2], done[2];

  __device__ void init(int warps) {
    for (int b = 0; b < 2; ++b) {
      hopper::init(partial[b], warps);
      hopper::init(ready[b], 1);
      hopper::init(done[b], 1);
    }
  }

  // The exchanging warp: the sums of a turn's row over warps and CTAs, once they are there, in all
  // of its lanes.
  __device__ float4 sums(uint32_t b, uint32_t phase, const Moments& merge, int warps, int lane,
                         const Place& place) {
    const int width = 1 << (32 - __clz(warps - 1));
    const int peer = lane & (width - 1);
    hopper::wait(partial[b], phase);
    const float4 nothing{0.0f, 0.0f, 0.0f, 0.0f};
    float4 all = merge(peer < warps ? of_warp[b][peer] : nothing, width, false);
    if (place.cluster > 1) {
      if (lane == 0) hopper::arrive_expect_bytes(ready[b], sizeof(float4) * place.cluster);
      if (lane < place.cluster) {
        hopper::store_async_in_cluster(&of_cta[b][place.rank], ready[b], lane, all);
      }
      __syncwarp();
      hopper::wait(ready[b], phase);
      all = merge(of_cta[b][lane & (place.cluster - 1)], place.cluster, true);
    }
    return all;
  }
};

}  // namespace ikbo::norm
