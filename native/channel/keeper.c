/* See keeper.h. */
#include "keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "births.h"
#include "brake.h"
#include "channel.h"

#ifndef GONE_MAX /* the tests build with small ones, which they fill */
#define GONE_MAX 4096
#endif
#define ROUND_FILES 16 /* made, then let go of, in turns */
#define TICK_MS 10     /* in a burst: the workers need not wake us for each file */

typedef struct {
  int fd;
  int32_t backing_id;
} remains;

static int woken = -1;
static atomic_bool asleep, ticking; /* waiting for a call; or for the next tick */
static pthread_mutex_t gone_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gone_closed = PTHREAD_COND_INITIALIZER;
static remains gone[GONE_MAX];
static uint32_t gone_first, gone_count, closing;

void keeper_open(void) { woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }

void keeper_call(void) {
  if (atomic_exchange(&asleep, false) | atomic_exchange(&ticking, false)) eventfd_write(woken, 1);
}

void keeper_let_go(aftermath after) {
  pthread_mutex_lock(&gone_lock);
  bool room = !after.cleared && gone_count < GONE_MAX;
  if (room) gone[(gone_first + gone_count++) % GONE_MAX] = (remains){after.fd, after.backing_id};
  pthread_mutex_unlock(&gone_lock);
  if (!room) finish(after);
  else if (atomic_exchange(&asleep, false)) eventfd_write(woken, 1);
}

/* Lets go of the next few; how many. */
static uint32_t close_some(void) {
  remains some[ROUND_FILES];
  uint32_t n = 0;
  pthread_mutex_lock(&gone_lock);
  for (; n < ROUND_FILES && gone_count; n++, gone_count--) {
    some[n] = gone[gone_first];
    gone_first = (gone_first + 1) % GONE_MAX;
  }
  closing += n;
  pthread_mutex_unlock(&gone_lock);
  for (uint32_t i = 0; i < n; i++) finish((aftermath){.fd = some[i].fd, .backing_id = some[i].backing_id});
  if (n) {
    pthread_mutex_lock(&gone_lock);
    closing -= n;
    if (!closing) pthread_cond_broadcast(&gone_closed);
    pthread_mutex_unlock(&gone_lock);
  }
  return n;
}

void keeper_settle(void) {
  while (close_some()) {}
  pthread_mutex_lock(&gone_lock);
  while (closing) pthread_cond_wait(&gone_closed, &gone_lock);
  pthread_mutex_unlock(&gone_lock);
}

/* One file ahead of its birth; false: none is wanted, or it could not be made. */
static bool make_one(void) {
  cradle c;
  int dir_fd;
  char name[BACKING_NAME_LEN];
  if (!births_order(&c, &dir_fd)) return false;
  backing_name(c.ino, name);
  c.fd = openat(dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  bool made = c.fd >= 0 && !device_backing_open(c.fd, &c.backing_id);
  if (made) brake_watch(c.ino, c.fd, WATCH_AHEAD);
  if (births_made(&c, made)) return true;
  if (made) device_backing_close(c.backing_id);
  if (c.fd >= 0) {
    brake_closing(c.fd);
    close(c.fd);
    unlinkat(dir_fd, name, 0);
  }
  return false;
}

bool keeper_round(void) {
  bool worked = false;
  for (;;) {
    uint32_t done = close_some();
    for (int i = 0; i < ROUND_FILES && make_one(); i++) done++;
    if (!done) return worked;
    worked = true;
  }
}

void *keeper_thread(void *unused) {
  (void)unused;
  struct pollfd at = {.fd = woken, .events = POLLIN};
  bool worked = false;
  for (;;) {
    eventfd_t calls;
    atomic_bool *resting = worked ? &ticking : &asleep;
    atomic_store(resting, true); /* before the last look: who brings work after it calls */
    bool again = keeper_round();
    if (!again) poll(&at, 1, worked ? TICK_MS : -1);
    atomic_store(resting, false);
    eventfd_read(woken, &calls);
    worked = again;
  }
}
