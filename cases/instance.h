// An instance: all tensors of a case, in memory that notices every write outside of the outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cases/call.h"
#include "cases/case.h"
#include "cases/device.h"

namespace deltic::cases {

// Bytes between two guard zones of kGuard bytes each, 64-byte aligned. Guards and fresh contents
// hold a NaN pattern in every float dtype, with a mark of its own for every buffer, so that a copy
// from one guard to another is seen too.
class Buffer {
 public:
  static constexpr size_t kGuard = 256;

  Buffer() = default;
  Buffer(size_t bytes, uint8_t mark);
  static Buffer on_gpu(size_t bytes, size_t copies);      // twins alone; every byte 0xFF: NaN
  bool has_memory() const { return memory_ != nullptr; }  // on the host
  std::byte* data() const { return memory_.get() + kGuard; }
  size_t bytes() const { return bytes_; }
  deltic_buffer c() const { return {bytes_ > 0 ? data() : nullptr, bytes_}; }
  std::byte pattern(size_t i) const;  // what byte i holds until somebody writes it
  void fill() const;                  // contents and guards
  bool guards_intact() const;

  // Twins on the GPU, guards included. The host's bytes are sent to all of them, and the first
  // one's come back.
  void mirror(size_t copies);
  bool is_mirrored() const { return twins_ != nullptr; }
  std::byte* device_data(size_t copy) const { return twin(copy) + kGuard; }
  void upload() const;
  void download() const;

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  size_t whole() const { return (bytes_ + 63) / 64 * 64 + 2 * kGuard; }
  // One allocation for all twins, each at a multiple of 256 bytes as an allocation would be.
  size_t twin_stride() const { return (whole() + 255) / 256 * 256; }
  std::byte* twin(size_t copy) const { return twins_.get() + copy * twin_stride(); }

  std::unique_ptr<std::byte, Free> memory_;
  std::shared_ptr<std::byte> twins_;
  size_t bytes_ = 0, copies_ = 0;
  uint8_t mark_ = 1;
};

enum class Role { input, output, inout };

// Whether an output is written in some slots alone: a pool, checkpoints.
bool is_by_slot(std::string_view name);

struct Tensor {
  std::string name;  // as in the operation's struct
  Role role = Role::input;
  TensorView view;
  Buffer buffer;
  std::vector<std::byte> before;  // input, inout: contents before a run, gaps included
};

struct RunOptions {
  std::string impl{};  // empty: best first
  int threads = 0;     // 0: the library's default
  size_t copy = 0;     // on the GPU: which of the twins
  void* stream = nullptr;
  bool checked = false;  // checked mode, wherever it is not on already
};

// Where an instance's tensors lie for the call. The host's memory is there in any case: inputs are
// drawn in it, and outputs come back to it.
struct Place {
  DeviceType device = DeviceType::cpu;
  size_t copies = 1;  // on the GPU: sets of tensors, so that a repeated call finds a cold cache
};

// Sequences and value heads of a case, whole or their first tokens.
struct Slice {
  std::vector<int64_t> sequences, heads;
  int64_t tokens = 0;  // at most so many of each sequence

  int64_t token_heads(const Case& c) const;
  bool is_whole(const Case& c) const;  // no sequence of it is cut
};
// About `token_heads` tokens of heads: all of a small case; of others a few heads and sequences,
// spread, the longest among them, and their first tokens.
Slice few_tokens(const Case& c, int64_t token_heads);
// The longest sequence, whole, and as many heads of it as make `token_heads`, at least one.
Slice whole_sequence(const Case& c, int64_t token_heads);

// Inputs depend on the case's seed only: the same on every platform.
class Instance {
 public:
  // keep_inputs: inputs are copied so that damage() sees writes to them (not for huge bench cases).
  explicit Instance(const Case& c, bool keep_inputs = true, const Place& place = {});
  // Descriptors only, all data pointers null: enough to explain a case of any size.
  static Instance shapes_of(const Case& c, DeviceType device = DeviceType::cpu);
  // The same values in fp64, contiguous: what the oracle (implementation `reference`) gets; or in
  // fp32. States of 16 bits stay what they are in decode, which rounds them after every token.
  static Instance widened(const Instance& other, DType type = DType::f64);

