/* Changes of names that are made here: unlink, rmdir, link, mkdir and symlink (changes.c), rename (moves.c), chmod, chown, utimens,
 * setxattr and removexattr (attributes.c). Each is checked against the view (view.h), recorded in the tenant's intent log, answered; the daemon folds the log into
 * catalog and manifest log, many at a time.
 *
 * Why that is right
 * - Check and record are one step under the page's lock, so changes that are made here, and records of the daemon's, have one order.
 * - What the daemon changes for a request that was forwarded cannot meet a change made here: the kernel holds the locks of the
 *   directories and inodes of both until they are answered, and the one for directories that move between directories.
 * - What the daemon changes by itself (undelete, revert) comes after it took back the numbers to give (BIRTH_INOS with 0), which stops
 *   changes here, too, and after it folded what was recorded before.
 *
 * Invariants
 * - Only what is plainly allowed is made here, and succeeds; of errors, an rmdir's ENOTEMPTY is given here. Whatever else (another
 *   error, a file whose times are its backing file's, special bits and xattrs, no room) is the daemon's.
 * - A record is in the log before its change is answered; the log is bounded (births.h).
 *
 * Owner: the worker that read the request.
 */
#ifndef AOF2_CHANNEL_CHANGES_H
#define AOF2_CHANNEL_CHANGES_H
#include <stdbool.h>

#include "channel.h"

/* True: made, and answered. */
bool changes_unlink(const request *r);
bool changes_rmdir(const request *r);
bool changes_rename(const request *r);
bool changes_link(const request *r);
bool changes_mkdir(const request *r);
bool changes_symlink(const request *r);
bool changes_setattr(const request *r);
bool changes_setxattr(const request *r);
bool changes_removexattr(const request *r);
#endif
