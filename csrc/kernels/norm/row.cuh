// How a thread reads and writes its columns of a row, in any of the element types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kernels/norm/norm.h"
#include "kernels/numeric.cuh"

namespace ikbo::norm {

using E4m3 = __nv_fp8_storage_t;

// Beyond the largest number: the largest. NaN stays.
__device__ inline E4m3 to_e4m3(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

// body(U{}) with the C++ twin of an operand's type beside x in T: T or float, and beside float
// anything. Uniform over the grid, so outside loops it costs nothing.
template <class T, class Body>
__device__ inline void with_type(ElementType type, const Body& body) {
  if constexpr (sizeof(T) == 4) {
    if (type == ElementType::kBfloat16) return body(__nv_bfloat16{});
    if (type == ElementType::kFloat16) return body(__half{});
    body(float{});
  } else if (type == ElementType::kFloat32) {
    body(float{});
  } else {
    body(T{});
  }
}

__device__ inline int size_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

// 32-bit words. They are loaded and stored in pieces of at most 16 bytes.
template <int kCount>
struct Words {
  static constexpr int kPiece = kCount < 4 ? kCount : 4;
  uint32_t word[kCount];
};

template <int kWords>
__device__ inline void load_piece(const char* from, uint32_t* to) {
  if constexpr (kWords == 1) {
    to[0] = *reinterpret_cast<const uint32_t*>(from);
  } else if constexpr (kWords == 2) {
    const uint2 pair = *reinterpret_cast<const uint2*>(from);
    to[0] = pair.x, to[1] = pair.y;
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }
}

// kStreams: as what is read last. Persistent CTAs, which read far ahead, gain 1 to 6 % by it;
// others lose 1 %.
template <int kWords, bool kStreams>
__device__ inline void store_piece(char* to, const uint32_t* from) {
  const auto store = [&](auto words) {
    if constexpr (kStreams) {
      __stcs(reinterpret_cast<decltype(words)*>(to), words);
    } else {
      *reinterpret_cast<decltype(words)*>(to) = words;
    }
  };
  if constexpr (kWords == 1) {
    store(from[0]);
  } else if constexpr (kWords == 2) {
    store(uint2{from[0], from[1]});
  } else {
    store(uint4{from[0], from[1], from[2], from[3]});
  }
}

// At an address aligned to a piece.
template <int kCount>
__device__ inline Words<kCount> load_words(const char* from) {
  Words<kCount> words;
#pragma unroll
  for (int i = 0; i < kCount; i += words.kPiece) {
    load_piece<words.kPiece>(from + 4 * i, words.word + i);
  }
  return words;
}
// How long lines stay in L1.
enum class InL1 { kAsOthers, kLonger, kShorter };

// 16 bytes, with a priority in the L2 cache (hopper/l2_priority.cuh). Where it is written: other
// loads the compiler moves.
template <InL1 kInL1 = InL1::kAsOthers>
__device__ inline Words<4> load_words(const char* from, uint64_t priority) {
  Words<4> words;
  uint32_t (&w)[4] = words.word;
  if constexpr (kInL1 == InL1::kLonger) {
    asm volatile("ld.global.L1::evict_last.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(from), "l"(priority));
  } else if constexpr (kInL1 == InL1::kShorter) {
    asm volatile("ld.global.L1::evict_first.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(from), "l"(priority));
  } else {
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(from), "l"(priority));
  }
  return words;
}
// 16 bytes of shared memory that are read again and again, and not to wait in registers meanwhile.
__device__ inline Words<4> load_words_again(uint32_t from) {
  Words<4> words;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
               : "r"(from));
  return words;
}
template <bool kStreams = true, int kCount>
__device__ inline void store_words(char* to, const Words<kCount>& words) {
#pragma unroll
  for (int i = 0; i < kCount; i += words.kPiece) {
    store_piece<words.kPiece, kStreams>(to + 4 * i, words.word + i);
  }
}

// What an address is beyond a multiple of `bytes`.
__device__ inline int beyond(const void* address, int bytes) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(address)) & (bytes - 1);
}

