/* The page that daemon and channel share: how far the intent logs are, and how far the daemon has taken them.
 *
 * A tenant's intent log (engine/FORMATS.md) has one order, whichever of the two appends: `end` moves under `lock`, with the record it is
 * about. The daemon writes `armed` and `taken`; each word by one atomic store. The lock also makes two steps exclude each other: the
 * daemon's "read end, say taken" and the channel's "is it taken? else record the close and drop the node". Without it the daemon could
 * take a birth, and answer an open by its node, while the channel drops that.
 *
 * Who holds the lock waits for nothing but the page cache, which may be slow. The channel ends with the daemon, so it may wait for it
 * for ever. The daemon does without where it cannot have it in time (the channel was killed with it, or the disk stands still): it
 * appends nothing then, and takes what is there without saying so, which leaves dropping nodes to the channel.
 */
#ifndef AOF2_SHAREDPAGE_H
#define AOF2_SHAREDPAGE_H
#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define STREAMS_MAX 16
#define OPENS_SLOTS 65536
#define PAGE_LOCK_MAX_MS 1000 /* the daemon: to take records, */
#define PAGE_APPEND_MAX_MS 20 /* and to append one, on its only loop */

typedef struct {
  _Atomic uint32_t armed; /* 1: the daemon wants an event for the next record */
  _Atomic uint32_t lock;
  _Atomic uint64_t total; /* bytes of all logs: differs from what the daemon has folded when it is behind */
  struct {
    _Atomic uint64_t end, taken;
  } streams[STREAMS_MAX];
  /* Files that the channel opened by itself (channel/opens.h). The daemon writes `block_len` and `going`, the channel `opens`. */
  _Atomic uint64_t block_len;
  _Atomic uint32_t opens[OPENS_SLOTS]; /* handles of its own, by page_slot of their inode */
  _Atomic uint32_t going[OPENS_SLOTS]; /* inodes that lose their bytes: none of them is opened there meanwhile */
} intent_page;

/* Inodes share slots: what is said of one may be another's. */
static inline uint32_t page_slot(uint64_t ino) { return (uint32_t)((ino * UINT64_C(0x9E3779B97F4A7C15)) >> 48) % OPENS_SLOTS; }

/* False: not within so many milliseconds (0: for ever). */
static inline bool page_lock(intent_page *page, int max_ms) {
  struct timespec began = {0}, now;
  for (unsigned spins = 0;; spins++) {
    uint32_t expected = 0;
    if (atomic_compare_exchange_strong(&page->lock, &expected, 1)) return true;
    sched_yield();
    if (!max_ms || spins % 64) continue;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!began.tv_sec) began = now;
    if ((now.tv_sec - began.tv_sec) * 1000 + (now.tv_nsec - began.tv_nsec) / 1000000 > max_ms) return false;
  }
}

static inline void page_unlock(intent_page *page) { atomic_store(&page->lock, 0); }

/* Puts a whole record behind the last one of a slot's log; false, with errno: nothing counts as written (what is there of it is written
 * over, or fails its checksum). With the lock held. */
static inline bool page_append(intent_page *page, uint32_t slot, int fd, const void *record, size_t len) {
  uint64_t end = atomic_load(&page->streams[slot].end);
  ssize_t done;
  do done = pwrite(fd, record, len, (off_t)end);
  while (done < 0 && errno == EINTR);
  if (done >= 0 && done != (ssize_t)len) errno = ENOSPC;
  if (done != (ssize_t)len) return false;
  atomic_store(&page->streams[slot].end, end + len);
  atomic_fetch_add(&page->total, len);
  return true;
}
#endif
