// The chunked backward: segments of chunks from the last to the first. In a segment, for each value
// head of a group: chunks are prepared and the state is carried forwards through them; then its
// gradient is pulled backwards through them, and each chunk gives its gradients. Preparing and
// giving are independent over chunks, the two chains over value columns.
//
// Two schedules, same bits. Whole tasks (sequence, q/k head) go to threads where there are enough
// of them, and go through a segment chunk by chunk. Else all threads share a task, stage by stage.
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

template <Gate kGate, class Engine>
class Backward {
 public:
  using Chain = typename Engine::Chain;
  using Operands = typename Engine::Operands;
  using Room = typename Engine::Room;

  explicit Backward(const Problem& p)
      : p_(p), shape_(p, Chain::kKeyAlign), segment_(segment_chunks(p)), group_(p.HV / p.H) {
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
    const deltic_save saved = check_saved_header(p_, Chain::kArithmetic);
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
      chain_.enter();
      zero_padding_rows();
      const int thread = omp_get_thread_num();
      const ThreadMemory mine(memory, thread, *this);
      if (whole) {
        const SegmentMemory seg(memory, thread, *this, false);
        for (int64_t i = next++; i < tasks; i = next++) {
          run_task<false>(memory, seg, mine, saved, layout, memory.order[i / p_.H], i % p_.H);
        }
      } else {
        const SegmentMemory seg(memory, 0, *this, true);
        for (int64_t i = 0; i < tasks; ++i) {
          run_task<true>(memory, seg, mine, saved, layout, memory.order[i / p_.H], i % p_.H);
        }
      }
      chain_.leave();
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
      Scratch thread(nullptr), whole(nullptr), team(nullptr);
      PrepareScratch(thread, b.shape_.C, b.shape_.Kp, kGate == Gate::channel, Chain::kTiles);
      ChainScratch(thread, b.shape_, Chain::kTiles);
      GradientScratch(thread, b.shape_, kGate == Gate::channel);
      Room(thread, b.shape_, kGate == Gate::channel);
      SegmentMemory(whole, b, false), SegmentMemory(team, b, true);
      thread_bytes = thread.used(), segment_bytes = whole.used();
      order = m.take<int64_t>(b.p_.N), loads = m.take<int64_t>(b.threads_);
      first_state = m.take<int64_t>(b.p_.N + 1), first_chunk = m.take<int64_t>(b.p_.N + 1);
      params = m.take<double>(b.has_params() ? b.p_.N * b.p_.HV * (1 + b.shape_.Kp) : 0);
      threads = m.take<std::byte>(static_cast<int64_t>(thread_bytes) * b.threads_);
      segments = m.take<std::byte>(static_cast<int64_t>(
          std::max(team.used(), segment_bytes * static_cast<size_t>(b.whole_tasks_at_once()))));
    }
  };
  bool has_params() const { return p_.gate_form != DELTIC_GATE_LOG_DECAY; }
  int64_t whole_tasks_at_once() const { return std::min<int64_t>(threads_, p_.N * p_.H); }

  struct ThreadMemory {
    Scratch m;
    PrepareScratch prepare;
    ChainScratch chain;
    GradientScratch gradient;
    Room room;
    ThreadMemory(const Memory& memory, int thread, const Backward& b)
        : m(memory.threads + static_cast<size_t>(thread) * memory.thread_bytes),
          prepare(m, b.shape_.C, b.shape_.Kp, kGate == Gate::channel, Chain::kTiles),
          chain(m, b.shape_, Chain::kTiles),
          gradient(m, b.shape_, kGate == Gate::channel),
          room(m, b.shape_, kGate == Gate::channel) {}
  };

  // A chunk between its preparation and its gradients.
  struct Chunk {
    Operands operands;
    float *k, *q, *e, *k_inverse_norm, *q_inverse_norm;  // as PrepareScratch has them
    ChunkStates states;
    double* d_param;  // [1 + Kp] sums of this chunk: dA_log, ddt_bias

    Chunk(Scratch& m, const Shape& s) : operands(m, s) {
      k = m.take<float>(s.C * s.Kp), q = m.take<float>(s.C * s.Kp);
      e = m.take<float>(kGate == Gate::channel ? s.C * s.Kp : s.C);
      k_inverse_norm = m.take<float>(s.C), q_inverse_norm = m.take<float>(s.C);
      states.S = m.take<float>(s.panels * s.panel_floats());
      states.Y = m.take<float>(s.panels * kPanel * s.C);
      d_param = m.take<double>(1 + s.Kp);
    }
  };

  // What one task holds for the segment it works on. A team needs the gradients of all its chunks
  // at once, a single thread those of one.
  struct SegmentMemory {
    std::byte *chunks, *gradients;
    float *dq, *dk;  // [segment C][Kp]
    float* dS;       // [group] gradients of the state, in panels
    float* starts;   // [group][segments] states at segment starts, where none were saved
    size_t chunk_bytes, gradient_bytes;

    SegmentMemory(Scratch& m, const Backward& b, bool team) {
      const Shape& s = b.shape_;
      Scratch chunk(nullptr), gradient(nullptr);
      Chunk(chunk, s);
      gradient.take<float>(s.panels * (s.panel_floats() + kPanel * s.C));
      chunk_bytes = chunk.used(), gradient_bytes = team ? gradient.used() : 0;
      chunks = m.take<std::byte>(static_cast<int64_t>(chunk_bytes) * b.segment_);
      gradients =
          m.take<std::byte>(static_cast<int64_t>(gradient.used()) * (team ? b.segment_ : 1));
      dq = m.take<float>(b.segment_ * s.C * s.Kp), dk = m.take<float>(b.segment_ * s.C * s.Kp);
      dS = m.take<float>(b.group_ * b.state_floats());
      starts = m.take<float>(
          b.p_.saved.bytes > 0 ? 0 : b.group_ * (b.max_segments() - 1) * b.state_floats());
    }
    SegmentMemory(const Memory& memory, int index, const Backward& b, bool team)
        : SegmentMemory(at(memory, index), b, team) {}

   private:
    SegmentMemory(Scratch&& m, const Backward& b, bool team) : SegmentMemory(m, b, team) {}
    static Scratch at(const Memory& memory, int index) {
      return Scratch(memory.segments + static_cast<size_t>(index) * memory.segment_bytes);
    }
  };
  int64_t max_segments() const {
    const int64_t chunks = std::max<int64_t>(1, (p_.T + shape_.C - 1) / shape_.C);
    return (chunks + segment_ - 1) / segment_;
  }

  Chunk chunk(const SegmentMemory& seg, int64_t j) const {
    Scratch m(seg.chunks + static_cast<size_t>(j) * seg.chunk_bytes);
    Chunk c(m, shape_);
    c.states.dS =
        reinterpret_cast<float*>(seg.gradients + static_cast<size_t>(j) * seg.gradient_bytes);
    c.states.dX = c.states.dS + shape_.panels * shape_.panel_floats();
    return c;
  }
  int64_t chunks(const Sequence& s) const { return (s.length + shape_.C - 1) / shape_.C; }
  ChunkPlace place(const Sequence& s, int64_t head, int64_t chunk) const {
    const int64_t first = chunk * shape_.C;
    return {s.batch, s.begin + first, std::min(shape_.C, s.length - first), head};
  }

  bool is_balanced(const Memory& memory) const {
    return order_tasks(p_, threads_, p_.H, memory.order, memory.loads).is_balanced &&
           whole_tasks_at_once() >= threads_;
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
      if (saved == DELTIC_SAVE_STATES) {
        const int64_t index = memory.first_state[n] + segment - 1;
        return load_saved(
            saved_payload(p_.saved) + (index * p_.HV + head0 + h) * layout.state_floats, panel, S);
      }
      const float* from = seg.starts + (h * (max_segments() - 1) + segment - 1) * state_floats();
      std::memcpy(S, from + panel * shape_.panel_floats(),
                  static_cast<size_t>(shape_.panel_floats()) * sizeof(float));
    };

    if (saved == DELTIC_SAVE_NONE) {  // the states at segment starts, from the first token on
      for (int64_t h = 0; h < group_; ++h) {
        for (int64_t segment = 0; segment + 1 < segments; ++segment) {
          const auto at = [&](int64_t j) { return place(s, head0 + h, segment * segment_ + j); };
          const auto state = [&](int64_t panel) {
            return seg.starts + (h * (max_segments() - 1) + segment) * state_floats() +
                   panel * shape_.panel_floats();
          };
          through_segment<kTeam>(
              segment_, [&](int64_t j) { prepare(at(j), chunk(seg, j), mine); },
              [&](int64_t j, int64_t panel) {
                float* S = state(panel);
                if (j == 0) start(segment, h, panel, S);
                carry(at(j), chunk(seg, j), panel, mine.chain.y, S, S, nullptr, mine);
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
        const auto at = [&](int64_t j) { return place(s, head, first + j); };
        // A single thread fetches the next chunk's rows between the products of this one.
        Ahead ahead;
        const auto look_ahead = [&](auto... add) {
          if constexpr (kTeam) return;
          ahead = Ahead();
          (add(), ...);
          ahead.spread(shape_.panels * Chain::kPauses);
        };
        through_segment<kTeam>(
            count,
            [&](int64_t j) {
              if (saved == DELTIC_SAVE_ALL) {
                restore(layout, memory.first_chunk[n] + first + j, at(j), chunk(seg, j), mine);
              } else {
                prepare(at(j), chunk(seg, j), mine);
              }
              look_ahead([&] {
                if (j + 1 == count) return add_rows(at(j), p_.d_o, head, p_.V, &ahead);
                add_keys<kGate>(p_, at(j + 1), &ahead);
                add_rows(at(j + 1), p_.v, head, p_.V, &ahead);
              });
            },
            [&](int64_t j, int64_t panel) {
              if (saved == DELTIC_SAVE_ALL) return;
              const ChunkStates c = chunk(seg, j).states;
              float* S = c.S + panel * shape_.panel_floats();
              if (j == 0) start(segment, h, panel, S);
              float* next = j + 1 < count
                                ? chunk(seg, j + 1).states.S + panel * shape_.panel_floats()
                                : nullptr;
              carry(at(j), chunk(seg, j), panel, c.Y + panel * kPanel * shape_.C, S, next, &ahead,
                    mine);
            });
        const auto pull_panel = [&](int64_t j, int64_t panel) {
          pull(at(j), chunk(seg, j), panel, mine, gradient_state(seg, h, panel), &ahead);
        };
        const auto give = [&](int64_t j) {
          const Chunk c = chunk(seg, j);
          const int64_t rows = j * shape_.C * shape_.Kp;
          const PrepareScratch scratch = redirect(mine, c);
          chunk_gradients<kGate, Engine>(p_, at(j), shape_, scratch, mine.gradient, mine.room,
                                         c.states, seg.dq + rows, seg.dk + rows);
          store_gradients<kGate>(p_, at(j), shape_, scratch, mine.gradient, c.states, c.d_param);
        };
        if constexpr (kTeam) {
          for_each<true>(shape_.panels, [&](int64_t panel) {
            for (int64_t j = count - 1; j >= 0; --j) pull_panel(j, panel);
          });
          for_each<true>(count, give);
        } else {
          for (int64_t j = count - 1; j >= 0; --j) {
            look_ahead([&] {
              add_rows(at(j), p_.dv, head, p_.V, &ahead);
              if (kGate == Gate::channel) add_rows(at(j), p_.dg, head, p_.K, &ahead);
              if (j > 0) add_rows(at(j - 1), p_.d_o, head, p_.V, &ahead);
            });
            for (int64_t panel = 0; panel < shape_.panels; ++panel) pull_panel(j, panel);
            give(j);
          }
        }
        if (has_params()) {
          // In chunk order, whoever computed them.
          for_each<kTeam>(1, [&](int64_t) {
            double* sums = params(memory, n, head);
            for (int64_t j = count - 1; j >= 0; --j) {
              const double* add = chunk(seg, j).d_param;
              for (int64_t i = 0; i < 1 + shape_.Kp; ++i) sums[i] += add[i];
            }
          });
        }
      }
      for_each<kTeam>(count, [&](int64_t j) {
        const ChunkPlace at = place(s, head0, first + j);
        const int64_t rows = j * shape_.C * shape_.Kp;
        const Chunk c = chunk(seg, j);  // k and q are the same for all value heads of the group
        const float* k_norms = p_.l2norm ? c.k_inverse_norm : nullptr;
        const float* q_norms = p_.l2norm ? c.q_inverse_norm : nullptr;
        store_head_gradient(p_.dq, at, k_head, p_.K, shape_.Kp, p_.scale, c.q, q_norms,
                            seg.dq + rows);
        store_head_gradient(p_.dk, at, k_head, p_.K, shape_.Kp, 1.0f, c.k, k_norms, seg.dk + rows);
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

  // The chain of states through `count` chunks: prepare(j), then carry(j, panel) in order of j.
  template <bool kTeam, class Prepare, class Carry>
  void through_segment(int64_t count, const Prepare& prepare, const Carry& carry) const {
    if constexpr (kTeam) {
      for_each<true>(count, prepare);
      for_each<true>(shape_.panels, [&](int64_t panel) {
        for (int64_t j = 0; j < count; ++j) carry(j, panel);
      });
    } else {
      for (int64_t j = 0; j < count; ++j) {
        prepare(j);
        for (int64_t panel = 0; panel < shape_.panels; ++panel) carry(j, panel);
      }
    }
  }

  // Where a chunk's preparation goes: what its gradients need stays with the chunk.
  static PrepareScratch redirect(const ThreadMemory& mine, const Chunk& c) {
    PrepareScratch s = Chain::redirect(mine.prepare, c.operands);
    s.k = c.k, s.q = c.q, s.e = c.e;
    s.k_inverse_norm = c.k_inverse_norm, s.q_inverse_norm = c.q_inverse_norm;
    return s;
  }
  void prepare(const ChunkPlace& at, const Chunk& c, const ThreadMemory& mine) const {
    const PrepareScratch s = redirect(mine, c);
    prepare_chunk<kGate>(p_, at, shape_.Kp, s, chain_);
    Engine::pack(s, c.operands, shape_, rows_of(at.length));
  }
  // A panel of a saved state: K rounded up to 16 rows there, to this engine's Kp here.
  void load_saved(const float* state, int64_t panel, float* S) const {
    const int64_t width = shape_.panel_width(panel), rows = padded(p_.K);
    std::memcpy(S, state + panel * rows * kPanel,
                static_cast<size_t>(rows * width) * sizeof(float));
    std::fill(S + rows * width, S + shape_.Kp * width, 0.0f);
  }
  // A chunk whose state, new values, inverse and scores were kept: only its rows are formed again.
  void restore(const SavedLayout& layout, int64_t index, const ChunkPlace& at, const Chunk& c,
               const ThreadMemory& mine) const {
    const float* from = saved_payload(p_.saved) + (index * p_.HV + at.head) * layout.chunk_floats();
    for (int64_t panel = 0; panel < shape_.panels; ++panel) {
      load_saved(from, panel, c.states.S + panel * shape_.panel_floats());
    }
    from += layout.state_floats;
    const PrepareScratch s = redirect(mine, c);
    const auto copy = [&](float* to, int64_t n) {
      std::memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
      from += n;
    };
    copy(c.states.Y, layout.y_floats);
    copy(s.inverse, layout.square_floats);
    copy(s.scores, layout.square_floats);
    prepare_rows<kGate>(p_, at, shape_.Kp, s);
    Engine::pack(s, c.operands, shape_, rows_of(at.length));
  }

  // The forward's chain without outputs: y and the state after the chunk (to `next`, may be S
  // itself).
  void carry(const ChunkPlace& at, const Chunk& c, int64_t panel, float* y, const float* S,
             float* next, Ahead* ahead, const ThreadMemory& mine) const {
    with_width(shape_.panel_width(panel), [&](auto width) {
      Chain::template values<width()>(p_, at, shape_, c.operands, panel, mine.chain, S, y, ahead);
      if (next == nullptr) return;
      Chain::template advance<width()>(at, shape_, c.operands, mine.chain, y, S, next, ahead);
    });
  }

  // One chunk of the chain of gradients on one panel; c.states keeps the gradient after the chunk.
  void pull(const ChunkPlace& at, const Chunk& c, int64_t panel, const ThreadMemory& mine,
            float* dS, Ahead* ahead) const {
    with_width(shape_.panel_width(panel), [&](auto width) {
      std::memcpy(c.states.dS + panel * shape_.panel_floats(), dS,
                  static_cast<size_t>(shape_.Kp * width()) * sizeof(float));
      Engine::template pull<width()>(p_, at, shape_, c.operands, panel, mine.chain,
                                     c.states.dX + panel * kPanel * shape_.C, dS, ahead);
    });
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
  Chain chain_;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
