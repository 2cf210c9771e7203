// Whether AMX tiles run here: CPUID, the kernel's permission, and one product to be sure.
#include "cpu/tiles.h"

#include "cpu/features.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace deltic::cpu {
namespace {

constexpr int kArchReqXcompPerm = 0x1023;  // arch_prctl: ask for the use of a register state
constexpr int kXfeatureTileData = 18;

thread_local bool t_trying = false;
sigjmp_buf g_escape;
struct sigaction g_former;

void on_illegal(int signal_number, siginfo_t* info, void* context) {
  if (t_trying) siglongjmp(g_escape, 1);
  // Another thread's own fault: hand it to whoever had the signal.
  if (g_former.sa_flags & SA_SIGINFO) {
    g_former.sa_sigaction(signal_number, info, context);
  } else if (g_former.sa_handler == SIG_DFL || g_former.sa_handler == SIG_IGN) {
    ::signal(SIGILL, SIG_DFL);  // the instruction runs again and ends the process
  } else {
    g_former.sa_handler(signal_number);
  }
}

// Row i of a is (i + 1, 0, ...), pair row 0 of b is (1, 0): every entry of row i is i + 1.
bool try_product() {
  alignas(64) uint16_t a[16][32] = {}, b[16][32] = {};
  alignas(64) float c[16][16] = {};
  for (int i = 0; i < 16; ++i) {
    const float x = static_cast<float>(i + 1);  // exact in bf16
    a[i][0] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, x) >> 16);
    b[0][2 * i] = 0x3F80;
  }
  tile_configure();
  tile_zero<0>();
  tile_load<1>(a, 64);
  tile_load<2>(b, 64);
  tile_dot<0, 1, 2>();
  tile_store<0>(c, 64);
  tile_release();
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) {
      if (c[i][j] != static_cast<float>(i + 1)) return false;
    }
  }
  return true;
}

const char* probe() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (avx512_missing() != nullptr)
    return "the CPU has no AVX-512, which prepares the tiles' operands";
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & (1u << 22)) ||
      !(edx & (1u << 24))) {
    return "the CPU has no AMX tiles for bf16";
  }
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & (1u << 5))) {
    return "the CPU has no AVX-512 bf16 conversions";
  }
  if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) != 0) {
    return "the kernel does not permit AMX tiles";
  }
  struct sigaction action = {};
  action.sa_sigaction = on_illegal;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  if (sigaction(SIGILL, &action, &g_former) != 0) return "AMX tiles could not be tried out";
  const char* answer = "AMX tiles are announced but do not run";
  t_trying = true;
  if (sigsetjmp(g_escape, 1) == 0) {
    answer = try_product() ? nullptr : "AMX tiles run but give wrong products";
  }
  t_trying = false;
  sigaction(SIGILL, &g_former, nullptr);
  return answer;
}

}  // namespace

const char* amx_missing() {
  static const char* const answer = probe();  // once per process; the permission is the process's
  return answer;
}

}  // namespace deltic::cpu

#else

namespace deltic::cpu {
const char* amx_missing() { return "AMX tiles are a feature of x86-64 CPUs under Linux"; }
}  // namespace deltic::cpu

#endif
