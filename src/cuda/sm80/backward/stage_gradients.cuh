// One chunk backward. With e, y as in stage_states.cuh and dS the gradient of the state after the
// chunk:
//
//     dy_i = sum_{l>=i} P_li do_l + (k R)_i dS          de_i = beta_i (dy_i - sum_{l>i} L_li de_l)
//     dv = de        dbeta_i = (dy_i - ..) e_i          dP = do y^T     dL = -de y^T
//     d(qE) = S do   d(kE) = -S de                      d(kR) = dS y    d(exp G_last) = S dS
//     dS <- exp(G_last) dS + (qE)^T do - (kE)^T de      the gradient of the state before the chunk
#pragma once

#include "cuda/sm80/backward/stage_states.cuh"
#include "cuda/tile/gate_gradients.cuh"

namespace deltic::gpu::backward {

// x[j] += row[j] factor for j < count.
__device__ inline void add_row(const float (&row)[kChunk], int count, float factor,
                               float (&x)[kChunk]) {
#pragma unroll
  for (int j = 0; j < kChunk; j += 4) {
    if (j >= count) break;
    const float4 r = *reinterpret_cast<const float4*>(&row[j]);
    x[j] += r.x * factor;
    if (j + 1 < count) x[j + 1] += r.y * factor;
    if (j + 2 < count) x[j + 2] += r.z * factor;
    if (j + 3 < count) x[j + 3] += r.w * factor;
  }
}

// The same with the decays of a column between the tokens: token j has them down to it, and
// `factor` those down to the last of the `count`.
__device__ inline void add_decayed_row(const float (&row)[kChunk], int count, float factor,
                                       const float (&b)[kChunk], float (&x)[kChunk]) {
#pragma unroll
  for (int j = kChunk - 1; j >= 0; --j) {
    if (j >= count) continue;
    x[j] += row[j] * factor;
    factor *= b[j];
  }
}

// solve_back where value columns have decays: s.d_o, s.de and s.y become those of the states around
// the chunk, s.gv keeps the plain ones.
template <class Tr>
__device__ void solve_decayed(Shared<Tr>& s, const Lane<Tr>& at, const float (&d_o)[kChunk],
                              const float (&beta)[kChunk], const float (&e)[kChunk],
                              float (&de)[kChunk], float (&dbeta)[kChunk], float (&dy)[kChunk]) {
  float b[kChunk], to_end = 1;
  read_tokens(s.gv.b[at.column], b);
  const bool leaves = at.part() == 0;
#pragma unroll
  for (int i = kChunk - 1; i >= 0; --i) {
    dy[i] *= to_end;
    if (leaves) {
      const float y = beta[i] * e[i];
      s.gv.z[at.column][i] = dy[i], s.gv.y[at.column][i] = y;
      s.y[at.column][i] = y * to_end;
    }
    to_end *= b[i];
  }
#pragma unroll
  for (int l = 0; l < kChunk; ++l) add_decayed_row(s.P[l], l + 1, d_o[l], b, dy);
#pragma unroll
  for (int i = kChunk - 1; i >= 0; --i) {
    de[i] = beta[i] * dy[i];
    dbeta[i] = dy[i] * e[i];
    add_decayed_row(s.L[i], i, -de[i] * b[i], b, dy);
  }
  if (!leaves) return;
  store_tokens(d_o, s.gv.d_o[at.column]), store_tokens(de, s.gv.de[at.column]);
  float from_start = 1;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    from_start *= b[i];
    s.d_o[at.column][i] = d_o[i] * from_start, s.de[at.column][i] = de[i] * from_start;
  }
}

// dy, de and du e of the thread's column; part 0 leaves d_o, de and y for the others. Parts are
// free on entry; a barrier must follow.
template <class Tr>
__device__ void solve_back(Shared<Tr>& s, const Lane<Tr>& at, const float (&d_o)[kChunk],
                           const float (&beta)[kChunk], const float (&e)[kChunk],
                           float (&de)[kChunk], float (&dbeta)[kChunk]) {
  float dy[kChunk] = {};
  multiply_keys<Tr>(s.kR, s.dS, at, dy);
  add_parts<Tr>(s, at, dy);
  if constexpr (Tr::kHasGv) {
    solve_decayed<Tr>(s, at, d_o, beta, e, de, dbeta, dy);
  } else {
    // Row by row of P and L: a row comes in four loads.
#pragma unroll
    for (int l = 0; l < kChunk; ++l) add_row(s.P[l], l + 1, d_o[l], dy);
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      de[i] = beta[i] * dy[i];
      dbeta[i] = dy[i] * e[i];
      add_row(s.L[i], i, -de[i], dy);
    }
    if (at.part() > 0) return;
    store_tokens(d_o, s.d_o[at.column]), store_tokens(de, s.de[at.column]);
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      *reinterpret_cast<float4*>(&s.y[at.column][i]) = {
          beta[i] * e[i], beta[i + 1] * e[i + 1], beta[i + 2] * e[i + 2], beta[i + 3] * e[i + 3]};
    }
  }
}

