// What a call over sequences would run on and need, from shapes alone: no tensor's memory is looked
// at, so that tensors without any (torch's meta device) can be asked about.
#include <string>
#include <string_view>

#include "bridge.h"

extern "C" {
// An implementation's answer; operation: "forward", "decode" or "backward".
typedef void (*deltic_torch_choice_fn)(const char* operation, const char* name, int32_t accepts,
                                       int32_t chosen, const char* sentence);
// A number of bytes: "workspace" or "saved" of an operation.
typedef void (*deltic_torch_bytes_fn)(const char* operation, const char* what, uint64_t bytes);
// A way to divide the work over a GPU (deltic_explain_division).
typedef void (*deltic_torch_way_fn)(const char* impl, const char* what, double predicted_us,
                                    int32_t chosen, const char* reason);
typedef struct deltic_torch_listener {
  deltic_torch_choice_fn choice;
  deltic_torch_bytes_fn bytes;
  deltic_torch_way_fn way;
} deltic_torch_listener;
}

namespace deltic::bridge {
namespace {

thread_local std::string t_text;

struct Slot {
  std::string_view name;
  deltic_tensor deltic_tensors::*member;
};
constexpr Slot kSlots[] = {{"q", &deltic_tensors::q},
                           {"k", &deltic_tensors::k},
                           {"v", &deltic_tensors::v},
                           {"beta", &deltic_tensors::beta},
                           {"g", &deltic_tensors::g},
                           {"gv", &deltic_tensors::gv},
                           {"A_log", &deltic_tensors::A_log},
                           {"dt_bias", &deltic_tensors::dt_bias},
                           {"initial_state", &deltic_tensors::initial_state},
                           {"state_pool", &deltic_tensors::state_pool},
                           {"read_index", &deltic_tensors::read_index},
                           {"write_index", &deltic_tensors::write_index},
                           {"cu_seqlens", &deltic_tensors::cu_seqlens},
                           {"cu_seqlens_cpu", &deltic_tensors::cu_seqlens_host},
                           {"ckpt_cu", &deltic_tensors::ckpt_cu},
                           {"ckpt_tokens", &deltic_tensors::ckpt_tokens},
                           {"ckpt_slots", &deltic_tensors::ckpt_slots},
                           {"ckpt_states", &deltic_tensors::ckpt_states},
                           {"write_pool", &deltic_tensors::write_pool},
                           {"has_initial_state", &deltic_tensors::has_initial_state},
                           {"accepted", &deltic_tensors::accepted},
                           {"parents", &deltic_tensors::parents},
                           {"recurrent_from", &deltic_tensors::recurrent_from},
                           {"positions", &deltic_tensors::positions},
                           {"out", &deltic_tensors::o}};

struct Told {
  const deltic_torch_listener* listener;
  const char* operation;
};

void tell_choice(void* user, const char* name, int32_t accepts, int32_t chosen,
                 const char* sentence) {
  const auto* told = static_cast<const Told*>(user);
  told->listener->choice(told->operation, name, accepts, chosen, sentence);
}

void tell_way(void* user, const char* impl, const char* what, double predicted_us, int32_t chosen,
              const char* reason) {
  static_cast<const Told*>(user)->listener->way(impl, what, predicted_us, chosen, reason);
}

// The gradients of a call of which `want` asks, as backward would be called.
void explain_backward(const Options& options, deltic_tensors& t, int64_t want, int32_t save,
                      const deltic_torch_listener& listener) {
  deltic_backward_tensors b;
  deltic_backward_tensors_init(&b, sizeof b);
  b.forward = &t;
  b.d_o = t.o;
  deltic_tensor d_initial = t.initial_state;
  d_initial.dtype = wide(t.q);
  const std::pair<deltic_tensor*, const deltic_tensor*> pairs[] = {
      {&b.dq, &t.q},
      {&b.dk, &t.k},
      {&b.dv, &t.v},
      {&b.dbeta, &t.beta},
      {&b.dg, &t.g},
      {&b.dgv, &t.gv},
      {&b.dA_log, &t.A_log},
      {&b.ddt_bias, &t.dt_bias},
      {&b.d_initial_state, &d_initial}};
  for (int i = 0; i < 9; ++i) {
    if ((want >> i & 1) != 0 && pairs[i].second->rank != 0)
      *pairs[i].first = plan_like(*pairs[i].second);
  }
  deltic_options mine = options.c;
  mine.save = DELTIC_SAVE_NONE;  // an option of forward
  t.o = t.final_state = {};
  Told told{&listener, "backward"};
  check(deltic_backward_explain(&mine, &b, tell_choice, &told));
  deltic_memory_plan plan;
  deltic_memory_plan_init(&plan, sizeof plan);
  const deltic_status status = deltic_backward_memory(&mine, &b, save, nullptr, &plan);
  if (status == DELTIC_UNSUPPORTED) return;  // nobody takes it, as was said
  check(status);
  listener.bytes("backward", "workspace", plan.workspace_bytes);
  listener.bytes("forward", "saved", plan.saved_bytes);
}

void explain(const char* op, const char* words, const double* scale, const double* lower_bound,
             int32_t count, const char* const* names, const deltic_tensor* tensors, int64_t want,
             int32_t num_sms, const deltic_torch_listener& listener) {
  const auto number = [](const double* x) { return x == nullptr ? MaybeFloat{} : MaybeFloat{*x}; };
  Options options(op, words, number(scale), number(lower_bound));
  deltic_tensors t;
  deltic_tensors_init(&t, sizeof t);
  for (int32_t i = 0; i < count; ++i) {
    for (const Slot& slot : kSlots) {
      if (slot.name == names[i]) t.*slot.member = tensors[i];
    }
  }
  plan_outputs(t, options);
  const bool is_decode = std::string_view(op).starts_with("decode");
  if (std::string_view(op) == "decode_") t.final_state = {};
  const int32_t save = options.c.save;
  const bool is_cuda = t.q.device_type == DELTIC_CUDA;
  options.c.save = DELTIC_SAVE_NONE;  // decides nothing, and an oracle without it still takes calls
  Told told{&listener, is_decode ? "decode" : "forward"};
  check(deltic_explain(is_decode ? DELTIC_DECODE : DELTIC_FORWARD, &options.c, &t, tell_choice,
                       &told));
  uint64_t bytes = 0;
  const auto query = is_decode ? deltic_decode_workspace : deltic_forward_workspace;
  const deltic_status status = query(&options.c, &t, nullptr, &bytes);
  if (status == DELTIC_OK) listener.bytes(told.operation, "workspace", bytes);
  if (status != DELTIC_OK && status != DELTIC_UNSUPPORTED && !is_cuda) check(status);
  if (is_cuda && !is_decode) {
    check(deltic_explain_division(&options.c, &t, num_sms, nullptr, tell_way, &told));
  }
  if (want != 0) explain_backward(options, t, want, save, listener);
}

}  // namespace
}  // namespace deltic::bridge

