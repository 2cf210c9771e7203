// Instances: allocation between guards, layouts, input generation, and the search for damage.
#include "instance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>

#include "scalar.h"

namespace deltic::cases {
namespace {

struct SequenceField {
  const char* name;
  TensorView Tensors::*field;
};
constexpr std::array kSequenceFields = {SequenceField{"q", &Tensors::q},
                                        SequenceField{"k", &Tensors::k},
                                        SequenceField{"v", &Tensors::v},
                                        SequenceField{"o", &Tensors::o},
                                        SequenceField{"beta", &Tensors::beta},
                                        SequenceField{"g", &Tensors::g},
                                        SequenceField{"gv", &Tensors::gv},
                                        SequenceField{"A_log", &Tensors::A_log},
                                        SequenceField{"dt_bias", &Tensors::dt_bias},
                                        SequenceField{"cu_seqlens", &Tensors::cu_seqlens},
                                        SequenceField{"cu_seqlens_host", &Tensors::cu_seqlens_host},
                                        SequenceField{"initial_state", &Tensors::initial_state},
                                        SequenceField{"final_state", &Tensors::final_state},
                                        SequenceField{"state_pool", &Tensors::state_pool},
                                        SequenceField{"read_index", &Tensors::read_index},
                                        SequenceField{"write_index", &Tensors::write_index},
                                        SequenceField{"ckpt_cu", &Tensors::ckpt_cu},
                                        SequenceField{"ckpt_tokens", &Tensors::ckpt_tokens},
                                        SequenceField{"ckpt_slots", &Tensors::ckpt_slots},
                                        SequenceField{"ckpt_states", &Tensors::ckpt_states}};

struct BlockField {
  const char* name;
  TensorView BlockTensors::*field;
};
constexpr std::array kBlockFields = {BlockField{"q", &BlockTensors::q},
                                     BlockField{"k", &BlockTensors::k},
                                     BlockField{"v", &BlockTensors::v},
                                     BlockField{"x", &BlockTensors::x},
                                     BlockField{"g", &BlockTensors::g},
                                     BlockField{"beta", &BlockTensors::beta},
                                     BlockField{"A_log", &BlockTensors::A_log},
                                     BlockField{"dt_bias", &BlockTensors::dt_bias},
                                     BlockField{"a", &BlockTensors::a},
                                     BlockField{"cu_seqlens", &BlockTensors::cu_seqlens},
                                     BlockField{"cu_seqlens_host", &BlockTensors::cu_seqlens_host},
                                     BlockField{"out", &BlockTensors::out},
                                     BlockField{"w", &BlockTensors::w},
                                     BlockField{"u", &BlockTensors::u},
                                     BlockField{"kg", &BlockTensors::kg},
                                     BlockField{"qg", &BlockTensors::qg},
                                     BlockField{"rstd", &BlockTensors::rstd}};

struct MemoryLayout {
  std::vector<int64_t> strides;
  int64_t offset = 0;    // elements before the first one
  int64_t elements = 0;  // to allocate
};

MemoryLayout make_layout(const std::vector<int64_t>& shape, Layout kind, bool is_input) {
  MemoryLayout m;
  const size_t rank = shape.size();
  m.strides.assign(rank, 1);
  if (kind == Layout::wide && rank >= 2) {
    // Odd gaps: nothing beyond the element is aligned.
    int64_t stride = shape[rank - 1] + 3;
    for (size_t i = rank - 1; i-- > 0;) {
      m.strides[i] = stride;
      stride = stride * std::max<int64_t>(shape[i], 1) + 5;
    }
    m.offset = 1;
    m.elements = m.offset + stride + 2;
    return m;
  }
  if (kind == Layout::head_major && rank == 4) {
    m.strides = {shape[1] * shape[2] * shape[3], shape[3], shape[1] * shape[3], 1};
    m.elements = shape[0] * m.strides[0];
    return m;
  }
  int64_t stride = 1;
  for (size_t i = rank; i-- > 0;) {
    m.strides[i] = stride;
    if (!(kind == Layout::expand && is_input && rank == 4 && i == 2)) stride *= shape[i];
  }
  if (kind == Layout::expand && is_input && rank == 4) m.strides[2] = 0;
  m.elements = stride;
  return m;
}

// Calls f(row-major index of a row's first element, its offset in memory) for every row.
template <class F>
void for_each_row(const TensorView& t, const F& f) {
  const int64_t width = t.shape[t.rank - 1];
  int64_t rows = 1;
  for (int32_t i = 0; i + 1 < t.rank; ++i) rows *= t.shape[i];
  if (width == 0) return;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t rest = r, offset = 0;
    for (int32_t i = t.rank - 2; i >= 0; --i) {
      offset += (rest % t.shape[i]) * t.strides[i];
      rest /= t.shape[i];
    }
    f(r * width, offset);
  }
}

constexpr int64_t kWorthThreads = 1 << 16;  // elements: about a millisecond of drawing numbers

DType dtype_of(const TensorView& t) { return static_cast<DType>(t.dtype); }

int64_t memory_offset(const TensorView& t, int64_t index) {
  int64_t offset = 0;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    offset += (index % t.shape[i]) * t.strides[i];
    index /= t.shape[i];
  }
  return offset;
}

