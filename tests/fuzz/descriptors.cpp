// Builds descriptors from bytes and calls the library with them.
#include "descriptors.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "deltic/deltic.h"

namespace deltic::test {
namespace {

FuzzCounts counts;

constexpr int64_t kMaxBytes = 1 << 18;  // of one tensor
// Tokens * heads * K * V of a call that is run: of every eighth call, and of the others, so that
// executions are many.
constexpr int64_t kMaxWork = 1 << 19, kUsualWork = 1 << 15;

[[noreturn]] void broken(const char* promise) {
  std::fprintf(stderr, "broken promise: %s (last error: %s)\n", promise, deltic_last_error());
  std::abort();
}

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ >= size_; }
  uint8_t byte() { return empty() ? 0 : data_[at_++]; }
  // Below n, which is at most 256.
  int64_t below(int64_t n) { return byte() % n; }
  int64_t word() {
    uint64_t x = 0;
    for (int i = 0; i < 8; ++i) x = x << 8 | byte();
    return static_cast<int64_t>(x);
  }
  // Numbers at which size arithmetic breaks.
  int64_t odd_number() {
    constexpr int64_t kOdd[] = {-1,
                                0,
                                1,
                                2,
                                3,
                                7,
                                16,
                                17,
                                64,
                                255,
                                256,
                                257,
                                1 << 20,
                                int64_t{1} << 31,
                                int64_t{1} << 32,
                                int64_t{1} << 40,
                                int64_t{1} << 59,
                                int64_t{1} << 60,
                                int64_t{1} << 62,
                                INT64_MAX,
                                INT64_MIN,
                                -16,
                                INT64_MAX - 1};
    constexpr int64_t kCount = sizeof kOdd / sizeof *kOdd;
    const int64_t i = below(kCount + 1);
    return i < kCount ? kOdd[i] : word();
  }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

int64_t element_bytes(int32_t dtype) {
  return dtype == DELTIC_BF16 || dtype == DELTIC_F16  ? 2
         : dtype == DELTIC_F32 || dtype == DELTIC_I32 ? 4
         : dtype == DELTIC_U8                         ? 1
                                                      : 8;
}

// Memory between two pages that nobody may touch: what ends at the second is followed by a fault,
// with a sanitizer or without.
class Fenced {
 public:
  explicit Fenced(size_t bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    bytes = (bytes + page - 1) / page * page;
    void* all = mmap(nullptr, bytes + 2 * page, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) broken("there are addresses for the fuzzer's own memory");
    end_ = static_cast<uint8_t*>(all) + page + bytes;
    if (mprotect(end_ - bytes, bytes, PROT_READ | PROT_WRITE) != 0)
      broken("the fuzzer's own memory may be written");
  }
  // The last bytes, from a multiple of `align` on.
  uint8_t* last(uint64_t bytes, uint64_t align) const {
    return end_ - (bytes + align - 1) / align * align;
  }

 private:
  uint8_t* end_;
};

// The struct as a program with another header has it: so many bytes and not one more. A negative
// number: its own.
template <class Struct>
const Struct* as_given(const Fenced& fenced, const Struct& s, int64_t claimed, bool is_dirty) {
  if (claimed < 0) return &s;
  constexpr int64_t kMost = sizeof(Struct) + 4096;  // a library looks no further
  const auto room = static_cast<size_t>(std::clamp<int64_t>(claimed, 8, kMost));
  uint8_t* at = fenced.last(room, alignof(Struct));
  std::memset(at, is_dirty ? 1 : 0, room);
  std::memcpy(at, &s, std::min(room, sizeof s));
  const auto size = static_cast<uint64_t>(claimed);
  std::memcpy(at, &size, sizeof size);
  return reinterpret_cast<const Struct*>(at);
}
// Mostly -1.
int64_t claimed_size(Bytes& b, size_t real) {
  if (b.below(32) != 0) return -1;
  if (b.below(2) == 0) return std::max<int64_t>(b.odd_number(), 0);
  return static_cast<int64_t>(real) + (b.below(64) - 32) * (b.below(2) == 0 ? 1 : 8);
}

deltic_tensor contiguous(int32_t dtype, std::initializer_list<int64_t> shape) {
  deltic_tensor t{};
  t.dtype = dtype;
  t.rank = static_cast<int32_t>(shape.size());
  int i = 0;
  for (int64_t n : shape) t.shape[i++] = n;
  int64_t stride = 1;
  for (i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(t.shape[i], 1), &stride)) stride = 0;
  }
  return t;
}

// Bytes from the first to behind the last element; -1 if the tensor is absent, unsound or too large
// to be given memory here.
int64_t extent(const deltic_tensor& t) {
  if (t.rank < 1 || t.rank > DELTIC_MAX_RANK) return -1;
  int64_t last = 0;
  bool is_empty = false;
  for (int32_t i = 0; i < t.rank; ++i) {
    if (t.shape[i] < 0 || t.strides[i] < 0) return -1;
    if (t.shape[i] == 0) is_empty = true;
    if (t.shape[i] > 1 && t.strides[i] > 0) {
      if (t.shape[i] > kMaxBytes || t.strides[i] > kMaxBytes) return -1;
      last += (t.shape[i] - 1) * t.strides[i];
    }
    if (last > kMaxBytes) return -1;
  }
  return is_empty ? 0 : (last + 1) * element_bytes(t.dtype);
}

struct Field {
  deltic_tensor* tensor;
  bool is_index;
};

struct Sizes {
  int64_t B, T, N, H, HV, K, V;
  int32_t chunk;

  // Whether a run ends soon. Without tokens there is little to do, whatever the other sizes are.
  bool is_small(int64_t work) const {
    const double heads = static_cast<double>(HV) * static_cast<double>(K) * static_cast<double>(V);
    const double tokens = static_cast<double>(B) * (static_cast<double>(T) + 1);
    return B == 0 || T == 0 || tokens * heads <= static_cast<double>(work);
  }
};

struct Memory {
  std::vector<std::unique_ptr<uint8_t[]>> blocks;
  bool complete = true;

  // Exactly the bytes the tensor spans. Index tensors get small numbers, of either width.
  void give(Bytes& bytes, deltic_tensor& t, bool is_index, int64_t limit) {
    if (t.rank == 0) return;
    const int64_t n = extent(t);
    if (n < 0) {
      complete = false;
      return;
    }
    uint8_t* block = place(bytes, static_cast<size_t>(n));
    std::memset(block, 0, static_cast<size_t>(n));
    if (is_index) {
      const int64_t element = element_bytes(t.dtype);
      int64_t value = 0;
      for (int64_t i = 0; (i + 1) * element <= n; ++i) {
        if (bytes.below(4) == 0) value += bytes.below(limit);
        int64_t x = bytes.below(32) == 0 ? bytes.odd_number() : value;
        std::memcpy(block + i * element, &x, static_cast<size_t>(element));
      }
    } else {
      // A row at a time: the fuzzer watches every comparison, and bytes one by one were a third of
      // its time.
      constexpr int64_t kRow = 61;
      uint8_t row[kRow];
      const uint8_t fill = bytes.byte();
      for (int64_t i = 0; i < kRow; ++i) row[i] = static_cast<uint8_t>(fill * (i + 1) % kRow);
      for (int64_t i = 0; i < n; i += kRow)
        std::memcpy(block + i, row, static_cast<size_t>(std::min(kRow, n - i)));
    }
    t.data = block;
  }

