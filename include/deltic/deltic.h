/* clang-format off */
/* deltic: delta-rule linear attention (DeltaNet, Gated DeltaNet, Kimi Delta Attention). The C
 * interface.
 *
 * The recurrence, per sequence and value head, with a state S of K x V numbers:
 *
 *     S'  = decay_t * S_{t-1}            decay_t = 1 | exp(g_t) | Diag(exp(g_t))
 *     u_t = beta_t * (v_t - S'^T k_t)
 *     S_t = S' + k_t u_t^T
 *     o_t = scale * S_t^T q_t            scale defaults to K^-1/2
 *
 * Letters: B batch, T tokens, N sequences, H query/key heads, HV value heads (a multiple of H; value
 * head h reads q/k head h / (HV/H)), K key width (at most 256), V value width (any). No tensor has
 * or spans more than 2^56 elements (a size of 0 counts as 1), nor are there more than 2^56 numbers
 * N*HV*K*V of states, of all layers.
 *
 * Contract of every call
 *  - Threads: all functions are thread-safe; two calls may run at once if neither writes what the
 *    other touches (workspaces included). Nothing is kept between calls but the process-wide
 *    defaults and OpenMP's threads. Where the system has fewer (tried when a thread first asks for
 *    so many), a call runs on fewer. After a fork the child's calls run on one thread.
 *  - Memory: a run function allocates nothing but the text of an error and, the first time, OpenMP's
 *    threads. Scratch comes from the caller's workspace; its size comes from the workspace query,
 *    which looks at shapes, dtypes, options and the stream only (data pointers may be null there).
 *  - Callbacks run on the caller's thread, before the function returns; the texts they get are gone
 *    afterwards. They may call the library, and must return: no exception, no longjmp.
 *  - Alignment: data pointers are aligned to their element, the workspace to 64 bytes.
 *  - Strides: in elements, any non-negative value for every dimension but the last, which is 1.
 *    Outputs need distinct elements. No input is ever copied as a whole.
 *  - Aliasing: an output may not overlap an input or another output, except a state updated in place
 *    (final_state == initial_state with the same dtype and strides; slots of a pool). The workspace
 *    overlaps no tensor.
 *  - Errors: nothing is written when a call fails with DELTIC_INVALID_ARGUMENT or
 *    DELTIC_UNSUPPORTED. The text, `op: argument: expected X, got Y`, is in deltic_last_error().
 *    Values on a GPU are looked at in checked mode alone, see deltic_device_error; unchecked, wrong
 *    lengths and slots there give undefined results, but no access outside of the tensors.
 *  - Results: the same bits for any number of threads and in every run; a sequence's result does not
 *    depend on what else is in the batch, on a GPU with split off or by_length (auto looks at the
 *    whole batch); later tokens never change a bit of an earlier output.
 *  - Growth: within one DELTIC_ABI_VERSION functions and enumerators (statuses too) are only added,
 *    and a struct that begins with `size` only gets fields at its end, whose zero means what was
 *    before. `size` is sizeof the struct in the caller's header: a program runs with an older or a
 *    newer library. Fields that the caller does not have count as zero; fields that the library
 *    does not have must be zero, else the call fails. Nothing behind `size` bytes is read or
 *    written. deltic_tensor and deltic_buffer have no size and never change.
 */
/* clang-format on */
#ifndef DELTIC_DELTIC_H_
#define DELTIC_DELTIC_H_

#include <stddef.h>
#include <stdint.h>

#define DELTIC_VERSION_MAJOR 0
#define DELTIC_VERSION_MINOR 2
#define DELTIC_VERSION_PATCH 0
#define DELTIC_VERSION_STRING "0.2.0"
/* The number in the library's file name (libdeltic.so.2). It changes when a program that is not
 * compiled again would no longer run: see `Growth` above for what may change without it. */
#define DELTIC_ABI_VERSION 2

#if defined(_WIN32)
#define DELTIC_API
#else
#define DELTIC_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum deltic_status {
  DELTIC_OK = 0,
  DELTIC_INVALID_ARGUMENT = 1, /* the call is wrong: shape, dtype, value, option, workspace */
  DELTIC_UNSUPPORTED = 2,      /* the call is right, no implementation here takes it */
  DELTIC_OUT_OF_MEMORY = 3,    /* no memory for a text or a list of the library's own */
  DELTIC_RUNTIME_ERROR = 4,    /* the device or the system failed */
  DELTIC_ABI_MISMATCH = 5      /* header and library do not belong together */
} deltic_status;

typedef enum deltic_dtype {
  DELTIC_F32 = 0,
  DELTIC_BF16 = 1,
  DELTIC_F16 = 2,
  DELTIC_F64 = 3, /* the oracle (implementation `reference`) only */
  DELTIC_I32 = 4,
  DELTIC_I64 = 5,
  DELTIC_U8 = 6 /* bytes, 0 or not, as bool tensors have them: has_initial_state only */
} deltic_dtype;

typedef enum deltic_device_type { DELTIC_CPU = 0, DELTIC_CUDA = 1 } deltic_device_type;

