// Checks of shapes, dtypes, strides, devices, alignment, aliasing and options.
#include "core/check.h"

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <string>

#include "core/error.h"

namespace deltic {

const char* name_of(deltic_op op) {
  constexpr const char* names[] = {"forward", "decode", "cumsum",  "gate", "l2norm",
                                   "kkt",     "scores", "inverse", "wy"};
  return op >= 0 && op < DELTIC_NUM_OPS ? names[op] : "unknown operation";
}

namespace {

constexpr int64_t kMaxExtent = int64_t{1}
                               << 60;  // elements a view may span: byte offsets stay 64 bit

std::string shape_text(const int64_t* shape, int32_t rank) {
  std::string s = "[";
  for (int32_t i = 0; i < rank; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}
std::string shape_text(const deltic_tensor& t) { return shape_text(t.shape, t.rank); }

const char* device_name(int32_t type) { return type == DELTIC_CPU ? "cpu" : "cuda"; }

bool is_empty(const deltic_tensor& t) {
  for (int32_t i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return true;
  }
  return false;
}

// Copies a versioned struct of the caller's size over a zeroed one of ours.
template <class Struct>
Struct read_struct(const char* op, const char* what, const Struct* given) {
  Struct s{};
  if (given == nullptr) return s;
  const uint64_t size = given->size;
  if (size < sizeof(Struct) || size > sizeof(Struct) + 4096) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": ", what, ".size: expected ", sizeof(Struct), ", got ",
         size, " (set it with deltic_", what, "_init)");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (uint64_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      fail(DELTIC_INVALID_ARGUMENT, op, ": ", what, ".size: expected ", sizeof(Struct), ", got ",
           size, " with fields this library does not know");
    }
  }
  std::memcpy(&s, given, sizeof(Struct));
  return s;
}

class Checker {
 public:
  Checker(deltic_op op, const CheckContext& context) : context_(context) {
    p_.op = op;
    op_ = name_of(op);
  }

  template <class... Parts>
  [[noreturn]] void bad(const char* argument, const Parts&... parts) const {
    fail(DELTIC_INVALID_ARGUMENT, op_, ": ", argument, ": ", parts...);
  }

  void options(const deltic_options& o) {
    const bool block = p_.op > DELTIC_DECODE;
    one_of("gate_form", o.gate_form, DELTIC_GATE_BOUNDED,
           "log_decay (0), softplus (1) or bounded (2)");
    one_of("beta_form", o.beta_form, DELTIC_BETA_2SIGMOID,
           "value (0), sigmoid (1) or 2sigmoid (2)");
    one_of("state_layout", o.state_layout, DELTIC_STATE_VK, "kv (0) or vk (1)");
    one_of("split", o.split, DELTIC_SPLIT_SEGMENTS,
           "auto (0), off (1), by_length (2) or a segment length (3)");
    one_of("qk_l2norm", o.qk_l2norm, 1, "0 or 1");
    one_of("reverse", o.reverse, 1, "0 or 1");
    one_of("has_scale", o.has_scale, 1, "0 or 1");
    one_of("has_lower_bound", o.has_lower_bound, 1, "0 or 1");
    one_of("checked", o.checked, 2, "0 (default), 1 (on) or 2 (off)");
    if (o.chunk != 0 && o.chunk != 16 && o.chunk != 32 && o.chunk != 64) {
      bad("chunk", "expected 16, 32 or 64, got ", o.chunk);
    }
    if (o.num_threads < 0 || o.num_threads > 4096) {
      bad("num_threads", "expected 0 (default) to 4096, got ", o.num_threads);
    }
    if (o.has_scale && !std::isfinite(o.scale))
      bad("scale", "expected a finite number, got ", o.scale);
    if (o.gate_form == DELTIC_GATE_BOUNDED) {
      if (!o.has_lower_bound)
        bad("lower_bound", "expected a finite number below 0 with the gate form bounded, got none");
      if (!std::isfinite(o.lower_bound) || !(o.lower_bound < 0)) {
        bad("lower_bound", "expected a finite number below 0, got ", o.lower_bound);
      }
    } else if (o.has_lower_bound) {
      bad("lower_bound", "expected none without the gate form bounded, got ", o.lower_bound);
    }
    if (o.split == DELTIC_SPLIT_SEGMENTS && o.segment_length <= 0) {
      bad("segment_length", "expected a number of tokens above 0, got ", o.segment_length);
    }
    if (o.split != DELTIC_SPLIT_SEGMENTS && o.segment_length != 0) {
      bad("segment_length", "expected 0 without split into segments, got ", o.segment_length);
    }
    if (o.reverse && p_.op != DELTIC_CUMSUM)
      bad("reverse", "expected 0 (cumsum alone has a direction), got 1");
    if (block) {
      const bool takes_gate = p_.op == DELTIC_CUMSUM || p_.op == DELTIC_GATE;
      const bool takes_scale = p_.op == DELTIC_CUMSUM || p_.op == DELTIC_SCORES;
      if (o.gate_form != DELTIC_GATE_LOG_DECAY && !takes_gate) {
        bad("gate_form", "expected log_decay (g is the cumulative sum here), got ", o.gate_form);
      }
      if (o.beta_form != DELTIC_BETA_VALUE) bad("beta_form", "expected value, got ", o.beta_form);
      if (o.qk_l2norm) bad("qk_l2norm", "expected 0 (l2norm is an operation of its own), got 1");
      if (o.has_scale && !takes_scale) bad("scale", "expected none, got ", o.scale);
      if (o.state_layout != DELTIC_STATE_KV)
        bad("state_layout", "expected kv (no state here), got vk");
      if (o.split > DELTIC_SPLIT_OFF) bad("split", "expected auto or off, got ", o.split);
    }
    p_.gate_form = static_cast<deltic_gate_form>(o.gate_form);
    p_.beta_form = static_cast<deltic_beta_form>(o.beta_form);
    p_.v_first = o.state_layout == DELTIC_STATE_VK;
    p_.split = static_cast<deltic_split>(o.split);
    p_.chunk = o.chunk == 0 ? 64 : o.chunk;
    p_.l2norm = o.qk_l2norm != 0;
    p_.reverse = o.reverse != 0;
    p_.lower_bound = o.has_lower_bound ? o.lower_bound : 0.0f;
    p_.threads = o.num_threads > 0 ? o.num_threads : context_.threads;
    p_.checked = o.checked == 0 ? context_.checked : o.checked == 1;
    has_scale_ = o.has_scale != 0;
    if (has_scale_) p_.scale = o.scale;
  }

