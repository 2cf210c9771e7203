// What every implementation promises besides being right: same bits for any number of threads, in
// any pack, in every run; nothing from the future; checkpoints and pools that change nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "support.h"

namespace deltic::test {
namespace {

struct Subject {
  Op op;
  std::string impl;
};
void PrintTo(const Subject& s, std::ostream* out) { *out << deltic::name(s.op) << " " << s.impl; }

std::vector<Subject> subjects() {
  std::vector<Subject> all;
  for (Op op : {Op::forward, Op::decode})
    for (const std::string& impl : runnable(op))
      // cpu.sse4 is cpu.avx2's source with narrower vectors.
      if (!kSanitized || (impl != "reference" && impl != "cpu.sse4")) all.push_back({op, impl});
  return all;
}

class Property : public testing::TestWithParam<Subject> {
 protected:
  Op op() const { return GetParam().op; }
  const std::string& impl() const { return GetParam().impl; }
  Results run(const Layer& layer, const Batch& batch) const {
    return test::run(op(), impl(), layer, batch);
  }
  Results run(const Layer& layer, const Sequence& s, int32_t threads = 1) const {
    return run(layer, Batch{.sequences = {s}, .threads = threads});
  }
  // The layers a property is tried on: those the implementation takes, never none of them.
  std::vector<Layer> taken(const std::vector<Layer>& layers) const {
    std::vector<Layer> some;
    for (const Layer& layer : layers)
      if (accepts(op(), impl(), layer)) some.push_back(layer);
    EXPECT_FALSE(some.empty()) << impl() << " takes none of the layers of this test";
    if (!kSanitized) return some;
    std::vector<Layer> few;
    for (size_t i = 0; i < some.size(); i += some.size() / 3 + 1) few.push_back(some[i]);
    return few;
  }
};

constexpr GateKind kGates[] = {GateKind::none, GateKind::head, GateKind::channel};
constexpr DType kDtypes[] = {DType::f32, DType::bf16, DType::f16};

// Every gate kind and dtype; widths that are and are not multiples of a vector.
std::vector<Layer> common_layers() {
  std::vector<Layer> layers;
  for (GateKind gate : kGates) {
    for (DType dtype : kDtypes) {
      layers.push_back({.K = 64, .V = 64, .gate = gate, .dtype = dtype, .qk_l2norm = true});
      layers.push_back({.H = 1, .HV = 3, .K = 24, .V = 40, .gate = gate, .dtype = dtype});
    }
  }
  layers.push_back({.H = 1,
                    .HV = 2,
                    .K = 128,
                    .V = 48,
                    .gate = GateKind::channel,
                    .gate_values = GateValues::mixed});
  layers.push_back({.K = 17, .V = 5, .gate = GateKind::head, .gate_form = GateForm::softplus});
  layers.push_back({.K = 16,
                    .V = 100,
                    .gate = GateKind::channel,
                    .gate_form = GateForm::bounded,
                    .beta_form = BetaForm::two_sigmoid,
                    .dtype = DType::bf16,
                    .gate_dtype = DType::bf16,
                    .beta_dtype = DType::f16,
                    .state_dtype = DType::bf16,
                    .chunk = 32});
  return layers;
}

void expect_same(const SequenceResult& a, const SequenceResult& b, const std::string& what) {
  EXPECT_TRUE(a.o == b.o) << what << ": o differs";
  EXPECT_TRUE(a.final_state == b.final_state) << what << ": final state differs";
  EXPECT_TRUE(a.checkpoints == b.checkpoints) << what << ": checkpoints differ";
}
void expect_same(const Results& a, const Results& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t n = 0; n < a.size(); ++n)
    expect_same(a[n], b[n], what + ", sequence " + std::to_string(n));
}

double tolerance(const Layer& layer) { return layer.dtype == DType::f32 ? 1e-4 : 6e-3; }
// A bf16 state costs up to 2^-9 of every element.
double state_tolerance(const Layer& layer) {
  return layer.state_dtype != DType::f32 ? 6e-3 : tolerance(layer);
}

Batch mixed_lengths() {
  return {.sequences = {{.seed = 11, .length = 130},
                        {.seed = 12, .length = 0},
                        {.seed = 13, .length = 1},
                        {.seed = 14, .length = 200, .checkpoints = {0, 64, 77, 200}},
                        {.seed = 15, .length = 15}},
          .padding = 3};
}

// ---- Determinism -----------------------------------------------------------------------------

TEST_P(Property, SameBitsForAnyNumberOfThreads) {
  for (const Layer& layer : taken(common_layers())) {
    Batch batch = mixed_lengths();
    const Results one = run(layer, batch);
    for (int32_t threads : {2, 3, 5}) {
      batch.threads = threads;
      expect_same(run(layer, batch), one, name(layer) + " threads=" + std::to_string(threads));
    }
  }
}

// One sequence and one head: the work is divided inside of the sequence, in rounds of eight chunks
// or more. Panels of columns that are no multiple of the threads: some prepare the next round while
// one still carries this one's last panel.
TEST_P(Property, SameBitsForAnyNumberOfThreadsInOneSequence) {
  std::vector<Layer> layers;
  for (GateKind gate : kGates)
    for (DType dtype : kDtypes)
      layers.push_back({.H = 1, .HV = 1, .K = 64, .V = 160, .gate = gate, .dtype = dtype});
  for (const Layer& layer : taken(layers)) {
    const Sequence s{.seed = 5, .length = 1650, .checkpoints = {64, 100, 1649}};
    const Results one = run(layer, s);
    for (int32_t threads : {2, 3, 5, 3, 5}) expect_same(run(layer, s, threads), one, name(layer));
  }
}

TEST_P(Property, SameBitsInEveryRun) {
  for (const Layer& layer : taken(common_layers())) {
    Batch batch = mixed_lengths();
    batch.threads = 2;
    const Results first = run(layer, batch);
    for (int i = 0; i < 3; ++i) expect_same(run(layer, batch), first, name(layer));
  }
}

// ---- Causality -------------------------------------------------------------------------------

std::vector<Layer> gate_settings() {
  std::vector<Layer> layers;
  for (DType dtype : kDtypes) {
    layers.push_back({.H = 1, .HV = 2, .gate = GateKind::none, .dtype = dtype});
    for (GateKind gate : {GateKind::head, GateKind::channel})
      for (GateValues values :
           {GateValues::zero, GateValues::slow, GateValues::random, GateValues::deep5,
            GateValues::deep20, GateValues::deep1000, GateValues::mixed})
        layers.push_back({.H = 1, .HV = 2, .gate = gate, .gate_values = values, .dtype = dtype});
  }
  return layers;
}

TEST_P(Property, LateTokensChangeNoEarlierBit) {
  for (const Layer& layer : taken(gate_settings())) {
    const Results whole = run(layer, {.seed = 3, .length = 150, .checkpoints = {}});
    for (int64_t cut : {1, 7, 16, 17, 63, 64, 65, 100, 149}) {
      const Results changed = run(layer, {.seed = 3, .length = 150, .changed_from = cut});
      EXPECT_TRUE(prefix(changed[0].o, layer, cut) == prefix(whole[0].o, layer, cut))
          << name(layer) << ": a change at token " << cut << " is seen before it";
      EXPECT_FALSE(changed[0].o == whole[0].o) << "the change had no effect at all";
    }
  }
}

TEST_P(Property, AppendedTokensChangeNoEarlierBit) {
  for (const Layer& layer : taken(gate_settings())) {
    const Results whole = run(layer, {.seed = 4, .length = 131});
    for (int64_t length : {1, 15, 16, 17, 63, 64, 65, 130}) {
      const Results part = run(layer, {.seed = 4, .length = length});
      EXPECT_TRUE(part[0].o == prefix(whole[0].o, layer, length))
          << name(layer) << ": outputs of " << length << " tokens change when more follow";
    }
  }
}

TEST_P(Property, LateTokensChangeNoEarlierBitOfOtherChunkLengthsAndWidths) {
  std::vector<Layer> layers;
  for (int32_t chunk : {16, 32})
    for (GateValues values : {GateValues::random, GateValues::mixed})
      for (DType dtype : kDtypes)
        layers.push_back({.H = 1,
                          .HV = 1,
                          .K = 96,
                          .V = 24,
                          .gate = GateKind::channel,
                          .gate_values = values,
                          .dtype = dtype,
                          .chunk = chunk});
  for (const Layer& layer : taken(layers)) {
    const Results whole = run(layer, {.seed = 3, .length = 70});
    for (int64_t cut = 1; cut < 70; cut += 4) {
      const Results changed = run(layer, {.seed = 3, .length = 70, .changed_from = cut});
      EXPECT_TRUE(prefix(changed[0].o, layer, cut) == prefix(whole[0].o, layer, cut))
          << name(layer) << " cut " << cut;
    }
  }
}

// A token that is not finite spoils at most its own chunk and what follows, in its own head and
// sequence.
TEST_P(Property, NonFiniteTokenStaysInItsPlace) {
  std::vector<Layer> layers;
  for (GateKind gate : {GateKind::head, GateKind::channel})
    for (DType dtype : kDtypes)
      layers.push_back({.H = 2, .HV = 4, .K = 32, .V = 24, .gate = gate, .dtype = dtype});
  const std::vector<Sequence> clean{
      {.seed = 1, .length = 100}, {.seed = 2, .length = 180}, {.seed = 3, .length = 20}};
  for (const Layer& layer : taken(layers)) {
    const Results before = run(layer, {.sequences = clean, .threads = 2});
    for (char tensor : {'q', 'k', 'v', 'g', 'b'}) {
      for (double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        auto spoiled = clean;
        spoiled[1].poison = {{tensor, 140, 1, 0, value}};
        const Results after = run(layer, {.sequences = spoiled, .threads = 2});
        const std::string what = name(layer) + " " + tensor + "=" + std::to_string(value);
        expect_same(after[0], before[0], what + ": another sequence");
        expect_same(after[2], before[2], what + ": another sequence");
        EXPECT_TRUE(prefix(after[1].o, layer, 128) == prefix(before[1].o, layer, 128))
            << what << ": an earlier chunk";
        if (std::isnan(value)) {
          EXPECT_FALSE(after[1].o == before[1].o) << what << ": left no trace";
        }
        // Head 1 of q and k feeds the value heads 2 and 3.
        const bool is_key = tensor == 'q' || tensor == 'k';
        const size_t row = 24 * element_bytes(layer.dtype);
        for (size_t t = 128; t < 180; ++t) {
          for (size_t h = 0; h < 4; ++h) {
            if (is_key ? h >= 2 : h == 1) continue;
            const size_t at = (t * 4 + h) * row;
            ASSERT_EQ(std::memcmp(&after[1].o[at], &before[1].o[at], row), 0)
                << what << ": head " << h << " token " << t;
          }
        }
      }
    }
  }
}

// ---- Independence of packing -----------------------------------------------------------------

TEST_P(Property, PackingChangesNoBit) {
  for (const Layer& layer : taken(common_layers())) {
    const Sequence subject{.seed = 21, .length = 97, .checkpoints = {31, 64}};
    const Results alone = run(layer, subject);
    const Results dense = run(
        layer,
        {.sequences = {subject, {.seed = 22, .length = 97}, subject}, .dense = true, .threads = 2});
    expect_same(dense[0], alone[0], name(layer) + " dense");
    expect_same(dense[2], alone[0], name(layer) + " dense, last row");
    for (int64_t first : {1, 15, 16, 64, 300}) {
      const Results packed = run(layer, {.sequences = {{.seed = 23, .length = first},
                                                       subject,
                                                       {.seed = 24, .length = 0},
                                                       {.seed = 25, .length = 70}},
                                         .padding = 5,
                                         .threads = 3});
      expect_same(packed[1], alone[0], name(layer) + " behind " + std::to_string(first));
    }
  }
}

TEST_P(Property, OffsetDtypeChangesNoBit) {
  for (const Layer& layer : taken(common_layers())) {
    Batch batch = mixed_lengths();
    const Results wide = run(layer, batch);
    batch.index_dtype = DType::i32;
    expect_same(run(layer, batch), wide, name(layer));
  }
}

TEST_P(Property, StridesChangeNoBit) {
  for (const Layer& layer : taken(common_layers())) {
    Batch batch = mixed_lengths();
    const Results contiguous = run(layer, batch);
    batch.strided = true;
    expect_same(run(layer, batch), contiguous, name(layer) + " packed");
    Batch dense{.sequences = {{.seed = 1, .length = 66}, {.seed = 2, .length = 66}}, .dense = true};
    const Results rows = run(layer, dense);
    dense.strided = true;
    expect_same(run(layer, dense), rows, name(layer) + " dense");
  }
}

// The layouts may sum in another order; they hold the same numbers.
TEST_P(Property, StateLayoutsAreTransposes) {
  for (Layer layer : taken(common_layers())) {
    const Results kv = run(layer, mixed_lengths());
    layer.layout = StateLayout::vk;
    const Results vk = run(layer, mixed_lengths());
    for (size_t n = 0; n < kv.size(); ++n) {
      EXPECT_LE(error(vk[n].o, kv[n].o, layer.dtype), layer.dtype == DType::f32 ? 1e-5 : 4e-3)
          << name(layer);
      EXPECT_LE(error(vk[n].final_state, kv[n].final_state, layer.state_dtype),
                layer.state_dtype == DType::f32 ? 1e-5 : 4e-3)
          << name(layer);
    }
    Batch strided = mixed_lengths();
    strided.strided = true;
    strided.pool = Pool::moved;
    expect_same(run(layer, strided), vk, name(layer) + " strided, in a pool");
  }
}

// ---- States ----------------------------------------------------------------------------------

TEST_P(Property, ResumingAtAChunkGivesTheSameBits) {
  for (Layer layer : taken(common_layers())) {
    if (layer.state_dtype != DType::f32) continue;
    if (impl() == "reference") layer.state_dtype = DType::f64;  // its own state is fp64
    const Results whole = run(layer, {.seed = 8, .length = 230, .checkpoints = {64, 128, 192}});
    for (size_t i = 0; i < 3; ++i) {
      const int64_t at = 64 * static_cast<int64_t>(i + 1);
      const Results rest = run(
          layer, {.seed = 8, .length = 230 - at, .first = at, .initial = whole[0].checkpoints[i]});
      const auto head = prefix(whole[0].o, layer, at);
      EXPECT_TRUE(std::equal(rest[0].o.begin(), rest[0].o.end(),
                             whole[0].o.begin() + static_cast<std::ptrdiff_t>(head.size())))
          << name(layer) << ": o behind token " << at;
      EXPECT_TRUE(rest[0].final_state == whole[0].final_state) << name(layer) << " from " << at;
    }
  }
}

TEST_P(Property, CheckpointsChangeNoOtherBit) {
  for (const Layer& layer : taken(common_layers())) {
    const Results without = run(layer, {.seed = 8, .length = 140});
    const Results with =
        run(layer,
            {.seed = 8, .length = 140, .checkpoints = {0, 1, 15, 16, 63, 64, 65, 100, 139, 140}});
    EXPECT_TRUE(with[0].o == without[0].o) << name(layer);
    EXPECT_TRUE(with[0].final_state == without[0].final_state) << name(layer);
    EXPECT_TRUE(with[0].checkpoints.back() == without[0].final_state)
        << name(layer) << ": a checkpoint at the end is the final state";
  }
}

TEST_P(Property, CheckpointIsTheFinalStateOfThePrefix) {
  for (const Layer& layer : taken(common_layers())) {
    const std::vector<int64_t> tokens{1, 3, 16, 40, 64, 65, 90, 128};
    const Results whole = run(layer, {.seed = 9, .length = 130, .checkpoints = tokens});
    for (size_t i = 0; i < tokens.size(); ++i) {
      const Results part = run(layer, {.seed = 9, .length = tokens[i]});
      EXPECT_LE(error(whole[0].checkpoints[i], part[0].final_state, layer.state_dtype),
                state_tolerance(layer))
          << name(layer) << ": after " << tokens[i] << " tokens";
    }
  }
}

TEST_P(Property, CheckpointZeroIsTheInitialState) {
  for (const Layer& layer : taken(common_layers())) {
    const Results drawn =
        run(layer, {.sequences = {{.seed = 9, .length = 70, .checkpoints = {0}},
                                  {.seed = 10, .length = 0, .checkpoints = {0}}}});
    // The state of an empty sequence is its initial state.
    EXPECT_TRUE(drawn[1].checkpoints[0] == drawn[1].final_state) << name(layer);
    Layer from_zero = layer;
    from_zero.has_initial = false;
    const Results zero = run(from_zero, {.seed = 9, .length = 70, .checkpoints = {0}});
    for (double x : numbers(zero[0].checkpoints[0], layer.state_dtype)) ASSERT_EQ(x, 0.0);
    const Results given = run(
        layer, {.seed = 9, .length = 5, .initial = drawn[0].checkpoints[0], .checkpoints = {0}});
    EXPECT_TRUE(given[0].checkpoints[0] == drawn[0].checkpoints[0]) << name(layer);
  }
}

TEST_P(Property, StateInPlaceEqualsOutOfPlace) {
  for (const Layer& layer : taken(common_layers())) {
    Batch batch = mixed_lengths();
    batch.threads = 2;
    const Results apart = run(layer, batch);
    batch.state_in_place = true;
    expect_same(run(layer, batch), apart, name(layer) + " final_state == initial_state");
    batch.state_in_place = false;
    batch.pool = Pool::in_place;
    expect_same(run(layer, batch), apart, name(layer) + " pool in place");
    batch.pool = Pool::moved;
    batch.index_dtype = DType::i32;
    expect_same(run(layer, batch), apart, name(layer) + " pool, other slots");
    batch.pool = Pool::none;
    batch.want_final = false;
    const Results no_final = run(layer, batch);
    for (size_t n = 0; n < apart.size(); ++n)
      EXPECT_TRUE(no_final[n].o == apart[n].o) << name(layer) << " without a final state";
  }
}

TEST_P(Property, PoolFromZero) {
  for (Layer layer : taken(common_layers())) {
    layer.has_initial = false;
    Batch batch = mixed_lengths();
    const Results apart = run(layer, batch);
    batch.pool = Pool::moved;
    expect_same(run(layer, batch), apart, name(layer));
  }
}

TEST_P(Property, AbsentStateIsZeroState) {
  for (Layer layer : taken(common_layers())) {
    const std::vector<double> zeros(static_cast<size_t>(layer.HV * layer.K * layer.V), 0.0);
    const Results given =
        run(layer, {.seed = 6, .length = 100, .initial = state_bits(zeros, layer.state_dtype)});
    layer.has_initial = false;
    expect_same(run(layer, {.seed = 6, .length = 100}), given, name(layer));
  }
}

// Scaling by a power of two is exact: o must scale with it.
TEST_P(Property, ScaleIsAFactorOfO) {
  for (Layer layer : taken(common_layers())) {
    layer.scale = 0.5f;
    const Results half = run(layer, {.seed = 6, .length = 100});
    layer.scale = 2.0f;
    const Results twice = run(layer, {.seed = 6, .length = 100});
    const auto a = numbers(half[0].o, layer.dtype), b = numbers(twice[0].o, layer.dtype);
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      difference += (4 * a[i] - b[i]) * (4 * a[i] - b[i]);
      size += b[i] * b[i];
    }
    EXPECT_LE(std::sqrt(difference / size), tolerance(layer)) << name(layer);
    EXPECT_TRUE(half[0].final_state == twice[0].final_state) << name(layer);
  }
}

