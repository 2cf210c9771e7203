// The chunked backward: segments of chunks from the last to the first. In a segment, for each value
// head of a group: chunks are prepared, the state is carried forwards through them, its gradient
// backwards, and then each chunk gives its gradients. The first and the last of these are
// independent over chunks, the two chains over value columns, so threads may share a task; whole
// tasks (sequence, q/k head) go to threads where there are enough of them. Same bits either way.
#if defined(DELTIC_CPU_SIMD_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_BACKWARD_INL_H_
#undef DELTIC_CPU_SIMD_BACKWARD_INL_H_
#else
#define DELTIC_CPU_SIMD_BACKWARD_INL_H_
#endif

#include <omp.h>

#include <atomic>

#include "core/error.h"
#include "cpu/saved.h"
#include "cpu/schedule.h"
#include "cpu/simd/gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

template <Gate kGate>
class Backward {
 public:
  using Operands = Fp32Engine::Operands;

  explicit Backward(const Problem& p)
      : p_(p), shape_(p, Fp32Engine::kKeyAlign), segment_(segment_chunks(p)), group_(p.HV / p.H) {
    const int64_t tasks = std::max<int64_t>(1, p.N * p.H);
    threads_ =
        static_cast<int>(std::min<int64_t>(p.threads, tasks * std::max(segment_, shape_.panels)));
  }

  size_t workspace_bytes() const {
    Scratch m(nullptr);
    Memory(m, *this);
    return m.used();
  }

  void run(std::span<std::byte> workspace) const {
    const deltic_save saved = check_saved_header(p_);
    const SavedLayout layout(p_, saved);
    if (p_.saved.bytes < layout.bytes) {
      fail(DELTIC_INVALID_ARGUMENT, "backward: saved: expected ", layout.bytes, " bytes, got ",
           p_.saved.bytes);
    }
    Scratch m(workspace.data());
    const Memory memory(m, *this);
    count_saved(p_, segment_, memory.first_state, memory.first_chunk);
    std::atomic<int64_t> next{0};
    const int64_t tasks = p_.N * p_.H;
    const bool whole = is_balanced(memory);
#pragma omp parallel num_threads(threads_)
    {
      const FlushDenormals flush;
      zero_padding_rows();
      const int thread = omp_get_thread_num();
      const ThreadMemory mine(memory, thread, *this);
      if (whole) {
        const SegmentMemory seg(memory, thread, *this);
        for (int64_t i = next++; i < tasks; i = next++) {
          run_task<false>(memory, seg, mine, saved, layout, memory.order[i / p_.H], i % p_.H);
        }
      } else {
        const SegmentMemory seg(memory, 0, *this);
        for (int64_t i = 0; i < tasks; ++i) {
          run_task<true>(memory, seg, mine, saved, layout, memory.order[i / p_.H], i % p_.H);
        }
      }
    }
    store_parameters(memory);
  }

 private:
  int64_t state_floats() const { return shape_.panels * shape_.panel_floats(); }

  struct Memory {
    int64_t *order, *loads;  // [N], [threads]
    int64_t* first_state;    // [N] index of a sequence's first kept state
    int64_t* first_chunk;    // [N]
    double* params;          // [N][HV][1 + Kp]
    std::byte *threads, *segments;
    size_t thread_bytes, segment_bytes;

    Memory(Scratch& m, const Backward& b) {
      Scratch thread(nullptr), segment(nullptr);
      PrepareScratch(thread, b.shape_.C, b.shape_.Kp, kGate == Gate::channel, false);
      ChainScratch(thread, b.shape_, false);
      GradientScratch(thread, b.shape_, kGate == Gate::channel);
      SegmentMemory(segment, b);
      thread_bytes = thread.used(), segment_bytes = segment.used();
      order = m.take<int64_t>(b.p_.N), loads = m.take<int64_t>(b.threads_);
      first_state = m.take<int64_t>(b.p_.N + 1), first_chunk = m.take<int64_t>(b.p_.N + 1);
      params = m.take<double>(b.has_params() ? b.p_.N * b.p_.HV * (1 + b.shape_.Kp) : 0);
      threads = m.take<std::byte>(static_cast<int64_t>(thread_bytes) * b.threads_);
      segments = m.take<std::byte>(static_cast<int64_t>(segment_bytes) * b.segment_memories());
    }
  };
  bool has_params() const { return p_.gate_form != DELTIC_GATE_LOG_DECAY; }
  int64_t segment_memories() const {
    return std::max<int64_t>(1, std::min<int64_t>(threads_, p_.N * p_.H));
  }

