/* See brake.h. */
#include "brake.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>

#include "../bytes.h"
#include "brake_state.h"
#include "channel.h"
#include "hold.h"

#define LOOK_MS_MAX 250
#define REPORTED_LOOK_MS 100
#define ALERT_LOOK_MS 2
#define ALERT_MS 200
#define IDLE_MS 500         /* a file that did not grow for so long is reported again, and not looked at */
#define RETRY_MS 5
#define QUIET_LOOKS 512     /* files that seem idle are looked at by so many a time */

/* What is left of `wanted` when `from` gave what it has. */
static uint64_t take(uint64_t *from, uint64_t wanted) {
  uint64_t got = wanted < *from ? wanted : *from;
  *from -= got;
  return wanted - got;
}

/* What the file took since it was last looked at comes out of the room. `at_rest`: no write is on its way. */
void measure(watch *w, bool at_rest, int64_t now) {
  uint64_t bytes = fan_disk_bytes(w->fd), size = fan_size(w->fd), longer = size > w->size ? size - w->size : 0, grown = 0;
  w->size = size;
  if (bytes > w->seen) {
    grown = take(&w->expected, take(&w->pending, bytes - w->seen));
    w->pool->left -= (int64_t)grown;
    w->moved_ms = now;
    if (grown && !w->ignored) grew_silently(w, grown, now);
  } else if (bytes < w->seen) { /* cut or punched by the daemon: that room is the daemon's */
    w->moved_ms = now;
    if (at_rest) w->pending = 0; /* what was written meanwhile hides behind it */
  }
  w->seen = bytes;
  mind_inside(w, grown, longer);
  if (!at_rest) return;
  w->pool->left += (int64_t)w->pending;
  w->pending = 0;
}

void update(pool *p, int64_t now) {
  if (p->free && p->left < brake.margin) {
    p->free = false;
    p->alert_ms = now;
    for (uint32_t i = brake.first_active; i != INDEX_NONE; i = brake.watches[i].next)
      if (brake.watches[i].pool == p) set_ignored(&brake.watches[i], false, now);
  } else if (!p->free && p->left >= 2 * brake.margin && !p->waiting) {
    p->free = true;
  }
}

/* -- what the daemon is told ------------------------------------------------------------------------------------- */
/* What must be left for the write; a silent one takes a step. */
static uint64_t need_of(const held *h, const watch *w) {
  uint64_t steps = w ? (uint64_t)steps_room(w->pool) : 0;
  return steps + (h->unique ? 0 : fan_need(h->e.fd, h->e.offset, h->e.length, w && w->append));
}

/* EV_SHORT: less than half is left of the last grant, or a write waits for room. Once, until more room comes. */
static void tell_short(pool *p) {
  uint8_t body[48];
  const held *first = NULL;
  bool low = 2 * p->left < p->high;
  if (!(low && !p->told_low) && !(p->waiting && !p->told_held)) return;
  for (uint32_t i = 0; i < brake.held_count && !first; i++)
    if (!brake.waiting[i].touched && brake.waiting[i].nodeid >> STREAM_SHIFT == p->stream) first = &brake.waiting[i];
  const watch *w = first ? watch_of(first->nodeid) : NULL;
  store_u64(body, p->stream);
  store_u64(body + 8, (uint64_t)p->left);
  store_u64(body + 16, first ? need_of(first, w) : 0);
  store_u64(body + 24, first ? first->nodeid : 0);
  store_u64(body + 32, first ? first->e.offset : 0);
  store_u64(body + 40, p->waiting);
  if (!event_try(EV_SHORT, 0, 0, body, sizeof body)) {
    brake.tell_again = true;
    return;
  }
  p->told_low = low;
  p->told_held = p->waiting;
}

static void tell_touched(held *h) {
  uint8_t body[32];
  store_u64(body, h->number);
  store_u64(body + 8, h->nodeid);
  store_u64(body + 16, h->e.offset);
  store_u64(body + 24, h->e.length);
  h->told = event_try(EV_TOUCHED, 0, 0, body, sizeof body);
  if (!h->told) brake.tell_again = true;
}

