// The rows of the suites.
#include "suites.h"

namespace deltic::cli {

const char* name_of(Baseline b) {
  constexpr const char* kNames[] = {"recurrence", "copy",   "one thread",
                                    "forward",    "others", "ours"};
  return kNames[static_cast<int>(b)];
}

Baseline default_baseline(const cases::Case& c) {
  return c.op == Op::forward    ? Baseline::recurrence
         : c.op == Op::backward ? Baseline::forward
                                : Baseline::copy;
}

namespace {

// Of a GPU: sizes that fill one.
std::vector<SuiteRow> gpu_suites() {
  std::vector<SuiteRow> rows;
  const auto add = [&](const char* suite, const std::string& label, const std::string& line) {
    const cases::Case c = cases::parse(line);
    rows.push_back({suite, label, c, Baseline::copy, 0, DeviceType::cuda});
  };
  const std::string wide = " dtype=bf16 K=128 V=128 ";
  const auto text = [](int n) { return std::to_string(n); };
  for (const char* gate : {"head", "channel"}) {
    for (const int length : {256, 1024, 4096, 16384, 65536, 131072}) {
      add("growth", std::string(gate[0] == 'h' ? "GDN" : "KDA") + " forward T=" + text(length),
          "forward gate=" + std::string(gate) + " dense=1x" + text(length) + " H=16 final=0" +
              wide);
    }
  }
  // blocks: pieces of a chunk alone, against a copy of as many bytes.
  for (const int heads : {16, 64}) {
    for (const int width : {16, 32, 64}) {
      const std::string sizes = " H=" + text(heads), chunk = " chunk=" + text(width);
      for (const char* type : {"f32", "bf16"}) {
        add("blocks", "inverse " + text(width) + sizes + " " + type,
            "inverse dense=8x4096 HV=" + text(heads) + chunk + " dtype=" + type +
                " odtype=" + type);
      }
      add("blocks", "beta k k^T " + text(width) + sizes + " bf16",
          "kkt gate=none dense=8x4096 K=128 dtype=bf16 odtype=bf16" + sizes + chunk);
    }
  }
  // neighbours: what a layer has around the delta rule, as wide as Qwen3-Next's, against a copy.
  const std::string conv = " D=8192 W=4 act=silu bias=0 dtype=bf16 wdtype=bf16 ";
  add("neighbours", "convolution T=8192", "conv dense=1x8192 final=0" + conv);
  add("neighbours", "convolution, 8 packed sequences",
      "conv seqs=4096,1024,1024,512,512,512,256,256 sdtype=bf16 init=1" + conv);
  add("neighbours", "convolution T=8192 fp32",
      "conv dense=1x8192 D=8192 W=4 act=silu bias=0 final=0 dtype=f32");
  add("neighbours", "its gradient T=8192",
      "conv_backward dense=1x8192 dfinal=0 odtype=bf16" + conv);
  const std::string norm = " H=64 K=128 act=silu dtype=bf16 wdtype=bf16 odtype=bf16";
  add("neighbours", "gated norm T=8192", "rmsnorm dense=1x8192" + norm);
  add("neighbours", "its gradient T=8192, norm", "rmsnorm_backward dense=1x8192" + norm);
  add("neighbours", "gated norm, 256 tokens", "rmsnorm dense=256x1" + norm);
  for (const char* state : {"kv", "vk"}) {
    const std::string layout = std::string(" sdtype=bf16 state=") + state;
    add("neighbours", std::string("its step, 256 sequences ") + state,
        "conv dense=256x1 pool=inplace" + layout + conv);
    add("neighbours", std::string("its step, 64 times 4 drafts ") + state,
        "conv dense=64x4 pool=drafts S=7" + layout + conv);
  }
  // States of 64 sequences from pool to pool.
  const std::string move = "move dense=64x1 HV=32 K=128 V=128 writepool=1 ";
  add("neighbours", "states moved, fp32", move);
  add("neighbours", "states moved to the other layout, fp32", move + "transpose=1");
  add("neighbours", "states moved, fp32 to bf16", move + "odtype=bf16");
  add("neighbours", "states moved to the other layout, bf16",
      move + "transpose=1 sdtype=bf16 odtype=bf16");
  // options: norm, gate and sigmoid inside, and the same shape with all of them done before.
  const auto add_pair = [&](const std::string& label, const std::string& shape,
                            const std::string& inside, const std::string& before) {
    add("options", label + ", inside", "forward " + shape + inside);
    rows.back().baseline = Baseline::ours;
    rows.back().other = cases::parse("forward " + shape + before);
    rows.back().other_name = "computed before";
    add("options", label + ", before", "forward " + shape + before);
  };
  for (const int heads : {96, 8}) {
    add_pair("KDA T=8192 H=" + text(heads),
             "gate=channel seqs=8192 gdtype=bf16 H=" + text(heads) + wide,
             "form=bounded beta=sigmoid l2norm=1", "");
  }
  add_pair("GDN T=8192 H=16 HV=32", "gate=head seqs=8192 H=16 HV=32" + wide,
           "form=softplus gates=softplus beta=sigmoid l2norm=1", "gates=softplus");
  // Drafted tokens of which no state is kept.
  const std::string step = " form=softplus gates=softplus beta=sigmoid l2norm=1 state=vk" + wide;
  for (const char* type : {"f32", "bf16"}) {
    add("decode_tokens",
        std::string("GDN B=64 ") + (type[0] == 'f' ? "fp32" : type) + " V-first 8 tokens, not kept",
        "decode dense=64x8 gate=head H=16 HV=32 init=1 final=0 sdtype=" + std::string(type) + step);
  }
  // step: what a layer does between its projections, and its decode alone.
  for (const char* gate : {"head", "channel"}) {
    const bool is_gdn = gate[0] == 'h';
    for (const int batch : {1, 64, 256}) {
      for (const int tokens : {1, 4}) {
        for (const char* type : {"f32", "bf16"}) {
          const std::string rule =
              " dense=" + text(batch) + "x" + text(tokens) + " gate=" + gate +
              " H=16 HV=32 pool=identity betadtype=bf16 gdtype=bf16 sdtype=" + type + step;
          add("step",
              std::string(is_gdn ? "GDN" : "KDA") + " B=" + text(batch) + " T=" + text(tokens) +
                  (type[0] == 'f' ? " fp32" : " bf16"),
              std::string("step W=4 bias=0 act=silu wdtype=bf16 odtype=bf16 norm=") +
                  (is_gdn ? "silu" : "sigmoid") + rule);
          rows.back().baseline = Baseline::ours;
          rows.back().other = cases::parse("decode" + rule);
          rows.back().other_name = "decode alone";
        }
      }
    }
  }
  // places: states in slots half as long again, every other one from the last, and in order.
  for (const char* type : {"f32", "bf16"}) {
    const std::string line = "decode dense=256x1 gate=head H=16 HV=32 sdtype=" + std::string(type);
    add("places", std::string("GDN B=256 V-first, pages from the last, ") + type,
        line + " pool=inplace strided=pages" + step);
    rows.back().baseline = Baseline::ours;
    rows.back().other = cases::parse(line + " pool=identity" + step);
    rows.back().other_name = "slots in order";
  }
  return rows;
}

}  // namespace

std::vector<SuiteRow> all_suites() {
  std::vector<SuiteRow> rows;
  const auto add = [&](const char* suite, const std::string& label, const std::string& line) {
    const cases::Case c = cases::parse(line);
    rows.push_back({suite, label, c, default_baseline(c), 0});
  };
  // cpu: K = V = 128 and 16 heads unless the label says otherwise.
  const std::string wide = " H=16 K=128 V=128 final=0 ";
  add("cpu", "GDN forward T=4096 fp32", "forward gate=head dense=1x4096 dtype=f32" + wide);
  add("cpu", "GDN forward T=4096 bf16", "forward gate=head dense=1x4096 dtype=bf16" + wide);
  add("cpu", "GDN forward T=1024 fp32", "forward gate=head dense=1x1024 dtype=f32" + wide);
  add("cpu", "KDA forward T=4096 fp32", "forward gate=channel dense=1x4096 dtype=f32" + wide);
  add("cpu", "KDA forward T=4096 bf16", "forward gate=channel dense=1x4096 dtype=bf16" + wide);
  add("cpu", "DeltaNet forward T=4096 fp32", "forward gate=none dense=1x4096 dtype=f32" + wide);
  add("cpu", "decode 16 sequences, 32 heads",
      "decode gate=head dense=16x1 H=32 K=128 V=128 pool=inplace");
  add("cpu", "decode 256 sequences, 32 heads",
      "decode gate=head dense=256x1 H=32 K=128 V=128 pool=inplace");
  add("cpu", "GDN one sequence, one head T=65536",
      "forward gate=head dense=1x65536 H=1 K=128 V=128 dtype=f32 final=0");
  rows.back().baseline = Baseline::one_thread;

  // quick: seconds altogether.
  add("quick", "GDN forward T=1024 fp32", "forward gate=head dense=1x1024 dtype=f32" + wide);
  add("quick", "GDN forward T=1024 bf16", "forward gate=head dense=1x1024 dtype=bf16" + wide);
  add("quick", "KDA forward T=1024 fp32", "forward gate=channel dense=1x1024 dtype=f32" + wide);
  add("quick", "GDN backward T=1024 fp32",
      "backward gate=head dense=1x1024 dfinal=0 H=16 K=128 V=128 dtype=f32");
  add("quick", "decode 16 sequences, 32 heads",
      "decode gate=head dense=16x1 H=32 K=128 V=128 pool=inplace");

  // training: forward and backward, for each kind of gate and each memory mode.
  for (const char* dtype : {"f32", "bf16"}) {
    for (const char* save : {"none", "states", "all"}) {
      add("training", std::string("GDN backward T=4096 ") + dtype + " save=" + save,
          std::string("backward gate=head dense=1x4096 dfinal=0 H=16 K=128 V=128 dtype=") + dtype +
              " save=" + save);
    }
    for (const char* gate : {"none", "channel"}) {
      add("training",
          std::string(gate[0] == 'n' ? "DeltaNet" : "KDA") + " backward T=4096 " + dtype,
          std::string("backward gate=") + gate +
              " dense=1x4096 dfinal=0 H=16 K=128 V=128 dtype=" + dtype);
    }
  }
  add("training", "GDN layer, grouped values, packed",
      "backward gate=head form=softplus seqs=1000,24,2048,1 H=16 HV=32 K=128 V=128 dtype=bf16 "
      "beta=sigmoid l2norm=1");

  // growth: time per token must be flat.
  for (const char* dtype : {"f32", "bf16"}) {
    for (const int length : {256, 1024, 4096, 16384, 65536}) {
      add("growth", "GDN forward T=" + std::to_string(length) + " " + dtype,
          "forward gate=head dense=1x" + std::to_string(length) + " dtype=" + dtype + wide);
    }
  }

  for (const int sequences : {1, 4, 16, 64, 256}) {
    for (const char* gate : {"head", "channel"}) {
      add("decode", "decode " + std::to_string(sequences) + " sequences, gate per " + gate,
          "decode gate=" + std::string(gate) + " dense=" + std::to_string(sequences) +
              "x1 H=32 K=128 V=128 pool=inplace");
    }
  }
  add("decode", "decode 64 sequences, bf16 states",
      "decode gate=head dense=64x1 H=32 K=128 V=128 pool=inplace dtype=bf16 sdtype=bf16");
  add("decode", "decode 64 sequences, V-first",
      "decode gate=head dense=64x1 H=32 K=128 V=128 pool=inplace state=vk");
  add("decode", "decode 16 sequences, 4 tokens",
      "decode gate=head dense=16x4 H=32 K=128 V=128 pool=inplace");

  // layers: shapes of published models, as a serving engine would batch them.
  add("layers", "GDN layer, grouped values, packed",
      "forward gate=head form=softplus seqs=1000,24,2048,1 H=16 HV=32 K=128 V=128 dtype=bf16 "
      "beta=sigmoid "
      "l2norm=1 init=1");
  add("layers", "KDA layer, packed",
      "forward gate=channel form=softplus seqs=1000,24,2048,1 H=32 K=128 V=128 dtype=bf16 "
      "beta=sigmoid "
      "l2norm=1 init=1");
  add("layers", "K=256 V=512",
      "forward gate=head dense=1x1024 H=8 K=256 V=512 dtype=bf16 l2norm=1");

  for (const char* op : {"kkt gate=none", "kkt gate=head", "kkt gate=channel", "scores gate=head",
                         "scores gate=channel", "scores_inverse gate=channel"}) {
    add("blocks", op, std::string(op) + " dense=1x2048 H=16 K=128");
  }
  add("blocks", "inverse", "inverse dense=1x2048 HV=16 K=128");
  add("blocks", "wy gate=head", "wy gate=head dense=1x2048 H=16 K=128 V=128");
  add("blocks", "wy gate=channel", "wy gate=channel dense=1x2048 H=16 K=128 V=128");
  add("blocks", "cumsum gate=channel", "cumsum gate=channel dense=1x4096 HV=16 K=128");
  add("blocks", "gate gate=channel form=softplus",
      "gate gate=channel form=softplus dense=1x4096 HV=16 K=128");
  add("blocks", "l2norm", "l2norm dense=1x4096 H=16 K=128");

  const std::vector<SuiteRow> on_gpu = gpu_suites();
  rows.insert(rows.end(), on_gpu.begin(), on_gpu.end());
  return rows;
}

}  // namespace deltic::cli
