/* See barrier.h. */
#include "barrier.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "ask.h"
#include "channel.h"
#include "uring.h"

#define THREADS_MAX 64
#define STACK_BYTES (64 << 10)

typedef struct {
  uint64_t nodeid;
  uint32_t seq;
  int keep;
  void (*done)(uint32_t seq, bool past);
} barrier;

static atomic_int threads;

static void give_up_descriptors(int keep) {
  if (unshare(CLONE_FILES)) return note("a barrier keeps the process's descriptors: %s", strerror(errno));
  if (keep > 3) syscall(SYS_close_range, 3, (unsigned)keep - 1, 0);
  syscall(SYS_close_range, (unsigned)(keep < 3 ? 3 : keep + 1), ~0u, 0);
}

static bool pass(uint64_t nodeid) {
  char path[40];
  int fd = open_node(nodeid);
  if (fd < 0) return false;
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  bool past = removexattr(path, BARRIER_XATTR) && errno == ENODATA;
  close(fd);
  return past;
}

static void *barrier_thread(void *arg) {
  barrier b = *(barrier *)arg;
  free(arg);
  uring_unpin();
  give_up_descriptors(b.keep);
  b.done(b.seq, pass(b.nodeid));
  atomic_fetch_sub(&threads, 1);
  return NULL;
}

static bool start_thread(barrier *b) {
  pthread_t thread;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  bool ok = !pthread_create(&thread, &attributes, barrier_thread, b);
  pthread_attr_destroy(&attributes);
  return ok;
}

bool barrier_begin(uint64_t nodeid, uint32_t seq, int keep, void (*done)(uint32_t seq, bool past)) {
  barrier *b = malloc(sizeof *b);
  if (b) *b = (barrier){nodeid, seq, keep, done};
  bool ok = atomic_fetch_add(&threads, 1) < THREADS_MAX && b && start_thread(b);
  if (ok) return true;
  atomic_fetch_sub(&threads, 1);
  free(b);
  return false;
}
