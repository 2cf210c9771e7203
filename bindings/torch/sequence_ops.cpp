// The operators over whole sequences: forward, backward and decode, and the ones that write into a
// state pool or into checkpoints in place.
#include <cstring>
#include <span>
#include <string>
#include <tuple>

#include "bridge.h"

namespace deltic::bridge {
namespace {

// Everything forward and decode may take. Members that an operator's schema does not have stay
// absent.
struct Inputs : Call {
  deltic_tensors t{};

  Inputs(const char* op, const std::string& words, MaybeFloat scale, MaybeFloat lower_bound)
      : Call(op, words, scale, lower_bound) {
    deltic_tensors_init(&t, sizeof t);
  }

  void rows(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& beta,
            const MaybeTensor& g, const MaybeTensor& gv, const MaybeTensor& A_log,
            const MaybeTensor& dt_bias) {
    t.q = input("q", q), t.k = input("k", k), t.v = input("v", v);
    t.beta = input("beta", beta), t.g = input("g", g), t.gv = input("gv", gv);
    t.A_log = input("A_log", A_log), t.dt_bias = input("dt_bias", dt_bias);
  }
  void initial_state(const MaybeTensor& state) { t.initial_state = input("initial_state", state); }
  void sequences(const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu) {
    t.cu_seqlens = input("cu_seqlens", cu_seqlens);
    t.cu_seqlens_host = input("cu_seqlens_host", cu_seqlens_cpu);
  }
  void pool(const MaybeTensor& state_pool, const MaybeTensor& read_index,
            const MaybeTensor& write_index) {
    t.state_pool = as_given("state_pool", state_pool);
    t.read_index = as_given("read_index", read_index);
    t.write_index = as_given("write_index", write_index);
  }
  void recurrent_from(const MaybeTensor& from) {
    t.recurrent_from = as_given("recurrent_from", from);
  }
  void tree(const MaybeTensor& parents) { t.parents = as_given("parents", parents); }
  void positions(const MaybeTensor& of) { t.positions = as_given("positions", of); }
  void servers_lists(const MaybeTensor& write_pool, const MaybeTensor& has_initial_state,
                     const MaybeTensor& accepted) {
    t.write_pool = as_given("write_pool", write_pool);
    t.has_initial_state = flags("has_initial_state", has_initial_state);
    t.accepted = as_given("accepted", accepted);
  }
  void checkpoints(const MaybeTensor& cu, const MaybeTensor& tokens, const MaybeTensor& slots,
                   const MaybeTensor& states) {
    t.ckpt_cu = input("ckpt_cu", cu), t.ckpt_tokens = input("ckpt_tokens", tokens);
    t.ckpt_slots = input("ckpt_slots", slots);
    t.ckpt_states = as_given("ckpt_states", states);
  }

  // Checks everything but values, before any memory is taken. A call like the one before it on this
  // thread has its answer: asking takes a third of the library's own time.
  uint64_t workspace_bytes(bool is_decode) {
    const Question question(is_decode, options, t, stream_of(t.q));
    Answer& last = last_answer();
    is_known_ = question.can_be_kept() && last.question == question;
    if (is_known_) return last.bytes;
    const uint64_t bytes = ask(is_decode);
    if (question.can_be_kept()) last = {question, bytes};
    return bytes;
  }
  // Settings that the answer depends on may have changed since. Then the call is refused before it
  // does anything, and made once more with what it needs now.
  void run(bool is_decode, uint64_t bytes) {
    const auto function = is_decode ? deltic_decode : deltic_forward;
    if (is_known_) {
      const Workspace workspace(bytes, t.q);
      const deltic_status status = function(&options.c, &t, workspace.c(), stream_of(t.q));
      if (status != DELTIC_INVALID_ARGUMENT) return check_call(status, workspace, t.q);
      last_answer() = {};
      bytes = ask(is_decode);
    }
    const Workspace workspace(bytes, t.q);
    check_call(function(&options.c, &t, workspace.c(), stream_of(t.q)), workspace, t.q);
  }

 private:
  // All that the size of the workspace follows from, but settings of the process.
  struct Question {
    bool is_decode = false, is_named = false;
    void* stream = nullptr;
    deltic_options options{};
    deltic_tensors tensors{};  // of addresses the last bits: implementations look at alignment

