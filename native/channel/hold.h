/* Holds: writers of a backing file stand still, splice and sendfile included, which no fanotify event reports.
 *
 *      a hand (a thread) asks for the file's extents: FIEMAP takes the inode's lock, shared
 *        └─ and stops where the kernel copies the first of them out: that page is a userfault's, missing
 *             └─ hold_end fills the page: the call ends, the lock is free
 *
 * Whatever changes the file needs that lock for itself alone, and waits: writers, but also a punch, a cut, new flags. So do, behind
 * one that waits, those that ask for extents, data or holes. Reading and fsync do not. Nothing of the file changes, not even its times.
 *
 * Invariants
 * - A hold is short: its caller ends it as soon as it can, and now and then in any case. A writer that waits for the lock
 *   cannot be killed, and what the daemon does to the file waits, too.
 * - Neither call waits for a hand, for the file's lock, or for a lock that is held over anything that waits.
 * - The caller does nothing itself that takes the file's lock while it holds it.
 * - Behind a hold writers go on in the order they came, and a new hold of the file comes after those that waited.
 *
 * Owner: the brake, with its lock. When the process ends, hands die in the fault, the lock is free, and every writer goes on.
 * A file without extents, or on a filesystem whose FIEMAP takes no lock, is not held, though it is said to be: the caller sees it grow.
 */
#ifndef AOF2_CHANNEL_HOLD_H
#define AOF2_CHANNEL_HOLD_H
#include <stdbool.h>
#include <stdint.h>

int hold_open(void); /* 0 or an errno: there is no userfaultfd for us, and every hold_begin fails */
/* Writers of the file stand still soon, or after the write that is on its way; 0: no hand is free. The descriptor stays the caller's. */
uint32_t hold_begin(int fd);
void hold_end(uint32_t hold);
/* Readable when a hold has begun to hold; -1: there is none. */
int hold_fd(void);
/* One that has; 0: no more. */
uint32_t hold_taken(void);
/* The calling thread, which runs for microseconds at a time, no longer waits for a core behind the writers it is to stop. */
bool hold_hurry(void);
#endif
