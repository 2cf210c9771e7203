/* One fact that a header fixes: a field's offset and size, a struct's size, an enumerator's value.
 */
#include <stddef.h>

typedef struct layout_row {
  const char* what;
  size_t value, size;
} layout_row;

extern const layout_row layout_before[], layout_now[];
