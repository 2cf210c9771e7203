/* One C program for every pair of header and library: every call, the structs' sizes as its header
 * has them, guard bytes behind each. It prints the results' bits, which run_pairs.py compares.
 *
 *   program known|unknown      whether the library knows the grown header's field */
#include <deltic/deltic.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../c_tensor.h"

static int failures = 0;

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      fprintf(stderr, "program.c:%d: %s (last error: %s)\n", __LINE__, #condition, \
              deltic_last_error());                                                \
      ++failures;                                                                  \
    }                                                                              \
  } while (0)
#define EXPECT_OK(call) EXPECT((call) == DELTIC_OK)

/* A struct with bytes behind it that nobody may touch. */
enum { kGuard = 64, kMark = 0xA5 };
#define GUARDED(name)                           \
  struct {                                      \
    deltic_##name s;                            \
    unsigned char guard[kGuard];                \
  } name;                                       \
  memset(&name, kMark, sizeof name);            \
  deltic_##name##_init(&name.s, sizeof name.s); \
  EXPECT(name.s.size == sizeof name.s);         \
  EXPECT(is_zero((const unsigned char*)&name.s + 8, sizeof name.s - 8))
#define EXPECT_GUARD(name) EXPECT(is_marked(name.guard))

static int is_zero(const unsigned char* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i)
    if (bytes[i] != 0) return 0;
  return 1;
}
static int is_marked(const unsigned char* guard) {
  for (int i = 0; i < kGuard; ++i)
    if (guard[i] != kMark) return 0;
  return 1;
}

enum { T = 20, H = 2, K = 8, D = H * K, W = 4 };
static const int64_t kRows[4] = {1, T, H, K}, kGate[3] = {1, T, H}, kState[4] = {1, H, K, K};
static const int64_t kSteps[3] = {1, T, D}, kTaps[2] = {D, W};

static deltic_tensor view(float* data, int32_t rank, const int64_t* shape) {
  return tensor(data, DELTIC_F32, rank, shape);
}

static float* numbers(int count, float scale) {
  float* x = malloc((size_t)count * sizeof *x);
  for (int i = 0; i < count; ++i) x[i] = scale * (float)((i * 37 + 11) % 64 - 32) / 32.0f;
  return x;
}

static deltic_workspace workspace(uint64_t bytes) {
  const deltic_workspace w = {workspace_memory(bytes), bytes};
  return w;
}

static void print(const char* name, const float* x, int count) {
  printf("%s", name);
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, &x[i], sizeof bits);
    printf(" %08x", bits);
  }
  puts("");
}

/* The grown header's field: nobody gives it a meaning, so a library that knows it goes on, and one
 * that does not refuses it, in a sentence that names the argument. */
#ifdef DELTIC_TEST_GROWN
static int is_field_known;
static void expect_unknown(deltic_status status, const char* start) {
  if (is_field_known) {
    EXPECT(status == DELTIC_OK);
  } else {
    EXPECT(status == DELTIC_INVALID_ARGUMENT);
    EXPECT(strncmp(deltic_last_error(), start, strlen(start)) == 0);
    EXPECT(strstr(deltic_last_error(), " with a later version's field set") != NULL);
  }
}
#define WITH_FIELD(object, call, start) \
  do {                                  \
    (object).grown = 1;                 \
    expect_unknown((call), start);      \
    (object).grown = 0;                 \
  } while (0)
#else
#define WITH_FIELD(object, call, start) (void)0
#endif