  // A present tensor that is sound by itself, on the call's device.
  void sound(const deltic_tensor& t, const char* name, bool is_output, bool any_device = false) {
    if (t.rank < 0 || t.rank > DELTIC_MAX_RANK) {
      bad(name, "expected a rank of 0 to ", DELTIC_MAX_RANK, ", got ", t.rank);
    }
    if (!is_valid(static_cast<DType>(t.dtype))) bad(name, "expected a known dtype, got ", t.dtype);
    if (t.device_type != DELTIC_CPU && t.device_type != DELTIC_CUDA) {
      bad(name, "expected device cpu (0) or cuda (1), got ", t.device_type);
    }
    if (!any_device) {
      if (!has_device_) {
        has_device_ = true;
        p_.device = static_cast<deltic_device_type>(t.device_type);
        p_.device_index = t.device_index;
        device_of_ = name;
      } else if (t.device_type != p_.device || t.device_index != p_.device_index) {
        bad(name, "expected device ", device_name(p_.device), ":", p_.device_index, " as ",
            device_of_, ", got ", device_name(t.device_type), ":", t.device_index);
      }
    }
    int64_t extent = 1, numel = 1, step = 0;
    for (int32_t i = 0; i < t.rank; ++i) {
      if (t.shape[i] < 0) bad(name, "expected sizes of at least 0, got shape ", shape_text(t));
      if (t.strides[i] < 0) {
        bad(name, "expected strides of at least 0, got ", shape_text(t.strides, t.rank));
      }
      if (__builtin_mul_overflow(numel, t.shape[i], &numel) || numel > kMaxExtent) {
        bad(name, "expected fewer than 2^60 elements, got shape ", shape_text(t));
      }
      if (t.shape[i] > 0 && (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &step) ||
                             step > kMaxExtent || (extent += step) > kMaxExtent)) {
        bad(name, "expected a span of fewer than 2^60 elements, got strides ",
            shape_text(t.strides, t.rank));
      }
    }
    const int32_t last = t.rank - 1;
    if (t.shape[last] > 1 && t.strides[last] != 1) {
      bad(name, "expected stride 1 in the last dimension, got ", t.strides[last]);
    }
    if (numel == 0 || context_.query) return;
    if (t.data == nullptr) bad(name, "expected data, got a null pointer");
    const auto element = static_cast<uintptr_t>(size_of(static_cast<DType>(t.dtype)));
    if (reinterpret_cast<uintptr_t>(t.data) % element != 0) {
      bad(name, "expected data aligned to ", element, " bytes, got a misaligned pointer");
    }
    if (is_output) {
      // Elements must be distinct: each dimension steps over all that the finer-stepping ones span.
      int32_t order[DELTIC_MAX_RANK];
      int32_t n = 0;
      for (int32_t d = 0; d < t.rank; ++d) {
        if (t.shape[d] <= 1) continue;
        int32_t at = n++;  // insertion by stride
        for (; at > 0 && t.strides[order[at - 1]] > t.strides[d]; --at) order[at] = order[at - 1];
        order[at] = d;
      }
      int64_t span = 1;
      for (int32_t i = 0; i < n; ++i) {
        if (t.strides[order[i]] < span) {
          bad(name, "expected strides that give every element a place of its own, got ",
              shape_text(t.strides, t.rank), " for shape ", shape_text(t));
        }
        span += (t.shape[order[i]] - 1) * t.strides[order[i]];
      }
    }
  }

