// A serving loop over pools: requests come and go, prompts are prefilled into slots, running
// requests decode together with drafted tokens of which some are accepted. Every output is compared
// with that of the request served alone, token by token: the bits are the same. On a GPU, where
// this program was built for one, a step is a CUDA graph that is replayed with other slots and
// lengths.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <vector>

#include "deltic/deltic.hpp"
#include "place.h"

namespace {

constexpr int64_t H = 2, HV = 4, K = 64, V = 64, W = 4, kDrafts = 3, kBatch = 3, kRequests = 7;
constexpr int64_t kChannels = 2 * H * K + HV * V, kGates = 2 * HV, kWindow = W - 1 + kDrafts;
constexpr int64_t kColumns = kDrafts + 1;          // slots of a request
constexpr int64_t kSlots = 1 + kBatch * kColumns;  // slot 0 is none: rows of padding name it
constexpr int64_t kLongest = 5 + 30 * kRequests;   // prompt

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
      table.push_back(r == nullptr ? 0 : static_cast<int32_t>(1 + r->place * kColumns + i));
    }
    accepted.push_back(r == nullptr ? 1 : static_cast<int32_t>(r->accepted));
    cu.push_back(static_cast<int32_t>(rows.size() / kChannels));
  }
};

// One layer, convolution and gated delta rule, with the pools that its windows and states lie in,
// and the memory of its calls: the addresses of a step never change.
class Layer {
 public:
  Layer(const Place& place, int64_t batch)
      : place_(place),
        batch_(batch),
        windows_(place, kSlots * kChannels * kWindow),
        states_(place, kSlots * HV * V * K),
        weight_(place, weights()),
        zero_(place, HV),
        rows_(place, kLongest * kChannels),
        gates_(place, kLongest * kGates),
        mixed_(place, kLongest * kChannels),
        o_(place, kLongest * HV * V),
        cu_(place, batch + 1),
        table_(place, batch * kColumns),
        accepted_(place, batch),
        fresh_(place, batch) {
    const auto step = [this] { launch(false, batch_, batch_ * kColumns); };
    step();  // of sequences without a token: makes the workspaces, which a capture cannot
    step_ = place.repeated(step);
  }

  // The packed tokens of some sequences. Prefill: each has a slot in the table and starts from
  // zero. Else it has kColumns, and the state after the accepted-th token of the last step is read.
  std::vector<float> run(bool is_prefill, const Step& step) {
    const auto N = static_cast<int64_t>(step.cu.size()) - 1;
    const auto T = static_cast<int64_t>(step.cu.back());
    rows_.upload(step.rows), gates_.upload(step.gates);
    cu_.upload(step.cu), table_.upload(step.table), accepted_.upload(step.accepted);
    is_prefill ? launch(true, N, T) : step_();
    return o_.download(T * HV * V);
  }

 private:
  static std::vector<float> weights() {
    std::mt19937 generator(1);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    std::vector<float> found(kChannels * W);
    std::generate(found.begin(), found.end(), [&] { return uniform(generator); });
    return found;
  }

