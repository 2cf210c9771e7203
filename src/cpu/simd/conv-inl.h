// The causal depthwise convolution and its gradient: how a call is cut into blocks of rows and
// panels of channels, and what comes before and after a sequence's tokens.
#if defined(DELTIC_CPU_SIMD_CONV_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_CONV_INL_H_
#undef DELTIC_CPU_SIMD_CONV_INL_H_
#else
#define DELTIC_CPU_SIMD_CONV_INL_H_
#endif

#include <hwy/cache_control.h>

#include <span>

#include "core/scratch.h"
#include "cpu/simd/conv_rows-inl.h"
#include "cpu/team.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// Rows of B*T whose part of dweight and dbias is added up in fp32. Fixed: another number would be
// another order of additions.
constexpr int64_t kBlockRows = 256;
constexpr int64_t kTileRows = 8;         // tokens of a pass: 8 streams in and 8 out
constexpr int64_t kMostChannels = 1024;  // of a panel: 4 KB of each row; scratch rows stay in L2
constexpr int64_t kFewestChannels = 128;
// Outputs in fp32 that no cache keeps for their reader go past the caches. Stored as usual a line
// is read before it is written: a forward pass of 128 MB takes 25 ms on a core then, 17 ms this
// way; a copy takes 14 ms. In bf16 arithmetic takes longer than either.
constexpr int64_t kStreamedBytes = 16 << 20;
constexpr int64_t kStepInputs = 8;      // of a state that a few tokens take in and leave in one go
constexpr int64_t kStateChannels = 64;  // whose states are gathered at once

// A sequence's tokens [first, last) inside of a block of rows.
struct Piece {
  Sequence s;
  int64_t first, last;
};

class Conv {
 public:
  explicit Conv(const Problem& p) : p_(p), taps_(p.taps), passes_(conv_passes(p.x.dtype, p.taps)) {
    const int64_t rows = p.B * p.T;
    blocks_ = (rows + kBlockRows - 1) / kBlockRows;
    channels_ = kMostChannels;
    // Measured: 0.5 ns for a number, 1 with its gradients. A state's count like those of a token.
    const int64_t numbers = (rows + (p.state_out ? p.N * p.V : 0)) * p.K;
    const int64_t useful =
        useful_threads(p, static_cast<double>(numbers), p.is_gradient ? 1.0 : 0.5);
    while (channels_ > kFewestChannels && blocks_ * panels() < 4 * useful) channels_ /= 2;
    threads_ = static_cast<int>(std::min(useful, std::max<int64_t>(1, blocks_ * panels())));
    has_sums_ = p.is_gradient && (p.dweight || p.dbias);
    const Rows& out = p.is_gradient ? p.dx : p.out;
    is_streamed_ = out && out.dtype == DType::f32 && is_aligned(out) &&
                   rows * p.K * size_of(DType::f32) >= kStreamedBytes;
  }

  size_t workspace_bytes() const {
    Scratch arena(nullptr);
    take_sums(arena);
    const size_t sums = arena.used(), local = Local(*this, arena).bytes;
    return static_cast<size_t>(checked_sum(sums, checked_product(local, threads_)));
  }

  void run(std::span<std::byte> workspace) const {
    Scratch whole(workspace.data());
    float* sums = take_sums(whole);
    const size_t begin = whole.used();
    const int64_t tasks = blocks_ * panels();
    run_team(threads_, [&](const Member& member) {
      Scratch counted(nullptr);
      const size_t local_bytes = Local(*this, counted).bytes;
      Scratch arena(workspace.data() + begin + static_cast<size_t>(member.index) * local_bytes);
      Local local(*this, arena);
      // Before any state is written: a checkpoint may hold what an initial state has.
      if (p_.ckpt && p_.ckpt_tokens.n0 > 0) {
        member.for_each(p_.N * panels(), [&](int64_t i) {
          store_checkpoints(sequence(p_, i / panels()), i % panels() * channels_, local);
        });
      }
      member.for_each(tasks, [&](int64_t i) {
        run_block(i / panels(), i % panels() * channels_, sums, local);
        if (is_streamed_) hwy::FlushStream();
      });
      // States of sequences that a task could not finish: others still read what they began with,
      // or there were no tokens.
      if (p_.is_gradient ? p_.d_initial.present : p_.state_out.present) {
        member.for_each(p_.N * panels(), [&](int64_t i) {
          finish_sequence(sequence(p_, i / panels()), i % panels() * channels_, local);
        });
      }
      if (has_sums_) {
        member.for_each(panels(), [&](int64_t i) { add_sums(sums, i * channels_); });
      }
    });
  }

