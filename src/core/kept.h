// A thread's newest answers to a question that is asked of few things, again and again.
#pragma once

#include <array>
#include <cstddef>

namespace deltic {

// The layers of a model, or a server's batches, ask with a few shapes and kernels. A new answer
// takes the place of the oldest.
template <class Answer, size_t kCount = 8>
class Kept {
 public:
  auto begin() const { return answers_.begin(); }
  auto end() const { return answers_.end(); }
  void add(const Answer& answer) {
    answers_[oldest_] = answer;
    oldest_ = (oldest_ + 1) % answers_.size();
  }

 private:
  std::array<Answer, kCount> answers_{};
  size_t oldest_ = 0;
};

}  // namespace deltic
