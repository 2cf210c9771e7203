/* The C interface from plain C11: versions, calls, errors per thread, callbacks, settings. */
#include <deltic/deltic.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "c_tensor.h"

static int failures = 0;

#define EXPECT(condition)                                                             \
  do {                                                                                \
    if (!(condition)) {                                                               \
      fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
              deltic_last_error());                                                   \
      ++failures;                                                                     \
    }                                                                                 \
  } while (0)

enum { T = 4, H = 1, K = 8, V = 8 };

static const int64_t kRow[4] = {1, T, H, K}, kGate[3] = {1, T, H}, kState[4] = {1, H, K, V};

typedef struct Problem {
  float q[T * K], k[T * K], v[T * V], o[T * V], g[T], beta[T], before[K * V], after[K * V];
  deltic_options options;
  deltic_tensors tensors;
} Problem;

static void make_problem(Problem* p) {
  for (int i = 0; i < T * K; ++i) {
    p->q[i] = 0.1f * (float)(i % 7);
    p->k[i] = 0.1f * (float)(i % 5 - 2);
    p->v[i] = 0.2f * (float)(i % 3);
    p->o[i] = NAN;
  }
  for (int t = 0; t < T; ++t) {
    p->g[t] = -0.1f * (float)t;
    p->beta[t] = 0.5f;
  }
  for (int i = 0; i < K * V; ++i) {
    p->before[i] = 0.01f * (float)i;
    p->after[i] = NAN;
  }
  deltic_options_init(&p->options, sizeof p->options);
  deltic_tensors_init(&p->tensors, sizeof p->tensors);
  p->tensors.q = tensor(p->q, DELTIC_F32, 4, kRow);
  p->tensors.k = tensor(p->k, DELTIC_F32, 4, kRow);
  p->tensors.v = tensor(p->v, DELTIC_F32, 4, kRow);
  p->tensors.o = tensor(p->o, DELTIC_F32, 4, kRow);
  p->tensors.g = tensor(p->g, DELTIC_F32, 3, kGate);
  p->tensors.beta = tensor(p->beta, DELTIC_F32, 3, kGate);
  p->tensors.initial_state = tensor(p->before, DELTIC_F32, 4, kState);
  p->tensors.final_state = tensor(p->after, DELTIC_F32, 4, kState);
}

static void test_versions(void) {
  EXPECT(strcmp(deltic_version(), DELTIC_VERSION_STRING) == 0);
  EXPECT(deltic_abi_version() == DELTIC_ABI_VERSION);
  EXPECT(deltic_check_abi(DELTIC_ABI_VERSION) == DELTIC_OK);
  EXPECT(deltic_check_abi(DELTIC_ABI_VERSION + 1) == DELTIC_ABI_MISMATCH);
  EXPECT(strcmp(deltic_last_error(), "check_abi: header: expected ABI 2, got 3") == 0);
  EXPECT(strcmp(deltic_status_name(DELTIC_OK), "ok") == 0);
  EXPECT(strcmp(deltic_status_name(DELTIC_INVALID_ARGUMENT), "invalid argument") == 0);
  EXPECT(strcmp(deltic_status_name((deltic_status)99), "unknown status") == 0);
  EXPECT(strcmp(deltic_op_name(DELTIC_FORWARD), "forward") == 0);
  EXPECT(strcmp(deltic_op_name(DELTIC_WY), "wy") == 0);
  EXPECT(strcmp(deltic_op_name((deltic_op)99), "unknown operation") == 0);
}

static void test_init(void) {
  deltic_options options;
  deltic_tensors tensors;
  deltic_block_tensors blocks;
  deltic_block_backward_tensors gradients;
  memset(&options, 0xFF, sizeof options);
  memset(&tensors, 0xFF, sizeof tensors);
  memset(&blocks, 0xFF, sizeof blocks);
  memset(&gradients, 0xFF, sizeof gradients);
  deltic_options_init(&options, sizeof options);
  deltic_tensors_init(&tensors, sizeof tensors);
  deltic_block_tensors_init(&blocks, sizeof blocks);
  deltic_block_backward_tensors_init(&gradients, sizeof gradients);
  deltic_block_backward_tensors_init(NULL, sizeof gradients);
  EXPECT(gradients.size == sizeof gradients && gradients.ddt_bias.rank == 0);
  EXPECT(gradients.forward == NULL);
  EXPECT(options.size == sizeof options && options.chunk == 0 && options.impl == NULL);
  EXPECT(tensors.size == sizeof tensors && tensors.q.rank == 0 && tensors.ckpt_states.rank == 0);
  EXPECT(blocks.size == sizeof blocks && blocks.rstd.rank == 0);
}

