// The causal depthwise convolution on a panel of channels: SiLU, weights and states as rows of
// fp32, and the passes over a few tokens, forward and backward.
#if defined(DELTIC_CPU_SIMD_CONV_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_CONV_ROWS_INL_H_
#undef DELTIC_CPU_SIMD_CONV_ROWS_INL_H_
#else
#define DELTIC_CPU_SIMD_CONV_ROWS_INL_H_
#endif

#include "cpu/simd/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// SiLU of kGroup vectors, stage by stage: its chain of dependent instructions is 100 cycles long,
// so that a vector alone would wait most of the time.
constexpr int kGroup = 4;
template <int kVecs>
struct Logistic {
  Vec near[kVecs];                 // x within 87, where all of these are normal numbers
  Vec exp[kVecs], sigmoid[kVecs];  // exp(-x), 1 / (1 + exp(-x))

  // exp as 2^n p(f), |f| <= 1/2, p of degree 5 (error 1.7e-7), then the reciprocal's estimate and
  // one Newton step. Half the instructions of `sigmoid` in vec-inl.h, which would take longer than
  // the memory does. NaN goes through `near`.
  HWY_INLINE explicit Logistic(const Vec* x) {
    const F32 d;
    const hn::RebindToSigned<F32> di;
    const Vec minus_log2e = hn::Set(d, -1.44269504f), one = hn::Set(d, 1.0f);
    const Vec round = hn::Set(d, 12582912.0f);  // 1.5 * 2^23: a sum's last bits are the integer
    Vec f[kVecs], p[kVecs];
    const auto each = [](const auto& stage) {
      DELTIC_UNROLL
      for (int i = 0; i < kVecs; ++i) stage(i);
    };
    each([&](int i) { near[i] = hn::Max(hn::Set(d, -87.0f), x[i]); });
    each([&](int i) { near[i] = hn::Min(hn::Set(d, 87.0f), near[i]); });
    each([&](int i) { exp[i] = hn::MulAdd(near[i], minus_log2e, round); });
    each([&](int i) { f[i] = hn::MulSub(near[i], minus_log2e, hn::Sub(exp[i], round)); });
    each([&](int i) {
      p[i] = hn::MulAdd(hn::Set(d, 0.00132647273f), f[i], hn::Set(d, 0.00967151299f));
    });
    each([&](int i) { p[i] = hn::MulAdd(p[i], f[i], hn::Set(d, 0.0555073358f)); });
    each([&](int i) { p[i] = hn::MulAdd(p[i], f[i], hn::Set(d, 0.240222424f)); });
    each([&](int i) { p[i] = hn::MulAdd(p[i], f[i], hn::Set(d, 0.693147004f)); });
    each([&](int i) { p[i] = hn::MulAdd(p[i], f[i], one); });
    each([&](int i) {
      const auto n = hn::ShiftLeft<23>(hn::BitCast(di, exp[i]));
      exp[i] = hn::BitCast(d, hn::Add(hn::BitCast(di, p[i]), n));
    });
    each([&](int i) { p[i] = hn::Add(one, exp[i]); });
#if HWY_ARCH_X86
    each([&](int i) { sigmoid[i] = hn::ApproximateReciprocal(p[i]); });  // 14 bits, or 12
    each([&](int i) { p[i] = hn::NegMulAdd(p[i], sigmoid[i], one); });
    each([&](int i) { sigmoid[i] = hn::MulAdd(sigmoid[i], p[i], sigmoid[i]); });
#else
    each([&](int i) { sigmoid[i] = hn::Div(one, p[i]); });
#endif
  }
};

