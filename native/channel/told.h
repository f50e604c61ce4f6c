/* Attributes as the kernel is told them, from rows and backing files: what fs/attrs.py makes of the same.
 *
 * Owner: pure functions.
 */
#ifndef AOF2_CHANNEL_TOLD_H
#define AOF2_CHANNEL_TOLD_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

#include "rows.h"
#include "wire.h"

#define TOLD_LONG_S 3600 /* names and attributes change through the kernel, or it is told */
#define TOLD_DIRTY_S 1   /* but for those of files that are being written */

/* -o uid, gid, umask: how everything looks, whatever is stored. `follows`: another machine changes the rows, so nothing is told for long. */
typedef struct {
  bool has_uid, has_gid, follows;
  uint32_t uid, gid, umask;
} told_as;

/* `backing` of a file that is being written, else NULL. */
void told_attr(wire_attr *out, const inode_row *row, const struct stat *backing, const told_as *as);
void told_entry(wire_entry_out *out, const inode_row *row, const struct stat *backing, const told_as *as);
#endif