typedef enum deltic_op {
  DELTIC_FORWARD = 0,  /* chunked form: prefill and training */
  DELTIC_DECODE = 1,   /* recurrent form: one or a few tokens per sequence, any number works */
  DELTIC_CUMSUM = 2,   /* chunk-local cumulative sum of a gate, alone or of the gate's form */
  DELTIC_GATE = 3,     /* the gate forms */
  DELTIC_L2NORM = 4,   /* x / sqrt(sum x^2 + 1e-6) */
  DELTIC_KKT = 5,      /* beta * k k^T, strictly lower, gated */
  DELTIC_SCORES = 6,   /* scale * q k^T, lower, gated */
  DELTIC_INVERSE = 7,  /* (I + A)^-1 */
  DELTIC_WY = 8,       /* w, u, k exp(G_last - G), q exp(G) */
  DELTIC_BACKWARD = 9, /* the gradients of forward */
  DELTIC_CONV = 10,    /* causal depthwise convolution of a few taps, in front of the delta rule */
  DELTIC_SCORES_INVERSE = 11, /* scores, and (I + A)^-1 of kkt's A, in one pass */
  DELTIC_RMSNORM = 12,        /* x / sqrt(mean x^2 + eps) * weight * activation(z) */
  DELTIC_MOVE = 13,           /* states from slots of one pool to slots of another */
  DELTIC_COMMIT = 14,         /* states to where accepted tokens left them, from decode's record */
  DELTIC_STEP = 15,   /* conv, decode and rmsnorm in one call: a layer between its projections */
  DELTIC_NUM_OPS = 16 /* in this header; a newer library has more */
} deltic_op;

typedef enum deltic_gate_form {
  DELTIC_GATE_LOG_DECAY = 0, /* g is the log decay */
  DELTIC_GATE_SOFTPLUS = 1,  /* -exp(A_log) * softplus(g + dt_bias), A_log required */
  DELTIC_GATE_BOUNDED =
      2 /* lower_bound * sigmoid(exp(A_log) * (g + dt_bias)); no A_log: factor 1 */
} deltic_gate_form;

typedef enum deltic_beta_form {
  DELTIC_BETA_VALUE = 0,
  DELTIC_BETA_SIGMOID = 1,
  DELTIC_BETA_2SIGMOID = 2 /* 2 * sigmoid: negative eigenvalues */
} deltic_beta_form;

typedef enum deltic_state_layout {
  DELTIC_STATE_KV = 0, /* K-first: [slot, HV, K, V] */
  DELTIC_STATE_VK = 1  /* V-first: [slot, HV, V, K] */
} deltic_state_layout;

/* How a sequence may be cut into segments. On the CPU `auto` is `off`. */
typedef enum deltic_split {
  DELTIC_SPLIT_AUTO = 0,
  DELTIC_SPLIT_OFF = 1,
  DELTIC_SPLIT_BY_LENGTH = 2,
  DELTIC_SPLIT_SEGMENTS = 3 /* segment_length tokens each */
} deltic_split;

/* What forward keeps for backward. All three give the same bits. */
typedef enum deltic_save {
  DELTIC_SAVE_NONE = 0,   /* inference */
  DELTIC_SAVE_STATES = 1, /* of the order of sqrt(chunks) states per sequence and head; the rest
                             is computed again */
  DELTIC_SAVE_ALL = 2 /* the state before every chunk, on the CPU also v_new and the inverse: less
                         work later */
} deltic_save;

/* How forward goes over the tokens of a sequence. The gradients are those of the same function:
 * backward goes chunk by chunk either way. */
typedef enum deltic_form {
  DELTIC_FORM_CHUNKED = 0,
  DELTIC_FORM_RECURRENT = 1 /* token by token, by decode's implementations and with decode's bits:
                               all tokens, or those from tensors.recurrent_from on. Not with save */
} deltic_form;

/* What `conv` applies to its sums, and `rmsnorm` to z. */
typedef enum deltic_activation {
  DELTIC_ACTIVATION_NONE = 0,
  DELTIC_ACTIVATION_SILU = 1,   /* x * sigmoid(x) */
  DELTIC_ACTIVATION_SIGMOID = 2 /* rmsnorm only */
} deltic_activation;

#define DELTIC_MAX_RANK 6

/* A tensor that somebody else owns. rank 0 means absent. Inputs are never written. Never grows. */
typedef struct deltic_tensor {
  void* data;
  int32_t dtype;       /* deltic_dtype */
  int32_t device_type; /* deltic_device_type */
  int32_t device_index;
  int32_t rank;
  int64_t shape[DELTIC_MAX_RANK];
  int64_t strides[DELTIC_MAX_RANK]; /* elements */
} deltic_tensor;

/* All options of the family. Zero-initialise and set `size`, as deltic_options_init does: zero is
 * the default everywhere. */
typedef struct deltic_options {
  uint64_t size;          /* sizeof(deltic_options), the caller's */
  int32_t gate_form;      /* deltic_gate_form */
  int32_t beta_form;      /* deltic_beta_form */
  int32_t state_layout;   /* deltic_state_layout, of every state tensor of the call */
  int32_t split;          /* deltic_split */
  int64_t segment_length; /* with DELTIC_SPLIT_SEGMENTS, else 0 */
  int32_t chunk;          /* 16, 32 or 64; 0 means 64. Of `inverse`: taken from the width of A */
  int32_t qk_l2norm;      /* 1: q and k are divided by sqrt(sum x^2 + 1e-6) inside */
  int32_t reverse;        /* cumsum only: 1 sums from the chunk's end */
  int32_t has_scale;      /* 0: K^-1/2 (cumsum: 1) */
  float scale;
  int32_t has_lower_bound;
  float lower_bound;   /* of DELTIC_GATE_BOUNDED: finite, below 0 */
  int32_t num_threads; /* 0: the default, see deltic_set_num_threads */
  int32_t checked;     /* 0: as deltic_set_checked or DELTIC_CHECKED says; 1: on; 2: off */
  int32_t save;        /* deltic_save, forward only: what goes into tensors.saved */
  const char* impl;   /* NULL: best first (or as DELTIC_IMPL says); else an implementation's name */
  int32_t activation; /* deltic_activation, conv and rmsnorm */
  int32_t reserved;   /* 0. No struct ends in bytes that have no name: they may become a field */
  int32_t has_null_slot; /* 0: -1 */
  int32_t null_slot; /* slots from -1 up to this one are none, in every list of slots: -1 or more */
  int32_t has_eps;   /* 0: 1e-5 */
  float eps;         /* rmsnorm only: finite, at least 0 */
  int32_t form;      /* deltic_form, of forward; backward takes and ignores it */
  int32_t reserved1; /* 0 */
  /* decode, states of 16 bits: 1 rounds them to one of their two neighbours, by chance, so that the
   * mean of many is the number itself (stochastic rounding), instead of to the nearest. The chance
   * is a function of the seed, the token's position in its sequence (tensors.positions), the value
   * head and the element: neither the batch nor the division into calls changes a bit. */
  int32_t has_seed;
  int32_t reserved_seed; /* 0 */
  uint64_t seed;
  int32_t norm_activation; /* deltic_activation, step: of its norm; `activation` is its conv's */
  int32_t reserved_norm;   /* 0 */
} deltic_options;

