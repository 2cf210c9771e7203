// Instances: which tensors a case has, and what is in them.
#include <algorithm>
#include <cmath>

#include "cases/draw.h"
#include "cases/elements.h"
#include "cases/instance.h"

namespace deltic::cases {
namespace {

std::function<double(int64_t)> from(const std::vector<double>& values) {
  return [&values](int64_t i) { return values[static_cast<size_t>(i)]; };
}

// Which token of its sequence row t of the T dimension is; of padding: any.
int64_t token_in_sequence(const Case& c, int64_t t) {
  if (!c.packed) return t;
  for (int64_t n : c.seqs) {
    if (t < n) return t;
    t -= n;
  }
  return 0;
}

}  // namespace

// Lists are drawn wherever they have memory.
void Instance::draw(Tensor& t, const std::function<double(int64_t)>& f) const {
  if (draws() || t.view.rank == 1) fill(t, f);
}

void Instance::add_lengths() {
  if (!spec_.packed) return;
  std::vector<int64_t> cu = {0};
  for (int64_t n : spec_.seqs) cu.push_back(cu.back() + n);
  const auto size = static_cast<int64_t>(cu.size());
  const auto value = [&](int64_t i) { return static_cast<double>(cu[static_cast<size_t>(i)]); };
  draw(add("cu_seqlens", Role::input, spec_.cu, {size}, false), value);
  if (spec_.cuhost) draw(add("cu_seqlens_host", Role::input, spec_.cu, {size}, false), value);
}

void Instance::add_gate_parameters() {
  if (spec_.gate == Gate::none || spec_.form == GateForm::log_decay) return;
  const bool is_wide = spec_.strided == Layout::wide;
  if (spec_.form == GateForm::softplus || spec_.alog) {
    const Random random(spec_.seed, "A");
    const bool softplus_form = spec_.form == GateForm::softplus;
    const std::vector<int64_t> shape =
        is_wide ? std::vector<int64_t>{1, 1, spec_.HV, 1} : std::vector<int64_t>{spec_.HV};
    draw(add("A_log", Role::input, spec_.pdtype, shape, false), [&](int64_t h) {
      return std::log(softplus_form ? 1.0 + 15.0 * random.uniform(h) : random.uniform(h, 0.5, 2.0));
    });
  }
  if (spec_.dtbias) {
    const Random random(spec_.seed, "dt_bias");
    const int64_t per_head = spec_.gate == Gate::channel ? spec_.K : 1;
    const std::vector<int64_t> shape = is_wide ? std::vector<int64_t>{spec_.HV, per_head}
                                               : std::vector<int64_t>{spec_.HV * per_head};
    draw(add("dt_bias", Role::input, spec_.pdtype, shape, false),
         [&](int64_t i) { return 0.5 * random.normal(i); });
  }
}

std::vector<int64_t> Instance::gate_shape() const {
  std::vector<int64_t> shape = {spec_.num_batches(), spec_.num_tokens(), spec_.HV};
  if (spec_.gate == Gate::channel) shape.push_back(spec_.K);
  return shape;
}

// g with A_log and dt_bias as its form needs them.
void Instance::add_raw_gate() {
  add_gate_parameters();
  const std::vector<double> none;
  const GateSource source(spec_, draws() && has("A_log") ? values("A_log") : none,
                          draws() && has("dt_bias") ? values("dt_bias") : none);
  draw(add("g", Role::input, spec_.gdtype, gate_shape(), true),
       [&](int64_t i) { return source.raw(i); });
}

// Reads and writes of every sequence; returns the number of slots.
int64_t Instance::assign_pool_slots(int64_t index_columns) {
  const Case& c = spec_;
  const int64_t N = c.num_sequences();
  // Slots: sequence n may read slot 1 + 2m and write 2 + 2m, m counted from the end; slot 0 and the
  // last one belong to nobody (fork: all read slot 0). identity: slot n, one to spare. tokens:
  // after the N read slots one for every token. drafts of decode and forward: a row of the table
  // each after slot 0. All of them after those that null_slot takes.
  int64_t slots = 2 * N + 3;
  read_slots_.assign(static_cast<size_t>(N), -1);
  write_slots_.assign(static_cast<size_t>(N), -1);
  if (c.pool == Pool::identity) slots = N + 1;
  if (c.pool == Pool::tokens) {
    slots = N + c.num_real_tokens() + 1;
    token_slots_.assign(static_cast<size_t>(N * index_columns), -1);
  }
  if (c.pool == Pool::drafts && c.op != Op::conv) slots = N * index_columns + 2;
  if (c.pool == Pool::drafts) assign_drafts(index_columns);
  int64_t token = 0;
  for (int64_t n = 0; n < N; ++n) {
    const auto i = static_cast<size_t>(n);
    const int64_t odd = 1 + 2 * (N - 1 - n), even = odd + 1;
    switch (c.pool) {
      case Pool::identity:
        read_slots_[i] = write_slots_[i] = n;
        break;
      case Pool::inplace:
      case Pool::writelist:
        read_slots_[i] = write_slots_[i] = odd;
        break;
      case Pool::move:
        read_slots_[i] = odd, write_slots_[i] = even;
        break;
      case Pool::start:
        write_slots_[i] = even;
        break;
      case Pool::peek:
        read_slots_[i] = odd;
        break;
      case Pool::fork:
        read_slots_[i] = 0, write_slots_[i] = even;
        break;
      case Pool::mixed:
        if (n % 5 == 0) read_slots_[i] = write_slots_[i] = odd;
        if (n % 5 == 1) read_slots_[i] = odd, write_slots_[i] = even;
        if (n % 5 == 2) write_slots_[i] = even;
        if (n % 5 == 3) read_slots_[i] = odd;
        break;
      case Pool::drafts:
        break;
      default:
        read_slots_[i] = n % 3 == 2 ? -1 : n;
        for (int64_t t = 0; t < c.sequence_length(n); ++t, ++token) {
          if (t % 3 != 1) {
            token_slots_[static_cast<size_t>(n * index_columns + t)] = N + token;
          }
        }
        break;
    }
  }
  if (c.record) write_slots_.assign(write_slots_.size(), -1);
  token_columns_ = token_slots_.empty() ? 0 : index_columns;
  const int64_t first = c.null_slot + 1;
  for (auto* list : {&read_slots_, &write_slots_, &token_slots_}) {
    for (int64_t& slot : *list) slot += slot >= 0 ? first : 0;
  }
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t t = 0; t < c.sequence_length(n) && token_columns_ > 0; ++t) {
      pool_written_.push_back(token_slots_[static_cast<size_t>(n * token_columns_ + t)]);
    }
    if (token_columns_ == 0) pool_written_.push_back(write_slots_[static_cast<size_t>(n)]);
  }
  std::erase(pool_written_, -1);
  std::sort(pool_written_.begin(), pool_written_.end());
  return slots + first;
}

