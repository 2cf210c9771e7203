// Drawn inputs and the runner of backward calls.
#include "gradients.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <sstream>

namespace deltic::test {
namespace {

enum Stream : uint64_t {
  kRowQ = 101,
  kRowK,
  kRowV,
  kRowG,
  kRowBeta,
  kOut,
  kIn,
  kFinal,
  kParam,
  kRowGv
};

Buffer rows(const GradientSetup& s, DType type, int64_t B, int64_t T, int64_t heads,
            int64_t width) {
  if (width == 0) {
    if (!s.strided) return Buffer(type, {B, T, heads});
    return Buffer(type, {B, T, heads}, {T * (heads + 3) + 5, heads + 3, 1});
  }
  if (!s.strided) return Buffer(type, {B, T, heads, width});
  const int64_t row = width + 3, head = T * row + 1;
  return Buffer(type, {B, T, heads, width}, {heads * head + 2, row, head, 1});
}

Buffer states(const GradientSetup& s, DType type) {
  const bool kv = s.layout == StateLayout::kv;
  const int64_t N = static_cast<int64_t>(s.sequences.size());
  const int64_t major = kv ? s.K : s.V, minor = kv ? s.V : s.K;
  if (!s.strided) return Buffer(type, {N, s.HV, major, minor});
  const int64_t row = minor + 1, head = major * row + 3;
  return Buffer(type, {N, s.HV, major, minor}, {s.HV * head + 7, head, row, 1});
}

// Parameters are read as fp32: multiples of 2^-10, so that a small step stays exact.
double coarse(double value) { return std::round(value * 1024) / 1024; }

double gate_number(const GradientSetup& s, uint64_t seed, uint64_t t, uint64_t h, uint64_t d) {
  if (s.gate_form != GateForm::log_decay) {
    return s.raw_gate_scale * normal(seed, kRowG, t, h, d);
  }
  const double u = uniform(seed, kRowG, t, h, d), factor = 0.9 + 0.2 * u;
  constexpr double kLevels[] = {0, -5, -20, -1000};
  switch (s.gate_values) {
    case GateValues::zero:
      return 0;
    case GateValues::slow:
      return -0.02 * u;
    case GateValues::deep5:
      return -5 * factor;
    case GateValues::deep20:
      return -20 * factor;
    case GateValues::deep1000:
      return -1000 * factor;
    case GateValues::growing:
      return growing_gate(u, static_cast<int64_t>(t), static_cast<int64_t>(d));
    case GateValues::mixed:
      return kLevels[static_cast<int>(4 * uniform(seed, kRowG + 100, t, h, d))] * factor;
    default:
      return -2 * u * u;
  }
}

double beta_number(const GradientSetup& s, uint64_t seed, uint64_t t, uint64_t h, uint64_t v) {
  if (s.beta_value) return *s.beta_value;
  if (s.beta_form != BetaForm::value) return 2 * normal(seed, kRowBeta, t, h, v);
  return uniform(seed, kRowBeta, t, h, v);
}

// Unit length, or any length where the norm is inside.
std::vector<double> key_row(const GradientSetup& s, Stream stream, uint64_t seed, uint64_t t,
                            uint64_t h) {
  std::vector<double> row(static_cast<size_t>(s.K));
  double sum = 0;
  for (size_t d = 0; d < row.size(); ++d) {
    const double own = normal(seed, stream, t, h, d), shared = normal(seed, kParam, 0, h, d);
    row[d] = s.keys == KeyValues::repeated && stream == kRowK ? shared
             : s.keys == KeyValues::correlated                ? shared + 0.2 * own
                                                              : own;
    sum += row[d] * row[d];
  }
  const bool zero = s.keys == KeyValues::zero_rows && t % 5 == 2;
  for (double& number : row) number = zero ? 0 : number / (s.qk_l2norm ? 0.5 : std::sqrt(sum));
  return row;
}

void place_tokens(GradientCall& c, int64_t n) {
  const GradientSetup& s = c.setup;
  const auto [seed, length] = s.sequences[static_cast<size_t>(n)];
  const int64_t b = s.dense ? n : 0, begin = c.begin(n);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t row = begin + i;
    const auto t = static_cast<uint64_t>(i);
    for (int64_t h = 0; h < s.H; ++h) {
      const auto q = key_row(s, kRowQ, seed, t, static_cast<uint64_t>(h));
      const auto k = key_row(s, kRowK, seed, t, static_cast<uint64_t>(h));
      for (int64_t d = 0; d < s.K; ++d) {
        c.x[kQ].set(c.x[kQ].at({b, row, h, d}), q[static_cast<size_t>(d)]);
        c.x[kK].set(c.x[kK].at({b, row, h, d}), k[static_cast<size_t>(d)]);
      }
    }
    for (int64_t h = 0; h < s.HV; ++h) {
      const auto uh = static_cast<uint64_t>(h);
      for (int64_t v = 0; v < s.V; ++v) {
        const auto uv = static_cast<uint64_t>(v);
        c.x[kV].set(c.x[kV].at({b, row, h, v}), normal(seed, kRowV, t, uh, uv));
        if (c.d_o) c.d_o.set(c.d_o.at({b, row, h, v}), normal(seed, kOut, t, uh, uv));
      }
      for (int64_t v = 0; c.x[kBeta] && v < (s.value_beta ? s.V : 1); ++v) {
        c.x[kBeta].set(c.x[kBeta].at({b, row, h}) + v,
                       beta_number(s, seed, t, uh, static_cast<uint64_t>(v)));
      }
      for (int64_t v = 0; c.x[kGv] && v < s.V; ++v) {
        c.x[kGv].set(c.x[kGv].at({b, row, h, v}),
                     -uniform(seed, kRowGv, t, uh, static_cast<uint64_t>(v)));
      }
      if (s.gate == GateKind::head) {
        c.x[kG].set(c.x[kG].at({b, row, h}), gate_number(s, seed, t, uh, 0));
      }
      for (int64_t d = 0; d < s.K && s.gate == GateKind::channel; ++d) {
        c.x[kG].set(c.x[kG].at({b, row, h, d}),
                    gate_number(s, seed, t, uh, static_cast<uint64_t>(d)));
      }
    }
  }
}

// The same numbers in both layouts.
void place_state(const GradientSetup& s, Buffer& to, int64_t n, Stream stream) {
  if (!to) return;
  const uint64_t seed = s.sequences[static_cast<size_t>(n)].seed;
  for (int64_t h = 0; h < s.HV; ++h) {
    for (int64_t d = 0; d < s.K; ++d) {
      for (int64_t v = 0; v < s.V; ++v) {
        const bool kv = s.layout == StateLayout::kv;
        to.set(kv ? to.at({n, h, d, v}) : to.at({n, h, v, d}),
               0.5 * normal(seed, stream, static_cast<uint64_t>(h), static_cast<uint64_t>(d),
                            static_cast<uint64_t>(v)));
      }
    }
  }
}

// Outputs start as NaN: whatever is not written shows.
void spoil(Buffer& b) {
  for (int64_t at : offsets(b))
    std::memset(b.data() + at * int64_t(element_bytes(b.dtype())), 0xFF, element_bytes(b.dtype()));
}

}  // namespace

