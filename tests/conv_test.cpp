// The causal depthwise convolution: the oracle against the equation and central differences, every
// implementation against the oracle, and what every call promises about bits and memory.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <list>
#include <sstream>

#include "gradients.h"

namespace deltic::test {
namespace {

enum class PoolUse { none, in_place, moved };

struct ConvSetup {
  int64_t D = 5, W = 4;
  int64_t S = 0;  // inputs in a state; 0: no state
  struct Length {
    uint64_t seed;
    int64_t tokens;
  };
  std::vector<Length> sequences{{1, 9}, {2, 0}, {3, 2}, {4, 1}};
  bool dense = false;  // all of the first one's length
  int64_t padding = 2;
  bool silu = true, bias = true, strided = false, in_place = false;
  bool has_initial = true, has_d_out = true, has_d_final = true;
  PoolUse pool = PoolUse::none;
  DType dtype = DType::f64, weight_dtype = DType::f64, state_dtype = DType::f64;
};

std::string name(const ConvSetup& s) {
  std::ostringstream out;
  out << "D=" << s.D << " W=" << s.W << " S=" << s.S << " N=" << s.sequences.size()
      << (s.dense ? " dense" : "") << (s.silu ? " silu" : "") << (s.bias ? " bias" : "")
      << (s.strided ? " strided" : "") << (s.in_place ? " in_place" : "")
      << (s.has_initial ? "" : " no_initial") << (s.has_d_final ? "" : " no_d_final")
      << " pool=" << static_cast<int>(s.pool) << " " << dtype_name(s.dtype) << "/"
      << dtype_name(s.weight_dtype) << "/" << dtype_name(s.state_dtype);
  return out.str();
}

ConvSetup with_dtypes(ConvSetup s, DType rows, DType weight, DType state) {
  s.dtype = rows, s.weight_dtype = weight, s.state_dtype = state;
  return s;
}

enum Stream : uint64_t { kX = 201, kWeight, kBias, kInitialState, kDOut, kDFinal };

void spoil(Buffer& b) {
  for (int64_t at : offsets(b)) {
    const auto size = element_bytes(b.dtype());
    std::memset(b.data() + at * static_cast<int64_t>(size), 0xFF, size);
  }
}

// A call and its gradient with memory of their own. Content follows from (seed, token, channel).
struct Call {
  explicit Call(const ConvSetup& setup) : s(setup) {
    N = static_cast<int64_t>(s.sequences.size());
    if (s.dense) {
      B = N, T = N > 0 ? s.sequences[0].tokens : 0;
    } else {
      cu = Buffer(DType::i64, {N + 1});
      cu.set_index(0, 0);
      for (int64_t n = 0; n < N; ++n) cu.set_index(n + 1, T += length(n));
      T += s.padding;
    }
    x = rows(), out = rows(), d_out = s.has_d_out ? rows() : Buffer(), dx = rows();
    weight = parameter({s.D, s.W}), dweight = parameter({s.D, s.W});
    if (s.bias) bias = parameter({s.D}), dbias = parameter({s.D});
    if (s.S > 0) {
      const bool is_pool = s.pool != PoolUse::none;
      const int64_t slots = is_pool ? 2 * N + 1 : N;
      if (s.has_initial || is_pool) initial = state(slots, s.state_dtype);
      final_state = s.in_place || is_pool ? initial : state(slots, s.state_dtype);
      if (s.has_d_final) d_final = state(N, gradient_dtype());
      if (s.has_initial) d_initial = state(N, gradient_dtype());
      if (is_pool) {
        read = Buffer(DType::i32, {N}), write = Buffer(DType::i64, {N});
        for (int64_t n = 0; n < N; ++n) {
          read.set_index(n, read_slot(n));
          write.set_index(n, write_slot(n));
        }
      }
    }
    fill();
  }

  int64_t length(int64_t n) const {
    return s.sequences[s.dense ? 0 : static_cast<size_t>(n)].tokens;
  }
  uint64_t seed(int64_t n) const { return s.sequences[static_cast<size_t>(n)].seed; }
  int64_t begin(int64_t n) const {
    int64_t first = 0;
    for (int64_t i = 0; i < n && !s.dense; ++i) first += length(i);
    return first;
  }
  int64_t read_slot(int64_t n) const { return s.pool == PoolUse::none ? n : 2 * n; }
  int64_t write_slot(int64_t n) const {
    return s.pool == PoolUse::moved ? 2 * n + 1 : read_slot(n);
  }
  DType gradient_dtype() const { return s.dtype == DType::f64 ? DType::f64 : DType::f32; }
  int64_t row(const Buffer& b, int64_t n, int64_t t, int64_t d) const {
    return s.dense ? b.at({n, t, d}) : b.at({0, begin(n) + t, d});
  }