static void run_sequences(void) {
  float *q = numbers(T * D, 0.4f), *k = numbers(T * D, 0.3f), *v = numbers(T * D, 1.0f);
  float *o = numbers(T * D, 0.0f), *step = numbers(T * D, 0.0f), *before = numbers(D * K, 0.5f);
  float *after = numbers(D * K, 0.0f), *g = numbers(T * H, 0.0f), *beta = numbers(T * H, 0.0f);
  float *d_o = numbers(T * D, 1.0f), *dq = numbers(T * D, 0.0f), *dk = numbers(T * D, 0.0f);
  float* d_before = numbers(D * K, 0.0f);
  uint64_t bytes = 0;
  for (int i = 0; i < T * H; ++i) g[i] = -0.05f * (float)(i % 7), beta[i] = 0.1f * (float)(i % 9);
  GUARDED(options);
  GUARDED(tensors);
  GUARDED(backward_tensors);
  GUARDED(memory_plan);
  options.s.qk_l2norm = 1;
  tensors.s.q = view(q, 4, kRows), tensors.s.k = view(k, 4, kRows);
  tensors.s.v = view(v, 4, kRows), tensors.s.o = view(o, 4, kRows);
  tensors.s.g = view(g, 3, kGate), tensors.s.beta = view(beta, 3, kGate);
  tensors.s.initial_state = view(before, 4, kState);
  tensors.s.final_state = view(after, 4, kState);

  options.s.save = DELTIC_SAVE_ALL;
  EXPECT_OK(deltic_forward_saved(&options.s, &tensors.s, &bytes));
  deltic_workspace saved = workspace(bytes);
  tensors.s.saved = saved;
  EXPECT_OK(deltic_forward_workspace(&options.s, &tensors.s, NULL, &bytes));
  deltic_workspace w = workspace(bytes);
  EXPECT_OK(deltic_forward(&options.s, &tensors.s, &w, NULL));
  print("o", o, T * D);
  print("after", after, D * K);
  WITH_FIELD(options.s, deltic_forward(&options.s, &tensors.s, &w, NULL),
             "forward: options.size: ");
  WITH_FIELD(tensors.s, deltic_forward(&options.s, &tensors.s, &w, NULL),
             "forward: tensors.size: ");
  free(w.data);

  options.s.save = DELTIC_SAVE_NONE;
  memset(&tensors.s.saved, 0, sizeof tensors.s.saved);
  tensors.s.o = view(step, 4, kRows);
  EXPECT_OK(deltic_decode_workspace(&options.s, &tensors.s, NULL, &bytes));
  w = workspace(bytes);
  EXPECT_OK(deltic_decode(&options.s, &tensors.s, &w, NULL));
  WITH_FIELD(tensors.s, deltic_decode(&options.s, &tensors.s, &w, NULL), "decode: tensors.size: ");
  free(w.data);
  print("step", step, T * D);
  for (int i = 0; i < T * D; ++i) EXPECT(fabsf(step[i] - o[i]) < 1e-4f); /* the chunked form's */

  memset(&tensors.s.o, 0, sizeof tensors.s.o);
  memset(&tensors.s.final_state, 0, sizeof tensors.s.final_state);
  tensors.s.saved = saved;
  backward_tensors.s.forward = &tensors.s;
  backward_tensors.s.d_o = view(d_o, 4, kRows);
  backward_tensors.s.dq = view(dq, 4, kRows), backward_tensors.s.dk = view(dk, 4, kRows);
  backward_tensors.s.d_initial_state = view(d_before, 4, kState);
  EXPECT_OK(deltic_backward_workspace(&options.s, &backward_tensors.s, NULL, &bytes));
  w = workspace(bytes);
  EXPECT_OK(deltic_backward(&options.s, &backward_tensors.s, &w, NULL));
  print("dq", dq, T * D);
  print("dk", dk, T * D);
  print("d_before", d_before, D * K);
  EXPECT_OK(deltic_backward_memory(&options.s, &backward_tensors.s, DELTIC_SAVE_ALL, NULL,
                                   &memory_plan.s));
  EXPECT(memory_plan.s.size == sizeof memory_plan.s && memory_plan.s.chunks == 1);
  EXPECT(memory_plan.s.saved_bytes == saved.bytes && memory_plan.s.workspace_bytes == bytes);
  WITH_FIELD(tensors.s, deltic_backward(&options.s, &backward_tensors.s, &w, NULL),
             "backward: forward.size: ");
  WITH_FIELD(backward_tensors.s, deltic_backward(&options.s, &backward_tensors.s, &w, NULL),
             "backward: tensors.size: ");
  WITH_FIELD(memory_plan.s,
             deltic_backward_memory(&options.s, &backward_tensors.s, DELTIC_SAVE_ALL, NULL,
                                    &memory_plan.s),
             "backward: plan.size: ");
  EXPECT_GUARD(options);
  EXPECT_GUARD(tensors);
  EXPECT_GUARD(backward_tensors);
  EXPECT_GUARD(memory_plan);
  float* all[] = {q, k, v, o, step, before, after, g, beta, d_o, dq, dk, d_before};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) free(all[i]);
  free(w.data), free(saved.data);
}

