// Does every call end, and with the right bits, whatever else holds SMs: green contexts, streams of
// other priorities, other processes, graphs? One line per scenario; exit code 1 if one failed, 77
// without a GPU that the kernels are for.
//   gpu_progress [--quick] [NAME...]   scenarios whose names begin so; default: all
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <map>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cases/check.h"
#include "gpu_progress_kernels.h"

namespace deltic::test {
namespace {

using cases::Instance;
namespace device = cases::device;

// --- what is called ------------------------------------------------------------------------------
// With split off a call has the bits of the same call alone; the size is for about 0.2 ms on a
// whole H200.
struct Operation {
  const char *name, *impl, *line;
};
constexpr Operation kOperations[] = {
    {"KDA", "cuda.sm90.forward",
     "forward gate=channel form=bounded dense=1x4096 H=32 K=128 V=128 dtype=bf16 gdtype=bf16 "
     "beta=sigmoid l2norm=1 init=1 state=vk split=off"},
    {"GDN", "cuda.sm90.forward",
     "forward gate=head dense=1x4096 H=16 HV=32 K=128 V=128 dtype=bf16 init=1 split=off"},
    {"DeltaNet", "cuda.sm90.forward",
     "forward gate=none dense=1x4096 H=32 K=128 V=128 dtype=bf16 split=off"},
    {"KDA backward", "cuda.sm90.backward",
     "backward gate=channel dense=1x2048 H=16 K=128 V=128 dtype=bf16 l2norm=1 init=1 state=vk "
     "save=all split=off"},
    {"GDN backward", "cuda.sm90.backward",
     "backward gate=head dense=1x2048 H=8 HV=16 K=128 V=128 dtype=bf16 init=1 save=states "
     "split=off"},
    {"backward in fp32", "cuda.general",
     "backward gate=channel dense=1x512 H=4 HV=8 K=64 V=64 dtype=f32 init=1 save=none split=off"},
    {"decode", "cuda.decode",
     "decode gate=channel form=bounded dense=32x1 H=8 HV=16 K=128 V=128 dtype=bf16 gdtype=bf16 "
     "beta=sigmoid l2norm=1 pool=inplace state=vk"},
    {"decode of four", "cuda.decode",
     "decode gate=head dense=16x4 H=8 HV=16 K=128 V=128 dtype=bf16 pool=tokens state=vk "
     "sdtype=bf16"},
};
// Of every operation, quick to draw and to check; more sequences than carriers and fewer.
constexpr Operation kSmall[] = {
    {"KDA", "cuda.sm90.forward",
     "forward gate=channel form=bounded seqs=130,0,64,257 H=2 K=128 V=128 dtype=bf16 gdtype=bf16 "
     "beta=sigmoid l2norm=1 init=1 state=vk split=off"},
    {"GDN", "cuda.sm90.forward",
     "forward gate=head seqs=130,0,64,257 H=2 HV=4 K=128 V=128 dtype=bf16 init=1 split=off"},
    {"DeltaNet", "cuda.sm90.forward",
     "forward gate=none seqs=700,90 H=2 K=128 V=128 dtype=bf16 split=off"},
    {"decode", "cuda.decode",
     "decode gate=channel dense=5x1 H=2 HV=4 K=128 V=128 dtype=bf16 pool=mixed state=vk"},
    {"decode of some", "cuda.decode",
     "decode gate=head seqs=1,4,0,3 H=2 HV=4 K=128 V=128 dtype=bf16 pool=drafts state=vk "
     "sdtype=bf16"},
    {"KDA backward", "cuda.sm90.backward",
     "backward gate=channel form=softplus seqs=130,0,64,257 H=2 K=128 V=128 dtype=bf16 gdtype=bf16 "
     "beta=sigmoid l2norm=1 init=1 dfinal=1 state=vk save=all split=off"},
    {"GDN backward", "cuda.sm90.backward",
     "backward gate=head seqs=130,0,64,257 H=2 HV=4 K=128 V=128 dtype=bf16 init=1 save=states "
     "split=off"},
    {"DeltaNet backward", "cuda.sm90.backward",
     "backward gate=none seqs=300,90 H=2 K=64 V=64 dtype=bf16 save=none split=off"},
    {"backward in fp32", "cuda.general",
     "backward gate=channel seqs=70,0,33 H=1 HV=2 K=48 V=40 dtype=f32 init=1 save=none split=off"},
};
// Cut into segments by the number of SMs: other bits, the same budget of errors.
constexpr Operation kSegments[] = {
    {"KDA in segments", "cuda.sm90.forward",
     "forward gate=channel form=bounded dense=1x8192 H=2 K=128 V=128 dtype=bf16 gdtype=bf16 "
     "beta=sigmoid l2norm=1 init=1 state=vk split=auto"},
    {"GDN in segments", "cuda.sm90.forward",
     "forward gate=head gates=slow dense=1x8192 H=2 K=128 V=128 dtype=bf16 split=auto"},
    {"GDN in 512", "cuda.sm90.forward",
     "forward gate=head gates=slow dense=1x4096 H=2 K=128 V=128 dtype=bf16 split=512"},
    {"KDA backward in segments", "cuda.sm90.backward",
     "backward gate=channel gates=slow dense=1x8192 H=2 K=128 V=128 dtype=bf16 split=auto"},
};

// --- small things --------------------------------------------------------------------------------
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct Skip : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Failure(std::string(what) + ": " + cudaGetErrorString(error));
}
double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
template <class... Arguments>
std::string text(const char* format, Arguments... arguments) {
  char line[512];
  std::snprintf(line, sizeof line, format, arguments...);
  return line;
}
std::string milliseconds(double s) { return text(s < 0.1 ? "%.2f ms" : "%.0f ms", s * 1e3); }

int num_sms() {
  int index = 0, sms = 0;
  check(cudaGetDevice(&index), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index), "SMs of the device");
  return sms;
}

