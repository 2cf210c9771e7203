// The order of work of the forward on Hopper, on the host: every chunk is carried once and in
// order, every packet has one owner, and nobody waits for ever, whatever the number of SMs. Roles
// and segments are those that trying all of them finds.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/sizes.h"
#include "cuda/code.h"
#include "cuda/saved.h"
#include "cuda/schedule/attendance.h"
#include "cuda/schedule/chains.h"
#include "cuda/schedule/fused.h"
#include "cuda/schedule/order.cuh"
#include "cuda/schedule/pieces.cuh"
#include "cuda/schedule/segments.h"
#include "cuda/schedule/shares.cuh"
#include "cuda/schedule/tickets.cuh"
#include "cuda/sm90/backward/rounds.h"

namespace deltic::gpu::schedule {
namespace {

constexpr int kRing = 8;  // as launch.cu's

struct Mix {
  const char* name;
  std::vector<int> chunks;  // of every piece
  int heads;
};
const std::vector<Mix>& mixes() {
  static const std::vector<Mix> all = {
      {"one chunk", {1}, 1},
      {"one long sequence", {128}, 1},
      {"one long sequence, three heads", {67}, 3},
      {"long sequences", {32, 32, 32, 32}, 32},
      {"short ones", std::vector<int>(40, 2), 5},
      {"single chunks", std::vector<int>(300, 1), 2},
      {"empty ones between", {0, 9, 0, 0, 1, 70, 0, 3, 0}, 6},
      {"one long among short", {1, 2, 90, 1, 1, 3, 2}, 4},
      {"odd", {13, 7, 29, 1, 17}, 7},
  };
  return all;
}

// As the planning kernel makes it.
struct Schedule {
  Plan plan{};
  std::vector<int> prefix;
  int heads = 0, preparers = 0;

