// Lists on the GPU that make no sense: unchecked, a call gives undefined results and writes nothing
// outside of its tensors; checked, it names the list and writes nothing at all.
#include <algorithm>
#include <cstring>

#include "gpu_support.h"

namespace deltic::test {
namespace {

using cases::Case;
using cases::Instance;
namespace device = cases::device;

constexpr const char* kPools[] = {"state_pool", "write_pool", "ckpt_states", "conv.state_pool",
                                  "conv.write_pool"};
constexpr const char* kLists[] = {"cu_seqlens",      "read_index",       "write_index",
                                  "accepted",        "parents",          "recurrent_from",
                                  "ckpt_cu",         "ckpt_tokens",      "ckpt_slots",
                                  "conv.read_index", "conv.write_index", "conv.accepted"};
// What takes lists, beside decode with states (GpuServing.ListsThatMakeNoSenseStayInThePool).
const char* const kListLines[] = {
    "forward gate=head seqs=70,5,64 pad=3 H=1 HV=2 K=64 V=64 dtype=bf16 pool=move hasinit=1 null=0 "
    "ckpt=0,10,64,end split=off",
    "forward gate=channel seqs=200,5,0,64 pad=3 cu=i64 H=1 HV=2 K=128 V=128 dtype=bf16 pool=move "
    "idx=i64 state=vk sdtype=bf16 ckpt=0,64,end cdtype=bf16 split=128",
    "forward gate=head seqs=70,5,64 H=1 HV=2 K=64 V=64 dtype=bf16 pool=drafts writepool=1 "
    "sdtype=f16 split=off",
    "forward gate=head seqs=70,5,64 pad=1 H=1 HV=2 K=64 V=64 dtype=bf16 pool=move "
    "recurrent=3,64,end split=off",
    "decode record=1 gate=head seqs=3,2,0,4,5 pad=1 H=1 HV=2 K=64 V=40 dtype=bf16 pool=drafts "
    "tree=1 idx=i64",
    "decode gate=head seqs=3,2,0,4 pad=1 H=1 HV=2 K=40 V=24 pool=move ckpt=0,1,end",
    "commit gate=channel dense=4x5 HV=2 K=64 V=40 layers=2 tree=1 pool=move idx=i64",
    "commit gate=head dense=4x5 HV=2 K=64 V=40 pool=move state=vk sdtype=bf16",
    "move dense=4x1 HV=2 K=32 V=64 layers=3 pool=move",
    "move dense=4x1 HV=2 K=64 V=40 pool=move writepool=1 transpose=1 sdtype=bf16 odtype=f32 "
    "idx=i64",
    "conv dense=5x1 D=40 W=4 pool=move dtype=bf16 sdtype=bf16 wdtype=bf16",
    "conv dense=3x4 D=40 W=4 S=7 pool=drafts null=0 dtype=bf16 sdtype=bf16 wdtype=bf16 idx=i64",
    "conv seqs=1,5,0,2 pad=2 D=40 W=4 S=7 pool=drafts dtype=f16",
    "conv seqs=70,5,0,64 pad=2 D=72 W=4 pool=move hasinit=1 dtype=bf16 ckpt=0,2,64,end idx=i64",
    "conv seqs=9,0,4,300 D=33 W=5 pool=move writepool=1 dtype=f32",
    "step gate=head dense=4x1 H=1 HV=2 K=128 V=64 l2norm=1 act=silu norm=silu dtype=bf16 "
    "sdtype=bf16 state=vk pool=move null=0 hasinit=1",
    "step gate=channel seqs=3,2,0,4 pad=1 H=1 HV=2 K=64 V=40 l2norm=1 act=silu norm=sigmoid "
    "dtype=bf16 pool=drafts idx=i64",
    "step gate=head dense=5x2 H=2 HV=4 K=33 V=24 l2norm=1 act=silu norm=off pool=move writepool=1",
    "step gate=head seqs=2,4,1 H=1 HV=2 K=64 V=64 l2norm=1 act=silu norm=silu pool=tokens",
};

std::vector<std::string> lists_of(const Instance& instance) {
  std::vector<std::string> names;
  for (const char* name : kLists)
    if (instance.has(name)) names.emplace_back(name);
  return names;
}
// Numbers far beyond any tensor, and such as are just outside of it.
void spoil(Instance& instance, const std::string& name) {
  const TensorView& list = instance.tensor(name).view;
  const bool is_wide = static_cast<DType>(list.dtype) == DType::i64;
  double edge = 0;  // slots of the largest pool, or tokens
  for (const std::string pool : kPools) {
    if (!instance.has(pool) || pool.starts_with("conv.") != name.starts_with("conv.")) continue;
    const TensorView& x = instance.tensor(pool).view;
    edge = std::max(edge, static_cast<double>(x.shape[x.rank == 5 ? 1 : 0]));
  }
  if (name == "cu_seqlens") edge = static_cast<double>(instance.spec().num_tokens());
  const double huge = is_wide ? 0x1p40 + 1 : 0x1p30;
  const double values[] = {edge + 1, -2, huge, -huge, edge, 1, -3, edge + 2, 0};
  const int64_t n = list.numel();
  for (int64_t i = 0; i < n; ++i) instance.set(name, i, values[i % std::ssize(values)]);
}

// A pool amid other memory, which must stay as it is.
struct Surrounded {
  std::string name;
  TensorView view;
  size_t around = 0, bytes = 0;  // of a side, of the pool
  std::shared_ptr<std::byte> memory{};
};
constexpr int kFill = 0x3C;  // a small number in every float dtype
Surrounded surround(const cases::Call& call, const std::string& name) {
  Surrounded x{.name = name, .view = call.get(name)};
  const auto size = static_cast<size_t>(cases::size_of(static_cast<DType>(x.view.dtype)));
  const int slots = x.view.rank == 5 ? 1 : 0;
  x.around = 3 * size * static_cast<size_t>(x.view.strides[slots]);
  x.around = (x.around + 255) / 256 * 256;
  x.bytes = size * static_cast<size_t>(x.view.shape[0] * x.view.strides[0]);
  x.memory = device::allocate(x.bytes + 2 * x.around);
  device::set(x.memory.get(), kFill, x.bytes + 2 * x.around);
  x.view.data = x.memory.get() + x.around;
  return x;
}
// Whether bytes [begin, end) are as `surround` left them.
bool is_as_it_was(const std::byte* memory, size_t begin, size_t end) {
  std::vector<std::byte> host(end - begin);
  device::download(host.data(), memory + begin, host.size());
  return std::all_of(host.begin(), host.end(),
                     [](std::byte x) { return x == static_cast<std::byte>(kFill); });
}

// The call with every pool in memory of its own and a workspace between guards.
void expect_nothing_outside(const std::string& line, const std::string& impl,
                            const std::vector<std::string>& spoiled) {
  std::string what = impl + ":";
  for (const std::string& name : spoiled) what += " " + name;
  SCOPED_TRACE(what + "\n  " + line);
  Instance instance(cases::parse(line), true, kGpu);
  for (const std::string& name : spoiled) spoil(instance, name);
  instance.reserve({.impl = impl});
  instance.reset();
  cases::Call call = instance.call_of();
  std::vector<Surrounded> pools;
  for (const char* name : kPools) {
    if (!instance.has(name)) continue;
    pools.push_back(surround(call, name));
    call.set(name, pools.back().view);
  }
  const Options options = instance.options({.impl = impl});
  const size_t bytes = call.workspace_bytes(options), guard = 4096;
  const auto workspace = device::allocate(bytes + 2 * guard);
  device::set(workspace.get(), kFill, bytes + 2 * guard);
  call.run(options, {workspace.get() + guard, bytes});
  device::synchronize();
  for (const Surrounded& x : pools) {
    EXPECT_TRUE(is_as_it_was(x.memory.get(), 0, x.around)) << "before " << x.name;
    EXPECT_TRUE(is_as_it_was(x.memory.get(), x.around + x.bytes, x.bytes + 2 * x.around))
        << "behind " << x.name;
  }
  EXPECT_TRUE(is_as_it_was(workspace.get(), 0, guard));
  EXPECT_TRUE(is_as_it_was(workspace.get(), guard + bytes, bytes + 2 * guard));
  instance.fetch();
  EXPECT_EQ(instance.damage(), "");  // inputs, and what lies around all other tensors
}

class GpuLists : public Gpu {};

TEST_F(GpuLists, UncheckedOnesReachNothingOutside) {
  for (const std::string line : kListLines) {
    const Case c = cases::parse(line);
    const std::vector<std::string> names = lists_of(Instance::shapes_of(c));
    ASSERT_FALSE(names.empty()) << line;
    for (const std::string& impl : takers(c)) {
      for (const std::string& name : names) expect_nothing_outside(line, impl, {name});
      expect_nothing_outside(line, impl, names);
    }
  }
}

// The CPU's sentences first, which need no GPU; it cuts no sequences.
Case on_cpu(const std::string& line) {
  Case c = cases::parse(line);
  if (c.split == Split::segments) c.split = Split::off, c.segment = 0;
  return c;
}
std::string sentence_of(const std::string& line, const std::string& spoiled) {
  Instance cpu(on_cpu(line));
  spoil(cpu, spoiled);
  return error_of([&] { cpu.run({.checked = true}); });
}
TEST(Lists, TheCpuNamesThem) {
  for (const std::string line : kListLines) {
    Instance right(on_cpu(line));
    EXPECT_EQ(error_of([&] { right.run({.checked = true}); }), "") << line;
    for (const std::string& name : lists_of(right)) {
      const std::string text = sentence_of(line, name);
      EXPECT_TRUE(is_about(text, name)) << name << ": " << text << "\n  " << line;
    }
  }
}
TEST_F(GpuLists, CheckedOnesAreNamed) {
  for (const std::string line : kListLines) {
    const Case c = cases::parse(line);
    for (const std::string& name : lists_of(Instance::shapes_of(c))) {
      const std::string expected = sentence_of(line, name);
      for (const std::string& impl : takers(c)) {
        SCOPED_TRACE(impl + ": " + name + "\n  " + line);
        Instance gpu(c, true, kGpu);
        spoil(gpu, name);
        EXPECT_EQ(error_of([&] { gpu.run({.impl = impl, .checked = true}); }), expected);
        gpu.fetch();
        EXPECT_EQ(gpu.damage(), "");
        for (const std::string& output : gpu.outputs()) {  // nothing was written
          const std::vector<std::byte> after = gpu.bytes(output);
          gpu.reset();
          EXPECT_TRUE(after == gpu.bytes(output)) << output;
        }
      }
    }
  }
}

}  // namespace
}  // namespace deltic::test
