// One call of the library, whatever its operation: options and tensors by their names.
#pragma once

#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "deltic/deltic.hpp"

namespace deltic::cases {

// Cases and tests assemble their calls with it, so that an operation's functions are named once.
class Call {
 public:
  Call() = default;
  // is_gradient: of a building block or of conv (backward is an operation of its own).
  explicit Call(Op op, bool is_gradient = false);
  // With the operation's struct, or its gradient's.
  template <class T>
  requires std::is_class_v<T> Call(Op op, const T& tensors) : op_(op), tensors_(tensors) {}

  // Sets the tensor of this name, as the header has it, those of `forward` among them; false if the
  // operation has none of that name. Those of a step are conv.x, norm.out and, without a prefix,
  // decode's; lengths are conv's.
  bool set(std::string_view name, const TensorView& view);
  TensorView get(std::string_view name) const;  // absent where there is none
  void set_saved(const deltic_buffer& saved);   // forward, backward

  // For a run on that stream.
  size_t workspace_bytes(const Options& options, void* stream = nullptr) const;
  void run(const Options& options, const deltic_workspace& workspace, void* stream = nullptr) const;
  void run(const Options& options) const;  // with a workspace of its own, on the CPU
  // The chosen implementation first, then the others.
  std::vector<Choice> explain(const Options& options) const;

  // The operation's struct; std::bad_variant_access for another one's.
  template <class T>
  const T& as() const {
    return std::get<T>(tensors_);
  }
  template <class T>
  T& as() {
    return std::get<T>(tensors_);
  }

 private:
  Op op_ = Op::forward;
  std::variant<Tensors, BackwardTensors, BlockTensors, BlockBackwardTensors, ConvTensors,
               ConvBackwardTensors, MoveTensors, CommitTensors, StepTensors>
      tensors_{};
};

}  // namespace deltic::cases
