// Checks: the oracle's values, errors against them, and the budgets of the numerical contract.
#include "cases/check.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <new>

#include "cases/scalar.h"

namespace deltic::cases {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The numerical contract, rms(x - ref) / rms(ref), by tensor; those not named are outputs and
// states.
struct Budget {
  double half, f32;
};
bool is_any(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}
Budget contract(const std::string& name) {
  if (is_any(name, {"dq", "dk", "dv", "dx", "dz", "da", "dweight", "dbias", "d_initial_state"}))
    return {8e-3, 1e-4};
  if (name == "dbeta") return {1.5e-2, 1e-4};
  if (name == "dg" || name == "dgv") return {2e-2, 2e-4};
  if (name == "dA_log" || name == "ddt_bias") return {1e-2, 2e-4};
  return {6e-3, 1e-4};
}

bool is_parameter_gradient(const std::string& name) { return is_any(name, {"dA_log", "ddt_bias"}); }

// Twice the plain algorithm's error, which counts as no less than these shares of half the
// contract: a plain sum may by luck be exact to the last bit, and an exponential or a sum in
// another order is no loss. Standard inputs have the contract besides.
constexpr double kFloorHalf = 1.0 / 6;
// A recurrence of 300 tokens rounds 300 times; gradients are sums of sums.
constexpr double kFloorF32 = 1.0 / 20;
// One number per head, or a few in all: their luck decides (seen: 0 for plain, 2e-5 for ours in
// fp32).
constexpr double kFloorFew = 1.0;
constexpr size_t kFew = 32;
double floor_of(const Case& c, const std::string& name, bool half, size_t count) {
  // A running sum over a chunk has one number's luck: its errors are a walk.
  if (half && c.op == Op::backward && name == "dg")
    count /= static_cast<size_t>(std::clamp<int64_t>(c.longest(), 1, c.chunk));
  if (is_parameter_gradient(name) || count < kFew) return kFloorFew;
  return half ? kFloorHalf : kFloorF32;
}
// The norm of a step magnifies what the rounding of the rows before it left, in heads where little
// is left of o: by a lot in some draws, for the plain algorithm as for others.
bool is_magnified(const std::string& name, bool half) { return half && name == "norm.out"; }
double budget_of(const Case& c, const std::string& name, bool half, size_t count, double plain) {
  const double limit = half ? contract(name).half : contract(name).f32;
  const double twice = std::max(2 * plain, limit * floor_of(c, name, half, count));
  if (has_adversarial_keys(c)) return twice;
  if (is_magnified(name, half)) return std::max(limit, twice);
  return is_standard(c) ? std::min(limit, twice) : std::max(limit, twice);
}
// The plain algorithm is written on its own: where oracle and plain differ by more, one of them is
// wrong. In backward the plain one, with operands in bf16, may lose more than the contract allows
// others (ddt_bias: 18 %, where gates are deep); in fp32 a wrong formula shows.
double largest_plain(const Case& c, const std::string& name, bool half) {
  if (!is_standard(c) || is_magnified(name, half)) return kInfinity;
  if (!c.is_gradient()) return half ? contract(name).half : contract(name).f32;
  return half ? kInfinity : 10 * contract(name).f32;
}

bool is_state(const std::string& name) {
  return is_by_slot(name) || is_any(name, {"final_state", "conv.final_state"});
}

// Whether the rounding to the stored dtype is no error of the call. Gradients that are stored with
// fewer digits than q, and those of parameters, where one number's luck would decide, count so.
bool counts_from_rounded(const Case& c, const std::string& name, DType stored) {
  return is_state(name) || (!c.is_sequence() && name != "o") || is_parameter_gradient(name) ||
         (c.op == Op::backward && stored != c.dtype);
}

// Whether 16-bit operands may enter a product on the way to this output.
bool has_half_products(const Case& c, const std::string& name) {
  // Such a state goes into the products of the next token, and a rounding may fall either way.
  if (c.hands_states_on() && is_half(c.sdtype) &&
      (name == "o" || name == "record" || is_state(name))) {
    return true;
  }
  if (!is_half(c.dtype)) return false;
  if (c.op == Op::forward || c.op == Op::backward || c.op == Op::step) return true;
  if (c.op == Op::kkt || c.op == Op::scores || c.op == Op::scores_inverse) return true;
  if (c.op == Op::wy) return !is_any(name, {"kg", "qg", "dq"});
  return c.op == Op::decode && name == "o";
}

double softplus_over_slope(double x) {  // softplus(x) / sigmoid(x)
  if (x < -40) return 1.0;
  return (std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)))) * (1.0 + std::exp(-x));
}