  Schedule(const Mix& mix, GateKind gate, int states, int rows, int ctas) : heads(mix.heads) {
    prefix = {0};
    int longest = 0, shortest = 1 << 30;
    for (const int n : mix.chunks) {
      prefix.push_back(prefix.back() + n);
      longest = std::max(longest, n);
      if (n > 0) shortest = std::min(shortest, n);
    }
    int short_jobs = 0;
    for (const int n : mix.chunks) short_jobs += n > 0 && n < 2 * shortest;
    plan.total = prefix.back() * heads, plan.num_pieces = int(mix.chunks.size());
    plan.longest = longest, plan.shortest = shortest, plan.short_jobs = short_jobs * heads;
    divide_among(gate, states, rows, ctas);
  }
  // As a CTA does it that finds so many of them present.
  void divide_among(GateKind gate, int states, int rows, int ctas) {
    const Work work = work_of(plan, states, rows, ctas);
    const Costs costs = costs_of(gate).shares;
    const Split split = in_pairs(costs, work, choose_split(costs, work));
    set_roles(plan, split);
    preparers = ctas - work.group(split.roles.parts) * split.roles.carriers;
  }
  Place at(int carrier, int step) const {
    return locate(plan, prefix.data(), heads, carrier * plan.steps + step);
  }
};

// Every chunk of every job once; those of a job in a carrier one after the other; a job that two
// carriers share begins at the start of the second and ends at the end of the first.
void check_places(const Schedule& s) {
  std::vector<int> seen(size_t(s.plan.total), 0);
  int positions = 0;
  for (int c = 0; c < s.plan.carriers; c++) {
    const int count = num_positions(s.plan, c);
    positions += count;
    for (int n = 0; n < count; n++) {
      const Place p = s.at(c, n);
      ASSERT_TRUE(p.head >= 0 && p.head < s.heads && p.chunk >= p.begin && p.chunk < p.end &&
                  p.end <= p.count);
      seen[size_t(s.heads * p.first_chunk + p.head * p.count + p.chunk)]++;
      if (p.chunk > p.begin) {
        const Place before = s.at(c, n - 1);
        ASSERT_TRUE(before.piece == p.piece && before.head == p.head &&
                    before.chunk == p.chunk - 1);
      }
      if (p.begin > 0) {
        const Place start = s.at(c + 1, 0);
        ASSERT_TRUE(start.piece == p.piece && start.head == p.head && start.begin == 0 &&
                    start.end == p.begin);
      }
    }
  }
  ASSERT_EQ(positions, s.plan.total);
  for (const int n : seen) ASSERT_EQ(n, 1);
}
// Packets in the order of preparation: all of them, each once, never a step before the one ahead.
void check_items(const Schedule& s) {
  std::vector<std::vector<int>> seen(size_t(s.plan.carriers));
  for (int c = 0; c < s.plan.carriers; c++)
    seen[size_t(c)].assign(size_t(num_positions(s.plan, c)), 0);
  int step = 0, owned = 0;
  for (int i = 0; i < s.plan.total; i++) {
    const StepOf item = item_at(s.plan, i);
    ASSERT_GE(item.step, step);
    step = item.step;
    ASSERT_TRUE(item.carrier >= 0 && item.carrier < s.plan.carriers &&
                item.step < num_positions(s.plan, item.carrier));
    seen[size_t(item.carrier)][size_t(item.step)]++;
  }
  for (const auto& steps : seen)
    for (const int n : steps) ASSERT_EQ(n, 1);
  for (int p = 0; p < s.preparers; p++) owned += num_items_of(s.plan.total, p, s.preparers);
  ASSERT_EQ(owned, s.plan.total);
}
// Who may go on goes on, until nobody may: is all done then? Stricter than the kernel: a CTA
// prepares one packet at a time, and a place in the ring is free two steps after its packet.
bool ends(const Schedule& s) {
  std::vector<int> done(size_t(s.plan.carriers) + 1, 0), prepared(size_t(s.preparers), 0);
  std::vector<std::vector<char>> ready(size_t(s.plan.carriers));
  for (int c = 0; c < s.plan.carriers; c++)
    ready[size_t(c)].assign(size_t(num_positions(s.plan, c)), 0);
  for (bool is_moving = true; is_moving;) {
    is_moving = false;
    for (int p = 0; p < s.preparers; p++)
      while (prepared[size_t(p)] < num_items_of(s.plan.total, p, s.preparers)) {
        const StepOf item = item_at(s.plan, p + prepared[size_t(p)] * s.preparers);
        if (done[size_t(item.carrier)] - 1 <= item.step - kRing && item.step >= kRing) break;
        ready[size_t(item.carrier)][size_t(item.step)] = 1;
        prepared[size_t(p)]++, is_moving = true;
      }
    for (int c = 0; c < s.plan.carriers; c++)
      while (done[size_t(c)] < num_positions(s.plan, c) &&
             ready[size_t(c)][size_t(done[size_t(c)])]) {
        const Place p = s.at(c, done[size_t(c)]);
        if (p.chunk == p.begin && p.begin > 0 && done[size_t(c) + 1] < p.begin) break;
        done[size_t(c)]++, is_moving = true;
      }
  }
  for (int c = 0; c < s.plan.carriers; c++)
    if (done[size_t(c)] < num_positions(s.plan, c)) return false;
  return true;
}

TEST(Schedule, EndsForEveryNumberOfSms) {
  for (const Mix& mix : mixes())
    for (const GateKind gate : {GateKind::kHead, GateKind::kChannel})
      for (const int states : {1, 2})
        for (const int rows : {64, 128})
          for (int ctas = states + 1; ctas <= 148; ctas += ctas < 24 ? 1 : 4) {
            SCOPED_TRACE(std::string(mix.name) + ", " + std::to_string(ctas) + " CTAs, " +
                         std::to_string(states) + " states of " + std::to_string(rows) + " rows" +
                         (gate == GateKind::kHead ? "" : ", gates per channel"));
            const Schedule s(mix, gate, states, rows, ctas);
            ASSERT_GE(s.plan.carriers, 1);
            ASSERT_GE(s.preparers, 1);
            ASSERT_NO_FATAL_FAILURE(check_places(s));
            ASSERT_NO_FATAL_FAILURE(check_items(s));
            ASSERT_TRUE(ends(s));
          }
}

// A schedule that is wrong is seen: a job longer than a carrier's steps would wait for a part that
// comes later than the ring reaches.
TEST(Schedule, AWaitForALaterStepIsSeen) {
  Schedule s({"", {40, 40, 40}, 1}, GateKind::kHead, 1, 128, 12);
  EXPECT_TRUE(ends(s));
  s.plan.carriers = 4, s.plan.steps = 30, s.preparers = 1;
  EXPECT_FALSE(ends(s));
}

// A plan for all SMs, divided anew among those that came: as if it had been made for them.
TEST(Attendance, PlansForEveryNumberOfSms) {
  for (const Mix& mix : mixes())
    for (const GateKind gate : {GateKind::kHead, GateKind::kChannel})
      for (const int states : {1, 2})
        for (int present = states + 1; present <= 132; present++) {
          SCOPED_TRACE(std::string(mix.name) + ", " + std::to_string(present) + " CTAs, " +
                       std::to_string(states) + " states");
          Schedule s(mix, gate, states, 128, 132);
          const Schedule alone(mix, gate, states, 128, present);
          s.divide_among(gate, states, 128, present);
          ASSERT_EQ(s.plan.carriers, alone.plan.carriers);
          ASSERT_EQ(s.plan.parts, alone.plan.parts);
          ASSERT_EQ(s.plan.steps, alone.plan.steps);
          ASSERT_EQ(s.preparers, alone.preparers);
          ASSERT_GE(s.preparers, 1);
          ASSERT_NO_FATAL_FAILURE(check_items(s));
          ASSERT_TRUE(ends(s));
        }
}

// CTAs that start, look and give up waiting in any order, each step of a thread by itself: all that
// take part see the same table, those that leave have no place in it, and there are enough.
TEST(Attendance, IsTheSameForAll) {
  std::mt19937 random(12);
  int closed = 0, whole = 0;
  for (int run = 0; run < 2000; run++) {
    const int ctas = 2 + int(random() % 7), fewest = 2 + (ctas > 2 && random() % 2);
    const bool is_patient = random() % 3 == 0;
    std::vector<uint32_t> table(size_t(ctas), kUndecided);
    const auto decide = [&](int i, uint32_t as) {
      if (table[size_t(i)] == kUndecided) table[size_t(i)] = as;
      return table[size_t(i)];
    };
    struct Cta {
      bool has_started = false, has_left = false, is_done = false;
      std::vector<uint32_t> seen;
      int present = 0;
    };
    std::vector<Cta> all(size_t(ctas), Cta{});
    for (int left = ctas; left > 0;) {
      const int i = int(random() % unsigned(ctas));
      Cta& c = all[size_t(i)];
      if (c.is_done) continue;
      if (!c.has_started) {
        // The last ones may start only when others have ended: those must not need them.
        const bool is_running = std::any_of(
            all.begin(), all.end(), [](const Cta& x) { return x.has_started && !x.is_done; });
        if (i >= fewest && is_running && random() % 50) continue;
        c.has_started = true, c.seen.assign(size_t(ctas), kUndecided);
        c.seen[size_t(i)] = decide(i, kPresent);
        if (c.seen[size_t(i)] == kAbsent) c.has_left = c.is_done = true, left--;
        continue;
      }
      c.present = int(std::count(c.seen.begin(), c.seen.end(), kPresent));
      if (std::count(c.seen.begin(), c.seen.end(), kUndecided) == 0) {
        c.is_done = true, left--;
        continue;
      }
      const int look = int(random() % unsigned(ctas));  // one thread of it
      uint32_t& word = c.seen[size_t(look)];
      if (word != kUndecided) continue;
      const bool is_enough = c.present >= fewest && !(is_patient && random() % 1000);
      word = is_enough && random() % 4 == 0 ? decide(look, kAbsent) : table[size_t(look)];
    }
    int present = 0;
    for (int i = 0; i < ctas; i++) {
      const Cta& c = all[size_t(i)];
      ASSERT_EQ(c.has_left, table[size_t(i)] == kAbsent);
      if (c.has_left) continue;
      present++;
      ASSERT_EQ(c.seen, table);
    }
    ASSERT_GE(present, fewest);
    present < ctas ? closed++ : whole++;
  }
  EXPECT_GT(closed, 100);
  EXPECT_GT(whole, 100);
}

// Whenever the others come, or never: no more than twice the time of who knows it beforehand, and
// what the starts of a launch lie apart.
TEST(Attendance, WaitsAsLongAsItMayGain) {
  for (const float time : {1.f, 50.f, 500.f, 20000.f})
    for (int present = 2; present < 132; present++) {
      const float wait = longest_wait(time, 132, present), alone = time * 132 / float(present);
      ASSERT_GE(wait, kDoorUs);
      ASSERT_LE(longest_wait(time, 132, present + 1), wait);
      for (const float come : {0.f, 0.3f, 1.f, 3.f, 1e9f}) {  // in waits
        const float best = std::min(alone, come * wait + time);
        const float taken = come <= 1.f ? come * wait + time : wait + alone;
        ASSERT_LE(taken, 2.0001f * best + kDoorUs);
      }
    }
  EXPECT_EQ(longest_wait(500.f, 132, 131), kDoorUs);
  EXPECT_NEAR(longest_wait(500.f, 132, 32), 500.f * 100 / 32, 1e-2f);
}
TEST(Attendance, StartsApartWhereOneLaunchAlwaysHasTwo) {
  EXPECT_TRUE(may_start_apart(132));
  EXPECT_TRUE(may_start_apart(kMostGrids + 1));
  for (const int sms : {2, 8, 64, 120, kMostGrids}) EXPECT_FALSE(may_start_apart(sms));
}

// Pieces follow one another without a gap, all but the last of whole chunks and the same length.
TEST(Pieces, CoverTheSequence) {
  for (const int length : {0, 1, 63, 64, 65, 128, 1000, 4096, 4097, 100000})
    for (const int cut : {0, 1, 2, 7, 32, 1563, 5000}) {
      SCOPED_TRACE(std::to_string(length) + " tokens by " + std::to_string(cut) + " chunks");
      Piece whole{};
      whole.token = 17, whole.length = length, whole.batch = 3;
      whole.read_slot = 5, whole.write_slot = 6, whole.is_last = true, whole.end_stash = -1;
      const int chunks = chunks_of(length), count = num_pieces(chunks, cut);
      ASSERT_GE(count, 1);
      int token = whole.token, chunk = 0;
      for (int j = 0; j < count; j++) {
        const Piece piece = piece_at(whole, cut, count, j);
        ASSERT_EQ(piece.token, token);
        ASSERT_EQ(piece.first_chunk, chunk);
        ASSERT_EQ(piece.is_last != 0, j + 1 == count);
        if (j + 1 < count) ASSERT_EQ(piece.length, cut * kChunk);
        ASSERT_TRUE(piece.batch == 3 && piece.read_slot == 5 && piece.write_slot == 6 &&
                    piece.end_stash == -1);
        ASSERT_TRUE(cut == 0 || piece.length <= cut * kChunk);
        token += piece.length, chunk += chunks_of(piece.length);
      }
      EXPECT_EQ(token, whole.token + length);
      EXPECT_EQ(chunk, chunks);
      EXPECT_TRUE(length == 0 || piece_at(whole, cut, count, count - 1).length > 0);
    }
}

// As the planning kernel does it: the first of the best in this order.
Split best_of_all(Costs c, const Work& w) {
  Split best = {{1, 1}, split_time(c, w, {1, 1})};
  for (int parts = 1; parts <= w.most_parts(); parts++)
    for (int n = 1; n <= w.most_carriers(parts); n++)
      if (const float t = split_time(c, w, {n, parts}); t < best.time) best = {{n, parts}, t};
  return best;
}
int segment_of_all(Costs c, const Work& w, int keys) {
  int best = 1;
  for (int n = 2; n <= most_segments(w.longest); n++)
    if (time_of_segments(c, w, keys, n, segment_of(w.longest, n)) <
        time_of_segments(c, w, keys, best, segment_of(w.longest, best)))
      best = n;
  return segment_of(w.longest, best);
}
// Calls of all sizes that the forward takes, small ones most often.
struct Draw {
  std::mt19937 random{7};
  int64_t up_to(int64_t most) {
    const int64_t m = std::uniform_int_distribution<int64_t>(1, most)(random);
    return std::uniform_int_distribution<int64_t>(1, m)(random);
  }
  Problem problem() {
    Problem p{};
    const int bits = std::uniform_int_distribution<int>(0, 22)(random);
    p.packed = random() % 2;
    p.gate = random() % 2 ? Gate::channel : Gate::head;
    p.T = (int64_t{1} << bits) + up_to(int64_t{1} << bits), p.B = p.packed ? 1 : up_to(16);
    p.N = p.packed ? up_to(64) : p.B, p.HV = up_to(128);
    p.K = 8 * up_to(16), p.V = 8 * up_to(16);
    p.split = DELTIC_SPLIT_AUTO;
    return p;
  }
};

// Every piece but a sequence's last has a window of its own, and from the window its end is found
// again, in the sequence of the first token after the window.
TEST(Pieces, HaveOneBorderInAWindow) {
  std::mt19937 random(7);
  for (int run = 0; run < 200; ++run) {
    const int cut = 1 + static_cast<int>(random() % 9), n = 1 + static_cast<int>(random() % 12);
    std::vector<int> starts = {0};
    for (int i = 0; i < n; ++i) {
      const int most = random() % 3 == 0 ? 100 : 4000;
      starts.push_back(starts.back() + static_cast<int>(random() % most));
    }
    const int windows = num_windows(starts.back(), cut);
    std::vector<int> borders(static_cast<size_t>(windows), -1);
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      Piece whole{};
      whole.token = starts[i], whole.length = starts[i + 1] - starts[i], whole.is_last = true;
      const int count = num_pieces(chunks_of(whole.length), cut);
      for (int j = 0; j < count; ++j) {
        const Piece piece = piece_at(whole, cut, count, j);
        if (piece.is_last) continue;
        const int window = window_of(piece.token, cut);
        ASSERT_LT(window, windows);
        EXPECT_EQ(borders[size_t(window)], -1) << "two pieces in a window";
        borders[size_t(window)] = piece.token + piece.length;
        if (cut <= kShortChunks) continue;
        const Piece end = shortened(piece);
        EXPECT_EQ(end.token + end.length, piece.token + piece.length);
        EXPECT_EQ(chunks_of(end.length), kShortChunks);
        EXPECT_EQ((end.token - piece.token) % kChunk, 0);
      }
    }
    for (int w = 0; w < windows; ++w) {
      int found = -1;
      for (size_t i = 0; i + 1 < starts.size(); ++i)
        if (starts[i] <= after_window(w, cut) && after_window(w, cut) < starts[i + 1])
          found = border_in(w, starts[i], starts[i + 1], cut);
      EXPECT_EQ(found, borders[size_t(w)]) << "window " << w << " of " << cut << " chunks";
    }
  }
}

TEST(Roles, AreThoseOfTryingAll) {
  Draw draw;
  int halves = 0, carried = 0;
  for (int i = 0; i < 20000; i++) {
    const Problem p = draw.problem();
    Work w = work_of(p, 1 + int(draw.up_to(180)));
    if (i % 2 && w.ctas >= kFewestSmsSplit) w.states = 2, w.rows = int(std::max(p.K, p.V));
    const CostsOfKind& costs = costs_of(kind_of(p));
    for (const Costs& c : {costs.shares, costs.measured}) {
      const Split all = best_of_all(c, w), split = choose_split(c, w);
      ASSERT_EQ(split.time, all.time);
      ASSERT_EQ(split.roles.carriers, all.roles.carriers)
          << w.total << " chunks, longest " << w.longest << ", " << w.ctas << " CTAs";
      ASSERT_EQ(split.roles.parts, all.roles.parts);
      halves += split.roles.parts == 2;
      carried += carry_time(c, w, split.roles) > prepare_time(c, w, split.roles);
    }
  }
  // Both kinds of bound were met, whole states and halves.
  EXPECT_GT(halves, 300);
  EXPECT_GT(carried, 1000);
  EXPECT_LT(carried, 39000);
}

// Gates per channel: an even number of CTAs carries, unless that is to take much longer.
TEST(Roles, CarriersInPairs) {
  Draw draw;
  int changed = 0, kept = 0;
  for (int i = 0; i < 20000; i++) {
    const Problem p = draw.problem();
    const Work w = work_of(p, 2 + int(draw.up_to(180)));
    const Costs c = costs_of(kind_of(p)).shares;
    const Split best = choose_split(c, w), taken = in_pairs(c, w, best);
    const bool is_odd = w.group(taken.roles.parts) * taken.roles.carriers % 2 != 0;
    ASSERT_EQ(taken.roles.parts, best.roles.parts);
    ASSERT_EQ(taken.time, split_time(c, w, taken.roles));
    ASSERT_TRUE(best.time == INFINITY || taken.time < 1.125f * best.time || best.time == 0.f);
    if (kind_of(p) == GateKind::kHead) ASSERT_EQ(taken.roles.carriers, best.roles.carriers);
    if (kind_of(p) == GateKind::kHead || best.roles.carriers == 1) continue;
    if (w.ctas >= 128) ASSERT_FALSE(is_odd) << w.total << " chunks, longest " << w.longest;
    changed += taken.roles.carriers != best.roles.carriers, kept += is_odd;
  }
  EXPECT_GT(changed, 100);
  EXPECT_GT(kept, 10);
}

TEST(Segments, AreThoseOfTryingAll) {
  Draw draw;
  int whole = 0, split = 0;
  for (int i = 0; i < 4000; i++) {
    Problem p = draw.problem();
    if (i % 2) p.HV = 1 + i % 8, p.N = p.B = 1;  // few jobs: those are cut
    const int sms = int(draw.up_to(160));
    const Work w = work_of(p, sms);
    const Costs c = costs_of(kind_of(p)).measured;
    const int chosen = split_chunks(p, sms);
    ASSERT_EQ(chosen, segment_of_all(c, w, int(p.K)))
        << p.T << " tokens, " << p.N << " sequences, " << p.HV << " heads, " << sms << " SMs";
    ASSERT_EQ(split_chunks(p, sms), chosen);  // as remembered
    chosen > 0 ? split++ : whole++;
  }
  EXPECT_GT(split, 500);
  EXPECT_GT(whole, 500);
}

// What is remembered of the call before is not taken for another one's.
TEST(Segments, OfCallsInTurn) {
  const auto chunks = [](Gate gate, int64_t tokens, int64_t heads, int64_t keys, int sms) {
    Problem p{};
    p.gate = gate, p.B = p.N = 1, p.T = tokens, p.HV = heads, p.K = keys, p.V = 128;
    p.split = DELTIC_SPLIT_AUTO;
    return split_chunks(p, sms);
  };
  for (int i = 0; i < 3; i++) {
    EXPECT_EQ(chunks(Gate::head, 8192, 8, 128, 132), 16);
    EXPECT_EQ(chunks(Gate::channel, 8192, 8, 128, 132), 26);
    EXPECT_EQ(chunks(Gate::channel, 8192, 32, 128, 132), 0);
    EXPECT_EQ(chunks(Gate::channel, 32768, 8, 128, 132), 103);
    EXPECT_EQ(chunks(Gate::head, 8192, 8, 128, 16), 0);
  }
}

Problem dense_heads(int64_t batch, int64_t tokens, int64_t heads, int64_t width = 128) {
  Problem p{};
  p.gate = Gate::head, p.B = p.N = batch, p.T = tokens, p.H = p.HV = heads, p.K = p.V = width;
  p.split = DELTIC_SPLIT_AUTO;
  return p;
}

// Which jobs each fused CTA gets, and when all are done: CTAs begin in their order on the SMs that
// are there, and hold theirs until there is no job left.
enum class Deal {
  kDrawn,      // by tickets, as the kernel does it
  kBeginning,  // by tickets, but the next one as soon as a job begins
  kRound       // every so many-th job each, as they come
};
struct FusedCtas {
  std::vector<int> seen;         // how often each job (piece, head) was done
  std::vector<int> steps, jobs;  // of each CTA
  std::vector<int> first_job;    // of each CTA; -1: none
  double time_us = 0;

