// Owned tensors, drawn inputs and the batch runner of the tests.
#include "support.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numbers>
#include <sstream>

#include "denormals.h"

namespace deltic::test {
namespace {

// A test that asks for threads gets them, however small its call and however busy the machine.
[[maybe_unused]] const int g_wake = ::setenv("DELTIC_WAKE", "1", 1);

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kBehind = 0;  // the sanitizer watches the end, reads included
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
constexpr size_t kBehind = 0;
#else
constexpr size_t kBehind = 64;
#endif
#else
constexpr size_t kBehind = 64;
#endif
constexpr uint8_t kSentinel = 0xFF;

std::shared_ptr<uint8_t> allocate(size_t bytes) {
  auto* p = static_cast<uint8_t*>(::operator new (bytes > 0 ? bytes : 1, std::align_val_t{64}));
  return {p, [](uint8_t* q) { ::operator delete (q, std::align_val_t{64}); }};
}

float f16_to_f32(uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int mantissa = h & 1023;
  float x;
  if (exponent == 31) {
    x = mantissa == 0 ? std::numeric_limits<float>::infinity()
                      : std::numeric_limits<float>::quiet_NaN();
  } else {
    x = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                      : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  }
  return (h & 0x8000) != 0 ? -x : x;
}

uint16_t f64_to_f16(double x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::fabs(x);
  if (std::isnan(a)) return static_cast<uint16_t>(sign | 0x7E00);
  if (a >= 65520.0) return static_cast<uint16_t>(sign | 0x7C00);
  if (a == 0) return sign;
  const int exponent = std::max(std::ilogb(a), -14);
  // In units of the last place; a carry moves into the exponent field by itself.
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(a, 10 - exponent)));
  return static_cast<uint16_t>(sign | (units + (exponent + 14) * 1024));
}

