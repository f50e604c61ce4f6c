/* See brake_state.h, brake.h. */
#include <errno.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>

#include "brake.h"
#include "brake_state.h"
#include "channel.h"

static index_entry id_entries[2 * WATCHES_MAX], fd_entries[2 * WATCHES_MAX];
static watch all_watches[WATCHES_MAX]; /* apart: what is zero takes no room in the executable */
brake_state brake = {.lock = PTHREAD_MUTEX_INITIALIZER,
                     .watches = all_watches,
                     .watches_free = INDEX_NONE,
                     .first_active = INDEX_NONE,
                     .by_id = {id_entries, 2 * WATCHES_MAX - 1},
                     .by_fd = {fd_entries, 2 * WATCHES_MAX - 1},
                     .block_bytes = 1,
                     .woken = -1};

int64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

pool *pool_of(uint64_t stream) {
  for (uint32_t i = 0; i < brake.pools_used; i++)
    if (brake.pools[i].stream == stream) return &brake.pools[i];
  if (brake.pools_used == POOLS_MAX) return NULL;
  brake.pools[brake.pools_used] = (pool){.stream = stream};
  return &brake.pools[brake.pools_used++];
}

watch *watch_of(uint64_t id) {
  uint32_t slot = index_get(&brake.by_id, id, 0);
  return slot == INDEX_NONE ? NULL : &brake.watches[slot];
}

void activate(watch *w) {
  if (w->active) return;
  uint32_t slot = (uint32_t)(w - brake.watches);
  w->active = true;
  w->prev = INDEX_NONE;
  w->next = brake.first_active;
  if (brake.first_active != INDEX_NONE) brake.watches[brake.first_active].prev = slot;
  brake.first_active = slot;
  w->pool->active++;
}

void deactivate(watch *w) {
  if (!w->active) return;
  w->active = false;
  if (w->prev != INDEX_NONE) brake.watches[w->prev].next = w->next;
  else brake.first_active = w->next;
  if (w->next != INDEX_NONE) brake.watches[w->next].prev = w->prev;
  w->pool->active--;
}

void set_ignored(watch *w, bool on, int64_t now) {
  if (w->ignored == on) return;
  fan_ignore(w->fd, on);
  w->ignored = on;
  if (on) w->spoke = false;
  else w->reported_ms = now;
}

void set_stopped(watch *w, bool on) {
  long flags = 0;
  if (w->stopped == on || ioctl(w->fd, FS_IOC_GETFLAGS, &flags)) return;
  flags = on ? flags | FS_IMMUTABLE_FL : flags & ~(long)FS_IMMUTABLE_FL;
  if (ioctl(w->fd, FS_IOC_SETFLAGS, &flags)) return;
  w->stopped = on;
  if (on) note("a writer is stopped: the cache is full, and it can neither be held nor asked (node %llu)", (unsigned long long)w->id);
}

/* -- claims ------------------------------------------------------------------------------------------------------ */
bool is_claimed(const watch *w, uint64_t offset, uint64_t length) {
  if (!w->claimed || !length) return false;
  uint64_t first = offset / brake.block_bytes, last = (offset + length - 1) / brake.block_bytes;
  for (uint64_t b = first; b <= last && b / 64 < w->claim_words; b++)
    if (w->claims[b / 64] >> (b % 64) & 1) return true;
  return false;
}

bool claims_grow(watch *w, uint64_t bits) {
  uint64_t words = (bits + 63) / 64;
  if (bits > CLAIM_BITS_MAX) return false;
  if (words <= w->claim_words) return true;
  uint64_t *grown = realloc(w->claims, words * sizeof *grown);
  if (!grown) return false;
  memset(grown + w->claim_words, 0, (words - w->claim_words) * sizeof *grown);
  w->claims = grown;
  w->claim_words = words;
  return true;
}

void set_claims(watch *w, uint64_t first, uint64_t count, bool on) {
  for (uint64_t b = first; b < first + count && b / 64 < w->claim_words; b++) {
    uint64_t bit = UINT64_C(1) << (b % 64);
    bool was = w->claims[b / 64] & bit;
    if (was == on) continue;
    w->claims[b / 64] ^= bit;
    w->claimed = on ? w->claimed + 1 : w->claimed - 1;
  }
}

/* -- files that come and go; these take the lock ----------------------------------------------------------------- */
void brake_watch(uint64_t nodeid, int fd, uint32_t flags) {
  if (fan_fd() < 0) return;
  int64_t now = now_ms();
  pthread_mutex_lock(&brake.lock);
  bool asleep = brake.first_active == INDEX_NONE;
  pool *p = pool_of(nodeid >> STREAM_SHIFT);
  watch *old = watch_of(nodeid);
  if (old && old->fd == fd) {
    old->append |= flags & WATCH_APPEND;
    old->ahead &= (flags & WATCH_AHEAD) != 0;
    old->moved_ms = now;
    set_ignored(old, p->free && !old->claimed, now);
    activate(old);
  } else if (p && (brake.watches_free != INDEX_NONE || brake.watches_fresh < WATCHES_MAX)) {
    uint32_t slot = brake.watches_free != INDEX_NONE ? brake.watches_free : brake.watches_fresh++;
    if (slot == brake.watches_free) brake.watches_free = brake.watches[slot].next_free;
    watch *w = &brake.watches[slot];
    *w = (watch){.id = nodeid, .fd = fd, .pool = p, .append = flags & WATCH_APPEND, .ahead = flags & WATCH_AHEAD,
                 .moved_ms = now, .reported_ms = now};
    w->seen = w->told = fan_disk_bytes(fd);
    w->size = fan_size(fd);
    if (!fan_mark(fd)) note("node %llu is not watched: %s", (unsigned long long)nodeid, strerror(errno));
    if (old) w->ignored = old->ignored, old->ignored = false; /* one inode has one mark, whatever descriptor it came by */
    if (old) end_hold(old), set_silent(old, false);
    index_put(&brake.by_id, nodeid, 0, slot);
    index_put(&brake.by_fd, (uint64_t)fd, 0, slot);
    brake.by_fd_count++;
    set_ignored(w, p->free, now);
    if (!(flags & WATCH_AHEAD)) activate(w);
  }
  if (p && !p->free && !(flags & WATCH_AHEAD)) p->alert_ms = now; /* should it report nothing, that shows soon */
  asleep = asleep && brake.first_active != INDEX_NONE;
  pthread_mutex_unlock(&brake.lock);
  if (asleep) wake_thread();
}

void brake_closing(int fd) {
  if (fan_fd() < 0 || fd < 0) return;
  pthread_mutex_lock(&brake.lock);
  uint32_t slot = index_get(&brake.by_fd, (uint64_t)fd, 0);
  if (slot != INDEX_NONE) {
    watch *w = &brake.watches[slot];
    w->pool->left += (int64_t)w->pending;
    end_hold(w);
    set_silent(w, false);
    set_stopped(w, false);
    deactivate(w);
    index_remove(&brake.by_fd, (uint64_t)fd, 0);
    brake.by_fd_count--;
    if (watch_of(w->id) == w) { /* else it is open again by another descriptor, and watched by that */
      fan_unmark(fd);
      index_remove(&brake.by_id, w->id, 0);
    }
    free(w->claims);
    *w = (watch){.next_free = brake.watches_free};
    brake.watches_free = slot;
  }
  pthread_mutex_unlock(&brake.lock);
}