  FusedCtas(const std::vector<int>& chunks, int heads, int ctas, int sms,
            Deal deal = Deal::kDrawn) {
    const int pieces = int(chunks.size());
    seen.assign(chunks.size() * size_t(heads), 0);
    steps.assign(size_t(ctas), 0), jobs = steps, first_job.assign(size_t(ctas), -1);
    Tickets t = tickets(chunks, ctas);
    struct Event {
      double time;
      int sm;
      bool operator>(const Event& o) const { return std::pair(time, sm) > std::pair(o.time, o.sm); }
    };
    std::priority_queue<Event, std::vector<Event>, std::greater<>> queue;
    std::vector<int> cta(size_t(sms), -1), own(size_t(sms), -1);
    std::vector<double> busy(size_t(sms), 0);  // until its jobs so far are done
    int next_cta = 0;
    const auto begin = [&](int sm) {
      if (next_cta == ctas) return;
      cta[size_t(sm)] = next_cta;
      own[size_t(sm)] = t.is_sorted && deal != Deal::kRound ? -1 : next_cta;
      next_cta++;
      queue.push({busy[size_t(sm)], sm});
    };
    // One look: the SM's next job, or -1.
    const auto find = [&](size_t sm) {
      while (true) {
        int job = own[sm];
        if (deal == Deal::kRound)
          own[sm] += ctas;
        else if (job >= 0)
          own[sm] = -1;
        else
          job = int(t.next++);
        const int place = job / heads;
        if (place >= (deal == Deal::kRound ? pieces : t.pieces)) return -1;
        const int piece = t.is_sorted && deal != Deal::kRound ? t.piece[place] : place;
        if (chunks[size_t(piece)] > 0) return piece * heads + job % heads;
      }
    };
    for (int sm = 0; sm < sms; sm++) begin(sm);
    while (!queue.empty()) {
      const double now = queue.top().time;
      const size_t sm = size_t(queue.top().sm), c = size_t(cta[sm]);
      queue.pop();
      const int job = find(sm);
      if (job < 0) {
        begin(int(sm));
        continue;
      }
      const int count = chunks[size_t(job / heads)];
      if (jobs[c]++ == 0) first_job[c] = job;
      seen[size_t(job)]++, steps[c] += count;
      busy[sm] = std::max(now, busy[sm]) + kFusedCosts.part + kFusedCosts.step * count;
      time_us = std::max(time_us, busy[sm]);
      const int left = deal == Deal::kBeginning ? count : std::min(count, kDrawnAhead + 4);
      queue.push({std::max(now, busy[sm] - kFusedCosts.step * left), int(sm)});
    }
    time_us += kFusedCosts.begin;
  }
  // As the planning kernel lays them.
  static Tickets tickets(const std::vector<int>& chunks, int ctas) {
    Tickets t{};
    int longest = 0, shortest = 1 << 30;
    bool has_empty = false;
    for (const int n : chunks) {
      longest = std::max(longest, n), has_empty |= n == 0;
      if (n > 0) shortest = std::min(shortest, n);
    }
    const int pieces = int(chunks.size());
    t.is_sorted = are_sorted(pieces, longest, shortest, has_empty);
    t.next = first_ticket(t.is_sorted, ctas), t.pieces = pieces;
    if (!t.is_sorted) return t;
    std::vector<uint32_t> keys;
    for (int i = 0; i < pieces; i++) keys.push_back(sort_key(chunks[size_t(i)], i));
    t.pieces = 0;
    for (int i = 0; i < pieces; i++) {
      if (chunks[size_t(i)] == 0) continue;
      t.piece[place_among(keys.data(), pieces, i)] = i, t.pieces++;
    }
    return t;
  }
};

// The order is that of a stable sort; empty pieces are in none.
TEST(Tickets, PiecesStandLongestFirst) {
  Draw draw;
  for (int i = 0; i < 2000; i++) {
    std::vector<int> chunks(draw.up_to(kSortedPieces + 20));
    const int most = i % 3 == 0 ? 1 << 22 : i % 3 == 1 ? 40 : 3;
    for (int& n : chunks) n = int(draw.up_to(most)) - 1;
    const Tickets t = FusedCtas::tickets(chunks, 132);
    std::vector<int> order(chunks.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return chunks[size_t(a)] > chunks[size_t(b)]; });
    const auto [least, longest] = std::minmax_element(chunks.begin(), chunks.end());
    ASSERT_EQ(t.is_sorted, chunks.size() <= kSortedPieces && (*least == 0 || *least < *longest));
    if (!t.is_sorted) continue;
    ASSERT_EQ(t.pieces, int(chunks.size()) - int(std::count(chunks.begin(), chunks.end(), 0)));
    ASSERT_TRUE(std::equal(order.begin(), order.begin() + t.pieces, t.piece));
  }
}