uint16_t f64_to_bf16(double x) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
  if (std::isnan(x)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

uint64_t hash(uint64_t seed, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  return mix(mix(seed + 0x9E3779B97F4A7C15u * a + 0xD1B54A32D192ED03u * b +
                 0xABC98388FB8FAC03u * c + 0x8CB92BA72F3D8DD7u * d));
}

enum Stream : uint64_t { kQ = 1, kK, kV, kG, kBeta, kGv, kState, kALog, kDtBias, kNoise };

// ---- Content ---------------------------------------------------------------------------------

uint64_t seed_at(const Sequence& s, int64_t t) {
  return t >= s.changed_from ? mix(s.seed) + 77 : s.seed;
}

std::vector<double> key_row(const Layer& layer, const Sequence& s, Stream stream, int64_t t,
                            int64_t h) {
  const uint64_t seed = seed_at(s, t);
  const auto ut = static_cast<uint64_t>(t), uh = static_cast<uint64_t>(h);
  std::vector<double> row(static_cast<size_t>(layer.K));
  double sum = 0;
  for (size_t d = 0; d < row.size(); ++d) {
    const double own = normal(seed, stream, ut, uh, d);
    const double shared = normal(s.seed, kNoise, 0, uh, d);  // one direction for the whole sequence
    switch (layer.keys) {
      case KeyValues::repeated:
        row[d] = stream == kK ? shared : own;
        break;
      case KeyValues::correlated:
        row[d] = shared + 0.2 * own;
        break;
      default:
        row[d] = own;
        break;
    }
    sum += row[d] * row[d];
  }
  const double length = layer.qk_l2norm ? 0.5 : std::sqrt(sum);
  const bool zero = layer.keys == KeyValues::zero_rows && t % 5 == 2;
  for (double& x : row) x = zero ? 0.0 : x / length;
  return row;
}

double factor(double u) { return 0.9 + 0.2 * u; }

double gate_value(const Layer& layer, const Sequence& s, int64_t t, int64_t h, int64_t d) {
  const uint64_t seed = seed_at(s, t);
  const auto ut = static_cast<uint64_t>(t), uh = static_cast<uint64_t>(h),
             ud = static_cast<uint64_t>(d);
  if (layer.gate_form != GateForm::log_decay) return 2 * normal(seed, kG, ut, uh, ud);
  const double u = uniform(seed, kG, ut, uh, ud);
  // Changed tokens jump to the hardest setting: the prefix must not notice.
  const GateValues values = t >= s.changed_from ? GateValues::mixed : layer.gate_values;
  switch (values) {
    case GateValues::zero:
      return 0;
    case GateValues::slow:
      return -0.02 * u;
    case GateValues::random:
      return -2 * u * u;
    case GateValues::deep5:
      return -5 * factor(u);
    case GateValues::deep20:
      return -20 * factor(u);
    case GateValues::deep1000:
      return -1000 * factor(u);
    case GateValues::growing:
      return growing_gate(u, t, d);
    case GateValues::mixed:
      break;
  }
  constexpr double kLevels[] = {0, -5, -20, -1000};
  return kLevels[mix(seed + 9 * ut + 131 * uh + 7919 * ud) % 4] * factor(u);
}

double beta_value(const Layer& layer, const Sequence& s, int64_t t, int64_t h, int64_t c) {
  const uint64_t seed = seed_at(s, t);
  const auto ut = static_cast<uint64_t>(t), uh = static_cast<uint64_t>(h),
             uc = static_cast<uint64_t>(c);
  if (layer.beta_form != BetaForm::value) return 2 * normal(seed, kBeta, ut, uh, uc);
  return layer.beta_value.value_or(uniform(seed, kBeta, ut, uh, uc));
}

// ---- Placement -------------------------------------------------------------------------------

// [B,T,heads,width] or, with width 0, [B,T,heads].
Buffer token_tensor(DType type, int64_t B, int64_t T, int64_t heads, int64_t width, bool strided) {
  if (width == 0) {
    if (!strided) return Buffer(type, {B, T, heads});
    return Buffer(type, {B, T, heads}, {T * (heads + 3) + 5, heads + 3, 1});
  }
  if (!strided) return Buffer(type, {B, T, heads, width});
  const int64_t row = width + 3, head = T * row + 1;
  return Buffer(type, {B, T, heads, width}, {heads * head + 2, row, head, 1});
}

Buffer state_tensor(const Layer& layer, int64_t slots, bool strided) {
  const bool kv = layer.layout == StateLayout::kv;
  const int64_t rows = kv ? layer.K : layer.V, columns = kv ? layer.V : layer.K;
  if (!strided) return Buffer(layer.state_dtype, {slots, layer.HV, rows, columns});
  const int64_t row = columns + 1, head = rows * row + 3;
  return Buffer(layer.state_dtype, {slots, layer.HV, rows, columns},
                {layer.HV * head + 7, head, row, 1});
}

int64_t state_at(const Layer& layer, const Buffer& states, int64_t slot, int64_t h, int64_t d,
                 int64_t c) {
  return layer.layout == StateLayout::kv ? states.at({slot, h, d, c}) : states.at({slot, h, c, d});
}

void put_state(const Layer& layer, const Buffer& states, int64_t slot,
               const std::vector<uint8_t>& bits) {
  const size_t size = element_bytes(layer.state_dtype);
  size_t i = 0;
  for (int64_t h = 0; h < layer.HV; ++h)
    for (int64_t d = 0; d < layer.K; ++d)
      for (int64_t c = 0; c < layer.V; ++c, i += size)
        std::memcpy(states.data() + state_at(layer, states, slot, h, d, c) * int64_t(size),
                    bits.data() + i, size);
}

std::vector<uint8_t> get_state(const Layer& layer, const Buffer& states, int64_t slot) {
  const size_t size = element_bytes(layer.state_dtype);
  std::vector<uint8_t> bits(static_cast<size_t>(layer.HV * layer.K * layer.V) * size);
  size_t i = 0;
  for (int64_t h = 0; h < layer.HV; ++h)
    for (int64_t d = 0; d < layer.K; ++d)
      for (int64_t c = 0; c < layer.V; ++c, i += size)
        std::memcpy(bits.data() + i,
                    states.data() + state_at(layer, states, slot, h, d, c) * int64_t(size), size);
  return bits;
}

std::vector<uint8_t> drawn_state(const Layer& layer, const Sequence& s) {
  std::vector<double> values;
  for (int64_t h = 0; h < layer.HV; ++h)
    for (int64_t d = 0; d < layer.K; ++d)
      for (int64_t c = 0; c < layer.V; ++c)
        values.push_back(0.5 * normal(s.seed, kState, static_cast<uint64_t>(h),
                                      static_cast<uint64_t>(d), static_cast<uint64_t>(c)));
  return state_bits(values, layer.state_dtype);
}

// One call's memory.
struct Call {
  Buffer q, k, v, o, beta, g, gv, A_log, dt_bias, cu, initial, final, pool, read, write, ckpt_cu,
      ckpt_tokens, ckpt_slots, ckpt_states;
  Options options;
  Tensors tensors;
};

bool is_untouched(const Buffer& states, const Layer& layer, int64_t slot) {
  for (uint8_t byte : get_state(layer, states, slot))
    if (byte != kSentinel) return false;
  return true;
}

int64_t read_slot(const Batch&, int64_t n) { return 2 * n + 1; }
int64_t write_slot(const Batch& batch, int64_t n) {
  return batch.pool == Pool::moved ? 2 * n : 2 * n + 1;
}

void place_tokens(const Layer& layer, const Sequence& s, Call& call, int64_t b, int64_t begin) {
  for (int64_t i = 0; i < s.length; ++i) {
    const int64_t t = s.first + i, row = begin + i;
    for (int64_t h = 0; h < layer.H; ++h) {
      const auto q = key_row(layer, s, kQ, t, h), k = key_row(layer, s, kK, t, h);
      for (int64_t d = 0; d < layer.K; ++d) {
        call.q.set(call.q.at({b, row, h, d}), q[static_cast<size_t>(d)]);
        call.k.set(call.k.at({b, row, h, d}), k[static_cast<size_t>(d)]);
      }
    }
    for (int64_t h = 0; h < layer.HV; ++h) {
      const bool zero = layer.keys == KeyValues::zero_rows && t % 5 == 2;
      for (int64_t c = 0; c < layer.V; ++c) {
        const double x = normal(seed_at(s, t), kV, static_cast<uint64_t>(t),
                                static_cast<uint64_t>(h), static_cast<uint64_t>(c));
        call.v.set(call.v.at({b, row, h, c}), zero ? 0 : x);
        if (call.gv) {
          const double u = uniform(seed_at(s, t), kGv, static_cast<uint64_t>(t),
                                   static_cast<uint64_t>(h), static_cast<uint64_t>(c));
          call.gv.set(call.gv.at({b, row, h, c}), -0.5 * u);
        }
        if (layer.beta == BetaKind::value)
          call.beta.set(call.beta.at({b, row, h, c}), beta_value(layer, s, t, h, c));
      }
      if (layer.beta == BetaKind::head)
        call.beta.set(call.beta.at({b, row, h}), beta_value(layer, s, t, h, 0));
      if (layer.gate == GateKind::head)
        call.g.set(call.g.at({b, row, h}), gate_value(layer, s, t, h, 0));
      if (layer.gate == GateKind::channel)
        for (int64_t d = 0; d < layer.K; ++d)
          call.g.set(call.g.at({b, row, h, d}), gate_value(layer, s, t, h, d));
    }
  }
  for (const Poison& p : s.poison) {
    const int64_t row = begin + p.token - s.first;
    if (p.tensor == 'q') call.q.set(call.q.at({b, row, p.head, p.channel}), p.value);
    if (p.tensor == 'k') call.k.set(call.k.at({b, row, p.head, p.channel}), p.value);
    if (p.tensor == 'v') call.v.set(call.v.at({b, row, p.head, p.channel}), p.value);
    if (p.tensor == 'b') call.beta.set(call.beta.at({b, row, p.head}), p.value);
    if (p.tensor == 'g')
      call.g.set(layer.gate == GateKind::head ? call.g.at({b, row, p.head})
                                              : call.g.at({b, row, p.head, p.channel}),
                 p.value);
  }
}

void place_gate_parameters(const Layer& layer, Call& call) {
  if (layer.gate_form == GateForm::log_decay) return;
  call.A_log = Buffer(DType::f32, {layer.HV});
  for (int64_t h = 0; h < layer.HV; ++h)
    call.A_log.set(h, uniform(5, kALog, static_cast<uint64_t>(h)) - 0.5);
  const bool per_channel = layer.gate == GateKind::channel;
  call.dt_bias =
      per_channel ? Buffer(DType::f32, {layer.HV, layer.K}) : Buffer(DType::f32, {layer.HV});
  for (int64_t i = 0; i < layer.HV * (per_channel ? layer.K : 1); ++i)
    call.dt_bias.set(i, normal(5, kDtBias, static_cast<uint64_t>(i)));
}

void place_states(const Layer& layer, const Batch& batch, Call& call) {
  const auto N = static_cast<int64_t>(batch.sequences.size());
  if (batch.pool != Pool::none) {
    call.pool = state_tensor(layer, 2 * N + 1, batch.strided);
    call.read = Buffer(batch.index_dtype, {N});
    call.write = Buffer(batch.index_dtype, {N});
    for (int64_t n = 0; n < N; ++n) {
      call.read.set_index(n, layer.has_initial ? read_slot(batch, n) : -1);
      call.write.set_index(n, write_slot(batch, n));
    }
  } else {
    if (layer.has_initial) call.initial = state_tensor(layer, N, batch.strided);
    if (batch.state_in_place) {
      call.final = call.initial;
    } else if (batch.want_final) {
      call.final = state_tensor(layer, N, batch.strided);
    }
  }
  for (int64_t n = 0; n < N && layer.has_initial; ++n) {
    const Sequence& s = batch.sequences[static_cast<size_t>(n)];
    const auto bits = s.initial.empty() ? drawn_state(layer, s) : s.initial;
    if (call.pool) {
      put_state(layer, call.pool, read_slot(batch, n), bits);
    } else {
      put_state(layer, call.initial, n, bits);
    }
  }
}

void place_checkpoints(const Layer& layer, const Batch& batch, Call& call) {
  int64_t M = 0;
  for (const Sequence& s : batch.sequences) M += static_cast<int64_t>(s.checkpoints.size());
  if (M == 0) return;
  const auto N = static_cast<int64_t>(batch.sequences.size());
  call.ckpt_cu = Buffer(batch.index_dtype, {N + 1});
  call.ckpt_tokens = Buffer(batch.index_dtype, {M + 1});
  call.ckpt_slots = Buffer(batch.index_dtype, {M + 1});
  call.ckpt_states = state_tensor(layer, M + 1, batch.strided);
  int64_t m = 0;
  for (int64_t n = 0; n < N; ++n) {
    call.ckpt_cu.set_index(n, m);
    for (int64_t token : batch.sequences[static_cast<size_t>(n)].checkpoints) {
      call.ckpt_tokens.set_index(m, token);
      call.ckpt_slots.set_index(m, M - 1 - m);
      ++m;
    }
  }
  call.ckpt_tokens.set_index(M, 0);  // an unused entry of the last sequence
  call.ckpt_slots.set_index(M, -1);
  call.ckpt_cu.set_index(N, M + 1);
}

Call build(const std::string& impl, const Layer& layer, const Batch& batch) {
  const auto N = static_cast<int64_t>(batch.sequences.size());
  int64_t total = batch.padding;
  for (const Sequence& s : batch.sequences) total += s.length;
  const int64_t B = batch.dense ? N : 1;
  const int64_t T = !batch.dense ? total : N > 0 ? batch.sequences[0].length : 0;
  const auto tokens = [&](DType type, int64_t heads, int64_t width) {
    return token_tensor(type, B, T, heads, width, batch.strided);
  };
  Call call;
  call.q = tokens(layer.dtype, layer.H, layer.K);
  call.k = tokens(layer.dtype, layer.H, layer.K);
  call.v = tokens(layer.dtype, layer.HV, layer.V);
  call.o = tokens(layer.dtype, layer.HV, layer.V);
  if (layer.beta == BetaKind::head) call.beta = tokens(layer.beta_dtype, layer.HV, 0);
  if (layer.beta == BetaKind::value) call.beta = tokens(layer.beta_dtype, layer.HV, layer.V);
  if (layer.gate == GateKind::head) call.g = tokens(layer.gate_dtype, layer.HV, 0);
  if (layer.gate == GateKind::channel) call.g = tokens(layer.gate_dtype, layer.HV, layer.K);
  if (layer.gv) call.gv = tokens(layer.gate_dtype, layer.HV, layer.V);
  if (!batch.dense) call.cu = Buffer(batch.index_dtype, {N + 1});
  int64_t begin = 0;
  for (int64_t n = 0; n < N; ++n) {
    const Sequence& s = batch.sequences[static_cast<size_t>(n)];
    if (call.cu) call.cu.set_index(n, begin);
    place_tokens(layer, s, call, batch.dense ? n : 0, batch.dense ? 0 : begin);
    begin += s.length;
  }
  if (call.cu) call.cu.set_index(N, begin);
  place_gate_parameters(layer, call);
  place_states(layer, batch, call);
  place_checkpoints(layer, batch, call);

  call.options = {.gate_form = layer.gate_form,
                  .beta_form = layer.beta_form,
                  .state_layout = layer.layout,
                  .split = Split::off,
                  .chunk = layer.chunk,
                  .qk_l2norm = layer.qk_l2norm,
                  .scale = layer.scale,
                  .num_threads = batch.threads,
                  .impl = impl};
  if (layer.gate_form == GateForm::bounded) call.options.lower_bound = -5.0f;
  call.tensors = {.q = call.q.view(),
                  .k = call.k.view(),
                  .v = call.v.view(),
                  .o = call.o.view(),
                  .beta = call.beta.view(),
                  .g = call.g.view(),
                  .gv = call.gv.view(),
                  .A_log = call.A_log.view(),
                  .dt_bias = call.dt_bias.view(),
                  .cu_seqlens = call.cu.view(),
                  .initial_state = call.initial.view(),
                  .final_state = call.final.view(),
                  .state_pool = call.pool.view(),
                  .read_index = call.read.view(),
                  .write_index = call.write.view(),
                  .ckpt_cu = call.ckpt_cu.view(),
                  .ckpt_tokens = call.ckpt_tokens.view(),
                  .ckpt_slots = call.ckpt_slots.view(),
                  .ckpt_states = call.ckpt_states.view()};
  return call;
}

std::vector<uint8_t> rows_of(const Buffer& o, const Layer& layer, int64_t b, int64_t begin,
                             int64_t length) {
  const size_t size = element_bytes(o.dtype()), row = static_cast<size_t>(layer.V) * size;
  std::vector<uint8_t> bytes(static_cast<size_t>(length * layer.HV) * row);
  for (int64_t t = 0; t < length; ++t)
    for (int64_t h = 0; h < layer.HV; ++h)
      std::memcpy(bytes.data() + static_cast<size_t>(t * layer.HV + h) * row,
                  o.data() + o.at({b, begin + t, h, 0}) * int64_t(size), row);
  return bytes;
}

void expect_surroundings(const Layer& layer, const Batch& batch, const Call& call) {
  const auto N = static_cast<int64_t>(batch.sequences.size());
  for (const Buffer* b : {&call.o, &call.final, &call.pool, &call.ckpt_states})
    EXPECT_TRUE(!*b || b->sentinels_intact()) << "written outside an output";
  if (call.ckpt_states) {
    const int64_t last = call.ckpt_states.view().shape[0] - 1;
    EXPECT_TRUE(is_untouched(call.ckpt_states, layer, last)) << "unused checkpoint slot written";
  }
  if (call.pool) {
    EXPECT_TRUE(is_untouched(call.pool, layer, 2 * N)) << "foreign slot written";
    for (int64_t n = 0; n < N; ++n) {
      const Sequence& s = batch.sequences[static_cast<size_t>(n)];
      if (batch.pool == Pool::moved && layer.has_initial) {
        EXPECT_EQ(get_state(layer, call.pool, read_slot(batch, n)),
                  s.initial.empty() ? drawn_state(layer, s) : s.initial)
            << "read slot written";
      } else if (batch.pool == Pool::in_place) {
        EXPECT_TRUE(is_untouched(call.pool, layer, 2 * n)) << "foreign slot written";
      }
    }
  }
}

}  // namespace

