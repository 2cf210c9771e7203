// The part of a chunk that carries the state, panel by panel.
//
// The state of one value head lives in panels of 32 value columns, [Kp][32] fp32 each. Columns
// never meet, so panels may go to different threads. An engine says how the operands of a prepared
// chunk are kept and how the products with them are formed.
#if defined(DELTIC_CPU_SIMD_CHAIN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_CHAIN_INL_H_
#undef DELTIC_CPU_SIMD_CHAIN_INL_H_
#else
#define DELTIC_CPU_SIMD_CHAIN_INL_H_
#endif

#include "cpu/saved.h"
#include "cpu/simd/prepare-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// Sizes that every part of a call needs.
struct Shape {
  int64_t C;  // tokens of a chunk: the call's, or an engine's step
  int64_t K, Kp, V, panels;

  Shape(const Problem& p, int64_t k_align, int64_t chunk)
      : C(chunk),
        K(p.K),
        Kp((p.K + k_align - 1) / k_align * k_align),
        V(p.V),
        panels((p.V + kPanel - 1) / kPanel) {}
  // The last panel is narrow if half of it is enough.
  int64_t panel_width(int64_t panel) const { return V - panel * kPanel > 16 ? 32 : 16; }
  int64_t panel_columns(int64_t panel) const { return std::min(kPanel, V - panel * kPanel); }
  int64_t panel_floats() const { return Kp * kPanel; }
  int64_t state_floats() const { return checked_product(panels, panel_floats()); }
};

inline void load_state(const States& states, int64_t slot, int64_t head, const Shape& s,
                       int64_t panel, float* S) {
  const int64_t width = s.panel_width(panel);
  std::memset(S, 0, static_cast<size_t>(s.Kp * width) * sizeof(float));
  if (!states || slot < 0) return;
  load_columns(states, slot, head, s.K, panel * kPanel, s.panel_columns(panel), S, width);
}

inline void store_state(const States& states, int64_t slot, int64_t head, const Shape& s,
                        int64_t panel, const float* S) {
  if (!states || slot < 0) return;
  store_columns(S, s.panel_width(panel), s.K, panel * kPanel, s.panel_columns(panel), states, slot,
                head);
}

// Rows as a panel, row t times factor[t] if there are factors; zeros past the end and for an absent
// tensor. And a panel as rows of o.
inline void load_panel_rows(const Rows& rows, const ChunkPlace& at, const Shape& s, int64_t panel,
                            const float* factor, float* x) {
  const int64_t columns = s.panel_columns(panel), width = s.panel_width(panel);
  const int64_t length = rows ? at.length : 0;
  const int64_t first = rows.at(at.batch, at.begin, at.head) + panel * kPanel;
  if (length > 0 && columns == width) {
    const F32 d;
    with_elements(rows.dtype, [&](auto how) DELTIC_INLINE {
      const auto* from = static_cast<const typename decltype(how)::Element*>(rows.data) + first;
      for (int64_t t = 0; t < length; ++t) {
        const Vec f = hn::Set(d, factor != nullptr ? factor[t] : 1.0f);
        for (int64_t c = 0; c < width; c += kLanes) {
          hn::StoreU(hn::Mul(how.load(from + t * rows.st + c), f), d, x + t * width + c);
        }
      }
    });
  } else {
    for (int64_t t = 0; t < length; ++t) {
      load_row(rows.data, rows.dtype, first + t * rows.st, columns, width, x + t * width);
      if (factor != nullptr) scale_row(x + t * width, width, factor[t]);
    }
  }
  std::memset(x + length * width, 0,
              static_cast<size_t>((rows_of(at.length) - length) * width) * sizeof(float));
}
inline void store_outputs(const Problem& p, const ChunkPlace& at, const Shape& s, int64_t panel,
                          int64_t width, const float* o) {
  const int64_t columns = s.panel_columns(panel);
  const int64_t first = p.o.at(at.batch, at.begin, at.head) + panel * kPanel;
  if (columns == width) {
    with_elements(p.o.dtype, [&](auto how) DELTIC_INLINE {
      auto* to = static_cast<typename decltype(how)::Element*>(p.o.data) + first;
      for (int64_t t = 0; t < at.length; ++t) {
        for (int64_t c = 0; c < width; c += kLanes) {
          how.store(hn::LoadU(F32(), o + t * width + c), to + t * p.o.st + c);
        }
      }
    });
  } else {
    for (int64_t t = 0; t < at.length; ++t) {
      store_row(o + t * width, columns, p.o.data, p.o.dtype, first + t * p.o.st);
    }
  }
}

