// `deltic demo`: what the library does, each claim with its measured number.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "bench.h"
#include "cases/check.h"
#include "commands.h"
#include "recall.h"

namespace deltic::cli {
namespace {

using cases::Case;
using cases::Instance;

class Demo {
 public:
  explicit Demo(const DemoOptions& options)
      : report_(options.common, "deltic.demo/1"),
        threads_(options.common.threads > 0 ? options.common.threads : num_threads()) {}

  int run(int only) {
    introduce();
    const std::function<void()> steps[] = {
        [&] { show_gates(); }, [&] { show_prefill_and_decode(); }, [&] { show_checkpoints(); },
        [&] { show_growth(); }, [&] { show_training(); }};
    static_assert(std::size(steps) == kDemoSteps);
    for (int i = 1; i <= kDemoSteps; ++i) {
      if (only == 0 || only == i) steps[i - 1]();
    }
    report_.print("\n%d checks passed, %d failed\n", passed_, failed_);
    report_.summary() = {{"passed", passed_}, {"failed", failed_}};
    report_.write();
    return failed_ == 0 ? kExitPass : kExitFail;
  }

 private:
  void title(const char* text) {
    report_.print("\n%s\n%s\n", text, std::string(std::strlen(text), '-').c_str());
  }

  // A claim that was measured; the reader sees the number and the verdict.
  void verdict(const std::string& name, bool ok, const std::string& text, Json numbers) {
    report_.print("  %s  %s\n", ok ? "[ok]  " : "[FAIL]", text.c_str());
    (ok ? passed_ : failed_) += 1;
    Json j = {{"name", name}, {"status", ok ? "pass" : "fail"}};
    j.update(numbers);
    report_.cases().push_back(std::move(j));
  }

  void introduce() {
    report_.print(
        "deltic %s: the engine for delta-rule linear attention\n"
        "\n"
        "A layer of this family keeps a state S of K x V numbers per head instead of a cache that "
        "grows\n"
        "with the text. Each token lets the state decay, and corrects what it answers for the key "
        "k:\n"
        "\n"
        "    S <- decay * S;   S <- S + beta * k (v - S^T k)^T;   o = S^T q / sqrt(K)\n"
        "\n"
        "One recurrence, three kinds of decay: none (DeltaNet), one number per head (Gated "
        "DeltaNet), one\n"
        "per key channel (Kimi Delta Attention).\n\n",
        std::string(version()).c_str());
    const Json facts = machine();
    report_.print("  machine   %s\n", facts.value("cpu", "unknown").c_str());
    report_.print("  uses      %s, %d thread%s\n", facts.value("cpu.used", "unknown").c_str(),
                  threads_, threads_ == 1 ? "" : "s");
  }

  void show_gates() {
    title("1. Three gate kinds on one packed batch, against the fp64 oracle");
    report_.print(
        "  Four sequences of 100, 0, 33 and 257 tokens in one call, 4 key heads, 8 value heads, K "
        "= V = 64.\n"
        "  Error: rms(x - oracle) / rms(oracle); budget 1e-4 in fp32, 6e-3 in bf16.\n\n");
    std::vector<std::vector<std::string>> table = {
        {"gate", "dtype", "implementation", "error of o", "of the states", "ms"}};
    double worst = 0;
    bool ok = true;
    for (const char* gate : {"none", "head", "channel"}) {
      for (const char* dtype : {"f32", "bf16"}) {
        const Case c = cases::parse(std::string("forward seqs=100,0,33,257 H=4 HV=8 init=1 gate=") +
                                    gate + " dtype=" + dtype);
        Instance instance(c);
        const std::string impl = instance.explain().front().name;
        const cases::Expected expected = cases::expect(instance);
        const cases::Result r = cases::check(instance, expected, {.impl = {}, .threads = threads_});
        const double ms = median_ms([&] { instance.call({.impl = {}, .threads = threads_}); });
        ok &= r.status == cases::Status::passed;
        double o = NAN, states = NAN;
        for (const cases::TensorError& e : r.errors) {
          (e.name == "o" ? o : states) = e.error;
          worst = std::max(worst, e.error / e.budget);
        }
        table.push_back(
            {gate, dtype, impl, format("%.1e", o), format("%.1e", states), format("%.2f", ms)});
        if (r.status != cases::Status::passed) report_.print("  %s\n", r.reason.c_str());
      }
    }
    print_table(report_, table);
    report_.print("\n");
    verdict("gates", ok, "all within budget; the worst at " + format("%.2f", worst) + " of it",
            {{"worst_fraction_of_budget", number_or_null(worst)}});
  }