 private:
  // On the heap, where a sanitizer sees both ends, or before a fence.
  uint8_t* place(Bytes& bytes, size_t n) {
    constexpr size_t kFences = 64;
    static const std::vector<Fenced> fenced = [] {
      std::vector<Fenced> all;
      for (size_t i = 0; i < kFences; ++i) all.emplace_back(8 * (kMaxBytes + 1));
      return all;
    }();
    if (bytes.below(2) == 0 && num_fenced_ < kFences) return fenced[num_fenced_++].last(n, 1);
    blocks.push_back(std::make_unique<uint8_t[]>(std::max<size_t>(n, 1)));
    return blocks.back().get();
  }
  size_t num_fenced_ = 0;
};

int32_t float_dtype(Bytes& b) {
  constexpr int32_t kFloats[] = {DELTIC_F32, DELTIC_BF16, DELTIC_F16};
  return kFloats[b.below(3)];
}
int32_t index_dtype(Bytes& b) { return b.below(2) == 0 ? DELTIC_I32 : DELTIC_I64; }

Sizes draw_sizes(Bytes& b) {
  constexpr int64_t kWidths[] = {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 100};
  constexpr int32_t kChunks[] = {0, 16, 32, 64};
  Sizes s;
  s.B = b.below(4);
  s.T = b.below(8) == 0 ? b.below(200) : b.below(20);
  s.H = 1 + b.below(3);
  s.HV = s.H * (1 + b.below(3));
  s.K = kWidths[b.below(12)];
  s.V = kWidths[b.below(12)];
  s.chunk = kChunks[b.below(4)];
  // Sizes that nobody has memory for, in all tensors of the call alike.
  for (int64_t i = b.below(8) == 0 ? 1 + b.below(2) : 0; i > 0; --i) {
    constexpr int kLog2[] = {20, 31, 32, 40, 48, 52, 55, 56, 57, 58, 60, 62};
    const int64_t huge = (int64_t{1} << kLog2[b.below(12)]) + (b.below(4) == 0 ? b.below(64) : 0);
    switch (b.below(6)) {
      case 0:
        s.B = huge;
        break;
      case 1:
        s.T = huge;
        break;
      case 2:
        s.H = 1, s.HV = huge;
        break;
      case 3:
        s.H = s.HV = huge;
        break;
      case 4:
        s.K = huge;
        break;
      default:
        s.V = huge;
    }
    if (b.below(2) == 0) (b.below(2) == 0 ? s.T : s.B) = 0;
  }
  s.N = s.B;
  return s;
}
// Sizes may lie at the end of their type: the sum stays there with them.
int64_t plus(int64_t size, int64_t more) {
  int64_t sum = 0;
  return __builtin_add_overflow(size, more, &sum) ? INT64_MAX : sum;
}
// Of packed sequences.
int64_t draw_sequences(Bytes& b) {
  return b.below(64) == 0 ? b.odd_number() & INT64_MAX : b.below(6);
}

// Strides of a view: gaps, or heads outside of tokens.
void restride(Bytes& b, deltic_tensor& t) {
  if (t.rank < 2 || b.below(4) != 0) return;
  if (b.below(4) == 0) {  // one row for all: huge views of little memory
    std::fill_n(t.strides, t.rank - 1, 0);
    return;
  }
  if (t.rank < 3) return;
  int64_t stride = 1;
  const bool swap = b.below(2) == 0;
  for (int i = t.rank - 1; i >= 0; --i) {
    const int d = swap && i == 1 ? 2 : swap && i == 2 ? 1 : i;
    if (t.rank == 3 && swap) break;
    t.strides[d] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(t.shape[d], 1), &stride)) stride = 0;
    if (stride <= kMaxBytes) stride += b.below(3);
  }
  t.strides[t.rank - 1] = 1;
}

void spoil(Bytes& b, deltic_tensor& t) {
  switch (b.below(9)) {
    case 0:
      t.shape[b.below(6)] = b.odd_number();
      break;
    case 1:
      t.strides[b.below(6)] = b.odd_number();
      break;
    case 2:
      t.dtype = static_cast<int32_t>(b.odd_number());
      break;
    case 3:
      t.dtype = static_cast<int32_t>(b.below(7));
      break;
    case 4:
      t.rank = static_cast<int32_t>(b.odd_number());
      break;
    case 5:
      t.rank = static_cast<int32_t>(b.below(8));
      break;
    case 6:
      t.device_type = static_cast<int32_t>(b.below(3));
      break;
    case 7:
      t.device_index = static_cast<int32_t>(b.below(3));
      break;
    default:
      t = {};
      break;
  }
}

deltic_options draw_options(Bytes& b, const Sizes& s) {
  static const char* const kNames[] = {nullptr,     nullptr,    nullptr,      "cpu.plain",
                                       "reference", "cpu.avx2", "cpu.avx512", "cpu.amx",
                                       "cpu.sse4",  "",         "x"};
  deltic_options o;
  deltic_options_init(&o, sizeof o);
  o.chunk = s.chunk;
  o.num_threads = static_cast<int32_t>(1 + b.below(2));
  o.impl = kNames[b.below(11)];
  o.checked = b.below(8) == 0 ? 1 : 0;
  if (b.below(4) == 0) o.qk_l2norm = 1;
  if (b.below(4) == 0) o.state_layout = DELTIC_STATE_VK;
  if (b.below(4) == 0) o.gate_form = static_cast<int32_t>(b.below(3));
  if (b.below(4) == 0) o.beta_form = static_cast<int32_t>(b.below(3));
  if (o.gate_form == DELTIC_GATE_BOUNDED) {
    o.has_lower_bound = 1;
    o.lower_bound = -5;
  }
  if (b.below(16) == 0) {
    int32_t* const fields[] = {&o.gate_form, &o.beta_form,   &o.state_layout,   &o.split,
                               &o.chunk,     &o.qk_l2norm,   &o.reverse,        &o.has_scale,
                               &o.checked,   &o.num_threads, &o.has_lower_bound};
    *fields[b.below(11)] = static_cast<int32_t>(b.odd_number());
    // A huge number of threads is sound and slow: not what is looked for here.
    if (o.num_threads > 4) o.num_threads = o.num_threads > 4096 ? o.num_threads : 4;
  }
  if (b.below(16) == 0) o.segment_length = b.odd_number();
  if (b.below(32) == 0) {  // any bits
    const auto bits = static_cast<uint32_t>(b.word());
    std::memcpy(b.below(2) == 0 ? &o.scale : &o.lower_bound, &bits, sizeof bits);
    o.has_scale = 1;
  }
  return o;
}

