// Choosing an implementation.
#include "api/dispatch.h"

#include <string_view>

#include "api/settings.h"
#include "api/work.h"
#include "core/check.h"
#include "core/error.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

namespace deltic {
namespace {

std::string list_names(deltic_op op, deltic_device_type device) {
  std::string names;
  for (int i = 0; i < implementation_count(op, device); ++i) {
    names += (i ? ", " : "") + std::string(implementation_at(op, device, i).name);
  }
  return names;
}

const Implementation* find(deltic_op op, deltic_device_type device, std::string_view name) {
  for (int i = 0; i < implementation_count(op, device); ++i) {
    if (name == implementation_at(op, device, i).name) return &implementation_at(op, device, i);
  }
  return nullptr;
}

bool known(deltic_op op, std::string_view name) {
  return find(op, DELTIC_CPU, name) != nullptr || find(op, DELTIC_CUDA, name) != nullptr;
}
bool known_anywhere(std::string_view name) {
  for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
    if (known(static_cast<deltic_op>(op), name)) return true;
  }
  return false;
}

// DELTIC_IMPL=forward:NAME,decode:NAME; a bare name binds the operations that have it. A name binds
// the calls of the device that has it.
const Implementation* from_environment(deltic_op op, deltic_device_type device,
                                       std::string_view text) {
  const Implementation* found = nullptr;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view entry = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    if (entry.empty()) continue;
    const size_t colon = entry.find(':');
    if (colon == std::string_view::npos) {
      if (const Implementation* i = find(op, device, entry)) {
        found = i;
      } else if (!known_anywhere(entry)) {
        fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": DELTIC_IMPL: expected an implementation (",
             list_names(op, device), "), got ", entry);
      }
      continue;
    }
    const std::string_view op_text = entry.substr(0, colon), name = entry.substr(colon + 1);
    int entry_op = 0;
    while (entry_op < DELTIC_NUM_OPS && op_text != name_of(static_cast<deltic_op>(entry_op)))
      ++entry_op;
    if (entry_op == DELTIC_NUM_OPS) {
      fail(DELTIC_INVALID_ARGUMENT, name_of(op),
           ": DELTIC_IMPL: expected an operation before ':', got ",
           op_text.empty() ? "none" : op_text);
    }
    if (!known(static_cast<deltic_op>(entry_op), name)) {
      fail(DELTIC_INVALID_ARGUMENT, name_of(op), ": DELTIC_IMPL: expected an implementation of ",
           op_text, " (", list_names(static_cast<deltic_op>(entry_op), device), "), got ",
           name.empty() ? "none" : name);
    }
    if (entry_op != op) continue;
    if (const Implementation* i = find(op, device, name)) found = i;
  }
  return found;
}

}  // namespace

namespace {

// Those of a backend; behind them what a step is made of, where the backend has it, and the oracle.
ImplementationList of_backend(deltic_op op, deltic_device_type device) {
  return device == DELTIC_CUDA ? gpu::implementations(op) : cpu::implementations(op);
}
bool has_parts(deltic_op op, deltic_device_type device) {
  return op == DELTIC_STEP && !of_backend(DELTIC_DECODE, device).empty();
}

}  // namespace

int implementation_count(deltic_op op, deltic_device_type device) {
  return static_cast<int>(of_backend(op, device).size()) + (has_parts(op, device) ? 1 : 0) +
         (device == DELTIC_CPU ? 1 : 0);
}

const Implementation& implementation_at(deltic_op op, deltic_device_type device, int index) {
  const ImplementationList list = of_backend(op, device);
  const auto at = static_cast<size_t>(index);
  if (at < list.size()) return list[at];
  return at == list.size() && has_parts(op, device) ? in_parts(device)
                                                    : reference::implementation(op);
}

const Implementation* named_behind(deltic_op op, deltic_device_type device, const char* option) {
  const bool is_known = option != nullptr && option[0] != '\0' && find(op, device, option);
  return named_implementation(op, device, is_known ? option : nullptr, op);
}

const Implementation* named_implementation(deltic_op op, deltic_device_type device,
                                           const char* option, deltic_op called) {
  const char* const who = name_of(called);
  static_cast<void>(logs_dispatch(who));  // a wrong DELTIC_LOG fails as a wrong name does
  if (option != nullptr && option[0] != '\0') {
    const Implementation* i = find(op, device, option);
    if (i == nullptr && known(op, option)) {
      const bool is_cpu = device == DELTIC_CPU;
      fail(DELTIC_UNSUPPORTED, who, ": impl: ", option, " was named and runs on ",
           is_cpu ? "CUDA" : "CPU", " tensors, got ", is_cpu ? "CPU" : "CUDA", " tensors");
    }
    if (i == nullptr && called != op && known(called, option)) {
      fail(DELTIC_UNSUPPORTED, who, ": impl: ", option,
           " was named and does not take this call: it has the chunked form alone");
    }
    if (i == nullptr) {
      fail(DELTIC_INVALID_ARGUMENT, who, ": impl: expected one of ", list_names(op, device),
           ", got ", option);
    }
    return i;
  }
  const char* text = environment().impl;
  return text == nullptr ? nullptr : from_environment(op, device, text);
}

const char* refusal(const Implementation& implementation, const Problem& p) {
  if (const char* sentence = implementation.missing()) return sentence;
  return implementation.refuse(p);
}

const Implementation& choose(const Problem& p, const Implementation* named) {
  const int count = implementation_count(p.op, p.device);
  const Implementation* chosen = nullptr;
  if (named != nullptr) {
    if (refusal(*named, p) == nullptr) chosen = named;
  } else {
    for (int i = 0; i < count && chosen == nullptr; ++i) {
      const Implementation& candidate = implementation_at(p.op, p.device, i);
      if (!candidate.only_when_named && refusal(candidate, p) == nullptr) chosen = &candidate;
    }
  }
  if (logs_dispatch(name_of(p.op))) {
    for (int i = 0; i < count; ++i) {
      const Implementation& candidate = implementation_at(p.op, p.device, i);
      const char* sentence = refusal(candidate, p);
      log_line(cat("deltic: ", name_of(p.op), ": ", candidate.name, ": ",
                   &candidate == chosen        ? "chosen"
                   : sentence != nullptr       ? sentence
                   : candidate.only_when_named ? "runs only when named"
                   : named != nullptr          ? "takes it, another was named"
                                               : "takes it, an earlier one was chosen"));
    }
  }
  if (chosen != nullptr) return *chosen;
  if (named != nullptr) {
    fail(DELTIC_UNSUPPORTED, name_of(p.op), ": impl: ", named->name,
         " was named (options.impl or DELTIC_IMPL) and does not take this call: ",
         refusal(*named, p));
  }
  std::string sentences;
  for (int i = 0; i < count; ++i) {
    const Implementation& candidate = implementation_at(p.op, p.device, i);
    if (candidate.only_when_named) continue;
    sentences += cat(sentences.empty() ? "" : "; ", candidate.name, ": ", refusal(candidate, p));
  }
  if (count == 0) {
    sentences = gpu::build_facts() == "no" ? gpu::kNotBuilt : "there is none for CUDA tensors";
  }
  fail(DELTIC_UNSUPPORTED, name_of(p.op), ": no implementation takes this call: ", sentences);
}

}  // namespace deltic
