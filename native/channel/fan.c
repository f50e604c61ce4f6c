/* See fan.h. */
#include "fan.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../bytes.h"
#include "channel.h"

#ifndef FAN_PRE_ACCESS
#define FAN_PRE_ACCESS 0x00100000
#endif
#ifndef FAN_MARK_IGNORE
#define FAN_MARK_IGNORE 0x00000400
#endif
#ifndef FAN_REPORT_TID
#define FAN_REPORT_TID 0x00000100
#endif
#define INFO_TYPE_RANGE 6  /* FAN_EVENT_INFO_TYPE_RANGE: header (4), u32 padding, u64 offset, u64 count */
#define INFO_RANGE_LEN 24
#define ERRNO_SHIFT 24     /* FAN_DENY | errno << this */
#define PAGE UINT64_C(4096)
#define EXTENTS_MAX 64     /* of one look at a range; beyond them everything counts as a hole */
#define EVENTS_BYTES 4096

static int group = -1;

int fan_open(int probe) {
  int fd = fanotify_init(FAN_CLASS_PRE_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_QUEUE | FAN_UNLIMITED_MARKS |
                             FAN_REPORT_TID,
                         O_RDONLY | O_CLOEXEC | O_LARGEFILE);
  if (fd < 0) return errno;
  group = fd;
  if (fan_mark(probe)) {
    fan_unmark(probe);
    return 0;
  }
  int error = errno;
  group = -1;
  close(fd);
  return error;
}

int fan_fd(void) { return group; }

bool fan_mark(int fd) { return !fanotify_mark(group, FAN_MARK_ADD, FAN_PRE_ACCESS, fd, NULL); }

void fan_unmark(int fd) {
  fan_ignore(fd, false);
  fanotify_mark(group, FAN_MARK_REMOVE, FAN_PRE_ACCESS, fd, NULL);
}

void fan_ignore(int fd, bool on) {
  unsigned flags = on ? FAN_MARK_ADD | FAN_MARK_IGNORED_SURV_MODIFY : FAN_MARK_REMOVE;
  fanotify_mark(group, flags | FAN_MARK_IGNORE, FAN_PRE_ACCESS, fd, NULL);
}

/* -- events ----------------------------------------------------------------------------------------------------- */
static void range_of(const struct fanotify_event_metadata *m, fan_event *out) {
  const uint8_t *at = (const uint8_t *)m + m->metadata_len, *end = (const uint8_t *)m + m->event_len;
  while (end - at >= 4) {
    uint16_t len = load_u16(at + 2);
    if (len < 4 || len > end - at) return;
    if (at[0] == INFO_TYPE_RANGE && len >= INFO_RANGE_LEN) {
      out->offset = load_u64(at + 8);
      out->length = load_u64(at + 16);
      return;
    }
    at += len;
  }
}

int fan_read(fan_event *out, int max) {
  static char buf[EVENTS_BYTES] __attribute__((aligned(8)));
  /* Never more than there is a place for: what was read must be answered. */
  size_t room = (size_t)max * (sizeof(struct fanotify_event_metadata) + INFO_RANGE_LEN);
  ssize_t len = read(group, buf, room < sizeof buf ? room : sizeof buf);
  int n = 0;
  const struct fanotify_event_metadata *m = (const void *)buf;
  for (; len > 0 && FAN_EVENT_OK(m, len); m = FAN_EVENT_NEXT(m, len)) {
    fan_event e = {.fd = m->fd, .tid = m->pid, .length = UINT64_MAX};
    if (m->fd < 0) continue; /* the queue ran over: cannot be, it is unlimited */
    range_of(m, &e);
    if (e.length == UINT64_MAX || n == max) fan_answer(&e, 0); /* an event without a range is no read or write */
    else out[n++] = e;
  }
  return n;
}

void fan_answer(const fan_event *e, int error) {
  struct fanotify_response response = {.fd = e->fd, .response = error ? FAN_DENY | (uint32_t)error << ERRNO_SHIFT : FAN_ALLOW};
  ssize_t done;
  do done = write(group, &response, sizeof response);
  while (done < 0 && errno == EINTR);
  if (done < 0 && error && errno == EINVAL) { /* an errno this kernel does not pass on */
    response.response = FAN_DENY;
    done = write(group, &response, sizeof response);
  }
  close(e->fd); /* ENOENT: its caller was killed meanwhile */
}