std::string name(const GradientSetup& s) {
  constexpr const char* kGates[] = {"none", "head", "channel"};
  constexpr const char* kForms[] = {"log_decay", "softplus", "bounded"};
  std::ostringstream out;
  out << "gate=" << kGates[static_cast<int>(s.gate)] << "/" << kForms[static_cast<int>(s.gate_form)]
      << "/" << static_cast<int>(s.gate_values) << "/" << s.raw_gate_scale
      << " A_log=" << s.has_A_log << " dt_bias=" << s.has_dt_bias << " beta=" << s.has_beta << "/"
      << static_cast<int>(s.beta_form) << "/" << s.beta_value.value_or(-1) << "/" << s.value_beta
      << " gv=" << s.has_gv << " l2norm=" << s.qk_l2norm << " keys=" << static_cast<int>(s.keys)
      << " layout=" << (s.layout == StateLayout::kv ? "kv" : "vk") << " dense=" << s.dense
      << " sequences=" << s.sequences.size() << " initial=" << s.has_initial << " d_o=" << s.has_d_o
      << " d_final=" << s.has_d_final << " H=" << s.H << " HV=" << s.HV << " K=" << s.K
      << " V=" << s.V << " dtype=" << dtype_name(s.dtype) << " strided=" << s.strided;
  return out.str();
}

