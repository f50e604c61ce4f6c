/* See brake.h. */
#include "brake.h"

#include <errno.h>
#include <linux/fs.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../bytes.h"
#include "channel.h"
#include "fan.h"
#include "index.h"

#define POOLS_MAX 256
#ifndef WATCHES_MAX /* the fuzzer builds with a small one, which it fills */
#define WATCHES_MAX 131072
#endif
#define HELD_MAX 1024
#define STREAM_SHIFT 40
#define RATE_A_CORE 3000000 /* bytes a core can write into the page cache in a millisecond */
#define MARGIN_MS 5         /* of writing on all cores, kept back while files are free */
#define LOOK_MS_MAX 250
#define REPORTED_LOOK_MS 100
#define ALERT_LOOK_MS 2
#define ALERT_MS 200
#define SPEAKS_MS 20        /* from here on the writes of a file that is not ignored are reported, or never will be */
#define IDLE_MS 500         /* a file that did not grow for so long is reported again, and not looked at */
#define QUIET_MS 500        /* and of one reported for so long without a write, none is on its way */
#define ALIVE_MS 1000
#define RETRY_MS 5
#define QUIET_LOOKS 512     /* files that seem idle are looked at by so many a time */
#define SLACK 65536         /* bytes: a file also takes blocks for its map, which no range tells */
#define CLAIM_BITS_MAX (UINT64_C(1) << 24)
#define GROWN_A_MESSAGE 2048

typedef struct {
  uint64_t stream;
  int64_t left, high; /* room that no writer took yet; what it was after the last ROOM */
  uint32_t active, waiting;
  bool free, told_low, told_held;
  bool stops; /* the daemon has no room either: who reports nothing is stopped */
  int64_t alert_ms; /* when it ceased to be free, or a file grew that reported nothing */
} pool;

typedef struct {
  uint64_t id;
  int fd;
  pool *pool;
  bool append, ignored, active, stopped;
  uint64_t seen;    /* bytes on the disk, when it was last looked at */
  uint64_t pending; /* taken from the room for the write that is on its way */
  uint64_t expected; /* that the daemon itself is about to add, out of room of its own */
  uint64_t told;
  int64_t moved_ms, reported_ms;
  uint64_t *claims, claim_words, claimed;
  uint32_t prev, next, next_free; /* of the active */
} watch;

typedef struct {
  fan_event e;
  uint64_t number, nodeid;
  bool touched, told;
} held;

static pthread_mutex_t brake_lock = PTHREAD_MUTEX_INITIALIZER;
static pool pools[POOLS_MAX];
static uint32_t pools_used;
static watch watches[WATCHES_MAX];
static uint32_t watches_fresh, watches_free = INDEX_NONE, first_active = INDEX_NONE;
static index_entry id_entries[2 * WATCHES_MAX], fd_entries[2 * WATCHES_MAX];
static index_table by_id = {id_entries, 2 * WATCHES_MAX - 1}, by_fd = {fd_entries, 2 * WATCHES_MAX - 1};
static held waiting[HELD_MAX]; /* in the order they came */
static uint32_t held_count, by_fd_count;
static uint64_t next_number, block_bytes = 1;
static int64_t margin, rate;
static pid_t daemon_pid;
static int woken = -1;
static bool tell_again;

static int64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* -- watches and pools; all below with the lock ------------------------------------------------------------------ */
static pool *pool_of(uint64_t stream) {
  for (uint32_t i = 0; i < pools_used; i++)
    if (pools[i].stream == stream) return &pools[i];
  if (pools_used == POOLS_MAX) return NULL;
  pools[pools_used] = (pool){.stream = stream};
  return &pools[pools_used++];
}

static watch *watch_of(uint64_t id) {
  uint32_t slot = index_get(&by_id, id, 0);
  return slot == INDEX_NONE ? NULL : &watches[slot];
}

static void activate(watch *w) {
  if (w->active) return;
  uint32_t slot = (uint32_t)(w - watches);
  w->active = true;
  w->prev = INDEX_NONE;
  w->next = first_active;
  if (first_active != INDEX_NONE) watches[first_active].prev = slot;
  first_active = slot;
  w->pool->active++;
}