  // Tokens [first, last) of a tensor [1,T,...].
  static TensorView tokens(TensorView t, int64_t first, int64_t last) {
    t.data = static_cast<std::byte*>(t.data) +
             first * t.strides[1] * cases::size_of(static_cast<DType>(t.dtype));
    t.shape[1] = last - first;
    return t;
  }
  static Tensors tokens_of(const Tensors& all, int64_t first, int64_t last) {
    Tensors t;
    t.q = tokens(all.q, first, last), t.k = tokens(all.k, first, last),
    t.v = tokens(all.v, first, last);
    t.g = tokens(all.g, first, last), t.beta = tokens(all.beta, first, last);
    return t;
  }
  static double difference(const float* a, const float* b, size_t n) {
    double error = 0, size = 0;
    for (size_t i = 0; i < n; ++i) {
      const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
      error += d * d;
      size += static_cast<double>(b[i]) * static_cast<double>(b[i]);
    }
    return std::sqrt(error / size);
  }

  void show_prefill_and_decode() {
    title("2. Prefill, then decode: the same answer as one pass");
    constexpr int64_t kTokens = 300, kPrefill = 236;
    const Case c = cases::parse("forward gate=channel dense=1x300 H=4 K=64 V=64");
    Instance whole(c);
    whole.run({.impl = {}, .threads = threads_});
    const auto* one_pass = static_cast<const float*>(whole.tensors().o.data);

    const size_t row = static_cast<size_t>(c.HV * c.V),
                 states = static_cast<size_t>(c.HV * c.K * c.V);
    std::vector<float> o(row * kTokens), state(states);
    const TensorView o_view(o.data(), {1, kTokens, c.HV, c.V});
    const TensorView state_view(state.data(), {1, c.HV, c.K, c.V});
    Tensors prefill = tokens_of(whole.tensors(), 0, kPrefill);
    prefill.o = tokens(o_view, 0, kPrefill);
    prefill.final_state = state_view;
    forward(whole.options(), prefill);
    for (int64_t t = kPrefill; t < kTokens; ++t) {
      Tensors step = tokens_of(whole.tensors(), t, t + 1);
      step.o = tokens(o_view, t, t + 1);
      step.initial_state = step.final_state = state_view;  // updated in place
      decode(whole.options(), step);
    }
    const double o_error = difference(o.data() + row * kPrefill, one_pass + row * kPrefill,
                                      row * (kTokens - kPrefill));
    const double s_error = difference(
        state.data(), static_cast<const float*>(whole.tensors().final_state.data), states);
    report_.print(
        "  forward over %lld tokens, then %lld calls of decode on the state it left, fp32:\n\n",
        static_cast<long long>(kPrefill), static_cast<long long>(kTokens - kPrefill));
    verdict("prefill_then_decode", o_error < 1e-5 && s_error < 1e-5,
            "outputs differ from one pass by " + format("%.1e", o_error) + ", the last state by " +
                format("%.1e", s_error),
            {{"o_difference", o_error}, {"state_difference", s_error}});
  }

