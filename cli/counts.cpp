// Counting formulas; their derivation is in counts.h.
#include "counts.h"

#include <algorithm>

#include "cases/instance.h"

namespace deltic::cli {

using cases::Case;

namespace {

// The states of conv, in and out.
double window_bytes(const Case& c, DType type) {
  const double D = static_cast<double>(c.channels()), N = static_cast<double>(c.num_sequences());
  const bool pool = c.pool != cases::Pool::none;
  const int reads = (pool ? c.pool != cases::Pool::start : c.init) ? 1 : 0;
  const int writes =
      (pool ? c.pool != cases::Pool::peek : c.final_state != cases::Final::none) ? 1 : 0;
  return N * D * static_cast<double>(c.S * cases::size_of(type)) * (reads + writes);
}
double conv_bytes(const Case& c) {
  return 2 * static_cast<double>(c.num_real_tokens() * c.D * cases::size_of(c.dtype)) +
         window_bytes(c, c.sdtype);
}

Case decode_of(const Case& step) {
  Case c = step;
  c.op = Op::decode;
  return c;
}
// As decode, whose q, k and v are x and whose o is the result; windows; z.
double step_bytes(const Case& c) {
  const double values = static_cast<double>(c.num_real_tokens() * c.HV * c.V);
  const auto in = static_cast<double>(cases::size_of(c.dtype));
  const double out = static_cast<double>(cases::size_of(c.odtype)) - in;
  return count_bytes(decode_of(c)) + window_bytes(c, c.windows) +
         (c.has_norm() ? values * (out + (c.z ? in : 0)) : 0);
}

// A number read and a number written of every state; nothing is read where zeros are written.
double move_bytes(const Case& c) {
  const double numbers = static_cast<double>(c.num_sequences() * std::max<int64_t>(c.layers, 1)) *
                         static_cast<double>(c.HV * c.K * c.V);
  const bool reads = c.pool != cases::Pool::start, writes = c.pool != cases::Pool::peek;
  return numbers *
         static_cast<double>((reads && writes ? cases::size_of(c.sdtype) : 0) +
                             (writes ? cases::size_of(c.write_pool ? c.odtype : c.sdtype) : 0));
}

// States in and out, and the rows of the record.
double commit_bytes(const Case& c) {
  const double states =
      static_cast<double>(std::max<int64_t>(c.layers, 1) * c.num_sequences() * c.HV);
  return states * static_cast<double>(2 * c.K * c.V * cases::size_of(c.sdtype) +
                                      4 * c.record_tokens() * c.record_width());
}

}  // namespace

double count_flops(const Case& c) {
  if (c.is_block() && c.gradient) {
    Case forward = c;
    forward.gradient = false;
    return 2 * count_flops(forward);
  }
  const double K = static_cast<double>(c.K), V = static_cast<double>(c.V), C = c.chunk;
  const double rows = static_cast<double>(c.num_real_tokens()) * static_cast<double>(c.HV);
  const double width = c.gate == cases::Gate::channel ? K : 1.0;
  switch (c.op) {
    case Op::forward:
      return rows * (C * (3 * K + 2 * V + C / 3) + 6 * K * V);
    case Op::decode:
      return rows * 7 * K * V;
    case Op::step:
      return count_flops(decode_of(c)) +
             static_cast<double>(c.num_real_tokens() * c.channels() * 2 * c.W) +
             (c.has_norm() ? rows * 6 * V : 0);
    case Op::backward: {
      const double again = C * (3 * K + V + C / 3) + 4 * K * V;
      const double once = C * (6 * K + 4 * V + 2 * C / 3) + 12 * K * V;
      return rows * (once + (c.save == Save::all      ? C * K
                             : c.save == Save::states ? again
                                                      : 2 * again));
    }
    case Op::cumsum:
    case Op::gate:
      return rows * width;
    case Op::l2norm:
      return static_cast<double>(c.num_real_tokens() * c.H) * 3 * K;
    case Op::rmsnorm:
      return static_cast<double>(c.num_real_tokens() * c.H) * 6 * K;
    case Op::kkt:
    case Op::scores:
      return rows * C * K;
    case Op::scores_inverse:
      return rows * C * (2 * K + C / 3);
    case Op::inverse:
      return rows * C * C / 3;
    case Op::move:
      return 0;
    case Op::commit:
      return static_cast<double>(std::max<int64_t>(c.layers, 1) * c.num_sequences() * c.HV) * 3 *
             K * V * static_cast<double>(c.record_tokens());
    case Op::conv:
      return static_cast<double>(c.num_real_tokens() * c.D * 2 * c.W) * (c.gradient ? 3 : 1);
    default:
      return rows * (C * (K + (c.u ? V : 0)) + (c.kg ? K : 0) + (c.qg ? K : 0));
  }
}

double count_bytes(const Case& c) {
  if (c.gradient) return cases::Instance::shapes_of(c).tensor_bytes();
  if (c.op == Op::conv) return conv_bytes(c);
  if (c.op == Op::step) return step_bytes(c);
  if (c.op == Op::move) return move_bytes(c);
  if (c.op == Op::commit) return commit_bytes(c);
  const auto size = [](DType t) { return static_cast<double>(cases::size_of(t)); };
  const double K = static_cast<double>(c.K), V = static_cast<double>(c.V), C = c.chunk;
  const double tokens = static_cast<double>(c.num_real_tokens());
  const double k_rows = tokens * static_cast<double>(c.H),
               v_rows = tokens * static_cast<double>(c.HV);
  const double g_width = c.gate == cases::Gate::none      ? 0.0
                         : c.gate == cases::Gate::channel ? K
                                                          : 1.0;
  const double gate = v_rows * g_width * size(c.gdtype);
  const double beta = c.beta == cases::Beta::none ? 0.0 : v_rows * size(c.betadtype);
  const double out = size(c.odtype), in = size(c.dtype);
  switch (c.op) {
    case Op::cumsum:
    case Op::gate:
      return gate + v_rows * g_width * out;
    case Op::l2norm:
      return k_rows * K * (in + out) + (c.rstd ? k_rows * 4 : 0);
    case Op::rmsnorm:
      return k_rows * K * (in * (c.z ? 2 : 1) + out);
    case Op::kkt:
      return k_rows * K * in + gate + beta + v_rows * C * out;
    case Op::scores:
      return 2 * k_rows * K * in + gate + v_rows * C * out;
    case Op::scores_inverse:
      return 2 * k_rows * K * in + gate + beta + 2 * v_rows * C * out;
    case Op::inverse:
      return v_rows * C * (in + out);
    case Op::wy:
      return k_rows * K * in * (c.qg ? 2 : 1) + gate + beta + v_rows * C * in +
             v_rows * K * out * (1 + (c.kg ? 1 : 0) + (c.qg ? 1 : 0)) +
             (c.u ? v_rows * V * (in + out) : 0);
    default:
      break;
  }
  const double state = static_cast<double>(c.HV) * K * V;
  const double N = static_cast<double>(c.num_sequences());
  if (c.op == Op::backward) {  // q k v g beta and their gradients, d_o, states
    const double states = c.init ? N * state * (size(c.sdtype) + 4) : 0;
    return 4 * k_rows * K * in + (c.d_o ? 3 : 2) * v_rows * V * in + 2 * gate + 2 * beta + states +
           (c.dfinal ? N * state * 4 : 0);
  }
  double bytes = 2 * k_rows * K * in + 2 * v_rows * V * in + gate;
  bytes += c.betavec ? beta * V : beta;
  if (c.gv) bytes += v_rows * V * size(c.gdtype);
  using cases::Pool;
  const bool pool = c.pool != Pool::none;
  const bool reads = pool ? c.pool != Pool::start : c.init;
  const bool per_token = c.pool == Pool::tokens || (c.pool == Pool::drafts && c.op == Op::decode);
  const bool writes =
      pool ? c.pool != Pool::peek && !per_token : c.final_state != cases::Final::none;
  bytes += N * state * size(c.sdtype) * ((reads ? 1 : 0) + (writes && !c.record ? 1 : 0));
  if (c.record) {
    bytes += 4 * N * static_cast<double>(c.HV * c.record_tokens() * c.record_width());
  }
  if (per_token && !c.record)
    bytes += tokens * state * size(c.sdtype) * (c.pool == Pool::tokens ? 2.0 / 3 : 1);
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    for (int64_t offset : c.ckpt) {
      if (offset <= c.sequence_length(n)) bytes += state * size(c.cdtype);
    }
  }
  return bytes;
}

}  // namespace deltic::cli
