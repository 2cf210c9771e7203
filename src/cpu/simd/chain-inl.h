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

// Scratch of one thread for the chain of states.
struct ChainScratch {
  float *x, *y, *kept;                    // panels: [C][32], [C][32], [Kp][32]
  uint16_t *x_pairs, *y_pairs, *S_pairs;  // bf16 operands of the tile engine

  ChainScratch(Scratch& arena, const Shape& s, bool tiles) {
    x = arena.take<float>(s.C, kPanel);
    y = arena.take<float>(s.C, kPanel);
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

  struct Operands {
    float *kd, *qd, *kg;      // [C][Kp]
    float *inverse, *scores;  // [C][C]
    float *decay, *beta;      // [Kp], [C]
    Operands(Scratch& arena, const Shape& s) {
      kd = arena.take<float>(s.C, s.Kp), qd = arena.take<float>(s.C, s.Kp);
      kg = arena.take<float>(s.C, s.Kp);
      inverse = arena.take<float>(s.C, s.C), scores = arena.take<float>(s.C, s.C);
      decay = arena.take<float>(s.Kp), beta = arena.take<float>(s.C);
    }
  };

  // Of a chunk of several steps, beside its own operands: what the steps do not have from those.
  struct Steps {
    float *kd, *kg;  // [C][Kp]
    float* decay;    // [steps][Kp]
    Steps(Scratch& arena, const Problem& p, const Shape& s) {
      kd = arena.take<float>(s.C, s.Kp), kg = arena.take<float>(s.C, s.Kp);
      decay = arena.take<float>(s.C / step(p), s.Kp);
    }
  };
  template <Gate kGate>
  static void cut(const Problem& p, const PrepareScratch& s, const ChunkPlace& at, int64_t Kp,
                  const Steps& to) {
    const int64_t rows = rows_of(at.length), size = step(p);
    for (int64_t t = 0; t < rows; t += size) {
      const float* e = s.e + t * (kGate == Gate::channel ? Kp : 1);
      decay_rows<kGate>(s.k + t * Kp, e, s.beta + t, size, Kp, to.kd + t * Kp);
      carry_rows<kGate>(s.k + t * Kp, e, size, Kp, to.kg + t * Kp, to.decay + t / size * Kp);
    }
  }
  // The operands of the step at token t: the inverse of a step is a block of the chunk's diagonal.
  static Operands step_at(Operands chunk, const Steps& steps, const Problem& p, const Shape& s,
                          int64_t t) {
    chunk.kd = steps.kd + t * s.Kp, chunk.kg = steps.kg + t * s.Kp;
    chunk.decay = steps.decay + t / step(p) * s.Kp;
    chunk.inverse += t * s.C + t, chunk.beta += t;
    chunk.qd = chunk.scores = nullptr;
    return chunk;
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

  // y = v_new: inverse (beta v - kd S).
  template <int64_t kWidth>
  static void values(const Problem& p, const ChunkPlace& at, const Shape& s, const Operands& ops,
                     int64_t panel, const ChainScratch& scratch, const float* S, float* y,
                     Ahead* ahead) {
    using Products = PanelProducts<kWidth>;
    const int64_t rows = rows_of(at.length);
    load_panel_rows(p.v, at, s, panel, ops.beta, scratch.x);
    Products::subtract(ops.kd, s.Kp, rows, s.K, S, scratch.x, ahead);
    Products::lower(ops.inverse, s.C, rows, scratch.x, y, ahead);
  }
  // o = qd S + scores y
  template <int64_t kWidth>
  static void outputs(const ChunkPlace& at, const Shape& s, const Operands& ops,
                      const ChainScratch&, const float* S, const float* y, float* o, Ahead* ahead) {
    PanelProducts<kWidth>::output(ops.qd, s.Kp, rows_of(at.length), s.K, S, ops.scores, s.C, y, o,
                                  ahead);
  }
  // next = decay S + kg^T y; next may be S.
  template <int64_t kWidth>
  static void advance(const ChunkPlace& at, const Shape& s, const Operands& ops,
                      const ChainScratch&, const float* y, const float* S, float* next,
                      Ahead* ahead) {
    PanelProducts<kWidth>::update(ops.decay, ops.kg, s.Kp, at.length, s.Kp, y, S, next, ahead);
  }
};

// One chunk on one panel; keep(y, S) runs between v_new and the update.
template <int64_t kWidth, class Engine, class Keep>
inline void carry_chunk(const Problem& p, const ChunkPlace& at, const Shape& s,
                        const typename Engine::Operands& ops, int64_t panel,
                        const ChainScratch& scratch, float* S, const Keep& keep, Ahead* ahead) {
  Engine::template values<kWidth>(p, at, s, ops, panel, scratch, S, scratch.y, ahead);
  Engine::template outputs<kWidth>(at, s, ops, scratch, S, scratch.y, scratch.x, ahead);
  store_outputs(p, at, s, panel, kWidth, scratch.x);
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