TEST(Tickets, OneIsDrawnInEveryJob) {
  for (int chunks = 0; chunks < 300; chunks++) {
    int drawn = 0;
    for (int left = chunks; left > 0; left--) {
      if (!draws_at(left, left == chunks)) continue;
      drawn++;
      EXPECT_EQ(left, std::min(chunks, kDrawnAhead));
    }
    EXPECT_EQ(drawn, chunks > 0 ? 1 : 0) << chunks;
  }
  EXPECT_FALSE(draws_at(0, true));
}

// Whatever the lengths, the grid and the SMs that are there: every job once, and no CTA is busy
// while others have nothing, but for its last job.
TEST(Tickets, EveryJobIsDrawnOnce) {
  Draw draw;
  for (int i = 0; i < 300; i++) {
    for (const Mix& mix : mixes()) {
      SCOPED_TRACE(mix.name);
      const int ctas = int(draw.up_to(160)), sms = int(draw.up_to(ctas));
      const FusedCtas fused(mix.chunks, mix.heads, ctas, sms);
      double all = 0;
      for (size_t job = 0; job < fused.seen.size(); job++) {
        const int chunks = mix.chunks[job / size_t(mix.heads)];
        ASSERT_EQ(fused.seen[job], chunks > 0 ? 1 : 0) << ctas << " CTAs on " << sms << " SMs";
        if (chunks > 0) all += kFusedCosts.part + kFusedCosts.step * chunks;
      }
      const int longest = *std::max_element(mix.chunks.begin(), mix.chunks.end());
      const double last = kFusedCosts.part + kFusedCosts.step * (longest + kDrawnAhead + 4);
      ASSERT_LE(fused.time_us, kFusedCosts.begin + all / sms + last);
    }
  }
}

