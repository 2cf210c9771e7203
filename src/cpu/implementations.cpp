// The CPU backend's lists, best first; the plain one last.
#include "core/check.h"
#include "cpu/cpu.h"
#include "cpu/features.h"
#include "cpu/plain.h"
#include "cpu/saved.h"
#include "cpu/simd/simd.h"

namespace deltic::cpu {
namespace {

// Tiles multiply bf16: exact for bf16 inputs, a loss for the others.
const char* takes_bf16(const Problem& p) {
  if (const char* reason = refuse_fp64(p)) return reason;
  return p.q.dtype == DType::bf16  ? nullptr
         : p.q.dtype == DType::f32 ? "q, k and v are fp32, tiles multiply bf16"
                                   : "q, k and v are fp16, tiles multiply bf16";
}

// Chunks know one beta and one decay for all value columns of a token.
const char* refuse_value_wise(const Problem& p) {
  if (p.beta_kind == BetaKind::value)
    return "beta is value-wise, which the recurrence (cpu.plain) alone takes";
  if (p.gv) return "gv is value-wise, which the recurrence (cpu.plain) alone takes";
  return refuse_fp64(p);
}
const char* takes_bf16_backward(const Problem& p) {
  const char* reason = refuse_value_wise(p);
  return reason != nullptr ? reason : takes_bf16(p);
}

// Fixed room, so that the first call of a process allocates as little as the others: nothing.
struct List {
  Implementation items[6] = {};
  size_t size = 0;

  void add(const Implementation& item) { items[size++] = item; }
  void add(std::span<const SimdDoor> doors, const char* (*refuse)(const Problem&)) {
    for (const SimdDoor& d : doors) {
      add({d.name, d.missing, refuse, d.workspace_bytes, d.run, false});
    }
  }
};

struct Lists {
  List of[DELTIC_NUM_OPS];

  Lists() {
    of[DELTIC_FORWARD].add(tile_forward_doors(), takes_bf16);
    of[DELTIC_FORWARD].add(forward_doors(), refuse_fp64);
    of[DELTIC_DECODE].add(decode_doors(), refuse_fp64);
    of[DELTIC_BACKWARD].add(tile_backward_doors(), takes_bf16_backward);
    of[DELTIC_BACKWARD].add(backward_doors(), refuse_value_wise);
    of[DELTIC_CONV].add(conv_doors(), refuse_fp64);
    of[DELTIC_RMSNORM].add(norm_doors(), refuse_fp64);
    of[DELTIC_MOVE].add(move_doors(), refuse_fp64);
    of[DELTIC_COMMIT].add(commit_doors(), refuse_fp64);
    for (int i = 0; i < DELTIC_NUM_OPS; ++i) {
      if (i == DELTIC_STEP) continue;  // runs those of its parts
      const bool goes_by_chunks = is_block(static_cast<deltic_op>(i)) && i != DELTIC_RMSNORM;
      if (goes_by_chunks) of[i].add(block_doors(), refuse_fp64);
      of[i].add(plain(static_cast<deltic_op>(i)));
    }
  }
};

}  // namespace

ImplementationList implementations(deltic_op op) {
  static const Lists lists;
  return {lists.of[op].items, lists.of[op].size};
}

SavedSizes saved_sizes(const Problem& p, deltic_save save) {
  const SavedLayout layout(p, save);
  return {layout.segment, std::max<int64_t>(0, layout.max_states + layout.max_chunks),
          layout.bytes};
}

std::string features_used() {
  std::string s;
  for (const Implementation& i : implementations(DELTIC_FORWARD)) {
    if (i.missing() != nullptr) continue;
    if (!s.empty()) s += ' ';
    s += i.name;
  }
  return s;
}

}  // namespace deltic::cpu