// Tables of slots and accepted counts; conv: one slot each, and counts that the window has room
// for.
void Instance::assign_drafts(int64_t index_columns) {
  const Case& c = spec_;
  const int64_t N = c.num_sequences(), most = c.op == Op::conv ? c.S - c.W + 2 : index_columns;
  const bool keeps_tokens = c.is_decode() && !c.record;
  if (keeps_tokens) token_slots_.assign(static_cast<size_t>(N * index_columns), -1);
  for (int64_t n = 0; n < N; ++n) {
    const auto i = static_cast<size_t>(n);
    const bool is_skipped = n % 4 == 3;
    // Branches of a tree start from a slot that no token writes: the last of the row.
    accepted_.push_back(is_skipped ? 1 : c.tree ? most : 1 + (3 * n + 1) % most);
    if (is_skipped) continue;
    if (c.op == Op::conv) {
      read_slots_[i] = 1 + 2 * (N - 1 - n);
      write_slots_[i] = read_slots_[i] + (c.write_pool ? 1 : 0);
      continue;
    }
    const int64_t row = 1 + (N - 1 - n) * index_columns;
    read_slots_[i] = row + accepted_[i] - 1;
    if (c.op == Op::forward) write_slots_[i] = row;
    for (int64_t t = 0; t < index_columns && keeps_tokens; ++t) {
      token_slots_[static_cast<size_t>(n * index_columns + t)] = row + t;
    }
  }
}

bool Instance::is_skipped(int64_t n) const {
  const auto i = static_cast<size_t>(n);
  if (read_slots_[i] >= 0 || write_slots_[i] >= 0) return false;
  for (int64_t t = 0; t < spec_.sequence_length(n) && token_columns_ > 0; ++t) {
    if (token_slots_[static_cast<size_t>(n * token_columns_ + t)] >= 0) return false;
  }
  return true;
}

int64_t Instance::window_of(int64_t n) const {
  if (spec_.pool != Pool::drafts || spec_.sequence_length(n) == 0) return spec_.S;
  return accepted_[static_cast<size_t>(n)] + spec_.W - 2;
}

// The shape of one sequence's state: [HV,K,V] in the case's layout, conv: [D,S].
std::vector<int64_t> Instance::state_shape() const {
  const Case& c = spec_;
  if (c.op == Op::conv) return {c.D, c.S};
  const bool v_first = c.state == StateLayout::vk;
  return {c.HV, v_first ? c.V : c.K, v_first ? c.K : c.V};
}
std::vector<int64_t> Instance::states_shape(int64_t count) const {
  std::vector<int64_t> shape = state_shape();
  shape.insert(shape.begin(), count);
  return shape;
}

// Every third sequence has none; what its slot or state holds must not be looked at: NaN.
void Instance::add_has_initial_state() {
  if (!spec_.has_init) return;
  draw(add("has_initial_state", Role::input, DType::u8, {spec_.num_sequences()}, false),
       [](int64_t n) { return n % 3 == 1 ? 0.0 : 1.0 + static_cast<double>(n % 5); });
  if (!has("initial_state") || !draws()) return;
  Tensor& state = find("initial_state");
  const int64_t N = spec_.num_sequences(), each = N > 0 ? state.view.numel() / N : 0;
  for (int64_t i = 0; i < N * each; ++i) {
    if (i / each % 3 != 1) continue;
    store(state.view.data, dtype_of(state.view), memory_offset(state.view, i), NAN);
  }
}