// dP and dL of the thread's pair of tokens. d_o, de and y are visible; a barrier must follow.
template <class Tr>
__device__ void lay_pair_gradients(Shared<Tr>& s) {
  const int i = static_cast<int>(threadIdx.x) / kChunk, j = threadIdx.x % kChunk;
  float dP = 0, dL = 0;
  if constexpr (Tr::kHasGv) {
    for (int c = 0; c < Tr::kColumns && j <= i; ++c) {
      float y = s.gv.y[c][j];
      for (int t = j + 1; t <= i; ++t) y *= s.gv.b[c][t];
      dP += s.gv.d_o[c][i] * y;
      dL -= s.gv.de[c][i] * y;
    }
  } else {
#pragma unroll 8
    for (int c = 0; c < Tr::kColumns; ++c) {
      const float y = s.y[c][j];
      dP += s.d_o[c][i] * y;
      dL -= s.de[c][i] * y;
    }
  }
  s.dP[i][j] = j <= i ? dP : 0.0f;  // selected: what lies beyond may be no number
  s.dL[i][j] = j < i ? dL : 0.0f;
}

// dgv of the chunk's tokens, the thread's column. As in key_gradients every term belongs to the
// decays that it contains. On entry the states, factors and s.gv are visible and parts are free; a
// barrier inside, and one must follow before parts are used.
template <class Tr>
__device__ void store_decay_gradients(const Params& p, int64_t first, int count, Shared<Tr>& s,
                                      const Lane<Tr>& at) {
  // Of exp(G_i): do_i and de_i of the state before the chunk. The state itself has all decays, as
  // the last token's has.
  float x[kChunk] = {};
  {
    float d_o[kChunk], de[kChunk], all = 0;
    read_tokens(s.d_o[at.column], d_o), read_tokens(s.de[at.column], de);
    for (int d = at.first_key; d < at.first_key + Tr::kPartKeys; ++d) {
      const float S = s.S[d][at.column];
      all += s.last[d] * S * s.dS[d][at.column];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        x[i] += S * (s.qE[d][i] * d_o[i] - s.kE[d][i] * de[i]);
      }
    }
    x[kChunk - 1] += s.gv.total[at.column] * all;
  }
  add_parts<Tr>(s, at, x);
  const int64_t column = int64_t{s.item.slice} * Tr::kColumns + at.column;
  if (at.part() > 0 || column >= p.V) return;
  float b[kChunk], y[kChunk], z[kChunk];
  read_tokens(s.gv.b[at.column], b), read_tokens(s.gv.y[at.column], y);
  read_tokens(s.gv.z[at.column], z);
#pragma unroll
  for (int t = kChunk - 2; t >= 0; --t) x[t] += x[t + 1];
  float before = 0;
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    x[t] += before;
    before += y[t] * z[t];
  }
  // Pairs (i, j): tokens j + 1 to i.
#pragma unroll
  for (int i = 1; i < kChunk; ++i) {
    const float d_o = s.gv.d_o[at.column][i], de = s.gv.de[at.column][i];
    float pair[kChunk], w = 1;
#pragma unroll
    for (int j = i - 1; j >= 0; --j) {
      w *= b[j + 1];
      pair[j] = (d_o * s.P[i][j] - de * s.L[i][j]) * w * y[j];
    }
    float inside = 0;
#pragma unroll
    for (int t = 1; t <= i; ++t) inside += pair[t - 1], x[t] += inside;
  }
  const int64_t to = offset(p.dgv, s.span.batch, first, s.item.head) + column;
#pragma unroll
  for (int t = 0; t < kChunk; ++t) {
    if (t < count) store(p.dgv.data, p.dgv.dtype, to + t * p.dgv.st, x[t]);
  }
}

