// A few neighbouring elements as they lie in memory, and as floats: moved by 16 bytes where there
// are so many.
#pragma once

#include "cuda/ptx/numbers.cuh"
#include "cuda/ptx/vectors.cuh"
#include "cuda/tile/element.cuh"

namespace deltic::gpu {

constexpr int run_alignment(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

// N elements at a multiple of run_alignment(N * sizeof(E)).
template <class E, int N>
struct alignas(run_alignment(N * sizeof(E))) Run {
  using Word = std::conditional_t<N * sizeof(E) % 4 == 0, uint32_t, E>;
  static constexpr int kWords = N * sizeof(E) / sizeof(Word);
  Word words[kWords];
};

template <class E, int N>
__device__ void unpack_run(const Run<E, N>& run, float (&out)[N]) {
  if constexpr (sizeof(E) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = __uint_as_float(run.words[i]);
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 pair = unpack<E>(run.words[i]);
      out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(run.words[i]);
  }
}
// One of them, where not all are wanted at once.
template <class E, int N>
__device__ float number_of(const Run<E, N>& run, int i) {
  if constexpr (sizeof(E) == 4) {
    return __uint_as_float(run.words[i]);
  } else {
    static_assert(N % 2 == 0);
    const float2 pair = unpack<E>(run.words[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
  }
}
template <class E, int N>
__device__ Run<E, N> pack_run(const float (&x)[N]) {
  Run<E, N> run;
  if constexpr (sizeof(E) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) run.words[i] = __float_as_uint(x[i]);
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) run.words[i] = pack_result<E>(x[2 * i], x[2 * i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) run.words[i] = from_float<E>(x[i]);
  }
  return run;
}

template <class E, int N>
__device__ Run<E, N> load_run(const E* from) {
  return *reinterpret_cast<const Run<E, N>*>(from);
}
template <class E, int N>
__device__ void store_raw_run(E* to, const Run<E, N>& run) {
  constexpr int kBytes = N * sizeof(E);
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const auto& w = run.words;
      store_vector(to + i * 16 / sizeof(E), w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
    }
  } else if constexpr (kBytes % 8 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 8; ++i) {
      store_vector(to + i * 8 / sizeof(E), run.words[2 * i], run.words[2 * i + 1]);
    }
  } else {
    *reinterpret_cast<Run<E, N>*>(to) = run;
  }
}
template <class E, int N>
__device__ void store_run(E* to, const float (&x)[N]) {
  store_raw_run<E, N>(to, pack_run<E, N>(x));
}

// The same of a tensor whose dtype the call says.
template <int N>
__device__ void load_run(const void* data, DType type, int64_t at, float (&out)[N]) {
  with_dtype(type, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    unpack_run<E, N>(load_run<E, N>(static_cast<const E*>(data) + at), out);
  });
}
template <int N>
__device__ void store_run(void* data, DType type, int64_t at, const float (&x)[N]) {
  with_dtype(type, [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    store_run<E, N>(static_cast<E*>(data) + at, x);
  });
}

// Whether runs of N elements lie at multiples of their alignment: a base, and strides in elements.
template <class... Strides>
bool has_runs(const void* data, DType type, int N, Strides... strides) {
  const auto bytes = static_cast<int>(size_of(type));
  const int64_t unit = run_alignment(N * bytes) / bytes;
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(unit * bytes) == 0 &&
         ((strides % unit == 0) && ...);
}

}  // namespace deltic::gpu
