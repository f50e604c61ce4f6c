/* The control socket: what the daemon says about nodes and handles, and the answers to its questions.
 *
 * Invariants
 * - Messages are received and applied in one step under control_lock, by whichever thread comes first: the control thread
 *   when one arrives, the reply thread before it looks at a reply. So the daemon's order is the order of effects.
 * - Nothing here waits for a request in progress. A message that is not understood is dropped with one line in the log.
 * - Every descriptor received is in a node, with births, in an answer to come, a segment, or closed.
 *
 * Owner: control_lock, then tables_lock inside it.
 */
#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../bytes.h"
#include "append.h"
#include "births.h"
#include "brake.h"
#include "channel.h"
#include "keeper.h"
#include "names.h"
#include "nests.h"

#define RANGES_MAX 2048      /* of one EV_WRITTEN */
#define WRITTEN_MAX 64       /* EV_WRITTENs of one COLLECT: what is left is told by the next */
#define HANDLES_A_MESSAGE 1024
#define HANDLE_LEN (16 + PROTO_COOKIE_LEN)

static pthread_mutex_t control_lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t dump_seq;
static bool dump_wanted;
static int wake = -1; /* an eventfd: a dump is wanted */

void control_open(void) { wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }

static void put_node(const control_message *m, int fd) {
  uint8_t body[12];
  aftermath after = AFTERMATH_NONE;
  int error = EMFILE;
  if (fd >= 0) {
    pthread_mutex_lock(&tables_lock);
    error = node_put(m, fd, &after) ? 0 : ENFILE;
    pthread_mutex_unlock(&tables_lock);
    finish(after);
    if (error) close(fd);
  }
  if (!error) return;
  note("node %llu not registered: %s", (unsigned long long)m->nodeid, strerror(error));
  store_u64(body, m->nodeid);
  store_u32(body + 8, (uint32_t)error);
  event_send(EV_REFUSED, 0, m->seq, body, sizeof body);
}

static void clear(const control_message *m) {
  bool again = false;
  pthread_mutex_lock(&tables_lock);
  node *n = node_find(m->nodeid);
  bool due = !n || node_clear(n, m->blocks.first, m->blocks.count, m->seq, &again);
  pthread_mutex_unlock(&tables_lock);
  if (!n) keeper_settle(); /* a lease can be asked for on what was dropped before */
  if (due || again) event_send(EV_CLEARED, again ? PROTO_AGAIN : 0, m->seq, NULL, 0);
}

static void collect(const control_message *m) {
  uint8_t body[28], ranges[RANGES_MAX * 16];
  uint64_t at = 0, first, count;
  for (int sent = 1;; sent++) {
    uint32_t n_ranges = 0;
    uint16_t flags = 0;
    uint64_t written = 0, budget = 0;
    pthread_mutex_lock(&tables_lock);
    node *n = node_find(m->nodeid);
    if (n) {
      written = n->written_bytes;
      budget = n->budget_bytes;
      flags = n->untracked ? PROTO_UNTRACKED : 0;
      n->written_bytes = 0;
      n->untracked = false;
      while (n_ranges < RANGES_MAX && bitmap_next(&n->dirty, at, &first, &count)) {
        bitmap_clear(&n->dirty, first, count);
        store_u64(ranges + 16 * n_ranges, first);
        store_u64(ranges + 16 * n_ranges + 8, count);
        n_ranges++;
        at = first + count;
      }
      if (n_ranges == RANGES_MAX && bitmap_next(&n->dirty, at, &first, &count))
        flags |= sent == WRITTEN_MAX ? PROTO_AGAIN : PROTO_MORE;
    }
    pthread_mutex_unlock(&tables_lock);
    store_u64(body, m->nodeid);
    store_u64(body + 8, written);
    store_u64(body + 16, budget);
    store_u32(body + 24, n_ranges);
    event_send2(EV_WRITTEN, flags, m->seq, body, sizeof body, ranges, 16 * (size_t)n_ranges);
    if (!(flags & PROTO_MORE)) return;
  }
}

