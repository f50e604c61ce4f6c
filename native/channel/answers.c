/* Answers of READs that are too long for the socket: each comes as a descriptor on the control socket (BYTES), right before
 * the reply that tells its slot, and is read and sent to the kernel from here.
 *
 * Invariants
 * - Fixed room, in the order they came. The replies come in that order, too: what is before the one that is asked for has
 *   lost its reply, and is closed.
 * - A reader gets bytes of its own handle and offset or an error, whatever the daemon says, and never more than it asked for.
 * - Every descriptor is in the ring or closed.
 *
 * Owner: answers_lock, never held over anything that waits. The reply thread takes, the thread with control_lock puts.
 */
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include "channel.h"

#ifndef ANSWERS_MAX /* the fuzzer builds with a small one, which it fills */
#define ANSWERS_MAX 8192 /* a power of two: `first` and `end` wrap around */
#endif

typedef struct {
  uint64_t fh, offset;
  uint32_t slot, len;
  int fd;
} held_answer;

static pthread_mutex_t answers_lock = PTHREAD_MUTEX_INITIALIZER;
static held_answer ring[ANSWERS_MAX];
static uint32_t first, end; /* those held are [first, end) */

static bool put(const control_message *m, int fd) {
  pthread_mutex_lock(&answers_lock);
  bool room = end - first < ANSWERS_MAX;
  if (room) ring[end++ % ANSWERS_MAX] = (held_answer){m->nodeid, m->bytes.offset, m->bytes.slot, m->bytes.len, fd};
  pthread_mutex_unlock(&answers_lock);
  return room;
}

void answers_put(const control_message *m, int fd) {
  const char *why = NULL;
  if (fd < 0) why = "no descriptor";
  else if (m->bytes.slot >= PROTO_SLOTS) why = "no such slot";
  else if (m->bytes.len > REQUEST_DATA_MAX) why = "too long";
  else if (!put(m, fd)) why = "no room";
  if (!why) return;
  note("an answer of %u bytes in slot %u is not kept: %s", m->bytes.len, m->bytes.slot, why);
  if (fd >= 0) close(fd);
}

static bool is_for(const held_answer *held, uint32_t slot, const wire_read_in *in) {
  return held->slot == slot && held->fh == in->fh && held->offset == in->offset;
}

/* The first that is for this READ, which is the caller's then; false: there is none, and nothing changed. */
static bool take(uint32_t slot, const wire_read_in *in, held_answer *out) {
  pthread_mutex_lock(&answers_lock);
  uint32_t at = first;
  while (at != end && !is_for(&ring[at % ANSWERS_MAX], slot, in)) at++;
  bool found = at != end;
  if (found) {
    if (at != first) note("%u long answers have lost their replies", at - first);
    for (; first != at; first++) close(ring[first % ANSWERS_MAX].fd);
    *out = ring[first++ % ANSWERS_MAX];
  }
  pthread_mutex_unlock(&answers_lock);
  return found;
}

static bool read_whole(int fd, uint8_t *data, size_t len) {
  for (size_t done = 0; done < len;) {
    ssize_t got = pread(fd, data + done, len - done, (off_t)done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += (size_t)got;
  }
  return true;
}

void answers_send(uint32_t slot, const pending *asked, uint8_t *data) {
  held_answer held;
  int error = EIO;
  size_t len = 0;
  data = device_data(asked->unique, data);
  if (take(slot, &asked->read, &held)) {
    len = held.len < asked->read.size ? held.len : asked->read.size;
    if (read_whole(held.fd, data, len)) error = 0;
    close(held.fd);
  }
  if (error) note("a read of slot %u fails: the bytes of its answer are not here", slot);
  device_reply(asked->unique, error, data, len);
}

void answers_reset(void) {
  for (; first != end; first++) close(ring[first % ANSWERS_MAX].fd);
}