extern "C" {

// Explains a call of the operator `op` with these tensors by their names in its schema; `want` as
// in backward, 0 for none. Returns a deltic_status; deltic_torch_explain_error is its text.
DELTIC_API int32_t deltic_torch_explain(const char* op, const char* words, const double* scale,
                                        const double* lower_bound, int32_t count,
                                        const char* const* names, const deltic_tensor* tensors,
                                        int64_t want, int32_t num_sms,
                                        const deltic_torch_listener* listener) {
  using namespace deltic::bridge;
  try {
    explain(op, words, scale, lower_bound, count, names, tensors, want, num_sms, *listener);
    return DELTIC_OK;
  } catch (const std::exception& e) {
    t_text = e.what();
    return deltic_torch_last_status();
  }
}
DELTIC_API const char* deltic_torch_explain_error() { return deltic::bridge::t_text.c_str(); }

// Every implementation of this build: whether the machine can run it, the sentence if not, and
// whether a call has to name it.
DELTIC_API void deltic_torch_implementations(void (*fn)(const char* operation, int32_t device,
                                                        const char* name, int32_t runs_here,
                                                        const char* sentence,
                                                        int32_t only_when_named)) {
  for (int32_t op = 0; op < DELTIC_NUM_OPS; ++op) {
    for (const int32_t device : {DELTIC_CPU, DELTIC_CUDA}) {
      for (int32_t i = 0;; ++i) {
        const char* name = deltic_implementation(op, device, i);
        if (name == nullptr) break;
        const char* sentence = "";
        const int32_t runs = deltic_implementation_runs_here(op, device, i, &sentence);
        fn(deltic_op_name(op), device, name, runs, sentence,
           deltic_implementation_only_when_named(op, device, i));
      }
    }
  }
}

}  // extern "C"