// Fills a tensor from a function of the row-major index; threads share the rows.
void fill(Tensor& t, const std::function<double(int64_t)>& f) {
  if (t.view.data == nullptr) return;
  const int64_t width = t.view.rank > 0 ? t.view.shape[t.view.rank - 1] : 0;
  const int64_t rows = width > 0 ? t.view.numel() / width : 0;
  const DType type = dtype_of(t.view);
  bool expanded = false;  // several indices share an element: the last one wins
  for (int32_t i = 0; i < t.view.rank; ++i)
    expanded |= t.view.strides[i] == 0 && t.view.shape[i] > 1;
#pragma omp parallel for if (rows * width > kWorthThreads && !expanded)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t offset = memory_offset(t.view, r * width);
    for (int64_t c = 0; c < width; ++c) store(t.view.data, type, offset + c, f(r * width + c));
  }
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }
double inverse_softplus(double y) {  // y > 0
  return y > 30.0 ? y : std::log(std::expm1(y));
}

// A log decay as the case asks for; `i` is the element, `h` its value head, `d` its channel or -1.
double draw_log_decay(const Case& c, const Random& random, const Random& pick, int64_t i, int64_t h,
                      int64_t d) {
  switch (c.gates) {
    case Gates::slow:
      if (h % 4 == 0 || (d >= 0 && d % 4 == 0)) return -1e-4 * pick.uniform(i, 0.5, 1.5);
      return -5.0 * sigmoid(random.normal(i));
    case Gates::softplus:
      return -(1.0 + 15.0 * Random(c.seed, "A").uniform(h)) * softplus(random.normal(i));
    case Gates::mixed: {
      constexpr double kLevels[] = {0.0, -5.0, -20.0, -1000.0};
      return kLevels[pick.bits(i) >> 62] * random.uniform(i, 0.9, 1.1);
    }
    case Gates::zero:
      return 0.0;
    case Gates::constant:
      return c.gate_value;
    default:
      return -5.0 * sigmoid(random.normal(i));
  }
}

// The raw g that a gate form turns into the log decay y; A = exp(A_log).
double invert_form(const Case& c, double y, double A, double bias) {
  if (c.form == GateForm::softplus) return inverse_softplus(std::max(-y / A, 1e-30)) - bias;
  if (c.form == GateForm::bounded) {
    const double r = std::clamp(y / c.lower_bound, 1e-7, 1.0 - 1e-7);
    return std::log(r / (1.0 - r)) / A - bias;
  }
  return y;
}

}  // namespace

// ---- Buffer ---------------------------------------------------------------------------------

Buffer::Buffer(size_t bytes, uint8_t mark) : bytes_(bytes), mark_(mark) {
  const size_t rounded = (bytes + 63) / 64 * 64;
  memory_.reset(
      static_cast<std::byte*>(::operator new (rounded + 2 * kGuard, std::align_val_t{64})));
  fill();
}
// Little-endian pairs (mark, 0xFF): 0xFFmm is NaN in bf16 and f16, 0xFFmmFFmm in f32, and so on.
std::byte Buffer::pattern(size_t i) const {
  return i % 2 == 0 ? static_cast<std::byte>(mark_) : std::byte{0xFF};
}
void Buffer::fill() const {
  std::byte* p = memory_.get();
  if (p == nullptr) return;
  const size_t total = (bytes_ + 63) / 64 * 64 + 2 * kGuard;
  const std::array<std::byte, 2> pair = {pattern(0), pattern(1)};
  for (size_t i = 0; i < 64; i += 2) std::memcpy(p + i, pair.data(), 2);
  for (size_t done = 64; done < total; done *= 2)
    std::memcpy(p + done, p, std::min(done, total - done));
}
bool Buffer::guards_intact() const {
  const std::byte* p = memory_.get();
  if (p == nullptr) return true;
  const size_t total = (bytes_ + 63) / 64 * 64 + 2 * kGuard;
  for (size_t i = 0; i < kGuard; ++i) {
    if (p[i] != pattern(i)) return false;
  }
  for (size_t i = kGuard + bytes_; i < total; ++i) {
    if (p[i] != pattern(i)) return false;
  }
  return true;
}

// ---- Building -------------------------------------------------------------------------------

Tensor& Instance::add(std::string name, Role role, DType dtype, std::vector<int64_t> shape,
                      bool rows) {
  Layout kind = spec_.strided;
  if (!rows && kind != Layout::wide) kind = Layout::packed;
  const MemoryLayout layout = make_layout(shape, kind, role == Role::input);
  auto t = std::make_unique<Tensor>();
  t->name = std::move(name);
  t->role = role;
  // Marks 1 to 120, by turns: zero would be an infinity in bf16.
  const auto mark = static_cast<uint8_t>(1 + list_.size() % 120);
  if (has_data_) t->buffer = Buffer(static_cast<size_t>(layout.elements * size_of(dtype)), mark);
  const std::byte* data = has_data_ ? t->buffer.data() + layout.offset * size_of(dtype) : nullptr;
  t->view = TensorView(data, dtype, shape);
  std::copy(layout.strides.begin(), layout.strides.end(), t->view.strides);
  list_.push_back(std::move(t));
  return *list_.back();
}

