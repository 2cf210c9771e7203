#include "fiber.h"

namespace deltic::emulator {

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

}  // namespace deltic::emulator