/* Bytes that somebody else owns. 64-byte aligned, on the device of the tensors; null if bytes is 0.
 * Never grows. */
typedef struct deltic_buffer {
  void* data;
  uint64_t bytes;
} deltic_buffer;

/* Tensors of forward and decode. Zero-initialise, set `size`; rank 0 means absent.
 * A gate of shape [B,T,HV] is one decay per head (Gated DeltaNet), of shape [B,T,HV,K] one per key
 * channel (Kimi Delta Attention); without g there is no gate (DeltaNet). */
typedef struct deltic_tensors {
  uint64_t size;       /* sizeof(deltic_tensors) */
  deltic_tensor q, k;  /* [B,T,H,K] fp32, bf16 or fp16 */
  deltic_tensor v;     /* [B,T,HV,V], q's dtype */
  deltic_tensor o;     /* out [B,T,HV,V], q's dtype */
  deltic_tensor beta;  /* [B,T,HV] any float dtype; absent: 1. Except in forward also [B,T,HV,V] */
  deltic_tensor g;     /* [B,T,HV] or [B,T,HV,K] any float dtype, natural log; absent: no gate */
  deltic_tensor gv;    /* value-wise log decay [B,T,HV,V]; not in forward */
  deltic_tensor A_log; /* HV elements in any shape, any float dtype */
  deltic_tensor dt_bias; /* likewise; HV elements (gate per head) or HV*K (per channel) */
  /* Packed sequences: B = 1, sequence n is tokens [cu[n], cu[n+1]). Rows from cu[N] on are padding:
   * o = 0. */
  deltic_tensor cu_seqlens;      /* [N+1] int32 or int64, on the device of q */
  deltic_tensor cu_seqlens_host; /* optional host copy of cu_seqlens */
  /* States in and out, per sequence. A missing initial state is zero. decode rounds a 16-bit
   * state after every token: T tokens in one call have the bits of T calls. */
  deltic_tensor initial_state; /* [N,HV,K,V] or [N,HV,V,K]; fp32, bf16 or fp16 */
  deltic_tensor final_state;   /* out, likewise */
  /* Or a pool: sequence n starts from slot read_index[n] (-1: zero) and leaves its last state in
   * slot write_index[n] (-1: nowhere); both -1: the sequence is skipped and its o is 0. One list
   * serves for both if only one is given; none: slot n. decode also takes write_index [N,T'], T' at
   * least the longest length: the slot of the state after every token. Slots may lie apart by more
   * than they hold (pages of a server). See also write_pool, has_initial_state and accepted. */
  deltic_tensor state_pool;  /* in and out [slots,HV,K,V] or [slots,HV,V,K] */
  deltic_tensor read_index;  /* [N] int32 or int64, any stride; [N,T'] with `accepted` */
  deltic_tensor write_index; /* likewise */
  /* Checkpoints: entries ckpt_cu[n] .. ckpt_cu[n+1]-1 belong to sequence n; entry m stores the
   * state after the first ckpt_tokens[m] tokens of this call (0: the initial state) in slot
   * ckpt_slots[m] of ckpt_states (-1: unused). */
  deltic_tensor ckpt_cu;     /* [N+1] int32 or int64, as the next two */
  deltic_tensor ckpt_tokens; /* [M] */
  deltic_tensor ckpt_slots;  /* [M] */
  deltic_tensor
      ckpt_states; /* out [slots,HV,K,V] or [slots,HV,V,K]; fp32, bf16 or fp16. May be the pool
                      that is written itself, in slots that no sequence reads or writes */
  /* out, with options.save: what backward needs, deltic_forward_saved bytes. It binds backward to
   * the same inputs, options and arithmetic (fp32 products, cpu.amx or cpu.plain). */
  deltic_buffer saved;
  /* What servers need besides; not in backward, nor with options.save. */
  deltic_tensor write_pool; /* out, as state_pool, its own slots and dtype: written instead of
                               state_pool, which is then only read. Both index lists or none */
  deltic_tensor has_initial_state; /* [N] DELTIC_U8: where 0 the sequence starts from zero, whatever
                                      its read slot or initial state */
  /* Drafted tokens: sequence n starts from slot read_index[n][accepted[n] - 1] of a table [N,T'],
   * accepted from 1 to T' (anything where none of the sequence's slots is one). decode writes the
   * same table where it has no write_index: its next call finds the state after every drafted
   * token. */
  deltic_tensor accepted; /* [N] int32 or int64 */
  /* decode: a tree of up to 16 drafted tokens. Token t starts from the state after token
   * parents[n][t] of this call, before t, or (-1) from where the sequence starts. Found in a slot
   * unless it is token t - 1: the parent needs one, and a start none that a token before writes. */
  deltic_tensor parents; /* [N,T'] int32 or int64 */
  /* forward with DELTIC_FORM_RECURRENT: the first token of each sequence that runs in the recurrent
   * form, 0 to its length; the tokens before run in chunks. As two calls would: the state between
   * them is stored as final_state or the pool would take it (or as the state that is read, or else
   * in fp32), and decode starts from it. Checkpoints up to that token are the chunked form's.
   * backward takes and ignores it. */
  deltic_tensor recurrent_from; /* [N] int32 or int64, any stride */
  /* decode: up to 16 drafted tokens that leave states as they are. Nothing but o and this is
   * written: row [n][t][h] is what token t does to the state, S_t = decay_t S_{t-1} + k_t u_t^T: k
   * (K numbers, normalised), u (V numbers) and the decay (K numbers, one or none, as the gate is).
   * Rows behind a sequence's length, and of a skipped one, change nothing (k = u = 0, decay 1). T'
   * is at least the longest length. deltic_commit applies the rows of accepted tokens. With
   * `parents` no token needs a slot. Not with gv, final_state, write_index, write_pool or
   * checkpoints. */
  deltic_tensor record; /* out [N,T',HV,W] fp32, W = K + V + the numbers of a decay */
  /* With options.has_seed: the position of sequence n's first token of this call, any number; the
   * next token's is one more, that of a tree's token one more than its parent's. Absent: 0. */
  deltic_tensor positions; /* [N] int32 or int64 */
} deltic_tensors;

