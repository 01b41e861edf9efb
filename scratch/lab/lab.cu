// Lab: forwards of whole rows, one row a CTA of kWarps warps, or rows within warps.
#include "kernels/norm/compiled.h"
#include "kernels/norm/forward_row.cuh"
#include "hopper/dependent_launch.cuh"
#include <cuda_runtime.h>
#include <map>
#include <string>
using namespace ikbo;
using namespace ikbo::norm;
struct P { const char* x; char* y; const char* w; const char* b; uint32_t rows; int row_bytes; float eps, per_column; uint32_t demote_from; };

__device__ inline uint64_t policy(int kind) {
  uint64_t p = 0;
  if (kind == 1) asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
  if (kind == 2) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
  if (kind == 3) asm("createpolicy.fractional.L2::evict_unchanged.b64 %0, 1.0;" : "=l"(p));
  return p;
}
// kPol: 0 none, 1 L2 evict_first, 2 L2 evict_last, 3 unchanged; with the L1 hint alike
template <int kPol> __device__ inline Words<4> load_pol(const char* from) {
  Words<4> r;
  if constexpr (kPol == 0) asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from));
  if constexpr (kPol == 1) asm volatile("ld.global.L1::evict_first.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from), "l"(policy(1)));
  if constexpr (kPol == 2) asm volatile("ld.global.L1::evict_last.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from), "l"(policy(2)));
  if constexpr (kPol == 3) asm volatile("ld.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from), "l"(policy(1)));
  if constexpr (kPol == 4) asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from), "l"(policy(1)));
  if constexpr (kPol == 6) { uint64_t q; asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(q)); asm volatile("ld.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from), "l"(q)); }
  if constexpr (kPol == 7) { uint64_t q; asm("createpolicy.fractional.L2::evict_last.b64 %0, 0.5;" : "=l"(q)); asm volatile("ld.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from), "l"(q)); }
  if constexpr (kPol == 8) { uint64_t q; asm("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 %0, 0.125;" : "=l"(q)); asm volatile("ld.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from), "l"(q)); }
  return r;
}
template <int kPol> __device__ inline void store_pol(char* to, const Words<4>& w) {
  if constexpr (kPol == 0) asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]) : "memory");
  if constexpr (kPol == 1 || kPol == 2) asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(to), "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]), "l"(policy(kPol)) : "memory");
}
template <int kHint> __device__ inline Words<4> load_hint(const char* from) {
  Words<4> r;
  if constexpr (kHint == 0) asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from));
  if constexpr (kHint == 1) asm volatile("ld.global.L1::evict_last.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from));
  if constexpr (kHint == 2) asm volatile("ld.global.L1::evict_first.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from));
  if constexpr (kHint == 3) asm("ld.global.nc.L1::evict_last.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3]) : "l"(from));
  return r;
}
template <int kLanes> __device__ inline float all(float v) {
#pragma unroll
  for (int o = kLanes / 2; o >= 1; o /= 2) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
// kX: 10 * first policy + policy of a second load, 5 where there is none
// kLanes <= 32: lanes of a row in a warp; else threads of the CTA.
template <class T, int kLanes, int kWarps, int kVectors, bool kLayer, int kRegs, int kX, int kW10, int kYPol, bool kPdl>
__global__ void __maxnreg__(kRegs) lab(const __grid_constant__ P p) {
  constexpr int kVector = 16 / sizeof(T);
  constexpr bool kInWarp = kLanes <= 32;
  constexpr int kW = kW10 % 10;
  if constexpr (kPdl) { hopper::touch(p); hopper::wait_for_previous_kernel(); hopper::allow_next_kernel(); }
  uint32_t row = blockIdx.x; int thread = threadIdx.x; bool exists = true;
  if constexpr (kInWarp) {
    row = (blockIdx.x * (32 * kWarps) + threadIdx.x) / kLanes; thread = threadIdx.x % kLanes;
    exists = row < p.rows; row = min(row, p.rows - 1);
  }
  int first = thread * 16; constexpr int step = 16 * kLanes;
  const char* const from = p.x + int64_t{row} * p.row_bytes + first;
  Words<4> x[kVectors], w[kVectors], b[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) x[v] = load_pol<kX / 10>(from + v * step);
  // kW: 0 late one ahead, 1 early all, 2 early all evict_last, 3 late all at once, 4 late one ahead evict_last
  const auto load_w = [&](int v) {
    w[v] = load_pol<kW == 2 || kW == 4 ? 2 : 0>(p.w + first + v * step);
    if constexpr (kLayer) b[v] = load_pol<kW == 2 || kW == 4 ? 2 : 0>(p.b + first + v * step);
  };
  if constexpr (kW == 1 || kW == 2) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_w(v);
  }
  const auto values_of = [&](int v, float (&values)[kVector]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(x[v].word[i]));
    unpack_words<T>(x[v], values);
  };
  const auto sum_over = [&](const auto& add) {
    float sums[4] = {};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[kVector]; values_of(v, values);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sums[e % 4] = add(values[e], sums[e % 4]);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  constexpr int kShuffled = kInWarp ? kLanes : 32;
  constexpr float kPart = 1.0f * kShuffled * kVectors * kVector;
  float sum = 0.0f, mean = 0.0f;
  if constexpr (kLayer) { sum = all<kShuffled>(sum_over([](float v, float s) { return s + v; })); mean = sum * (1.0f / kPart); }
  float squares = all<kShuffled>(sum_over([&](float v, float s) { const float a = kLayer ? v - mean : v; return fmaf(a, a, s); }));
  float of_row = mean, shift = 0.0f;
  if constexpr (!kInWarp) {
    __shared__ float2 of_warp[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) of_warp[warp] = {mean, squares};
    __syncthreads();
    constexpr int kWidth = kWarps <= 2 ? 2 : kWarps <= 4 ? 4 : kWarps <= 8 ? 8 : kWarps <= 16 ? 16 : 32;
    const int peer = lane % kWidth;
    float2 part = peer < kWarps ? of_warp[peer] : float2{0.0f, 0.0f};
    if constexpr (kLayer) {
      of_row = all<kWidth>(part.x) * (1.0f / kWarps);
      const float away = part.x - of_row;
      part.y = peer < kWarps ? fmaf(kPart * away, away, part.y) : 0.0f;
    }
    squares = all<kWidth>(part.y);
    shift = mean - of_row;
  }
  const float rstd = rsqrtf(fmaf(squares, p.per_column, p.eps));
  shift *= rstd;
  if constexpr (kLayer && !kInWarp && kX % 10 != 5) { mean = of_row; shift = 0.0f; }
  asm volatile("" : "+r"(first));
  char* const to = p.y + int64_t{row} * p.row_bytes + first;
  if constexpr (kX % 10 != 5) {
    const char* const again = p.x + int64_t{row} * p.row_bytes + first;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[v] = load_pol<kX % 10>(again + v * step);
  }
  if constexpr (kW == 0 || kW == 4) load_w(0);
  if constexpr (kW == 3) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) load_w(v);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float values[kVector], ws[kVector], bs[kVector];
    unpack_words<T>(w[v], ws);
    if constexpr (kLayer) unpack_words<T>(b[v], bs);
    if ((kW == 0 || kW == 4) && v + 1 < kVectors) load_w(v + 1);
    values_of(v, values);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if constexpr (kLayer) values[e] -= mean;
      values[e] = !kLayer || kInWarp ? values[e] * rstd : fmaf(values[e], rstd, shift);
      values[e] = kLayer ? fmaf(values[e], ws[e], bs[e]) : __fmul_rn(values[e], ws[e]);
    }
    if (exists) store_pol<kYPol>(to + v * step, pack_words<T>(values));
    if constexpr (kW10 >= 10) {
      if (row >= p.demote_from && threadIdx.x % 8 == 0) asm volatile("applypriority.global.L2::evict_normal [%0], 128;" :: "l"(p.x + int64_t{row} * p.row_bytes + first + v * step) : "memory");
    }
  }
}
template <int kReads, int kEach, int kPol, int kY>
__global__ void lab_copy(const char* a, const char* b, char* to, int64_t vectors) {
  int64_t i = (int64_t)blockIdx.x * (256 * kEach) + threadIdx.x;
  Words<4> x[kEach], z[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) if (i + e * 256 < vectors) { x[e] = load_pol<kPol>(a + (i + e * 256) * 16); if (kReads == 2) z[e] = load_pol<kPol>(b + (i + e * 256) * 16); }
#pragma unroll
  for (int e = 0; e < kEach; ++e) if (i + e * 256 < vectors) {
    if (kReads == 2) { for (int k = 0; k < 4; ++k) x[e].word[k] ^= z[e].word[k]; }
    store_pol<kY>(to + (i + e * 256) * 16, x[e]);
  }
}
extern "C" int lab_copy_run(int reads, int each, int pol, int y, const void* a, const void* b, void* to, int64_t bytes, void* stream) {
  const int64_t v = bytes / 16; const unsigned grid = (v + 256 * each - 1) / (256 * each); auto st = (cudaStream_t)stream;
#define C(r, e, p, q) if (reads == r && each == e && pol == p && y == q) { lab_copy<r, e, p, q><<<grid, 256, 0, st>>>((const char*)a, (const char*)b, (char*)to, v); return cudaGetLastError(); }
  C(1,1,0,0) C(1,4,0,0) C(1,1,2,0) C(1,4,2,0) C(1,2,2,0) C(1,1,2,1) C(1,4,2,1) C(1,1,6,0) C(1,4,6,0) C(1,8,6,0)
  C(2,1,0,0) C(2,4,0,0) C(2,1,2,0) C(2,4,2,0) C(2,2,2,0) C(2,1,2,1) C(2,4,2,1) C(2,1,6,0) C(2,4,6,0) C(2,2,6,0)
  return -5;
}
struct Entry { void (*kernel)(P); int lanes, warps, vectors, size; bool layer, pdl; };
static std::map<std::string, Entry>& table() { static std::map<std::string, Entry> t; return t; }
template <class T, int kLanes, int kWarps, int kVectors, bool kLayer, int kRegs, int kX, int kW, int kYPol, bool kPdl>
static void add(const char* name) { table()[name] = {lab<T, kLanes, kWarps, kVectors, kLayer, kRegs, kX, kW, kYPol, kPdl>, kLanes, kWarps, kVectors, sizeof(T), kLayer, kPdl}; }
using B = __nv_bfloat16; using H = __half; using F = float;
static int init() {
#include "variants.inc"
  return 0;
}
static std::string names;
extern "C" const char* lab_names() { init(); names.clear(); for (auto& e : table()) names += e.first + " " + std::to_string(e.second.vectors * e.second.lanes * 16 / e.second.size) + " " + std::to_string(e.second.size) + " " + (e.second.layer ? "ln" : "rms") + "\n"; return names.c_str(); }
static int64_t demote_from = 0;
extern "C" void lab_demote(int64_t f) { demote_from = f; }
extern "C" int lab_run(const char* name, const void* x, void* y, const void* w, const void* b, int64_t rows, void* stream) {
  const Entry& e = table().at(name);
  const int columns = e.vectors * e.lanes * 16 / e.size;
  P p{(const char*)x, (char*)y, (const char*)w, (const char*)b, (uint32_t)rows, columns * e.size, 1e-6f, 1.0f / columns, (uint32_t)demote_from};
  cudaLaunchConfig_t c{};
  const int per = e.lanes <= 32 ? 32 * e.warps / e.lanes : 1;
  c.gridDim = dim3((rows + per - 1) / per); c.blockDim = dim3(32 * e.warps); c.stream = (cudaStream_t)stream;
  cudaLaunchAttribute a[1]; c.attrs = a;
  if (e.pdl) { a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; a[0].val.programmaticStreamSerializationAllowed = 1; c.numAttrs = 1; }
  return cudaLaunchKernelEx(&c, e.kernel, p);
}
extern "C" int lab_regs(const char* name) { cudaFuncAttributes a; if (cudaFuncGetAttributes(&a, table().at(name).kernel)) return -1; return a.numRegs * 1000 + (int)a.localSizeBytes; }
