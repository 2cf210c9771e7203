// The path every operation takes: validate once, choose an implementation, run.
#include "api/operation.h"

#include <algorithm>
#include <array>
#include <optional>

#include "api/dispatch.h"
#include "api/settings.h"
#include "api/threads.h"
#include "api/work.h"
#include "core/check.h"
#include "core/error.h"
#include "core/sizes.h"
#include "core/step.h"
#include "core/structs.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

namespace deltic {
namespace {

constexpr uint64_t kWorkspaceAlign = 64;

// The tensors of a call's struct: those that stand side by side in it, and those after a field that
// is none.
using Runs = std::array<std::span<const deltic_tensor>, 2>;
std::span<const deltic_tensor> run(const deltic_tensor& first, const deltic_tensor& last) {
  return {&first, static_cast<size_t>(&last - &first) + 1};
}
Runs tensors_of(const deltic_tensors& t) {
  return {run(t.q, t.ckpt_states), run(t.write_pool, t.positions)};
}
Runs tensors_of(const deltic_block_tensors& t) { return {run(t.q, t.weight)}; }
Runs tensors_of(const deltic_backward_tensors& t) { return {run(t.d_o, t.d_initial_state)}; }
Runs tensors_of(const deltic_block_backward_tensors& t) { return {run(t.d_out, t.dweight)}; }
Runs tensors_of(const deltic_commit_tensors& t) { return {run(t.state_pool, t.parents)}; }
Runs tensors_of(const deltic_move_tensors& t) { return {run(t.state_pool, t.write_index)}; }
Runs tensors_of(const deltic_conv_tensors& t) { return {run(t.x, t.ckpt_states)}; }
Runs tensors_of(const deltic_conv_backward_tensors& t) { return {run(t.d_out, t.d_initial_state)}; }

// f of the struct and of those that it points to.
template <class Tensors, class F>
void for_each_struct(const Tensors& t, const F& f) {
  if constexpr (std::is_same_v<Tensors, deltic_step_tensors>) {
    f(*t.conv), f(*t.decode);
    if (t.norm != nullptr) f(*t.norm);
  } else {
    f(t);
    if constexpr (requires { t.forward; }) f(*t.forward);
  }
}

// The device of the first tensor, which the others must share: who can be named depends on it, and
// the checks on who was named.
template <class Tensors>
deltic_device_type device_in(const Tensors& tensors) {
  if constexpr (requires { tensors.forward; }) {
    return device_in(*tensors.forward);
  } else if constexpr (requires { tensors.conv; }) {
    return device_in(*tensors.conv);
  } else {
    const std::span<const deltic_tensor> first = tensors_of(tensors)[0];
    for (const deltic_tensor& t : first) {
      if (t.rank > 0) return t.device_type == DELTIC_CUDA ? DELTIC_CUDA : DELTIC_CPU;
    }
    return DELTIC_CPU;
  }
}

bool has_first_token(const auto& tensors) {
  if constexpr (requires { tensors.recurrent_from; }) return tensors.recurrent_from.rank != 0;
  return false;
}

CheckContext context_of(deltic_op op, deltic_op listed, const Implementation* named, bool query) {
  return {.query = query,
          .allow_f64 = named != nullptr && named == &reference::implementation(listed),
          .threads = default_threads(),
          .checked = default_checked(name_of(op))};
}

// A step's calls are its own problem's neighbours.
template <class Tensors>
struct Parts {
  Problem check(deltic_op op, const deltic_options& options, const Tensors& tensors,
                const CheckContext& context) {
    return check_call(op, options, tensors, context);
  }
};
template <>
struct Parts<deltic_step_tensors> {
  StepProblem of{};
  Problem check(deltic_op op, const deltic_options& options, const deltic_step_tensors& tensors,
                const CheckContext& context) {
    return check_call(op, options, tensors, context, of);
  }
};

template <class Tensors>
struct Call {
  const EnvironmentOfCall environment;
  const deltic_options options;
  const GivenTensors<Tensors> given;
  const deltic_op listed;  // whose implementations can be named: of a forward that is recurrent
                           // from its first token on they are decode's
  const Implementation* const named;
  Parts<Tensors> parts;
  Problem problem;