void Instance::add_states() {
  const Case& c = spec_;
  const Random random(c.seed, "state"), random_d(c.seed, "d_final_state");
  const std::vector<int64_t> shape = states_shape(c.num_sequences());
  if (c.init) {
    const Role role = c.final_state == Final::inplace ? Role::inout : Role::input;
    draw(add("initial_state", role, c.sdtype, shape, false),
         [&](int64_t i) { return 0.5 * random.normal(i); });
  }
  add_has_initial_state();
  if (c.is_gradient()) {
    if (!c.dfinal) return;
    draw(add("d_final_state", Role::input, c.gradient ? c.odtype : DType::f32, shape, false),
         [&](int64_t i) { return 0.5 * random_d.normal(i); });
    return;
  }
  if (c.final_state == Final::separate) add("final_state", Role::output, c.sdtype, shape, false);
  if (c.pool != Pool::none) add_pool();
  if (c.stochastic) {
    // Beyond 32 bits where there are more, and below 0.
    const bool is_long = c.idx == DType::i64;
    draw(add("positions", Role::input, c.idx, {c.num_sequences()}, false), [=](int64_t n) {
      return static_cast<double>(n % 4 == 3 ? -5 : n % 2 == 1 && is_long ? 6000000000 : 100 * n);
    });
  }
}

void Instance::add_pool() {
  const Case& c = spec_;
  const int64_t index_columns = c.longest() + 2;
  const int64_t slots = assign_pool_slots(index_columns);
  const Role role = c.write_pool || c.record ? Role::input : Role::inout;
  Tensor& pool = add("state_pool", role, c.sdtype, states_shape(slots), false);
  std::vector<int64_t> read;  // all other slots stay NaN
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    const bool starts = !c.has_init || n % 3 != 1;
    if (starts && read_slots_[static_cast<size_t>(n)] >= 0)
      read.push_back(read_slots_[static_cast<size_t>(n)]);
  }
  std::sort(read.begin(), read.end());
  read.erase(std::unique(read.begin(), read.end()), read.end());
  for (int64_t slot : read) {
    if (draws()) fill_slot(pool, slot);
  }
  if (c.op == Op::conv && c.pool == Pool::drafts && draws()) {
    // Of a window only the accepted tokens, and the W - 1 before the last of them, are looked at.
    for (int64_t n = 0; n < c.num_sequences(); ++n) {
      const int64_t slot = read_slots_[static_cast<size_t>(n)], end = window_of(n);
      for (int64_t i = 0; i < c.D * c.S && slot >= 0 && c.sequence_length(n) > 0; ++i) {
        if (i % c.S >= end - c.W + 1 && i % c.S < end) continue;
        store(pool.view.data, c.sdtype, memory_offset(pool.view, slot * c.D * c.S + i), NAN);
      }
    }
  }
  if (c.write_pool) add("write_pool", Role::output, c.sdtype, states_shape(slots), false);
  add_pool_lists(index_columns);
}

// A list of slots as the call gets it: for none all the numbers that mean it, by turns.
std::function<double(int64_t)> Instance::listed(const std::vector<int64_t>& slots) const {
  return [&slots, nones = spec_.null_slot + 2](int64_t i) {
    const int64_t slot = slots[static_cast<size_t>(i)];
    return static_cast<double>(slot >= 0 ? slot : i % nones - 1);
  };
}

void Instance::add_pool_lists(int64_t index_columns) {
  const Case& c = spec_;
  const int64_t N = c.num_sequences();
  const bool is_table = c.pool == Pool::drafts && c.op != Op::conv;
  if (is_table) {
    // A row of the table is that of the slot that is read and those after and before it.
    draw(add("read_index", Role::input, c.idx, {N, index_columns}, false), [&](int64_t i) {
      const auto n = static_cast<size_t>(i / index_columns);
      const int64_t column = i % index_columns, slot = read_slots_[n];
      return static_cast<double>(slot >= 0 ? slot + column - (accepted_[n] - 1)
                                           : i % (c.null_slot + 2) - 1);
    });
  } else if (c.pool != Pool::identity && c.pool != Pool::writelist) {
    draw(add("read_index", Role::input, c.idx, {N}, false), listed(read_slots_));
  }
  if (c.pool == Pool::tokens) {
    draw(add("write_index", Role::input, c.idx, {N, index_columns}, false), listed(token_slots_));
  } else if (c.pool == Pool::drafts ? c.write_pool || c.op == Op::forward
                                    : c.pool != Pool::identity && c.pool != Pool::inplace) {
    draw(add("write_index", Role::input, c.idx, {N}, false), listed(write_slots_));
  }
  if (c.tree) {
    // Branches of one and of two tokens, roots among them.
    draw(add("parents", Role::input, c.idx, {N, index_columns}, false), [&](int64_t i) {
      const int64_t t = i % index_columns, n = i / index_columns;
      return static_cast<double>(std::max<int64_t>(-1, t - 1 - t * (n + 1) % 3));
    });
  }
  if (c.pool == Pool::drafts) {
    draw(add("accepted", Role::input, c.idx, {N}, false),
         [&](int64_t n) { return static_cast<double>(accepted_[static_cast<size_t>(n)]); });
  }
}