void tell_all(void) {
  brake.tell_again = false;
  for (uint32_t i = 0; i < brake.pools_used; i++) tell_short(&brake.pools[i]);
  for (uint32_t i = 0; i < brake.held_count; i++)
    if (brake.waiting[i].touched && !brake.waiting[i].told) tell_touched(&brake.waiting[i]);
  tell_claims();
}

/* -- one write --------------------------------------------------------------------------------------------------- */
bool is_waiting(const watch *w) {
  for (uint32_t i = 0; i < brake.held_count; i++)
    if (brake.waiting[i].nodeid == w->id) return true;
  return false;
}

/* Whether the write may go on; it has taken its room then. */
static bool may_pass(held *h, bool first_in_turn, int64_t now) {
  watch *w = watch_of(h->nodeid);
  if (!w) return true; /* closed: no descriptor of it is left that could write */
  if (h->unique) return may_splice(h, w, first_in_turn, now);
  bool claimed = is_claimed(w, h->e.offset, h->e.length);
  if (claimed != h->touched) h->touched = claimed, h->told = false;
  if (claimed) return false;
  uint64_t need = fan_need(h->e.fd, h->e.offset, h->e.length, w->append);
  if (need && (!first_in_turn || w->pool->left < (int64_t)need + steps_room(w->pool) + SLACK)) return false;
  w->pool->left -= (int64_t)need;
  w->pending += need;
  w->moved_ms = now;
  activate(w);
  if (w->pool->free && !w->claimed) set_ignored(w, true, now);
  return true;
}

static void answer_held(const held *h, int error) {
  if (h->unique) answer_silent(h, watch_of(h->nodeid), error);
  else fan_answer(&h->e, error);
}

/* Lets go the writes that may pass, in the order they came: a tenant's first without room keeps those behind it waiting. */
void let_go(int64_t now) {
  uint32_t kept = 0;
  bool stuck[POOLS_MAX] = {false};
  for (uint32_t i = 0; i < brake.pools_used; i++) brake.pools[i].waiting = 0;
  for (uint32_t i = 0; i < brake.held_count; i++) {
    held h = brake.waiting[i];
    pool *p = pool_of(h.nodeid >> STREAM_SHIFT);
    if (!p || may_pass(&h, !stuck[p - brake.pools], now)) {
      answer_held(&h, 0);
      if (h.unique) step(watch_of(h.nodeid));
      continue;
    }
    if (!h.touched && !h.settles) p->waiting++;
    if (!h.touched) stuck[p - brake.pools] = true;
    brake.waiting[kept++] = h;
  }
  brake.held_count = kept;
  for (uint32_t i = 0; i < brake.pools_used; i++) update(&brake.pools[i], now);
  tell_all();
}

/* Ends with an error, or lets go, those that `which` says. */
void end_held(bool (*which)(const held *, uint64_t), uint64_t arg, int error) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < brake.held_count; i++) {
    if (which(&brake.waiting[i], arg)) answer_held(&brake.waiting[i], error);
    else brake.waiting[kept++] = brake.waiting[i];
  }
  brake.held_count = kept;
}

bool is_of_node(const held *h, uint64_t nodeid) { return h->nodeid == nodeid; }
static bool is_dead(const held *h, uint64_t unused) { return (void)unused, !h->unique && !fan_is_alive(h->e.tid); }

/* A write of an application: lets it go, or keeps it. */
static void take_event(const fan_event *e, uint64_t nodeid) {
  int64_t now = now_ms();
  watch *w = watch_of(nodeid);
  if (!w) return fan_answer(e, 0);
  end_held(is_of_node, nodeid, 0); /* its caller was killed, or this one could not be here */
  end_hold(w);                     /* the inode's lock at the mount is this write's: no splice is under way */
  measure(w, true, now);
  set_silent(w, false);
  w->spoke = true;
  if (brake.held_count == HELD_MAX) return fan_answer(e, is_claimed(w, e->offset, e->length) ? EIO : 0);
  brake.waiting[brake.held_count++] = (held){.e = *e, .nodeid = nodeid, .number = ++brake.next_number};
  grant_claims(nodeid); /* the inode's lock is this write's: those before it are over */
  let_go(now);
}