  void fill() {
    const auto u = [](int64_t i) { return static_cast<uint64_t>(i); };
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t d = 0; d < s.D; ++d) {
        for (int64_t t = 0; t < length(n); ++t) {
          x.set(row(x, n, t, d), normal(seed(n), kX, u(t), u(d)));
          if (d_out) d_out.set(row(d_out, n, t, d), normal(seed(n), kDOut, u(t), u(d)));
        }
        for (int64_t i = 0; i < s.S; ++i) {
          if (initial)
            initial.set(initial.at({read_slot(n), d, i}),
                        normal(seed(n), kInitialState, u(i), u(d)));
          if (d_final) d_final.set(d_final.at({n, d, i}), normal(seed(n), kDFinal, u(i), u(d)));
        }
      }
    }
    for (int64_t d = 0; d < s.D; ++d) {
      for (int64_t j = 0; j < s.W; ++j)
        weight.set(weight.at({d, j}), normal(7, kWeight, u(j), u(d)));
      if (bias) bias.set(bias.at({d}), normal(7, kBias, u(d)));
    }
  }

  ConvTensors inputs() const {
    ConvTensors t{
        .x = x.view(), .weight = weight.view(), .bias = bias.view(), .cu_seqlens = cu.view()};
    if (s.pool == PoolUse::none) t.initial_state = initial.view();
    return t;
  }
  Options options(const std::string& impl, int32_t threads = 1) const {
    return {.num_threads = threads,
            .impl = impl,
            .activation = s.silu ? Activation::silu : Activation::none};
  }

  // Outputs and workspace are NaN first; nothing but outputs may change.
  void forward(const std::string& impl, int32_t threads = 1) {
    ConvTensors t = inputs();
    t.out = out.view();
    if (s.pool != PoolUse::none) {
      t.state_pool = initial.view(), t.read_index = read.view(), t.write_index = write.view();
    } else {
      t.final_state = final_state.view();
    }
    spoil(out);
    if (!s.in_place && s.pool == PoolUse::none) spoil(final_state);
    const std::vector<const Buffer*> fixed{&x, &weight, &bias, &cu, &read, &write};
    const auto before = bytes(fixed);
    run_guarded({Op::conv, t}, options(impl, threads));
    EXPECT_TRUE(bytes(fixed) == before) << "an input was written";
    EXPECT_TRUE(out.sentinels_intact() && (!final_state || final_state.sentinels_intact()));
    for (int64_t t0 = begin(N); !s.dense && t0 < T; ++t0) {
      for (int64_t d = 0; d < s.D; ++d) EXPECT_EQ(out.get(out.at({0, t0, d})), 0) << "padding";
    }
  }
  void backward(const std::string& impl, int32_t threads = 1) {
    const ConvBackwardTensors t{.forward = inputs(),
                                .d_out = d_out.view(),
                                .d_final_state = d_final.view(),
                                .dx = dx.view(),
                                .dweight = dweight.view(),
                                .dbias = dbias.view(),
                                .d_initial_state = d_initial.view()};
    for (Buffer* b : {&dx, &dweight, &dbias, &d_initial}) spoil(*b);
    const std::vector<const Buffer*> fixed{&x, &weight, &bias, &cu, &initial, &d_out, &d_final};
    const auto before = bytes(fixed);
    run_guarded({Op::conv, t}, options(impl, threads));
    EXPECT_TRUE(bytes(fixed) == before) << "an input was written";
    for (const Buffer* b : {&dx, &dweight, &dbias, &d_initial})
      EXPECT_TRUE(!*b || b->sentinels_intact());
    for (int64_t t0 = begin(N); !s.dense && t0 < T; ++t0) {
      for (int64_t d = 0; d < s.D; ++d) EXPECT_EQ(dx.get(dx.at({0, t0, d})), 0) << "padding";
    }
  }
  // What backward differentiates.
  double loss() {
    forward("reference");
    double sum = 0;
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t d = 0; d < s.D; ++d) {
        for (int64_t t = 0; t < length(n) && d_out; ++t)
          sum += out.get(row(out, n, t, d)) * d_out.get(row(d_out, n, t, d));
        for (int64_t i = 0; i < s.S && d_final; ++i)
          sum += final_state.get(final_state.at({n, d, i})) * d_final.get(d_final.at({n, d, i}));
      }
    }
    return sum;
  }
  void copy_inputs(const Call& from) {
    const auto copy = [](const Buffer& in, Buffer& to) {
      const auto a = offsets(in), b = offsets(to);
      for (size_t i = 0; i < a.size(); ++i) to.set(b[i], in.get(a[i]));
    };
    copy(from.x, x), copy(from.weight, weight), copy(from.bias, bias), copy(from.initial, initial);
    copy(from.d_out, d_out), copy(from.d_final, d_final);
  }

  // The bytes of a sequence's outputs, gradients and states: what neighbours may not change.
  std::vector<uint8_t> bytes_of(int64_t n, bool gradients) const {
    std::vector<uint8_t> all;
    const auto add = [&](const Buffer& b, int64_t at) {
      const auto size = static_cast<int64_t>(element_bytes(b.dtype()));
      all.insert(all.end(), b.data() + at * size, b.data() + (at + 1) * size);
    };
    const Buffer& rows_of = gradients ? dx : out;
    const Buffer& states = gradients ? d_initial : final_state;
    for (int64_t d = 0; d < s.D; ++d) {
      for (int64_t t = 0; t < length(n); ++t) add(rows_of, row(rows_of, n, t, d));
      for (int64_t i = 0; i < s.S && states; ++i)
        add(states, states.at({gradients ? n : write_slot(n), d, i}));
    }
    return all;
  }
  std::vector<std::vector<uint8_t>> results() const {
    return bytes({&out, &final_state, &dx, &dweight, &dbias, &d_initial});
  }

  ConvSetup s;
  int64_t N = 0, B = 1, T = 0;
  Buffer x{}, weight{}, bias{}, cu{}, initial{}, final_state{}, out{}, read{}, write{};
  Buffer d_out{}, d_final{}, dx{}, dweight{}, dbias{}, d_initial{};

 private:
  Buffer rows() const {
    if (!s.strided) return Buffer(s.dtype, {B, T, s.D});
    return Buffer(s.dtype, {B, T, s.D}, {T * (s.D + 3) + 5, s.D + 3, 1});
  }
  Buffer parameter(std::vector<int64_t> shape) const {
    if (!s.strided) return Buffer(s.weight_dtype, shape);
    return Buffer(
        s.weight_dtype, shape,
        shape.size() == 2 ? std::vector<int64_t>{2, 2 * s.D + 1} : std::vector<int64_t>{3});
  }
  // Strided: channels side by side.
  Buffer state(int64_t slots, DType type) const {
    if (!s.strided) return Buffer(type, {slots, s.D, s.S});
    return Buffer(type, {slots, s.D, s.S}, {s.S * (s.D + 1) + 3, 1, s.D + 1});
  }
  static std::vector<std::vector<uint8_t>> bytes(const std::vector<const Buffer*>& buffers) {
    std::vector<std::vector<uint8_t>> all;
    for (const Buffer* b : buffers) all.push_back(*b ? b->all_bytes() : std::vector<uint8_t>{});
    return all;
  }
};