// See Expected::magnitude. A parameter's gradient is a sum over what dg is made of.
Values magnitudes(const Instance& instance, const Values& reference) {
  const Case& c = instance.spec();
  if (!instance.has("dA_log") && !instance.has("ddt_bias")) return {};
  const std::vector<double>& dg = reference.at("dg");
  const std::vector<double> g = instance.values("g");
  const std::vector<double> bias =
      instance.has("dt_bias") ? instance.values("dt_bias") : std::vector<double>();
  const auto width = static_cast<size_t>(c.gate == Gate::channel ? c.K : 1);
  const size_t heads = static_cast<size_t>(c.HV);
  std::vector<double> of_A(heads, 0.0), of_bias(heads * width, 0.0);
  for (size_t i = 0; i < dg.size(); ++i) {
    if (dg[i] == 0) continue;  // padding, whose g is NaN, among them
    const size_t channel = i % (heads * width);
    const double x = g[i] + (bias.empty() ? 0.0 : bias[channel]);
    const double term = dg[i] * (c.form == GateForm::softplus ? softplus_over_slope(x) : x);
    of_A[channel / width] += term * term;
    of_bias[channel] += dg[i] * dg[i];
  }
  for (auto* list : {&of_A, &of_bias}) {
    for (double& y : *list) y = std::sqrt(y);
  }
  return {{"dA_log", of_A}, {"ddt_bias", of_bias}};
}

const std::vector<double>* magnitude_of(const Values& magnitude, const std::string& name) {
  const auto at = magnitude.find(name);
  return at == magnitude.end() ? nullptr : &at->second;
}

// Where rms(ref) is below this, errors are absolute.
constexpr double kSmallest = 1e-6;
// What a lucky or unlucky draw can explain: an error of more than this many budgets is wrong.
constexpr double kMostLuck = 10;

// rms(x - ref), and rms(ref) or of the magnitudes.
struct Deviation {
  double error = 0, size = 0;
  bool is_absolute() const { return size < kSmallest; }
  double relative() const { return std::isinf(error) || is_absolute() ? error : error / size; }
};
Deviation deviation(const std::vector<double>& x, const std::vector<double>& ref, DType stored,
                    bool count_from_rounded, const std::vector<double>* magnitude) {
  double error = 0, size = 0;
  int64_t count = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    if (std::isnan(ref[i])) continue;  // not written
    if (!std::isfinite(x[i])) return {kInfinity, kInfinity};
    double difference = std::fabs(x[i] - ref[i]);
    if (count_from_rounded) {
      difference =
          std::max(0.0, difference - std::max(half_ulp(x[i], stored), half_ulp(ref[i], stored)));
    }
    error += difference * difference;
    const double from = std::max(std::fabs(ref[i]), magnitude != nullptr ? (*magnitude)[i] : 0.0);
    size += from * from;
    ++count;
  }
  if (count == 0) return {};
  return {std::sqrt(error / static_cast<double>(count)),
          std::sqrt(size / static_cast<double>(count))};
}

// The plain algorithm's errors on an instance, by tensor.
using Deviations = std::map<std::string, Deviation>;
Deviations plain_deviations(const Instance& instance, const Values& ref, const Values& magnitude) {
  const Values plain = plain_chunked(instance);
  Deviations all;
  for (const std::string& name : instance.outputs()) {
    const auto stored = static_cast<DType>(instance.tensor(name).view.dtype);
    all[name] = deviation(plain.at(name), ref.at(name), stored,
                          counts_from_rounded(instance.spec(), name, stored),
                          magnitude_of(magnitude, name));
  }
  return all;
}

}  // namespace

const char* name_of(Status s) {
  return s == Status::passed ? "pass" : s == Status::failed ? "fail" : "skip";
}

Values reference(const Instance& instance) {
  Instance oracle = Instance::widened(instance);
  oracle.run({.impl = "reference"});
  Values all;
  for (const std::string& name : oracle.outputs()) {
    std::vector<double> list = oracle.values(name);
    if (is_by_slot(name)) {
      const Tensor& t = oracle.tensor(name);
      const int64_t width = t.view.shape[t.view.rank - 1];
      for (int64_t i = 0; i < static_cast<int64_t>(list.size()); i += width) {
        if (!oracle.is_written(t, i)) std::fill_n(list.begin() + i, width, NAN);
      }
    }
    all[name] = std::move(list);
  }
  return all;
}

Expected expect(const Instance& instance) {
  Expected e;
  e.reference = reference(instance);
  e.magnitude = magnitudes(instance, e.reference);
  for (const auto& [name, d] : plain_deviations(instance, e.reference, e.magnitude))
    e.plain[name] = d.relative();
  return e;
}

double relative_error(const std::vector<double>& x, const std::vector<double>& ref, DType stored,
                      bool count_from_rounded, const std::vector<double>* magnitude,
                      bool* absolute) {
  const Deviation d = deviation(x, ref, stored, count_from_rounded, magnitude);
  if (absolute != nullptr) *absolute = d.is_absolute();
  return d.relative();
}