size_t element_bytes(DType type) {
  switch (type) {
    case DType::u8:
      return 1;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::f32:
    case DType::i32:
      return 4;
    default:
      return 8;
  }
}

const char* dtype_name(DType type) {
  switch (type) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f64:
      return "f64";
    case DType::i32:
      return "i32";
    case DType::i64:
      return "i64";
    case DType::u8:
      return "u8";
  }
  return "?";
}

void store(uint8_t* at, DType type, double x) {
  const auto put = [at](auto value) { std::memcpy(at, &value, sizeof value); };
  switch (type) {
    case DType::f32:
      put(static_cast<float>(x));
      break;
    case DType::bf16:
      put(f64_to_bf16(x));
      break;
    case DType::f16:
      put(f64_to_f16(x));
      break;
    case DType::f64:
      put(x);
      break;
    case DType::i32:
      put(static_cast<int32_t>(x));
      break;
    case DType::i64:
      put(static_cast<int64_t>(x));
      break;
    case DType::u8:
      put(static_cast<uint8_t>(x));
      break;
  }
}

double load(const uint8_t* at, DType type) {
  const auto get = [at](auto value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (type) {
    case DType::f32:
      return static_cast<double>(get(0.0f));
    case DType::bf16:
      return static_cast<double>(std::bit_cast<float>(uint32_t{get(uint16_t{0})} << 16));
    case DType::f16:
      return static_cast<double>(f16_to_f32(get(uint16_t{0})));
    case DType::f64:
      return get(0.0);
    case DType::i32:
      return get(int32_t{0});
    case DType::i64:
      return static_cast<double>(get(int64_t{0}));
    case DType::u8:
      return get(uint8_t{0});
  }
  return 0;
}

Buffer::Buffer(DType type, std::vector<int64_t> shape, std::vector<int64_t> strides)
    : type_(type),
      size_(static_cast<int64_t>(element_bytes(type))),
      shape_(std::move(shape)),
      strides_(std::move(strides)) {
  if (strides_.empty()) {
    strides_.assign(shape_.size(), 1);
    for (size_t d = shape_.size() - 1; d > 0; --d) strides_[d - 1] = strides_[d] * shape_[d];
  }
  int64_t reach = 1;
  bool empty = false;
  for (size_t d = 0; d < shape_.size(); ++d) {
    reach += (shape_[d] - 1) * strides_[d];
    empty = empty || shape_[d] == 0;
  }
  if (empty) reach = 0;
  front_ = 64 + static_cast<size_t>(size_);
  bytes_ = front_ + static_cast<size_t>(reach * size_) + kBehind;
  memory_ = allocate(bytes_);
  std::memset(memory_.get(), kSentinel, bytes_);
  elements_ = static_cast<size_t>(reach);
  int64_t numel = 1;
  for (int64_t n : shape_) numel *= n;
  if (numel == reach) return;  // no gaps
  used_.assign(elements_, false);
  std::vector<int64_t> index(shape_.size(), 0);
  for (size_t d = 0; d < shape_.size();) {
    int64_t offset = 0;
    for (size_t i = 0; i < shape_.size(); ++i) offset += index[i] * strides_[i];
    used_[static_cast<size_t>(offset)] = true;
    for (d = 0; d < shape_.size(); ++d) {
      if (++index[d] < shape_[d]) break;
      index[d] = 0;
    }
  }
}

int64_t Buffer::at(std::initializer_list<int64_t> index) const {
  int64_t offset = 0;
  size_t d = 0;
  for (int64_t i : index) offset += i * strides_[d++];
  return offset;
}

void Buffer::set_index(int64_t offset, int64_t x) {
  uint8_t* at = data() + offset * size_;
  if (type_ == DType::i32) {
    const auto narrow = static_cast<int32_t>(x);
    std::memcpy(at, &narrow, sizeof narrow);
  } else {
    std::memcpy(at, &x, sizeof x);
  }
}

TensorView Buffer::view() const {
  if (memory_ == nullptr) return {};
  TensorView t(data(), type_, std::span<const int64_t>(shape_));
  for (size_t d = 0; d < strides_.size(); ++d) t.strides[d] = strides_[d];
  return t;
}

bool Buffer::sentinels_intact() const {
  for (size_t i = 0; i < bytes_; ++i) {
    if (i == front_ && used_.empty()) i += elements_ * static_cast<size_t>(size_);
    if (i >= bytes_) break;
    const size_t element = i < front_ ? elements_ : (i - front_) / static_cast<size_t>(size_);
    const bool is_used = element < elements_ && used_[element];
    if (!is_used && memory_.get()[i] != kSentinel) return false;
  }
  return true;
}

Scratch::Scratch(size_t bytes) : bytes_(bytes), memory_(allocate(bytes + kBehind)) {
  std::memset(memory_.get(), kSentinel, bytes + kBehind);
}

bool Scratch::sentinels_intact() const {
  for (size_t i = 0; i < kBehind; ++i)
    if (memory_.get()[bytes_ + i] != kSentinel) return false;
  return true;
}

std::string name(const Layer& layer) {
  constexpr const char* kGates[] = {"none", "head", "channel"};
  constexpr const char* kValues[] = {"zero",   "slow",     "random", "deep5",
                                     "deep20", "deep1000", "mixed",  "growing"};
  constexpr const char* kForms[] = {"log_decay", "softplus", "bounded"};
  constexpr const char* kKeys[] = {"random", "repeated", "correlated", "zero_rows"};
  std::ostringstream out;
  out << "gate=" << kGates[static_cast<int>(layer.gate)]
      << " values=" << kValues[static_cast<int>(layer.gate_values)]
      << " form=" << kForms[static_cast<int>(layer.gate_form)]
      << " keys=" << kKeys[static_cast<int>(layer.keys)] << " H=" << layer.H << " HV=" << layer.HV
      << " K=" << layer.K << " V=" << layer.V << " dtype=" << dtype_name(layer.dtype)
      << " gdtype=" << dtype_name(layer.gate_dtype) << " bdtype=" << dtype_name(layer.beta_dtype)
      << " sdtype=" << dtype_name(layer.state_dtype) << " l2norm=" << layer.qk_l2norm
      << " chunk=" << layer.chunk << " beta=" << static_cast<int>(layer.beta) << "/"
      << static_cast<int>(layer.beta_form) << "/" << layer.beta_value.value_or(-1)
      << " layout=" << (layer.layout == StateLayout::kv ? "kv" : "vk")
      << " initial=" << layer.has_initial;
  return out.str();
}

void run_guarded(const cases::Call& call, const Options& options) {
  const Scratch scratch(call.workspace_bytes(options));
  call.run(options, scratch.c());
  EXPECT_TRUE(keeps_denormals()) << options.impl << ": denormals are still flushed";
  EXPECT_TRUE(scratch.sentinels_intact()) << options.impl << ": written behind the workspace";
}

Results run(Op op, const std::string& impl, const Layer& layer, const Batch& batch) {
  Call call = build(impl, layer, batch);
  const Buffer* inputs[] = {&call.q,           &call.k,          &call.v,      &call.beta,
                            &call.g,           &call.gv,         &call.A_log,  &call.dt_bias,
                            &call.cu,          &call.read,       &call.write,  &call.ckpt_cu,
                            &call.ckpt_tokens, &call.ckpt_slots, &call.initial};
  std::vector<std::vector<uint8_t>> before;
  for (const Buffer* b : inputs) before.push_back(*b ? b->all_bytes() : std::vector<uint8_t>());
  run_guarded({op, call.tensors}, call.options);
  for (size_t i = 0; i < std::size(inputs); ++i) {
    if (!*inputs[i] || (batch.state_in_place && inputs[i] == &call.initial)) continue;
    EXPECT_EQ(inputs[i]->all_bytes() == before[i], true) << "input " << i << " was written";
  }
  expect_surroundings(layer, batch, call);

  Results results;
  int64_t begin = 0, m = 0;
  for (size_t n = 0; n < batch.sequences.size(); ++n) {
    const Sequence& s = batch.sequences[n];
    const auto slot = static_cast<int64_t>(n);
    SequenceResult r;
    r.o = rows_of(call.o, layer, batch.dense ? slot : 0, batch.dense ? 0 : begin, s.length);
    if (call.pool) r.final_state = get_state(layer, call.pool, write_slot(batch, slot));
    if (call.final) r.final_state = get_state(layer, call.final, slot);
    for (size_t i = 0; i < s.checkpoints.size(); ++i, ++m) {
      const int64_t slots = call.ckpt_states.view().shape[0];
      r.checkpoints.push_back(get_state(layer, call.ckpt_states, slots - 2 - m));
    }
    begin += s.length;
    results.push_back(std::move(r));
  }
  if (!batch.dense && batch.padding > 0) {
    for (double x : numbers(rows_of(call.o, layer, 0, begin, batch.padding), layer.dtype)) {
      EXPECT_EQ(x, 0.0) << "padding is not zero";
      if (x != 0.0) break;
    }
  }
  return results;
}

bool accepts(Op op, const std::string& impl, const Layer& layer) {
  const Batch batch{.sequences = {{.length = 1}}};
  const Call call = build("", layer, batch);
  // The oracle takes what only it takes when it is named.
  Options options = call.options;
  if (impl == "reference") options.impl = impl;
  for (const Choice& c : cases::Call(op, call.tensors).explain(options))
    if (c.name == impl) return c.accepts;
  return false;
}

std::vector<std::string> runnable(Op op) {
  std::vector<std::string> names;
  for (const ImplementationInfo& i : implementations(op)) {
    // cpu.sse4 is cpu.avx2's source with narrower vectors: sanitizers see it once.
    if (i.runs_here && !(kSanitized && i.name == "cpu.sse4")) names.push_back(i.name);
  }
  return names;
}

bool runs_on_gpu(Op op, const std::string& impl) {
  for (const ImplementationInfo& i : implementations(op, DeviceType::cuda)) {
    if (i.name == impl) return i.runs_here;
  }
  return false;
}

std::vector<double> numbers(const std::vector<uint8_t>& bytes, DType type) {
  const size_t size = element_bytes(type);
  std::vector<double> x(bytes.size() / size);
  for (size_t i = 0; i < x.size(); ++i) x[i] = load(bytes.data() + i * size, type);
  return x;
}

bool all_finite(const std::vector<uint8_t>& bytes, DType type) {
  for (double x : numbers(bytes, type))
    if (!std::isfinite(x)) return false;
  return true;
}

double error(const std::vector<uint8_t>& x, const std::vector<uint8_t>& ref, DType type) {
  EXPECT_EQ(x.size(), ref.size());
  const auto a = numbers(x, type), b = numbers(ref, type);
  if (a.empty()) return 0;
  double difference = 0, scale = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    scale += b[i] * b[i];
  }
  const auto count = static_cast<double>(a.size());
  difference = std::sqrt(difference / count);
  scale = std::sqrt(scale / count);
  return scale < 1e-6 ? difference : difference / scale;
}

