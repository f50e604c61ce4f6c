/* The page that daemon and channel share: how far the birth logs are, and how far the daemon has taken them.
 *
 * The channel writes `end` and `total`, the daemon `armed` and `taken`; each word by one atomic store. `lock` makes two
 * steps exclude each other: the daemon's "read end, say taken" and the channel's "is it taken? else record the close and drop
 * the node". Without it the daemon could take a birth, and answer an open by its node, while the channel drops that.
 *
 * Who holds the lock waits for nothing. The channel ends with the daemon, so it may wait for it for ever; the daemon does
 * not outlive a channel for long, and waits PAGE_LOCK_MAX_S for one that was killed with the lock.
 */
#ifndef AOF2_SHAREDPAGE_H
#define AOF2_SHAREDPAGE_H
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define STREAMS_MAX 16
#define PAGE_LOCK_MAX_S 1

typedef struct {
  _Atomic uint32_t armed; /* 1: the daemon wants an event for the next record */
  _Atomic uint32_t lock;
  _Atomic uint64_t total; /* bytes of all logs: differs from what the daemon has folded when it is behind */
  struct {
    _Atomic uint64_t end, taken;
  } streams[STREAMS_MAX];
} birth_page;

/* False: not within max_s seconds (0: for ever). */
static inline bool page_lock(birth_page *page, int max_s) {
  struct timespec began = {0}, now;
  for (unsigned spins = 0;; spins++) {
    uint32_t expected = 0;
    if (atomic_compare_exchange_strong(&page->lock, &expected, 1)) return true;
    sched_yield();
    if (!max_s || spins % 64) continue;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!began.tv_sec) began = now;
    if (now.tv_sec - began.tv_sec > max_s) return false;
  }
}

static inline void page_unlock(birth_page *page) { atomic_store(&page->lock, 0); }
#endif
