/* The channel without kernel, daemon and threads: everything but main, mount and the sockets, fed with messages.
 *
 * Holds after every input: each descriptor was closed, each backing id given back, no bitmap and no line kept, nothing tried to end the
 * process, and no event was longer than the protocol allows. What an event tells of a segment is in its file.
 */
#include "harness.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../../bytes.h"
#include "../append.h"
#include "../births.h"
#include "../channel.h"
#include "../keeper.h"
#include "../names.h"
#include "../opens.h"
#include "../uring.h"
#include "segments.h"

#define FILE_LEN (64 * 1024)
#define NODES_SEEN_MAX 4096

channel_state channel = {.dev = -1, .dev_notify = -1, .fuse = -1, .control = -1, .notify = -1, .relay = {-1, -1}};
outside seen;

void channel_gone(uint32_t reason) {
  fprintf(stderr, "ended: %u\n", reason);
  abort();
}
void daemon_gone(const char *what) {
  fprintf(stderr, "ended: %s\n", what);
  abort();
}
void note(const char *format, ...) { (void)format; }

void event_send2(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len, const void *more,
                 size_t more_len) {
  (void)flags, (void)seq;
  CHECK(PROTO_HEADER_LEN + len + more_len <= PROTO_MESSAGE_MAX);
  if (kind == EV_APPENDED) segment_told(body, len);
  volatile uint8_t sum = 0; /* the sanitizer looks at every byte */
  for (size_t i = 0; i < len; i++) sum ^= ((const uint8_t *)body)[i];
  for (size_t i = 0; i < more_len; i++) sum ^= ((const uint8_t *)more)[i];
  seen.events++;
  seen.last_event = kind;
}
void event_send(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len) {
  event_send2(kind, flags, seq, body, len, NULL, 0);
}
bool event_try(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len) {
  event_send2(kind, flags, seq, body, len, NULL, 0);
  return true;
}

void device_reply(uint64_t unique, int error, const void *payload, size_t len) {
  (void)unique;
  CHECK(error >= 0 && len <= REQUEST_DATA_MAX);
  volatile uint8_t sum = 0;
  for (size_t i = 0; !error && i < len; i++) sum ^= ((const uint8_t *)payload)[i];
  seen.replies++;
  seen.last_error = error;
  seen.last_reply_len = error ? 0 : len < sizeof seen.last_reply ? len : sizeof seen.last_reply;
  if (seen.last_reply_len) memcpy(seen.last_reply, payload, seen.last_reply_len);
}
bool device_write(int fd, const struct iovec *parts, int n) {
  (void)fd;
  CHECK(n >= 1 && parts->iov_len >= sizeof(wire_out_header));
  wire_out_header header;
  size_t len = 0;
  memcpy(&header, parts->iov_base, sizeof header);
  for (int i = 0; i < n; i++) len += parts[i].iov_len;
  CHECK(header.len == len);
  seen.replies++;
  CHECK(header.error <= 0 && header.error > -WIRE_ERRORS_MAX);
  seen.last_error = -header.error;
  seen.last_reply_len = parts->iov_len < sizeof seen.last_reply ? parts->iov_len : sizeof seen.last_reply;
  memcpy(seen.last_reply, parts->iov_base, seen.last_reply_len);
  return header.unique % 7 != 3; /* some are not wanted any more */
}
int device_backing_open(int fd, int32_t *id) {
  CHECK(fd >= 0);
  if (seen.backing_error) return seen.backing_error;
  *id = (int32_t)++seen.backings_open;
  return 0;
}
void device_backing_close(int32_t id) {
  CHECK(id > 0 && seen.backings_open > 0);
  seen.backings_open--;
}
void device_read_ahead(void) {}
uint8_t *device_data(uint64_t unique, uint8_t *otherwise) { return (void)unique, otherwise; }

bool uring_open(uint32_t kernel_minor, uint32_t kernel_flags2) { return kernel_minor && (kernel_flags2 & WIRE2_OVER_IO_URING); }
void uring_begin(void) {}
void uring_unpin(void) {}
uring_state uring_status(void) { return (uring_state){.why = "no kernel"}; }

int backing_new(void) {
  static int file = -1;
  if (file < 0) {
    struct rlimit small = {1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &small);
    signal(SIGXFSZ, SIG_IGN);
    file = memfd_create("backing", MFD_CLOEXEC);
    CHECK(file >= 0 && ftruncate(file, FILE_LEN) == 0);
  }
  return dup(file);
}