// Jobs of one length: CTA i begins with job i, and the one with the most has what is said.
TEST(Fused, SharesOfJobs) {
  Draw draw;
  for (int i = 0; i < 500; i++) {
    const Problem p =
        dense_heads(int64_t(draw.up_to(40)), int64_t(draw.up_to(5000)), int64_t(draw.up_to(64)));
    const int sms = int(draw.up_to(160)), jobs = int(p.N * p.HV);
    const FusedCtas fused(std::vector<int>(size_t(p.N), int(chunks_in(p.T))), int(p.HV), sms, sms);
    const Work work = work_of(p, sms);
    const FusedShare share = share_of(work);
    ASSERT_EQ(share.steps, *std::max_element(fused.steps.begin(), fused.steps.end()));
    ASSERT_EQ(share.jobs, *std::max_element(fused.jobs.begin(), fused.jobs.end()));
    ASSERT_NEAR(fused.time_us, fused_time(kFusedCosts, work), 1e-3 * fused.time_us);
    for (int c = 0; c < sms; c++) ASSERT_EQ(fused.first_job[size_t(c)], c < jobs ? c : -1);
  }
}

// The table of the forward's README: microseconds as predicted, on 132 SMs.
TEST(Tickets, OfPackedCallsEndTogether) {
  const auto of = [](std::vector<int> tokens) {
    for (int& n : tokens) n = int(chunks_in(n));
    return tokens;
  };
  const std::vector<int> six = {1300, 547, 2048, 963, 271, 3063};
  const std::vector<int> sixteen = {1024, 323, 5161, 256,  2580, 645, 8192, 1625,
                                    406,  813, 3251, 1290, 6502, 512, 2048, 4096};
  std::vector<int> one_long(32, 512);
  one_long.back() = 8192;
  struct Row {
    std::vector<int> tokens;
    int heads, sms;
    double round, drawn, beginning;
  };
  const Row rows[] = {{six, 64, 132, 400, 279, 300},
                      {sixteen, 16, 132, 731, 490, 572},
                      {sixteen, 32, 132, 1230, 590, 703},
                      {sixteen, 32, 99, 1230, 777, 796},
                      {one_long, 32, 132, 732, 490, 524},
                      {{6144, 2048}, 64, 132, 371, 371, 371},
                      {std::vector<int>(8, 1024), 32, 132, 139, 139, 139},
                      {std::vector<int>(8, 1024), 32, 99, 268, 204, 204}};
  for (const Row& r : rows) {
    SCOPED_TRACE(cat(r.tokens.size(), " sequences, ", r.heads, " heads, ", r.sms, " SMs"));
    Problem p = dense_heads(int64_t(r.tokens.size()), 0, r.heads);
    p.packed = true, p.B = 1, p.T = std::accumulate(r.tokens.begin(), r.tokens.end(), int64_t{0});
    EXPECT_TRUE(fuses(p, 132));
    const auto time = [&](Deal deal) {
      return FusedCtas(of(r.tokens), r.heads, 132, r.sms, deal).time_us;
    };
    EXPECT_NEAR(time(Deal::kRound), r.round, 1);
    EXPECT_NEAR(time(Deal::kDrawn), r.drawn, 1);
    EXPECT_NEAR(time(Deal::kBeginning), r.beginning, 1);
  }
}

// Calls as measured on 132 SMs, in milliseconds: each takes what was shorter. Within 2 % either
// will do.
TEST(Fused, AreTakenWhereTheyWereShorter) {
  struct Row {
    int64_t sequences, tokens, heads, value_heads;
    float roles, fused;
  };
  constexpr Row kRows[] = {{4, 8192, 16, 32, .4985f, .5029f},  {8, 1024, 16, 16, .1007f, .0741f},
                           {8, 1024, 16, 32, .1698f, .1339f},  {8, 1024, 32, 32, .1701f, .1358f},
                           {8, 4096, 16, 16, .2660f, .2535f},  {4, 2048, 32, 32, .1631f, .1338f},
                           {4, 8192, 16, 64, 1.0133f, .9351f}, {4, 8192, 2, 8, .1876f, .4318f},
                           {8, 4096, 2, 8, .1403f, .2239f},    {8, 1024, 2, 8, .0548f, .0677f},
                           {8, 1024, 4, 16, .0919f, .0706f},   {8, 1024, 8, 8, .0582f, .0689f},
                           {8, 1024, 16, 48, .2341f, .1963f},  {16, 512, 16, 32, .1957f, .1478f},
                           {64, 128, 16, 32, .3188f, .2394f},  {2, 8192, 16, 32, .2562f, .4365f},
                           {2, 8192, 16, 64, .4769f, .4763f},  {3, 4096, 16, 32, .1993f, .2388f},
                           {2, 4096, 32, 32, .1505f, .2272f}};
  for (const Row& r : kRows)
    for (const bool packed : {false, true}) {
      SCOPED_TRACE(std::to_string(r.sequences) + " x " + std::to_string(r.tokens) + " " +
                   std::to_string(r.heads) + "/" + std::to_string(r.value_heads));
      Problem p = dense_heads(r.sequences, r.tokens, r.value_heads);
      p.H = r.heads;
      if (packed) p.packed = true, p.B = 1, p.T = r.sequences * r.tokens;
      const float taken = fuses(p, 132) ? r.fused : r.roles;
      EXPECT_LE(taken, 1.02f * std::min(r.roles, r.fused));
      // The times that are compared are near those measured where jobs fill the SMs; roles take
      // longer than predicted where a job has two chunks (0.24 for 0.32).
      const Work w = equal_work(p, 132);
      if (float(w.short_jobs) < kFusedShare * 132) continue;
      if (w.longest >= 8) EXPECT_NEAR(roles_time(w), 1000 * r.roles, 150 * r.roles);
      EXPECT_NEAR(fused_time(kFusedCosts, w), 1000 * r.fused, 150 * r.fused);
    }
}

// Two calls in turn, and then more than are kept: the answer is that of a thread that was asked
// nothing before.
TEST(Fused, OfCallsInTurn) {
  Draw draw;
  std::vector<Problem> calls;
  for (int i = 0; i < 400; i++) {
    calls.push_back(dense_heads(draw.up_to(32), 64 << draw.up_to(6), 4 << draw.up_to(4)));
    calls.push_back(calls[size_t(draw.up_to(2 * i + 1) - 1)]);
  }
  int fused = 0;
  for (const Problem& p : calls) {
    const bool is_fused = fuses(p, 132);
    bool alone = false;
    std::thread([&] { alone = fuses(p, 132); }).join();
    ASSERT_EQ(is_fused, alone) << p.N << " x " << p.T << ", " << p.HV << " heads";
    fused += is_fused;
  }
  EXPECT_GT(fused, 50);
  EXPECT_LT(fused, 750);
}