double growing_gate(double u, int64_t t, int64_t d) {
  return (t + d) % 32 == 3 ? 3.5 * factor(u) : -0.3 - u;
}

std::vector<uint8_t> prefix(const std::vector<uint8_t>& o, const Layer& layer, int64_t rows) {
  const auto bytes = static_cast<size_t>(rows * layer.HV * layer.V) * element_bytes(layer.dtype);
  return {o.begin(), o.begin() + static_cast<std::ptrdiff_t>(std::min(bytes, o.size()))};
}

std::vector<uint8_t> state_bits(const std::vector<double>& values, DType type) {
  const size_t size = element_bytes(type);
  std::vector<uint8_t> bits(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) store(bits.data() + i * size, type, values[i]);
  return bits;
}

std::string identifier(std::string text) {
  for (char& c : text)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return text;
}

double uniform(uint64_t seed, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  return static_cast<double>(hash(seed, a, b, c, d) >> 11) * 0x1p-53;
}

// Four uniform parts of one hash added up: mean 0, variance 1, at most 3.5.
double normal(uint64_t seed, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  const uint64_t x = hash(seed, a, b, c, d);
  const uint64_t sum = (x & 0xFFFF) + ((x >> 16) & 0xFFFF) + ((x >> 32) & 0xFFFF) + (x >> 48);
  return (static_cast<double>(sum) * 0x1p-16 - 2) * std::numbers::sqrt3;
}

}  // namespace deltic::test