// x * sigmoid(x), in place. Above 87 x counts itself.
template <int kVecs>
HWY_INLINE void silu(Vec* x) {
  const Logistic<kVecs> l(x);
  DELTIC_UNROLL
  for (int i = 0; i < kVecs; ++i) x[i] = hn::Mul(hn::Max(l.near[i], x[i]), l.sigmoid[i]);
}
// Its derivative s + x s (1 - s), where 1 - s is exp(-x) s: a difference would lose what x then
// makes large.
template <int kVecs>
HWY_INLINE void silu_slope(Vec* x) {
  const Logistic<kVecs> l(x);
  DELTIC_UNROLL
  for (int i = 0; i < kVecs; ++i) {
    const Vec rest = hn::Mul(l.exp[i], l.sigmoid[i]);
    x[i] = hn::MulAdd(hn::Mul(l.near[i], l.sigmoid[i]), rest, l.sigmoid[i]);
  }
}

// ---- A few numbers per channel: weights [D,W] and states [D,S] ------------------------------

struct Columns {
  void* data;
  DType dtype;
  int64_t base, s_channel, s_column, num_columns;

  static Columns of(const Param& w, int64_t num_columns) {
    return {w.data, w.dtype, 0, w.strides[0], w.rank > 1 ? w.strides[1] : 1, num_columns};
  }
  static Columns of(const States& s, int64_t slot, int64_t num_columns) {
    return {s.data, s.dtype, s.at(slot, 0), s.s_k, s.s_v, num_columns};
  }
  int64_t at(int64_t channel, int64_t column) const {
    return base + channel * s_channel + column * s_column;
  }
  // The usual layouts of 3 or 4 numbers per channel, side by side in memory.
  bool is_interleaved() const {
    return s_column == 1 && s_channel == num_columns && (num_columns == 3 || num_columns == 4);
  }
};

// Columns [first, num_columns) of n channels from c0 on, as rows of fp32, `pitch` apart.
inline void load_columns(const Columns& m, int64_t c0, int64_t n, int64_t first, float* dst,
                         int64_t pitch) {
  const F32 d;
  if (m.s_channel == 1) {
    for (int64_t i = first; i < m.num_columns; ++i, dst += pitch) {
      load_row(m.data, m.dtype, m.at(c0, i), n, n, dst);
    }
    return;
  }
  int64_t c = 0;
  if (m.is_interleaved()) {
    const int64_t count = m.num_columns * kLanes;
    alignas(64) float together[4 * kLanes];
    for (; c + kLanes <= n; c += kLanes) {
      const float* src = together;
      if (m.dtype == DType::f32) {
        src = static_cast<const float*>(m.data) + m.at(c0 + c, 0);
      } else {
        load_row(m.data, m.dtype, m.at(c0 + c, 0), count, count, together);
      }
      Vec v[4];
      if (m.num_columns == 4) {
        hn::LoadInterleaved4(d, src, v[0], v[1], v[2], v[3]);
      } else {
        hn::LoadInterleaved3(d, src, v[0], v[1], v[2]);
      }
      DELTIC_UNROLL
      for (int64_t i = 0; i < 4; ++i) {
        if (i >= first && i < m.num_columns) hn::StoreU(v[i], d, dst + (i - first) * pitch + c);
      }
    }
  }
  for (; c < n; ++c) {
    for (int64_t i = first; i < m.num_columns; ++i) {
      dst[(i - first) * pitch + c] = load_f32(m.data, m.dtype, m.at(c0 + c, i));
    }
  }
}

