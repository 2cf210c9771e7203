// Eager calls straight from Python's objects. Through torch's dispatcher a call of 15 arguments
// takes 8 us of a Xeon besides its launches: the schema's parser, boxing, a handle per tensor. The
// way here is DLPack's table of C functions, which a tensor's class has. It is taken by the plain
// case alone, whatever is special goes by the operator: where a function here returns None, nothing
// was done, and the caller calls the operator, whose errors are ours too.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bridge.h"
#include "python_abi.h"

namespace deltic::bridge {
namespace {

// DLPack 1.x, as far as it is used: its ABI is frozen within a major version.
struct DlTensor {
  void* data;
  int32_t device_type, device_index;
  int32_t rank;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DlApi {
  uint32_t major, minor;
  DlApi* older;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*from_object)(void* object, DlTensor* out);
  int (*current_stream)(int32_t device_type, int32_t device_index, void** stream);
};
enum : int32_t { kDlCpu = 1, kDlCuda = 2 };

// A reference to an object.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : x_(owned) {}
  Object(Object&& other) noexcept : x_(other.release()) {}
  Object& operator=(Object&& other) noexcept {
    std::swap(x_, other.x_);
    return *this;
  }
  ~Object() {
    if (x_ != nullptr) Py_DecRef(x_);
  }
  PyObject* get() const { return x_; }
  PyObject* release() {
    PyObject* const x = x_;
    x_ = nullptr;
    return x;
  }
  explicit operator bool() const { return x_ != nullptr; }

 private:
  PyObject* x_ = nullptr;
};

// What Python hands over once, in the order of `direct` in _library.py. References live as long as
// the process.
struct Python {
  PyObject *none, *tensor, *parameter, *number, *whole, *text;  // types
  PyObject* api;                                                // a capsule
  PyObject* questions;  // (function, answer of the plain case)...
  PyObject* facts;      // (dict, name, value of the plain case)...
  PyObject *is_grad_enabled, *yes, *no, *requires_grad, *is_neg;
  PyObject *empty_like, *contiguous;        // keywords
  PyObject *new_empty, *float32, *float64;  // keywords
  PyObject *empty_cuda, *empty_cpu;         // (sizes, strides, dtype); None: this torch has none
  PyObject* dtypes;                         // of deltic_dtype, as far as outputs have them
  PyObject* increment_version;
  PyObject *sample, *address;  // a tensor, and where its memory is
};
constexpr ptrdiff_t kHanded = sizeof(Python) / sizeof(PyObject*);
Python g_python;
const DlApi* g_api = nullptr;
struct Question {
  PyObject *function, *answer;
};
struct Fact {
  PyObject *dict, *name, *value;
};
std::vector<Question> g_questions;
std::vector<Fact> g_facts;

bool is_type(PyObject* x, const PyObject* type) {
  PyObject* const found = PyObject_Type(x);
  Py_DecRef(found);  // a type outlives its objects
  return found == type;
}

// Whether torch does nothing around calls now: no mode, transform, tracer, autocast or profiler.
bool is_plain() {
  for (const Fact& f : g_facts) {
    if (PyDict_GetItem(f.dict, f.name) != f.value) return false;
  }
  for (const Question& q : g_questions) {
    const Object answer(PyObject_CallObject(q.function, nullptr));
    if (answer.get() != q.answer) return false;
  }
  return true;
}

// The arguments of a call over sequences, in their order.
enum class Kind { input, given, flags };
struct Place {
  deltic_tensor deltic_tensors::*tensor;
  Kind kind;
};
constexpr Place kPlaces[] = {{&deltic_tensors::q, Kind::input},
                             {&deltic_tensors::k, Kind::input},
                             {&deltic_tensors::v, Kind::input},
                             {&deltic_tensors::beta, Kind::input},
                             {&deltic_tensors::g, Kind::input},
                             {&deltic_tensors::gv, Kind::input},
                             {&deltic_tensors::A_log, Kind::input},
                             {&deltic_tensors::dt_bias, Kind::input},
                             {&deltic_tensors::initial_state, Kind::input},
                             {&deltic_tensors::state_pool, Kind::given},
                             {&deltic_tensors::read_index, Kind::given},
                             {&deltic_tensors::write_index, Kind::given},
                             {&deltic_tensors::write_pool, Kind::given},
                             {&deltic_tensors::has_initial_state, Kind::flags},
                             {&deltic_tensors::accepted, Kind::given},
                             {&deltic_tensors::parents, Kind::given},
                             {&deltic_tensors::cu_seqlens, Kind::input},
                             {&deltic_tensors::cu_seqlens_host, Kind::input},
                             {&deltic_tensors::o, Kind::given}};
constexpr int kTensors = std::size(kPlaces);
enum : int { kV = 2, kInitialState = 8, kStatePool = 9, kWritePool = 12, kOut = 18 };
// Behind them: scale, lower_bound, then the options that words are made of.
enum : int { kGate, kBetaForm, kStateLayout, kNorm, kFinal, kNumOptions };
enum : int { kScale = kTensors, kLowerBound, kOptions, kImpl = kOptions + kNumOptions, kNullSlot };
constexpr int kArguments = kNullSlot + 1;

int32_t dtype_of(const DlTensor& x, Kind kind) {
  enum : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6 };
  if (x.lanes != 1) return -1;
  if (kind == Kind::flags)
    return x.bits == 8 && (x.code == kBool || x.code == kUint) ? DELTIC_U8 : -1;
  switch (x.code << 8 | x.bits) {
    case kFloat << 8 | 32:
      return DELTIC_F32;
    case kBfloat << 8 | 16:
      return DELTIC_BF16;
    case kFloat << 8 | 16:
      return DELTIC_F16;
    case kFloat << 8 | 64:
      return DELTIC_F64;
    case kInt << 8 | 32:
      return DELTIC_I32;
    case kInt << 8 | 64:
      return DELTIC_I64;
    default:
      return -1;
  }
}

