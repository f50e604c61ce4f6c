/* Rows of the catalog, as engine/catalog/rows.py writes them: msgpack arrays, positional, with fields at the end that may be missing
 * or that only newer releases know (engine/FORMATS.md, "Rows that the channel reads").
 *
 * Invariants: a row is right or refused. Nothing is read past its length; types and ranges are checked; what points into the
 * row (`target`, `last_name`) lives as long as that does.
 *
 * Owner: pure functions.
 */
#ifndef AOF2_CHANNEL_ROWS_H
#define AOF2_CHANNEL_ROWS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  const uint8_t *at;
  size_t len;
} span;

/* Nanoseconds of before 1970, and of after 2262, are times, too. */
typedef struct {
  int64_t s;
  uint32_t ns;
} row_time;

typedef struct {
  uint64_t ino;
  uint32_t mode, uid, gid, nlink, rdev;
  uint64_t size, hole_bytes, generation, parent;
  row_time mtime, ctime, atime;
  span target, last_name;
} inode_row;

bool inode_row_decode(span row, inode_row *out);
/* A file's bytes at one generation; `chunk` is the id of its one chunk, 0: it has more, or none. */
typedef struct {
  uint64_t ino, generation, state, size, chunk;
  bool has_backing; /* what its backing file looked like when its bytes were last known to be right */
  uint64_t backing_inode, backing_size, backing_mtime_ns;
} object_row;
enum { OBJECT_DIRTY = 0, OBJECT_SEALED = 1, OBJECT_PUBLISHED = 2, OBJECT_TOMBSTONED = 3 };

bool object_row_decode(span row, object_row *out);
/* The blocks of a chunk that are here. */
bool residency_row_decode(span row, uint64_t *mask);
bool dentry_row_decode(span row, uint64_t *ino, uint32_t *mode);
bool number_row_decode(span row, uint64_t *out);
bool bytes_row_decode(span row, span *out);

row_time row_time_of_ns(uint64_t ns);
/* Whether a is earlier than b. */
bool row_time_before(row_time a, row_time b);
#endif
