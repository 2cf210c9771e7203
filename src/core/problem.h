// A checked call: what every backend gets. Views with 64-bit strides, sizes and resolved options;
// nothing here is owned. One struct serves all operations of the family.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "deltic/deltic.h"

namespace deltic {

enum class Gate { none, head, channel };
enum class BetaKind { none, head, value };  // absent (1), [B,T,HV], [B,T,HV,V]

// A tensor of rows: element (b, t, h, c) is at b*sb + t*st + h*sh + c.
struct Rows {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool present = false;
  int64_t sb = 0, st = 0, sh = 0;

  explicit operator bool() const { return present; }
  int64_t at(int64_t b, int64_t t, int64_t h) const { return b * sb + t * st + h * sh; }
  template <class E>
  E* row(int64_t b, int64_t t, int64_t h) const {
    return static_cast<E*>(data) + at(b, t, h);
  }
};

// A flat parameter (A_log, dt_bias, the weights of conv), any shape and strides.
struct Param {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool present = false;
  bool contiguous = false;
  int32_t rank = 0;
  int64_t shape[DELTIC_MAX_RANK] = {}, strides[DELTIC_MAX_RANK] = {};

  explicit operator bool() const { return present; }
  int64_t at(int64_t i) const {
    int64_t offset = 0;
    for (int32_t d = rank - 1; d >= 0; --d) {
      offset += (i % shape[d]) * strides[d];
      i /= shape[d];
    }
    return offset;
  }
  double operator[](int64_t i) const { return load_f64(data, dtype, at(i)); }
};

// States by slot: element (slot, h, d, v) is at slot*s_slot + h*s_head + d*s_k + v*s_v. The last
// inputs that conv keeps are such states too: one head, its channels as d, the inputs as v.
struct States {
  void* data = nullptr;
  DType dtype = DType::f32;
  bool present = false;
  int64_t slots = 0, s_slot = 0, s_head = 0, s_k = 0,
          s_v = 0;  // s_v is 1 K-first, s_k is 1 V-first
  int64_t s_layer = 0;

  explicit operator bool() const { return present; }
  int64_t at(int64_t slot, int64_t h) const { return slot * s_slot + h * s_head; }
  int64_t at(int64_t layer, int64_t slot, int64_t h) const { return layer * s_layer + at(slot, h); }
};

// int32 or int64 indices, one or two dimensions.
struct Indices {
  const void* data = nullptr;
  bool present = false, is64 = false;
  int64_t n0 = 0, n1 = 0, s0 = 0, s1 = 0;  // n1 = 0: one dimension

  explicit operator bool() const { return present; }
  int64_t operator()(int64_t i, int64_t j = 0) const {
    const int64_t at = i * s0 + j * s1;
    return is64 ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
  }
};

// A yes or no per sequence, one byte each.
struct Flags {
  const uint8_t* data = nullptr;
  bool present = false;
  int64_t s0 = 0;

  explicit operator bool() const { return present; }
  bool operator()(int64_t i) const { return data[i * s0] != 0; }
};

// Where the tokens of a sequence lie.
struct Span {
  int64_t batch, begin, length;  // row of the B dimension, first token, tokens
};

struct StepProblem;  // core/step.h

struct Problem {
  deltic_op op = DELTIC_FORWARD;
  StepProblem* step = nullptr;  // of a step: the calls that it is made of
  bool in_step = false;         // one of those: arguments are named after it
  deltic_device_type device = DELTIC_CPU;
  int32_t device_index = 0;
  int64_t B = 0, T = 0, N = 0, H = 0, HV = 0, K = 0, V = 0;  // N * HV * K * V: at most 2^56
  bool packed = false;

  Gate gate = Gate::none;
  deltic_gate_form gate_form = DELTIC_GATE_LOG_DECAY;
  BetaKind beta_kind = BetaKind::none;
  deltic_beta_form beta_form = DELTIC_BETA_VALUE;
  bool l2norm = false, v_first = false, reverse = false, checked = false;
  bool has_fp64 = false;  // some tensor is: the oracle's
  float scale = 1.0f, lower_bound = 0.0f;
  int32_t chunk = 64;  // width of A for `inverse`
  deltic_split split = DELTIC_SPLIT_AUTO;
  int64_t segment_length = 0;              // tokens, with DELTIC_SPLIT_SEGMENTS
  deltic_form form = DELTIC_FORM_CHUNKED;  // of forward
  int32_t threads = 1;
  void* stream = nullptr;  // of the call, or of the one that a query is for
  // SMs of the stream's context, asked for once in a call by who needs them; 0: not yet.
  mutable int32_t stream_sms = 0;

