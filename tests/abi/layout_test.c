/* What the header of 0.2.0 fixed is where it was: the same table, compiled with both headers. */
#include "layout.h"

#include <stdio.h>

int main(void) {
  int rows = 0, wrong = 0;
  for (; layout_before[rows].what != NULL; ++rows) {
    const layout_row before = layout_before[rows], now = layout_now[rows];
    if (before.value == now.value && before.size == now.size) continue;
    ++wrong;
    fprintf(stderr, "%s: expected %zu (%zu bytes) as in 0.2.0, got %zu (%zu bytes)\n", before.what,
            before.value, before.size, now.value, now.size);
  }
  printf("%d fields, structs and enumerators, %d of them moved\n", rows, wrong);
  return wrong == 0 && rows > 150 ? 0 : 1;
}