// ---- Against the oracle ----------------------------------------------------------------------

TEST_P(Property, AgreesWithTheOracleOnEveryLength) {
  for (const Layer& layer : taken(common_layers())) {
    Batch batch;
    for (int64_t length : {1, 0, 4, 15, 16, 17, 63, 64, 65, 130})
      batch.sequences.push_back({.seed = 31 + uint64_t(length), .length = length});
    const Results got = run(layer, batch), want = test::run(op(), "reference", layer, batch);
    for (size_t n = 0; n < got.size(); ++n) {
      const std::string what = name(layer) + " T=" + std::to_string(batch.sequences[n].length);
      EXPECT_LE(error(got[n].o, want[n].o, layer.dtype), tolerance(layer)) << what;
      EXPECT_LE(error(got[n].final_state, want[n].final_state, layer.state_dtype),
                state_tolerance(layer))
          << what;
    }
  }
}

// Gates above 0 are right as far as the contract goes: sums below 8 in a chunk.
TEST_P(Property, GrowingGatesAgreeWithTheOracle) {
  std::vector<Layer> layers;
  for (GateKind gate : {GateKind::head, GateKind::channel})
    for (DType dtype : kDtypes)
      layers.push_back(
          {.K = 32, .V = 32, .gate = gate, .gate_values = GateValues::growing, .dtype = dtype});
  for (const Layer& layer : taken(layers)) {
    const Batch batch{.sequences = {{.seed = 1, .length = 4}, {.seed = 2, .length = 130}}};
    const Results got = run(layer, batch), want = test::run(op(), "reference", layer, batch);
    for (size_t n = 0; n < got.size(); ++n) {
      EXPECT_LE(error(got[n].o, want[n].o, layer.dtype), tolerance(layer)) << name(layer);
      EXPECT_LE(error(got[n].final_state, want[n].final_state, layer.state_dtype), tolerance(layer))
          << name(layer);
    }
  }
}

