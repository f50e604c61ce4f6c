/* Appending: WRITEs to the `_append` of a stream become records of its active segment, here, while the daemon leaves that to us.
 *
 *     daemon's ── APPEND ──► ours ── APPEND_TAKE ──► daemon's        (a segment; WRITEs are forwarded while it is the daemon's)
 *
 * Invariants
 * - A WRITE is answered when its records are in the file, whole and in order; what is not answered here is forwarded, and then nothing
 *   of it is in the file.
 * - The line that a handle began and did not end is kept with the handle. Before a WRITE or the RELEASE of the handle is forwarded, the
 *   daemon gets it (EV_PARTIAL): it is never in two places, and the next WRITE does not come before this one is answered (the kernel
 *   writes to a file without a cache one call at a time).
 * - Events of a node leave in the order of what they tell: they are sent under append_lock.
 * - After a write that failed, the segment takes none until the daemon took it and gave it, or another one, again.
 * - Fixed room: APPENDS_MAX nodes, APPEND_HANDLES_MAX handles, of which PARTIALS_MAX may have begun a line, of PARTIALS_BYTES_MAX in all.
 *   What finds none is the daemon's.
 *
 * Owner: append_lock (tables, and how far a segment is) is held for moments, but for room in the control socket. A node's write_lock is
 * held while a WRITE is in progress; append_lock is taken inside it. Control messages never wait for a WRITE: an APPEND_TAKE that meets
 * one is answered by it.
 */
#ifndef AOF2_CHANNEL_APPEND_H
#define AOF2_CHANNEL_APPEND_H
#include "channel.h"

#ifndef APPENDS_MAX /* the fuzzer builds with small ones, which it fills */
#define APPENDS_MAX 16384
#define APPEND_HANDLES_MAX 65536
#define PARTIALS_MAX 4096
#define PARTIALS_BYTES_MAX (64u << 20)
#endif

/* True: answered. With `waits` false only where that is sure not to wait for another thread, and nothing is changed elsewise. */
bool append_write(const request *r, bool waits);
/* A RELEASE is about to be forwarded: the handle is forgotten. */
void append_release(const request *r);

/* An OPEN reply carries this handle: true when it is one of an `_append`. */
bool append_opened(uint64_t nodeid, uint64_t fh);
/* Which the kernel did not take. */
void append_unopened(uint64_t nodeid, uint64_t fh);

/* Control messages, under control_lock. */
void append_give(const control_message *m, int fd);
void append_room(const control_message *m);
void append_take(const control_message *m);
void append_tell(const control_message *m);
void append_handle(const control_message *m);
void append_partial(const control_message *m);

/* The mount is gone: the daemon gets all lines that were begun. */
void append_over(void);
void append_reset(void); /* tests */
uint64_t append_bytes_used(void);
#endif
