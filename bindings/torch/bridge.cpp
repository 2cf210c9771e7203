// Between torch tensors and the structs of the C ABI.
#include "bridge.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>

namespace deltic::bridge {
namespace {

thread_local int32_t t_last_status = DELTIC_OK;

std::atomic<int32_t> g_num_threads{0};  // 0: torch's

int32_t num_threads() {
  const int32_t n = g_num_threads.load(std::memory_order_relaxed);
  if (n > 0) return n;
  return static_cast<int32_t>(std::min<uint32_t>(torch::stable::get_num_threads(), 4096));
}

// Where the library's lines go, and the tensors that this thread's call has been given: kept only
// while somebody listens.
std::atomic<deltic_torch_log_fn> g_log{nullptr};
thread_local std::string t_tensors;

// The operator that this thread is in, the function that it was called by, and where notes about
// copies go.
thread_local std::string t_operator, t_function;
std::atomic<deltic_torch_note_fn> g_note{nullptr};

// The library's own names of arguments that are called otherwise in Python, those of the
// convolution alone behind its name.
constexpr std::pair<std::string_view, const char*> kArguments[] = {
    {"cu_seqlens_host", "cu_seqlens_cpu"},
    {"chunk", "chunk_size"},
    {"segment_length", "split"},
    {"final_state", "output_final_state"},
    {"gate_form", "gate"},
    {"ckpt_cu", "checkpoints.cu"},
    {"ckpt_tokens", "checkpoints.tokens"},
    {"ckpt_slots", "checkpoints.slots"},
    {"ckpt_states", "checkpoints.states"},
    {"o", "out"},
    {"conv.state_pool", "state"},
    {"conv.write_pool", "write_state"},
    {"conv.read_index", "state_index"}};
// Those of a step's parts; without a name of their own they are called as in the part's own call.
constexpr std::pair<std::string_view, const char*> kStepArguments[] = {
    {"conv.weight", "conv_weight"},    {"conv.bias", "conv_bias"},
    {"conv.state_pool", "conv_state"}, {"conv.write_pool", "conv_write_state"},
    {"conv.read_index", "conv_index"}, {"conv.write_index", "conv_write_index"},
    {"norm.weight", "norm_weight"}};

// Of blocks with several outputs, which stand together in `out`; without an operator: of all.
struct Output {
  std::string_view op, known;
  const char* ours;
};
constexpr Output kOutputs[] = {{"l2norm_out_", "out", "out.y"},
                               {"scores_inverse_out_", "out", "out.scores"},
                               {"scores_inverse_out_", "a", "out.inverse"},
                               {"", "inverse", "out.inverse"},
                               {"", "rstd", "out.rstd"},
                               {"", "w", "out.w"},
                               {"", "u", "out.u"},
                               {"", "kg", "out.kg"},
                               {"", "qg", "out.qg"}};

const char* argument_name(std::string_view op, const char* name) {
  if (op.starts_with("step")) {
    for (const auto& [known, ours] : kStepArguments) {
      if (known == name) return ours;
    }
    if (const char* point = std::strchr(name, '.'); point != nullptr) name = point + 1;
  }
  if (op.ends_with("_out_")) {
    for (const Output& x : kOutputs) {
      if (name == x.known && (x.op.empty() || x.op == op)) return x.ours;
    }
  }
  const std::string of_conv = op.starts_with("conv") ? std::string("conv.") + name : "";
  for (const auto& [known, ours] : kArguments) {
    if (known == name || known == of_conv) return ours;
  }
  return name;
}

// Whether a text's first word is an operation's name, or ours where no operation has one.
bool names_operation(std::string_view word) {
  if (word == "deltic") return true;
  constexpr std::string_view kBackward = "_backward";
  if (word.ends_with(kBackward)) word.remove_suffix(kBackward.size());
  for (int32_t op = 0; op < DELTIC_NUM_OPS; ++op) {
    if (word == deltic_op_name(op)) return true;
  }
  return false;
}

// Whether an error is about the dtype of an output, which has the shape it needs and the dtype that
// was asked for.
bool refuses_dtype(std::string_view operation, std::string_view argument, std::string_view rest) {
  const bool is_output =
      argument == "out" || argument == "w" || (operation == "scores_inverse" && argument == "a");
  if (!is_output || t_operator.ends_with("out_") || t_operator == "step_") return false;
  const size_t got = rest.rfind("got ");
  if (got == std::string_view::npos) return false;
  const std::string_view found = rest.substr(got + 4);
  for (const char* type : {"fp32", "bf16", "fp16", "fp64", "int"}) {
    if (found.starts_with(type)) return true;
  }
  return false;
}

// Another argument that an error speaks of, in our words: it stands behind one of these, and before
// a comma or the end.
void rename_other(std::string& text) {
  for (const std::string_view before : {" overlap with ", " as "}) {
    const size_t found = text.rfind(before);
    if (found == std::string::npos) continue;
    const size_t begin = found + before.size(), end = std::min(text.find(',', begin), text.size());
    const std::string name = text.substr(begin, end - begin);
    text.replace(begin, end - begin, argument_name(t_operator, name.c_str()));
  }
}

void replace(std::string& text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  if (at != std::string::npos) text.replace(at, from.size(), to);
}

// What the library expects, in the words of torch's users: a bool is its uint8, and only a table of
// slots goes with accepted counts.
void rename_expected(std::string_view argument, std::string& text) {
  replace(text, "expected uint8 (bool)", "expected bool or uint8");
  if (argument != "read_index") return;
  const std::string_view one = "expected one dimension, got shape [";
  const size_t comma = text.find(", ", one.size());
  if (!text.starts_with(one) || comma == std::string::npos ||
      text.find(", ", comma + 1) != std::string::npos) {
    return;
  }
  replace(text, "one dimension", "one dimension (a table [N,T'] needs accepted)");
}

// A text of the library's, `operation: argument: rest`, as the function that was called would say
// it. Texts of other forms stay.
std::string in_our_words(const std::string& text) {
  const size_t first = text.find(": ");
  if (first == std::string::npos || t_function.empty()) return text;
  const std::string operation = text.substr(0, first);
  if (!names_operation(operation) && operation != t_function) return text;
  std::string rest = text.substr(first + 2);
  const size_t second = rest.find(": ");
  if (second == std::string::npos || rest.find(' ') < second) return t_function + ": " + rest;
  std::string argument = argument_name(t_operator, rest.substr(0, second).c_str());
  rest.erase(0, second + 2);
  rename_other(rest);
  rename_expected(argument, rest);
  if (refuses_dtype(operation, argument, rest)) argument = "dtype";
  if (rest.find("expected stride 1 in the last dimension") != std::string::npos) {
    rest += " (it is written in place, so no copy will do: " + argument + ".contiguous() has it)";
  }
  return t_function + ": " + argument + ": " + rest;
}

struct TypePair {
  int32_t torch;
  int32_t deltic;
};
const TypePair kTypes[] = {
    {aoti_torch_dtype_float32(), DELTIC_F32}, {aoti_torch_dtype_bfloat16(), DELTIC_BF16},
    {aoti_torch_dtype_float16(), DELTIC_F16}, {aoti_torch_dtype_float64(), DELTIC_F64},
    {aoti_torch_dtype_int32(), DELTIC_I32},   {aoti_torch_dtype_int64(), DELTIC_I64}};
const int32_t kCpu = aoti_torch_device_type_cpu();
const int32_t kCuda = aoti_torch_device_type_cuda();
const int32_t kByte = aoti_torch_dtype_uint8();
const int32_t kBool = aoti_torch_dtype_bool();

const char* foreign_type_name(int32_t type) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_uint8(), "uint8"},
      {aoti_torch_dtype_uint16(), "uint16"},
      {aoti_torch_dtype_uint32(), "uint32"},
      {aoti_torch_dtype_uint64(), "uint64"},
      {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},
      {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex32(), "complex32"},
      {aoti_torch_dtype_complex64(), "complex64"},
      {aoti_torch_dtype_complex128(), "complex128"},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2"}};
  for (const auto& [known, name] : names) {
    if (known == type) return name;
  }
  return "another dtype";
}

