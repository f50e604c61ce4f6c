/* Which pages of two buffers differ.
 *
 * Invariants: bits at and past the page count are zero; no byte past either buffer is read.
 */
#include "bytes.h"
#include "native.h"

static size_t pages_of(size_t len, size_t page_len) { return len / page_len + (len % page_len != 0); }

static size_t page_bytes(size_t len, size_t start, size_t page_len) {
  if (start >= len) return 0;
  return len - start < page_len ? len - start : page_len;
}

int64_t aof2_page_diff(const uint8_t *a, size_t a_len, const uint8_t *b, size_t b_len, size_t page_len,
                       uint8_t *bitmap, size_t bitmap_len) {
  if (page_len == 0) return -1;
  size_t longer = a_len > b_len ? a_len : b_len, pages = pages_of(longer, page_len);
  size_t needed = pages_of(pages, 8);
  int64_t changed = 0;
  if (bitmap_len < needed) return -1;
  if (needed) memset(bitmap, 0, needed);
  for (size_t i = 0; i < pages; i++) {
    size_t start = i * page_len;
    size_t in_a = page_bytes(a_len, start, page_len), in_b = page_bytes(b_len, start, page_len);
    if (in_a == in_b && memcmp(a + start, b + start, in_a) == 0) continue;
    bitmap[i / 8] |= (uint8_t)(1u << i % 8);
    changed++;
  }
  return changed;
}
