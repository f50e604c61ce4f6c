/* See ring.h. */
#include "ring.h"

#include <errno.h>
#include <linux/io_uring.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define COMMANDS 256 /* prepared at a time */

/* Newer than some systems' headers; a kernel that speaks FUSE over io_uring has them all. */
#define SETUP_CQSIZE (1u << 3)
#define SETUP_SUBMIT_ALL (1u << 7) /* one that fails does not keep the others back */
#define SETUP_SQE128 (1u << 10)
#define SETUP_SINGLE_ISSUER (1u << 12)
#define SETUP_DEFER_TASKRUN (1u << 13) /* the thread is not interrupted for what arrives: it looks when it waits */

static void *map(int fd, size_t len, off_t at) {
  void *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, at);
  return p == MAP_FAILED ? NULL : p;
}

int ring_open(ring *r, uint32_t room) {
  struct io_uring_params p = {.cq_entries = room < COMMANDS ? COMMANDS : room};
  p.flags = SETUP_CQSIZE | SETUP_SUBMIT_ALL | SETUP_SQE128 | SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN;
  r->fd = (int)syscall(SYS_io_uring_setup, COMMANDS, &p);
  if (r->fd < 0) return errno;
  size_t sq_len = p.sq_off.array + p.sq_entries * sizeof(uint32_t);
  uint8_t *sq = map(r->fd, sq_len, IORING_OFF_SQ_RING);
  uint8_t *cq = map(r->fd, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), IORING_OFF_CQ_RING);
  r->commands = map(r->fd, p.sq_entries * sizeof(ring_command), IORING_OFF_SQES);
  if (!sq || !cq || !r->commands) { /* what was mapped goes with the process: it does without io_uring */
    close(r->fd);
    return ENOMEM;
  }
  uint32_t *order = (uint32_t *)(void *)(sq + p.sq_off.array);
  for (uint32_t i = 0; i < p.sq_entries; i++) order[i] = i;
  r->sq_head = (uint32_t *)(void *)(sq + p.sq_off.head);
  r->sq_tail = (uint32_t *)(void *)(sq + p.sq_off.tail);
  r->cq_head = (uint32_t *)(void *)(cq + p.cq_off.head);
  r->cq_tail = (uint32_t *)(void *)(cq + p.cq_off.tail);
  r->completions = (const struct io_uring_cqe *)(void *)(cq + p.cq_off.cqes);
  r->sq_mask = p.sq_entries - 1;
  r->cq_mask = p.cq_entries - 1;
  r->tail = *r->sq_tail;
  return 0;
}

/* Those the kernel has not taken yet. */
static uint32_t prepared(const ring *r) { return r->tail - __atomic_load_n(r->sq_head, __ATOMIC_ACQUIRE); }

bool ring_prepared(const ring *r) { return prepared(r); }

ring_command *ring_next(ring *r) {
  while (prepared(r) > r->sq_mask) ring_wait(r, false);
  ring_command *c = &r->commands[r->tail++ & r->sq_mask];
  memset(c, 0, sizeof *c);
  return c;
}

int ring_wait(ring *r, bool wait) {
  __atomic_store_n(r->sq_tail, r->tail, __ATOMIC_RELEASE);
  long done = syscall(SYS_io_uring_enter, r->fd, prepared(r), wait ? 1 : 0, IORING_ENTER_GETEVENTS, NULL, 0);
  return done < 0 ? errno : 0;
}

bool ring_ready(const ring *r) { return *r->cq_head != __atomic_load_n(r->cq_tail, __ATOMIC_ACQUIRE); }

bool ring_take(ring *r, uint64_t *user_data, int32_t *result) {
  uint32_t head = *r->cq_head;
  if (!ring_ready(r)) return false;
  const struct io_uring_cqe *c = &r->completions[head & r->cq_mask];
  *user_data = c->user_data;
  *result = c->res;
  __atomic_store_n(r->cq_head, head + 1, __ATOMIC_RELEASE);
  return true;
}
