// A backward call with memory of its own: inputs that depend on (sequence, token, head, channel)
// only, what came back, and every gradient.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "support.h"

namespace deltic::test {

// The differentiable inputs; a gradient has the number of its input.
enum Input { kQ, kK, kV, kBeta, kG, kGv, kALog, kDtBias, kInitial, kNumInputs };
inline constexpr const char* kInputNames[] = {"q",  "k",     "v",       "beta",         "g",
                                              "gv", "A_log", "dt_bias", "initial_state"};
inline constexpr bool is_per_token(int input) { return input <= kGv; }

struct GradientSetup {
  int64_t H = 2, HV = 4, K = 3, V = 2;
  // Sequences: seed and length. Packed unless dense.
  struct Length {
    uint64_t seed;
    int64_t tokens;
  };
  std::vector<Length> sequences{{1, 5}};
  bool dense = false;
  int64_t padding = 0;
  bool strided = false;  // heads before tokens, gaps between rows
  GateKind gate = GateKind::head;
  GateForm gate_form = GateForm::log_decay;
  float lower_bound = -5;                       // bounded only
  GateValues gate_values = GateValues::random;  // log_decay only; else normal numbers, times:
  double raw_gate_scale = 1;
  bool has_A_log = true, has_dt_bias = true;
  bool has_beta = true;
  BetaForm beta_form = BetaForm::value;
  std::optional<double> beta_value{};
  bool value_beta = false, has_gv = false;  // one beta, one more decay per value column
  KeyValues keys = KeyValues::random;
  bool qk_l2norm = false;
  StateLayout layout = StateLayout::kv;
  bool has_initial = true, has_d_o = true, has_d_final = true;
  std::optional<float> scale{};
  int32_t chunk = 64;
  // q k v d_o | g | beta | A_log dt_bias | initial_state | d_initial_state d_final_state
  DType dtype = DType::f64, gate_dtype = DType::f64, beta_dtype = DType::f64,
        param_dtype = DType::f64, state_dtype = DType::f64, d_state_dtype = DType::f64;
};
std::string name(const GradientSetup& setup);
// The same with other dtypes throughout; params, states and their gradients fp32 for half types.
GradientSetup with_dtype(GradientSetup setup, DType type);

struct GradientCall {
  explicit GradientCall(const GradientSetup& setup);

  // o and the final state; then their product with d_o and d_final: what backward differentiates.
  double loss();
  // o and the final state by an implementation that keeps `what` in `saved`.
  void forward_keeping(const std::string& impl, int32_t threads, Save what);
  // Gradients and workspace are filled with NaN first; checks that nothing else is written and that
  // padding is zero. Gradients not in `asked` are left out. Takes `saved`, if there is some. Throws
  // what the library throws.
  void backward(const std::string& impl, int32_t threads = 1,
                const std::vector<int>& asked = {kQ, kK, kV, kBeta, kG, kGv, kALog, kDtBias,
                                                 kInitial});
  // The inputs' values, elementwise; shapes must agree.
  void copy_inputs(const GradientCall& from);

  int64_t num_sequences() const { return static_cast<int64_t>(setup.sequences.size()); }
  int64_t begin(int64_t n) const;  // first token of a sequence in the T dimension

  GradientSetup setup;
  int64_t B = 1, T = 0;
  std::array<Buffer, kNumInputs> x{}, dx{};  // inputs and their gradients
  Buffer o{}, final_state{}, d_o{}, d_final{}, cu{};
  Options options{};
  std::optional<Scratch> saved{};
  Tensors inputs() const;
};

// Implementations of backward that take such a call; the oracle takes all.
std::vector<std::string> takers(const GradientSetup& setup, bool with_oracle = false);
// The bytes of every gradient.
std::vector<std::vector<uint8_t>> all_gradients(const GradientCall& call);

// Offsets of all elements, last index fastest.
std::vector<int64_t> offsets(const Buffer& b);
std::vector<double> values(const Buffer& b);
// Elements whose sequence is n and whose token, counted from its start, is at least `from`.
std::vector<int64_t> token_offsets(const GradientCall& call, const Buffer& b, int64_t n,
                                   int64_t from = 0);
std::vector<uint8_t> bytes_at(const Buffer& b, const std::vector<int64_t>& at);
// A power of two, and parameters are coarse: x +- step is exact, in fp32 as well.
inline constexpr double kStep = 0x1p-17;
// The largest difference of a gradient from (loss(x + step) - loss(x - step)) / 2 step, in units of
// its largest element. NaN in x: padding, or what nobody reads.
double difference_error(Buffer& x, const Buffer& gradient, const std::function<double()>& loss,
                        double step = kStep);
// rms(x - ref) / rms(ref); absolute where rms(ref) is below 1e-6.
double error(const Buffer& x, const Buffer& ref);

}  // namespace deltic::test