void Instance::fill_slot(Tensor& pool, int64_t slot) const {
  const Random random(spec_.seed, "state");
  const TensorView& view = pool.view;
  const int64_t columns = row_width(view), per_slot = view.numel() / view.shape[0];
  const DType type = spec_.sdtype;
#pragma omp parallel for if (per_slot > kWorthThreads)
  for (int64_t r = 0; r < per_slot / columns; ++r) {
    const int64_t first = slot * per_slot + r * columns;
    const int64_t offset = memory_offset(view, first);
    for (int64_t d = 0; d < columns; ++d) {
      store(view.data, type, offset + d, 0.5 * random.normal(first + d));
    }
  }
}

void Instance::add_checkpoints() {
  const Case& c = spec_;
  if (c.ckpt.empty()) return;
  std::vector<int64_t> cu = {0}, tokens, slots;
  std::vector<bool> has_state;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    for (int64_t offset : c.ckpt) {
      if (offset > c.sequence_length(n)) continue;
      tokens.push_back(offset == kCkptEnd ? c.sequence_length(n) : offset);
      has_state.push_back(c.pool == Pool::none || !is_skipped(n));
    }
    cu.push_back(static_cast<int64_t>(tokens.size()));
  }
  const auto M = static_cast<int64_t>(tokens.size());
  for (int64_t m = 0; m < M; ++m) {  // from the end; slot 0 and the last belong to nobody
    slots.push_back(c.ckptskip && m % 2 == 1 ? c.null_slot : c.null_slot + 1 + M - m);
    if (slots.back() > c.null_slot && has_state[static_cast<size_t>(m)])
      ckpt_written_.push_back(slots.back());
  }
  std::sort(ckpt_written_.begin(), ckpt_written_.end());
  const auto add_list = [&](const char* name, const std::vector<int64_t>& list) {
    draw(add(name, Role::input, c.idx, {static_cast<int64_t>(list.size())}, false),
         [&](int64_t i) { return static_cast<double>(list[static_cast<size_t>(i)]); });
  };
  add_list("ckpt_cu", cu);
  add_list("ckpt_tokens", tokens);
  add_list("ckpt_slots", slots);
  add("ckpt_states", Role::output, c.cdtype, states_shape(M + 2 + c.null_slot + 1), false);
}

// Beta and the gates.
void Instance::add_rule_inputs() {
  const Case& c = spec_;
  const int64_t B = c.num_batches(), T = c.num_tokens();
  const Random random_beta(c.seed, "beta");
  if (c.beta != Beta::none) {
    std::vector<int64_t> shape = {B, T, c.HV};
    if (c.betavec) shape.push_back(c.V);
    draw(add("beta", Role::input, c.betadtype, shape, true),
         [&](int64_t i) { return draw_beta(c, random_beta, i); });
  }
  if (c.gate != Gate::none) add_raw_gate();
  if (c.gv) {
    const Random random(c.seed, "gv"), pick(c.seed, "gv.pick");
    draw(add("gv", Role::input, c.gdtype, {B, T, c.HV, c.V}, true),
         [&](int64_t i) { return draw_value_gate(c, random, pick, i); });
  }
}

void Instance::add_record() {
  const Case& c = spec_;
  if (!c.record) return;
  add("record", Role::output, DType::f32,
      {c.num_sequences(), c.record_tokens(), c.HV, c.record_width()}, true);
}

void Instance::generate_sequence_op() {
  const Case& c = spec_;
  const std::vector<double> none;
  const int64_t B = c.num_batches(), T = c.num_tokens();
  draw(add("q", Role::input, c.dtype, {B, T, c.H, c.K}, true),
       from(draws() ? draw_queries(c) : none));
  draw(add("k", Role::input, c.dtype, {B, T, c.H, c.K}, true),
       from(draws() ? draw_keys(c, !c.l2norm) : none));
  const Random random_v(c.seed, "v");
  draw(add("v", Role::input, c.dtype, {B, T, c.HV, c.V}, true),
       [&](int64_t i) { return random_v.normal(i); });
  add_rule_inputs();
  if (c.op != Op::backward) add("o", Role::output, c.dtype, {B, T, c.HV, c.V}, true);
  add_record();
  add_lengths();
  add_states();
  add_checkpoints();
  if (!c.from.empty()) {
    draw(add("recurrent_from", Role::input, c.idx, {c.num_sequences()}, false),
         [&](int64_t n) { return static_cast<double>(c.recurrent_from(n)); });
  }
  if (c.op == Op::backward) add_backward();
}

// d_o, and a gradient for every input that has one.
void Instance::add_backward() {
  const Case& c = spec_;
  if (c.d_o) {
    const Random random(c.seed, "d_o");
    draw(add("d_o", Role::input, c.dtype, {c.num_batches(), c.num_tokens(), c.HV, c.V}, true),
         [&](int64_t i) { return random.normal(i); });
  }
  add_gradients_of({"q", "k", "v", "beta", "g", "gv", "A_log", "dt_bias", "initial_state"});
}