void Instance::add_lengths() {
  if (!spec_.packed) return;
  std::vector<int64_t> cu = {0};
  for (int64_t n : spec_.seqs) cu.push_back(cu.back() + n);
  const auto size = static_cast<int64_t>(cu.size());
  const auto value = [&](int64_t i) { return static_cast<double>(cu[static_cast<size_t>(i)]); };
  fill(add("cu_seqlens", Role::input, spec_.cu, {size}, false), value);
  if (spec_.cuhost) fill(add("cu_seqlens_host", Role::input, spec_.cu, {size}, false), value);
}

void Instance::add_gate_parameters() {
  if (spec_.gate == Gate::none || spec_.form == GateForm::log_decay) return;
  const bool is_wide = spec_.strided == Layout::wide;
  if (spec_.form == GateForm::softplus || spec_.alog) {
    const Random random(spec_.seed, "A");
    const bool softplus_form = spec_.form == GateForm::softplus;
    const std::vector<int64_t> shape =
        is_wide ? std::vector<int64_t>{1, 1, spec_.HV, 1} : std::vector<int64_t>{spec_.HV};
    fill(add("A_log", Role::input, spec_.pdtype, shape, false), [&](int64_t h) {
      return std::log(softplus_form ? 1.0 + 15.0 * random.uniform(h) : random.uniform(h, 0.5, 2.0));
    });
  }
  if (spec_.dtbias) {
    const Random random(spec_.seed, "dt_bias");
    const int64_t per_head = spec_.gate == Gate::channel ? spec_.K : 1;
    const std::vector<int64_t> shape = is_wide ? std::vector<int64_t>{spec_.HV, per_head}
                                               : std::vector<int64_t>{spec_.HV * per_head};
    fill(add("dt_bias", Role::input, spec_.pdtype, shape, false),
         [&](int64_t i) { return 0.5 * random.normal(i); });
  }
}

void Instance::add_states() {
  const Case& c = spec_;
  const int64_t N = c.num_sequences();
  const bool v_first = c.state == StateLayout::vk;
  const int64_t rows = v_first ? c.V : c.K, columns = v_first ? c.K : c.V;
  const Random random(c.seed, "state");
  const auto value = [&](int64_t i) { return 0.5 * random.normal(i); };
  const std::vector<int64_t> shape = {N, c.HV, rows, columns};
  if (c.init) {
    const Role role = c.final_state == Final::inplace ? Role::inout : Role::input;
    fill(add("initial_state", role, c.sdtype, shape, false), value);
  }
  if (c.final_state == Final::separate) add("final_state", Role::output, c.sdtype, shape, false);
  if (c.pool == Pool::none) return;

  // Slots: sequence n may read slot 1 + 2m and write 2 + 2m, m counted from the end; slot 0 and the
  // last one belong to nobody (fork: all read slot 0). identity: slot n, one to spare. tokens:
  // after the N read slots one for every token.
  int64_t slots = 2 * N + 3;
  read_slots_.assign(static_cast<size_t>(N), -1);
  write_slots_.assign(static_cast<size_t>(N), -1);
  int64_t columns_of_index = 0;
  std::vector<int64_t> token_slots;
  if (c.pool == Pool::identity) slots = N + 1;
  if (c.pool == Pool::tokens) {
    slots = N + c.num_real_tokens() + 1;
    columns_of_index = c.longest() + 2;
    token_slots.assign(static_cast<size_t>(N * columns_of_index), -1);
  }
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
      default:
        read_slots_[i] = n % 3 == 2 ? -1 : n;
        for (int64_t t = 0; t < c.sequence_length(n); ++t, ++token) {
          if (t % 3 != 1) {
            token_slots[static_cast<size_t>(n * columns_of_index + t)] = N + token;
            pool_written_.push_back(N + token);
          }
        }
        break;
    }
    if (c.pool != Pool::tokens && write_slots_[i] >= 0) pool_written_.push_back(write_slots_[i]);
  }
  std::sort(pool_written_.begin(), pool_written_.end());

  Tensor& pool = add("state_pool", Role::inout, c.sdtype, {slots, c.HV, rows, columns}, false);
  const int64_t per_slot = c.HV * rows * columns;
  std::vector<int64_t> read(read_slots_);
  std::sort(read.begin(), read.end());
  read.erase(std::unique(read.begin(), read.end()), read.end());
  for (int64_t slot : read) {  // all other slots stay NaN
    if (slot < 0 || !has_data_) continue;
    TensorView view = pool.view;
    view.data = static_cast<std::byte*>(view.data) + slot * view.strides[0] * size_of(c.sdtype);
    view.shape[0] = 1;
    const int64_t first = slot * per_slot;
    const DType type = c.sdtype;
#pragma omp parallel for if (per_slot > kWorthThreads)
    for (int64_t r = 0; r < c.HV * rows; ++r) {
      const int64_t offset = memory_offset(view, r * columns);
      for (int64_t d = 0; d < columns; ++d) {
        store(view.data, type, offset + d, value(first + r * columns + d));
      }
    }
  }
  const auto list = [](const std::vector<int64_t>& from) {
    return [&from](int64_t i) { return static_cast<double>(from[static_cast<size_t>(i)]); };
  };
  if (c.pool != Pool::identity && c.pool != Pool::writelist) {
    fill(add("read_index", Role::input, c.idx, {N}, false), list(read_slots_));
  }
  if (c.pool == Pool::tokens) {
    fill(add("write_index", Role::input, c.idx, {N, columns_of_index}, false), list(token_slots));
  } else if (c.pool != Pool::identity && c.pool != Pool::inplace) {
    fill(add("write_index", Role::input, c.idx, {N}, false), list(write_slots_));
  }
}