static void deactivate(watch *w) {
  if (!w->active) return;
  w->active = false;
  if (w->prev != INDEX_NONE) watches[w->prev].next = w->next;
  else first_active = w->next;
  if (w->next != INDEX_NONE) watches[w->next].prev = w->prev;
  w->pool->active--;
}

static void set_ignored(watch *w, bool on, int64_t now) {
  if (w->ignored == on) return;
  fan_ignore(w->fd, on);
  w->ignored = on;
  if (!on) w->reported_ms = now;
}

static void set_stopped(watch *w, bool on) {
  long flags = 0;
  if (w->stopped == on || ioctl(w->fd, FS_IOC_GETFLAGS, &flags)) return;
  flags = on ? flags | FS_IMMUTABLE_FL : flags & ~(long)FS_IMMUTABLE_FL;
  if (ioctl(w->fd, FS_IOC_SETFLAGS, &flags)) return;
  w->stopped = on;
  if (on) note("a writer is stopped: the cache is full, and splice and sendfile report nothing (node %llu)", (unsigned long long)w->id);
}

/* splice and sendfile write past the report. They cannot be held: the file becomes immutable, and they get EPERM. */
static void stop_silent(watch *w) {
  if (w->pool->stops && w->pool->left < -SLACK) set_stopped(w, true);
}

/* What is left of `wanted` when `from` gave what it has. */
static uint64_t take(uint64_t *from, uint64_t wanted) {
  uint64_t got = wanted < *from ? wanted : *from;
  *from -= got;
  return wanted - got;
}

/* What the file took since it was last looked at comes out of the room. `settled`: no write is on its way. */
static void measure(watch *w, bool settled, int64_t now) {
  uint64_t bytes = fan_disk_bytes(w->fd);
  if (bytes > w->seen) {
    uint64_t grown = take(&w->expected, take(&w->pending, bytes - w->seen));
    w->pool->left -= (int64_t)grown;
    w->moved_ms = now;
    if (grown && !w->ignored && now - w->reported_ms >= SPEAKS_MS) w->pool->alert_ms = now, stop_silent(w);
  } else if (bytes < w->seen) { /* cut or punched by the daemon: that room is the daemon's */
    w->moved_ms = now;
    if (settled) w->pending = 0; /* what was written meanwhile hides behind it */
  }
  w->seen = bytes;
  if (!settled) return;
  w->pool->left += (int64_t)w->pending;
  w->pending = 0;
}

static void update(pool *p, int64_t now) {
  if (p->free && p->left < margin) {
    p->free = false;
    p->alert_ms = now;
    for (uint32_t i = first_active; i != INDEX_NONE; i = watches[i].next)
      if (watches[i].pool == p) set_ignored(&watches[i], false, now);
  } else if (!p->free && p->left >= 2 * margin && !p->waiting) {
    p->free = true;
  }
}

