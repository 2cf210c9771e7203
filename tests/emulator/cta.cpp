#include "cta.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "machine.h"

// Dynamic shared memory of the CTA that runs on this thread of the host: one place under all names
// that kernels have for it. A declaration in a function is of a variable of the namespace around
// it. Static shared memory is thread_local by itself.
asm(R"(
.macro deltic_name name
.globl \name
.type \name, @tls_object
\name:
.endm
.section .tbss, "awT", @nobits
.balign 1024
deltic_name deltic_shared_memory
deltic_name _ZN6deltic3gpu4conv8s_piecesE
deltic_name _ZN6deltic3gpu6decode6memoryE
deltic_name _ZN6deltic3gpu7forward4smemE
deltic_name _ZN6deltic3gpu8gradient4smemE
deltic_name _ZN6deltic3gpu8gradient6memoryE
deltic_name _ZN6deltic3gpu8backward6memoryE
deltic_name _ZN6deltic3gpu6scores4smemE
.zero 232448
.text
)");
extern "C" {
extern thread_local unsigned char deltic_shared_memory[];
}

// Of the thread whose turn it is.
thread_local uint3 threadIdx, blockIdx;
thread_local dim3 blockDim, gridDim;

namespace deltic::emulator {
namespace {

thread_local Cta* t_cta = nullptr;
thread_local int t_thread = 0;

constexpr size_t kStack = size_t{128} << 10;  // what is touched of it is what it takes
// Turns of each thread after which a copy that is under way ends at the latest: threads that look
// for something together, with others of their warp, never stand still.
constexpr int kLatest = 32;
constexpr uint64_t kCanary = 0xC0FFEE0DDBA11ull;

}  // namespace

void fault(const char* format, ...) {
  va_list list;
  va_start(list, format);
  std::fprintf(stderr, "emulated GPU: ");
  std::vfprintf(stderr, format, list);
  va_end(list);
  std::fprintf(stderr, "\n");
  if (t_cta != nullptr) {
    std::fprintf(stderr, "  %s, CTA (%u, %u, %u), thread %d\n", t_cta->grid().name().c_str(),
                 blockIdx.x, blockIdx.y, blockIdx.z, t_thread);
  }
  std::fflush(stdout);
  std::abort();
}

uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(place) - deltic_shared_memory);
}
std::byte* shared_place(uint32_t address) {
  return reinterpret_cast<std::byte*>(deltic_shared_memory) + static_cast<int32_t>(address);
}

Cta::Cta() = default;
Cta::~Cta() {
  if (stacks_ != nullptr) munmap(stacks_, stacks_bytes_);
}

Cta& Cta::current() {
  if (t_cta == nullptr) fault("device code on a thread of the host");
  return *t_cta;
}
int Cta::thread() { return t_thread; }

