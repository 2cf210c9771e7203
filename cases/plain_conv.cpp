// The plain algorithm of the causal depthwise convolution and its gradient: the sums in fp32.
#include "cases/plain.h"

namespace deltic::cases::plain {
namespace {

// One sequence's inputs: those of the state it starts from, then those of the call.
struct ConvSequence {
  const Problem& p;
  const Floats &weight, &bias;
  int64_t n;

  int64_t length() const { return p.c.sequence_length(n); }
  size_t state_at(int64_t slot, int64_t d, int64_t i) const {
    return static_cast<size_t>((slot * p.c.D + d) * p.c.S + i);
  }
  size_t row_at(int64_t t, int64_t d) const {
    return static_cast<size_t>((p.first_token(n) + t) * p.c.D + d);
  }
  // Input t of channel d; before the first token, of the state.
  float input(int64_t t, int64_t d) const {
    if (t >= 0) return p.x[row_at(t, d)];
    const int64_t slot = p.read_slot(n);
    const int64_t place = p.instance.window_of(n) + t;
    return slot < 0 || place < 0 ? 0.0f : p.state[state_at(slot, d, place)];
  }
  float tap(int64_t d, int64_t j) const { return weight[static_cast<size_t>(d * p.c.W + j)]; }
  float sum(int64_t t, int64_t d) const {
    float y = bias.empty() ? 0.0f : bias[static_cast<size_t>(d)];
    for (int64_t j = 0; j < p.c.W; ++j) y += tap(d, j) * input(t - p.c.W + 1 + j, d);
    return y;
  }
};

}  // namespace

Values conv(const Instance& instance) {
  const Problem p(instance);
  const Case& c = p.c;
  const Floats weight = p.floats("weight"), bias = p.floats("bias");
  Values all;
  const Output out = make_output(instance, all, "out", 0.0);
  const Output final_state = make_output(instance, all, "final_state", NAN);
  const Output pool = make_output(instance, all, c.write_pool ? "write_pool" : "state_pool", NAN);
  const Output ckpt = make_output(instance, all, "ckpt_states", NAN);
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    if (p.is_skipped(n)) continue;
    const ConvSequence s{p, weight, bias, n};
    const auto entry = static_cast<size_t>(n);
    for (int64_t m = p.ckpt_cu.empty() ? 0 : p.ckpt_cu[entry];
         !p.ckpt_cu.empty() && m < p.ckpt_cu[entry + 1]; ++m) {
      const int64_t to = p.ckpt_slots[static_cast<size_t>(m)];
      for (int64_t i = 0; i < c.D * c.S && to > c.null_slot; ++i) {
        const int64_t token = p.ckpt_tokens[static_cast<size_t>(m)] - c.S + i % c.S;
        ckpt.put(s.state_at(to, i / c.S, i % c.S), s.input(token, i / c.S));
      }
    }
    const int64_t slot = c.pool == Pool::none ? n : instance.write_slots()[static_cast<size_t>(n)];
    for (int64_t d = 0; d < c.D; ++d) {
      for (int64_t t = 0; t < s.length(); ++t) {
        const float y = s.sum(t, d);
        out.put(s.row_at(t, d), c.activation == Activation::silu ? y * sigmoid(y) : y);
      }
      const bool is_window = c.pool == Pool::drafts && s.length() > 0;
      const int64_t from = is_window ? 2 - c.W : s.length() - c.S;
      for (int64_t i = 0; i < c.S && slot >= 0; ++i) {
        (c.pool == Pool::none ? final_state : pool)
            .put(s.state_at(slot, d, i), from + i < s.length() ? s.input(from + i, d) : 0.0f);
      }
    }
  }
  return all;
}

Values conv_gradient(const Instance& instance) {
  const Problem p(instance);
  const Case& c = p.c;
  const Floats weight = p.floats("weight"), bias = p.floats("bias"), d_out = p.floats("d_out");
  Values all;
  const Output dx = make_output(instance, all, "dx", 0.0);
  const Output d_initial = make_output(instance, all, "d_initial_state", 0.0);
  Floats dweight(weight.size(), 0.0f), dbias(bias.size(), 0.0f);
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    const ConvSequence s{p, weight, bias, n};
    const int64_t T = s.length();
    for (int64_t d = 0; d < c.D; ++d) {
      Floats inputs(static_cast<size_t>(c.S + T), 0.0f);  // gradients of state and inputs
      for (int64_t i = 0; i < c.S && !p.d_final.empty(); ++i)
        inputs[static_cast<size_t>(T + i)] = p.d_final[s.state_at(n, d, i)];
      for (int64_t t = 0; t < T && !d_out.empty(); ++t) {
        float dy = d_out[s.row_at(t, d)];
        if (c.activation == Activation::silu) {
          const float y = s.sum(t, d), gate = sigmoid(y);
          dy *= gate * (1 + y * (1 - gate));
        }
        if (!dbias.empty()) dbias[static_cast<size_t>(d)] += dy;
        for (int64_t j = 0; j < c.W; ++j) {
          const int64_t from = t - c.W + 1 + j;
          dweight[static_cast<size_t>(d * c.W + j)] += dy * s.input(from, d);
          if (c.S + from >= 0) inputs[static_cast<size_t>(c.S + from)] += dy * s.tap(d, j);
        }
      }
      for (int64_t t = 0; t < T; ++t) dx.put(s.row_at(t, d), inputs[static_cast<size_t>(c.S + t)]);
      for (int64_t i = 0; i < c.S; ++i)
        d_initial.put(s.state_at(n, d, i), inputs[static_cast<size_t>(i)]);
    }
  }
  const Output dw = make_output(instance, all, "dweight", 0.0);
  const Output db = make_output(instance, all, "dbias", 0.0);
  for (size_t i = 0; i < dweight.size(); ++i) dw.put(i, dweight[i]);
  for (size_t i = 0; i < dbias.size(); ++i) db.put(i, dbias[i]);
  return all;
}

}  // namespace deltic::cases::plain
