// Facts about build and machine, and the lists of implementations.
#include <string>

#include "api/dispatch.h"
#include "api/guard.h"
#include "api/settings.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"

using namespace deltic;

deltic_status deltic_info(deltic_info_fn fn, void* user) {
  return guard([&] {
    if (fn == nullptr) fail(DELTIC_INVALID_ARGUMENT, "info: fn: expected a function, got null");
    fn(user, "version", DELTIC_VERSION_STRING);
    fn(user, "abi", std::to_string(DELTIC_ABI_VERSION).c_str());
    fn(user, "commit", DELTIC_BUILT_COMMIT);
    fn(user, "build", DELTIC_BUILD_TYPE);
#if defined(__clang__)
    fn(user, "compiler", "clang " __clang_version__);
#else
    fn(user, "compiler", "gcc " __VERSION__);
#endif
    fn(user, "cuda", gpu::build_facts().c_str());
    fn(user, "driver", gpu::driver_version().c_str());
    const std::vector<std::string> devices = gpu::devices_found();
    for (size_t i = 0; i < devices.size(); ++i) {
      fn(user, ("gpu." + std::to_string(i)).c_str(), devices[i].c_str());
    }
    fn(user, "cpu.found", cpu::features_found().c_str());
    fn(user, "cpu.used", cpu::features_used().c_str());
    fn(user, "threads", std::to_string(default_threads()).c_str());
    constexpr const char* kChecked[] = {"DELTIC_CHECKED is neither 0 nor 1", "off", "on"};
    fn(user, "checked", kChecked[checked_setting() + 1]);
    constexpr const char* kLog[] = {"DELTIC_LOG is not dispatch", "off", "dispatch"};
    fn(user, "log", kLog[log_setting() + 1]);
  });
}

namespace {
bool exists(int32_t op, int32_t device, int32_t index) {
  return op >= 0 && op < DELTIC_NUM_OPS && (device == DELTIC_CPU || device == DELTIC_CUDA) &&
         index >= 0 &&
         index < implementation_count(static_cast<deltic_op>(op),
                                      static_cast<deltic_device_type>(device));
}
const Implementation& at(int32_t op, int32_t device, int32_t index) {
  return implementation_at(static_cast<deltic_op>(op), static_cast<deltic_device_type>(device),
                           index);
}
}  // namespace

const char* deltic_implementation(int32_t op, int32_t device, int32_t index) {
  return exists(op, device, index) ? at(op, device, index).name : nullptr;
}

int32_t deltic_implementation_runs_here(int32_t op, int32_t device, int32_t index,
                                        const char** sentence) {
  const char* why = "there is no such implementation";
  if (exists(op, device, index)) why = at(op, device, index).missing();
  if (sentence != nullptr) *sentence = why != nullptr ? why : "";
  return why == nullptr ? 1 : 0;
}

int32_t deltic_implementation_only_when_named(int32_t op, int32_t device, int32_t index) {
  return exists(op, device, index) && at(op, device, index).only_when_named ? 1 : 0;
}