// dS of the state before the chunk, the thread's own elements.
template <class Tr>
__device__ void advance_back(Shared<Tr>& s, const Lane<Tr>& at) {
  float d_o[kChunk], de[kChunk];  // read again: held over the sums they would spill
  read_tokens(s.d_o[at.column], d_o), read_tokens(s.de[at.column], de);
  const float total = column_total<Tr>(s, at.column);
  for (int d = at.first_key; d < at.first_key + Tr::kPartKeys; ++d) {
    float x = s.last[d] * total * s.dS[d][at.column];
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float4 q = *reinterpret_cast<const float4*>(&s.qE[d][i]);
      const float4 k = *reinterpret_cast<const float4*>(&s.kE[d][i]);
      x += q.x * d_o[i] + q.y * d_o[i + 1] + (q.z * d_o[i + 2] + q.w * d_o[i + 3]);
      x -= k.x * de[i] + k.y * de[i + 1] + (k.z * de[i + 2] + k.w * de[i + 3]);
    }
    s.dS[d][at.column] = x;
  }
}

// What a thread has of one key after the sums over columns.
struct KeySums {
  float dqE[kChunk] = {}, dkE[kChunk] = {}, dkR[kChunk] = {};
  float d_last = 0;
};

// Thread t has key t % kWidth and the columns of part t / kWidth.
template <class Tr>
__device__ void multiply_columns(const Shared<Tr>& s, KeySums& sum) {
  const int d = static_cast<int>(threadIdx.x) % Tr::kWidth;
  const int first = static_cast<int>(threadIdx.x) / Tr::kWidth * Tr::kPartColumns;
  for (int c = first; c < first + Tr::kPartColumns; c += 4) {
    const float4 S4 = *reinterpret_cast<const float4*>(&s.S[d][c]);
    const float4 dS4 = *reinterpret_cast<const float4*>(&s.dS[d][c]);
    const float S[4] = {S4.x, S4.y, S4.z, S4.w}, dS[4] = {dS4.x, dS4.y, dS4.z, dS4.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      sum.d_last += column_total<Tr>(s, c + n) * S[n] * dS[n];
#pragma unroll
      for (int i = 0; i < kChunk; i += 4) {
        const float4 o = *reinterpret_cast<const float4*>(&s.d_o[c + n][i]);
        const float4 e = *reinterpret_cast<const float4*>(&s.de[c + n][i]);
        const float4 y = *reinterpret_cast<const float4*>(&s.y[c + n][i]);
        sum.dqE[i] += S[n] * o.x, sum.dqE[i + 1] += S[n] * o.y;
        sum.dqE[i + 2] += S[n] * o.z, sum.dqE[i + 3] += S[n] * o.w;
        sum.dkE[i] -= S[n] * e.x, sum.dkE[i + 1] -= S[n] * e.y;
        sum.dkE[i + 2] -= S[n] * e.z, sum.dkE[i + 3] -= S[n] * e.w;
        sum.dkR[i] += dS[n] * y.x, sum.dkR[i + 1] += dS[n] * y.y;
        sum.dkR[i + 2] += dS[n] * y.z, sum.dkR[i + 3] += dS[n] * y.w;
      }
    }
  }
}

// The parts' sums added up, in order, by the threads of part 0. s.S has been read: its place is
// used, for all sums of a part at once or, in narrow slices, one kind after the other. Barriers
// inside.
template <class Tr>
__device__ void add_column_parts(Shared<Tr>& s, KeySums& sum) {
  constexpr int kAtOnce = Tr::kStatePitch >= 3 * kChunk + 1 ? 3 : 1;
  static_assert(Tr::kColumnParts == 1 || Tr::kStatePitch >= kChunk + 1, "a kind fits there");
  float* place = &s.S[0][0];
  const int d = static_cast<int>(threadIdx.x) % Tr::kWidth;
  const int part = static_cast<int>(threadIdx.x) / Tr::kWidth;
  const auto kind = [&](int m) -> float(&)[kChunk] {
    return m == 0 ? sum.dqE : m == 1 ? sum.dkE : sum.dkR;
  };
#pragma unroll 1
  for (int n = 1; n < Tr::kColumnParts; ++n) {
#pragma unroll
    for (int first = 0; first < 3; first += kAtOnce) {
      __syncthreads();  // S, or what was there before, has been read
      if (part == n) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
#pragma unroll
          for (int m = 0; m < kAtOnce; ++m) {
            place[(m * kChunk + i) * Tr::kWidth + d] = kind(first + m)[i];
          }
        }
        if (first == 0) place[kAtOnce * kChunk * Tr::kWidth + d] = sum.d_last;
      }
      __syncthreads();  // it is there
      if (part == 0) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
#pragma unroll
          for (int m = 0; m < kAtOnce; ++m) {
            kind(first + m)[i] += place[(m * kChunk + i) * Tr::kWidth + d];
          }
        }
        if (first == 0) sum.d_last += place[kAtOnce * kChunk * Tr::kWidth + d];
      }
    }
  }
}

