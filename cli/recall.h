// Associative recall: a small model that is trained with forward and backward, and answers with
// decode.
//
// A text of this toy language has pairs of a key and a value, then some of the keys again:
//
//     k Q  m B  x Q  ...    m ?    k ?
//
// and the model has to say which value followed the key. The pairs are drawn anew for every text,
// so nothing can be learned by heart: the weights learn to write pairs into the state and to read
// them.
//
//     e_t = embedding of token t                               [kWidth]
//     q k v beta g = [e_t, e_{t-1}] project                    two tokens: a short convolution
//     o = Gated DeltaNet(q, k, v, beta, g; A_log, dt_bias)     one layer of the library
//     logits = o readout
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "deltic/deltic.hpp"

namespace deltic::cli::recall {

inline constexpr int kKeys = 26, kValues = 26, kTokens = kKeys + kValues;
inline constexpr int64_t kPairs = 16;           // of a text, and as many questions
inline constexpr int64_t kLength = 4 * kPairs;  // tokens: pairs, then questions with their answers

// Texts in one batch, row-major [texts, kLength].
using Tokens = std::vector<int>;
Tokens draw_texts(std::mt19937& random, int64_t texts);
char letter(int token);  // keys a to z, values A to Z

// Weights with their gradient and what Adam keeps of it.
struct Parameter {
  std::vector<float> value, gradient, mean, square;
  explicit Parameter(size_t size) : value(size), gradient(size), mean(size), square(size) {}
};

class Model {
 public:
  Model(unsigned seed, int threads);

  struct Score {
    double loss = 0;    // mean cross entropy of the answers
    double recall = 0;  // share of right answers
  };
  // One step of Adam on a batch of texts; the score is that before the step.
  Score train(const Tokens& texts);

  // The answers to all questions of the texts: the pairs by one forward call, everything after them
  // by decode, token by token, from the state. [texts, kPairs]
  Tokens answer(const Tokens& texts) const;

 private:
  static constexpr int64_t kWidth = 32, kHeads = 2, kDim = 32;  // K = V = kDim
  static constexpr int64_t kOut = kHeads * kDim;                // elements of q, k, v, o per token
  static constexpr int64_t kRow = 3 * kOut + 2 * kHeads;        // q k v beta g side by side

  // q k v beta g of [texts, tokens] as views of one array of rows: nothing is copied.
  static Tensors views(const float* rows, int64_t texts, int64_t tokens);
  Tensors inputs(const float* rows, int64_t texts, int64_t tokens) const;
  // [e_t, e_{t-1}] of tokens begin .. end of every text, and what `project` makes of them.
  std::vector<float> look_up(const Tokens& texts, int64_t begin, int64_t end) const;
  std::vector<float> project_rows(const std::vector<float>& x) const;
  Score answer_loss(const Tokens& texts, const std::vector<float>& o, std::vector<float>& d_o);
  void adam_step();
  std::vector<Parameter*> parameters();

  Options options_;
  int threads_;
  int64_t step_ = 0;
  Parameter embedding_, project_, A_log_, dt_bias_, readout_;
};

}  // namespace deltic::cli::recall