  bool given(const deltic_tensor& t, const char* name, bool is_output = false) {
    if (t.rank == 0) return false;
    sound(t, name, is_output);
    return true;
  }
  void required(const deltic_tensor& t, const char* name, bool is_output = false) {
    if (!given(t, name, is_output)) bad(name, "expected a tensor, got none");
  }

  void shape(const deltic_tensor& t, const char* name, std::initializer_list<int64_t> want) const {
    const bool same = t.rank == static_cast<int32_t>(want.size()) &&
                      std::equal(want.begin(), want.end(), t.shape);
    if (!same) {
      bad(name, "expected shape ", shape_text(want.begin(), static_cast<int32_t>(want.size())),
          ", got ", shape_text(t));
    }
  }
  void rank4(const deltic_tensor& t, const char* name, const char* letters) const {
    if (t.rank != 4) bad(name, "expected shape ", letters, ", got ", shape_text(t));
  }

  void float_dtype(const deltic_tensor& t, const char* name) const {
    const DType d = static_cast<DType>(t.dtype);
    if (!is_float(d)) bad(name, "expected fp32, bf16 or fp16, got ", name_of(d));
    if (d == DType::f64 && !context_.allow_f64) {
      bad(name,
          "expected fp32, bf16 or fp16, got fp64 (taken by the implementation reference alone)");
    }
  }
  void same_dtype(const deltic_tensor& t, const char* name, const deltic_tensor& as,
                  const char* as_name) const {
    if (t.dtype != as.dtype) {
      bad(name, "expected ", name_of(static_cast<DType>(as.dtype)), " as ", as_name, ", got ",
          name_of(static_cast<DType>(t.dtype)));
    }
  }
  void state_dtype(const deltic_tensor& t, const char* name) const {
    const DType d = static_cast<DType>(t.dtype);
    const bool ok = d == DType::f32 || d == DType::bf16 || (d == DType::f64 && context_.allow_f64);
    if (!ok) bad(name, "expected fp32 or bf16, got ", name_of(d));
  }

  static Rows rows(const deltic_tensor& t) {
    if (t.rank == 0) return {};
    return {t.data, static_cast<DType>(t.dtype), true, t.strides[0], t.strides[1], t.strides[2]};
  }

  Param param(const deltic_tensor& t, const char* name, int64_t elements, const char* letters) {
    if (!given(t, name)) return {};
    float_dtype(t, name);
    int64_t n = 1;
    for (int32_t i = 0; i < t.rank; ++i) n *= t.shape[i];
    if (n != elements)
      bad(name, "expected ", letters, " = ", elements, " elements, got shape ", shape_text(t));
    Param q;
    q.data = t.data;
    q.dtype = static_cast<DType>(t.dtype);
    q.present = true;
    q.rank = t.rank;
    std::copy(t.shape, t.shape + t.rank, q.shape);
    std::copy(t.strides, t.strides + t.rank, q.strides);
    int64_t packed_stride = 1;
    q.contiguous = true;
    for (int32_t i = t.rank - 1; i >= 0; --i) {
      q.contiguous = q.contiguous && (t.shape[i] == 1 || t.strides[i] == packed_stride);
      packed_stride *= t.shape[i];
    }
    return q;
  }

  Indices indices(const deltic_tensor& t, const char* name, bool may_be_2d = false) {
    if (!given(t, name)) return {};
    const DType d = static_cast<DType>(t.dtype);
    if (!is_index(d)) bad(name, "expected int32 or int64, got ", name_of(d));
    if (t.rank != 1 && !(may_be_2d && t.rank == 2)) {
      bad(name, "expected ", may_be_2d ? "one or two dimensions" : "one dimension", ", got shape ",
          shape_text(t));
    }
    Indices x;
    x.data = t.data;
    x.present = true;
    x.is64 = d == DType::i64;
    x.n0 = t.shape[0];
    x.s0 = t.strides[0];
    if (t.rank == 2) {
      if (t.shape[1] == 0) bad(name, "expected at least one column, got shape ", shape_text(t));
      x.n1 = t.shape[1];
      x.s1 = t.strides[1];
    }
    return x;
  }

