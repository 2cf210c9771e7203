// Times short calls alone and beside busy processes, with one thread and with all.
//
//   contention [--busy N] [--seconds S] [CASE...]
//
// A user's program is rarely alone on its machine. A call that waits for a core somebody else has
// can take a hundred times as long as the same call on one thread: this shows where. One thread
// and all threads take turns of a quarter of a second, so that both see the same load; the first
// 20 ms of a turn, in which threads of the turn before may still spin, are not counted.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cases/case.h"
#include "cases/instance.h"

namespace {

using deltic::cases::Instance;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Processes that do nothing but take a core each.
class BusyProcesses {
 public:
  explicit BusyProcesses(int count) {
    for (int i = 0; i < count; ++i) {
      const pid_t child = fork();
      if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        volatile unsigned x = 0;
        while (true) x = x + 1;
      }
      if (child > 0) children_.push_back(child);
    }
  }
  ~BusyProcesses() {
    for (const pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
  }
  BusyProcesses(const BusyProcesses&) = delete;
  BusyProcesses& operator=(const BusyProcesses&) = delete;

 private:
  std::vector<pid_t> children_;
};

struct Times {
  std::vector<double> us;
  double mean() const {
    double sum = 0;
    for (const double x : us) sum += x;
    return sum / static_cast<double>(std::max<size_t>(us.size(), 1));
  }
  double quantile(double q) {
    std::sort(us.begin(), us.end());
    return us.empty() ? 0 : us[static_cast<size_t>(q * static_cast<double>(us.size() - 1))];
  }
};

void turn(Instance& instance, int threads, double seconds, Times& times) {
  const deltic::cases::RunOptions run{.impl = {}, .threads = threads};
  instance.reserve(run);
  if (instance.spec().op == deltic::Op::backward) {
    instance.reserve_forward(run);
    instance.call_forward(run);  // backward starts from what it keeps
  }
  const double begin = now_s();
  while (true) {
    const double from = now_s();
    instance.call(run);
    const double to = now_s();
    if (from - begin >= 0.02) times.us.push_back((to - from) * 1e6);
    if (to - begin >= seconds && !times.us.empty()) return;
  }
}

// Returns the mean of all threads over that of one.
double measure(const std::string& line, int threads, double seconds) {
  constexpr double kTurn = 0.25;
  Instance instance(deltic::cases::parse(line), false);
  Times one, all;
  for (double spent = 0; spent < seconds; spent += 2 * kTurn) {
    turn(instance, 1, kTurn, one);
    turn(instance, threads, kTurn, all);
  }
  const double ratio = all.mean() / one.mean();
  std::printf("    one thread %10.1f us mean %10.1f median %10.1f p90\n", one.mean(),
              one.quantile(0.5), one.quantile(0.9));
  std::printf("    %2d threads %10.1f us mean %10.1f median %10.1f p90   %.2f times\n", threads,
              all.mean(), all.quantile(0.5), all.quantile(0.9), ratio);
  std::fflush(stdout);
  return ratio;
}

}  // namespace

int main(int argc, char** argv) {
  int busy = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  double seconds = 4;
  std::vector<std::string> lines;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (std::strcmp(argv[i], "--busy") == 0 && has_value) {
      busy = std::atoi(argv[++i]);
    } else if (std::strcmp(argv[i], "--seconds") == 0 && has_value) {
      seconds = std::atof(argv[++i]);
    } else if (argv[i][0] == '-') {
      std::fprintf(stderr, "contention: expected --busy N, --seconds S or cases, got %s\n",
                   argv[i]);
      return 2;
    } else {
      lines.push_back(argv[i]);
    }
  }
  if (lines.empty()) {
    lines = {"decode dense=1x1 H=2 K=16 V=16 pool=inplace",
             "decode dense=1x1 H=32 K=128 V=128 pool=inplace",
             "conv dense=1x1 D=64 W=4 act=silu final=0",
             "conv dense=1x64 D=2048 W=4 act=silu final=0",
             "l2norm dense=1x16 H=2 K=64",
             "kkt gate=head dense=1x64 H=2 K=64",
             "forward gate=head dense=1x64 H=2 K=64 V=64",
             "forward gate=head dense=1x64 H=16 K=128 V=128",
             "forward gate=head dense=1x4096 H=1 K=128 V=128",
             "backward gate=head dense=1x64 H=2 K=64 V=64"};
  }
  const int threads = deltic::num_threads();
  double worst = 0;
  for (const std::string& line : lines) {
    std::printf("%s\n  alone\n", line.c_str());
    try {
      measure(line, threads, seconds);
      std::printf("  beside %d busy processes\n", busy);
      std::fflush(stdout);
      const BusyProcesses others(busy);
      worst = std::max(worst, measure(line, threads, seconds));
    } catch (const std::exception& e) {
      std::fprintf(stderr, "contention: %s\n", e.what());
      return 2;
    }
  }
  std::printf("beside %d busy processes all threads took at most %.2f times as long as one\n", busy,
              worst);
  return 0;
}