// Outputs of the inputs' shapes. backward: of their dtypes, but fp32 of the initial state.
void Instance::add_gradients_of(std::initializer_list<const char*> inputs) {
  for (const std::string_view name : inputs) {
    if (!has(name)) continue;
    const TensorView x = tensor(name).view;
    const bool is_state = name == "initial_state", is_row = x.rank >= 3 && !is_state;
    const DType type = name == "x" && spec_.op == Op::conv ? spec_.dtype
                       : spec_.gradient                    ? spec_.odtype
                       : is_state                          ? DType::f32
                                                           : dtype_of(x);
    const bool is_parameter = name == "A_log" || name == "dt_bias";
    add((is_state ? "d_" : "d") + std::string(name), Role::output, type,
        std::vector<int64_t>(x.shape, x.shape + x.rank), is_row && !is_parameter);
  }
}

void Instance::generate_block() {
  add_lengths();
  add_block_inputs();
  if (spec_.gradient) {
    add_block_gradients();
  } else {
    add_block_outputs();
  }
}

void Instance::add_block_inputs() {
  const Case& c = spec_;
  const std::vector<double> none;
  const int64_t B = c.num_batches(), T = c.num_tokens(), W = c.chunk;
  if (c.op == Op::l2norm) {
    const std::vector<double> x = draws() ? draw_keys(c, false) : none;
    draw(add("x", Role::input, c.dtype, {B, T, c.H, c.K}, true), from(x));
    return;
  }
  if (c.op == Op::rmsnorm) return add_norm_inputs();
  if (c.op == Op::cumsum || c.op == Op::gate) return add_raw_gate();
  const BlockInputs x = draws() ? draw_block_inputs(c) : BlockInputs{};
  if (c.op == Op::inverse) {
    draw(add(c.from_result ? "out" : "a", Role::input, c.dtype, {B, T, c.HV, W}, true), from(x.a));
    return;
  }
  draw(add("k", Role::input, c.dtype, {B, T, c.H, c.K}, true), from(x.k));
  const bool has_scores = c.op == Op::scores || c.op == Op::scores_inverse;
  if (has_scores || (c.op == Op::wy && c.qg)) {
    draw(add("q", Role::input, c.dtype, {B, T, c.H, c.K}, true),
         from(draws() ? draw_queries(c) : none));
  }
  if (c.gate != Gate::none) draw(add("g", Role::input, c.gdtype, gate_shape(), true), from(x.G));
  if (c.op != Op::scores && c.beta != Beta::none) {
    const Random random_beta(c.seed, "beta");
    draw(add("beta", Role::input, c.betadtype, {B, T, c.HV}, true),
         [&](int64_t i) { return draw_beta(c, random_beta, i); });
  }
  if (c.op != Op::wy) return;
  draw(add("a", Role::input, c.dtype, {B, T, c.HV, W}, true), from(x.a));
  if (!c.u) return;
  const Random random_v(c.seed, "v");
  draw(add("v", Role::input, c.dtype, {B, T, c.HV, c.V}, true),
       [&](int64_t i) { return random_v.normal(i); });
}

void Instance::add_norm_inputs() {
  const Case& c = spec_;
  const std::vector<int64_t> shape = {c.num_batches(), c.num_tokens(), c.H, c.K};
  const Random random_x(c.seed, "x"), random_z(c.seed, "z"), random_w(c.seed, "weight");
  // Rows of every size, zeros among them where they have a norm.
  const bool has_zeros = !c.eps || *c.eps > 0;
  draw(add("x", Role::input, c.dtype, shape, true), [&](int64_t i) {
    const int64_t row = i / c.K;
    return has_zeros && row % 7 == 3 ? 0.0 : random_x.normal(i) * (row % 5 == 1 ? 20.0 : 1.0);
  });
  if (c.z) {
    draw(add("z", Role::input, c.dtype, shape, true),
         [&](int64_t i) { return 2 * random_z.normal(i); });
  }
  if (!c.weight) return;
  draw(add("weight", Role::input, c.wdtype, {c.K}, false),
       [&](int64_t i) { return 1 + 0.5 * random_w.normal(i); });
}

void Instance::add_block_outputs() {
  const Case& c = spec_;
  const int64_t B = c.num_batches(), T = c.num_tokens(), W = c.chunk;
  if (c.op == Op::l2norm || c.op == Op::rmsnorm) {
    add("out", Role::output, c.odtype, {B, T, c.H, c.K}, true);
    if (c.rstd) add("rstd", Role::output, DType::f32, {B, T, c.H}, true);
  } else if (c.op == Op::cumsum || c.op == Op::gate) {
    add("out", Role::output, c.odtype, gate_shape(), true);
  } else if (c.op != Op::wy) {
    add("out", Role::output, c.odtype, {B, T, c.HV, W}, true);
    if (c.op == Op::scores_inverse) add("a", Role::output, c.odtype, {B, T, c.HV, W}, true);
  } else {
    add("w", Role::output, c.odtype, {B, T, c.HV, c.K}, true);
    if (c.u) add("u", Role::output, c.odtype, {B, T, c.HV, c.V}, true);
    if (c.kg) add("kg", Role::output, c.odtype, {B, T, c.HV, c.K}, true);
    if (c.qg) add("qg", Role::output, c.odtype, {B, T, c.HV, c.K}, true);
  }
}