  States states(const deltic_tensor& t, const char* name, int64_t slots, bool is_output) {
    if (!given(t, name, is_output)) return {};
    state_dtype(t, name);
    const int64_t rows_n = p_.v_first ? p_.V : p_.K, cols_n = p_.v_first ? p_.K : p_.V;
    if (slots < 0) slots = t.rank > 0 ? t.shape[0] : 0;
    shape(t, name, {slots, p_.HV, rows_n, cols_n});
    States s;
    s.data = t.data;
    s.dtype = static_cast<DType>(t.dtype);
    s.present = true;
    s.slots = slots;
    s.s_slot = t.strides[0];
    s.s_head = t.strides[1];
    s.s_k = p_.v_first ? 1 : t.strides[2];
    s.s_v = p_.v_first ? t.strides[2] : 1;
    return s;
  }

  void sequences(const deltic_tensor& cu, const deltic_tensor& cu_host) {
    p_.cu = indices(cu, "cu_seqlens");
    p_.packed = p_.cu.present;
    p_.N = p_.B;
    if (p_.packed) {
      if (p_.B != 1) bad("cu_seqlens", "expected a batch of 1 with packed sequences, got ", p_.B);
      if (p_.cu.n0 < 1) bad("cu_seqlens", "expected at least one offset, got none");
      p_.N = p_.cu.n0 - 1;
    }
    if (cu_host.rank != 0) {
      sound(cu_host, "cu_seqlens_host", false, true);
      if (!p_.packed) bad("cu_seqlens_host", "expected none without cu_seqlens, got a tensor");
      if (cu_host.device_type != DELTIC_CPU)
        bad("cu_seqlens_host", "expected device cpu, got cuda");
      const DType d = static_cast<DType>(cu_host.dtype);
      if (!is_index(d)) bad("cu_seqlens_host", "expected int32 or int64, got ", name_of(d));
      shape(cu_host, "cu_seqlens_host", {p_.N + 1});
      if (p_.device == DELTIC_CPU && !context_.query) {
        const Indices host{cu_host.data, true, d == DType::i64, p_.N + 1, 0, cu_host.strides[0], 0};
        for (int64_t i = 0; i <= p_.N; ++i) {
          if (host(i) != p_.cu(i)) {
            bad("cu_seqlens_host", "expected the values of cu_seqlens, got ", host(i), " for ",
                p_.cu(i), " at ", i);
          }
        }
      }
    }
  }

  // g with its form and parameters: kind from the rank.
  void gates(const deltic_tensor& g, const deltic_tensor& a_log, const deltic_tensor& dt_bias,
             int64_t channels) {
    if (given(g, "g")) {
      float_dtype(g, "g");
      if (g.rank != 3 && g.rank != 4)
        bad("g", "expected shape [B,T,HV] or [B,T,HV,K], got ", shape_text(g));
      p_.gate = g.rank == 3 ? Gate::head : Gate::channel;
      if (g.rank == 3) shape(g, "g", {p_.B, p_.T, p_.HV});
      if (g.rank == 4) shape(g, "g", {p_.B, p_.T, p_.HV, channels});
      p_.g = rows(g);
    } else if (p_.gate_form != DELTIC_GATE_LOG_DECAY) {
      bad("g", "expected a tensor with the gate form ",
          p_.gate_form == DELTIC_GATE_SOFTPLUS ? "softplus" : "bounded", ", got none");
    }
    if (p_.gate_form == DELTIC_GATE_LOG_DECAY) {
      if (a_log.rank != 0) bad("A_log", "expected none with the gate form log_decay, got a tensor");
      if (dt_bias.rank != 0)
        bad("dt_bias", "expected none with the gate form log_decay, got a tensor");
      return;
    }
    p_.A_log = param(a_log, "A_log", p_.HV, "HV");
    if (p_.gate_form == DELTIC_GATE_SOFTPLUS && !p_.A_log) {
      bad("A_log", "expected a tensor with the gate form softplus, got none");
    }
    const bool per_channel = p_.gate == Gate::channel;
    p_.dt_bias = param(dt_bias, "dt_bias", per_channel ? p_.HV * channels : p_.HV,
                       per_channel ? "HV*K" : "HV");
  }