// At any address, `offset` bytes, whole pieces, behind `base`, by the aligned pieces around: a copy
// of what is there to an aligned place. The last piece is read only if the words reach into it. (Of
// all vectors of a row the shift is that of `base`: the compiler finds it out once.)
template <int kCount>
__device__ inline Words<kCount> load_words_anywhere(const char* base, int offset) {
  constexpr int kPiece = Words<kCount>::kPiece;
  const int shift = beyond(base, 4 * kPiece);
  const char* const from = base - shift + offset;
  uint32_t around[kCount + kPiece] = {};
#pragma unroll
  for (int i = 0; i < kCount; i += kPiece) load_piece<kPiece>(from + 4 * i, around + i);
  if (shift != 0) load_piece<kPiece>(from + 4 * kCount, around + kCount);
  if (kPiece == 4 && (shift & 8)) {
#pragma unroll
    for (int i = 0; i < kCount + kPiece - 2; ++i) around[i] = around[i + 2];
  }
  if (kPiece >= 2 && (shift & 4)) {
#pragma unroll
    for (int i = 0; i < kCount + kPiece - 1; ++i) around[i] = around[i + 1];
  }
  Words<kCount> words;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    words.word[i] = __funnelshift_r(around[i], around[i + 1], 8 * (shift & 3));
  }
  return words;
}

template <class T, int kCount>
inline constexpr int kWordsOf = kCount * static_cast<int>(sizeof(T)) / 4;

template <class T, int kCount>
__device__ inline void unpack_words(const Words<kWordsOf<T, kCount>>& words,
                                    float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kWordsOf<T, kCount>; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words.word[i]);
    } else {
      const float2 pair = unpack<T>(words.word[i]);
      values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
    }
  }
}

template <class T, int kCount>
__device__ inline Words<kWordsOf<T, kCount>> pack_words(const float (&values)[kCount]) {
  Words<kWordsOf<T, kCount>> words;
#pragma unroll
  for (int i = 0; i < kWordsOf<T, kCount>; ++i) {
    if constexpr (sizeof(T) == 4) {
      words.word[i] = __float_as_uint(values[i]);
    } else if constexpr (sizeof(T) == 2) {
      words.word[i] = pack<T>(values[2 * i], values[2 * i + 1]);
    } else {
      const auto pair = [&](int first) -> uint32_t {
        return __nv_cvt_float2_to_fp8x2({values[first], values[first + 1]}, __NV_SATFINITE,
                                        __NV_E4M3);
      };
      words.word[i] = pair(4 * i) | pair(4 * i + 2) << 16;
    }
  }
  return words;
}

// What a thread keeps from vector to vector of a row that it stores.
struct StoreState {
  uint32_t before[4];  // the last words of the thread's vector before
};

// A thread's columns of a CTA's span: NormMapping::column() on the device, where not interleaved.
// kVector is the elements of a vector; kInWarp says that the threads of a row are within a warp.
//
// kFull: every thread has kVectors vectors, at aligned addresses. Else `vectors` up to kVectors, at
// any address. The threads have the same columns then (or a row's bits would depend on its
// address): they read the aligned pieces around a vector, and for storing hand the elements that
// lie in the next thread's piece to it.
template <int kVectors, int kVector, bool kInWarp, bool kFull>
struct Columns {
  int lanes, vectors, thread;
  int count;  // columns of the span

  __device__ static Columns of_span(const NormMapping& m, int thread) {
    return {m.lanes, kFull ? kVectors : m.thread_vectors, thread, static_cast<int>(m.cta_columns)};
  }

  // The same, of which the compiler knows nothing: addresses that follow from it are computed again
  // and not kept in registers over the loop around, two for each vector of each operand.
  __device__ Columns recomputed() const {
    Columns copy = *this;
    asm volatile("" : "+r"(copy.thread));
    return copy;
  }

  __device__ int first(int v) const { return (v * lanes + thread) * kVector; }
  // The same for all threads.
  __device__ bool has(int v) const { return kFull || v < vectors; }

