// Which rows of a tensor belong to a sequence: fixed length, packed (cu_seqlens) and partly used
// (seqused) in one object. Everything a kernel knows about lengths it reads here, once a tile.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace flashattn {

// The rows of one sequence. Fixed length: `begin` is 0, the batch stride does the rest.
struct SeqRows {
  int64_t begin;  // first row in the packed tensor
  int length;     // rows that take part (seqused, or all of them)
};

// Where sequence `batch_index`, whose first row is `begin`, starts among the rows of all sequences
// when each sequence starts a group of `group` rows. That of (batch, rows) is enough for all.
FLASHATTN_HOST_DEVICE int64_t grouped_begin(bool packed, int64_t rows, int64_t batch_index,
                                            int64_t begin, int group) {
  return packed ? (begin / group + batch_index) * group
                : batch_index * ((rows + group - 1) / group * group);
}

// The lengths of one side (queries or keys). Device-side integers are bounded here, so that no
// value of theirs leads outside the tensor: begin is clamped to [0, rows], the end to [begin,
// rows], seqused to [0, end - begin].
struct SeqLens {
  const int32_t* cu_seqlens = nullptr;  // (batch + 1,), or null: fixed length
  const int32_t* seqused = nullptr;     // (batch,), or null: every row is used
  int64_t rows = 0;                     // fixed length: rows a sequence; packed: rows in all

  FLASHATTN_HOST_DEVICE bool packed() const { return cu_seqlens != nullptr; }

  FLASHATTN_HOST_DEVICE SeqRows sequence(int64_t batch_index) const {
    int64_t begin = 0, end = rows;
    if (cu_seqlens != nullptr) {
      begin = clamp(cu_seqlens[batch_index], 0, rows);
      end = clamp(cu_seqlens[batch_index + 1], begin, rows);
    }
    int64_t length = end - begin;
    if (seqused != nullptr) length = clamp(seqused[batch_index], 0, length);
    return {begin, static_cast<int>(length)};
  }

  FLASHATTN_HOST_DEVICE int64_t grouped_begin(int64_t batch_index, int64_t begin, int group) const {
    return flashattn::grouped_begin(packed(), rows, batch_index, begin, group);
  }

 private:
  static FLASHATTN_HOST_DEVICE int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : (x > high ? high : x);
  }
};

}  // namespace flashattn
