# Warnings and sanitizers, one place: every target links deltic_flags privately.
add_library(deltic_flags INTERFACE)
set(deltic_is_host $<COMPILE_LANGUAGE:C,CXX>)
target_compile_options(deltic_flags INTERFACE
  $<${deltic_is_host}:-Wall -Wextra -Wpedantic -Wshadow -Wno-psabi>
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>
  $<$<AND:${deltic_is_host},$<BOOL:${DELTIC_WERROR}>>:-Werror>)
# GCC 12 sees an overlap in `"text" + std::string` that is not there (its bug 105651).
target_compile_options(deltic_flags INTERFACE
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)
# The same expression must give the same bits in every kernel: contraction only where written (MulAdd, std::fma).
target_compile_options(deltic_flags INTERFACE $<${deltic_is_host}:-ffp-contract=off -fno-math-errno>)
if(DELTIC_SANITIZE)
  target_compile_options(deltic_flags INTERFACE -fsanitize=${DELTIC_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(deltic_flags INTERFACE -fsanitize=${DELTIC_SANITIZE})
  # A loop full of checks is not vectorized, whatever `omp simd` asks for.
  target_compile_options(deltic_flags INTERFACE $<$<CXX_COMPILER_ID:Clang>:-Wno-pass-failed>)
  if(DELTIC_SANITIZE STREQUAL "thread")
    # ThreadSanitizer learns of OpenMP's barriers from Archer, which libomp loads by name. Its dlopen is
    # answered by the sanitizer inside the program, so the program's own path must lead there.
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-resource-dir  # LLVM/lib/clang/VERSION
                    OUTPUT_VARIABLE deltic_clang OUTPUT_STRIP_TRAILING_WHITESPACE)
    find_library(DELTIC_ARCHER NAMES archer HINTS ${deltic_clang}/../.. REQUIRED)
    get_filename_component(deltic_archer_folder "${DELTIC_ARCHER}" DIRECTORY)
    target_link_options(deltic_flags INTERFACE LINKER:-rpath,${deltic_archer_folder})
  endif()
endif()