  // Vector v of a row whose span begins at `row`, in shared or global memory.
  template <class T>
  __device__ void load(const char* row, int v, float (&values)[kVector]) const {
    constexpr int kWords = kWordsOf<T, kVector>, kSize = sizeof(T);
    if constexpr (kFull) {
      unpack_words<T>(load_words<kWords>(row + first(v) * kSize), values);
    } else {
      unpack_words<T>(load_words_anywhere<kWords>(row, first(v) * kSize), values);
    }
  }
  // All vectors; zero where there is none.
  template <class T>
  __device__ void load_row(const char* row, float (&values)[kVectors][kVector]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (has(v)) {
        load<T>(row, v, values[v]);
      } else {
#pragma unroll
        for (int e = 0; e < kVector; ++e) values[v][e] = 0.0f;
      }
    }
  }

  // By all threads of a warp, vector after vector. Nothing is stored where there is no row.
  template <class T, bool kStreams = true>
  __device__ void store(char* row, int v, const float (&values)[kVector], bool has_row,
                        StoreState& state) const {
    if constexpr (!kFull) {
      store_anywhere<T>(reinterpret_cast<T*>(row), v, values, has_row, state);
    } else if (has_row) {
      store_words<kStreams>(row + first(v) * static_cast<int>(sizeof(T)), pack_words<T>(values));
    }
  }
  template <class T, bool kStreams = true>
  __device__ void store_row(char* row, const float (&values)[kVectors][kVector],
                            bool has_row) const {
    StoreState state{};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (has(v)) store<T, kStreams>(row, v, values[v], has_row, state);
    }
  }

 private:
  template <class T>
  __device__ void store_anywhere(T* row, int v, const float (&values)[kVector], bool has_row,
                                 StoreState& state) const {
    constexpr int kWords = kWordsOf<T, kVector>, kPiece = Words<kWords>::kPiece;
    constexpr int kSize = sizeof(T);
    const int lane = threadIdx.x % 32;
    const Words<kWords> own = pack_words<T>(values);
    // The thread of the columns before: its last words, of this vector or, for the row's first
    // thread, of the vector before.
    const int source = kInWarp ? (lane & ~(lanes - 1)) | ((thread - 1) & (lanes - 1)) : lane - 1;
    const bool ends_turn = kInWarp && thread == lanes - 1;
    uint32_t around[kPiece + kWords];
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const uint32_t last = own.word[kWords - kPiece + i];
      around[i] = __shfl_sync(0xffffffffu, ends_turn ? state.before[i] : last, source & 31);
      state.before[i] = last;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) around[kPiece + i] = own.word[i];
    // The aligned place at or before the own one, and what belongs there.
    T* to = row + first(v);
    const int shift = beyond(row, 4 * kPiece);
    if (kPiece == 4 && (shift & 8)) {
#pragma unroll
      for (int i = kPiece + kWords - 1; i >= 2; --i) around[i] = around[i - 2];
    }
    if (kPiece >= 2 && (shift & 4)) {
#pragma unroll
      for (int i = kPiece + kWords - 1; i >= 1; --i) around[i] = around[i - 1];
    }
    Words<kWords> words;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words.word[i] = __funnelshift_l(around[kPiece + i - 1], around[kPiece + i], 8 * (shift & 3));
    }
    // All but the first piece of a run, of threads that hand on to one another: a row, or a warp's
    // part of a row of several.
    const int index = kInWarp ? thread : lane;
    const int moved = shift / kSize;
    if (has_row && (moved == 0 || index > 0 || (kInWarp && v > 0))) {
      store_words(reinterpret_cast<char*>(to - moved), words);
    }
    // A run's first piece, and what its last thread can't hand on: a thread for each element.
    if constexpr (kInWarp) {
      const int head = v * lanes * kVector, tail = head + (lanes - 1) * kVector;
      const int first_lane = lane - index, last_lane = first_lane + lanes - 1;
#pragma unroll 1
      for (int skipped = 0; v == 0 && skipped < kVector; skipped += lanes) {
        const int e = skipped + index;
        store_edge(row + head - moved, words, first_lane, e, moved > 0 ? moved : kVector, has_row);
      }
#pragma unroll 1
      for (int skipped = 0; v == vectors - 1 && skipped < kVector; skipped += lanes) {
        store_edge(row + tail, own, last_lane, skipped + index, kVector - moved, has_row);
      }
    } else if (moved > 0) {
      // The compiler knows nothing of it: what follows from it isn't kept in registers.
      int at = lane;
      asm volatile("" : "+r"(at));
      const bool is_tail = at >= kVector;
      Words<kWords> edge;
#pragma unroll
      for (int i = 0; i < kWords; ++i) edge.word[i] = at == 31 ? own.word[i] : words.word[i];
      const int head = first(v) - at * kVector;
      const int from = is_tail ? head + 31 * kVector : head - moved;
      store_edge(row + from, edge, is_tail ? 31 : 0, is_tail ? at - kVector : at,
                 is_tail ? kVector - moved : moved, has_row);
    }
  }

  // Element e of `words` of another lane, if low <= e. By all threads of a warp.
  template <class T, int kWords>
  __device__ static void store_edge(T* to, const Words<kWords>& words, int source, int e, int low,
                                    bool has_row) {
    constexpr int kSize = sizeof(T);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t other = __shfl_sync(0xffffffffu, words.word[i], source);
      if (e * kSize / 4 == i) word = other;
    }
    if (!has_row || e < low || e >= kVector) return;
    word >>= 8 * (e * kSize % 4);
    if constexpr (kSize == 4) {
      *reinterpret_cast<uint32_t*>(to + e) = word;
    } else if constexpr (kSize == 2) {
      *reinterpret_cast<uint16_t*>(to + e) = static_cast<uint16_t>(word);
    } else {
      to[e] = static_cast<uint8_t>(word);
    }
  }
};

}  // namespace ikbo::norm