void on_choice(void* user, const char* name, int32_t accepts, int32_t chosen,
               const char* sentence) {
  if (name == nullptr || sentence == nullptr) broken("explain gives name and sentence");
  if (chosen != 0 && accepts == 0) broken("the chosen implementation takes the call");
  *static_cast<int*>(user) += chosen;
}

void check_status(deltic_status status) {
  if (status < DELTIC_OK || status > DELTIC_RUNTIME_ERROR) broken("the status is a known one");
  if (status == DELTIC_RUNTIME_ERROR) broken("descriptors give no runtime error");
  if (status != DELTIC_OK && deltic_last_error()[0] == '\0') broken("an error has a text");
}

// Queries, explanation, run. `fields` are the tensors of the struct; memory is given for the run.
// `reads_values`: the checks compare lists before they ask for the workspace.
// `prepare`: what has to be done when the tensors have their memory.
template <class Tensors, class Query, class Explain, class Run>
void call(
    Bytes& bytes, Tensors& tensors, const std::vector<Field>& fields, const Sizes& s,
    bool reads_values, const Query& query, const Explain& explain, const Run& run,
    const std::function<void()>& prepare = [] {}) {
  static const Fenced struct_memory(1 << 14);
  const int64_t claimed = claimed_size(bytes, sizeof(Tensors));
  const bool is_dirty = bytes.below(4) == 0;
  const auto given = [&] { return as_given(struct_memory, tensors, claimed, is_dirty); };
  ++counts.calls;
  uint64_t needed = 0;
  const deltic_status asked = query(given(), &needed);
  check_status(asked);
  int chosen = 0;
  const deltic_status explained = explain(given(), &chosen);
  check_status(explained);
  if (asked == DELTIC_OK && chosen != 1) broken("a call that is taken has a chosen implementation");
  // Sizes that do not fit are an invalid argument of the workspace: who would run it is known then.
  if (asked == DELTIC_UNSUPPORTED && explained == DELTIC_OK && chosen != 0)
    broken("a call that nobody takes has no chosen implementation");
  if (asked == DELTIC_OK) ++counts.accepted;

  Memory memory;
  for (const Field& f : fields) memory.give(bytes, *f.tensor, f.is_index, s.T / 3 + 2);
  constexpr uint64_t kMaxWorkspace = 1 << 26;
  const int64_t work = bytes.below(8) == 0 ? kMaxWork : kUsualWork;
  const bool small = s.is_small(work) && needed <= kMaxWorkspace;
  if (!memory.complete && asked == DELTIC_OK && needed > 0 && !reads_values) {
    // Views too large for memory: the checks run on pointers that nobody may follow, and the
    // missing workspace ends the call.
    alignas(64) static uint8_t nowhere[64];
    for (const Field& f : fields)
      if (f.tensor->rank > 0 && f.tensor->data == nullptr) f.tensor->data = nowhere;
    if (run(given(), nullptr) == DELTIC_OK) broken("a call without workspace fails");
  }
  if (!memory.complete || !small) return;
  prepare();
  deltic_workspace workspace{nullptr, needed};
  if (bytes.below(16) == 0) workspace.bytes = static_cast<uint64_t>(bytes.below(200));
  static const Fenced workspace_memory(kMaxWorkspace);
  if (workspace.bytes > 0) workspace.data = workspace_memory.last(workspace.bytes, 64);
  // Nulls and odd pointers last, when nobody writes there any more.
  if (bytes.below(16) == 0) {
    deltic_tensor& t = *fields[static_cast<size_t>(bytes.below(int64_t(fields.size())))].tensor;
    if (bytes.below(2) == 0) t.data = nullptr;
  }
  const deltic_status status = run(given(), bytes.below(32) == 0 ? nullptr : &workspace);
  check_status(status);
  if (status == DELTIC_OK && asked != DELTIC_OK) broken("what runs passes the query");
  if (status == DELTIC_OK) ++counts.runs;
}

// What forward keeps: memory before a fence.
constexpr uint64_t kMaxSaved = 1 << 24;
uint8_t* saved_memory(uint64_t bytes) {
  static const Fenced fenced(kMaxSaved);
  return fenced.last(bytes, 64);
}

std::vector<Field> fields_of(deltic_tensors& t) {
  std::vector<Field> fields;
  for (deltic_tensor* x = &t.q; x <= &t.ckpt_states; ++x) {
    const bool is_index = x == &t.cu_seqlens || x == &t.cu_seqlens_host || x == &t.read_index ||
                          x == &t.write_index || (x >= &t.ckpt_cu && x <= &t.ckpt_slots);
    fields.push_back({x, is_index});
  }
  return fields;
}
void spoil_some(Bytes& b, const std::vector<Field>& fields) {
  for (const Field& f : fields) restride(b, *f.tensor);
  for (int64_t i = b.below(4) == 0 ? 1 + b.below(2) : 0; i > 0; --i)
    spoil(b, *fields[static_cast<size_t>(b.below(int64_t(fields.size())))].tensor);
}

deltic_tensor draw_states(Bytes& b, const deltic_options& options, const Sizes& s, int64_t slots,
                          bool is_fp32) {
  const int32_t type = is_fp32 || b.below(2) == 0 ? DELTIC_F32 : DELTIC_BF16;
  return options.state_layout == DELTIC_STATE_VK ? contiguous(type, {slots, s.HV, s.V, s.K})
                                                 : contiguous(type, {slots, s.HV, s.K, s.V});
}

