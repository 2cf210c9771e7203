// What forward keeps for backward: the same gradients whatever is kept, a bounded peak of memory,
// and buffers of another call refused with the difference named.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "gradients.h"

namespace deltic::test {
namespace {

std::vector<GradientSetup> grid() {
  std::vector<GradientSetup> all;
  for (GateKind gate : {GateKind::none, GateKind::head, GateKind::channel}) {
    for (DType type : {DType::f32, DType::bf16, DType::f16}) {
      const GateForm form = gate == GateKind::none ? GateForm::log_decay : GateForm::softplus;
      // Eleven chunks: segments of four. Narrow panels, K between the engines' paddings.
      GradientSetup setup{.H = 1,
                          .HV = 2,
                          .K = 36,
                          .V = 44,
                          .sequences = {{1, 170}, {2, 170}},
                          .dense = true,
                          .gate = gate,
                          .gate_form = form,
                          .qk_l2norm = true,
                          .chunk = 16};
      all.push_back(with_dtype(setup, type));
      setup.chunk = 32;
      setup.layout = StateLayout::vk;
      setup.strided = true;
      setup.dense = false;
      setup.sequences = {{1, 300}, {2, 0}, {3, 33}, {4, 96}};
      setup.padding = 5;
      all.push_back(with_dtype(setup, type));
      setup.chunk = 64;
      setup.H = 2, setup.HV = 6, setup.K = 16, setup.V = 10;
      setup.sequences = {{1, 64}, {2, 65}, {3, 1}, {4, 0}, {5, 320}};
      setup.has_initial = false;
      setup.keys = KeyValues::zero_rows;
      setup.beta_form = BetaForm::two_sigmoid;
      all.push_back(with_dtype(setup, type));
    }
  }
  return all;
}

TEST(Saved, GradientsAndOutputsHaveTheSameBitsWhateverIsKept) {
  for (const GradientSetup& setup : grid()) {
    SCOPED_TRACE(name(setup));
    GradientCall call(setup);
    for (const std::string& impl : takers(setup)) {
      call.forward_keeping(impl, 1, Save::none);
      const auto o = call.o.all_bytes(), state = call.final_state.all_bytes();
      call.backward(impl);
      const auto want = all_gradients(call);
      for (Save save : {Save::states, Save::all}) {
        for (int32_t threads : {1, 3}) {
          call.forward_keeping(impl, threads, save);
          EXPECT_TRUE(call.o.all_bytes() == o) << impl;
          EXPECT_TRUE(call.final_state.all_bytes() == state) << impl;
          call.backward(impl, threads);
          EXPECT_TRUE(all_gradients(call) == want)
              << impl << " save=" << static_cast<int>(save) << " threads=" << threads;
        }
      }
    }
  }
}

// The error of a backward call, "" if there is none.
std::string refusal(GradientCall& call, const std::string& impl) {
  try {
    call.backward(impl);
    return "";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
}

GradientSetup base() {
  return with_dtype({.H = 1,
                     .HV = 2,
                     .K = 32,
                     .V = 16,
                     .sequences = {{1, 200}},
                     .dense = true,
                     .gate = GateKind::channel,
                     .gate_form = GateForm::bounded},
                    DType::bf16);
}

TEST(Saved, BuffersOfAnotherCallAreRefused) {
  struct Difference {
    const char* named;
    void (*change)(GradientSetup&);
  };
  const Difference differences[] = {
      {"expected B 2 ",
       [](GradientSetup& s) {
         s.sequences = {{1, 200}, {2, 200}};
       }},
      {"expected T 199 ",
       [](GradientSetup& s) {
         s.sequences = {{1, 199}};
       }},
      {"expected H 2 ", [](GradientSetup& s) { s.H = 2; }},
      {"expected HV 1 ", [](GradientSetup& s) { s.HV = 1; }},
      {"expected K 30 ", [](GradientSetup& s) { s.K = 30; }},
      {"expected V 15 ", [](GradientSetup& s) { s.V = 15; }},
      {"expected chunk 32 ", [](GradientSetup& s) { s.chunk = 32; }},
      {"expected gate per head ", [](GradientSetup& s) { s.gate = GateKind::head; }},
      {"expected gate_form softplus ", [](GradientSetup& s) { s.gate_form = GateForm::softplus; }},
      {"expected beta_form sigmoid ", [](GradientSetup& s) { s.beta_form = BetaForm::sigmoid; }},
      {"expected qk_l2norm given ", [](GradientSetup& s) { s.qk_l2norm = true; }},
      {"expected dtype fp32 ", [](GradientSetup& s) { s = with_dtype(s, DType::f32); }},
      {"expected cu_seqlens given ", [](GradientSetup& s) { s.dense = false; }},
      {"expected beta absent ", [](GradientSetup& s) { s.has_beta = false; }},
      {"expected initial_state absent ", [](GradientSetup& s) { s.has_initial = false; }},
      {"expected scale 0.5 ", [](GradientSetup& s) { s.scale = 0.5f; }},
      {"expected lower_bound -4 ", [](GradientSetup& s) { s.lower_bound = -4; }},
  };
  for (const std::string& impl : takers(base())) {
    for (Save save : {Save::states, Save::all}) {
      GradientCall kept(base());
      kept.forward_keeping(impl, 1, save);
      for (const Difference& d : differences) {
        GradientSetup other = base();
        d.change(other);
        const auto able = takers(other);
        if (std::find(able.begin(), able.end(), impl) == able.end()) continue;
        GradientCall call(other);
        call.saved = kept.saved;
        EXPECT_NE(refusal(call, impl).find(d.named), std::string::npos)
            << d.named << ": " << refusal(call, impl);
      }
      EXPECT_EQ(refusal(kept, impl), "");
    }
  }
}

TEST(Saved, OtherLengthsAreRefused) {
  GradientSetup setup = base();
  setup.dense = false;
  setup.sequences = {{1, 130}, {2, 70}};
  GradientCall kept(setup);
  setup.sequences = {{1, 129}, {2, 71}};
  GradientCall other(setup);
  setup.sequences = {{1, 130}, {2, 70}, {3, 0}};
  GradientCall more(setup);
  setup.sequences = {{1, 130}, {2, 69}};
  setup.padding = 1;
  GradientCall shorter(setup);
  for (const std::string& impl : takers(setup)) {
    kept.forward_keeping(impl, 1, Save::states);
    for (GradientCall* call : {&other, &shorter}) {
      call->saved = kept.saved;
      EXPECT_NE(refusal(*call, impl).find("expected the cu_seqlens of this call"),
                std::string::npos);
    }
    more.saved = kept.saved;
    EXPECT_NE(refusal(more, impl).find("expected N 3 as in this call, got 2"), std::string::npos);
  }
}

// Backward computes states again from those kept: with other products they would be others.
TEST(Saved, BuffersOfAnotherArithmeticAreRefused) {
  GradientCall call(base());
  const auto kind = [](const std::string& impl) {
    return impl == "cpu.amx" ? 1 : impl == "cpu.plain" ? 2 : 0;
  };
  for (const std::string& kept_by : takers(call.setup)) {
    call.forward_keeping(kept_by, 1, Save::states);
    for (const std::string& read_by : takers(call.setup)) {
      const std::string text = refusal(call, read_by);
      const bool same = kind(kept_by) == kind(read_by);
      EXPECT_EQ(text.find("expected implementation ") == std::string::npos, same)
          << kept_by << ' ' << read_by;
    }
  }
}

TEST(Saved, SpoiltBuffersAreRefused) {
  GradientCall call(base());
  const std::string impl = takers(call.setup).front();
  call.forward_keeping(impl, 1, Save::states);
  auto* bytes = static_cast<uint8_t*>(call.saved->c().data);
  const auto with = [&](size_t at, uint8_t value) {
    const uint8_t before = bytes[at];
    bytes[at] = value;
    const std::string text = refusal(call, impl);
    bytes[at] = before;
    return text;
  };
  EXPECT_NE(with(0, 'x').find("got other bytes"), std::string::npos);
  EXPECT_NE(with(8, 77).find("version"), std::string::npos);
  EXPECT_NE(with(16, 9).find("expected save states or all"), std::string::npos);
  const Scratch whole = *call.saved;
  for (size_t size : {size_t{64}, static_cast<size_t>(whole.c().bytes - 64)}) {
    call.saved.emplace(size);
    std::memcpy(call.saved->c().data, whole.c().data, size);
    EXPECT_NE(refusal(call, impl).find("bytes, got"), std::string::npos) << size;
  }
  call.saved = whole;
  EXPECT_EQ(refusal(call, impl), "");
}

struct Peak {
  double states, all;  // bytes of what is saved and of the larger workspace, per memory mode
  double inputs;       // q, k, v, g, o
};
Peak peak(DType type, int64_t T, GateKind gate) {
  constexpr int64_t H = 16, K = 128, V = 128;
  const auto rows = [&](int64_t width, DType t) {
    TensorView view(static_cast<const float*>(nullptr), {1, T, H, width});
    view.dtype = static_cast<int32_t>(t);
    return view;
  };
  Tensors t{.q = rows(K, type), .k = rows(K, type), .v = rows(V, type), .o = rows(V, type)};
  const auto bytes = [](const TensorView& x) {
    return static_cast<double>(x.numel()) * (x.dtype == DELTIC_F32 ? 4 : 2);
  };
  t.g = gate == GateKind::channel ? rows(K, DType::f32)
                                  : TensorView(static_cast<const float*>(nullptr), {1, T, H});
  Peak p{};
  p.inputs = bytes(t.q) + bytes(t.k) + bytes(t.v) + bytes(t.o) + bytes(t.g);
  for (Save save : {Save::states, Save::all}) {
    Options options{.num_threads = 2, .save = save};
    const size_t saved = forward_saved_bytes(options, t);
    const size_t forward_bytes = forward_workspace_bytes(options, t);
    options.save = Save::none;
    BackwardTensors b{.forward = t};
    b.forward.o = {};
    alignas(64) static std::byte somewhere[64];
    b.forward.saved = {somewhere, saved};
    const size_t work = std::max(forward_bytes, backward_workspace_bytes(options, b));
    (save == Save::states ? p.states : p.all) = static_cast<double>(saved + work);
  }
  return p;
}

// The library allocates nothing (see Allocation), so what it asks for is the peak.
TEST(Saved, PeakOfMemory) {
  for (GateKind gate : {GateKind::head, GateKind::channel}) {
    for (DType type : {DType::f32, DType::bf16, DType::f16}) {
      const Peak p = peak(type, 4096, gate);
      EXPECT_LT(p.states, (type == DType::f32 ? 0.2 : 0.4) * p.inputs);
      EXPECT_GT(p.all, p.states);
      // Sixteen times the tokens: four times the states.
      EXPECT_LT(peak(type, 16 * 4096, gate).states, 4.5 * p.states);
    }
  }
}

}  // namespace
}  // namespace deltic::test
