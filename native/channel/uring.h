/* FUSE over io_uring: where the kernel offers it, requests and answers go through rings instead of read and write.
 *
 *      a caller on core n ── entry of queue n ──► queue thread n, pinned to that core ──┬── answers by itself: in the same call
 *        ▲                                          ▲          │                         │   it asks for the next request
 *        │                                          │          └── READ, WRITE that may wait ──► pool ──┐
 *        └── COMMIT_AND_FETCH ◄── queue thread n ◄──┴── hand_over ◄── reply thread, control, brake, pool ◄─┘
 *
 * So what the channel answers by itself wakes no other core, which is most of what a round trip takes. While long READs come one
 * behind the other a queue's thread leaves its core for one that is idle: the reader and it work side by side. FORGET, INTERRUPT, and
 * whatever comes before the rings are ready come by read, as without io_uring; whence a request came is found by its unique.
 *
 * Invariants
 * - An entry (header and buffer) is the kernel's or ours, from its completion until its commit. While it is ours it carries one
 *   request, found by its unique until one thread takes it to answer it.
 * - A ring is its queue thread's alone: others hand their answers over.
 * - The request's bytes are gone when it is answered: who answers does not look at them any more.
 * - A queue thread never waits for the disk, for blocks that are being fetched, or for another thread's work: READs and WRITEs that
 *   cannot be answered out of memory are the pool's. It may wait for room in the daemon's sockets, as a reader of /dev/fuse does. Records
 *   that are appended (append.h) go to the page cache from here, where that takes a fraction of the way to the pool and back: should
 *   the kernel hold up those that write too much, the callers of this core wait as well.
 * - A queue does not run dry. A request that waits (a WRITE without room, a READ of what is being fetched, a question that the
 *   brake keeps) keeps its entry, and what could end its wait may be a request itself: a RELEASE, an UNLINK, a barrier of our own.
 *   So there are as many entries as requests that the daemon takes at a time, up to 8 cores of each queue, and no fewer than
 *   ENTRIES_MIN: only with so many callers of one core waiting does the next one wait for any of them. More cannot be added
 *   when they are missed: the kernel gives a new entry none of the requests that already wait.
 * - Memory: an entry takes half a KiB of the kernel's, and what was touched of its buffer, which is given back but for WARM_MAX
 *   long ones a queue.
 *
 * Owner: each queue its thread; what is shared has locks that are never held over anything that waits. When the process ends the
 * kernel takes all entries back and ends their requests.
 */
#ifndef AOF2_CHANNEL_URING_H
#define AOF2_CHANNEL_URING_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* Before the mount: the kernel is to offer io_uring, if we may say so. */
void uring_prepare(void);
/* INIT came with these: whether it may be answered with WIRE2_OVER_IO_URING, for everything is ready. */
bool uring_open(uint32_t kernel_minor, uint32_t kernel_flags2);
/* That answer was given: the kernel gets its entries, or goes on with read. */
void uring_begin(void);

/* What is in use, and why not io_uring. */
typedef struct {
  uint32_t queues; /* 0: read */
  bool enabled;    /* the kernel's parameter was off, and uring_prepare set it */
  const char *why;
} uring_state;
uring_state uring_status(void);

/* An answer, its header first: true when its request came through a ring; then the kernel gets it. Any thread. */
bool uring_reply(const struct iovec *parts, int n);
/* Where the bytes of this request's answer are best put; `otherwise` when it did not come through a ring. */
uint8_t *uring_data(uint64_t unique, uint8_t *otherwise);
/* For a thread that a queue's thread may have started: it runs on any core, as others do. */
void uring_unpin(void);
#endif
