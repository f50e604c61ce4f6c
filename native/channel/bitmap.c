/* See bitmap.h. */
#include "bitmap.h"

#include <stdlib.h>
#include <string.h>

#define WORDS_MIN 8

static uint64_t bytes_used;

uint64_t bitmap_bytes_used(void) { return bytes_used; }

bool bitmap_grow(bitmap *b, uint64_t bits) {
  if (bits <= b->bits) return true;
  if (bits > BITMAP_BYTES_MAX * 8) return false;
  uint64_t words = (bits + 63) / 64, old = b->bits / 64;
  if (words < WORDS_MIN) words = WORDS_MIN;
  uint64_t room = (BITMAP_BYTES_MAX - bytes_used) / 8; /* further words */
  if (words < 2 * old && 2 * old - old <= room) words = 2 * old;
  if (words - old > room) return false;
  uint64_t *grown = realloc(b->words, words * 8);
  if (!grown) return false;
  memset(grown + old, 0, (words - old) * 8);
  b->words = grown;
  b->bits = words * 64;
  bytes_used += (words - old) * 8;
  return true;
}

void bitmap_free(bitmap *b) {
  bytes_used -= b->bits / 8;
  free(b->words);
  b->words = NULL;
  b->bits = 0;
}

/* The bits of one word that lie in [first, end); first is in that word. */
static uint64_t mask_of(uint64_t first, uint64_t end) {
  uint64_t low = first % 64, span = end - first;
  uint64_t ones = span >= 64 - low ? UINT64_MAX : (UINT64_C(1) << span) - 1;
  return ones << low;
}

static uint64_t clip(const bitmap *b, uint64_t first, uint64_t count) {
  if (first >= b->bits) return first;
  return count > b->bits - first ? b->bits : first + count;
}

void bitmap_set(bitmap *b, uint64_t first, uint64_t count) {
  uint64_t end = clip(b, first, count);
  for (; first < end; first = (first / 64 + 1) * 64) b->words[first / 64] |= mask_of(first, end);
}

void bitmap_clear(bitmap *b, uint64_t first, uint64_t count) {
  uint64_t end = clip(b, first, count);
  for (; first < end; first = (first / 64 + 1) * 64) b->words[first / 64] &= ~mask_of(first, end);
}

bool bitmap_all(const bitmap *b, uint64_t first, uint64_t count) {
  if (first > b->bits || count > b->bits - first) return false;
  for (uint64_t end = first + count; first < end; first = (first / 64 + 1) * 64) {
    uint64_t mask = mask_of(first, end);
    if ((b->words[first / 64] & mask) != mask) return false;
  }
  return true;
}

bool bitmap_next(const bitmap *b, uint64_t from, uint64_t *first, uint64_t *count) {
  uint64_t at = from;
  while (at < b->bits) {
    uint64_t rest = b->words[at / 64] >> (at % 64);
    if (rest) {
      at += (uint64_t)__builtin_ctzll(rest);
      break;
    }
    at = (at / 64 + 1) * 64;
  }
  if (at >= b->bits) return false;
  uint64_t end = at;
  while (end < b->bits) {
    uint64_t rest = ~(b->words[end / 64] >> (end % 64)); /* zeros shifted in at the top read as ones: clip below */
    uint64_t ones = rest ? (uint64_t)__builtin_ctzll(rest) : 64;
    uint64_t left = 64 - end % 64;
    if (ones < left) {
      end += ones;
      break;
    }
    end += left;
  }
  *first = at;
  *count = end - at;
  return true;
}
