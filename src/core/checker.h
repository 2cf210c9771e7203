// The checks themselves: one object per call, which knows its operation's name and its problem.
#pragma once

#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>

#include "core/check.h"
#include "core/error.h"
#include "core/sizes.h"
#include "core/step_memory.h"

namespace deltic {

inline std::string shape_text(const int64_t* shape, int32_t rank) {
  std::string s = "[";
  for (int32_t i = 0; i < rank; ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + "]";
}
inline std::string shape_text(const deltic_tensor& t) { return shape_text(t.shape, t.rank); }

inline const char* device_name(int32_t type) { return type == DELTIC_CPU ? "cpu" : "cuda"; }

inline bool is_empty(const deltic_tensor& t) {
  for (int32_t i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return true;
  }
  return false;
}

class Checker {
 public:
  Checker(deltic_op op, const CheckContext& context, Problem& p) : p_(p), context_(context) {
    p_.op = op;
    p_.in_step = context.step != nullptr;
    op_ = name_of(p_.in_step ? DELTIC_STEP : op);
    prefix_ = p_.in_step ? part_prefix(op) : "";
  }

  template <class... Parts>
  [[noreturn]] void bad(const char* argument, const Parts&... parts) const {
    fail(DELTIC_INVALID_ARGUMENT, op_, ": ", prefix_, argument, ": ", parts...);
  }

  void options(const deltic_options& o) {
    const bool block = is_block(p_.op);
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
    one_of("save", o.save, DELTIC_SAVE_ALL, "none (0), states (1) or all (2)");
    if (o.save != DELTIC_SAVE_NONE && p_.op != DELTIC_FORWARD) {
      bad("save", "expected none (forward alone saves), got ", o.save);
    }
    if (o.reserved != 0) bad("reserved", "expected 0, got ", o.reserved);
    if (o.reserved1 != 0) bad("reserved1", "expected 0, got ", o.reserved1);
    one_of("form", o.form, DELTIC_FORM_RECURRENT, "chunked (0) or recurrent (1)");
    if (o.form != DELTIC_FORM_CHUNKED && p_.op != DELTIC_FORWARD && p_.op != DELTIC_BACKWARD) {
      bad("form", "expected chunked (forward alone has two forms), got recurrent");
    }
    if (o.form != DELTIC_FORM_CHUNKED && o.save != DELTIC_SAVE_NONE) {
      bad("save", "expected none with the form recurrent (backward finds the states again), got ",
          o.save == DELTIC_SAVE_STATES ? "states" : "all");
    }
    p_.form = static_cast<deltic_form>(o.form);
    one_of("has_null_slot", o.has_null_slot, 1, "0 or 1");
    if (o.has_null_slot && o.null_slot < -1) {
      bad("null_slot", "expected -1 (none) or a slot, got ", o.null_slot);
    }
    p_.null_slot = o.has_null_slot ? o.null_slot : -1;
    p_.save = static_cast<deltic_save>(o.save);
    one_of("activation", o.activation, DELTIC_ACTIVATION_SIGMOID,
           "none (0), silu (1) or sigmoid (2)");
    const bool is_norm = p_.op == DELTIC_RMSNORM, is_step = p_.op == DELTIC_STEP;
    if (o.activation != DELTIC_ACTIVATION_NONE && p_.op != DELTIC_CONV && !is_norm && !is_step) {
      bad("activation", "expected none (conv, rmsnorm and step alone have one), got ",
          o.activation);
    }
    one_of("norm_activation", o.norm_activation, DELTIC_ACTIVATION_SIGMOID,
           "none (0), silu (1) or sigmoid (2)");
    if (o.norm_activation != DELTIC_ACTIVATION_NONE && !is_step) {
      bad("norm_activation", "expected none (step alone has one), got ", o.norm_activation);
    }
    if (o.reserved_norm != 0) bad("reserved_norm", "expected 0, got ", o.reserved_norm);
    if (o.activation == DELTIC_ACTIVATION_SIGMOID && !is_norm) {
      bad("activation", "expected none (0) or silu (1), got ", o.activation);
    }
    one_of("has_eps", o.has_eps, 1, "0 or 1");
    if (o.has_eps && !is_norm && !is_step) {
      bad("eps", "expected none (rmsnorm and step alone have one), got ", o.eps);
    }
    if (o.has_eps && !(std::isfinite(o.eps) && o.eps >= 0)) {
      bad("eps", "expected a finite number of at least 0, got ", o.eps);
    }
    p_.eps = o.has_eps ? o.eps : kRmsEps;
    one_of("has_seed", o.has_seed, 1, "0 or 1");
    if (o.reserved_seed != 0) bad("reserved_seed", "expected 0, got ", o.reserved_seed);
    if (!o.has_seed && o.seed != 0) bad("seed", "expected 0 without has_seed, got ", o.seed);
    if (o.has_seed && p_.op != DELTIC_DECODE && !is_step) {
      bad("seed", "expected none (decode alone rounds states after every token), got ", o.seed);
    }
    p_.has_seed = o.has_seed != 0, p_.seed = o.seed;
    p_.activation = static_cast<deltic_activation>(o.activation);
    if (p_.op == DELTIC_CONV || p_.op == DELTIC_MOVE || p_.op == DELTIC_COMMIT) {
      const auto unused = [&](const char* name, bool is_set) {
        if (is_set) {
          bad(name, "expected the default (the delta rule's options are not ", op_,
              "'s), got another");
        }
      };
      unused("gate_form", o.gate_form != 0), unused("beta_form", o.beta_form != 0);
      unused("qk_l2norm", o.qk_l2norm != 0);
      unused("state_layout", o.state_layout != 0 && p_.op == DELTIC_CONV);
      unused("scale", o.has_scale != 0), unused("split", o.split > DELTIC_SPLIT_OFF);
    }
    if (block) {
      const bool takes_gate = p_.op == DELTIC_CUMSUM || p_.op == DELTIC_GATE;
      const bool takes_scale =
          p_.op == DELTIC_CUMSUM || p_.op == DELTIC_SCORES || p_.op == DELTIC_SCORES_INVERSE;
      if (o.gate_form != DELTIC_GATE_LOG_DECAY && !takes_gate) {
        bad("gate_form", "expected log_decay (g is the cumulative sum here), got ", o.gate_form);
      }
      if (o.beta_form != DELTIC_BETA_VALUE) bad("beta_form", "expected value, got ", o.beta_form);
      if (o.qk_l2norm) bad("qk_l2norm", "expected 0 (l2norm is an operation of its own), got 1");
      if (o.has_scale && !takes_scale) bad("scale", "expected none, got ", o.scale);
      if (o.state_layout != DELTIC_STATE_KV)
        bad("state_layout", "expected kv (no state here), got vk");
      if (o.split > DELTIC_SPLIT_OFF) bad("split", "expected auto or off, got ", o.split);
      if (o.has_null_slot) bad("null_slot", "expected none (no slots here), got ", o.null_slot);
    }
    p_.gate_form = static_cast<deltic_gate_form>(o.gate_form);
    p_.beta_form = static_cast<deltic_beta_form>(o.beta_form);
    p_.v_first = o.state_layout == DELTIC_STATE_VK;
    p_.split = static_cast<deltic_split>(o.split);
    p_.segment_length = o.segment_length;
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
  void sound(const deltic_tensor& t, const char* name, bool is_output, bool any_device = false,
             bool any_strides = false) {
    if (t.rank < 0 || t.rank > DELTIC_MAX_RANK) {
      bad(name, "expected a rank of 0 to ", DELTIC_MAX_RANK, ", got ", t.rank);
    }
    if (!is_valid(static_cast<DType>(t.dtype))) bad(name, "expected a known dtype, got ", t.dtype);
    p_.has_fp64 = p_.has_fp64 || t.dtype == DELTIC_F64;
    if (t.device_type != DELTIC_CPU && t.device_type != DELTIC_CUDA) {
      bad(name, "expected device cpu (0) or cuda (1), got ", t.device_type);
    }
    if (!any_device) {
      if (!has_device_) {
        has_device_ = true;
        p_.device = static_cast<deltic_device_type>(t.device_type);
        p_.device_index = t.device_index;
        device_of_ = is_between(t) ? "conv.x" : name;
      } else if (t.device_type != p_.device || t.device_index != p_.device_index) {
        bad(name, "expected device ", device_name(p_.device), ":", p_.device_index, " as ",
            device_of_, ", got ", device_name(t.device_type), ":", t.device_index);
      }
    }
    int64_t span = 1, extents = 1, step = 0;
    bool empty = false;
    for (int32_t i = 0; i < t.rank; ++i) {
      if (t.shape[i] < 0) bad(name, "expected sizes of at least 0, got shape ", shape_text(t));
      if (t.strides[i] < 0) {
        bad(name, "expected strides of at least 0, got ", shape_text(t.strides, t.rank));
      }
      // A size of 0 does not bound the others: HV*V is multiplied in calls without tokens too.
      empty = empty || t.shape[i] == 0;
      if (__builtin_mul_overflow(extents, std::max<int64_t>(t.shape[i], 1), &extents) ||
          extents > kMaxExtent) {
        bad(name, "expected at most 2^", kMaxExtentLog2,
            " elements (a size of 0 counts as 1), got shape ", shape_text(t));
      }
      if (t.shape[i] > 1 && (__builtin_mul_overflow(t.shape[i] - 1, t.strides[i], &step) ||
                             step > kMaxExtent || (span += step) > kMaxExtent)) {
        bad(name, "expected a span of at most 2^", kMaxExtentLog2, " elements, got strides ",
            shape_text(t.strides, t.rank), " for shape ", shape_text(t));
      }
    }
    const int32_t last = t.rank - 1;
    if (!any_strides && t.shape[last] > 1 && t.strides[last] != 1) {
      bad(name, "expected stride 1 in the last dimension, got ", t.strides[last]);
    }
    if (empty || context_.query) return;
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
      int64_t covered = 1;
      for (int32_t i = 0; i < n; ++i) {
        if (t.strides[order[i]] < covered) {
          bad(name, "expected strides that give every element a place of its own, got ",
              shape_text(t.strides, t.rank), " for shape ", shape_text(t));
        }
        covered += (t.shape[order[i]] - 1) * t.strides[order[i]];
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
  // A gradient has its input's shape, and no meaning without the input.
  bool gradient(const deltic_tensor& d, const char* name, const deltic_tensor& of,
                const char* of_name) {
    if (!given(d, name, true)) return false;
    same_shape(d, name, of, of_name);
    return true;
  }
  void same_shape(const deltic_tensor& d, const char* name, const deltic_tensor& of,
                  const char* of_name) const {
    if (of.rank == 0) bad(name, "expected none without ", of_name, ", got a tensor");
    if (d.rank != of.rank || !std::equal(d.shape, d.shape + d.rank, of.shape)) {
      bad(name, "expected shape ", shape_text(of), " as ", of_name, ", got ", shape_text(d));
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
    const bool ok = is_float(d) && (d != DType::f64 || context_.allow_f64);
    if (!ok) bad(name, "expected fp32, bf16 or fp16, got ", name_of(d));
  }

  // A dimension of one element has any stride, and nobody steps along it: kept, for those who look
  // at alignment, where its multiples fit.
  static int64_t stride(const deltic_tensor& t, int32_t i) {
    return t.shape[i] > 1 ? t.strides[i] : std::min(t.strides[i], kMaxExtent);
  }
  static Rows rows(const deltic_tensor& t) {
    if (t.rank == 0) return {};
    return {t.data, static_cast<DType>(t.dtype), true, stride(t, 0), stride(t, 1), stride(t, 2)};
  }

  Param param(const deltic_tensor& t, const char* name, int64_t elements, const char* letters) {
    if (!given(t, name)) return {};
    float_dtype(t, name);
    int64_t n = 1;
    for (int32_t i = 0; i < t.rank; ++i) n *= t.shape[i];
    if (n != elements)
      bad(name, "expected ", letters, " = ", elements, " elements, got shape ", shape_text(t));
    return param_view(t);
  }
  static Param param_view(const deltic_tensor& t) {
    if (t.rank == 0) return {};
    Param q;
    q.data = t.data;
    q.dtype = static_cast<DType>(t.dtype);
    q.present = true;
    q.rank = t.rank;
    std::copy(t.shape, t.shape + t.rank, q.shape);
    for (int32_t i = 0; i < t.rank; ++i) q.strides[i] = stride(t, i);
    int64_t packed_stride = 1;
    q.contiguous = true;
    for (int32_t i = t.rank - 1; i >= 0; --i) {
      q.contiguous = q.contiguous && (t.shape[i] == 1 || t.strides[i] == packed_stride);
      packed_stride *= t.shape[i];
    }
    return q;
  }

  Indices indices(const deltic_tensor& t, const char* name, bool may_be_2d = false) {
    if (t.rank == 0) return {};
    sound(t, name, false, false, true);
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
    x.s0 = stride(t, 0);
    if (t.rank == 2) {
      if (t.shape[1] == 0) bad(name, "expected at least one column, got shape ", shape_text(t));
      x.n1 = t.shape[1];
      x.s1 = stride(t, 1);
    }
    return x;
  }

  Flags flags(const deltic_tensor& t, const char* name) {
    if (t.rank == 0) return {};
    sound(t, name, false, false, true);
    const DType d = static_cast<DType>(t.dtype);
    if (d != DType::u8) bad(name, "expected uint8 (bool), got ", name_of(d));
    shape(t, name, {p_.N});
    return {static_cast<const uint8_t*>(t.data), true, stride(t, 0)};
  }

  // Where sequences start and end in a pool: what forward, decode and conv have in common.
  template <class Tensors>
  void slots(const Tensors& t) {
    p_.is_pool = t.state_pool.rank != 0;
    p_.has_write_pool = t.write_pool.rank != 0;
    p_.has_initial = flags(t.has_initial_state, "has_initial_state");
    if (!p_.is_pool) {
      absent(t.read_index, "read_index", "without a state pool");
      absent(t.write_index, "write_index", "without a state pool");
      absent(t.write_pool, "write_pool", "without a state pool");
      absent(t.accepted, "accepted", "without a state pool");
      if (p_.has_initial && t.initial_state.rank == 0) {
        bad("has_initial_state", "expected none without an initial state or a pool, got a tensor");
      }
      return;
    }
    absent(t.initial_state, "initial_state", "with a state pool");
    absent(t.final_state, "final_state", "with a state pool");
    const bool is_decode = p_.op == DELTIC_DECODE, is_conv = p_.op == DELTIC_CONV;
    p_.accepted = indices(t.accepted, "accepted");
    if (p_.accepted) shape(t.accepted, "accepted", {p_.N});
    p_.read_index = indices(t.read_index, "read_index", p_.accepted && !is_conv);
    p_.write_index = indices(t.write_index, "write_index", is_decode);
    if (p_.accepted && !is_conv && p_.read_index.n1 == 0) {
      bad("read_index", "expected a table [N,T'] with accepted counts, got ",
          p_.read_index ? "a list" : "none");
    }
    for (const auto& [index, tensor, name, may_be_table] :
         {Listed{&p_.read_index, &t.read_index, "read_index", p_.read_index.n1 > 0},
          Listed{&p_.write_index, &t.write_index, "write_index", is_decode}}) {
      if (!*index || index->n0 == p_.N) continue;
      if (!may_be_table) shape(*tensor, name, {p_.N});
      bad(name, "expected N = ", p_.N, " rows, got shape ", shape_text(*tensor));
    }
    if (p_.has_write_pool && p_.read_index.present != p_.write_index.present) {
      bad(p_.read_index ? "write_index" : "read_index",
          "expected a tensor with a write pool and the other list, got none");
    }
    if (p_.read_index.n1 > 0 && !p_.write_index) {
      if (!is_decode) {
        bad("write_index", "expected a tensor with a table of read slots, got none");
      }
      p_.write_index = p_.read_index;
    }
    if (p_.write_index.n1 > 0 && !p_.read_index) {
      bad("read_index", "expected a tensor with a write index per token, got none");
    }
    if (p_.write_index.n1 > 0 && !p_.packed && p_.write_index.n1 < p_.T) {
      bad(t.write_index.rank != 0 ? "write_index" : "read_index", "expected at least T = ", p_.T,
          " columns, got shape ",
          shape_text(t.write_index.rank != 0 ? t.write_index : t.read_index));
    }
  }
  struct Listed {
    const Indices* index;
    const deltic_tensor* tensor;
    const char* name;
    bool may_be_table;
  };
  // Slots of a pool that every sequence has one of, where no list says which.
  void slots_without_lists(const States& pool, const char* name) const {
    if (p_.read_index || p_.write_index || pool.slots >= p_.N) return;
    bad(name, "expected at least N = ", p_.N, " slots without indices, got ", pool.slots);
  }
  // Checkpoint lists, where one of them is given; the states come first.
  template <class Tensors>
  void checkpoint_lists(const Tensors& t) {
    const Named lists[] = {{&t.ckpt_cu, "ckpt_cu"},
                           {&t.ckpt_tokens, "ckpt_tokens"},
                           {&t.ckpt_slots, "ckpt_slots"},
                           {&t.ckpt_states, "ckpt_states"}};
    if (!p_.ckpt_cu && !p_.ckpt_tokens && !p_.ckpt_slots && !p_.ckpt) return;
    for (const auto& l : lists) {
      if (l.tensor->rank == 0) {
        bad(l.name, "expected a tensor with the other checkpoint lists, got none");
      }
    }
    shape(t.ckpt_cu, "ckpt_cu", {p_.N + 1});
    shape(t.ckpt_slots, "ckpt_slots", {p_.ckpt_tokens.n0});
    const deltic_tensor& pool = p_.has_write_pool ? t.write_pool : t.state_pool;
    p_.is_ckpt_in_pool = p_.is_pool && pool.data == t.ckpt_states.data &&
                         pool.dtype == t.ckpt_states.dtype && pool.rank == t.ckpt_states.rank &&
                         std::equal(pool.shape, pool.shape + pool.rank, t.ckpt_states.shape) &&
                         std::equal(pool.strides, pool.strides + pool.rank, t.ckpt_states.strides);
  }
  // A null slot says something of lists alone.
  void null_slot(bool has_lists) const {
    if (p_.null_slot < 0) return;
    if (!has_lists) bad("null_slot", "expected none without a list of slots, got ", p_.null_slot);
    if (p_.is_pool && p_.null_slot >= p_.state_in.slots) {
      bad("null_slot", "expected one of the pool's ", p_.state_in.slots, " slots, or -1, got ",
          p_.null_slot);
    }
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
    s.s_slot = stride(t, 0);
    s.s_head = stride(t, 1);
    s.s_k = p_.v_first ? 1 : stride(t, 2);
    s.s_v = p_.v_first ? stride(t, 2) : 1;
    return s;
  }

  // A pool [slots,HV,K,V] or [layers,slots,HV,K,V] in one of the layouts, of any sizes.
  struct Pool {
    States states;
    int64_t layers, heads, K, V;
  };
  Pool pool(const deltic_tensor& t, const char* name, bool is_output, bool v_first) {
    required(t, name, is_output);
    state_dtype(t, name);
    if (t.rank != 4 && t.rank != 5) {
      bad(name, "expected shape ", v_first ? "[slots,HV,V,K]" : "[slots,HV,K,V]",
          ", or with layers before them, got ", shape_text(t));
    }
    const int32_t first = t.rank - 4;
    Pool x{{},
           first == 1 ? t.shape[0] : 1,
           t.shape[first + 1],
           t.shape[first + 2],
           t.shape[first + 3]};
    if (v_first) std::swap(x.K, x.V);
    if (x.heads < 1 || x.K < 1 || x.V < 1) {
      bad(name, "expected at least one head, key channel and value column, got shape ",
          shape_text(t));
    }
    States& s = x.states;
    s.data = t.data, s.dtype = static_cast<DType>(t.dtype), s.present = true;
    s.slots = t.shape[first], s.s_slot = stride(t, first), s.s_head = stride(t, first + 1);
    s.s_k = v_first ? 1 : stride(t, first + 2), s.s_v = v_first ? stride(t, first + 2) : 1;
    s.s_layer = first == 1 ? stride(t, 0) : 0;
    return x;
  }

  // What tokens do to states, [N,T',HV,W], behind `first` dimensions: its dtype and tokens.
  void record(const deltic_tensor& t, int32_t first) {
    const DType d = static_cast<DType>(t.dtype);
    if (d != DType::f32 && !(d == DType::f64 && context_.allow_f64)) {
      bad("record", "expected fp32, got ", name_of(d));
    }
    p_.update_tokens = t.shape[first + 1];
    if (p_.update_tokens > kMaxDrafts) {
      bad("record", "expected at most ", kMaxDrafts, " drafted tokens T', got ", p_.update_tokens);
    }
    p_.updates = {t.data, d, true, stride(t, first), stride(t, first + 1), stride(t, first + 2)};
    p_.update_layer = first == 1 ? stride(t, 0) : 0;
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
      if (context_.query) return;
      p_.cu_host = {cu_host.data, true, d == DType::i64, p_.N + 1, 0, stride(cu_host, 0), 0};
      if (p_.device == DELTIC_CPU) {
        for (int64_t i = 0; i <= p_.N; ++i) {
          if (p_.cu_host(i) != p_.cu(i)) {
            bad("cu_seqlens_host", "expected the values of cu_seqlens, got ", p_.cu_host(i),
                " for ", p_.cu(i), " at ", i);
          }
        }
      }
    }
  }

  // Sizes of different tensors that passes over sequences and heads multiply: as many numbers as
  // the states have, whether there are any or not.
  void sizes_together() const {
    const int64_t sizes[] = {p_.N, p_.HV, p_.K, p_.V};
    int64_t numbers = std::max<int64_t>(p_.layers, 1);
    for (const int64_t n : sizes) {
      if (__builtin_mul_overflow(numbers, std::max<int64_t>(n, 1), &numbers) ||
          numbers > kMaxExtent) {
        bad("tensors", "expected at most 2^", kMaxExtentLog2, " numbers N*HV*K*V",
            p_.layers == 1 ? "" : " of all layers", ", got ", shape_text(sizes, 4),
            p_.layers == 1 ? "" : " of " + std::to_string(p_.layers));
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

  using Range = MemoryRange;
  static Range range_of(const deltic_tensor& t) {
    if (t.rank == 0 || t.data == nullptr || is_empty(t) || is_between(t)) return {};
    const auto begin = reinterpret_cast<intptr_t>(t.data);
    return {begin, begin + span_inside(t, std::numeric_limits<int64_t>::max())};
  }
  // Two views, whose ranges meet, that share a byte. Views that interleave in one buffer are told
  // apart: if all steps of both are multiples of a period or stay inside it, only places inside the
  // period matter.
  static bool overlap(const deltic_tensor& a, const deltic_tensor& b) {
    const auto pa = reinterpret_cast<intptr_t>(a.data), pb = reinterpret_cast<intptr_t>(b.data);
    for (const deltic_tensor* t : {&a, &b}) {
      for (int32_t i = 0; i < t->rank; ++i) {
        if (t->shape[i] <= 1 || t->strides[i] == 0) continue;
        const int64_t period = t->strides[i] * size_of(static_cast<DType>(t->dtype));
        const int64_t wa = span_inside(a, period), wb = span_inside(b, period);
        if (wa < 0 || wb < 0) continue;
        const int64_t offset = ((pb - pa) % period + period) % period;
        if (offset >= wa && offset + wb <= period) return false;
      }
    }
    return true;
  }
  // Bytes that a view spans with the dimensions that step by less than `period`; -1 if another
  // dimension's step is no multiple of it.
  static int64_t span_inside(const deltic_tensor& t, int64_t period) {
    const int64_t element = size_of(static_cast<DType>(t.dtype));
    int64_t span = element;
    for (int32_t i = 0; i < t.rank; ++i) {
      if (t.shape[i] <= 1) continue;
      const int64_t step = t.strides[i] * element;
      if (step < period) {
        span += (t.shape[i] - 1) * step;
      } else if (step % period != 0) {
        return -1;
      }
    }
    return span;
  }

  struct Named {
    const deltic_tensor* tensor;
    const char* name;
  };
  // Outputs first, each against the ones before it; then every input against all outputs.
  void output(const deltic_tensor& t, const char* name) {
    if (const Range range = alone(t, name, true, nullptr)) {
      outputs_[num_outputs_++] = {{&t, name}, range};
      remember(t, name, range, true);
    }
  }
  // `same_as`: the output that may be this very tensor (a state updated in place).
  void input(const deltic_tensor& t, const char* name, const char* same_as = nullptr) const {
    if (const Range range = alone(t, name, false, same_as)) remember(t, name, range, false);
  }
  Range alone(const deltic_tensor& t, const char* name, bool is_output, const char* same_as) const {
    if (context_.query) return {};
    const Range range = range_of(t);
    if (!range) return range;
    for (int i = 0; i < num_outputs_; ++i) {
      const Output& out = outputs_[i];
      if (!out.range.meets(range)) continue;
      if (same_as != nullptr && std::strcmp(out.name, same_as) == 0) continue;
      if (overlap(*out.tensor, t)) {
        bad(is_output ? name : out.name, "expected memory of its own, got an overlap with ",
            prefix_, is_output ? out.name : name);
      }
    }
    return range;
  }
  void absent(const deltic_tensor& t, const char* name, const char* where) const {
    if (t.rank != 0) bad(name, "expected none ", where, ", got a tensor");
  }

  void one_of(const char* name, int32_t value, int32_t last, const char* what) const {
    if (value < 0 || value > last) bad(name, "expected ", what, ", got ", value);
  }

  // Tensors of a step's part are beside those of the others too.
  void remember(const deltic_tensor& t, const char* name, const Range& range,
                bool is_output) const {
    if (context_.step != nullptr) context_.step->add({&t, prefix_, name, range, is_output});
  }

  Problem& p_;  // in the making
  const char *op_ = "", *prefix_ = "";
  bool has_scale_ = false;

 private:
  const CheckContext& context_;
  bool has_device_ = false;
  const char* device_of_ = "";
  struct Output : Named {
    Range range;
  };
  Output outputs_[16];
  int num_outputs_ = 0;
};

}  // namespace deltic
