/* malloc with random places and contents, for LD_PRELOAD (tools/repeat_tests.sh): a test that
 * passes because of what lies beside or in its memory fails with another seed. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void* __libc_malloc(size_t);
void __libc_free(void*);

/* Before every block: where its memory begins, and its size. */
struct Header {
  void* base;
  size_t size;
};

static uint64_t state; /* threads may race for it: the numbers are random anyway */

static uint64_t next(void) {
  if (state == 0) {
    const char* seed = getenv("RANDOM_MALLOC_SEED");
    state = (seed ? strtoull(seed, NULL, 10) : 1) * 2 + 1;
  }
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

static struct Header* header_of(void* block) { return (struct Header*)block - 1; }

static void* take(size_t size, size_t align) {
  const size_t front = (next() % 64) * 16, back = (next() % 64) * 16;
  const size_t extra = sizeof(struct Header) + align + front + back;
  if (size > SIZE_MAX - extra) return NULL;
  char* base = __libc_malloc(size + extra);
  if (base == NULL) return NULL;
  const uintptr_t first = (uintptr_t)base + sizeof(struct Header) + front;
  char* block = (char*)((first + align - 1) / align * align);
  *header_of(block) = (struct Header){base, size};
  memset(block, (int)(next() & 0xFF), size);
  return block;
}

void* malloc(size_t size) { return take(size, 16); }

void free(void* block) {
  if (block == NULL) return;
  const int saved = errno;
  __libc_free(header_of(block)->base);
  errno = saved;
}

void* calloc(size_t count, size_t size) {
  if (size != 0 && count > SIZE_MAX / size) return NULL;
  void* block = take(count * size, 16);
  return block == NULL ? NULL : memset(block, 0, count * size);
}

void* realloc(void* block, size_t size) {
  if (block == NULL) return malloc(size);
  void* other = take(size, 16);
  if (other == NULL) return NULL;
  const size_t before = header_of(block)->size;
  memcpy(other, block, before < size ? before : size);
  free(block);
  return other;
}

void* memalign(size_t align, size_t size) { return take(size, align < 16 ? 16 : align); }
void* aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
void* valloc(size_t size) { return memalign(4096, size); }
int posix_memalign(void** block, size_t align, size_t size) {
  *block = memalign(align, size);
  return *block == NULL ? ENOMEM : 0;
}
size_t malloc_usable_size(void* block) { return block == NULL ? 0 : header_of(block)->size; }
