// A serving loop over pools: requests come and go, prompts are prefilled into slots, running
// requests decode together with drafted tokens of which some are accepted. Every output is compared
// with that of the request served alone, token by token: the bits are the same.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "deltic/deltic.hpp"

namespace {

constexpr int64_t H = 2, HV = 4, K = 32, V = 32, W = 4, kDrafts = 3, kBatch = 3, kRequests = 7;
constexpr int64_t kChannels = 2 * H * K + HV * V, kGates = 2 * HV, kWindow = W - 1 + kDrafts;
constexpr int64_t kSlots = 1 + kBatch * (kDrafts + 1);  // slot 0 is none: rows of padding name it

struct Request {
  int64_t id, prompt, length, done = 0, accepted = 1, place = 0;
};

// What a model's projections would give for a request's token; a wrong guess gives something else.
void draw(const Request& r, int64_t token, bool is_right, float* row, float* gates) {
  const auto seed = static_cast<uint32_t>((r.id * 1000 + token) * 2 + (is_right ? 1 : 0));
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::generate_n(row, kChannels, [&] { return uniform(generator); });
  std::generate_n(gates, kGates, [&] { return uniform(generator); });
}

// One layer, convolution and gated delta rule, with the pools that its windows and states lie in.
class Layer {
 public:
  Layer() : states_(kSlots * HV * V * K), windows_(kSlots * kChannels * kWindow) {
    std::mt19937 generator(1);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    weight_.resize(kChannels * W);
    std::generate(weight_.begin(), weight_.end(), [&] { return uniform(generator); });
  }

  // The packed tokens of N sequences. Prefill: `table` has a slot each, they start from zero. Else
  // it has kDrafts + 1 each, and the state after the accepted-th token of the last step is read.
  std::vector<float> run(bool is_prefill, std::vector<float>& rows, std::vector<float>& gates,
                         const std::vector<int32_t>& cu, const std::vector<int32_t>& table,
                         const std::vector<int32_t>& accepted) {
    const auto N = static_cast<int64_t>(cu.size()) - 1, T = static_cast<int64_t>(cu.back());
    const int64_t columns = is_prefill ? 1 : kDrafts + 1;
    const std::vector<uint8_t> fresh(static_cast<size_t>(N), 0);
    std::vector<float> mixed(rows.size()), o(static_cast<size_t>(T * HV * V));
    const deltic::TensorView offsets(cu.data(), {N + 1});
    const deltic::TensorView first = deltic::TensorView(table.data(), {N}).with_strides({columns});
    deltic::ConvTensors conv{.x = {rows.data(), {1, T, kChannels}},
                             .weight = {weight_.data(), {kChannels, W}},
                             .cu_seqlens = offsets,
                             .state_pool = {windows_.data(), {kSlots, kChannels, kWindow}},
                             .read_index = first,
                             .out = {mixed.data(), {1, T, kChannels}}};
    // q, k and v are slices of the convolution's rows, beta and g of the gates'.
    const auto slice = [&](const std::vector<float>& of, int64_t at, int64_t heads, int64_t width) {
      return deltic::TensorView(of.data() + at, {1, T, heads, width})
          .with_strides({T * kChannels, kChannels, width, 1});
    };
    const auto gate = [&](int64_t at) {
      return deltic::TensorView(gates.data() + at, {1, T, HV})
          .with_strides({T * kGates, kGates, 1});
    };
    deltic::Tensors rule{.q = slice(mixed, 0, H, K),
                         .k = slice(mixed, H * K, H, K),
                         .v = slice(mixed, 2 * H * K, HV, V),
                         .o = {o.data(), {1, T, HV, V}},
                         .beta = gate(0),
                         .g = gate(HV),
                         .A_log = {zero_.data(), {HV}},
                         .dt_bias = {zero_.data(), {HV}},
                         .cu_seqlens = offsets,
                         .state_pool = {states_.data(), {kSlots, HV, V, K}},
                         .read_index = first};
    if (is_prefill) {
      conv.state_pool.shape[2] = W - 1;  // the places that accepted = 1 reads
      conv.has_initial_state = rule.has_initial_state =
          deltic::TensorView(fresh.data(), deltic::DType::u8, {N});
    } else {
      conv.accepted = rule.accepted = {accepted.data(), {N}};
      rule.read_index = {table.data(), {N, columns}};
    }
    deltic::conv({.activation = deltic::Activation::silu, .null_slot = 0}, conv);
    const deltic::Options options{.gate_form = deltic::GateForm::softplus,
                                  .beta_form = deltic::BetaForm::sigmoid,
                                  .state_layout = deltic::StateLayout::vk,
                                  .split = deltic::Split::off,
                                  .qk_l2norm = true,
                                  .null_slot = 0};
    is_prefill ? deltic::forward(options, rule) : deltic::decode(options, rule);
    return o;
  }