    Question() = default;
    Question(bool decode, const Options& given, const deltic_tensors& t, void* of)
        : is_decode(decode), is_named(given.c.impl != nullptr), stream(of), options(given.c) {
      constexpr uintptr_t kAlignment = 64;
      tensors = t;
      const std::span<deltic_tensor> first(&tensors.q, &tensors.ckpt_states + 1);
      const std::span<deltic_tensor> more(&tensors.write_pool, &tensors.positions + 1);
      for (const auto& run : {first, more}) {
        for (deltic_tensor& x : run)
          x.data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(x.data) % kAlignment);
      }
    }
    // A name is a pointer; checkpoints may lie in the pool itself, which addresses say; who listens
    // is told of every question.
    bool can_be_kept() const {
      return !is_named && tensors.ckpt_states.rank == 0 && tensors.saved.bytes == 0 && !is_logged();
    }
    // The structs have no bytes without a name.
    bool operator==(const Question& other) const {
      return is_decode == other.is_decode && stream == other.stream &&
             std::memcmp(&options, &other.options, sizeof options) == 0 &&
             std::memcmp(&tensors, &other.tensors, sizeof tensors) == 0;
    }
  };
  struct Answer {
    Question question;
    uint64_t bytes = 0;
  };
  static Answer& last_answer() {
    static thread_local Answer last;
    return last;
  }
  uint64_t ask(bool is_decode) const {
    uint64_t bytes = 0;
    const auto function = is_decode ? deltic_decode_workspace : deltic_forward_workspace;
    check(function(&options.c, &t, stream_of(t.q), &bytes));
    return bytes;
  }

