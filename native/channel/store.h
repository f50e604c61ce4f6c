/* The catalog, read-only: LMDB's environment, which the daemon writes to (engine/catalog/store.py).
 *
 * A picture is one read transaction, the calling thread's only one: begun after a request was read, it has every commit that was
 * answered before. What is found points into the map, and is gone with the picture.
 *
 * Invariants
 * - Pictures are short: a page that an old one may need is not used again.
 * - Opened once in the life of the process, and never before a fork. LMDB's lock file has a place for each thread; those of a
 *   channel that was killed are given back by the daemon that opens the environment next (mdb_reader_check).
 * - Where anything is wrong (another LMDB, a map that grew past ours), nothing is found, and the daemon answers.
 *
 * Owner: store_open under control_lock; the others from any thread, whose picture and cursor are its own.
 */
#ifndef AOF2_CHANNEL_STORE_H
#define AOF2_CHANNEL_STORE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rows.h"

enum { STORE_NAMESPACE, STORE_META, STORE_CHUNKS, STORES };

/* 0 or an errno. */
int store_open(const char *path);
/* False: there is none to be had. */
bool store_begin(void);
void store_end(void);

typedef enum { ROW_ABSENT, ROW_FOUND, ROW_BROKEN } row_result;
row_result store_get(int which, span key, span *value);
/* The first at or behind a key; then the one behind that. Of the namespace. */
row_result store_seek(span key, span *found, span *value);
row_result store_next(span *found, span *value);
#endif
