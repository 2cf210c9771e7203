// The gradient's rows on their way: of x and of its output's gradient. Called by a thread on its
// own, for its channels; no barriers: what a thread asks for nobody else reads.
#pragma once

#include "cuda/sm80/conv/stage_inputs.cuh"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::conv {

// Tokens of a run, one after the other, `kPlaces` of them under way: in shared memory, which leaves
// the registers to inputs, later gradients and sums. Rows of single numbers, too short for an
// asynchronous copy, are under way in registers.
template <class Tr>
struct Pairs {
  using E = typename Tr::E;
  using Row = Run<E, Tr::kVec>;
  static constexpr bool kShared = sizeof(Row) >= 8;
  static constexpr int kPlaces = kShared ? 8 : 4;
  struct Shared {
    Row rows[kShared ? kPlaces : 1][2][kThreads];  // of token t in place t % kPlaces
  };

  Shared& shared;
  Row held[kShared ? 1 : kPlaces][2];
  const E *x, *d;  // where the token is that is asked for next
  int64_t x_stride, d_stride;
  int left;       // tokens that have not been asked for
  int place = 0;  // of the token that is taken next

  __device__ Pairs(const Params& p, const Work& s, int c, int count, Shared& shared)
      : shared(shared),
        x(row_of<E>(p.x, s, s.first, c)),
        d(row_of<E>(p.d_out, s, s.first, c)),
        x_stride(p.x.st),
        d_stride(p.d_out.st),
        left(count) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) request(i);
  }
  // kIsThere: the token that is asked for is one, and nobody has to look.
  template <bool kIsThere = false>
  __device__ void request(int at) {
    if (kIsThere || left > 0) {
      if constexpr (kShared) {
        copy_run_async<sizeof(Row)>(&shared.rows[at][0][threadIdx.x], x);
        copy_run_async<sizeof(Row)>(&shared.rows[at][1][threadIdx.x], d);
      } else {
        held[at][0] = load_run<E, Tr::kVec>(x), held[at][1] = load_run<E, Tr::kVec>(d);
      }
    }
    if constexpr (kShared) copies_commit();
    x += x_stride, d += d_stride, --left;
  }
  template <bool kIsThere = false>
  __device__ void take(float (&x_row)[Tr::kVec], float (&d_row)[Tr::kVec]) {
    if constexpr (kShared) {
      copies_wait<kPlaces - 1>();
      unpack_run<E, Tr::kVec>(shared.rows[place][0][threadIdx.x], x_row);
      unpack_run<E, Tr::kVec>(shared.rows[place][1][threadIdx.x], d_row);
      request<kIsThere>(place);
      place = (place + 1) % kPlaces;
    } else {
      unpack_run<E, Tr::kVec>(held[0][0], x_row), unpack_run<E, Tr::kVec>(held[0][1], d_row);
#pragma unroll
      for (int i = 0; i + 1 < kPlaces; ++i) {
        held[i][0] = held[i + 1][0], held[i][1] = held[i + 1][1];
      }
      request<kIsThere>(kPlaces - 1);
    }
  }
};

}  // namespace deltic::gpu::conv