// False: the operator is to look at it.
bool view(PyObject* x, Kind kind, deltic_tensor& t) {
  DlTensor dl;
  if (!is_type(x, g_python.tensor) && !is_type(x, g_python.parameter)) return false;
  const Object negated(PyObject_CallFunctionObjArgs(g_python.is_neg, x, nullptr));
  if (negated.get() != g_python.no || g_api->from_object(x, &dl) != 0) return false;
  t.dtype = dtype_of(dl, kind);
  if (t.dtype < 0 || dl.rank < 1 || dl.rank > DELTIC_MAX_RANK || dl.strides == nullptr)
    return false;
  if (dl.device_type != kDlCpu && dl.device_type != kDlCuda) return false;
  t.device_type = dl.device_type == kDlCpu ? DELTIC_CPU : DELTIC_CUDA;
  t.device_index = dl.device_type == kDlCpu ? 0 : dl.device_index;
  t.data = static_cast<std::byte*>(dl.data) + dl.byte_offset;
  t.rank = dl.rank;
  std::copy(dl.shape, dl.shape + dl.rank, t.shape);
  std::copy(dl.strides, dl.strides + dl.rank, t.strides);
  // The operator copies such ones.
  return kind != Kind::input || t.shape[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1;
}

bool needs_gradient(PyObject* x) {
  const Object answer(PyObject_GetAttr(x, g_python.requires_grad));
  return answer.get() != g_python.no;
}

// Adds a word, or its value; false: the operator is to look at it.
bool add_text(PyObject* x, const char* key, std::string& words) {
  if (!is_type(x, g_python.text)) return false;
  const Object bytes(PyUnicode_AsUTF8String(x));
  char* text = nullptr;
  // Without a place for the size it refuses zero bytes, at which the text would end here.
  if (!bytes || PyBytes_AsStringAndSize(bytes.get(), &text, nullptr) != 0) return false;
  const std::string value = text;
  if (value.empty() || value.find_first_of(" =") != std::string::npos) return false;
  words += key + value;
  return true;
}
bool add_flag(PyObject* x, const char* word, std::string& words) {
  if (x == g_python.yes) words += word;
  return x == g_python.yes || x == g_python.no;
}

// Options as Python's objects, known by their addresses: the references keep them.
struct Known {
  std::array<PyObject*, kNumOptions> objects{};
  deltic_options options{};
  bool final_state = false;
};
// False: no such options.
bool options_of(PyObject* const* objects, Known& found) {
  constexpr size_t kKept = 16;  // a program has a few
  static std::mutex mutex;      // not every interpreter has one lock for all
  static std::array<Known, kKept> known;
  static size_t oldest = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Known& k : known) {
    if (std::equal(k.objects.begin(), k.objects.end(), objects)) return found = k, true;
  }
  std::string words;
  if (!add_text(objects[kGate], "gate=", words) || !add_text(objects[kBetaForm], " beta=", words) ||
      !add_text(objects[kStateLayout], " layout=", words) ||
      !add_flag(objects[kNorm], " qk_l2norm", words) ||
      !add_flag(objects[kFinal], " final", words)) {
    return false;
  }
  const Options parsed("direct", words, {}, {});
  Known& k = known[oldest];
  oldest = (oldest + 1) % kKept;
  for (PyObject* const x : k.objects) {
    if (x != nullptr) Py_DecRef(x);
  }
  std::copy(objects, objects + kNumOptions, k.objects.begin());
  for (PyObject* const x : k.objects) Py_IncRef(x);
  k.options = parsed.c, k.final_state = parsed.final_state;
  found = k;
  return true;
}