/* The recurrence, written out. */
static void by_hand(const Problem* p, float* o, float* state) {
  double S[K][V];
  for (int d = 0; d < K; ++d)
    for (int c = 0; c < V; ++c) S[d][c] = p->before[d * V + c];
  for (int t = 0; t < T; ++t) {
    for (int d = 0; d < K; ++d)
      for (int c = 0; c < V; ++c) S[d][c] *= exp(p->g[t]);
    for (int c = 0; c < V; ++c) {
      double read = 0;
      for (int d = 0; d < K; ++d) read += S[d][c] * p->k[t * K + d];
      const double u = p->beta[t] * (p->v[t * V + c] - read);
      double out = 0;
      for (int d = 0; d < K; ++d) {
        S[d][c] += p->k[t * K + d] * u;
        out += S[d][c] * p->q[t * K + d];
      }
      o[t * V + c] = (float)(out / sqrt(K));
    }
  }
  for (int d = 0; d < K; ++d)
    for (int c = 0; c < V; ++c) state[d * V + c] = (float)S[d][c];
}

static double distance(const float* a, const float* b, int count) {
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    const double d = fabs((double)a[i] - (double)b[i]);
    if (!(d <= worst)) worst = d; /* NaN counts */
  }
  return worst;
}

typedef deltic_status (*query_fn)(const deltic_options*, const deltic_tensors*, void*, uint64_t*);
typedef deltic_status (*run_fn)(const deltic_options*, const deltic_tensors*,
                                const deltic_workspace*, void*);

static void test_call(query_fn query, run_fn run) {
  Problem p;
  float o[T * V], state[K * V];
  uint64_t bytes = 0;
  make_problem(&p);
  by_hand(&p, o, state);
  EXPECT(query(&p.options, &p.tensors, NULL, &bytes) == DELTIC_OK);
  deltic_workspace workspace = {workspace_memory(bytes), bytes};
  EXPECT(run(&p.options, &p.tensors, &workspace, NULL) == DELTIC_OK);
  EXPECT(distance(p.o, o, T * V) < 1e-5);
  EXPECT(distance(p.after, state, K * V) < 1e-5);
  /* Defaults without options; the same numbers again. */
  memset(p.o, 0xFF, sizeof p.o);
  EXPECT(run(NULL, &p.tensors, &workspace, NULL) == DELTIC_OK);
  EXPECT(distance(p.o, o, T * V) < 1e-5);
  free(workspace.data);
}

static void test_block(void) {
  float x[T * K], out[T * K], rstd[T];
  deltic_block_tensors tensors;
  uint64_t bytes = 0;
  for (int i = 0; i < T * K; ++i) x[i] = (float)(i % 9) - 4.0f;
  deltic_block_tensors_init(&tensors, sizeof tensors);
  tensors.x = tensor(x, DELTIC_F32, 4, kRow);
  tensors.out = tensor(out, DELTIC_F32, 4, kRow);
  tensors.rstd = tensor(rstd, DELTIC_F32, 3, kGate);
  EXPECT(deltic_block_workspace(DELTIC_L2NORM, NULL, &tensors, NULL, &bytes) == DELTIC_OK);
  deltic_workspace workspace = {workspace_memory(bytes), bytes};
  EXPECT(deltic_block(DELTIC_L2NORM, NULL, &tensors, &workspace, NULL) == DELTIC_OK);
  for (int t = 0; t < T; ++t) {
    double sum = 1e-6;
    for (int d = 0; d < K; ++d) sum += (double)x[t * K + d] * x[t * K + d];
    EXPECT(fabs(rstd[t] - 1 / sqrt(sum)) < 1e-6);
    for (int d = 0; d < K; ++d) EXPECT(fabs(out[t * K + d] - x[t * K + d] / sqrt(sum)) < 1e-6);
  }
  /* In C any number is a value of the enum. */
  EXPECT(deltic_block((deltic_op)99, NULL, &tensors, &workspace, NULL) == DELTIC_INVALID_ARGUMENT);
  EXPECT(
      strcmp(
          deltic_last_error(),
          "block: op: expected a building block, 2 to 8, 11 or 12, got unknown operation (99)") ==
      0);
  EXPECT(deltic_implementation((deltic_op)99, DELTIC_CPU, 0) == NULL);
  EXPECT(deltic_implementation(DELTIC_FORWARD, (deltic_device_type)99, 0) == NULL);
  free(workspace.data);
}