namespace {

void add_reason(Result& result, const std::string& reason) {
  result.status = Status::failed;
  result.reason += (result.reason.empty() ? "" : "; ") + reason;
}

// Empty if the error is within its budget.
std::string miss_of(TensorError& e) {
  e.ok = e.error <= e.budget;  // false for NaN
  if (e.ok) return "";
  char text[96];
  std::snprintf(text, sizeof text, "error %.3g above the budget %.3g (plain %.3g)", e.error,
                e.budget, e.plain);
  return text;
}

// What is wrong with one tensor; empty if nothing is.
std::string judge(TensorError& e, const Case& c, const std::vector<double>& x,
                  const std::vector<double>& ref) {
  const bool half = has_half_products(c, e.name);
  e.budget = budget_of(c, e.name, half, ref.size(), e.plain);
  if (!std::isfinite(e.plain)) return "the plain algorithm is not finite here";
  if (e.plain > largest_plain(c, e.name, half))
    return "oracle and plain algorithm differ by " + std::to_string(e.plain);
  if (std::isinf(e.error)) {
    size_t at = 0;
    while (std::isnan(ref[at]) || std::isfinite(x[at])) ++at;
    return "not finite at element " + std::to_string(at);
  }
  return miss_of(e);
}

// Whether another draw might not have missed: false for NaN too.
bool misses_a_little(const TensorError& e, const Case& c) {
  return e.plain <= largest_plain(c, e.name, has_half_products(c, e.name)) && !e.absolute &&
         e.error <= kMostLuck * e.budget;
}

// One tensor of a call beside the oracle's.
Deviation own_deviation(const Instance& instance, const std::string& name,
                        const std::vector<double>& x, const Expected& expected) {
  const auto stored = static_cast<DType>(instance.tensor(name).view.dtype);
  return deviation(x, expected.reference.at(name), stored,
                   counts_from_rounded(instance.spec(), name, stored),
                   magnitude_of(expected.magnitude, name));
}

}  // namespace

Result compare_values(const Instance& instance, const Values& values, const Expected& expected) {
  const Case& c = instance.spec();
  Result result;
  bool is_luck = true;
  for (const std::string& name : instance.outputs()) {
    const std::vector<double>& x = values.at(name);
    const Deviation own = own_deviation(instance, name, x, expected);
    TensorError e;
    e.name = name;
    e.error = own.relative();
    e.absolute = own.is_absolute();
    e.plain = expected.plain.at(name);
    const std::string reason = judge(e, c, x, expected.reference.at(name));
    is_luck = is_luck && (reason.empty() || misses_a_little(e, c));
    if (!reason.empty()) add_reason(result, name + ": " + reason);
    for (const auto& [first, last] : instance.zero_ranges(name)) {
      const auto begin = x.begin() + first, end = x.begin() + last;
      const auto at = std::find_if(begin, end, [](double y) { return y != 0.0; });
      if (at == end) continue;
      add_reason(result, name + ": expected 0 at element " + std::to_string(at - x.begin()));
      is_luck = false;
    }
    result.errors.push_back(std::move(e));
  }
  result.may_be_luck = result.status == Status::failed && is_luck;
  return result;
}

Result compare(const Instance& instance, const Expected& expected) {
  Values values;
  for (const std::string& name : instance.outputs()) values[name] = instance.values(name);
  Result result = compare_values(instance, values, expected);
  const std::string damage = instance.damage();
  if (!damage.empty()) add_reason(result, damage), result.may_be_luck = false;
  return result;
}

Result compare_in_f32(const Instance& instance, int threads) {
  Instance wide = Instance::widened(instance, DType::f32);
  wide.run({.threads = threads});
  Result result;
  for (const std::string& name : instance.outputs()) {
    const auto stored = static_cast<DType>(instance.tensor(name).view.dtype);
    TensorError e;
    e.name = name;
    e.error =
        relative_error(instance.values(name), wide.values(name), stored,
                       counts_from_rounded(instance.spec(), name, stored), nullptr, &e.absolute);
    e.budget = has_half_products(instance.spec(), name) ? contract(name).half : contract(name).f32;
    e.ok = e.error <= e.budget;  // false for NaN
    if (!e.ok) {
      char text[96];
      std::snprintf(text, sizeof text, ": error %.3g above the budget %.3g, whole sequence",
                    e.error, e.budget);
      add_reason(result, name + text);
    }
    result.errors.push_back(std::move(e));
  }
  return result;
}

Result guarded(const std::function<Result()>& f) {
  try {
    return f();
  } catch (const Error& e) {
    const bool refused = e.kind() == ErrorKind::unsupported;
    return {refused ? Status::skipped : Status::failed, e.what(), {}};
  } catch (const std::bad_alloc&) {
    return {Status::failed, "not enough memory", {}};
  }
}

