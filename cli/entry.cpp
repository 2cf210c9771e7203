// The program inside of another library, which the Python package calls: the same commands and
// words.
#include <csignal>
#include <exception>

#include "commands.h"

extern "C" {

// The program, with the quick forms of verify and bench as the default.
DELTIC_API int32_t deltic_torch_program(int32_t argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGINT, SIG_DFL);  // an interpreter's handler would wait for the end of the command
  return deltic::cli::run_program(argc, argv, true);
}

// `deltic explain` of a case: calls fn with its JSON and returns 1, or with the error's text and
// returns 0. device: a deltic_device_type; impl: empty for none; sms: 0 for those of the GPU here.
DELTIC_API int32_t deltic_torch_explain_case(const char* line, const char* impl, int32_t device,
                                             int32_t sms, void (*fn)(const char* text)) {
  using namespace deltic;
  try {
    std::string answer;
    cli::ExplainOptions options;
    options.line = line;
    options.impl = impl;
    options.sms = sms;
    options.common.answer = &answer;
    options.common.device = device == DELTIC_CUDA ? DeviceType::cuda : DeviceType::cpu;
    cli::run_explain(options);
    fn(answer.c_str());
    return 1;
  } catch (const std::exception& e) {
    fn(e.what());
    return 0;
  }
}

}  // extern "C"