// What the library would say to a dtype that it has no number for: it takes other dtypes for
// numbers, indices and states.
const char* types_of(std::string_view name) {
  if (name.starts_with("cu_seqlens") || name.ends_with("_index") || name == "ckpt_cu" ||
      name == "ckpt_tokens" || name == "ckpt_slots" || name == "accepted" || name == "parents" ||
      name == "recurrent_from" || name == "positions") {
    return "int32 or int64";
  }
  if (name == "has_initial_state") return "bool or uint8";
  return "fp32, bf16 or fp16";
}

// Arguments whose elements count, in whatever shape: one number may come without a dimension.
bool has_any_shape(std::string_view name) { return name == "A_log" || name == "dt_bias"; }

// Says once for every function and argument that a tensor is copied.
void note_copy(const std::string& function, const char* name, int64_t stride) {
  const deltic_torch_note_fn listener = g_note.load();
  if (listener == nullptr) return;
  const std::string argument = argument_name(t_operator, name);
  {
    static std::mutex mutex;
    static std::set<std::string>* said = new std::set<std::string>;  // no end: threads outlive it
    const std::lock_guard<std::mutex> lock(mutex);
    if (!said->insert(function + "." + argument).second) return;
  }
  listener((function + ": " + argument +
            ": copied in every such call, because its last dimension has stride " +
            std::to_string(stride) + " (" + argument + ".contiguous() before spares that)")
               .c_str());
}

