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
  report.print("\nimplementations, best first\n");
  Json list = Json::object();
  std::vector<std::pair<std::string, std::string>> missing;
  std::vector<std::string> named;
  for (int i = 0; i < DELTIC_NUM_OPS; ++i) {
    const Op op = static_cast<Op>(i);
    std::string line;
    std::vector<ImplementationInfo> all = implementations(op, DeviceType::cuda);
    const std::vector<ImplementationInfo> on_cpu = implementations(op);
    all.insert(all.end(), on_cpu.begin(), on_cpu.end());
    for (const ImplementationInfo& impl : all) {
      line += "  " + impl.name + (impl.runs_here ? "" : " (no)");
      list[std::string(name(op))].push_back({{"name", impl.name},
                                             {"runs_here", impl.runs_here},
                                             {"sentence", impl.sentence},
                                             {"only_when_named", impl.only_when_named}});
      if (impl.only_when_named && std::find(named.begin(), named.end(), impl.name) == named.end()) {
        named.push_back(impl.name);
      }
      const std::pair<std::string, std::string> why{impl.name, impl.sentence};
      if (!impl.runs_here && std::find(missing.begin(), missing.end(), why) == missing.end()) {
        missing.push_back(why);
      }
    }
    report.print("  %-8s%s\n", std::string(name(op)).c_str(), line.c_str());
  }
  std::string only;
  for (const std::string& impl : named) only += (only.empty() ? "" : ", ") + impl;
  report.print("  only when named: %s\n", only.c_str());
  for (const auto& [impl, sentence] : missing)
    report.print("  %s: %s\n", impl.c_str(), sentence.c_str());
  report.summary()["implementations"] = std::move(list);
  report.write();
  return kExitPass;
}

}  // namespace deltic::cli