static void run_blocks(void) {
  float *x = numbers(T * D, 1.0f), *y = numbers(T * D, 0.0f), *dy = numbers(T * D, 0.5f);
  float* dx = numbers(T * D, 0.0f);
  uint64_t bytes = 0;
  GUARDED(block_tensors);
  GUARDED(block_backward_tensors);
  block_tensors.s.x = view(x, 4, kRows), block_tensors.s.out = view(y, 4, kRows);
  EXPECT_OK(deltic_block_workspace(DELTIC_L2NORM, NULL, &block_tensors.s, NULL, &bytes));
  deltic_workspace w = workspace(bytes);
  EXPECT_OK(deltic_block(DELTIC_L2NORM, NULL, &block_tensors.s, &w, NULL));
  print("y", y, T * D);
  WITH_FIELD(block_tensors.s, deltic_block(DELTIC_L2NORM, NULL, &block_tensors.s, &w, NULL),
             "l2norm: tensors.size: ");
  free(w.data);
  memset(&block_tensors.s.out, 0, sizeof block_tensors.s.out);
  block_backward_tensors.s.forward = &block_tensors.s;
  block_backward_tensors.s.d_out = view(dy, 4, kRows);
  block_backward_tensors.s.dx = view(dx, 4, kRows);
  EXPECT_OK(deltic_block_backward_workspace(DELTIC_L2NORM, NULL, &block_backward_tensors.s, NULL,
                                            &bytes));
  w = workspace(bytes);
  EXPECT_OK(deltic_block_backward(DELTIC_L2NORM, NULL, &block_backward_tensors.s, &w, NULL));
  print("dx", dx, T * D);
  WITH_FIELD(block_tensors.s,
             deltic_block_backward(DELTIC_L2NORM, NULL, &block_backward_tensors.s, &w, NULL),
             "l2norm: forward.size: ");
  WITH_FIELD(block_backward_tensors.s,
             deltic_block_backward(DELTIC_L2NORM, NULL, &block_backward_tensors.s, &w, NULL),
             "l2norm: tensors.size: ");
  EXPECT_GUARD(block_tensors);
  EXPECT_GUARD(block_backward_tensors);
  free(w.data), free(x), free(y), free(dy), free(dx);
}

static void run_conv(void) {
  float *x = numbers(T * D, 1.0f), *weight = numbers(D * W, 0.5f), *y = numbers(T * D, 0.0f);
  float *dy = numbers(T * D, 0.5f), *dx = numbers(T * D, 0.0f), *dweight = numbers(D * W, 0.0f);
  uint64_t bytes = 0;
  GUARDED(options);
  GUARDED(conv_tensors);
  GUARDED(conv_backward_tensors);
  options.s.activation = DELTIC_ACTIVATION_SILU;
  conv_tensors.s.x = view(x, 3, kSteps), conv_tensors.s.weight = view(weight, 2, kTaps);
  conv_tensors.s.out = view(y, 3, kSteps);
  EXPECT_OK(deltic_conv_workspace(&options.s, &conv_tensors.s, NULL, &bytes));
  deltic_workspace w = workspace(bytes);
  EXPECT_OK(deltic_conv(&options.s, &conv_tensors.s, &w, NULL));
  print("conv", y, T * D);
  WITH_FIELD(conv_tensors.s, deltic_conv(&options.s, &conv_tensors.s, &w, NULL),
             "conv: tensors.size: ");
  free(w.data);
  memset(&conv_tensors.s.out, 0, sizeof conv_tensors.s.out);
  conv_backward_tensors.s.forward = &conv_tensors.s;
  conv_backward_tensors.s.d_out = view(dy, 3, kSteps);
  conv_backward_tensors.s.dx = view(dx, 3, kSteps);
  conv_backward_tensors.s.dweight = view(dweight, 2, kTaps);
  EXPECT_OK(deltic_conv_backward_workspace(&options.s, &conv_backward_tensors.s, NULL, &bytes));
  w = workspace(bytes);
  EXPECT_OK(deltic_conv_backward(&options.s, &conv_backward_tensors.s, &w, NULL));
  print("conv dx", dx, T * D);
  print("conv dweight", dweight, D * W);
  WITH_FIELD(conv_tensors.s, deltic_conv_backward(&options.s, &conv_backward_tensors.s, &w, NULL),
             "conv: forward.size: ");
  WITH_FIELD(conv_backward_tensors.s,
             deltic_conv_backward(&options.s, &conv_backward_tensors.s, &w, NULL),
             "conv: tensors.size: ");
  EXPECT_GUARD(options);
  EXPECT_GUARD(conv_tensors);
  EXPECT_GUARD(conv_backward_tensors);
  free(w.data), free(x), free(weight), free(y), free(dy), free(dx), free(dweight);
}