/* Tensors of backward: those of the forward (or decode) call, what came back, and the gradients
 * asked for. With a value-wise beta or decay the recurrent implementation runs.
 * States are differentiable as initial_state and final_state; pools and checkpoints are not. */
typedef struct deltic_backward_tensors {
  uint64_t size;                 /* sizeof(deltic_backward_tensors) */
  const deltic_tensors* forward; /* inputs as in the forward call and `saved` as it left it; no o,
                                    final_state, pool or checkpoints. Without `saved` (bytes 0) the
                                    states are computed again from the first token on */
  deltic_tensor d_o;             /* [B,T,HV,V] q's dtype; absent: 0 */
  deltic_tensor d_final_state;   /* as final_state, fp32; absent: 0 */
  /* Out, each where asked for (rank > 0). Rows of padding get 0. */
  deltic_tensor dq, dk;           /* as q, k: sums over the group of value heads */
  deltic_tensor dv;               /* as v */
  deltic_tensor dbeta;            /* as beta: of the raw value where beta has a form */
  deltic_tensor dg;               /* as g: of the raw value where the gate has a form */
  deltic_tensor dgv;              /* as gv */
  deltic_tensor dA_log, ddt_bias; /* as A_log, dt_bias */
  deltic_tensor d_initial_state;  /* as initial_state, fp32 */
} deltic_backward_tensors;

/* clang-format off */
/* Tensors of the building blocks. Every operation takes just the ones named with it; another one is
 * an error. G is the chunk-local cumulative sum of the log decay, [B,T,HV] or [B,T,HV,K], as
 * `cumsum` gives it; chunks are counted from the start of each sequence. W is the chunk length.
 *
 *   cumsum  g [A_log dt_bias] -> out (g's shape), times `scale`; the gate form is applied first
 *   gate    g [A_log dt_bias] -> out (g's shape)
 *   l2norm  x [B,T,H,D] -> out [rstd: [B,T,H] fp32]
 *   kkt     k [g beta] -> out [B,T,HV,W]: beta_i sum_d k_id k_jd exp(G_id - G_jd), j < i, else 0
 *   scores  q k [g] -> out [B,T,HV,W]: scale sum_d q_id k_jd exp(G_id - G_jd), j <= i, else 0
 *   inverse a [B,T,HV,W] -> out: (I + A)^-1 per chunk; only entries below the diagonal are read;
 *           unit diagonal, zeros above it and in columns past a partial chunk's length
 *   scores_inverse  q k [g beta] -> out [B,T,HV,W]: as scores; a [B,T,HV,W], written by this
 *           operation: (I + A)^-1 with the A that kkt gives, as inverse has it, without a rounding
 *           in between
 *   wy      k a [v g beta q] -> w = A (beta k exp(G)) [B,T,HV,K]; with v: u = A (beta v)
 *           [B,T,HV,V]; where asked for kg = k exp(G_last - G) and, with q, qg = q exp(G), both
 *           [B,T,HV,K]. a is the inverse, as `inverse` gives it.
 *   rmsnorm x [B,T,H,D] [z weight] -> out: x / sqrt(mean_d x^2 + eps) * weight [D] * activation(z)
 *           [B,T,H,D]; without z, or without weight, the factor is 1
 *
 * Inputs and outputs are fp32, bf16 or fp16, each its own; arithmetic is fp32. Padding rows give 0. */
/* clang-format on */
typedef struct deltic_block_tensors {
  uint64_t size; /* sizeof(deltic_block_tensors) */
  deltic_tensor q, k, v, x, g, beta, A_log, dt_bias, a, cu_seqlens, cu_seqlens_host;
  deltic_tensor out, w, u, kg, qg, rstd;
  deltic_tensor z, weight; /* of rmsnorm */
} deltic_block_tensors;

