#include "problem.h"

#include <algorithm>
#include <limits>
#include <numeric>

using treeverify::kLatent;
using treeverify::kRow;
using treeverify::MaskKind;

namespace {

constexpr int kFreeSlots = 50;     // pool rows that no request owns
constexpr int kSpareIndices = 40;  // behind the last index, not to be followed
constexpr double kUseless = 1e9;

__nv_bfloat16 bf16(float x) { return __float2bfloat16_rn(x); }

}  // namespace

Problem::Problem(const Case& shape, unsigned seed)
    : shape_(shape),
      batch_(static_cast<int>(shape.prefixes.size())),
      wide_(shape.mask != MaskKind::kBits),
      words_((shape.nodes + 63) / 64),
      random_(seed) {
  const size_t tokens = static_cast<size_t>(batch_) * shape_.nodes;
  const size_t rows = tokens * shape_.heads;
  q_.resize(rows * kRow);
  draft_.resize(tokens * kRow);
  for (auto& x : q_) x = normal();
  for (auto& x : draft_) x = normal();
  out_.assign(rows * kLatent, bf16(NAN));
  lse_.assign(rows, NAN);
  fill_pool();
  visible_.assign(tokens * shape_.nodes, 0);
  bits_.assign(tokens * words_, ~0ull);  // bits beyond the last node mean nothing
  mask_indptr_.assign(1, 0);
  for (int request = 0; request < batch_; ++request) {
    make_tree(request);
    if (shape_.hostile && shape_.mask != MaskKind::kCausal && shape_.nodes > 2) hide_a_node(request);
    pack_masks(request);
  }
}

__nv_bfloat16 Problem::normal() { return bf16(gauss_(random_)); }

void Problem::fill_pool() {
  const int total = std::accumulate(shape_.prefixes.begin(), shape_.prefixes.end(), 0);
  const int slots = total + kFreeSlots;
  pool_.resize(static_cast<size_t>(slots) * kRow);
  for (auto& x : pool_) x = shape_.hostile ? bf16(NAN) : normal();
  std::vector<int> order(slots);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_);
  indices_.assign(total + kSpareIndices, std::numeric_limits<int32_t>::max());
  indices_64_.assign(total + kSpareIndices, int64_t{1} << 60);
  for (int i = 0; i < total; ++i) {
    indices_[i] = order[i];
    indices_64_[i] = order[i];
    for (int column = 0; column < kRow; ++column) pool_[static_cast<size_t>(order[i]) * kRow + column] = normal();
  }
  indptr_.assign(1, 0);
  for (const int prefix : shape_.prefixes) indptr_.push_back(indptr_.back() + prefix);
  indptr_64_.assign(indptr_.begin(), indptr_.end());
}

// A node sees itself and what its parent, an earlier node, sees; without a mask the tree is a chain.
void Problem::make_tree(int request) {
  const int nodes = shape_.nodes;
  char* visible = &visible_[static_cast<size_t>(request) * nodes * nodes];
  for (int node = 0; node < nodes; ++node) {
    const bool chain = shape_.mask == MaskKind::kCausal;
    const int parent = node == 0 ? -1 : chain ? node - 1 : static_cast<int>(random_() % node);
    for (int column = 0; column < nodes; ++column) {
      visible[node * nodes + column] = column == node || (parent >= 0 && visible[parent * nodes + column]);
    }
  }
}

// Makes a node one that padding left: it sees no draft row, none sees it, and its key is garbage.
void Problem::hide_a_node(int request) {
  const int nodes = shape_.nodes;
  const int hidden = 1 + static_cast<int>(random_() % (nodes - 1));
  char* visible = &visible_[static_cast<size_t>(request) * nodes * nodes];
  for (int node = 0; node < nodes; ++node) {
    visible[node * nodes + hidden] = 0;
    visible[hidden * nodes + node] = 0;
  }
  __nv_bfloat16* row = &draft_[(static_cast<size_t>(request) * nodes + hidden) * kRow];
  for (int column = 0; column < kRow; ++column) row[column] = bf16(random_() % 2 ? NAN : INFINITY);
}

