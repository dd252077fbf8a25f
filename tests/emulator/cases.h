// What is tried: one problem and one launch each. The tile rows are those that the program is compiled for.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/tree_attention/params.h"

enum class Depth { kSmall, kDeep };  // the two configurations of portable_launch.cu

struct Case {
  const char* name;
  Depth depth;
  std::vector<int> prefixes;  // one request each
  int nodes;
  int heads;
  treeverify::MaskKind mask;
  bool hostile = true;  // NaN in pool rows that no request owns; draft nodes that none sees hold NaN or infinity
  int ctas;
  int granule = 0;
  bool allow_parts = true;
};

std::vector<Case> mask_cases();
std::vector<Case> schedule_cases();
std::vector<Case> many_cta_cases();