/* clang-format off */
/* Tensors of a building block's gradient: its inputs, what came back for its outputs, and the
 * gradients asked for (rank > 0), each with its input's shape and a dtype of its own. The gradient is
 * that of the formula above; g of kkt, scores and wy is G, and dg its gradient. scores_inverse has
 * none of its own: it is that of scores, plus that of kkt at da of inverse.
 *
 *   cumsum  g [A_log dt_bias], d_out -> dg dA_log ddt_bias; 0 where the log decay is below -104
 *   gate    g [A_log dt_bias], d_out -> dg dA_log ddt_bias
 *   l2norm  x, d_out -> dx (rstd is an output without a gradient; it is formed again from x)
 *   kkt     k [g beta], d_out -> dk dg dbeta; only entries of d_out below the diagonal are read
 *   scores  q k [g], d_out -> dq dk dg; entries up to the diagonal are read
 *   inverse out, the result, or a, from which it is formed again; d_out -> da, strictly lower; only
 *           entries below the diagonal are read
 *   wy      k a [v g beta q], [d_w d_u d_kg d_qg] (absent: 0; d_u needs v, d_qg needs q) -> da
 *           (lower, zeros above the diagonal) dk dv dg dbeta dq
 *   rmsnorm x [z weight], d_out -> dx dz dweight
 *
 * dq and dk are the sums over the group of value heads, in order, rounded once; dA_log and ddt_bias
 * are summed in fp64 and rounded once, dweight is fp32 sums over parts of the rows, added up in fp64
 * in order. Padding rows give 0. */
/* clang-format on */
typedef struct deltic_block_backward_tensors {
  uint64_t size;                             /* sizeof(deltic_block_backward_tensors) */
  const deltic_block_tensors* forward;       /* the inputs; no outputs, but `out` of inverse */
  deltic_tensor d_out, d_w, d_u, d_kg, d_qg; /* as out, w, u, kg, qg */
  deltic_tensor dq, dk, dv, dx, dg, dbeta, da, dA_log, ddt_bias; /* out */
  deltic_tensor dz, dweight;                                     /* out, of rmsnorm */
} deltic_block_backward_tensors;

/* clang-format off */
/* Tensors of the causal depthwise convolution, per sequence and channel d:
 *
 *     y_t[d] = activation(bias[d] + sum_{j=0}^{W-1} weight[d][j] * x_{t-W+1+j}[d])
 *
 * Inputs before the sequence's first token come from its state, the last S inputs before this call,
 * most recent last; a missing state is zero. S is at least W - 1; only the last W - 1 are read. The
 * state left behind is the last S inputs after this call, where the sequence is shorter with what
 * the state it started from still has to say.
 * With `accepted` (drafted tokens of the last call, of which so many count) a state is a window: the
 * W - 1 inputs from place accepted[n] - 1 on are those before this call's first token, and the state
 * left behind is the W - 2 inputs before it, then the call's own, from place 0 on; 0 behind them (an
 * empty sequence's window stays as it is). S is at least W - 2 plus the tokens of a sequence: W - 1 +
 * drafts. A call without `accepted` on the first W - 1 places of each slot (a view) leaves what
 * accepted = 1 reads. The count of a skipped sequence may be anything.
 * x and out have unit stride in D; weights and states may have any strides. Arithmetic is fp32. */
/* clang-format on */
typedef struct deltic_conv_tensors {
  uint64_t size;                             /* sizeof(deltic_conv_tensors) */
  deltic_tensor x;                           /* [B,T,D] fp32, bf16 or fp16 */
  deltic_tensor weight;                      /* [D,W] any float dtype; W is 1 to 8 */
  deltic_tensor bias;                        /* [D] any float dtype; absent: 0 */
  deltic_tensor cu_seqlens, cu_seqlens_host; /* as in deltic_tensors; padding rows give 0 */
  deltic_tensor initial_state;               /* [N,D,S], x's dtype or fp32 */
  deltic_tensor final_state; /* out, likewise; may be the initial state itself, updated in place */
  /* Or a pool [slots,D,S], read and written in place; indices as in deltic_tensors. */
  deltic_tensor state_pool;
  deltic_tensor read_index, write_index; /* [N] int32 or int64, any stride */
  deltic_tensor out;                     /* out [B,T,D], x's dtype */
  deltic_tensor write_pool;              /* out, as in deltic_tensors; state_pool's S */
  deltic_tensor has_initial_state;       /* [N] DELTIC_U8, as in deltic_tensors */
  deltic_tensor accepted;                /* [N] int32 or int64, 1 to S - W + 2, with a pool */
  /* Checkpoints, as in deltic_tensors: the last S inputs after so many tokens. Not with accepted.
   */
  deltic_tensor ckpt_cu, ckpt_tokens, ckpt_slots;
  deltic_tensor ckpt_states; /* out [slots,D,S], x's dtype or fp32; may be the pool itself */
} deltic_conv_tensors;

/* Tensors of its gradient: the inputs, what came back, and the gradients asked for (rank > 0), each
 * with its input's shape and a float dtype of its own. dweight and dbias are fp32 sums over parts
 * of the rows (CPU: blocks of 256 of B*T), added up in fp64 in order. Pools have no gradient. */
typedef struct deltic_conv_backward_tensors {
  uint64_t size;                      /* sizeof(deltic_conv_backward_tensors) */
  const deltic_conv_tensors* forward; /* the inputs; no out, final_state or pool */
  deltic_tensor d_out;                /* [B,T,D] x's dtype; absent: 0 */
  deltic_tensor d_final_state;        /* [N,D,S] any float dtype; absent: 0 */
  deltic_tensor dx;                   /* out, as x and of its dtype */
  deltic_tensor dweight, dbias;
  deltic_tensor d_initial_state;
} deltic_conv_backward_tensors;

/* clang-format off */
/* Tensors of a step, what a layer does in decode between its projections: conv of rows that hold
 * q, k and v side by side, decode, and the gated norm of every value head. The results - out or o,
 * states, windows - have the bits of the three calls with rows of x's dtype between them.
 *
 *   conv    as in a call of conv, without out and checkpoints. x is [B,T,D], D = 2*H*K + HV*V: H rows
 *           of K numbers q, H of k, HV of V numbers v
 *   decode  as in a call of decode, without q, k and v, and without o where there is a norm. States
 *           are required, given or asked for: K, V and HV are theirs, and H follows from D. No parents
 *           but with weights of one tap: the windows of more are chains
 *   norm    as in a call of rmsnorm, without x: out [B,T,HV,V] [z weight]. Null: no norm, decode's o
 *           is the result
 *
 * Lengths are conv's; decode and norm have the same tensor or none. options: those of decode, with
 * `activation` of conv, `norm_activation` and `eps` of norm; a null slot is one in every list. */
