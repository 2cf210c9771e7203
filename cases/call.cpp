// Calls: the tensors' names, and which functions belong to which operation.
#include "cases/call.h"

#include <array>

namespace deltic::cases {
namespace {

template <class T>
struct Field {
  const char* name;
  TensorView T::*member;
};
#define FIELD(type, name) \
  Field<type> { #name, &type::name }

constexpr std::array kSequence = {FIELD(Tensors, q),
                                  FIELD(Tensors, k),
                                  FIELD(Tensors, v),
                                  FIELD(Tensors, o),
                                  FIELD(Tensors, beta),
                                  FIELD(Tensors, g),
                                  FIELD(Tensors, gv),
                                  FIELD(Tensors, A_log),
                                  FIELD(Tensors, dt_bias),
                                  FIELD(Tensors, cu_seqlens),
                                  FIELD(Tensors, cu_seqlens_host),
                                  FIELD(Tensors, initial_state),
                                  FIELD(Tensors, final_state),
                                  FIELD(Tensors, state_pool),
                                  FIELD(Tensors, read_index),
                                  FIELD(Tensors, write_index),
                                  FIELD(Tensors, ckpt_cu),
                                  FIELD(Tensors, ckpt_tokens),
                                  FIELD(Tensors, ckpt_slots),
                                  FIELD(Tensors, ckpt_states),
                                  FIELD(Tensors, write_pool),
                                  FIELD(Tensors, has_initial_state),
                                  FIELD(Tensors, accepted),
                                  FIELD(Tensors, parents),
                                  FIELD(Tensors, recurrent_from),
                                  FIELD(Tensors, record),
                                  FIELD(Tensors, positions)};
constexpr std::array kBackward = {FIELD(BackwardTensors, d_o),
                                  FIELD(BackwardTensors, d_final_state),
                                  FIELD(BackwardTensors, dq),
                                  FIELD(BackwardTensors, dk),
                                  FIELD(BackwardTensors, dv),
                                  FIELD(BackwardTensors, dbeta),
                                  FIELD(BackwardTensors, dg),
                                  FIELD(BackwardTensors, dgv),
                                  FIELD(BackwardTensors, dA_log),
                                  FIELD(BackwardTensors, ddt_bias),
                                  FIELD(BackwardTensors, d_initial_state)};
constexpr std::array kBlock = {FIELD(BlockTensors, q),
                               FIELD(BlockTensors, k),
                               FIELD(BlockTensors, v),
                               FIELD(BlockTensors, x),
                               FIELD(BlockTensors, g),
                               FIELD(BlockTensors, beta),
                               FIELD(BlockTensors, A_log),
                               FIELD(BlockTensors, dt_bias),
                               FIELD(BlockTensors, a),
                               FIELD(BlockTensors, cu_seqlens),
                               FIELD(BlockTensors, cu_seqlens_host),
                               FIELD(BlockTensors, out),
                               FIELD(BlockTensors, w),
                               FIELD(BlockTensors, u),
                               FIELD(BlockTensors, kg),
                               FIELD(BlockTensors, qg),
                               FIELD(BlockTensors, rstd),
                               FIELD(BlockTensors, z),
                               FIELD(BlockTensors, weight)};
constexpr std::array kBlockBackward = {
    FIELD(BlockBackwardTensors, d_out),  FIELD(BlockBackwardTensors, d_w),
    FIELD(BlockBackwardTensors, d_u),    FIELD(BlockBackwardTensors, d_kg),
    FIELD(BlockBackwardTensors, d_qg),   FIELD(BlockBackwardTensors, dq),
    FIELD(BlockBackwardTensors, dk),     FIELD(BlockBackwardTensors, dv),
    FIELD(BlockBackwardTensors, dx),     FIELD(BlockBackwardTensors, dg),
    FIELD(BlockBackwardTensors, dbeta),  FIELD(BlockBackwardTensors, da),
    FIELD(BlockBackwardTensors, dA_log), FIELD(BlockBackwardTensors, ddt_bias),
    FIELD(BlockBackwardTensors, dz),     FIELD(BlockBackwardTensors, dweight)};
constexpr std::array kConv = {FIELD(ConvTensors, x),
                              FIELD(ConvTensors, weight),
                              FIELD(ConvTensors, bias),
                              FIELD(ConvTensors, cu_seqlens),
                              FIELD(ConvTensors, cu_seqlens_host),
                              FIELD(ConvTensors, initial_state),
                              FIELD(ConvTensors, final_state),
                              FIELD(ConvTensors, state_pool),
                              FIELD(ConvTensors, read_index),
                              FIELD(ConvTensors, write_index),
                              FIELD(ConvTensors, out),
                              FIELD(ConvTensors, write_pool),
                              FIELD(ConvTensors, has_initial_state),
                              FIELD(ConvTensors, accepted),
                              FIELD(ConvTensors, ckpt_cu),
                              FIELD(ConvTensors, ckpt_tokens),
                              FIELD(ConvTensors, ckpt_slots),
                              FIELD(ConvTensors, ckpt_states)};
constexpr std::array kConvBackward = {
    FIELD(ConvBackwardTensors, d_out), FIELD(ConvBackwardTensors, d_final_state),
    FIELD(ConvBackwardTensors, dx),    FIELD(ConvBackwardTensors, dweight),
    FIELD(ConvBackwardTensors, dbias), FIELD(ConvBackwardTensors, d_initial_state)};
constexpr std::array kMove = {FIELD(MoveTensors, state_pool), FIELD(MoveTensors, write_pool),
                              FIELD(MoveTensors, read_index), FIELD(MoveTensors, write_index)};
constexpr std::array kCommit = {
    FIELD(CommitTensors, state_pool),  FIELD(CommitTensors, record),
    FIELD(CommitTensors, accepted),    FIELD(CommitTensors, read_index),
    FIELD(CommitTensors, write_index), FIELD(CommitTensors, has_initial_state),
    FIELD(CommitTensors, parents)};
#undef FIELD

template <class T, size_t N>
TensorView* find(T& tensors, const std::array<Field<T>, N>& fields, std::string_view name) {
  for (const Field<T>& f : fields) {
    if (name == f.name) return &(tensors.*f.member);
  }
  return nullptr;
}

// A gradient's own tensors, and those of the call that it is of.
TensorView* find(Tensors& t, std::string_view name) { return find(t, kSequence, name); }
TensorView* find(BlockTensors& t, std::string_view name) { return find(t, kBlock, name); }
TensorView* find(ConvTensors& t, std::string_view name) { return find(t, kConv, name); }
TensorView* find(MoveTensors& t, std::string_view name) { return find(t, kMove, name); }
TensorView* find(CommitTensors& t, std::string_view name) { return find(t, kCommit, name); }
template <class T, size_t N>
TensorView* find_either(T& t, const std::array<Field<T>, N>& fields, std::string_view name) {
  TensorView* own = find(t, fields, name);
  return own != nullptr ? own : find(t.forward, name);
}
TensorView* find(BackwardTensors& t, std::string_view name) {
  return find_either(t, kBackward, name);
}
TensorView* find(BlockBackwardTensors& t, std::string_view name) {
  return find_either(t, kBlockBackward, name);
}
TensorView* find(ConvBackwardTensors& t, std::string_view name) {
  return find_either(t, kConvBackward, name);
}

TensorView* find(StepTensors& t, std::string_view name) {
  if (name.starts_with("conv.")) return find(t.conv, name.substr(5));
  if (name.starts_with("norm.")) return find(t.norm, name.substr(5));
  if (name.starts_with("cu_seqlens")) return find(t.conv, name);
  return find(t.decode, name);
}

size_t bytes_of(Op op, const Options& o, const Tensors& t, void* stream) {
  return op == Op::decode ? decode_workspace_bytes(o, t, stream)
                          : forward_workspace_bytes(o, t, stream);
}
size_t bytes_of(Op, const Options& o, const BackwardTensors& t, void* stream) {
  return backward_workspace_bytes(o, t, stream);
}
size_t bytes_of(Op op, const Options& o, const BlockTensors& t, void* stream) {
  return block_workspace_bytes(op, o, t, stream);
}
size_t bytes_of(Op op, const Options& o, const BlockBackwardTensors& t, void* stream) {
  return block_backward_workspace_bytes(op, o, t, stream);
}
size_t bytes_of(Op, const Options& o, const ConvTensors& t, void* stream) {
  return conv_workspace_bytes(o, t, stream);
}
size_t bytes_of(Op, const Options& o, const ConvBackwardTensors& t, void* stream) {
  return conv_backward_workspace_bytes(o, t, stream);
}
size_t bytes_of(Op, const Options& o, const MoveTensors& t, void* stream) {
  return move_workspace_bytes(o, t, stream);
}
size_t bytes_of(Op, const Options& o, const CommitTensors& t, void* stream) {
  return commit_workspace_bytes(o, t, stream);
}
size_t bytes_of(Op, const Options& o, const StepTensors& t, void* stream) {
  return step_workspace_bytes(o, t, stream);
}

void run_it(Op op, const Options& o, const Tensors& t, const deltic_workspace& w, void* stream) {
  op == Op::decode ? decode(o, t, w, stream) : forward(o, t, w, stream);
}
void run_it(Op, const Options& o, const BackwardTensors& t, const deltic_workspace& w,
            void* stream) {
  backward(o, t, w, stream);
}
void run_it(Op op, const Options& o, const BlockTensors& t, const deltic_workspace& w,
            void* stream) {
  block(op, o, t, w, stream);
}
void run_it(Op op, const Options& o, const BlockBackwardTensors& t, const deltic_workspace& w,
            void* stream) {
  block_backward(op, o, t, w, stream);
}
void run_it(Op, const Options& o, const ConvTensors& t, const deltic_workspace& w, void* stream) {
  conv(o, t, w, stream);
}
void run_it(Op, const Options& o, const ConvBackwardTensors& t, const deltic_workspace& w,
            void* stream) {
  conv_backward(o, t, w, stream);
}
void run_it(Op, const Options& o, const MoveTensors& t, const deltic_workspace& w, void* stream) {
  move(o, t, w, stream);
}
void run_it(Op, const Options& o, const CommitTensors& t, const deltic_workspace& w, void* stream) {
  commit(o, t, w, stream);
}
void run_it(Op, const Options& o, const StepTensors& t, const deltic_workspace& w, void* stream) {
  step(o, t, w, stream);
}

std::vector<Choice> ask(Op op, const Options& o, const Tensors& t) {
  return deltic::explain(op, o, t);
}
std::vector<Choice> ask(Op, const Options& o, const BackwardTensors& t) {
  return deltic::explain(o, t);
}
std::vector<Choice> ask(Op op, const Options& o, const BlockTensors& t) {
  return deltic::explain(op, o, t);
}
std::vector<Choice> ask(Op op, const Options& o, const BlockBackwardTensors& t) {
  return deltic::explain(op, o, t);
}
std::vector<Choice> ask(Op, const Options& o, const ConvTensors& t) {
  return deltic::explain(o, t);
}
std::vector<Choice> ask(Op, const Options& o, const ConvBackwardTensors& t) {
  return deltic::explain(o, t);
}
std::vector<Choice> ask(Op, const Options& o, const MoveTensors& t) {
  return deltic::explain(o, t);
}
std::vector<Choice> ask(Op, const Options& o, const CommitTensors& t) {
  return deltic::explain(o, t);
}
std::vector<Choice> ask(Op, const Options& o, const StepTensors& t) {
  return deltic::explain(o, t);
}

}  // namespace

Call::Call(Op op, bool is_gradient) : op_(op) {
  switch (op) {
    case Op::forward:
    case Op::decode:
      break;
    case Op::backward:
      tensors_.emplace<BackwardTensors>();
      break;
    case Op::move:
      tensors_.emplace<MoveTensors>();
      break;
    case Op::commit:
      tensors_.emplace<CommitTensors>();
      break;
    case Op::step:
      tensors_.emplace<StepTensors>();
      break;
    case Op::conv:
      if (is_gradient) {
        tensors_.emplace<ConvBackwardTensors>();
      } else {
        tensors_.emplace<ConvTensors>();
      }
      break;
    default:
      if (is_gradient) {
        tensors_.emplace<BlockBackwardTensors>();
      } else {
        tensors_.emplace<BlockTensors>();
      }
  }
}

bool Call::set(std::string_view name, const TensorView& view) {
  TensorView* field = std::visit([&](auto& t) { return find(t, name); }, tensors_);
  if (field == nullptr) return false;
  *field = view;
  return true;
}

TensorView Call::get(std::string_view name) const {
  const TensorView* field =
      std::visit([&](auto& t) { return find(t, name); }, const_cast<Call*>(this)->tensors_);
  return field != nullptr ? *field : TensorView();
}

void Call::set_saved(const deltic_buffer& saved) {
  if (op_ == Op::backward) {
    std::get<BackwardTensors>(tensors_).forward.saved = saved;
  } else {
    std::get<Tensors>(tensors_).saved = saved;
  }
}

size_t Call::workspace_bytes(const Options& options, void* stream) const {
  return std::visit([&](const auto& t) { return bytes_of(op_, options, t, stream); }, tensors_);
}

void Call::run(const Options& options, const deltic_workspace& workspace, void* stream) const {
  std::visit([&](const auto& t) { run_it(op_, options, t, workspace, stream); }, tensors_);
}

void Call::run(const Options& options) const {
  const Workspace workspace(workspace_bytes(options));
  run(options, workspace.c());
}

std::vector<Choice> Call::explain(const Options& options) const {
  return std::visit([&](const auto& t) { return ask(op_, options, t); }, tensors_);
}

}  // namespace deltic::cases
