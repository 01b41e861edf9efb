// The candidate attention kernels on raw pointers.

#include "entry.h"
#include "kernels/candidate_attention/candidate_attention_launch.cuh"

// In bfloat16, all contiguous: q [B, S, H, D], k and v [U, L, Hk, D] by the kernel of that index.
IKBO_TEST_ENTRY ikbo_test_candidate_attention(const void* q, const void* k, const void* v,
                                              const int32_t* cand_to_user,
                                              const int32_t* user_offsets, const int32_t* kv_len,
                                              void* out, float* lse, int64_t B, int64_t S,
                                              int64_t H, int64_t Hk, int64_t D, int64_t Dv,
                                              int64_t U, int64_t L, double scale, int64_t kernel,
                                              int64_t ctas, cudaStream_t stream) {
  return ikbo::entry([&] {
    ikbo::AttentionOperands o{};
    o.type = ikbo::ElementType::kBfloat16;
    o.B = B, o.S = S, o.H = H, o.Hk = Hk, o.D = D, o.Dv = Dv, o.U = U;
    o.q = q, o.q_row_stride = H * D, o.q_head_stride = D;
    o.k = k, o.k_batch_stride = L * Hk * D, o.k_row_stride = Hk * D, o.k_head_stride = D;
    o.v = v, o.v_batch_stride = L * Hk * Dv, o.v_row_stride = Hk * Dv, o.v_head_stride = Dv;
    o.kv_batches = U, o.kv_rows = L;
    o.cand_to_user = cand_to_user, o.user_offsets = user_offsets, o.kv_len = kv_len;
    o.out = out, o.lse = lse, o.scale = static_cast<float>(scale);
    ikbo::attention::for_each_kernel<__nv_bfloat16>([&]<class Shape>(int index) {
      if (index == kernel) {
        const ikbo::AttentionConfig config{index, 1, static_cast<int>(ctas), false};
        ikbo::attention::launch_kernel<Shape>(o, config, stream);
      }
    });
  });
}