// All rows and columns of a chunk's panel lie in memory, so that products can take it from there.
template <int64_t kWidth>
inline bool is_whole(const ChunkPlace& at, const Shape& s, int64_t panel) {
  return at.length == rows_of(at.length) && s.panel_columns(panel) == kWidth;
}
// use(how its elements are loaded and stored, where they start), of a chunk's panel of rows.
template <class Use>
HWY_INLINE void with_panel(const Rows& rows, const ChunkPlace& at, int64_t panel, const Use& use) {
  with_elements(rows.dtype, [&](auto how) DELTIC_INLINE {
    auto* data = static_cast<typename decltype(how)::Element*>(const_cast<void*>(rows.data));
    use(how, data + rows.at(at.batch, at.begin, at.head) + panel * kPanel);
  });
}

// Scratch of one thread for the chain of states.
struct ChainScratch {
  float *x, *y, *carried, *kept;          // panels: three of [C][32], [Kp][32]
  uint16_t *x_pairs, *y_pairs, *S_pairs;  // bf16 operands of the tile engine

  ChainScratch(Scratch& arena, const Shape& s, bool tiles) {
    x = arena.take<float>(s.C, kPanel);
    y = arena.take<float>(s.C, kPanel);
    carried = arena.take<float>(tiles ? 0 : s.C, kPanel);
    kept = arena.take<float>(s.panel_floats());
    x_pairs = tiles ? arena.take<uint16_t>(64, kPanel) : nullptr;
    y_pairs = tiles ? arena.take<uint16_t>(64, kPanel) : nullptr;
    S_pairs = tiles ? arena.take<uint16_t>(s.panel_floats()) : nullptr;
  }
};

// fp32 products: operands are kept as they come.
struct Fp32Engine {
  static constexpr int64_t kKeyAlign = 16;
  static constexpr bool kTiles = false;
  static constexpr Arithmetic kArithmetic = Arithmetic::fp32_chunks;
  // Tokens that the state is carried through at once, whatever the call's chunk length: the README
  // has the count. Chunk lengths are multiples of it, so every chunk starts with a step.
  static constexpr int64_t step(const Problem&) { return 16; }
  // Calls of Ahead::some per panel of so many rows, K = 128.
  static int64_t pauses(int64_t rows) { return 3 * num_row_blocks(rows) + num_row_blocks(128); }

  // The chain's products take rows and factors of rows. With a gate per channel the decays are in
  // the rows and there are no factors; else kd and kg are k and qd is q, as they were loaded.
  struct Operands {
    float *kd, *qd, *kg;      // [C][Kp]
    float *inverse, *scores;  // [C][C]
    float *decay, *beta;      // [Kp], [C]
    float *prefix, *suffix;   // [C] exp(G), exp(G_last - G), or null
    Operands(Scratch& arena, const Shape& s) {
      kd = arena.take<float>(s.C, s.Kp), qd = arena.take<float>(s.C, s.Kp);
      kg = arena.take<float>(s.C, s.Kp);
      inverse = arena.take<float>(s.C, s.C), scores = arena.take<float>(s.C, s.C);
      decay = arena.take<float>(s.Kp), beta = arena.take<float>(s.C);
      prefix = arena.take<float>(s.C), suffix = arena.take<float>(s.C);
    }
  };
  // Of a step: what its chain reads, in the memory of `own`.
  template <Gate kGate>
  static Operands of_step(Operands own) {
    if constexpr (kGate != Gate::channel) own.kg = own.kd;
    if constexpr (kGate != Gate::head) own.prefix = own.suffix = nullptr;
    return own;
  }

  // The rows of a step, from its k, q, e and beta on.
  template <Gate kGate>
  static void step_rows(const PrepareScratch& s, int64_t rows, int64_t Kp, const Operands& to) {
    if constexpr (kGate == Gate::channel) {
      decay_rows<kGate>(s.k, s.e, nullptr, rows, Kp, to.kd);
      if (to.qd != nullptr) decay_rows<kGate>(s.q, s.e, nullptr, rows, Kp, to.qd);
      carry_rows<kGate>(s.k, s.e, rows, Kp, to.kg, to.decay);
    } else if constexpr (kGate == Gate::head) {
      row_factors(s.e, rows, Kp, to.prefix, to.suffix, to.decay);
    } else {
      std::fill(to.decay, to.decay + Kp, 1.0f);
    }
  }
  // A step of the forward: its rows (into `to`) and squares.
  template <Gate kGate>
  void prepare_step(const Problem& p, const ChunkPlace& at, const Shape& shape, PrepareScratch s,
                    const Operands& to) const {
    s = redirect(s, to);
    if constexpr (kGate != Gate::channel) s.k = to.kd, s.q = to.qd;
    load_chunk<kGate>(p, at, shape.C, shape.Kp, s);
    step_rows<kGate>(s, rows_of(at.length), shape.Kp, to);
    prepare_squares<kGate>(p, at, shape.C, shape.Kp, s, *this);
  }