/* -- the thread -------------------------------------------------------------------------------------------------- */
/* Of those that are not looked at, a few each time: splice and sendfile do not report that they begin. */
static void look_at_quiet(void) {
  static uint32_t next;
  for (uint32_t n = brake.watches_fresh < QUIET_LOOKS ? brake.watches_fresh : QUIET_LOOKS; n; n--) {
    watch *w = &brake.watches[next = (next + 1) % brake.watches_fresh];
    if (w->pool && !w->active && !w->ahead && fan_disk_bytes(w->fd) > w->seen) activate(w);
  }
}

static void look(int64_t now) {
  for (uint32_t i = brake.first_active, next; i != INDEX_NONE; i = next) {
    watch *w = &brake.watches[i];
    next = w->next;
    bool idle = now - w->moved_ms >= IDLE_MS;
    measure(w, idle, now);
    mind_silent(w, idle, now);
    if (!idle || w->hold || w->stopped || now - w->moved_ms < IDLE_MS) continue;
    set_ignored(w, false, now);
    w->expected = 0;
    if (w->told == w->seen && !w->claimed) deactivate(w);
  }
}

static int64_t next_look_ms(int64_t now) {
  int64_t soonest = brake.held_count || brake.by_fd_count ? ALIVE_MS : -1;
  if (brake.tell_again) soonest = RETRY_MS;
  for (uint32_t i = 0; i < brake.pools_used; i++) {
    const pool *p = &brake.pools[i];
    if (!p->active) continue;
    int64_t ms = p->free ? (p->left - brake.margin) / brake.rate : now - p->alert_ms < ALERT_MS ? ALERT_LOOK_MS : REPORTED_LOOK_MS;
    ms = ms < 1 ? 1 : ms > LOOK_MS_MAX ? LOOK_MS_MAX : ms;
    if (soonest < 0 || ms < soonest) soonest = ms;
  }
  return soonest;
}

static void handle_events(void) {
  fan_event events[32];
  int n;
  while ((n = fan_read(events, 32)) > 0) {
    for (int i = 0; i < n; i++) {
      uint64_t nodeid = fan_ino(&events[i]);
      if (!nodeid || fan_is_ours(events[i].tid, brake.daemon_pid) || fan_only_reads(events[i].tid)) {
        fan_answer(&events[i], 0);
        continue;
      }
      pthread_mutex_lock(&brake.lock);
      take_event(&events[i], nodeid);
      pthread_mutex_unlock(&brake.lock);
    }
  }
}

void *brake_thread(void *unused) {
  (void)unused;
  /* Between two looks writers are on their own: the thread must not wait for a core behind them. */
  if (!hold_hurry()) note("the brake runs at ordinary priority: %s", strerror(errno));
  int64_t due = INT64_MAX, alive_due = 0;
  for (;;) {
    struct pollfd at[3] = {
        {.fd = fan_fd(), .events = POLLIN}, {.fd = brake.woken, .events = POLLIN}, {.fd = hold_fd(), .events = POLLIN}};
    int64_t now = now_ms();
    poll(at, 3, due == INT64_MAX ? -1 : due > now ? (int)(due - now) : 0);
    eventfd_t calls;
    if (at[1].revents) eventfd_read(brake.woken, &calls);
    if (at[0].revents) handle_events();
    if (at[2].revents) handle_holds();
    pthread_mutex_lock(&brake.lock);
    now = now_ms();
    if (at[1].revents) tell_all();
    if (now >= due) {
      look_at_quiet();
      look(now);
      if (brake.held_count && now >= alive_due) {
        end_held(is_dead, 0, 0);
        alive_due = now + ALIVE_MS;
      }
      let_go(now);
    }
    int64_t wait = next_look_ms(now);
    due = wait < 0 ? INT64_MAX : now + wait < due || now >= due ? now + wait : due;
    pthread_mutex_unlock(&brake.lock);
  }
}

void wake_thread(void) {
  if (brake.woken >= 0) eventfd_write(brake.woken, 1);
}
