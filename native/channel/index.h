/* A hash index of fixed size: two-word keys to slot numbers, linear probing, deletion by shifting back (no tombstones).
 *
 * The caller keeps it at most half full: every search ends at a free entry. Owner: as the tables.
 */
#ifndef AOF2_CHANNEL_INDEX_H
#define AOF2_CHANNEL_INDEX_H
#include <stdbool.h>
#include <stdint.h>

#define INDEX_NONE UINT32_MAX

typedef struct {
  uint64_t a, b;
  uint32_t slot1; /* slot + 1; 0: free */
} index_entry;

typedef struct {
  index_entry *entries;
  uint32_t mask; /* entries - 1, a power of two less one */
} index_table;

static inline uint32_t index_home(const index_table *t, uint64_t a, uint64_t b) {
  uint64_t h = (a ^ (b * UINT64_C(0x9E3779B97F4A7C15))) * UINT64_C(0xD6E8FEB86659FD93);
  h ^= h >> 32;
  h *= UINT64_C(0xD6E8FEB86659FD93);
  return (uint32_t)(h >> 32) & t->mask;
}

static inline uint32_t index_at(const index_table *t, uint64_t a, uint64_t b) {
  uint32_t i = index_home(t, a, b);
  while (t->entries[i].slot1 && (t->entries[i].a != a || t->entries[i].b != b)) i = (i + 1) & t->mask;
  return i;
}

static inline uint32_t index_get(const index_table *t, uint64_t a, uint64_t b) {
  return t->entries[index_at(t, a, b)].slot1 - 1; /* 0 - 1 is INDEX_NONE */
}

static inline void index_put(index_table *t, uint64_t a, uint64_t b, uint32_t slot) {
  t->entries[index_at(t, a, b)] = (index_entry){a, b, slot + 1};
}

static inline void index_remove(index_table *t, uint64_t a, uint64_t b) {
  uint32_t hole = index_at(t, a, b);
  if (!t->entries[hole].slot1) return;
  for (uint32_t i = (hole + 1) & t->mask; t->entries[i].slot1; i = (i + 1) & t->mask) {
    uint32_t home = index_home(t, t->entries[i].a, t->entries[i].b);
    if (((i - home) & t->mask) >= ((i - hole) & t->mask)) { /* its home is at or before the hole */
      t->entries[hole] = t->entries[i];
      hole = i;
    }
  }
  t->entries[hole].slot1 = 0;
}
#endif