std::vector<std::string> fast_ones() {
  std::vector<std::string> names = runnable(Op::conv);
  std::erase(names, "reference");
  return names;
}

// ---- The oracle -------------------------------------------------------------------------------

std::vector<ConvSetup> small_setups() {
  std::vector<ConvSetup> all;
  for (int64_t W : {1, 2, 3, 4, 8}) {
    for (bool silu : {false, true}) {
      all.push_back({.W = W, .S = std::max<int64_t>(1, W - 1), .silu = silu});
    }
  }
  all.push_back({.S = 6});
  all.push_back({.S = 4, .strided = true});
  all.push_back({.S = 0, .bias = false});
  all.push_back({.S = 3, .has_initial = false});
  all.push_back({.S = 5, .sequences = {{1, 4}, {2, 4}, {3, 4}}, .dense = true, .bias = false});
  all.push_back({.S = 3, .has_d_out = false});
  all.push_back({.S = 4, .has_d_final = false});
  return all;
}

TEST(ConvOracle, IsTheEquation) {
  for (const ConvSetup& s : small_setups()) {
    Call call(s);
    call.forward("reference");
    for (int64_t n = 0; n < call.N; ++n) {
      for (int64_t d = 0; d < s.D; ++d) {
        std::vector<double> line;  // the state's inputs, then the sequence's
        for (int64_t i = 0; i < 8; ++i) {
          const int64_t kept = s.S - 8 + i;
          line.push_back(call.initial && kept >= 0 ? call.initial.get(call.initial.at({n, d, kept}))
                                                   : 0.0);
        }
        for (int64_t t = 0; t < call.length(n); ++t) {
          line.push_back(call.x.get(call.row(call.x, n, t, d)));
          double sum = call.bias ? call.bias.get(call.bias.at({d})) : 0;
          for (int64_t j = 0; j < s.W; ++j) {
            sum += call.weight.get(call.weight.at({d, j})) *
                   line[line.size() - static_cast<size_t>(s.W - j)];
          }
          const double want = s.silu ? sum / (1 + std::exp(-sum)) : sum;
          EXPECT_NEAR(call.out.get(call.row(call.out, n, t, d)), want, 1e-14) << name(s);
        }
        for (int64_t i = 0; i < s.S; ++i) {
          EXPECT_EQ(call.final_state.get(call.final_state.at({n, d, i})),
                    line[line.size() - static_cast<size_t>(s.S - i)])
              << name(s) << " " << n << " " << i;
        }
      }
    }
  }
}

TEST(ConvOracle, GradientsAreDifferences) {
  for (const ConvSetup& s : small_setups()) {
    Call call(s);
    call.backward("reference");
    const auto loss = [&] { return call.loss(); };
    const std::vector<std::pair<Buffer*, Buffer*>> pairs{{&call.x, &call.dx},
                                                         {&call.weight, &call.dweight},
                                                         {&call.bias, &call.dbias},
                                                         {&call.initial, &call.d_initial}};
    for (const auto& [of, gradient] : pairs) {
      if (!*of) continue;
      const Buffer kept = *gradient;
      EXPECT_LT(difference_error(*of, kept, loss), 1e-8) << name(s);
    }
  }
}

// ---- Every implementation against the oracle ----------------------------------------------------

// rms relative to the oracle on the same inputs: the rounding of the outputs and a few of fp32.
double budget(DType type) {
  return type == DType::f32 ? 4e-7 : type == DType::bf16 ? 2.5e-3 : 3e-4;
}