static void count_choice(void* user, const char* name, int32_t accepts, int32_t chosen,
                         const char* sentence) {
  EXPECT(name != NULL && sentence != NULL && (accepts || !chosen));
  *(int*)user += chosen;
}

/* The norm's gradient: dx = r (dy - y (y . dy)). */
static void test_block_backward(void) {
  float x[T * K], dy[T * K], dx[T * K];
  deltic_block_backward_tensors tensors;
  uint64_t bytes = 0;
  int chosen = 0;
  for (int i = 0; i < T * K; ++i) x[i] = (float)(i % 9) - 4.0f, dy[i] = (float)(i % 7) - 2.0f;
  deltic_block_tensors inputs;
  deltic_block_tensors_init(&inputs, sizeof inputs);
  deltic_block_backward_tensors_init(&tensors, sizeof tensors);
  tensors.forward = &inputs;
  inputs.x = tensor(x, DELTIC_F32, 4, kRow);
  tensors.d_out = tensor(dy, DELTIC_F32, 4, kRow);
  tensors.dx = tensor(dx, DELTIC_F32, 4, kRow);
  EXPECT(deltic_block_backward_workspace(DELTIC_L2NORM, NULL, &tensors, NULL, &bytes) == DELTIC_OK);
  EXPECT(deltic_block_backward_explain(DELTIC_L2NORM, NULL, &tensors, count_choice, &chosen) ==
         DELTIC_OK);
  EXPECT(chosen == 1);
  deltic_workspace workspace = {workspace_memory(bytes), bytes};
  EXPECT(deltic_block_backward(DELTIC_L2NORM, NULL, &tensors, &workspace, NULL) == DELTIC_OK);
  for (int t = 0; t < T; ++t) {
    double sum = 1e-6, along = 0;
    for (int d = 0; d < K; ++d) sum += (double)x[t * K + d] * x[t * K + d];
    for (int d = 0; d < K; ++d) along += (double)x[t * K + d] * dy[t * K + d] / sum;
    for (int d = 0; d < K; ++d)
      EXPECT(fabs(dx[t * K + d] - (dy[t * K + d] - along * x[t * K + d]) / sqrt(sum)) < 1e-5);
  }
  EXPECT(deltic_block_backward(DELTIC_DECODE, NULL, &tensors, &workspace, NULL) ==
         DELTIC_INVALID_ARGUMENT);
  EXPECT(strcmp(deltic_last_error(),
                "block_backward: op: expected a building block, 2 to 8 or 12, got decode (1)") ==
         0);
  free(workspace.data);
}

static void test_error(void) {
  Problem p;
  const deltic_workspace none = {NULL, 0};
  make_problem(&p);
  p.tensors.k.shape[3] = 4;
  EXPECT(deltic_forward(&p.options, &p.tensors, &none, NULL) == DELTIC_INVALID_ARGUMENT);
  EXPECT(strcmp(deltic_last_error(), "forward: k: expected shape [1, 4, 1, 8], got [1, 4, 1, 4]") ==
         0);
  EXPECT(isnan(p.o[0]));
  /* A call that succeeds leaves the last error alone. */
  EXPECT(deltic_set_num_threads(0) == DELTIC_OK);
  EXPECT(strncmp(deltic_last_error(), "forward: k:", 11) == 0);
  EXPECT(deltic_forward(NULL, NULL, NULL, NULL) == DELTIC_INVALID_ARGUMENT);
  EXPECT(strcmp(deltic_last_error(), "forward: tensors: expected a struct, got a null pointer") ==
         0);
}

