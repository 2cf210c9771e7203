// Divisions of a call's work in words.
#include "cuda/schedule/explain.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"
#include "cuda/schedule/chains.h"
#include "cuda/schedule/fused.h"
#include "cuda/schedule/segments.h"

namespace deltic::gpu::schedule {
namespace {

std::string roles_text(const Roles& roles, const Work& work) {
  const int carrying = work.group(roles.parts) * roles.carriers;
  return cat(carrying, carrying == 1 ? " carrier" : " carriers",
             roles.parts == 2 ? " of half a state each" : "", ", ", work.ctas - carrying,
             work.ctas - carrying == 1 ? " preparer" : " preparers");
}
// What the predicted time of a launch (launch_time) consists of.
std::string bound_of(Costs c, const Work& work) {
  const Roles roles = choose_split(c, work).roles;
  const int steps = steps_of(work.total, work.longest, roles.carriers);
  const bool is_prepared = prepare_time(c, work, roles) > carry_time(c, work, roles);
  return cat(roles_text(roles, work), ": ",
             is_prepared
                 ? cat(work.total, " packets of ", c.prepare, " us among them are the bound")
                 : cat(steps, steps == 1 ? " step of " : " steps of ", step_time(c, work, roles),
                       " us", steps == work.longest ? ", those of the longest piece" : ""),
             ", ", kLaunchUs, " us to begin, ", kPartUs * float(changes_of_state(work, roles)),
             " us for changes of state");
}

// The chain forward of whole sequences, where its CTAs are others.
std::string forward_text(ChainCosts c, const ChainWork& work) {
  const ChainDeal deal = deal_chains(c, work);
  const int64_t jobs = int64_t{work.jobs} * (work.values / deal.forward);
  std::string text;
  if (deal.forward != deal.back) text = cat(" backwards, of ", deal.forward, " forwards");
  if (deal.forward_ctas < jobs) {
    text += cat(text.empty() ? " backwards and forwards" : "", ": ", deal.forward_ctas,
                " CTAs share the ", jobs, " chains forward");
  }
  return text;
}

// Jobs as fused CTAs would run them, or do.
WorkDivision explain_fused(const Problem& p, int sms) {
  const Work work = equal_work(p, sms);
  const FusedShare share = share_of(work);
  const FusedCosts& c = kFusedCosts;
  WorkDivision d;
  d.what = "fused: whole sequences of a head in one CTA";
  d.predicted_us = double(fused_time(c, work));
  d.chosen = fuses(p, sms);
  d.reason =
      cat(share.steps, share.steps == 1 ? " step of " : " steps of ", c.step,
          " us in the CTA with the most, ", share.jobs,
          share.jobs == 1 ? " state of " : " states of ", c.part, " us, ", c.begin,
          " us to begin; where jobs fill the GPU roles are taken for ", roles_time(work), " us");
  if (p.packed && p.N > 1)
    d.reason +=
        "; lengths, which are not known here, are taken for equal ones; "
        "CTAs draw jobs, the longest first";
  return d;
}

}  // namespace

std::vector<WorkDivision> explain(const Problem& p, int sms) {
  if (p.N == 0 || p.T == 0 || sms < kFewestSms) return {};
  const Costs c = costs_of(kind_of(p)).measured, shares = costs_of(kind_of(p)).shares;
  const Work work = work_of(p, sms);
  int chosen = split_chunks(p, sms);
  if (chosen >= work.longest) chosen = 0;  // cuts nothing
  const auto by_length = [&](int segment) { return (work.longest + segment - 1) / segment; };
  std::vector<int> counts = {1};
  for (int n = 2; sms >= kFewestSmsSplit && n <= most_segments(work.longest); n *= 2)
    counts.push_back(n);
  if (chosen > 0) counts.push_back(by_length(chosen));
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  std::vector<WorkDivision> all;
  for (const int n : counts) {
    const bool is_chosen = chosen > 0 ? n == by_length(chosen) : n == 1;
    const int segment = is_chosen ? chosen : segment_of(work.longest, n);
    WorkDivision d;
    d.what = segment == 0 ? "whole sequences" : cat(n, " segments of ", segment, " chunks");
    d.predicted_us = double(time_of_segments(c, work, int(p.K), n, segment));
    d.chosen = is_chosen;
    const Work pieces = segment > 0 ? in_segments(work, n, segment) : work;
    d.reason = bound_of(c, pieces);
    if (segment > 0)
      d.reason +=
          cat("; before it ", transfer_time(c, work, int(p.K), n, segment), " us for ", n - 1,
              n == 2 ? " transfer" : " transfers", " of each sequence and the merge");
    if (is_chosen) {
      const Split split = in_pairs(shares, pieces, choose_split(shares, pieces));
      d.reason += cat("; in roles it runs with ", roles_text(split.roles, pieces));
      if (p.packed && p.N > 1)
        d.reason +=
            ", or as the lengths want it, which are not known here: the longest is taken for 1.5 "
            "times the mean";
      if (p.split != DELTIC_SPLIT_AUTO) d.reason += "; asked for by split";
    }
    all.push_back(std::move(d));
  }
  if (chosen == 0 && kind_of(p) == GateKind::kHead) {
    WorkDivision fused = explain_fused(p, sms);
    for (WorkDivision& d : all) d.chosen = d.chosen && !fused.chosen;
    all.push_back(std::move(fused));
  }
  std::stable_partition(all.begin(), all.end(), [](const WorkDivision& d) { return d.chosen; });
  return all;
}

std::vector<WorkDivision> explain_chains(const Problem& p, int sms, int64_t rounds,
                                         int64_t round_bytes) {
  if (p.N == 0 || p.T == 0) return {};
  const ChainCosts c = chain_costs_of(kind_of(p));
  const ChainWork work = chain_work_of(p, sms);
  const auto number = [&](int segment) {
    return segment > 0 ? (work.longest + segment - 1) / segment : 1;
  };
  int chosen = chain_segment(p, sms);
  if (chosen >= work.longest) chosen = 0;  // cuts nothing
  std::vector<int> segments = {chosen};
  for (int n = 1; n == 1 || n <= most_segments(work.longest); n *= 2) {
    const int segment = segment_of(work.longest, n);
    if (segment != chosen) segments.push_back(segment);
  }
  std::vector<WorkDivision> all;
  for (const int segment : segments) {
    const int n = number(segment);
    // What is not chosen would have rounds of its own: it is shown in one.
    const bool is_chosen = segment == chosen;
    const int64_t heads = is_chosen ? round_at(p.H, rounds, 0).heads : p.H;
    const ChainTime time = chain_time(c, chain_work_in(work, p.H, heads), n, segment);
    WorkDivision d;
    d.what = segment == 0 ? "whole sequences" : cat(n, " segments of ", segment, " chunks");
    d.predicted_us = is_chosen && rounds > 1 ? double(chain_time_in_rounds(p, sms, segment, rounds))
                                             : double(time.all());
    d.chosen = is_chosen;
    d.reason = cat("CTAs of ", time.columns, " value columns");
    if (segment == 0) d.reason += forward_text(c, chain_work_in(work, p.H, heads));
    if (segment > 0) {
      d.reason +=
          cat("; before them ", time.transfer, " us for transfers, where gates do not forget: ",
              work.remembered < 1.f ? "a quarter of the heads is taken for such"
                                    : "all heads are taken for such");
    }
    if (d.chosen && p.split != DELTIC_SPLIT_AUTO) d.reason += "; asked for by split";
    if (is_chosen && rounds > 1) {
      d.reason +=
          cat("; in ", rounds, " rounds, one after the other in the same ", round_bytes >> 20,
              " MiB of workspace, of ", p.H % rounds == 0 ? "" : "at most ", heads,
              p.H == p.HV ? "" : " q/k", heads == 1 ? " head" : " heads", " each");
    }
    all.push_back(std::move(d));
  }
  return all;
}

}  // namespace deltic::gpu::schedule
