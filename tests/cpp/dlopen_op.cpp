// How a C++ server uses ikbo: dlopen_op /path/libikbo.so. torch is linked, ikbo is not.
//
// concat_linear of x_cand = [[1], [2], [3]] and x_user = [[10], [20]] with weights of one,
// candidate b belonging to user map[b]: out[b] = x_cand[b] + x_user[map[b]].

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

template <class T>
Tensor tensor(const std::vector<T>& values, const std::vector<int64_t>& sizes, ScalarType dtype) {
  Tensor t = torch::stable::empty(sizes, dtype);
  for (size_t i = 0; i < values.size(); ++i) t.mutable_data_ptr<T>()[i] = values[i];
  return t;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  using Version = const char* (*)();
  std::printf("ikbo %s\n", reinterpret_cast<Version>(dlsym(library, "ikbo_version"))());

  const Tensor x_cand = tensor<float>({1, 2, 3}, {3, 1}, ScalarType::Float);
  const Tensor x_user = tensor<float>({10, 20}, {2, 1}, ScalarType::Float);
  const Tensor one = tensor<float>({1}, {1, 1}, ScalarType::Float);
  const Tensor map = tensor<int32_t>({0, 1, 0}, {3}, ScalarType::Int);
  const std::optional<Tensor> none;
  using torch::stable::detail::from;
  std::array<StableIValue, 9> stack{from(x_cand), from(x_user), from(one),
                                    from(one),    from(none),   from(map),
                                    from(none),   from(none),   from(std::string("none"))};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("ikbo::concat_linear", "", stack.data(), TORCH_ABI_VERSION));
  const Tensor out = torch::stable::detail::to<Tensor>(stack[0]);
  const float* values = out.const_data_ptr<float>();
  std::printf("%g %g %g\n", values[0], values[1], values[2]);
  return 0;
}