void Instance::add_checkpoints() {
  const Case& c = spec_;
  if (c.ckpt.empty()) return;
  std::vector<int64_t> cu = {0}, tokens, slots;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    for (int64_t offset : c.ckpt) {
      if (offset > c.sequence_length(n)) continue;
      tokens.push_back(offset == kCkptEnd ? c.sequence_length(n) : offset);
    }
    cu.push_back(static_cast<int64_t>(tokens.size()));
  }
  const auto M = static_cast<int64_t>(tokens.size());
  for (int64_t m = 0; m < M; ++m) {  // from the end; slot 0 and the last belong to nobody
    slots.push_back(c.ckptskip && m % 2 == 1 ? -1 : M - m);
    if (slots.back() >= 0) ckpt_written_.push_back(slots.back());
  }
  std::sort(ckpt_written_.begin(), ckpt_written_.end());
  const auto add_list = [&](const char* name, const std::vector<int64_t>& list) {
    fill(add(name, Role::input, c.idx, {static_cast<int64_t>(list.size())}, false),
         [&](int64_t i) { return static_cast<double>(list[static_cast<size_t>(i)]); });
  };
  add_list("ckpt_cu", cu);
  add_list("ckpt_tokens", tokens);
  add_list("ckpt_slots", slots);
  const bool v_first = c.state == StateLayout::vk;
  add("ckpt_states", Role::output, c.cdtype,
      {M + 2, c.HV, v_first ? c.V : c.K, v_first ? c.K : c.V}, false);
}

namespace {

// Keys [B,T,H,K], row-major: normalised unless the operation does it.
std::vector<double> draw_keys(const Case& c, bool normalised) {
  const int64_t rows = c.num_batches() * c.num_tokens() * c.H;
  std::vector<double> k(static_cast<size_t>(rows * c.K));
  const Random random(c.seed, "k"), base(c.seed, "k.base");
#pragma omp parallel for if (rows * c.K > kWorthThreads)
  for (int64_t r = 0; r < rows; ++r) {
    double* row = k.data() + r * c.K;
    const int64_t h = r % c.H, t = r / c.H % c.num_tokens();
    double sum = 0, base_sum = 0;
    for (int64_t d = 0; d < c.K; ++d) {
      row[d] = random.normal(r * c.K + d);
      sum += row[d] * row[d];
      const double b = base.normal(h * c.K + d);
      base_sum += b * b;
    }
    if (c.keys == Keys::repeated || c.keys == Keys::correlated) {
      // correlated: cosine about 0.96 between any two rows
      const double noise = c.keys == Keys::correlated ? 0.2 / std::sqrt(sum) : 0.0;
      sum = 0;
      for (int64_t d = 0; d < c.K; ++d) {
        row[d] = base.normal(h * c.K + d) / std::sqrt(base_sum) + noise * row[d];
        sum += row[d] * row[d];
      }
    }
    const bool is_zero = c.keys == Keys::zero && t % 3 == 1;
    const double factor = is_zero ? 0.0 : normalised ? 1.0 / std::sqrt(sum) : 1.0;
    for (int64_t d = 0; d < c.K; ++d) row[d] *= factor;
  }
  return k;
}

std::function<double(int64_t)> from(const std::vector<double>& values) {
  return [&values](int64_t i) { return values[static_cast<size_t>(i)]; };
}

double draw_beta(const Case& c, const Random& random, int64_t i) {
  if (c.is_block()) return c.beta == Beta::two_sigmoid ? 2 * random.uniform(i) : random.uniform(i);
  if (c.beta == Beta::value) return random.uniform(i);
  return (c.beta == Beta::two_sigmoid ? 2.0 : 1.0) * random.normal(i);
}

std::vector<double> draw_queries(const Case& c) {
  const int64_t rows = c.num_batches() * c.num_tokens() * c.H;
  std::vector<double> q(static_cast<size_t>(rows * c.K));
  const Random random(c.seed, "q");
#pragma omp parallel for if (rows * c.K > kWorthThreads)
  for (int64_t i = 0; i < rows * c.K; ++i) {
    const int64_t t = i / c.K / c.H % c.num_tokens();
    q[static_cast<size_t>(i)] = c.keys == Keys::zero && t % 3 == 1 ? 0.0 : random.normal(i);
  }
  return q;
}

}  // namespace

