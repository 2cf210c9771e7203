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

// In the dtype of the states, where that has 16 bits.
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

void run_sequence(const Problem& p, const Sequence& s, int64_t h, Memory& memory) {
  const Matrix& S = memory.S;
  Token& token = memory.token;
  double* o = memory.o;
  if (!s.skipped) {
    load_state(p.state_in, s.read_slot, h, S);
    keep_state(p, s, h, 0, S);
  }
  for (int64_t t = 0; t < s.length; ++t) {
    std::fill_n(o, p.V, 0.0);
    if (!s.skipped) {
      if (parent_of(p, s, t) != t - 1) {  // a tree's other branch
        const StateSource from = jump_source(p, s, t);
        load_state(*from.states, from.slot, h, S);
      }
      token.load(s.batch, s.begin + t, h);
      token.step(S);
      add_transposed_product(S, p.scale, token.q, o);  // o_t = scale S_t^T q_t
      if (rounds_tokens(p)) round_state(p, s, h, t, S);
      keep_state(p, s, h, t + 1, S);
    }
    for (int64_t c = 0; c < p.V; ++c) put(p.o, s.batch, s.begin + t, h, c, o[c]);
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