// Costs of one thing are near each other, whatever they are for, and every row has a name.
TEST(Costs, AreInOneTable) {
  std::set<std::string> names;
  std::map<std::string, std::pair<float, float>> range[2];
  for (const CostRow& row : kCostTable) {
    EXPECT_TRUE(names.insert(std::string(row.who) + ", " + row.what).second) << row.who;
    EXPECT_GT(row.head + row.channel, 0.f) << row.who << ", " << row.what;
    for (const int kind : {0, 1}) {
      const float us = kind == 0 ? row.head : row.channel;
      if (us == 0.f) continue;
      const auto [at, is_first] = range[kind].try_emplace(row.who, us, us);
      at->second = {std::min(at->second.first, us), std::max(at->second.second, us)};
    }
    std::printf("%-36s %-13s %7.3f %7.3f us\n", row.who, row.what, double(row.head),
                double(row.channel));
  }
  for (const auto& of_kind : range)
    for (const auto& [who, us] : of_kind) EXPECT_LE(us.second, 3 * us.first) << who;
}

// The backward's: cut where few states leave SMs idle, whole where they fill them.
TEST(Chains, AreCutWhereHeadsAreFew) {
  const auto chunks = [](Gate gate, int64_t tokens, int64_t heads, int sms) {
    Problem p{};
    p.gate = gate, p.B = p.N = 1, p.T = tokens, p.HV = heads, p.K = p.V = 128;
    p.split = DELTIC_SPLIT_AUTO;
    return chain_segment(p, sms);
  };
  for (const Gate gate : {Gate::none, Gate::head, Gate::channel}) {
    EXPECT_EQ(chunks(gate, 8192, 96, 132), 0);
    EXPECT_EQ(chunks(gate, 8192, 64, 132), 0);
    EXPECT_EQ(chunks(gate, 500, 1, 132), 0);
    EXPECT_EQ(chunks(gate, 8192, 4, 0), 0);
    EXPECT_EQ(chunks(gate, int64_t{1} << 45, int64_t{1} << 20, 132), 0);
    for (const int64_t heads : {1, 2, 4, 8}) {
      const int segment = chunks(gate, 32768, heads, 132);
      ASSERT_GT(segment, 0) << heads;
      EXPECT_LE(512 / segment, kMaxSegments) << heads;
      const ChainCosts c =
          chain_costs_of(gate == Gate::channel ? GateKind::kChannel : GateKind::kHead);
      const ChainWork w = {int(heads), int(512 * heads), 512, 128, 128, 132};
      const float whole = chain_time(c, w, 1, 0).all();
      EXPECT_LT(chain_time(c, w, (511 + segment) / segment, segment).all(), 0.6f * whole) << heads;
    }
  }
}
TEST(Chains, AsTheCallSays) {
  Problem p{};
  p.gate = Gate::head, p.B = p.N = 1, p.T = 8192, p.HV = 4, p.K = p.V = 128;
  p.split = DELTIC_SPLIT_OFF;
  EXPECT_EQ(chain_segment(p, 132), 0);
  p.split = DELTIC_SPLIT_BY_LENGTH;
  const int by_length = chain_segment(p, 132);
  EXPECT_EQ(by_length, kMinSegmentChunks);
  p.B = p.N = 7;
  EXPECT_EQ(chain_segment(p, 20), by_length);
  p.split = DELTIC_SPLIT_SEGMENTS, p.segment_length = 640;
  EXPECT_EQ(chain_segment(p, 132), 10);
}

// Jobs that CTAs share, as the chains' kernel goes through them.
struct Sharing {
  unsigned jobs, ctas;
  int chunks;
  enum Handed { kNobodyCame, kIsThere, kIsLeft };
  std::vector<int> handed = std::vector<int>(ctas, kNobodyCame);
  std::vector<int> done = std::vector<int>(jobs, 0);  // chunks so far

  // Chunks [begin, end) of a job: in order, and none twice.
  void go(unsigned job, int begin, int end) {
    EXPECT_EQ(done[job], begin) << "job " << job;
    done[job] = end;
  }
  void run(unsigned index) {
    const Share share = share_of(jobs, ctas, index);
    for (unsigned job = share.first; job < share.end; ++job) {
      const bool is_rest = job + 1 == share.end && share.after > 0;
      const unsigned later = is_rest ? share.after : job == share.first ? share.before : 0;
      const int cut = later > 0 ? first_chunks(chunks, later, ctas) : chunks;
      if (cut == chunks) {
        if (!is_rest) go(job, 0, chunks);
        continue;
      }
      if (!is_rest) go(job, 0, cut);
      int& note = handed[is_rest ? index + 1 : index];
      const int before = std::exchange(note, is_rest ? kIsLeft : kIsThere);
      if (before == (is_rest ? kIsThere : kIsLeft)) go(job, cut, chunks);
    }
  }
};
// Every chunk once and in order, whichever CTA comes when: nobody waits.
TEST(Shares, HaveAllChunksOnce) {
  std::mt19937 random(5);
  for (unsigned jobs = 1; jobs <= 50; ++jobs) {
    for (unsigned ctas = 1; ctas <= jobs; ++ctas) {
      for (const int chunks : {0, 1, 2, 5, 128}) {
        std::vector<unsigned> order(ctas);
        std::iota(order.begin(), order.end(), 0u);
        for (int turn = 0; turn < 3; ++turn) {
          Sharing sharing{jobs, ctas, chunks};
          for (const unsigned index : order) sharing.run(index);
          EXPECT_EQ(sharing.done, std::vector<int>(jobs, chunks)) << jobs << " " << ctas;
          if (turn == 0) std::reverse(order.begin(), order.end());
          if (turn == 1) std::shuffle(order.begin(), order.end(), random);
        }
      }
    }
  }
}
// All CTAs have as much, and a job's last part is reached when its first one is done.
TEST(Shares, EndTogether) {
  constexpr int kChunks = 128;
  for (unsigned jobs = 1; jobs <= 132; ++jobs) {
    for (unsigned ctas = 1; ctas <= jobs; ++ctas) {
      for (unsigned i = 0; i < ctas; ++i) {
        const Share share = share_of(jobs, ctas, i);
        const int later = kChunks - first_chunks(kChunks, share.before, ctas);
        const int all = int(share.end - share.first) * kChunks;
        const int rest = share.after > 0 ? kChunks - first_chunks(kChunks, share.after, ctas) : 0;
        const int own = all - later - (share.after > 0 ? kChunks - rest : 0);
        EXPECT_LE(std::abs(own - int(jobs * kChunks / ctas)), 2) << jobs << " " << ctas;
        if (rest > 0) {
          EXPECT_GE(own - rest + 2, kChunks - rest);
        }
      }
    }
  }
}
// Rows measured per channel; see kForwardShares and the backward's README.
TEST(Chains, AreDealtAsMeasured) {
  struct Row {
    int jobs, chunks, back, forward_ctas;
  };
  constexpr Row kRows[] = {
      {32, 128, 64, 32},    // 360 us; with 24 forward 357, with 20 398
      {32, 256, 64, 32},    // 701 us; with 24 forward 697
      {48, 128, 64, 36},    // 460 us; of 128 columns and one to each 530, with 40 forward 511
      {64, 128, 128, 32},   // 611 us
      {80, 64, 128, 80},    // 384 us; with 52 forward 387, with 40 395
      {128, 64, 128, 128},  // 612 us; backwards of 64 columns 632
  };
  for (const Row& row : kRows) {
    const ChainDeal x =
        deal_chains(kChannelChain, {row.jobs, row.jobs * row.chunks, row.chunks, 128, 128, 132});
    EXPECT_EQ(x.back, row.back) << row.jobs;
    EXPECT_EQ(x.forward, 128) << row.jobs;
    EXPECT_EQ(x.forward_ctas, row.forward_ctas) << row.jobs;
  }
}
TEST(Chains, AreDealtOverAllSms) {
  const auto deal = [](const ChainCosts& c, int jobs, int values = 128) {
    return deal_chains(c, {jobs, 128 * jobs, 128, 128, values, 132});
  };
  EXPECT_EQ(deal(kHeadChain, 32).forward, 64);
  EXPECT_EQ(deal(kHeadChain, 33).forward_ctas, 66);
  EXPECT_EQ(deal(kHeadChain, 64).back, 128);
  float before = 0;
  for (int jobs = 1; jobs <= 300; ++jobs) {
    for (const ChainCosts& c : {kHeadChain, kChannelChain}) {
      for (const int values : {64, 128}) {
        const ChainDeal x = deal(c, jobs, values);
        const int back = jobs * (values / x.back), forward = jobs * (values / x.forward);
        EXPECT_GT(x.forward_ctas, 0);
        EXPECT_LE(x.forward_ctas, forward);
        EXPECT_TRUE(x.forward_ctas == forward || back + x.forward_ctas == 132 ||
                    (x.forward_ctas == kForwardShares && back + forward <= 132))
            << jobs;
      }
    }
    // A job more never takes less time.
    const float time = deal(kChannelChain, jobs).time;
    EXPECT_GE(time, before) << jobs;
    before = time;
  }
}

