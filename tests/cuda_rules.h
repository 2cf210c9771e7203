// Which cases the CUDA implementations take, by shapes alone: so that a machine without a GPU can
// count them. A test on a GPU compares these rules with what the implementations say.
#pragma once

#include <string_view>

#include "cases/case.h"

namespace deltic::test {

// cuda.sm90.forward: chunks of 64, rows of 16 bits and up to 128 columns, whose strides are
// multiples of 16 bytes and not 0.
inline bool sm90_forward_takes(const cases::Case& c) {
  return c.listed_op() == Op::forward && cases::is_half(c.dtype) && c.K <= 128 && c.V <= 128 &&
         c.K % 8 == 0 && c.V % 8 == 0 && c.chunk == 64 && c.segment % 64 == 0 &&
         c.strided != cases::Layout::wide && c.strided != cases::Layout::expand;
}

// cuda.sm90.backward: chunks of 64, rows of 16 bits and 64 or 128 columns, whose strides are
// multiples of 16 bytes.
inline bool sm90_backward_takes(const cases::Case& c) {
  return c.op == Op::backward && cases::is_half(c.dtype) && (c.K == 64 || c.K == 128) &&
         (c.V == 64 || c.V == 128) && c.chunk == 64 && !c.betavec && !c.gv &&
         c.strided != cases::Layout::wide;
}

// cuda.general: everything but the convolution, the gated norm, moves and steps.
inline bool cuda_general_takes(const cases::Case& c) {
  return c.op != Op::conv && c.op != Op::rmsnorm && c.op != Op::move && c.op != Op::step;
}

// cuda.decode: keys of 64 or 128 channels; rows whose runs of four, and states whose runs of 16
// bytes, lie at multiples of their size.
inline bool has_decode_state(const cases::Case& c) {
  return c.init || c.final_state != cases::Final::none || c.pool != cases::Pool::none;
}
inline bool decode_kernels_take(const cases::Case& c) {
  if (c.listed_op() != Op::decode || (c.K != 64 && c.K != 128) || c.betavec || c.gv ||
      !c.ckpt.empty())
    return false;
  const int64_t run = 16 / cases::size_of(c.sdtype);
  return c.strided != cases::Layout::wide &&
         (!has_decode_state(c) || c.state == StateLayout::vk || c.V % run == 0);
}
inline bool cuda_decode_takes(const cases::Case& c) { return decode_kernels_take(c) && !c.record; }

// cuda.drafts: of them fp32 states that are not written, up to 16 tokens in rows of 16 bits.
inline bool cuda_drafts_takes(const cases::Case& c) {
  const bool keeps_states =
      c.record || (c.pool == cases::Pool::none && c.final_state == cases::Final::none && !c.packed);
  return decode_kernels_take(c) && keeps_states && c.longest() <= 16 && cases::is_half(c.dtype) &&
         !(has_decode_state(c) && cases::is_half(c.sdtype));
}

// cuda.conv: the convolution, all of it.
inline bool cuda_conv_takes(const cases::Case& c) { return c.op == Op::conv; }

// cuda.norm: the gated norm, all of it.
inline bool cuda_norm_takes(const cases::Case& c) { return c.op == Op::rmsnorm; }

// cuda.move: the move, all of it.
inline bool cuda_move_takes(const cases::Case& c) { return c.op == Op::move; }

// cuda.parts: steps, all of them.
inline bool cuda_parts_takes(const cases::Case& c) { return c.op == Op::step; }

struct CudaRule {
  std::string_view impl;
  bool (*takes)(const cases::Case&);
};
inline constexpr CudaRule kCudaRules[] = {{"cuda.sm90.forward", sm90_forward_takes},
                                          {"cuda.sm90.backward", sm90_backward_takes},
                                          {"cuda.decode", cuda_decode_takes},
                                          {"cuda.drafts", cuda_drafts_takes},
                                          {"cuda.conv", cuda_conv_takes},
                                          {"cuda.norm", cuda_norm_takes},
                                          {"cuda.move", cuda_move_takes},
                                          {"cuda.parts", cuda_parts_takes},
                                          {"cuda.general", cuda_general_takes}};

}  // namespace deltic::test