  void show_checkpoints() {
    title("3. Checkpoint and resume");
    constexpr int64_t kTokens = 300;
    const Case c = cases::parse("forward gate=head dense=1x300 H=4 K=64 V=64 ckpt=100,192");
    Instance whole(c);
    whole.run({.impl = {}, .threads = threads_});
    const size_t row = static_cast<size_t>(c.HV * c.V);
    const auto slots = whole.values("ckpt_slots");
    const TensorView kept = whole.tensors().ckpt_states;
    report_.print(
        "  One pass keeps the state after 100 and after 192 tokens. Going on from each:\n\n");
    int entry = 0;
    for (const int64_t at : {100, 192}) {
      TensorView state = kept;
      state.data = static_cast<float*>(kept.data) +
                   static_cast<int64_t>(slots[static_cast<size_t>(entry++)]) * kept.strides[0];
      state.shape[0] = 1;
      std::vector<float> o(row * static_cast<size_t>(kTokens - at));
      Tensors rest = tokens_of(whole.tensors(), at, kTokens);
      rest.initial_state = state;
      rest.o = TensorView(o.data(), {1, kTokens - at, c.HV, c.V});
      forward(whole.options(), rest);
      const float* one_pass =
          static_cast<const float*>(whole.tensors().o.data) + row * static_cast<size_t>(at);
      const double error = difference(o.data(), one_pass, o.size());
      const bool same_bits = std::memcmp(o.data(), one_pass, o.size() * sizeof(float)) == 0;
      const bool on_chunk = at % 64 == 0;
      verdict(
          "resume_at_" + std::to_string(at), on_chunk ? same_bits : error < 1e-5,
          "from token " + std::to_string(at) + ": " +
              (same_bits ? "the same bits as one pass" : "differs by " + format("%.1e", error)) +
              (on_chunk ? " (a multiple of the chunk length, 64)" : ""),
          {{"difference", error}, {"same_bits", same_bits}});
    }
  }

  double median_ms(const std::function<void()>& f, double seconds = 0.4) {
    f();
    std::vector<double> times;
    double spent = 0;
    while (times.size() < 3 || (spent < seconds * 1e3 && times.size() < 50)) {
      times.push_back(time_ms(f));
      spent += times.back();
    }
    return quantile(times, 0.5);
  }

  void show_growth() {
    title("4. Speed against the plain recurrence as the sequence grows");
    report_.print(
        "  Gated DeltaNet, 8 heads, K = V = 128, %d thread%s. Recurrence: our decode over all "
        "tokens.\n"
        "  Bars: microseconds per token (# chunked form, - recurrence).\n\n",
        threads_, threads_ == 1 ? "" : "s");
    struct Point {
      int64_t length;
      std::string dtype;
      double ms, recurrence_ms;
    };
    std::vector<Point> points;
    for (const char* dtype : {"f32", "bf16"}) {
      for (int64_t length = 128; length <= 8192; length *= 4) {
        const Case c = cases::parse("forward gate=head H=8 K=128 V=128 final=0 dense=1x" +
                                    std::to_string(length) + " dtype=" + dtype);
        Instance instance(c, false);
        instance.reserve({.impl = {}, .threads = threads_});
        instance.reset();
        const double ms = median_ms([&] { instance.call({.impl = {}, .threads = threads_}); });
        const double recurrence = median_ms(recurrence_call(instance, threads_));
        points.push_back({length, dtype, ms, recurrence});
        report_.cases().push_back({{"name", "growth"},
                                   {"status", "pass"},
                                   {"case", cases::canonical(c)},
                                   {"median_ms", ms},
                                   {"baseline", "recurrence"},
                                   {"baseline_ms", recurrence},
                                   {"ratio", recurrence / ms}});
        if (ms + recurrence > 2000) break;  // a minute is a minute, on any machine
      }
    }
    const auto per_token = [](const Point& p, double ms) {
      return ms * 1e3 / static_cast<double>(p.length);
    };
    double longest = 0;
    for (const Point& p : points)
      longest = std::max({longest, per_token(p, p.ms), per_token(p, p.recurrence_ms)});
    constexpr double kBar = 40;
    const auto bar = [&](double us, char mark) {
      return std::string(static_cast<size_t>(std::max(1.0, std::round(kBar * us / longest))), mark);
    };
    report_.print("  dtype   tokens  us/token\n");
    for (const Point& p : points) {
      const double ours = per_token(p, p.ms), theirs = per_token(p, p.recurrence_ms);
      report_.print("  %-5s  %7lld  %8.2f  %-*s\n", p.dtype.c_str(),
                    static_cast<long long>(p.length), ours, static_cast<int>(kBar),
                    bar(ours, '#').c_str());
      report_.print("                  %8.2f  %-*s  %.2f times\n", theirs, static_cast<int>(kBar),
                    bar(theirs, '-').c_str(), p.recurrence_ms / p.ms);
    }
  }