// Sums of many terms of size 1 and either sign: what cancels does not make the error smaller.
double sum_error(const Call& call, const Buffer& x, const Buffer& ref) {
  double square = 0;
  for (double number : values(ref)) square += number * number;
  const double rms = std::sqrt(square / std::max<double>(1, double(values(ref).size())));
  const double size = std::max(rms, std::sqrt(double(call.B * call.T)));
  return error(x, ref) * (rms < 1e-6 ? 1 : rms) / size;
}

void expect_agreement(const ConvSetup& s) {
  Call oracle(with_dtypes(s, DType::f64, DType::f64, DType::f64));
  for (const std::string& impl : fast_ones()) {
    SCOPED_TRACE(impl + " " + name(s));
    Call call(s);
    oracle.copy_inputs(call);
    call.backward(impl), oracle.backward("reference");
    EXPECT_LT(error(call.dx, oracle.dx), 2 * budget(s.dtype));
    EXPECT_LT(sum_error(call, call.dweight, oracle.dweight), 2 * budget(s.weight_dtype));
    EXPECT_LT(sum_error(call, call.dbias, oracle.dbias), 2 * budget(s.weight_dtype));
    EXPECT_LT(error(call.d_initial, oracle.d_initial), 2 * budget(DType::f32));
    call.forward(impl), oracle.forward("reference");
    if (s.pool == PoolUse::none) {
      EXPECT_LT(error(call.out, oracle.out), budget(s.dtype));
      // States are inputs handed on: exact.
      EXPECT_EQ(values(call.final_state), values(oracle.final_state));
    } else {
      for (int64_t n = 0; n < call.N; ++n) {
        for (int64_t d = 0; d < s.D; ++d) {
          for (int64_t i = 0; i < s.S; ++i) {
            const auto at = call.initial.at({call.write_slot(n), d, i});
            EXPECT_EQ(call.initial.get(at),
                      oracle.initial.get(oracle.initial.at({oracle.write_slot(n), d, i})));
          }
        }
      }
    }
  }
}

TEST(Conv, AgreesWithTheOracle) {
  const std::vector<ConvSetup::Length> lengths{{1, 0}, {2, 300}, {3, 1}, {4, 2}, {5, 250}, {6, 9}};
  for (DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (int64_t D : {1, 40, 133}) {
      expect_agreement(with_dtypes({.D = D, .S = 3, .sequences = lengths}, type, type, type));
      expect_agreement(with_dtypes({.D = D, .S = 4, .sequences = lengths, .strided = true}, type,
                                   DType::f32, DType::f32));
    }
    expect_agreement(
        with_dtypes({.D = 64, .S = 4, .sequences = {{1, 270}, {2, 270}}, .dense = true}, type,
                    DType::bf16, DType::f32));
    expect_agreement(
        with_dtypes({.D = 70, .S = 4, .sequences = lengths, .silu = false}, type, type, type));
    expect_agreement(with_dtypes({.D = 33, .sequences = lengths, .bias = false}, type, type, type));
    expect_agreement(
        with_dtypes({.D = 33, .S = 7, .sequences = lengths, .has_d_out = false}, type, type, type));
    for (int64_t W : {1, 2, 3, 5, 6, 7, 8}) {
      expect_agreement(
          with_dtypes({.D = 40, .W = W, .S = 8, .sequences = lengths}, type, type, type));
    }
    // Across a border of tasks, at any power of 2 from 32 on, sequences that leave one, two or
    // three places of their windows to the initial state.
    std::vector<ConvSetup::Length> across;
    for (int64_t left = 1; left <= 3; ++left) {
      for (int64_t border = 32; border <= 1024; border *= 2) {
        const int64_t at = border + 4096 * (left - 1);
        int64_t before = 0;
        for (const ConvSetup::Length& l : across) before += l.tokens;
        across.push_back({1, at - before - 1});
        across.push_back({2, 5 - left});
      }
    }
    expect_agreement(with_dtypes({.D = 9, .S = 5, .sequences = across}, type, type, type));
  }
}

TEST(Conv, SiluOfLargeNumbers) {
  for (const std::string& impl : runnable(Op::conv)) {
    ConvSetup s = with_dtypes({.D = 20, .W = 1, .sequences = {{1, 1}}, .bias = false}, DType::f32,
                              DType::f32, DType::f32);
    Call call(s);
    const double big[] = {-1e30, -200, -88, -87, -30, -1e-30, 0, 1e-30, 30, 87, 88, 200, 1e30};
    for (int64_t d = 0; d < 20; ++d) {
      call.weight.set(d, 1);
      call.x.set(d, d < 13 ? big[d] : 1.0);
      call.d_out.set(d, 1);
    }
    call.forward(impl), call.backward(impl);
    for (int64_t d = 0; d < 13; ++d) {
      const double e = std::exp(-std::abs(big[d])),
                   sigmoid = big[d] < 0 ? e / (1 + e) : 1 / (1 + e);
      // exp's argument is rounded once: its size is the relative error, in units of fp32's.
      const double relative = 3e-7 + 6e-8 * std::min(100.0, std::abs(big[d]));
      EXPECT_NEAR(call.out.get(d), big[d] * sigmoid, relative * std::abs(big[d] * sigmoid) + 2e-36)
          << impl << " " << big[d];
      EXPECT_NEAR(call.dx.get(d), sigmoid * (1 + big[d] * (1 - sigmoid)), 3e-7) << impl << big[d];
    }
  }
}

