/* One forward pass of Kimi Delta Attention from plain C, with the workspace query and error texts.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "deltic/deltic.h"

enum { T = 100, H = 2, K = 64, V = 64 };

static deltic_tensor tensor(float* data, int32_t rank, int64_t s0, int64_t s1, int64_t s2,
                            int64_t s3) {
  deltic_tensor t = {0};
  const int64_t shape[4] = {s0, s1, s2, s3};
  int64_t stride = 1;
  int32_t i;
  t.data = data;
  t.dtype = DELTIC_F32;
  t.device_type = DELTIC_CPU;
  t.rank = rank;
  for (i = rank - 1; i >= 0; --i) {
    t.shape[i] = shape[i];
    t.strides[i] = stride;
    stride *= shape[i];
  }
  return t;
}

static float* numbers(size_t n, float low, float high) {
  static uint32_t seed = 1;
  float* x = malloc(n * sizeof(float));
  size_t i;
  if (x == NULL) exit(1);
  for (i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = low + (high - low) * (float)(seed >> 8) / 16777216.0f;
  }
  return x;
}

static int check(const char* what, deltic_status status) {
  if (status == DELTIC_OK) return 1;
  fprintf(stderr, "%s: %s: %s\n", what, deltic_status_name(status), deltic_last_error());
  return 0;
}

int main(void) {
  float* q = numbers(T * H * K, -1.0f, 1.0f);
  float* k = numbers(T * H * K, -1.0f, 1.0f);
  float* v = numbers(T * H * V, -1.0f, 1.0f);
  float* g = numbers(T * H * K, -0.2f, 0.0f); /* one log decay per key channel */
  float* beta = numbers(T * H, 0.0f, 1.0f);
  float* o = numbers(T * H * V, 0.0f, 0.0f);
  deltic_options options;
  deltic_tensors tensors;
  deltic_workspace workspace = {NULL, 0};
  double sum = 0.0;
  int i, failed = 1;

  deltic_options_init(&options, sizeof options);
  options.qk_l2norm = 1;
  deltic_tensors_init(&tensors, sizeof tensors);
  tensors.q = tensor(q, 4, 1, T, H, K);
  tensors.k = tensor(k, 4, 1, T, H, K);
  tensors.v = tensor(v, 4, 1, T, H, V);
  tensors.o = tensor(o, 4, 1, T, H, V);
  tensors.g = tensor(g, 4, 1, T, H, K);
  tensors.beta = tensor(beta, 3, 1, T, H, 0);

  if (!check("abi", deltic_check_abi(DELTIC_ABI_VERSION))) goto done;
  if (!check("workspace", deltic_forward_workspace(&options, &tensors, NULL, &workspace.bytes)))
    goto done;
  /* The workspace is aligned to 64 bytes; aligned_alloc wants a multiple of that. */
  workspace.bytes = (workspace.bytes + 63) / 64 * 64;
  workspace.data = workspace.bytes > 0 ? aligned_alloc(64, workspace.bytes) : NULL;
  if (workspace.bytes > 0 && workspace.data == NULL) goto done;
  if (!check("forward", deltic_forward(&options, &tensors, &workspace, NULL))) goto done;
  for (i = 0; i < T * H * V; ++i) sum += fabs((double)o[i]);
  if (!(sum > 0.0) || !isfinite(sum)) {
    fprintf(stderr, "forward: the output is empty or not finite\n");
    goto done;
  }
  printf("forward: %d tokens, %d heads, a finite output\n", T, H);

  /* A wrong call writes nothing and says what was expected. */
  tensors.beta.shape[1] = T - 1;
  if (deltic_forward(&options, &tensors, &workspace, NULL) != DELTIC_INVALID_ARGUMENT) {
    fprintf(stderr, "forward: a wrong shape was not refused\n");
    goto done;
  }
  printf("refused: %s\n", deltic_last_error());
  failed = 0;

done:
  free(workspace.data);
  free(q);
  free(k);
  free(v);
  free(g);
  free(beta);
  free(o);
  return failed;
}
