// Backward calls whose workspace is larger than a round's: every head has the bits that it has in a
// call of its own. Of tensors too large for the oracle, of which a few heads are looked at.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cases/device.h"
#include "support.h"

namespace deltic::test {
namespace {

namespace device = cases::device;

// Rows or states on the GPU, [..., heads, ...]: its heads are dimension `heads_at`.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType type, std::vector<int64_t> shape, int heads_at)
      : type_(type),
        shape_(std::move(shape)),
        heads_at_(heads_at),
        size_(type == DType::f32 ? 4 : 2) {
    int64_t n = 1;
    for (const int64_t x : shape_) n *= x;
    bytes_ = static_cast<size_t>(n) * size_;
    memory_ = device::allocate(bytes_);
    device::set(memory_.get(), 0xFF, bytes_);  // NaN, in bf16 as well
  }
  // Numbers between `low` and `high`, which repeat after a prime number of them: no head is as
  // another.
  void fill(double low, double high, uint32_t seed) {
    constexpr size_t kPeriod = 500009;
    std::vector<std::byte> host(std::min(kPeriod * size_, bytes_));
    for (size_t i = 0; i < host.size(); i += size_) {
      seed = seed * 1664525u + 1013904223u;
      store(reinterpret_cast<uint8_t*>(host.data() + i), type_,
            low + (high - low) * double(seed >> 8) * 0x1p-24);
    }
    device::upload(memory_.get(), host.data(), host.size());
    for (size_t done = host.size(); done < bytes_;) {
      const size_t more = std::min(done, bytes_ - done);
      device::copy(memory_.get() + done, memory_.get(), more, nullptr);
      done += more;
    }
  }
  TensorView view() const {
    return TensorView(memory_.get(), type_, std::span<const int64_t>(shape_)).on(DeviceType::cuda);
  }
  // Those heads, where they lie.
  TensorView view(int64_t first, int64_t heads) const {
    TensorView t = view();
    t.data = memory_.get() + first * t.strides[heads_at_] * static_cast<int64_t>(size_);
    t.shape[heads_at_] = heads;
    return t;
  }
  Tensor like(int64_t heads) const {
    std::vector<int64_t> shape = shape_;
    shape[static_cast<size_t>(heads_at_)] = heads;
    return Tensor(type_, shape, heads_at_);
  }
  std::vector<std::byte> bytes(int64_t first, int64_t heads) const {
    int64_t rows = 1, inner = 1;
    for (int i = 0; i < static_cast<int>(shape_.size()); ++i) {
      if (i < heads_at_) rows *= shape_[static_cast<size_t>(i)];
      if (i > heads_at_) inner *= shape_[static_cast<size_t>(i)];
    }
    const size_t head = static_cast<size_t>(inner) * size_,
                 width = head * static_cast<size_t>(heads);
    const size_t pitch = head * static_cast<size_t>(shape_[static_cast<size_t>(heads_at_)]);
    const auto packed = device::allocate(width * static_cast<size_t>(rows));
    device::copy_2d(packed.get(), width, memory_.get() + head * static_cast<size_t>(first), pitch,
                    width, static_cast<size_t>(rows));
    std::vector<std::byte> host(width * static_cast<size_t>(rows));
    device::download(host.data(), packed.get(), host.size());
    return host;
  }