void note(const char* name, const deltic_tensor& t) {
  const char* types[] = {"fp32",  "bf16",  "fp16", "fp64",
                         "int32", "int64", "uint8"};  // as deltic_dtype
  t_tensors += t_tensors.empty() ? "" : ", ";
  t_tensors += std::string(name) + " " + types[t.dtype] + " " + shape_text(t, ",");
}

int32_t torch_device_type(const deltic_tensor& t) {
  return t.device_type == DELTIC_CPU ? kCpu : kCuda;
}

Tensor empty(int32_t rank, const int64_t* shape, const int64_t* strides, int32_t type,
             const deltic_tensor& where) {
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(rank, shape, strides, type, torch_device_type(where),
                               where.device_index, &handle) == AOTI_TORCH_SUCCESS) {
    return Tensor(handle);
  }
  // The call was checked, so memory is all that can be missing. torch's own text is a C++ stack.
  uint64_t bytes = aoti_torch_dtype_element_size(type);
  for (int32_t i = 0; i < rank; ++i) bytes *= static_cast<uint64_t>(shape[i]);
  const std::string place = where.device_type == DELTIC_CPU
                                ? "the CPU"
                                : "CUDA device " + std::to_string(where.device_index);
  fail(DELTIC_OUT_OF_MEMORY, "deltic: memory: expected " + std::to_string(bytes) + " bytes on " +
                                 place + ", got none: out of memory");
}

Tensor bytes_tensor(uint64_t bytes, const deltic_tensor& where) {
  const auto size = static_cast<int64_t>(bytes);
  const int64_t one = 1;
  return empty(1, &size, &one, kByte, where);
}

