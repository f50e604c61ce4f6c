/* Names told ahead: while a process looks up the files of a directory one after the other, the daemon tells those that come
 * next (AHEAD), and their LOOKUPs are answered here.
 *
 * Why that is right: the kernel itself may keep what a LOOKUP said for an hour, because names and attributes change by
 * requests, which all come through here, or are told to it by a notification. So everything told ahead is forgotten
 * - before a request is looked at that may change anything, and again before any answer that comes by the FUSE socket, or
 *   of an upcall that may have changed something, goes to the kernel;
 * - before a notification goes there, after all that the daemon said earlier was heard.
 * `moves` counts these moments. A LOOKUP that is handed up carries the count, AHEAD brings it back: what was told on the
 * grounds of an older tree is not taken. Files that can change without any of this (open, dirty, new) are never told.
 *
 * Invariants: fixed room, the oldest makes way. What was told is good for a second at most.
 *
 * Owner: ahead_lock inside, never held over anything that waits; any thread may call.
 */
#ifndef AOF2_CHANNEL_AHEAD_H
#define AOF2_CHANNEL_AHEAD_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "channel.h"

/* For the LOOKUP that is about to be handed up. */
uint32_t ahead_moves(void);
/* Entries of a directory, each a fuse_entry_out, a length byte and the name; `seq` is the count they were asked with. */
void ahead_put(uint64_t dir, uint32_t seq, const uint8_t *packed, size_t len);
/* True: answered. */
bool ahead_lookup(const request *r);
/* Something may change, or has. */
void ahead_forget(void);
/* Whether a request changes nothing that a LOOKUP tells. */
bool ahead_harmless(uint32_t opcode);
#endif
