// Checks: what a case should give (oracle and plain algorithm), and how far a run is from it.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "cases/instance.h"

namespace deltic::cases {

// Output name -> row-major values. Slots that the call does not write are NaN.
using Values = std::map<std::string, std::vector<double>>;

// The oracle: implementation `reference` on fp64 copies of the instance's (rounded) inputs.
Values reference(const Instance& instance);

// The plain algorithm: the chunked form with the operands of each product rounded to the operand
// type (the dtype; factors of exponentials to bf16 where it is f16; nothing for f32), fp32
// otherwise. decode: the fp32 recurrence. Building blocks, conv: their formula in fp32; step: these
// after one another, the rows in between rounded to the dtype. Outputs rounded as the call's. What
// a call's error is compared with: see budget_of.
Values plain_chunked(const Instance& instance);

struct TensorError {
  std::string name;
  double error = 0.0;  // see relative_error
  double budget = 0.0;
  double plain = 0.0;  // the plain algorithm's error
  bool absolute = false;
  bool ok = false;
};

enum class Status { passed, failed, skipped };
const char* name_of(Status s);  // pass, fail, skip

struct Result {
  Status status = Status::passed;
  std::string reason;  // failed: what is wrong; skipped: the implementation's sentence
  std::vector<TensorError> errors;
  bool may_be_luck = false;  // failed by budgets alone, none of them missed tenfold
};

struct Expected {
  Values reference;
  // Of the gradients of a gate's parameters, each a sum over all tokens in which much cancels: the
  // root of the sum of its squared terms. An error is counted from it where it exceeds the sum.
  Values magnitude;
  std::map<std::string, double> plain;  // the plain algorithm's errors by tensor
};
Expected expect(const Instance& instance);

// rms(x - ref) / rms(ref) for a tensor stored as `stored`; absolute where rms(ref) is below 1e-6.
// With magnitudes the larger of |ref| and they count instead of |ref|. `count_from_rounded` takes
// half a unit in the last place of the stored dtype off every difference (states, blocks).
double relative_error(const std::vector<double>& x, const std::vector<double>& ref, DType stored,
                      bool count_from_rounded, const std::vector<double>* magnitude = nullptr,
                      bool* absolute = nullptr);

// After instance.run(): errors, budgets, zero rows, damage. NaN never passes.
Result compare(const Instance& instance, const Expected& expected);
// The same of outputs that are no call's: errors, budgets, zero rows.
Result compare_values(const Instance& instance, const Values& values, const Expected& expected);

// The outputs an instance holds against fp32 on the CPU (itself within 1e-4 of the oracle, and a
// hundred times as quick): errors and the contract's budgets, for whole long sequences of
// 16-bit rows.
Result compare_in_f32(const Instance& instance, int threads = 0);

// Everything for one case and one implementation: run, compare. A refusal gives `skipped`.
Result check(const Case& c, const RunOptions& run = {}, DeviceType device = DeviceType::cpu);
// The same with the expected values at hand (one oracle run for several implementations). Errors
// are random numbers, of the call and of the plain algorithm (a repeated key is one key: its
// rounding alone moves both by half). So a tensor that misses its budget by less than a factor of
// ten is judged again on four draws together, of this seed and the next three.
Result check(Instance& instance, const Expected& expected, const RunOptions& run = {});

// The tensors that missed in `own`, what compare says of the instance's outputs, on four draws.
Result check_draws(const Instance& instance, const Expected& expected, const Result& own,
                   const RunOptions& run = {});

// What f returns; a refusal becomes `skipped`, every other error of the library and a lack of
// memory `failed`, each with its sentence. verify and bench count alike because both go through
// here.
Result guarded(const std::function<Result()>& f);
// Empty if the case fits into the memory that is free, else the sentence. May throw deltic::Error.
std::string lack_of_memory(const Case& c, DeviceType device = DeviceType::cpu);

// Names of the implementations of an operation that verify looks at: all but the oracle, or the one
// that is named, where the operation has it.
std::vector<std::string> implementation_names(Op op, const std::string& named = {},
                                              DeviceType device = DeviceType::cpu);
// Implementations that are compiled in and cannot run on this machine, each with its sentence.
std::vector<ImplementationInfo> not_run_here();
// Whether these arguments leave somebody to run the operation. A build without the device's backend
// has nobody for anything, which is no fault of the arguments.
bool may_run(Op op, const std::string& named, DeviceType device);

}  // namespace deltic::cases
