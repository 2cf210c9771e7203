// Instances: allocation between guards, layouts, runs, and the search for damage.
#include "cases/instance.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "cases/elements.h"

namespace deltic::cases {
namespace {

struct MemoryLayout {
  std::vector<int64_t> strides;
  int64_t offset = 0;    // elements before the first one
  int64_t elements = 0;  // to allocate
};

MemoryLayout make_layout(const std::vector<int64_t>& shape, Layout kind, bool is_input,
                         bool is_row) {
  MemoryLayout m;
  const size_t rank = shape.size();
  m.strides.assign(rank, 1);
  if (kind == Layout::wide && rank >= 2) {
    // Odd gaps: nothing beyond the element is aligned.
    int64_t stride = shape[rank - 1] + 3;
    for (size_t i = rank - 1; i-- > 0;) {
      m.strides[i] = stride;
      stride = stride * std::max<int64_t>(shape[i], 1) + 5;
    }
    m.offset = 1;
    m.elements = m.offset + stride + 2;
    return m;
  }
  if (kind == Layout::pages && rank >= 3) {
    // Multiples of 8 elements: 16 bytes of any float. Rows [B,T,...] are the second of three slices
    // of a longer row; a state's slots are half as long again, those of layers too.
    const size_t outer = is_row || rank == 5 ? 1 : 0;
    int64_t content = 1;
    for (size_t i = rank; i-- > outer + 1;) {
      m.strides[i] = content;
      content *= shape[i];
    }
    m.strides[outer] = is_row ? 3 * content : (content * 3 / 2 + 7) / 8 * 8;
    if (outer == 1) m.strides[0] = m.strides[1] * shape[1];
    m.offset = is_row ? content : 0;
    m.elements = m.strides[0] * shape[0];
    return m;
  }
  if (kind == Layout::head_major && rank == 4) {
    m.strides = {shape[1] * shape[2] * shape[3], shape[3], shape[1] * shape[3], 1};
    m.elements = shape[0] * m.strides[0];
    return m;
  }
  int64_t stride = 1;
  for (size_t i = rank; i-- > 0;) {
    m.strides[i] = stride;
    if (!(kind == Layout::expand && is_input && rank == 4 && i == 2)) stride *= shape[i];
  }
  if (kind == Layout::expand && is_input && rank == 4) m.strides[2] = 0;
  m.elements = stride;
  return m;
}

}  // namespace

// ---- Buffer ---------------------------------------------------------------------------------

Buffer::Buffer(size_t bytes, uint8_t mark) : bytes_(bytes), mark_(mark) {
  memory_.reset(static_cast<std::byte*>(::operator new (whole(), std::align_val_t{64})));
  fill();
}
// Little-endian pairs (mark, 0xFF): 0xFFmm is NaN in bf16 and f16, 0xFFmmFFmm in f32, and so on.
std::byte Buffer::pattern(size_t i) const {
  return i % 2 == 0 ? static_cast<std::byte>(mark_) : std::byte{0xFF};
}
void Buffer::fill() const {
  std::byte* p = memory_.get();
  if (p == nullptr) return;
  const size_t total = whole();
  const std::array<std::byte, 2> pair = {pattern(0), pattern(1)};
  for (size_t i = 0; i < 64; i += 2) std::memcpy(p + i, pair.data(), 2);
  for (size_t done = 64; done < total; done *= 2)
    std::memcpy(p + done, p, std::min(done, total - done));
}
bool Buffer::guards_intact() const {
  const std::byte* p = memory_.get();
  if (p == nullptr) return true;
  const size_t total = whole();
  for (size_t i = 0; i < kGuard; ++i) {
    if (p[i] != pattern(i)) return false;
  }
  for (size_t i = kGuard + bytes_; i < total; ++i) {
    if (p[i] != pattern(i)) return false;
  }
  return true;
}

Buffer Buffer::on_gpu(size_t bytes, size_t copies) {
  Buffer b;
  b.bytes_ = bytes, b.copies_ = copies;
  b.twins_ = device::allocate(copies * b.twin_stride());
  device::set(b.twins_.get(), 0xFF, copies * b.twin_stride());
  return b;
}
void Buffer::mirror(size_t copies) {
  twins_ = nullptr, copies_ = copies;
  if (memory_ != nullptr) twins_ = device::allocate(copies * twin_stride());
}
void Buffer::upload() const {
  if (!is_mirrored() || !has_memory()) return;
  for (size_t i = 0; i < copies_; ++i) device::upload(twin(i), memory_.get(), whole());
}
void Buffer::download() const {
  if (is_mirrored() && has_memory()) device::download(memory_.get(), twin(0), whole());
}

// ---- Building -------------------------------------------------------------------------------

Tensor& Instance::add(std::string name, Role role, DType dtype, std::vector<int64_t> shape,
                      bool rows) {
  Layout kind = spec_.strided;
  if (!rows && kind != Layout::wide && kind != Layout::pages) kind = Layout::packed;
  // States of conv with channels innermost: [slots,S,D] in memory.
  const bool is_of_conv = spec_.op == Op::conv || (name.starts_with("conv.") && name != "conv.x");
  const bool is_turned = is_of_conv && spec_.state == StateLayout::vk && !rows && shape.size() == 3;
  if (is_turned) std::swap(shape[1], shape[2]);
  MemoryLayout layout = make_layout(shape, kind, role == Role::input, rows);
  if (is_turned) std::swap(shape[1], shape[2]), std::swap(layout.strides[1], layout.strides[2]);
  auto t = std::make_unique<Tensor>();
  t->name = std::move(name);
  t->role = role;
  // Marks 1 to 120, by turns: zero would be an infinity in bf16.
  const auto mark = static_cast<uint8_t>(1 + list_.size() % 120);
  const bool on_host = memory_ >= Memory::blank || (memory_ == Memory::lists && shape.size() == 1);
  if (on_host) t->buffer = Buffer(static_cast<size_t>(layout.elements * size_of(dtype)), mark);
  const std::byte* data = on_host ? t->buffer.data() + layout.offset * size_of(dtype) : nullptr;
  t->view = TensorView(data, dtype, shape);
  std::copy(layout.strides.begin(), layout.strides.end(), t->view.strides);
  list_.push_back(std::move(t));
  return *list_.back();
}

Instance::Instance(const Case& c, bool keep_inputs, const Place& place) : spec_(c) {
  generate();
  place_ = place;
  if (place.device == DeviceType::cuda) to_device();
  for (auto& t : list_) {
    if (t->role == Role::inout || (keep_inputs && t->role == Role::input)) {
      t->before.assign(t->buffer.data(), t->buffer.data() + t->buffer.bytes());
    }
  }
}

Instance Instance::shapes_of(const Case& c, DeviceType device) {
  Instance i;
  i.spec_ = c;
  i.memory_ = Memory::none;
  i.place_.device = device;
  i.generate();
  return i;
}

void Instance::move_to(const Place& place) {
  place_ = place;
  if (place.device == DeviceType::cuda) to_device();
}

void Instance::to_device() {
  for (auto& t : list_) {
    if (t->name != "cu_seqlens_host") t->buffer.mirror(place_.copies);
  }
  bind();
}

bool is_by_slot(std::string_view name) {
  constexpr std::array kNames = {"state_pool", "write_pool", "ckpt_states", "conv.state_pool",
                                 "conv.write_pool"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

namespace {
bool is_carried(const std::string& name) {  // not conv's of a step: inputs, as they are
  return name == "initial_state" || name == "final_state" || name == "state_pool" ||
         name == "write_pool";
}
}  // namespace

Instance Instance::widened(const Instance& other, DType wide) {
  Instance copy;
  copy.spec_ = other.spec_;
  copy.spec_.strided = Layout::packed;
  if (copy.spec_.op == Op::conv) copy.spec_.state = StateLayout::kv;  // of memory alone
  copy.spec_.save = Save::none;         // the oracle keeps nothing and needs nothing
  copy.spec_.split = Split::automatic;  // and knows no segments
  copy.spec_.segment = 0;
  copy.read_slots_ = other.read_slots_;
  copy.write_slots_ = other.write_slots_;
  copy.pool_written_ = other.pool_written_;
  copy.token_slots_ = other.token_slots_;
  copy.token_columns_ = other.token_columns_;
  copy.accepted_ = other.accepted_;
  copy.ckpt_written_ = other.ckpt_written_;
  copy.window_read_ = other.window_read_;
  copy.window_write_ = other.window_write_;
  copy.windows_written_ = other.windows_written_;
  for (const auto& t : other.list_) {
    const DType type = dtype_of(t->view);
    const bool is_index = type == DType::i32 || type == DType::i64 || type == DType::u8;
    // A state of 16 bits is rounded after every recurrent token, by the oracle too.
    const bool is_rounded = other.spec_.hands_states_on() && is_half(type) && is_carried(t->name);
    copy.add_copy(t->name, *t, is_index || is_rounded ? type : wide);
  }
  copy.bind();
  return copy;
}

// A tensor with the first values, before any run, of another one.
void Instance::add_copy(const std::string& name, const Tensor& from, DType as) {
  const std::vector<int64_t> shape(from.view.shape, from.view.shape + from.view.rank);
  Tensor& twin = add(name, from.role, as, shape, false);
  if (from.role == Role::output) return;
  TensorView first_value = from.view;
  first_value.data = const_cast<std::byte*>(from.before.data()) +
                     (static_cast<std::byte*>(from.view.data) - from.buffer.data());
  fill(twin, [&](int64_t i) {
    return load(first_value.data, dtype_of(from.view), memory_offset(first_value, i));
  });
  twin.before.assign(twin.buffer.data(), twin.buffer.data() + twin.buffer.bytes());
}

namespace {

// The case of a step's part.
Case part_of(const Case& step, Op part) {
  Case c = step;
  c.op = part, c.strided = Layout::packed;
  if (part == Op::rmsnorm) {
    c.H = c.HV = step.HV, c.K = step.V;
    c.activation = static_cast<Activation>(static_cast<int>(step.norm) - 1);
    c.pool = Pool::none;
  }
  if (part != Op::conv) return normalise(c);
  c.D = step.channels(), c.sdtype = step.windows, c.ckpt.clear();
  c.state = StateLayout::kv;  // of memory alone
  if (c.pool == Pool::tokens) c.pool = Pool::move;
  return normalise(c);
}

}  // namespace

Instance Instance::part_of_step(Op part) const {
  const std::string prefix = part == Op::conv ? "conv." : part == Op::rmsnorm ? "norm." : "";
  Instance x;
  x.spec_ = part_of(spec_, part);
  x.read_slots_ = part == Op::conv ? window_read_ : read_slots_;
  x.write_slots_ = part == Op::conv ? window_write_ : write_slots_;
  x.pool_written_ = part == Op::conv ? windows_written_ : pool_written_;
  if (part != Op::conv) x.token_slots_ = token_slots_, x.token_columns_ = token_columns_;
  x.accepted_ = accepted_, x.ckpt_written_ = ckpt_written_;
  for (const auto& t : list_) {
    const bool is_shared = t->name.starts_with("cu_seqlens");
    const size_t dot = t->name.find('.');
    const std::string own = dot == std::string::npos ? "" : t->name.substr(0, dot + 1);
    if (own != prefix && !is_shared) continue;
    x.add_copy(is_shared ? t->name : t->name.substr(prefix.size()), *t, dtype_of(t->view));
  }
  const Case& c = spec_;
  const int64_t B = c.num_batches(), T = c.num_tokens();
  const auto rows = [&](const char* name, Role role, std::vector<int64_t> shape) {
    Tensor& t = x.add(name, role, c.dtype, std::move(shape), true);
    t.before.assign(t.buffer.data(), t.buffer.data() + t.buffer.bytes());
  };
  if (part == Op::conv) rows("out", Role::output, {B, T, c.channels()});
  if (part == Op::rmsnorm) rows("x", Role::input, {B, T, c.HV, c.V});
  if (part == Op::decode) {
    rows("q", Role::input, {B, T, c.H, c.K}), rows("k", Role::input, {B, T, c.H, c.K});
    rows("v", Role::input, {B, T, c.HV, c.V});
    if (c.has_norm()) rows("o", Role::output, {B, T, c.HV, c.V});
  }
  x.bind();
  return x;
}

void Instance::set_step_rows(const std::vector<double>& qkv) {
  const Case& c = spec_;
  const int64_t keys = c.H * c.K, D = 2 * keys + c.HV * c.V;
  const int64_t tokens = c.num_batches() * c.num_tokens();
  const auto columns = [&](const char* name, int64_t first, int64_t count) {
    std::vector<double> list;
    list.reserve(static_cast<size_t>(tokens * count));
    for (int64_t t = 0; t < tokens; ++t) {
      const auto row = qkv.begin() + t * D + first;
      list.insert(list.end(), row, row + count);
    }
    set_values(name, list);
  };
  columns("q", 0, keys), columns("k", keys, keys), columns("v", 2 * keys, c.HV * c.V);
}

// The descriptors of the call.
void Instance::bind(size_t copy) {
  call_ = Call(spec_.op, spec_.gradient);
  for (const auto& t : list_) {
    TensorView view = t->view;
    if (place_.device == DeviceType::cuda && t->name != "cu_seqlens_host") {
      view.device_type = DELTIC_CUDA;
      if (t->buffer.is_mirrored()) {
        view.data = t->buffer.device_data(copy);
        if (t->buffer.has_memory())
          view.data = static_cast<std::byte*>(view.data) +
                      (static_cast<std::byte*>(t->view.data) - t->buffer.data());
      }
    }
    call_.set(t->name, view);
  }
  if (spec_.op == Op::move) {
    auto& move = call_.as<MoveTensors>();
    move.read_head = spec_.read_head, move.write_head = spec_.write_head;
    move.num_heads = spec_.HV, move.transpose = spec_.transpose;
  }
  if (spec_.final_state == Final::inplace) {
    call_.set("final_state", call_.get("initial_state"));
    call_.set("conv.final_state", call_.get("conv.initial_state"));
  }
  if (keeps_for_backward()) call_.set_saved(at_call(saved_, copy));
}

// ---- Running --------------------------------------------------------------------------------

Options Instance::options(const RunOptions& run) const {
  const Case& c = spec_;
  Options o;
  o.impl = run.impl;
  o.num_threads = run.threads;
  if (run.checked) o.checked = true;
  o.chunk = c.chunk;
  const bool has_rule = c.is_sequence() || c.op == Op::step;
  if (c.gate != Gate::none && (has_rule || c.op == Op::cumsum || c.op == Op::gate)) {
    o.gate_form = c.form;
    if (c.form == GateForm::bounded) o.lower_bound = static_cast<float>(c.lower_bound);
  }
  if (c.scale) o.scale = static_cast<float>(*c.scale);
  o.reverse = c.reverse;
  o.activation = c.activation;
  if (c.eps) o.eps = static_cast<float>(*c.eps);
  if (c.null_slot >= 0) o.null_slot = static_cast<int32_t>(c.null_slot);
  if (c.op == Op::move || c.op == Op::commit) o.state_layout = c.state;
  if (c.has_norm()) o.norm_activation = static_cast<Activation>(static_cast<int>(c.norm) - 1);
  if (!has_rule) return o;
  if (c.beta == Beta::sigmoid) o.beta_form = BetaForm::sigmoid;
  if (c.beta == Beta::two_sigmoid) o.beta_form = BetaForm::two_sigmoid;
  o.state_layout = c.state;
  o.split = c.split;
  o.segment_length = c.segment;
  o.qk_l2norm = c.l2norm;
  if (c.recurrent) o.form = Form::recurrent;
  if (c.stochastic) o.seed = c.seed * 0x9E3779B97F4A7C15u;  // both halves of it
  return o;
}

// Of the forward call of a backward case.
Options Instance::forward_options(const RunOptions& run) const {
  Options o = options({.impl = {}, .threads = run.threads});
  o.save = spec_.save;
  if (run.impl.empty()) return o;
  for (const Choice& choice : forward_call().explain(o)) {
    if (choice.name == run.impl && choice.accepts) o.impl = run.impl;
  }
  return o;
}

Call Instance::forward_call(size_t copy) const {
  Call call(Op::forward);
  for (const auto& t : list_) {
    if (t->role == Role::input) call.set(t->name, call_.get(t->name));
  }
  TensorView o(at_call(forward_o_, copy).data, spec_.dtype,
               {spec_.num_batches(), spec_.num_tokens(), spec_.HV, spec_.V});
  o.device_type = call.get("q").device_type;
  call.set("o", o);
  if (spec_.save != Save::none) call.set_saved(at_call(saved_, copy));
  return call;
}

// Where a buffer lies for the call.
deltic_buffer Instance::at_call(const Buffer& buffer, size_t copy) const {
  if (!buffer.is_mirrored()) return buffer.c();
  return {buffer.bytes() > 0 ? buffer.device_data(copy) : nullptr, buffer.bytes()};
}

std::vector<Buffer*> Instance::buffers() {
  std::vector<Buffer*> all = {&workspace_, &forward_o_, &forward_workspace_, &saved_};
  for (auto& t : list_) all.push_back(&t->buffer);
  return all;
}

void Instance::reserve_forward(const RunOptions& run) {
  constexpr uint8_t kWorkspaceMark = 122, kSavedMark = 123, kOutputMark = 124;
  const Options o = forward_options(run);
  const Call call = forward_call();
  const auto elements = static_cast<size_t>(call.get("o").numel());
  forward_o_ = make_workspace(elements * static_cast<size_t>(size_of(spec_.dtype)), kOutputMark);
  forward_workspace_ = make_workspace(call.workspace_bytes(o, run.stream), kWorkspaceMark);
  if (spec_.save != Save::none)
    saved_ = make_workspace(forward_saved_bytes(o, call.as<Tensors>()), kSavedMark);
  if (keeps_for_backward()) call_.set_saved(at_call(saved_, 0));
}

void Instance::reserve(const RunOptions& run) {
  constexpr uint8_t kWorkspaceMark = 121;
  if (keeps_for_backward()) reserve_forward(run);
  workspace_ = make_workspace(call_.workspace_bytes(options(run), run.stream), kWorkspaceMark);
}
Buffer Instance::make_workspace(size_t bytes, uint8_t mark) const {
  if (memory_ == Memory::lists) return Buffer::on_gpu(bytes, place_.copies);
  Buffer b(bytes, mark);
  if (place_.device == DeviceType::cuda) b.mirror(place_.copies);
  return b;
}

size_t Instance::step_bytes() const {
  size_t gradients = 0;
  for (const auto& t : list_) {
    if (t->role == Role::output) gradients += t->buffer.bytes();
  }
  return forward_o_.bytes() + saved_.bytes() +
         std::max(forward_workspace_.bytes(), gradients + workspace_.bytes());
}

void Instance::call_forward(const RunOptions& run) {
  if (place_.copies > 1) bind(run.copy);
  forward_call(run.copy).run(forward_options(run), at_call(forward_workspace_, run.copy),
                             run.stream);
}

void Instance::reset() {
  for (auto& t : list_) {
    if (t->role == Role::output) t->buffer.fill();
    if (t->role == Role::inout) std::copy(t->before.begin(), t->before.end(), t->buffer.data());
  }
  for (const Buffer* b : {&workspace_, &forward_o_, &forward_workspace_, &saved_}) b->fill();
  saved_before_.clear();
  for (const Buffer* b : buffers()) b->upload();
  // A copy from pageable memory may still be under way, and other streams would not wait for it.
  if (place_.device == DeviceType::cuda) device::synchronize();
}

void Instance::fetch() {
  if (place_.device != DeviceType::cuda) return;
  device::synchronize();
  for (const Buffer* b : buffers()) b->download();
}

void Instance::call(const RunOptions& run) {
  if (place_.copies > 1) bind(run.copy);
  call_.run(options(run), at_call(workspace_, run.copy), run.stream);
}

void Instance::run(const RunOptions& run) {
  reserve(run);
  reset();
  if (keeps_for_backward()) {
    call_forward(run);
    fetch();
    saved_before_.assign(saved_.data(), saved_.data() + saved_.bytes());
  }
  call(run);
  if (place_.device == DeviceType::cuda && (run.checked || deltic_get_checked() == 1)) {
    device_error(at_call(workspace_, run.copy), run.stream);
  }
  fetch();
}

std::vector<Choice> Instance::explain(const RunOptions& run) const {
  return call_.explain(options(run));
}

// ---- Looking --------------------------------------------------------------------------------

Tensor& Instance::find(std::string_view name) {
  if (name == "final_state" && spec_.final_state == Final::inplace) name = "initial_state";
  if (name == "conv.final_state" && spec_.final_state == Final::inplace) {
    name = "conv.initial_state";
  }
  for (auto& t : list_) {
    if (t->name == name) return *t;
  }
  throw std::out_of_range("no tensor '" + std::string(name) + "' in " + canonical(spec_));
}
const Tensor& Instance::tensor(std::string_view name) const {
  return const_cast<Instance*>(this)->find(name);
}
bool Instance::has(std::string_view name) const {
  if (name == "final_state" && spec_.final_state == Final::inplace) return true;
  return std::any_of(list_.begin(), list_.end(), [&](const auto& t) { return t->name == name; });
}
std::vector<std::string> Instance::inputs() const {
  std::vector<std::string> names;
  for (const auto& t : list_) {
    if (t->role != Role::output) names.push_back(t->name);
  }
  return names;
}
std::vector<std::string> Instance::outputs() const {
  std::vector<std::string> names;
  for (const auto& t : list_) {
    if (t->role == Role::input) continue;
    names.push_back(t->name == "initial_state"        ? "final_state"
                    : t->name == "conv.initial_state" ? "conv.final_state"
                                                      : t->name);
  }
  return names;
}

double Instance::tensor_bytes() const {
  double bytes = 0;
  for (const auto& t : list_) {
    double elements = t->view.rank > 0 ? 1 : 0;
    for (int32_t i = 0; i < t->view.rank; ++i) elements *= static_cast<double>(t->view.shape[i]);
    bytes += elements * static_cast<double>(size_of(dtype_of(t->view)));
  }
  return bytes;
}

std::vector<double> Instance::values(std::string_view name) const {
  const Tensor& t = tensor(name);
  std::vector<double> list(static_cast<size_t>(t.view.numel()));
  const DType type = dtype_of(t.view);
  const int64_t width = row_width(t.view);
  const int64_t rows = width > 0 ? t.view.numel() / width : 0;
#pragma omp parallel for if (rows * width > kWorthThreads)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t offset = memory_offset(t.view, r * width);
    for (int64_t c = 0; c < width; ++c)
      list[static_cast<size_t>(r * width + c)] = load(t.view.data, type, offset + c);
  }
  return list;
}

std::vector<std::byte> Instance::bytes(std::string_view name) const {
  const Tensor& t = tensor(name);
  const auto size = static_cast<size_t>(size_of(dtype_of(t.view)));
  const auto width = static_cast<size_t>(row_width(t.view));
  std::vector<std::byte> list(static_cast<size_t>(t.view.numel()) * size);
  for_each_row(t.view, [&](int64_t index, int64_t offset) {
    std::memcpy(list.data() + static_cast<size_t>(index) * size,
                static_cast<const std::byte*>(t.view.data) + static_cast<size_t>(offset) * size,
                width * size);
  });
  return list;
}

void Instance::set(std::string_view name, int64_t index, double value) {
  Tensor& t = find(name);
  if (t.role == Role::output) throw std::out_of_range(std::string(name) + " is an output");
  const int64_t offset = memory_offset(t.view, index);
  store(t.view.data, dtype_of(t.view), offset, value);
  const auto from_start = static_cast<std::byte*>(t.view.data) - t.buffer.data();
  store(t.before.data() + from_start, dtype_of(t.view), offset, value);
}

void Instance::set_values(std::string_view name, const std::vector<double>& list) {
  for (size_t i = 0; i < list.size(); ++i) set(name, static_cast<int64_t>(i), list[i]);
}

const std::vector<int64_t>& Instance::written_slots(std::string_view name) const {
  return name == "ckpt_states"       ? ckpt_written_
         : name.starts_with("conv.") ? windows_written_
                                     : pool_written_;
}

std::string Instance::damage() const {
  if (!workspace_.guards_intact()) return "wrote outside of the workspace";
  if (!forward_workspace_.guards_intact()) return "forward wrote outside of the workspace";
  if (!forward_o_.guards_intact()) return "forward wrote outside of o";
  if (!saved_.guards_intact()) return "wrote outside of saved";
  if (!saved_before_.empty() &&
      std::memcmp(saved_.data(), saved_before_.data(), saved_before_.size()) != 0) {
    return "backward wrote to saved";
  }
  for (const auto& t : list_) {
    if (!t->buffer.guards_intact()) return "wrote outside of " + t->name;
    const std::byte* data = t->buffer.data();
    const size_t size = t->buffer.bytes();
    if (t->role == Role::input) {
      if (!t->before.empty() && std::memcmp(data, t->before.data(), size) != 0)
        return "wrote to the input " + t->name;
      continue;
    }
    // What may be written: all elements, or those of the written slots.
    const bool by_slot = is_by_slot(t->name);
    const int64_t numel = t->view.numel();
    const auto element = static_cast<size_t>(size_of(dtype_of(t->view)));
    if (!by_slot && static_cast<size_t>(numel) * element == size) continue;
    std::vector<char> writable(size, 0);
    const auto first = static_cast<size_t>(static_cast<const std::byte*>(t->view.data) - data);
    const auto row_bytes = static_cast<size_t>(row_width(t->view)) * element;
    for_each_row(t->view, [&](int64_t index, int64_t offset) {
      if (by_slot && !is_written(*t, index)) return;
      std::memset(writable.data() + first + static_cast<size_t>(offset) * element, 1, row_bytes);
    });
    for (size_t i = 0; i < size; ++i) {
      const std::byte should = t->role == Role::inout ? t->before[i] : t->buffer.pattern(i);
      if (writable[i] == 0 && data[i] != should) {
        return "wrote to a part of " + t->name + " that the call does not own (byte " +
               std::to_string(i) + ")";
      }
    }
  }
  return "";
}

std::vector<std::pair<int64_t, int64_t>> Instance::zero_ranges(std::string_view name) const {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  constexpr std::array kNotByToken = {
      "final_state",      "state_pool",      "write_pool",     "ckpt_states", "dA_log",
      "ddt_bias",         "dweight",         "dbias",          "record",      "d_initial_state",
      "conv.final_state", "conv.state_pool", "conv.write_pool"};
  const bool by_token =
      std::find(kNotByToken.begin(), kNotByToken.end(), name) == kNotByToken.end();
  if (!has(name) || !by_token) return ranges;
  const int64_t tokens = spec_.num_batches() * spec_.num_tokens();
  for (const auto& [first, last] : unread_tokens()) {
    const int64_t per_token = tensor(name).view.numel() / tokens;
    ranges.emplace_back(first * per_token, last * per_token);
  }
  return ranges;
}

}  // namespace deltic::cases
