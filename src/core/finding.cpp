// The words of what a check of values found.
#include "core/finding.h"

#include "core/check.h"
#include "core/error.h"

namespace deltic {
namespace {

const char* name_of(Argument argument) {
  constexpr const char* names[] = {"q",
                                   "k",
                                   "v",
                                   "x",
                                   "a",
                                   "beta",
                                   "g",
                                   "gv",
                                   "d_o",
                                   "out",
                                   "d_out",
                                   "d_w",
                                   "d_u",
                                   "d_kg",
                                   "d_qg",
                                   "z",
                                   "A_log",
                                   "dt_bias",
                                   "weight",
                                   "bias",
                                   "initial_state",
                                   "state_pool",
                                   "d_final_state",
                                   "cu_seqlens",
                                   "cu_seqlens_host",
                                   "read_index",
                                   "write_index",
                                   "ckpt_cu",
                                   "ckpt_tokens",
                                   "ckpt_slots",
                                   "accepted",
                                   "parents",
                                   "recurrent_from",
                                   "record"};
  return names[static_cast<int>(argument)];
}

// ` at sequence 1, token 2, head 3`: what of it there is.
std::string where(const Finding& f, const char* who) {
  std::string text;
  const auto add = [&](const char* what, int64_t index) {
    if (index >= 0) text += cat(text.empty() ? " at " : ", ", what, " ", index);
  };
  add("layer", f.layer);
  add(who, f.sequence);
  add("token", f.token);
  add("head", f.head);
  add("channel", f.channel);
  return text;
}

std::string expected(deltic_op op, const Finding& f) {
  // What a list of slots has: sequences, or entries of a move.
  const bool is_move = op == DELTIC_MOVE;
  const char* who = is_move ? "entry" : "sequence";
  switch (f.wrong) {
    case Wrong::first_offset:
      return cat("the first offset to be 0, got ", f.got);
    case Wrong::falling_offset:
      return cat("offsets that never decrease, ",
                 f.limit >= 0 ? cat("up to M = ", f.limit, ", ") : "", "got ", f.got, " after ",
                 f.other, " at ", f.at);
    case Wrong::last_offset:
      return cat("a last offset of at most T = ", f.limit, ", got ", f.got);
    case Wrong::few_columns:
      return cat("a column for each of the ", f.limit, " tokens of sequence ", f.sequence, ", got ",
                 f.got);
    case Wrong::slot:
      return cat("slots of -1 to ", f.limit - 1, ", got ", f.got, " at ", f.at);
    case Wrong::written_twice:
      return cat("every slot to be written once, got slot ", f.got,
                 f.sequence == f.other ? cat(" twice for ", who, " ", f.sequence)
                                       : cat(is_move ? " for entries " : " for sequences ",
                                             f.sequence, " and ", f.other));
    case Wrong::read_while_written:
      return cat("no slot that another ", who, " writes, got slot ", f.got, " for ", who, " ",
                 f.sequence, ", written by ", who, " ", f.other);
    case Wrong::token_of_sequence:
      return cat("0 to ", f.limit, ", the length of sequence ", f.sequence, ", got ", f.got, " at ",
                 f.at);
    case Wrong::not_finite:
      return cat("finite values, got ", f.value, where(f, who));
    case Wrong::growing_gate:
      return cat("positive log decays that sum to less than 8 in a chunk, got ", f.value,
                 where(f, who));
    case Wrong::accepted:
      return cat(op == DELTIC_COMMIT ? "0 to " : "1 to ", f.limit, " accepted tokens, got ", f.got,
                 " for sequence ", f.sequence);
    case Wrong::long_window:
      return cat("at most ", f.limit, " tokens (S - W + 2, with accepted counts), got ", f.got,
                 " for sequence ", f.sequence);
    case Wrong::many_drafts:
      return cat("at most ", kMaxDrafts, " drafted tokens, got ", f.got, " of sequence ",
                 f.sequence);
    case Wrong::parent:
      return cat("a parent before its token, or -1, got ", f.got, where(f, who));
    case Wrong::parent_not_kept:
      return cat("a parent whose state has a slot, got token ", f.got, ", which has none,",
                 where(f, who));
    case Wrong::start_overwritten:
      return cat(
          "the slot that the sequence starts from to last for a token with parent -1, got slot ",
          f.got, ", which token ", f.other, " writes,", where(f, who));
    default:
      return "right values, got right values";
  }
}

}  // namespace

std::string text_of(deltic_op op, const Finding& f) {
  const char* who = deltic::name_of(f.in_step ? DELTIC_STEP : op);
  return cat(who, ": ", f.in_step ? part_prefix(op) : "", name_of(f.argument), ": expected ",
             expected(op, f));
}

}  // namespace deltic
