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

// Where exp(-x) and its reciprocal are still normal numbers; NaN goes through.
HWY_INLINE Vec clamp_for_silu(Vec x) {
  const F32 d;
  return hn::Min(hn::Set(d, 87.0f), hn::Max(hn::Set(d, -87.0f), x));
}

// exp(-x) and 1 / (1 + exp(-x)) for x within 87: exp as 2^n p(f), |f| <= 1/2, p of degree 6 (error
// 8e-8), then the reciprocal's estimate and one Newton step. `sigmoid` of vec-inl.h takes twice as
// long, which here is longer than the memory takes.
struct Logistic {
  Vec exp, sigmoid;
};
HWY_INLINE Logistic logistic(Vec x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const Vec minus_log2e = hn::Set(d, -1.44269504f);
  const auto n = hn::NearestInt(hn::Mul(x, minus_log2e));
  const Vec f = hn::MulSub(x, minus_log2e, hn::ConvertTo(d, n));
  Vec p = hn::Set(d, 0.000153458124f);
  p = hn::MulAdd(p, f, hn::Set(d, 0.00133999309f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.00961848907f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.0555032864f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.240226462f));
  p = hn::MulAdd(p, f, hn::Set(d, 0.693147182f));
  const Vec one = hn::Set(d, 1.0f);
  p = hn::MulAdd(p, f, one);
  const Vec e = hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(n)));
  const Vec sum = hn::Add(one, e);
#if HWY_ARCH_X86
  const Vec r = hn::ApproximateReciprocal(sum);  // 14 bits, 12 below AVX-512
  return {e, hn::MulAdd(r, hn::NegMulAdd(sum, r, one), r)};
#else
  return {e, hn::Div(one, sum)};
#endif
}