 private:
  // What a thread needs beside the sums.
  struct Local {
    Local(const Conv& conv, Scratch& arena) {
      const size_t before = arena.used();
      const int64_t pitch = conv.pitch();
      weight = arena.take<float>(conv.taps_, pitch);
      bias = arena.take<float>(pitch);
      inputs = arena.take<float>(conv.taps_ - 1, pitch);
      if (conv.p_.is_gradient) {
        gradients = arena.take<float>(conv.taps_ - 1, pitch);
        early = arena.take<float>(conv.taps_ - 1, pitch);
        if (conv.p_.d_final) seeds = arena.take<float>(kTileRows, pitch);
      }
      state = arena.take<float>(conv.p_.V, kStateChannels);
      if (conv.p_.state_out && conv.p_.V <= kStepInputs) {
        line = arena.take<float>(conv.p_.V + kTileRows, pitch);
      }
      bytes = arena.used() - before;
    }
    float *weight, *bias, *inputs;
    float *gradients = nullptr, *early = nullptr, *seeds = nullptr;
    float* state;           // [S] rows of kStateChannels
    float* line = nullptr;  // [S + kTileRows] rows
    size_t bytes;
  };

  // Whether every row begins with a line.
  static bool is_aligned(const Rows& rows) {
    constexpr int64_t kLine = 64 / sizeof(float);
    return reinterpret_cast<uintptr_t>(rows.data) % 64 == 0 && rows.st % kLine == 0 &&
           rows.sb % kLine == 0;
  }
  int64_t panels() const { return (p_.K + channels_ - 1) / channels_; }
  // Of scratch rows: a line more than a power of two, so that not all of them share a set of L1.
  int64_t pitch() const { return channels_ + 16; }
  float* take_sums(Scratch& arena) const {
    return arena.take<float>(has_sums_ ? blocks_ : 0, taps_ + 1, padded(p_.K));
  }
  static void* row(const Rows& rows, const Sequence& s, int64_t t, int64_t c0) {
    return static_cast<std::byte*>(rows.data) +
           (rows.at(s.batch, s.begin + t, 0) + c0) * size_of(rows.dtype);
  }
  int64_t first_row(const Sequence& s) const { return s.batch * p_.T + s.begin; }

  // ---- A block of rows -----------------------------------------------------------------------

  void run_block(int64_t block, int64_t c0, float* sums, Local& local) const {
    const int64_t begin = block * kBlockRows, end = std::min(begin + kBlockRows, p_.B * p_.T);
    ConvPanel panel = start_panel(c0, local);
    if (has_sums_) {
      panel.sums_pitch = padded(p_.K);
      panel.sums = sums + block * (taps_ + 1) * panel.sums_pitch + c0;
      for (int64_t j = 0; j <= taps_; ++j) {
        std::fill_n(panel.sums + j * panel.sums_pitch, panel.channels, 0.0f);
      }
    }
    int64_t n = first_sequence(begin);
    for (int64_t at = begin; at < end; ++n) {
      if (n == p_.N) {
        for (; at < end; ++at) zero_outputs(Sequence{}, at, c0, panel.channels);
        break;
      }
      const Sequence s = sequence(p_, n);
      const int64_t first = at - first_row(s), last = std::min(s.length, end - first_row(s));
      if (first >= last) continue;  // empty
      at += last - first;
      const Piece piece{s, first, last};
      if (s.skipped) {
        for (int64_t t = first; t < last; ++t) zero_outputs(s, t, c0, panel.channels);
      } else if (p_.is_gradient) {
        backward(piece, c0, panel, local);
      } else {
        forward(piece, c0, panel, local);
      }
    }
  }