/* -- who, and what ---------------------------------------------------------------------------------------------- */
uint64_t fan_ino(const fan_event *e) {
  char link[40], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", e->fd);
  ssize_t len = readlink(link, path, sizeof path - 1);
  if (len <= 0) return 0;
  path[len] = 0;
  const char *name = strrchr(path, '/');
  return name ? strtoull(name + 1, NULL, 10) : 0;
}

bool fan_is_ours(pid_t tid, pid_t pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/task/%d", (int)pid, (int)tid);
  if (!access(path, F_OK)) return true;
  snprintf(path, sizeof path, "/proc/self/task/%d", (int)tid);
  return !access(path, F_OK);
}

static bool proc_text(pid_t tid, const char *what, char *text, size_t room) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/%s", (int)tid, what);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  ssize_t len = read(fd, text, room - 1);
  close(fd);
  text[len > 0 ? len : 0] = 0;
  return len > 0;
}

bool fan_only_reads(pid_t tid) {
  char text[128];
  if (!proc_text(tid, "syscall", text, sizeof text) || text[0] < '0' || text[0] > '9') return false;
  switch (strtol(text, NULL, 10)) {
    case SYS_read:
    case SYS_pread64:
    case SYS_readv:
    case SYS_preadv:
    case SYS_preadv2:
    case SYS_mmap:
    case SYS_execve:
    case SYS_execveat: return true;
    default: return false;
  }
}

bool fan_splices(pid_t tid, bool otherwise) {
  char text[128];
  if (!proc_text(tid, "syscall", text, sizeof text) || text[0] < '0' || text[0] > '9') return otherwise;
  long call = strtol(text, NULL, 10);
  return call == SYS_splice || call == SYS_sendfile;
}

bool fan_is_alive(pid_t tid) {
  char text[512];
  if (!proc_text(tid, "stat", text, sizeof text)) return false;
  const char *name_end = strrchr(text, ')');
  return name_end && name_end[1] && name_end[2] != 'Z' && name_end[2] != 'X';
}

/* -- what a write takes ------------------------------------------------------------------------------------------ */
static uint64_t up(uint64_t n) { return n > UINT64_MAX - PAGE ? n : (n + PAGE - 1) / PAGE * PAGE; }

uint64_t fan_disk_bytes(int fd) {
  struct stat st;
  return fstat(fd, &st) ? 0 : (uint64_t)st.st_blocks * 512;
}

uint64_t fan_size(int fd) {
  struct stat st;
  return fstat(fd, &st) ? 0 : (uint64_t)st.st_size;
}

/* Bytes of the range without an extent, preallocated ones included; all of it where the filesystem does not say. */
static uint64_t holes_in(int fd, uint64_t start, uint64_t end) {
  struct {
    struct fiemap map;
    struct fiemap_extent extents[EXTENTS_MAX];
  } ask;
  memset(&ask.map, 0, sizeof ask.map);
  ask.map.fm_start = start;
  ask.map.fm_length = end - start;
  ask.map.fm_extent_count = EXTENTS_MAX;
  if (ioctl(fd, FS_IOC_FIEMAP, &ask.map)) return end - start;
  uint64_t held = 0;
  for (uint32_t i = 0; i < ask.map.fm_mapped_extents && i < EXTENTS_MAX; i++) {
    uint64_t low = ask.extents[i].fe_logical, high = low + ask.extents[i].fe_length;
    if (low < start) low = start;
    if (high > end) high = end;
    if (low < high) held += high - low;
  }
  return end - start - held;
}

uint64_t fan_need(int fd, uint64_t offset, uint64_t length, bool append) {
  struct stat st;
  if (!length || offset > INT64_MAX || length > INT64_MAX - offset) return length;
  if (append) return up(length) + PAGE; /* where its end is then is not in the event */
  if (fstat(fd, &st)) return length;
  uint64_t start = offset / PAGE * PAGE, end = up(offset + length), size = up((uint64_t)st.st_size);
  uint64_t blocks = (uint64_t)st.st_blocks * 512;
  if (start >= size && blocks <= size) return end - start; /* at the end of a file, or behind it: the usual writer */
  if (end <= size && blocks >= size) return 0;             /* within a file without holes */
  return holes_in(fd, start, end);
}
