#include "kernels/group_candidates/group_candidates.h"

#include "launch/device.h"
#include "launch/stream.h"
#include "ops/candidate_map.h"
#include "ops/checks.h"
#include "ops/group_candidates_reference.h"
#include "ops/ops.h"
#include "ops/record.h"

namespace ikbo {

Tensors2 group_candidates(const Tensor& cand_to_user, int64_t n_users) {
  constexpr const char* op = "group_candidates";
  check_dim(op, "cand_to_user", cand_to_user, {"B"});
  IKBO_CHECK(n_users >= 0, op, "expected n_users >= 0, got ", n_users, ".");
  const int64_t rows = cand_to_user.size(0);
  IKBO_CHECK(rows <= std::numeric_limits<int32_t>::max(), op, "expected fewer than 2^31 rows, got ",
             rows, ".");
  const CandidateMap map = check_candidate_map(op, cand_to_user, rows, n_users, std::nullopt,
                                               std::nullopt, cand_to_user);
  if (!cand_to_user.is_cuda()) {
    static PathSite site(op, PathSite::Kind::kCpu, "cpu", "CPU tensors");
    site.hit();
    return group_candidates_reference(map.cand_to_user, n_users);
  }
  const int device = cand_to_user.get_device_index();
  if (!device_properties(device).is_hopper()) {
    static PathSite site(op, PathSite::Kind::kReference, "reference", "the GPU is not a Hopper");
    site.hit();
    return group_candidates_reference(map.cand_to_user, n_users);
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  const GroupCandidatesConfig config = group_candidates_config(rows, n_users);
  const Tensor order = empty({rows}, ScalarType::Int, cand_to_user);
  const Tensor offsets = empty({n_users + 1}, ScalarType::Int, cand_to_user);
  const Tensor scratch = empty({config.scratch_words(rows)}, ScalarType::Int, cand_to_user);
  static PathSite site(op, PathSite::Kind::kKernel, "sm90", "");
  site.hit(to_json(config));
  run_group_candidates(
      {map.cand_to_user.const_data_ptr<int32_t>(), order.mutable_data_ptr<int32_t>(),
       offsets.mutable_data_ptr<int32_t>(), scratch.mutable_data_ptr<int32_t>(), rows, n_users},
      config, current_stream(device));
  return {order, offsets};
}

}  // namespace ikbo