  // T rows, of which those from cu[N] on are padding.
  void launch(bool is_prefill, int64_t N, int64_t T) {
    const int64_t columns = is_prefill ? 1 : kColumns;
    const deltic::TensorView first = table_.view(0, {N}).with_strides({columns});
    deltic::ConvTensors conv{.x = rows_.view(0, {1, T, kChannels}),
                             .weight = weight_.view(0, {kChannels, W}),
                             .cu_seqlens = cu_.view(0, {N + 1}),
                             .state_pool = windows_.view(0, {kSlots, kChannels, kWindow}),
                             .read_index = first,
                             .out = mixed_.view(0, {1, T, kChannels})};
    // q, k and v are slices of the convolution's rows, beta and g of the gates'.
    const auto slice = [&](int64_t at, int64_t heads, int64_t width) {
      return mixed_.view(at, {1, T, heads, width})
          .with_strides({T * kChannels, kChannels, width, 1});
    };
    const auto gate = [&](int64_t at) {
      return gates_.view(at, {1, T, HV}).with_strides({T * kGates, kGates, 1});
    };
    deltic::Tensors rule{.q = slice(0, H, K),
                         .k = slice(H * K, H, K),
                         .v = slice(2 * H * K, HV, V),
                         .o = o_.view(0, {1, T, HV, V}),
                         .beta = gate(0),
                         .g = gate(HV),
                         .A_log = zero_.view(0, {HV}),
                         .dt_bias = zero_.view(0, {HV}),
                         .cu_seqlens = cu_.view(0, {N + 1}),
                         .state_pool = states_.view(0, {kSlots, HV, V, K}),
                         .read_index = first};
    if (is_prefill) {
      conv.state_pool.shape[2] = W - 1;  // the places that accepted = 1 reads
      conv.has_initial_state = rule.has_initial_state = fresh_.view(0, {N});
    } else {
      conv.accepted = rule.accepted = accepted_.view(0, {N});
      rule.read_index = table_.view(0, {N, columns});
    }
    const deltic::Options silu{.activation = deltic::Activation::silu, .null_slot = 0};
    const deltic::Options options{.gate_form = deltic::GateForm::softplus,
                                  .beta_form = deltic::BetaForm::sigmoid,
                                  .state_layout = deltic::StateLayout::vk,
                                  .split = deltic::Split::off,
                                  .qk_l2norm = true,
                                  .null_slot = 0};
    void* const stream = place_.stream();
    Memory<std::byte>& work = is_prefill ? prefill_work_ : step_work_;
    const size_t of_rule = is_prefill ? deltic::forward_workspace_bytes(options, rule, stream)
                                      : deltic::decode_workspace_bytes(options, rule, stream);
    const auto bytes =
        static_cast<int64_t>(std::max(of_rule, deltic::conv_workspace_bytes(silu, conv, stream)));
    if (work.count() < bytes) work = Memory<std::byte>(place_, bytes);
    const deltic_workspace workspace{work.data(), static_cast<uint64_t>(work.count())};
    deltic::conv(silu, conv, workspace, stream);
    is_prefill ? deltic::forward(options, rule, workspace, stream)
               : deltic::decode(options, rule, workspace, stream);
  }

  const Place& place_;
  int64_t batch_;
  Memory<float> windows_, states_, weight_, zero_, rows_, gates_, mixed_, o_;
  Memory<int32_t> cu_, table_, accepted_;
  Memory<uint8_t> fresh_;
  Memory<std::byte> prefill_work_{}, step_work_{};
  std::function<void()> step_{};
};

std::vector<float> serve_alone(const Place& place, Request r) {
  Layer layer(place, 1);
  std::vector<float> all;
  while (r.done < r.length) {
    const bool is_prefill = r.done == 0;
    Step step;
    const int64_t count = is_prefill ? r.prompt : 1;
    step.add(&r, count, count, is_prefill ? 1 : kColumns);
    const auto o = layer.run(is_prefill, step);
    all.insert(all.end(), o.begin(), o.end());
    r.done += count;
  }
  return all;
}

}  // namespace

int main() try {
  deltic::check_abi();
  const Place place;
  if (place.is_gpu()) {
    std::printf("on the GPU, steps as a CUDA graph\n");
  } else {
    std::printf("on the CPU: %s\n", place.why_not().c_str());
  }
  std::vector<Request> waiting;
  for (int64_t n = kRequests; n > 0; --n) waiting.push_back({n, 5 + 30 * n, 5 + 30 * n + 6 + n});
  std::vector<Request*> running(kBatch, nullptr);
  std::vector<Request> places(kBatch);
  std::vector<std::vector<float>> expected(kRequests + 1);
  Layer layer(place, kBatch);
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
      expected[static_cast<size_t>(r.id)] = serve_alone(place, r);
      Step prompt;
      prompt.add(&r, r.prompt, r.prompt, 1);
      const auto o = layer.run(true, prompt);
      compare(r, o.data(), r.prompt);
    }
    Step step;
    std::vector<int64_t> right;
    for (Request* r : running) {  // guesses of one to three tokens, the later ones wrong
      const int64_t count = 1 + steps % kColumns;
      right.push_back(
          r == nullptr ? 0 : std::min({1 + (steps + r->id) % 3, count, r->length - r->done}));
      step.add(r, count, right.back(), kColumns);
    }
    const auto o = layer.run(false, step);
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
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