// Inputs of a pass over sequences; is_decode: one that takes numbers per value column.
deltic_tensors draw_inputs(Bytes& b, const deltic_options& options, bool is_decode, Sizes& s) {
  deltic_tensors t;
  deltic_tensors_init(&t, sizeof t);
  const bool packed = b.below(2) == 0;
  if (packed) {
    s.B = 1;
    s.N = draw_sequences(b);
    t.cu_seqlens = contiguous(index_dtype(b), {plus(s.N, 1)});
    if (b.below(4) == 0) t.cu_seqlens_host = contiguous(index_dtype(b), {plus(s.N, 1)});
  }
  const int32_t dtype = float_dtype(b);
  t.q = t.k = contiguous(dtype, {s.B, s.T, s.H, s.K});
  t.v = contiguous(dtype, {s.B, s.T, s.HV, s.V});
  if (b.below(4) != 0) t.beta = contiguous(float_dtype(b), {s.B, s.T, s.HV});
  if (is_decode && b.below(4) == 0) t.beta = contiguous(float_dtype(b), {s.B, s.T, s.HV, s.V});
  if (is_decode && b.below(4) == 0) t.gv = contiguous(float_dtype(b), {s.B, s.T, s.HV, s.V});
  const int64_t gate = options.gate_form != 0 ? 1 + b.below(2) : b.below(3);
  if (gate == 1) t.g = contiguous(float_dtype(b), {s.B, s.T, s.HV});
  if (gate == 2) t.g = contiguous(float_dtype(b), {s.B, s.T, s.HV, s.K});
  if (options.gate_form != 0) {
    t.A_log = contiguous(float_dtype(b), {s.HV});
    if (b.below(2) == 0) t.dt_bias = contiguous(float_dtype(b), {s.HV, gate == 2 ? s.K : 1});
  }
  return t;
}

// What servers add to a pool, of sequences and of the convolution alike. Drawn last: bytes that end
// before give none, and the stored inputs mean what they meant.
template <class Tensors>
void draw_servers_lists(Bytes& b, deltic_options& options, const Sizes& s, Tensors& t,
                        std::vector<Field>& fields) {
  if (b.below(4) == 1) options.has_null_slot = 1;
  if (b.below(4) == 1) options.null_slot = static_cast<int32_t>(b.odd_number());
  if (b.below(4) == 1) t.has_initial_state = contiguous(DELTIC_U8, {s.N});
  if (b.below(4) == 1) t.accepted = contiguous(index_dtype(b), {s.N});
  if (b.below(4) == 1) t.write_pool = t.state_pool;
  std::vector<Field> added = {
      {&t.has_initial_state, true}, {&t.accepted, true}, {&t.write_pool, false}};
  if constexpr (requires { t.parents; }) {
    const int64_t columns = s.T > 0 ? s.T : 1;
    if (b.below(4) == 1) t.parents = contiguous(index_dtype(b), {s.N, columns});
    if (b.below(4) == 1) t.read_index = contiguous(index_dtype(b), {s.N, columns});
    if (b.below(4) == 1) t.ckpt_states = t.state_pool;
    added.push_back({&t.parents, true});
    if (b.below(4) == 1) {  // a record: of the right width, mostly
      const int64_t gate = t.g.rank == 0 ? 0 : t.g.rank == 3 ? 1 : s.K;
      const int64_t width = plus(plus(s.K, s.V), b.below(8) == 0 ? b.below(3) : gate);
      const int64_t tokens = plus(s.T > 0 ? s.T : 1, b.below(4) == 0 ? b.below(20) : 0);
      t.record = contiguous(DELTIC_F32, {s.N, tokens, s.HV, width});
      if (b.below(8) != 0) t.final_state = t.write_index = t.write_pool = t.ckpt_states = {};
    }
    added.push_back({&t.record, false});
    if (b.below(4) == 1) options.has_seed = 1, options.seed = static_cast<uint64_t>(b.odd_number());
    if (b.below(4) == 1) t.positions = contiguous(index_dtype(b), {s.N});
    added.push_back({&t.positions, true});
  } else {
    if (b.below(4) == 1) {
      t.ckpt_cu = contiguous(index_dtype(b), {plus(s.N, 1)});
      t.ckpt_tokens = t.ckpt_slots = contiguous(index_dtype(b), {b.below(8)});
      t.ckpt_states = t.state_pool;
    }
    for (deltic_tensor* x = &t.ckpt_cu; x <= &t.ckpt_states; ++x)
      added.push_back({x, x != &t.ckpt_states});
  }
  if (b.below(4) == 1) spoil_some(b, added);
  if constexpr (requires { t.recurrent_from; }) {
    if (b.below(4) == 1) options.form = static_cast<int32_t>(b.below(3));
    if (b.below(4) == 1) t.recurrent_from = contiguous(index_dtype(b), {s.N});
    added.push_back({&t.recurrent_from, true});
  }
  fields.insert(fields.end(), added.begin(), added.end());
}

void on_division(void*, const char* impl, const char* what, double, int32_t, const char* reason) {
  if (impl == nullptr || what == nullptr || reason == nullptr) broken("a division has its texts");
}

void fuzz_sequence_op(Bytes& b, deltic_op op) {
  Sizes s = draw_sizes(b);
  deltic_options options = draw_options(b, s);
  const bool is_decode = op == DELTIC_DECODE;
  deltic_tensors t = draw_inputs(b, options, is_decode, s);
  t.o = t.v;
  const auto states = [&](int64_t slots) { return draw_states(b, options, s, slots, false); };
  if (b.below(3) == 0) {
    t.state_pool = states(plus(s.N, b.below(12)));
    if (b.below(2) == 0) t.read_index = contiguous(index_dtype(b), {s.N});
    if (b.below(2) == 0) t.write_index = contiguous(index_dtype(b), {s.N});
    if (is_decode && b.below(4) == 0)
      t.write_index = contiguous(index_dtype(b), {s.N, s.T > 0 ? s.T : 1});
  } else {
    if (b.below(2) == 0) t.initial_state = states(s.N);
    if (b.below(2) == 0) t.final_state = states(s.N);
  }
  if (b.below(4) == 0) {
    const int64_t M = b.below(8);
    t.ckpt_cu = contiguous(index_dtype(b), {plus(s.N, 1)});
    t.ckpt_tokens = contiguous(index_dtype(b), {M});
    t.ckpt_slots = contiguous(index_dtype(b), {M});
    t.ckpt_states = states(b.below(8));
  }
  std::vector<Field> fields = fields_of(t);
  spoil_some(b, fields);
  if (b.below(4) == 0) options.save = static_cast<int32_t>(1 + b.below(2));
  if (b.below(4) == 1) draw_servers_lists(b, options, s, t, fields);
  uint64_t saved_bytes = 0;
  if (options.save != 0) {
    check_status(deltic_forward_saved(&options, &t, &saved_bytes));
    if (b.below(16) == 0) saved_bytes = static_cast<uint64_t>(b.odd_number());
    t.saved = {nullptr, saved_bytes};
  }
  static const Fenced options_memory(1 << 14);
  const deltic_options* given =
      b.below(16) == 0
          ? nullptr
          : as_given(options_memory, options, claimed_size(b, sizeof options), b.below(4) == 0);
  if (op == DELTIC_FORWARD && b.below(8) == 0) {
    const auto num_sms = static_cast<int32_t>(b.odd_number());
    check_status(deltic_explain_division(given, &t, num_sms, nullptr, on_division, nullptr));
  }
  call(
      b, t, fields, s, t.cu_seqlens_host.rank != 0,
      [&](const deltic_tensors* x, uint64_t* bytes) {
        return op == DELTIC_FORWARD ? deltic_forward_workspace(given, x, nullptr, bytes)
                                    : deltic_decode_workspace(given, x, nullptr, bytes);
      },
      [&](const deltic_tensors* x, int* chosen) {
        return deltic_explain(op, given, x, on_choice, chosen);
      },
      [&](const deltic_tensors* x, const deltic_workspace* w) {
        return op == DELTIC_FORWARD ? deltic_forward(given, x, w, nullptr)
                                    : deltic_decode(given, x, w, nullptr);
      },
      [&] {
        if (saved_bytes <= kMaxSaved && b.below(32) != 0) t.saved.data = saved_memory(saved_bytes);
      });
}