void Cta::begin(Grid& grid, unsigned index, uint64_t seed) {
  grid_ = &grid, index_ = index;
  random_.seed(static_cast<uint32_t>(seed % 2147483646u) + 1);
  mood_ = static_cast<Mood>(random(3));
  const unsigned n = grid.shape.threads;
  if (n * kStack > stacks_bytes_) {
    if (stacks_ != nullptr) munmap(stacks_, stacks_bytes_);
    stacks_bytes_ = n * kStack;
    void* p = mmap(nullptr, stacks_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fault("no memory for the stacks of %u threads", n);
    stacks_ = static_cast<std::byte*>(p);
  }
  // What nobody has written is NaN.
  std::memset(deltic_shared_memory, 0xFF, grid.shape.smem);
  threads_ = std::vector<Thread>(n);
  warps_ = std::vector<Warp>((n + kWarpLanes - 1) / kWarpLanes);
  for (unsigned t = 0; t < n; ++t) {
    std::byte* stack = stacks_ + t * kStack;
    std::memcpy(stack, &kCanary, sizeof kCanary);
    threads_[t].fiber.begin(stack, kStack, run_thread, this);
    threads_[t].state = State::ready;
    ++warps_[t / kWarpLanes].num_ready;
  }
  num_live_ = static_cast<int>(n), num_waiting_for_grid_ = 0, num_late_ = 0;
  has_released_ = false;
  sync_arrived_ = sync_value_ = 0, sync_waiting_.clear();
  named_ = {};
  mbarriers_.clear();
  copies_.clear();
}

void Cta::run_thread(void* cta) {
  auto* self = static_cast<Cta*>(cta);
  self->grid_->body();
  self->end_thread();
}

void Cta::resume(int t) {
  Thread& thread = threads_[static_cast<size_t>(t)];
  t_thread = running_ = t;
  threadIdx.x = static_cast<unsigned>(t);
  thread.has_polled = false, num_looks_ = 0;
  Fiber::change(host_, thread.fiber);
}
void Cta::leave(State state, const char* at) {
  Thread& self = threads_[static_cast<size_t>(running_)];
  if (state != State::ready) --warps_[static_cast<size_t>(running_ / kWarpLanes)].num_ready;
  self.state = state, self.at = at;
  Fiber::change(self.fiber, host_);
}
void Cta::make_ready(int t) {
  Thread& thread = threads_[static_cast<size_t>(t)];
  if (thread.state != State::blocked) fault("thread %d is woken where it does not wait", t);
  thread.state = State::ready;
  ++warps_[static_cast<size_t>(t / kWarpLanes)].num_ready;
}

void Cta::end_thread() {
  const int t = running_;
  uint64_t canary;
  std::memcpy(&canary, stacks_ + static_cast<size_t>(t) * kStack, sizeof canary);
  if (canary != kCanary) fault("the stack of a thread is too small");
  const Warp& warp = warps_[static_cast<size_t>(t / kWarpLanes)];
  for (const Meeting& m : warp.meetings) {
    if (m.arrived != 0 && m.mask >> (t % kWarpLanes) & 1)
      fault("a lane ends that others of its warp wait for");
  }
  finish_small(t, ~0ull);
  for (const Copy& c : copies_) {
    if (c.thread == t && c.kind == Copy::Kind::store && !c.is_read)
      fault("a thread ends before its bulk stores have read shared memory");
  }
  --num_live_;
  if (sync_arrived_ > 0 && sync_arrived_ == num_live_) complete_sync();
  leave(State::done, "its end");
  fault("a thread goes on after its end");
}

Cta::End Cta::run(int turns) {
  t_cta = this;
  const dim3& g = grid_->shape.grid;
  blockIdx = {index_ % g.x, index_ / g.x % g.y, index_ / g.x / g.y};
  gridDim = g, blockDim = dim3(grid_->shape.threads);
  threadIdx = {0, 0, 0};
  int idle = 0;  // turns in a row in which a thread only looked once more
  End end = End::preempted;
  while (turns > 0) {
    if (num_live_ == 0) {
      end = End::done;
      break;
    }
    const auto count = static_cast<uint32_t>(warps_.size());
    uint32_t w = random(count), tried = 0;
    while (tried < count && warps_[w].num_ready == 0) w = w + 1 == count ? 0 : w + 1, ++tried;
    if (tried == count) {
      if (finish_some_copy()) continue;
      if (num_waiting_for_grid_ == 0) fault("nothing of a CTA can go on: %s", where().c_str());
      end = End::waits;
      break;
    }
    if (idle > 2 * num_live_) {
      if (finish_some_copy()) {
        idle = 0;
        continue;
      }
      end = End::polls;
      break;
    }
    const uint32_t order = random(2) * (kWarpLanes - 1);  // from the first lane on, or the last
    for (uint32_t i = 0; i < kWarpLanes; ++i) {
      const size_t t = w * kWarpLanes + (i ^ order);
      if (t >= threads_.size() || threads_[t].state != State::ready) continue;
      resume(static_cast<int>(t));
      --turns;
      if (copies_.empty()) {
        num_late_ = 0;
      } else if (++num_late_ > kLatest * static_cast<int>(threads_.size())) {
        finish_some_copy();
        num_late_ = 0;
      }
      idle = threads_[t].has_polled && threads_[t].state == State::ready ? idle + 1 : 0;
    }
    if (mood_ == Mood::random && !copies_.empty() && random(4) == 0)
      finish(random(uint32_t(copies_.size())));
  }
  if (end == End::done) finish_copies(), release_next_grid();
  t_cta = nullptr;
  return end;
}

std::string Cta::where() const {
  std::string text;
  int shown = 0;
  for (size_t t = 0; t < threads_.size() && shown < 12; ++t) {
    const Thread& a = threads_[t];
    if (a.state == State::done) continue;
    const bool is_same = t > 0 && threads_[t - 1].at == a.at && threads_[t - 1].state == a.state &&
                         threads_[t - 1].barrier == a.barrier;
    if (is_same) continue;
    text += (shown++ > 0 ? ", thread " : "thread ") + std::to_string(t) + " at " + a.at;
    if (a.barrier != nullptr)
      text += " (shared memory + " + std::to_string(int32_t(shared_address(a.barrier))) + ")";
  }
  return text.empty() ? "no thread waits" : text;
}

// --- the threads of a warp
// -------------------------------------------------------------------------

void Cta::meet(uint32_t mask, const void* what, void* own,
               void (*all)(void** of_lanes, uint32_t mask)) {
  const int t = t_thread, own_lane = t % kWarpLanes;
  Warp& warp = warps_[static_cast<size_t>(t / kWarpLanes)];
  // A CTA's last warp may have fewer lanes.
  const size_t first = static_cast<size_t>(t - own_lane), left = threads_.size() - first;
  const uint32_t there = left < kWarpLanes ? (1u << left) - 1 : kAllLanes;
  mask &= there;
  if (!(mask >> own_lane & 1)) fault("a lane calls an instruction for others of its warp");
  Meeting* m = nullptr;
  for (Meeting& x : warp.meetings)
    if (x.arrived != 0 && (x.mask & mask) != 0) m = &x;
  if (m == nullptr) {
    for (Meeting& x : warp.meetings)
      if (x.arrived == 0) m = &x;
    if (m == nullptr) m = &warp.meetings.emplace_back();
    m->mask = mask, m->what = what;
    for (int l = 0; l < kWarpLanes; ++l) {
      if (mask >> l & 1 && threads_[first + static_cast<size_t>(l)].state == State::done)
        fault("an instruction of a warp waits for lane %d, which has ended", l);
    }
  }
  if (m->mask != mask || m->what != what || m->arrived >> own_lane & 1)
    fault("lanes of a warp are at different instructions");
  m->own[static_cast<size_t>(own_lane)] = own;
  m->arrived |= 1u << own_lane;
  if (m->arrived != mask) {
    leave(State::blocked, "an instruction of its warp");
    return;
  }
  all(m->own.data(), mask);
  m->arrived = 0;
  for (int l = 0; l < kWarpLanes; ++l)
    if (l != own_lane && mask >> l & 1) make_ready(static_cast<int>(first) + l);
  // Else this lane would run ahead of those it met, always.
  leave(State::ready, "");
}

// --- barriers of the CTA
// -----------------------------------------------------------------------------

void Cta::complete_sync() {
  sync_result_ = sync_value_, sync_value_ = 0, sync_arrived_ = 0;
  std::vector<int> waiting;
  waiting.swap(sync_waiting_);
  for (const int t : waiting) make_ready(t);
}
int Cta::sync(int value) {
  sync_value_ += value, ++sync_arrived_;
  if (sync_arrived_ == num_live_) {
    complete_sync();
  } else {
    sync_waiting_.push_back(t_thread);
    leave(State::blocked, "__syncthreads");
  }
  return sync_result_;
}

void Cta::named_sync(int id, int threads, bool waits) {
  if (id < 0 || id > 15 || threads <= 0 || threads % kWarpLanes != 0)
    fault("named barrier %d of %d threads", id, threads);
  NamedBarrier& b = named_[static_cast<size_t>(id)];
  if (b.arrived == 0) b.expected = threads;
  if (b.expected != threads)
    fault("named barrier %d of %d threads, and of %d", id, b.expected, threads);
  if (++b.arrived == b.expected) {
    b.arrived = 0;
    std::vector<int> waiting;
    waiting.swap(b.waiting);
    for (const int t : waiting) make_ready(t);
    return;
  }
  if (!waits) return;
  b.waiting.push_back(t_thread);
  leave(State::blocked, "a named barrier");
}

void Cta::poll() {
  threads_[static_cast<size_t>(t_thread)].has_polled = true;
  leave(State::ready, "a look at memory");
}
void Cta::look() {
  constexpr int kMostLooks = 100;
  if (++num_looks_ > kMostLooks) poll();
}
uint64_t Cta::clock() { return Machine::get().clock(); }

// --- mbarriers
// ---------------------------------------------------------------------------------------

namespace {
// What stands in shared memory for a barrier that is alive; written over, it is none.
uint64_t word_of(const uint64_t* at) {
  return 0xBA771E7000000000ull ^ reinterpret_cast<uintptr_t>(at);
}
}  // namespace

Cta::Mbarrier& Cta::mbarrier(uint64_t* at) {
  const auto found = mbarriers_.find(at);
  if (found == mbarriers_.end() || *at != word_of(at))
    fault("an mbarrier at shared memory + %d that is not initialised, or written over",
          int32_t(shared_address(at)));
  return found->second;
}
void Cta::barrier_init(uint64_t* at, int arrivals) {
  if (reinterpret_cast<uintptr_t>(at) % 8 != 0 || arrivals <= 0)
    fault("mbarrier of %d arrivals", arrivals);
  if (const auto found = mbarriers_.find(at);
      found != mbarriers_.end() && *at == word_of(at) && !found->second.waiting.empty())
    fault("an mbarrier is initialised again while threads wait at it");
  mbarriers_[at] = {
      .expected = arrivals, .pending = arrivals, .bytes = 0, .phase = 0, .waiting = {}};
  *at = word_of(at);
}
void Cta::flip(Mbarrier& b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1, b.pending = b.expected;
  std::vector<int> waiting;
  waiting.swap(b.waiting);
  for (const int t : waiting) make_ready(t);
}
void Cta::barrier_arrive(uint64_t* at, int expected_bytes, int arrivals) {
  Mbarrier& b = mbarrier(at);
  b.bytes += expected_bytes, b.pending -= arrivals;
  if (b.pending < 0) fault("more arrivals than an mbarrier expects");
  flip(b);
}
void Cta::barrier_complete(uint64_t* at, int bytes) {
  Mbarrier& b = mbarrier(at);
  b.bytes -= bytes;
  flip(b);
}
bool Cta::is_over(uint64_t* at, uint32_t parity) { return mbarrier(at).phase != (parity & 1); }
void Cta::barrier_wait(uint64_t* at, uint32_t parity) {
  // A barrier may be two phases on before the thread has its turn: then it waits for the next one,
  // as on a GPU.
  while (!is_over(at, parity)) {
    Thread& self = threads_[static_cast<size_t>(t_thread)];
    mbarrier(at).waiting.push_back(t_thread);
    self.barrier = at, self.parity = parity;
    leave(State::blocked, "an mbarrier");
    self.barrier = nullptr;
  }
}

// --- what goes by itself
// -----------------------------------------------------------------------------

bool Cta::is_now() { return mood_ == Mood::at_once || (mood_ == Mood::random && random(3) == 0); }

void Cta::add_copy(Copy::Kind kind, std::function<void(std::vector<std::byte>&)> read,
                   std::function<void(const std::vector<std::byte>&)> write) {
  const uint64_t group = threads_[static_cast<size_t>(t_thread)].commits;
  copies_.push_back({kind, t_thread, group, std::move(read), std::move(write)});
  if (is_now()) finish(copies_.size() - 1);
}
void Cta::finish(size_t index) {
  Copy copy = std::move(copies_[index]);
  copies_[index] = std::move(copies_.back());
  copies_.pop_back();
  if (!copy.is_read) copy.read(copy.bytes);
  copy.write(copy.bytes);
}
bool Cta::finish_some_copy() {
  if (copies_.empty()) return false;
  finish(random(static_cast<uint32_t>(copies_.size())));
  return true;
}
void Cta::finish_copies() {
  while (finish_some_copy()) {
  }
}
void Cta::commit_small_copies() { ++threads_[static_cast<size_t>(t_thread)].commits; }
void Cta::finish_small(int thread, uint64_t below) {
  for (size_t i = 0; i < copies_.size();) {
    const Copy& c = copies_[i];
    if (c.thread == thread && c.kind == Copy::Kind::small && c.group < below)
      finish(i);
    else
      ++i;
  }
}
void Cta::wait_small_copies(int left) {
  const uint64_t commits = threads_[static_cast<size_t>(t_thread)].commits;
  const auto kept = static_cast<uint64_t>(left);
  if (commits > kept) finish_small(t_thread, commits - kept);
}
void Cta::wait_stores(bool only_read) {
  for (size_t i = 0; i < copies_.size();) {
    Copy& c = copies_[i];
    if (c.thread != t_thread || c.kind != Copy::Kind::store) {
      ++i;
    } else if (!only_read) {
      finish(i);
    } else {
      if (!c.is_read) c.read(c.bytes), c.is_read = true;
      ++i;
    }
  }
}

void Cta::add_product(Product product) {
  Warp& warp = warps_[static_cast<size_t>(t_thread / kWarpLanes)];
  product.group = warp.commits;
  warp.products.push_back(std::move(product));
  if (is_now()) multiply_up_to(warp, ~0ull);
}
void Cta::commit_products() { ++warps_[static_cast<size_t>(t_thread / kWarpLanes)].commits; }
void Cta::multiply_up_to(Warp& warp, uint64_t below) {
  size_t done = 0;
  while (done < warp.products.size() && warp.products[done].group < below)
    multiply(warp.products[done++]);
  warp.products.erase(warp.products.begin(), warp.products.begin() + static_cast<ptrdiff_t>(done));
}
void Cta::wait_products(int left) {
  Warp& warp = warps_[static_cast<size_t>(t_thread / kWarpLanes)];
  const auto kept = static_cast<uint64_t>(left);
  if (warp.commits > kept) multiply_up_to(warp, warp.commits - kept);
}

// --- launches
// --------------------------------------------------------------------------------------------

void Cta::wait_for_grid() {
  // Only a launch that may start early can find the one ahead of it under way.
  while (grid_->before != nullptr && !grid_->before->is_over()) {
    threads_[static_cast<size_t>(t_thread)].waits_for_grid = true;
    ++num_waiting_for_grid_;
    leave(State::blocked, "griddepcontrol.wait");
  }
}
void Cta::go_on() {
  num_waiting_for_grid_ = 0;
  for (size_t t = 0; t < threads_.size(); ++t) {
    if (!threads_[t].waits_for_grid) continue;
    threads_[t].waits_for_grid = false;
    make_ready(static_cast<int>(t));
  }
}
// The first thread that says so speaks for its CTA; whoever ends has said so, too.
void Cta::release_next_grid() {
  if (has_released_) return;
  has_released_ = true;
  ++grid_->num_released;
}

}  // namespace deltic::emulator