HWY_INLINE Vec silu(Vec x) {
  const F32 d;
  return hn::Mul(hn::Max(hn::Set(d, -87.0f), x), logistic(clamp_for_silu(x)).sigmoid);
}
// s + x s (1 - s), where 1 - s is exp(-x) s: a difference would lose what x then makes large.
HWY_INLINE Vec silu_slope(Vec x) {
  const Vec near = clamp_for_silu(x);
  const Logistic l = logistic(near);
  const Vec rest = hn::Mul(l.exp, l.sigmoid);
  return hn::MulAdd(hn::Mul(near, l.sigmoid), rest, l.sigmoid);
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
    alignas(64) float together[4 * kLanes], apart[4 * kLanes];
    for (; c + kLanes <= n; c += kLanes) {
      load_row(m.data, m.dtype, m.at(c0 + c, 0), count, count, together);
      Vec v0, v1, v2, v3 = hn::Zero(d);
      if (m.num_columns == 4) {
        hn::LoadInterleaved4(d, together, v0, v1, v2, v3);
      } else {
        hn::LoadInterleaved3(d, together, v0, v1, v2);
      }
      hn::Store(v0, d, apart), hn::Store(v1, d, apart + kLanes);
      hn::Store(v2, d, apart + 2 * kLanes), hn::Store(v3, d, apart + 3 * kLanes);
      for (int64_t i = first; i < m.num_columns; ++i) {
        hn::StoreU(hn::Load(d, apart + i * kLanes), d, dst + (i - first) * pitch + c);
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
      if (m.num_columns == 4) {
        hn::StoreInterleaved4(v0, v1, v2, hn::LoadU(d, at + 3 * pitch), d, together);
      } else {
        hn::StoreInterleaved3(v0, v1, v2, d, together);
      }
      store_row(together, m.num_columns * kLanes, m.data, m.dtype, m.at(c0 + c, 0));
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
template <class Access>
HWY_INLINE void store_some(Vec x, typename Access::Element* to, int64_t count) {
  if (count == kLanes) return Access::store(x, to);
  typename Access::Element whole[kLanes];
  Access::store(x, whole);
  std::memcpy(to, whole, static_cast<size_t>(count) * sizeof(*to));
}

// What the rows of a panel share: its channels, and scratch rows of fp32, `pitch` apart.
struct ConvPanel {
  int64_t channels, pitch;
  bool is_silu;
  const float* weight;  // [W] rows
  const float* bias;    // one row
  float* inputs;        // [W-1] rows: the inputs before the next token, oldest first
  float* gradients;     // [W-1] rows: backward, gradients of these inputs so far
  float* sums;          // [W+1] rows, sums_pitch apart: of dweight and dbias; null: not wanted
  int64_t sums_pitch;
};

// W inputs of a vector of channels, oldest first; the last is the token's own.
template <int kTaps>
HWY_INLINE Vec weighted_sum(const Vec* weight, const Vec* inputs, Vec bias) {
  Vec sum = bias;
  DELTIC_UNROLL
  for (int j = 0; j < kTaps; ++j) sum = hn::MulAdd(weight[j], inputs[j], sum);
  return sum;
}

// `rows` tokens forward, from inputs x to outputs y. A few rows at a time are a few streams, each
// of which goes through memory in order, and let weights stay in registers.
template <class Access, int kTaps>
void conv_tokens(const ConvPanel& panel, int64_t rows, const void* x_data, int64_t x_row,
                 void* y_data, int64_t y_row) {
  const F32 d;
  const auto* x = static_cast<const typename Access::Element*>(x_data);
  auto* y = static_cast<typename Access::Element*>(y_data);
  for (int64_t c = 0; c < panel.channels; c += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, panel.channels - c);
    Vec weight[kTaps], inputs[kTaps];
    DELTIC_UNROLL
    for (int j = 0; j < kTaps; ++j) weight[j] = hn::LoadU(d, panel.weight + j * panel.pitch + c);
    const Vec bias = hn::LoadU(d, panel.bias + c);
    DELTIC_UNROLL
    for (int j = 1; j < kTaps; ++j) {
      inputs[j] = hn::LoadU(d, panel.inputs + (j - 1) * panel.pitch + c);
    }
    for (int64_t r = 0; r < rows; ++r) {
      DELTIC_UNROLL
      for (int j = 1; j < kTaps; ++j) inputs[j - 1] = inputs[j];
      inputs[kTaps - 1] = load_some<Access>(x + r * x_row + c, count);
      const Vec pre = weighted_sum<kTaps>(weight, inputs, bias);
      store_some<Access>(panel.is_silu ? silu(pre) : pre, y + r * y_row + c, count);
    }
    DELTIC_UNROLL
    for (int j = 1; j < kTaps; ++j) {
      hn::StoreU(inputs[j], d, panel.inputs + (j - 1) * panel.pitch + c);
    }
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

// `rows` tokens backward, in the order of time: a token adds to the gradients of its W inputs, the
// oldest of which is then complete. With `sums` also to the sums of dweight and dbias.
template <class Access, int kTaps>
void conv_gradients(const ConvPanel& panel, int64_t rows, const GradientRow* row, bool sums) {
  using Element = typename Access::Element;
  const F32 d;
  const bool has_sums = sums && panel.sums != nullptr;
  for (int64_t c = 0; c < panel.channels; c += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, panel.channels - c);
    Vec weight[kTaps], inputs[kTaps], gradients[kTaps], dweight[kTaps], dbias = hn::Zero(d);
    float* sum_rows = has_sums ? panel.sums + c : nullptr;
    DELTIC_UNROLL
    for (int j = 0; j < kTaps; ++j) {
      weight[j] = hn::LoadU(d, panel.weight + j * panel.pitch + c);
      dweight[j] = has_sums ? hn::LoadU(d, sum_rows + j * panel.sums_pitch) : hn::Zero(d);
    }
    if (has_sums) dbias = hn::LoadU(d, sum_rows + kTaps * panel.sums_pitch);
    const Vec bias = hn::LoadU(d, panel.bias + c);
    DELTIC_UNROLL
    for (int j = 1; j < kTaps; ++j) {
      inputs[j] = hn::LoadU(d, panel.inputs + (j - 1) * panel.pitch + c);
      gradients[j] = hn::LoadU(d, panel.gradients + (j - 1) * panel.pitch + c);
    }
    for (int64_t r = 0; r < rows; ++r) {
      DELTIC_UNROLL
      for (int j = 1; j < kTaps; ++j) {
        inputs[j - 1] = inputs[j];
        gradients[j - 1] = gradients[j];
      }
      inputs[kTaps - 1] = load_some<Access>(static_cast<const Element*>(row[r].x) + c, count);
      gradients[kTaps - 1] = row[r].seed ? hn::LoadU(d, row[r].seed + c) : hn::Zero(d);
      Vec dpre = load_some<Access>(static_cast<const Element*>(row[r].d_out) + c, count);
      if (panel.is_silu) {
        dpre = hn::Mul(dpre, silu_slope(weighted_sum<kTaps>(weight, inputs, bias)));
      }
      DELTIC_UNROLL
      for (int j = 0; j < kTaps; ++j) {
        gradients[j] = hn::MulAdd(weight[j], dpre, gradients[j]);
        dweight[j] = hn::MulAdd(inputs[j], dpre, dweight[j]);
      }
      dbias = hn::Add(dbias, dpre);
      if (row[r].dx != nullptr) {
        store_some<Access>(gradients[0], static_cast<Element*>(row[r].dx) + c, count);
      } else if (row[r].early != nullptr) {
        hn::StoreU(gradients[0], d, row[r].early + c);
      }
    }
    DELTIC_UNROLL
    for (int j = 1; j < kTaps; ++j) {
      hn::StoreU(inputs[j], d, panel.inputs + (j - 1) * panel.pitch + c);
      hn::StoreU(gradients[j], d, panel.gradients + (j - 1) * panel.pitch + c);
    }
    if (!has_sums) continue;
    DELTIC_UNROLL
    for (int j = 0; j < kTaps; ++j) hn::StoreU(dweight[j], d, sum_rows + j * panel.sums_pitch);
    hn::StoreU(dbias, d, sum_rows + kTaps * panel.sums_pitch);
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