  ConvPanel start_panel(int64_t c0, Local& local) const {
    const int64_t n = std::min(channels_, p_.K - c0);
    load_columns(Columns::of(p_.weight, taps_), c0, n, 0, local.weight, pitch());
    if (p_.bias) {
      load_columns(Columns::of(p_.bias, 1), c0, n, 0, local.bias, pitch());
    } else {
      std::fill_n(local.bias, n, 0.0f);
    }
    return {.channels = n,
            .pitch = pitch(),
            .is_silu = p_.activation == DELTIC_ACTIVATION_SILU,
            .is_streamed = is_streamed_,
            .weight = local.weight,
            .bias = local.bias,
            .inputs = local.inputs,
            .gradients = local.gradients,
            .sums = nullptr,
            .sums_pitch = 0};
  }

  // The sequence of a row of B*T.
  int64_t first_sequence(int64_t row) const {
    if (!p_.packed) return row / p_.T;
    int64_t low = 0, high = p_.N;  // the first that ends behind the row
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (p_.cu(middle + 1) > row ? high : low) = p_.cu(middle + 1) > row ? middle : middle + 1;
    }
    return low;
  }

  void zero_outputs(const Sequence& s, int64_t t, int64_t c0, int64_t n) const {
    const Rows& out = p_.is_gradient ? p_.dx : p_.out;
    if (out) zero_row(out.data, out.dtype, out.at(s.batch, s.begin + t, 0) + c0, n);
  }

  // The W-1 inputs before token t, oldest first.
  void load_inputs(const Sequence& s, int64_t t, int64_t c0, const ConvPanel& panel) const {
    const int64_t before = taps_ - 1;
    const int64_t from_state = std::max<int64_t>(0, before - t);
    if (from_state > 0 && s.read_slot >= 0) {
      // Those before the first token that this token sees: the state's last W-1-t.
      load_columns(Columns::of(p_.state_in, s.read_slot, s.inputs), c0, panel.channels,
                   s.inputs - from_state, panel.inputs, panel.pitch);
    } else {
      for (int64_t i = 0; i < from_state; ++i) {
        std::fill_n(panel.inputs + i * panel.pitch, panel.channels, 0.0f);
      }
    }
    for (int64_t i = from_state; i < before; ++i) {
      const int64_t earlier = t - before + i;
      load_row(p_.x.data, p_.x.dtype, p_.x.at(s.batch, s.begin + earlier, 0) + c0, panel.channels,
               panel.channels, panel.inputs + i * panel.pitch);
    }
  }

  // ---- Forward -------------------------------------------------------------------------------

  void forward(const Piece& piece, int64_t c0, const ConvPanel& panel, Local& local) const {
    const Sequence& s = piece.s;
    const bool ends_here = s.write_slot >= 0 && is_whole(s);
    if (ends_here && s.length <= kTileRows && s.inputs + s.left_from <= kTileRows &&
        local.line != nullptr) {
      return step(s, c0, panel, local.line);
    }
    load_inputs(s, piece.first, c0, panel);
    for (int64_t t = piece.first; t < piece.last; t += kTileRows) {
      passes_.tokens(panel, std::min(kTileRows, piece.last - t), row(p_.x, s, t, c0), p_.x.st,
                     row(p_.out, s, t, c0), p_.out.st);
    }
    if (ends_here) store_final(s, c0, local);
  }

  // A few tokens, from state to state: the old inputs and the new ones in a row, read once.
  void step(const Sequence& s, int64_t c0, ConvPanel panel, float* line) const {
    const int64_t S = p_.V, n = panel.channels, before = s.inputs;
    const int64_t left = before + s.left_from;  // the first of the state left behind
    if (s.read_slot >= 0) {
      load_columns(Columns::of(p_.state_in, s.read_slot, before), c0, n, 0, line, panel.pitch);
    } else {
      for (int64_t i = 0; i < before; ++i) std::fill_n(line + i * panel.pitch, n, 0.0f);
    }
    for (int64_t t = 0; t < s.length; ++t) {
      load_row(p_.x.data, p_.x.dtype, p_.x.at(s.batch, s.begin + t, 0) + c0, n, n,
               line + (before + t) * panel.pitch);
    }
    for (int64_t i = before + s.length; i < left + S; ++i) {
      std::fill_n(line + i * panel.pitch, n, 0.0f);
    }
    store_columns(line + left * panel.pitch, panel.pitch, n,
                  Columns::of(p_.state_out, s.write_slot, S), c0);
    panel.inputs = line + (before - taps_ + 1) * panel.pitch;
    passes_.tokens(panel, s.length, row(p_.x, s, 0, c0), p_.x.st, row(p_.out, s, 0, c0), p_.out.st);
  }

  // Whether one task has all tokens of a sequence, and there are some.
  bool is_whole(const Sequence& s) const {
    const int64_t first = first_row(s);
    return s.length > 0 && first / kBlockRows == (first + s.length - 1) / kBlockRows;
  }

  void finish_sequence(const Sequence& s, int64_t c0, Local& local) const {
    if (p_.is_gradient) {
      if (s.length == 0) store_d_initial(s, c0, local);
    } else if (!is_whole(s)) {
      store_final(s, c0, local);
    }
  }

  void store_final(const Sequence& s, int64_t c0, Local& local) const {
    if (s.write_slot >= 0) store_window(s, s.left_from, c0, p_.state_out, s.write_slot, local);
  }
  void store_checkpoints(const Sequence& s, int64_t c0, Local& local) const {
    for (int64_t m = s.ckpt_begin; m < s.ckpt_end && !s.skipped; ++m) {
      const int64_t slot = checkpoint_slot(p_, m);
      if (slot >= 0) store_window(s, p_.ckpt_tokens(m) - p_.V, c0, p_.ckpt, slot, local);
    }
  }

  // S inputs from token left_from on, some of which may still be the initial state's. A few
  // channels at a time are read before they are written, so that a state may be updated in place.
  void store_window(const Sequence& s, int64_t left_from, int64_t c0, const States& to,
                    int64_t slot, Local& local) const {
    const int64_t S = p_.V, end = std::min(c0 + channels_, p_.K);
    // Places of the state: those it started from, the call's own inputs, zeros.
    const int64_t kept = std::clamp<int64_t>(-left_from, 0, S);
    const int64_t filled = std::clamp<int64_t>(s.length - left_from, kept, S);
    for (int64_t c = c0; c < end; c += kStateChannels) {
      const int64_t n = std::min(kStateChannels, end - c);
      if (kept > 0 && s.read_slot >= 0) {
        load_columns(Columns::of(p_.state_in, s.read_slot, s.inputs + left_from + kept), c, n,
                     s.inputs + left_from, local.state, kStateChannels);
      } else {
        std::fill_n(local.state, kept * kStateChannels, 0.0f);
      }
      for (int64_t i = kept; i < filled; ++i) {
        load_row(p_.x.data, p_.x.dtype, p_.x.at(s.batch, s.begin + left_from + i, 0) + c, n, n,
                 local.state + i * kStateChannels);
      }
      std::fill_n(local.state + filled * kStateChannels, (S - filled) * kStateChannels, 0.0f);
      store_columns(local.state, kStateChannels, n, Columns::of(to, slot, S), c);
    }
  }

  // ---- Backward ------------------------------------------------------------------------------

  // The gradient of the final state is also one of the inputs that it is: of tokens from
  // length - S on. Column of d_final for the input at token t; below 0: none.
  int64_t final_column(const Sequence& s, int64_t t) const {
    return p_.d_final ? p_.V - s.length + t : -1;
  }
  // That column of n channels as a row, or null.
  const float* load_seed(const Sequence& s, int64_t t, int64_t c0, int64_t n, float* to) const {
    const int64_t column = final_column(s, t);
    if (column < 0) return nullptr;
    Columns one = Columns::of(p_.d_final, s.n, column + 1);
    one.base += column * one.s_column;
    one.num_columns = 1;
    load_columns(one, c0, n, 0, to, pitch());
    return to;
  }

  // The gradients of a piece's inputs also need the W-1 tokens after it. Those of the inputs before
  // it are another task's, or the initial state's.
  void backward(const Piece& piece, int64_t c0, const ConvPanel& panel, Local& local) const {
    const Sequence& s = piece.s;
    const int64_t stop = std::min(piece.last + taps_ - 1, s.length);
    load_inputs(s, piece.first, c0, panel);
    for (int64_t i = 0; i < taps_ - 1; ++i) {
      float* to = panel.gradients + i * panel.pitch;
      const bool is_initial = piece.first == 0;
      if (!is_initial || !load_seed(s, i - taps_ + 1, c0, panel.channels, to)) {
        std::fill_n(to, panel.channels, 0.0f);
      }
    }
    for (int64_t t = piece.first; t < piece.last; t += kTileRows) {
      gradient_tile(piece, t, std::min(kTileRows, piece.last - t), true, c0, panel, local);
    }
    if (stop > piece.last) {
      gradient_tile(piece, piece.last, stop - piece.last, false, c0, panel, local);
    }
    // Nothing comes after the last token: the gradients that are left are complete.
    for (int64_t t = stop - taps_ + 1; t < piece.last; ++t) {
      const float* from = panel.gradients + (t - stop + taps_ - 1) * panel.pitch;
      if (t >= piece.first) {
        if (p_.dx) {
          store_row(from, panel.channels, p_.dx.data, p_.dx.dtype,
                    p_.dx.at(s.batch, s.begin + t, 0) + c0);
        }
      } else if (t < 0) {
        std::copy_n(from, panel.channels, local.early + (t + taps_ - 1) * panel.pitch);
      }
    }
    if (piece.first == 0 && p_.d_initial) store_d_initial(s, c0, local);
  }

  void gradient_tile(const Piece& piece, int64_t t0, int64_t rows, bool is_mine, int64_t c0,
                     const ConvPanel& panel, Local& local) const {
    const Sequence& s = piece.s;
    GradientRow tile[kTileRows];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t t = t0 + r, complete = t - taps_ + 1;
      GradientRow& at = tile[r];
      at.x = row(p_.x, s, t, c0), at.d_out = row(p_.d_out, s, t, c0);
      at.seed = is_mine && p_.d_final
                    ? load_seed(s, t, c0, panel.channels, local.seeds + r * panel.pitch)
                    : nullptr;
      at.dx = p_.dx && complete >= piece.first ? row(p_.dx, s, complete, c0) : nullptr;
      at.early = complete < 0 ? local.early + (complete + taps_ - 1) * panel.pitch : nullptr;
    }
    passes_.gradients(panel, rows, tile, is_mine);
  }

  // The last W-1 numbers of a channel are in `early`, if there were tokens; the others' inputs were
  // only handed on to the final state.
  void store_d_initial(const Sequence& s, int64_t c0, Local& local) const {
    const int64_t S = p_.V, end = std::min(c0 + channels_, p_.K);
    for (int64_t c = c0; c < end; c += kStateChannels) {
      const int64_t n = std::min(kStateChannels, end - c);
      for (int64_t i = 0; i < S; ++i) {
        float* to = local.state + i * kStateChannels;
        if (s.length > 0 && i > S - taps_) {
          std::copy_n(local.early + (i - S + taps_ - 1) * pitch() + c - c0, n, to);
        } else if (load_seed(s, i - S, c, n, to) == nullptr) {
          std::fill_n(to, n, 0.0f);
        }
      }
      store_columns(local.state, kStateChannels, n, Columns::of(p_.d_initial, s.n, S), c);
    }
  }

  // Blocks in order, in fp64.
  void add_sums(const float* sums, int64_t c0) const {
    const int64_t end = std::min(c0 + channels_, p_.K), pitch = padded(p_.K);
    for (int64_t j = 0; j <= taps_; ++j) {
      const Param& to = j < taps_ ? p_.dweight : p_.dbias;
      if (!to) continue;
      for (int64_t c = c0; c < end; c += kStateChannels) {
        const int64_t n = std::min(kStateChannels, end - c);
        double total[kStateChannels] = {};
        for (int64_t b = 0; b < blocks_; ++b) {
          const float* part = sums + (b * (taps_ + 1) + j) * pitch + c;
          for (int64_t i = 0; i < n; ++i) total[i] += static_cast<double>(part[i]);
        }
        for (int64_t i = 0; i < n; ++i) {
          const int64_t at = (c + i) * to.strides[0] + (j < taps_ ? j * to.strides[1] : 0);
          store(to.data, to.dtype, at, total[i]);
        }
      }
    }
  }

  const Problem& p_;
  int64_t taps_;
  ConvPasses passes_;
  int64_t blocks_ = 0, channels_ = 0;
  int threads_ = 1;
  bool has_sums_ = false, is_streamed_ = false;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
