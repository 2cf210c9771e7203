// Version, errors, struct initialisers.
#include <cstring>

#include "api/guard.h"
#include "core/check.h"

namespace deltic {
namespace {
// A fixed buffer: reporting an error may not fail for want of memory. Longer texts are cut.
thread_local char t_last_error[4096] = "";

// All zero and its size, as the caller knows the struct: nothing behind it is written.
template <class Struct>
void init(Struct* s, uint64_t size) {
  if (s == nullptr || size < sizeof(s->size)) return;
  std::memset(static_cast<void*>(s), 0, size);
  s->size = size;
}
}  // namespace

void set_last_error(const char* text) noexcept {
  std::strncpy(t_last_error, text, sizeof(t_last_error) - 1);
  t_last_error[sizeof(t_last_error) - 1] = '\0';
}
}  // namespace deltic

using namespace deltic;

const char* deltic_version(void) { return DELTIC_VERSION_STRING; }
uint32_t deltic_abi_version(void) { return DELTIC_ABI_VERSION; }
deltic_status deltic_check_abi(uint32_t header_abi_version) {
  return guard([&] {
    if (header_abi_version != DELTIC_ABI_VERSION) {
      fail(DELTIC_ABI_MISMATCH, "check_abi: header: expected ABI ", DELTIC_ABI_VERSION, ", got ",
           header_abi_version);
    }
  });
}
const char* deltic_last_error(void) { return t_last_error; }

const char* deltic_status_name(int32_t status) {
  constexpr const char* names[] = {
      "ok", "invalid argument", "unsupported", "out of memory", "runtime error", "ABI mismatch"};
  return status >= 0 && status <= DELTIC_ABI_MISMATCH ? names[status] : "unknown status";
}
const char* deltic_op_name(int32_t op) {
  const bool known = op >= 0 && op < DELTIC_NUM_OPS;
  return known ? name_of(static_cast<deltic_op>(op)) : "unknown operation";
}

void deltic_options_init(deltic_options* options, uint64_t size) { init(options, size); }
void deltic_tensors_init(deltic_tensors* tensors, uint64_t size) { init(tensors, size); }
void deltic_backward_tensors_init(deltic_backward_tensors* tensors, uint64_t size) {
  init(tensors, size);
}
void deltic_conv_tensors_init(deltic_conv_tensors* tensors, uint64_t size) { init(tensors, size); }
void deltic_commit_tensors_init(deltic_commit_tensors* tensors, uint64_t size) {
  init(tensors, size);
}
void deltic_step_tensors_init(deltic_step_tensors* tensors, uint64_t size) { init(tensors, size); }
void deltic_move_tensors_init(deltic_move_tensors* tensors, uint64_t size) { init(tensors, size); }
void deltic_conv_backward_tensors_init(deltic_conv_backward_tensors* tensors, uint64_t size) {
  init(tensors, size);
}
void deltic_memory_plan_init(deltic_memory_plan* plan, uint64_t size) { init(plan, size); }
void deltic_block_tensors_init(deltic_block_tensors* tensors, uint64_t size) {
  init(tensors, size);
}
void deltic_block_backward_tensors_init(deltic_block_backward_tensors* tensors, uint64_t size) {
  init(tensors, size);
}
