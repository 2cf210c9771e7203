// The halves of a forward in two forms.
#include "core/form.h"

#include "core/scratch.h"

namespace deltic {
namespace {

struct Memory {
  FormLists lists;
  void* states;
  size_t bytes;
};

// The state between the halves is kept as two calls would keep it.
DType type_between(const Problem& p) {
  const States& kept = kept_states(p);
  return kept ? kept.dtype : DType::f32;
}

Memory memory_of(const Problem& p, std::byte* base) {
  constexpr int64_t kAlign = 1024;
  Scratch scratch(base);
  const int64_t M = p.ckpt ? p.ckpt_tokens.n0 : 0;
  Memory m{};
  m.lists.before = scratch.take<Span>(p.N), m.lists.after = scratch.take<Span>(p.N);
  for (int64_t** list : {&m.lists.read, &m.lists.between, &m.lists.write}) {
    *list = scratch.take<int64_t>(p.N);
  }
  for (int64_t** list : {&m.lists.tokens_after, &m.lists.ckpt_before, &m.lists.ckpt_after}) {
    *list = scratch.take<int64_t>(M);
  }
  m.states = scratch.take<std::byte>(p.N, p.HV, p.K, p.V, size_of(type_between(p)));
  m.bytes = static_cast<size_t>(round_up(static_cast<int64_t>(scratch.used()), kAlign));
  return m;
}

Indices list_of(const int64_t* data, int64_t count) {
  return {.data = data, .present = true, .is64 = true, .n0 = count, .s0 = 1};
}

}  // namespace

size_t form_bytes(const Problem& p) { return memory_of(p, nullptr).bytes; }

TwoForms two_forms(const Problem& p, std::byte* memory) {
  const Memory m = memory_of(p, memory);
  const int64_t M = p.ckpt ? p.ckpt_tokens.n0 : 0;
  const States between{.data = m.states,
                       .dtype = type_between(p),
                       .present = true,
                       .slots = p.N,
                       .s_slot = p.HV * p.K * p.V,
                       .s_head = p.K * p.V,
                       .s_k = p.v_first ? 1 : p.V,
                       .s_v = p.v_first ? p.K : 1};
  TwoForms two{p, p, m.lists};
  for (Problem* half : {&two.before, &two.after}) {
    // The lists have looked at null slots, at counts of accepted tokens and at what starts from 0.
    half->form = DELTIC_FORM_CHUNKED, half->recurrent_from = {}, half->cu_host = {};
    half->is_pool = half->has_write_pool = true;
    half->null_slot = -1, half->accepted = {}, half->has_initial = {};
  }
  Problem& before = two.before;
  before.spans = m.lists.before;
  before.state_out = between;
  before.read_index = list_of(m.lists.read, p.N),
  before.write_index = list_of(m.lists.between, p.N);
  Problem& after = two.after;
  after.op = DELTIC_DECODE;
  after.spans = m.lists.after;
  after.state_in = between;
  after.read_index = list_of(m.lists.between, p.N), after.write_index = list_of(m.lists.write, p.N);
  if (M > 0) {
    before.ckpt_slots = list_of(m.lists.ckpt_before, M);
    after.ckpt_slots = list_of(m.lists.ckpt_after, M);
    after.ckpt_tokens = list_of(m.lists.tokens_after, M);
  } else {
    for (Problem* half : {&before, &after}) {
      half->ckpt = {}, half->ckpt_cu = {}, half->ckpt_tokens = {}, half->ckpt_slots = {};
    }
  }
  return two;
}

void fill_lists(const Problem& p, const FormLists& lists) {
  const int64_t M = p.ckpt ? p.ckpt_tokens.n0 : 0;
  for (int64_t m = 0; m < M; ++m) lists.ckpt_before[m] = lists.ckpt_after[m] = -1;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    const int64_t from = p.recurrent_from(n);
    lists.before[n] = {s.batch, s.begin, from};
    lists.after[n] = {s.batch, s.begin + from, s.length - from};
    lists.read[n] = s.read_slot, lists.write[n] = s.write_slot;
    lists.between[n] = s.skipped ? -1 : n;
    for (int64_t m = s.ckpt_begin; m < s.ckpt_end && M > 0; ++m) {
      lists.tokens_after[m] = p.ckpt_tokens(m) - from;
      (p.ckpt_tokens(m) <= from ? lists.ckpt_before : lists.ckpt_after)[m] = checkpoint_slot(p, m);
    }
  }
}

}  // namespace deltic