  struct ThreadMemory {
    Scratch m;
    PrepareScratch prepare;
    ChainScratch chain;
    GradientScratch gradient;
    ThreadMemory(const Memory& memory, int thread, const Backward& b)
        : m(memory.threads + static_cast<size_t>(thread) * memory.thread_bytes),
          prepare(m, b.shape_.C, b.shape_.Kp, kGate == Gate::channel, false),
          chain(m, b.shape_, false),
          gradient(m, b.shape_, kGate == Gate::channel) {}
  };

  // What one task holds for the segment it works on.
  struct SegmentMemory {
    std::byte* chunks;  // operands and states of each chunk
    float *dq, *dk;     // [segment C][Kp]
    float* dS;          // [group] gradients of the state, in panels
    float* starts;      // [group][segments] states at segment starts, where none were saved
    size_t operand_bytes, chunk_bytes;

    SegmentMemory(Scratch& m, const Backward& b) {
      Scratch operands(nullptr), states(nullptr);
      Operands(operands, b.shape_);
      ChunkStates(states, b.shape_);
      operand_bytes = operands.used(), chunk_bytes = operand_bytes + states.used();
      chunks = m.take<std::byte>(static_cast<int64_t>(chunk_bytes) * b.segment_);
      dq = m.take<float>(b.segment_ * b.shape_.C * b.shape_.Kp);
      dk = m.take<float>(b.segment_ * b.shape_.C * b.shape_.Kp);
      dS = m.take<float>(b.group_ * b.state_floats());
      starts = m.take<float>(
          b.p_.saved.bytes > 0 ? 0 : b.group_ * (b.max_segments() - 1) * b.state_floats());
    }
    SegmentMemory(const Memory& memory, int index, const Backward& b)
        : SegmentMemory(at(memory, index), b) {}

   private:
    SegmentMemory(Scratch&& m, const Backward& b) : SegmentMemory(m, b) {}
    static Scratch at(const Memory& memory, int index) {
      return Scratch(memory.segments + static_cast<size_t>(index) * memory.segment_bytes);
    }
  };
  int64_t max_segments() const {
    const int64_t chunks = std::max<int64_t>(1, (p_.T + shape_.C - 1) / shape_.C);
    return (chunks + segment_ - 1) / segment_;
  }

  Operands operands(const SegmentMemory& seg, int64_t j) const {
    Scratch m(seg.chunks + static_cast<size_t>(j) * seg.chunk_bytes);
    return Operands(m, shape_);
  }
  ChunkStates states(const SegmentMemory& seg, int64_t j) const {
    Scratch m(seg.chunks + static_cast<size_t>(j) * seg.chunk_bytes + seg.operand_bytes);
    return ChunkStates(m, shape_);
  }
  int64_t chunks(const Sequence& s) const { return (s.length + shape_.C - 1) / shape_.C; }
  ChunkPlace place(const Sequence& s, int64_t head, int64_t chunk) const {
    const int64_t first = chunk * shape_.C;
    return {s.batch, s.begin + first, std::min(shape_.C, s.length - first), head};
  }

  bool is_balanced(const Memory& memory) const {
    return order_tasks(p_, threads_, p_.H, memory.order, memory.loads).is_balanced &&
           segment_memories() >= threads_;
  }

