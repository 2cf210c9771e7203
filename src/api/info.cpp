// Facts about build and machine, and the lists of implementations.
#include <string>

#include "api/dispatch.h"
#include "api/guard.h"
#include "api/settings.h"
#include "cpu/cpu.h"

using namespace deltic;

deltic_status deltic_info(deltic_info_fn fn, void* user) {
  return guard([&] {
    if (fn == nullptr) fail(DELTIC_INVALID_ARGUMENT, "info: fn: expected a function, got null");
    fn(user, "version", DELTIC_VERSION_STRING);
    fn(user, "abi", std::to_string(DELTIC_ABI_VERSION).c_str());
    fn(user, "commit", DELTIC_COMMIT);
    fn(user, "build", DELTIC_BUILD_TYPE);
#if defined(__clang__)
    fn(user, "compiler", "clang " __clang_version__);
#else
    fn(user, "compiler", "gcc " __VERSION__);
#endif
    fn(user, "cuda", "no");
    fn(user, "cpu.found", cpu::features_found().c_str());
    fn(user, "cpu.used", cpu::features_used().c_str());
    fn(user, "threads", std::to_string(default_threads()).c_str());
    fn(user, "checked", default_checked() ? "on" : "off");
  });
}

const char* deltic_implementation(deltic_op op, deltic_device_type device, int32_t index) {
  if (op < 0 || op >= DELTIC_NUM_OPS || index < 0 || index >= implementation_count(op, device)) {
    return nullptr;
  }
  return implementation_at(op, device, index).name;
}

int32_t deltic_implementation_runs_here(deltic_op op, deltic_device_type device, int32_t index,
                                        const char** sentence) {
  const char* why = "there is no such implementation";
  if (deltic_implementation(op, device, index) != nullptr) {
    why = implementation_at(op, device, index).missing();
  }
  if (sentence != nullptr) *sentence = why != nullptr ? why : "";
  return why == nullptr ? 1 : 0;
}
