/* Between the kernel and libfuse: workers carry requests one way, the reply thread answers the other way.
 *
 * Invariants
 * - A message is forwarded whole and unchanged, but for the replies patch.c rewrites.
 * - Before a reply is looked at, everything the daemon sent on the control socket earlier has been applied.
 * - No worker and not the reply thread ever waits for a page lock: notifications are the notify thread's.
 * - ENODEV from /dev/fuse is the end of the mount, end of file on the socket the end of the daemon.
 *
 * Owner: each thread owns its buffers; `offer` is written by the worker that reads INIT before it forwards it.
 */
#include <errno.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../bytes.h"
#include "append.h"
#include "brake.h"
#include "channel.h"
#include "nests.h"
#include "opens.h"
#include "uring.h"

static init_offer offer;

static uint8_t *buffer_new(void) {
  void *p = mmap(NULL, BUFFER_LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

#define NO_MEMORY_TRIES 2000
#define NO_MEMORY_US 1000

/* A long message takes pages in a row, which the kernel may not find at once. */
static void forward(const request *r) {
  int tries = 0;
  while (send(channel.fuse, r->raw, r->raw_len, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if ((errno == ENOBUFS || errno == ENOMEM) && tries++ < NO_MEMORY_TRIES) {
      usleep(NO_MEMORY_US);
      continue;
    }
    if (errno == EPIPE || errno == ECONNRESET) daemon_gone("fuse");
    note("request %u of %zu bytes not forwarded: %s", r->header.opcode, r->raw_len, strerror(errno));
    if (r->header.opcode != WIRE_FORGET && r->header.opcode != WIRE_BATCH_FORGET) device_reply(r->header.unique, EIO, NULL, 0);
    return;
  }
}

/* Notes what the answer will need; false: already answered, because no room is left to handle the answer right. */
static bool before_forward(const request *r) {
  bool go_on = true, minds = nests_minds(r);
  pthread_mutex_lock(&tables_lock);
  switch (r->header.opcode) {
    case WIRE_INIT:
      init_offer_from(r->body, r->body_len, &offer);
      pending_put(r->header.unique, 0, WIRE_INIT, false);
      break;
    case WIRE_OPEN:
    case WIRE_CREATE:
      go_on = tables_room_for_open() && pending_put(r->header.unique, r->header.nodeid, r->header.opcode, false);
      break;
    case WIRE_RELEASE: {
      wire_release_in in;
      if (r->body_len >= sizeof in) {
        memcpy(&in, r->body, sizeof in);
        handle_released(r->header.nodeid, in.fh);
      }
      break;
    }
    case WIRE_READ: {
      wire_read_in in;
      if (r->body_len >= sizeof in && pending_put(r->header.unique, r->header.nodeid, WIRE_READ, false)) {
        memcpy(&in, r->body, sizeof in);
        pending_read(r->header.unique, &in);
      }
      break;
    }
    case WIRE_OPENDIR: pending_put(r->header.unique, r->header.nodeid, WIRE_OPENDIR, false); break;
    case WIRE_SETATTR: go_on = pending_put(r->header.unique, r->header.nodeid, WIRE_SETATTR, false); break;
    default:
      if (minds) go_on = pending_put(r->header.unique, r->header.nodeid, r->header.opcode, false);
      break;
  }
  pthread_mutex_unlock(&tables_lock);
  if (go_on) nests_forwarded(r);
  if (go_on && (r->header.opcode == WIRE_OPEN || r->header.opcode == WIRE_SETATTR)) opens_tell(r->header.nodeid);
  if (!go_on) device_reply(r->header.unique, ENFILE, NULL, 0);
  return go_on;
}

/* An INTERRUPT of something libfuse never saw: it would keep it for good. */
static bool interrupts_upcall(const request *r) {
  uint64_t unique;
  pending asked;
  if (r->header.opcode != WIRE_INTERRUPT || r->body_len < WIRE_INTERRUPT_IN_LEN) return false;
  memcpy(&unique, r->body, sizeof unique);
  pthread_mutex_lock(&tables_lock);
  bool found = pending_find(unique, false, &asked) && asked.upcall;
  pthread_mutex_unlock(&tables_lock);
  return found || brake_interrupted(unique);
}

void request_handle(const uint8_t *buf, size_t len, uint8_t *data) {
  request r;
  if (!request_parse(buf, len, &r)) {
    note("a request of %zu bytes that is none", len);
    return;
  }
  if (serve(&r, data) || interrupts_upcall(&r) || !before_forward(&r)) return;
  forward(&r);
}

void *worker_thread(void *unused) {
  (void)unused;
  uint8_t *buf = buffer_new(), *data = buffer_new();
  if (!buf || !data) {
    note("no memory for a worker");
    channel_gone(GONE_BROKEN);
  }
  for (;;) {
    ssize_t len = read(channel.dev, buf, BUFFER_LEN);
    if (len < 0) {
      if (errno == EINTR || errno == EAGAIN || errno == ENOENT) continue; /* ENOENT: interrupted before it was read */
      if (errno == ENODEV) channel_gone(GONE_UNMOUNTED);
      if (errno == ECONNABORTED) channel_gone(GONE_ABORTED);
      note("read from /dev/fuse: %s", strerror(errno));
      channel_gone(GONE_BROKEN);
    }
    request_handle(buf, (size_t)len, data);
  }
}

static void tell_transport(void) {
  uint8_t body[8];
  uring_state state = uring_status();
  const char *why = state.queues ? "" : state.why;
  store_u32(body, state.queues);
  store_u32(body + 4, state.enabled);
  event_send2(EV_TRANSPORT, 0, 0, body, sizeof body, why, strlen(why));
}

static void init_answered(const wire_init_out *out) {
  uint8_t body[20];
  store_u32(body, offer.kernel_minor);
  store_u32(body + 4, out->flags);
  store_u32(body + 8, out->flags2);
  store_u32(body + 12, out->max_write);
  store_u32(body + 16, !!(out->flags2 & WIRE2_PASSTHROUGH));
  if (out->flags2 & WIRE2_OVER_IO_URING) uring_begin();
  tell_transport();
  device_read_ahead();
  event_send(EV_INIT, 0, 0, body, sizeof body);
}

/* The daemon brought the blocks of a READ here and leaves the answer to us: so its bytes need not go through the socket.
 * Where they are gone again, it is asked again. */
static void serve_after_all(const pending *asked, uint8_t *data) {
  struct {
    wire_in_header header;
    wire_read_in in;
  } raw = {.header = {.len = sizeof raw, .opcode = WIRE_READ, .unique = asked->unique, .nodeid = asked->nodeid}, .in = asked->read};
  request r;
  if (!request_parse((const uint8_t *)&raw, sizeof raw, &r) || serve_read(&r, device_data(asked->unique, data))) return;
  if (before_forward(&r)) forward(&r);
}

void reply_handle(uint8_t *buf, size_t len, uint8_t *data) {
  wire_out_header header;
  wire_init_out init;
  pending asked;
  uint64_t nodeid, fh;
  bool opened = false, inited = false;
  if (len < sizeof header || (memcpy(&header, buf, sizeof header), header.len != len)) {
    note("a reply of %zu bytes that is none", len);
    return;
  }
  if (!header.unique) { /* a notification of libfuse's own */
    if (send(channel.relay[0], buf, len, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) note("a notification was dropped: %s", strerror(errno));
    return;
  }
  pthread_mutex_lock(&tables_lock);
  bool known = pending_find(header.unique, false, &asked) && !asked.upcall && pending_find(header.unique, true, &asked);
  pthread_mutex_unlock(&tables_lock);
  bool reads = known && asked.opcode == WIRE_READ;
  if (reads && header.error == -PROTO_SERVE) return serve_after_all(&asked, data);
  if (reads && header.error <= -PROTO_HELD && header.error > -PROTO_HELD - PROTO_SLOTS)
    return answers_send((uint32_t)(-header.error - PROTO_HELD), &asked, data);
  if (header.error > 0 || header.error <= -WIRE_ERRORS_MAX) { /* the kernel would not take it, and the caller wait for ever */
    note("a reply with error %d, which is none", header.error);
    header = (wire_out_header){.len = sizeof header, .error = -EIO, .unique = header.unique};
    memcpy(buf, &header, len = sizeof header);
  }
  if (known && asked.opcode == WIRE_INIT) {
    bool uring = !header.error && uring_open(offer.kernel_minor, offer.kernel_flags2);
    inited = !header.error && init_patch(buf, len, &offer, channel.privileged, uring, channel.data_max, &init);
    if (!inited) note("an answer to INIT of %zu bytes, error %d: passed on as it is", len, header.error);
  } else if (known) {
    nests_answered(&asked, buf, len);
    if (asked.opcode == WIRE_OPENDIR) opendir_patch(buf, len, &asked);
    if (asked.opcode == WIRE_OPEN || asked.opcode == WIRE_CREATE) opened = open_patch(buf, len, &asked, &nodeid, &fh);
  }
  struct iovec part = {buf, len};
  bool taken = device_write(channel.dev, &part, 1);
  if (inited && taken) init_answered(&init);
  if (opened && !taken) { /* the kernel will not release it */
    pthread_mutex_lock(&tables_lock);
    handle_released(nodeid, fh);
    pthread_mutex_unlock(&tables_lock);
    append_unopened(nodeid, fh);
  }
}

void *reply_thread(void *unused) {
  (void)unused;
  uint8_t *buf = buffer_new();
  if (!buf) {
    note("no memory for replies");
    channel_gone(GONE_BROKEN);
  }
  for (;;) {
    struct iovec part = {buf, BUFFER_LEN};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    ssize_t len = recvmsg(channel.fuse, &message, MSG_CMSG_CLOEXEC);
    if (len < 0 && errno == EINTR) continue;
    if (len < 0) daemon_gone("fuse");
    if (len == 0) { /* the end, or a message of no bytes */
      struct pollfd at = {.fd = channel.fuse, .events = POLLIN | POLLRDHUP};
      if (poll(&at, 1, 0) > 0 && (at.revents & (POLLRDHUP | POLLHUP | POLLERR))) daemon_gone("fuse");
      continue;
    }
    control_drain();
    if (message.msg_flags & MSG_TRUNC) {
      note("a reply longer than any answer can be");
      continue;
    }
    reply_handle(buf, (size_t)len, buf);
  }
}
