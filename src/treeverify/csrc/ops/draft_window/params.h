// What a draft_window launch needs. Shapes: [batch], [batch, width], [batch, block], the table [rows, columns].
#pragma once

#include <cstdint>

namespace treeverify {

constexpr int kMaxWindowWidth = 257;

struct DraftWindowParams {
  const void* request_rows;   // int32 or int64 [batch]
  const void* lengths;        // int32 or int64 [batch]
  const int32_t* slot_table;  // [rows, columns]
  const void* roots;          // int32 or int64 [batch]
  int64_t* slots;             // [batch, width]
  int64_t* block_slots;       // [batch, block]
  int64_t* ids;               // [batch, block]
  int64_t* positions;         // [batch, block]
  int64_t rows;
  int64_t columns;
  int64_t mask_token;
  int32_t batch;
  int32_t width;
  int32_t block;
  bool rows_is_64;
  bool lengths_is_64;
  bool roots_is_64;
};

}  // namespace treeverify