// What came back for the outputs, in the dtype of the rows, and a gradient for every input.
void Instance::add_block_gradients() {
  const Case& c = spec_;
  const int64_t B = c.num_batches(), T = c.num_tokens();
  const bool is_gate = c.op == Op::cumsum || c.op == Op::gate;
  const auto incoming = [&](const char* name, const std::vector<int64_t>& shape) {
    const Random random(c.seed, name);
    draw(add(name, Role::input, is_gate ? c.gdtype : c.dtype, shape, true),
         [&](int64_t i) { return random.normal(i); });
  };
  if (c.op == Op::l2norm || c.op == Op::rmsnorm) {
    incoming("d_out", {B, T, c.H, c.K});
  } else if (is_gate) {
    incoming("d_out", gate_shape());
  } else if (c.op == Op::wy) {
    if (c.d_o) incoming("d_w", {B, T, c.HV, c.K});
    if (c.u) incoming("d_u", {B, T, c.HV, c.V});
    if (c.kg) incoming("d_kg", {B, T, c.HV, c.K});
    if (c.qg) incoming("d_qg", {B, T, c.HV, c.K});
  } else {
    add_square_gradient();
  }
  add_gradients_of({"q", "k", "v", "x", "z", "weight", "g", "beta", "a", "A_log", "dt_bias"});
  if (c.from_result) add("da", Role::output, c.odtype, {B, T, c.HV, c.chunk}, true);
}

// d_out of kkt, inverse (below the diagonal) and scores (up to it): what is not read is NaN.
void Instance::add_square_gradient() {
  const Case& c = spec_;
  const int64_t W = c.chunk, end = c.op == Op::scores ? 1 : 0;
  const Random random(c.seed, "d_out");
  draw(add("d_out", Role::input, c.dtype, {c.num_batches(), c.num_tokens(), c.HV, W}, true),
       [&](int64_t i) {
         const int64_t row = i / W / c.HV % c.num_tokens();  // padding is spoilt later
         return i % W < token_in_sequence(c, row) % W + end ? random.normal(i) : NAN;
       });
}

// The weights of conv; of a step those of keys so small that the state does not grow.
void Instance::add_taps(const std::string& prefix) {
  const Case& c = spec_;
  const bool is_small = c.op == Op::step && !c.l2norm;
  const double shrunk = 0.7 / std::sqrt(static_cast<double>(c.K * (c.W + 1)));
  const auto factor = [=](int64_t channel) {
    return is_small && channel < 2 * c.H * c.K ? shrunk : 1.0;
  };
  const Random weight(c.seed, "weight"), bias(c.seed, "bias");
  draw(add(prefix + "weight", Role::input, c.wdtype, {c.channels(), c.W}, false),
       [&](int64_t i) { return weight.normal(i) * factor(i / c.W); });
  if (!c.bias) return;
  // A first token's o is q k^T v: of a product near 0 the norm would make whatever rounding left.
  const double mean = c.op == Op::step ? 1.0 : 0.0;
  draw(add(prefix + "bias", Role::input, c.wdtype, {c.channels()}, false),
       [&](int64_t i) { return (bias.normal(i) + mean) * factor(i); });
}

// The states of a step's conv, beside those of its decode: in the same slots where both have one
// for a sequence, else (a table of slots) in slots of their own.
void Instance::add_windows() {
  const Case& c = spec_;
  const int64_t N = c.num_sequences(), D = c.channels();
  const Random random(c.seed, "windows");
  const auto shape = [&](int64_t count) { return std::vector<int64_t>{count, D, c.S}; };
  const auto starts = [&](int64_t n) { return !c.has_init || n % 3 != 1; };
  if (c.init) {
    const Role role = c.final_state == Final::inplace ? Role::inout : Role::input;
    draw(add("conv.initial_state", role, c.windows, shape(N), false),
         [&](int64_t i) { return starts(i / (D * c.S)) ? random.normal(i) : NAN; });
  }
  if (c.has_init) {
    draw(add("conv.has_initial_state", Role::input, DType::u8, {N}, false),
         [&](int64_t n) { return starts(n) ? 1.0 : 0.0; });
  }
  if (c.final_state == Final::separate) {
    add("conv.final_state", Role::output, c.windows, shape(N), false);
  }
  if (c.pool == Pool::none) return;
  const bool has_table = c.pool == Pool::drafts || c.pool == Pool::tokens;
  const int64_t first = c.null_slot + 1, slots = first + 2 * N + 3;
  window_read_ = read_slots_, window_write_ = c.record ? read_slots_ : write_slots_;
  for (int64_t n = 0; n < N && has_table; ++n) {
    const auto i = static_cast<size_t>(n);
    const bool is_none = is_skipped(n) || read_slots_[i] < 0;
    window_read_[i] = is_none ? -1 : first + 1 + 2 * n;
    window_write_[i] = is_skipped(n) ? -1 : first + 1 + 2 * n + (c.write_pool ? 1 : 0);
  }
  windows_written_ = window_write_;
  std::erase(windows_written_, -1);
  std::sort(windows_written_.begin(), windows_written_.end());
  const Role role = c.write_pool ? Role::input : Role::inout;
  Tensor& pool = add("conv.state_pool", role, c.windows, shape(slots), false);
  std::vector<int64_t> reader(static_cast<size_t>(slots), -1);
  for (int64_t n = 0; n < N; ++n) {
    const int64_t slot = window_read_[static_cast<size_t>(n)];
    if (slot >= 0 && starts(n)) reader[static_cast<size_t>(slot)] = n;
  }
  draw(pool, [&](int64_t i) {
    // Of a window only the accepted tokens, and the W - 1 before the last of them, are looked at.
    const int64_t n = reader[static_cast<size_t>(i / (D * c.S))], place = i % c.S;
    const int64_t end = n < 0 ? 0 : window_of(n);
    const bool is_read = end == c.S || (place > end - c.W && place < end);
    return n >= 0 && is_read ? random.normal(i) : NAN;
  });
  if (c.write_pool) add("conv.write_pool", Role::output, c.windows, shape(slots), false);
  if (c.pool == Pool::identity) return;
  const bool has_read = c.pool != Pool::writelist;
  const bool has_write = has_table || (c.pool != Pool::inplace && !c.record);
  if (has_read) {
    draw(add("conv.read_index", Role::input, c.idx, {N}, false), listed(window_read_));
  }
  if (has_write) {
    draw(add("conv.write_index", Role::input, c.idx, {N}, false), listed(window_write_));
  }
  if (c.pool == Pool::drafts) {
    draw(add("conv.accepted", Role::input, c.idx, {N}, false),
         [&](int64_t n) { return static_cast<double>(accepted_[static_cast<size_t>(n)]); });
  }
}