  void show_training() {
    title("5. Training: recall in context, learned through forward and backward");
    report_.print(
        "  A text has %lld pairs of a key (a to z) and a value (A to Z), drawn anew each time, "
        "then "
        "asks for\n"
        "  every key's value. An embedding, one layer of Gated DeltaNet (2 heads, K = V = 32) and "
        "a "
        "readout\n"
        "  learn with Adam, 32 texts a step, what to write into the state and how to read it.\n\n",
        static_cast<long long>(recall::kPairs));
    constexpr int kMostSteps = 600, kMean = 10;
    constexpr double kLearned = 0.995, kClaimed = 0.95;
    std::mt19937 random(2);
    recall::Model model(1, threads_);
    const bool is_terminal = isatty(fileno(report_.out())) != 0;
    std::vector<double> last;  // recall of the last steps
    double mean = 0;
    int step = 0;
    const double ms = time_ms([&] {
      while (step < kMostSteps && mean < kLearned) {
        const recall::Model::Score score = model.train(recall::draw_texts(random, 32));
        ++step;
        last.push_back(score.recall);
        if (last.size() > kMean) last.erase(last.begin());
        mean = last.size() < kMean ? 0 : std::accumulate(last.begin(), last.end(), 0.0) / kMean;
        const bool is_done = step == kMostSteps || mean >= kLearned;
        if (!is_terminal && step % 20 != 1 && !is_done) continue;
        report_.print("%s  step %4d   loss %6.3f   recall %5.1f %%%s", is_terminal ? "\r" : "",
                      step, score.loss, 100 * score.recall, is_terminal && !is_done ? "" : "\n");
        std::fflush(report_.out());
      }
    });

    constexpr int64_t kTexts = 64, kShown = 2;
    const recall::Tokens texts = recall::draw_texts(random, kTexts), answers = model.answer(texts);
    int64_t right = 0;
    report_.print("\n  Answers from the state, by decode (? question, = answer, x wrong):\n\n");
    for (int64_t i = 0; i < kTexts; ++i) {
      std::string pairs, asked;
      for (int64_t p = 0; p < recall::kPairs; ++p) {
        const int* pair = texts.data() + i * recall::kLength + 2 * p;
        const int* question = pair + 2 * recall::kPairs;
        const int answer = answers[static_cast<size_t>(i * recall::kPairs + p)];
        const bool is_right = answer == question[1];
        right += is_right ? 1 : 0;
        pairs += "  ";
        for (const int* token : {pair, pair + 1}) pairs += recall::letter(*token);
        asked += std::string(" ") + recall::letter(question[0]) + "?" + (is_right ? '=' : 'x') +
                 recall::letter(answer);
      }
      if (i < kShown) report_.print("   %s\n   %s\n\n", pairs.c_str(), asked.c_str());
    }
    const double share = static_cast<double>(right) / (kTexts * recall::kPairs);
    verdict("recall", share >= kClaimed,
            format("%.1f", 100 * share) + " % of " + std::to_string(kTexts * recall::kPairs) +
                " questions about texts never seen are answered right, after " +
                std::to_string(step) + " steps and " + format("%.1f", ms * 1e-3) + " s",
            {{"recall", share}, {"steps", step}, {"seconds", ms * 1e-3}});
  }

  Report report_;
  int threads_;
  int passed_ = 0, failed_ = 0;
};

}  // namespace

int run_demo(const DemoOptions& options) { return Demo(options).run(options.step); }

}  // namespace deltic::cli