  // Two views that share a byte. Interleaved rows of one buffer (equal token strides) are told
  // apart.
  static bool overlap(const deltic_tensor& a, const deltic_tensor& b) {
    if (a.rank == 0 || b.rank == 0 || is_empty(a) || is_empty(b)) return false;
    if (a.data == nullptr || b.data == nullptr) return false;
    const auto bytes = [](const deltic_tensor& t, int32_t from) {
      const int64_t element = size_of(static_cast<DType>(t.dtype));
      int64_t extent = element;
      for (int32_t i = from; i < t.rank; ++i) extent += (t.shape[i] - 1) * t.strides[i] * element;
      return extent;
    };
    const auto pa = reinterpret_cast<intptr_t>(a.data), pb = reinterpret_cast<intptr_t>(b.data);
    if (pa + bytes(a, 0) <= pb || pb + bytes(b, 0) <= pa) return false;
    if (a.rank < 3 || b.rank < 3) return true;
    const int64_t ea = size_of(static_cast<DType>(a.dtype)),
                  eb = size_of(static_cast<DType>(b.dtype));
    for (int32_t inner = 2; inner <= 3; ++inner) {
      // Rows of one period: equal steps of every outer dimension that has more than one element.
      if (a.rank <= inner - 1 || b.rank <= inner - 1) continue;
      const int64_t period = a.strides[inner - 1] * ea;
      bool same = period > 0 && period == b.strides[inner - 1] * eb;
      for (int32_t i = 0; i < inner - 1 && same; ++i) {
        const int64_t sa = a.shape[i] > 1 ? a.strides[i] * ea : 0;
        const int64_t sb = b.shape[i] > 1 ? b.strides[i] * eb : 0;
        same = sa % period == 0 && sb % period == 0;
      }
      if (!same) continue;
      const int64_t offset = ((pb - pa) % period + period) % period;
      const int64_t wa = bytes(a, inner), wb = bytes(b, inner);
      if (wa <= period && wb <= period && offset >= wa && offset + wb <= period) return false;
    }
    return true;
  }

  struct Named {
    const deltic_tensor* tensor;
    const char* name;
  };
  void aliasing(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) const {
    if (context_.query) return;
    for (auto out = outputs.begin(); out != outputs.end(); ++out) {
      for (const Named& in : inputs) {
        if (overlap(*out->tensor, *in.tensor)) {
          bad(out->name, "expected memory of its own, got an overlap with ", in.name);
        }
      }
      for (auto other = outputs.begin(); other != out; ++other) {
        if (overlap(*out->tensor, *other->tensor)) {
          bad(out->name, "expected memory of its own, got an overlap with ", other->name);
        }
      }
    }
  }

  void one_of(const char* name, int32_t value, int32_t last, const char* what) const {
    if (value < 0 || value > last) bad(name, "expected ", what, ", got ", value);
  }

  Problem p_;
  const char* op_ = "";
  bool has_scale_ = false;

 private:
  const CheckContext& context_;
  bool has_device_ = false;
  const char* device_of_ = "";
};

void check_widths(const Checker& c, const Problem& p) {
  if (p.H < 1) c.bad("q", "expected at least one head, got shape with H = ", p.H);
  if (p.K < 1 || p.K > 256) c.bad("q", "expected a key width K of 1 to 256, got ", p.K);
}

}  // namespace