/* An upcall's answer. TMPFILE opens a file, as CREATE does. */
static void answer_upcall(const control_message *m) {
  static uint8_t buf[PROTO_MESSAGE_MAX + sizeof(wire_out_header)]; /* under control_lock */
  pending asked;
  uint64_t nodeid, fh;
  pthread_mutex_lock(&tables_lock);
  bool known = pending_find(m->reply.unique, false, &asked) && asked.upcall && pending_find(m->reply.unique, true, &asked);
  pthread_mutex_unlock(&tables_lock);
  if (!known) {
    note("an answer to upcall %llu, which is not waiting", (unsigned long long)m->reply.unique);
    return;
  }
  size_t len = sizeof(wire_out_header) + m->reply.payload_len;
  wire_out_header header = {.len = (uint32_t)len, .error = m->reply.error, .unique = asked.unique};
  memcpy(buf, &header, sizeof header);
  memcpy(buf + sizeof header, m->reply.payload, m->reply.payload_len);
  nests_answered(&asked, buf, len);
  bool opened = asked.opcode == WIRE_TMPFILE && open_patch(buf, len, &asked, &nodeid, &fh);
  struct iovec part = {buf, len};
  if (!device_write(channel.dev, &part, 1) && opened) {
    pthread_mutex_lock(&tables_lock);
    handle_released(nodeid, fh);
    pthread_mutex_unlock(&tables_lock);
  }
}

static void nest(const control_message *m) {
  int result = nests_change(m->nodeid, m->nest.action, m->nest.flags & 1, m->nest.gid, m->seq);
  if (result != 1) event_send(EV_NEST, result ? PROTO_AGAIN : 0, m->seq, NULL, 0);
}

/* The catalog to answer names from, and how they look. */
static void open_catalog(const control_message *m) {
  char path[PROTO_MESSAGE_MAX];
  uint8_t body[4];
  told_as as = {.has_uid = m->nodeid & CATALOG_UID, .has_gid = m->nodeid & CATALOG_GID, .uid = m->catalog.uid, .gid = m->catalog.gid,
                .umask = m->catalog.umask, .follows = m->nodeid & CATALOG_FOLLOWS};
  memcpy(path, m->catalog.path, m->catalog.path_len);
  path[m->catalog.path_len] = 0;
  names_look(&as);
  store_u32(body, (uint32_t)view_open(path));
  event_send(EV_CATALOG, 0, m->seq, body, sizeof body);
}

static void probe(const control_message *m, int fd) {
  uint8_t body[4];
  int32_t id;
  int error = fd < 0 ? EBADF : device_backing_open(fd, &id);
  if (!error) device_backing_close(id);
  if (fd >= 0) close(fd);
  store_u32(body, (uint32_t)error);
  event_send(EV_PROBED, 0, m->seq, body, sizeof body);
}

void control_apply(const control_message *m, int fd) {
  aftermath after = AFTERMATH_NONE;
  if (m->kind == PROTO_NODE) return put_node(m, fd);
  if (m->kind == PROTO_PROBE) return probe(m, fd);
  if (m->kind == PROTO_BYTES) return answers_put(m, fd);
  if (m->kind == PROTO_APPEND) return append_give(m, fd);
  if (m->kind == PROTO_BRAKE) return brake_open(m, fd);
  if (m->kind == PROTO_BIRTH_PAGE) return births_page(fd);
  if (m->kind == PROTO_BIRTH_DIR) return births_dir(m->nodeid, m->caps_on, fd);
  if (m->kind == PROTO_BIRTH_LOG) return births_log(m->nodeid, fd);
  if (fd >= 0) {
    note("a descriptor with message %u, which takes none", m->kind);
    close(fd);
  }
  switch (m->kind) {
    case PROTO_CLEAR: return clear(m);
    case PROTO_BIRTH_INOS: return births_inos(m->nodeid, m->blocks.first, m->blocks.count, !(m->flags & 1));
    case PROTO_NAMES: return nests_names(m->nodeid, m->reply.payload, m->reply.payload_len);
    case PROTO_NEST: return nest(m);
    case PROTO_CATALOG: return open_catalog(m);
    case PROTO_TREE:
      if (!view_tree(m->nodeid, m->caps_on)) note("the tree of tenant %llu is not read here", (unsigned long long)m->nodeid);
      return;
    case PROTO_COLLECT: return collect(m);
    case PROTO_REPLY: return answer_upcall(m);
    case PROTO_ROOM: return brake_room(m);
    case PROTO_GROWN: return brake_grown(m);
    case PROTO_EXPECT: return brake_expect(m);
    case PROTO_DENY: return brake_deny(m);
    case PROTO_CLAIM: return brake_claim(m);
    case PROTO_UNCLAIM: return brake_unclaim(m);
    case PROTO_PASS: return brake_pass(m);
    case PROTO_APPEND_ROOM: return append_room(m);
    case PROTO_APPEND_TAKE: return append_take(m);
    case PROTO_APPEND_STATE: return append_tell(m);
    case PROTO_APPEND_HANDLE: return append_handle(m);
    case PROTO_APPEND_PARTIAL: return append_partial(m);
    case PROTO_DUMP: /* many messages: the control thread's, so that the reply thread is never held up by them */
      dump_seq = m->seq;
      dump_wanted = true;
      eventfd_write(wake, 1);
      return;
    default: break;
  }
  bool ok = true;
  pthread_mutex_lock(&tables_lock);
  node *n = node_find(m->nodeid);
  switch (m->kind) {
    case PROTO_HANDLE: ok = handle_put(m->nodeid, m->handle.fh, m->handle.cookie); break;
    case PROTO_BLOCKS:
      if (n) node_blocks(n, m->blocks.first, m->blocks.count);
      break;
    case PROTO_COMING:
      if (n) n->coming_first = m->blocks.first, n->coming_end = m->blocks.first + m->blocks.count;
      break;
    case PROTO_GRANT:
      if (n) n->budget_bytes = m->grant_bytes > UINT64_MAX - n->budget_bytes ? UINT64_MAX : n->budget_bytes + m->grant_bytes;
      break;
    case PROTO_DROP: after = node_drop(m->nodeid); break;
    case PROTO_WATCH:
      if (n && n->mode == NODE_PASSTHROUGH) brake_watch(n->id, n->fd, m->caps_on);
      break;
    case PROTO_CAPS: caps_set(m->nodeid, m->caps_on); break;
    default: break;
  }
  pthread_cond_broadcast(&tables_changed);
  pthread_mutex_unlock(&tables_lock);
  if (!ok) note("handle %llu of node %llu: the table is full", (unsigned long long)m->handle.fh, (unsigned long long)m->nodeid);
  finish(after);
}