  Call(deltic_op op, const deltic_options* caller_options, const Tensors* caller_tensors,
       void* stream, bool query)
      : options(read_options(name_of(op), caller_options)),
        given(name_of(op), caller_tensors),
        listed(op == DELTIC_FORWARD && options.form == DELTIC_FORM_RECURRENT &&
                       !has_first_token(given.tensors)
                   ? DELTIC_DECODE
                   : op),
        named(named_implementation(listed, device_in(given.tensors), options.impl, op)),
        problem(parts.check(op, options, given.tensors, context_of(op, listed, named, query))) {
    problem.stream = stream;
    if (is_forked_child()) problem.threads = 1;
    for_each_part(problem, [&](Problem& p) {
      p.stream = stream, p.threads = problem.threads;
      // Of packed ones the lengths are looked at.
      if (!has_tokens_or_states(p) && !p.packed) p.N = 0;
    });
  }
  Work work() const { return choose_work(problem, named, options.impl); }
};

// Bytes that the call writes, beside everything else it was given.
void check_alone(deltic_op op, const char* name, const deltic_buffer& buffer, uint64_t bytes,
                 const Runs& tensors) {
  for (const std::span<const deltic_tensor> run : tensors) {
    for (const deltic_tensor& t : run) {
      if (overlaps(t, buffer.data, bytes)) {
        fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": ", name,
             ": expected memory of its own, got an overlap with a tensor");
      }
    }
  }
}

// At least `needed` bytes, aligned.
void check_buffer(deltic_op op, const char* name, const deltic_buffer& buffer, uint64_t needed) {
  if (buffer.bytes < needed) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": ", name, ": expected at least ", needed,
         " bytes, got ", buffer.bytes);
  }
  if (needed > 0 && buffer.data == nullptr) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": ", name, ": expected ", needed,
         " bytes, got a null pointer");
  }
  if (reinterpret_cast<uintptr_t>(buffer.data) % kWorkspaceAlign != 0) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": ", name, ": expected memory aligned to ",
         kWorkspaceAlign, " bytes, got a misaligned pointer");
  }
}

// A size of memory, or the sentence that there is none.
template <class Body>
auto sized(const Problem& p, const char* what, const Body& body) {
  try {
    return body();
  } catch (const SizeOverflow&) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(p.op), ": ", what,
         ": expected sizes that need less than 2^63 bytes, got B = ", p.B, ", T = ", p.T,
         ", N = ", p.N, ", H = ", p.H, ", HV = ", p.HV, ", K = ", p.K, ", V = ", p.V, " and ",
         p.threads, p.threads == 1 ? " thread" : " threads");
  }
}

// Whether f holds for a part of a step, or for another call.
template <class F>
bool any_part(const Problem& p, const F& f) {
  bool any = false;
  for_each_part(p, [&](const Problem& part) { any = any || f(part); });
  return any;
}

// Checks of values run before the work, in the same memory.
uint64_t needed_bytes(const Problem& p, const Work& chosen, bool works) {
  return sized(p, "workspace", [&]() -> uint64_t {
    const size_t work = works ? chosen.bytes(p) : 0;
    uint64_t one_by_one = 0;
    int64_t together = 0;
    for_each_part(p, [&](const Problem& part) {
      if (p.device == DELTIC_CPU) {
        one_by_one = std::max<uint64_t>(one_by_one, value_scratch_bytes(part));
      } else if (p.checked) {
        together = checked_sum(together, gpu::check_bytes(part));
      }
    });
    if (p.device == DELTIC_CPU) return std::max<uint64_t>(work, one_by_one);
    return static_cast<uint64_t>(checked_sum(work, together));
  });
}

// Checked mode on a GPU, of every part in memory of its own, before any of them works. Returns how
// much of the memory they have.
size_t check_parts_on_device(Problem& p, std::span<std::byte> memory, void* stream) {
  size_t used = 0;
  for_each_part(p, [&](const Problem& part) {
    const size_t bytes = gpu::check_bytes(part);
    gpu::check_on_device(part, memory.subspan(used, bytes), stream,
                         used > 0 ? memory.data() : nullptr);
    used += bytes;
  });
  p.record = reinterpret_cast<const uint64_t*>(memory.data());
  for_each_part(p, [&](Problem& part) { part.record = p.record; });
  return used;
}