// Scratch of a thread's small calls, kept: fresh pages cost 3 us of a call with one token. Forward
// needs 0.4 MB at K = 64 and 1.3 MB at K = 256 on one thread; pages that no call touches stay
// virtual. An operator does not call another one, so one block per thread is enough.
constexpr uint64_t kSmallBytes = 2 << 20;
void* small_memory() {
  struct Free {
    void operator()(void* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  thread_local std::unique_ptr<void, Free> memory(
      ::operator new (kSmallBytes, std::align_val_t{64}));
  return memory.get();
}

}  // namespace

void fail(deltic_status status, const std::string& text) {
  t_last_status = status;
  throw std::runtime_error(in_our_words(text));
}

void check(deltic_status status) {
  if (status != DELTIC_OK) fail(status, deltic_last_error());
}

namespace {

deltic_tensor view_of(const char* op, const char* name, const Tensor& tensor, bool may_be_flags) {
  const AtenTensorHandle handle = tensor.get();
  deltic_tensor t{};
  int32_t type = 0, device = 0;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  bool is_defined = false;
  DELTIC_TORCH_CHECK(aoti_torch_is_defined(handle, &is_defined));
  if (!is_defined) {  // None for an argument that is no optional one
    fail(DELTIC_INVALID_ARGUMENT, std::string(op) + ": " + name + ": expected a tensor, got none");
  }
  DELTIC_TORCH_CHECK(aoti_torch_get_dtype(handle, &type));
  DELTIC_TORCH_CHECK(aoti_torch_get_device_type(handle, &device));
  DELTIC_TORCH_CHECK(aoti_torch_get_dim(handle, &rank));
  DELTIC_TORCH_CHECK(aoti_torch_get_sizes(handle, &sizes));
  DELTIC_TORCH_CHECK(aoti_torch_get_strides(handle, &strides));
  DELTIC_TORCH_CHECK(aoti_torch_get_data_ptr(handle, &t.data));
  const TypePair* pair = std::find_if(std::begin(kTypes), std::end(kTypes),
                                      [&](const TypePair& p) { return p.torch == type; });
  const bool is_flags = may_be_flags && (type == kByte || type == kBool);
  if (pair == std::end(kTypes) && !is_flags) {
    fail(DELTIC_INVALID_ARGUMENT, std::string(op) + ": " + name + ": expected " + types_of(name) +
                                      ", got " + foreign_type_name(type));
  }
  t.dtype = is_flags ? DELTIC_U8 : pair->deltic;
  if (device == kCuda) {
    t.device_type = DELTIC_CUDA;
    DELTIC_TORCH_CHECK(aoti_torch_get_device_index(handle, &t.device_index));
  } else if (device != kCpu) {
    fail(DELTIC_UNSUPPORTED,
         std::string(op) + ": " + name + ": expected a CPU or CUDA tensor, got another device's");
  }
  t.rank = static_cast<int32_t>(std::min<int64_t>(rank, std::numeric_limits<int32_t>::max()));
  const int64_t held = std::min<int64_t>(rank, DELTIC_MAX_RANK);
  std::copy(sizes, sizes + held, t.shape);
  std::copy(strides, strides + held, t.strides);
  if (rank == 0) {  // the library's sign for no tensor
    if (!has_any_shape(name)) {
      fail(DELTIC_INVALID_ARGUMENT,
           std::string(op) + ": " + name + ": expected at least one dimension, got shape []");
    }
    t.rank = 1, t.shape[0] = 1, t.strides[0] = 1;
  }
  if (g_log.load(std::memory_order_relaxed) != nullptr) note(name, t);
  return t;
}

}  // namespace

std::string shape_text(const deltic_tensor& t, const char* between) {
  std::string text = "[";
  for (int32_t i = 0; i < std::min<int32_t>(t.rank, DELTIC_MAX_RANK); ++i) {
    text += (i > 0 ? between : "") + std::to_string(t.shape[i]);
  }
  return text + "]";
}

deltic_tensor view(const char* op, const char* name, const Tensor& tensor) {
  return view_of(op, name, tensor, false);
}

deltic_tensor view_flags(const char* op, const char* name, const MaybeTensor& tensor) {
  return tensor.has_value() ? view_of(op, name, *tensor, true) : deltic_tensor{};
}

deltic_tensor view(const char* op, const char* name, const MaybeTensor& tensor) {
  return tensor.has_value() ? view(op, name, *tensor) : deltic_tensor{};
}

deltic_tensor Call::packed(const char* name, const MaybeTensor& tensor, bool is_said) {
  deltic_tensor t = view(function(), name, tensor);
  if (t.rank < 1 || t.rank > DELTIC_MAX_RANK) return t;
  const int64_t width = t.shape[t.rank - 1], stride = t.strides[t.rank - 1];
  if (width <= 1 || stride == 1) return t;
  if (std::find(t.shape, t.shape + t.rank, 0) != t.shape + t.rank) {
    // Nothing is read, and contiguous() leaves an empty tensor's strides as they are.
    t.strides[t.rank - 1] = 1;
    return t;
  }
  // Not torch's contiguous(): where memory is missing, that prints a C++ stack.
  deltic_tensor copy = plan_like(t);
  copies_.push_back(allocate(copy, t));
  DELTIC_TORCH_CHECK(aoti_torch_copy_(copies_.back().get(), tensor->get(), 0));
  if (is_said) note_copy(options.function, name, stride);
  return copy;
}

deltic_tensor plan(std::initializer_list<int64_t> shape, int32_t dtype,
                   const deltic_tensor& where) {
  deltic_tensor t{};
  t.dtype = dtype;
  t.device_type = where.device_type;
  t.device_index = where.device_index;
  for (int64_t n : shape) t.shape[t.rank++] = n;
  int64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= std::max<int64_t>(t.shape[i], 1);
  }
  return t;
}