TEST(Conv, NanStaysInItsChannelAndWindow) {
  for (const std::string& impl : fast_ones()) {
    Call call(with_dtypes({.D = 40, .sequences = {{1, 20}, {2, 20}}}, DType::f32, DType::f32,
                          DType::f32));
    call.x.set(call.row(call.x, 0, 18, 7), std::nan(""));
    call.forward(impl);
    for (int64_t n = 0; n < 2; ++n) {
      for (int64_t t = 0; t < 20; ++t) {
        for (int64_t d = 0; d < 40; ++d) {
          EXPECT_EQ(std::isnan(call.out.get(call.row(call.out, n, t, d))),
                    n == 0 && t >= 18 && d == 7);
        }
      }
    }
  }
}

// ---- Bits ---------------------------------------------------------------------------------------

const std::vector<ConvSetup::Length> kPack{{1, 700}, {2, 0}, {3, 1}, {4, 3}, {5, 513}, {6, 40}};

TEST(Conv, ThreadsChangeNoBit) {
  for (const std::string& impl : fast_ones()) {
    for (DType type : {DType::f32, DType::bf16}) {
      for (bool in_place : {false, true}) {
        const ConvSetup s = with_dtypes(
            {.D = 600, .S = 4, .sequences = kPack, .in_place = in_place}, type, type, type);
        Call one(s);
        one.backward(impl, 1), one.forward(impl, 1);
        for (int32_t threads : {2, 3, 7}) {
          Call many(s);
          many.backward(impl, threads), many.forward(impl, threads);
          EXPECT_TRUE(one.results() == many.results()) << impl << " " << threads << name(s);
        }
      }
    }
  }
}

TEST(Conv, NeighboursChangeNoBit) {
  for (const std::string& impl : fast_ones()) {
    for (DType type : {DType::f32, DType::bf16}) {
      const ConvSetup s = with_dtypes({.D = 150, .S = 4, .sequences = kPack}, type, type, type);
      Call pack(s);
      pack.forward(impl), pack.backward(impl);
      for (int64_t n = 0; n < pack.N; ++n) {
        for (bool dense : {false, true}) {
          ConvSetup alone = s;
          alone.sequences = {kPack[static_cast<size_t>(n)]}, alone.dense = dense, alone.padding = 0;
          Call single(alone);
          single.forward(impl), single.backward(impl);
          EXPECT_TRUE(single.bytes_of(0, false) == pack.bytes_of(n, false)) << impl << n;
          EXPECT_TRUE(single.bytes_of(0, true) == pack.bytes_of(n, true)) << impl << n;
        }
      }
    }
  }
}

// Large outputs that begin with a line take another way to memory than others: the same bits, and
// nothing beside them.
TEST(Conv, WaysToMemoryChangeNoBit) {
  constexpr int64_t T = 520, D = 8195, kRow = 8208;
  for (const std::string& impl : fast_ones()) {
    if (impl == "cpu.plain") continue;  // has one way
    Call call(with_dtypes({.D = D, .sequences = {{1, T}}, .padding = 0}, DType::f32, DType::f32,
                          DType::f32));
    call.forward(impl), call.backward(impl);  // rows of 8195 begin anywhere
    const Scratch memory(2 * T * kRow * sizeof(float));
    auto* out = static_cast<float*>(memory.c().data);
    float* dx = out + T * kRow;
    const auto aligned = [](float* data) {
      return TensorView(data, {1, T, D}).with_strides({T * kRow, kRow, 1});
    };
    ConvTensors t = call.inputs();
    conv_backward(call.options(impl, 2),
                  {.forward = t, .d_out = call.d_out.view(), .dx = aligned(dx)});
    t.out = aligned(out);
    conv(call.options(impl, 2), t);
    for (int64_t row = 0; row < T; ++row) {
      ASSERT_EQ(0, std::memcmp(out + row * kRow, call.out.data() + row * D * 4, D * 4)) << impl;
      ASSERT_EQ(0, std::memcmp(dx + row * kRow, call.dx.data() + row * D * 4, D * 4)) << impl;
      for (int64_t c = D; c < kRow; ++c) {
        ASSERT_TRUE(std::isnan(out[row * kRow + c]) && std::isnan(dx[row * kRow + c]));
      }
    }
    EXPECT_TRUE(memory.sentinels_intact());
  }
}

TEST(Conv, LaterTokensChangeNoBit) {
  for (const std::string& impl : fast_ones()) {
    ConvSetup s =
        with_dtypes({.D = 50, .S = 3, .sequences = {{1, 300}}}, DType::f32, DType::f32, DType::f32);
    Call whole(s);
    whole.forward(impl);
    for (int64_t cut : {1, 2, 255, 256, 257, 299}) {
      s.sequences = {{1, cut}};
      Call part(s);
      part.forward(impl);
      for (int64_t t = 0; t < cut; ++t) {
        for (int64_t d = 0; d < 50; ++d) {
          EXPECT_EQ(part.out.get(part.out.at({0, t, d})), whole.out.get(whole.out.at({0, t, d})));
        }
      }
    }
  }
}