bool number(PyObject* x, int32_t& has, float& value) {
  if (x == g_python.none) return true;
  if (!is_type(x, g_python.number)) return false;
  const double given = PyFloat_AsDouble(x);
  if (!(std::abs(given) <= std::numeric_limits<float>::max())) return false;
  has = 1, value = static_cast<float>(given);
  return true;
}

// A bool is no slot, nor is what 32 bits do not hold.
bool slot(PyObject* x, int32_t& has, int32_t& value) {
  if (x == g_python.none) return true;
  if (!is_type(x, g_python.whole)) return false;
  const long long given = PyLong_AsLongLong(x);
  if (given == -1 && PyErr_Occurred() != nullptr) return false;
  if (given != static_cast<int32_t>(given)) return false;
  has = 1, value = static_cast<int32_t>(given);
  return true;
}

// Also where the size is 1: torch.empty_like keeps strides.
bool is_contiguous(const deltic_tensor& t) {
  int64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    if (t.strides[i] != stride) return false;
    stride *= std::max<int64_t>(t.shape[i], 1);
  }
  return true;
}

// By what torch's own compiled graphs call: past the parser and the dispatcher, 0.6 us less of a
// Xeon than empty_like (1.7). On the current device alone.
PyObject* function_at_once(const deltic_tensor& planned) {
  const bool is_cuda = planned.device_type == DELTIC_CUDA;
  const bool is_taken =
      planned.rank == 4 && planned.dtype <= DELTIC_F64 && (!is_cuda || is_current_device(planned));
  return !is_taken ? g_python.none : is_cuda ? g_python.empty_cuda : g_python.empty_cpu;
}
// Sizes, strides and dtype as arguments.
Object arguments_at_once(const deltic_tensor& planned) {
  struct KnownSizes {
    int32_t dtype = -1;
    int64_t shape[4], strides[4];
    PyObject* args = nullptr;

    bool operator==(const deltic_tensor& t) const {
      return dtype == t.dtype && std::equal(shape, shape + 4, t.shape) &&
             std::equal(strides, strides + 4, t.strides);
    }
  };
  constexpr size_t kKept = 16;
  static std::mutex mutex;
  static std::array<KnownSizes, kKept> known;
  static size_t oldest = 0;
  // Nothing of Python's is made or freed under the lock: it may run finalizers, and they may call.
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto* found = std::find(known.begin(), known.end(), planned);
    if (found != known.end()) {
      Py_IncRef(found->args);
      return Object(found->args);
    }
  }
  Object sizes(PyTuple_New(4)), strides(PyTuple_New(4)), args(PyTuple_New(3));
  for (int i = 0; i < 4; ++i) {
    PyTuple_SetItem(sizes.get(), i, PyLong_FromLongLong(planned.shape[i]));
    PyTuple_SetItem(strides.get(), i, PyLong_FromLongLong(planned.strides[i]));
  }
  PyObject* const dtype = PyTuple_GetItem(g_python.dtypes, planned.dtype);
  Py_IncRef(dtype);
  PyTuple_SetItem(args.get(), 0, sizes.release());
  PyTuple_SetItem(args.get(), 1, strides.release());
  PyTuple_SetItem(args.get(), 2, dtype);
  KnownSizes made{.dtype = planned.dtype, .shape = {}, .strides = {}, .args = args.get()};
  std::copy(planned.shape, planned.shape + 4, made.shape);
  std::copy(planned.strides, planned.strides + 4, made.strides);
  Py_IncRef(made.args);  // the list's
  {
    const std::lock_guard<std::mutex> lock(mutex);
    std::swap(known[oldest], made);
    oldest = (oldest + 1) % kKept;
  }
  if (made.args != nullptr) Py_DecRef(made.args);
  return args;
}

