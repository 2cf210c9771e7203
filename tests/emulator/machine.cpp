#include "machine.h"

#include <asm/prctl.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <semaphore.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace deltic::emulator {

std::string Grid::name() const {
  Dl_info info;
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) return "a kernel";
  int status = 0;
  char* text = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : info.dli_sname;
  std::free(text);
  return name.substr(0, name.find('('));
}

Item launch_item(const Shape& shape, const void* kernel, std::function<void()> body) {
  auto grid = std::make_shared<Grid>();
  grid->shape = shape, grid->kernel = kernel, grid->body = std::move(body);
  grid->num_ctas = shape.grid.x * shape.grid.y * shape.grid.z;
  return {std::move(grid), nullptr};
}

namespace {
constexpr unsigned kSmThreads = 2048, kSmBytes = 233472, kReservedBytes = 1024;
// More would only be more threads of the host.
constexpr unsigned kSmCtas = 3;

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}
}  // namespace

namespace {

// A thread's storage begins where this points, by the ABI of x86-64.
uintptr_t own_storage() {
  uintptr_t at;
  asm volatile("movq %%fs:0, %0" : "=r"(at));
  return at;
}
[[gnu::noinline]] void change_storage(uintptr_t at) {
  static const bool has_instruction = (getauxval(AT_HWCAP2) & 2) != 0;  // HWCAP2_FSGSBASE
  if (has_instruction)
    asm volatile("wrfsbase %0" : : "r"(at) : "memory");
  else
    syscall(SYS_arch_prctl, ARCH_SET_FS, at);
}

}  // namespace

// A thread of the host that never runs: it is there for its storage. The thread that drains takes
// that on for a CTA's turn. Threads that really took turns would be woken millions of times a
// minute, and Linux's scheduler then starved everything else on the machine.
struct Machine::Seat {
  Cta cta;
  uintptr_t storage = 0;

  Seat() {
    sem_t is_up;
    sem_init(&is_up, 0, 0);
    std::thread([&] {
      storage = own_storage();
      sem_post(&is_up);
      for (;;) pause();
    }).detach();
    while (sem_wait(&is_up) != 0) {
    }
    sem_destroy(&is_up);
  }
  // f by itself looks at no storage of a thread: a compiler may keep such addresses over calls.
  [[gnu::noinline]] void call(const std::function<void(Cta&)>& f) {
    const uintptr_t own = own_storage();
    change_storage(storage);
    f(cta);
    change_storage(own);
  }
};

Machine::Machine() {
  settings.sms = static_cast<int>(from_environment("DELTIC_EMULATED_SMS", 16));
  settings.held = static_cast<int>(from_environment("DELTIC_EMULATED_HELD", 0));
  settings.seed = from_environment("DELTIC_EMULATED_SEED", 1);
  random_.seed(settings.seed);
}
Machine::~Machine() = default;
Machine& Machine::get() {
  static auto* machine = new Machine;  // kernels may be launched until the process ends
  return *machine;
}

Stream& Machine::stream(cudaStream_t handle) {
  if (handle == nullptr) return null_;
  std::unique_ptr<Stream>& s = streams_[handle];
  if (s == nullptr) s = std::make_unique<Stream>();
  return *s;
}

cudaError_t Machine::refuse(const Shape& shape) const {
  const uint64_t ctas = uint64_t{shape.grid.x} * shape.grid.y * shape.grid.z;
  if (ctas == 0 || shape.threads == 0 || shape.threads > 1024 || shape.grid.y > 65535 ||
      shape.grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  if (shape.smem > kSmBytes - kReservedBytes) return cudaErrorInvalidValue;
  if (!shape.is_together) return cudaSuccess;
  std::vector<Sm> sms(static_cast<size_t>(settings.sms));
  for (uint64_t i = 0; i < ctas; ++i) {
    const int sm = place_for(shape, sms);
    if (sm < 0) return cudaErrorCooperativeLaunchTooLarge;
    Sm& s = sms[static_cast<size_t>(sm)];
    s.threads += shape.threads, s.smem += shape.smem + kReservedBytes, ++s.ctas;
  }
  return cudaSuccess;
}

void Machine::add(cudaStream_t handle, Item item) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  Stream& s = stream(handle);
  if (s.captured != nullptr) {
    s.captured->push_back(std::move(item));
    return;
  }
  const bool others_wait =
      handle == nullptr
          ? std::ranges::any_of(streams_, [](const auto& x) { return !x.second->items.empty(); })
          : !null_.items.empty();
  if (others_wait) drain();
  s.items.push_back(std::move(item));
}