/* clang-format on */
typedef struct deltic_step_tensors {
  uint64_t size; /* sizeof(deltic_step_tensors) */
  const deltic_conv_tensors* conv;
  const deltic_tensors* decode;
  const deltic_block_tensors* norm;
} deltic_step_tensors;

/* Tensors of a move: entry m copies slot read_index[m] of state_pool (-1: zeros) to slot
 * write_index[m] of write_pool (-1: the entry is nothing), of every layer the value heads
 * [read_head, read_head + num_heads) to those from write_head on; all else stays as it is. Within
 * one pool no slot may be read by one entry and written by another. The same dtype moves the same
 * bits; a narrower one is rounded to nearest even. */
typedef struct deltic_move_tensors {
  uint64_t size;            /* sizeof(deltic_move_tensors) */
  deltic_tensor state_pool; /* [slots,HV,K,V] or [slots,HV,V,K], as options.state_layout says; fp32,
                               bf16 or fp16; [layers,slots,...]: the same slots of all layers */
  deltic_tensor write_pool; /* out: as many layers, slots, heads, dtype and strides of its own.
                               Absent: within state_pool */
  deltic_tensor read_index, write_index;    /* [M] int32 or int64, any stride */
  int64_t read_head, write_head, num_heads; /* num_heads 0: all of state_pool from read_head on.
                               Within one pool: the same heads, or others altogether */
  int32_t transpose;                        /* 1: write_pool has the other layout than state_pool */
  int32_t reserved;                         /* 0 */
} deltic_move_tensors;

/* Tensors of a commit: per sequence the state of its slot, S <- decay_t S + k_t u_t^T for the
 * accepted tokens of decode's record, of all layers at once. A 16-bit state is rounded after every
 * token: the bits are those of decode, token by token, in the implementation of the same name
 * (cuda.general). */
typedef struct deltic_commit_tensors {
  uint64_t size;            /* sizeof(deltic_commit_tensors) */
  deltic_tensor state_pool; /* in and out [slots,HV,K,V] or [slots,HV,V,K]; [layers,slots,...] */
  deltic_tensor record;     /* [N,T',HV,W] fp32; [layers,N,T',HV,W] */
  deltic_tensor
      accepted; /* [N] int32 or int64: so many tokens count, 0 to T'. With parents the
                   last of them is token accepted[n] - 1, the others those it comes from */
  deltic_tensor read_index, write_index; /* [N] as in deltic_tensors */
  deltic_tensor has_initial_state;       /* [N] DELTIC_U8, as in the call of decode */
  deltic_tensor parents;                 /* [N,T'] int32 or int64, likewise */
} deltic_commit_tensors;

typedef deltic_buffer deltic_workspace;

/* What training costs in memory: sizes follow from shapes and options alone. Chunks and segments
 * are those of the chunked form; cpu.plain goes token by token and needs nothing of it. */
typedef struct deltic_memory_plan {
  uint64_t size;            /* sizeof(deltic_memory_plan) */
  int64_t chunks;           /* of the longest sequence that the shapes allow */
  int64_t segment_chunks;   /* chunks per segment; backward works on one segment at a time */
  int64_t saved_states;     /* room for so many states per value head, over all sequences */
  uint64_t saved_bytes;     /* as deltic_forward_saved says */
  uint64_t workspace_bytes; /* of backward with such a `saved` */
} deltic_memory_plan;

/* Operations, devices and statuses are passed as int32_t: a number outside their enum is an error,
 * not undefined behaviour. */

/* ---- Library ------------------------------------------------------------------------------- */

DELTIC_API const char* deltic_version(void);
DELTIC_API uint32_t deltic_abi_version(void);
/* DELTIC_OK if a program compiled with this header may use the library it found. */
DELTIC_API deltic_status deltic_check_abi(uint32_t header_abi_version);
/* The text of this thread's last failed call; "" if there is none. Valid until the thread's next
 * failure or its end. */
DELTIC_API const char* deltic_last_error(void);
DELTIC_API const char* deltic_status_name(int32_t status);
DELTIC_API const char* deltic_op_name(int32_t op);

/* Threads of a call whose options say 0. n = 0 goes back to the OpenMP default. Process-wide. */
DELTIC_API deltic_status deltic_set_num_threads(int32_t n);
DELTIC_API int32_t deltic_get_num_threads(void);
/* Checked mode also looks for non-finite inputs and for gates above 0 beyond the contract, and
 * names the first one; what forward kept (`saved`) is taken as it is. Of CUDA tensors it also looks
 * at lengths, slots and lists, and deltic_device_error says what it found. -1 goes back to what
 * DELTIC_CHECKED says (0 or 1; every operation fails on another text). Process-wide. */
DELTIC_API deltic_status deltic_set_checked(int32_t on);
/* 0, 1, or -1: DELTIC_CHECKED is asked and is neither. */
DELTIC_API int32_t deltic_get_checked(void);
/* Receives what DELTIC_LOG asks for (`dispatch`: one line per decision) instead of stderr; with a
 * callback set, `dispatch` is on. NULL goes back to the environment. Process-wide: several threads
 * may be in the callback at once. It may call the library; what those calls decide is not logged.
 * When deltic_set_log returns, the former callback runs on no other thread, unless it was called
 * from a callback, where it does not wait. */