void Instance::generate_sequence_op() {
  const Case& c = spec_;
  const std::vector<double> none;
  const int64_t B = c.num_batches(), T = c.num_tokens();
  fill(add("q", Role::input, c.dtype, {B, T, c.H, c.K}, true),
       from(has_data_ ? draw_queries(c) : none));
  fill(add("k", Role::input, c.dtype, {B, T, c.H, c.K}, true),
       from(has_data_ ? draw_keys(c, !c.l2norm) : none));
  const Random random_v(c.seed, "v"), random_beta(c.seed, "beta");
  fill(add("v", Role::input, c.dtype, {B, T, c.HV, c.V}, true),
       [&](int64_t i) { return random_v.normal(i); });
  if (c.beta != Beta::none) {
    std::vector<int64_t> shape = {B, T, c.HV};
    if (c.betavec) shape.push_back(c.V);
    fill(add("beta", Role::input, c.betadtype, shape, true),
         [&](int64_t i) { return draw_beta(c, random_beta, i); });
  }
  add_gate_parameters();
  if (c.gate != Gate::none) {
    const Random random(c.seed, "g"), pick(c.seed, "g.pick");
    const std::vector<double> A = has_data_ && has("A_log") ? values("A_log") : none;
    const std::vector<double> bias = has_data_ && has("dt_bias") ? values("dt_bias") : none;
    const int64_t width = c.gate == Gate::channel ? c.K : 1;
    std::vector<int64_t> shape = {B, T, c.HV};
    if (c.gate == Gate::channel) shape.push_back(c.K);
    fill(add("g", Role::input, c.gdtype, shape, true), [&](int64_t i) {
      const int64_t h = i / width % c.HV, d = c.gate == Gate::channel ? i % width : -1;
      if (c.gates == Gates::softplus && c.form == GateForm::softplus) return random.normal(i);
      const double y = draw_log_decay(c, random, pick, i, h, d);
      const double factor = A.empty() ? 1.0 : std::exp(A[static_cast<size_t>(h)]);
      const double shift =
          bias.empty() ? 0.0 : bias[static_cast<size_t>(h * width + std::max<int64_t>(d, 0))];
      return invert_form(c, y, factor, shift);
    });
  }
  if (c.gv) {
    const Random random(c.seed, "gv"), pick(c.seed, "gv.pick");
    fill(add("gv", Role::input, c.gdtype, {B, T, c.HV, c.V}, true),
         [&](int64_t i) { return draw_log_decay(c, random, pick, i, i / c.V % c.HV, i % c.V); });
  }
  add("o", Role::output, c.dtype, {B, T, c.HV, c.V}, true);
  add_lengths();
  add_states();
  add_checkpoints();
}