/* Every thread has its own last error. */
typedef struct ThreadCase {
  int32_t chunk;
  char first[64];
  char text[256];
  pthread_barrier_t* barrier;
} ThreadCase;

static void* fail_in_thread(void* argument) {
  ThreadCase* c = argument;
  Problem p;
  make_problem(&p);
  snprintf(c->first, sizeof c->first, "%s", deltic_last_error());
  p.options.chunk = c->chunk;
  deltic_forward(&p.options, &p.tensors, NULL, NULL);
  pthread_barrier_wait(c->barrier); /* both have failed before either reads */
  snprintf(c->text, sizeof c->text, "%s", deltic_last_error());
  return NULL;
}

static void test_threads(void) {
  pthread_barrier_t barrier;
  pthread_t threads[2];
  ThreadCase cases[2] = {{.chunk = 5, .barrier = &barrier}, {.chunk = 7, .barrier = &barrier}};
  char before[256];
  snprintf(before, sizeof before, "%s", deltic_last_error());
  EXPECT(pthread_barrier_init(&barrier, NULL, 2) == 0);
  for (int i = 0; i < 2; ++i)
    EXPECT(pthread_create(&threads[i], NULL, fail_in_thread, &cases[i]) == 0);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  pthread_barrier_destroy(&barrier);
  EXPECT(strcmp(cases[0].first, "") == 0 && strcmp(cases[1].first, "") == 0);
  EXPECT(strcmp(cases[0].text, "forward: chunk: expected 16, 32 or 64, got 5") == 0);
  EXPECT(strcmp(cases[1].text, "forward: chunk: expected 16, 32 or 64, got 7") == 0);
  EXPECT(strcmp(deltic_last_error(), before) == 0);
}

/* Two calls at once give what one gives. */
static void* run_in_thread(void* argument) {
  Problem* p = argument;
  uint64_t bytes = 0;
  for (int i = 0; i < 20; ++i) {
    if (deltic_forward_workspace(&p->options, &p->tensors, NULL, &bytes) != DELTIC_OK) return NULL;
    deltic_workspace workspace = {workspace_memory(bytes), bytes};
    const deltic_status status = deltic_forward(&p->options, &p->tensors, &workspace, NULL);
    free(workspace.data);
    if (status != DELTIC_OK) return NULL;
  }
  return p;
}

static void test_concurrent_calls(void) {
  Problem problems[3];
  pthread_t threads[2];
  void* result = NULL;
  for (int i = 0; i < 3; ++i) make_problem(&problems[i]);
  EXPECT(run_in_thread(&problems[2]) != NULL);
  for (int i = 0; i < 2; ++i)
    EXPECT(pthread_create(&threads[i], NULL, run_in_thread, &problems[i]) == 0);
  for (int i = 0; i < 2; ++i) {
    pthread_join(threads[i], &result);
    EXPECT(result != NULL);
    EXPECT(memcmp(problems[i].o, problems[2].o, sizeof problems[2].o) == 0);
  }
}

typedef struct Seen {
  int calls, chosen, chosen_at;
  char last[64];
} Seen;

static void on_choice(void* user, const char* name, int32_t accepts, int32_t chosen,
                      const char* sentence) {
  Seen* seen = user;
  if (chosen) {
    seen->chosen_at = seen->calls;
    seen->chosen += accepts;
  }
  EXPECT(sentence != NULL && sentence[0] != '\0');
  snprintf(seen->last, sizeof seen->last, "%s", name);
  ++seen->calls;
}

static void test_explain(void) {
  Problem p;
  Seen seen = {0, 0, -1, ""};
  int count = 0;
  make_problem(&p);
  EXPECT(deltic_explain(DELTIC_FORWARD, &p.options, &p.tensors, on_choice, &seen) == DELTIC_OK);
  while (deltic_implementation(DELTIC_FORWARD, DELTIC_CPU, count) != NULL) ++count;
  EXPECT(seen.calls == count);
  EXPECT(seen.chosen == 1 && seen.chosen_at == 0);
  EXPECT(strcmp(seen.last, "reference") == 0);
}