// What forward leaves for these inputs, whose memory is there; empty if it does not run.
std::vector<uint8_t> saved_by_forward(const deltic_options& options, const deltic_tensors& inputs,
                                      uint64_t bytes) {
  deltic_tensors t = inputs;
  t.o = contiguous(t.v.dtype, {t.v.shape[0], t.v.shape[1], t.v.shape[2], t.v.shape[3]});
  const int64_t n = extent(t.o);
  uint64_t needed = 0;
  if (n < 0 || deltic_forward_workspace(&options, &t, nullptr, &needed) != DELTIC_OK) return {};
  if (needed > (1u << 26) || bytes > kMaxSaved) return {};
  const auto outputs = std::make_unique<uint8_t[]>(static_cast<size_t>(n + 1));
  t.o.data = outputs.get();
  const auto aligned = [](uint64_t size) {
    return std::unique_ptr<uint8_t, decltype(&std::free)>(
        static_cast<uint8_t*>(std::aligned_alloc(64, (size + 64) / 64 * 64)), std::free);
  };
  const auto workspace = aligned(needed), saved = aligned(bytes);
  t.saved = {saved.get(), bytes};
  const deltic_workspace w{workspace.get(), needed};
  if (deltic_forward(&options, &t, &w, nullptr) != DELTIC_OK) return {};
  return {saved.get(), saved.get() + bytes};
}

// Gradients of forward, or of decode: from the first token on, from what forward kept, and from
// what it kept with bits turned or an end missing.
void fuzz_backward(Bytes& b) {
  Sizes s = draw_sizes(b);
  deltic_options options = draw_options(b, s);
  deltic_tensors f = draw_inputs(b, options, b.below(4) == 0, s);
  if (b.below(2) == 0) f.initial_state = draw_states(b, options, s, s.N, false);
  deltic_backward_tensors t;
  deltic_backward_tensors_init(&t, sizeof t);
  t.forward = &f;
  if (b.below(8) != 0) t.d_o = f.v;
  if (b.below(2) == 0) t.d_final_state = draw_states(b, options, s, s.N, true);
  const std::pair<const deltic_tensor*, deltic_tensor*> gradients[] = {
      {&f.q, &t.dq}, {&f.k, &t.dk},   {&f.v, &t.dv},         {&f.beta, &t.dbeta},
      {&f.g, &t.dg}, {&f.gv, &t.dgv}, {&f.A_log, &t.dA_log}, {&f.dt_bias, &t.ddt_bias}};
  for (const auto& [of, d] : gradients)
    if (b.below(4) != 0) *d = *of;
  if (f.initial_state.rank != 0 && b.below(4) != 0)
    t.d_initial_state = draw_states(b, options, s, s.N, true);
  std::vector<Field> fields = fields_of(f);
  for (deltic_tensor* x = &t.d_o; x <= &t.d_initial_state; ++x) fields.push_back({x, false});
  spoil_some(b, fields);

  deltic_options saving = options;
  saving.save = static_cast<int32_t>(1 + b.below(2));
  uint64_t real_bytes = 0;
  const int64_t from = b.below(4);  // 0: nothing was kept; 1: all of it; 2: in part; 3: other bytes
  if (from > 0) {
    deltic_tensors forward = f;
    forward.o = f.v;
    check_status(deltic_forward_saved(&saving, &forward, &real_bytes));
    f.saved.bytes = real_bytes;
    if (from == 2 && b.below(2) == 0)
      f.saved.bytes = real_bytes - std::min<uint64_t>(real_bytes, uint64_t(1 + b.byte()));
    if (b.below(16) == 0) f.saved.bytes = static_cast<uint64_t>(b.odd_number());
  }
  deltic_memory_plan plan;
  deltic_memory_plan_init(&plan, sizeof plan);
  check_status(
      deltic_backward_memory(&options, &t, static_cast<int32_t>(b.below(4)), nullptr, &plan));
  const deltic_options* given = b.below(16) == 0 ? nullptr : &options;
  call(
      b, t, fields, s, f.cu_seqlens_host.rank != 0,
      [&](const deltic_backward_tensors* x, uint64_t* bytes) {
        return deltic_backward_workspace(given, x, nullptr, bytes);
      },
      [&](const deltic_backward_tensors* x, int* chosen) {
        return deltic_backward_explain(given, x, on_choice, chosen);
      },
      [&](const deltic_backward_tensors* x, const deltic_workspace* w) {
        return deltic_backward(given, x, w, nullptr);
      },
      [&] {
        if (f.saved.bytes == 0 || f.saved.bytes > kMaxSaved) return;
        uint8_t* data = saved_memory(f.saved.bytes);
        f.saved.data = data;
        std::memset(data, b.byte(), f.saved.bytes);
        if (from == 3) return;
        const std::vector<uint8_t> real = saved_by_forward(saving, f, real_bytes);
        if (real.empty()) return;
        std::memcpy(data, real.data(), std::min<uint64_t>(f.saved.bytes, real.size()));
        for (int64_t i = from == 2 ? b.below(4) : 0; i > 0; --i) {
          const bool in_header = b.below(2) == 0;
          const auto at = static_cast<uint64_t>(in_header ? b.below(256) : b.word() & INT64_MAX);
          data[at % f.saved.bytes] ^= static_cast<uint8_t>(1 << b.below(8));
        }
      });
}