void Instance::generate_block() {
  const Case& c = spec_;
  const std::vector<double> none;
  const int64_t B = c.num_batches(), T = c.num_tokens(), W = c.chunk;
  const int64_t width = c.gate == Gate::channel ? c.K : 1;
  std::vector<int64_t> gate_shape = {B, T, c.HV};
  if (c.gate == Gate::channel) gate_shape.push_back(c.K);
  add_lengths();

  if (c.op == Op::l2norm) {
    const std::vector<double> x = has_data_ ? draw_keys(c, false) : none;
    fill(add("x", Role::input, c.dtype, {B, T, c.H, c.K}, true), from(x));
    add("out", Role::output, c.odtype, {B, T, c.H, c.K}, true);
    if (c.rstd) add("rstd", Role::output, DType::f32, {B, T, c.H}, true);
    return;
  }

  const Random random(c.seed, "g"), pick(c.seed, "g.pick"), random_beta(c.seed, "beta");
  const auto log_decay = [&](int64_t i) {
    return draw_log_decay(c, random, pick, i, i / width % c.HV,
                          c.gate == Gate::channel ? i % width : -1);
  };
  if (c.op == Op::cumsum || c.op == Op::gate) {
    add_gate_parameters();
    const std::vector<double> A = has_data_ && has("A_log") ? values("A_log") : none;
    const std::vector<double> bias = has_data_ && has("dt_bias") ? values("dt_bias") : none;
    fill(add("g", Role::input, c.gdtype, gate_shape, true), [&](int64_t i) {
      if (c.gates == Gates::softplus && c.form == GateForm::softplus) return random.normal(i);
      const int64_t h = i / width % c.HV;
      const double factor = A.empty() ? 1.0 : std::exp(A[static_cast<size_t>(h)]);
      const double shift = bias.empty() ? 0.0 : bias[static_cast<size_t>(i % (c.HV * width))];
      return invert_form(c, log_decay(i), factor, shift);
    });
    add("out", Role::output, c.odtype, gate_shape, true);
    return;
  }

  // kkt, scores, inverse, wy: chunks count from the start of each sequence.
  const std::vector<double> k = has_data_ ? draw_keys(c, true) : none;
  const bool is_gated = c.op != Op::inverse && c.gate != Gate::none;
  const bool has_a = c.op == Op::inverse || c.op == Op::wy;
  const int64_t rows_here = has_data_ ? B * T * c.HV : 0;
  std::vector<double> G(static_cast<size_t>(is_gated ? rows_here * width : 0));
  std::vector<double> A(static_cast<size_t>(has_a ? rows_here * W : 0), 0.0);
  const auto beta_at = [&](int64_t i) {
    return c.beta == Beta::none ? 1.0 : draw_beta(c, random_beta, i);
  };
  for (int64_t n = 0; has_data_ && n < c.num_sequences(); ++n) {
    const int64_t first = c.packed ? c.sequence_begin(n) : n * T;
    const int64_t length = c.sequence_length(n);
    for (int64_t h = 0; h < c.HV; ++h) {
      const auto row = [&](int64_t t) { return (first + t) * c.HV + h; };
      if (!G.empty()) {
        for (int64_t t = 0; t < length; ++t) {
          for (int64_t d = 0; d < width; ++d) {
            const double before = t % W == 0 ? 0.0 : G[static_cast<size_t>(row(t - 1) * width + d)];
            G[static_cast<size_t>(row(t) * width + d)] =
                before + std::max(-104.0, log_decay(row(t) * width + d));
          }
        }
      }
      if (A.empty()) continue;
      const int64_t kh = h / (c.HV / c.H);
      for (int64_t begin = 0; begin < length; begin += W) {
        const int64_t rows = std::min(W, length - begin);
        for (int64_t i = 0; i < rows; ++i) {
          double* a = A.data() + row(begin + i) * W;
          for (int64_t j = 0; j < i; ++j) {
            double sum = 0;
            for (int64_t d = 0; d < c.K; ++d) {
              double gate = 0;
              if (!G.empty()) {
                const int64_t gd = c.gate == Gate::channel ? d : 0;
                gate = G[static_cast<size_t>(row(begin + i) * width + gd)] -
                       G[static_cast<size_t>(row(begin + j) * width + gd)];
              }
              sum += k[static_cast<size_t>(((first + begin + i) * c.H + kh) * c.K + d)] *
                     k[static_cast<size_t>(((first + begin + j) * c.H + kh) * c.K + d)] *
                     std::exp(gate);
            }
            a[j] = beta_at(row(begin + i)) * sum;
          }
          if (c.op == Op::wy) {  // row i of the inverse: e_i - sum_j A_ij inverse_j
            std::vector<double> inverse(static_cast<size_t>(W), 0.0);
            for (int64_t j = 0; j < i; ++j) {
              const double* other = A.data() + row(begin + j) * W;
              for (int64_t m = 0; m <= j; ++m) inverse[static_cast<size_t>(m)] -= a[j] * other[m];
            }
            inverse[static_cast<size_t>(i)] = 1.0;
            std::copy(inverse.begin(), inverse.end(), a);
          } else {  // inverse reads below the diagonal only
            for (int64_t j = i; j < W; ++j) a[j] = NAN;
          }
        }
      }
    }
  }

  if (c.op == Op::inverse) {
    fill(add("a", Role::input, c.dtype, {B, T, c.HV, W}, true), from(A));
    add("out", Role::output, c.odtype, {B, T, c.HV, W}, true);
    return;
  }
  fill(add("k", Role::input, c.dtype, {B, T, c.H, c.K}, true), from(k));
  if (c.op == Op::scores || (c.op == Op::wy && c.qg)) {
    fill(add("q", Role::input, c.dtype, {B, T, c.H, c.K}, true),
         from(has_data_ ? draw_queries(c) : none));
  }
  if (is_gated) fill(add("g", Role::input, c.gdtype, gate_shape, true), from(G));
  if (c.op != Op::scores && c.beta != Beta::none) {
    fill(add("beta", Role::input, c.betadtype, {B, T, c.HV}, true),
         [&](int64_t i) { return draw_beta(c, random_beta, i); });
  }
  if (c.op != Op::wy) {
    add("out", Role::output, c.odtype, {B, T, c.HV, W}, true);
    return;
  }
  fill(add("a", Role::input, c.dtype, {B, T, c.HV, W}, true), from(A));
  add("w", Role::output, c.odtype, {B, T, c.HV, c.K}, true);
  if (c.u) {
    const Random random_v(c.seed, "v");
    fill(add("v", Role::input, c.dtype, {B, T, c.HV, c.V}, true),
         [&](int64_t i) { return random_v.normal(i); });
    add("u", Role::output, c.odtype, {B, T, c.HV, c.V}, true);
  }
  if (c.kg) add("kg", Role::output, c.odtype, {B, T, c.HV, c.K}, true);
  if (c.qg) add("qg", Role::output, c.odtype, {B, T, c.HV, c.K}, true);
}