GradientSetup with_dtype(GradientSetup s, DType type) {
  s.dtype = s.gate_dtype = s.beta_dtype = type;
  s.param_dtype = s.state_dtype = s.d_state_dtype = type == DType::f64 ? type : DType::f32;
  return s;
}

GradientCall::GradientCall(const GradientSetup& given) : setup(given) {
  const GradientSetup& s = setup;
  const int64_t N = num_sequences();
  T = s.padding;
  for (const auto& sequence : s.sequences) T += sequence.tokens;
  if (s.dense) B = N, T = N > 0 ? s.sequences[0].tokens : 0;

  const int64_t gate_width = s.gate == GateKind::channel ? s.K : 0;
  const auto make_inputs = [&](std::array<Buffer, kNumInputs>& to, DType state_dtype) {
    to[kQ] = rows(s, s.dtype, B, T, s.H, s.K);
    to[kK] = rows(s, s.dtype, B, T, s.H, s.K);
    to[kV] = rows(s, s.dtype, B, T, s.HV, s.V);
    if (s.has_beta) to[kBeta] = rows(s, s.beta_dtype, B, T, s.HV, s.value_beta ? s.V : 0);
    if (s.has_gv) to[kGv] = rows(s, s.gate_dtype, B, T, s.HV, s.V);
    if (s.gate != GateKind::none) to[kG] = rows(s, s.gate_dtype, B, T, s.HV, gate_width);
    if (s.gate_form != GateForm::log_decay && s.has_A_log) {
      to[kALog] = Buffer(s.param_dtype, {1, s.HV, 1});
    }
    if (s.gate_form != GateForm::log_decay && s.has_dt_bias) {
      to[kDtBias] =
          gate_width > 0 ? Buffer(s.param_dtype, {s.HV, s.K}) : Buffer(s.param_dtype, {s.HV});
    }
    if (s.has_initial) to[kInitial] = states(s, state_dtype);
  };
  make_inputs(x, s.state_dtype);
  make_inputs(dx, s.d_state_dtype);
  o = rows(s, s.dtype, B, T, s.HV, s.V);
  final_state = states(s, s.d_state_dtype);
  if (s.has_d_o) d_o = rows(s, s.dtype, B, T, s.HV, s.V);
  if (s.has_d_final) d_final = states(s, s.d_state_dtype);
  if (!s.dense) {
    cu = Buffer(DType::i32, {N + 1});
    for (int64_t n = 0; n <= N; ++n) cu.set_index(n, begin(n));
  }
  // In padding the inputs stay NaN: nobody may read them. d_o is a number, for the loss.
  for (int64_t at : d_o ? offsets(d_o) : std::vector<int64_t>()) d_o.set(at, 7);
  for (int64_t n = 0; n < N; ++n) {
    place_tokens(*this, n);
    place_state(s, x[kInitial], n, kIn);
    place_state(s, d_final, n, kFinal);
  }
  if (x[kALog]) {
    for (int64_t h = 0; h < s.HV; ++h) {
      x[kALog].set(h, coarse(uniform(5, kParam, 1, static_cast<uint64_t>(h)) - 0.5));
    }
  }
  if (x[kDtBias]) {
    for (int64_t at : offsets(x[kDtBias])) {
      x[kDtBias].set(at, coarse(normal(5, kParam, 2, static_cast<uint64_t>(at))));
    }
  }
  options = {.gate_form = s.gate_form,
             .beta_form = s.beta_form,
             .state_layout = s.layout,
             .split = Split::off,
             .chunk = s.chunk,
             .qk_l2norm = s.qk_l2norm,
             .scale = s.scale,
             .num_threads = 1};
  if (s.gate_form == GateForm::bounded) options.lower_bound = s.lower_bound;
}

int64_t GradientCall::begin(int64_t n) const {
  int64_t first = 0;
  for (int64_t i = 0; i < n && !setup.dense; ++i) {
    first += setup.sequences[static_cast<size_t>(i)].tokens;
  }
  return first;
}