// The gradients of one key channel, of all the chunk's tokens.
struct KeyGradients {
  float dq[kChunk], dk[kChunk], dg[kChunk];
};

// From the sums over columns and the pairs of tokens. In dg every term belongs to the decays that
// it contains: exp(G_i) to tokens up to i, exp(G_last - G_i) to those after i, a pair (i, j) to
// those from j + 1 to i. So nothing is added that has to cancel, and a decay of 0 gives 0.
template <class Tr>
__device__ void key_gradients(const Params& p, const Shared<Tr>& s, const KeySums& sum,
                              KeyGradients& out) {
  const int d = static_cast<int>(threadIdx.x) % Tr::kWidth;
  float k[kChunk], decay[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) k[i] = s.k[i][d], decay[i] = s.decay[i][d];
  {  // the state's part
    float factor = 1, before = s.last[d] * sum.d_last;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      factor *= decay[i];
      out.dq[i] = factor * sum.dqE[i];  // of scale q: times scale at the end
      out.dk[i] = factor * sum.dkE[i];
      out.dg[i] = before;
      before += s.kR[d][i] * sum.dkR[i];
    }
    float after = 0;
    factor = 1;
#pragma unroll
    for (int i = kChunk - 1; i >= 0; --i) {
      after += p.scale * s.q[i][d] * out.dq[i] + k[i] * out.dk[i];
      out.dg[i] += after;
      out.dk[i] += factor * sum.dkR[i];
      factor *= decay[i];
    }
  }
  // Pairs: row i from its diagonal to the left, w the decays between.
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float q = p.scale * s.q[i][d], dP_ii = s.dP[i][i];
    out.dq[i] += dP_ii * k[i];
    out.dk[i] += dP_ii * q;
    float pair[kChunk], w = 1;
#pragma unroll
    for (int j = i - 1; j >= 0; --j) {
      w *= decay[j + 1];
      const float P = s.dP[i][j] * w, L = s.dL[i][j] * w;
      const float dk_j = P * q + L * k[i];
      out.dq[i] += P * k[j];
      out.dk[i] += L * k[j];
      out.dk[j] += dk_j;
      pair[j] = dk_j * k[j];
    }
    float inside = 0;
#pragma unroll
    for (int t = 1; t <= i; ++t) inside += pair[t - 1], out.dg[t] += inside;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) out.dq[i] *= p.scale;
}

// Rows of dq, dk and dg of the chunk's tokens into scratch. One decay per head: its gradient is the
// sum over channels, in a fixed order. s.parts is free; barriers inside if there are gates per
// head.
template <class Tr>
__device__ void store_key_gradients(const Params& p, int64_t row, int count, Shared<Tr>& s,
                                    const KeyGradients& x) {
  const int d = static_cast<int>(threadIdx.x);
  const int64_t stride = int64_t{p.HV} * p.num_slices;
  const int64_t at = row * stride + s.item.head * p.num_slices + s.item.slice;
  if (d < p.K && d < Tr::kWidth) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i >= count) break;
      const int64_t to = (at + i * stride) * p.K + d;
      p.scratch.dq[to] = x.dq[i], p.scratch.dk[to] = x.dk[i];
      if (p.gate == Gate::channel) p.scratch.dg[to] = x.dg[i];
    }
  }
  if (p.gate != Gate::head) return;
  float* sums = &s.parts[0][0][0];  // [token][warp]
  static_assert(sizeof(s.parts) >= kChunk * kWarps * sizeof(float));
  if (d < Tr::kWidth) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const float sum = warp_sum(x.dg[i]);
      if (d % 32 == 0) sums[i * kWarps + d / 32] = sum;
    }
  }
  __syncthreads();  // the warps' sums
  if (d < count) {
    float sum = 0;
    for (int w = 0; w < Tr::kWidth / 32; ++w) sum += sums[d * kWarps + w];
    p.scratch.dg[at + d * stride] = sum;
  }
}

