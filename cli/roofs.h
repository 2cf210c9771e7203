// The machine's roofs, measured: the rate of a matrix product from the first cache, and of a copy.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace deltic::cli {

struct ProductRoof {
  double gflops = 0;
  std::string kind;  // which instructions
};
// fp32: a register-blocked product with operands in L1, on every thread at once, with the widest
// vectors here. Of cpu.avx2: with its own vectors; of cpu.amx: bf16 operands on tiles (only where
// the library runs it).
ProductRoof measure_product_roof(int threads, const std::string& impl);

// A copy that moves `traffic` bytes: half of them read, half written, a slice per thread.
class CopyRoof {
 public:
  CopyRoof(size_t traffic, int threads);
  void run();
  size_t traffic() const { return 2 * half_; }

 private:
  size_t half_;
  int threads_;
  std::unique_ptr<std::byte[]> from_, to_;
};

}  // namespace deltic::cli