// A call that does not end becomes a failure with a sentence. The children die with this process.
char current_scenario[128];
void on_alarm(int) {
  constexpr char kText[] = " did not end: the watchdog ends the program\n";
  for (const char* part : {static_cast<const char*>(current_scenario), kText})
    if (write(STDOUT_FILENO, part, std::strlen(part)) < 0) break;
  _exit(1);
}

class Stream {
 public:
  explicit Stream(int priority = 0) {
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority),
          "cudaStreamCreateWithPriority");
  }
  ~Stream() { static_cast<void>(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};
// Lowest and highest; a smaller number is a higher priority.
std::array<int, 2> priorities() {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
  return {lowest, highest};
}
void wait_for(cudaStream_t stream) { check(cudaStreamSynchronize(stream), "the stream's work"); }

// --- calls with known results --------------------------------------------------------------------
// An operation's bits, alone on the GPU and within the contract's budget of the oracle, or of fp32
// on the CPU.
struct Known {
  std::map<std::string, std::shared_ptr<std::byte>> bytes;  // on the GPU
  std::map<std::string, std::shared_ptr<std::byte>> first;  // of states updated in place
};
void check_values(Instance& instance, const Operation& op) {
  instance.fetch();
  const std::string damage = instance.damage();
  if (!damage.empty()) throw Failure(std::string(op.name) + ": " + damage);
  constexpr int64_t kFew = 1 << 13;  // tokens of heads for which the oracle is quick
  const cases::Case& c = instance.spec();
  const cases::Result result = c.num_real_tokens() * c.HV <= kFew
                                   ? cases::compare(instance, cases::expect(instance))
                                   : cases::compare_in_f32(instance);
  if (result.status != cases::Status::passed)
    throw Failure(std::string(op.name) + ": " + result.reason);
}
const Known& known(const Operation& op) {
  static std::map<std::string, Known> all;
  const auto [at, is_new] = all.try_emplace(op.line);
  if (!is_new) return at->second;
  Instance instance(cases::parse(op.line), true, {.device = DeviceType::cuda});
  instance.run({.impl = op.impl});
  check_values(instance, op);
  for (const std::string& name : instance.outputs()) {
    const auto& buffer = instance.tensor(name).buffer;
    const auto copy = device::allocate(buffer.bytes());
    device::copy(copy.get(), buffer.device_data(0), buffer.bytes(), nullptr);
    at->second.bytes[name] = copy;
    if (instance.tensor(name).role != cases::Role::inout) continue;
    const auto& before = instance.tensor(name).before;
    const auto first = device::allocate(before.size());
    device::upload(first.get(), before.data(), before.size());
    at->second.first[name] = first;
  }
  device::synchronize();
  return at->second;
}

// A call with tensors and a workspace of its own, for one stream at a time.
class Work {
 public:
  explicit Work(const Operation& op)
      : op_(op), instance_(cases::parse(op.line), true, {.device = DeviceType::cuda}) {
    void* count = nullptr;
    check(cudaMalloc(&count, sizeof(unsigned long long)), "cudaMalloc");
    count_ = {static_cast<unsigned long long*>(count),
              [](unsigned long long* p) { static_cast<void>(cudaFree(p)); }};
  }
  const char* name() const { return op_.name; }
  Instance& instance() { return instance_; }

  // A workspace as the stream wants it.
  void use(cudaStream_t stream) {
    stream_ = stream;
    instance_.reserve({.impl = op_.impl, .stream = stream});
    instance_.reset();
    check(cudaMemset(count_.get(), 0, sizeof(unsigned long long)), "cudaMemset");
    device::synchronize();
  }
  // Of a backward that starts from what forward kept: both.
  void call() {
    const cases::RunOptions options{.impl = op_.impl, .stream = stream_};
    if (instance_.keeps_for_backward()) instance_.call_forward(options);
    instance_.call(options);
  }
  // Outputs spoiled, the call, its bits compared: all on the stream, none waited for.
  void start() {
    const Known& expected = known(op_);
    for (const auto& [name, bytes] : expected.bytes) {
      const auto& buffer = instance_.tensor(name).buffer;
      const auto first = expected.first.find(name);
      if (first != expected.first.end())
        device::copy(buffer.device_data(0), first->second.get(), buffer.bytes(), stream_);
      else
        check(cudaMemsetAsync(buffer.device_data(0), 0xFF, buffer.bytes(), stream_), "spoiling");
    }
    call();
    compare();
  }
  void compare() {
    for (const auto& [name, bytes] : known(op_).bytes) {
      const auto& buffer = instance_.tensor(name).buffer;
      check(count_differences(buffer.device_data(0), bytes.get(), buffer.bytes(), count_.get(),
                              stream_),
            "comparing");
    }
  }
  // After the stream's end.
  void check_bits() const {
    unsigned long long different = 0;
    check(cudaMemcpy(&different, count_.get(), sizeof different, cudaMemcpyDeviceToHost),
          "reading the count");
    if (different > 0)
      throw Failure(
          text("%s: %llu words differ from those of the call alone", op_.name, different));
  }
  // start, wait, check_bits; how long it took, and how long until all was launched.
  double run(double* launched = nullptr) {
    const double begin = seconds();
    start();
    if (launched != nullptr) *launched = seconds() - begin;
    wait_for(stream_);
    const double end = seconds();
    check_bits();
    return end - begin;
  }

 private:
  const Operation& op_;
  Instance instance_;
  cudaStream_t stream_ = nullptr;
  std::shared_ptr<unsigned long long> count_;
};
std::vector<Work> works(std::span<const Operation> operations) {
  std::vector<Work> all;
  for (const Operation& op : operations) {
    known(op);  // now, not beside what the scenario starts
    all.emplace_back(op);
  }
  return all;
}
// Sets of an operation's tensors, drawn once for all scenarios: lane i has one of each operation.
std::vector<Work>& lane(size_t i) {
  static std::vector<std::vector<Work>> all;
  while (all.size() <= i) all.push_back(works(kOperations));
  return all[i];
}
// CUDA loads the code of a kernel at its first launch and waits for what runs on the GPU then: not
// beside what the scenario starts.
void warm_up(Work& work, cudaStream_t stream) {
  work.use(stream);
  work.run();
}
// Every operation once on the stream, twice so that the second time is without first costs.
std::string run_each(std::vector<Work>& all, cudaStream_t stream) {
  std::string times;
  for (Work& work : all) {
    work.use(stream);
    work.run();
    times +=
        (times.empty() ? "" : ", ") + std::string(work.name()) + " " + milliseconds(work.run());
  }
  return times;
}

// --- who holds SMs -------------------------------------------------------------------------------
SmSet some_sms(int count, std::mt19937& random) {
  std::vector<int> all(static_cast<size_t>(num_sms()));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  std::shuffle(all.begin(), all.end(), random);
  SmSet set;
  for (int i = 0; i < count; ++i) {
    const auto sm = static_cast<size_t>(all[static_cast<size_t>(i)]);
    set.words[sm / 64] |= uint64_t{1} << (sm % 64);
  }
  return set;
}
// A word per SM in the host's memory that kernels write.
class HostFlags {
 public:
  HostFlags() {
    constexpr size_t kBytes = SmSet::kMost * sizeof(int);
    check(cudaHostAlloc(reinterpret_cast<void**>(&flags_), kBytes, cudaHostAllocMapped),
          "cudaHostAlloc");
    std::memset(flags_, 0, kBytes);
  }
  ~HostFlags() { static_cast<void>(cudaFreeHost(flags_)); }
  HostFlags(const HostFlags&) = delete;
  HostFlags& operator=(const HostFlags&) = delete;
  int* get() const { return flags_; }
  // Until so many SMs are held.
  void wait(int count) const {
    const volatile int* flags = flags_;
    for (const double begin = seconds();;) {
      int held = 0;
      for (int i = 0; i < SmSet::kMost; ++i) held += flags[i] != 0;
      if (held == count) return;
      if (held > count || seconds() - begin > 0.5)
        throw Failure(text("%d SMs are held, not %d", held, count));
    }
  }

 private:
  int* flags_ = nullptr;
};

// --- green contexts ------------------------------------------------------------------------------
template <class Function>
Function driver_function(const char* name, unsigned version) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess)
    throw Skip(std::string("the driver has no ") + name);
  return reinterpret_cast<Function>(f);
}
void check_driver(CUresult error, const char* what) {
  if (error != CUDA_SUCCESS)
    throw Failure(text("%s failed with error %d of the driver", what, static_cast<int>(error)));
}
class GreenContext {
 public:
  explicit GreenContext(unsigned sms) {
    const auto resource_of =
        driver_function<decltype(&cuDeviceGetDevResource)>("cuDeviceGetDevResource", 12040);
    const auto split = driver_function<decltype(&cuDevSmResourceSplitByCount)>(
        "cuDevSmResourceSplitByCount", 12040);
    const auto describe =
        driver_function<decltype(&cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc", 12040);
    const auto create = driver_function<decltype(&cuGreenCtxCreate)>("cuGreenCtxCreate", 12040);
    const auto create_stream =
        driver_function<decltype(&cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate", 12050);
    destroy_ = driver_function<decltype(&cuGreenCtxDestroy)>("cuGreenCtxDestroy", 12040);
    int index = 0;
    check(cudaGetDevice(&index), "cudaGetDevice");
    CUdevResource whole{}, part{}, rest{};
    check_driver(resource_of(index, &whole, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
    if (sms > whole.sm.smCount) throw Skip(text("the GPU has %u SMs", whole.sm.smCount));
    unsigned groups = 1;
    // Below eight SMs only without the promise that they stand together.
    const unsigned flags = sms < 8 ? CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING : 0;
    const CUresult error = split(&part, &groups, &whole, &rest, flags, sms);
    if (error != CUDA_SUCCESS || groups == 0)
      throw Skip(
          text("the driver gives no group of %u SMs (error %d)", sms, static_cast<int>(error)));
    sms_ = part.sm.smCount;
    CUdevResourceDesc description{};
    check_driver(describe(&description, &part, 1), "cuDevResourceGenerateDesc");
    check_driver(create(&context_, description, index, CU_GREEN_CTX_DEFAULT_STREAM),
                 "cuGreenCtxCreate");
    check_driver(create_stream(&stream_, context_, CU_STREAM_NON_BLOCKING, 0),
                 "cuGreenCtxStreamCreate");
  }
  ~GreenContext() {
    if (stream_ != nullptr) static_cast<void>(cudaStreamDestroy(stream_));
    if (context_ != nullptr) static_cast<void>(destroy_(context_));
  }
  GreenContext(const GreenContext&) = delete;
  GreenContext& operator=(const GreenContext&) = delete;
  cudaStream_t stream() const { return stream_; }
  CUgreenCtx handle() const { return context_; }
  unsigned sms() const { return sms_; }

 private:
  CUgreenCtx context_ = nullptr;
  CUstream stream_ = nullptr;
  unsigned sms_ = 0;
  decltype(&cuGreenCtxDestroy) destroy_ = nullptr;
};
// While it lives, the null stream is the context's.
class CurrentContext {
 public:
  explicit CurrentContext(const GreenContext& green) {
    const auto as_context =
        driver_function<decltype(&cuCtxFromGreenCtx)>("cuCtxFromGreenCtx", 12040);
    const auto get = driver_function<decltype(&cuCtxGetCurrent)>("cuCtxGetCurrent", 4000);
    set_ = driver_function<decltype(&cuCtxSetCurrent)>("cuCtxSetCurrent", 4000);
    CUcontext context = nullptr;
    check_driver(get(&before_), "cuCtxGetCurrent");
    check_driver(as_context(&context, green.handle()), "cuCtxFromGreenCtx");
    check_driver(set_(context), "cuCtxSetCurrent");
  }
  ~CurrentContext() { static_cast<void>(set_(before_)); }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  CUcontext before_ = nullptr;
  decltype(&cuCtxSetCurrent) set_ = nullptr;
};

// --- other processes -----------------------------------------------------------------------------
// This program again, as a child that has its own GPU context; what it is to do comes as arguments.
class Child {
 public:
  Child(std::vector<std::string> arguments,
        const std::vector<std::pair<std::string, std::string>>& environment = {}) {
    std::fflush(stdout);
    pid_ = fork();
    if (pid_ < 0) throw Failure("fork failed");
    if (pid_ > 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    std::string program = "gpu_progress";
    std::vector<char*> list = {program.data()};
    for (std::string& argument : arguments) list.push_back(argument.data());
    list.push_back(nullptr);
    execv("/proc/self/exe", list.data());
    _exit(127);
  }
  // Its exit code; 128 and more: ended by a signal.
  int wait() const {
    int status = 0;
    if (waitpid(pid_, &status, 0) != pid_) return 127;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
};
// The child's side: `calls N`, `capture MODE INDEX`.
int run_calls(int count) {
  Stream stream;
  std::vector<Work> all = works(kSmall);
  for (Work& work : all) work.use(stream);
  for (int i = 0; i < count; ++i) all[static_cast<size_t>(i) % all.size()].start();
  wait_for(stream);
  for (const Work& work : all) work.check_bits();
  return 0;
}
constexpr struct {
  const char* name;
  cudaStreamCaptureMode mode;
} kModes[] = {{"global", cudaStreamCaptureModeGlobal},
              {"thread", cudaStreamCaptureModeThreadLocal},
              {"relaxed", cudaStreamCaptureModeRelaxed}};
// What a process captures as its first call: all small operations, and those in segments.
std::vector<Operation> captured() {
  std::vector<Operation> all(std::begin(kSmall), std::end(kSmall));
  all.insert(all.end(), std::begin(kSegments), std::end(kSegments));
  return all;
}
// The process has asked the library for nothing before, not even for the size of a workspace: SMs
// are counted and code is loaded while the stream captures. Gradients from inputs alone: what
// forward keeps would be a call of its own.
int run_capture(const std::string& name, const Operation& op) {
  constexpr size_t kRoom = size_t{1} << 30;
  cases::Case c = cases::parse(op.line);
  c.save = Save::none;
  Instance instance(c, true, {.device = DeviceType::cuda});
  const Stream stream;
  const auto memory = device::allocate(kRoom);
  const auto mode = std::find_if(std::begin(kModes), std::end(kModes),
                                 [&](const auto& m) { return name == m.name; });
  check(cudaStreamBeginCapture(stream, mode->mode), "cudaStreamBeginCapture");
  const Options options = instance.options({.impl = op.impl});
  const size_t bytes = instance.call_of().workspace_bytes(options, stream);
  if (bytes > kRoom) throw Failure(text("a workspace of %zu bytes", bytes));
  instance.call_of().run(options, {memory.get(), bytes}, stream);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  for (int i = 0; i < 2; ++i) {
    instance.reset();
    check(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    wait_for(stream);
    check_values(instance, op);
  }
  return 0;
}
int run_child(const std::vector<std::string>& arguments) {
  try {
    if (arguments.at(0) == "calls") return run_calls(std::stoi(arguments.at(1)));
    return run_capture(arguments.at(1), captured().at(std::stoul(arguments.at(2))));
  } catch (const std::exception& e) {
    std::printf("  %s: %s\n", arguments.at(0).c_str(), e.what());
    return 1;
  }
}

// --- scenarios -----------------------------------------------------------------------------------
struct Settings {
  bool quick = false;
};

std::string alone(const Settings&) {
  Stream stream;
  for (const cudaStream_t special : {cudaStream_t{}, cudaStreamLegacy, cudaStreamPerThread})
    run_each(lane(0), special);
  return run_each(lane(0), stream);
}

template <unsigned kSms>
std::string green(const Settings&) {
  const GreenContext context(kSms);
  std::string times = run_each(lane(0), context.stream());
  for (Work& work : lane(0)) {  // guards of a workspace that is as large as this context's
    work.instance().fetch();
    if (const std::string damage = work.instance().damage(); !damage.empty())
      throw Failure(std::string(work.name()) + ": " + damage);
  }
  for (const Operation& op : kSegments) {
    Work work(op);
    work.use(context.stream());
    try {
      work.call();
    } catch (const Error& e) {  // a transfer has two states to carry
      if (context.sms() >= 3 || std::string(e.what()).find("SMs") == std::string::npos) throw;
      times += "; " + std::string(e.what());
      continue;
    }
    wait_for(context.stream());
    check_values(work.instance(), op);
  }
  return text("%u SMs: ", context.sms()) + times;
}
std::string green_current(const Settings&) {
  const GreenContext context(64);
  const CurrentContext current(context);
  return run_each(lane(0), nullptr);
}
// Workspaces of a stream's own size: that of a few SMs is too small for all of them.
std::string green_workspace(const Settings&) {
  const GreenContext context(8);
  Work work(kOperations[0]);
  work.use(context.stream());
  try {
    work.instance().call({.impl = kOperations[0].impl});
  } catch (const Error& e) {
    if (std::string(e.what()).find("workspace") == std::string::npos) throw;
    return e.what();
  }
  throw Failure("a workspace for 8 SMs was taken for all");
}

// Calls on every stream beside kernels that hold some SMs for some time.
std::string mixed_streams(const Settings& settings, size_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  const auto [lowest, highest] = priorities();
  std::vector<std::unique_ptr<Stream>> streams;
  for (size_t i = 0; i < count; ++i) {
    streams.push_back(std::make_unique<Stream>(i % 2 == 0 ? lowest : highest));
    for (Work& work : lane(i)) warm_up(work, *streams.back());
  }
  const Stream low(lowest), high(highest);
  const double begin = seconds(), budget = settings.quick ? 1 : 4;
  double longest = 0, longest_hold = 0;
  int rounds = 0;
  while (seconds() - begin < budget || rounds == 0) {
    // The longest comes first; the others have 0.1 to 100 ms, evenly by their logarithm.
    const double most = settings.quick ? 0.5 : 3;
    const double hold =
        rounds == 0 ? most : 1e-4 * std::pow(1e3, std::uniform_real_distribution<>()(random));
    const int sms =
        rounds == 0 ? num_sms() / 2 : std::uniform_int_distribution<>(1, num_sms() - 1)(random);
    const double round_begin = seconds();
    check(hold_sms(some_sms(sms, random), num_sms(), static_cast<int64_t>(hold * 1e9), nullptr,
                   random() % 2 == 0 ? low : high),
          "hold_sms");
    for (int repeat = 0; repeat < 2; ++repeat)
      for (size_t i = 0; i < count; ++i) lane(i)[random() % lane(i).size()].start();
    for (const auto& stream : streams) wait_for(*stream);
    if (rounds == 0 && seconds() - round_begin > hold)
      throw Failure(text("calls on half of the SMs ended after %.2f s, when the others were free",
                         seconds() - round_begin));
    longest = std::max(longest, seconds() - round_begin);
    longest_hold = std::max(longest_hold, hold);
    wait_for(low), wait_for(high);
    rounds++;
  }
  for (size_t i = 0; i < count; ++i)
    for (const Work& work : lane(i)) work.check_bits();
  return text("%d rounds of %zu calls; SMs held for up to %.1f s, the longest round %.1f s", rounds,
              2 * count, longest_hold, longest);
}
std::string two_streams(const Settings& settings) { return mixed_streams(settings, 2); }
std::string four_streams(const Settings& settings) { return mixed_streams(settings, 4); }

// A kernel holds SMs for seconds: calls end on the others meanwhile.
std::string held_sms(const Settings& settings, int count) {
  std::mt19937 random(1);
  const double hold = settings.quick ? 1 : 5;
  const auto [lowest, highest] = priorities();
  const Stream held(lowest), stream(highest);
  std::vector<Work> segments = works(kSegments);
  std::vector<Work*> all;
  for (Work& work : lane(0)) all.push_back(&work);
  for (Work& work : segments) all.push_back(&work);
  for (Work* work : all) warm_up(*work, stream);
  const HostFlags started;
  check(hold_sms(some_sms(count, random), num_sms(), static_cast<int64_t>(hold * 1e9),
                 started.get(), held),
        "hold_sms");
  const double begin = seconds();
  started.wait(count);
  std::string times;
  for (Work* work : all) {
    double launched = 0;
    const double took = work->run(&launched);
    if (cudaStreamQuery(held) != cudaErrorNotReady)
      throw Failure(text("%s ended after the SMs were free: %.2f s, launched after %.2f s",
                         work->name(), took, launched));
    times += (times.empty() ? "" : ", ") + std::string(work->name()) + " " + milliseconds(took);
  }
  wait_for(held);
  return text("%d held for %.1f s, meanwhile: ", count, seconds() - begin) + times;
}
std::string one_sm(const Settings& settings) { return held_sms(settings, 1); }
std::string most_sms(const Settings& settings) { return held_sms(settings, num_sms() * 3 / 4); }
std::string all_but_three(const Settings& settings) { return held_sms(settings, num_sms() - 3); }

// Operations by turns, each call on a random one of streams of mixed priority, beside kernels that
// hold up to `most_sms`.
struct Crowd {
  std::span<const Operation> operations;
  int calls;
  size_t streams;
  int calls_per_hold, most_sms;
};
std::string crowd(const Crowd& c) {
  std::mt19937 random(2);
  const auto priority = priorities();
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<std::vector<Work>> all;
  for (size_t i = 0; i < c.streams; ++i) {
    streams.push_back(std::make_unique<Stream>(priority[i % 2]));
    all.push_back(works(c.operations));
    for (Work& work : all.back()) work.use(*streams.back());
  }
  const Stream held(priority[1]);
  const double begin = seconds();
  for (int i = 0; i < c.calls; ++i) {
    const int sms = 1 + static_cast<int>(random() % static_cast<unsigned>(c.most_sms));
    if (i % c.calls_per_hold == 0)
      check(hold_sms(some_sms(sms, random), num_sms(), 100'000, nullptr, held), "hold_sms");
    const size_t which = random() % c.streams;
    all[which][static_cast<size_t>(i) % c.operations.size()].start();
  }
  for (const auto& stream : streams) wait_for(*stream);
  const double took = seconds() - begin;
  wait_for(held);
  for (const auto& works_of_stream : all)
    for (const Work& work : works_of_stream) work.check_bits();
  return text(
      "%d calls of %zu operations on %zu streams in %.2f s, %.1f us each with spoiling and "
      "comparing",
      c.calls, c.operations.size(), c.streams, took, took / c.calls * 1e6);
}
std::string many_calls(const Settings& settings) {
  return crowd({kSmall, settings.quick ? 1000 : 10000, 4, 250, 100});
}
// Every gradient a thousand times, the same bits each time.
std::string many_gradients(const Settings& settings) {
  std::vector<Operation> gradients;
  std::copy_if(std::begin(kSmall), std::end(kSmall), std::back_inserter(gradients),
               [](const Operation& op) { return std::string(op.line).starts_with("backward"); });
  const int each = settings.quick ? 250 : 1000;
  return crowd({gradients, each * static_cast<int>(gradients.size()), 3, 10, num_sms() - 3});
}

// Recorded once, replayed on another stream beside a kernel that holds SMs.
std::string graphs(const Settings& settings) {
  std::mt19937 random(3);
  const auto [lowest, highest] = priorities();
  const Stream recorded(lowest), held(highest);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  for (Work& work : lane(0)) work.use(recorded);
  check(cudaStreamBeginCapture(recorded, cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
  for (Work& work : lane(0)) work.start();
  check(cudaStreamEndCapture(recorded, &graph), "cudaStreamEndCapture");
  check(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  const int replays = settings.quick ? 20 : 200;
  const double begin = seconds();
  for (int i = 0; i < replays; ++i) {
    if (i % 10 == 0)
      check(hold_sms(some_sms(22, random), num_sms(), 1'000'000, nullptr, held), "hold_sms");
    check(cudaGraphLaunch(exec, recorded), "cudaGraphLaunch");
  }
  wait_for(recorded);
  const double took = seconds() - begin;
  wait_for(held);
  for (const Work& work : lane(0)) work.check_bits();
  check(cudaGraphExecDestroy(exec), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return text("%d replays of %zu calls, %.2f ms each", replays, lane(0).size(),
              took / replays * 1e3);
}

// Every operation in every mode, in a process of its own; those of an operation at once. Quick: the
// modes by turns.
std::string first_in_capture(const Settings& settings) {
  const std::vector<Operation> operations = captured();
  size_t processes = 0;
  for (size_t op = 0; op < operations.size(); ++op) {
    std::vector<std::pair<const char*, Child>> children;
    for (size_t i = 0; i < std::size(kModes); ++i) {
      if (settings.quick && i != op % std::size(kModes)) continue;
      const char* mode = kModes[i].name;
      children.emplace_back(
          mode, std::vector<std::string>{"--child", "capture", mode, std::to_string(op)});
    }
    processes += children.size();
    std::string failed;
    for (const auto& [mode, child] : children) {
      if (const int code = child.wait(); code != 0)
        failed += text(", in mode %s with code %d", mode, code);
    }
    if (!failed.empty())
      throw Failure(std::string(operations[op].name) + ": processes ended" + failed);
  }
  return text("%zu processes, %zu operations, %zu modes%s", processes, operations.size(),
              std::size(kModes), settings.quick ? " by turns" : "");
}

constexpr int kCallsOfAChild = 300;
std::string two_processes(const Settings&) {
  const std::string calls = std::to_string(kCallsOfAChild);
  const double begin = seconds();
  const Child a({"--child", "calls", calls}), b({"--child", "calls", calls});
  const int codes[] = {a.wait(), b.wait()};
  if (codes[0] != 0 || codes[1] != 0)
    throw Failure(text("two processes ended with codes %d and %d", codes[0], codes[1]));
  return text("%d calls each, %.1f s with their starts", kCallsOfAChild, seconds() - begin);
}

// Two processes under a daemon of our own, one of them with half of the SMs.
std::string mps(const Settings&) {
  if (std::system("command -v nvidia-cuda-mps-control >/dev/null 2>&1") != 0)
    throw Skip("there is no nvidia-cuda-mps-control");
  std::string folder = "/tmp/gpu_progress.XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) throw Skip("no folder for the daemon");
  const std::vector<std::pair<std::string, std::string>> environment = {
      {"CUDA_MPS_PIPE_DIRECTORY", folder}, {"CUDA_MPS_LOG_DIRECTORY", folder}};
  const std::string with =
      "CUDA_MPS_PIPE_DIRECTORY=" + folder + " CUDA_MPS_LOG_DIRECTORY=" + folder + " ";
  struct Daemon {  // ends with the scenario
    std::string with, folder;
    ~Daemon() {
      [[maybe_unused]] const int ended = std::system(
          ("echo quit | " + with + "timeout 10 nvidia-cuda-mps-control >/dev/null 2>&1").c_str());
      std::error_code error;
      std::filesystem::remove_all(folder, error);
    }
  };
  if (std::system((with + "timeout 10 nvidia-cuda-mps-control -d >/dev/null 2>&1").c_str()) != 0) {
    std::filesystem::remove_all(folder);
    throw Skip("the daemon of MPS does not start");
  }
  const Daemon daemon{with, folder};
  auto half = environment;
  half.emplace_back("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50");
  const std::string calls = std::to_string(kCallsOfAChild);
  if (Child({"--child", "calls", "1"}, environment).wait() != 0)
    throw Skip("a process under the daemon of MPS gets no context here");
  const Child a({"--child", "calls", calls}, environment), b({"--child", "calls", calls}, half);
  const int codes[] = {a.wait(), b.wait()};
  if (codes[0] != 0 || codes[1] != 0)
    throw Failure(text("under MPS: codes %d and, with half of the SMs, %d", codes[0], codes[1]));
  return text("%d calls each, one of two processes with half of the SMs", kCallsOfAChild);
}

constexpr struct {
  const char* name;
  std::string (*run)(const Settings&);
  unsigned limit_s;  // of the watchdog; bench/gpu.sh allows 660 s for all of them
} kScenarios[] = {
    {"alone", alone, 60},
    {"green context of 2", green<2>, 30},
    {"green context of 8", green<8>, 20},
    {"green context of 16", green<16>, 20},
    {"green context of 64", green<64>, 20},
    {"green context of 120", green<120>, 20},
    {"green context current", green_current, 20},
    {"green context, workspace", green_workspace, 20},
    {"streams, two", two_streams, 30},
    {"streams, four", four_streams, 30},
    {"SMs held, one", one_sm, 30},
    {"SMs held, three quarters", most_sms, 30},
    {"SMs held, all but three", all_but_three, 30},
    {"calls, ten thousand", many_calls, 40},
    {"gradients, a thousand", many_gradients, 30},
    {"graphs", graphs, 20},
    {"capture, first call", first_in_capture, 90},
    {"processes, two", two_processes, 40},
    {"processes, MPS", mps, 60},
};

int run_all(const Settings& settings, const std::vector<std::string>& wanted) {
  int passed = 0, failed = 0, skipped = 0;
  const double first = seconds();
  for (const auto& scenario : kScenarios) {
    const bool is_wanted =
        wanted.empty() || std::any_of(wanted.begin(), wanted.end(), [&](const std::string& name) {
          return std::string(scenario.name).starts_with(name);
        });
    if (!is_wanted) continue;
    std::snprintf(current_scenario, sizeof current_scenario, "fail  %s:", scenario.name);
    alarm(scenario.limit_s);
    const double begin = seconds();
    const char* word = "ok";
    std::string line;
    try {
      line = scenario.run(settings);
      passed++;
    } catch (const Skip& e) {
      word = "skip", line = e.what(), skipped++;
    } catch (const std::exception& e) {
      word = "fail", line = e.what(), failed++;
    }
    alarm(0);
    std::printf("%-5s %-25s %5.1f s  %s\n", word, scenario.name, seconds() - begin, line.c_str());
    std::fflush(stdout);
    // After an error of the GPU this process has no context that works.
    if (cudaDeviceSynchronize() != cudaSuccess) {
      std::printf("the GPU's context is lost: %s; what comes after was not run\n",
                  cudaGetErrorString(cudaGetLastError()));
      break;
    }
  }
  std::printf("%d passed, %d failed, %d skipped, %.0f s\n", passed, failed, skipped,
              seconds() - first);
  return failed > 0 || passed == 0 ? 1 : 0;
}

// Empty: the operations have an implementation here.
std::string missing() {
  if (std::string sentence = device::missing(); !sentence.empty()) return sentence;
  for (const Operation& op : kOperations) {
    for (const Choice& choice :
         Instance::shapes_of(cases::parse(op.line), DeviceType::cuda).explain())
      if (choice.name == op.impl && !choice.accepts) return choice.name + ": " + choice.sentence;
  }
  return "";
}

}  // namespace
}  // namespace deltic::test

int main(int argc, char** argv) {
  using namespace deltic::test;
  constexpr int kSkipped = 77;
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (!arguments.empty() && arguments[0] == "--child")
    return run_child({arguments.begin() + 1, arguments.end()});
  Settings settings;
  std::erase_if(arguments, [&](const std::string& a) {
    settings.quick = settings.quick || a == "--quick";
    return a == "--quick";
  });
  if (const std::string sentence = missing(); !sentence.empty()) {
    std::printf("skipped: %s\n", sentence.c_str());
    return kSkipped;
  }
  std::signal(SIGALRM, on_alarm);
  return run_all(settings, arguments);
}
