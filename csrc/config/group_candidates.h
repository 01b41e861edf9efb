// How group_candidates sorts: a pure function of the problem, tested on the CPU.
#pragma once

#include <cstdint>
#include <string>

namespace ikbo {

// A stable sort of B map values by user, 8 bits of the user index a pass, least significant first.
// With at most 255 users it is one counting sort.
struct GroupCandidatesConfig {
  static constexpr int kDigitBits = 8;
  static constexpr int kDigits = 1 << kDigitBits;
  static constexpr int kSteps = 8;        // rows a thread holds in registers
  static constexpr int kTileRows = 4096;  // rows a CTA sorts in the tiled form: 16 warps
  // Up to here one CTA of 32 warps holds all rows, and one launch does it all; the sorted keys of
  // several passes stand in shared memory, and the users are few enough to search there.
  static constexpr int kSingleCtaRows = 8192;
  static constexpr int kSingleCtaUsers = 16383;

  int passes;       // ceil(bits of n_users / 8): keys are 0 ... n_users, the last for "no user"
  bool single_cta;  // everything in one launch of one CTA
  int64_t tiles;    // CTAs of the histogram and scatter launches

  int launches() const { return single_cta ? 1 : 3 * passes + (passes > 1 ? 1 : 0); }
  // int32 words of scratch: keys and rows between passes, twice; a count a digit and tile; totals.
  int64_t scratch_words(int64_t rows) const {
    return (passes > 1 ? 4 * rows : 0) + (single_cta ? 0 : kDigits * (tiles + 1));
  }
};

inline GroupCandidatesConfig group_candidates_config(int64_t rows, int64_t n_users) {
  int bits = 1;
  while (bits < 32 && (n_users >> bits) != 0) ++bits;
  GroupCandidatesConfig config{};
  config.passes =
      (bits + GroupCandidatesConfig::kDigitBits - 1) / GroupCandidatesConfig::kDigitBits;
  config.single_cta = rows <= GroupCandidatesConfig::kSingleCtaRows &&
                      n_users <= GroupCandidatesConfig::kSingleCtaUsers;
  config.tiles = (rows + GroupCandidatesConfig::kTileRows - 1) / GroupCandidatesConfig::kTileRows;
  return config;
}

// For explain: the config as JSON.
inline std::string to_json(const GroupCandidatesConfig& config) {
  return "{\"kernel\": \"group_candidates_sm90\", \"passes\": " + std::to_string(config.passes) +
         ", \"single_cta\": " + (config.single_cta ? "true" : "false") +
         ", \"tiles\": " + std::to_string(config.tiles) +
         ", \"launches\": " + std::to_string(config.launches()) + "}";
}

}  // namespace ikbo