Problem check_call(deltic_op op, const deltic_options* options, const deltic_tensors* given,
                   const CheckContext& context) {
  Checker c(op, context);
  Problem& p = c.p_;
  if (given == nullptr) c.bad("tensors", "expected a struct, got a null pointer");
  const deltic_tensors t = read_struct(c.op_, "tensors", given);
  const bool decode = op == DELTIC_DECODE;
  c.options(read_struct(c.op_, "options", options));

  c.required(t.q, "q");
  c.float_dtype(t.q, "q");
  c.rank4(t.q, "q", "[B,T,H,K]");
  p.B = t.q.shape[0], p.T = t.q.shape[1], p.H = t.q.shape[2], p.K = t.q.shape[3];
  check_widths(c, p);
  c.required(t.k, "k");
  c.same_dtype(t.k, "k", t.q, "q");
  c.shape(t.k, "k", {p.B, p.T, p.H, p.K});
  c.required(t.v, "v");
  c.same_dtype(t.v, "v", t.q, "q");
  c.rank4(t.v, "v", "[B,T,HV,V]");
  p.HV = t.v.shape[2], p.V = t.v.shape[3];
  c.shape(t.v, "v", {p.B, p.T, p.HV, p.V});
  if (p.HV < 1 || p.HV % p.H != 0) {
    c.bad("v", "expected a number of value heads HV that is a multiple of H = ", p.H, ", got ",
          p.HV);
  }
  if (p.V < 1) c.bad("v", "expected a value width V of at least 1, got ", p.V);
  c.required(t.o, "o", true);
  c.same_dtype(t.o, "o", t.q, "q");
  c.shape(t.o, "o", {p.B, p.T, p.HV, p.V});
  if (!c.has_scale_) p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.K)));

  if (c.given(t.beta, "beta")) {
    c.float_dtype(t.beta, "beta");
    if (decode && t.beta.rank == 4) {
      c.shape(t.beta, "beta", {p.B, p.T, p.HV, p.V});
      p.beta_kind = BetaKind::value;
    } else {
      c.shape(t.beta, "beta", {p.B, p.T, p.HV});
      p.beta_kind = BetaKind::head;
    }
  } else if (p.beta_form != DELTIC_BETA_VALUE) {
    c.bad("beta", "expected a tensor with the beta form sigmoid or 2sigmoid, got none");
  }
  c.gates(t.g, t.A_log, t.dt_bias, p.K);
  if (c.given(t.gv, "gv")) {
    if (!decode) c.bad("gv", "expected none (decode alone takes a value-wise decay), got a tensor");
    c.float_dtype(t.gv, "gv");
    c.shape(t.gv, "gv", {p.B, p.T, p.HV, p.V});
  }
  c.sequences(t.cu_seqlens, t.cu_seqlens_host);

  p.is_pool = t.state_pool.rank != 0;
  if (p.is_pool) {
    if (t.initial_state.rank != 0)
      c.bad("initial_state", "expected none with a state pool, got a tensor");
    if (t.final_state.rank != 0)
      c.bad("final_state", "expected none with a state pool, got a tensor");
    p.state_in = p.state_out = c.states(t.state_pool, "state_pool", -1, true);
    p.read_index = c.indices(t.read_index, "read_index");
    p.write_index = c.indices(t.write_index, "write_index", decode);
    if (p.read_index && p.read_index.n0 != p.N) c.shape(t.read_index, "read_index", {p.N});
    if (p.write_index && p.write_index.n0 != p.N) {
      c.bad("write_index", "expected N = ", p.N, " rows, got shape ", shape_text(t.write_index));
    }
    if (p.write_index.n1 > 0 && !p.read_index) {
      c.bad("read_index", "expected a tensor with a write index per token, got none");
    }
    if (p.write_index.n1 > 0 && !p.packed && p.write_index.n1 < p.T) {
      c.bad("write_index", "expected at least T = ", p.T, " columns, got shape ",
            shape_text(t.write_index));
    }
    if (!p.read_index && !p.write_index && p.state_in.slots < p.N) {
      c.bad("state_pool", "expected at least N = ", p.N, " slots without indices, got ",
            p.state_in.slots);
    }
  } else {
    if (t.read_index.rank != 0)
      c.bad("read_index", "expected none without a state pool, got a tensor");
    if (t.write_index.rank != 0)
      c.bad("write_index", "expected none without a state pool, got a tensor");
    p.state_in = c.states(t.initial_state, "initial_state", p.N, false);
    p.state_out = c.states(t.final_state, "final_state", p.N, true);
  }

  p.ckpt_cu = c.indices(t.ckpt_cu, "ckpt_cu");
  p.ckpt_tokens = c.indices(t.ckpt_tokens, "ckpt_tokens");
  p.ckpt_slots = c.indices(t.ckpt_slots, "ckpt_slots");
  p.ckpt = c.states(t.ckpt_states, "ckpt_states", -1, true);
  const Checker::Named lists[] = {{&t.ckpt_cu, "ckpt_cu"},
                                  {&t.ckpt_tokens, "ckpt_tokens"},
                                  {&t.ckpt_slots, "ckpt_slots"},
                                  {&t.ckpt_states, "ckpt_states"}};
  const bool any = p.ckpt_cu || p.ckpt_tokens || p.ckpt_slots || p.ckpt;
  for (const auto& l : lists) {
    if (any && l.tensor->rank == 0)
      c.bad(l.name, "expected a tensor with the other checkpoint lists, got none");
  }
  if (any) {
    c.shape(t.ckpt_cu, "ckpt_cu", {p.N + 1});
    c.shape(t.ckpt_slots, "ckpt_slots", {p.ckpt_tokens.n0});
  }

  p.q = Checker::rows(t.q), p.k = Checker::rows(t.k), p.v = Checker::rows(t.v);
  p.o = Checker::rows(t.o), p.beta = Checker::rows(t.beta), p.gv = Checker::rows(t.gv);

  const bool in_place =
      !p.is_pool && p.state_in && p.state_out && p.state_in.data == p.state_out.data &&
      t.initial_state.dtype == t.final_state.dtype &&
      std::equal(t.initial_state.strides, t.initial_state.strides + 4, t.final_state.strides);
  const deltic_tensor none{};
  c.aliasing({{&t.o, "o"},
              {&t.final_state, "final_state"},
              {&t.state_pool, "state_pool"},
              {&t.ckpt_states, "ckpt_states"}},
             {{&t.q, "q"},
              {&t.k, "k"},
              {&t.v, "v"},
              {&t.beta, "beta"},
              {&t.g, "g"},
              {&t.gv, "gv"},
              {&t.A_log, "A_log"},
              {&t.dt_bias, "dt_bias"},
              {&t.cu_seqlens, "cu_seqlens"},
              {&t.cu_seqlens_host, "cu_seqlens_host"},
              {&t.read_index, "read_index"},
              {&t.write_index, "write_index"},
              {&t.ckpt_cu, "ckpt_cu"},
              {&t.ckpt_tokens, "ckpt_tokens"},
              {&t.ckpt_slots, "ckpt_slots"},
              {in_place ? &none : &t.initial_state, "initial_state"}});
  if (in_place)
    c.aliasing({{&t.o, "o"}, {&t.ckpt_states, "ckpt_states"}},
               {{&t.initial_state, "initial_state"}});

  if (p.device == DELTIC_CPU && p.split > DELTIC_SPLIT_OFF) {
    fail(DELTIC_UNSUPPORTED, c.op_, ": split: expected auto or off on the CPU, got ",
         p.split == DELTIC_SPLIT_BY_LENGTH ? "by_length" : "a segment length");
  }
  return p;
}