  // body(i) for i < n: by this thread, or shared by the team with a barrier at the end.
  template <bool kTeam, class Body>
  static void for_each(int64_t n, const Body& body) {
    if constexpr (kTeam) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < n; ++i) body(i);
    } else {
      for (int64_t i = 0; i < n; ++i) body(i);
    }
  }

  template <bool kTeam>
  void run_task(const Memory& memory, const SegmentMemory& seg, const ThreadMemory& mine,
                deltic_save saved, const SavedLayout& layout, int64_t n, int64_t k_head) const {
    const Sequence s = sequence(p_, n);
    const int64_t total = chunks(s), segments = (total + segment_ - 1) / segment_;
    const int64_t head0 = k_head * group_;
    for_each<kTeam>(group_ * shape_.panels, [&](int64_t i) {
      load_state(p_.d_final, p_.d_final ? n : -1, head0 + i / shape_.panels, shape_,
                 i % shape_.panels, gradient_state(seg, i / shape_.panels, i % shape_.panels));
      if (has_params() && i % shape_.panels == 0) {
        double* sums = params(memory, n, head0 + i / shape_.panels);
        std::fill(sums, sums + 1 + shape_.Kp, 0.0);
      }
    });
    const auto start = [&](int64_t segment, int64_t h, int64_t panel, float* S) {
      if (segment == 0) return load_state(p_.state_in, s.read_slot, head0 + h, shape_, panel, S);
      const float* from =
          saved == DELTIC_SAVE_STATES
              ? saved_state(memory.first_state[n] + segment - 1, head0 + h)
              : seg.starts + (h * (max_segments() - 1) + segment - 1) * state_floats();
      std::memcpy(S, from + panel * shape_.panel_floats(),
                  static_cast<size_t>(shape_.panel_floats()) * sizeof(float));
    };

    if (saved == DELTIC_SAVE_NONE) {  // the states at segment starts, from the first token on
      for (int64_t h = 0; h < group_; ++h) {
        for (int64_t segment = 0; segment + 1 < segments; ++segment) {
          for_each<kTeam>(segment_, [&](int64_t j) {
            prepare(place(s, head0 + h, segment * segment_ + j), operands(seg, j), mine);
          });
          for_each<kTeam>(shape_.panels, [&](int64_t panel) {
            float* S = seg.starts + (h * (max_segments() - 1) + segment) * state_floats() +
                       panel * shape_.panel_floats();
            start(segment, h, panel, S);
            for (int64_t j = 0; j < segment_; ++j) {
              carry_to(place(s, head0 + h, segment * segment_ + j), operands(seg, j), panel,
                       mine.chain.x, mine.chain.y, S, S);
            }
          });
        }
      }
    }

    for (int64_t segment = segments - 1; segment >= 0; --segment) {
      const int64_t first = segment * segment_, count = std::min(segment_, total - first);
      for_each<kTeam>(count, [&](int64_t j) {
        const size_t bytes = static_cast<size_t>(shape_.C * shape_.Kp) * sizeof(float);
        std::memset(seg.dq + j * shape_.C * shape_.Kp, 0, bytes);
        std::memset(seg.dk + j * shape_.C * shape_.Kp, 0, bytes);
      });
      for (int64_t h = 0; h < group_; ++h) {
        const int64_t head = head0 + h;
        if (saved == DELTIC_SAVE_ALL) {
          for_each<kTeam>(count, [&](int64_t j) {
            restore(layout, memory.first_chunk[n] + first + j, place(s, head, first + j),
                    operands(seg, j), states(seg, j), mine);
          });
        } else {
          for_each<kTeam>(count, [&](int64_t j) {
            prepare(place(s, head, first + j), operands(seg, j), mine);
          });
          for_each<kTeam>(shape_.panels, [&](int64_t panel) {
            for (int64_t j = 0; j < count; ++j) {
              const ChunkStates c = states(seg, j);
              float* S = c.S + panel * shape_.panel_floats();
              if (j == 0) start(segment, h, panel, S);
              float* next =
                  j + 1 < count ? states(seg, j + 1).S + panel * shape_.panel_floats() : nullptr;
              carry_to(place(s, head, first + j), operands(seg, j), panel, mine.chain.x,
                       c.Y + panel * kPanel * shape_.C, S, next);
            }
          });
        }
        for_each<kTeam>(shape_.panels, [&](int64_t panel) {
          for (int64_t j = count - 1; j >= 0; --j) {
            pull(place(s, head, first + j), operands(seg, j), states(seg, j), panel, mine,
                 gradient_state(seg, h, panel));
          }
        });
        for_each<kTeam>(count, [&](int64_t j) {
          const ChunkPlace at = place(s, head, first + j);
          const ChunkStates c = states(seg, j);
          const int64_t rows = j * shape_.C * shape_.Kp;
          chunk_gradients<kGate>(p_, at, shape_, mine.prepare, mine.gradient, c,
                                 operands(seg, j).decay, seg.dq + rows, seg.dk + rows);
          store_gradients<kGate>(p_, at, shape_, mine.prepare, mine.gradient, c);
        });
        if (has_params()) {
          // In chunk order, whoever computed them.
          for_each<kTeam>(1, [&](int64_t) {
            double* sums = params(memory, n, head);
            for (int64_t j = count - 1; j >= 0; --j) {
              const double* add = states(seg, j).d_param;
              for (int64_t i = 0; i < 1 + shape_.Kp; ++i) sums[i] += add[i];
            }
          });
        }
      }
      for_each<kTeam>(count, [&](int64_t j) {
        const ChunkPlace at = place(s, head0, first + j);
        const int64_t rows = j * shape_.C * shape_.Kp;
        store_head_gradient(p_, p_.q, p_.dq, at, k_head, shape_.Kp, p_.scale, mine.prepare.k,
                            seg.dq + rows);
        store_head_gradient(p_, p_.k, p_.dk, at, k_head, shape_.Kp, 1.0f, mine.prepare.k,
                            seg.dk + rows);
      });
    }
    for_each<kTeam>(group_ * shape_.panels, [&](int64_t i) {
      store_state(p_.d_initial, p_.d_initial ? n : -1, head0 + i / shape_.panels, shape_,
                  i % shape_.panels, gradient_state(seg, i / shape_.panels, i % shape_.panels));
    });
  }

  float* gradient_state(const SegmentMemory& seg, int64_t h, int64_t panel) const {
    return seg.dS + h * state_floats() + panel * shape_.panel_floats();
  }
  double* params(const Memory& memory, int64_t n, int64_t head) const {
    return memory.params + (n * p_.HV + head) * (1 + shape_.Kp);
  }
  const float* saved_state(int64_t index, int64_t head) const {
    return saved_payload(p_.saved) + (index * p_.HV + head) * state_floats();
  }

  void prepare(const ChunkPlace& at, const Operands& to, const ThreadMemory& mine) const {
    prepare_chunk<kGate>(p_, at, shape_.Kp, Fp32Engine::redirect(mine.prepare, to), Fp32Engine());
  }

  // The forward's chain without outputs: y and the state after the chunk (to `next`, may be S
  // itself).
  template <int64_t kWidth>
  void carry_width(const ChunkPlace& at, const Operands& ops, int64_t panel, float* x, float* y,
                   const float* S, float* next) const {
    using Products = PanelProducts<kWidth>;
    const int64_t rows = rows_of(at.length);
    load_panel_rows(p_.v, at, shape_, panel, ops.beta, x);
    Products::subtract(ops.kd, shape_.Kp, rows, shape_.K, S, x);
    Products::lower(ops.inverse, shape_.C, rows, x, y);
    if (next != nullptr) {
      Products::update(ops.decay, ops.kg, shape_.Kp, at.length, shape_.Kp, y, S, next);
    }
  }
  void carry_to(const ChunkPlace& at, const Operands& ops, int64_t panel, float* x, float* y,
                const float* S, float* next) const {
    if (shape_.panel_width(panel) == 32) {
      carry_width<32>(at, ops, panel, x, y, S, next);
    } else {
      carry_width<16>(at, ops, panel, x, y, S, next);
    }
  }

  // One chunk of the chain of gradients on one panel: dX, and dS from after the chunk to before it.
  template <int64_t kWidth>
  void pull_width(const ChunkPlace& at, const Operands& ops, const ChunkStates& c, int64_t panel,
                  const ThreadMemory& mine, float* dS) const {
    using Products = GradientProducts<kWidth>;
    const int64_t rows = rows_of(at.length), Kp = shape_.Kp;
    float *d_o = mine.chain.x, *dY = mine.chain.y, *dX = c.dX + panel * kPanel * shape_.C;
    std::memcpy(c.dS + panel * shape_.panel_floats(), dS,
                static_cast<size_t>(Kp * kWidth) * sizeof(float));
    load_panel_rows(p_.d_o, at, shape_, panel, nullptr, d_o);
    Products::pull(ops.scores, shape_.C, rows, d_o, ops.kg, Kp, shape_.K, dS, dY);
    Products::lower_transposed(ops.inverse, shape_.C, rows, dY, dX);
    Products::push(ops.decay, ops.qd, ops.kd, Kp, at.length, Kp, d_o, dX, dS);
  }
  void pull(const ChunkPlace& at, const Operands& ops, const ChunkStates& c, int64_t panel,
            const ThreadMemory& mine, float* dS) const {
    if (shape_.panel_width(panel) == 32) {
      pull_width<32>(at, ops, c, panel, mine, dS);
    } else {
      pull_width<16>(at, ops, c, panel, mine, dS);
    }
  }

  // A chunk whose state, new values, inverse and scores were kept: only its rows are formed again.
  void restore(const SavedLayout& layout, int64_t chunk, const ChunkPlace& at, const Operands& ops,
               const ChunkStates& c, const ThreadMemory& mine) const {
    const float* from = saved_payload(p_.saved) + (chunk * p_.HV + at.head) * layout.chunk_floats();
    const auto copy = [&](float* to, int64_t n) {
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      from += n;
    };
    copy(c.S, layout.state_floats);
    copy(c.Y, layout.y_floats);
    copy(ops.inverse, layout.square_floats);
    copy(ops.scores, layout.square_floats);
    prepare_rows<kGate>(p_, at, shape_.Kp, Fp32Engine::redirect(mine.prepare, ops));
  }

  void zero_padding_rows() const {
    const auto zero = [&](const Rows& x, int64_t t, int64_t heads, int64_t width) {
      for (int64_t h = 0; x && h < heads; ++h) zero_row(x.data, x.dtype, x.at(0, t, h), width);
    };
#pragma omp for schedule(static) nowait
    for (int64_t t = padding_begin(p_); t < p_.T; ++t) {
      zero(p_.dq, t, p_.H, p_.K), zero(p_.dk, t, p_.H, p_.K), zero(p_.dv, t, p_.HV, p_.V);
      zero(p_.dbeta, t, p_.HV, 1), zero(p_.dg, t, p_.HV, kGate == Gate::channel ? p_.K : 1);
    }
  }

  // The parameters' gradients: sequences in order, rounded once.
  void store_parameters(const Memory& memory) const {
    const int64_t width = kGate == Gate::channel ? p_.K : 1;
    for (int64_t h = 0; has_params() && h < p_.HV; ++h) {
      for (int64_t i = 0; i < 1 + width; ++i) {
        double sum = 0;
        for (int64_t n = 0; n < p_.N; ++n) sum += params(memory, n, h)[i];
        if (i == 0 && p_.dA_log) store(p_.dA_log.data, p_.dA_log.dtype, p_.dA_log.at(h), sum);
        if (i > 0 && p_.ddt_bias) {
          store(p_.ddt_bias.data, p_.ddt_bias.dtype, p_.ddt_bias.at(h * width + i - 1), sum);
        }
      }
    }
  }

  const Problem& p_;
  Shape shape_;
  int64_t segment_, group_;
  int threads_;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
