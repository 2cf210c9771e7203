// Times of the backward's chains, and the choice among divisions.
#include "cuda/schedule/chains.h"

#include <algorithm>

#include "core/sizes.h"

namespace deltic::gpu::schedule {
namespace {

// Jobs of equal length on so many SMs, one CTA to each.
float waves(int64_t ctas, int sms) { return float((ctas + sms - 1) / sms); }

}  // namespace

ChainWork chain_work_of(const Problem& p, int num_sms) {
  const Work w = work_of(p, num_sms);
  return {w.short_jobs,
          w.total,
          w.longest,
          int(p.K),
          int(p.V),
          num_sms,
          p.gate == Gate::head ? 0.25f : 1.f,
          kind_of(p) == GateKind::kChannel && p.V == 128 && !p.packed};
}

ChainDeal deal_chains(ChainCosts c, const ChainWork& w) {
  const auto steps = float(std::max(w.longest, 1));
  const auto time_of = [&](float step, float n) {
    return std::max(n * step, c.memory * float(w.jobs)) * steps + n * kChainStartUs;
  };
  ChainDeal best{};
  for (const int columns : {w.values, 64}) {
    const bool is_wide = columns > 64;
    const float step = is_wide ? c.wide : c.narrow;
    const int forward = is_wide || c.is_mixed ? w.values : 64;
    const int64_t back = int64_t{w.jobs} * (w.values / columns);
    const int64_t jobs = int64_t{w.jobs} * (w.values / forward);
    // A CTA for each job, wave after wave.
    ChainDeal deal = {columns, forward, jobs, time_of(step, waves(back + jobs, w.sms))};
    const int64_t left = w.shares ? w.sms - back : 0;  // SMs for jobs to share
    if (is_wide && left >= jobs && c.memory * float(w.jobs) > step) {
      deal.forward_ctas = std::min(jobs, kForwardShares);
    } else if (left > 0 && left < jobs) {
      // Those forward on what SMs the others leave: shared, unless one after the other is as good.
      const float each = forward > 64 ? c.forward : c.narrow;
      const float time = time_of(std::max(step, each * float(jobs) / float(left)), 1);
      const bool is_shared = time < time_of(std::max(step, each * waves(jobs, int(left))), 1);
      if (time < deal.time) deal.forward_ctas = is_shared ? left : jobs, deal.time = time;
    }
    if (best.back == 0 || deal.time < best.time) best = deal;
  }
  return best;
}

ChainTime chain_time(ChainCosts c, const ChainWork& w, int n, int chunks) {
  if (chunks == 0) {
    const ChainDeal deal = deal_chains(c, w);
    return {0, deal.time, deal.back};
  }
  const int steps = std::max(chunks, 1);
  // Pieces of all sequences: as many as whole ones, or more where lengths differ.
  const int64_t pieces = std::max<int64_t>((int64_t{w.total} + steps - 1) / steps, w.jobs);
  const auto time_of = [&](int64_t ctas, float step) {
    return waves(ctas, w.sms) * (step * float(steps) + kChainStartUs);
  };
  const float narrow = time_of(2 * pieces * (w.values / 64), c.narrow);
  const float wide = w.values > 64 ? time_of(2 * pieces, c.wide) : narrow;
  ChainTime time{};
  time.columns = w.values > 64 && wide <= narrow ? w.values : 64;
  time.chains = std::min(narrow, wide);
  const int columns = w.keys == w.values ? w.values : 64;
  const int64_t jobs = 2 * (pieces - pieces / n) * (w.values / columns) +
                       std::max<int64_t>(pieces - 2 * (pieces / n), 0) * (w.keys / columns);
  const auto needed = int64_t(float(jobs) * w.remembered) + 1;
  time.transfer = time_of(needed, columns > 64 ? c.transfer : c.transfer * c.narrow / c.wide) +
                  float(n) * kChainMergeUs + kChainLaunchesUs;
  return time;
}

int choose_chain_segment(ChainCosts c, const ChainWork& w) {
  if (w.sms < kFewestSmsSplit || w.longest < 8 || w.total < w.longest || w.jobs < 1) return 0;
  // Predictions are no better than that, and heads may remember more: whole sequences unless much
  // is gained.
  constexpr float kWorth = 0.85f;
  float best = kWorth * chain_time(c, w, 1, 0).all();
  int chunks = 0;
  for (int n = 2; n <= most_segments(w.longest); ++n) {
    const int segment = segment_of(w.longest, n);
    const float time = chain_time(c, w, n, segment).all();
    if (time < best) best = time, chunks = segment;
  }
  return chunks;
}

int chain_segment(const Problem& p, int num_sms) {
  if (p.split == DELTIC_SPLIT_OFF || p.N == 0 || p.T == 0) return 0;
  if (p.split != DELTIC_SPLIT_AUTO) return split_chunks(p, num_sms);
  return choose_chain_segment(chain_costs_of(kind_of(p)), chain_work_of(p, num_sms));
}

ChainWork chain_work_in(ChainWork all, int64_t H, int64_t heads) {
  if (heads < H) all.jobs = int(all.jobs / H * heads), all.total = int(all.total / H * heads);
  return all;
}

float chain_time_in_rounds(const Problem& p, int num_sms, int segment, int64_t rounds) {
  const ChainWork all = chain_work_of(p, num_sms);
  const int n = segment > 0 ? (all.longest + segment - 1) / segment : 1;
  const auto time_of = [&](int64_t index) {
    const int64_t heads = round_at(p.H, rounds, index).heads;
    return chain_time(chain_costs_of(kind_of(p)), chain_work_in(all, p.H, heads), n, segment).all();
  };
  // Those with a head more, and the others.
  const int64_t more = p.H % rounds;
  const float large = more > 0 ? float(more) * time_of(0) : 0.f;
  return large + float(rounds - more) * time_of(rounds - 1);
}

int64_t choose_rounds(const Problem& p, int segment, const std::function<int64_t(int64_t)>& bytes) {
  if (p.N == 0 || p.T == 0 || p.H < 2 || bytes(p.H) <= kRoundBytes) return 1;
  const int64_t all = p.packed ? chunks_in(p.T) : checked_product(p.B, chunks_in(p.T));
  // Beyond 32 bits: such a call ends before it runs.
  if (checked_product(checked_sum(all, p.N), p.HV) > INT32_MAX) return 1;
  const auto time_of = [&](int64_t rounds) {
    const float rest = kind_of(p) == GateKind::kChannel ? kChannelRest : kHeadRest;
    return chain_time_in_rounds(p, kRoundSms, segment, rounds) + float(all * p.HV) * rest +
           float(rounds - 1) * kRoundUs;
  };
  const float most = kRoundsWorth * time_of(1);
  int64_t found = 1;
  for (int64_t n = 2; n <= std::min(p.H, kMostRounds); ++n) {
    if (time_of(n) > most || round_at(p.H, n, 0).heads == round_at(p.H, found, 0).heads) continue;
    found = n;
    if (bytes(round_at(p.H, n, 0).heads) <= kRoundBytes) break;
  }
  return found;
}

}  // namespace deltic::gpu::schedule
