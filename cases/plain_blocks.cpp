// The plain algorithm of the building blocks: their formulas in fp32, operands of products rounded.
#include "cases/plain.h"

namespace deltic::cases::plain {
namespace {

void block_gates(const Problem& p, const Output& out) {
  const Case& c = p.c;
  const int64_t width = c.gate == Gate::channel ? c.K : 1;
  const float scale = c.scale ? static_cast<float>(*c.scale) : 1.0f;
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    for (int64_t d = 0; d < width; ++d) {
      float sum = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = (token + (c.reverse ? rows - 1 - r : r)) * c.HV + h;
        const float y = p.log_decay(row, h, d);
        sum += std::max(kMinLogDecay, y);
        out.put(static_cast<size_t>(row * width + d), c.op == Op::gate ? y : scale * sum);
      }
    }
  });
}

void block_l2norm(const Problem& p, const Output& out, const Output& rstd) {
  const Case& c = p.c;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    for (int64_t r = p.first_token(n) * c.H; r < (p.first_token(n) + c.sequence_length(n)) * c.H;
         ++r) {
      const float* x = p.x.data() + r * c.K;
      float sum = 0;
      for (int64_t d = 0; d < c.K; ++d) sum += x[d] * x[d];
      const float factor = 1.0f / std::sqrt(sum + kNormEps);
      for (int64_t d = 0; d < c.K; ++d) out.put(static_cast<size_t>(r * c.K + d), x[d] * factor);
      rstd.put(static_cast<size_t>(r), factor);
    }
  }
}

// Entries of kkt or of scores: put(index, value).
template <class F>
void block_products(const Problem& p, bool is_kkt, const F& put) {
  const Case& c = p.c;
  Floats Gi(static_cast<size_t>(c.K)), Gj(Gi.size());
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = (token + i) * c.HV + h;
      const float* left = (is_kkt ? p.k : p.q).data() + ((token + i) * c.H + p.k_head(h)) * c.K;
      for (int64_t j = 0; j < (is_kkt ? i : i + 1); ++j) {
        const float* right = p.k.data() + ((token + j) * c.H + p.k_head(h)) * c.K;
        for (int64_t d = 0; d < c.K; ++d) {
          Gi[static_cast<size_t>(d)] = gate_at(p, row, d);
          Gj[static_cast<size_t>(d)] = gate_at(p, (token + j) * c.HV + h, d);
        }
        float sum = 0, same = 0;
        gated_products(p, left, left, right, Gi.data(), Gj.data(), c.K, sum, same);
        put(static_cast<size_t>(row * c.chunk + j), (is_kkt ? p.beta_at(row) : p.scale()) * sum);
      }
    }
  });
}

void block_inverse(const Problem& p, const Floats& a, const Output& out) {
  const int64_t W = p.c.chunk;
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    Floats L(static_cast<size_t>(rows * W), 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(a.data() + ((token + i) * p.c.HV + h) * W, i, L.data() + i * W);
    }
    const Floats A = invert(L, rows, W);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < W; ++j) {
        out.put(static_cast<size_t>(((token + i) * p.c.HV + h) * W + j),
                A[static_cast<size_t>(i * W + j)]);
      }
    }
  });
}

void block_wy(const Problem& p, const Instance& instance, Values& all) {
  const Case& c = p.c;
  const Output w = make_output(instance, all, "w", 0.0), u = make_output(instance, all, "u", 0.0);
  const Output kg = make_output(instance, all, "kg", 0.0),
               qg = make_output(instance, all, "qg", 0.0);
  for_each_chunk(p, [&](int64_t token, int64_t rows, int64_t h) {
    const int64_t last = (token + rows - 1) * c.HV + h;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = (token + i) * c.HV + h;
      const auto k_at = [&](int64_t t, int64_t d) {
        return static_cast<size_t>((t * c.H + p.k_head(h)) * c.K + d);
      };
      for (int64_t d = 0; d < c.K; ++d) {
        float sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t other = (token + j) * c.HV + h;
          sum += p.operand(p.a[static_cast<size_t>(row * c.chunk + j)]) *
                 p.exp_operand(p.beta_at(other) * p.k[k_at(token + j, d)] *
                               std::exp(gate_at(p, other, d)));
        }
        const auto at = static_cast<size_t>(row * c.K + d);
        w.put(at, sum);
        kg.put(at, p.k[k_at(token + i, d)] * std::exp(gate_at(p, last, d) - gate_at(p, row, d)));
        if (c.qg) qg.put(at, p.q[k_at(token + i, d)] * std::exp(gate_at(p, row, d)));
      }
      for (int64_t d = 0; c.u && d < c.V; ++d) {
        float sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          const int64_t other = (token + j) * c.HV + h;
          sum += p.operand(p.a[static_cast<size_t>(row * c.chunk + j)]) *
                 p.operand(p.beta_at(other) * p.v[static_cast<size_t>(other * c.V + d)]);
        }
        u.put(static_cast<size_t>(row * c.V + d), sum);
      }
    }
  });
}
}  // namespace

Values block(const Instance& instance) {
  const Op op = instance.spec().op;
  const Problem p(instance);
  Values all;
  if (op == Op::wy) {
    block_wy(p, instance, all);
    return all;
  }
  const Output out = make_output(instance, all, "out", 0.0);
  if (op == Op::cumsum || op == Op::gate) block_gates(p, out);
  if (op == Op::l2norm) block_l2norm(p, out, make_output(instance, all, "rstd", 0.0));
  if (op == Op::kkt || op == Op::scores || op == Op::scores_inverse) {
    block_products(p, op == Op::kkt, [&](size_t at, float x) { out.put(at, x); });
  }
  if (op == Op::inverse) block_inverse(p, p.a, out);
  if (op == Op::scores_inverse) {
    const Output inverse = make_output(instance, all, "a", 0.0);
    Floats L(all["a"].size(), 0.0f);
    block_products(p, true, [&](size_t at, float x) { L[at] = x; });
    block_inverse(p, L, inverse);
  }
  return all;
}

}  // namespace deltic::cases::plain
