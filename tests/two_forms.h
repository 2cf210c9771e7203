// A forward that goes over to the recurrent form beside the two calls that it stands for: a chunked
// one over the first tokens of every sequence, and a decode of the others. On any device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cases/check.h"

namespace deltic::test {

using Numbers = std::vector<double>;

// The tokens [first, end) of a sequence, as a packed call over them alone has them.
struct Tokens {
  int64_t first = 0, end = 0;
};

inline int64_t row_of(const cases::Case& c, int64_t n, int64_t token) {
  return (c.packed ? c.sequence_begin(n) : n * c.length) + token;
}

// Rows of those tokens, sequence after sequence.
inline Numbers rows_of(const cases::Case& c, const Numbers& all, const std::vector<Tokens>& parts) {
  const auto per_token =
      static_cast<int64_t>(all.size()) / std::max<int64_t>(c.num_batches() * c.num_tokens(), 1);
  Numbers rows;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    const Tokens& part = parts[static_cast<size_t>(n)];
    const auto begin = all.begin() + row_of(c, n, part.first) * per_token;
    rows.insert(rows.end(), begin, begin + (part.end - part.first) * per_token);
  }
  return rows;
}

// States by sequence: of initial_state, or of the slots of a pool; zeros where there is none.
inline Numbers states_of(const cases::Instance& x, const std::string& name,
                         const std::vector<int64_t>& slots) {
  const cases::Case& c = x.spec();
  const auto size = static_cast<size_t>(c.HV * c.K * c.V);
  Numbers states(static_cast<size_t>(c.num_sequences()) * size, 0.0);
  if (!x.has(name)) return states;
  const Numbers all = x.values(name);
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    const int64_t slot = c.pool == cases::Pool::none ? n : slots[static_cast<size_t>(n)];
    if (slot < 0) continue;
    std::copy_n(all.begin() + slot * static_cast<int64_t>(size), size,
                states.begin() + n * static_cast<int64_t>(size));
  }
  return states;
}

// One of the two calls, with the inputs of its tokens and the states that it starts from.
inline cases::Instance half_of(const cases::Instance& whole, Op op,
                               const std::vector<Tokens>& parts, const Numbers& states,
                               const cases::Place& place) {
  const cases::Case& c = whole.spec();
  cases::Case half = c;
  half.op = op;
  half.recurrent = false, half.from.clear();
  half.packed = true, half.seqs.clear(), half.pad = 0;
  for (const Tokens& part : parts) half.seqs.push_back(part.end - part.first);
  half.pool = cases::Pool::none, half.init = true, half.final_state = cases::Final::separate;
  cases::Instance instance(cases::normalise(half), true, place);
  for (const std::string& name : instance.inputs()) {
    if (name == "initial_state" || name == "cu_seqlens") continue;
    const bool is_row = whole.tensor(name).view.rank >= 3 && name != "A_log" && name != "dt_bias";
    instance.set_values(name, is_row ? rows_of(c, whole.values(name), parts) : whole.values(name));
  }
  instance.set_values("initial_state", states);
  return instance;
}

inline bool is_listed(Op op, const std::string& impl, DeviceType device) {
  const std::vector<std::string> names = cases::implementation_names(op, {}, device);
  return std::find(names.begin(), names.end(), impl) != names.end();
}

// Of a case with offsets (recurrent=), split off, states of one dtype.
inline void expect_two_calls(const std::string& line, const std::string& impl,
                             const cases::Place& place) {
  const cases::Case c = cases::parse(line);
  cases::Instance whole(c, true, place);
  const bool is_pool = c.pool != cases::Pool::none;
  const Numbers start =
      states_of(whole, is_pool ? "state_pool" : "initial_state", whole.read_slots());
  whole.run({.impl = impl});
  std::vector<Tokens> first, second;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    const bool is_skipped = is_pool && whole.is_skipped(n);
    const int64_t end = is_skipped ? 0 : c.sequence_length(n);
    const int64_t from = std::min(end, c.recurrent_from(n));
    first.push_back({0, from}), second.push_back({from, end});
  }
  cases::Instance prompt = half_of(whole, Op::forward, first, start, place);
  prompt.run({.impl = impl});
  cases::Instance answer = half_of(whole, Op::decode, second, prompt.values("final_state"), place);
  answer.run({.impl = is_listed(Op::decode, impl, place.device) ? impl : ""});
  EXPECT_TRUE(rows_of(c, whole.values("o"), first) == prompt.values("o"))
      << impl << ": o before\n  " << line;
  EXPECT_TRUE(rows_of(c, whole.values("o"), second) == answer.values("o"))
      << impl << ": o from there on\n  " << line;
  if (c.final_state == cases::Final::none && !is_pool) return;
  const bool in_place = c.final_state == cases::Final::inplace;
  const Numbers left = states_of(whole,
                                 is_pool    ? c.write_pool ? "write_pool" : "state_pool"
                                 : in_place ? "initial_state"
                                            : "final_state",
                                 whole.write_slots());
  const Numbers expected = answer.values("final_state");
  const auto size = static_cast<size_t>(c.HV * c.K * c.V);
  for (size_t n = 0; n < first.size(); ++n) {
    if (is_pool && whole.write_slots()[n] < 0) continue;
    const auto at = static_cast<int64_t>(n * size);
    EXPECT_TRUE(std::equal(left.begin() + at, left.begin() + at + static_cast<int64_t>(size),
                           expected.begin() + at))
        << impl << ": state of sequence " << n << "\n  " << line;
  }
}

// Gates, dtypes of rows and states, pools, both layouts, widths of every kind of kernel.
inline const char* const kTwoFormLines[] = {
    "forward gate=head seqs=100,0,64,20,130 pad=3 H=2 HV=4 K=128 V=128 init=1 "
    "recurrent=64,0,10,end,70 dtype=bf16 split=off",
    "forward gate=channel form=bounded gdtype=bf16 beta=sigmoid l2norm=1 dense=3x150 H=2 K=128 "
    "V=128 init=1 recurrent=128,37,0 dtype=bf16 state=vk split=off",
    "forward gate=channel form=bounded gdtype=bf16 l2norm=1 seqs=100,0,64,20 H=2 K=128 V=128 "
    "pool=inplace sdtype=bf16 recurrent=64,0,10 dtype=bf16 state=vk split=off",
    "forward gate=head seqs=70,30,0,65 H=1 HV=2 K=128 V=64 pool=mixed sdtype=bf16 recurrent=64,10 "
    "dtype=bf16 state=vk idx=i64 split=off",
    "forward gate=none dense=2x90 H=2 K=64 V=72 recurrent=64,5 dtype=f32 split=off",
    "forward gate=head form=softplus gates=softplus seqs=100,40 H=2 HV=4 K=96 V=72 init=1 "
    "final=inplace recurrent=70,1 dtype=f16 split=off",
    "forward gate=channel seqs=40,100,3 H=1 HV=2 K=40 V=33 pool=move sdtype=f16 "
    "recurrent=33,64,end "
    "dtype=f32 chunk=32 split=off",
};

}  // namespace deltic::test
