// What a system of 2018 (glibc 2.28, libstdc++ of GCC 8: manylinux_2_28) calls otherwise or does
// not have: with this a library linked on a younger one runs there too. `tools/wheel_tag.py` says
// what is reached.
//
// glibc 2.34 moved threads and dlopen into libc and gave them new versions; 2.29 gave exp one
// without matherr. The first versions are still there, in every glibc. CMakeLists.txt reads the
// names below and tells the linker to --wrap them: a call of `name` is a call of `__wrap_name`,
// which jumps to the version asked for here.
#include <locale.h>
#include <sys/stat.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <string>

#if defined(__x86_64__)
#define DELTIC_JUMP "jmp "
#define DELTIC_PLT "@PLT"
#define DELTIC_FIRST(version) version
#elif defined(__aarch64__)
#define DELTIC_JUMP "b "
#define DELTIC_PLT ""
#define DELTIC_FIRST(version) "GLIBC_2.17"
#endif
#define DELTIC_VERSION_OF(name, version)                                             \
  __asm__(".text\n.symver old_" #name "," #name "@" version "\n.globl __wrap_" #name \
          "\n.type __wrap_" #name ", %function\n__wrap_" #name ":\n" DELTIC_JUMP     \
          "old_" #name DELTIC_PLT "\n.size __wrap_" #name ", .-__wrap_" #name "\n");
#define DELTIC_ANOTHER(name, other)                                                          \
  __asm__(".text\n.globl __wrap_" #name "\n.type __wrap_" #name ", %function\n__wrap_" #name \
          ":\n" DELTIC_JUMP #other DELTIC_PLT "\n.size __wrap_" #name ", .-__wrap_" #name "\n");
#define DELTIC_OLD(name) DELTIC_VERSION_OF(name, DELTIC_FIRST("GLIBC_2.2.5"))
#define DELTIC_OLD_AT(name, version) DELTIC_VERSION_OF(name, version)
#define DELTIC_OLD_AS(name, other) DELTIC_ANOTHER(name, other)

// Ours, and torch's headers'.
DELTIC_OLD(dlopen)
DELTIC_OLD(dlsym)
DELTIC_OLD(exp)
DELTIC_OLD(log)
DELTIC_OLD(pow)
DELTIC_OLD(pthread_create)
DELTIC_OLD(pthread_join)
DELTIC_OLD(pthread_sigmask)
// std::condition_variable::wait; the later version is not noexcept.
DELTIC_OLD_AT(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "GLIBCXX_3.4.11")
// A runtime_error that is moved: copied, as before GCC 9.
DELTIC_OLD_AS(_ZNSt13runtime_errorC2EOS_, _ZNSt13runtime_errorC2ERKS_)

#ifdef DELTIC_TORCH_CUDA  // The CUDA runtime's.
DELTIC_OLD(dlclose)
DELTIC_OLD(dlerror)
DELTIC_OLD_AT(dlmopen, DELTIC_FIRST("GLIBC_2.3.4"))
DELTIC_OLD(dlvsym)
DELTIC_OLD(pthread_condattr_setpshared)
DELTIC_OLD(pthread_detach)
DELTIC_OLD(pthread_getspecific)
DELTIC_OLD(pthread_key_create)
DELTIC_OLD(pthread_key_delete)
DELTIC_OLD(pthread_kill)
DELTIC_OLD(pthread_mutex_trylock)
DELTIC_OLD(pthread_mutexattr_destroy)
DELTIC_OLD(pthread_mutexattr_init)
DELTIC_OLD(pthread_mutexattr_setpshared)
DELTIC_OLD(pthread_mutexattr_settype)
DELTIC_OLD(pthread_once)
DELTIC_OLD(pthread_rwlock_destroy)
DELTIC_OLD(pthread_rwlock_init)
DELTIC_OLD(pthread_rwlock_rdlock)
DELTIC_OLD(pthread_rwlock_timedrdlock)
DELTIC_OLD(pthread_rwlock_timedwrlock)
DELTIC_OLD(pthread_rwlock_tryrdlock)
DELTIC_OLD(pthread_rwlock_trywrlock)
DELTIC_OLD(pthread_rwlock_unlock)
DELTIC_OLD(pthread_rwlock_wrlock)
DELTIC_OLD(pthread_rwlockattr_destroy)
DELTIC_OLD(pthread_rwlockattr_init)
DELTIC_OLD(pthread_rwlockattr_setpshared)
DELTIC_OLD(pthread_setspecific)
DELTIC_OLD(pthread_spin_destroy)
DELTIC_OLD(pthread_spin_init)
DELTIC_OLD(pthread_spin_lock)
DELTIC_OLD(pthread_spin_trylock)
DELTIC_OLD(pthread_spin_unlock)
DELTIC_OLD(sem_destroy)
DELTIC_OLD(sem_init)
DELTIC_OLD(sem_post)
DELTIC_OLD(sem_timedwait)
DELTIC_OLD(sem_trywait)
DELTIC_OLD(sem_wait)
DELTIC_OLD(shm_open)
DELTIC_OLD(shm_unlink)
#endif

// Not there in 2018, and defined here: the flag of a process without threads (glibc 2.32), which
// reference counts look at; how libstdc++ (GCC 11) says that an array is too long; numbers as text.
#define DELTIC_OWN(name) __wrap_##name

namespace {

// The C locale for this thread: a program's own may write 0,5.
class PlainNumbers {
 public:
  PlainNumbers() : before_(uselocale(plain())) {}
  ~PlainNumbers() { uselocale(before_); }
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;

 private:
  static locale_t plain() {
    static const locale_t found = newlocale(LC_ALL_MASK, "C", nullptr);
    return found;
  }
  locale_t before_;
};

// What std::from_chars takes of a text, in its general format: no blank, no plus, no hexadecimal.
std::string taken_by_from_chars(const char* first, const char* last) {
  std::string text(first, last);
  const size_t sign = !text.empty() && text[0] == '-';
  if (text.size() == sign || !std::strchr("0123456789.iInN", text[sign])) return "";
  return text.substr(0, text.find_first_of("xX", sign));
}

}  // namespace

extern "C" {
extern char DELTIC_OWN(__libc_single_threaded);
char DELTIC_OWN(__libc_single_threaded) = 0;

[[noreturn]] void DELTIC_OWN(_ZSt28__throw_bad_array_new_lengthv)();
void DELTIC_OWN(_ZSt28__throw_bad_array_new_lengthv)() { throw std::bad_array_new_length(); }

std::from_chars_result DELTIC_OWN(_ZSt10from_charsPKcS0_RdSt12chars_format)(const char* first,
                                                                            const char* last,
                                                                            double& value,
                                                                            std::chars_format);
std::from_chars_result DELTIC_OWN(_ZSt10from_charsPKcS0_RdSt12chars_format)(const char* first,
                                                                            const char* last,
                                                                            double& value,
                                                                            std::chars_format) {
  const std::string text = taken_by_from_chars(first, last);
  const PlainNumbers locale;
  const int error = errno;
  errno = 0;
  char* end = nullptr;
  const double x = std::strtod(text.c_str(), &end);
  const bool is_far = errno == ERANGE && (x == 0 || std::isinf(x));  // not a subnormal number
  errno = error;
  if (end == text.c_str()) return {first, std::errc::invalid_argument};
  const char* const stop = first + (end - text.c_str());
  if (is_far) return {stop, std::errc::result_out_of_range};
  value = x;
  return {stop, std::errc()};
}

// The fewest digits that read back as x; fixed where that is not longer than scientific.
std::to_chars_result DELTIC_OWN(_ZSt8to_charsPcS_d)(char* first, char* last, double x);
std::to_chars_result DELTIC_OWN(_ZSt8to_charsPcS_d)(char* first, char* last, double x) {
  const PlainNumbers locale;
  char text[40];
  int digits = 1;
  do {
    std::snprintf(text, sizeof text, "%.*e", digits - 1, x);
  } while (std::isfinite(x) && std::strtod(text, nullptr) != x && ++digits <= 17);
  if (const char* const exponent = std::strchr(text, 'e'); std::isfinite(x)) {
    const int decimals = digits - 1 - std::atoi(exponent + 1);
    char fixed[40];
    const int length = std::snprintf(fixed, sizeof fixed, "%.*f", decimals > 0 ? decimals : 0, x);
    if (length <= static_cast<int>(std::strlen(text))) std::memcpy(text, fixed, length + 1);
  }
  const size_t length = std::strlen(text);
  if (length > static_cast<size_t>(last - first)) return {last, std::errc::value_too_large};
  std::memcpy(first, text, length);
  return {first + length, std::errc()};
}
}

// stat was in the headers alone until glibc 2.33, around a function that takes the struct's
// version.
#if defined(__x86_64__)
#define DELTIC_STAT_VERSION 1
#else
#define DELTIC_STAT_VERSION 0
#endif
__asm__(".symver old_xstat,__xstat@" DELTIC_FIRST("GLIBC_2.2.5"));
extern "C" {
int old_xstat(int version, const char* path, struct stat* found);
int DELTIC_OWN(stat)(const char* path, struct stat* found);
int DELTIC_OWN(stat)(const char* path, struct stat* found) {
  return old_xstat(DELTIC_STAT_VERSION, path, found);
}
}

// Members of these that C++20 added, and constructors without arguments, are in libstdc++ since GCC
// 9 and 11: compiled here, they are not asked for.
template class std::basic_stringbuf<char>;
template class std::basic_istringstream<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