static void test_backward_explain(void) {
  Problem p;
  Seen seen = {0, 0, -1, ""};
  int count = 0;
  deltic_backward_tensors t;
  deltic_memory_plan plan;
  make_problem(&p);
  deltic_backward_tensors_init(&t, sizeof t);
  memset(&p.tensors.o, 0, sizeof p.tensors.o);
  memset(&p.tensors.final_state, 0, sizeof p.tensors.final_state);
  t.forward = &p.tensors;
  EXPECT(deltic_backward_explain(&p.options, &t, on_choice, &seen) == DELTIC_OK);
  while (deltic_implementation(DELTIC_BACKWARD, DELTIC_CPU, count) != NULL) ++count;
  EXPECT(seen.calls == count);
  EXPECT(seen.chosen == 1 && seen.chosen_at == 0);
  EXPECT(strcmp(seen.last, "reference") == 0);
  EXPECT(deltic_backward_explain(&p.options, &t, NULL, NULL) == DELTIC_INVALID_ARGUMENT);
  EXPECT(deltic_backward_explain(&p.options, NULL, on_choice, &seen) == DELTIC_INVALID_ARGUMENT);
  EXPECT(deltic_backward_explain_division(&p.options, &t, 132, NULL, NULL, NULL) ==
         DELTIC_INVALID_ARGUMENT);
  EXPECT(strcmp(deltic_last_error(), "backward: fn: expected a function, got null") == 0);

  memset(&plan, 0xFF, sizeof plan);
  EXPECT(deltic_backward_memory(NULL, &t, DELTIC_SAVE_STATES, NULL, &plan) ==
         DELTIC_INVALID_ARGUMENT);
  EXPECT(deltic_backward_memory(NULL, &t, DELTIC_SAVE_STATES, NULL, NULL) ==
         DELTIC_INVALID_ARGUMENT);
  deltic_memory_plan_init(NULL, sizeof plan);
  deltic_memory_plan_init(&plan, sizeof plan);
  EXPECT(plan.size == sizeof plan && plan.saved_bytes == 0);
  EXPECT(deltic_backward_memory(NULL, &t, 3, NULL, &plan) == DELTIC_INVALID_ARGUMENT);
  EXPECT(deltic_backward_memory(NULL, &t, DELTIC_SAVE_ALL, NULL, &plan) == DELTIC_OK);
  EXPECT(plan.chunks == 1 && plan.segment_chunks == 1 && plan.saved_states == 1);
  EXPECT(plan.saved_bytes > 0 && plan.workspace_bytes > 0);
}

static void on_fact(void* user, const char* key, const char* value) {
  int* found = user;
  if (strcmp(key, "version") == 0 && strcmp(value, DELTIC_VERSION_STRING) == 0) *found |= 1;
  if (strcmp(key, "threads") == 0 && atoi(value) == deltic_get_num_threads()) *found |= 2;
  if (strcmp(key, "cpu.found") == 0) *found |= 4;
  if (strcmp(key, "cpu.used") == 0) *found |= 8;
}

static void test_info_and_settings(void) {
  int found = 0;
  const int32_t before = deltic_get_num_threads();
  EXPECT(before >= 1);
  EXPECT(deltic_set_num_threads(3) == DELTIC_OK);
  EXPECT(deltic_get_num_threads() == 3);
  EXPECT(deltic_info(on_fact, &found) == DELTIC_OK);
  EXPECT(found == 15);
  EXPECT(deltic_set_num_threads(0) == DELTIC_OK);
  EXPECT(deltic_get_num_threads() == before);
  EXPECT(deltic_set_num_threads(-4) == DELTIC_INVALID_ARGUMENT);
  EXPECT(deltic_set_checked(1) == DELTIC_OK && deltic_get_checked() == 1);
  EXPECT(deltic_set_checked(0) == DELTIC_OK && deltic_get_checked() == 0);
  EXPECT(deltic_set_checked(-1) == DELTIC_OK);
}