typedef void (*deltic_log_fn)(void* user, const char* line);
DELTIC_API deltic_status deltic_set_log(deltic_log_fn fn, void* user);

/* `size` is sizeof the struct: deltic_options_init(&options, sizeof options). So many bytes become
 * zero, then the field `size` is set; with a null pointer or fewer than 8 bytes nothing is. The
 * `forward` of a gradient's tensors, and the parts of a step's, are then null: point them to
 * structs with sizes of their own. */
DELTIC_API void deltic_options_init(deltic_options* options, uint64_t size);
DELTIC_API void deltic_tensors_init(deltic_tensors* tensors, uint64_t size);
DELTIC_API void deltic_backward_tensors_init(deltic_backward_tensors* tensors, uint64_t size);
DELTIC_API void deltic_block_tensors_init(deltic_block_tensors* tensors, uint64_t size);
DELTIC_API void deltic_block_backward_tensors_init(deltic_block_backward_tensors* tensors,
                                                   uint64_t size);
DELTIC_API void deltic_memory_plan_init(deltic_memory_plan* plan, uint64_t size);
DELTIC_API void deltic_conv_tensors_init(deltic_conv_tensors* tensors, uint64_t size);
DELTIC_API void deltic_conv_backward_tensors_init(deltic_conv_backward_tensors* tensors,
                                                  uint64_t size);
DELTIC_API void deltic_move_tensors_init(deltic_move_tensors* tensors, uint64_t size);
DELTIC_API void deltic_commit_tensors_init(deltic_commit_tensors* tensors, uint64_t size);
DELTIC_API void deltic_step_tensors_init(deltic_step_tensors* tensors, uint64_t size);

/* ---- What would run ------------------------------------------------------------------------ */

/* Names of an operation's implementations on a device, best first, the oracle last. NULL past the
 * end. */
DELTIC_API const char* deltic_implementation(int32_t op, int32_t device, int32_t index);
/* Whether the machine can run it at all, and the sentence if not (valid until the thread's next
 * call). */
DELTIC_API int32_t deltic_implementation_runs_here(int32_t op, int32_t device, int32_t index,
                                                   const char** sentence);
/* 1 if it is never chosen, and runs only where options.impl or DELTIC_IMPL name it: the oracle, and
 * what has not been proven on its device. 0 for others, and for one that there is not. */
DELTIC_API int32_t deltic_implementation_only_when_named(int32_t op, int32_t device, int32_t index);
/* Called once per implementation: the chosen one first (chosen = 1), then the others in list order,
 * each with yes or no and a sentence. */
typedef void (*deltic_explain_fn)(void* user, const char* name, int32_t accepts, int32_t chosen,
                                  const char* sentence);
DELTIC_API deltic_status deltic_explain(int32_t op, const deltic_options* options,
                                        const deltic_tensors* tensors, deltic_explain_fn fn,
                                        void* user);
/* Called once per way to divide a forward's work over a GPU of num_sms SMs (0: those that `stream`
 * may use on the call's device; else no GPU is needed): the chosen one first, each with a predicted
 * time in microseconds and where it comes from. num_sms: 0, or 4 to 1024. An implementation that
 * has a choice, but not for this call, is named once: `what` is empty, the time 0, and `reason` the
 * sentence why. Not called for CPU tensors, and for an implementation without a choice that was
 * named. */
typedef void (*deltic_division_fn)(void* user, const char* impl, const char* what,
                                   double predicted_us, int32_t chosen, const char* reason);
DELTIC_API deltic_status deltic_explain_division(const deltic_options* options,
                                                 const deltic_tensors* tensors, int32_t num_sms,
                                                 void* stream, deltic_division_fn fn, void* user);
/* The same for a backward: whether the chains of its states are cut into segments. The times are
 * those of the chains alone. */
DELTIC_API deltic_status deltic_backward_explain_division(const deltic_options* options,
                                                          const deltic_backward_tensors* tensors,
                                                          int32_t num_sms, void* stream,
                                                          deltic_division_fn fn, void* user);
DELTIC_API deltic_status deltic_block_explain(int32_t op, const deltic_options* options,
                                              const deltic_block_tensors* tensors,
                                              deltic_explain_fn fn, void* user);
DELTIC_API deltic_status deltic_block_backward_explain(int32_t op, const deltic_options* options,
                                                       const deltic_block_backward_tensors* tensors,
                                                       deltic_explain_fn fn, void* user);
DELTIC_API deltic_status deltic_backward_explain(const deltic_options* options,
                                                 const deltic_backward_tensors* tensors,
                                                 deltic_explain_fn fn, void* user);
DELTIC_API deltic_status deltic_conv_explain(const deltic_options* options,
                                             const deltic_conv_tensors* tensors,
                                             deltic_explain_fn fn, void* user);
DELTIC_API deltic_status deltic_conv_backward_explain(const deltic_options* options,
                                                      const deltic_conv_backward_tensors* tensors,
                                                      deltic_explain_fn fn, void* user);
DELTIC_API deltic_status deltic_move_explain(const deltic_options* options,
                                             const deltic_move_tensors* tensors,
                                             deltic_explain_fn fn, void* user);
DELTIC_API deltic_status deltic_commit_explain(const deltic_options* options,
                                               const deltic_commit_tensors* tensors,
                                               deltic_explain_fn fn, void* user);
DELTIC_API deltic_status deltic_step_explain(const deltic_options* options,
                                             const deltic_step_tensors* tensors,
                                             deltic_explain_fn fn, void* user);

/* The memory that backward needs, and forward keeps for it, under a deltic_save. What the tensors
 * have of `saved` does not matter; `plan` comes with its size. */
