// The chunked forward: schedule of chunks, panels and threads, checkpoints, states in and out.
//
// A chunk here is what the engine carries the state through at once, shape_.C tokens. What backward
// asked to be kept is by chunks of the call's length, p_.chunk, of one or more of these.
//
// Two schedules, same bits. Many (sequence, head) tasks: each thread takes whole tasks, longest
// first, and a chunk's operands never leave its L2. Few tasks: all threads work on a group of tasks
// in rounds; round r carries the state through one block of chunks, panel by panel, while the next
// block is prepared, chunk by chunk.
#if defined(DELTIC_CPU_SIMD_FORWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_FORWARD_INL_H_
#undef DELTIC_CPU_SIMD_FORWARD_INL_H_
#else
#define DELTIC_CPU_SIMD_FORWARD_INL_H_
#endif

#include "cpu/saved.h"
#include "cpu/schedule.h"
#include "cpu/simd/chain-inl.h"
#include "cpu/team.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

template <Gate kGate, class Engine>
class Forward {
 public:
  using Operands = typename Engine::Operands;

  explicit Forward(const Problem& p)
      : p_(p),
        shape_(p, Engine::kKeyAlign, Engine::step(p)),
        plan_(forward_plan(p, shape_.panels, shape_.C)),
        saved_(p, p.save) {}

  size_t workspace_bytes() const {
    Scratch arena(nullptr);
    Memory memory(arena, *this);
    return arena.used();
  }

  void run(std::span<std::byte> workspace) const {
    Scratch arena(workspace.data());
    const Memory memory(arena, *this);
    if (p_.save != DELTIC_SAVE_NONE) {
      write_saved_header(p_, p_.save, Engine::kArithmetic);
      count_saved(p_, saved_.segment, memory.first_state, memory.first_chunk);
    }
    if (!has_tokens_or_states(p_)) return;
    const int threads = TeamClock::limit(plan_.threads);
    const TaskOrder order =
        order_tasks(p_, threads, p_.HV, most_heads(), memory.order, memory.loads);
    run_team(threads, [&](const Member& member) {
      const FlushDenormals flush;
      engine_.enter();
      zero_unused(member);
      const ThreadMemory mine(memory, member.index, *this);
      if (order.is_balanced) {
        run_whole_tasks(memory, mine, order.heads_at_once, member);
      } else {
        run_rounds(memory, mine, member);
      }
      engine_.leave();
    });
  }

 private:
  // Where everything lies in the workspace: sizes follow from shapes alone.
  struct Memory {
    int64_t* order;                      // [N] sequences, longest first
    int64_t* loads;                      // [threads]
    int64_t *first_state, *first_chunk;  // [N + 1] of what is saved
    std::byte* threads;                  // scratch of each thread
    std::byte* shared;                   // operands and states: of threads, or of a group's tasks
    size_t thread_bytes, operand_bytes, state_bytes;

    Memory(Scratch& arena, const Forward& f) {
      Scratch one(nullptr), operands(nullptr), state(nullptr);
      PrepareScratch(one, f.most_rows(), f.shape_.Kp, kGate == Gate::channel, Engine::kTiles);
      ChainScratch(one, f.shape_, Engine::kTiles);
      Operands(operands, f.shape_);
      state.take<float>(f.shape_.state_floats());
      thread_bytes = one.used(), operand_bytes = operands.used(), state_bytes = state.used();
      order = arena.take<int64_t>(f.p_.N);
      loads = arena.take<int64_t>(f.plan_.threads);
      const int64_t counts = f.p_.save != DELTIC_SAVE_NONE ? f.p_.N + 1 : 0;
      first_state = arena.take<int64_t>(counts), first_chunk = arena.take<int64_t>(counts);
      threads = arena.take<std::byte>(thread_bytes, f.plan_.threads);
      const int64_t whole =
          checked_product(f.plan_.threads,
                          checked_sum(operand_bytes, checked_product(f.most_heads(), state_bytes)));
      const int64_t rounds = checked_product(
          f.plan_.group,
          checked_sum(checked_product(2, f.plan_.block, operand_bytes), state_bytes));
      shared = arena.take<std::byte>(std::max(whole, rounds));
    }
    float* task_state(int64_t i) const {
      return reinterpret_cast<float*>(shared + static_cast<size_t>(i) * state_bytes);
    }
    std::byte* operands(int64_t states, int64_t i) const {
      return shared + static_cast<size_t>(states) * state_bytes +
             static_cast<size_t>(i) * operand_bytes;
    }
  };

