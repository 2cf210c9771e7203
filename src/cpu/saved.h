// What forward keeps for backward on the CPU: a header that says what it belongs to, then states.
#pragma once

#include "core/saved.h"
#include "core/sizes.h"

namespace deltic::cpu {

// Where things lie in the buffer. Sizes follow from shapes alone.
struct SavedLayout {
  int64_t segment = 1;                     // chunks
  int64_t max_states = 0;                  // kept per value head (DELTIC_SAVE_STATES)
  int64_t max_chunks = 0;                  // of all sequences (DELTIC_SAVE_ALL)
  int64_t state_floats = 0, y_floats = 0;  // Kp x padded V, C x padded V
  int64_t square_floats = 0;               // C x C
  size_t bytes = 0;

  SavedLayout(const Problem& p, deltic_save save);
  int64_t chunk_floats() const { return checked_sum(state_floats, y_floats, 2 * square_floats); }
};

// The first kept state and the first chunk of each sequence: [N + 1] each.
void count_saved(const Problem& p, int64_t segment, int64_t* first_state, int64_t* first_chunk);

// How states were computed: backward computes them again from what was kept, in the same way.
enum class Arithmetic : int64_t { fp32_chunks = 0, bf16_tiles = 1, recurrence = 2 };

// Writes the header, or throws with the first difference between it and the call.
void write_saved_header(const Problem& p, deltic_save save, Arithmetic how);
deltic_save check_saved_header(const Problem& p, Arithmetic how);
float* saved_payload(const deltic_buffer& saved);

}  // namespace deltic::cpu