// A sequence in calls of a few tokens, the state in place, is the sequence in one call, to the bit.
TEST(Conv, PartsAreTheWhole) {
  for (const std::string& impl : fast_ones()) {
    for (int64_t S : {3, 4, 6}) {
      const ConvSetup s = with_dtypes({.D = 90, .S = S, .sequences = {{1, 300}}, .dense = true},
                                      DType::bf16, DType::bf16, DType::f32);
      Call whole(s);
      Buffer state(DType::f32, {1, 90, S});
      for (int64_t at : offsets(state)) state.set(at, whole.initial.get(at));
      Buffer out(DType::bf16, {1, 300, 90});
      const int64_t cuts[] = {0, 1, 2, 7, 7, 100, 299, 300};
      for (size_t i = 0; i + 1 < std::size(cuts); ++i) {
        const int64_t first = cuts[i], tokens = cuts[i + 1] - first;
        const auto rows = [&](const Buffer& b) {
          TensorView view = b.view();
          view.shape[1] = tokens;
          view.data = b.data() + first * 90 * 2;
          return view;
        };
        conv(whole.options(impl), {.x = rows(whole.x),
                                   .weight = whole.weight.view(),
                                   .bias = whole.bias.view(),
                                   .initial_state = state.view(),
                                   .final_state = state.view(),
                                   .out = rows(out)});
      }
      whole.forward(impl);
      EXPECT_EQ(values(out), values(whole.out)) << impl;
      EXPECT_EQ(values(state), values(whole.final_state)) << impl;
    }
  }
}

TEST(Conv, PoolsAreStates) {
  for (const std::string& impl : runnable(Op::conv)) {
    for (bool strided : {false, true}) {
      ConvSetup s = with_dtypes({.D = 70, .S = 4, .sequences = kPack, .strided = strided},
                                DType::f32, DType::f32, DType::f32);
      Call plain(s);
      plain.forward(impl);
      for (PoolUse use : {PoolUse::in_place, PoolUse::moved}) {
        s.pool = use;
        Call pool(s);
        pool.forward(impl, 2);
        for (int64_t n = 0; n < pool.N; ++n) {
          EXPECT_TRUE(pool.bytes_of(n, false) == plain.bytes_of(n, false)) << impl << " " << n;
          for (int64_t d = 0; d < 70 && use == PoolUse::moved; ++d) {
            for (int64_t i = 0; i < 4; ++i) {
              EXPECT_EQ(pool.initial.get(pool.initial.at({2 * n, d, i})),
                        plain.initial.get(plain.initial.at({n, d, i})))
                  << "a slot that was only read";
            }
          }
        }
      }
    }
  }
}

TEST(Conv, NegativeSlotsStartFromZeroOrAreSkipped) {
  for (const std::string& impl : runnable(Op::conv)) {
    Call call(with_dtypes({.D = 20, .S = 3, .sequences = {{1, 2}, {2, 2}, {3, 2}}, .dense = true},
                          DType::f32, DType::f32, DType::f32));
    Buffer read(DType::i64, {3}), write(DType::i32, {3});
    const int64_t from[] = {-1, -1, 2}, to[] = {0, -1, -1};
    for (int64_t n = 0; n < 3; ++n) read.set_index(n, from[n]), write.set_index(n, to[n]);
    const std::vector<double> before = values(call.initial);
    ConvTensors t = call.inputs();
    t.initial_state = {}, t.state_pool = call.initial.view(), t.out = call.out.view();
    t.read_index = read.view(), t.write_index = write.view();
    conv(call.options(impl), t);
    for (int64_t d = 0; d < 20; ++d) {
      EXPECT_EQ(call.initial.get(call.initial.at({0, d, 0})), 0);
      EXPECT_EQ(call.initial.get(call.initial.at({0, d, 2})), call.x.get(call.x.at({0, 1, d})));
      EXPECT_EQ(call.out.get(call.out.at({1, 0, d})), 0);
      EXPECT_NE(call.out.get(call.out.at({2, 0, d})), 0);
      for (int64_t i = 20 * 3 + d * 3; i < 20 * 3 + d * 3 + 3; ++i)
        EXPECT_EQ(call.initial.get(i), before[static_cast<size_t>(i)]);
    }
  }
}

TEST(Conv, NothingToDo) {
  for (const std::string& impl : runnable(Op::conv)) {
    for (const ConvSetup& s :
         {ConvSetup{.S = 3, .sequences = {}, .padding = 0}, ConvSetup{.S = 3, .sequences = {}},
          ConvSetup{.S = 3, .sequences = {{1, 0}, {2, 0}}, .dense = true}}) {
      Call call(with_dtypes(s, DType::f32, DType::f32, DType::f32));
      call.forward(impl), call.backward(impl);
      for (double x : values(call.dweight)) EXPECT_EQ(x, 0);
      if (call.N > 0) {
        EXPECT_EQ(values(call.final_state), values(call.initial));
        EXPECT_EQ(values(call.d_initial), values(call.d_final));
      }
    }
  }
}

// ---- Errors -------------------------------------------------------------------------------------