// All columns of n channels from rows of fp32.
inline void store_columns(const float* src, int64_t pitch, int64_t n, const Columns& m,
                          int64_t c0) {
  const F32 d;
  if (m.s_channel == 1) {
    for (int64_t i = 0; i < m.num_columns; ++i) {
      store_row(src + i * pitch, n, m.data, m.dtype, m.at(c0, i));
    }
    return;
  }
  int64_t c = 0;
  if (m.is_interleaved()) {
    alignas(64) float together[4 * kLanes];
    for (; c + kLanes <= n; c += kLanes) {
      const float* at = src + c;
      const Vec v0 = hn::LoadU(d, at), v1 = hn::LoadU(d, at + pitch),
                v2 = hn::LoadU(d, at + 2 * pitch);
      const bool is_f32 = m.dtype == DType::f32;
      float* dst = is_f32 ? static_cast<float*>(m.data) + m.at(c0 + c, 0) : together;
      if (m.num_columns == 4) {
        hn::StoreInterleaved4(v0, v1, v2, hn::LoadU(d, at + 3 * pitch), d, dst);
      } else {
        hn::StoreInterleaved3(v0, v1, v2, d, dst);
      }
      if (!is_f32) store_row(together, m.num_columns * kLanes, m.data, m.dtype, m.at(c0 + c, 0));
    }
  }
  for (; c < n; ++c) {
    for (int64_t i = 0; i < m.num_columns; ++i) {
      store(m.data, m.dtype, m.at(c0 + c, i), static_cast<double>(src[i * pitch + c]));
    }
  }
}

// ---- Passes over a few tokens ---------------------------------------------------------------

// The first `count` elements of a vector's; all of them where that is kLanes.
template <class Access>
HWY_INLINE Vec load_some(const typename Access::Element* from, int64_t count) {
  if (count == kLanes) return Access::load(from);
  typename Access::Element whole[kLanes] = {};
  std::memcpy(whole, from, static_cast<size_t>(count) * sizeof(*from));
  return Access::load(whole);
}
// `is_streamed`: past the caches, where a vector is a line; half a line at a time takes four times
// as long as the usual store.
template <class Access>
HWY_INLINE void store_some(Vec x, typename Access::Element* to, int64_t count, bool is_streamed) {
  if (count == kLanes) {
#if HWY_TARGET == HWY_AVX3
    if constexpr (sizeof(*to) == sizeof(float)) {
      if (is_streamed) return hn::Stream(x, F32(), to);
    }
#else
    (void)is_streamed;
#endif
    return Access::store(x, to);
  }
  typename Access::Element whole[kLanes];
  Access::store(x, whole);
  std::memcpy(to, whole, static_cast<size_t>(count) * sizeof(*to));
}

// What the rows of a panel share: its channels, and scratch rows of fp32, `pitch` apart.
struct ConvPanel {
  int64_t channels, pitch;
  bool is_silu;
  bool is_streamed;     // whole vectors of fp32 go past the caches
  const float* weight;  // [W] rows
  const float* bias;    // one row
  float* inputs;        // [W-1] rows: the inputs before the next token, oldest first
  float* gradients;     // [W-1] rows: backward, gradients of these inputs so far
  float* sums;          // [W+1] rows, sums_pitch apart: of dweight and dbias; null: not wanted
  int64_t sums_pitch;
};

// The sums before the activation of kRows tokens: inputs[j] .. inputs[j + W - 1] are token j's.
template <int kTaps, int kRows>
HWY_INLINE void weighted_sums(const Vec* weight, const Vec* inputs, Vec bias, Vec* sums) {
  DELTIC_UNROLL
  for (int r = 0; r < kRows; ++r) sums[r] = bias;
  DELTIC_UNROLL
  for (int j = 0; j < kTaps; ++j) {
    DELTIC_UNROLL
    for (int r = 0; r < kRows; ++r) sums[r] = hn::MulAdd(weight[j], inputs[r + j], sums[r]);
  }
}

// A pass over tokens for one vector of channels, `count` of which are there: weights and what lies
// before the next token, in registers.
template <class Access, int kTaps>
struct ConvForward {
  static constexpr int kBefore = kTaps - 1;
  using Element = typename Access::Element;