  struct ThreadMemory {
    Scratch arena;
    PrepareScratch prepare;
    ChainScratch chain;
    int thread;
    const Memory& shared;
    ThreadMemory(const Memory& m, int index, const Forward& f)
        : arena(m.threads + static_cast<size_t>(index) * m.thread_bytes),
          prepare(arena, f.most_rows(), f.shape_.Kp, kGate == Gate::channel, Engine::kTiles),
          chain(arena, f.shape_, Engine::kTiles),
          thread(index),
          shared(m) {}
  };

  // Rows that a thread prepares at once.
  int64_t most_rows() const { return p_.save == DELTIC_SAVE_ALL ? p_.chunk : shape_.C; }
  int64_t chunks(const Sequence& s) const { return (s.length + shape_.C - 1) / shape_.C; }
  ChunkPlace place(const Sequence& s, int64_t head, int64_t chunk) const {
    return place_of(s, head, chunk * shape_.C, shape_.C);
  }
  static ChunkPlace place_of(const Sequence& s, int64_t head, int64_t first, int64_t most) {
    return {s.batch, s.begin + first, std::min(most, s.length - first), head};
  }
  Operands operands_at(std::byte* memory) const {
    Scratch arena(memory);
    return Engine::template of_step<kGate>(Operands(arena, shape_));
  }

  // Outputs of padding rows and of skipped sequences.
  void zero_unused(const Member& member) const {
    const int64_t padding = padding_begin(p_);
    member.for_own(p_.T - padding, [&](int64_t t) {
      for (int64_t h = 0; h < p_.HV; ++h)
        zero_row(p_.o.data, p_.o.dtype, p_.o.at(0, padding + t, h), p_.V);
    });
    member.for_own(p_.N, [&](int64_t n) {
      const Sequence s = sequence(p_, n);
      for (int64_t t = 0; s.skipped && t < s.length; ++t) {
        for (int64_t h = 0; h < p_.HV; ++h) {
          zero_row(p_.o.data, p_.o.dtype, p_.o.at(s.batch, s.begin + t, h), p_.V);
        }
      }
    });
  }

  void prepare(const Sequence& s, int64_t head, int64_t chunk, const Operands& operands,
               const ThreadMemory& mine) const {
    const ChunkPlace at = place(s, head, chunk);
    const bool keeps = p_.save == DELTIC_SAVE_ALL && row_in_saved(chunk) == 0;
    if (keeps && shape_.C < p_.chunk) {
      const ChunkPlace whole = place_of(s, head, chunk * shape_.C, p_.chunk);
      prepare_chunk<kGate>(p_, whole, p_.chunk, shape_.Kp, mine.prepare, engine_);
      save_squares(mine.prepare, saved_chunk(mine, s, head, chunk));
    }
    engine_.template prepare_step<kGate>(p_, at, shape_, mine.prepare, operands);
    if (keeps && shape_.C == p_.chunk) {
      save_squares(Engine::redirect(mine.prepare, operands), saved_chunk(mine, s, head, chunk));
    }
  }

