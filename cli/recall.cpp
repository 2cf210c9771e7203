// The recall model: where the library is called, and what a training step needs around it.
#include "recall.h"

#include <algorithm>
#include <cmath>

namespace deltic::cli::recall {
namespace {

// Dense layers, row-major. Each element is summed by one thread in one order: the same bits for any
// number of threads.

// C[I, N] = A[I, M] B[M, N]
std::vector<float> product(const std::vector<float>& A, const std::vector<float>& B, int64_t M,
                           int64_t N, int threads) {
  const int64_t I = static_cast<int64_t>(A.size()) / M;
  std::vector<float> C(static_cast<size_t>(I * N), 0.0f);
#pragma omp parallel for num_threads(threads) if (I > 64)
  for (int64_t i = 0; i < I; ++i) {
    float* c = C.data() + i * N;
    for (int64_t m = 0; m < M; ++m) {
      const float a = A[static_cast<size_t>(i * M + m)];
      const float* b = B.data() + m * N;
      for (int64_t n = 0; n < N; ++n) c[n] += a * b[n];
    }
  }
  return C;
}

// B[M, N] += A[I, M]^T C[I, N]
void add_left_gradient(const std::vector<float>& A, const std::vector<float>& C, int64_t M,
                       int64_t N, std::vector<float>& B, int threads) {
  const int64_t I = static_cast<int64_t>(A.size()) / M;
#pragma omp parallel for num_threads(threads)
  for (int64_t m = 0; m < M; ++m) {
    float* b = B.data() + m * N;
    for (int64_t i = 0; i < I; ++i) {
      const float a = A[static_cast<size_t>(i * M + m)];
      const float* c = C.data() + i * N;
      for (int64_t n = 0; n < N; ++n) b[n] += a * c[n];
    }
  }
}

std::vector<float> transposed(const std::vector<float>& B, int64_t M, int64_t N) {
  std::vector<float> turned(B.size());
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      turned[static_cast<size_t>(n * M + m)] = B[static_cast<size_t>(m * N + n)];
    }
  }
  return turned;
}

double uniform(std::mt19937& random) { return (random() + 0.5) / 4294967296.0; }

}  // namespace

char letter(int token) {
  return static_cast<char>(token < kKeys ? 'a' + token : 'A' + token - kKeys);
}

Tokens draw_texts(std::mt19937& random, int64_t texts) {
  Tokens all;
  for (int64_t i = 0; i < texts; ++i) {
    std::vector<int> keys(kKeys), values;
    for (int k = 0; k < kKeys; ++k) keys[static_cast<size_t>(k)] = k;
    const auto shuffle = [&](std::vector<int>& list) {  // std::shuffle differs between libraries
      for (size_t n = list.size(); n > 1; --n) std::swap(list[n - 1], list[random() % n]);
    };
    shuffle(keys);
    keys.resize(kPairs);
    for (int64_t p = 0; p < kPairs; ++p) {
      values.push_back(kKeys + static_cast<int>(random() % kValues));
      all.push_back(keys[static_cast<size_t>(p)]);
      all.push_back(values.back());
    }
    std::vector<int> order(kPairs);
    for (int p = 0; p < kPairs; ++p) order[static_cast<size_t>(p)] = p;
    shuffle(order);
    for (int p : order) {
      all.push_back(keys[static_cast<size_t>(p)]);
      all.push_back(values[static_cast<size_t>(p)]);
    }
  }
  return all;
}

Model::Model(unsigned seed, int threads)
    : threads_(threads),
      embedding_(kTokens * kWidth),
      project_(2 * kWidth * kRow),
      A_log_(kHeads),
      dt_bias_(kHeads),
      readout_(kOut * kTokens) {
  options_ = {.gate_form = GateForm::softplus,
              .beta_form = BetaForm::sigmoid,
              .qk_l2norm = true,
              .scale = 1.0f,
              .num_threads = threads};
  std::mt19937 random(seed);
  const auto fill = [&](Parameter& p, double size) {
    for (float& x : p.value) x = static_cast<float>(size * (2 * uniform(random) - 1));
  };
  fill(embedding_, 1.0);
  fill(project_, std::sqrt(3.0 / (2 * kWidth)));
  fill(readout_, std::sqrt(3.0 / kOut));
  // A slow decay to begin with: exp(-exp(A_log) softplus(dt_bias)) is about 0.99.
  std::fill(dt_bias_.value.begin(), dt_bias_.value.end(), -4.5f);
}

Tensors Model::views(const float* rows, int64_t texts, int64_t tokens) {
  const int64_t by_text = tokens * kRow;
  const auto part = [&](int64_t first) {
    return TensorView(rows + first, {texts, tokens, kHeads, kDim})
        .with_strides({by_text, kRow, kDim, 1});
  };
  const auto scalars = [&](int64_t first) {
    return TensorView(rows + first, {texts, tokens, kHeads}).with_strides({by_text, kRow, 1});
  };
  return {.q = part(0),
          .k = part(kOut),
          .v = part(2 * kOut),
          .beta = scalars(3 * kOut),
          .g = scalars(3 * kOut + kHeads)};
}

