// Times a call by replays of a graph.
#pragma once

#include <algorithm>

#include "cuda/schedule/segments.h"
#include "tensors.cuh"

int g_repeats = 21;
double time_case(std::vector<int> lens, int heads, int value_heads, const char* name, int g_fill,
                 Config cfg, double anchor, deltic_split split = DELTIC_SPLIT_AUTO) {
  int64_t tokens = 0;
  for (int n : lens) tokens += n;
  const double bytes = cfg.gate == Gate::channel
                           ? double(tokens) * heads * (5 * 256 + 2)
                           : double(tokens) * (heads * 512. + value_heads * 516.);
  // Sets of inputs beyond the 60 MB of L2 together.
  int sets = std::max(1, std::min(8, int(std::ceil(150e6 / bytes))));
  std::vector<Tensors> t;
  Fills f;
  f.g = g_fill;
  for (int i = 0; i < sets; i++) t.push_back(make_tensors(lens, heads, value_heads, cfg, f, 7 + i));
  g_split = split;
  const float scale = 1.f / std::sqrt(128.f);
  for (auto& x : t) launch(x, cfg, scale, -5.f, nullptr);  // sizes the workspace, too
  const int segment = deltic::gpu::schedule::split_chunks(problem_of(t[0], cfg, scale, -5.f), 132);
  const std::vector<float> ms = probe::replay_ms(8, g_repeats, 5, [&](int i, cudaStream_t stream) {
    launch(t[i % sets], cfg, scale, -5.f, stream);
  });
  const double med = ms[ms.size() / 2];
  std::printf(
      "time %zu x %6d H %3d/%3d %-8s seg %3d %.4f ms (%.4f..%.4f) %.2f TB/s  anchor %.3f: %.2fx\n",
      lens.size(), lens[0], heads, value_heads, name, segment, med, ms.front(), ms.back(),
      bytes / med * 1e-9, anchor, anchor / med);
  std::fflush(stdout);
  for (auto& x : t) free_tensors(x);
  return med;
}
