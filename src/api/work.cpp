// Implementations of a call in one or two forms, one after the other in one workspace.
#include "api/work.h"

#include <algorithm>

#include "api/dispatch.h"
#include "core/form.h"
#include "core/sizes.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

namespace deltic {
namespace {

// The oracle takes both forms in one pass.
bool is_divided(const Problem& p, const Implementation* named) {
  return has_two_forms(p) && named != &reference::implementation(DELTIC_FORWARD);
}

const Implementation& choose_behind(const Problem& after, const char* option) {
  return choose(after, named_behind(after.op, after.device, option));
}

}  // namespace

Problem asked_call(const Problem& p, const Implementation* named) {
  if (is_divided(p, named)) return two_forms(p, nullptr).before;
  return is_recurrent(p) && !p.recurrent_from ? as_decode(p) : p;
}

const char* name_behind(const Problem& p, const Implementation* named, const char* option) {
  if (!is_divided(p, named)) return "";
  return choose_behind(two_forms(p, nullptr).after, option).name;
}

Work choose_work(const Problem& p, const Implementation* named, const char* option) {
  if (!is_recurrent(p)) return {&choose(p, named)};
  if (!is_divided(p, named)) return {&choose(asked_call(p, named), named)};
  const TwoForms two = two_forms(p, nullptr);
  return {&choose(two.before, named), &choose_behind(two.after, option)};
}

size_t Work::bytes(const Problem& p) const {
  if (second == nullptr) {
    return first->workspace_bytes(is_recurrent(p) ? asked_call(p, first) : p);
  }
  const TwoForms two = two_forms(p, nullptr);
  const size_t most =
      std::max(first->workspace_bytes(two.before), second->workspace_bytes(two.after));
  return static_cast<size_t>(checked_sum(form_bytes(p), most));
}

void Work::run(const Problem& p, std::span<std::byte> memory, void* stream) const {
  if (second == nullptr) {
    return first->run(is_recurrent(p) ? asked_call(p, first) : p, memory, stream);
  }
  const TwoForms two = two_forms(p, memory.data());
  p.device == DELTIC_CUDA ? gpu::fill_form_lists(p, two.lists, stream) : fill_lists(p, two.lists);
  const std::span<std::byte> rest = memory.subspan(form_bytes(p));
  first->run(two.before, rest, stream);
  second->run(two.after, rest, stream);
}

}  // namespace deltic