static void on_line(void* user, const char* line) {
  if (strstr(line, "deltic: decode: ") == line) ++*(int*)user;
}

static void test_log(void) {
  Problem p;
  int lines = 0;
  uint64_t bytes = 0;
  make_problem(&p);
  EXPECT(deltic_set_log(on_line, &lines) == DELTIC_OK);
  EXPECT(deltic_decode_workspace(&p.options, &p.tensors, NULL, &bytes) == DELTIC_OK);
  EXPECT(lines > 0);
  EXPECT(deltic_set_log(NULL, NULL) == DELTIC_OK);
}

/* A callback may call the library: what it decides is not logged, and the log may be ended there.
 */
typedef struct Nested {
  Problem* problem;
  deltic_status status;
  int lines;
} Nested;
static void on_line_call(void* user, const char* line) {
  Nested* nested = user;
  uint64_t bytes = 0;
  (void)line;
  ++nested->lines;
  nested->status =
      deltic_decode_workspace(&nested->problem->options, &nested->problem->tensors, NULL, &bytes);
  EXPECT(deltic_set_log(NULL, NULL) == DELTIC_OK);
}
static void test_log_calls_the_library(void) {
  Problem p;
  Nested nested = {&p, DELTIC_RUNTIME_ERROR, 0};
  uint64_t bytes = 0;
  make_problem(&p);
  EXPECT(deltic_set_log(on_line_call, &nested) == DELTIC_OK);
  EXPECT(deltic_decode_workspace(&p.options, &p.tensors, NULL, &bytes) == DELTIC_OK);
  EXPECT(nested.lines == 1 && nested.status == DELTIC_OK);
}

/* A callback may wait for a thread that is in the library; and when the log has changed, the former
 * callback runs nowhere. */
typedef struct Meeting {
  Problem* problem;
  pthread_barrier_t both;
  int lines, is_over;
} Meeting;
static void on_line_meet(void* user, const char* line) {
  Meeting* meeting = user;
  (void)line;
  if (__atomic_fetch_add(&meeting->lines, 1, __ATOMIC_SEQ_CST) < 2)
    pthread_barrier_wait(&meeting->both);
  EXPECT(!__atomic_load_n(&meeting->is_over, __ATOMIC_SEQ_CST));
}
static void* query_logged(void* user) {
  Meeting* meeting = user;
  uint64_t bytes = 0;
  EXPECT(deltic_decode_workspace(&meeting->problem->options, &meeting->problem->tensors, NULL,
                                 &bytes) == DELTIC_OK);
  return NULL;
}
static void test_log_on_two_threads(void) {
  Problem p;
  Meeting meeting = {.problem = &p};
  pthread_t threads[2];
  make_problem(&p);
  EXPECT(pthread_barrier_init(&meeting.both, NULL, 2) == 0);
  EXPECT(deltic_set_log(on_line_meet, &meeting) == DELTIC_OK);
  for (int i = 0; i < 2; ++i)
    EXPECT(pthread_create(&threads[i], NULL, query_logged, &meeting) == 0);
  while (__atomic_load_n(&meeting.lines, __ATOMIC_SEQ_CST) < 2) sched_yield();
  EXPECT(deltic_set_log(NULL, NULL) == DELTIC_OK);
  __atomic_store_n(&meeting.is_over, 1, __ATOMIC_SEQ_CST);
  for (int i = 0; i < 2; ++i) EXPECT(pthread_join(threads[i], NULL) == 0);
  pthread_barrier_destroy(&meeting.both);
}

int main(void) {
  EXPECT(strcmp(deltic_last_error(), "") == 0);
  test_versions();
  test_init();
  test_call(deltic_forward_workspace, deltic_forward);
  test_call(deltic_decode_workspace, deltic_decode);
  test_block();
  test_block_backward();
  test_error();
  test_threads();
  test_concurrent_calls();
  test_explain();
  test_backward_explain();
  test_info_and_settings();
  test_log();
  test_log_calls_the_library();
  test_log_on_two_threads();
  if (failures == 0) puts("all passed");
  return failures == 0 ? 0 : 1;
}
