/* Views and scratch memory for the tests in C, whatever header they are compiled with. */
#include <deltic/deltic.h>
#include <stdlib.h>
#include <string.h>

static deltic_tensor tensor(void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  deltic_tensor t;
  int64_t stride = 1;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.dtype = dtype;
  t.rank = rank;
  for (int32_t i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    stride *= shape[i];
  }
  return t;
}

/* aligned_alloc wants a multiple of the alignment. */
static void* workspace_memory(uint64_t bytes) {
  return bytes > 0 ? aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64)) : NULL;
}
