// Who computes what: fixed splits, waves, parts, and items that so many CTAs share that the merge changes its way.
#include "cases.h"

using enum Pipeline;
using enum treeverify::MaskKind;

std::vector<Case> schedule_cases() {
  return {
      {.name = "fixed splits, deep",
       .pipeline = kDeep,
       .prefixes = {200, 33},
       .nodes = 9,
       .heads = 4,
       .mask = kBits,
       .ctas = 3,
       .granule = 2},
      {.name = "fixed splits, pipelined",
       .pipeline = kPipelined,
       .prefixes = {200, 33},
       .nodes = 9,
       .heads = 4,
       .mask = kCausal,
       .hostile = false,
       .ctas = 3,
       .granule = 1},
      {.name = "waves, pipelined",
       .pipeline = kPipelined,
       .prefixes = {96, 100, 90, 80},
       .nodes = 9,
       .heads = 8,
       .mask = kBits,
       .ctas = 3},
      {.name = "waves, deep",
       .pipeline = kDeep,
       .prefixes = {96, 100, 90, 80, 85},
       .nodes = 9,
       .heads = 4,
       .mask = kFlat,
       .ctas = 4},
      {.name = "parts",
       .pipeline = kPipelined,
       .prefixes = {300, 30, 90},
       .nodes = 5,
       .heads = 3,
       .mask = kBits,
       .ctas = 13},
  };
}

std::vector<Case> many_cta_cases() {
  return {
      {.name = "many parts",
       .pipeline = kDeep,
       .prefixes = {1900},
       .nodes = 5,
       .heads = 3,
       .mask = kBits,
       .ctas = 61},
      {.name = "many cuts",
       .pipeline = kSmall,
       .prefixes = {900, 100, 400, 30},
       .nodes = 5,
       .heads = 3,
       .mask = kFlat,
       .ctas = 25,
       .allow_parts = false},
      {.name = "many fixed splits",
       .pipeline = kDeep,
       .prefixes = {700, 33, 300},
       .nodes = 5,
       .heads = 3,
       .mask = kBits,
       .ctas = 5,
       .granule = 1},
  };
}