// The gradient of a block, made from the block's descriptors: outputs become what came back.
void fuzz_block_backward(Bytes& b, deltic_op op, const deltic_options& options, const Sizes& s,
                         const deltic_block_tensors& block) {
  deltic_block_backward_tensors t;
  deltic_block_backward_tensors_init(&t, sizeof t);
  deltic_block_tensors f = block;
  t.forward = &f;
  t.d_out = f.out, t.d_w = f.w, t.d_u = f.u, t.d_kg = f.kg, t.d_qg = f.qg;
  f.out = f.w = f.u = f.kg = f.qg = f.rstd = {};
  if (op == DELTIC_INVERSE && b.below(2) == 0) std::swap(f.a, f.out);
  if (b.below(8) == 0) t.d_w = {};
  const std::pair<const deltic_tensor*, deltic_tensor*> gradients[] = {
      {&f.q, &t.dq},       {&f.k, &t.dk}, {&f.v, &t.dv},          {&f.x, &t.dx},
      {&f.g, &t.dg},       {&f.a, &t.da}, {&f.A_log, &t.dA_log},  {&f.dt_bias, &t.ddt_bias},
      {&f.beta, &t.dbeta}, {&f.z, &t.dz}, {&f.weight, &t.dweight}};
  for (const auto& [of, d] : gradients) {
    if (b.below(4) == 0) continue;
    *d = *of;
    if (d->rank != 0) d->dtype = float_dtype(b);
  }
  std::vector<Field> fields;
  for (deltic_tensor* x = &f.q; x <= &f.weight; ++x) fields.push_back({x, x == &f.cu_seqlens});
  for (deltic_tensor* x = &t.d_out; x <= &t.dweight; ++x) fields.push_back({x, false});
  spoil_some(b, fields);
  call(
      b, t, fields, s, false,
      [&](const deltic_block_backward_tensors* x, uint64_t* bytes) {
        return deltic_block_backward_workspace(op, &options, x, nullptr, bytes);
      },
      [&](const deltic_block_backward_tensors* x, int* chosen) {
        return deltic_block_backward_explain(op, &options, x, on_choice, chosen);
      },
      [&](const deltic_block_backward_tensors* x, const deltic_workspace* w) {
        return deltic_block_backward(op, &options, x, w, nullptr);
      });
}

void fuzz_block(Bytes& b, deltic_op op) {
  Sizes s = draw_sizes(b);
  deltic_options options = draw_options(b, s);
  if (b.below(8) != 0) {  // what blocks do not take
    options.beta_form = options.state_layout = options.qk_l2norm = 0;
    if (op != DELTIC_CUMSUM && op != DELTIC_GATE) {
      options.gate_form = options.has_lower_bound = 0;
      options.lower_bound = 0;
    }
  }
  deltic_block_tensors t;
  deltic_block_tensors_init(&t, sizeof t);
  if (b.below(2) == 0) {
    s.B = 1;
    s.N = draw_sequences(b);
    t.cu_seqlens = contiguous(index_dtype(b), {plus(s.N, 1)});
  }
  const int64_t width = s.chunk == 0 ? 64 : s.chunk;
  const auto rows = [&](int64_t heads, int64_t columns) {
    return contiguous(float_dtype(b), {s.B, s.T, heads, columns});
  };
  const auto gate = [&](bool per_channel) {
    return per_channel ? rows(s.HV, s.K) : contiguous(float_dtype(b), {s.B, s.T, s.HV});
  };
  const bool per_channel = b.below(2) == 0;
  switch (op) {
    case DELTIC_CUMSUM:
    case DELTIC_GATE:
      t.g = gate(per_channel);
      t.out = gate(per_channel);
      if (options.gate_form != 0) {
        t.A_log = contiguous(float_dtype(b), {s.HV});
        t.dt_bias = contiguous(float_dtype(b), {s.HV, per_channel ? s.K : 1});
      }
      break;
    case DELTIC_L2NORM:
      t.x = rows(s.H, s.K);
      t.out = rows(s.H, s.K);
      if (b.below(2) == 0) t.rstd = contiguous(DELTIC_F32, {s.B, s.T, s.H});
      break;
    case DELTIC_RMSNORM:
      t.x = rows(s.H, s.K);
      t.out = rows(s.H, s.K);
      if (b.below(2) == 0) t.weight = contiguous(float_dtype(b), {s.K});
      if (b.below(2) != 0) break;
      t.z = rows(s.H, s.K);
      options.activation = static_cast<int32_t>(b.below(3));
      if (b.below(2) == 0) options.has_eps = 1, options.eps = 1e-3f;
      break;
    case DELTIC_INVERSE:
      t.a = rows(s.HV, width);
      t.out = rows(s.HV, width);
      break;
    default:
      t.k = rows(s.H, s.K);
      if (b.below(2) == 0) t.g = gate(per_channel);
      if (op == DELTIC_SCORES_INVERSE) t.a = rows(s.HV, width);
      if (op != DELTIC_SCORES && b.below(2) == 0)
        t.beta = contiguous(float_dtype(b), {s.B, s.T, s.HV});
      if (op == DELTIC_SCORES || op == DELTIC_SCORES_INVERSE) t.q = rows(s.H, s.K);
      if (op != DELTIC_WY) {
        t.out = rows(s.HV, width);
        break;
      }
      t.a = rows(s.HV, width);
      t.w = rows(s.HV, s.K);
      if (b.below(2) == 0) t.kg = rows(s.HV, s.K);
      if (b.below(2) == 0) {
        t.v = rows(s.HV, s.V);
        t.u = rows(s.HV, s.V);
      }
      if (b.below(2) == 0) {
        t.q = rows(s.H, s.K);
        t.qg = rows(s.HV, s.K);
      }
      break;
  }
  if (b.below(2) == 0) return fuzz_block_backward(b, op, options, s, t);
  std::vector<Field> fields;
  for (deltic_tensor* x = &t.q; x <= &t.weight; ++x) {
    fields.push_back({x, x == &t.cu_seqlens || x == &t.cu_seqlens_host});
  }
  spoil_some(b, fields);
  const deltic_op asked = b.below(128) == 0 ? static_cast<deltic_op>(b.below(16)) : op;
  const deltic_options* given = &options;
  call(
      b, t, fields, s, false,
      [&](const deltic_block_tensors* x, uint64_t* bytes) {
        return deltic_block_workspace(asked, given, x, nullptr, bytes);
      },
      [&](const deltic_block_tensors* x, int* chosen) {
        return deltic_block_explain(asked, given, x, on_choice, chosen);
      },
      [&](const deltic_block_tensors* x, const deltic_workspace* w) {
        return deltic_block(asked, given, x, w, nullptr);
      });
}