  // A part of a step as a case of its own: conv, decode or rmsnorm with the step's inputs, and with
  // rows to come for what lies in between. Contiguous.
  Instance part_of_step(Op part) const;
  // Of its decode: q, k and v, from the values of conv's out.
  void set_step_rows(const std::vector<double>& qkv);

  // To where the calls of an instance that was made on the host shall run.
  void move_to(const Place& place);

  // Large cases of the GPU: rows and states exist there only, repeated from a few MB that are drawn
  // on the host, with another odd period for every tensor, so that no two chunks see the same rows.
  // Backward cases can be repeated too, but their parts have no results of their own: a gradient
  // needs the whole sequence.
  static bool can_be_tiled(const Case& c);
  static bool can_be_repeated(const Case& c);
  static Case tile_of(const Case& c);  // one sequence of a few MB per tensor
  static Instance tiled(const Case& c, size_t copies, const Instance& tile);
  // A part of such an instance as a case of its own on the host: its inputs as they are now, and
  // later its outputs (of the first copy).
  Instance inputs_of(const Slice& slice) const;
  void outputs_of(const Slice& slice, Instance& part) const;
  // Of a tiled instance: empty if every element of every output is a number, else the sentence.
  std::string not_finite() const;

  Instance(Instance&&) = default;
  Instance& operator=(Instance&&) = default;

  const Case& spec() const { return spec_; }
  DeviceType device() const { return place_.device; }
  Options options(const RunOptions& run = {}) const;
  // The descriptors of the call, pointing into this object. Tests may change a copy of them.
  const Call& call_of() const { return call_; }
  const Tensors& tensors() const { return call_.as<Tensors>(); }  // forward, decode
  const BackwardTensors& gradients() const { return call_.as<BackwardTensors>(); }  // backward

  // Outputs and workspace to NaN, states updated in place back to their first value; all of it to
  // the GPU if the instance is there.
  void reset();
  // The call alone; needs reset once with the same options (bench calls it many times). On the GPU
  // it does not wait for the end.
  void call(const RunOptions& run = {});
  // reserve, reset, call, fetch; of a backward case that starts from what forward kept, forward
  // before call. Throws deltic::Error.
  void run(const RunOptions& run = {});
  // From the GPU: everything that a call may have written, and what it must not have.
  void fetch();
  // Asks for the workspace and allocates it between guards, exactly as large as asked for.
  void reserve(const RunOptions& run = {});
  size_t workspace_bytes() const { return workspace_.bytes(); }
  double tensor_bytes() const;  // of all tensors; a double, as a case's sizes may have no bounds

  // The forward call of a backward case: leaves in `saved` what the case's `save` says. It runs on
  // the implementation of the same name where that takes it, else on the best one. reserve does
  // what it needs if the case keeps something; else ask for it.
  void reserve_forward(const RunOptions& run = {});
  void call_forward(const RunOptions& run = {});
  bool keeps_for_backward() const { return spec_.op == Op::backward && spec_.save != Save::none; }
  size_t saved_bytes() const { return saved_.bytes(); }
  // What forward and backward of a backward case need besides the inputs, where it is most: o,
  // what forward keeps, and the larger of forward's workspace and gradients with backward's. Needs
  // reserve and reserve_forward.
  size_t step_bytes() const;
  std::vector<Choice> explain(const RunOptions& run = {}) const;

  bool has(std::string_view name) const;
  const Tensor& tensor(std::string_view name) const;  // throws std::out_of_range
  std::vector<std::string> inputs() const;   // names of inputs and of states updated in place
  std::vector<std::string> outputs() const;  // names of outputs and of states updated in place
  // Elements in row-major order, strides resolved: as numbers, as bytes.
  std::vector<double> values(std::string_view name) const;
  std::vector<std::byte> bytes(std::string_view name) const;
  // Changes one element of an input (row-major index); rounds to its dtype.
  void set(std::string_view name, int64_t index, double value);
  // Changes a whole input. For a state updated in place this is its value before every run.
  void set_values(std::string_view name, const std::vector<double>& values);

  // Empty if nothing was written that must not be: guards, gaps between rows, inputs, pool slots
  // that are not written, checkpoint slots that no entry names. Else a sentence with the tensor's
  // name.
  std::string damage() const;