Tensors GradientCall::inputs() const {
  return {.q = x[kQ].view(),
          .k = x[kK].view(),
          .v = x[kV].view(),
          .beta = x[kBeta].view(),
          .g = x[kG].view(),
          .gv = x[kGv].view(),
          .A_log = x[kALog].view(),
          .dt_bias = x[kDtBias].view(),
          .cu_seqlens = cu.view(),
          .initial_state = x[kInitial].view()};
}

double GradientCall::loss() {
  Tensors tensors = inputs();
  tensors.o = o.view();
  tensors.final_state = final_state.view();
  options.impl = "reference";
  options.num_threads = 1;
  // Value-wise numbers are the recurrence's alone.
  setup.value_beta || setup.has_gv ? decode(options, tensors) : forward(options, tensors);
  const auto product = [](const Buffer& a, const Buffer& b) {
    double sum = 0;
    if (!b) return sum;
    for (int64_t at : offsets(a)) sum += a.get(at) * b.get(at);
    return sum;
  };
  return product(o, d_o) + product(final_state, d_final);
}

void GradientCall::forward_keeping(const std::string& impl, int32_t threads, Save what) {
  Tensors tensors = inputs();
  tensors.o = o.view();
  tensors.final_state = final_state.view();
  Options with = options;
  with.impl = impl;
  with.num_threads = threads;
  with.save = what;
  saved.reset();
  if (what != Save::none) saved.emplace(forward_saved_bytes(with, tensors));
  if (saved) tensors.saved = saved->c();
  spoil(o), spoil(final_state);
  run_guarded({Op::forward, tensors}, with);
  EXPECT_TRUE(!saved || saved->sentinels_intact()) << "written behind what was saved";
}

void GradientCall::backward(const std::string& impl, int32_t threads,
                            const std::vector<int>& asked) {
  BackwardTensors tensors{.forward = inputs(), .d_o = d_o.view(), .d_final_state = d_final.view()};
  if (saved) tensors.forward.saved = saved->c();
  TensorView* gradients[] = {&tensors.dq,     &tensors.dk,       &tensors.dv,
                             &tensors.dbeta,  &tensors.dg,       &tensors.dgv,
                             &tensors.dA_log, &tensors.ddt_bias, &tensors.d_initial_state};
  for (Buffer& gradient : dx) {
    if (gradient) spoil(gradient);
  }
  for (int i : asked) *gradients[i] = dx[static_cast<size_t>(i)].view();
  options.impl = impl;
  options.num_threads = threads;
  std::vector<const Buffer*> kept{&d_o, &d_final, &cu};
  for (const Buffer& input : x) kept.push_back(&input);
  std::vector<std::vector<uint8_t>> before;
  for (const Buffer* b : kept) before.push_back(*b ? b->all_bytes() : std::vector<uint8_t>());
  run_guarded({Op::backward, tensors}, options);
  for (size_t i = 0; i < kept.size(); ++i) {
    EXPECT_TRUE(!*kept[i] || kept[i]->all_bytes() == before[i]) << "input " << i << " was written";
  }
  for (size_t i = 0; i < kNumInputs; ++i) {
    EXPECT_TRUE(!dx[i] || dx[i].sentinels_intact()) << "written outside d" << kInputNames[i];
  }
  for (int i : asked) {
    const Buffer& gradient = dx[static_cast<size_t>(i)];
    if (!gradient || setup.dense || !is_per_token(i)) continue;
    const TensorView view = gradient.view();
    for (int64_t t = begin(num_sequences()); t < T; ++t) {
      for (int64_t h = 0; h < view.shape[2]; ++h) {
        for (int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
          EXPECT_EQ(gradient.get(gradient.at({0, t, h}) + d), 0)
              << "padding of d" << kInputNames[i];
        }
      }
    }
  }
}

void GradientCall::copy_inputs(const GradientCall& from) {
  const auto copy = [](const Buffer& in, Buffer& out) {
    if (!in) return;
    const auto a = offsets(in), b = offsets(out);
    for (size_t i = 0; i < a.size(); ++i) out.set(b[i], in.get(a[i]));
  };
  for (size_t i = 0; i < kNumInputs; ++i) copy(from.x[i], x[i]);
  copy(from.d_o, d_o);
  copy(from.d_final, d_final);
}

