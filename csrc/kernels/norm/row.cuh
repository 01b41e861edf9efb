// How a thread reads and writes its columns of a row, in any of the element types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/norm/norm.h"
#include "kernels/numeric.cuh"

namespace ikbo::norm {

// body(T{}) with the type's C++ twin. Uniform over the grid, so outside loops it costs nothing.
template <class Body>
__device__ inline void with_type(ElementType type, const Body& body) {
  if (type == ElementType::kBfloat16) {
    body(__nv_bfloat16{});
  } else if (type == ElementType::kFloat16) {
    body(__half{});
  } else {
    body(float{});
  }
}

// Two or four 32-bit words at an address aligned to them.
template <int kWords>
struct Words {
  uint32_t word[kWords];
};

template <int kWords>
__device__ inline Words<kWords> load_words(const char* from) {
  static_assert(kWords == 2 || kWords == 4 || kWords == 8);
  Words<kWords> words;
  if constexpr (kWords == 2) {
    const uint2 pair = *reinterpret_cast<const uint2*>(from);
    words.word[0] = pair.x, words.word[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + 4 * i);
      words.word[i] = four.x, words.word[i + 1] = four.y;
      words.word[i + 2] = four.z, words.word[i + 3] = four.w;
    }
  }
  return words;
}

// Streaming stores: results larger than L2 would only push out what is still to be read.
template <int kWords>
__device__ inline void store_words(char* to, const Words<kWords>& words) {
  if constexpr (kWords == 2) {
    __stcs(reinterpret_cast<uint2*>(to), uint2{words.word[0], words.word[1]});
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      __stcs(reinterpret_cast<uint4*>(to + 4 * i),
             uint4{words.word[i], words.word[i + 1], words.word[i + 2], words.word[i + 3]});
    }
  }
}

template <class T, int kCount>
__device__ inline void load_vector(const char* from, float (&values)[kCount]) {
  constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  const Words<kWords> words = load_words<kWords>(from);
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = __uint_as_float(words.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const float2 pair = unpack<T>(words.word[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
}

template <class T, int kCount>
__device__ inline void store_vector(char* to, const float (&values)[kCount]) {
  constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  Words<kWords> words;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words.word[i] = __float_as_uint(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words.word[i] = pack<T>(values[2 * i], values[2 * i + 1]);
    }
  }
  store_words(to, words);
}

// A thread's columns of a CTA's span: NormMapping::column() on the device. kVectors is the most
// there are, kVector the elements of one.
template <int kVectors, int kVector, bool kAligned>
struct Columns {
  int thread, lanes, vectors;
  int count;  // columns of the span

  // The same, of which the compiler knows nothing: addresses that follow from it are computed again
  // and not kept in registers over the loop around, four or nine for each operand.
  __device__ Columns recomputed() const {
    Columns copy = *this;
    asm volatile("" : "+r"(copy.thread));
    return copy;
  }

  __device__ int first(int v) const { return (v * lanes + thread) * kVector; }
  // Whether a vector, and of it an element, is one of the span's. Aligned vectors are whole.
  __device__ bool has(int v) const { return v < vectors && first(v) < count; }
  __device__ bool has(int v, int e) const { return kAligned || first(v) + e < count; }

  // Vector v of a row whose span begins at `row`; zero where there is no column.
  template <class T>
  __device__ void load(const char* row, int v, float (&values)[kVector]) const {
    if constexpr (kAligned) {
      load_vector<T>(row + first(v) * static_cast<int>(sizeof(T)), values);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        values[e] =
            has(v, e) ? static_cast<float>(reinterpret_cast<const T*>(row)[first(v) + e]) : 0.0f;
      }
    }
  }
  __device__ void load(ElementType type, const char* row, int v, float (&values)[kVector]) const {
    with_type(type, [&](auto zero) { load<decltype(zero)>(row, v, values); });
  }

  template <class T>
  __device__ void store(char* row, int v, const float (&values)[kVector]) const {
    if constexpr (kAligned) {
      store_vector<T>(row + first(v) * static_cast<int>(sizeof(T)), values);
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (has(v, e)) reinterpret_cast<T*>(row)[first(v) + e] = static_cast<T>(values[e]);
      }
    }
  }
  __device__ void store(ElementType type, char* row, int v, const float (&values)[kVector]) const {
    with_type(type, [&](auto zero) { store<decltype(zero)>(row, v, values); });
  }

  // Columns the thread has.
  __device__ int owned() const {
    int sum = 0;
    for (int v = 0; v < vectors; ++v) sum += max(0, min(kVector, count - first(v)));
    return sum;
  }
};

__device__ inline int size_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

}  // namespace ikbo::norm