// Input rows of padding and of skipped sequences must never be looked at: they hold NaN.
void Instance::spoil_unread_rows() {
  for (const char* name : {"q", "k", "v", "g", "gv", "beta", "x", "a"}) {
    if (!has(name)) continue;
    Tensor& t = find(name);
    const int64_t tokens = spec_.num_batches() * spec_.num_tokens();
    for (const auto& [first, last] : unread_tokens()) {
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
  if (c.pool == Pool::none || c.pool == Pool::tokens)
    return ranges;  // tokens: each writes its first
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    const auto i = static_cast<size_t>(n);
    if (read_slots_[i] >= 0 || write_slots_[i] >= 0) continue;
    const int64_t first = c.packed ? c.sequence_begin(n) : n * c.length;
    ranges.emplace_back(first, first + c.sequence_length(n));
  }
  return ranges;
}

void Instance::generate() {
  if (spec_.is_block()) {
    generate_block();
  } else {
    generate_sequence_op();
  }
  if (has_data_) spoil_unread_rows();
  bind();
}

Instance::Instance(const Case& c, bool keep_inputs) : spec_(c) {
  generate();
  for (auto& t : list_) {
    if (t->role == Role::inout || (keep_inputs && t->role == Role::input)) {
      t->before.assign(t->buffer.data(), t->buffer.data() + t->buffer.bytes());
    }
  }
}

Instance Instance::shapes_of(const Case& c) {
  Instance i;
  i.spec_ = c;
  i.has_data_ = false;
  i.generate();
  return i;
}

Instance Instance::in_f64(const Instance& other) {
  Instance copy;
  copy.spec_ = other.spec_;
  copy.spec_.strided = Layout::packed;
  copy.read_slots_ = other.read_slots_;
  copy.write_slots_ = other.write_slots_;
  copy.pool_written_ = other.pool_written_;
  copy.ckpt_written_ = other.ckpt_written_;
  for (const auto& t : other.list_) {
    const DType type = dtype_of(t->view);
    const bool is_index = type == DType::i32 || type == DType::i64;
    const std::vector<int64_t> shape(t->view.shape, t->view.shape + t->view.rank);
    Tensor& twin = copy.add(t->name, t->role, is_index ? type : DType::f64, shape, false);
    if (t->role == Role::output) continue;
    TensorView first_value = t->view;  // before any run
    first_value.data = const_cast<std::byte*>(t->before.data()) +
                       (static_cast<std::byte*>(t->view.data) - t->buffer.data());
    fill(twin,
         [&](int64_t i) { return load(first_value.data, type, memory_offset(first_value, i)); });
    twin.before.assign(twin.buffer.data(), twin.buffer.data() + twin.buffer.bytes());
  }
  copy.bind();
  return copy;
}

void Instance::bind() {
  for (const auto& t : list_) {
    if (spec_.is_block()) {
      for (const BlockField& f : kBlockFields) {
        if (t->name == f.name) blocks_.*f.field = t->view;
      }
    } else {
      for (const SequenceField& f : kSequenceFields) {
        if (t->name == f.name) tensors_.*f.field = t->view;
      }
    }
  }
  if (spec_.final_state == Final::inplace) tensors_.final_state = tensors_.initial_state;
}

// ---- Running --------------------------------------------------------------------------------

Options Instance::options(const RunOptions& run) const {
  const Case& c = spec_;
  Options o;
  o.impl = run.impl;
  o.num_threads = run.threads;
  o.chunk = c.chunk;
  if (c.gate != Gate::none && (!c.is_block() || c.op == Op::cumsum || c.op == Op::gate)) {
    o.gate_form = c.form;
    if (c.form == GateForm::bounded) o.lower_bound = static_cast<float>(c.lower_bound);
  }
  if (c.scale) o.scale = static_cast<float>(*c.scale);
  o.reverse = c.reverse;
  if (c.is_block()) return o;
  if (c.beta == Beta::sigmoid) o.beta_form = BetaForm::sigmoid;
  if (c.beta == Beta::two_sigmoid) o.beta_form = BetaForm::two_sigmoid;
  o.state_layout = c.state;
  o.split = c.split;
  o.segment_length = c.segment;
  o.qk_l2norm = c.l2norm;
  return o;
}

void Instance::reserve(const RunOptions& run) {
  const Options o = options(run);
  const size_t bytes = spec_.op == Op::forward  ? forward_workspace_bytes(o, tensors_)
                       : spec_.op == Op::decode ? decode_workspace_bytes(o, tensors_)
                                                : block_workspace_bytes(spec_.op, o, blocks_);
  constexpr uint8_t kWorkspaceMark = 121;
  workspace_ = Buffer(bytes, kWorkspaceMark);
}

void Instance::reset() {
  for (auto& t : list_) {
    if (t->role == Role::output) t->buffer.fill();
    if (t->role == Role::inout) std::copy(t->before.begin(), t->before.end(), t->buffer.data());
  }
  workspace_.fill();
}

void Instance::call(const RunOptions& run) {
  const Options o = options(run);
  const deltic_workspace w = {workspace_.bytes() > 0 ? workspace_.data() : nullptr,
                              workspace_.bytes()};
  if (spec_.op == Op::forward) {
    forward(o, tensors_, w);
  } else if (spec_.op == Op::decode) {
    decode(o, tensors_, w);
  } else {
    block(spec_.op, o, blocks_, w);
  }
}

void Instance::run(const RunOptions& run) {
  reserve(run);
  reset();
  call(run);
}

std::vector<Choice> Instance::explain(const RunOptions& run) const {
  const Options o = options(run);
  return spec_.is_block() ? deltic::explain(spec_.op, o, blocks_)
                          : deltic::explain(spec_.op, o, tensors_);
}

// ---- Looking --------------------------------------------------------------------------------

Tensor& Instance::find(std::string_view name) {
  if (name == "final_state" && spec_.final_state == Final::inplace) name = "initial_state";
  for (auto& t : list_) {
    if (t->name == name) return *t;
  }
  throw std::out_of_range("no tensor '" + std::string(name) + "' in " + canonical(spec_));
}
const Tensor& Instance::tensor(std::string_view name) const {
  return const_cast<Instance*>(this)->find(name);
}
bool Instance::has(std::string_view name) const {
  if (name == "final_state" && spec_.final_state == Final::inplace) return true;
  return std::any_of(list_.begin(), list_.end(), [&](const auto& t) { return t->name == name; });
}
std::vector<std::string> Instance::inputs() const {
  std::vector<std::string> names;
  for (const auto& t : list_) {
    if (t->role != Role::output) names.push_back(t->name);
  }
  return names;
}
std::vector<std::string> Instance::outputs() const {
  std::vector<std::string> names;
  for (const auto& t : list_) {
    if (t->role == Role::input) continue;
    names.push_back(t->name == "initial_state" ? "final_state" : t->name);
  }
  return names;
}

std::vector<double> Instance::values(std::string_view name) const {
  const Tensor& t = tensor(name);
  std::vector<double> list(static_cast<size_t>(t.view.numel()));
  const DType type = dtype_of(t.view);
  const int64_t width = t.view.shape[t.view.rank - 1];
  for_each_row(t.view, [&](int64_t index, int64_t offset) {
    for (int64_t c = 0; c < width; ++c) {
      list[static_cast<size_t>(index + c)] = load(t.view.data, type, offset + c);
    }
  });
  return list;
}

std::vector<std::byte> Instance::bytes(std::string_view name) const {
  const Tensor& t = tensor(name);
  const auto size = static_cast<size_t>(size_of(dtype_of(t.view)));
  const auto width = static_cast<size_t>(t.view.shape[t.view.rank - 1]);
  std::vector<std::byte> list(static_cast<size_t>(t.view.numel()) * size);
  for_each_row(t.view, [&](int64_t index, int64_t offset) {
    std::memcpy(list.data() + static_cast<size_t>(index) * size,
                static_cast<const std::byte*>(t.view.data) + static_cast<size_t>(offset) * size,
                width * size);
  });
  return list;
}

void Instance::set(std::string_view name, int64_t index, double value) {
  Tensor& t = find(name);
  if (t.role == Role::output) throw std::out_of_range(std::string(name) + " is an output");
  const int64_t offset = memory_offset(t.view, index);
  store(t.view.data, dtype_of(t.view), offset, value);
  const auto from_start = static_cast<std::byte*>(t.view.data) - t.buffer.data();
  store(t.before.data() + from_start, dtype_of(t.view), offset, value);
}

void Instance::set_values(std::string_view name, const std::vector<double>& list) {
  for (size_t i = 0; i < list.size(); ++i) set(name, static_cast<int64_t>(i), list[i]);
}

const std::vector<int64_t>& Instance::written_slots(std::string_view name) const {
  return name == "ckpt_states" ? ckpt_written_ : pool_written_;
}

std::string Instance::damage() const {
  if (!workspace_.guards_intact()) return "wrote outside of the workspace";
  for (const auto& t : list_) {
    if (!t->buffer.guards_intact()) return "wrote outside of " + t->name;
    const std::byte* data = t->buffer.data();
    const size_t size = t->buffer.bytes();
    if (t->role == Role::input) {
      if (!t->before.empty() && std::memcmp(data, t->before.data(), size) != 0)
        return "wrote to the input " + t->name;
      continue;
    }
    // What may be written: all elements, or those of the written slots.
    const bool by_slot = t->name == "state_pool" || t->name == "ckpt_states";
    const int64_t numel = t->view.numel();
    const auto element = static_cast<size_t>(size_of(dtype_of(t->view)));
    if (!by_slot && static_cast<size_t>(numel) * element == size) continue;
    std::vector<char> writable(size, 0);
    const std::vector<int64_t>& slots = written_slots(t->name);
    const int64_t per_slot = t->view.shape[0] > 0 ? numel / t->view.shape[0] : 0;
    const auto first = static_cast<size_t>(static_cast<const std::byte*>(t->view.data) - data);
    const auto row_bytes = static_cast<size_t>(t->view.shape[t->view.rank - 1]) * element;
    for_each_row(t->view, [&](int64_t index, int64_t offset) {
      if (by_slot && !std::binary_search(slots.begin(), slots.end(), index / per_slot)) return;
      std::memset(writable.data() + first + static_cast<size_t>(offset) * element, 1, row_bytes);
    });
    for (size_t i = 0; i < size; ++i) {
      const std::byte should = t->role == Role::inout ? t->before[i] : t->buffer.pattern(i);
      if (writable[i] == 0 && data[i] != should) {
        return "wrote to a part of " + t->name + " that the call does not own (byte " +
               std::to_string(i) + ")";
      }
    }
  }
  return "";
}

std::vector<std::pair<int64_t, int64_t>> Instance::zero_ranges(std::string_view name) const {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  if (!has(name) || !(spec_.is_block() || name == "o")) return ranges;
  const int64_t tokens = spec_.num_batches() * spec_.num_tokens();
  for (const auto& [first, last] : unread_tokens()) {
    const int64_t per_token = tensor(name).view.numel() / tokens;
    ranges.emplace_back(first * per_token, last * per_token);
  }
  return ranges;
}

}  // namespace deltic::cases