// A sound call: B = 1, T = 8, D = 6, W = 4, S = 3, fp32.
struct World {
  Call call{with_dtypes({.D = 6, .S = 3, .sequences = {{1, 8}}, .dense = true}, DType::f32,
                        DType::f32, DType::f32)};
  deltic_options options = call.options("").c();
  deltic_conv_tensors t = [this] {
    ConvTensors all = call.inputs();
    all.final_state = call.final_state.view(), all.out = call.out.view();
    return all.c();
  }();
  deltic_conv_tensors inputs;  // b.forward points here
  deltic_conv_backward_tensors b = [this] {
    return ConvBackwardTensors{.forward = call.inputs(),
                               .d_out = call.d_out.view(),
                               .d_final_state = call.d_final.view(),
                               .dx = call.dx.view(),
                               .dweight = call.dweight.view(),
                               .dbias = call.dbias.view(),
                               .d_initial_state = call.d_initial.view()}
        .c(inputs);
  }();
  std::list<Buffer> more{};
  alignas(64) uint8_t scratch[1 << 17] = {};
  deltic_workspace workspace{scratch, sizeof scratch};

  deltic_tensor list(std::vector<int64_t> numbers) {
    Buffer& b_ = more.emplace_back(DType::i64, std::vector<int64_t>{int64_t(numbers.size())});
    for (size_t i = 0; i < numbers.size(); ++i) b_.set_index(static_cast<int64_t>(i), numbers[i]);
    return b_.view();
  }
  void pool(std::vector<int64_t> read) {
    t.state_pool = t.final_state, t.read_index = list(std::move(read));
    t.initial_state = t.final_state = {};
  }
};

void reshape(deltic_tensor& t, std::initializer_list<int64_t> shape) {
  t = TensorView(t.data, static_cast<DType>(t.dtype), shape);
}

struct Wrong {
  bool backward;
  std::function<void(World&)> spoil;
  std::string text;  // behind `conv: `
  deltic_status status = DELTIC_INVALID_ARGUMENT;
};

