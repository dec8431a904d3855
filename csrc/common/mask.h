// Causal and window masks: which keys a row sees, and which blocks are empty, partial or full.
//
// Query i of a sequence sees key j when  i + Sk - Sq - left <= j <= i + Sk - Sq + right  (aligned
// to the bottom right); a negative bound is no bound. Causal is right = 0. Kernels visit the blocks
// in [begin, end) and apply visible() in those outside [full_begin, full_end) alone.
#pragma once

#include <cstdint>

#include "common/macros.h"

namespace flashattn {

struct BlockRange {
  int begin, end;            // blocks with at least one visible (query, key) pair
  int full_begin, full_end;  // of those, the blocks in which every pair is visible

  FLASHATTN_HOST_DEVICE bool empty() const { return begin >= end; }
  FLASHATTN_HOST_DEVICE bool any_partial() const { return full_begin > begin || full_end < end; }
  FLASHATTN_HOST_DEVICE bool partial(int block) const {
    return block < full_begin || block >= full_end;
  }
};

struct KeyRange {
  int begin, end;
};

// Bounds are kept below 2^30 (see clamp_window), as are sequence lengths: int arithmetic is enough.
struct MaskSpec {
  int left = -1;
  int right = -1;

  static constexpr int kMaxBound = 1 << 30;
  static FLASHATTN_HOST_DEVICE int clamp_window(int64_t bound) {
    return bound < 0 || bound >= kMaxBound ? -1 : static_cast<int>(bound);
  }
};

// A mask applied to one sequence.
struct SequenceMask {
  MaskSpec spec;
  int seqlen_q;
  int seqlen_k;

  FLASHATTN_HOST_DEVICE int diagonal() const { return seqlen_k - seqlen_q; }

  // Keys that query `row` sees; begin == end when it sees none.
  FLASHATTN_HOST_DEVICE KeyRange visible_keys(int row) const {
    int begin = spec.left < 0 ? 0 : max(0, row + diagonal() - spec.left);
    int end = spec.right < 0 ? seqlen_k : min(seqlen_k, row + diagonal() + 1 + spec.right);
    return {begin, max(begin, end)};
  }

  // Queries that see `key`; begin == end when none does.
  FLASHATTN_HOST_DEVICE KeyRange visible_rows(int key) const {
    int begin = spec.right < 0 ? 0 : max(0, key - diagonal() - spec.right);
    int end = spec.left < 0 ? seqlen_q : min(seqlen_q, key - diagonal() + 1 + spec.left);
    return {begin, max(begin, end)};
  }

  FLASHATTN_HOST_DEVICE bool visible(int row, int key) const {
    KeyRange keys = visible_keys(row);
    return key >= keys.begin && key < keys.end;
  }

  // Key blocks of `block_n` keys for the queries [row_begin, row_begin + block_m).
  FLASHATTN_HOST_DEVICE BlockRange key_blocks(int row_begin, int block_m, int block_n) const {
    int row_last = min(row_begin + block_m, seqlen_q) - 1;
    if (row_last < row_begin) return {0, 0, 0, 0};
    KeyRange first = visible_keys(row_begin), last = visible_keys(row_last);
    return blocks({first.begin, last.end}, {last.begin, first.end}, block_n);
  }

  // Query blocks of `block_m` rows for the keys [key_begin, key_begin + block_n). A pair of blocks
  // is in this range exactly when it is in that of key_blocks(): the deterministic backward counts
  // on it.
  FLASHATTN_HOST_DEVICE BlockRange query_blocks(int key_begin, int block_n, int block_m) const {
    int key_last = min(key_begin + block_n, seqlen_k) - 1;
    if (key_last < key_begin) return {0, 0, 0, 0};
    KeyRange first = visible_rows(key_begin), last = visible_rows(key_last);
    BlockRange range = blocks({first.begin, last.end}, {last.begin, first.end}, block_m);
    bool keys_past_end = key_begin + block_n > seqlen_k;
    if (keys_past_end) range.full_begin = range.full_end = range.begin;
    return range;
  }

 private:
  static FLASHATTN_HOST_DEVICE int min(int a, int b) { return a < b ? a : b; }
  static FLASHATTN_HOST_DEVICE int max(int a, int b) { return a > b ? a : b; }

  // Blocks that touch `any` (seen by some), and those inside `all` (seen by all).
  static FLASHATTN_HOST_DEVICE BlockRange blocks(KeyRange any, KeyRange all, int block) {
    if (any.begin >= any.end) return {0, 0, 0, 0};
    int begin = any.begin / block;
    int end = (any.end + block - 1) / block;
    int full_begin = (all.begin + block - 1) / block;
    int full_end = all.end / block;
    full_begin = min(max(full_begin, begin), end);
    full_end = max(min(full_end, end), full_begin);
    return {begin, end, full_begin, full_end};
  }
};

}  // namespace flashattn