 private:
  DType type_ = DType::f32;
  std::vector<int64_t> shape_;
  int heads_at_ = 0;
  size_t size_ = 0, bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
};

struct RoundsCase {
  const char* name;
  bool per_channel;
  int64_t T, H, HV;
  std::vector<int32_t> cu;  // empty: one sequence
  bool has_form;            // softplus, with parameters
  int64_t segment = 0;
};
void PrintTo(const RoundsCase& c, std::ostream* out) { *out << c.name; }

struct Output {
  const char* name;
  TensorView BackwardTensors::*at;
  bool is_of_keys;
  Tensor tensor;
};
struct Input {
  TensorView Tensors::*at;
  bool is_of_keys;
  Tensor tensor;
};

class GpuRounds : public testing::TestWithParam<RoundsCase> {
 protected:
  void SetUp() override {
    const std::string missing = device::missing();
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

TEST_P(GpuRounds, HeadsHaveTheBitsOfTheirOwnCalls) {
  const RoundsCase& c = GetParam();
  constexpr int64_t kWidth = 128;
  const int64_t group = c.HV / c.H;
  const int64_t N = c.cu.empty() ? 1 : static_cast<int64_t>(c.cu.size()) - 1;
  const DType type = DType::bf16;
  uint32_t seed = 1;
  const auto filled = [&](DType dtype, std::vector<int64_t> shape, int heads_at, double low,
                          double high) {
    Tensor x(dtype, std::move(shape), heads_at);
    x.fill(low, high, seed++);
    return x;
  };
  const auto rows = [&](int64_t heads, double low, double high) {
    return filled(type, {1, c.T, heads, kWidth}, 2, low, high);
  };
  const std::vector<int64_t> per_token = {1, c.T, c.HV}, states = {N, c.HV, kWidth, kWidth};
  const std::vector<int64_t> gates =
      c.per_channel ? std::vector<int64_t>{1, c.T, c.HV, kWidth} : per_token;
  std::vector<Input> inputs = {
      {&Tensors::q, true, rows(c.H, -1, 1)},
      {&Tensors::k, true, rows(c.H, -1, 1)},
      {&Tensors::v, false, rows(c.HV, -1, 1)},
      {&Tensors::beta, false, filled(type, per_token, 2, -1, 1)},
      // Slow ones: segments remember.
      {&Tensors::g, false, filled(type, gates, 2, c.has_form ? -5 : -0.02, c.has_form ? -1 : 0)},
      {&Tensors::initial_state, false, filled(DType::f32, states, 1, -1, 1)}};
  const Tensor d_o = rows(c.HV, -1, 1), d_final = filled(DType::f32, states, 1, -1, 1);
  std::vector<Output> outputs = {
      {"dq", &BackwardTensors::dq, true, Tensor(type, {1, c.T, c.H, kWidth}, 2)},
      {"dk", &BackwardTensors::dk, true, Tensor(type, {1, c.T, c.H, kWidth}, 2)},
      {"dv", &BackwardTensors::dv, false, Tensor(type, {1, c.T, c.HV, kWidth}, 2)},
      {"dbeta", &BackwardTensors::dbeta, false, Tensor(type, per_token, 2)},
      {"dg", &BackwardTensors::dg, false, Tensor(type, gates, 2)},
      {"d_initial_state", &BackwardTensors::d_initial_state, false, Tensor(DType::f32, states, 1)}};
  if (c.has_form) {
    const std::vector<int64_t> bias =
        c.per_channel ? std::vector<int64_t>{c.HV, kWidth} : std::vector<int64_t>{c.HV};
    inputs.push_back({&Tensors::A_log, false, filled(DType::f32, {c.HV}, 0, -1, 1)});
    inputs.push_back({&Tensors::dt_bias, false, filled(DType::f32, bias, 0, -1, 1)});
    outputs.push_back({"dA_log", &BackwardTensors::dA_log, false, Tensor(DType::f32, {c.HV}, 0)});
    outputs.push_back({"ddt_bias", &BackwardTensors::ddt_bias, false, Tensor(DType::f32, bias, 0)});
  }
  std::shared_ptr<std::byte> cu;
  if (!c.cu.empty()) {
    cu = device::allocate(c.cu.size() * 4);
    device::upload(cu.get(), reinterpret_cast<const std::byte*>(c.cu.data()), c.cu.size() * 4);
  }
  Options options{.beta_form = BetaForm::sigmoid,
                  .split = c.segment > 0 ? Split::segments : Split::off,
                  .segment_length = c.segment,
                  .qk_l2norm = true,
                  .impl = "cuda.sm90.backward"};
  if (c.has_form) options.gate_form = GateForm::softplus;

  // The call of q/k heads [first, first + heads); its gradients go to `to`.
  const auto call_of = [&](int64_t first, int64_t heads, const std::vector<Output>& to,
                           bool is_whole) {
    BackwardTensors t;
    const auto place = [&](bool is_of_keys, const Tensor& x) {
      const int64_t each = is_of_keys ? 1 : group;
      return x.view(first * each, heads * each);
    };
    for (const Input& x : inputs) t.forward.*x.at = place(x.is_of_keys, x.tensor);
    t.d_o = place(false, d_o), t.d_final_state = place(false, d_final);
    if (cu != nullptr) {
      t.forward.cu_seqlens = TensorView(cu.get(), DType::i32, {N + 1}).on(DeviceType::cuda);
    }
    for (const Output& x : to) {
      t.*x.at = is_whole ? place(x.is_of_keys, x.tensor) : x.tensor.view();
    }
    return t;
  };
  const BackwardTensors whole = call_of(0, c.H, outputs, true);
  size_t bytes = 0;
  try {
    bytes = backward_workspace_bytes(options, whole);
  } catch (const Error& e) {
    const std::string text = e.what();
    const bool is_absent = !runs_on_gpu(Op::backward, options.impl) ||
                           text.find("not in this build") != std::string::npos;
    ASSERT_TRUE(e.kind() == ErrorKind::unsupported && is_absent) << text;
    GTEST_SKIP() << text;  // another GPU, or a build without this instance
  }
  // Two rounds: as much as for the heads of the first one.
  const int64_t half = (c.H + 1) / 2;
  EXPECT_EQ(bytes, backward_workspace_bytes(options, call_of(0, half, outputs, true)));
  const auto memory = device::allocate(bytes);
  const deltic_workspace workspace{memory.get(), bytes};
  device::set(memory.get(), 0xFF, bytes);
  backward(options, whole, workspace);
  device::synchronize();
  for (const int64_t head : {int64_t{0}, half - 1, half, c.H - 1}) {
    std::vector<Output> own;
    for (const Output& x : outputs) {
      own.push_back({x.name, x.at, x.is_of_keys, x.tensor.like(x.is_of_keys ? 1 : group)});
    }
    const BackwardTensors alone = call_of(head, 1, own, false);
    ASSERT_LE(backward_workspace_bytes(options, alone), bytes);
    device::set(memory.get(), 0xFF, bytes);
    backward(options, alone, workspace);
    device::synchronize();
    for (size_t i = 0; i < own.size(); ++i) {
      const int64_t each = own[i].is_of_keys ? 1 : group;
      EXPECT_TRUE(own[i].tensor.bytes(0, each) == outputs[i].tensor.bytes(head * each, each))
          << own[i].name << " of q/k head " << head;
    }
  }
  // Heads differ, or nothing was seen here.
  EXPECT_FALSE(outputs[0].tensor.bytes(0, 1) == outputs[0].tensor.bytes(half, 1));
}
INSTANTIATE_TEST_SUITE_P(
    All, GpuRounds,
    testing::Values(
        RoundsCase{"per channel, of odd heads", true, 6052, 131, 131, {}, false},
        RoundsCase{
            "packed, with padding and parameters", true, 6052, 131, 131, {0, 2000, 5990}, true},
        RoundsCase{"in segments", true, 6052, 130, 130, {}, false, 24 * 64},
        RoundsCase{"per head, groups of two", false, 10020, 65, 130, {}, true}));

}  // namespace
}  // namespace deltic::test
