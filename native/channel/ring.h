/* An io_uring by its system calls: just what uring.c needs of one.
 *
 * Invariants
 * - Made and used by one thread (the kernel refuses others): completions come only while that thread is in ring_wait.
 * - Commands are taken by the kernel at the next ring_wait, in order. `room` commands at most are under way at a time: so no
 *   completion is ever without a place.
 *
 * Owner: the thread that opened it. The ring goes with its descriptor, and what was under way with it.
 */
#ifndef AOF2_CHANNEL_RING_H
#define AOF2_CHANNEL_RING_H
#include <stdbool.h>
#include <stdint.h>

/* A command of twice the common length, as IORING_SETUP_SQE128 has them: io_uring_sqe's fields that are used here. */
typedef struct {
  uint8_t opcode, flags;
  uint16_t ioprio;
  int32_t fd;
  uint32_t number, unused0; /* of IORING_OP_URING_CMD: which command of the file's */
  uint64_t addr;
  uint32_t len, op_flags;
  uint64_t user_data;
  uint8_t unused1[8];
  uint8_t cmd[80]; /* what the file it goes to understands */
} ring_command;
_Static_assert(sizeof(ring_command) == 128, "an SQE of 128 bytes");

typedef struct {
  int fd;
  uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail;
  uint32_t sq_mask, cq_mask, tail; /* tail: behind the last command, shown to the kernel when it is called */
  ring_command *commands;
  const struct io_uring_cqe *completions;
} ring;

int ring_open(ring *r, uint32_t room); /* 0 or an errno */
/* A zeroed command to fill in. */
ring_command *ring_next(ring *r);
/* Hands what was prepared to the kernel and, with `wait`, returns when there is a completion, at once where there was one before. 0 or an errno; EINTR: call again. */
int ring_wait(ring *r, bool wait);
/* Whether ring_wait has something to hand over. */
bool ring_prepared(const ring *r);
bool ring_ready(const ring *r); /* whether there is a completion */
/* The next completion: whose command it was, and what came of it. False: there is none. */
bool ring_take(ring *r, uint64_t *user_data, int32_t *result);
#endif
