// The plain implementation: the recurrence and its backward pass in fp32, token by token, and the
// building blocks in fp32.
#include "cpu/plain.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "cpu/block_gradients.h"
#include "cpu/block_math.h"
#include "cpu/conv_math.h"
#include "cpu/move_math.h"
#include "cpu/norm_math.h"
#include "cpu/recurrence.h"
#include "cpu/recurrence_backward.h"
#include "cpu/saved.h"

namespace deltic::cpu {
namespace {

// Value columns of a task. Columns of the state never meet, so slices change no bit. A slice of
// 128 x 32 fp32 is 16 KB and stays in L1; the last slice of a head is filled up with zeros, so that
// every inner loop has this constant length.
constexpr int64_t kColumns = 32;

// What one thread needs: a slice of the state and the vectors of one token.
struct Slice {
  Slice(const Problem& p, std::byte* base) {
    Scratch scratch(base);
    S = scratch.take<float>(p.K, kColumns);
    q = scratch.take<float>(p.K);
    k = scratch.take<float>(p.K);
    decay = scratch.take<float>(p.K);
    v = scratch.take<float>(kColumns);
    u = scratch.take<float>(kColumns);
    value_decay = scratch.take<float>(kColumns);
    beta = scratch.take<float>(kColumns);
    bytes = scratch.used();
  }
  float *S, *q, *k, *decay, *v, *u, *value_decay, *beta;
  size_t bytes;
};

float decay_of(float log_decay) { return std::exp(std::max(log_decay, kMinLogDecay)); }

void load_token(const Problem& p, int64_t b, int64_t t, int64_t h, int64_t first, int64_t count,
                Slice& x) {
  load_row(p.q, b, t, p.k_head(h), 0, p.K, x.q);
  load_row(p.k, b, t, p.k_head(h), 0, p.K, x.k);
  if (p.l2norm) {
    normalize(x.q, p.K);
    normalize(x.k, p.K);
  }
  for (int64_t d = 0; d < p.K; ++d) x.q[d] *= p.scale;
  if (p.gate != Gate::none) {
    load_log_decay(p, b, t, h, x.decay);
    for (int64_t d = 0; d < gate_width(p); ++d) x.decay[d] = decay_of(x.decay[d]);
    if (p.gate == Gate::head) std::fill_n(x.decay, p.K, x.decay[0]);
  }
  load_row(p.v, b, t, h, first, count, x.v);
  load_beta(p, b, t, h, first, count, x.beta);
  if (p.gv) {
    load_row(p.gv, b, t, h, first, count, x.value_decay);
    for (int64_t c = 0; c < count; ++c) x.value_decay[c] = decay_of(x.value_decay[c]);
  }
}

// S_{t-1} -> S_t; o_t in x.v. Two sweeps over the slice: decay and S'^T k, then update and S^T q.
void step(const Problem& p, Slice& x) {
  if (p.gv) {
    for (int64_t d = 0; d < p.K; ++d) {
      for (int64_t c = 0; c < kColumns; ++c) x.S[d * kColumns + c] *= x.value_decay[c];
    }
  }
  float o[kColumns] = {}, *u = x.u;
  std::fill_n(u, kColumns, 0.0f);
  for (int64_t d = 0; d < p.K; ++d) {
    float* S = x.S + d * kColumns;
    const float k = x.k[d], decay = x.decay[d];
    for (int64_t c = 0; c < kColumns; ++c) {
      S[c] *= decay;
      u[c] += S[c] * k;
    }
  }
  for (int64_t c = 0; c < kColumns; ++c) u[c] = x.beta[c] * (x.v[c] - u[c]);
  for (int64_t d = 0; d < p.K; ++d) {
    float* S = x.S + d * kColumns;
    const float k = x.k[d], q = x.q[d];
    for (int64_t c = 0; c < kColumns; ++c) {
      S[c] += k * u[c];
      o[c] += S[c] * q;
    }
  }
  std::copy_n(o, kColumns, x.v);
}

void round_state(const Problem& p, Slice& x) {
  if (!rounds_tokens(p)) return;
  const bool is_bf16 = kept_states(p).dtype == DType::bf16;
  for (int64_t i = 0; i < p.K * kColumns; ++i) {
    x.S[i] = is_bf16 ? bf16_to_f32(f32_to_bf16(x.S[i])) : f16_to_f32(f32_to_f16(x.S[i]));
  }
}

// What a token did to the state, k, u and decay, in its row of the record. k and decay are those of
// the whole head: its first slice has them.
void store_update(const Problem& p, int64_t n, int64_t t, int64_t h, int64_t first, int64_t count,
                  const Slice& x) {
  if (first == 0) {
    store_row(p.updates, n, t, h, 0, p.K, x.k);
    store_row(p.updates, n, t, h, p.K + p.V, decay_width(p), x.decay);
  }
  store_row(p.updates, n, t, h, p.K + first, count, x.u);
}
// Rows that no token has: they change nothing.
void store_no_updates(const Problem& p, const Sequence& s, int64_t h, int64_t first, int64_t count,
                      Slice& x) {
  std::fill_n(x.k, p.K, 0.0f), std::fill_n(x.u, kColumns, 0.0f), std::fill_n(x.decay, p.K, 1.0f);
  for (int64_t t = s.skipped ? 0 : s.length; t < p.update_tokens; ++t) {
    store_update(p, s.n, t, h, first, count, x);
  }
}

// S <- decay S + k u^T, in two sweeps as in `step`: the same bits.
void apply(const Problem& p, Slice& x) {
  for (int64_t d = 0; d < p.K; ++d) {
    for (int64_t c = 0; c < kColumns; ++c) x.S[d * kColumns + c] *= x.decay[d];
  }
  for (int64_t d = 0; d < p.K; ++d) {
    for (int64_t c = 0; c < kColumns; ++c) x.S[d * kColumns + c] += x.k[d] * x.u[c];
  }
  round_state(p, x);
}
// The tokens of a path by their rows. Of a branch in decode k and decay are the tokens' own:
// another thread may have them to write.
void apply_path(const Problem& p, const Sequence& s, const Path& path, int64_t h, int64_t first,
                int64_t count, Slice& x) {
  for (int64_t i = 0; i < path.length; ++i) {
    const int64_t t = path.tokens[i];
    if (p.op == DELTIC_COMMIT) {
      load_row(p.updates, s.n, t, h, 0, p.K, x.k);
      load_row(p.updates, s.n, t, h, p.K + p.V, decay_width(p), x.decay);
      if (p.gate == Gate::head) std::fill_n(x.decay, p.K, x.decay[0]);
    } else {
      load_token(p, s.batch, s.begin + t, h, first, count, x);
    }
    load_row(p.updates, s.n, t, h, p.K + first, count, x.u);
    apply(p, x);
  }
}

void clear(const Problem& p, Slice& x) {
  std::fill_n(x.S, p.K * kColumns, 0.0f);
  std::fill_n(x.decay, p.K, 1.0f);
  for (float* row : {x.v, x.u, x.value_decay, x.beta}) std::fill_n(row, kColumns, 0.0f);
}

void run_slice(const Problem& p, const Sequence& s, int64_t h, int64_t first, Slice& x) {
  const int64_t count = std::min(kColumns, p.V - first);
  if (s.skipped) {
    for (int64_t t = 0; t < s.length; ++t) zero_row(p.o, s.batch, s.begin + t, h, first, count);
    if (p.updates) store_no_updates(p, s, h, first, count, x);
    return;
  }
  clear(p, x);
  StateColumns states(p, s, h, first, count, kColumns);
  states.load_initial(x.S);
  states.keep(x.S, 0);
  for (int64_t t = 0; t < s.length; ++t) {
    if (p.updates && parent_of(p, s, t) != t - 1) {
      states.load_initial(x.S);
      apply_path(p, s, path_to(p, s.n, parent_of(p, s, t)), h, first, count, x);
    } else {
      states.load_branch(t, x.S);
    }
    load_token(p, s.batch, s.begin + t, h, first, count, x);
    step(p, x);
    store_row(p.o, s.batch, s.begin + t, h, first, count, x.v);
    if (p.updates) store_update(p, s.n, t, h, first, count, x);
    if (p.has_seed) {
      const RandomState random(p, s, h, t);
      for (int64_t i = 0; i < p.K * kColumns; ++i) {
        x.S[i] = random.rounded(i / kColumns, first + i % kColumns, x.S[i]);
      }
    } else {
      round_state(p, x);
    }
    states.keep(x.S, t + 1);
  }
  if (p.updates) store_no_updates(p, s, h, first, count, x);
}

// A slice of commit, of one layer.
void run_commit(const Problem& p, const Sequence& s, int64_t h, int64_t first, Slice& x) {
  if (s.write_slot < 0) return;
  const int64_t count = std::min(kColumns, p.V - first);
  clear(p, x);
  StateColumns states(p, s, h, first, count, kColumns);
  states.load_initial(x.S);
  apply_path(p, s, path_to(p, s.n, p.accepted(s.n) - 1), h, first, count, x);
  states.store_last(x.S);
}

void run_recurrence(const Problem& p, std::span<std::byte> workspace) {
  const size_t bytes = Slice(p, nullptr).bytes;
  const int64_t num_slices = (p.V + kColumns - 1) / kColumns;
  const int64_t per_layer = p.N * p.HV * num_slices;
  const int64_t num_tasks = has_tokens_or_states(p) ? p.layers * per_layer : 0;
  run_team(recurrence_threads(p, num_tasks), [&](const Member& member) {
    Slice x(p, workspace.data() + static_cast<size_t>(member.index) * bytes);
    member.for_each(num_tasks, [&](int64_t i) {
      const int64_t head = i % per_layer / num_slices, first = i % num_slices * kColumns;
      if (p.op == DELTIC_COMMIT) {
        const Problem layer = layer_of(p, i / per_layer);
        return run_commit(layer, sequence(layer, head / p.HV), head % p.HV, first, x);
      }
      run_slice(p, sequence(p, head / p.HV), head % p.HV, first, x);
    });
  });
  zero_padding(p, p.o, p.HV, p.V);
}

bool is_recurrence(const Problem& p) {
  return p.op == DELTIC_FORWARD || p.op == DELTIC_DECODE || p.op == DELTIC_COMMIT;
}

const char* nothing_missing() { return nullptr; }

size_t workspace_bytes(const Problem& p) {
  if (p.op == DELTIC_CONV || p.op == DELTIC_MOVE) return 0;
  if (p.op == DELTIC_RMSNORM) return norm::Norm<norm::PlainMath>(p).workspace_bytes();
  if (p.op == DELTIC_BACKWARD) return recurrence_backward::workspace_bytes(p);
  if (p.is_gradient) return block_gradients::workspace_bytes(p);
  if (!is_recurrence(p)) return blocks::workspace_bytes(p);
  return static_cast<size_t>(checked_product(Slice(p, nullptr).bytes, p.threads));
}

// Backward here starts from the first token, whatever was kept: the header is all it looks at.
void run(const Problem& p, std::span<std::byte> workspace, void*) {
  if (p.op == DELTIC_CONV) return conv::run(p);
  if (p.op == DELTIC_MOVE) return move::Move<move::PlainMath>(p).run();
  if (p.op == DELTIC_RMSNORM) return norm::Norm<norm::PlainMath>(p).run(workspace);
  if (p.op == DELTIC_BACKWARD) {
    check_saved_header(p, Arithmetic::recurrence);
    return recurrence_backward::run(p, workspace);
  }
  if (p.save != DELTIC_SAVE_NONE) write_saved_header(p, p.save, Arithmetic::recurrence);
  if (p.is_gradient) return block_gradients::run(p, workspace);
  is_recurrence(p) ? run_recurrence(p, workspace) : blocks::run(p, workspace);
}

}  // namespace

// One entry serves every operation: the problem says which it is.
const Implementation& plain(deltic_op) {
  static const Implementation entry{"cpu.plain", nothing_missing, refuse_fp64, workspace_bytes,
                                    run};
  return entry;
}

}  // namespace deltic::cpu