 private:
  std::vector<float> states_, windows_, weight_{}, zero_ = std::vector<float>(HV);
};

// Rows of one step: the next `count` tokens of every request, the first `right` of them right.
struct Step {
  std::vector<float> rows{}, gates{};
  std::vector<int32_t> cu{0}, table{}, accepted{};

  void add(const Request* r, int64_t count, int64_t right, int64_t columns) {
    for (int64_t i = 0; i < count && r != nullptr; ++i) {
      rows.resize(rows.size() + kChannels), gates.resize(gates.size() + kGates);
      draw(*r, r->done + i, i < right, rows.data() + rows.size() - kChannels,
           gates.data() + gates.size() - kGates);
    }
    for (int64_t i = 0; i < columns; ++i) {
      table.push_back(r == nullptr ? 0 : static_cast<int32_t>(1 + r->place * (kDrafts + 1) + i));
    }
    accepted.push_back(r == nullptr ? 1 : static_cast<int32_t>(r->accepted));
    cu.push_back(static_cast<int32_t>(rows.size() / kChannels));
  }
};

std::vector<float> serve_alone(Request r) {
  Layer layer;
  std::vector<float> all;
  while (r.done < r.length) {
    const bool is_prefill = r.done == 0;
    Step step;
    const int64_t count = is_prefill ? r.prompt : 1;
    step.add(&r, count, count, is_prefill ? 1 : kDrafts + 1);
    const auto o = layer.run(is_prefill, step.rows, step.gates, step.cu, step.table, step.accepted);
    all.insert(all.end(), o.begin(), o.end());
    r.done += count;
  }
  return all;
}

}  // namespace

int main() try {
  deltic::check_abi();
  std::vector<Request> waiting;
  for (int64_t n = kRequests; n > 0; --n) waiting.push_back({n, 5 + 30 * n, 5 + 30 * n + 6 + n});
  std::vector<Request*> running(kBatch, nullptr);
  std::vector<Request> places(kBatch);
  std::vector<std::vector<float>> expected(kRequests + 1);
  Layer layer;
  int64_t finished = 0, steps = 0, tokens = 0, rejected = 0;
  bool same = true;
  const auto compare = [&](Request& r, const float* o, int64_t count) {
    const size_t each = HV * V;
    const float* want = expected[static_cast<size_t>(r.id)].data() + r.done * HV * V;
    same = same && std::memcmp(o, want, static_cast<size_t>(count) * each * sizeof(float)) == 0;
    r.done += count, tokens += count;
  };
  for (; finished < kRequests; ++steps) {
    for (size_t i = 0; i < running.size(); ++i) {
      if (running[i] != nullptr || waiting.empty()) continue;
      places[i] = waiting.back();
      waiting.pop_back();
      Request& r = *(running[i] = &places[i]);
      r.place = static_cast<int64_t>(i);
      expected[static_cast<size_t>(r.id)] = serve_alone(r);
      Step prompt;
      prompt.add(&r, r.prompt, r.prompt, 1);
      const auto o =
          layer.run(true, prompt.rows, prompt.gates, prompt.cu, prompt.table, prompt.accepted);
      compare(r, o.data(), r.prompt);
    }
    Step step;
    std::vector<int64_t> right;
    for (Request* r : running) {  // guesses of one to three tokens, the later ones wrong
      const int64_t count = 1 + steps % (kDrafts + 1);
      right.push_back(
          r == nullptr ? 0 : std::min({1 + (steps + r->id) % 3, count, r->length - r->done}));
      step.add(r, count, right.back(), kDrafts + 1);
    }
    const auto o = layer.run(false, step.rows, step.gates, step.cu, step.table, step.accepted);
    for (size_t i = 0; i < running.size(); ++i) {
      if (running[i] == nullptr) continue;
      Request& r = *running[i];
      rejected += step.cu[i + 1] - step.cu[i] - right[i];
      compare(r, o.data() + step.cu[i] * HV * V, right[i]);
      r.accepted = right[i];
      if (r.done < r.length) continue;
      running[i] = nullptr;
      ++finished;
    }
  }
  std::printf("%d requests, %d tokens, %d guesses rejected, %d steps: %s served alone\n",
              static_cast<int>(finished), static_cast<int>(tokens), static_cast<int>(rejected),
              static_cast<int>(steps), same ? "the bits of every request" : "OTHER outputs than");
  return same ? 0 : 1;
} catch (const deltic::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