  // Of a chunk of several steps, beside its own operands: what the steps do not have from those.
  struct Steps {
    float *kd, *kg;          // [C][Kp]; without a gate per channel k itself
    float* decay;            // [steps][Kp]
    float *prefix, *suffix;  // [C]
    Steps(Scratch& arena, const Problem& p, const Shape& s, float* k) : kd(k), kg(k) {
      if (p.gate == Gate::channel) {
        kd = arena.take<float>(s.C, s.Kp), kg = arena.take<float>(s.C, s.Kp);
      }
      decay = arena.take<float>(s.C / step(p), s.Kp);
      prefix = arena.take<float>(s.C), suffix = arena.take<float>(s.C);
    }
  };
  template <Gate kGate>
  static void cut(const Problem& p, PrepareScratch s, const ChunkPlace& at, const Operands& chunk,
                  const Shape& shape, const Steps& to) {
    const int64_t rows = rows_of(at.length), size = step(p), Kp = shape.Kp;
    for (int64_t t = 0; t < rows; t += size) {
      step_rows<kGate>(s, size, Kp, step_at<kGate>(chunk, to, p, shape, t));
      s.k += size * Kp, s.e += size * (kGate == Gate::channel ? Kp : 1);
    }
  }
  // The operands of the step at token t: the inverse of a step is a block of the chunk's diagonal.
  template <Gate kGate>
  static Operands step_at(Operands chunk, const Steps& steps, const Problem& p, const Shape& s,
                          int64_t t) {
    chunk.kd = steps.kd + t * s.Kp, chunk.kg = steps.kg + t * s.Kp;
    chunk.decay = steps.decay + t / step(p) * s.Kp;
    chunk.prefix = steps.prefix + t, chunk.suffix = steps.suffix + t;
    chunk.inverse += t * s.C + t, chunk.beta += t;
    chunk.qd = chunk.scores = nullptr;
    return of_step<kGate>(chunk);
  }

  void enter() const {}
  void leave() const {}

  // Preparing writes straight into the operands.
  static PrepareScratch redirect(PrepareScratch scratch, const Operands& to) {
    scratch.kd = to.kd, scratch.qd = to.qd, scratch.kg = to.kg;
    scratch.inverse = to.inverse, scratch.scores = to.scores, scratch.decay = to.decay,
    scratch.beta = to.beta;
    return scratch;
  }
  static void pack(const PrepareScratch&, const Operands&, const Shape&, int64_t) {}

  template <Gate kGate>
  void scores(const PrepareScratch& s, int64_t rows, int64_t K, int64_t Kp, int64_t C) const {
    using Wide = PanelProducts<32>;
    using Narrow = PanelProducts<16>;
    if constexpr (kGate != Gate::channel) {
      // Panels of 32 columns, rows from the panel's first on: above it all is masked.
      for (int64_t j = 0; j < rows; j += 32) {
        const int64_t columns = std::min<int64_t>(32, rows - j);
        float* panel = s.transposed + j * Kp;
        transpose(s.k + j * Kp, Kp, columns, Kp, panel, columns);
        const int64_t i = j * Kp, c = j * C + j, n = rows - j;
        if (columns == 32) {
          Wide::scores(s.k + i, Kp, n, K, panel, 32, s.lower + c, C);
          Wide::scores(s.q + i, Kp, n, K, panel, 32, s.scores + c, C);
        } else {  // the last 16 rows
          diagonal_scores(s.k + i, Kp, K, panel, 16, s.lower + c, C);
          diagonal_scores(s.q + i, Kp, K, panel, 16, s.scores + c, C);
        }
      }
    } else {
      for (int64_t b = 16; b < rows;
           b += 32) {  // rows b .. b+15 against the 16 columns before them
        const int64_t j = b - 16;
        transpose(s.col_k[0] + j * Kp, Kp, 16, Kp, s.transposed, 16);
        Narrow::scores(s.row_k[0] + b * Kp, Kp, 16, K, s.transposed, 16, s.lower + b * C + j, C);
        Narrow::scores(s.row_q[0] + b * Kp, Kp, 16, K, s.transposed, 16, s.scores + b * C + j, C);
      }
      if (rows > 32) {  // rows 32 .. against columns 0 .. 31
        transpose(s.col_k[1], Kp, 32, Kp, s.transposed, 32);
        Wide::scores(s.row_k[1] + 32 * Kp, Kp, rows - 32, K, s.transposed, 32, s.lower + 32 * C, C);
        Wide::scores(s.row_q[1] + 32 * Kp, Kp, rows - 32, K, s.transposed, 32, s.scores + 32 * C,
                     C);
      }
    }
  }

