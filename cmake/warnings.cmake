# Warnings and sanitizers, one place: every target links deltic_flags privately.
add_library(deltic_flags INTERFACE)
target_compile_options(deltic_flags INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wno-psabi
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>
  $<$<BOOL:${DELTIC_WERROR}>:-Werror>)
# The same expression must give the same bits in every kernel: contraction only where written (MulAdd, std::fma).
target_compile_options(deltic_flags INTERFACE -ffp-contract=off -fno-math-errno)
if(DELTIC_SANITIZE)
  target_compile_options(deltic_flags INTERFACE -fsanitize=${DELTIC_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(deltic_flags INTERFACE -fsanitize=${DELTIC_SANITIZE})
endif()