/* -- what the daemon is told ------------------------------------------------------------------------------------- */
/* EV_SHORT: less than half is left of the last grant, or somebody waits. Once, until more room comes. */
static void tell_short(pool *p) {
  uint8_t body[48];
  const held *first = NULL;
  bool low = 2 * p->left < p->high;
  if (!(low && !p->told_low) && !(p->waiting && !p->told_held)) return;
  for (uint32_t i = 0; i < held_count && !first; i++)
    if (!waiting[i].touched && waiting[i].nodeid >> STREAM_SHIFT == p->stream) first = &waiting[i];
  const watch *w = first ? watch_of(first->nodeid) : NULL;
  store_u64(body, p->stream);
  store_u64(body + 8, (uint64_t)p->left);
  store_u64(body + 16, first ? fan_need(first->e.fd, first->e.offset, first->e.length, w && w->append) : 0);
  store_u64(body + 24, first ? first->nodeid : 0);
  store_u64(body + 32, first ? first->e.offset : 0);
  store_u64(body + 40, p->waiting);
  if (!event_try(EV_SHORT, 0, 0, body, sizeof body)) {
    tell_again = true;
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
  if (!h->told) tell_again = true;
}

static void tell_all(void) {
  tell_again = false;
  for (uint32_t i = 0; i < pools_used; i++) tell_short(&pools[i]);
  for (uint32_t i = 0; i < held_count; i++)
    if (waiting[i].touched && !waiting[i].told) tell_touched(&waiting[i]);
}

/* -- one write --------------------------------------------------------------------------------------------------- */
static bool is_claimed(const watch *w, uint64_t offset, uint64_t length) {
  if (!w->claimed || !length) return false;
  uint64_t first = offset / block_bytes, last = (offset + length - 1) / block_bytes;
  for (uint64_t b = first; b <= last && b / 64 < w->claim_words; b++)
    if (w->claims[b / 64] >> (b % 64) & 1) return true;
  return false;
}

/* Whether the write may go on; it has taken its room then. */
static bool may_pass(held *h, bool first_in_turn, int64_t now) {
  watch *w = watch_of(h->nodeid);
  if (!w) return true; /* closed: no descriptor of it is left that could write */
  bool claimed = is_claimed(w, h->e.offset, h->e.length);
  if (claimed != h->touched) h->touched = claimed, h->told = false;
  if (claimed) return false;
  uint64_t need = fan_need(h->e.fd, h->e.offset, h->e.length, w->append);
  if (need && (!first_in_turn || w->pool->left < (int64_t)need + SLACK)) return false;
  w->pool->left -= (int64_t)need;
  w->pending += need;
  w->moved_ms = now;
  activate(w);
  if (w->pool->free && !w->claimed) set_ignored(w, true, now);
  return true;
}

/* Lets go whoever may, in the order they came: a tenant's first without room keeps those behind it waiting. */
static void let_go(int64_t now) {
  uint32_t kept = 0;
  bool stuck[POOLS_MAX] = {false};
  for (uint32_t i = 0; i < pools_used; i++) pools[i].waiting = 0;
  for (uint32_t i = 0; i < held_count; i++) {
    held h = waiting[i];
    pool *p = pool_of(h.nodeid >> STREAM_SHIFT);
    if (!p || may_pass(&h, !stuck[p - pools], now)) {
      fan_answer(&h.e, 0);
      continue;
    }
    if (!h.touched) p->waiting++, stuck[p - pools] = true;
    waiting[kept++] = h;
  }
  held_count = kept;
  for (uint32_t i = 0; i < pools_used; i++) update(&pools[i], now);
  tell_all();
}

/* Ends with an error, or lets go, those that `which` says. */
static void end_held(bool (*which)(const held *, uint64_t), uint64_t arg, int error) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < held_count; i++) {
    if (which(&waiting[i], arg)) fan_answer(&waiting[i].e, error);
    else waiting[kept++] = waiting[i];
  }
  held_count = kept;
}

static bool is_of_node(const held *h, uint64_t nodeid) { return h->nodeid == nodeid; }
static bool waits_in(const held *h, uint64_t stream) { return !h->touched && h->nodeid >> STREAM_SHIFT == stream; }
static bool has_number(const held *h, uint64_t number) { return h->number == number; }
static bool touches(const held *h, uint64_t unused) { return (void)unused, h->touched; }
static bool is_dead(const held *h, uint64_t unused) { return (void)unused, !fan_is_alive(h->e.tid); }

/* A write of somebody else's: lets it go, or keeps it. */
static void take_event(const fan_event *e, uint64_t nodeid) {
  int64_t now = now_ms();
  watch *w = watch_of(nodeid);
  if (!w) return fan_answer(e, 0);
  end_held(is_of_node, nodeid, 0); /* its caller was killed, or this one could not be here */
  measure(w, true, now);
  if (held_count == HELD_MAX) return fan_answer(e, 0);
  waiting[held_count++] = (held){.e = *e, .nodeid = nodeid, .number = ++next_number};
  let_go(now);
}

/* -- the thread --------------------------------------------------------------------------------------------------- */
/* Of those that are not looked at, a few each time: splice and sendfile do not report that they begin. */
static void look_at_quiet(void) {
  static uint32_t next;
  for (uint32_t n = watches_fresh < QUIET_LOOKS ? watches_fresh : QUIET_LOOKS; n; n--) {
    watch *w = &watches[next = (next + 1) % watches_fresh];
    if (w->pool && !w->active && fan_disk_bytes(w->fd) > w->seen) activate(w);
  }
}

