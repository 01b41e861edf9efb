// Which path each call took: counters, the thread's last record (for explain), strict mode, and the
// one warning per reason that keeps a slow path from being silent.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace ikbo {

inline constexpr size_t kMaxConfigBytes = 512;

// A place in the code where an op settles on a path. Sites are function-local statics; the first
// hit registers the site, each later one costs an atomic increment and a thread-local store.
class PathSite {
 public:
  enum class Kind {
    kKernel,     // a Hopper kernel, or the library's where those are what the op is made of
    kCpu,        // the implementation for CPU tensors
    kReference,  // the slow path on a GPU: warns once, raises under strict
  };
  // `reason` says why this path and not a kernel; empty for kKernel. All strings are literals.
  PathSite(const char* op, Kind kind, const char* path, const char* reason);

  // Counts the call and makes it the thread's last record. `config` is JSON of what is launched.
  void hit(std::string config = {});

  // The same without the price of printing: to_json(config) is called once somebody asks.
  template <class Config>
  void hit_with(const Config& config) {
    static_assert(std::is_trivially_copyable_v<Config> && sizeof(Config) <= kMaxConfigBytes);
    hit_with(&config, sizeof(Config),
             [](const void* bytes) { return to_json(*static_cast<const Config*>(bytes)); });
  }

 private:
  using Print = std::string (*)(const void*);
  void hit_with(const void* config, size_t bytes, Print print);
  void count_call();

  friend std::string counters_json();
  friend void counters_reset();
  friend class OpPaths;
  const char* op_;
  int op_index_;  // of the thread's last records
  Kind kind_;
  const char* path_;
  const char* reason_;
  std::atomic<int64_t> count_{0};
  std::atomic<bool> warned_{false};
  PathSite* next_ = nullptr;
};

// The paths of an op that has a kernel for some inputs: a function-local static of the op.
class OpPaths {
 public:
  // `kernel_path` names the path of kernel(): "library" where it isn't a kernel of this one.
  explicit OpPaths(const char* op, const char* kernel_path = "sm90");

  template <class Config>
  void kernel(const Config& config) {
    kernel_.hit_with(config);
  }
  // Records the path of a call that kernels don't take, for `reason` (a literal; each has a counter
  // and a warning of its own) or because its tensors are on the CPU. True where they take it
  // (reason is null): then kernel() records it.
  bool takes_kernel(bool is_cuda, const char* reason);

 private:
  void reference(const char* reason);

  const char* op_;
  PathSite cpu_, kernel_;
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

// For a backward whose work is the library's products: no slow path where `has_kernels`, that is
// where the op's forward would run on kernels.
#define IKBO_RECORD_BACKWARD(op, has_kernels, is_cuda)                                        \
  do {                                                                                        \
    if (has_kernels) {                                                                        \
      static ::ikbo::PathSite site(op, ::ikbo::PathSite::Kind::kKernel, "library", "");       \
      site.hit();                                                                             \
    } else {                                                                                  \
      IKBO_RECORD_REFERENCE(op, is_cuda, "a GPU or a dtype without kernels of this library"); \
    }                                                                                         \
  } while (false)

std::string counters_json();  // [{"op", "path", "reason", "count"}, ...]
void counters_reset();
std::string last_record_json(const char* op);  // the thread's last call of `op`; "null" if none
void set_strict(bool on);                      // process-wide: slow paths raise

}  // namespace ikbo