namespace {

// Which tensors an operation takes: required, optional.
enum Use { kNo, kMay, kMust };
struct BlockUse {
  Use q = kNo, k = kNo, v = kNo, x = kNo, g = kNo, beta = kNo, gate_params = kNo, a = kNo,
      out = kNo, w = kNo, u = kNo, kg = kNo, qg = kNo, rstd = kNo;
};
constexpr BlockUse block_use(deltic_op op) {
  switch (op) {
    case DELTIC_CUMSUM:
    case DELTIC_GATE:
      return {.g = kMust, .gate_params = kMay, .out = kMust};
    case DELTIC_L2NORM:
      return {.x = kMust, .out = kMust, .rstd = kMay};
    case DELTIC_KKT:
      return {.k = kMust, .g = kMay, .beta = kMay, .out = kMust};
    case DELTIC_SCORES:
      return {.q = kMust, .k = kMust, .g = kMay, .out = kMust};
    case DELTIC_INVERSE:
      return {.a = kMust, .out = kMust};
    default:
      return {.q = kMay,
              .k = kMust,
              .v = kMay,
              .g = kMay,
              .beta = kMay,
              .a = kMust,
              .w = kMust,
              .u = kMay,
              .kg = kMay,
              .qg = kMay};
  }
}

}  // namespace