SavedSizes saved_sizes(const Problem& p, deltic_save save) {
  return sized(p, "saved", [&] {
    return p.device == DELTIC_CUDA ? gpu::saved_sizes(p, save) : cpu::saved_sizes(p, save);
  });
}

// What forward keeps, or backward reads: size, alignment, and no other memory of the call's.
template <class Tensors>
void check_saved(const Problem& p, const Tensors& tensors, const deltic_workspace& workspace,
                 uint64_t workspace_bytes) {
  if (p.op == DELTIC_FORWARD) {
    if (p.save == DELTIC_SAVE_NONE && p.saved.bytes != 0) {
      fail(DELTIC_INVALID_ARGUMENT, "forward: saved: expected none without save, got ",
           p.saved.bytes, " bytes");
    }
    check_buffer(p.op, "saved", p.saved, saved_sizes(p, p.save).bytes);
  } else if (p.op == DELTIC_BACKWARD) {
    check_buffer(p.op, "saved", p.saved, p.saved.bytes);
  }
  if (p.saved.bytes == 0) return;
  check_alone(p.op, "saved", p.saved, p.saved.bytes, tensors_of(tensors));
  if (ranges_overlap(reinterpret_cast<uintptr_t>(p.saved.data), p.saved.bytes,
                     reinterpret_cast<uintptr_t>(workspace.data), workspace_bytes)) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(p.op),
         ": saved: expected memory of its own, got an overlap with the workspace");
  }
}

}  // namespace

template <class Tensors>
void workspace_query(deltic_op op, const deltic_options* options, const Tensors* tensors,
                     void* stream, uint64_t* bytes) {
  const Call<Tensors> call(op, options, tensors, stream, true);
  if (bytes == nullptr) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": bytes: expected a pointer, got null");
  }
  *bytes = needed_bytes(call.problem, call.work(), any_part(call.problem, has_work));
}

void saved_query(const deltic_options* options, const deltic_tensors* tensors, uint64_t* bytes) {
  const Call<deltic_tensors> call(DELTIC_FORWARD, options, tensors, nullptr, true);
  if (bytes == nullptr) {
    fail(DELTIC_INVALID_ARGUMENT, "forward: bytes: expected a pointer, got null");
  }
  *bytes = saved_sizes(call.problem, call.problem.save).bytes;
}

void memory_query(const deltic_options* options, const deltic_backward_tensors* tensors,
                  int32_t save, void* stream, deltic_memory_plan* plan) {
  Call<deltic_backward_tensors> call(DELTIC_BACKWARD, options, tensors, stream, true);
  Problem& p = call.problem;
  if (save < DELTIC_SAVE_NONE || save > DELTIC_SAVE_ALL) {
    fail(DELTIC_INVALID_ARGUMENT, "backward: save: expected none (0), states (1) or all (2), got ",
         save);
  }
  deltic_memory_plan result = read_struct("backward", "plan", plan);
  const SavedSizes sizes = saved_sizes(p, static_cast<deltic_save>(save));
  p.saved.bytes = sizes.bytes;
  result.chunks = (p.T + p.chunk - 1) / p.chunk;
  result.segment_chunks = sizes.segment;
  result.saved_states = sizes.states;
  result.saved_bytes = sizes.bytes;
  // The plan of a call that asks for gradients, whether they are named already or not.
  result.workspace_bytes = needed_bytes(p, call.work(), true);
  write_struct(result, plan->size, plan);
}

