/* Growing bitmaps out of one bounded store: which blocks of a file are present, which were written.
 *
 * A bit past the end of a bitmap is clear. Owner: the thread with the tables' lock; the count of bytes in use is one for all.
 */
#ifndef AOF2_CHANNEL_BITMAP_H
#define AOF2_CHANNEL_BITMAP_H
#include <stdbool.h>
#include <stdint.h>

#define BITMAP_BYTES_MAX (UINT64_C(64) << 20) /* of all bitmaps together */

typedef struct {
  uint64_t *words;
  uint64_t bits; /* a multiple of 64 */
} bitmap;

/* Makes room for `bits`; false, and nothing changed, where the store has none. */
bool bitmap_grow(bitmap *b, uint64_t bits);
void bitmap_free(bitmap *b);
/* These clip to the bitmap's end. first + count does not overflow. */
void bitmap_set(bitmap *b, uint64_t first, uint64_t count);
void bitmap_clear(bitmap *b, uint64_t first, uint64_t count);
/* Whether each of the bits is set; past the end none is. */
bool bitmap_all(const bitmap *b, uint64_t first, uint64_t count);
/* The next run of set bits at or after `from`; false when there is none. */
bool bitmap_next(const bitmap *b, uint64_t from, uint64_t *first, uint64_t *count);
uint64_t bitmap_bytes_used(void);
#endif