// An output with the shape of `like`, contiguous.
Object make_like(PyObject* like, const deltic_tensor& t) {
  if (is_contiguous(t))
    return Object(PyObject_CallFunctionObjArgs(g_python.empty_like, like, nullptr));
  const Object args(PyTuple_New(1));
  Py_IncRef(like);
  PyTuple_SetItem(args.get(), 0, like);
  return Object(PyObject_Call(g_python.empty_like, args.get(), g_python.contiguous));
}
// Another shape and dtype, on the device of `beside`.
Object make(PyObject* beside, const deltic_tensor& planned) {
  const Object args(PyTuple_New(2));
  Object shape(PyTuple_New(planned.rank));
  for (int32_t i = 0; i < planned.rank; ++i) {
    PyTuple_SetItem(shape.get(), i, PyLong_FromLongLong(planned.shape[i]));
  }
  Py_IncRef(beside);
  PyTuple_SetItem(args.get(), 0, beside), PyTuple_SetItem(args.get(), 1, shape.release());
  PyObject* const dtype = planned.dtype == DELTIC_F64 ? g_python.float64 : g_python.float32;
  return Object(PyObject_Call(g_python.new_empty, args.get(), dtype));
}
// What is planned: at once, or the other way.
template <class Make>
Object make_output(const deltic_tensor& planned, Make other) {
  PyObject* const function = function_at_once(planned);
  if (function == g_python.none) return other();
  const Object args = arguments_at_once(planned);
  return Object(PyObject_Call(function, args.get(), nullptr));
}
bool take_memory(const Object& made, deltic_tensor& planned) {
  DlTensor dl;
  if (!made || g_api->from_object(made.get(), &dl) != 0) return false;
  planned.data = static_cast<std::byte*>(dl.data) + dl.byte_offset;
  return true;
}

// All that the size of a workspace follows from, but settings of the process: a call that the
// answer is too small for is refused.
struct Asked {
  static constexpr size_t kWords = kTensors * (1 + 2 * 4) + sizeof(deltic_options) / 8 + 3;
  std::array<uint64_t, kWords> words;
  size_t count = 0;
  uint64_t bytes = 0;

  void add(uint64_t word) { words[count++] = word; }
  bool operator==(const Asked& other) const {
    return count == other.count && std::memcmp(words.data(), other.words.data(), count * 8) == 0;
  }
};
// False: one of more than four dimensions, which nothing takes.
bool add_tensor(Asked& asked, int place, const deltic_tensor& t) {
  constexpr uintptr_t kAlignment = 64;  // implementations look at addresses so far
  if (t.rank > 4) return false;
  asked.add(static_cast<uint64_t>(place) | static_cast<uint64_t>(t.rank) << 8 |
            static_cast<uint64_t>(t.dtype) << 16 |
            reinterpret_cast<uintptr_t>(t.data) % kAlignment << 24 |
            static_cast<uint64_t>(t.device_type) << 31 |
            static_cast<uint64_t>(static_cast<uint32_t>(t.device_index)) << 32);
  for (int32_t i = 0; i < t.rank; ++i) {
    asked.add(static_cast<uint64_t>(t.shape[i])), asked.add(static_cast<uint64_t>(t.strides[i]));
  }
  return true;
}

struct DirectCall {
  bool is_decode = false;
  deltic_options options{};
  deltic_tensors t;  // read() clears it
  void* stream = nullptr;