// The backward's workspace, a chunk and value head with K = V = 128; much as its layout has it.
int64_t chunk_bytes(Gate gate) { return gate == Gate::channel ? 182784 : 133632; }
struct Sized {
  Gate gate;
  int64_t B, T, H, group = 1;
  Problem problem() const {
    Problem p{};
    p.gate = gate, p.B = p.N = B, p.T = T, p.H = H, p.HV = H * group, p.K = p.V = 128;
    return p;
  }
  int64_t bytes(int64_t heads) const {
    return checked_product(B, (T + 63) / 64, group, chunk_bytes(gate), heads);
  }
  int64_t rounds(int segment = 0) const {
    return choose_rounds(problem(), segment, [&](int64_t heads) { return bytes(heads); });
  }
};

// Rounds that fill the SMs as one launch does.
TEST(Rounds, BoundTheWorkspaceWhereItCostsNoTime) {
  const Gate channel = Gate::channel, head = Gate::head;
  EXPECT_EQ((Sized{channel, 1, 8192, 96}.rounds()), 2);  // a wave of 48 heads each
  EXPECT_EQ((Sized{channel, 4, 4096, 64}.rounds()), 2);
  EXPECT_EQ((Sized{head, 4, 4096, 64}.rounds()), 1);     // a twentieth more time
  EXPECT_EQ((Sized{channel, 1, 8192, 32}.rounds()), 1);  // it is small enough
  // One round's chains would leave half of the SMs idle.
  EXPECT_EQ((Sized{channel, 1, 8192, 64}.rounds()), 1);
  EXPECT_EQ((Sized{head, 1, 32768, 16, 2}.rounds()), 1);
  // A q/k head is the least.
  EXPECT_EQ((Sized{channel, 66, 65536, 4}.rounds()), 4);
  EXPECT_EQ((Sized{channel, 66, 65536, 1, 4}.rounds()), 1);
  // Those of tests/gpu_rounds.cpp.
  EXPECT_EQ((Sized{channel, 1, 6052, 131}.rounds()), 2);
  EXPECT_EQ((Sized{channel, 1, 6052, 130}.rounds(24)), 2);
  EXPECT_EQ((Sized{head, 1, 10020, 65, 2}.rounds()), 2);
}
TEST(Rounds, AreTheBestOfAll) {
  for (const Gate gate : {Gate::head, Gate::channel}) {
    for (const int64_t B : {1, 3, 8}) {
      for (const int64_t T : {640, 4096, 40000}) {
        for (const int64_t H : {1, 7, 32, 96, 300}) {
          const Sized call{gate, B, T, H, H == 32 ? 2 : 1};
          const Problem p = call.problem();
          const auto time = [&](int64_t n) {
            const float rest = gate == Gate::channel ? kChannelRest : kHeadRest;
            return chain_time_in_rounds(p, kRoundSms, 0, n) +
                   float(B * chunks_in(T) * p.HV) * rest + float(n - 1) * kRoundUs;
          };
          const auto bytes = [&](int64_t n) { return call.bytes(round_at(H, n, 0).heads); };
          const int64_t chosen = call.rounds();
          EXPECT_LE(time(chosen), kRoundsWorth * time(1));
          for (int64_t n = 1; n <= std::min(H, kMostRounds); ++n) {
            if (time(n) > kRoundsWorth * time(1)) continue;
            EXPECT_TRUE(n >= chosen || bytes(n) > kRoundBytes) << n << " instead of " << chosen;
            EXPECT_TRUE(bytes(chosen) <= kRoundBytes || bytes(n) >= bytes(chosen)) << n;
          }
        }
      }
    }
  }
}
TEST(Rounds, HaveAllHeadsOnce) {
  for (int64_t heads = 1; heads <= 40; ++heads) {
    for (int64_t rounds = 1; rounds <= heads; ++rounds) {
      int64_t next = 0;
      for (int64_t i = 0; i < rounds; ++i) {
        const HeadRange range = round_at(heads, rounds, i);
        EXPECT_EQ(range.first, next);
        EXPECT_GE(range.heads, heads / rounds);
        EXPECT_LE(range.heads, round_at(heads, rounds, 0).heads);
        next += range.heads;
      }
      EXPECT_EQ(next, heads);
      EXPECT_EQ(round_at(heads, rounds, 0).heads, (heads + rounds - 1) / rounds);
    }
  }
}
// Sizes that nobody has memory for.
TEST(Rounds, OfHugeCalls) {
  constexpr int64_t kOne = 1;
  EXPECT_EQ((Sized{Gate::channel, 1, kOne << 26, kOne << 20}.rounds()), 1);  // ends before it runs
  EXPECT_EQ((Sized{Gate::head, kOne << 30, 1, 2}.rounds()), 1);
  EXPECT_EQ((Sized{Gate::head, kOne << 20, 64, 1000}.rounds(1)), 250);
  EXPECT_THROW((Sized{Gate::channel, 1, kOne << 45, kOne << 20}.rounds()), SizeOverflow);
  EXPECT_THROW((Sized{Gate::channel, kOne << 50, 64, 2}.rounds()), SizeOverflow);
  EXPECT_EQ((Sized{Gate::channel, 0, 64, 96}.rounds()), 1);
  EXPECT_EQ((Sized{Gate::channel, 1, 0, 96}.rounds()), 1);
  const HeadRange last = round_at(INT64_MAX, 256, 255);
  EXPECT_EQ(last.first + last.heads, INT64_MAX);
}

