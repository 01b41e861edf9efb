// Argument checks. Every message reads: "op: what was expected, what came. How to fix it."
#pragma once

#include <sstream>

#include "ops/tensor.h"

namespace ikbo {

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "ikbo." << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// The parts of the message are evaluated only where the check fails: texts of shapes cost more than
// the call of a small op.
#define IKBO_CHECK(condition, op, ...) \
  do {                                 \
    if (!(condition)) [[unlikely]] {   \
      ::ikbo::fail(op, __VA_ARGS__);   \
    }                                  \
  } while (false)

std::string shape_text(const Tensor& t);   // "[2, 3]"
const char* dtype_text(ScalarType t);      // "bfloat16"
std::string device_text(const Tensor& t);  // "cuda:0"

// `dims` names every dimension, e.g. {"B", "Kc", "N"}; only the count is checked.
void check_dim(const char* op, const char* name, const Tensor& t,
               std::initializer_list<const char*> dims);
// t.size(dim) must equal `expected`, which is `meaning` (e.g. "w_cand.size(1)").
void check_size(const char* op, const char* name, const Tensor& t, int64_t dim, int64_t expected,
                const char* meaning);
// Floating point that the ops compute with: float16, bfloat16, float32, float64.
void check_floating(const char* op, const char* name, const Tensor& t);
void check_same_dtype(const char* op, const char* name, const Tensor& t, const char* like_name,
                      const Tensor& like);
void check_same_device(const char* op, const char* name, const Tensor& t, const char* like_name,
                       const Tensor& like);
// dtype and device at once: what most operands must share with the first.
void check_like(const char* op, const char* name, const Tensor& t, const char* like_name,
                const Tensor& like);
void check_like(const char* op, const char* name, const OptTensor& t, const char* like_name,
                const Tensor& like);
// An out= tensor: exact shape, dtype and device.
void check_out(const char* op, const Tensor& out, const Sizes& sizes, ScalarType dtype,
               const Tensor& like);

}  // namespace ikbo