template <class Tensors>
void run_operation(deltic_op op, const deltic_options* options, const Tensors* tensors,
                   const deltic_workspace* workspace, void* stream) {
  Call<Tensors> call(op, options, tensors, stream, false);
  Problem& p = call.problem;
  std::optional<gpu::DeviceScope> scope;
  if (p.device == DELTIC_CUDA) {
    gpu::check_device(name_of(op), p.device_index);
    scope.emplace(p.device_index);  // a stream may be the current device's default one
  }
  const Work chosen = call.work();
  const bool works = any_part(p, has_work);
  const uint64_t needed = needed_bytes(p, chosen, works);
  const deltic_workspace given = workspace != nullptr ? *workspace : deltic_workspace{nullptr, 0};
  check_buffer(op, "workspace", given, needed);
  const Tensors& own = call.given.tensors;
  if (needed > 0) {
    for_each_struct(own, [&](const auto& tensors_of_one) {
      check_alone(op, "workspace", given, needed, tensors_of(tensors_of_one));
    });
  }
  if constexpr (!std::is_same_v<Tensors, deltic_step_tensors>) check_saved(p, own, given, needed);
  const std::span<std::byte> memory(static_cast<std::byte*>(given.data), needed);
  if (p.device == DELTIC_CUDA) {
    for_each_part(p, check_host_lengths);
    const size_t checks = p.checked ? check_parts_on_device(p, memory, stream) : 0;
    if (works) chosen.run(p, memory.subspan(checks), stream);
    return;
  }
  for_each_part(p, [&](const Problem& part) { check_values(part, memory); });
  if (!works || !any_part(p, lists_leave_work)) return;
  if (p.checked) for_each_part(p, check_finite);
  const int threads = p.threads;
  const auto set_threads = [&](int number) {
    p.threads = number;
    for_each_part(p, [&](Problem& part) { part.threads = number; });
  };
  set_threads(threads_to_be_had(threads));
  // The workspace was sized for more. Fewer may cut the work otherwise and need more of it; one
  // never does.
  while (p.threads > 1 && p.threads < threads && needed_bytes(p, chosen, true) > needed)
    set_threads(p.threads - 1);
  chosen.run(p, memory, stream);
}

void device_error(const deltic_workspace* workspace, void* stream) {
  if (workspace == nullptr) {
    fail(DELTIC_INVALID_ARGUMENT, "device_error: workspace: expected a struct, got a null pointer");
  }
  gpu::fail_as_found(*workspace, stream);
}

template <class Tensors>
void explain_operation(deltic_op op, const deltic_options* options, const Tensors* tensors,
                       deltic_explain_fn fn, void* user) {
  const Call<Tensors> call(op, options, tensors, nullptr, true);
  const Problem p = asked_call(call.problem, call.named);
  if (fn == nullptr)
    fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": fn: expected a function, got null");
  const int count = implementation_count(p.op, p.device);
  // Of a call in two forms somebody takes the rest too, or nobody takes the call.
  std::string behind, nobody;
  if (has_two_forms(call.problem)) {
    try {
      behind = text_behind(call.problem, call.named, call.options.impl);
    } catch (const Failure& failure) {
      if (failure.status() != DELTIC_UNSUPPORTED) throw;
      nobody = failure.what();
    }
  }
  const auto refusal_of = [&](const Implementation& candidate) {
    const char* sentence = refusal(candidate, p);
    return sentence == nullptr && !nobody.empty() ? nobody.c_str() : sentence;
  };
  int chosen = -1;
  for (int i = 0; i < count && chosen < 0; ++i) {
    const Implementation& candidate = implementation_at(p.op, p.device, i);
    const bool eligible =
        call.named != nullptr ? &candidate == call.named : !candidate.only_when_named;
    if (eligible && refusal_of(candidate) == nullptr) chosen = i;
  }
  const auto say = [&](int i, const char* yes) {
    const Implementation& candidate = implementation_at(p.op, p.device, i);
    const char* sentence = refusal_of(candidate);
    const std::string named_in_vain =
        sentence != nullptr && &candidate == call.named
            ? cat("named (impl or DELTIC_IMPL), but does not take the call: ", sentence)
            : "";
    if (!named_in_vain.empty()) sentence = named_in_vain.c_str();
    fn(user, candidate.name, sentence == nullptr, i == chosen,
       sentence != nullptr ? sentence : yes);
  };
  if (chosen >= 0) {
    std::string why =
        call.named != nullptr ? "named by the caller" : "the first in the list that takes the call";
    if (&implementation_at(p.op, p.device, chosen) == &in_parts(p.device))
      behind = text_behind(p, call.named, call.options.impl);
    if (!behind.empty()) why += "; " + behind;
    say(chosen, why.c_str());
  }
  for (int i = 0; i < count; ++i) {
    if (i == chosen) continue;
    say(i, implementation_at(p.op, p.device, i).only_when_named
               ? "takes the call, but runs only when named"
           : call.named != nullptr ? "takes the call, but another was named"
                                   : "takes the call");
  }
}