DELTIC_API deltic_status deltic_backward_memory(const deltic_options* options,
                                                const deltic_backward_tensors* tensors,
                                                int32_t save, void* stream,
                                                deltic_memory_plan* plan);
/* Facts about build and machine, one call per fact, for example ("cpu.found", "avx2, avx512f"). */
typedef void (*deltic_info_fn)(void* user, const char* key, const char* value);
DELTIC_API deltic_status deltic_info(deltic_info_fn fn, void* user);

/* ---- Operations ---------------------------------------------------------------------------- */

/* `options` may be NULL: all defaults. `stream` is a cudaStream_t for CUDA tensors (null: the
 * default stream); the CPU ignores it. A workspace query takes the stream of the call that it is
 * for: how the work is divided depends on the SMs that the stream may use. A call whose stream
 * needs more than its workspace has fails. */
DELTIC_API deltic_status deltic_forward_workspace(const deltic_options* options,
                                                  const deltic_tensors* tensors, void* stream,
                                                  uint64_t* bytes);
DELTIC_API deltic_status deltic_forward(const deltic_options* options,
                                        const deltic_tensors* tensors,
                                        const deltic_workspace* workspace, void* stream);
/* Bytes of tensors.saved for options.save: the same on every stream. */
DELTIC_API deltic_status deltic_forward_saved(const deltic_options* options,
                                              const deltic_tensors* tensors, uint64_t* bytes);
DELTIC_API deltic_status deltic_backward_workspace(const deltic_options* options,
                                                   const deltic_backward_tensors* tensors,
                                                   void* stream, uint64_t* bytes);
DELTIC_API deltic_status deltic_backward(const deltic_options* options,
                                         const deltic_backward_tensors* tensors,
                                         const deltic_workspace* workspace, void* stream);
DELTIC_API deltic_status deltic_decode_workspace(const deltic_options* options,
                                                 const deltic_tensors* tensors, void* stream,
                                                 uint64_t* bytes);
DELTIC_API deltic_status deltic_decode(const deltic_options* options, const deltic_tensors* tensors,
                                       const deltic_workspace* workspace, void* stream);
/* op: a building block: DELTIC_CUMSUM .. DELTIC_WY, DELTIC_SCORES_INVERSE or DELTIC_RMSNORM. */
DELTIC_API deltic_status deltic_block_workspace(int32_t op, const deltic_options* options,
                                                const deltic_block_tensors* tensors, void* stream,
                                                uint64_t* bytes);
DELTIC_API deltic_status deltic_block(int32_t op, const deltic_options* options,
                                      const deltic_block_tensors* tensors,
                                      const deltic_workspace* workspace, void* stream);
/* The gradient of the same operation, under the same options. */
DELTIC_API deltic_status deltic_block_backward_workspace(
    int32_t op, const deltic_options* options, const deltic_block_backward_tensors* tensors,
    void* stream, uint64_t* bytes);
DELTIC_API deltic_status deltic_block_backward(int32_t op, const deltic_options* options,
                                               const deltic_block_backward_tensors* tensors,
                                               const deltic_workspace* workspace, void* stream);
/* The causal depthwise convolution, of whole sequences or of a few tokens, and its gradient. */
DELTIC_API deltic_status deltic_conv_workspace(const deltic_options* options,
                                               const deltic_conv_tensors* tensors, void* stream,
                                               uint64_t* bytes);
DELTIC_API deltic_status deltic_conv(const deltic_options* options,
                                     const deltic_conv_tensors* tensors,
                                     const deltic_workspace* workspace, void* stream);
DELTIC_API deltic_status deltic_conv_backward_workspace(const deltic_options* options,
                                                        const deltic_conv_backward_tensors* tensors,
                                                        void* stream, uint64_t* bytes);
DELTIC_API deltic_status deltic_conv_backward(const deltic_options* options,
                                              const deltic_conv_backward_tensors* tensors,
                                              const deltic_workspace* workspace, void* stream);
/* States from slots of one pool to slots of another. */
DELTIC_API deltic_status deltic_move_workspace(const deltic_options* options,
                                               const deltic_move_tensors* tensors, void* stream,
                                               uint64_t* bytes);
DELTIC_API deltic_status deltic_move(const deltic_options* options,
                                     const deltic_move_tensors* tensors,
                                     const deltic_workspace* workspace, void* stream);
/* States to where the accepted ones of drafted tokens left them. */
DELTIC_API deltic_status deltic_commit_workspace(const deltic_options* options,
                                                 const deltic_commit_tensors* tensors, void* stream,
                                                 uint64_t* bytes);
DELTIC_API deltic_status deltic_commit(const deltic_options* options,
                                       const deltic_commit_tensors* tensors,
                                       const deltic_workspace* workspace, void* stream);
/* Convolution, decode and gated norm. */
DELTIC_API deltic_status deltic_step_workspace(const deltic_options* options,
                                               const deltic_step_tensors* tensors, void* stream,
                                               uint64_t* bytes);
DELTIC_API deltic_status deltic_step(const deltic_options* options,
                                     const deltic_step_tensors* tensors,
                                     const deltic_workspace* workspace, void* stream);

/* Checked mode on a GPU. The host does not see the values of a call there, so checks run on the
 * stream before the work. If they find an error - lengths, slots, lists, an input that is not
 * finite, a gate beyond the contract - nothing but the workspace is written, the call itself still
 * returns DELTIC_OK, and this function, given its workspace, waits for the stream and returns the
 * error with its text; DELTIC_OK if there was none. The workspace must not have been used for
 * another call in between. A call recorded in a graph is checked in every replay; a stream under
 * capture cannot be waited for: DELTIC_UNSUPPORTED. */
DELTIC_API deltic_status deltic_device_error(const deltic_workspace* workspace, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DELTIC_DELTIC_H_ */
