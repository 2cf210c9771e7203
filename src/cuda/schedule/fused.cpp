// Times of fused CTAs and of roles, and the choice between them.
#include "cuda/schedule/fused.h"

#include "core/kept.h"

namespace deltic::gpu::schedule {

Work equal_work(const Problem& p, int num_sms) {
  Work w = work_of(p, num_sms);
  w.longest = w.shortest = int((w.total + w.short_jobs - 1) / w.short_jobs);
  return w;
}
FusedShare share_of(const Work& w) {
  const int jobs = (w.short_jobs + w.ctas - 1) / w.ctas;
  return {jobs, jobs * w.longest};
}
float fused_time(const FusedCosts& c, const Work& w) {
  const FusedShare share = share_of(w);
  return c.begin + c.step * float(share.steps) + c.part * float(share.jobs);
}
float roles_time(const Work& w) {
  return kLaunchUs + choose_split(costs_of(GateKind::kHead).full, w).time;
}

bool fuses(const Problem& p, int num_sms) {
  if (kind_of(p) != GateKind::kHead || p.N == 0 || p.T == 0) return false;
  if (split_chunks(p, num_sms) > 0) return false;
  const Work w = equal_work(p, num_sms);
  if (float(w.short_jobs) < kFusedShare * float(w.ctas)) return false;
  if (w.short_jobs <= w.ctas && w.longest >= kFusedLongest) return false;
  // Every call asks, and a split of the SMs takes most of a microsecond to find.
  struct Choice {
    Work work{};  // no call has its total of 0
    bool is_fused = false;
  };
  static thread_local Kept<Choice> kept;
  for (const Choice& c : kept)
    if (c.work == w) return c.is_fused;
  const bool is_fused = fused_time(kFusedCosts, w) < kFusedGain * roles_time(w);
  kept.add({w, is_fused});
  return is_fused;
}

}  // namespace deltic::gpu::schedule
