#include "ops/checks.h"

namespace ikbo {
namespace {

std::string sizes_text(const Sizes& sizes) {
  std::ostringstream text;
  text << "[";
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << "]";
  return text.str();
}

// torch's own code of a dtype or device type. Comparing codes is what most calls come down to:
// Tensor::scalar_type() asks the shim for one dtype after the other until it has found this one.
int32_t code(AOTITorchError (*getter)(AtenTensorHandle, int32_t*), const Tensor& t) {
  int32_t value = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(getter(t.get(), &value));
  return value;
}

}  // namespace

std::string shape_text(const Tensor& t) { return sizes_text(sizes_of(t)); }

const char* dtype_text(ScalarType t) {
  switch (t) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    default:
      return torch::headeronly::toString(t);
  }
}

std::string device_text(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device:") + std::to_string(t.get_device_index());
}

void check_dim(const char* op, const char* name, const Tensor& t,
               std::initializer_list<const char*> dims) {
  if (t.dim() == static_cast<int64_t>(dims.size())) return;
  std::string expected;
  for (const char* dim : dims) expected += (expected.empty() ? "" : ", ") + std::string(dim);
  fail(op, "expected ", name, " of shape [", expected, "], got ", shape_text(t), ".");
}

void check_size(const char* op, const char* name, const Tensor& t, int64_t dim, int64_t expected,
                const char* meaning) {
  if (t.size(dim) == expected) return;
  fail(op, "expected ", name, ".size(", dim, ") == ", meaning, " (", expected, "), got ", name,
       " of shape ", shape_text(t), ".");
}

void check_floating(const char* op, const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  IKBO_CHECK(is_16_bit(dtype) || dtype == ScalarType::Float || dtype == ScalarType::Double, op,
             "expected ", name, " in float16, bfloat16, float32 or float64, got ",
             dtype_text(dtype), ". Convert it with .to(torch.bfloat16).");
}

void check_same_dtype(const char* op, const char* name, const Tensor& t, const char* like_name,
                      const Tensor& like) {
  IKBO_CHECK(code(aoti_torch_get_dtype, t) == code(aoti_torch_get_dtype, like), op, "expected ",
             name, " in the dtype of ", like_name, " (", dtype_text(like.scalar_type()), "), got ",
             dtype_text(t.scalar_type()),
             ". Convert one with .to(dtype), or run under torch.autocast.");
}

void check_same_device(const char* op, const char* name, const Tensor& t, const char* like_name,
                       const Tensor& like) {
  IKBO_CHECK(code(aoti_torch_get_device_type, t) == code(aoti_torch_get_device_type, like) &&
                 t.get_device_index() == like.get_device_index(),
             op, "expected ", name, " on the device of ", like_name, " (", device_text(like),
             "), got ", device_text(t), ". Move it with .to(", like_name, ".device).");
}

void check_like(const char* op, const char* name, const Tensor& t, const char* like_name,
                const Tensor& like) {
  check_same_dtype(op, name, t, like_name, like);
  check_same_device(op, name, t, like_name, like);
}

void check_like(const char* op, const char* name, const OptTensor& t, const char* like_name,
                const Tensor& like) {
  if (t) check_like(op, name, *t, like_name, like);
}

void check_out(const char* op, const Tensor& out, const Sizes& sizes, ScalarType dtype,
               const Tensor& like) {
  IKBO_CHECK(sizes_of(out) == sizes, op, "expected out of shape ", sizes_text(sizes), ", got ",
             shape_text(out), ". Allocate it with that shape; ikbo never resizes out.");
  IKBO_CHECK(out.scalar_type() == dtype, op, "expected out in ", dtype_text(dtype), ", got ",
             dtype_text(out.scalar_type()), ".");
  check_same_device(op, "out", out, "the inputs", like);
}

}  // namespace ikbo