deltic_tensor plan_like(const deltic_tensor& like) {
  deltic_tensor t = plan({}, like.dtype, like);
  if (like.rank > DELTIC_MAX_RANK) return t;
  t.rank = like.rank;
  int64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = like.shape[i];
    t.strides[i] = stride;
    stride *= std::max<int64_t>(t.shape[i], 1);
  }
  return t;
}

Tensor allocate(deltic_tensor& planned, const deltic_tensor& where) {
  if (planned.rank == 0) {
    const int64_t none = 0, one = 1;
    return empty(1, &none, &one, kTypes[0].torch, where);
  }
  Tensor tensor =
      empty(planned.rank, planned.shape, planned.strides, kTypes[planned.dtype].torch, planned);
  planned.data = tensor.data_ptr();
  return tensor;
}

int32_t dtype_of(const char* op, MaybeType type, int32_t otherwise) {
  if (!type.has_value()) return otherwise;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type));
  for (const TypePair& pair : kTypes) {
    if (pair.torch == code) return pair.deltic;
  }
  fail(DELTIC_INVALID_ARGUMENT,
       std::string(op) + ": dtype: expected fp32, bf16 or fp16, got " + foreign_type_name(code));
}

void check_wanted(const char* op, int64_t want, int count) {
  if (want >= 0 && want < int64_t{1} << count) return;
  fail(DELTIC_INVALID_ARGUMENT,
       std::string(op) + ": want: expected bits of " + std::to_string(count) + " gradients, 0 to " +
           std::to_string((1 << count) - 1) + ", got " + std::to_string(want));
}

Workspace::Workspace(uint64_t bytes, const deltic_tensor& where) : buffer_{nullptr, bytes} {
  if (bytes == 0) return;
  if (where.device_type == DELTIC_CPU && bytes <= kSmallBytes) {
    buffer_.data = small_memory();
    return;
  }
  if (where.device_type == DELTIC_CUDA) buffer_.data = raw_ = allocate_raw(bytes, where);
  if (raw_ != nullptr) return;
  tensor_ = bytes_tensor(bytes, where);
  buffer_.data = tensor_->data_ptr();
}