TEST_P(Property, LongSequenceAgreesWithTheOracle) {
  std::vector<Layer> layers;
  for (GateKind gate : kGates)
    for (DType dtype : {DType::f32, DType::bf16})
      layers.push_back({.H = 1,
                        .HV = 2,
                        .K = 32,
                        .V = 32,
                        .gate = gate,
                        .gate_values = GateValues::slow,
                        .dtype = dtype});
  for (const Layer& layer : taken(layers)) {
    const Batch batch{.sequences = {{.seed = 2, .length = 4097}}, .threads = 2};
    const Results got = run(layer, batch), want = test::run(op(), "reference", layer, batch);
    EXPECT_LE(error(got[0].o, want[0].o, layer.dtype), tolerance(layer)) << name(layer);
    EXPECT_LE(error(got[0].final_state, want[0].final_state, DType::f32), tolerance(layer))
        << name(layer);
  }
}

TEST_P(Property, AdversarialInputsStayFinite) {
  std::vector<Layer> layers;
  for (DType dtype : kDtypes)
    for (KeyValues keys :
         {KeyValues::random, KeyValues::repeated, KeyValues::correlated, KeyValues::zero_rows})
      for (double beta : {0.0, 1.0, 2.0})
        for (GateKind gate : kGates)
          for (GateValues values : {GateValues::zero, GateValues::deep20, GateValues::mixed})
            for (bool norm : {false, true})
              layers.push_back({.H = 1,
                                .HV = 1,
                                .K = 32,
                                .V = 16,
                                .gate = gate,
                                .gate_values = values,
                                .beta_value = beta,
                                .keys = keys,
                                .dtype = dtype,
                                .qk_l2norm = norm});
  for (const Layer& layer : taken(layers)) {
    if (layer.gate == GateKind::none && layer.gate_values != GateValues::zero) continue;
    const Results r = run(layer, {.seed = 41, .length = 130});
    EXPECT_TRUE(all_finite(r[0].o, layer.dtype)) << name(layer);
    EXPECT_TRUE(all_finite(r[0].final_state, DType::f32)) << name(layer);
  }
}