Tensors Model::inputs(const float* rows, int64_t texts, int64_t tokens) const {
  Tensors t = views(rows, texts, tokens);
  t.A_log = TensorView(A_log_.value.data(), {kHeads});
  t.dt_bias = TensorView(dt_bias_.value.data(), {kHeads});
  return t;
}

std::vector<float> Model::look_up(const Tokens& texts, int64_t begin, int64_t end) const {
  const int64_t num_texts = static_cast<int64_t>(texts.size()) / kLength;
  std::vector<float> x(static_cast<size_t>(num_texts * (end - begin) * 2 * kWidth), 0.0f);
  float* row = x.data();
  for (int64_t i = 0; i < num_texts; ++i) {
    for (int64_t t = begin; t < end; ++t, row += 2 * kWidth) {
      const int* token = texts.data() + i * kLength + t;
      std::copy_n(embedding_.value.data() + *token * kWidth, kWidth, row);
      if (t > 0) std::copy_n(embedding_.value.data() + token[-1] * kWidth, kWidth, row + kWidth);
    }
  }
  return x;
}

std::vector<float> Model::project_rows(const std::vector<float>& x) const {
  return product(x, project_.value, 2 * kWidth, kRow, threads_);
}

// ---- Training: forward, loss, backward -------------------------------------------------------

Model::Score Model::train(const Tokens& texts) {
  const int64_t N = static_cast<int64_t>(texts.size()) / kLength;
  for (Parameter* p : parameters()) std::fill(p->gradient.begin(), p->gradient.end(), 0.0f);

  // 1. The projections, then the layer. `saved` is what the layer keeps for its backward.
  const std::vector<float> x = look_up(texts, 0, kLength), rows = project_rows(x);
  std::vector<float> o(static_cast<size_t>(N * kLength * kOut)), d_o(o.size(), 0.0f);
  const TensorView o_view(o.data(), {N, kLength, kHeads, kDim});
  Options keeping = options_;
  keeping.save = Save::states;
  Tensors tensors = inputs(rows.data(), N, kLength);
  tensors.o = o_view;
  const Workspace saved(forward_saved_bytes(keeping, tensors));
  tensors.saved = saved.c();
  forward(keeping, tensors);

  // 2. The readout and the loss give d_o; d(readout) on the way.
  const Score score = answer_loss(texts, o, d_o);

  // 3. Back through the layer: gradients of q k v beta g lie as q k v beta g do.
  std::vector<float> d_rows(rows.size());
  const Tensors d = views(d_rows.data(), N, kLength);
  tensors.o = {};  // backward takes the inputs and `saved`
  backward(options_, {.forward = tensors,
                      .d_o = {d_o.data(), {N, kLength, kHeads, kDim}},
                      .dq = d.q,
                      .dk = d.k,
                      .dv = d.v,
                      .dbeta = d.beta,
                      .dg = d.g,
                      .dA_log = {A_log_.gradient.data(), {kHeads}},
                      .ddt_bias = {dt_bias_.gradient.data(), {kHeads}}});

  // 4. Back through the projections to the embedding.
  add_left_gradient(x, d_rows, 2 * kWidth, kRow, project_.gradient, threads_);
  const std::vector<float> dx =
      product(d_rows, transposed(project_.value, 2 * kWidth, kRow), kRow, 2 * kWidth, threads_);
  for (size_t i = 0; i < texts.size(); ++i) {
    const bool has_previous = i % kLength > 0;
    for (int64_t part = 0; part < (has_previous ? 2 : 1); ++part) {
      const float* from = dx.data() + (static_cast<int64_t>(i) * 2 + part) * kWidth;
      const int token = texts[i - static_cast<size_t>(part)];
      float* to = embedding_.gradient.data() + token * kWidth;
      for (int64_t c = 0; c < kWidth; ++c) to[c] += from[c];
    }
  }
  adam_step();
  return score;
}