  // Row-major index ranges [first, second) of an output that must be exactly 0: padding rows and
  // skipped sequences.
  std::vector<std::pair<int64_t, int64_t>> zero_ranges(std::string_view name) const;
  // Slots of a pool or of ckpt_states that the call writes.
  const std::vector<int64_t>& written_slots(std::string_view name) const;
  bool is_written(const Tensor& t, int64_t index) const;
  // Slots of the pool per sequence; -1 as in the call. Empty without a pool.
  const std::vector<int64_t>& read_slots() const { return read_slots_; }
  const std::vector<int64_t>& write_slots() const { return write_slots_; }
  // Of the state after every token, token_columns() per sequence; empty where there are none.
  const std::vector<int64_t>& token_slots() const { return token_slots_; }
  int64_t token_columns() const { return token_columns_; }
  // Whether sequence n reads and writes no slot.
  bool is_skipped(int64_t n) const;
  // conv with accepted counts: how many inputs of a state count; else all S.
  int64_t window_of(int64_t n) const;

 private:
  // What is in the host's memory: nothing; the tensors of one dimension (lengths, indices,
  // parameters of gates); memory for all of them, in which those alone are drawn; everything.
  enum class Memory { none, lists, blank, drawn };

  Instance() = default;
  bool draws() const { return memory_ == Memory::drawn; }
  void draw(Tensor& t, const std::function<double(int64_t)>& f) const;
  void repeat(const Instance& tile);
  void repeat_states(const Tensor& t, const Instance& tile) const;
  Buffer make_workspace(size_t bytes, uint8_t mark) const;
  void gather(const Slice& slice, Tensor& part, const Instance& parts) const;
  void generate();
  Tensor& add(std::string name, Role role, DType dtype, std::vector<int64_t> shape, bool rows);
  void add_copy(const std::string& name, const Tensor& from, DType as);
  Tensor& find(std::string_view name);
  void bind(size_t copy = 0);
  void to_device();
  deltic_buffer at_call(const Buffer& buffer, size_t copy) const;
  std::vector<Buffer*> buffers();
  void add_lengths();
  void add_gate_parameters();
  void add_raw_gate();
  std::vector<int64_t> gate_shape() const;
  int64_t assign_pool_slots(int64_t index_columns);
  void assign_drafts(int64_t index_columns);
  void add_pool_lists(int64_t index_columns);
  void add_has_initial_state();
  std::function<double(int64_t)> listed(const std::vector<int64_t>& slots) const;
  void add_states();
  void add_checkpoints();
  void generate_sequence_op();
  void add_rule_inputs();
  void add_record();
  std::vector<int64_t> state_shape() const;
  std::vector<int64_t> states_shape(int64_t count) const;
  void add_pool();
  void fill_slot(Tensor& pool, int64_t slot) const;
  void add_backward();
  void add_gradients_of(std::initializer_list<const char*> inputs);
  Options forward_options(const RunOptions& run) const;
  Call forward_call(size_t copy = 0) const;
  void generate_block();
  void add_block_inputs();
  void add_block_outputs();
  void add_block_gradients();
  void add_square_gradient();
  void generate_conv();
  void generate_step();
  void add_taps(const std::string& prefix);
  void add_windows();
  void generate_move();
  void generate_commit();
  void draw_pool(Tensor& pool, int64_t heads, int64_t first_head) const;
  int64_t pool_heads(int64_t first) const;
  void add_norm_inputs();
  void spoil_unread_rows();
  std::vector<std::pair<int64_t, int64_t>> unread_tokens() const;

  Case spec_;
  Place place_;
  Memory memory_ = Memory::drawn;
  std::vector<std::unique_ptr<Tensor>> list_;
  Call call_;
  Buffer workspace_;
  Buffer forward_o_, forward_workspace_, saved_;  // of a backward case's forward call
  std::vector<std::byte> saved_before_;           // as forward left it
  std::vector<int64_t> read_slots_, write_slots_, pool_written_, ckpt_written_;
  // Of a step's conv, a slot each: what it reads, what it writes, and those in order.
  std::vector<int64_t> window_read_, window_write_, windows_written_;
  std::vector<int64_t> token_slots_, accepted_;
  int64_t token_columns_ = 0;
};

}  // namespace deltic::cases