// Keys of zero write nothing; queries of zero read nothing.
TEST_P(Property, ZeroRowsWriteAndReadNothing) {
  std::vector<Layer> layers;
  for (DType dtype : kDtypes) {
    for (bool norm : {false, true}) {
      layers.push_back({.H = 1,
                        .HV = 2,
                        .gate = GateKind::none,
                        .keys = KeyValues::zero_rows,
                        .dtype = dtype,
                        .qk_l2norm = norm});
    }
  }
  for (const Layer& layer : taken(layers)) {
    const Results r = run(layer, {.seed = 7, .length = 10, .checkpoints = {2, 3}});
    const auto o = numbers(r[0].o, layer.dtype);
    for (size_t i = 2 * 64; i < 3 * 64; ++i) ASSERT_EQ(o[i], 0.0) << "token 2 is a zero row";
    EXPECT_LE(error(r[0].checkpoints[1], r[0].checkpoints[0], DType::f32), tolerance(layer) / 10)
        << name(layer);
  }
}

// beta = 0 leaves only the decay.
TEST_P(Property, BetaZeroOnlyDecays) {
  std::vector<Layer> layers;
  for (DType dtype : kDtypes) {
    layers.push_back(
        {.H = 1, .HV = 2, .gate_values = GateValues::deep1000, .beta_value = 0.0, .dtype = dtype});
  }
  for (const Layer& layer : taken(layers)) {
    const Results r = run(layer, {.seed = 7, .length = 70});
    for (double x : numbers(r[0].final_state, DType::f32)) ASSERT_EQ(x, 0.0) << name(layer);
    for (double x : numbers(r[0].o, layer.dtype)) ASSERT_EQ(x, 0.0) << name(layer);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Property, testing::ValuesIn(subjects()), [](const auto& row) {
  return std::string(deltic::name(row.param.op)) + "_" + identifier(row.param.impl);
});

// ---- Both forms together ---------------------------------------------------------------------

// Prefill and then decode token by token is one pass.
class Together : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Together, PrefillThenDecodeIsOnePass) {
  const auto& [prefill, step] = GetParam();
  int number = 0;
  for (const Layer& layer : common_layers()) {
    if (!accepts(Op::forward, prefill, layer) || !accepts(Op::decode, step, layer)) continue;
    if (layer.state_dtype != DType::f32) continue;
    if (kSanitized && number++ > 0) continue;
    constexpr int64_t kWhole = 110, kPrompt = 90;
    const Sequence all{.seed = 51, .length = kWhole};
    const Results whole = run(Op::forward, prefill, layer, {.sequences = {all}});
    Results r = run(Op::forward, prefill, layer, {.sequences = {{.seed = 51, .length = kPrompt}}});
    std::vector<uint8_t> o = r[0].o, state = r[0].final_state;
    for (int64_t t = kPrompt; t < kWhole;) {
      const int64_t tokens = t % 3 == 0 ? 4 : 1;  // one or a few at a time
      const int64_t count = std::min(tokens, kWhole - t);
      r = run(Op::decode, step, layer,
              {.sequences = {{.seed = 51, .length = count, .first = t, .initial = state}},
               .state_in_place = true});
      o.insert(o.end(), r[0].o.begin(), r[0].o.end());
      state = r[0].final_state;
      t += count;
    }
    // Two roundings of o meet in half precision.
    const double allowed = layer.dtype == DType::f32 ? 1e-4 : 8e-3;
    EXPECT_LE(error(o, whole[0].o, layer.dtype), allowed) << name(layer);
    EXPECT_LE(error(state, whole[0].final_state, DType::f32), allowed) << name(layer);
  }
}
INSTANTIATE_TEST_SUITE_P(All, Together,
                         testing::Combine(testing::ValuesIn(runnable(Op::forward)),
                                          testing::ValuesIn(runnable(Op::decode))),
                         [](const auto& row) {
                           return identifier(std::get<0>(row.param)) + "_then_" +
                                  identifier(std::get<1>(row.param));
                         });