Tensor zeroed_bytes(uint64_t bytes, const deltic_tensor& where) {
  if (bytes == 0 || where.device_type != DELTIC_CPU) {
    Tensor tensor = bytes_tensor(bytes, where);
    if (bytes > 0) torch::stable::zero_(tensor);
    return tensor;
  }
  // calloc gets large blocks from the system, already zero: nothing is written twice.
  constexpr size_t kAlign = 64;
  std::unique_ptr<void, decltype(&std::free)> block(std::calloc(bytes + kAlign, 1), &std::free);
  if (block == nullptr) {
    fail(DELTIC_OUT_OF_MEMORY, "deltic: memory: expected " + std::to_string(bytes) +
                                   " bytes on the CPU, got none: out of memory");
  }
  const auto start = (reinterpret_cast<uintptr_t>(block.get()) + kAlign - 1) / kAlign * kAlign;
  const auto size = static_cast<int64_t>(bytes);
  const int64_t one = 1;
  AtenTensorHandle handle = nullptr;
  DELTIC_TORCH_CHECK(torch_from_blob(
      reinterpret_cast<void*>(start), 1, &size, &one, 0, kByte, kCpu, -1, &handle,
      aoti_torch_layout_strided(), nullptr, 0, [](void*, void* context) { std::free(context); },
      block.get()));
  block.release();
  return Tensor(handle);
}

Options::Options(const char* op, const std::string& words, MaybeFloat scale,
                 MaybeFloat lower_bound) {
  t_tensors.clear();
  t_operator = t_function = function = op;
  deltic_options_init(&c, sizeof c);
  c.num_threads = num_threads();
  c.has_scale = scale.has_value() ? 1 : 0;
  c.scale = static_cast<float>(scale.value_or(0.0));
  c.has_lower_bound = lower_bound.has_value() ? 1 : 0;
  c.lower_bound = static_cast<float>(lower_bound.value_or(0.0));
  // The library takes a name up to the first of them.
  if (words.find('\0') != std::string::npos) {
    fail(DELTIC_INVALID_ARGUMENT,
         std::string(op) + ": options: expected a text without zero bytes, got one with them");
  }
  std::string_view rest = words;
  while (!rest.empty()) {
    const size_t space = rest.find(' ');
    const std::string_view word = rest.substr(0, space);
    rest = space == std::string_view::npos ? std::string_view{} : rest.substr(space + 1);
    if (word.empty()) continue;
    const size_t equal = word.find('=');
    const std::string_view key = word.substr(0, equal);
    const std::string_view value =
        equal == std::string_view::npos ? std::string_view{} : word.substr(equal + 1);
    if (!take(key, value)) {
      fail(DELTIC_INVALID_ARGUMENT, std::string(op) + ": options: expected words such as " +
                                        "gate=softplus or chunk=32, got " + std::string(word));
    }
  }
}

bool Options::take(std::string_view key, std::string_view value) {
  const auto choose = [&](int32_t& field, std::initializer_list<std::string_view> names) {
    const auto* at = std::find(names.begin(), names.end(), value);
    if (at == names.end()) return false;
    field = static_cast<int32_t>(at - names.begin());
    return true;
  };
  const auto flag = [&](int32_t& field) { return value.empty() && (field = 1); };
  const auto number = [&](auto& field) {
    const auto [end, error] = std::from_chars(value.begin(), value.end(), field);
    return error == std::errc{} && end == value.end();
  };
  if (key == "gate") return choose(c.gate_form, {"log_decay", "softplus", "bounded"});
  if (key == "beta") return choose(c.beta_form, {"value", "sigmoid", "2sigmoid"});
  if (key == "layout") return choose(c.state_layout, {"kv", "vk"});
  if (key == "save") return choose(c.save, {"none", "states", "all"});
  if (key == "form") return choose(c.form, {"chunked", "recurrent"});
  if (key == "activation") return choose(c.activation, {"none", "silu", "sigmoid"});
  if (key == "qk_l2norm") return flag(c.qk_l2norm);
  if (key == "reverse") return flag(c.reverse);
  if (key == "chunk") return number(c.chunk);
  if (key == "null_slot") {
    c.has_null_slot = 1;
    return number(c.null_slot);
  }
  if (key == "seed") {
    c.has_seed = 1;
    return number(c.seed);
  }
  if (key == "norm") {
    norm = true;
    return choose(c.norm_activation, {"none", "silu", "sigmoid"});
  }
  if (key == "final") return final_state = true;
  if (key == "split") {
    if (choose(c.split, {"auto", "off", "by_length"})) return true;
    c.split = DELTIC_SPLIT_SEGMENTS;
    return number(c.segment_length);
  }
  if (key == "as") {
    t_function = function = value;
    return !value.empty();
  }
  if (key == "impl") {
    impl = value;
    c.impl = impl.c_str();
    return true;
  }
  return false;
}