TEST(ConvErrors, NameArgumentExpectedAndGot) {
  constexpr bool F = false, Back = true;
  const Wrong all[] = {
      {F, [](World& w) { w.t.x = {}; }, "x: expected a tensor, got none"},
      {F, [](World& w) { w.t.weight = {}; }, "weight: expected a tensor, got none"},
      {F, [](World& w) { w.t.out = {}; }, "out: expected a tensor, got none"},
      {F,
       [](World& w) {
         reshape(w.t.x, {8, 6});
       },
       "x: expected shape [B,T,D], got [8, 6]"},
      {F, [](World& w) { w.t.x.strides[2] = 2; },
       "x: expected stride 1 in the last dimension, got 2"},
      {F, [](World& w) { w.t.x.dtype = DELTIC_I32; }, "x: expected fp32, bf16 or fp16, got int32"},
      {F,
       [](World& w) {
         reshape(w.t.weight, {6, 1, 4});
       },
       "weight: expected shape [D,W], got [6, 1, 4]"},
      {F,
       [](World& w) {
         reshape(w.t.weight, {2, 9});
       },
       "weight: expected 1 to 8 taps W, got 9"},
      {F,
       [](World& w) {
         reshape(w.t.weight, {5, 4});
       },
       "weight: expected shape [6, 4], got [5, 4]"},
      {F, [](World& w) { reshape(w.t.bias, {5}); }, "bias: expected shape [6], got [5]"},
      {F,
       [](World& w) {
         reshape(w.t.initial_state, {1, 6, 2});
       },
       "initial_state: expected at least W - 1 = 3 inputs S per channel (and 1), got 2"},
      {F,
       [](World& w) {
         reshape(w.t.initial_state, {2, 6, 3});
       },
       "initial_state: expected shape [1, 6, 3], got [2, 6, 3]"},
      {F,
       [](World& w) {
         reshape(w.t.final_state, {1, 6, 4});
       },
       "final_state: expected shape [1, 6, 3], got [1, 6, 4]"},
      {F, [](World& w) { w.t.initial_state.dtype = DELTIC_BF16; },
       "initial_state: expected fp32 as x, or fp32, got bf16"},
      {F, [](World& w) { w.t.out.dtype = DELTIC_BF16; }, "out: expected fp32 as x, got bf16"},
      {F, [](World& w) { w.t.out = w.t.x; },
       "out: expected memory of its own, got an overlap with x"},
      {F,
       [](World& w) {
         w.t.final_state.data = w.t.initial_state.data;
         w.t.final_state.strides[1] = 1, w.t.final_state.strides[2] = 6;
       },
       "final_state: expected memory of its own, got an overlap with initial_state"},
      {F,
       [](World& w) {
         w.t.cu_seqlens = w.list({0, 9});
       },
       "cu_seqlens: expected a last offset of at most T = 8, got 9"},
      {F, [](World& w) { w.t.read_index = w.list({0}); },
       "read_index: expected none without a state pool, got a tensor"},
      {F, [](World& w) { w.pool({1}); }, "read_index: expected slots of -1 to 0, got 1 at 0"},
      {F,
       [](World& w) {
         w.pool({0, 0});
       },
       "read_index: expected shape [1], got [2]"},
      {F, [](World& w) { w.t.state_pool = w.t.final_state; },
       "initial_state: expected none with a state pool, got a tensor"},
      {F, [](World& w) { w.options.activation = 2; },
       "activation: expected none (0) or silu (1), got 2"},
      {F, [](World& w) { w.options.activation = 3; },
       "activation: expected none (0), silu (1) or sigmoid (2), got 3"},
      {F, [](World& w) { w.options.qk_l2norm = 1; },
       "qk_l2norm: expected the default (the delta rule's options are not conv's), got another"},
      {F, [](World& w) { w.options.impl = "cpu.none"; },
       "impl: expected one of " +
           [] {
             std::string names;
             for (const auto& i : implementations(Op::conv))
               names += (names.empty() ? "" : ", ") + i.name;
             return names;
           }() +
           ", got cpu.none"},
      {F,
       [](World& w) {
         w.options.checked = 1;
         w.call.x.set(w.call.x.at({0, 3, 2}), std::nan(""));
       },
       "x: expected finite values, got nan at sequence 0, token 3, head 0"},
      {F,
       [](World& w) {
         w.options.checked = 1;
         w.call.weight.set(9, std::nan(""));
       },
       "weight: expected finite values, got nan at channel 2"},
      {F, [](World& w) { w.workspace.bytes = 64; }, ""},
      {Back, [](World& w) { w.inputs.out = w.call.out.view(); },
       "out: expected none in a gradient's call, got a tensor"},
      {Back, [](World& w) { w.inputs.state_pool = w.call.final_state.view(); },
       "state_pool: expected none in a gradient's call: pools are not differentiable, got a "
       "tensor"},
      {Back, [](World& w) { w.b.d_out.dtype = DELTIC_BF16; },
       "d_out: expected fp32 as x, got bf16"},
      {Back,
       [](World& w) {
         reshape(w.b.d_out, {1, 7, 6});
       },
       "d_out: expected shape [1, 8, 6], got [1, 7, 6]"},
      {Back,
       [](World& w) {
         reshape(w.b.dweight, {4, 6});
       },
       "dweight: expected shape [6, 4] as weight, got [4, 6]"},
      {Back, [](World& w) { w.inputs.bias = {}; },
       "dbias: expected none without bias, got a tensor"},
      {Back, [](World& w) { w.inputs.initial_state = {}; },
       "d_initial_state: expected none without initial_state, got a tensor"},
      {Back, [](World& w) { w.b.dx = w.b.d_out; },
       "dx: expected memory of its own, got an overlap with d_out"},
  };
  for (const Wrong& wrong : all) {
    const auto w = std::make_unique<World>();
    const auto call = [&] {
      return wrong.backward ? deltic_conv_backward(&w->options, &w->b, &w->workspace, nullptr)
                            : deltic_conv(&w->options, &w->t, &w->workspace, nullptr);
    };
    ASSERT_EQ(call(), DELTIC_OK) << deltic_last_error();
    wrong.spoil(*w);
    const auto before = w->call.results();
    EXPECT_EQ(call(), wrong.status) << wrong.text;
    if (wrong.text.empty()) {
      EXPECT_NE(std::string(deltic_last_error()).find("conv: workspace: expected at least "),
                std::string::npos);
    } else {
      EXPECT_EQ(std::string(deltic_last_error()), "conv: " + wrong.text);
    }
    EXPECT_TRUE(w->call.results() == before) << "a failed call wrote: " << wrong.text;
  }
}

TEST(ConvErrors, ActivationIsConvsAlone) {
  Buffer x(DType::f32, {1, 2, 1, 4}), out(DType::f32, {1, 2, 1, 4});
  for (int64_t at : offsets(x)) x.set(at, 1);
  try {
    l2norm({.activation = Activation::silu}, {.x = x.view(), .out = out.view()});
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "l2norm: activation: expected none (conv, rmsnorm and step alone have one), got 1");
  }
}

TEST(ConvErrors, CudaIsRefused) {
  World w;
  for (deltic_tensor* t :
       {&w.t.x, &w.t.weight, &w.t.bias, &w.t.initial_state, &w.t.final_state, &w.t.out}) {
    t->device_type = DELTIC_CUDA;
  }
  EXPECT_EQ(deltic_conv(&w.options, &w.t, &w.workspace, nullptr), DELTIC_UNSUPPORTED);
  EXPECT_EQ(std::string(deltic_last_error()).rfind("conv: no implementation takes this call: ", 0),
            0u)
      << deltic_last_error();
}

TEST(Conv, ExplainNamesTheChosen) {
  const World w{};
  std::vector<Choice> choices;
  ASSERT_EQ(deltic_conv_explain(&w.options, &w.t, detail::collect_choice, &choices), DELTIC_OK);
  EXPECT_EQ(choices.size(), implementations(Op::conv).size());
  EXPECT_TRUE(choices[0].chosen);
  choices.clear();
  ASSERT_EQ(deltic_conv_backward_explain(&w.options, &w.b, detail::collect_choice, &choices),
            DELTIC_OK);
  EXPECT_TRUE(choices[0].chosen);
}

}  // namespace
}  // namespace deltic::test