  // y = v_new: inverse (beta (v - prefix (kd S))).
  template <int64_t kWidth>
  static void values(const Problem& p, const ChunkPlace& at, const Shape& s, const Operands& ops,
                     int64_t panel, const ChainScratch& scratch, const float* S, float* y,
                     Ahead* ahead) {
    using Products = PanelProducts<kWidth>;
    const int64_t rows = rows_of(at.length);
    const auto subtract = [&](auto how, const auto* v, int64_t v_row) DELTIC_INLINE {
      Products::template subtract<decltype(how)>(ops.kd, s.Kp, rows, s.K, S, ops.prefix, ops.beta,
                                                 v, v_row, scratch.x, ahead);
    };
    if (p.v && is_whole<kWidth>(at, s, panel)) {
      with_panel(p.v, at, panel, [&](auto how, const auto* v) { subtract(how, v, p.v.st); });
    } else {
      load_panel_rows(p.v, at, s, panel, nullptr, scratch.x);
      subtract(LoadF32(), scratch.x, kWidth);
    }
    Products::lower(ops.inverse, s.C, rows, scratch.x, y, ops.suffix, scratch.carried, ahead);
  }
  // o = prefix (qd S) + scores y
  template <int64_t kWidth>
  static void outputs(const Problem& p, const ChunkPlace& at, const Shape& s, const Operands& ops,
                      int64_t panel, const ChainScratch& scratch, const float* S, const float* y,
                      Ahead* ahead) {
    const auto output = [&](auto how, auto* o, int64_t o_row) DELTIC_INLINE {
      PanelProducts<kWidth>::template output<decltype(how)>(ops.qd, s.Kp, rows_of(at.length), s.K,
                                                            S, ops.prefix, ops.scores, s.C, y, o,
                                                            o_row, ahead);
    };
    if (is_whole<kWidth>(at, s, panel)) {
      with_panel(p.o, at, panel, [&](auto how, auto* o) { output(how, o, p.o.st); });
    } else {
      output(LoadF32(), scratch.x, kWidth);
      store_outputs(p, at, s, panel, kWidth, scratch.x);
    }
  }
  // next = decay S + kg^T (suffix y); next may be S. The product was left in the scratch by values.
  template <int64_t kWidth>
  static void advance(const ChunkPlace& at, const Shape& s, const Operands& ops,
                      const ChainScratch& scratch, const float* y, const float* S, float* next,
                      Ahead* ahead) {
    PanelProducts<kWidth>::update(ops.decay, ops.kg, s.Kp, at.length, s.Kp,
                                  ops.suffix != nullptr ? scratch.carried : y, S, next, ahead);
  }
};

// One chunk on one panel; keep(y, S) runs between v_new and the update.
template <int64_t kWidth, class Engine, class Keep>
inline void carry_chunk(const Problem& p, const ChunkPlace& at, const Shape& s,
                        const typename Engine::Operands& ops, int64_t panel,
                        const ChainScratch& scratch, float* S, const Keep& keep, Ahead* ahead) {
  Engine::template values<kWidth>(p, at, s, ops, panel, scratch, S, scratch.y, ahead);
  Engine::template outputs<kWidth>(p, at, s, ops, panel, scratch, S, scratch.y, ahead);
  keep(scratch.y, S);
  Engine::template advance<kWidth>(at, s, ops, scratch, scratch.y, S, S, ahead);
}

// use(width of the panel as a constant): 32 or 16.
template <class Use>
HWY_INLINE void with_width(int64_t width, const Use& use) {
  if (width == 32) {
    use(std::integral_constant<int64_t, 32>());
  } else {
    use(std::integral_constant<int64_t, 16>());
  }
}

// Rows of a chunk to come, fetched between blocks of products.
inline void add_rows(const ChunkPlace& at, const Rows& x, int64_t head, int64_t width,
                     Ahead* ahead) {
  if (!x) return;
  const int64_t size = size_of(x.dtype);
  ahead->add(static_cast<const std::byte*>(x.data) + x.at(at.batch, at.begin, head) * size,
             at.length, x.st * size, width * size);
}
template <Gate kGate>
inline void add_keys(const Problem& p, const ChunkPlace& at, Ahead* ahead) {
  add_rows(at, p.k, p.k_head(at.head), p.K, ahead);
  add_rows(at, p.q, p.k_head(at.head), p.K, ahead);
  if (kGate == Gate::channel) add_rows(at, p.g, at.head, p.K, ahead);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