static void look(int64_t now) {
  for (uint32_t i = first_active, next; i != INDEX_NONE; i = next) {
    watch *w = &watches[i];
    next = w->next;
    bool idle = now - w->moved_ms >= IDLE_MS;
    measure(w, idle, now);
    if (!idle || w->stopped || now - w->moved_ms < IDLE_MS) continue;
    set_ignored(w, false, now);
    w->expected = 0;
    if (w->told == w->seen && !w->claimed) deactivate(w);
  }
}

static int64_t next_look_ms(int64_t now) {
  int64_t soonest = held_count || by_fd_count ? ALIVE_MS : -1;
  if (tell_again) soonest = RETRY_MS;
  for (uint32_t i = 0; i < pools_used; i++) {
    const pool *p = &pools[i];
    if (!p->active) continue;
    int64_t ms = p->free ? (p->left - margin) / rate : now - p->alert_ms < ALERT_MS ? ALERT_LOOK_MS : REPORTED_LOOK_MS;
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
      if (!nodeid || fan_is_ours(events[i].tid, daemon_pid) || fan_only_reads(events[i].tid)) {
        fan_answer(&events[i], 0);
        continue;
      }
      pthread_mutex_lock(&brake_lock);
      take_event(&events[i], nodeid);
      pthread_mutex_unlock(&brake_lock);
    }
  }
}

void *brake_thread(void *unused) {
  (void)unused;
  /* Between two looks writers are on their own: the thread must not wait for a core behind them. */
  if (setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), -15)) note("the brake runs at ordinary priority: %s", strerror(errno));
  int64_t due = INT64_MAX, alive_due = 0;
  for (;;) {
    struct pollfd at[2] = {{.fd = fan_fd(), .events = POLLIN}, {.fd = woken, .events = POLLIN}};
    int64_t now = now_ms();
    poll(at, 2, due == INT64_MAX ? -1 : due > now ? (int)(due - now) : 0);
    eventfd_t calls;
    if (at[1].revents) eventfd_read(woken, &calls);
    if (at[0].revents) handle_events();
    pthread_mutex_lock(&brake_lock);
    now = now_ms();
    if (now >= due) {
      look_at_quiet();
      look(now);
      if (held_count && now >= alive_due) {
        end_held(is_dead, 0, 0);
        alive_due = now + ALIVE_MS;
      }
      let_go(now);
    }
    int64_t wait = next_look_ms(now);
    due = wait < 0 ? INT64_MAX : now + wait < due || now >= due ? now + wait : due;
    pthread_mutex_unlock(&brake_lock);
  }
}

static void wake_thread(void) {
  if (woken >= 0) eventfd_write(woken, 1);
}

/* -- from other threads ------------------------------------------------------------------------------------------- */
void brake_watch(uint64_t nodeid, int fd, uint32_t flags) {
  if (fan_fd() < 0) return;
  int64_t now = now_ms();
  pthread_mutex_lock(&brake_lock);
  bool asleep = first_active == INDEX_NONE;
  pool *p = pool_of(nodeid >> STREAM_SHIFT);
  watch *old = watch_of(nodeid);
  if (old && old->fd == fd) {
    old->append |= flags & WATCH_APPEND;
    old->moved_ms = now;
    set_ignored(old, p->free && !old->claimed, now);
    activate(old);
  } else if (p && (watches_free != INDEX_NONE || watches_fresh < WATCHES_MAX)) {
    uint32_t slot = watches_free != INDEX_NONE ? watches_free : watches_fresh++;
    if (slot == watches_free) watches_free = watches[slot].next_free;
    watch *w = &watches[slot];
    *w = (watch){.id = nodeid, .fd = fd, .pool = p, .append = flags & WATCH_APPEND, .moved_ms = now, .reported_ms = now};
    w->seen = w->told = fan_disk_bytes(fd);
    if (!fan_mark(fd)) note("node %llu is not watched: %s", (unsigned long long)nodeid, strerror(errno));
    if (old) w->ignored = old->ignored, old->ignored = false; /* one inode has one mark, whatever descriptor it came by */
    index_put(&by_id, nodeid, 0, slot);
    index_put(&by_fd, (uint64_t)fd, 0, slot);
    by_fd_count++;
    set_ignored(w, p->free, now);
    if (!(flags & WATCH_AHEAD)) activate(w);
  }
  if (p && !p->free && !(flags & WATCH_AHEAD)) p->alert_ms = now; /* should it report nothing, that shows soon */
  asleep = asleep && first_active != INDEX_NONE;
  pthread_mutex_unlock(&brake_lock);
  if (asleep) wake_thread();
}