  // What backward asked to be kept: all of a chunk of the call's length, or the state at the start
  // of a segment. The first is where `chunk` lies in it, at a row of its own.
  float* saved_chunk(const ThreadMemory& mine, const Sequence& s, int64_t head,
                     int64_t chunk) const {
    const int64_t index = mine.shared.first_chunk[s.n] + chunk * shape_.C / p_.chunk;
    return saved_payload(p_.saved) + (index * p_.HV + head) * saved_.chunk_floats();
  }
  int64_t row_in_saved(int64_t chunk) const { return chunk * shape_.C % p_.chunk; }
  void save_squares(const PrepareScratch& from, float* to) const {
    const size_t bytes = static_cast<size_t>(saved_.square_floats) * sizeof(float);
    to += saved_.state_floats + saved_.y_floats;
    std::memcpy(to, from.inverse, bytes);
    std::memcpy(to + saved_.square_floats, from.scores, bytes);
  }
  // Saved panels have K rounded up to 16 rows, the first of this engine's Kp.
  int64_t saved_panel_floats() const { return padded(p_.K) * kPanel; }
  void save_panel(const float* from, int64_t rows, int64_t panel, float* to) const {
    std::memcpy(to, from, static_cast<size_t>(rows * shape_.panel_width(panel)) * sizeof(float));
  }
  void save_segment_start(const ThreadMemory& mine, const Sequence& s, int64_t head, int64_t chunk,
                          int64_t panel, const float* S) const {
    const int64_t done = chunk + 1, segment = saved_.segment * (p_.chunk / shape_.C);
    if (p_.save != DELTIC_SAVE_STATES || done % segment != 0 || done >= chunks(s)) return;
    const int64_t index = mine.shared.first_state[s.n] + done / segment - 1;
    save_panel(S, padded(p_.K), panel,
               saved_payload(p_.saved) + (index * p_.HV + head) * saved_.state_floats +
                   panel * saved_panel_floats());
  }

  // Checkpoints of a sequence that lie strictly inside a chunk: S_n = decay S + (k exp(G_n - G))^T
  // v_new.
  bool has_inner_checkpoint(const Sequence& s, int64_t chunk) const {
    const int64_t first = chunk * shape_.C;
    for (int64_t m = s.ckpt_begin; m < s.ckpt_end; ++m) {
      const int64_t n = p_.ckpt_tokens(m) - first;
      if (checkpoint_slot(p_, m) >= 0 && n > 0 && n < std::min(shape_.C, s.length - first))
        return true;
    }
    return false;
  }
  void keep_inner(const Sequence& s, const ChunkPlace& at, int64_t chunk, int64_t panel,
                  const float* y, const float* S, const ThreadMemory& mine) const {
    const PrepareScratch& r = mine.prepare;
    load_heads(p_.k, at, p_.k_head(at.head), p_.K, shape_.Kp, p_.l2norm, 1.0f, r.k);
    load_gates<kGate>(p_, at, shape_.C, shape_.Kp, r.gate_bias, r.e);
    for (int64_t m = s.ckpt_begin; m < s.ckpt_end; ++m) {
      const int64_t n = p_.ckpt_tokens(m) - chunk * shape_.C;
      if (checkpoint_slot(p_, m) < 0 || n <= 0 || n >= at.length) continue;
      const float *kg = r.k, *carried = y;
      const int64_t width = shape_.panel_width(panel);
      if constexpr (kGate == Gate::head) {
        row_factors(r.e, n, shape_.Kp, r.prefix, r.suffix, r.decay);
        for (int64_t t = 0; t < n; ++t) {
          scale_row_into(y + t * width, width, r.suffix[t], mine.chain.x + t * width);
        }
        carried = mine.chain.x;
      } else {
        carry_rows<kGate>(r.k, r.e, n, shape_.Kp, r.kg, r.decay);
        kg = r.kg;
      }
      with_width(width, [&](auto w) {
        PanelProducts<w()>::update(r.decay, kg, shape_.Kp, n, shape_.Kp, carried, S,
                                   mine.chain.kept);
      });
      store_state(p_.ckpt, checkpoint_slot(p_, m), at.head, shape_, panel, mine.chain.kept);
    }
  }
  // Checkpoints at a chunk's edge: the state as it is after n tokens.
  void keep_edge(const Sequence& s, int64_t head, int64_t tokens, int64_t panel,
                 const float* S) const {
    for (int64_t m = s.ckpt_begin; m < s.ckpt_end; ++m) {
      if (p_.ckpt_tokens(m) == tokens)
        store_state(p_.ckpt, checkpoint_slot(p_, m), head, shape_, panel, S);
    }
  }

