// The choice among a build's code as drivers make it.
#include "cuda/code.h"

#include <algorithm>

namespace deltic::gpu {
namespace {

struct Part {
  std::string_view name;  // `90a`
  int version = 0;
  bool is_exact = false;  // for this version alone
  bool is_ptx = false;
};

template <class Visit>
void for_each_part(std::string_view archs, Visit visit) {
  while (!archs.empty()) {
    const size_t end = std::min(archs.find(' '), archs.size());
    std::string_view word = archs.substr(0, end);
    archs.remove_prefix(std::min(end + 1, archs.size()));
    if (word.empty()) continue;
    Part part;
    constexpr std::string_view kPtx = "-ptx";
    part.is_ptx = word.ends_with(kPtx);
    if (part.is_ptx) word.remove_suffix(kPtx.size());
    part.name = word;
    part.is_exact = word.ends_with('a');
    for (const char c : word) {
      if (c >= '0' && c <= '9') part.version = 10 * part.version + (c - '0');
    }
    visit(part);
  }
}

}  // namespace

int code_for(std::string_view archs, int version, CodeRules rules) {
  int machine = 0, ptx = 0;
  for_each_part(archs, [&](const Part& part) {
    const bool is_whole = !part.is_exact || part.version == version;
    if (part.is_ptx) {
      if (part.version <= version && is_whole && !rules.no_ptx) ptx = std::max(ptx, part.version);
    } else if (part.version / 10 == version / 10 && part.version <= version && is_whole &&
               !rules.only_ptx) {
      machine = std::max(machine, part.version);
    }
  });
  return machine > 0 ? machine : ptx;
}

bool has_hopper_code(std::string_view archs, int version, CodeRules rules) {
  bool has = false;
  for_each_part(archs, [&](const Part& part) {
    has = has || (part.name == "90a" && !part.is_ptx && version == 90 && !rules.only_ptx);
  });
  return has;
}

std::string code_text(std::string_view archs) {
  std::string text;
  for_each_part(archs, [&](const Part& part) {
    if (!text.empty()) text += ", ";
    text += part.is_ptx ? "PTX of compute_" : "sm_";
    text += part.name;
  });
  return text;
}

}  // namespace deltic::gpu