// The convolution or its gradient, whose outputs become what came back.
void fuzz_conv(Bytes& b) {
  Sizes s = draw_sizes(b);
  deltic_options options = draw_options(b, s);
  if (b.below(8) != 0) {  // what the delta rule alone takes
    options.gate_form = options.beta_form = options.state_layout = options.qk_l2norm = 0;
    options.has_lower_bound = options.has_scale = 0;
    options.lower_bound = 0;
  }
  options.activation = static_cast<int32_t>(b.below(32) == 0 ? b.odd_number() : b.below(2));
  deltic_conv_backward_tensors t;
  deltic_conv_backward_tensors_init(&t, sizeof t);
  deltic_conv_tensors f;
  deltic_conv_tensors_init(&f, sizeof f);
  t.forward = &f;
  if (b.below(2) == 0) {
    s.B = 1;
    s.N = draw_sequences(b);
    f.cu_seqlens = contiguous(index_dtype(b), {plus(s.N, 1)});
  }
  int64_t D = 0;
  if (__builtin_mul_overflow(s.K, s.H, &D)) D = s.K;
  const int64_t W = 1 + b.below(8);
  const int64_t S = W - (W > 1 && b.below(2) == 0 ? 1 : 0) + b.below(3);
  const int32_t dtype = float_dtype(b);
  f.x = f.out = contiguous(dtype, {s.B, s.T, D});
  f.weight = contiguous(float_dtype(b), {D, W});
  if (b.below(2) == 0) f.weight.strides[0] = 1, f.weight.strides[1] = D;
  if (b.below(2) == 0) f.bias = contiguous(float_dtype(b), {D});
  const auto states = [&](int64_t slots) {
    return contiguous(b.below(2) == 0 ? dtype : DELTIC_F32, {slots, D, S});
  };
  const bool is_backward = b.below(2) == 0;
  if (!is_backward && b.below(3) == 0) {
    f.state_pool = states(plus(s.N, b.below(8)));
    if (b.below(2) == 0) f.read_index = contiguous(index_dtype(b), {s.N});
    if (b.below(2) == 0) f.write_index = contiguous(index_dtype(b), {s.N});
  } else {
    if (b.below(2) == 0) f.initial_state = states(s.N);
    if (b.below(2) == 0) f.final_state = states(s.N);
  }
  if (is_backward) {
    if (b.below(4) != 0) t.d_out = f.out;
    t.d_final_state = f.final_state;
    f.out = f.final_state = {};
    if (b.below(4) != 0) t.dx = f.x;
    if (b.below(4) != 0) t.dweight = f.weight;
    if (b.below(4) != 0) t.dbias = f.bias;
    if (b.below(4) != 0) t.d_initial_state = f.initial_state;
  }
  std::vector<Field> fields;
  for (deltic_tensor* x = &f.x; x <= &f.out; ++x) {
    fields.push_back({x, x == &f.cu_seqlens || x == &f.read_index || x == &f.write_index});
  }
  for (deltic_tensor* x = &t.d_out; x <= &t.d_initial_state; ++x) fields.push_back({x, false});
  spoil_some(b, fields);
  if (b.below(4) == 1) draw_servers_lists(b, options, s, f, fields);
  const deltic_options* given = &options;
  call(
      b, t, fields, s, false,
      [&](const deltic_conv_backward_tensors* x, uint64_t* bytes) {
        return is_backward ? deltic_conv_backward_workspace(given, x, nullptr, bytes)
                           : deltic_conv_workspace(given, &f, nullptr, bytes);
      },
      [&](const deltic_conv_backward_tensors* x, int* chosen) {
        return is_backward ? deltic_conv_backward_explain(given, x, on_choice, chosen)
                           : deltic_conv_explain(given, &f, on_choice, chosen);
      },
      [&](const deltic_conv_backward_tensors* x, const deltic_workspace* w) {
        return is_backward ? deltic_conv_backward(given, x, w, nullptr)
                           : deltic_conv(given, &f, w, nullptr);
      });
}

// States alone: from slot to slot, or to where a record's tokens left them.
void fuzz_states(Bytes& b, bool is_commit) {
  Sizes s = draw_sizes(b);
  deltic_options options = draw_options(b, s);
  if (b.below(8) != 0) {  // what the delta rule alone takes
    options.gate_form = options.beta_form = options.qk_l2norm = 0;
    options.has_lower_bound = options.has_scale = 0;
    options.lower_bound = 0;
  }
  if (b.below(4) == 1) options.has_null_slot = 1;
  if (b.below(4) == 1) options.null_slot = static_cast<int32_t>(b.odd_number());
  const int64_t layers = b.below(3), slots = plus(s.N, b.below(8));
  const auto with_layers = [&](deltic_tensor t) {
    if (layers == 0 || t.rank > 5) return t;
    std::copy_backward(t.shape, t.shape + t.rank, t.shape + t.rank + 1);
    std::copy_backward(t.strides, t.strides + t.rank, t.strides + t.rank + 1);
    t.shape[0] = layers, t.strides[0] = 0;
    if (__builtin_mul_overflow(t.shape[1], t.strides[1], &t.strides[0])) t.strides[0] = 1;
    ++t.rank;
    return t;
  };
  const auto pool = [&](bool v_first, int64_t heads) {
    return with_layers(v_first ? contiguous(float_dtype(b), {slots, heads, s.V, s.K})
                               : contiguous(float_dtype(b), {slots, heads, s.K, s.V}));
  };
  const bool v_first = options.state_layout == DELTIC_STATE_VK;
  const auto list = [&] { return contiguous(index_dtype(b), {s.N}); };
  std::vector<Field> fields;
  const deltic_options* given = &options;
  if (is_commit) {
    deltic_commit_tensors t;
    deltic_commit_tensors_init(&t, sizeof t);
    const int64_t gates[] = {0, 1, s.K}, tokens = 1 + b.below(18);
    t.state_pool = pool(v_first, s.HV);
    t.record = with_layers(
        contiguous(DELTIC_F32, {s.N, tokens, s.HV, plus(plus(s.K, s.V), gates[b.below(3)])}));
    t.accepted = list();
    if (b.below(2) == 0) t.read_index = list();
    if (b.below(2) == 0) t.write_index = list();
    if (b.below(4) == 0) t.has_initial_state = contiguous(DELTIC_U8, {s.N});
    if (b.below(4) == 0) t.parents = contiguous(index_dtype(b), {s.N, tokens});
    for (deltic_tensor* x = &t.state_pool; x <= &t.parents; ++x)
      fields.push_back({x, x >= &t.accepted});
    spoil_some(b, fields);
    call(
        b, t, fields, s, false,
        [&](const deltic_commit_tensors* x, uint64_t* bytes) {
          return deltic_commit_workspace(given, x, nullptr, bytes);
        },
        [&](const deltic_commit_tensors* x, int* chosen) {
          return deltic_commit_explain(given, x, on_choice, chosen);
        },
        [&](const deltic_commit_tensors* x, const deltic_workspace* w) {
          return deltic_commit(given, x, w, nullptr);
        });
    return;
  }
  deltic_move_tensors t;
  deltic_move_tensors_init(&t, sizeof t);
  t.state_pool = pool(v_first, s.HV);
  if (b.below(3) != 0) {
    t.transpose = static_cast<int32_t>(b.below(16) == 0 ? b.odd_number() : b.below(2));
    t.write_pool = pool(v_first != (t.transpose == 1), plus(s.HV, b.below(3)));
  }
  t.read_index = list(), t.write_index = list();
  for (int64_t* head : {&t.read_head, &t.write_head, &t.num_heads}) {
    *head = b.below(16) == 0 ? b.odd_number() : b.below(3);
  }
  for (deltic_tensor* x = &t.state_pool; x <= &t.write_index; ++x) {
    fields.push_back({x, x >= &t.read_index});
  }
  spoil_some(b, fields);
  call(
      b, t, fields, s, false,
      [&](const deltic_move_tensors* x, uint64_t* bytes) {
        return deltic_move_workspace(given, x, nullptr, bytes);
      },
      [&](const deltic_move_tensors* x, int* chosen) {
        return deltic_move_explain(given, x, on_choice, chosen);
      },
      [&](const deltic_move_tensors* x, const deltic_workspace* w) {
        return deltic_move(given, x, w, nullptr);
      });
}