  void begin(const Sequence& s, int64_t head, int64_t panel, float* S) const {
    load_state(p_.state_in, s.read_slot, head, shape_, panel, S);
    keep_edge(s, head, 0, panel, S);
  }
  void carry(const Sequence& s, int64_t head, int64_t chunk, int64_t panel,
             const Operands& operands, const ThreadMemory& mine, float* S,
             Ahead* ahead = nullptr) const {
    const ChunkPlace at = place(s, head, chunk);
    const bool inner = s.ckpt_begin < s.ckpt_end && has_inner_checkpoint(s, chunk);
    const auto keep = [&](const float* y, const float* S_in) {
      if (inner) keep_inner(s, at, chunk, panel, y, S_in, mine);
      if (p_.save == DELTIC_SAVE_ALL) {
        float* to = saved_chunk(mine, s, head, chunk);
        const int64_t row = row_in_saved(chunk);
        if (row == 0) save_panel(S_in, padded(p_.K), panel, to + panel * saved_panel_floats());
        save_panel(
            y, rows_of(at.length), panel,
            to + saved_.state_floats + panel * kPanel * p_.chunk + row * shape_.panel_width(panel));
      }
    };
    with_width(shape_.panel_width(panel), [&](auto width) {
      carry_chunk<width(), Engine>(p_, at, shape_, operands, panel, mine.chain, S, keep, ahead);
    });
    if (s.ckpt_begin < s.ckpt_end) keep_edge(s, head, chunk * shape_.C + at.length, panel, S);
    save_segment_start(mine, s, head, chunk, panel, S);
  }
  void end(const Sequence& s, int64_t head, int64_t panel, const float* S) const {
    store_state(p_.state_out, s.write_slot, head, shape_, panel, S);
  }
  float* panel_state(float* state, int64_t panel) const {
    return state + panel * shape_.panel_floats();
  }

  int64_t most_heads() const {
    return most_heads_at_once(p_.HV, checked_product(shape_.state_floats(), sizeof(float)),
                              shape_.C);
  }

  void run_whole_tasks(const Memory& memory, const ThreadMemory& mine, int64_t at_once,
                       const Member& member) const {
    const int64_t most = most_heads(), blocks = (p_.HV + at_once - 1) / at_once;
    const Operands operands = operands_at(memory.operands(plan_.threads * most, mine.thread));
    const auto state = [&](int64_t i, int64_t panel) {
      return panel_state(memory.task_state(mine.thread * most + i), panel);
    };
    member.for_each(p_.N * blocks, [&](int64_t task) {
      const Sequence s = sequence(p_, memory.order[task / blocks]);
      const int64_t head0 = task % blocks * at_once, heads = std::min(at_once, p_.HV - head0);
      if (s.skipped) return;
      const auto each_panel = [&](const auto& body) {
        for (int64_t i = 0; i < heads; ++i) {
          for (int64_t panel = 0; panel < shape_.panels; ++panel) body(i, panel);
        }
      };
      each_panel([&](int64_t i, int64_t panel) { begin(s, head0 + i, panel, state(i, panel)); });
      for (int64_t step = 0; step < chunks(s) * heads; ++step) {
        const int64_t chunk = step / heads, i = step % heads;
        prepare(s, head0 + i, chunk, operands, mine);
        Ahead ahead;
        if (step + 1 < chunks(s) * heads) {
          const int64_t next_head = head0 + (step + 1) % heads;
          const ChunkPlace then = place(s, next_head, (step + 1) / heads);
          add_keys<kGate>(p_, then, &ahead);
          add_rows(then, p_.v, next_head, p_.V, &ahead);
          add_rows(then, p_.o, next_head, p_.V, &ahead);
          ahead.spread(shape_.panels * Engine::pauses(shape_.C));
        }
        for (int64_t panel = 0; panel < shape_.panels; ++panel) {
          carry(s, head0 + i, chunk, panel, operands, mine, state(i, panel), &ahead);
        }
      }
      each_panel([&](int64_t i, int64_t panel) { end(s, head0 + i, panel, state(i, panel)); });
    });
  }