/* The first descriptor that came along, or -1; further ones are closed. */
static int fd_of(struct msghdr *message) {
  int fd = -1;
  for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < n; i++) {
      int got;
      memcpy(&got, CMSG_DATA(c) + i * sizeof got, sizeof got);
      if (fd < 0) fd = got;
      else close(got);
    }
  }
  return fd;
}

/* Applies what has arrived; called with the lock. */
static void drain(void) {
  static uint8_t buf[PROTO_MESSAGE_MAX + 1];
  for (;;) {
    char room[CMSG_SPACE(MESSAGE_FDS_MAX * sizeof(int))];
    struct iovec part = {buf, sizeof buf};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t len = recvmsg(channel.control, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (len < 0 && errno == EINTR) continue;
    if (len < 0 && errno == EAGAIN) return;
    if (len < 0) daemon_gone("control");
    int fd = fd_of(&message);
    if (len == 0) {
      struct pollfd at = {.fd = channel.control, .events = POLLIN | POLLRDHUP};
      if (poll(&at, 1, 0) > 0 && (at.revents & (POLLRDHUP | POLLHUP | POLLERR))) daemon_gone("control");
    }
    control_message m;
    if (!(message.msg_flags & MSG_TRUNC) && control_decode(buf, (size_t)len, &m)) {
      control_apply(&m, fd);
      continue;
    }
    note("a control message of %zd bytes that is none", len);
    if (fd >= 0) close(fd);
  }
}

void control_drain(void) {
  pthread_mutex_lock(&control_lock);
  drain();
  pthread_mutex_unlock(&control_lock);
}

static void dump(uint32_t seq) {
  uint8_t body[HANDLES_A_MESSAGE * HANDLE_LEN];
  uint32_t slot = 0;
  const handle *h;
  do {
    size_t len = 0;
    pthread_mutex_lock(&tables_lock);
    while (len < sizeof body && (h = handle_next(&slot))) {
      store_u64(body + len, h->nodeid);
      store_u64(body + len + 8, h->fh);
      memcpy(body + len + 16, h->cookie, PROTO_COOKIE_LEN);
      len += HANDLE_LEN;
    }
    pthread_mutex_unlock(&tables_lock);
    if (len) event_send(EV_HANDLE, 0, seq, body, len);
    if (len < sizeof body) break;
  } while (true);
  event_send(EV_DUMPED, 0, seq, NULL, 0);
}

void *control_thread(void *unused) {
  (void)unused;
  for (;;) {
    struct pollfd at[2] = {{.fd = channel.control, .events = POLLIN | POLLRDHUP}, {.fd = wake, .events = POLLIN}};
    if (poll(at, 2, -1) < 0) continue;
    eventfd_t woken;
    if (at[1].revents) eventfd_read(wake, &woken);
    pthread_mutex_lock(&control_lock);
    drain();
    bool wanted = dump_wanted;
    uint32_t seq = dump_seq;
    dump_wanted = false;
    pthread_mutex_unlock(&control_lock);
    if (wanted) dump(seq);
  }
}
