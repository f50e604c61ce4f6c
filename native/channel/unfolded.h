/* Intents that the rows do not have yet (engine/FORMATS.md, "Intent log"), laid over them: which names and inodes they made, took
 * away or touched.
 *
 * Channel and daemon append to a tenant's log; the daemon folds it into the rows, and says in the same commit how far it got. So a
 * picture of the rows (store.h) and what stands in the log behind its position are the tree as it was answered. The log is
 * read here, each record once, when a look-up needs it; a record is forgotten when a picture has it.
 *
 * Invariants
 * - `folded` is the position of the caller's picture. What was forgotten since that began is missing here: OVER_OLD, the caller takes
 *   a new picture.
 * - Fixed room. Where it does not do, or the log cannot be read, the daemon answers (OVER_LOST) until the rows have caught up.
 *
 * Owner: unfolded_lock inside, never held over anything that waits; any thread may call.
 */
#ifndef AOF2_CHANNEL_UNFOLDED_H
#define AOF2_CHANNEL_UNFOLDED_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "rows.h"

typedef enum { OVER_READY, OVER_OLD, OVER_LOST } over_state;

typedef struct {
  uint32_t slot; /* of the tenant in the shared page */
  uint64_t folded;
} over_view;

/* Reads what was appended up to `end`, and forgets what the picture has. */
over_state unfolded_read(over_view v, int log_fd, uint64_t end);

typedef enum { OVER_NOTHING, OVER_THERE, OVER_GONE } over_what;
over_state unfolded_name(over_view v, uint64_t dir, span name, over_what *what, uint64_t *ino);

/* xattrs of an inode are laid like the names of a directory with this number. */
#define XATTRS_OF(ino) ((ino) | UINT64_C(1) << 63)
/* The value into `out`, which has room for INTENT_NAME_MAX, where it is OVER_THERE. */
over_state unfolded_xattr(over_view v, uint64_t ino, span name, over_what *what, uint8_t *out, size_t *len);

/* What is laid over one field: the newest value, and the end of its record. */
typedef struct {
  uint64_t end, value;
} over_field;
enum { OVER_NLINK, OVER_CTIME, OVER_PARENT, OVER_MODE, OVER_ATIME, OVER_MTIME, OVER_CLOSED, OVER_UID, OVER_GID, OVER_FIELDS };

typedef struct {
  bool born;   /* `row` is all there is of it */
  bool gone;   /* its last name is: the rows show it as it was before */
  bool touched; /* names in it changed, last at `when` */
  inode_row row;
  row_time when;
  uint64_t touched_end;
  over_field fields[OVER_FIELDS]; /* those with an end */
} over_inode;
over_state unfolded_inode(over_view v, uint64_t ino, over_inode *out);
/* The target of a born symlink into `out`, which has room for INTENT_NAME_MAX; 0: it is none. */
size_t unfolded_target(over_view v, uint64_t ino, uint8_t *out);
/* The row with all that laid over it. */
void over_apply(const over_inode *over, inode_row *row);

#define OVER_NAMES_MAX 256
typedef struct {
  uint64_t ino;
  uint32_t mode; /* the type alone */
  uint32_t size; /* of an xattr: its value's */
  bool there;
  uint8_t len;
  uint8_t name[255];
} over_name;

/* The first names of a directory behind `after`, in order; `cut`: there are more behind the last. */
typedef struct {
  uint32_t count;
  bool cut;
  over_name names[OVER_NAMES_MAX];
} over_names;
over_state unfolded_names(over_view v, uint64_t dir, span after, over_names *out);

void unfolded_reset(void); /* tests */
#endif
