// The plain algorithm of a step: those of its parts, with rounded rows in between.
#include "cases/plain.h"

namespace deltic::cases::plain {
namespace {

// The results of a part under the step's names.
void keep(Values& all, const Values& part, const std::string& prefix, const char* between) {
  for (const auto& [name, list] : part) {
    if (name != between) all[prefix + name] = list;
  }
}

}  // namespace

Values step(const Instance& instance) {
  const bool has_norm = instance.spec().has_norm();
  Values all;
  const Values convolved = conv(instance.part_of_step(Op::conv));
  keep(all, convolved, "conv.", "out");
  Instance rule = instance.part_of_step(Op::decode);
  rule.set_step_rows(convolved.at("out"));
  const Values decoded = decode(rule);
  keep(all, decoded, "", has_norm ? "o" : "");
  if (!has_norm) return all;
  Instance last = instance.part_of_step(Op::rmsnorm);
  last.set_values("x", decoded.at("o"));
  keep(all, norm(last), "norm.", "");
  return all;
}

}  // namespace deltic::cases::plain
