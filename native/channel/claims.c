/* Claims: blocks that the daemon takes from under a passthrough writer, uploads and punches. See brake.h and PROTOCOL.md.
 *
 * From the moment its bits are set each reported write into the blocks is held (brake.c). What is left are writes from before, not
 * reported or let go, that wait for a core or for the disk: for as long as that takes. So a claim is granted when they are certainly
 * over:
 * - a write of the file is held: the kernel lets one at a time into a passthrough inode, and this is the one; or
 * - the file was reported for QUIET_MS and did not grow (what splices would have been seen to, silent.c), and after that a call of our
 *   own had the inode's lock at the mount (barrier.h).
 * A claim that is refused leaves its bits to the daemon, which knows what of the blocks was punched before.
 *
 * Owner: brake.lock. A crash of this process lets every writer go on; of the daemon, see brake_abandon.
 */
#include <errno.h>

#include "barrier.h"
#include "brake.h"
#include "brake_state.h"
#include "channel.h"

#define CLAIMS_MAX 256
#define QUIET_MS 500

typedef struct {
  uint64_t nodeid, first, count;
  uint32_t seq;
  enum { NONE, WAITS, GRANTED, REFUSED } state; /* the last two are to be told */
} pending_claim;

static pending_claim pending_claims[CLAIMS_MAX];

void tell_claims(void) {
  for (uint32_t i = 0; i < CLAIMS_MAX; i++) {
    pending_claim *c = &pending_claims[i];
    if (c->state < GRANTED) continue;
    if (event_try(EV_CLAIMED, c->state == GRANTED ? 0 : PROTO_AGAIN, c->seq, NULL, 0)) c->state = NONE;
    else brake.tell_again = true;
  }
}

/* Whether each of its bits is set still: the file may have been closed, and opened again, meanwhile. */
static bool stands(const pending_claim *c) {
  const watch *w = watch_of(c->nodeid);
  for (uint64_t b = c->first; w && b < c->first + c->count; b++)
    if (!is_claimed(w, b * brake.block_bytes, 1)) return false;
  return w;
}

void grant_claims(uint64_t nodeid) {
  for (uint32_t i = 0; i < CLAIMS_MAX; i++) {
    pending_claim *c = &pending_claims[i];
    if (c->state == WAITS && c->nodeid == nodeid) c->state = stands(c) ? GRANTED : REFUSED;
  }
}

/* The barrier's thread, which has no socket: the brake's tells. Of younger claims it says nothing. */
static void is_past(uint32_t seq, bool past) {
  pthread_mutex_lock(&brake.lock);
  for (uint32_t i = 0; i < CLAIMS_MAX; i++) {
    pending_claim *c = &pending_claims[i];
    if (c->state == WAITS && c->seq == seq) c->state = past && stands(c) ? GRANTED : REFUSED;
  }
  pthread_mutex_unlock(&brake.lock);
  wake_thread();
}

static pending_claim *free_slot(void) {
  for (uint32_t i = 0; i < CLAIMS_MAX; i++)
    if (pending_claims[i].state == NONE) return &pending_claims[i];
  return NULL;
}

/* No write of this file is on its way, as far as time tells: one is held, or there was none for long. */
static bool is_quiet(const watch *w, int64_t now) {
  if (is_waiting(w)) return true;
  if (w->hold) return false;
  int64_t since = w->moved_ms > w->reported_ms ? w->moved_ms : w->reported_ms;
  return now - since >= QUIET_MS;
}

/* Whether the blocks may be claimed now. The file's writes are reported from here on in any case. */
static bool begin_claim(watch *w, const control_message *m, int64_t now) {
  uint64_t stop = m->blocks.first + m->blocks.count;
  if (!w || m->blocks.count > CLAIM_BITS_MAX || !claims_grow(w, stop)) return false;
  set_ignored(w, false, now);
  if (!is_quiet(w, now) || !is_behind(w, stop * brake.block_bytes)) return false;
  set_claims(w, m->blocks.first, m->blocks.count, true);
  activate(w);
  return true;
}

void brake_claim(const control_message *m) {
  pthread_mutex_lock(&brake.lock);
  watch *w = watch_of(m->nodeid);
  pending_claim *c = free_slot();
  bool begun = c && begin_claim(w, m, now_ms()), sure = begun && is_waiting(w);
  if (begun) *c = (pending_claim){m->nodeid, m->blocks.first, m->blocks.count, m->seq, sure ? GRANTED : WAITS};
  pthread_mutex_unlock(&brake.lock);
  if (!begun) event_send(EV_CLAIMED, PROTO_AGAIN, m->seq, NULL, 0);
  else if (sure) wake_thread();
  else if (!barrier_begin(m->nodeid, m->seq, brake.woken, is_past)) is_past(m->seq, false);
}

static bool overlaps(const pending_claim *c, const control_message *m) {
  return c->nodeid == m->nodeid && c->first < m->blocks.first + m->blocks.count && m->blocks.first < c->first + c->count;
}

void brake_unclaim(const control_message *m) {
  pthread_mutex_lock(&brake.lock);
  watch *w = watch_of(m->nodeid);
  if (w) set_claims(w, m->blocks.first, m->blocks.count, false);
  for (uint32_t i = 0; i < CLAIMS_MAX; i++)
    if (pending_claims[i].state == WAITS && overlaps(&pending_claims[i], m)) pending_claims[i].state = REFUSED;
  let_go(now_ms());
  pthread_mutex_unlock(&brake.lock);
}