// A step: conv, decode and the norm, of widths that fit one another.
void fuzz_step(Bytes& b) {
  Sizes s = draw_sizes(b);
  deltic_options options = draw_options(b, s);
  if (b.below(4) != 0) options.impl = nullptr;
  deltic_tensors t = draw_inputs(b, options, true, s);
  const int32_t dtype = t.q.dtype;
  t.q = t.k = t.v = {};
  deltic_conv_tensors f;
  deltic_conv_tensors_init(&f, sizeof f);
  f.cu_seqlens = t.cu_seqlens, f.cu_seqlens_host = t.cu_seqlens_host;
  if (b.below(8) != 0) t.cu_seqlens = t.cu_seqlens_host = {};
  int64_t keys = 0, values = 0;
  if (__builtin_mul_overflow(s.H, plus(s.K, s.K), &keys)) keys = s.K;
  if (__builtin_mul_overflow(s.HV, s.V, &values)) values = s.V;
  const int64_t D = plus(plus(keys, values), b.below(16) == 0 ? b.odd_number() : 0);
  const int64_t W = 1 + b.below(8), S = W + b.below(3);
  f.x = contiguous(dtype, {s.B, s.T, D});
  f.weight = contiguous(float_dtype(b), {D, W});
  if (b.below(2) == 0) f.bias = contiguous(float_dtype(b), {D});
  options.activation = static_cast<int32_t>(b.below(32) == 0 ? b.odd_number() : b.below(2));
  const auto windows = [&](int64_t slots) {
    return contiguous(b.below(2) == 0 ? dtype : DELTIC_F32, {slots, D, S});
  };
  const auto states = [&](int64_t slots) { return draw_states(b, options, s, slots, false); };
  if (b.below(2) == 0) {
    const int64_t slots = plus(s.N, b.below(8));
    t.state_pool = states(slots), f.state_pool = windows(slots);
    if (b.below(2) == 0) t.read_index = f.read_index = contiguous(index_dtype(b), {s.N});
    if (b.below(2) == 0) t.write_index = f.write_index = contiguous(index_dtype(b), {s.N});
  } else {
    if (b.below(2) == 0) t.initial_state = states(s.N), f.initial_state = windows(s.N);
    if (b.below(8) != 0) t.final_state = states(s.N), f.final_state = windows(s.N);
  }
  deltic_block_tensors n;
  deltic_block_tensors_init(&n, sizeof n);
  deltic_step_tensors x;
  deltic_step_tensors_init(&x, sizeof x);
  x.conv = &f, x.decode = &t;
  const auto rows = [&](int32_t type) { return contiguous(type, {s.B, s.T, s.HV, s.V}); };
  if (b.below(4) != 0) {
    x.norm = &n;
    n.out = rows(float_dtype(b));
    if (b.below(2) == 0) n.weight = contiguous(float_dtype(b), {s.V});
    if (b.below(2) == 0) n.z = rows(float_dtype(b));
    if (n.z.rank != 0) options.norm_activation = static_cast<int32_t>(b.below(3));
    if (b.below(8) == 0) options.norm_activation = static_cast<int32_t>(b.odd_number());
  } else {
    t.o = rows(dtype);
  }
  std::vector<Field> fields = fields_of(t);
  for (deltic_tensor* y = &f.x; y <= &f.out; ++y) {
    fields.push_back({y, y == &f.cu_seqlens || y == &f.cu_seqlens_host || y == &f.read_index ||
                             y == &f.write_index});
  }
  for (deltic_tensor* y = &n.q; y <= &n.weight; ++y) fields.push_back({y, false});
  spoil_some(b, fields);
  if (b.below(4) == 1) draw_servers_lists(b, options, s, t, fields);
  if (b.below(4) == 1) draw_servers_lists(b, options, s, f, fields);
  if (b.below(32) == 0) x.norm = nullptr;
  if (b.below(64) == 0) x.conv = nullptr;
  if (b.below(64) == 0) x.decode = nullptr;
  for (uint64_t* size : {&f.size, &t.size, &n.size}) {
    if (b.below(64) == 0) *size = static_cast<uint64_t>(b.below(200));
  }
  const deltic_options* given = &options;
  call(
      b, x, fields, s, f.cu_seqlens_host.rank != 0,
      [&](const deltic_step_tensors* y, uint64_t* bytes) {
        return deltic_step_workspace(given, y, nullptr, bytes);
      },
      [&](const deltic_step_tensors* y, int* chosen) {
        return deltic_step_explain(given, y, on_choice, chosen);
      },
      [&](const deltic_step_tensors* y, const deltic_workspace* w) {
        return deltic_step(given, y, w, nullptr);
      });
}

}  // namespace

void fuzz_descriptors(const uint8_t* data, size_t size) {
  Bytes bytes(data, size);
  // Numbers as they were with 13 operations, so that stored inputs mean what they meant; some ops
  // have two.
  constexpr int32_t kOps[] = {
      0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 1, DELTIC_MOVE, DELTIC_COMMIT, DELTIC_STEP};
  static_assert(DELTIC_NUM_OPS == 16, "a new operation is drawn too");
  const auto op = static_cast<deltic_op>(kOps[bytes.below(18)]);
  if (op == DELTIC_STEP) {
    fuzz_step(bytes);
  } else if (op == DELTIC_MOVE || op == DELTIC_COMMIT) {
    fuzz_states(bytes, op == DELTIC_COMMIT);
  } else if (op == DELTIC_FORWARD || op == DELTIC_DECODE) {
    fuzz_sequence_op(bytes, op);
  } else if (op == DELTIC_BACKWARD) {
    fuzz_backward(bytes);
  } else if (op == DELTIC_CONV) {
    fuzz_conv(bytes);
  } else {
    fuzz_block(bytes, op);
  }
}

const FuzzCounts& fuzz_counts() { return counts; }

}  // namespace deltic::test
