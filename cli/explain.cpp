// `deltic explain`: the chosen implementation first, then the others, each with its sentence.
#include "cases/instance.h"
#include "commands.h"

namespace deltic::cli {
namespace {

// What each memory mode keeps and needs; the numbers are the library's.
void print_memory(Report& report, const cases::Instance& instance, const Options& options) {
  std::vector<std::vector<std::string>> table = {
      {"save", "kept states per head", "saved bytes", "workspace bytes"}};
  Json modes = Json::object();
  deltic_memory_plan plan;
  for (const char* name : {"none", "states", "all"}) {
    const auto save = static_cast<Save>(modes.size());
    plan = backward_memory(options, instance.gradients(), save);
    const bool is_case = save == instance.spec().save;
    table.push_back({std::string(name) + (is_case ? " (this case)" : ""),
                     std::to_string(plan.saved_states), std::to_string(plan.saved_bytes),
                     std::to_string(plan.workspace_bytes)});
    modes[name] = {{"saved_states", plan.saved_states},
                   {"saved_bytes", plan.saved_bytes},
                   {"workspace_bytes", plan.workspace_bytes}};
  }
  report.print("\n  memory: %lld chunks of %d tokens at most in a sequence, segments of %lld\n\n",
               static_cast<long long>(plan.chunks), instance.spec().chunk,
               static_cast<long long>(plan.segment_chunks));
  print_table(report, table);
  report.summary()["memory"] = {
      {"chunks", plan.chunks}, {"segment_chunks", plan.segment_chunks}, {"save", std::move(modes)}};
}

// The ways to divide a call's work over a GPU, with what they would cost, or why there are none.
void print_divisions(Report& report, const cases::Instance& instance, const Options& options,
                     int sms) {
  constexpr int kH200 = 132;
  if (sms == 0 && !cases::device::missing().empty()) sms = kH200;
  const bool is_backward = instance.spec().op == Op::backward;
  const std::vector<Division> all = is_backward
                                        ? explain_division(options, instance.gradients(), sms)
                                        : explain_division(options, instance.tensors(), sms);
  if (all.empty()) return;
  if (all.front().what.empty()) {
    const Division& none = all.front();
    report.print("\n  %s divides no work here: %s\n", none.impl.c_str(), none.reason.c_str());
    report.summary()["not_divided"] = {{"impl", none.impl}, {"reason", none.reason}};
    return;
  }
  const std::string where = sms > 0 ? "a GPU of " + std::to_string(sms) + " SMs" : "this GPU";
  report.print("\n  %s of %s on %s, times as predicted, the chosen one first\n\n",
               is_backward ? "chains of states" : "work", all.front().impl.c_str(), where.c_str());
  size_t width = 0;
  for (const Division& d : all) width = std::max(width, d.what.size());
  for (const Division& d : all) {
    report.print("  %-*s  %7.0f us  %s\n", static_cast<int>(width), d.what.c_str(), d.predicted_us,
                 d.reason.c_str());
    report.summary()["divisions"].push_back({{"impl", d.impl},
                                             {"what", d.what},
                                             {"predicted_us", d.predicted_us},
                                             {"chosen", d.chosen},
                                             {"reason", d.reason}});
  }
}

// Why nothing would run.
std::string nobody(const std::vector<Choice>& choices) {
  for (const Choice& choice : choices) {
    if (choice.sentence.starts_with("named ")) {
      return "nothing runs this case: " + choice.name +
             " alone may (impl or DELTIC_IMPL), and does not take it";
    }
  }
  const std::string none = "no implementation takes this case";
  if (!choices.empty()) return none;  // each has said why
  const std::string missing = cases::device::missing();
  return none + ": " +
         (missing == cases::device::kNotBuilt ? missing : "there is none for CUDA tensors");
}

}  // namespace

int run_explain(const ExplainOptions& options) {
  check_impl_name(options.impl);
  if (options.sms > 0 && options.common.device != DeviceType::cuda)
    throw UsageError("--sms: expected it with --device cuda, got --device cpu");
  const cases::Case c = parse_argument(options.line);
  Report report(options.common, "deltic.explain/1");
  report.print("%s\n", cases::canonical(c).c_str());
  const cases::Instance instance = cases::Instance::shapes_of(c, options.common.device);
  const cases::RunOptions run{.impl = options.impl, .threads = options.common.threads};
  std::vector<Choice> choices;
  try {
    choices = instance.explain(run);
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
  if (!any) report.print("  %s\n", nobody(choices).c_str());
  if (any && options.common.device == DeviceType::cpu)
    report.summary()["workspace_bytes"] = instance.call_of().workspace_bytes(instance.options(run));
  if (any && c.op == Op::backward) print_memory(report, instance, instance.options(run));
  if ((c.op == Op::forward || c.op == Op::backward) && options.common.device == DeviceType::cuda)
    print_divisions(report, instance, instance.options(run), options.sms);
  report.write();
  return any ? kExitPass : kExitFail;
}

}  // namespace deltic::cli
