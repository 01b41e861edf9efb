// Which path each call took: counters, the thread's last record (for explain), strict mode, and the
// one warning per reason that keeps a slow path from being silent.
#pragma once

#include <atomic>
#include <string>

namespace ikbo {

// A place in the code where an op settles on a path. Sites are function-local statics; the first
// hit registers the site, each later one costs an atomic increment and a thread-local store.
class PathSite {
 public:
  enum class Kind {
    kKernel,     // a Hopper kernel
    kCpu,        // the implementation for CPU tensors
    kReference,  // the slow path on a GPU: warns once, raises under strict
  };
  // `reason` says why this path and not a kernel; empty for kKernel. All strings are literals.
  PathSite(const char* op, Kind kind, const char* path, const char* reason);

  // Counts the call and makes it the thread's last record. `config` is JSON of what is launched.
  void hit(std::string config = {});

 private:
  friend std::string counters_json();
  friend void counters_reset();
  const char* op_;
  int op_index_;  // of the thread's last records
  Kind kind_;
  const char* path_;
  const char* reason_;
  std::atomic<int64_t> count_{0};
  std::atomic<bool> warned_{false};
  PathSite* next_ = nullptr;
};

// For an op that has no kernel for these inputs: records the CPU path or the GPU slow path.
#define IKBO_RECORD_REFERENCE(op, is_cuda, reason)                                               \
  do {                                                                                           \
    if (is_cuda) {                                                                               \
      static ::ikbo::PathSite site(op, ::ikbo::PathSite::Kind::kReference, "reference", reason); \
      site.hit();                                                                                \
    } else {                                                                                     \
      static ::ikbo::PathSite site(op, ::ikbo::PathSite::Kind::kCpu, "cpu", "CPU tensors");      \
      site.hit();                                                                                \
    }                                                                                            \
  } while (false)

std::string counters_json();  // [{"op", "path", "reason", "count"}, ...]
void counters_reset();
std::string last_record_json(const char* op);  // the thread's last call of `op`; "null" if none
void set_strict(bool on);                      // process-wide: slow paths raise

}  // namespace ikbo