// Launches whose turn it is. Those of one stream may overlap as far as they said.
bool Machine::start_items() {
  bool has_started = false;
  const auto start = [&](Stream& s) {
    while (!s.under_way.empty() && s.under_way.front()->is_over()) s.under_way.pop_front();
    while (!s.items.empty()) {
      Item& item = s.items.front();
      if (!item.grid) {
        if (!s.under_way.empty() || !item.work()) return;
        s.items.pop_front();
        has_started = true;
        continue;
      }
      constexpr size_t kMostUnderWay = 3;
      if (!s.under_way.empty() &&
          (!item.grid->shape.is_early || s.under_way.size() >= kMostUnderWay ||
           !std::ranges::all_of(s.under_way, [](const auto& g) { return g->lets_next_start(); })))
        return;
      const std::shared_ptr<Grid> grid = item.grid;
      s.items.pop_front();
      grid->before = s.under_way.empty() ? nullptr : s.under_way.back();
      s.under_way.push_back(grid), active_.push_back(grid);
      has_started = true;
    }
  };
  start(null_);
  for (auto& [handle, s] : streams_) start(*s);
  return has_started;
}

int Machine::place_for(const Shape& shape, const std::vector<Sm>& sms) const {
  int best = -1;
  for (size_t i = 0; i < sms.size(); ++i) {
    const Sm& s = sms[i];
    if (s.ctas >= kSmCtas || s.threads + shape.threads > kSmThreads ||
        s.smem + shape.smem + kReservedBytes > kSmBytes)
      continue;
    if (best < 0 || s.ctas < sms[static_cast<size_t>(best)].ctas) best = static_cast<int>(i);
  }
  return best;
}

void Machine::begin(const std::shared_ptr<Grid>& grid, int sm) {
  Sm& s = sms_[static_cast<size_t>(sm)];
  s.threads += grid->shape.threads, s.smem += grid->shape.smem + kReservedBytes, ++s.ctas;
  if (free_seats_.empty()) {
    seats_.push_back(std::make_unique<Seat>());
    free_seats_.push_back(seats_.back().get());
  }
  Seat* seat = free_seats_.back();
  free_seats_.pop_back();
  const unsigned index = grid->num_begun++;
  const uint64_t seed = random_();
  seat->call([&](Cta& cta) { cta.begin(*grid, index, seed); });
  running_.push_back({seat, grid, sm, false});
}

bool Machine::dispatch() {
  bool has_begun = false;
  for (const std::shared_ptr<Grid>& grid : active_) {
    if (grid->shape.is_together && grid->num_begun == 0) {
      std::vector<Sm> sms(sms_.begin(), sms_.end() - held_);
      unsigned fits = 0;
      for (; fits < grid->num_ctas; ++fits) {
        const int sm = place_for(grid->shape, sms);
        if (sm < 0) break;
        Sm& s = sms[static_cast<size_t>(sm)];
        s.threads += grid->shape.threads, s.smem += grid->shape.smem + kReservedBytes, ++s.ctas;
      }
      if (fits < grid->num_ctas) continue;
    }
    while (grid->num_begun < grid->num_ctas) {
      const std::vector<Sm> sms(sms_.begin(), sms_.end() - held_);
      const int sm = place_for(grid->shape, sms);
      if (sm < 0) break;
      begin(grid, sm);
      has_begun = true;
    }
    // Those of a later launch start when all of the one ahead have.
    if (grid->num_begun < grid->num_ctas) break;
  }
  return has_begun;
}