std::vector<std::string> takers(const GradientSetup& setup, bool with_oracle) {
  const GradientCall call(setup);
  std::vector<std::string> names;
  for (const std::string& impl : runnable(Op::backward)) {
    if (impl == "reference" && !with_oracle) continue;
    Options options = call.options;
    options.impl = impl;
    try {
      backward_workspace_bytes(options, {.forward = call.inputs()});
      names.push_back(impl);
    } catch (const Error& refused) {
      EXPECT_EQ(refused.kind(), ErrorKind::unsupported) << refused.what();
    }
  }
  EXPECT_FALSE(names.empty());
  return names;
}

std::vector<std::vector<uint8_t>> all_gradients(const GradientCall& call) {
  std::vector<std::vector<uint8_t>> bytes;
  for (const Buffer& gradient : call.dx) {
    bytes.push_back(gradient ? gradient.all_bytes() : std::vector<uint8_t>());
  }
  return bytes;
}

std::vector<int64_t> offsets(const Buffer& b) {
  const TensorView view = b.view();
  std::vector<int64_t> all;
  if (!b || view.numel() == 0) return all;
  all.push_back(0);
  for (int32_t d = 0; d < view.rank; ++d) {
    std::vector<int64_t> finer;
    finer.reserve(all.size() * static_cast<size_t>(view.shape[d]));
    for (int64_t at : all) {
      for (int64_t i = 0; i < view.shape[d]; ++i) finer.push_back(at + i * view.strides[d]);
    }
    all = std::move(finer);
  }
  return all;
}

std::vector<double> values(const Buffer& b) {
  std::vector<double> all;
  for (int64_t at : offsets(b)) all.push_back(b.get(at));
  return all;
}

std::vector<int64_t> token_offsets(const GradientCall& call, const Buffer& b, int64_t n,
                                   int64_t from) {
  const TensorView view = b.view();
  std::vector<int64_t> all;
  const int64_t batch = call.setup.dense ? n : 0, begin = call.begin(n);
  for (int64_t t = from; t < call.setup.sequences[static_cast<size_t>(n)].tokens; ++t) {
    for (int64_t h = 0; h < view.shape[2]; ++h) {
      for (int64_t d = 0; d < (view.rank == 4 ? view.shape[3] : 1); ++d) {
        all.push_back(b.at({batch, begin + t, h}) + d);
      }
    }
  }
  return all;
}

std::vector<uint8_t> bytes_at(const Buffer& b, const std::vector<int64_t>& at) {
  const size_t size = element_bytes(b.dtype());
  std::vector<uint8_t> bytes(at.size() * size);
  for (size_t i = 0; i < at.size(); ++i) {
    std::memcpy(bytes.data() + i * size, b.data() + at[i] * static_cast<int64_t>(size), size);
  }
  return bytes;
}

double difference_error(Buffer& x, const Buffer& gradient, const std::function<double()>& loss,
                        double step) {
  const auto at = offsets(x), to = offsets(gradient);
  double worst = 0, largest = 0;
  for (size_t i = 0; i < at.size(); ++i) {
    const double value = x.get(at[i]), d = gradient.get(to[i]);
    double difference = 0;
    if (!std::isnan(value)) {
      x.set(at[i], value + step);
      const double above = loss();
      x.set(at[i], value - step);
      difference = (above - loss()) / (2 * step);
      x.set(at[i], value);
    }
    if (!std::isfinite(d - difference)) return INFINITY;
    largest = std::max(largest, std::fabs(d));
    worst = std::max(worst, std::fabs(d - difference));
  }
  return worst / std::max(largest, 1e-3);
}

double error(const Buffer& x, const Buffer& ref) {
  const auto a = values(x), b = values(ref);
  double difference = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    scale += b[i] * b[i];
  }
  const double count = std::max<double>(1, static_cast<double>(a.size()));
  difference = std::sqrt(difference / count);
  scale = std::sqrt(scale / count);
  return scale < 1e-6 ? difference : difference / scale;
}

}  // namespace deltic::test
