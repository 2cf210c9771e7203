// Output of the commands: text for people, JSON for programs.
#include "report.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>

#include "cases/device.h"
#include "cases/instance.h"

namespace deltic::cli {

Report::Report(const Common& common, const std::string& schema)
    : path_(common.json), answer_(common.answer), out_(common.json == "-" ? stderr : stdout) {
  if (!path_.empty() && path_ != "-") open_for_writing(std::ios::app);  // before hours of work
  if (common.threads > 0) set_num_threads(common.threads);
  document_["schema"] = schema;
  const std::time_t now = std::time(nullptr);
  char date[16] = "";
  std::tm utc{};
  if (gmtime_r(&now, &utc) != nullptr) std::strftime(date, sizeof date, "%Y-%m-%d", &utc);
  document_["date"] = date;
  document_["version"] = std::string(version());
  document_["commit"] = fact("commit");
  document_["machine"] = machine();
  document_["cases"] = Json::array();
  document_["summary"] = Json::object();
}

namespace {
// Of what was written last; the system's reason is still in errno.
void check_output() {
  const int error = errno;
  if (std::ferror(stdout) == 0 && std::cout.good()) return;
  throw std::runtime_error(std::string("output: writing to stdout failed: ") +
                           std::strerror(error));
}
}  // namespace

void flush_output() {
  std::cout.flush();
  std::fflush(stdout);
  check_output();
}

void Report::print(const char* format, ...) const {
  if (answer_ != nullptr) return;
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(out_, format, arguments);
  va_end(arguments);
  if (out_ == stdout) check_output();  // no hours of work for nobody
}

void Report::write() const {
  const std::string text = document_.dump(2) + "\n";
  if (answer_ != nullptr) {
    *answer_ = text;
    return;
  }
  flush_output();
  if (path_.empty()) return;
  if (path_ == "-") {
    std::cout << text;
    flush_output();
    return;
  }
  std::ofstream file = open_for_writing(std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw std::runtime_error("--json: writing to '" + path_ + "' failed");
}

void Report::save_part() const {
  if (!path_.empty() && path_ != "-") write();
}

std::ofstream Report::open_for_writing(std::ios::openmode mode) const {
  std::ofstream file(path_, mode);
  if (!file) throw UsageError("--json: expected a file that can be written, got '" + path_ + "'");
  return file;
}

Json read_json(const std::string& path, const std::string& option, const std::string& expected) {
  const auto refuse = [&](const std::string& what) {
    throw UsageError(option + ": expected " + expected + ", got '" + path + "', " + what);
  };
  if (cases::is_folder(path)) refuse("which is a folder");
  std::ifstream in(path);
  if (!in) refuse("which cannot be read");
  Json document = Json::parse(in, nullptr, false);
  if (document.is_discarded()) refuse("which is no JSON");
  return document;
}

Progress::Progress(std::string verb, size_t total)
    : verb_(std::move(verb)), total_(total), is_terminal_(isatty(STDERR_FILENO) != 0) {}
Progress::~Progress() {
  if (is_terminal_ && done_ > 0) std::fputs("\r\033[K", stderr);
}
void Progress::step(const std::string& what) {
  ++done_;
  if (is_terminal_) {
    std::fprintf(stderr, "\r\033[K%s %zu/%zu  %.60s", verb_.c_str(), done_, total_, what.c_str());
    std::fflush(stderr);
    return;
  }
  const size_t tenth = total_ > 0 ? 10 * done_ / total_ : 10;
  if (tenth == last_tenth_) return;
  last_tenth_ = tenth;
  std::fprintf(stderr, "%s %zu/%zu\n", verb_.c_str(), done_, total_);
}

void print_table(const Report& report, const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      line += (i == 0 ? "  " + row[i] + space : "  " + space + row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    report.print("%s\n", line.c_str());
  }
}

namespace {
std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}
}  // namespace

Json machine() {
  Json m;
  m["cpu"] = cpu_model();
  for (const auto& [key, value] : info()) m[key] = value;
  return m;
}

std::string fact(const char* key) {
  for (const auto& [k, value] : info()) {
    if (k == key) return value;
  }
  return "unknown";
}

Json number_or_null(double x) { return std::isfinite(x) ? Json(x) : Json(nullptr); }

std::string format(const char* format, double x) {
  char text[64];
  std::snprintf(text, sizeof text, format, x);
  return text;
}

cases::Case parse_argument(const std::string& line) {
  try {
    return cases::parse(line);
  } catch (const cases::CaseError& e) {
    throw UsageError(e.what());
  }
}

void check_device(const Common& common) {
  if (common.device == DeviceType::cpu) return;
  const std::string missing = cases::device::missing();
  if (!missing.empty()) throw UsageError("--device: expected a GPU, got none: " + missing);
}

namespace {

// An operation's own names are looked at when it is called: here any operation's will do.
void check_name(const std::string& where, const std::string& impl) {
  if (impl.empty()) return;
  std::string known;
  for (int i = 0; i < DELTIC_NUM_OPS; ++i) {
    for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda}) {
      for (const ImplementationInfo& info : implementations(static_cast<Op>(i), device)) {
        if (info.name == impl) return;
        if (known.find(info.name) != std::string::npos) continue;
        if (!known.empty()) known += ", ";
        known += info.name;
      }
    }
  }
  throw UsageError(where + ": expected one of " + known + ", got '" + impl + "'");
}

}  // namespace

void check_environment() {
  const char* impl = std::getenv("DELTIC_IMPL");
  check_name("DELTIC_IMPL", impl != nullptr ? impl : "");
  try {
    cases::Instance::shapes_of(cases::parse("forward dense=1x1")).explain();
  } catch (const Error& e) {
    const std::string text = e.what();
    const size_t at = text.find("DELTIC_");
    if (at != std::string::npos && text.find("DELTIC_IMPL") == std::string::npos)
      throw UsageError(text.substr(at));
  }
}

void check_impl_name(const std::string& impl) { check_name("--impl", impl); }

}  // namespace deltic::cli
