// The gradients at the pre-activations, element by element: what the backward of gated_linear and
// linear_act does between library products. Memory's rate is its roofline: each element is read and
// written once.
#pragma once

#include <cstdint>

#include "kernels/activation.cuh"
#include "kernels/gated/gated.h"
#include "kernels/numeric.cuh"

namespace ikbo::gated {

inline constexpr int kGradThreads = 256;
inline constexpr int kChunk = 8;  // elements a thread takes, 16 bytes

template <class T>
struct Chunk {
  float values[kChunk];

  // Of `there` elements; the others are zeros.
  __device__ static Chunk load(const void* base, int64_t first, int there) {
    const T* from = static_cast<const T*>(base) + first;
    Chunk chunk;
    if (there == kChunk) {
      const uint4 packed = *reinterpret_cast<const uint4*>(from);
      const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(pairs[i]);
        chunk.values[2 * i] = pair.x, chunk.values[2 * i + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        chunk.values[i] = i < there ? static_cast<float>(from[i]) : 0;
      }
    }
    return chunk;
  }

  __device__ void store(void* base, int64_t first, int there) const {
    T* to = static_cast<T*>(base) + first;
    if (there == kChunk) {
      *reinterpret_cast<uint4*>(to) = {pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                                       pack<T>(values[4], values[5]),
                                       pack<T>(values[6], values[7])};
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        if (i < there) to[i] = static_cast<T>(values[i]);
      }
    }
  }
};

// Calls body(first, there) for the thread's elements.
template <class Body>
__device__ inline void for_my_chunk(int64_t count, const Body& body) {
  const int64_t first = (int64_t{blockIdx.x} * kGradThreads + threadIdx.x) * kChunk;
  if (first < count) body(first, count - first < kChunk ? static_cast<int>(count - first) : kChunk);
}

template <class T>
__global__ void __launch_bounds__(kGradThreads)
    gated_grad_sm90(const GatedGradParams p, int64_t count) {
  for_my_chunk(count, [&](int64_t first, int there) {
    auto grad = Chunk<T>::load(p.grad, first, there);
    auto gate = Chunk<T>::load(p.gate, first, there);
    auto up = Chunk<T>::load(p.up, first, there);
    with_activation(p.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const ActivationGrad at =
            backward<decltype(activation)::value>(gate.values[i], grad.values[i] * up.values[i]);
        gate.values[i] = at.grad;
        grad.values[i] *= at.value;
        up.values[i] *= at.value;
      }
    });
    gate.store(p.grad_gate, first, there);
    grad.store(p.grad_up, first, there);
    if (p.hidden != nullptr) up.store(p.hidden, first, there);
  });
}

template <class T>
__global__ void __launch_bounds__(kGradThreads) linear_grad_sm90(const LinearGradParams p) {
  for_my_chunk(p.count, [&](int64_t first, int there) {
    auto grad = Chunk<T>::load(p.grad, first, there);
    const auto saved = Chunk<T>::load(p.saved, first, there);
    with_activation(p.activation, [&](auto activation) {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        const float value = saved.values[i];
        if constexpr (decltype(activation)::value == Activation::kSigmoid) {
          grad.values[i] *= value * (1 - value);
        } else {
          // relu's sign is its output's.
          grad.values[i] = backward<decltype(activation)::value>(value, grad.values[i]).grad;
        }
      }
    });
    grad.store(p.grad_preact, first, there);
  });
}

}  // namespace ikbo::gated
