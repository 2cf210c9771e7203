// The case grammar: what is read is what is printed, and errors name the key.
#include <gtest/gtest.h>

#include "cases/case.h"

namespace deltic::cases {
namespace {

std::string error_of(std::string_view line) {
  try {
    parse(line);
  } catch (const CaseError& e) {
    return e.what();
  }
  return "";
}

TEST(Grammar, ReadsWhatItPrints) {
  const auto all = read_folder(DELTIC_CASES_FOLDER);
  ASSERT_GT(all.size(), 500u);
  for (const SourcedCase& c : all) {
    const std::string line = canonical(c.spec);
    EXPECT_TRUE(parse(line) == c.spec) << line;
    EXPECT_EQ(canonical(parse(line)), line);
    EXPECT_TRUE(parse(brief(c.spec)) == c.spec) << brief(c.spec);
  }
}

TEST(Grammar, ReadsAFullLine) {
  const Case c = parse(
      "forward gate=channel form=softplus seqs=1000,0,3096 H=16 HV=32 K=128 V=96 dtype=bf16 "
      "gdtype=f16 beta=sigmoid l2norm=1 state=vk split=off seed=7");
  EXPECT_EQ(c.op, Op::forward);
  EXPECT_EQ(c.gate, Gate::channel);
  EXPECT_EQ(c.form, GateForm::softplus);
  EXPECT_EQ(c.seqs, (std::vector<int64_t>{1000, 0, 3096}));
  EXPECT_EQ(c.H, 16);
  EXPECT_EQ(c.HV, 32);
  EXPECT_EQ(c.K, 128);
  EXPECT_EQ(c.V, 96);
  EXPECT_EQ(c.dtype, DType::bf16);
  EXPECT_EQ(c.gdtype, DType::f16);
  EXPECT_EQ(c.beta, Beta::sigmoid);
  EXPECT_TRUE(c.l2norm);
  EXPECT_EQ(c.state, StateLayout::vk);
  EXPECT_EQ(c.split, Split::off);
  EXPECT_EQ(c.seed, 7u);
  EXPECT_EQ(c.num_sequences(), 3);
  EXPECT_EQ(c.num_tokens(), 4096);
  EXPECT_EQ(c.sequence_begin(2), 1000);
  EXPECT_EQ(c.longest(), 3096);
}

TEST(Grammar, ReadsABackwardLine) {
  const Case c = parse("backward gate=channel form=bounded seqs=3,0 dtype=bf16 dfinal=0 save=all");
  EXPECT_EQ(c.op, Op::backward);
  EXPECT_FALSE(c.is_block());
  EXPECT_EQ(c.save, Save::all);
  EXPECT_TRUE(c.d_o);
  EXPECT_FALSE(c.dfinal);
  EXPECT_FALSE(c.init);
  EXPECT_EQ(parse("backward").save, Save::states) << "what training does";
  EXPECT_EQ(parse("forward").save, Save::none);
  EXPECT_FALSE(value_of(parse("forward"), "save"));
  EXPECT_EQ(value_of(parse("backward do=0"), "do"), "0");
  EXPECT_TRUE(matches(c, "op=backward save=all"));
  EXPECT_FALSE(matches(c, "save=states"));
}

TEST(Grammar, ReadsGradientsOfBlocksAndConv) {
  const Case c = parse("kkt_backward gate=channel seqs=3,0 dtype=bf16 odtype=f16");
  EXPECT_EQ(c.op, Op::kkt);
  EXPECT_TRUE(c.gradient);
  EXPECT_TRUE(c.is_block());
  EXPECT_TRUE(c.is_gradient());
  EXPECT_EQ(value_of(c, "op"), "kkt_backward");
  EXPECT_TRUE(matches(c, "op=kkt_backward"));
  EXPECT_FALSE(matches(c, "op=kkt"));
  EXPECT_FALSE(parse("kkt") == parse("kkt_backward"));
  const Case conv = parse("conv_backward W=1 D=3 act=silu init=1");
  EXPECT_EQ(conv.activation, Activation::silu);
  EXPECT_FALSE(conv.is_block());
  EXPECT_EQ(conv.S, 1) << "a state has room for one input";
  EXPECT_EQ(parse("conv W=6").S, 5);
}

TEST(Grammar, OrderAndBlanksDoNotMatter) {
  EXPECT_TRUE(parse("forward K=32 gate=none  V=16") == parse("  forward V=16 gate=none K=32 "));
}

TEST(Grammar, ValueHeadsFollowHeads) {
  EXPECT_EQ(parse("forward H=8").HV, 8);
  EXPECT_EQ(parse("forward H=8 HV=16").HV, 16);
}

TEST(Grammar, ErrorsNameTheKey) {
  const struct {
    const char* line;
    const char* names;
  } rows[] = {
      {"", "operation"},
      {"sideways K=32", "operation"},
      {"forward K", "line"},
      {"forward colour=red", "colour"},
      {"forward K=0", "case: K:"},
      {"forward K=x", "case: K:"},
      {"forward K=32x", "case: K:"},
      {"forward K=32 K=64", "case: K: expected once"},
      {"forward gate=open", "case: gate: expected none|head|channel, got 'open'"},
      {"forward form=linear", "case: form:"},
      {"forward dtype=f64", "case: dtype:"},
      {"forward dtype=int8", "case: dtype:"},
      {"forward seqs=1,-2", "case: seqs:"},
      {"forward seqs=1,,2", "case: seqs:"},
      {"forward seqs=5 dense=1x5", "seqs"},
      {"forward dense=5", "case: dense:"},
      {"forward dense=5x", "case: dense:"},
      {"forward pad=3", "case: pad:"},
      {"forward chunk=48", "case: chunk: expected 16|32|64, got '48'"},
      {"forward split=half", "case: split:"},
      {"forward l2norm=yes", "case: l2norm:"},
      {"forward gv=1", "case: gv:"},
      {"forward betavec=1", "case: betavec:"},
      {"forward pool=tokens", "pool"},
      {"forward lower_bound=-3", "case: lower_bound:"},
      {"forward form=bounded lower_bound=3", "case: lower_bound: expected a number below 0"},
      {"forward H=2 HV=3", "HV"},
      {"forward seed=-1", "case: seed:"},
      {"inverse K=16 gate=head", "case: gate:"},
      {"forward reverse=1", "case: reverse:"},
      {"forward final=inplace", "final"},
      {"forward save=states", "case: save: expected backward as the operation"},
      {"decode dfinal=1", "case: dfinal:"},
      {"forward do=1", "case: do:"},
      {"backward save=some", "case: save: expected none|states|all, got 'some'"},
      {"backward final=1", "case: final:"},
      {"backward pool=move", "case: pool:"},
      {"backward ckpt=3", "case: ckpt:"},
      {"backward gv=1", "case: gv:"},
      {"backward sdtype=bf16", "case: sdtype: expected init=1"},
      {"backward dfinal=0 state=vk", "case: state: expected a state"},
      {"scores_inverse_backward", "case: operation: expected one of forward|"},
      {"forward K={16,32}", "case: line: expected one case, got braces, which stand for several"},
      {"kkt_backward rstd=1", "case: rstd: expected l2norm as the operation"},
      {"l2norm_backward rstd=1", "case: rstd: expected an operation that is no gradient"},
      {"inverse result=1", "case: result: expected inverse_backward as the operation"},
      {"conv K=64", "case: K: expected another operation than conv"},
      {"conv W=9", "case: W: expected a whole number from 1 to 8, got '9'"},
      {"conv W=4 S=2", "case: S: expected at least W - 1 = 3, got 2"},
      {"conv final=0 S=4", "case: S: expected a state"},
      {"conv dtype=f16 sdtype=bf16", "case: sdtype: expected f32 or dtype's f16, got 'bf16'"},
      {"conv strided=expand", "case: strided: expected 0, 1 or pages for conv"},
      {"conv pool=tokens",
       "case: pool: expected decode or step as the operation for tokens, got 'conv'"},
      {"conv_backward pool=move", "case: pool:"},
      {"conv act=relu", "case: act: expected none|silu|sigmoid, got 'relu'"},
      {"step pool=drafts dense=1x3 W=2 tree=1",
       "case: tree: expected 0 for step with W above 1, got 1"},
      {"conv act=sigmoid", "case: act: expected none or silu for conv, got 'sigmoid'"},
      {"rmsnorm z=0 act=silu", "case: act: expected conv, step or rmsnorm with z"},
      {"rmsnorm eps=-1", "case: eps: expected a number of at least 0 or default, got '-1'"},
      {"forward D=3", "case: D: expected conv as the operation"},
      {"forward layers=2", "case: layers: expected move or commit as the operation"},
      {"move odtype=bf16", "case: odtype: expected a building block, conv_backward, move with "},
      {"step gate=head init=0 final=0", "case: final: expected a state for step"},
      {"step norm=sigmoid z=0", "case: norm: expected none or off without z, got 'sigmoid'"},
      {"step z=0", "case: z: expected rmsnorm, or step with a norm"},
      {"step act=sigmoid", "case: act: expected none or silu for step, got 'sigmoid'"},
      {"step windows=f16", "case: windows: expected f32 or dtype's f32, got 'f16'"},
      {"step dense=2x4 pool=drafts S=4",
       "case: S: expected at least W - 2 and the longest length, "},
      {"step keys=zero", "case: keys: expected an operation with keys"},
      {"move transpose=1", "case: transpose: expected writepool=1"},
      {"move pool=inplace", "case: pool: expected move, start, peek, mixed or fork for move, got "},
      {"move HV=4 whead=2", "case: whead: expected the heads that are read, or none of them"},
      {"move H=2", "case: H: expected"},
      {"move dtype=bf16",
       "case: dtype: expected another operation than cumsum, gate, move and commit"},
  };
  for (const auto& row : rows) {
    const std::string text = error_of(row.line);
    EXPECT_NE(text, "") << "'" << row.line << "' was accepted";
    EXPECT_NE(text.find(row.names), std::string::npos) << row.line << "\n  says: " << text;
  }
}

TEST(Grammar, BracesMultiply) {
  EXPECT_EQ(expand("forward K={16,32} dtype={f32,bf16}").size(), 4u);
  EXPECT_EQ(expand("forward K=16").size(), 1u);
  EXPECT_EQ(expand("forward seqs={1,2|3}").size(), 2u);
  EXPECT_EQ(expand("a{1,2}b{3|4,5}{x,y}c"),
            (std::vector<std::string>{"a1b3xc", "a1b3yc", "a1b4,5xc", "a1b4,5yc", "a2b3xc",
                                      "a2b3yc", "a2b4,5xc", "a2b4,5yc"}));
  EXPECT_THROW(expand("forward K={16,32"), CaseError);
}

TEST(Grammar, HugeProductsAreRefusedWithTheirCount) {
  std::string line = "forward";
  for (int i = 0; i < 12; ++i) line += " K={1,2,3,4,5,6,7,8,9,10}";
  try {
    expand(line);
    FAIL() << "no error";
  } catch (const CaseError& e) {
    EXPECT_STREQ(e.what(),
                 "case: line: expected at most 100000 cases from its braces, got 1000000000000");
  }
}

TEST(Grammar, FilesNameTheLine) {
  try {
    read_text("# fine\n\nforward K=16\nforward K=none # bad\n", "some.txt");
    FAIL() << "no error";
  } catch (const CaseError& e) {
    EXPECT_NE(std::string(e.what()).find("some.txt:4:"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("K"), std::string::npos) << e.what();
  }
  EXPECT_THROW(read_file("/does/not/exist.txt"), CaseError);
}

// Who has not seen a line yet is shown one that can be read.
TEST(Grammar, ErrorsShowALine) {
  for (const char* line : {"", "  ", "hello", "{", "forward K={16,32}", "forward fast"}) {
    const std::string text = error_of(line), start = " (a line: ";
    const size_t at = text.find(start);
    ASSERT_NE(at, std::string::npos) << "'" << line << "' says: " << text;
    const size_t begin = at + start.size();
    EXPECT_EQ(error_of(text.substr(begin, text.size() - begin - 1)), "") << text;
  }
}

TEST(Grammar, Filters) {
  const Case c = parse("forward gate=channel K=32 V=48 dtype=bf16");
  EXPECT_TRUE(matches(c, ""));
  EXPECT_TRUE(matches(c, "gate=channel"));
  EXPECT_TRUE(matches(c, "gate=channel dtype=bf16"));
  EXPECT_FALSE(matches(c, "gate=channel dtype=f32"));
  EXPECT_FALSE(matches(c, "K=3"));
  EXPECT_TRUE(matches(c, "forward"));
  EXPECT_FALSE(matches(c, "decode"));
  // A value that the key never has matches nothing, which must not go unsaid.
  const struct {
    const char* filter;
    const char* text;
  } rows[] = {
      {"gate=foo", "filter: gate: expected one of none|head|channel, got 'foo'"},
      {"op=forwards", "filter: op: expected one of forward|decode|backward|"},
      {"K=64 dtype=fp32", "filter: dtype: expected one of f32|bf16|f16, got 'fp32'"},
      {"l2norm=yes", "filter: l2norm: expected one of 0|1, got 'yes'"},
      {"gates=fast", "filter: gates: expected one of random|slow|softplus|mixed|zero|number"},
      {"K=wide", "filter: K: expected a whole number from 1 to 65536, got 'wide'"},
      {"colour=red", "filter: key: expected one of op gate "},
  };
  for (const auto& row : rows) {
    try {
      check_filter(row.filter);
      ADD_FAILURE() << row.filter << " was accepted";
    } catch (const CaseError& e) {
      EXPECT_EQ(std::string(e.what()).find(row.text), 0u) << e.what();
    }
  }
  for (const char* filter :
       {"", "forward", "op=kkt_backward gate=head", "K=64 seqs=1,2", "gates=-1"})
    EXPECT_NO_THROW(check_filter(filter)) << filter;
}

TEST(Grammar, HelpNamesEveryKeyOfALine) {
  const std::string help = grammar_help();
  for (const char* op : {"forward", "decode", "cumsum", "gate", "l2norm", "kkt", "scores",
                         "inverse", "wy", "scores_inverse", "backward form=softplus init=1", "conv",
                         "conv_backward init=1", "inverse_backward", "wy_backward"}) {
    const std::string line = canonical(parse(op));
    for (size_t at = line.find('='); at != std::string::npos; at = line.find('=', at + 1)) {
      const size_t begin = line.rfind(' ', at) + 1;
      const std::string key = line.substr(begin, at - begin);
      EXPECT_NE(help.find(key), std::string::npos) << key;
    }
  }
}

TEST(Grammar, StandardInputs) {
  EXPECT_TRUE(is_standard(parse("forward gate=head")));
  EXPECT_TRUE(is_standard(parse("forward gate=channel gates=slow")));
  EXPECT_FALSE(is_standard(parse("forward gate=head gates=mixed")));
  EXPECT_FALSE(is_standard(parse("forward keys=repeated")));
  EXPECT_FALSE(is_standard(parse("forward beta=2sigmoid")));
}

}  // namespace
}  // namespace deltic::cases