void Instance::generate_step() {
  const Case& c = spec_;
  const int64_t B = c.num_batches(), T = c.num_tokens();
  const Random random_x(c.seed, "x"), random_z(c.seed, "z"), random_w(c.seed, "norm.weight");
  draw(add("conv.x", Role::input, c.dtype, {B, T, c.channels()}, true),
       [&](int64_t i) { return random_x.normal(i); });
  add_taps("conv.");
  add_lengths();
  add_rule_inputs();
  if (!c.has_norm()) add("o", Role::output, c.dtype, {B, T, c.HV, c.V}, true);
  add_record();
  add_states();
  add_windows();
  add_checkpoints();
  if (!c.has_norm()) return;
  if (c.z) {
    draw(add("norm.z", Role::input, c.dtype, {B, T, c.HV, c.V}, true),
         [&](int64_t i) { return 2 * random_z.normal(i); });
  }
  if (c.weight) {
    draw(add("norm.weight", Role::input, c.wdtype, {c.V}, false),
         [&](int64_t i) { return 1 + 0.5 * random_w.normal(i); });
  }
  add("norm.out", Role::output, c.odtype, {B, T, c.HV, c.V}, true);
}

void Instance::generate_conv() {
  const Case& c = spec_;
  const int64_t B = c.num_batches(), T = c.num_tokens();
  const auto normal = [&](const char* name, Role role, DType type, std::vector<int64_t> shape,
                          bool is_row) {
    const Random random(c.seed, name);
    draw(add(name, role, type, std::move(shape), is_row),
         [&](int64_t i) { return random.normal(i); });
  };
  normal("x", Role::input, c.dtype, {B, T, c.D}, true);
  add_taps("");
  add_lengths();
  add_states();
  add_checkpoints();
  if (!c.gradient) {
    add("out", Role::output, c.dtype, {B, T, c.D}, true);
    return;
  }
  if (c.d_o) normal("d_out", Role::input, c.dtype, {B, T, c.D}, true);
  add_gradients_of({"x", "weight", "bias", "initial_state"});
}

// Heads of a pool of move: those before the first one that counts, HV, and then one more.
int64_t Instance::pool_heads(int64_t first) const { return first + spec_.HV + (first > 0 ? 1 : 0); }

// Numbers in the slots that are read; what nobody reads stays NaN.
void Instance::draw_pool(Tensor& pool, int64_t heads, int64_t first_head) const {
  const Case& c = spec_;
  const Random random(c.seed, "state");
  const int64_t slots = pool.view.shape[pool.view.rank - 4], state = c.K * c.V;
  std::vector<char> is_read(static_cast<size_t>(slots), 0);
  for (size_t n = 0; n < read_slots_.size(); ++n) {
    const bool starts = !c.has_init || n % 3 != 1;
    if (starts && read_slots_[n] >= 0) is_read[static_cast<size_t>(read_slots_[n])] = 1;
  }
  draw(pool, [&](int64_t i) {
    const int64_t slot = i / (heads * state) % slots, head = i / state % heads;
    const bool counts =
        is_read[static_cast<size_t>(slot)] != 0 && head >= first_head && head < first_head + c.HV;
    return counts ? 0.5 * random.normal(i) : NAN;
  });
}

