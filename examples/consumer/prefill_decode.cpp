// Prefill a prompt, decode token by token from the state it left, and compare with one pass over
// all.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "deltic/deltic.hpp"

namespace {

constexpr int64_t kPrompt = 200, kGenerated = 8, kTokens = kPrompt + kGenerated;
constexpr int64_t H = 2, HV = 4, K = 64, V = 64;  // each q/k head serves two value heads

std::vector<float> normal(int64_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& value : x) value = distribution(generator);
  return x;
}

}  // namespace

int main() try {
  deltic::check_abi();

  const std::vector<float> q = normal(kTokens * H * K, 1), k = normal(kTokens * H * K, 2);
  const std::vector<float> v = normal(kTokens * HV * V, 3), beta = normal(kTokens * HV, 4);
  std::vector<float> g = normal(kTokens * HV, 5);  // Gated DeltaNet: one log decay per head
  for (float& value : g) value = -0.1f * std::abs(value);
  std::vector<float> o(v.size()), o_whole(v.size()), state(HV * K * V);

  // Tokens [begin, end) of everything; the views own nothing and copy nothing.
  const auto tokens = [&](int64_t begin, int64_t end, std::vector<float>& out) {
    const int64_t n = end - begin;
    return deltic::Tensors{.q = {q.data() + begin * H * K, {1, n, H, K}},
                           .k = {k.data() + begin * H * K, {1, n, H, K}},
                           .v = {v.data() + begin * HV * V, {1, n, HV, V}},
                           .o = {out.data() + begin * HV * V, {1, n, HV, V}},
                           .beta = {beta.data() + begin * HV, {1, n, HV}},
                           .g = {g.data() + begin * HV, {1, n, HV}}};
  };
  const deltic::Options options{.beta_form = deltic::BetaForm::sigmoid, .qk_l2norm = true};

  deltic::Tensors prompt = tokens(0, kPrompt, o);
  prompt.final_state = {state.data(), {1, HV, K, V}};
  deltic::forward(options, prompt);

  // One workspace serves every step: a run function allocates nothing.
  deltic::Workspace workspace;
  for (int64_t t = kPrompt; t < kTokens; ++t) {
    deltic::Tensors step = tokens(t, t + 1, o);
    step.initial_state = step.final_state = {state.data(), {1, HV, K, V}};  // updated in place
    workspace.reserve(deltic::decode_workspace_bytes(options, step));
    deltic::decode(options, step, workspace.c());
  }

  deltic::forward(options, tokens(0, kTokens, o_whole));

  double worst = 0.0, largest = 0.0;
  for (size_t i = 0; i < o.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(o[i]) - o_whole[i]));
    largest = std::max(largest, std::abs(static_cast<double>(o_whole[i])));
  }
  const bool same = worst <= 1e-4 * largest;  // fp32: false for NaN too
  std::printf("prefill of %d tokens, then %d steps: %s one pass\n", static_cast<int>(kPrompt),
              static_cast<int>(kGenerated), same ? "same outputs as" : "DIFFERENT outputs from");
  return same ? 0 : 1;
} catch (const deltic::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
