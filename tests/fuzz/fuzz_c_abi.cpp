// The libFuzzer target of the C interface's descriptors.
#include "descriptors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  deltic::test::fuzz_descriptors(data, size);
  return 0;
}