void brake_closing(int fd) {
  if (fan_fd() < 0 || fd < 0) return;
  pthread_mutex_lock(&brake_lock);
  uint32_t slot = index_get(&by_fd, (uint64_t)fd, 0);
  if (slot != INDEX_NONE) {
    watch *w = &watches[slot];
    w->pool->left += (int64_t)w->pending;
    set_stopped(w, false);
    deactivate(w);
    index_remove(&by_fd, (uint64_t)fd, 0);
    by_fd_count--;
    if (watch_of(w->id) == w) { /* else it is open again by another descriptor, and watched by that */
      fan_unmark(fd);
      index_remove(&by_id, w->id, 0);
    }
    free(w->claims);
    *w = (watch){.next_free = watches_free};
    watches_free = slot;
  }
  pthread_mutex_unlock(&brake_lock);
}

/* -- what the daemon says ----------------------------------------------------------------------------------------- */
void brake_open(const control_message *m, int fd) {
  uint8_t body[4];
  int error = fan_fd() >= 0 ? EALREADY : fd < 0 ? EBADF : channel.privileged ? fan_open(fd) : EPERM;
  if (!error) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    daemon_pid = (pid_t)m->nodeid;
    block_bytes = m->blocks.first ? m->blocks.first : 1;
    rate = RATE_A_CORE * (int64_t)(cores < 1 ? 1 : cores);
    margin = MARGIN_MS * rate;
    woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_t thread;
    error = pthread_create(&thread, NULL, brake_thread, NULL);
  }
  if (fd >= 0) close(fd);
  store_u32(body, (uint32_t)error);
  event_send(EV_BRAKED, 0, m->seq, body, sizeof body);
}

void brake_room(const control_message *m) {
  pthread_mutex_lock(&brake_lock);
  pool *p = pool_of(m->nodeid);
  if (p) {
    p->left += (int64_t)m->grant_bytes; /* also less: the two sides counted differently */
    p->high = p->left;
    p->told_low = p->told_held = p->stops = false;
    for (uint32_t i = first_active; i != INDEX_NONE && p->left >= 0; i = watches[i].next)
      if (watches[i].pool == p) set_stopped(&watches[i], false);
    let_go(now_ms());
  }
  pthread_mutex_unlock(&brake_lock);
  wake_thread();
}

/* One message of files that grew; whether there are more. With the lock. */
static bool gather(const pool *p, uint8_t *rows, uint32_t *n) {
  for (uint32_t i = first_active; i != INDEX_NONE; i = watches[i].next) {
    watch *w = &watches[i];
    if (w->pool != p || w->told == w->seen + w->pending) continue;
    if (*n == GROWN_A_MESSAGE) return true;
    w->told = w->seen + w->pending;
    store_u64(rows + 16 * *n, w->id);
    store_u64(rows + 16 * *n + 8, w->told);
    ++*n;
  }
  return false;
}

void brake_grown(const control_message *m) {
  uint8_t body[28], rows[GROWN_A_MESSAGE * 16];
  bool more = true, looked = false;
  while (more) {
    uint32_t n = 0;
    int64_t left = 0, now = now_ms();
    uint64_t waits = 0;
    pthread_mutex_lock(&brake_lock);
    pool *p = pool_of(m->nodeid);
    for (uint32_t i = first_active; !looked && i != INDEX_NONE; i = watches[i].next)
      if (watches[i].pool == p) measure(&watches[i], false, now);
    looked = true;
    more = p && gather(p, rows, &n);
    if (p) {
      left = p->left;
      if (!more && (m->flags & PROTO_TAKE)) p->left = left > 0 ? 0 : left, p->high = 0;
      update(p, now);
      waits = p->waiting;
      tell_all();
    }
    pthread_mutex_unlock(&brake_lock);
    store_u64(body, m->nodeid);
    store_u64(body + 8, (uint64_t)left);
    store_u64(body + 16, waits);
    store_u32(body + 24, n);
    event_send2(EV_GROWN, more ? PROTO_MORE : 0, m->seq, body, sizeof body, rows, 16 * (size_t)n);
  }
}

