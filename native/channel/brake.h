/* The brake: passthrough writers, which the kernel serves past us, keep within the room that the daemon grants.
 *
 *      free: a file's writes are not reported; what it takes is looked at every few milliseconds
 *        │  ▲ room again                                            (as often as the room left demands)
 *        ▼  │
 *      reported: each write is told by its range before it happens, and takes that much of the room
 *        │  ▲ ROOM                                          ┌─ DENY: it fails with ENOSPC or EDQUOT
 *        ▼  │                                               │
 *      held: there is no room for it ───────────────────────┴─ or the write goes into blocks that are claimed: EV_TOUCHED
 *
 * splice and sendfile are never reported: silent.c makes the kernel ask for each of their steps instead.
 *
 * Invariants
 * - Every tenant has room of its own, and what its writers added since a grant never exceeds the grant, but for what they
 *   can write between two looks; MARGIN_S of all cores' writing is kept back for that while they are free.
 * - The kernel lets one write at a time into a passthrough inode, and holds that lock while the write is held here. So
 *   while one is held no other is on its way, and the next to come proves that the last is over.
 * - A write into claimed blocks (the daemon uploads them, or punched them) waits until the daemon passes it.
 * - A silent writer takes a step only where there is room for it, and with little room one at a time (silent.c).
 * - Calls of the daemon and of this process are answered without thinking; so is what certainly only reads. The brake's
 *   thread waits for no other thread, for no lock that is held while a file is read or written, and for no socket: the
 *   daemon's one thread may be the one whose read is held.
 * - A file is watched from before it can be opened for writing (a mark does not reach descriptors older than itself) until
 *   its descriptor is closed.
 *
 * Owner: brake.lock, inside tables_lock where both are held. A crash of this process lets go of all; when the daemon is
 * gone, writes into claimed blocks fail with EIO, and no more of them are taken (brake_abandon).
 */
#ifndef AOF2_CHANNEL_BRAKE_H
#define AOF2_CHANNEL_BRAKE_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto.h"

void brake_open(const control_message *m, int fd); /* BRAKE, answered by EV_BRAKED */
/* A file that will be opened for writing, passed through. The descriptor stays the caller's. */
void brake_watch(uint64_t nodeid, int fd, uint32_t flags);
enum { WATCH_APPEND = 1u, WATCH_AHEAD = 2u }; /* AHEAD: no descriptor is open yet, and it is told again before one is */
/* Before a descriptor is closed that may be watched. */
void brake_closing(int fd);

/* The kernel asks before a write whether the file has capabilities: true, this is answered when the write may go on. */
bool brake_asks(uint64_t nodeid, uint64_t unique, pid_t tid);
/* What removing them, which a denied write was led to, is to fail with; 0: nothing of ours. */
int brake_denies(uint64_t nodeid);
/* The caller of a request got a signal: true, it was one that brake_asks kept, and goes on. */
bool brake_interrupted(uint64_t unique);

void brake_room(const control_message *m);
void brake_grown(const control_message *m);
void brake_expect(const control_message *m);
void brake_deny(const control_message *m);
void brake_claim(const control_message *m);
void brake_unclaim(const control_message *m);
void brake_pass(const control_message *m);
void brake_abandon(void);
void *brake_thread(void *unused);
#endif
