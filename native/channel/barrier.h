/* Barriers: every write to a file of the mount that had begun is over, passed through or not, splice included.
 *
 * The kernel writes to a passthrough file under the inode's lock at the mount, taken before the write is reported and given back when
 * it is done. removexattr takes that lock, too, before it asks us for an attribute that no file has. So when the call is over, each
 * write from before it is.
 *
 * Nothing interrupts a wait for that lock, and its holder may be a writer that we hold. So a barrier's thread has no descriptors of the
 * process: were it killed, the thread would otherwise keep them open, fanotify's group among them, and the writer held for ever.
 *
 * Owner: a thread a barrier, THREADS_MAX at most. A crash leaves nothing.
 */
#ifndef AOF2_CHANNEL_BARRIER_H
#define AOF2_CHANNEL_BARRIER_H
#include <stdbool.h>
#include <stdint.h>

#define BARRIER_XATTR "user.aof2.barrier" /* REMOVEXATTR of it is answered by the channel: there is none */

/* `done` is called on the thread with the caller's number: whether writes that had begun are over. It has no descriptor but `keep`. False: too many barriers are
 * under way. Never waits. */
bool barrier_begin(uint64_t nodeid, uint32_t seq, int keep, void (*done)(uint32_t seq, bool past));
#endif