std::string lack_of_memory(const Case& c, DeviceType device) {
  std::ifstream in("/proc/meminfo");
  std::string key, unit;
  double kib = 0;
  while (key != "MemAvailable:" && in >> key >> kib) std::getline(in, unit);
  if (key != "MemAvailable:") return "";  // nobody knows
  const Instance instance = Instance::shapes_of(c, device);
  double needed = 2 * instance.tensor_bytes();  // as much again while inputs are drawn and compared
  if (c.op == Op::backward) {
    const auto plan = backward_memory(instance.options(), instance.gradients(), c.save);
    needed += static_cast<double>(plan.saved_bytes) + static_cast<double>(plan.workspace_bytes);
  }
  if (needed <= kib * 1024) return "";
  char text[96];
  std::snprintf(text, sizeof text, "expected %.3g GiB of free memory, got %.3g", needed * 0x1p-30,
                kib * 0x1p-20);
  return text;
}

namespace {

constexpr int kDraws = 4;

// Mean squares over the draws of a case.
struct DrawnErrors {
  double error = 0, plain = 0, size = 0;
  void add(const Deviation& own, double relative_plain) {
    error += own.error * own.error / kDraws, size += own.size * own.size / kDraws;
    plain += std::pow(relative_plain * (own.is_absolute() ? 1.0 : own.size), 2) / kDraws;
  }
};

}  // namespace

Result check_draws(const Instance& instance, const Expected& expected, const Result& own,
                   const RunOptions& run) {
  std::map<std::string, DrawnErrors> drawn;
  const auto add = [&](const Instance& draw, const Expected& values) {
    for (const TensorError& e : own.errors) {
      if (e.ok) continue;
      drawn[e.name].add(own_deviation(draw, e.name, draw.values(e.name), values),
                        values.plain.at(e.name));
    }
  };
  add(instance, expected);
  for (int i = 1; i < kDraws; ++i) {
    Case other = instance.spec();
    other.seed += static_cast<uint64_t>(i);
    Instance draw(other, true, {.device = instance.device()});
    draw.run(run);
    const Expected values = expect(draw);
    Result result = compare(draw, values);
    if (result.status == Status::failed && !result.may_be_luck) {
      result.reason = "with seed " + std::to_string(other.seed) + " " + result.reason;
      return result;
    }
    add(draw, values);
  }
  Result result{Status::passed, {}, own.errors};
  for (TensorError& e : result.errors) {
    if (e.ok) continue;
    const DrawnErrors& all = drawn.at(e.name);
    e.error = Deviation{std::sqrt(all.error), std::sqrt(all.size)}.relative();
    e.plain = Deviation{std::sqrt(all.plain), std::sqrt(all.size)}.relative();
    e.budget = budget_of(instance.spec(), e.name, has_half_products(instance.spec(), e.name),
                         expected.reference.at(e.name).size(), e.plain);
    const std::string reason = miss_of(e);
    if (!reason.empty()) add_reason(result, e.name + ": of four draws, " + reason);
  }
  return result;
}

Result check(Instance& instance, const Expected& expected, const RunOptions& run) {
  return guarded([&] {
    instance.run(run);
    const Result own = compare(instance, expected);
    return own.may_be_luck ? check_draws(instance, expected, own, run) : own;
  });
}

Result check(const Case& c, const RunOptions& run, DeviceType device) {
  return guarded([&]() -> Result {
    const std::string lack = lack_of_memory(c, device);
    if (!lack.empty()) return {Status::failed, lack, {}};
    Instance instance(c, true, {.device = device});
    instance.reserve(run);  // ask first: a refused case needs no oracle
    return check(instance, expect(instance), run);
  });
}

std::vector<std::string> implementation_names(Op op, const std::string& named, DeviceType device) {
  std::vector<std::string> names;
  for (const ImplementationInfo& i : implementations(op, device)) {
    if (named.empty() ? i.name != "reference" : i.name == named) names.push_back(i.name);
  }
  return names;
}

std::vector<ImplementationInfo> not_run_here() {
  std::vector<ImplementationInfo> list;
  for (const DeviceType device : {DeviceType::cpu, DeviceType::cuda}) {
    for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
      for (const ImplementationInfo& i : implementations(static_cast<Op>(op), device)) {
        const bool is_known = std::any_of(list.begin(), list.end(),
                                          [&](const auto& known) { return known.name == i.name; });
        if (!i.runs_here && !is_known) list.push_back(i);
      }
    }
  }
  return list;
}

bool may_run(Op op, const std::string& named, DeviceType device) {
  const bool has_backend = !implementation_names(Op::forward, {}, device).empty();
  return (named.empty() && !has_backend) || !implementation_names(op, named, device).empty();
}

}  // namespace deltic::cases
