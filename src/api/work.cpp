// Implementations of a call that is made of several, one after the other in one workspace.
#include "api/work.h"

#include <algorithm>

#include "api/dispatch.h"
#include "core/check.h"
#include "core/error.h"
#include "core/form.h"
#include "core/sizes.h"
#include "core/step.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

namespace deltic {
namespace {

// The oracle takes both forms in one pass.
bool is_divided(const Problem& p, const Implementation* named) {
  return has_two_forms(p) && named != &reference::implementation(DELTIC_FORWARD);
}

const Implementation& choose_behind(const Problem& p, const char* option) {
  return choose(p, named_behind(p.op, p.device, option));
}

// What the calls have between them: states and lists, or rows.
size_t bytes_between(const Problem& p) {
  return p.step != nullptr ? rows_bytes(*p.step) : form_bytes(p);
}
// f of the calls that p is made of, in order, over that memory, whose lists are empty.
template <class F>
void for_each_call(const Problem& p, std::byte* memory, const F& f) {
  if (p.step != nullptr) {
    lay_rows(*p.step, memory);
    return for_each_part(p, f);
  }
  const TwoForms two = two_forms(p, memory);
  if (memory != nullptr) {
    p.device == DELTIC_CUDA ? gpu::fill_form_lists(p, two.lists, p.stream)
                            : fill_lists(p, two.lists);
  }
  f(two.before), f(two.after);
}

Work work_in_parts(const Problem& p) {
  Work work;
  for_each_part(
      p, [&](const Problem& part) { work.runs[work.count++] = &choose_behind(part, nullptr); });
  return work;
}

// Null: there is somebody for every part; else the last one's sentence, or that of who was named.
const char* refuse_parts(const Problem& p) {
  const char* sentence = nullptr;
  for_each_part(p, [&](const Problem& part) {
    if (sentence != nullptr) return;
    if (const Implementation* named = named_behind(part.op, part.device, nullptr)) {
      sentence = refusal(*named, part);
      return;
    }
    for (int i = 0; i < implementation_count(part.op, part.device); ++i) {
      const Implementation& candidate = implementation_at(part.op, part.device, i);
      if (candidate.only_when_named) continue;
      sentence = refusal(candidate, part);
      if (sentence == nullptr) return;
    }
  });
  return sentence;
}
size_t bytes_of_parts(const Problem& p) { return work_in_parts(p).bytes(p); }
void run_parts(const Problem& p, std::span<std::byte> memory, void* stream) {
  work_in_parts(p).run(p, memory, stream);
}

const char* nothing_missing() { return nullptr; }
const char* missing_on_gpu() {
  return implementation_at(DELTIC_DECODE, DELTIC_CUDA,
                           implementation_count(DELTIC_DECODE, DELTIC_CUDA) - 1)
      .missing();
}

}  // namespace

const Implementation& in_parts(deltic_device_type device) {
  static const Implementation on_cpu{"cpu.parts", nothing_missing, refuse_parts, bytes_of_parts,
                                     run_parts};
  static const Implementation on_gpu{"cuda.parts", missing_on_gpu, refuse_parts, bytes_of_parts,
                                     run_parts};
  return device == DELTIC_CUDA ? on_gpu : on_cpu;
}

Problem asked_call(const Problem& p, const Implementation* named) {
  if (is_divided(p, named)) return two_forms(p, nullptr).before;
  return is_recurrent(p) && !p.recurrent_from ? as_decode(p) : p;
}

std::string text_behind(const Problem& p, const Implementation* named, const char* option) {
  std::string text;
  if (p.step != nullptr) {
    const Work work = work_in_parts(p);
    int i = 0;
    for_each_part(p, [&](const Problem& part) {
      text += cat(text.empty() ? "" : ", ", work.runs[i++]->name, " runs ", name_of(part.op));
    });
  } else if (is_divided(p, named)) {
    text = cat(choose_behind(two_forms(p, nullptr).after, option).name,
               " runs the tokens from recurrent_from on");
  }
  return text;
}

Work choose_work(const Problem& p, const Implementation* named, const char* option) {
  if (p.step != nullptr) {
    const Implementation& chosen = choose(p, named);
    return &chosen == &in_parts(p.device) ? work_in_parts(p) : Work{{&chosen}, 1};
  }
  if (!is_recurrent(p)) return {{&choose(p, named)}, 1};
  if (!is_divided(p, named)) return {{&choose(asked_call(p, named), named)}, 1};
  const TwoForms two = two_forms(p, nullptr);
  return {{&choose(two.before, named), &choose_behind(two.after, option)}, 2};
}

size_t Work::bytes(const Problem& p) const {
  // A call that runs as it is is not copied: it remembers what the driver was asked.
  if (count == 1) {
    return is_recurrent(p) ? runs[0]->workspace_bytes(asked_call(p, runs[0]))
                           : runs[0]->workspace_bytes(p);
  }
  size_t most = 0;
  int i = 0;
  for_each_call(p, nullptr, [&](const Problem& call) {
    most = std::max(most, runs[i++]->workspace_bytes(call));
  });
  return static_cast<size_t>(checked_sum(bytes_between(p), most));
}

void Work::run(const Problem& p, std::span<std::byte> memory, void* stream) const {
  if (count == 1) {
    return is_recurrent(p) ? runs[0]->run(asked_call(p, runs[0]), memory, stream)
                           : runs[0]->run(p, memory, stream);
  }
  const std::span<std::byte> rest = memory.subspan(bytes_between(p));
  int i = 0;
  for_each_call(p, memory.data(), [&](const Problem& call) {
    const Implementation& implementation = *runs[i++];
    if (has_work(call)) implementation.run(call, rest, stream);
  });
}

}  // namespace deltic