// dv of the thread's column, and dbeta where it is the column's own.
template <class Tr>
__device__ void store_column_gradients(const Params& p, int64_t first, int count,
                                       const Shared<Tr>& s, const Lane<Tr>& at,
                                       const float (&de)[kChunk], const float (&dbeta)[kChunk]) {
  const int64_t column = int64_t{s.item.slice} * Tr::kColumns + at.column;
  if (at.part() > 0 || column >= p.V) return;
  const int64_t b = s.span.batch, h = s.item.head;
  const bool per_column = p.dbeta.present && p.beta_kind == BetaKind::value;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (i >= count) break;
    const int64_t t = first + i;
    if (p.dv.present) store(p.dv.data, p.dv.dtype, offset(p.dv, b, t, h) + column, de[i]);
    if (per_column) {
      const float x = load(p.beta.data, p.beta.dtype, offset(p.beta, b, t, h) + column);
      store(p.dbeta.data, p.dbeta.dtype, offset(p.dbeta, b, t, h) + column,
            beta_gradient(p.beta_form, x, dbeta[i]));
    }
  }
}

// The sum over the slice's columns of dbeta, which stands in parts[0]: warp w has tokens w, w + 8.
template <class Tr>
__device__ void store_beta_gradients(const Params& p, int64_t row, int count, const Shared<Tr>& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t stride = int64_t{p.HV} * p.num_slices;
  for (int i = warp; i < count; i += kWarps) {
    float sum = 0;
    for (int c = lane; c < Tr::kColumns; c += 32) sum += s.parts[0][i][c];
    sum = warp_sum(sum);
    if (lane == 0) {
      p.scratch.dbeta[(row + i) * stride + s.item.head * p.num_slices + s.item.slice] = sum;
    }
  }
}

// One chunk: s.dS becomes the gradient of the state before it. row: of its first token in scratch.
// Ends with a barrier.
template <class Tr>
__device__ void go_back(const Params& p, int64_t first, int count, int64_t row, Shared<Tr>& s,
                        const float* state, const float* errors, const float* scores) {
  const Lane<Tr> at;
  load_state<Tr>(state, s.S);
  load_tokens<Tr>(p, first, count, true, s);
  if constexpr (Tr::kHasGv) lay_column_decays<Tr>(p, first, count, s);
  (&s.L[0][0])[threadIdx.x] = scores[threadIdx.x];
  (&s.P[0][0])[threadIdx.x] = scores[kChunk * kChunk + threadIdx.x];
  float d_o[kChunk], beta[kChunk], e[kChunk], de[kChunk], dbeta[kChunk];
  load_values<Tr>(p, p.d_o, s, first, count, d_o);
  load_betas<Tr>(p, s, first, count, beta);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) e[i] = errors[i * Tr::kColumns + at.column];
  __syncthreads();  // tokens, scores
  lay_factors<Tr>(p, s);
  __syncthreads();  // factors
  solve_back<Tr>(s, at, d_o, beta, e, de, dbeta);
  store_column_gradients<Tr>(p, first, count, s, at, de, dbeta);
  __syncthreads();  // d_o, de, y; parts have been read
  if constexpr (Tr::kHasGv) {
    if (p.dgv.present) store_decay_gradients<Tr>(p, first, count, s, at);
    __syncthreads();  // parts have been read again
  }
  if (at.part() == 0) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) s.parts[0][i][at.column] = dbeta[i];
  }
  lay_pair_gradients<Tr>(s);
  KeySums sums;
  multiply_columns<Tr>(s, sums);
  __syncthreads();  // dbeta, pairs; the state and its gradient have been read
  if (p.dbeta.present && p.beta_kind == BetaKind::head) {
    store_beta_gradients<Tr>(p, row, count, s);
  }
  advance_back<Tr>(s, at);
  add_column_parts<Tr>(s, sums);
  KeyGradients gradients;
  if (threadIdx.x < Tr::kWidth) key_gradients<Tr>(p, s, sums, gradients);
  __syncthreads();  // dbeta has been read: the parts' place is free
  store_key_gradients<Tr>(p, row, count, s, gradients);
  __syncthreads();  // everything has been read
}

}  // namespace deltic::gpu::backward
