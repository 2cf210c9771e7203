// forward and decode: the recurrence, token by token.
#include <omp.h>

#include "reference/chance.h"
#include "reference/operations.h"
#include "reference/token.h"

namespace deltic::reference {
namespace {

struct Memory {
  Memory(const Problem& p, std::byte* base)
      : scratch(base), S(scratch, p.K, p.V), token(p, scratch), o(scratch.take<double>(p.V)) {}
  Scratch scratch;
  Matrix S;
  Token token;
  double* o;
};

// S is the state after the first `tokens` tokens: where the call wants it.
void keep_state(const Problem& p, const Sequence& s, int64_t h, int64_t tokens, const Matrix& S) {
  const bool is_final = tokens == s.length;
  const int64_t slot = tokens > 0 ? token_slot(p, s, tokens - 1) : is_final ? s.write_slot : -1;
  if (slot >= 0) store_state(p.state_out, slot, h, S);
  for (int64_t m = s.ckpt_begin; m < s.ckpt_end; ++m) {
    if (p.ckpt_tokens(m) == tokens && checkpoint_slot(p, m) >= 0) {
      store_state(p.ckpt, checkpoint_slot(p, m), h, S);
    }
  }
}

// In the dtype of the states, where that has 16 bits: as token t leaves it.
void round_state(const Problem& p, const Sequence& s, int64_t h, int64_t t, const Matrix& S) {
  const DType type = kept_states(p).dtype;
  for (int64_t d = 0; d < S.rows; ++d) {
    for (int64_t c = 0; c < S.columns; ++c) {
      if (p.has_seed) {
        const int64_t element = p.v_first ? c * p.K + d : d * p.V + c;
        S(d, c) =
            rounded_by_chance(type, S(d, c), chance(p.seed, position_of(p, s, t), h, element));
      } else {
        S(d, c) = rounded_to(type, S(d, c));
      }
    }
  }
}

// What a token did to the state; without one: nothing.
void keep_update(const Problem& p, const Sequence& s, int64_t h, int64_t t, const Token* token) {
  for (int64_t d = 0; d < p.K; ++d) put(p.updates, s.n, t, h, d, token ? token->k[d] : 0);
  for (int64_t c = 0; c < p.V; ++c) put(p.updates, s.n, t, h, p.K + c, token ? token->u[c] : 0);
  for (int64_t d = 0; d < decay_width(p); ++d) {
    put(p.updates, s.n, t, h, p.K + p.V + d, token ? token->decay[d] : 1);
  }
}

// The state that token t starts from, where it is not the one that token t - 1 left.
void load_branch(const Problem& p, const Sequence& s, int64_t h, int64_t t, Memory& memory) {
  const Matrix& S = memory.S;
  const StateSource from = jump_source(p, s, t);
  if (!p.updates || parent_of(p, s, t) < 0) return load_state(*from.states, from.slot, h, S);
  load_state(p.state_in, s.read_slot, h, S);
  const Path path = path_to(p, s.n, parent_of(p, s, t));
  for (int64_t i = 0; i < path.length; ++i) {
    memory.token.load(s.batch, s.begin + path.tokens[i], h);
    memory.token.step(S);
    if (rounds_tokens(p)) round_state(p, s, h, path.tokens[i], S);
  }
}

// Rounds the state after so many tokens where it is handed on as one of 16 bits, and keeps it. A
// forward hands its state over where it goes on in the recurrent form: there a checkpoint is still
// the chunked form's, as it is.
void keep_rounded(const Problem& p, const Sequence& s, int64_t h, int64_t tokens, const Matrix& S) {
  const int64_t from = has_two_forms(p) && keeps_16_bits(p) ? p.recurrent_from(s.n) : s.length + 1;
  const bool is_handed_on = tokens > from || (rounds_tokens(p) && tokens > 0);
  if (is_handed_on) round_state(p, s, h, tokens - 1, S);
  keep_state(p, s, h, tokens, S);
  if (tokens == from) round_state(p, s, h, tokens - 1, S);
}

void run_sequence(const Problem& p, const Sequence& s, int64_t h, Memory& memory) {
  const Matrix& S = memory.S;
  Token& token = memory.token;
  double* o = memory.o;
  if (!s.skipped) {
    load_state(p.state_in, s.read_slot, h, S);
    keep_rounded(p, s, h, 0, S);
  }
  for (int64_t t = 0; t < s.length; ++t) {
    std::fill_n(o, p.V, 0.0);
    if (!s.skipped) {
      if (parent_of(p, s, t) != t - 1) load_branch(p, s, h, t, memory);  // a tree's other branch
      token.load(s.batch, s.begin + t, h);
      token.step(S);
      add_transposed_product(S, p.scale, token.q, o);  // o_t = scale S_t^T q_t
      if (p.updates) keep_update(p, s, h, t, &token);
      keep_rounded(p, s, h, t + 1, S);
    }
    for (int64_t c = 0; c < p.V; ++c) put(p.o, s.batch, s.begin + t, h, c, o[c]);
  }
  for (int64_t t = s.skipped ? 0 : s.length; t < p.update_tokens; ++t) {
    keep_update(p, s, h, t, nullptr);
  }
}

}  // namespace

size_t recurrence_bytes(const Problem& p) {
  return bytes_of_threads(p, p.N * p.HV, Memory(p, nullptr).scratch.used());
}

void run_recurrence(const Problem& p, std::byte* workspace) {
  const size_t bytes = Memory(p, nullptr).scratch.used();
#pragma omp parallel for schedule(dynamic) num_threads(num_threads(p, p.N* p.HV))
  for (int64_t i = 0; i < p.N * p.HV; ++i) {
    Memory memory(p, workspace + static_cast<size_t>(omp_get_thread_num()) * bytes);
    run_sequence(p, sequence(p, i / p.HV), i % p.HV, memory);
  }
  put_zero_padding(p, p.o, p.HV, p.V);
}

}  // namespace deltic::reference
