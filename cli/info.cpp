// `deltic info`: version, build, machine, implementations.
#include <algorithm>

#include "commands.h"

namespace deltic::cli {

int run_info(const InfoOptions& options) {
  Report report(options.common, "deltic.info/1");
  const Json facts = machine();
  size_t width = 0;
  for (const auto& [key, value] : facts.items()) width = std::max(width, key.size());
  report.print("deltic %s\n\n", std::string(version()).c_str());
  for (const auto& [key, value] : facts.items()) {
    if (key == "version") continue;
    report.print("  %-*s  %s\n", static_cast<int>(width), key.c_str(),
                 value.get<std::string>().c_str());
  }
  const std::vector<ImplementationInfo> drafting = implementations(Op::decode, DeviceType::cuda);
  const bool has_drafts = std::any_of(drafting.begin(), drafting.end(),
                                      [](const auto& x) { return x.name == "cuda.drafts"; });
  report.print("\nimplementations, best first (the oracle, reference,%s only when named)\n",
               has_drafts ? " and cuda.drafts run" : " runs");
  Json list = Json::object();
  std::vector<std::pair<std::string, std::string>> missing;
  for (int i = 0; i < DELTIC_NUM_OPS; ++i) {
    const Op op = static_cast<Op>(i);
    std::string line;
    std::vector<ImplementationInfo> all = implementations(op, DeviceType::cuda);
    const std::vector<ImplementationInfo> on_cpu = implementations(op);
    all.insert(all.end(), on_cpu.begin(), on_cpu.end());
    for (const ImplementationInfo& impl : all) {
      line += "  " + impl.name + (impl.runs_here ? "" : " (no)");
      list[std::string(name(op))].push_back(
          {{"name", impl.name}, {"runs_here", impl.runs_here}, {"sentence", impl.sentence}});
      const std::pair<std::string, std::string> why{impl.name, impl.sentence};
      if (!impl.runs_here && std::find(missing.begin(), missing.end(), why) == missing.end()) {
        missing.push_back(why);
      }
    }
    report.print("  %-8s%s\n", std::string(name(op)).c_str(), line.c_str());
  }
  for (const auto& [impl, sentence] : missing)
    report.print("  %s: %s\n", impl.c_str(), sentence.c_str());
  report.summary()["implementations"] = std::move(list);
  report.write();
  return kExitPass;
}

}  // namespace deltic::cli
