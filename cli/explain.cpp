// `deltic explain`: the chosen implementation first, then the others, each with its sentence.
#include "commands.h"
#include "instance.h"

namespace deltic::cli {

int run_explain(const ExplainOptions& options) {
  check_impl_name(options.impl);
  const cases::Case c = parse_argument(options.line);
  Report report(options.common, "deltic.explain/1");
  report.print("%s\n", cases::canonical(c).c_str());
  const cases::Instance instance = cases::Instance::shapes_of(c);
  std::vector<Choice> choices;
  try {
    choices = instance.explain({.impl = options.impl, .threads = options.common.threads});
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::invalid_argument) throw UsageError(e.what());
    throw;
  }
  size_t width = 0;
  for (const Choice& choice : choices) width = std::max(width, choice.name.size());
  bool any = false;
  for (const Choice& choice : choices) {
    report.print("  %-*s  %-3s  %s\n", static_cast<int>(width), choice.name.c_str(),
                 choice.accepts ? "yes" : "no", choice.sentence.c_str());
    any |= choice.chosen;
    report.cases().push_back({{"case", cases::canonical(c)},
                              {"impl", choice.name},
                              {"accepts", choice.accepts},
                              {"chosen", choice.chosen},
                              {"sentence", choice.sentence}});
  }
  report.summary()["chosen"] = any ? Json(choices.front().name) : Json(nullptr);
  if (!any) report.print("  no implementation takes this case\n");
  report.write();
  return any ? kExitPass : kExitFail;
}

}  // namespace deltic::cli