  bool is_known_ = false;  // the answer is that of a call before
};

// What decode and forward share: no state but the initial one, nothing kept.
std::tuple<Tensor, Tensor> run_functional(Inputs& in, bool is_decode,
                                          const MaybeTensor& initial_state) {
  in.initial_state(initial_state);
  plan_outputs(in.t, in.options);
  const uint64_t bytes = in.workspace_bytes(is_decode);
  Tensor o = allocate(in.t.o, in.t.q), final_state = allocate(in.t.final_state, in.t.q);
  in.run(is_decode, bytes);
  return {o, final_state};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const MaybeTensor& beta, const MaybeTensor& g,
                                   const MaybeTensor& A_log, const MaybeTensor& dt_bias,
                                   const MaybeTensor& initial_state, const MaybeTensor& cu_seqlens,
                                   const MaybeTensor& cu_seqlens_cpu, MaybeFloat scale,
                                   MaybeFloat lower_bound, const std::string& options) {
  Inputs in("forward", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, std::nullopt, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  return run_functional(in, false, initial_state);
}

// Forward that keeps what backward needs, and returns checkpoints as a new tensor.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_save(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& beta,
    const MaybeTensor& g, const MaybeTensor& A_log, const MaybeTensor& dt_bias,
    const MaybeTensor& initial_state, const MaybeTensor& cu_seqlens,
    const MaybeTensor& cu_seqlens_cpu, const MaybeTensor& ckpt_cu, const MaybeTensor& ckpt_tokens,
    const MaybeTensor& ckpt_slots, const MaybeTensor& ckpt_states,
    const MaybeTensor& recurrent_from, MaybeFloat scale, MaybeFloat lower_bound,
    const std::string& options) {
  Inputs in("forward_save", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, std::nullopt, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  in.initial_state(initial_state);
  in.checkpoints(ckpt_cu, ckpt_tokens, ckpt_slots, ckpt_states);
  in.recurrent_from(recurrent_from);
  plan_outputs(in.t, in.options);
  const ForwardBytes bytes = forward_bytes(in.options.c, in.t, stream_of(in.t.q));

  Tensor o = allocate(in.t.o, in.t.q), final_state = allocate(in.t.final_state, in.t.q);
  Tensor saved = zeroed_bytes(bytes.saved, in.t.q);
  if (bytes.saved > 0) in.t.saved = {saved.data_ptr(), bytes.saved};
  deltic_tensor none{};
  Tensor ckpt =
      ckpt_states.has_value() ? torch::stable::clone(*ckpt_states) : allocate(none, in.t.q);
  if (ckpt_states.has_value()) in.t.ckpt_states = in.as_given("ckpt_states", ckpt);
  in.run(false, bytes.workspace);
  return {o, final_state, ckpt, saved};
}

std::tuple<Tensor, Tensor> forward_(const Tensor& q, const Tensor& k, const Tensor& v,
                                    const MaybeTensor& beta, const MaybeTensor& g,
                                    const MaybeTensor& A_log, const MaybeTensor& dt_bias,
                                    const MaybeTensor& initial_state, const MaybeTensor& state_pool,
                                    const MaybeTensor& read_index, const MaybeTensor& write_index,
                                    const MaybeTensor& cu_seqlens,
                                    const MaybeTensor& cu_seqlens_cpu, const MaybeTensor& ckpt_cu,
                                    const MaybeTensor& ckpt_tokens, const MaybeTensor& ckpt_slots,
                                    const MaybeTensor& ckpt_states, MaybeFloat scale,
                                    MaybeFloat lower_bound, const std::string& options) {
  Inputs in("forward_", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, std::nullopt, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  in.initial_state(initial_state);
  in.pool(state_pool, read_index, write_index);
  in.checkpoints(ckpt_cu, ckpt_tokens, ckpt_slots, ckpt_states);
  plan_outputs(in.t, in.options);
  const uint64_t bytes = in.workspace_bytes(false);
  Tensor o = allocate(in.t.o, in.t.q), final_state = allocate(in.t.final_state, in.t.q);
  in.run(false, bytes);
  return {o, final_state};
}

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k, const Tensor& v,
                                  const MaybeTensor& beta, const MaybeTensor& g,
                                  const MaybeTensor& gv, const MaybeTensor& A_log,
                                  const MaybeTensor& dt_bias, const MaybeTensor& initial_state,
                                  const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
                                  MaybeFloat scale, MaybeFloat lower_bound,
                                  const std::string& options) {
  Inputs in("decode", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, gv, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  return run_functional(in, true, initial_state);
}

Tensor decode_(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& beta,
               const MaybeTensor& g, const MaybeTensor& gv, const MaybeTensor& A_log,
               const MaybeTensor& dt_bias, const Tensor& state_pool, const MaybeTensor& read_index,
               const MaybeTensor& write_index, const MaybeTensor& cu_seqlens,
               const MaybeTensor& cu_seqlens_cpu, MaybeFloat scale, MaybeFloat lower_bound,
               const std::string& options) {
  Inputs in("decode_", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, gv, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  in.pool(state_pool, read_index, write_index);
  plan_outputs(in.t, in.options);
  const uint64_t bytes = in.workspace_bytes(true);
  Tensor o = allocate(in.t.o, in.t.q);
  in.run(true, bytes);
  return o;
}

// The rest of a call with everything that servers have: o goes into `out` where that is given, and
// comes back empty then.
std::tuple<Tensor, Tensor> run_out(Inputs& in, bool is_decode, const MaybeTensor& out) {
  in.t.o = in.as_given("o", out);
  plan_outputs(in.t, in.options);
  const uint64_t bytes = in.workspace_bytes(is_decode);
  deltic_tensor none{};
  Tensor o = allocate(out.has_value() ? none : in.t.o, in.t.q);
  Tensor final_state = allocate(in.t.final_state, in.t.q);
  in.run(is_decode, bytes);
  return {o, final_state};
}

std::tuple<Tensor, Tensor> forward_out_(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& beta,
    const MaybeTensor& g, const MaybeTensor& A_log, const MaybeTensor& dt_bias,
    const MaybeTensor& initial_state, const MaybeTensor& state_pool, const MaybeTensor& read_index,
    const MaybeTensor& write_index, const MaybeTensor& write_pool,
    const MaybeTensor& has_initial_state, const MaybeTensor& accepted,
    const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu, const MaybeTensor& ckpt_cu,
    const MaybeTensor& ckpt_tokens, const MaybeTensor& ckpt_slots, const MaybeTensor& ckpt_states,
    const MaybeTensor& recurrent_from, const MaybeTensor& out, MaybeFloat scale,
    MaybeFloat lower_bound, const std::string& options) {
  Inputs in("forward_out_", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, std::nullopt, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  in.initial_state(initial_state);
  in.pool(state_pool, read_index, write_index);
  in.servers_lists(write_pool, has_initial_state, accepted);
  in.checkpoints(ckpt_cu, ckpt_tokens, ckpt_slots, ckpt_states);
  in.recurrent_from(recurrent_from);
  return run_out(in, false, out);
}

std::tuple<Tensor, Tensor> decode_out_(
    const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& beta,
    const MaybeTensor& g, const MaybeTensor& gv, const MaybeTensor& A_log,
    const MaybeTensor& dt_bias, const MaybeTensor& initial_state, const MaybeTensor& state_pool,
    const MaybeTensor& read_index, const MaybeTensor& write_index, const MaybeTensor& write_pool,
    const MaybeTensor& has_initial_state, const MaybeTensor& accepted, const MaybeTensor& parents,
    const MaybeTensor& positions, const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
    const MaybeTensor& out, MaybeFloat scale, MaybeFloat lower_bound, const std::string& options) {
  Inputs in("decode_out_", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, gv, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  in.initial_state(initial_state);
  in.pool(state_pool, read_index, write_index);
  in.servers_lists(write_pool, has_initial_state, accepted);
  in.tree(parents), in.positions(positions);
  return run_out(in, true, out);
}

// Drafted tokens, whose updates go into `record`: no state is written.
Tensor decode_record_(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& beta,
                      const MaybeTensor& g, const MaybeTensor& A_log, const MaybeTensor& dt_bias,
                      const Tensor& state_pool, const MaybeTensor& read_index,
                      const MaybeTensor& has_initial_state, const MaybeTensor& accepted,
                      const MaybeTensor& parents, const Tensor& record,
                      const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
                      const MaybeTensor& out, MaybeFloat scale, MaybeFloat lower_bound,
                      const std::string& options) {
  Inputs in("decode_record_", options, scale, lower_bound);
  in.rows(q, k, v, beta, g, std::nullopt, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  in.pool(state_pool, read_index, std::nullopt);
  in.servers_lists(std::nullopt, has_initial_state, accepted);
  in.tree(parents);
  in.t.record = in.as_given("record", record);
  return std::get<0>(run_out(in, true, out));
}

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Bit i of `want` asks for the i-th gradient; the others come back empty.
Gradients backward(const MaybeTensor& d_o, const MaybeTensor& d_final_state, const Tensor& q,
                   const Tensor& k, const Tensor& v, const MaybeTensor& beta, const MaybeTensor& g,
                   const MaybeTensor& gv, const MaybeTensor& A_log, const MaybeTensor& dt_bias,
                   const MaybeTensor& initial_state, const MaybeTensor& cu_seqlens,
                   const MaybeTensor& cu_seqlens_cpu, const MaybeTensor& saved, MaybeFloat scale,
                   MaybeFloat lower_bound, const std::string& options, int64_t want) {
  Inputs in("backward", options, scale, lower_bound);
  check_wanted(in.function(), want, 9);
  in.rows(q, k, v, beta, g, gv, A_log, dt_bias);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  in.initial_state(initial_state);
  if (saved.has_value() && saved->numel() > 0) {
    in.t.saved = {saved->data_ptr(), static_cast<uint64_t>(saved->numel())};
  }
  deltic_backward_tensors b;
  deltic_backward_tensors_init(&b, sizeof b);
  b.forward = &in.t;
  b.d_o = in.gradient("d_o", d_o);
  b.d_final_state = in.gradient("d_final_state", d_final_state);
  const deltic_tensor& where = in.t.q;
  deltic_tensor d_initial = in.t.initial_state;
  d_initial.dtype = wide(in.t.q);  // added up in fp32 whatever the state is kept in
  const std::pair<deltic_tensor*, const deltic_tensor*> pairs[] = {
      {&b.dq, &in.t.q},
      {&b.dk, &in.t.k},
      {&b.dv, &in.t.v},
      {&b.dbeta, &in.t.beta},
      {&b.dg, &in.t.g},
      {&b.dgv, &in.t.gv},
      {&b.dA_log, &in.t.A_log},
      {&b.ddt_bias, &in.t.dt_bias},
      {&b.d_initial_state, &d_initial}};
  for (int i = 0; i < 9; ++i) {
    if ((want >> i & 1) != 0 && pairs[i].second->rank != 0)
      *pairs[i].first = plan_like(*pairs[i].second);
  }
  uint64_t bytes = 0;
  check(deltic_backward_workspace(&in.options.c, &b, stream_of(where), &bytes));
  const auto make = [&](deltic_tensor& planned) { return allocate(planned, where); };
  Gradients gradients{make(b.dq),     make(b.dk),       make(b.dv),
                      make(b.dbeta),  make(b.dg),       make(b.dgv),
                      make(b.dA_log), make(b.ddt_bias), make(b.d_initial_state)};
  const Workspace workspace(bytes, where);
  check_call(deltic_backward(&in.options.c, &b, workspace.c(), stream_of(where)), workspace, where);
  return gradients;
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("forward_save", TORCH_BOX(&forward_save));
  m.impl("forward_", TORCH_BOX(&forward_));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("decode_", TORCH_BOX(&decode_));
  m.impl("forward_out_", TORCH_BOX(&forward_out_));
  m.impl("decode_out_", TORCH_BOX(&decode_out_));
  m.impl("decode_record_", TORCH_BOX(&decode_record_));
}

// Tensor arguments and options that operators share, in their order.
#define DELTIC_ROWS "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? g, "
#define DELTIC_GATE_PARAMS "Tensor? A_log, Tensor? dt_bias, "
#define DELTIC_SEQUENCES "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, "
#define DELTIC_CHECKPOINTS "Tensor? ckpt_cu, Tensor? ckpt_tokens, Tensor? ckpt_slots, "
#define DELTIC_POOLS                                                  \
  "Tensor(a!)? state_pool, Tensor? read_index, Tensor? write_index, " \
  "Tensor(b!)? write_pool, Tensor? has_initial_state, Tensor? accepted, "
#define DELTIC_OPTIONS "float? scale=None, float? lower_bound=None, str options=''"

DELTIC_TORCH_OPERATORS(DELTIC_TORCH_NAMESPACE, m) {
  m.def("forward(" DELTIC_ROWS DELTIC_GATE_PARAMS
        "Tensor? initial_state, " DELTIC_SEQUENCES DELTIC_OPTIONS
        ") -> (Tensor o, Tensor final_state)");
  m.def("forward_save(" DELTIC_ROWS DELTIC_GATE_PARAMS
        "Tensor? initial_state, " DELTIC_SEQUENCES DELTIC_CHECKPOINTS
        "Tensor? ckpt_states, Tensor? recurrent_from, " DELTIC_OPTIONS
        ") -> (Tensor o, Tensor final_state, Tensor ckpt_states, Tensor saved)");
  m.def("forward_(" DELTIC_ROWS DELTIC_GATE_PARAMS
        "Tensor? initial_state, Tensor(a!)? state_pool, Tensor? read_index, Tensor? "
        "write_index, " DELTIC_SEQUENCES DELTIC_CHECKPOINTS
        "Tensor(b!)? ckpt_states, " DELTIC_OPTIONS ") -> (Tensor o, Tensor final_state)");
  m.def("backward(Tensor? d_o, Tensor? d_final_state, " DELTIC_ROWS
        "Tensor? gv, " DELTIC_GATE_PARAMS "Tensor? initial_state, " DELTIC_SEQUENCES
        "Tensor? saved, " DELTIC_OPTIONS
        ", int want=511) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbeta, "
        "Tensor dg, Tensor dgv, Tensor dA_log, Tensor ddt_bias, Tensor d_initial_state)");
  m.def("decode(" DELTIC_ROWS "Tensor? gv, " DELTIC_GATE_PARAMS
        "Tensor? initial_state, " DELTIC_SEQUENCES DELTIC_OPTIONS
        ") -> (Tensor o, Tensor final_state)");
  m.def("decode_(" DELTIC_ROWS "Tensor? gv, " DELTIC_GATE_PARAMS
        "Tensor(a!) state_pool, Tensor? read_index, Tensor? write_index, " DELTIC_SEQUENCES
            DELTIC_OPTIONS ") -> Tensor");
  m.def("forward_out_(" DELTIC_ROWS DELTIC_GATE_PARAMS
        "Tensor? initial_state, " DELTIC_POOLS DELTIC_SEQUENCES DELTIC_CHECKPOINTS
        "Tensor(c!)? ckpt_states, Tensor? recurrent_from, Tensor(d!)? out, " DELTIC_OPTIONS
        ") -> (Tensor o, Tensor final_state)");
  m.def("decode_out_(" DELTIC_ROWS "Tensor? gv, " DELTIC_GATE_PARAMS
        "Tensor? initial_state, " DELTIC_POOLS
        "Tensor? parents, Tensor? positions, " DELTIC_SEQUENCES "Tensor(d!)? out, " DELTIC_OPTIONS
        ") -> (Tensor o, Tensor final_state)");
  m.def("decode_record_(" DELTIC_ROWS DELTIC_GATE_PARAMS
        "Tensor state_pool, Tensor? read_index, Tensor? has_initial_state, Tensor? accepted, "
        "Tensor? parents, Tensor(a!) record, " DELTIC_SEQUENCES "Tensor(d!)? out, " DELTIC_OPTIONS
        ") -> Tensor");
}

DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CPU, m) { register_kernels(m); }
// CUDA tensors take the same way: the library says what it can do with them.
DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace deltic::bridge
