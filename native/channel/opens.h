/* Opens that the channel answers by itself: files to read that are clean and here whole, of one chunk. The kernel reads them from their
 * backing files, so that opening one of many small files does not wait for the daemon.
 *
 * Whether a file is such is in the rows (view.h); its backing file must look as they say. The node is the channel's *own* until the
 * daemon is told of its handles, which it is before it gets an OPEN or a SETATTR of the inode: from then on it is as if the daemon had
 * opened them, and their RELEASEs are forwarded.
 *
 * Invariants
 * - The daemon knows of a handle, or it keeps still: a file is not opened here while the daemon has a node of it, or an OPEN or SETATTR.
 * - A file does not lose its bytes, or its inode, while it is open here, nor is it opened while it does: the daemon says `going` in the
 *   page, then looks at `opens` there, or asks for a lease; here `opens` counts and the file is open first, then `going` and the rows are
 *   looked at.
 * - Uses are told to the daemon many at a time (EV_USED); what finds no room is not.
 *
 * Owner: tables_lock for nodes and handles; telling_lock, before it, so that a request is not forwarded while another thread is still
 * telling of its inode. Any thread may call.
 */
#ifndef AOF2_CHANNEL_OPENS_H
#define AOF2_CHANNEL_OPENS_H
#include <stdbool.h>
#include <stdint.h>

#include "channel.h"

#define OPEN_FH (UINT64_C(1) << 62) /* set in the handles of such opens */

/* True when the request was answered. */
bool opens_open(const request *r);
bool opens_release(const request *r);
/* Whether the handle was given here: libfuse does not say of which inode an FSYNC is, and the daemon does not know the handle. */
bool opens_fsync(const request *r);
/* Whether the source of a copy is such a handle. */
bool opens_copies(const request *r);
/* The daemon is about to get a request that may make the file its own: it hears of the handles first. */
void opens_tell(uint64_t nodeid);
void opens_reset(void); /* tests */
#endif