// ---- The recurrent form alone ----------------------------------------------------------------

class Decode : public testing::TestWithParam<std::string> {};

TEST_P(Decode, VectorBetaAndValueGateAgreeWithTheOracle) {
  std::vector<Layer> layers;
  for (GateKind gate : kGates)
    for (DType dtype : kDtypes)
      for (StateLayout layout : {StateLayout::kv, StateLayout::vk})
        layers.push_back({.K = 32,
                          .V = 40,
                          .gate = gate,
                          .beta = BetaKind::value,
                          .gv = true,
                          .dtype = dtype,
                          .layout = layout});
  for (const Layer& layer : layers) {
    if (!accepts(Op::decode, GetParam(), layer)) continue;
    const Batch batch{.sequences = {{.seed = 1, .length = 1}, {.seed = 2, .length = 9}}};
    const Results got = run(Op::decode, GetParam(), layer, batch);
    const Results want = run(Op::decode, "reference", layer, batch);
    for (size_t n = 0; n < 2; ++n) {
      EXPECT_LE(error(got[n].o, want[n].o, layer.dtype), tolerance(layer)) << name(layer);
      EXPECT_LE(error(got[n].final_state, want[n].final_state, DType::f32), 1e-4) << name(layer);
    }
  }
}

// Splitting a decode into single steps changes no bit: the recurrent form has no chunks, and a
// state of 16 bits is rounded after every token.
TEST_P(Decode, StepsAreOneCall) {
  std::vector<Layer> layers = common_layers();
  for (const Layer& layer : common_layers()) {
    layers.push_back(layer), layers.back().layout = StateLayout::vk;
    for (DType state : {DType::bf16, DType::f16})
      layers.push_back(layers.back()), layers.back().state_dtype = state;
  }
  for (Layer layer : layers) {
    if (!accepts(Op::decode, GetParam(), layer)) continue;
    if (GetParam() == "reference" && layer.state_dtype == DType::f32) {
      layer.state_dtype = DType::f64;  // its own state is fp64
    }
    const Results whole =
        run(Op::decode, GetParam(), layer, {.sequences = {{.seed = 3, .length = 8}}});
    std::vector<uint8_t> o, state;
    for (int64_t t = 0; t < 8; ++t) {
      const Results r =
          run(Op::decode, GetParam(), layer,
              {.sequences = {{.seed = 3, .length = 1, .first = t, .initial = state}}});
      o.insert(o.end(), r[0].o.begin(), r[0].o.end());
      state = r[0].final_state;
    }
    EXPECT_TRUE(o == whole[0].o) << name(layer);
    EXPECT_TRUE(state == whole[0].final_state) << name(layer);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Decode, testing::ValuesIn(runnable(Op::decode)),
                         [](const auto& row) { return identifier(row.param); });

}  // namespace
}  // namespace deltic::test