/* The page and the first log of an input, which have files of their own: records would lie over the page else. */
static intent_page *page;
static int log_fd = -1;
static uint32_t log_slot;

static int shared_new(control_message *m) {
  if (m->kind == PROTO_APPEND) return segment_new(m);
  if (m->kind != PROTO_BIRTH_PAGE && m->kind != PROTO_BIRTH_LOG) return backing_new();
  int fd = memfd_create("shared", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, m->kind == PROTO_BIRTH_PAGE ? (off_t)sizeof(intent_page) : FILE_LEN) == 0);
  if (m->kind == PROTO_BIRTH_LOG && log_fd < 0) CHECK((log_fd = dup(fd)) >= 0);
  if (m->kind == PROTO_BIRTH_PAGE && !page) {
    page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(page != MAP_FAILED);
  }
  return fd;
}

static void shared_reset(void) {
  if (page) munmap(page, sizeof *page);
  if (log_fd >= 0) close(log_fd);
  page = NULL;
  log_fd = -1;
  log_slot = 0;
}

/* As the daemon does it. */
static void intent_put(const uint8_t *record, size_t len) {
  if (!page || log_fd < 0 || atomic_load(&page->streams[log_slot].end) > FILE_LEN) return;
  CHECK(page_lock(page, 1));
  page_append(page, log_slot, log_fd, record, len);
  page_unlock(page);
}

static uint64_t nodes_seen[NODES_SEEN_MAX];
static size_t n_seen;

static void step(uint8_t what, uint8_t flags, const uint8_t *data, size_t len) {
  static uint8_t room[REQUEST_DATA_MAX + REQUEST_HEADERS_MAX];
  uint8_t *exact = malloc(len ? len : 1); /* of its very length: a read past it is seen */
  CHECK(exact);
  memcpy(exact, data, len);
  if (what == STEP_CONTROL) {
    control_message m;
    bool known = control_decode(exact, len, &m);
    int fd = !(flags & WITH_FD) ? -1 : known ? shared_new(&m) : backing_new();
    if (known) {
      if (m.kind == PROTO_BIRTH_DIR && log_fd < 0 && m.caps_on < STREAMS_MAX) log_slot = m.caps_on;
      if (m.kind == PROTO_NODE && n_seen < NODES_SEEN_MAX) nodes_seen[n_seen++] = m.nodeid;
      if (m.kind == PROTO_NODE && n_seen == NODES_SEEN_MAX) m.kind = PROTO_DROP;
      control_apply(&m, fd);
    } else if (fd >= 0) {
      close(fd);
    }
  } else if (what == STEP_REQUEST) {
    channel.upcall_names = flags & 1;
    request_handle(exact, len, room);
    if (len % 2) keeper_round();
  } else if (what == STEP_ROW) {
    fake_put(exact, len);
  } else if (what == STEP_INTENT) {
    intent_put(exact, len);
  } else {
    seen.backing_error = flags & 2 ? EPERM : 0;
    reply_handle(exact, len, room);
  }
  free(exact);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static bool opened;
  if (!opened) tables_open(16, 16, 16);
  opened = true;
  close(backing_new());
  int lowest = dup(STDERR_FILENO);
  close(lowest);
  seen = (outside){0};
  n_seen = 0;
  for (size_t at = 0; size - at >= STEP_HEADER_LEN;) {
    size_t len = load_u16(data + at + 2);
    if (len > size - at - STEP_HEADER_LEN) len = size - at - STEP_HEADER_LEN;
    step(data[at] % STEPS, data[at + 1], data + at + STEP_HEADER_LEN, len);
    at += STEP_HEADER_LEN + len;
  }
  for (size_t i = 0; i < n_seen; i++) {
    control_message drop = {.kind = PROTO_DROP, .nodeid = nodes_seen[i]};
    control_apply(&drop, -1);
  }
  keeper_settle();
  view_reset();
  listing_reset();
  fake_reset();
  opens_reset();
  births_reset();
  append_reset();
  segments_reset();
  shared_reset();
  answers_reset();
  CHECK(seen.backings_open == 0);
  CHECK(bitmap_bytes_used() == 0 && append_bytes_used() == 0);
  int again = dup(STDERR_FILENO);
  CHECK(again == lowest);
  close(again);
  tables_reset();
  return 0;
}