deltic_tensor without_groups(deltic_tensor weight) {
  if (weight.rank != 3 || weight.shape[1] != 1) return weight;
  weight.rank = 2;
  weight.shape[1] = weight.shape[2];
  weight.strides[1] = weight.strides[2];
  return weight;
}

void plan_outputs(deltic_tensors& t, const deltic_options& options, bool final_state) {
  if (t.o.rank == 0) t.o = plan_like(t.v);
  if (!final_state) return;
  const bool is_packed = t.cu_seqlens.rank != 0;
  const int64_t N = is_packed ? t.cu_seqlens.shape[0] - 1 : t.q.shape[0];
  const int64_t K = t.q.shape[3], V = t.v.shape[3];
  const int32_t dtype = t.initial_state.rank != 0 ? t.initial_state.dtype : wide(t.q);
  t.final_state = options.state_layout == DELTIC_STATE_VK
                      ? plan({N, t.v.shape[2], V, K}, dtype, t.q)
                      : plan({N, t.v.shape[2], K, V}, dtype, t.q);
}

ForwardBytes forward_bytes(deltic_options& options, const deltic_tensors& tensors, void* stream) {
  ForwardBytes bytes;
  deltic_status status = deltic_forward_workspace(&options, &tensors, stream, &bytes.workspace);
  if (status == DELTIC_UNSUPPORTED && options.save != DELTIC_SAVE_NONE) {
    options.save = DELTIC_SAVE_NONE;
    status = deltic_forward_workspace(&options, &tensors, stream, &bytes.workspace);
  }
  check(status);
  if (options.save != DELTIC_SAVE_NONE) {
    check(deltic_forward_saved(&options, &tensors, &bytes.saved));
  }
  return bytes;
}

bool is_logged() {
  return g_log.load(std::memory_order_relaxed) != nullptr || std::getenv("DELTIC_LOG") != nullptr;
}

void check_call(deltic_status status, const Workspace& workspace, const deltic_tensor& where) {
  check(status);
  if (where.device_type != DELTIC_CUDA || deltic_get_checked() != 1) return;
  const deltic_status found = deltic_device_error(workspace.c(), stream_of(where));
  if (found != DELTIC_UNSUPPORTED) check(found);
}

}  // namespace deltic::bridge

using namespace deltic;