void Machine::end(size_t index) {
  const Running r = running_[index];
  running_[index] = running_.back();
  running_.pop_back();
  Sm& s = sms_[static_cast<size_t>(r.sm)];
  s.threads -= r.grid->shape.threads, s.smem -= r.grid->shape.smem + kReservedBytes, --s.ctas;
  free_seats_.push_back(r.seat);
  if (++r.grid->num_ended < r.grid->num_ctas) return;
  std::erase(active_, r.grid);
  r.grid->before = nullptr;  // else every launch would be kept
  for (Running& other : running_) {
    if (other.grid->before != r.grid) continue;
    other.waits = false;
    other.seat->cta.go_on();
  }
}

void Machine::say_stuck() {
  std::fprintf(stderr, "emulated GPU: nothing goes on\n");
  for (size_t i = 0; i < running_.size() && i < 20; ++i) {
    std::string where;
    running_[i].seat->call([&](Cta& cta) { where = cta.where(); });
    std::fprintf(stderr, "  %s: %s\n", running_[i].grid->name().c_str(), where.c_str());
  }
  for (const auto& grid : active_)
    std::fprintf(stderr, "  %s: %u CTAs, %u begun, %u ended\n", grid->name().c_str(),
                 grid->num_ctas, grid->num_begun, grid->num_ended);
  std::abort();
}

void Machine::drain() {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  sms_.resize(static_cast<size_t>(settings.sms));
  held_ = settings.held;
  // Looks in vain, one after the other, after which nothing will come of it; a wait for a time on
  // the clock ends before.
  constexpr int kPatience = 20000;
  // Turns without a CTA that begins or ends: lanes that look together are no single looks. The
  // longest CTA of the tests takes a hundredth of it.
  constexpr int64_t kMostTurns = int64_t{1} << 31;
  int in_vain = 0;
  int64_t num_turns = 0;
  for (;;) {
    const bool has_started = start_items();
    const bool has_begun = dispatch();
    if (running_.empty()) {
      if (active_.empty() && !has_started) {
        const bool is_empty = null_.items.empty() && std::ranges::all_of(streams_, [](auto& x) {
                                return x.second->items.empty();
                              });
        if (is_empty) return;
      }
      if (!has_started && !has_begun) {
        if (held_ == 0) say_stuck();
        held_ = 0;
      }
      continue;
    }
    size_t i = random_() % running_.size();
    for (size_t n = 0; running_[i].waits && n < running_.size(); ++n) i = (i + 1) % running_.size();
    if (running_[i].waits) say_stuck();
    Cta::End end{};
    const int turns = 1 + static_cast<int>(random_() % 4096);
    num_turns = has_started || has_begun ? 0 : num_turns + turns;
    running_[i].seat->call([&](Cta& cta) { end = cta.run(turns); });
    running_[i].waits = end == Cta::End::waits;
    if (end == Cta::End::done) {
      this->end(i);
      in_vain = 0, num_turns = 0;
    } else if (end == Cta::End::preempted) {
      in_vain = 0;
    } else {
      ++in_vain;
    }
    if (in_vain > kPatience || num_turns > kMostTurns / (held_ == 0 ? 1 : 64)) {
      if (held_ == 0) say_stuck();
      held_ = 0, in_vain = 0, num_turns = 0;  // what held the SMs ends at last
    }
  }
}

std::byte* Machine::allocate(size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  void* p = nullptr;
  if (posix_memalign(&p, 512, bytes) != 0) return nullptr;
  std::memset(p, 0xFF, bytes);  // what nobody has written is NaN
  auto* place = static_cast<std::byte*>(p);
  memory_[place] = bytes;
  return place;
}
void Machine::free(std::byte* place) {
  if (place == nullptr) return;
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  drain();
  if (memory_.erase(place) == 0) fault("memory is freed that is not the GPU's");
  std::free(place);
}
bool Machine::owns(const void* place) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  return holds(place);
}
bool Machine::holds(const void* place) {
  auto* p = static_cast<std::byte*>(const_cast<void*>(place));
  const auto next = memory_.upper_bound(p);
  if (next == memory_.begin()) return false;
  const auto& [first, bytes] = *std::prev(next);
  return p < first + bytes;
}

}  // namespace deltic::emulator