  HWY_INLINE ConvForward(const ConvPanel& panel, int64_t c)
      : count(std::min<int64_t>(kLanes, panel.channels - c)) {
    const F32 d;
    DELTIC_UNROLL
    for (int j = 0; j < kTaps; ++j) weight[j] = hn::LoadU(d, panel.weight + j * panel.pitch + c);
    bias = hn::LoadU(d, panel.bias + c);
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) before[j] = hn::LoadU(d, panel.inputs + j * panel.pitch + c);
  }
  HWY_INLINE void leave(const ConvPanel& panel, int64_t c) const {
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) {
      hn::StoreU(before[j], F32(), panel.inputs + j * panel.pitch + c);
    }
  }

  template <int kRows>
  HWY_INLINE void tokens(const ConvPanel& panel, const Element* x, int64_t x_row, Element* y,
                         int64_t y_row) {
    Vec inputs[kBefore + kRows], sums[kRows];
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) inputs[j] = before[j];
    DELTIC_UNROLL
    for (int r = 0; r < kRows; ++r) inputs[kBefore + r] = load_some<Access>(x + r * x_row, count);
    weighted_sums<kTaps, kRows>(weight, inputs, bias, sums);
    if (panel.is_silu) silu<kRows>(sums);
    DELTIC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      store_some<Access>(sums[r], y + r * y_row, count, panel.is_streamed);
    }
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) before[j] = inputs[kRows + j];
  }

  int64_t count;
  Vec weight[kTaps], bias, before[kTaps];
};

// `rows` tokens forward, from inputs x to outputs y. A few rows at a time are a few streams, each
// of which goes through memory in order, and let weights stay in registers.
template <class Access, int kTaps>
void conv_tokens(const ConvPanel& panel, int64_t rows, const void* x_data, int64_t x_row,
                 void* y_data, int64_t y_row) {
  const auto* x = static_cast<const typename Access::Element*>(x_data);
  auto* y = static_cast<typename Access::Element*>(y_data);
  for (int64_t c = 0; c < panel.channels; c += kLanes) {
    ConvForward<Access, kTaps> pass(panel, c);
    int64_t r = 0;
    for (; r + kGroup <= rows; r += kGroup) {
      pass.template tokens<kGroup>(panel, x + r * x_row + c, x_row, y + r * y_row + c, y_row);
    }
    for (; r < rows; ++r) {
      pass.template tokens<1>(panel, x + r * x_row + c, x_row, y + r * y_row + c, y_row);
    }
    pass.leave(panel, c);
  }
}

// One token of a backward pass: its rows in memory.
struct GradientRow {
  const void *x, *d_out;
  const float* seed;  // what the final state's gradient says about this input; null: nothing
  // The gradient of the input W-1 tokens ago is complete: it goes to one of these, or nowhere.
  void* dx;
  float* early;
};

// The same backward, in the order of time: a token adds to the gradients of its W inputs, the
// oldest of which is then complete.
template <class Access, int kTaps>
struct ConvBackward {
  static constexpr int kBefore = kTaps - 1;
  using Element = typename Access::Element;