void Instance::generate_commit() {
  const Case& c = spec_;
  const int64_t N = c.num_sequences(), T = c.record_tokens(), W = c.record_width();
  std::vector<int64_t> pool = states_shape(assign_pool_slots(T)), rows = {N, T, c.HV, W};
  if (c.layers > 0) {
    pool.insert(pool.begin(), c.layers);
    rows.insert(rows.begin(), c.layers);
  }
  draw_pool(add("state_pool", Role::inout, c.sdtype, pool, false), c.HV, 0);
  const Random random(c.seed, "record");
  draw(add("record", Role::input, DType::f32, rows, false), [&](int64_t i) {
    const int64_t at = i % W;
    if (at >= c.K + c.V) return random.uniform(i, 0.3, 1.0);
    return random.normal(i) / (at < c.K ? std::sqrt(static_cast<double>(c.K)) : 1.0);
  });
  add_pool_lists(T);
  add_has_initial_state();
  // From none to all of them; of a skipped sequence it may be anything.
  draw(add("accepted", Role::input, c.idx, {N}, false),
       [&](int64_t n) { return static_cast<double>(is_skipped(n) ? 99 : (5 * n + T) % (T + 1)); });
}

void Instance::generate_move() {
  const Case& c = spec_;
  const int64_t slots = assign_pool_slots(0);
  const auto shape = [&](int64_t heads, bool v_first) {
    std::vector<int64_t> sizes = {slots, heads, v_first ? c.V : c.K, v_first ? c.K : c.V};
    if (c.layers > 0) sizes.insert(sizes.begin(), c.layers);
    return sizes;
  };
  const bool v_first = c.state == StateLayout::vk;
  // Within one pool it has the heads of both.
  const int64_t from = pool_heads(c.write_pool ? c.read_head : std::max(c.read_head, c.write_head));
  const Role role = c.write_pool ? Role::input : Role::inout;
  draw_pool(add("state_pool", role, c.sdtype, shape(from, v_first), false), from, c.read_head);
  if (c.write_pool) {
    add("write_pool", Role::output, c.odtype,
        shape(pool_heads(c.write_head), v_first != c.transpose), false);
  }
  const int64_t N = c.num_sequences();
  draw(add("read_index", Role::input, c.idx, {N}, false), listed(read_slots_));
  draw(add("write_index", Role::input, c.idx, {N}, false), listed(write_slots_));
}

// Whether an element of a pool or of checkpoints (row-major index) is one that the call writes.
bool Instance::is_written(const Tensor& t, int64_t index) const {
  const bool has_layers = t.view.rank == 5;
  const int64_t slots = t.view.shape[has_layers ? 1 : 0];
  const int64_t per_slot = t.view.numel() / slots / (has_layers ? t.view.shape[0] : 1);
  const std::vector<int64_t>& written = written_slots(t.name);
  if (!std::binary_search(written.begin(), written.end(), index / per_slot % slots)) return false;
  if (spec_.op != Op::move) return true;
  const int64_t head = index % per_slot / (spec_.K * spec_.V);
  return head >= spec_.write_head && head < spec_.write_head + spec_.HV;
}

// Input rows of padding and of skipped sequences must never be looked at: they hold NaN.
void Instance::spoil_unread_rows() {
  for (const std::string_view name : {"q", "k", "v", "g", "gv", "beta", "x", "z", "a", "out", "d_o",
                                      "d_out", "d_w", "d_u", "d_kg", "d_qg", "conv.x", "norm.z"}) {
    if (!has(name)) continue;
    Tensor& t = find(name);
    if (t.role == Role::output) continue;
    const int64_t tokens = spec_.num_batches() * spec_.num_tokens();
    for (const auto& [first, last] : unread_tokens()) {
      // A norm knows of no slots: the rows of a skipped sequence are 0 times its gate.
      if (name == "norm.z" && (!spec_.packed || first < tokens - spec_.pad)) continue;
      const int64_t per_token = t.view.numel() / tokens;
      for (int64_t i = first * per_token; i < last * per_token; ++i) {
        store(t.view.data, dtype_of(t.view), memory_offset(t.view, i), NAN);
      }
    }
  }
}

// Token ranges [first, last), counted over the batch rows, that belong to no sequence that runs.
std::vector<std::pair<int64_t, int64_t>> Instance::unread_tokens() const {
  const Case& c = spec_;
  std::vector<std::pair<int64_t, int64_t>> ranges;
  const int64_t tokens = c.num_batches() * c.num_tokens();
  if (c.packed && c.pad > 0) ranges.emplace_back(tokens - c.pad, tokens);
  if (c.pool == Pool::none || c.op == Op::move || c.op == Op::commit) return ranges;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    if (!is_skipped(n)) continue;
    const int64_t first = c.packed ? c.sequence_begin(n) : n * c.length;
    ranges.emplace_back(first, first + c.sequence_length(n));
  }
  return ranges;
}

void Instance::generate() {
  if (spec_.op == Op::move) {
    generate_move();
  } else if (spec_.op == Op::commit) {
    generate_commit();
  } else if (spec_.op == Op::conv) {
    generate_conv();
  } else if (spec_.op == Op::step) {
    generate_step();
  } else if (spec_.is_block()) {
    generate_block();
  } else {
    generate_sequence_op();
  }
  if (draws()) spoil_unread_rows();
  bind();
}

}  // namespace deltic::cases
