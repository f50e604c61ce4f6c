/* What the daemon says: see brake.h and PROTOCOL.md. */
#include <errno.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "../bytes.h"
#include "ask.h"
#include "brake.h"
#include "brake_state.h"
#include "channel.h"
#include "hold.h"

#define GROWN_A_MESSAGE 2048

/* Who holds the lock runs with the priority of those who wait for it: the brake's thread must not wait for a core behind writers. Other
 * threads leave the lock alone until there is a group (fan_fd). */
static void share_priority(pthread_mutex_t *lock) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
  pthread_mutex_init(lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

void brake_open(const control_message *m, int fd) {
  uint8_t body[4];
  if (fan_fd() < 0) share_priority(&brake.lock);
  int error = fan_fd() >= 0 ? EALREADY : fd < 0 ? EBADF : channel.privileged ? fan_open(fd) : EPERM;
  if (!error) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    brake.daemon_pid = (pid_t)m->nodeid;
    brake.block_bytes = m->blocks.first ? m->blocks.first : 1;
    brake.rate = RATE_A_CORE * (int64_t)(cores < 1 ? 1 : cores > RATE_CORES_MAX ? RATE_CORES_MAX : cores);
    brake.margin = MARGIN_MS * brake.rate;
    brake.woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_t thread;
    int why = hold_open(); /* before the thread, which looks at once whether there is something to wait for */
    error = pthread_create(&thread, NULL, brake_thread, NULL);
    if (!error) error = ask_open(is_asking);
    if (why) note("splice and sendfile may take a little more than there is room for: no userfaultfd: %s", strerror(why));
  }
  if (fd >= 0) close(fd);
  store_u32(body, (uint32_t)error);
  event_send(EV_BRAKED, 0, m->seq, body, sizeof body);
}

void brake_room(const control_message *m) {
  pthread_mutex_lock(&brake.lock);
  pool *p = pool_of(m->nodeid);
  if (p) {
    p->left += (int64_t)m->grant_bytes; /* also less: the two sides counted differently */
    p->high = p->left;
    p->told_low = p->told_held = p->stops = false;
    for (uint32_t i = brake.first_active; i != INDEX_NONE && p->left >= 0; i = brake.watches[i].next)
      if (brake.watches[i].pool == p && brake.watches[i].inside <= INSIDE_MAX) set_stopped(&brake.watches[i], false);
    let_go(now_ms());
  }
  pthread_mutex_unlock(&brake.lock);
  wake_thread();
}

/* One message of files that grew; whether there are more. With the lock. */
static bool gather(const pool *p, uint8_t *rows, uint32_t *n) {
  for (uint32_t i = brake.first_active; i != INDEX_NONE; i = brake.watches[i].next) {
    watch *w = &brake.watches[i];
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
    pthread_mutex_lock(&brake.lock);
    pool *p = pool_of(m->nodeid);
    for (uint32_t i = brake.first_active; !looked && i != INDEX_NONE; i = brake.watches[i].next)
      if (brake.watches[i].pool == p) measure(&brake.watches[i], false, now);
    looked = true;
    more = p && gather(p, rows, &n);
    if (p) {
      left = p->left;
      if (!more && (m->flags & PROTO_TAKE)) p->left = left > 0 ? 0 : left, p->high = 0;
      update(p, now);
      waits = p->waiting;
      tell_all();
    }
    pthread_mutex_unlock(&brake.lock);
    store_u64(body, m->nodeid);
    store_u64(body + 8, (uint64_t)left);
    store_u64(body + 16, waits);
    store_u32(body + 24, n);
    event_send2(EV_GROWN, more ? PROTO_MORE : 0, m->seq, body, sizeof body, rows, 16 * (size_t)n);
  }
}

void brake_expect(const control_message *m) {
  pthread_mutex_lock(&brake.lock);
  watch *w = watch_of(m->nodeid);
  if (w) {
    measure(w, false, now_ms()); /* what was there before is not the daemon's */
    w->expected += m->grant_bytes;
    activate(w);
  }
  pthread_mutex_unlock(&brake.lock);
}

static bool waits_in(const held *h, uint64_t stream) { return !h->touched && h->nodeid >> STREAM_SHIFT == stream; }
static bool has_number(const held *h, uint64_t number) { return h->number == number; }
static bool touches(const held *h, uint64_t unused) { return (void)unused, h->touched; }

/* The next that is held is told again: those the daemon was asked for are gone. With the lock. */
static void forget_told(uint64_t stream) {
  pool *p = pool_of(stream);
  if (p) p->told_held = false;
}

void brake_deny(const control_message *m) {
  pthread_mutex_lock(&brake.lock);
  pool *p = m->flags & PROTO_SILENT ? pool_of(m->nodeid) : NULL;
  if (p) p->stops = true;
  else end_held(waits_in, m->nodeid, (int)m->caps_on), forget_told(m->nodeid);
  let_go(now_ms());
  pthread_mutex_unlock(&brake.lock);
}

void brake_pass(const control_message *m) {
  pthread_mutex_lock(&brake.lock);
  if (m->caps_on) end_held(has_number, m->nodeid, (int)m->caps_on);
  for (uint32_t i = 0; i < brake.held_count; i++)
    if (has_number(&brake.waiting[i], m->nodeid)) brake.waiting[i].told = false; /* still claimed: the daemon is asked again */
  let_go(now_ms());
  pthread_mutex_unlock(&brake.lock);
}

void brake_abandon(void) {
  if (fan_fd() < 0) return;
  struct timespec soon;
  clock_gettime(CLOCK_REALTIME, &soon);
  soon.tv_sec += 1;
  if (pthread_mutex_timedlock(&brake.lock, &soon)) return;
  for (uint32_t i = 0; i < brake.watches_fresh; i++) {
    long flags = 0;
    end_hold(&brake.watches[i]);
    if (!brake.watches[i].claimed || ioctl(brake.watches[i].fd, FS_IOC_GETFLAGS, &flags)) continue;
    flags |= FS_IMMUTABLE_FL; /* recovery takes it away */
    if (ioctl(brake.watches[i].fd, FS_IOC_SETFLAGS, &flags)) note("a file with parts elsewhere can be written to: %s", strerror(errno));
  }
  end_held(touches, 0, EIO);
  pthread_mutex_unlock(&brake.lock);
}
