// Times of divisions into segments, and the choice among them.
#include "cuda/schedule/segments.h"

#include <algorithm>
#include <array>

#include "core/kept.h"

namespace deltic::gpu::schedule {
namespace {

float launch_time(Costs c, const Work& w) {
  const Split split = choose_split(c, w);
  return kLaunchUs + float(changes_of_state(w, split.roles)) * kPartUs + split.time;
}
Work transfers(Work w, int keys, int n, int chunks) {
  w = in_segments(w, n, chunks);
  w.total -= w.total / n;  // the last needs no transfer
  w.states = 2, w.rows = keys > w.rows ? keys : w.rows;
  return w;
}

// No launch_time() is below: every SM at work all the time, or the longest job without a break, and
// as few changes of state as the most carriers have. Without kLaunchUs.
float least_time(Costs c, const Work& w) {
  const auto with = [&](int parts, float step) {
    const float busy = (float(w.group(parts)) * step + c.prepare) * float(w.total) / float(w.ctas);
    return std::max(busy, step * float(w.longest));
  };
  const float time = w.most_parts() == 1 ? with(1, c.carry_half)
                                         : std::min(with(1, c.carry), with(2, c.carry_half));
  const int changes = w.total / w.most_carriers(1) / w.longest;
  return time + kPartUs * float(std::max(changes, 1) + 1);
}

}  // namespace

GateKind kind_of(const Problem& p) {
  return p.gate == Gate::channel ? GateKind::kChannel : GateKind::kHead;
}

Work work_of(const Problem& p, int num_sms) {
  const int64_t all = p.packed ? chunks_in(p.T) : p.B * chunks_in(p.T);
  // Lengths of packed sequences are not known here: the longest 1.5, the shortest 0.5 of the mean.
  const int64_t mean = (all + p.N - 1) / p.N;
  const bool is_mixed = p.packed && p.N > 1;
  return {int(all * p.HV),
          int(is_mixed ? std::min(all, mean + mean / 2) : mean),
          1,
          int(p.V),
          num_sms,
          int(is_mixed ? std::max<int64_t>(mean / 2, 1) : mean),
          int(p.N * p.HV)};
}

int changes_of_state(const Work& w, const Roles& roles) {
  return steps_of(w.total, w.longest, roles.carriers) / w.longest + 1;
}

Work in_segments(Work w, int n, int chunks) {
  w.longest = chunks, w.short_jobs *= n;
  if (w.shortest > chunks) w.shortest = chunks;
  return w;
}
float transfer_time(Costs c, const Work& w, int keys, int n, int chunks) {
  return launch_time(c, transfers(w, keys, n, chunks)) + float(n) * kMergeUs;
}
float time_of_segments(Costs c, const Work& w, int keys, int n, int chunks) {
  if (chunks == 0) return launch_time(c, w);
  return transfer_time(c, w, keys, n, chunks) + launch_time(c, in_segments(w, n, chunks));
}

// The first of the best, as if the time of each number were looked at. Most cannot be it: their
// least time is above what another one has.
int choose_segment(Costs c, const Work& w, int keys) {
  constexpr float kRounding = 1 - 1e-5f;  // least times and times are rounded differently
  if (w.ctas < kFewestSmsSplit) return 0;
  const int most = most_segments(w.longest);
  int best = 1;
  float time = time_of_segments(c, w, keys, 1, 0);
  struct Least {
    float transfer, forward;
    float both() const { return kRounding * (transfer + forward); }
  };
  std::array<Least, kMaxSegments + 1> least;
  int likely = 0;
  for (int n = 2; n <= most; ++n) {
    const int chunks = segment_of(w.longest, n);
    Least& x = least[size_t(n)];
    x.transfer = kLaunchUs + least_time(c, transfers(w, keys, n, chunks)) + float(n) * kMergeUs;
    x.forward = kLaunchUs + least_time(c, in_segments(w, n, chunks));
    if (likely == 0 || x.both() < least[size_t(likely)].both()) likely = n;
  }
  const auto look_at = [&](int n) {
    const Least& x = least[size_t(n)];
    if (x.both() > time) return;
    const int chunks = segment_of(w.longest, n);
    const float transfer = transfer_time(c, w, keys, n, chunks);
    if (kRounding * (transfer + x.forward) > time) return;
    const float t = transfer + launch_time(c, in_segments(w, n, chunks));
    if (t < time || (t == time && n < best)) time = t, best = n;
  };
  if (likely > 0) look_at(likely);
  for (int n = 2; n <= most; ++n)
    if (n != likely) look_at(n);
  return segment_of(w.longest, best);
}

int split_chunks(const Problem& p, int num_sms) {
  if (p.split == DELTIC_SPLIT_OFF || p.N == 0 || p.T == 0) return 0;
  const int64_t most = chunks_in(p.T);  // of a sequence
  if (p.split != DELTIC_SPLIT_AUTO) {
    const int64_t chunks =
        p.split == DELTIC_SPLIT_BY_LENGTH  // the same pieces, whatever else is in the call
            ? std::max<int64_t>(kMinSegmentChunks, 4 * p.HV)
            : std::max(p.segment_length / kChunk, (most + kMaxSegments - 1) / kMaxSegments);
    return chunks < most ? int(chunks) : 0;
  }
  // A call asks twice, for its workspace and for the launch, and the caller before it: a choice
  // takes up to 1.5 us.
  struct Choice {
    GateKind gate{};
    Work work{};  // no call has its total of 0
    int keys = 0, chunks = 0;
  };
  static thread_local Kept<Choice> kept;
  const GateKind gate = kind_of(p);
  const Work work = work_of(p, num_sms);
  const int keys = int(p.K);
  for (const Choice& c : kept)
    if (c.gate == gate && c.keys == keys && c.work == work) return c.chunks;
  const int chunks = choose_segment(costs_of(gate).measured, work, keys);
  kept.add({gate, work, keys, chunks});
  return chunks;
}

}  // namespace deltic::gpu::schedule