// For the Python side, which reads them through ctypes: they take no tensors.
extern "C" {

DELTIC_API int32_t deltic_torch_last_status() { return bridge::t_last_status; }
DELTIC_API const char* deltic_torch_version() { return deltic_version(); }
DELTIC_API const char* deltic_torch_namespace() {
  return DELTIC_TORCH_TEXT(DELTIC_TORCH_NAMESPACE);
}
// Whether sequences of CUDA tensors have gradients in this build.
DELTIC_API int32_t deltic_torch_has_cuda_backward() {
  return deltic_implementation(DELTIC_BACKWARD, DELTIC_CUDA, 0) != nullptr;
}
// Whether a device of this machine (DELTIC_CPU or DELTIC_CUDA) runs the norm and its gradient, and
// with them all that has code wherever the general kernels have (convolution, decode): dispatch is
// asked, nothing is launched.
DELTIC_API int32_t deltic_torch_runs_on(int32_t type, int32_t index) {
  bridge::t_tensors.clear();
  deltic_options options;
  deltic_options_init(&options, sizeof options);
  deltic_tensor where{};
  where.device_type = type, where.device_index = index;
  deltic_block_tensors t;
  deltic_block_tensors_init(&t, sizeof t);
  t.x = t.out = bridge::plan({1, 1, 1, 16}, DELTIC_F32, where);
  uint64_t bytes = 0;
  if (deltic_block_workspace(DELTIC_RMSNORM, &options, &t, nullptr, &bytes) != DELTIC_OK) return 0;
  deltic_block_backward_tensors b;
  deltic_block_backward_tensors_init(&b, sizeof b);
  t.out = {};  // the gradient starts from the inputs
  b.forward = &t, b.d_out = b.dx = t.x;
  return deltic_block_backward_workspace(DELTIC_RMSNORM, &options, &b, nullptr, &bytes) ==
         DELTIC_OK;
}

// Threads of a call: 0 for torch's number. Returns 0 where the number is refused.
DELTIC_API int32_t deltic_torch_set_num_threads(int32_t n) {
  if (n < 0 || n > 4096) return 0;
  bridge::g_num_threads = n;
  return 1;
}
DELTIC_API int32_t deltic_torch_get_num_threads() { return bridge::num_threads(); }

// Lines about which implementation was chosen, and the tensors of the call that they are about.
// Null goes back to what DELTIC_LOG says.
DELTIC_API void deltic_torch_set_log(deltic_torch_log_fn fn) {
  bridge::g_log = fn;
  if (fn == nullptr) {
    deltic_set_log(nullptr, nullptr);
    return;
  }
  deltic_set_log(
      [](void*, const char* line) {
        const deltic_torch_log_fn listener = bridge::g_log;
        if (listener != nullptr) listener(line, bridge::t_tensors.c_str());
      },
      nullptr);
}

// Receives a sentence where a tensor had to be copied, once for every function and argument.
DELTIC_API void deltic_torch_set_note(deltic_torch_note_fn fn) { bridge::g_note = fn; }

// What an operator's argument is called in Python. Valid as long as `name`.
DELTIC_API const char* deltic_torch_argument_name(const char* op, const char* name) {
  return bridge::argument_name(op, name);
}

// The dtypes that an argument may have, in words.
DELTIC_API const char* deltic_torch_types_of(const char* name) { return bridge::types_of(name); }

// Facts about build and machine.
DELTIC_API int32_t deltic_torch_info(deltic_info_fn fn) { return deltic_info(fn, nullptr); }

// Bytes that forward keeps for these sizes (packed: B = 1, N sequences); 0 for a call it refuses.
DELTIC_API int64_t deltic_torch_saved_bytes(int32_t device, int32_t is_f64, int64_t B, int64_t T,
                                            int64_t H, int64_t K, int64_t HV, int64_t V, int64_t N,
                                            int32_t packed, int32_t chunk, int32_t save,
                                            const char* impl) {
  bridge::t_tensors.clear();
  deltic_options options;
  deltic_options_init(&options, sizeof options);
  options.chunk = chunk;
  options.save = save;
  options.impl = impl;
  deltic_tensor where{};
  where.device_type = device;
  const int32_t dtype = is_f64 ? DELTIC_F64 : DELTIC_F32;
  deltic_tensors t;
  deltic_tensors_init(&t, sizeof t);
  t.q = t.k = bridge::plan({B, T, H, K}, dtype, where);
  t.v = t.o = bridge::plan({B, T, HV, V}, dtype, where);
  if (packed) t.cu_seqlens = bridge::plan({N + 1}, DELTIC_I64, where);
  try {
    return static_cast<int64_t>(bridge::forward_bytes(options, t, nullptr).saved);
  } catch (const std::exception&) {
    return 0;
  }
}

}  // extern "C"