  HWY_INLINE ConvBackward(const ConvPanel& panel, int64_t c, bool has_sums) : forward(panel, c) {
    const F32 d;
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) {
      gradients[j] = hn::LoadU(d, panel.gradients + j * panel.pitch + c);
    }
    DELTIC_UNROLL
    for (int j = 0; j <= kTaps; ++j) {
      sums[j] = has_sums ? hn::LoadU(d, panel.sums + j * panel.sums_pitch + c) : hn::Zero(d);
    }
  }
  HWY_INLINE void leave(const ConvPanel& panel, int64_t c, bool has_sums) const {
    const F32 d;
    forward.leave(panel, c);
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) {
      hn::StoreU(gradients[j], d, panel.gradients + j * panel.pitch + c);
    }
    if (!has_sums) return;
    DELTIC_UNROLL
    for (int j = 0; j <= kTaps; ++j) {
      hn::StoreU(sums[j], d, panel.sums + j * panel.sums_pitch + c);
    }
  }

  template <int kRows>
  HWY_INLINE void tokens(const ConvPanel& panel, const GradientRow* row, int64_t c) {
    const F32 d;
    const int64_t count = forward.count;
    Vec inputs[kBefore + kRows], dpre[kRows];
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) inputs[j] = forward.before[j];
    DELTIC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      inputs[kBefore + r] = load_some<Access>(static_cast<const Element*>(row[r].x) + c, count);
    }
    if (panel.is_silu) {
      weighted_sums<kTaps, kRows>(forward.weight, inputs, forward.bias, dpre);
      silu_slope<kRows>(dpre);
    }
    DELTIC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const Vec dy = load_some<Access>(static_cast<const Element*>(row[r].d_out) + c, count);
      dpre[r] = panel.is_silu ? hn::Mul(dpre[r], dy) : dy;
    }
    DELTIC_UNROLL
    for (int r = 0; r < kRows; ++r) {
      gradients[kBefore] = row[r].seed != nullptr ? hn::LoadU(d, row[r].seed + c) : hn::Zero(d);
      DELTIC_UNROLL
      for (int j = 0; j < kTaps; ++j) {
        gradients[j] = hn::MulAdd(forward.weight[j], dpre[r], gradients[j]);
        sums[j] = hn::MulAdd(inputs[r + j], dpre[r], sums[j]);
      }
      sums[kTaps] = hn::Add(sums[kTaps], dpre[r]);
      if (row[r].dx != nullptr) {
        store_some<Access>(gradients[0], static_cast<Element*>(row[r].dx) + c, count,
                           panel.is_streamed);
      } else if (row[r].early != nullptr) {
        hn::StoreU(gradients[0], d, row[r].early + c);
      }
      DELTIC_UNROLL
      for (int j = 0; j < kBefore; ++j) gradients[j] = gradients[j + 1];
    }
    DELTIC_UNROLL
    for (int j = 0; j < kBefore; ++j) forward.before[j] = inputs[kRows + j];
  }

  ConvForward<Access, kTaps> forward;
  Vec gradients[kTaps], sums[kTaps + 1];  // sums: of dweight, and of dbias
};

template <class Access, int kTaps>
void conv_gradients(const ConvPanel& panel, int64_t rows, const GradientRow* row, bool sums) {
  const bool has_sums = sums && panel.sums != nullptr;
  for (int64_t c = 0; c < panel.channels; c += kLanes) {
    ConvBackward<Access, kTaps> pass(panel, c, has_sums);
    int64_t r = 0;
    for (; r + kGroup <= rows; r += kGroup) {
      pass.template tokens<kGroup>(panel, row + r, c);
    }
    for (; r < rows; ++r) pass.template tokens<1>(panel, row + r, c);
    pass.leave(panel, c, has_sums);
  }
}

// The passes for a dtype and a number of taps.
struct ConvPasses {
  void (*tokens)(const ConvPanel&, int64_t, const void*, int64_t, void*, int64_t);
  void (*gradients)(const ConvPanel&, int64_t, const GradientRow*, bool);
};
template <class Access>
ConvPasses conv_passes(int64_t taps) {
  constexpr ConvPasses kPasses[] = {{conv_tokens<Access, 1>, conv_gradients<Access, 1>},
                                    {conv_tokens<Access, 2>, conv_gradients<Access, 2>},
                                    {conv_tokens<Access, 3>, conv_gradients<Access, 3>},
                                    {conv_tokens<Access, 4>, conv_gradients<Access, 4>},
                                    {conv_tokens<Access, 5>, conv_gradients<Access, 5>},
                                    {conv_tokens<Access, 6>, conv_gradients<Access, 6>},
                                    {conv_tokens<Access, 7>, conv_gradients<Access, 7>},
                                    {conv_tokens<Access, 8>, conv_gradients<Access, 8>}};
  return kPasses[taps - 1];
}
inline ConvPasses conv_passes(DType type, int64_t taps) {
  return type == DType::f32    ? conv_passes<LoadF32>(taps)
         : type == DType::bf16 ? conv_passes<LoadBf16>(taps)
                               : conv_passes<LoadF16>(taps);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
