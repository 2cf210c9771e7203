#include "fiber.h"

#include <cstdint>

namespace deltic::emulator {

#if defined(__x86_64__)

// What a function keeps, by the System V ABI; a switch takes 5 ns, swapcontext 300 (it asks the
// kernel for the signal mask).
asm(R"(
.text
.type deltic_change_fiber, @function
deltic_change_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size deltic_change_fiber, . - deltic_change_fiber
.type deltic_begin_fiber, @function
deltic_begin_fiber:
  movq %r12, %rdi
  callq *%rbx
  ud2
.size deltic_begin_fiber, . - deltic_begin_fiber
)");
extern "C" {
void deltic_change_fiber(void** from, void** to);
void deltic_begin_fiber();
}

void Fiber::begin(std::byte* stack, size_t bytes, void (*body)(void*), void* argument) {
  auto** top = reinterpret_cast<void**>(stack + bytes / 64 * 64);
  // deltic_begin_fiber calls from an address of 16 bytes' alignment.
  *--top = nullptr, *--top = nullptr;
  *--top = reinterpret_cast<void*>(&deltic_begin_fiber);
  *--top = nullptr;                                      // rbp
  *--top = reinterpret_cast<void*>(body);                // rbx
  *--top = argument;                                     // r12
  *--top = nullptr, *--top = nullptr, *--top = nullptr;  // r13 to r15
  stack_pointer_ = top;
}
void Fiber::change(Fiber& from, Fiber& to) {
  deltic_change_fiber(&from.stack_pointer_, &to.stack_pointer_);
}

#else

namespace {
// makecontext passes ints.
void enter(unsigned body_high, unsigned body_low, unsigned high, unsigned low) {
  const auto join = [](unsigned h, unsigned l) { return uint64_t{h} << 32 | l; };
  reinterpret_cast<void (*)(void*)>(join(body_high, body_low))(
      reinterpret_cast<void*>(join(high, low)));
}
}  // namespace

void Fiber::begin(std::byte* stack, size_t bytes, void (*body)(void*), void* argument) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack, context_.uc_stack.ss_size = bytes, context_.uc_link = nullptr;
  const auto b = reinterpret_cast<uint64_t>(body), a = reinterpret_cast<uint64_t>(argument);
  makecontext(&context_, reinterpret_cast<void (*)()>(enter), 4, unsigned(b >> 32), unsigned(b),
              unsigned(a >> 32), unsigned(a));
}
void Fiber::change(Fiber& from, Fiber& to) { swapcontext(&from.context_, &to.context_); }

#endif

}  // namespace deltic::emulator