/* What came after 0.2.0: nothing is printed, as the program of that header has none of it. */
#ifdef DELTIC_TEST_AFTER_0_2
static void run_move(void) {
  float *from = numbers(2 * D * K, 1.0f), *to = numbers(D * K, 0.0f);
  int32_t read[1] = {1}, write[1] = {0};
  static const int64_t kSlots[] = {2, H, K, K}, kOne[] = {1};
  uint64_t bytes = 0;
  GUARDED(move_tensors);
  move_tensors.s.state_pool = view(from, 4, kSlots);
  move_tensors.s.write_pool = view(to, 4, kState);
  move_tensors.s.read_index = tensor(read, DELTIC_I32, 1, kOne);
  move_tensors.s.write_index = tensor(write, DELTIC_I32, 1, kOne);
  EXPECT_OK(deltic_move_workspace(NULL, &move_tensors.s, NULL, &bytes));
  deltic_workspace w = workspace(bytes);
  EXPECT_OK(deltic_move(NULL, &move_tensors.s, &w, NULL));
  EXPECT(memcmp(to, from + D * K, sizeof(float) * D * K) == 0);
  WITH_FIELD(move_tensors.s, deltic_move(NULL, &move_tensors.s, &w, NULL), "move: tensors.size: ");
  EXPECT_GUARD(move_tensors);
  free(w.data), free(from), free(to);
}

/* One drafted token, accepted: the state that decode leaves. */
static void run_commit(void) {
  float *q = numbers(D, 0.4f), *v = numbers(D, 1.0f), *o = numbers(D, 0.0f);
  float *pool = numbers(D * K, 1.0f), *after = numbers(D * K, 1.0f);
  float* record = numbers(H * 2 * K, 0.0f);
  int32_t accepted[1] = {1};
  static const int64_t kToken[] = {1, 1, H, K}, kRecord[] = {1, 1, H, 2 * K}, kOne[] = {1};
  uint64_t bytes = 0;
  GUARDED(tensors);
  GUARDED(commit_tensors);
  tensors.s.q = view(q, 4, kToken), tensors.s.k = view(q, 4, kToken);
  tensors.s.v = view(v, 4, kToken), tensors.s.o = view(o, 4, kToken);
  tensors.s.state_pool = view(after, 4, kState);
  EXPECT_OK(deltic_decode_workspace(NULL, &tensors.s, NULL, &bytes));
  deltic_workspace w = workspace(bytes);
  EXPECT_OK(deltic_decode(NULL, &tensors.s, &w, NULL));
  tensors.s.state_pool = view(pool, 4, kState), tensors.s.record = view(record, 4, kRecord);
  EXPECT_OK(deltic_decode(NULL, &tensors.s, &w, NULL));
  free(w.data);
  commit_tensors.s.state_pool = view(pool, 4, kState);
  commit_tensors.s.record = view(record, 4, kRecord);
  commit_tensors.s.accepted = tensor(accepted, DELTIC_I32, 1, kOne);
  EXPECT_OK(deltic_commit_workspace(NULL, &commit_tensors.s, NULL, &bytes));
  w = workspace(bytes);
  EXPECT_OK(deltic_commit(NULL, &commit_tensors.s, &w, NULL));
  EXPECT(memcmp(pool, after, sizeof(float) * D * K) == 0);
  WITH_FIELD(commit_tensors.s, deltic_commit(NULL, &commit_tensors.s, &w, NULL),
             "commit: tensors.size: ");
  EXPECT_GUARD(commit_tensors);
  free(w.data), free(q), free(v), free(o), free(pool), free(after), free(record);
}

