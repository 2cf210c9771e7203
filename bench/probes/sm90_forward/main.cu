// Stand-alone check and timing of the forward on Hopper through its door: `probe check | small |
// bits | time | few | rows | gdn FILE | once`.
#include <string>

#include "check.cuh"
#include "times.cuh"

namespace {

// Gates: per channel (KDA), per head (Gated DeltaNet), none (DeltaNet); raw: norm and sigmoid off.
const Config kda{}, kda_log{Gate::channel, GateForm::kLogDecay},
    kda_soft{Gate::channel, GateForm::kSoftplus}, gdn{Gate::head, GateForm::kLogDecay},
    gdn_soft{Gate::head, GateForm::kSoftplus}, none{Gate::none, GateForm::kLogDecay},
    gdn_raw{Gate::head, GateForm::kLogDecay, true}, none_raw{Gate::none, GateForm::kLogDecay, true},
    kda_raw{Gate::channel, GateForm::kLogDecay, true};

// --- what is checked -----------------------------------------------------------------------------
const std::vector<int> ragged{200, 1, 63, 0, 65, 129, 8};

bool check_small() {  // for the sanitizers
  bool ok = check("bounded, ragged", kda, {70, 1, 0, 130}, 2, 2, {}, 6e-3);
  ok &= check("gdn, ragged, 1/2", gdn, {70, 1, 0, 130}, 1, 2, {.g = kGateMix}, 6e-3);
  return ok;
}
// Sums of all bits of calls that two builds must agree on.
void print_bits() {
  const auto print = [](const char* name, Config cfg, std::vector<int> lens, int heads,
                        int value_heads, Fills f, deltic_split split = DELTIC_SPLIT_OFF) {
    Call call(cfg, std::move(lens), heads, value_heads, f, split, 128);
    std::printf("bits %-28s %016llx\n", name, call.sum_of_bits());
  };
  print("bounded, 2 x 1000, 40", kda, {1000, 1000}, 40, 40, {});
  print("bounded, ragged", kda, ragged, 3, 3, {});
  print("bounded, 8192, 96", kda, {8192}, 96, 96, {});
  print("bounded, 8192, auto", kda, {8192}, 4, 4, {}, DELTIC_SPLIT_AUTO);
  print("per head, ragged", gdn, ragged, 2, 6, {.g = kGateSlow});
  print("per head, 2 x 1000", gdn_raw, {1000, 1000}, 20, 40, {.g = kGateRow});
  print("per head, 4 x 4096", gdn_raw, std::vector<int>(4, 4096), 16, 32, {.g = kGateRow});
  print("per head, 8192, auto", gdn, {8192}, 2, 4, {.g = kGateSlow}, DELTIC_SPLIT_AUTO);
}
bool check_channels() {
  bool ok = true;
  ok &= check("bounded, 1 x 64", kda, {64}, 2, 2, {}, 6e-3);
  ok &= check("bounded, 1 x 64, no state", kda, {64}, 2, 2, {.state = false}, 6e-3);
  ok &= check("bounded, 1 x 1024", kda, {1024}, 2, 2, {}, 6e-3);
  ok &= check("bounded, ragged", kda, ragged, 3, 3, {}, 6e-3);
  ok &= check("bounded, 2 x 1000", kda, {1000, 1000}, 4, 4, {}, 6e-3);
  ok &= check("bounded, 2 x 1000, 40 heads", kda, {1000, 1000}, 40, 40, {}, 6e-3);
  ok &= check("softplus inside, ragged", kda_soft, ragged, 2, 4, {}, 6e-3);
  ok &= check("slow, ragged", kda_log, {300, 17, 512}, 4, 4, {.g = kGateSlow}, 6e-3);
  ok &= check("slow, 1 x 2048", kda_log, {2048}, 8, 8, {.g = kGateSlow}, 6e-3);
  ok &= check("softplus, 1 x 1000", kda_log, {1000}, 8, 8, {.g = kGateSoftplus}, 6e-3);
  ok &= check("-1e-4..-1000, ragged", kda_log, ragged, 4, 4, {.g = kGateMix}, 6e-3);
  ok &= check("-1e-4..-1000, 1 x 1000", kda_log, {1000}, 8, 8, {.g = kGateMix}, 6e-3);
  ok &= check("-5.4 everywhere, 1 x 500", kda_log, {500}, 4, 4, {.g = kGateDeep}, 6e-3);
  check("correlated keys, slow, 1 x 500 (info)", kda_log, {500}, 4, 4,
        {.g = kGateSlow, .k = kCorrelated}, 1);
  return ok;
}
bool check_heads() {
  bool ok = true;
  ok &= check("per head, slow, ragged, 2/6", gdn, ragged, 2, 6, {.g = kGateSlow}, 6e-3);
  ok &= check("per head, -1e-4..-1000, 1 x 1000", gdn, {1000}, 4, 8, {.g = kGateMix}, 6e-3);
  ok &= check("per head, softplus inside, 2 x 1000", gdn_soft, {1000, 1000}, 4, 8, {}, 6e-3);
  ok &= check("no gate, ragged", none, ragged, 2, 4, {}, 6e-3);
  ok &= check("per head, norm off, ragged, 2/6", gdn_raw, ragged, 2, 6, {.g = kGateRow}, 6e-3);
  ok &= check("per head, norm off, 1 x 4096, 2/8", gdn_raw, {4096}, 2, 8, {.g = kGateRow}, 6e-3);
  ok &= check("per head, norm off, 2 x 1000, 20/40", gdn_raw, {1000, 1000}, 20, 40, {.g = kGateRow},
              6e-3);
  ok &= check("per channel, norm off, ragged", kda_raw, ragged, 4, 4, {.g = kGateSlow}, 6e-3);
  ok &= check("per head, -5.4 everywhere, 1 x 500", gdn, {500}, 2, 4, {.g = kGateDeep}, 6e-3);
  return ok;
}
bool check_segments_and_widths() {
  bool ok = true;
  ok &= check("bounded, 1 x 4096, by length", kda, {4096}, 2, 2, {}, 6e-3, DELTIC_SPLIT_BY_LENGTH);
  ok &= check("slow, 1 x 8000, by length", kda_log, {8000}, 4, 4, {.g = kGateSlow}, 6e-3,
              DELTIC_SPLIT_BY_LENGTH);
  ok &= check("-1e-4..-1000, ragged, by length", kda_log, {4700, 1, 0, 65, 2300}, 2, 2,
              {.g = kGateMix}, 6e-3, DELTIC_SPLIT_BY_LENGTH);
  ok &= check("per head, slow, 1 x 8192, auto", gdn, {8192}, 2, 4, {.g = kGateSlow}, 6e-3,
              DELTIC_SPLIT_AUTO);
  ok &= check("per head, norm off, ragged, by length", gdn_raw, {4700, 1, 0, 65, 2300}, 2, 4,
              {.g = kGateRow}, 6e-3, DELTIC_SPLIT_BY_LENGTH);
  ok &= check("K = V = 64, per head, ragged", gdn, ragged, 2, 4, {.g = kGateSlow}, 6e-3,
              DELTIC_SPLIT_OFF, 64);
  ok &=
      check("K = V = 64, bounded, 2 x 500", kda, {500, 500}, 2, 2, {}, 6e-3, DELTIC_SPLIT_OFF, 64);
  ok &= check("K = V = 64, softplus, by length", kda_soft, {4100}, 2, 2, {}, 6e-3,
              DELTIC_SPLIT_BY_LENGTH, 64);
  return ok;
}

// --- what is timed -------------------------------------------------------------------------------
struct Row {
  std::vector<int> lens;
  int heads;
  double anchor;
};
void time_main() {
  const Row rows[] = {{{8192}, 96, 1.395}, {{8192}, 64, 1.183}, {{8192}, 32, .974},
                      {{8192}, 8, .813},   {{32768}, 8, 3.174}, {{131072}, 4, 12.08}};
  for (const Row& r : rows) time_case(r.lens, r.heads, r.heads, "random", kNormal, kda, r.anchor);
  for (int i = 0; i < 4; i++)
    time_case(rows[i].lens, rows[i].heads, rows[i].heads, "slow", kGateSlow, kda_log,
              rows[i].anchor);
  time_case({8192}, 96, 96, "softplus", kNormal, kda_soft, 1.395);
  for (int tokens = 256; tokens <= 131072; tokens *= 4)  // growth
    time_case({tokens}, 16, 16, "growth", kNormal, kda, 0);
  time_case({8192}, 16, 32, "none", kGateRow, none_raw, .232);
  time_case({8192}, 16, 32, "gdn raw", kGateRow, gdn_raw, .232, DELTIC_SPLIT_OFF);
  time_case({8192}, 16, 64, "gdn raw", kGateRow, gdn_raw, .357, DELTIC_SPLIT_OFF);
  time_case({8192, 8192, 8192, 8192}, 16, 32, "gdn raw", kGateRow, gdn_raw, .401);
  time_case({8192}, 16, 32, "gdn slow", kGateSlow, gdn, .232);
  time_case({8192}, 16, 64, "gdn slow", kGateSlow, gdn, .357);
  time_case({8192, 8192, 8192, 8192}, 16, 32, "gdn slow", kGateSlow, gdn, .401);
  time_case({32768}, 2, 8, "gdn slow", kGateSlow, gdn, .236);
}
void time_rows() {  // KDA rows with FlashKDA's times
  const std::vector<int> mixed{1300, 547, 2048, 963, 271, 3063};
  const Row rows[] = {{{2048}, 12, .2335},
                      {{2048}, 16, .2407},
                      {{4096}, 8, .4243},
                      {{4096}, 12, .44},
                      {std::vector<int>(4, 2048), 12, .3108},
                      {{8192}, 16, .8652},
                      {{1024}, 4, .1147},
                      {{3072}, 10, .3253},
                      {{8192}, 24, .9217},
                      {std::vector<int>(8, 2048), 16, .4412},
                      {{8192}, 96, 1.3952},
                      {{8192}, 64, 1.1833},
                      {{8192}, 32, .9738},
                      {{8192}, 8, .8127},
                      {mixed, 96, 1.3869},
                      {std::vector<int>(8, 1024), 96, 1.1893},
                      {mixed, 64, 1.0073},
                      {std::vector<int>(8, 1024), 64, .8061},
                      {{32768}, 32, 3.8084},
                      {{32768}, 8, 3.1738},
                      {{131072}, 4, 12.0845}};
  double product = 0;
  for (const Row& r : rows)
    product +=
        std::log(r.anchor / time_case(r.lens, r.heads, r.heads, "random", kNormal, kda, r.anchor));
  std::printf("geometric mean over FlashKDA, %zu rows: %.2fx\n", std::size(rows),
              std::exp(product / std::size(rows)));
}
// Rows of every kind of bound, a second or two: for two builds in turn.
void time_few() {
  g_repeats = 9;
  const std::vector<int> four(4, 8192), eight(8, 1024);
  for (const int heads : {96, 64, 32, 8})
    time_case({8192}, heads, heads, "random", kNormal, kda, 0);
  time_case(four, 16, 32, "gdn", kGateRow, gdn_raw, .401);
  time_case(four, 16, 64, "gdn", kGateRow, gdn_raw, 0);
  time_case(eight, 16, 32, "gdn", kGateRow, gdn_raw, 0);
  time_case(eight, 16, 16, "gdn", kGateRow, gdn_raw, .056);
  time_case({8192}, 16, 32, "gdn", kGateRow, gdn_raw, .232);
  time_case({32768}, 2, 8, "gdn", kGateRow, gdn_raw, .236);
}
// FILE with lines `best heads value_heads length ...`: rows of other kernels.
bool time_file(const char* path) {
  std::FILE* file = std::fopen(path, "r");
  if (!file) return std::printf("no file of rows\n"), false;
  g_repeats = 11;
  struct Done {
    double ratio;
    std::string line;
  };
  std::vector<Done> done;
  char line[512];
  double product = 0;
  while (std::fgets(line, sizeof line, file)) {
    double best;
    int heads, value_heads, used, at = 0, n;
    std::vector<int> lens;
    if (std::sscanf(line, "%lf %d %d%n", &best, &heads, &value_heads, &at) != 3) continue;
    while (std::sscanf(line + at, "%d%n", &n, &used) == 1) lens.push_back(n), at += used;
    const double ms = time_case(lens, heads, value_heads, "gdn", kGateRow, gdn_raw, best);
    product += std::log(best / ms);
    done.push_back({best / ms, line});
  }
  std::fclose(file);
  std::sort(done.begin(), done.end(), [](auto& a, auto& b) { return a.ratio < b.ratio; });
  for (size_t i = 0; i < done.size() && i < 40; i++)
    std::printf("%.2fx %s", done[i].ratio, done[i].line.c_str());
  std::printf("geometric mean over the best other, %zu rows: %.3fx, median %.2fx\n", done.size(),
              std::exp(product / done.size()), done[done.size() / 2].ratio);
  return true;
}
void run_once(int heads, bool is_head) {  // for profilers
  const Config cfg = is_head ? gdn_raw : kda;
  Tensors t = make_tensors({8192}, heads, heads, cfg,
                           {.g = is_head ? kGateRow : kNormal, .state = false}, 1);
  launch(t, cfg, .1f, -5.f, nullptr);
  launch(t, cfg, .1f, -5.f, nullptr);
  probe::check(cudaDeviceSynchronize());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "check";
  bool ok = true;
  if (what == "small") ok = check_small();
  if (what == "check") {
    ok = check_channels();
    ok &= check_heads();
    ok &= check_segments_and_widths();
    std::printf("%s\n", ok ? "ALL OK" : "SOME FAILED");
  }
  if (what == "bits") print_bits();
  if (what == "few") time_few();
  if (what == "time") time_main();
  if (what == "rows") time_rows();
  if (what == "gdn") ok = time_file(argc > 2 ? argv[2] : "gdn_rows.txt");
  if (what == "once") run_once(argc > 2 ? std::atoi(argv[2]) : 96, argc > 3);
  return ok ? 0 : 1;
}