  // Whether the plain case is all there is to it.
  bool read(PyObject* const* args) {
    Known found;
    if (args[kImpl] != g_python.none || !options_of(args + kOptions, found)) return false;
    options = found.options, has_final = found.final_state;
    if (!number(args[kScale], options.has_scale, options.scale) ||
        !number(args[kLowerBound], options.has_lower_bound, options.lower_bound) ||
        !slot(args[kNullSlot], options.has_null_slot, options.null_slot)) {
      return false;
    }
    deltic_tensors_init(&t, sizeof t);
    const Object grad(PyObject_CallObject(g_python.is_grad_enabled, nullptr));
    const bool may_train = grad.get() != g_python.no;
    for (int i = 0; i < kTensors; ++i) {
      if (args[i] == g_python.none) continue;
      deltic_tensor& x = t.*kPlaces[i].tensor;
      if (!view(args[i], kPlaces[i].kind, x) || (may_train && needs_gradient(args[i])))
        return false;
      if (!add_tensor(asked, i, x)) return false;
    }
    if (t.q.rank != 4 || t.v.rank != 4) return false;
    // A beta per value column is another operator's, and a pool has the last states.
    if (!is_decode && t.beta.rank == 4) return false;
    if (has_final && t.state_pool.rank != 0) return false;
    options.num_threads = t.q.device_type == DELTIC_CPU ? deltic_torch_get_num_threads() : 1;
    stream = stream_of(t.q);
    return true;
  }

  // Bytes of workspace; false: the call is wrong.
  bool ask(uint64_t& bytes) {
    static thread_local std::array<Asked, 4> kept;
    static thread_local size_t oldest = 0;
    asked.add(reinterpret_cast<uintptr_t>(stream));
    asked.add(static_cast<uint64_t>(is_decode) | static_cast<uint64_t>(has_final) << 1);
    std::memcpy(&asked.words[asked.count], &options, sizeof options);
    asked.count += sizeof options / 8;
    for (const Asked& known : kept) {
      if (known == asked) return bytes = known.bytes, true;
    }
    const auto query = is_decode ? deltic_decode_workspace : deltic_forward_workspace;
    if (query(&options, &t, stream, &bytes) != DELTIC_OK) return false;
    asked.bytes = bytes, kept[oldest] = asked;
    oldest = (oldest + 1) % kept.size();
    return true;
  }

  bool has_final = false;
  Asked asked;
};
static_assert(sizeof(deltic_options) % 8 == 0);

bool increment_versions(PyObject* const* args) {
  Object written[3];
  ptrdiff_t count = 0;
  for (const int i : {kStatePool, kWritePool, kOut}) {
    if (args[i] == g_python.none) continue;
    Py_IncRef(args[i]);
    written[count++] = Object(args[i]);
  }
  if (count == 0) return true;
  const Object tuple(PyTuple_New(count));
  for (ptrdiff_t i = 0; i < count; ++i) PyTuple_SetItem(tuple.get(), i, written[i].release());
  const Object done(PyObject_CallFunctionObjArgs(g_python.increment_version, tuple.get(), nullptr));
  return static_cast<bool>(done);
}

// (o, final state or None); null: nothing was done, and an error may be set.
PyObject* run(bool is_decode, PyObject* const* args) {
  DirectCall call;
  call.is_decode = is_decode;
  if (is_logged() || deltic_get_checked() != 0 || !is_plain() || !call.read(args)) return nullptr;
  deltic_tensors& t = call.t;
  const bool has_out = args[kOut] != g_python.none;
  plan_outputs(t, call.options, call.has_final);
  uint64_t bytes = 0;
  if (!call.ask(bytes)) return nullptr;
  Object o, final_state;
  if (!has_out) {
    o = make_output(t.o, [&] { return make_like(args[kV], t.v); });
    if (!take_memory(o, t.o)) return nullptr;
  }
  if (call.has_final) {
    const bool is_like =
        t.initial_state.rank == 4 &&
        std::equal(t.final_state.shape, t.final_state.shape + 4, t.initial_state.shape);
    if (!is_like && t.initial_state.rank != 0) return nullptr;
    final_state = make_output(t.final_state, [&] {
      return is_like ? make_like(args[kInitialState], t.initial_state)
                     : make(args[0], t.final_state);
    });
    if (!take_memory(final_state, t.final_state)) return nullptr;
  }
  const Workspace workspace(bytes, t.q);
  PyThreadState* const unlocked = PyEval_SaveThread();
  const auto function = is_decode ? deltic_decode : deltic_forward;
  const deltic_status status = function(&call.options, &t, workspace.c(), call.stream);
  PyEval_RestoreThread(unlocked);
  if (status != DELTIC_OK) return nullptr;
  Object result(PyTuple_New(2));
  PyObject* const first = has_out ? args[kOut] : o.get();
  PyObject* const second = call.has_final ? final_state.get() : g_python.none;
  Py_IncRef(first), Py_IncRef(second);
  PyTuple_SetItem(result.get(), 0, first), PyTuple_SetItem(result.get(), 1, second);
  // Behind the call, as with the operator; it was made, whatever is wrong with a version.
  if (!increment_versions(args)) PyErr_Clear();
  return result.release();
}