// A round's views: strides stay, each tensor begins with its first head.
TEST(Rounds, AreCallsOnTheirHeads) {
  Problem p = Sized{Gate::channel, 2, 100, 5, 3}.problem();
  static char memory[1];
  const auto rows = [&](int64_t heads, DType type) {
    return Rows{memory, type, true, 100 * heads * 160, heads * 160, 160};
  };
  p.q = p.dq = rows(5, DType::bf16), p.v = p.d_o = rows(15, DType::bf16);
  p.g = p.dg = rows(15, DType::f32);
  p.beta = {nullptr, DType::f32, true, 1500, 15, 1};  // as in a query
  p.state_in = {memory, DType::f32, true, 2, 15 * 999, 999, 1, 128, 0};
  p.d_final = p.d_initial = p.state_in;
  p.dk = p.dq, p.dv = p.v, p.dbeta = {memory, DType::f32, true, 1500, 15, 1};
  p.A_log = {memory, DType::f32, true, true, 1, {15}, {1}};
  p.dt_bias = {memory, DType::f16, true, false, 2, {15, 128}, {200, 1}};
  const Problem x = gradient::round_of(p, 2, 1);  // heads 3 and 4, values 9 to 14
  EXPECT_EQ(x.H, 2);
  EXPECT_EQ(x.HV, 6);
  EXPECT_EQ(x.N, 2);
  const auto moved = [&](const void* data) { return static_cast<const char*>(data) - memory; };
  EXPECT_EQ(moved(x.q.data), 3 * 160 * 2);
  EXPECT_EQ(moved(x.dq.data), 3 * 160 * 2);
  EXPECT_EQ(moved(x.v.data), 9 * 160 * 2);
  EXPECT_EQ(moved(x.d_o.data), 9 * 160 * 2);
  EXPECT_EQ(moved(x.g.data), 9 * 160 * 4);
  EXPECT_EQ(moved(x.dg.data), 9 * 160 * 4);
  EXPECT_EQ(x.beta.data, nullptr);
  EXPECT_FALSE(x.k.present);
  EXPECT_EQ(x.k.data, nullptr);
  EXPECT_EQ(moved(x.state_in.data), 9 * 999 * 4);
  EXPECT_EQ(moved(x.d_final.data), 9 * 999 * 4);
  EXPECT_EQ(moved(x.d_initial.data), 9 * 999 * 4);
  EXPECT_EQ(moved(x.dk.data), 3 * 160 * 2);
  EXPECT_EQ(moved(x.dv.data), 9 * 160 * 2);
  EXPECT_EQ(moved(x.dbeta.data), 9 * 4);
  EXPECT_EQ(moved(x.A_log.data), 9 * 4);
  EXPECT_EQ(moved(x.dt_bias.data), 9 * 200 * 2);
  EXPECT_EQ(x.v.st, p.v.st);
  EXPECT_EQ(x.state_in.s_slot, p.state_in.s_slot);
  const Problem first = gradient::round_of(p, 2, 0);
  EXPECT_EQ(moved(first.v.data), 0);
  EXPECT_EQ(first.HV, 9);
}
// Every shape and stride of a parameter: the range is the one that its elements are at, or none.
TEST(Rounds, CutParameters) {
  static double memory[1];
  const std::vector<std::vector<int64_t>> shapes = {{24},    {4, 6},     {2, 3, 4},   {1, 24},
                                                    {24, 1}, {2, 1, 12}, {1, 4, 1, 6}};
  int cut = 0, whole = 0;
  for (const auto& shape : shapes) {
    for (const bool is_turned : {false, true}) {
      Param x{memory, DType::f64, true, false, int32_t(shape.size()), {}, {}};
      int64_t stride = 3;
      for (size_t i = 0; i < shape.size(); ++i) {
        const size_t d = is_turned ? i : shape.size() - 1 - i;
        x.shape[d] = shape[d], x.strides[d] = stride, stride *= shape[d] + 1;
      }
      for (int64_t first = 0; first < 24; ++first) {
        for (int64_t count = 1; first + count <= 24; ++count) {
          Param part = x;
          const bool is_there = gradient::cut_param(part, first, count);
          const int64_t offset = static_cast<double*>(part.data) - memory;
          bool is_right = true;
          for (int64_t i = 0; i < count; ++i) is_right &= offset + part.at(i) == x.at(first + i);
          EXPECT_TRUE(is_right || !is_there) << first << " " << count;
          EXPECT_TRUE(is_there || shape.size() > 1) << first << " " << count;
          is_there ? ++cut : ++whole;
        }
      }
    }
  }
  EXPECT_GT(cut, 0);
  EXPECT_GT(whole, 0);
  Problem p = Sized{Gate::head, 1, 64, 6}.problem();
  p.A_log = {memory, DType::f32, true, false, 2, {2, 3}, {10, 1}};
  EXPECT_EQ(gradient::rounds_of_params(p, 2), 2);
  EXPECT_EQ(gradient::rounds_of_params(p, 6), 6);
  EXPECT_EQ(gradient::rounds_of_params(p, 4), 1);  // heads 2 and 3 are of two rows
  p.A_log.contiguous = true;
  EXPECT_EQ(gradient::rounds_of_params(p, 4), 4);
}

// Every batch row has slots of its own; packed sequences share one row's.
TEST(Saved, SlotsOfEveryBatchRow) {
  Problem p{};
  p.B = 3, p.T = 1000, p.H = 1, p.HV = 2, p.K = 60, p.V = 64, p.chunk = 64;
  const int64_t state = 2 * 64 * 64 * 4;
  const SavedLayout rows = saved_layout(p, DELTIC_SAVE_ALL);
  EXPECT_EQ(rows.slots, 3 * 15);
  EXPECT_EQ(int64_t(rows.bytes), int64_t(kSavedHeaderBytes) + 3 * 15 * state);
  p.packed = true;
  EXPECT_EQ(saved_layout(p, DELTIC_SAVE_ALL).slots, 15);
  EXPECT_EQ(saved_layout(p, DELTIC_SAVE_NONE).bytes, 0u);
  p.V = int64_t{1} << 40;
  EXPECT_THROW(saved_layout(p, DELTIC_SAVE_ALL), SizeOverflow);
}

// Drivers take machine code of the same major version, else the latest PTX that they can compile.
TEST(Code, OfEveryGpu) {
  constexpr std::string_view kAll = "80 86 89 90a 100 120 90-ptx";
  const std::pair<int, int> versions[] = {{75, 0},   {80, 80},   {86, 86},   {87, 86},
                                          {89, 89},  {90, 90},   {100, 100}, {103, 100},
                                          {110, 90}, {120, 120}, {121, 120}, {130, 90}};
  for (const auto& [gpu, code] : versions) {
    EXPECT_EQ(code_for(kAll, gpu), code) << gpu;
    EXPECT_EQ(code_for(kAll, gpu, {.only_ptx = true}), gpu >= 90 ? 90 : 0) << gpu;
    EXPECT_EQ(has_hopper_code(kAll, gpu), gpu == 90) << gpu;
    EXPECT_FALSE(has_hopper_code(kAll, gpu, {.only_ptx = true})) << gpu;
    EXPECT_EQ(code_for("80-ptx", gpu), gpu >= 80 ? 80 : 0) << gpu;
    EXPECT_EQ(code_for("80-ptx", gpu, {.no_ptx = true}), 0) << gpu;
    EXPECT_EQ(code_for("90a", gpu), gpu == 90 ? 90 : 0) << gpu;
    EXPECT_FALSE(has_hopper_code("80 90 90-ptx", gpu)) << gpu;
  }
  EXPECT_EQ(code_for("", 90), 0);
  EXPECT_EQ(code_text("80 90a 90-ptx"), "sm_80, sm_90a, PTX of compute_90");
}

}  // namespace
}  // namespace deltic::gpu::schedule