Problem check_call(deltic_op op, const deltic_options* options, const deltic_block_tensors* given,
                   const CheckContext& context) {
  Checker c(op, context);
  Problem& p = c.p_;
  if (given == nullptr) c.bad("tensors", "expected a struct, got a null pointer");
  const deltic_block_tensors t = read_struct(c.op_, "block_tensors", given);
  c.options(read_struct(c.op_, "options", options));
  const BlockUse use = block_use(op);
  const auto take = [&](const deltic_tensor& tensor, const char* name, Use how, bool is_output) {
    if (how == kNo && tensor.rank != 0) c.bad(name, "expected none, got a tensor");
    if (how == kMust) c.required(tensor, name, is_output);
    if (how == kMay) c.given(tensor, name, is_output);
    if (tensor.rank != 0) c.float_dtype(tensor, name);
  };
  take(t.q, "q", use.q, false);
  take(t.k, "k", use.k, false);
  take(t.v, "v", use.v, false);
  take(t.x, "x", use.x, false);
  take(t.g, "g", use.g, false);
  take(t.beta, "beta", use.beta, false);
  take(t.A_log, "A_log", use.gate_params, false);
  take(t.dt_bias, "dt_bias", use.gate_params, false);
  take(t.a, "a", use.a, false);
  take(t.out, "out", use.out, true);
  take(t.w, "w", use.w, true);
  take(t.u, "u", use.u, true);
  take(t.kg, "kg", use.kg, true);
  take(t.qg, "qg", use.qg, true);
  take(t.rstd, "rstd", use.rstd, true);

  // Sizes from the leading input, then everything else against them.
  const auto heads = [&](const deltic_tensor& tensor, const char* name, const char* letters) {
    c.rank4(tensor, name, letters);
    p.B = tensor.shape[0], p.T = tensor.shape[1];
    return tensor.shape[2];
  };
  if (op == DELTIC_CUMSUM || op == DELTIC_GATE) {
    if (t.g.rank != 3 && t.g.rank != 4)
      c.bad("g", "expected shape [B,T,HV] or [B,T,HV,K], got ", shape_text(t.g));
    p.B = t.g.shape[0], p.T = t.g.shape[1], p.H = p.HV = t.g.shape[2];
    p.K = t.g.rank == 4 ? t.g.shape[3] : 1;
  } else if (op == DELTIC_L2NORM) {
    p.H = p.HV = heads(t.x, "x", "[B,T,H,D]");
    p.K = t.x.shape[3];
  } else if (op == DELTIC_INVERSE) {
    p.H = p.HV = heads(t.a, "a", "[B,T,HV,W]");
    const int64_t width = t.a.shape[3];
    if (width != 16 && width != 32 && width != 64)
      c.bad("a", "expected a width of 16, 32 or 64, got ", width);
    if (p.chunk != 64 && p.chunk != width)
      c.bad("chunk", "expected the width of a, ", width, ", got ", p.chunk);
    p.chunk = static_cast<int32_t>(width);
    p.K = 1;
  } else {
    p.H = heads(t.k, "k", "[B,T,H,K]");
    p.K = t.k.shape[3];
    const deltic_tensor& by_value_head = op == DELTIC_WY ? t.a : t.out;
    const char* name = op == DELTIC_WY ? "a" : "out";
    c.rank4(by_value_head, name, "[B,T,HV,W]");
    p.HV = by_value_head.shape[2];
    if (p.H < 1) c.bad("k", "expected at least one head, got ", p.H);
    if (p.HV < 1 || p.HV % p.H != 0) {
      c.bad(name, "expected a number of value heads HV that is a multiple of H = ", p.H, ", got ",
            p.HV);
    }
    if (p.K < 1 || p.K > 256) c.bad("k", "expected a key width K of 1 to 256, got ", p.K);
    c.shape(by_value_head, name, {p.B, p.T, p.HV, p.chunk});
  }
  if (p.HV < 1)
    c.bad(op == DELTIC_L2NORM    ? "x"
          : op == DELTIC_INVERSE ? "a"
                                 : "g",
          "expected at least one head, got none");
  if (p.K < 1) c.bad(op == DELTIC_L2NORM ? "x" : "g", "expected a width of at least 1, got 0");
  c.gates(t.g, t.A_log, t.dt_bias, p.K);
  c.sequences(t.cu_seqlens, t.cu_seqlens_host);

  if (op == DELTIC_CUMSUM || op == DELTIC_GATE) {
    if (t.g.rank == 3) c.shape(t.out, "out", {p.B, p.T, p.HV});
    if (t.g.rank == 4) c.shape(t.out, "out", {p.B, p.T, p.HV, p.K});
  } else if (op == DELTIC_L2NORM) {
    c.shape(t.out, "out", {p.B, p.T, p.H, p.K});
    if (t.rstd.rank != 0) {
      c.shape(t.rstd, "rstd", {p.B, p.T, p.H});
      const DType d = static_cast<DType>(t.rstd.dtype);
      if (d != DType::f32 && d != DType::f64) c.bad("rstd", "expected fp32, got ", name_of(d));
    }
  } else if (op == DELTIC_INVERSE) {
    c.shape(t.out, "out", {p.B, p.T, p.HV, p.chunk});
  }
  if (t.q.rank != 0) c.shape(t.q, "q", {p.B, p.T, p.H, p.K});
  if (t.beta.rank != 0) {
    c.shape(t.beta, "beta", {p.B, p.T, p.HV});
    p.beta_kind = BetaKind::head;
  }
  if (op == DELTIC_WY) {
    c.shape(t.w, "w", {p.B, p.T, p.HV, p.K});
    if ((t.v.rank != 0) != (t.u.rank != 0))
      c.bad(t.v.rank != 0 ? "u" : "v", "expected a tensor, as u goes with v, got none");
    if ((t.q.rank != 0) != (t.qg.rank != 0))
      c.bad(t.q.rank != 0 ? "qg" : "q", "expected a tensor, as qg goes with q, got none");
    if (t.v.rank != 0) {
      c.rank4(t.v, "v", "[B,T,HV,V]");
      p.V = t.v.shape[3];
      c.shape(t.v, "v", {p.B, p.T, p.HV, p.V});
      c.shape(t.u, "u", {p.B, p.T, p.HV, p.V});
    }
    if (t.kg.rank != 0) c.shape(t.kg, "kg", {p.B, p.T, p.HV, p.K});
    if (t.qg.rank != 0) c.shape(t.qg, "qg", {p.B, p.T, p.HV, p.K});
  }
  if (!c.has_scale_) {
    p.scale =
        op == DELTIC_SCORES ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.K))) : 1.0f;
  }
  p.q = Checker::rows(t.q), p.k = Checker::rows(t.k), p.v = Checker::rows(t.v),
  p.x = Checker::rows(t.x);
  p.beta = Checker::rows(t.beta), p.a = Checker::rows(t.a), p.out = Checker::rows(t.out);
  p.w = Checker::rows(t.w), p.u = Checker::rows(t.u), p.kg = Checker::rows(t.kg);
  p.qg = Checker::rows(t.qg), p.rstd = Checker::rows(t.rstd);
  c.aliasing(
      {{&t.out, "out"}, {&t.w, "w"}, {&t.u, "u"}, {&t.kg, "kg"}, {&t.qg, "qg"}, {&t.rstd, "rstd"}},
      {{&t.q, "q"},
       {&t.k, "k"},
       {&t.v, "v"},
       {&t.x, "x"},
       {&t.g, "g"},
       {&t.beta, "beta"},
       {&t.A_log, "A_log"},
       {&t.dt_bias, "dt_bias"},
       {&t.a, "a"},
       {&t.cu_seqlens, "cu_seqlens"},
       {&t.cu_seqlens_host, "cu_seqlens_host"}});
  return p;
}

}  // namespace deltic
