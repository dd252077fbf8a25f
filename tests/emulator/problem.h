// The tensors of a case and what the operator must make of them.
#pragma once

#include <random>

#include "cases.h"
#include "cuda.h"

struct Errors {
  double out;  // relative, over the whole output
  double lse;  // largest absolute
};

class Problem {
 public:
  Problem(const Case& shape, unsigned seed);

  // Points into this object, which must stay where it is.
  treeverify::TreeAttentionParams params();

  // Compares what was written with an fp64 reference.
  Errors errors() const;

 private:
  __nv_bfloat16 normal();
  void fill_pool();
  void make_tree(int request);
  void hide_a_node(int request);
  void pack_masks(int request);
  bool sees(int request, int node, int column) const;
  const __nv_bfloat16* key(int request, int column) const;

  const Case shape_;
  const int batch_;
  const bool wide_;  // 64-bit indices
  const int words_;  // of a node's bit mask
  const float scale_ = 1.f / std::sqrt(192.f);
  std::mt19937 random_;
  std::normal_distribution<float> gauss_;
  std::vector<__nv_bfloat16> pool_, draft_, q_, out_;
  std::vector<float> lse_;
  std::vector<int32_t> indptr_, indices_;
  std::vector<int64_t> indptr_64_, indices_64_, mask_indptr_;
  std::vector<char> visible_;  // [batch, nodes, nodes]
  std::vector<uint8_t> flat_;
  std::vector<uint64_t> bits_;
};