void Problem::pack_masks(int request) {
  const int prefix = shape_.prefixes[request];
  for (int node = 0; node < shape_.nodes; ++node) {
    for (int column = 0; column < prefix; ++column) flat_.push_back(random_() % 2 * 77);  // never to be read
    for (int column = 0; column < shape_.nodes; ++column) {
      const bool seen = sees(request, node, column);
      flat_.push_back(seen ? 1 + random_() % 3 : 0);
      uint64_t& word = bits_[(static_cast<size_t>(request) * shape_.nodes + node) * words_ + column / 64];
      if (!seen) word &= ~(1ull << (column % 64));
    }
  }
  mask_indptr_.push_back(static_cast<int64_t>(flat_.size()));
}

bool Problem::sees(int request, int node, int column) const {
  return visible_[(static_cast<size_t>(request) * shape_.nodes + node) * shape_.nodes + column];
}

treeverify::TreeAttentionParams Problem::params() {
  treeverify::TreeAttentionParams p{};
  p.q = q_.data();
  p.q_token_stride = shape_.heads * kRow;
  p.q_head_stride = kRow;
  p.draft_kv = draft_.data();
  p.draft_stride = kRow;
  p.kv_pool = pool_.data();
  p.pool_stride = kRow;
  p.kv_indptr = wide_ ? static_cast<const void*>(indptr_64_.data()) : indptr_.data();
  p.kv_indices = wide_ ? static_cast<const void*>(indices_64_.data()) : indices_.data();
  p.indptr_is_64 = wide_;
  p.indices_is_64 = wide_;
  p.mask_kind = shape_.mask;
  if (shape_.mask == MaskKind::kFlat) p.mask = flat_.data();
  if (shape_.mask == MaskKind::kBits) p.mask = bits_.data();
  p.mask_indptr = mask_indptr_.data();
  p.mask_indptr_is_64 = true;
  p.mask_words = words_;
  p.out = out_.data();
  p.out_token_stride = shape_.heads * kLatent;
  p.out_head_stride = kLatent;
  p.lse = lse_.data();
  p.batch = batch_;
  p.nodes = shape_.nodes;
  p.heads = shape_.heads;
  p.scale = scale_;
  return p;
}

const __nv_bfloat16* Problem::key(int request, int column) const {
  const int prefix = shape_.prefixes[request];
  if (column < prefix) return &pool_[static_cast<size_t>(indices_[indptr_[request] + column]) * kRow];
  return &draft_[(static_cast<size_t>(request) * shape_.nodes + column - prefix) * kRow];
}

Errors Problem::errors() const {
  double difference = 0, norm = 0, worst_lse = 0;
  for (size_t row = 0; row < lse_.size(); ++row) {
    const int token = static_cast<int>(row / shape_.heads);
    const int request = token / shape_.nodes, node = token % shape_.nodes;
    const int prefix = shape_.prefixes[request];
    std::vector<double> scores;
    std::vector<const __nv_bfloat16*> keys;
    for (int column = 0; column < prefix + shape_.nodes; ++column) {
      if (column >= prefix && !sees(request, node, column - prefix)) continue;
      const __nv_bfloat16* row_key = key(request, column);
      double product = 0;
      for (int i = 0; i < kRow; ++i) {
        product += static_cast<double>(__bfloat162float(q_[row * kRow + i])) * __bfloat162float(row_key[i]);
      }
      scores.push_back(product * scale_);
      keys.push_back(row_key);
    }
    std::vector<double> expected(kLatent, 0.);
    double expected_lse = -INFINITY;  // a row that sees nothing: zeros
    if (!scores.empty()) {
      const double top = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (const double score : scores) sum += std::exp(score - top);
      expected_lse = top + std::log(sum);
      for (size_t j = 0; j < keys.size(); ++j) {
        const double weight = std::exp(scores[j] - expected_lse);
        for (int i = 0; i < kLatent; ++i) expected[i] += weight * __bfloat162float(keys[j][i]);
      }
    }
    const double lse_error = lse_[row] == expected_lse ? 0. : std::fabs(lse_[row] - expected_lse);
    worst_lse = std::max(worst_lse, std::isnan(lse_error) ? kUseless : lse_error);
    for (int i = 0; i < kLatent; ++i) {
      const double error = expected[i] - __bfloat162float(out_[row * kLatent + i]);
      difference += std::isnan(error) ? kUseless : error * error;
      norm += expected[i] * expected[i];
    }
  }
  return {std::sqrt(difference / norm), worst_lse};
}