  Rows q, k, v, o, beta, g, gv;        // forward, decode
  Rows x, a, out, w, u, kg, qg, rstd;  // building blocks
  Rows z;                              // rmsnorm
  Rows inverse;                        // out, of scores_inverse: `a` of the call
  Param A_log, dt_bias;
  Indices cu, cu_host;
  Indices recurrent_from;  // [N], of a forward that goes over to the recurrent form there
  // [N], where the call runs over parts of its sequences, which lie inside of them; on its device.
  const Span* spans = nullptr;
  // initial/final state or a pool: where sequence n starts and ends. state_out is the write pool
  // where there is one.
  States state_in, state_out, ckpt;
  bool is_pool = false, has_write_pool = false;
  bool is_ckpt_in_pool = false;  // `ckpt` is state_out
  int64_t layers = 1;            // of the pools: the lists are those of every layer
  bool transposes = false;       // state_out has the other layout than v_first says
  int64_t null_slot = -1;        // slots up to this one are none
  // read_index is a table [N,T'] with `accepted` (conv: never, there `accepted` moves the window).
  Indices read_index, write_index, ckpt_cu, ckpt_tokens, ckpt_slots, accepted;
  Indices parents;        // [N,T'], of decode
  bool has_seed = false;  // decode: states of 16 bits are rounded by chance, not to nearest
  uint64_t seed = 0;
  Indices positions;  // [N], of first tokens; absent: 0
  Flags has_initial;
  // What tokens do to states, row (sequence, token, value head): k, u and decays. Written by decode
  // instead of states, read by commit, where T is the number of its tokens.
  Rows updates;
  int64_t update_layer = 0, update_tokens = 0;  // stride of layers; T'

  // Backward: what came back, the gradients asked for, and what the forward kept.
  deltic_save save = DELTIC_SAVE_NONE;
  Rows d_o, dq, dk, dv, dbeta, dg, dgv;
  // A building block's gradient: the same, for its outputs and inputs.
  bool is_gradient = false;
  Rows d_out, d_w, d_u, d_kg, d_qg, dx, da, dz;
  Param dA_log, ddt_bias;  // written through at()
  States d_final, d_initial;
  deltic_buffer saved = {};

  // conv: H = HV = 1, K channels, V inputs per channel in a state (0 without one), `taps` weights.
  // rmsnorm: rows of K numbers, one weight for each.
  int64_t taps = 0;
  float eps = 0;
  deltic_activation activation = DELTIC_ACTIVATION_NONE;
  Param weight, bias, dweight, dbias;

  // Checked mode on a GPU: a word in its memory, all ones unless the checks found something; then
  // the work is skipped. Null: unchecked.
  const uint64_t* record = nullptr;

