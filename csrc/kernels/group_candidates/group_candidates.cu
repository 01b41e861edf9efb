#include "kernels/group_candidates/group_candidates.h"
#include "kernels/group_candidates/group_candidates_sm90.cuh"
#include "launch/launch.h"

namespace ikbo {

void run_group_candidates(const GroupCandidatesParams& p, const GroupCandidatesConfig& config,
                          cudaStream_t stream) {
  group::Scratch scratch{};
  int32_t* words = p.scratch;
  if (config.passes > 1) {
    scratch.even_keys = reinterpret_cast<uint32_t*>(words);
    scratch.odd_keys = reinterpret_cast<uint32_t*>(words + p.rows);
    scratch.even_rows = words + 2 * p.rows;
    scratch.odd_rows = words + 3 * p.rows;
    words += 4 * p.rows;
  }
  const uint32_t n_users = static_cast<uint32_t>(p.n_users);
  if (config.single_cta) {
    launch(group::group_candidates_single_sm90,
           {1, group::kSingleThreads, sizeof(group::SingleShared)}, stream, p.cand_to_user, p.order,
           p.user_offsets, scratch, p.rows, n_users, config.passes);
    return;
  }
  scratch.histogram = reinterpret_cast<uint32_t*>(words);
  const LaunchShape tiles{static_cast<unsigned>(config.tiles), group::kTileThreads,
                          sizeof(group::TileShared)};
  const LaunchShape digits{group::kDigits * 32 / 128, 128};
  for (int pass = 0; pass < config.passes; ++pass) {
    launch(group::group_candidates_histogram_sm90, tiles, stream, p.cand_to_user, scratch, p.rows,
           n_users, pass);
    launch(group::group_candidates_scan_sm90, digits, stream, scratch.histogram, config.tiles);
    launch(group::group_candidates_scatter_sm90, tiles, stream, p.cand_to_user, p.order,
           p.user_offsets, scratch, p.rows, n_users, pass, config.passes);
  }
  if (config.passes > 1) {
    const unsigned blocks = static_cast<unsigned>((p.n_users + 1 + 255) / 256);
    launch(group::group_candidates_offsets_sm90, {blocks, 256}, stream,
           scratch.keys(config.passes - 1), p.rows, p.user_offsets, n_users);
  }
}

void load_group_candidates() {
  load_kernel(group::group_candidates_single_sm90);
  load_kernel(group::group_candidates_histogram_sm90);
  load_kernel(group::group_candidates_scan_sm90);
  load_kernel(group::group_candidates_scatter_sm90);
  load_kernel(group::group_candidates_offsets_sm90);
}

}  // namespace ikbo