// Mean cross entropy at the questions; d_o, and the gradient of the readout.
Model::Score Model::answer_loss(const Tokens& texts, const std::vector<float>& o,
                                std::vector<float>& d_o) {
  const int64_t N = static_cast<int64_t>(texts.size()) / kLength, questions = N * kPairs;
  std::vector<int64_t> at;  // tokens that ask
  for (int64_t i = 0; i < N; ++i) {
    for (int64_t p = 0; p < kPairs; ++p) at.push_back(i * kLength + 2 * kPairs + 2 * p);
  }
  std::vector<float> asked;
  for (int64_t t : at) asked.insert(asked.end(), o.begin() + t * kOut, o.begin() + (t + 1) * kOut);
  std::vector<float> logits = product(asked, readout_.value, kOut, kTokens, threads_);
  Score score;
  for (int64_t i = 0; i < questions; ++i) {
    float* row = logits.data() + i * kTokens;  // becomes its own gradient
    const int want = texts[static_cast<size_t>(at[static_cast<size_t>(i)] + 1)];
    const float largest = *std::max_element(row, row + kTokens);
    score.recall += row[want] == largest ? 1.0 : 0.0;
    double sum = 0;
    for (int v = 0; v < kTokens; ++v) sum += std::exp(static_cast<double>(row[v] - largest));
    score.loss += std::log(sum) - static_cast<double>(row[want] - largest);
    for (int v = 0; v < kTokens; ++v) {
      const double share = std::exp(static_cast<double>(row[v] - largest)) / sum;
      row[v] =
          static_cast<float>((share - (v == want ? 1.0 : 0.0)) / static_cast<double>(questions));
    }
  }
  add_left_gradient(asked, logits, kOut, kTokens, readout_.gradient, threads_);
  const std::vector<float> d_asked =
      product(logits, transposed(readout_.value, kOut, kTokens), kTokens, kOut, threads_);
  for (size_t i = 0; i < at.size(); ++i) {
    std::copy_n(d_asked.begin() + static_cast<int64_t>(i) * kOut, kOut, d_o.begin() + at[i] * kOut);
  }
  score.loss /= static_cast<double>(questions);
  score.recall /= static_cast<double>(questions);
  return score;
}

std::vector<Parameter*> Model::parameters() {
  return {&embedding_, &project_, &A_log_, &dt_bias_, &readout_};
}

void Model::adam_step() {
  constexpr double kRate = 1e-2, kMean = 0.9, kSquare = 0.99, kEps = 1e-8;
  ++step_;
  const double from_mean = 1 - std::pow(kMean, static_cast<double>(step_)),
               from_square = 1 - std::pow(kSquare, static_cast<double>(step_));
  for (Parameter* p : parameters()) {
    for (size_t i = 0; i < p->value.size(); ++i) {
      const double g = p->gradient[i];
      const double mean = kMean * p->mean[i] + (1 - kMean) * g;
      const double square = kSquare * p->square[i] + (1 - kSquare) * g * g;
      p->mean[i] = static_cast<float>(mean);
      p->square[i] = static_cast<float>(square);
      p->value[i] -=
          static_cast<float>(kRate * (mean / from_mean) / (std::sqrt(square / from_square) + kEps));
    }
  }
}

// ---- Answering: prefill, then decode ---------------------------------------------------------

Tokens Model::answer(const Tokens& texts) const {
  const int64_t N = static_cast<int64_t>(texts.size()) / kLength, prefill = 2 * kPairs;
  std::vector<float> state(static_cast<size_t>(N * kHeads * kDim * kDim));
  const TensorView state_view(state.data(), {N, kHeads, kDim, kDim});

  // The pairs: one call, which leaves the state. Its size does not depend on how many there were.
  const std::vector<float> rows = project_rows(look_up(texts, 0, prefill));
  std::vector<float> o(static_cast<size_t>(N * prefill * kOut));
  Tensors tensors = inputs(rows.data(), N, prefill);
  tensors.o = TensorView(o.data(), {N, prefill, kHeads, kDim});
  tensors.final_state = state_view;
  forward(options_, tensors);

  // The rest: token by token for all texts at once, the state updated in place. What the model
  // answers is what it reads next.
  Tokens own = texts, answers;
  o.resize(static_cast<size_t>(N * kOut));
  for (int64_t t = prefill; t < kLength; ++t) {
    const std::vector<float> row = project_rows(look_up(own, t, t + 1));
    Tensors step = inputs(row.data(), N, 1);
    step.o = TensorView(o.data(), {N, 1, kHeads, kDim});
    step.initial_state = step.final_state = state_view;
    decode(options_, step);
    if (t % 2 == 1) continue;  // an answer was read; its next token is a question
    const std::vector<float> logits = product(o, readout_.value, kOut, kTokens, threads_);
    for (int64_t i = 0; i < N; ++i) {
      const float* row_of = logits.data() + i * kTokens;
      const auto best = std::max_element(row_of, row_of + kTokens) - row_of;
      own[static_cast<size_t>(i * kLength + t + 1)] = static_cast<int>(best);
    }
  }
  for (int64_t i = 0; i < N; ++i) {
    for (int64_t p = 0; p < kPairs; ++p) {
      answers.push_back(own[static_cast<size_t>(i * kLength + prefill + 2 * p + 1)]);
    }
  }
  return answers;
}

}  // namespace deltic::cli::recall
