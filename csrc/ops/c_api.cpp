// The plain C functions of libikbo.so, for servers and for Python through ctypes. Strings returned
// belong to the calling thread and stand until its next call of the same function.

#include <cuda_runtime_api.h>

#include <exception>
#include <string>

#include "kernels/candidate_attention/candidate_attention.h"
#include "kernels/concat_linear/concat_linear.h"
#include "kernels/gated/gated.h"
#include "kernels/group_candidates/group_candidates.h"
#include "kernels/linear_compression/linear_compression.h"
#include "kernels/norm/norm.h"
#include "kernels/pack/pack_rows.h"
#include "launch/device.h"
#include "launch/error.h"
#include "ops/record.h"

#define IKBO_EXPORT extern "C" __attribute__((visibility("default")))

IKBO_EXPORT const char* ikbo_version() { return IKBO_VERSION; }

// Loads every kernel onto the device, so that neither the first request nor a graph capture has to.
// Returns null, or what went wrong.
IKBO_EXPORT const char* ikbo_warmup(int device) {
  thread_local std::string error;
  try {
    int previous = 0;
    IKBO_CUDA_CHECK(cudaGetDevice(&previous));
    IKBO_CUDA_CHECK(cudaSetDevice(device));
    if (ikbo::device_properties(device).is_hopper()) {
      ikbo::load_group_candidates();
      ikbo::load_pack_rows();
      ikbo::load_concat_linear();
      ikbo::load_linear_compression();
      ikbo::load_gated();
      ikbo::load_candidate_attention();
      ikbo::load_norm();
    }
    IKBO_CUDA_CHECK(cudaSetDevice(previous));
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

// JSON of what this thread's last call of the op launched and why; "null" if it made none.
IKBO_EXPORT const char* ikbo_explain(const char* op) {
  thread_local std::string json;
  json = ikbo::last_record_json(op);
  return json.c_str();
}

// JSON list of {"op", "path", "reason", "count"} since load or the last reset.
IKBO_EXPORT const char* ikbo_counters() {
  thread_local std::string json;
  json = ikbo::counters_json();
  return json.c_str();
}
IKBO_EXPORT void ikbo_counters_reset() { ikbo::counters_reset(); }

// Process-wide: calls that would take the slow path on a GPU raise instead.
IKBO_EXPORT void ikbo_set_strict(int on) { ikbo::set_strict(on != 0); }

// Process-wide: persistent kernels fill at most this many SMs; 0 lifts the limit.
IKBO_EXPORT void ikbo_set_sm_limit(int sms) { ikbo::set_sm_limit(sms); }
IKBO_EXPORT int ikbo_sm_limit() { return ikbo::sm_limit(); }