  void run_rounds(const Memory& memory, const ThreadMemory& mine, const Member& member) const {
    const int64_t tasks = p_.N * p_.HV, group = plan_.group, block = plan_.block;
    const auto buffer_at = [&](int64_t slot, int64_t round, int64_t j) {
      return memory.operands(group, (slot * 2 + round % 2) * block + j);
    };
    const auto buffer = [&](int64_t slot, int64_t round, int64_t j) {
      return operands_at(buffer_at(slot, round, j));
    };
    for (int64_t first = 0; first < tasks; first += group) {
      const int64_t size = std::min(group, tasks - first);
      // Tasks are ordered by length: the group's first is its longest.
      const int64_t longest = chunks(sequence(p_, memory.order[first / p_.HV]));
      const int64_t rounds = (longest + block - 1) / block;
      for (int64_t round = -1; round < std::max<int64_t>(rounds, 1); ++round) {
        // Panels of one task that go together read each operand once; enough pieces for all
        // threads.
        const int64_t per_item = std::max<int64_t>(1, size * shape_.panels / plan_.threads);
        const int64_t items = (shape_.panels + per_item - 1) / per_item;  // of a task
        const int64_t carries = round < 0 ? 0 : size * items;
        const int64_t prepares = round + 1 < rounds ? size * block : 0;
        member.for_each(carries + prepares, [&](int64_t i) {
          const bool is_carry = i < carries;
          const int64_t item = is_carry ? i : i - carries;
          const int64_t slot = is_carry ? item / items : item / block;
          const Sequence s = sequence(p_, memory.order[(first + slot) / p_.HV]);
          const int64_t head = (first + slot) % p_.HV;
          if (s.skipped) return;
          if (is_carry) {
            const int64_t begin_panel = item % items * per_item;
            const int64_t end_panel = std::min(begin_panel + per_item, shape_.panels);
            const auto each_panel = [&](const auto& body) {
              for (int64_t panel = begin_panel; panel < end_panel; ++panel) {
                body(panel, panel_state(memory.task_state(slot), panel));
              }
            };
            if (round == 0) each_panel([&](int64_t panel, float* S) { begin(s, head, panel, S); });
            const int64_t last = std::min(chunks(s), (round + 1) * block);
            for (int64_t chunk = round * block; chunk < last; ++chunk) {
              // Half of the next chunk's operands lie in other cores' caches: fetched meanwhile.
              Ahead ahead;
              if (chunk + 1 < last) {
                ahead.add(buffer_at(slot, round, chunk + 1 - round * block), 1, 0,
                          static_cast<int64_t>(memory.operand_bytes));
                add_rows(place(s, head, chunk + 1), p_.v, head, p_.V, &ahead);
                ahead.spread((end_panel - begin_panel) * Engine::pauses(shape_.C));
              }
              const Operands operands = buffer(slot, round, chunk - round * block);
              each_panel([&](int64_t panel, float* S) {
                carry(s, head, chunk, panel, operands, mine, S, &ahead);
              });
            }
            if (round + 1 >= std::max<int64_t>(rounds, 1)) {
              each_panel([&](int64_t panel, float* S) { end(s, head, panel, S); });
            }
          } else {
            const int64_t j = item % block, chunk = (round + 1) * block + j;
            // Probably this thread's next one.
            const int64_t next = chunk + plan_.threads;
            Ahead ahead;
            if (next < chunks(s)) add_keys<kGate>(p_, place(s, head, next), &ahead);
            ahead.spread(1);
            ahead.some();
            if (chunk < chunks(s)) prepare(s, head, chunk, buffer(slot, round + 1, j), mine);
          }
        });
      }
    }
  }

  const Problem& p_;
  Shape shape_;
  ForwardPlan plan_;
  SavedLayout saved_;
  Engine engine_;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