template <class Tensors>
void explain_division(deltic_op op, const deltic_options* options, const Tensors* tensors,
                      int32_t num_sms, void* stream, deltic_division_fn fn, void* user) {
  const Call<Tensors> call(op, options, tensors, stream, true);
  if (fn == nullptr) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": fn: expected a function, got null");
  }
  constexpr int32_t kFewest = 4, kMost = 1024;
  if (num_sms != 0 && (num_sms < kFewest || num_sms > kMost)) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": num_sms: expected 0, or ", kFewest, " to ", kMost,
         " SMs, got ", num_sms);
  }
  const Problem& p = call.problem;
  if (p.device != DELTIC_CUDA) return;
  const int sms = num_sms > 0 ? num_sms : gpu::num_sms(p.device_index, stream);
  if (sms == 0) {
    fail(DELTIC_INVALID_ARGUMENT, name_of(op),
         ": num_sms: expected a number of SMs without a GPU, got 0");
  }
  for (int i = 0; i < implementation_count(p.op, p.device); ++i) {
    const Implementation& candidate = implementation_at(p.op, p.device, i);
    if (candidate.divisions == nullptr || (call.named != nullptr && &candidate != call.named))
      continue;
    const std::vector<WorkDivision> ways =
        call.listed == p.op ? candidate.divisions(p, sms) : std::vector<WorkDivision>{};
    for (const WorkDivision& d : ways)
      fn(user, candidate.name, d.what.c_str(), d.predicted_us, d.chosen, d.reason.c_str());
    if (!ways.empty()) continue;
    // Without tokens `refuse` may name this machine or build, which do not matter here.
    const char* why = p.N == 0 || p.T == 0  ? "the call has no tokens"
                      : call.listed != p.op ? "all tokens run in the recurrent form"
                                            : candidate.refuse(p);
    if (why != nullptr) fn(user, candidate.name, "", 0.0, 0, why);
  }
}

template void explain_division(deltic_op, const deltic_options*, const deltic_tensors*, int32_t,
                               void*, deltic_division_fn, void*);
template void explain_division(deltic_op, const deltic_options*, const deltic_backward_tensors*,
                               int32_t, void*, deltic_division_fn, void*);
template void workspace_query(deltic_op, const deltic_options*, const deltic_tensors*, void*,
                              uint64_t*);
template void workspace_query(deltic_op, const deltic_options*, const deltic_block_tensors*, void*,
                              uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_tensors*,
                            const deltic_workspace*, void*);
template void run_operation(deltic_op, const deltic_options*, const deltic_block_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*, const deltic_tensors*,
                                deltic_explain_fn, void*);
template void explain_operation(deltic_op, const deltic_options*, const deltic_block_tensors*,
                                deltic_explain_fn, void*);

template void workspace_query(deltic_op, const deltic_options*, const deltic_backward_tensors*,
                              void*, uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_backward_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*, const deltic_backward_tensors*,
                                deltic_explain_fn, void*);

template void workspace_query(deltic_op, const deltic_options*,
                              const deltic_block_backward_tensors*, void*, uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_block_backward_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*,
                                const deltic_block_backward_tensors*, deltic_explain_fn, void*);

template void workspace_query(deltic_op, const deltic_options*, const deltic_conv_tensors*, void*,
                              uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_conv_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*, const deltic_conv_tensors*,
                                deltic_explain_fn, void*);

template void workspace_query(deltic_op, const deltic_options*, const deltic_conv_backward_tensors*,
                              void*, uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_conv_backward_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*,
                                const deltic_conv_backward_tensors*, deltic_explain_fn, void*);

template void workspace_query(deltic_op, const deltic_options*, const deltic_move_tensors*, void*,
                              uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_move_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*, const deltic_move_tensors*,
                                deltic_explain_fn, void*);

template void workspace_query(deltic_op, const deltic_options*, const deltic_commit_tensors*, void*,
                              uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_commit_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*, const deltic_commit_tensors*,
                                deltic_explain_fn, void*);

template void workspace_query(deltic_op, const deltic_options*, const deltic_step_tensors*, void*,
                              uint64_t*);
template void run_operation(deltic_op, const deltic_options*, const deltic_step_tensors*,
                            const deltic_workspace*, void*);
template void explain_operation(deltic_op, const deltic_options*, const deltic_step_tensors*,
                                deltic_explain_fn, void*);

}  // namespace deltic
