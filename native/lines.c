/* Framing by line: where the records of a written buffer end.
 *
 * Invariants: 1 <= length[i] <= max_record; the lengths add up to *consumed <= len.
 */
#include "bytes.h"
#include "native.h"

size_t aof2_frame_lines(const uint8_t *buf, size_t len, uint32_t max_record, size_t rows, uint32_t *length,
                        size_t *consumed) {
  size_t n = 0, pos = 0;
  while (n < rows && pos < len && max_record) {
    size_t reach = len - pos < max_record ? len - pos : max_record;
    const uint8_t *newline = memchr(buf + pos, '\n', reach);
    if (!newline && reach < max_record) break; /* the rest of this line is still to come */
    length[n] = newline ? (uint32_t)(newline - (buf + pos) + 1) : max_record;
    pos += length[n++];
  }
  *consumed = pos;
  return n;
}