  int64_t k_head(int64_t value_head) const { return value_head / (HV / H); }
  // Those of the call; N may leave out empty ones.
  int64_t sequences_given() const { return packed ? N : B; }
};

// The recurrent form hands its state from token to token as from call to call: one of 16 bits is
// rounded after every token, so that T tokens in one call have the bits of T calls. The state that
// is written says so, else the one that is read.
inline const States& kept_states(const Problem& p) {
  return p.state_out ? p.state_out : p.state_in;
}
inline bool keeps_16_bits(const Problem& p) {
  const States& kept = kept_states(p);
  return kept && size_of(kept.dtype) == 2;
}
inline bool rounds_tokens(const Problem& p) {
  return (p.op == DELTIC_DECODE || p.op == DELTIC_COMMIT) && keeps_16_bits(p);
}

// Whether forward runs in the recurrent form: all of it, or from a token of each sequence on.
inline bool is_recurrent(const Problem& p) {
  return p.op == DELTIC_FORWARD && p.form == DELTIC_FORM_RECURRENT;
}
inline bool has_two_forms(const Problem& p) { return is_recurrent(p) && p.recurrent_from; }

// Whether a call without tokens has a state to write.
inline bool writes_states(const Problem& p) {
  return p.N > 0 && (p.state_out || p.d_initial || (p.ckpt && p.ckpt_tokens.n0 > 0));
}

// Whether there are rows of updates for decode to write.
inline bool writes_updates(const Problem& p) {
  return p.op == DELTIC_DECODE && p.updates && p.N > 0 && p.update_tokens > 0;
}

// Whether sequences have anything in them. Of others there may be 2^50, or as many heads: nobody
// passes over them.
inline bool has_tokens_or_states(const Problem& p) {
  return p.T > 0 || p.ckpt || writes_states(p) || writes_updates(p);
}

// Whether there is a byte for the call to write, or a buffer of forward's to look at.
inline bool has_work(const Problem& p) {
  if (p.save != DELTIC_SAVE_NONE || p.saved.bytes > 0) return true;
  if (writes_states(p) || writes_updates(p)) return true;
  if (p.dA_log || p.ddt_bias || p.dweight || p.dbias) return true;
  if (p.B == 0 || p.T == 0) return false;
  for (const Rows* rows : {&p.o, &p.w, &p.u, &p.kg, &p.qg, &p.rstd, &p.inverse, &p.dq, &p.dk, &p.dv,
                           &p.dbeta, &p.dg, &p.dgv, &p.dx, &p.da, &p.dz}) {
    if (*rows) return true;
  }
  return p.out && !p.is_gradient;
}

inline constexpr float kMinLogDecay = -104.0f;  // exp is 0 below that in fp32
inline constexpr double kNormEps = 1e-6;
inline constexpr float kRmsEps = 1e-5f;  // of rmsnorm, unless the call says another

// One sequence of the batch.
struct Sequence {
  int64_t n = 0;      // index in the call
  int64_t batch = 0;  // row of the B dimension
  int64_t begin = 0;  // first token in the T dimension
  int64_t length = 0;
  int64_t read_slot = -1, write_slot = -1;  // of state_in, state_out; -1: zero, nowhere
  int64_t ckpt_begin = 0, ckpt_end = 0;
  bool skipped = false;  // both pool indices -1: o = 0, nothing else is touched
  // conv: so many inputs of the state it starts from count, from place 0 on; and the input that
  // place 0 of the state left behind holds, counted from the call's first token.
  int64_t inputs = 0, left_from = 0;
};

// The slot that an index list names; -1: none.
inline int64_t named_slot(const Problem& p, int64_t slot) {
  return slot <= p.null_slot ? -1 : slot;
}
// Slot of checkpoint m; -1: unused.
inline int64_t checkpoint_slot(const Problem& p, int64_t m) {
  return named_slot(p, p.ckpt_slots(m));
}
// The column of a read table that the count of accepted tokens names. Where a row has no slots the
// count may be anything.
inline int64_t read_column(const Problem& p, int64_t n) {
  const int64_t columns = p.read_index.n1;
  return columns > 0 ? std::clamp<int64_t>(p.accepted(n), 1, columns) - 1 : 0;
}
// Where the read list or table says that sequence n starts; -1: nowhere.
inline int64_t listed_read_slot(const Problem& p, int64_t n) {
  const Indices& read = p.read_index ? p.read_index : p.write_index;
  return read ? named_slot(p, read(n, read_column(p, n))) : n;
}

// Tokens of sequence n; needs host-visible lengths.
inline int64_t length_of(const Problem& p, int64_t n) {
  if (p.spans != nullptr) return p.spans[n].length;
  return p.packed ? p.cu(n + 1) - p.cu(n) : p.T;
}

// Needs host-visible lengths and indices. With write_index [N,T'] write_slot is -1: ask token_slot.
inline Sequence sequence(const Problem& p, int64_t n) {
  Sequence s;
  s.n = n;
  s.batch = p.packed ? 0 : n;
  s.begin = p.spans != nullptr ? p.spans[n].begin : p.packed ? p.cu(n) : 0;
  s.length = length_of(p, n);
  const bool per_token = p.write_index.n1 > 0;
  if (p.is_pool) {
    const Indices& write = p.write_index ? p.write_index : p.read_index;
    s.read_slot = listed_read_slot(p, n);
    s.write_slot = per_token ? -1 : write ? named_slot(p, write(n)) : n;
    if (per_token) {
      bool any = s.read_slot >= 0;
      for (int64_t t = 0; t < s.length && !any; ++t) {
        any = named_slot(p, p.write_index(n, t)) >= 0;
      }
      s.skipped = !any;
    } else {
      s.skipped = s.read_slot < 0 && s.write_slot < 0;
    }
  } else {
    s.read_slot = p.state_in ? n : -1;
    s.write_slot = p.state_out ? n : -1;
  }
  if (p.updates && p.op == DELTIC_DECODE) {  // no state is written
    s.write_slot = -1;
    s.skipped = p.is_pool && s.read_slot < 0;
  }
  if (p.has_initial && !p.has_initial(n)) s.read_slot = -1;
  if (p.op == DELTIC_CONV) {
    // An empty sequence's stays as it is; a skipped one's count may be anything.
    const bool is_window = p.accepted && s.length > 0 && !s.skipped;
    s.inputs = is_window ? p.accepted(n) + p.taps - 2 : p.V;
    s.left_from = is_window ? 2 - p.taps : s.length - p.V;
  }
  if (p.ckpt_cu) {
    s.ckpt_begin = p.ckpt_cu(n);
    s.ckpt_end = p.ckpt_cu(n + 1);
  }
  return s;
}
// Whether the lists leave a call that has work by its shapes something to write: of one without
// tokens, and of those that write states alone, they may name no slot, for 2^50 heads or layers.
// Needs what sequence() needs.
inline bool lists_leave_work(const Problem& p) {
  const bool has_rows = p.T > 0 && p.op != DELTIC_COMMIT;
  if (has_rows || p.save != DELTIC_SAVE_NONE || writes_updates(p)) return true;
  if (!p.is_pool && (p.state_out || !p.ckpt)) return true;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    if (p.is_pool && s.write_slot >= 0) return true;
    for (int64_t m = s.ckpt_begin; m < s.ckpt_end; ++m) {
      if (checkpoint_slot(p, m) >= 0) return true;
    }
  }
  return false;
}
// Slot of the state after token t (0-based) of a sequence; -1: not kept.
inline int64_t token_slot(const Problem& p, const Sequence& s, int64_t t) {
  if (p.write_index.n1 > 0) return named_slot(p, p.write_index(s.n, t));
  return t + 1 == s.length ? s.write_slot : -1;
}
// The most tokens of a sequence with parents.
inline constexpr int64_t kMaxDrafts = 16;
// The token of the call whose state token t starts from; -1: where the sequence starts.
inline int64_t parent_of(const Problem& p, const Sequence& s, int64_t t) {
  return p.parents ? p.parents(s.n, t) : t - 1;
}
// The position in its sequence of token t of the call; a tree's tokens follow their parents.
inline int64_t position_of(const Problem& p, const Sequence& s, int64_t t) {
  uint64_t position = p.positions ? static_cast<uint64_t>(p.positions(s.n)) : 0;
  if (!p.parents) return static_cast<int64_t>(position + static_cast<uint64_t>(t));
  while ((t = parent_of(p, s, t)) >= 0) ++position;
  return static_cast<int64_t>(position);
}
// Where the state is that token t starts from, if it is not the one that token t - 1 left.
struct StateSource {
  const States* states;
  int64_t slot;  // -1: zero
};
inline StateSource jump_source(const Problem& p, const Sequence& s, int64_t t) {
  const int64_t parent = parent_of(p, s, t);
  if (parent < 0) return {&p.state_in, s.read_slot};
  return {&p.state_out, token_slot(p, s, parent)};
}
// The tokens from a root to `last` (-1: none) of a sequence with parents, or of a chain.
struct Path {
  int64_t tokens[kMaxDrafts];
  int64_t length = 0;
};
inline Path path_to(const Problem& p, int64_t n, int64_t last) {
  Path path;
  for (int64_t t = last; t >= 0 && path.length < kMaxDrafts;
       t = p.parents ? p.parents(n, t) : t - 1) {
    path.tokens[path.length++] = t;
  }
  std::reverse(path.tokens, path.tokens + path.length);
  return path;
}
// Numbers of a decay in a row of updates.
inline int64_t decay_width(const Problem& p) {
  return p.gate == Gate::none ? 0 : p.gate == Gate::head ? 1 : p.K;
}
// One layer of a call as a call of its own.
inline Problem layer_of(const Problem& p, int64_t layer) {
  Problem x = p;
  const auto shift = [&](void*& data, int64_t stride, DType type) {
    data = static_cast<std::byte*>(data) + layer * stride * size_of(type);
  };
  if (p.state_in) shift(x.state_in.data, p.state_in.s_layer, p.state_in.dtype);
  if (p.state_out) shift(x.state_out.data, p.state_out.s_layer, p.state_out.dtype);
  if (p.updates) shift(x.updates.data, p.update_layer, p.updates.dtype);
  x.layers = 1;
  return x;
}

// Tokens of the packed T dimension that belong to no sequence.
inline int64_t padding_begin(const Problem& p) {
  return p.packed ? (p.N > 0 ? p.cu(p.N) : 0) : p.T;
}

}  // namespace deltic