void brake_expect(const control_message *m) {
  pthread_mutex_lock(&brake_lock);
  watch *w = watch_of(m->nodeid);
  if (w) {
    measure(w, false, now_ms()); /* what was there before is not the daemon's */
    w->expected += m->grant_bytes;
    activate(w);
  }
  pthread_mutex_unlock(&brake_lock);
}

void brake_deny(const control_message *m) {
  pthread_mutex_lock(&brake_lock);
  pool *p = m->flags & PROTO_SILENT ? pool_of(m->nodeid) : NULL;
  if (p) p->stops = true;
  else end_held(waits_in, m->nodeid, (int)m->caps_on);
  let_go(now_ms());
  pthread_mutex_unlock(&brake_lock);
}

static bool claims_grow(watch *w, uint64_t bits) {
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

static void set_claims(watch *w, uint64_t first, uint64_t count, bool on) {
  for (uint64_t b = first; b < first + count && b / 64 < w->claim_words; b++) {
    uint64_t bit = UINT64_C(1) << (b % 64);
    bool was = w->claims[b / 64] & bit;
    if (was == on) continue;
    w->claims[b / 64] ^= bit;
    w->claimed = on ? w->claimed + 1 : w->claimed - 1;
  }
}

/* No write of this file is on its way: one is held, or there was none for long. With the lock. */
static bool is_quiet(const watch *w, int64_t now) {
  for (uint32_t i = 0; i < held_count; i++)
    if (waiting[i].nodeid == w->id) return true;
  int64_t since = w->moved_ms > w->reported_ms ? w->moved_ms : w->reported_ms;
  return !w->ignored && now - since >= QUIET_MS;
}

void brake_claim(const control_message *m) {
  int64_t now = now_ms();
  pthread_mutex_lock(&brake_lock);
  watch *w = watch_of(m->nodeid);
  bool ok = w && m->blocks.count <= CLAIM_BITS_MAX && claims_grow(w, m->blocks.first + m->blocks.count);
  if (ok) {
    set_ignored(w, false, now);
    ok = is_quiet(w, now);
    if (ok) {
      set_claims(w, m->blocks.first, m->blocks.count, true);
      activate(w);
    }
  }
  pthread_mutex_unlock(&brake_lock);
  event_send(EV_CLAIMED, ok ? 0 : PROTO_AGAIN, m->seq, NULL, 0);
}

void brake_unclaim(const control_message *m) {
  pthread_mutex_lock(&brake_lock);
  watch *w = watch_of(m->nodeid);
  if (w) set_claims(w, m->blocks.first, m->blocks.count, false);
  let_go(now_ms());
  pthread_mutex_unlock(&brake_lock);
}

void brake_pass(const control_message *m) {
  pthread_mutex_lock(&brake_lock);
  if (m->caps_on) end_held(has_number, m->nodeid, (int)m->caps_on);
  for (uint32_t i = 0; i < held_count; i++)
    if (has_number(&waiting[i], m->nodeid)) waiting[i].told = false; /* still claimed: the daemon is asked again */
  let_go(now_ms());
  pthread_mutex_unlock(&brake_lock);
}

void brake_abandon(void) {
  if (fan_fd() < 0) return;
  struct timespec soon;
  clock_gettime(CLOCK_REALTIME, &soon);
  soon.tv_sec += 1;
  if (pthread_mutex_timedlock(&brake_lock, &soon)) return;
  for (uint32_t i = 0; i < watches_fresh; i++) {
    long flags = 0;
    if (!watches[i].claimed || ioctl(watches[i].fd, FS_IOC_GETFLAGS, &flags)) continue;
    flags |= FS_IMMUTABLE_FL; /* recovery takes it away */
    if (ioctl(watches[i].fd, FS_IOC_SETFLAGS, &flags)) note("a file with parts elsewhere can be written to: %s", strerror(errno));
  }
  end_held(touches, 0, EIO);
  pthread_mutex_unlock(&brake_lock);
}