/* One token without states before it: o is (q k^T) v of what the convolution makes of x. */
static void run_step(void) {
  enum { kChannels = 2 * H * K + D };
  float *x = numbers(kChannels, 1.0f), *weight = numbers(kChannels * W, 0.5f);
  float *after = numbers(D * K, 0.0f), *out = numbers(D, 0.0f);
  static const int64_t kToken[] = {1, 1, H, K}, kRow[] = {1, 1, kChannels}, kAll[] = {kChannels, W};
  uint64_t bytes = 0;
  GUARDED(options);
  GUARDED(conv_tensors);
  GUARDED(tensors);
  GUARDED(block_tensors);
  GUARDED(step_tensors);
  options.s.activation = DELTIC_ACTIVATION_SILU;
  conv_tensors.s.x = view(x, 3, kRow), conv_tensors.s.weight = view(weight, 2, kAll);
  tensors.s.final_state = view(after, 4, kState);
  block_tensors.s.out = view(out, 4, kToken);
  step_tensors.s.conv = &conv_tensors.s, step_tensors.s.decode = &tensors.s;
  step_tensors.s.norm = &block_tensors.s;
  EXPECT_OK(deltic_step_workspace(&options.s, &step_tensors.s, NULL, &bytes));
  deltic_workspace w = workspace(bytes);
  EXPECT_OK(deltic_step(&options.s, &step_tensors.s, &w, NULL));
  EXPECT(out[0] != 0 && out[D - 1] != 0);
  WITH_FIELD(step_tensors.s, deltic_step(&options.s, &step_tensors.s, &w, NULL),
             "step: tensors.size: ");
  WITH_FIELD(conv_tensors.s, deltic_step(&options.s, &step_tensors.s, &w, NULL),
             "step: conv.size: ");
  WITH_FIELD(tensors.s, deltic_step(&options.s, &step_tensors.s, &w, NULL), "step: decode.size: ");
  WITH_FIELD(block_tensors.s, deltic_step(&options.s, &step_tensors.s, &w, NULL),
             "step: norm.size: ");
  EXPECT_GUARD(step_tensors);
  EXPECT_GUARD(options);
  free(w.data), free(x), free(weight), free(after), free(out);
}
#endif

/* Sizes that are none, and null. */
static void run_init(void) {
  uint64_t words[2 + kGuard / 8];
  memset(words, kMark, sizeof words);
  deltic_options_init((deltic_options*)words, 7);
  EXPECT(is_marked((const unsigned char*)words));
  deltic_options_init((deltic_options*)words, 16);
  EXPECT(words[0] == 16 && words[1] == 0 && is_marked((const unsigned char*)(words + 2)));
  deltic_options_init(NULL, sizeof(deltic_options));
  EXPECT(deltic_forward((deltic_options*)words, NULL, NULL, NULL) == DELTIC_INVALID_ARGUMENT);
  EXPECT(strcmp(deltic_last_error(),
                "forward: options.size: expected at least 88, got 16 (sizeof the struct: see "
                "deltic_options_init)") == 0);
}

int main(int count, char** arguments) {
  const int is_known = count == 2 && strcmp(arguments[1], "known") == 0;
  if (!is_known && (count != 2 || strcmp(arguments[1], "unknown") != 0)) return 2;
#ifdef DELTIC_TEST_GROWN
  is_field_known = is_known;
#endif
  EXPECT_OK(deltic_check_abi(DELTIC_ABI_VERSION));
  run_init();
  run_sequences();
  run_blocks();
  run_conv();
#ifdef DELTIC_TEST_AFTER_0_2
  run_move();
  run_commit();
  run_step();
#endif
  return failures == 0 ? 0 : 1;
}