// Whether the table says of a tensor what torch does: [3, 2] in bf16, transposed.
bool is_right(const DlApi& api) {
  DlTensor x{};
  if (api.from_object(g_python.sample, &x) != 0) return false;
  return static_cast<std::byte*>(x.data) + x.byte_offset == PyLong_AsVoidPtr(g_python.address) &&
         x.device_type == kDlCpu && dtype_of(x, Kind::input) == DELTIC_BF16 && x.rank == 2 &&
         x.shape[0] == 3 && x.shape[1] == 2 && x.strides != nullptr && x.strides[0] == 1 &&
         x.strides[1] == 3;
}

template <bool kDecode>
PyObject* call(PyObject*, PyObject* const* args, ptrdiff_t count) {
  PyObject* result = nullptr;
  if (count == kArguments) {
    try {
      result = run(kDecode, args);
    } catch (const std::exception&) {  // such as memory; the operator says it
    }
  }
  if (result != nullptr) return result;
  PyErr_Clear();
  Py_IncRef(g_python.none);
  return g_python.none;
}

}  // namespace
}  // namespace deltic::bridge

using namespace deltic::bridge;

// Whether this process has an interpreter whose functions we see.
extern "C" DELTIC_API int32_t deltic_torch_has_python() {
  return Py_IncRef != nullptr && PyCFunction_NewEx != nullptr && PyEval_SaveThread != nullptr;
}

// The functions (forward, decode) for what Python hands over; None where this torch has no table of
// functions that we know.
extern "C" DELTIC_API PyObject* deltic_torch_direct(PyObject* handed) {
  constexpr int kFastCall = 0x80;  // METH_FASTCALL
  static PyMethodDef methods[] = {{"forward", call<false>, kFastCall, nullptr},
                                  {"decode", call<true>, kFastCall, nullptr}};
  PyObject** const to = &g_python.none;
  for (ptrdiff_t i = 0; i < kHanded; ++i) to[i] = PyTuple_GetItem(handed, i);
  Py_IncRef(handed);
  const auto* api =
      static_cast<const DlApi*>(PyCapsule_GetPointer(g_python.api, "dlpack_exchange_api"));
  while (api != nullptr && api->major != 1) api = api->older;
  if (api == nullptr || api->from_object == nullptr || !is_right(*api)) {
    PyErr_Clear();
    Py_IncRef(g_python.none);
    return g_python.none;
  }
  for (ptrdiff_t i = 0; i < PyTuple_Size(g_python.questions); ++i) {
    PyObject* const pair = PyTuple_GetItem(g_python.questions, i);
    g_questions.push_back({PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1)});
  }
  for (ptrdiff_t i = 0; i < PyTuple_Size(g_python.facts); ++i) {
    PyObject* const three = PyTuple_GetItem(g_python.facts, i);
    g_facts.push_back(
        {PyTuple_GetItem(three, 0), PyTuple_GetItem(three, 1), PyTuple_GetItem(three, 2)});
  }
  g_api = api;
  PyObject* const functions = PyTuple_New(2);
  for (ptrdiff_t i = 0; i < 2; ++i) {
    PyTuple_SetItem(functions, i, PyCFunction_NewEx(&methods[i], nullptr, nullptr));
  }
  return functions;
}
