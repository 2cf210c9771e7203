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

#include "core/error.h"
#include "cpu/gradients.h"
#include "cpu/saved.h"
#include "cpu/schedule.h"
#include "cpu/simd/gradients-inl.h"
#include "cpu/team.h"

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
      : p_(p),
        shape_(p, Chain::kKeyAlign, p.chunk),
        segment_(segment_chunks(p)),
        group_(p.HV / p.H) {
    const double pieces = static_cast<double>(std::max<int64_t>(1, p.N * p.H)) *
                          static_cast<double>(std::max(segment_, shape_.panels));
    threads_ = useful_threads(p, pieces, 3 * forward_ns(p) / pieces);
  }

  size_t workspace_bytes() const {
    Scratch m(nullptr);
    if (has_tasks()) Memory(m, *this);
    return m.used();
  }

  void run(std::span<std::byte> workspace) const {
    const Kept kept(p_);
    if (p_.saved.bytes < kept.layout.bytes) {
      fail(DELTIC_INVALID_ARGUMENT, "backward: saved: expected ", kept.layout.bytes, " bytes, got ",
           p_.saved.bytes);
    }
    if (!has_tasks()) return;
    Scratch m(workspace.data());
    const Memory memory(m, *this);
    count_saved(p_, segment_, memory.first_state, memory.first_chunk);
    const int threads = TeamClock::limit(threads_);
    const TaskOrder order =
        order_tasks(p_, threads, p_.H, most_heads(), memory.order, memory.loads);
    const bool whole = order.is_balanced && whole_tasks_at_once() >= threads;
    const int64_t blocks = (p_.H + order.heads_at_once - 1) / order.heads_at_once;
    run_team(threads, [&](const Member& member) {
      const FlushDenormals flush;
      chain_.enter();
      const ThreadMemory mine(memory, member, *this);
      if (whole) {
        const SegmentMemory seg(memory, member.index, *this, false);
        member.for_each(p_.N * blocks, [&](int64_t i) {
          const int64_t head = i % blocks * order.heads_at_once;
          Task<false>(*this, memory, seg, mine, kept, memory.order[i / blocks], head,
                      std::min(order.heads_at_once, p_.H - head))
              .run();
        });
      } else {
        const SegmentMemory seg(memory, 0, *this, true);
        for (int64_t i = 0; i < p_.N * p_.H; ++i) {
          Task<true>(*this, memory, seg, mine, kept, memory.order[i / p_.H], i % p_.H, 1).run();
        }
      }
      chain_.leave();
    });
    store_parameter_gradients(p_, memory.params);
    zero_gradient_padding(p_);
  }

 private:
  int64_t state_floats() const { return shape_.state_floats(); }
  bool has_tasks() const { return has_tokens_or_states(p_) || has_params(); }

  // What the forward kept.
  struct Kept {
    deltic_save save;
    SavedLayout layout;
    explicit Kept(const Problem& p)
        : save(check_saved_header(p, Chain::kArithmetic)), layout(p, save) {}
  };

  struct Memory {
    int64_t *order, *loads;  // [N], [threads]
    int64_t* first_state;    // [N] index of a sequence's first kept state
    int64_t* first_chunk;    // [N]
    double* params;          // [N][HV][sums_per_head]
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
      params = m.take<double>(b.has_params() ? b.p_.N : 0, b.p_.HV, b.sums_per_head());
      threads = m.take<std::byte>(thread_bytes, b.threads_);
      segments =
          m.take<std::byte>(std::max(static_cast<int64_t>(team.used()),
                                     checked_product(segment_bytes, b.whole_tasks_at_once())));
    }
  };
  bool has_params() const { return p_.gate_form != DELTIC_GATE_LOG_DECAY; }
  int64_t sums_per_head() const { return 1 + gate_width(p_); }  // A_log, then dt_bias
  int64_t whole_tasks_at_once() const { return std::min<int64_t>(threads_, p_.N * p_.H); }

  struct ThreadMemory {
    Scratch m;
    PrepareScratch prepare;
    ChainScratch chain;
    GradientScratch gradient;
    Room room;
    const Member& member;
    ThreadMemory(const Memory& memory, const Member& thread, const Backward& b)
        : m(memory.threads + static_cast<size_t>(thread.index) * memory.thread_bytes),
          prepare(m, b.shape_.C, b.shape_.Kp, kGate == Gate::channel, Chain::kTiles),
          chain(m, b.shape_, Chain::kTiles),
          gradient(m, b.shape_, kGate == Gate::channel),
          room(m, b.shape_, kGate == Gate::channel),
          member(thread) {}
  };

  // A chunk between its preparation and its gradients.
  struct Chunk {
    Operands operands;
    float *k, *q, *e, *k_inverse_norm, *q_inverse_norm;  // as PrepareScratch has them
    float *S, *Y;     // incoming state and v_new, in panels; elsewhere if they were kept
    double* d_param;  // [1 + Kp] sums of this chunk: dA_log, ddt_bias
    ChunkStates states;
    std::byte* steps;  // Chain::Steps

    Chunk(Scratch& m, const Shape& s) : operands(m, s) {
      k = m.take<float>(s.C, s.Kp), q = m.take<float>(s.C, s.Kp);
      e = m.take<float>(kGate == Gate::channel ? s.C * s.Kp : s.C);
      k_inverse_norm = m.take<float>(s.C), q_inverse_norm = m.take<float>(s.C);
      S = m.take<float>(s.state_floats()), Y = m.take<float>(s.panels, kPanel, s.C);
      d_param = m.take<double>(1 + s.Kp);
      states = {S, Y, nullptr, nullptr};
    }
  };

  // What one task holds for the segment it works on. A team needs the steps and gradients of all
  // its chunks at once, a single thread the steps of a chunk, the gradients of it and of the one
  // before it.
  struct SegmentMemory {
    std::byte *chunks, *steps, *gradients;
    float *dq, *dk;  // [segment C][Kp]
    float* dS;       // [value heads] gradients of the state, in panels
    float* starts;   // [value heads][segments] states at segment starts, where none were saved
    size_t chunk_bytes, step_bytes, gradient_bytes;
    int64_t num_steps, num_gradients;

    SegmentMemory(Scratch& m, const Backward& b, bool team) {
      const Shape& s = b.shape_;
      Scratch chunk(nullptr), step(nullptr), gradient(nullptr);
      Chunk(chunk, s);
      typename Chain::Steps(step, b.p_, s, nullptr);
      gradient.take<float>(s.panels, s.panel_floats() + kPanel * s.C);
      chunk_bytes = chunk.used(), step_bytes = step.used(), gradient_bytes = gradient.used();
      chunks = m.take<std::byte>(chunk_bytes, b.segment_);
      num_steps = team ? b.segment_ : 1;
      steps = m.take<std::byte>(step_bytes, num_steps);
      num_gradients = team ? b.segment_ : 2;
      gradients = m.take<std::byte>(gradient_bytes, num_gradients);
      dq = m.take<float>(b.segment_, s.C, s.Kp), dk = m.take<float>(b.segment_, s.C, s.Kp);
      const int64_t heads = b.most_heads() * b.group_;
      dS = m.take<float>(heads, b.state_floats());
      starts =
          m.take<float>(b.p_.saved.bytes > 0 ? 0 : heads, b.max_segments() - 1, b.state_floats());
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
    c.steps = seg.steps + static_cast<size_t>(j % seg.num_steps) * seg.step_bytes;
    c.states.dS = gradient_after(seg, j);
    c.states.dX = gradient_after(seg, j) + state_floats();
    return c;
  }
  // The gradient of the state after chunk j, in panels.
  float* gradient_after(const SegmentMemory& seg, int64_t j) const {
    return reinterpret_cast<float*>(seg.gradients + static_cast<size_t>(j % seg.num_gradients) *
                                                        seg.gradient_bytes);
  }
  int64_t chunks(const Sequence& s) const { return (s.length + shape_.C - 1) / shape_.C; }
  ChunkPlace place(const Sequence& s, int64_t head, int64_t chunk) const {
    const int64_t first = chunk * shape_.C;
    return {s.batch, s.begin + first, std::min(shape_.C, s.length - first), head};
  }

  // q/k heads that a whole task takes segment by segment.
  int64_t most_heads() const {
    return most_heads_at_once(p_.H, checked_product(group_, state_floats(), sizeof(float)),
                              shape_.C);
  }

  // One sequence and some q/k heads with the value heads of their groups, by one thread or by the
  // team. h counts these value heads.
  template <bool kTeam>
  struct Task {
    const Backward& b;
    const Memory& memory;
    const SegmentMemory& seg;
    const ThreadMemory& mine;
    const Kept& kept;
    int64_t n, k_head0, k_heads, head0, length, segments;
    Sequence s;
    Ahead ahead{};

    Task(const Backward& backward, const Memory& m, const SegmentMemory& segment,
         const ThreadMemory& thread, const Kept& k, int64_t sequence_index, int64_t first_head,
         int64_t num_heads)
        : b(backward),
          memory(m),
          seg(segment),
          mine(thread),
          kept(k),
          n(sequence_index),
          k_head0(first_head),
          k_heads(num_heads),
          head0(first_head * backward.group_),
          s(sequence(backward.p_, n)) {
      // With all kept nothing is carried through a segment: chunk by chunk, heads side by side.
      length = !kTeam && kept.save == DELTIC_SAVE_ALL ? 1 : b.segment_;
      segments = (b.chunks(s) + length - 1) / length;
    }

    void run() {
      const int64_t panels = b.shape_.panels, heads = k_heads * b.group_;
      for_each<kTeam>(heads * panels, [&](int64_t i) {
        load_state(b.p_.d_final, b.p_.d_final ? n : -1, head0 + i / panels, b.shape_, i % panels,
                   b.gradient_state(seg, i / panels, i % panels));
        if (b.has_params() && i % panels == 0) {
          double* sums = b.params(memory, n, head0 + i / panels);
          std::fill_n(sums, b.sums_per_head(), 0.0);
        }
      });
      for (int64_t h = 0; kept.save == DELTIC_SAVE_NONE && h < heads; ++h) find_starts(h);
      for (int64_t segment = segments - 1; segment >= 0; --segment) {
        const int64_t first = segment * length;
        const int64_t count = std::min(length, b.chunks(s) - first);
        for (int64_t h = 0; h < heads; ++h) {
          if (kTeam || kept.save != DELTIC_SAVE_ALL) find_states(h, segment, count);
          find_gradients(h, first, count);
          if (b.has_params()) add_parameters(h, count);
          if ((h + 1) % b.group_ != 0) continue;
          for_each<kTeam>(count, [&](int64_t j) { store_keys(h / b.group_, first, j); });
        }
      }
      for_each<kTeam>(heads * panels, [&](int64_t i) {
        store_state(b.p_.d_initial, b.p_.d_initial ? n : -1, head0 + i / panels, b.shape_,
                    i % panels, b.gradient_state(seg, i / panels, i % panels));
      });
    }

    // body(i) for i < count: by this thread, or shared by the team, which meets at the end.
    template <bool kShared, class Body>
    void for_each(int64_t count, const Body& body) const {
      if constexpr (kShared) {
        mine.member.for_each(count, body);
      } else {
        for (int64_t i = 0; i < count; ++i) body(i);
      }
    }

    ChunkPlace place(int64_t h, int64_t index) const { return b.place(s, head0 + h, index); }

    // The state a segment starts from.
    void start(int64_t segment, int64_t h, int64_t panel, float* S) const {
      if (segment == 0) {
        load_state(b.p_.state_in, s.read_slot, head0 + h, b.shape_, panel, S);
      } else if (kept.save == DELTIC_SAVE_STATES) {
        const int64_t index = (memory.first_state[n] + segment - 1) * b.p_.HV + head0 + h;
        b.load_saved(saved_payload(b.p_.saved) + index * kept.layout.state_floats, panel, S);
      } else {
        std::memcpy(S, found_start(segment, h, panel),
                    static_cast<size_t>(b.shape_.panel_floats()) * sizeof(float));
      }
    }
    float* found_start(int64_t segment, int64_t h, int64_t panel) const {
      return seg.starts + (h * (b.max_segments() - 1) + segment - 1) * b.state_floats() +
             panel * b.shape_.panel_floats();
    }

    // The states at segment starts, from the first token on, where none were kept.
    void find_starts(int64_t h) {
      for (int64_t segment = 0; segment + 1 < segments; ++segment) {
        const auto at = [&](int64_t j) { return place(h, segment * b.segment_ + j); };
        through_segment(
            b.segment_, [&](int64_t j) { b.prepare(at(j), b.chunk(seg, j), mine); },
            [&](int64_t j, int64_t panel) {
              float* S = found_start(segment + 1, h, panel);
              if (j == 0) start(segment, h, panel, S);
              b.carry(at(j), b.chunk(seg, j), panel, mine.chain.y, S, S, nullptr, mine);
            });
      }
    }

    // Operands, incoming state and v_new of every chunk of a segment.
    void find_states(int64_t h, int64_t segment, int64_t count) {
      const int64_t first = segment * b.segment_;
      const auto at = [&](int64_t j) { return place(h, first + j); };
      if (kept.save == DELTIC_SAVE_ALL) {
        return for_each<kTeam>(count, [&](int64_t j) { restored(h, first, j); });
      }
      through_segment(
          count,
          [&](int64_t j) {
            b.prepare(at(j), b.chunk(seg, j), mine);
            look_ahead([&] {
              if (j + 1 == count) return add_rows(at(j), b.p_.d_o, at(j).head, b.p_.V, &ahead);
              add_keys<kGate>(b.p_, at(j + 1), &ahead);
              add_rows(at(j + 1), b.p_.v, at(j).head, b.p_.V, &ahead);
            });
          },
          [&](int64_t j, int64_t panel) {
            const Chunk c = b.chunk(seg, j);
            const int64_t state = panel * b.shape_.panel_floats();
            if (j == 0) start(segment, h, panel, c.S + state);
            float* next = j + 1 < count ? b.chunk(seg, j + 1).S + state : nullptr;
            b.carry(at(j), c, panel, c.Y + panel * kPanel * b.shape_.C, c.S + state, next, &ahead,
                    mine);
          });
    }

    // A chunk of which all was kept: S and Y stay where they are, only its rows are formed again.
    void restored(int64_t h, int64_t first, int64_t j) const {
      b.restore(kept_chunk(h, first, j), kept.layout, place(h, first + j), b.chunk(seg, j), mine);
    }
    const float* kept_chunk(int64_t h, int64_t first, int64_t j) const {
      const int64_t index = (memory.first_chunk[n] + first + j) * b.p_.HV + head0 + h;
      return saved_payload(b.p_.saved) + index * kept.layout.chunk_floats();
    }
    Chunk chunk(int64_t h, int64_t first, int64_t j) const {
      Chunk c = b.chunk(seg, j);
      if (kept.save == DELTIC_SAVE_ALL) {
        const float* from = kept_chunk(h, first, j);
        if (kept.layout.state_floats == b.state_floats()) c.states.S = from;
        c.states.Y = from + kept.layout.state_floats;
      }
      return c;
    }

    // The gradient of the state backwards through a segment, and each chunk's gradients.
    void find_gradients(int64_t h, int64_t first, int64_t count) {
      const auto pull = [&](int64_t j, int64_t panel) {
        const int64_t state = panel * b.shape_.panel_floats();
        float* outside = b.gradient_state(seg, h, panel);
        if (j == count - 1) {
          std::memcpy(b.gradient_after(seg, j) + state, outside,
                      static_cast<size_t>(b.shape_.panel_floats()) * sizeof(float));
        }
        float* before = j > 0 ? b.gradient_after(seg, j - 1) + state : outside;
        const Chunk c = b.chunk(seg, j);
        with_width(b.shape_.panel_width(panel), [&](auto width) {
          Engine::template pull<width()>(b.p_, place(h, first + j), b.shape_, c.operands, panel,
                                         mine.chain, c.states.dX + panel * kPanel * b.shape_.C,
                                         c.states.dS + state, before, &ahead);
        });
      };
      const auto give = [&](int64_t j) {
        const Chunk c = chunk(h, first, j);
        const ChunkPlace at = place(h, first + j);
        const int64_t rows = j * b.shape_.C * b.shape_.Kp;
        const PrepareScratch scratch = redirect(mine, c);
        chunk_gradients<kGate, Engine>(b.p_, at, b.shape_, scratch, mine.gradient, mine.room,
                                       c.states, h % b.group_ == 0, seg.dq + rows, seg.dk + rows);
        store_gradients<kGate>(b.p_, at, b.shape_, scratch, mine.gradient, c.states, c.d_param);
      };
      if constexpr (kTeam) {
        for_each<true>(b.shape_.panels, [&](int64_t panel) {
          for (int64_t j = count - 1; j >= 0; --j) pull(j, panel);
        });
        for_each<true>(count, give);
      } else {
        for (int64_t j = count - 1; j >= 0; --j) {
          const bool restores = kept.save == DELTIC_SAVE_ALL;
          if (restores) restored(h, first, j);
          look_ahead([&] {
            const ChunkPlace at = place(h, first + j);
            add_rows(at, b.p_.dv, at.head, b.p_.V, &ahead);
            if (kGate == Gate::channel) add_rows(at, b.p_.dg, at.head, b.p_.K, &ahead);
            const bool is_last_head = !restores || h + 1 == k_heads * b.group_;
            if (is_last_head && first + j == 0) return;
            const ChunkPlace then = !is_last_head ? place(h + 1, first + j)
                                    : restores    ? place(0, first + j - 1)
                                                  : place(h, first + j - 1);
            add_rows(then, b.p_.d_o, then.head, b.p_.V, &ahead);
            if (restores) add_keys<kGate>(b.p_, then, &ahead);
          });
          for (int64_t panel = 0; panel < b.shape_.panels; ++panel) pull(j, panel);
          give(j);
        }
      }
    }

    // In chunk order, whoever computed them.
    void add_parameters(int64_t h, int64_t count) {
      for_each<kTeam>(1, [&](int64_t) {
        double* sums = b.params(memory, n, head0 + h);
        for (int64_t j = count - 1; j >= 0; --j) {
          const double* add = b.chunk(seg, j).d_param;
          for (int64_t i = 0; i < b.sums_per_head(); ++i) sums[i] += add[i];
        }
      });
    }

    // dq and dk of a chunk; k and q are the same for all value heads of the group.
    void store_keys(int64_t k_head, int64_t first, int64_t j) const {
      const ChunkPlace at = place(k_head * b.group_, first + j);
      const int64_t rows = j * b.shape_.C * b.shape_.Kp;
      const Chunk c = b.chunk(seg, j);
      const float* k_norms = b.p_.l2norm ? c.k_inverse_norm : nullptr;
      const float* q_norms = b.p_.l2norm ? c.q_inverse_norm : nullptr;
      store_head_gradient(b.p_.dq, at, k_head0 + k_head, b.p_.K, b.shape_.Kp, b.p_.scale, c.q,
                          q_norms, seg.dq + rows);
      store_head_gradient(b.p_.dk, at, k_head0 + k_head, b.p_.K, b.shape_.Kp, 1.0f, c.k, k_norms,
                          seg.dk + rows);
    }

    // A single thread fetches the next chunk's rows between the products of this one.
    template <class Add>
    void look_ahead(const Add& add) {
      if constexpr (kTeam) return;
      ahead = Ahead();
      add();
      ahead.spread(b.shape_.panels * Chain::pauses(b.shape_.C));
    }

    // The chain of states through `count` chunks: prepare(j), then carry(j, panel) in order of j.
    template <class Prepare, class Carry>
    void through_segment(int64_t count, const Prepare& prepare, const Carry& carry) const {
      if constexpr (kTeam) {
        for_each<true>(count, prepare);
        for_each<true>(b.shape_.panels, [&](int64_t panel) {
          for (int64_t j = 0; j < count; ++j) carry(j, panel);
        });
      } else {
        for (int64_t j = 0; j < count; ++j) {
          prepare(j);
          for (int64_t panel = 0; panel < b.shape_.panels; ++panel) carry(j, panel);
        }
      }
    }
  };

  float* gradient_state(const SegmentMemory& seg, int64_t h, int64_t panel) const {
    return seg.dS + h * state_floats() + panel * shape_.panel_floats();
  }
  double* params(const Memory& memory, int64_t n, int64_t head) const {
    return memory.params + (n * p_.HV + head) * sums_per_head();
  }

  // Where a chunk's preparation goes: what its gradients need stays with the chunk.
  static PrepareScratch redirect(const ThreadMemory& mine, const Chunk& c) {
    PrepareScratch s = Chain::redirect(mine.prepare, c.operands);
    s.k = c.k, s.q = c.q, s.e = c.e;
    s.k_inverse_norm = c.k_inverse_norm, s.q_inverse_norm = c.q_inverse_norm;
    return s;
  }
  typename Chain::Steps steps(const Chunk& c) const {
    Scratch m(c.steps);
    return typename Chain::Steps(m, p_, shape_, c.k);
  }
  void prepare(const ChunkPlace& at, const Chunk& c, const ThreadMemory& mine) const {
    const PrepareScratch s = redirect(mine, c);
    prepare_chunk<kGate>(p_, at, shape_.C, shape_.Kp, s, chain_);
    Chain::template cut<kGate>(p_, s, at, c.operands, shape_, steps(c));
    Engine::pack(s, c.operands, shape_, rows_of(at.length));
  }
  // A panel of a saved state: K rounded up to 16 rows there, to this engine's Kp here.
  void load_saved(const float* state, int64_t panel, float* S) const {
    const int64_t width = shape_.panel_width(panel), rows = padded(p_.K);
    std::memcpy(S, state + panel * rows * kPanel,
                static_cast<size_t>(rows * width) * sizeof(float));
    std::fill(S + rows * width, S + shape_.Kp * width, 0.0f);
  }
  // A chunk from what was kept of it, `from`; S only where it has not this engine's number of rows.
  void restore(const float* from, const SavedLayout& layout, const ChunkPlace& at, const Chunk& c,
               const ThreadMemory& mine) const {
    for (int64_t panel = 0; layout.state_floats != state_floats() && panel < shape_.panels;
         ++panel) {
      load_saved(from, panel, c.S + panel * shape_.panel_floats());
    }
    from += layout.state_floats + layout.y_floats;
    const PrepareScratch s = redirect(mine, c);
    const size_t bytes = static_cast<size_t>(layout.square_floats) * sizeof(float);
    std::memcpy(s.inverse, from, bytes);
    std::memcpy(s.scores, from + layout.square_floats, bytes);
    prepare_rows<kGate>(p_, at, shape_.C, shape_.Kp, s);
    Engine::pack(s, c.operands, shape_, rows_of(at.length));
  }

  // The forward's chain without outputs, in its steps: y and the state after the chunk (to `next`,
  // may be S itself).
  void carry(const ChunkPlace& at, const Chunk& c, int64_t panel, float* y, const float* S,
             float* next, Ahead* ahead, const ThreadMemory& mine) const {
    const int64_t size = Chain::step(p_);
    float* to = next != nullptr ? next : mine.chain.kept;
    for (int64_t t = 0; t < at.length; t += size) {
      const ChunkPlace part{at.batch, at.begin + t, std::min(size, at.length - t), at.head};
      const auto& operands = Chain::template step_at<kGate>(c.operands, steps(c), p_, shape_, t);
      with_width(shape_.panel_width(panel), [&](auto width) {
        float* y_part = y + t * width();
        Chain::template values<width()>(p_, part, shape_, operands, panel, mine.chain, S, y_part,
                                        ahead);
        if (next == nullptr && t + size >= at.length) return;
        Chain::template advance<width()>(part, shape_, operands, mine.chain, y_part, S, to, ahead);
      });
      S = to;
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
