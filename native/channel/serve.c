/* What the channel answers without the daemon: reads and writes of resident ranges, appends (append.h), ranges of passthrough files, look-ups of
 * xattrs no file has, and what libfuse would refuse.
 *
 * Invariants
 * - A request's own numbers are checked against its length and against what fits before they are used.
 * - A block's bytes are read only between node_enter and node_leave, and only while its bit was set at the enter.
 * - Whatever cannot be answered here (no handle, no bit, no budget, an error from the backing file that the daemon may mend)
 *   goes to the daemon unchanged: the request's bytes are never written to.
 *
 * Owner: the thread that the request came to.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../bytes.h"
#include "append.h"
#include "barrier.h"
#include "births.h"
#include "brake.h"
#include "changes.h"
#include "channel.h"
#include "names.h"
#include "nests.h"
#include "opens.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

#define MAPPED_MIN (128u << 10) /* a shorter answer is copied in less time than it is mapped */

bool request_parse(const uint8_t *buf, size_t len, request *out) {
  if (len < sizeof out->header) return false;
  memcpy(&out->header, buf, sizeof out->header);
  if (out->header.len != len) return false;
  out->raw = buf;
  out->raw_len = len;
  out->body = buf + sizeof out->header;
  out->body_len = len - sizeof out->header;
  return true;
}

/* Copies a request's fixed part out; false where it is cut short. */
#define BODY(r, struct_ptr) ((r)->body_len >= sizeof *(struct_ptr) && memcpy((struct_ptr), (r)->body, sizeof *(struct_ptr)))

static void answer(const request *r, int error, const void *payload, size_t len) {
  device_reply(r->header.unique, error, payload, len);
}

void finish(aftermath after) {
  for (clear_wait *w = after.cleared; w; w = w->next) event_send(EV_CLEARED, 0, w->seq, NULL, 0);
  if (after.cleared) {
    pthread_mutex_lock(&tables_lock);
    clears_release(after.cleared);
    pthread_mutex_unlock(&tables_lock);
  }
  if (after.backing_id) device_backing_close(after.backing_id);
  brake_closing(after.fd);
  if (after.fd >= 0) close(after.fd);
}

static void leave(node *n, unsigned phase) {
  pthread_mutex_lock(&tables_lock);
  aftermath after = node_leave(n, phase);
  pthread_mutex_unlock(&tables_lock);
  finish(after);
}

/* The node behind a table handle, entered; NULL where there is none or `fits` says no. Leaves with `leave`. */
typedef bool node_fits(node *n, const void *arg);

static node *enter(uint64_t nodeid, uint64_t fh, node_fits *fits, const void *arg, unsigned *phase) {
  pthread_mutex_lock(&tables_lock);
  node *n = handle_find(nodeid, fh) ? node_find(nodeid) : NULL;
  if (n && !fits(n, arg)) n = NULL;
  if (n) *phase = node_enter(n);
  pthread_mutex_unlock(&tables_lock);
  return n;
}

static bool fits_read(node *n, const void *arg) {
  const wire_read_in *in = arg;
  return node_present(n, in->offset, in->size);
}

static bool fits_write(node *n, const void *arg) {
  const wire_write_in *in = arg;
  if ((n->flags & NODE_SUID) && (in->write_flags & WIRE_WRITE_KILL_SUIDGID)) return false;
  return node_write_begin(n, in->offset, in->size);
}

static bool fits_whole(node *n, const void *arg) {
  (void)arg;
  return n->mode == NODE_PASSTHROUGH || (n->flags & NODE_ALL_PRESENT);
}

#define COMING_MS 50 /* a READ waits so long for blocks that are being fetched; then the daemon is asked */

int read_waits_max;
static int read_waits; /* under tables_lock */

/* The daemon said that the blocks of this READ are on their way: it need not be asked for each. True: they came. */
static bool blocks_came(const request *r, const wire_read_in *in) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += COMING_MS * 1000000L;
  if (until.tv_nsec >= 1000000000L) until.tv_sec++, until.tv_nsec -= 1000000000L;
  bool here = false, late = false;
  pthread_mutex_lock(&tables_lock);
  while (!here && !late) {
    const node *n = handle_find(r->header.nodeid, in->fh) ? node_find(r->header.nodeid) : NULL;
    if (!n || !node_coming(n, in->offset, in->size)) break;
    here = node_present(n, in->offset, in->size);
    if (here || read_waits >= read_waits_max) break;
    read_waits++;
    late = pthread_cond_timedwait(&tables_changed, &tables_lock, &until) == ETIMEDOUT;
    read_waits--;
  }
  pthread_mutex_unlock(&tables_lock);
  return here;
}

/* A long answer straight out of the page cache: a copy less. Only of a file that keeps still: should pages go between the two
 * calls (a truncation), the kernel would end the request with EIO. False: nothing was sent. */
static bool answer_mapped(const request *r, const node *n, const wire_read_in *in) {
  struct stat st;
  if (in->size < MAPPED_MIN || !atomic_load(&n->still) || atomic_load(&channel.over_rings)) return false;
  if (fstat(n->fd, &st) || in->offset + in->size > (uint64_t)st.st_size) return false;
  void *at = mmap(NULL, in->size, PROT_READ, MAP_SHARED, n->fd, (off_t)in->offset);
  if (at == MAP_FAILED) return false; /* not at a page's start, among others */
  bool here = !madvise(at, in->size, MADV_POPULATE_READ);
  if (here) answer(r, 0, at, in->size);
  munmap(at, in->size);
  return here;
}

/* Of any length: a long answer that is copied where it is asked for is in the processor's cache when the kernel copies it on, and wakes
 * no other core; by way of the pool it took half as long again. */
bool serve_read_now(const request *r, uint8_t *data) {
  wire_read_in in;
  unsigned phase;
  if (!BODY(r, &in) || !in.size || in.size > REQUEST_DATA_MAX) return false;
  node *n = enter(r->header.nodeid, in.fh, fits_read, &in, &phase);
  if (!n) return false;
  size_t done = 0;
  ssize_t got = 1;
  while (done < in.size && got > 0) {
    struct iovec part = {data + done, in.size - done};
    got = preadv2(n->fd, &part, 1, (off_t)(in.offset + done), RWF_NOWAIT);
    if (got > 0) done += (size_t)got;
  }
  leave(n, phase);
  if (got < 0) return false;
  answer(r, 0, data, done);
  return true;
}

bool serve_read(const request *r, uint8_t *data) {
  wire_read_in in;
  unsigned phase;
  if (!BODY(r, &in) || !in.size || in.size > REQUEST_DATA_MAX) return false;
  node *n = enter(r->header.nodeid, in.fh, fits_read, &in, &phase);
  if (!n && blocks_came(r, &in)) n = enter(r->header.nodeid, in.fh, fits_read, &in, &phase);
  if (!n) return false;
  if (answer_mapped(r, n, &in)) {
    leave(n, phase);
    return true;
  }
  size_t done = 0;
  ssize_t got = 1;
  while (done < in.size && got > 0) {
    got = pread(n->fd, data + done, in.size - done, (off_t)(in.offset + done));
    if (got < 0 && errno == EINTR) got = 1;
    else if (got > 0) done += (size_t)got;
  }
  leave(n, phase);
  if (got < 0) return false;
  answer(r, 0, data, done);
  return true;
}

/* A write that must clear suid and sgid goes to the daemon, which cannot see the flag: it is told first. */
static void tell_kill(const request *r, const wire_write_in *in) {
  uint8_t body[8];
  if (!(in->write_flags & WIRE_WRITE_KILL_SUIDGID)) return;
  pthread_mutex_lock(&tables_lock);
  const node *n = node_find(r->header.nodeid);
  bool suid = n && (n->flags & NODE_SUID);
  pthread_mutex_unlock(&tables_lock);
  store_u64(body, r->header.nodeid);
  if (suid) event_send(EV_KILL, 0, 0, body, sizeof body);
}

static bool serve_write(const request *r) {
  wire_write_in in;
  unsigned phase;
  if (!BODY(r, &in) || !in.size || in.size > r->body_len - sizeof in) return false;
  node *n = enter(r->header.nodeid, in.fh, fits_write, &in, &phase);
  if (!n) {
    tell_kill(r, &in);
    return false;
  }
  size_t done = 0;
  int error = 0;
  while (done < in.size && !error) {
    ssize_t put = pwrite(n->fd, r->body + sizeof in + done, in.size - done, (off_t)(in.offset + done));
    if (put > 0) done += (size_t)put;
    else if (put == 0) break;
    else if (errno != EINTR) error = errno;
  }
  pthread_mutex_lock(&tables_lock);
  node_write_end(n, in.offset, in.size, done);
  aftermath after = node_leave(n, phase);
  pthread_mutex_unlock(&tables_lock);
  finish(after);
  if (!done && error == EBADF) return false; /* registered for reading only */
  wire_write_out out = {.size = (uint32_t)done};
  answer(r, done ? 0 : error, &out, sizeof out);
  return true;
}

static bool serve_lseek(const request *r) {
  wire_lseek_in in;
  unsigned phase;
  if (!BODY(r, &in) || (in.whence != SEEK_DATA && in.whence != SEEK_HOLE) || in.offset > INT64_MAX) return false;
  node *n = enter(r->header.nodeid, in.fh, fits_whole, NULL, &phase);
  if (!n) return false;
  off_t at = lseek(n->fd, (off_t)in.offset, (int)in.whence);
  int error = at < 0 ? errno : 0;
  leave(n, phase);
  uint64_t out = (uint64_t)at;
  answer(r, error, &out, sizeof out);
  return true;
}

/* security.* and ACLs: no file has them, and `ls -l` asks for each file; security.capability only of nodes told by CAPS. */
static bool serve_getxattr(const request *r) {
  if (r->body_len <= WIRE_GETXATTR_IN_LEN) return false;
  const char *name = (const char *)r->body + WIRE_GETXATTR_IN_LEN;
  size_t room = r->body_len - WIRE_GETXATTR_IN_LEN;
  if (!memchr(name, 0, room)) return false;
  bool acl = !strncmp(name, "system.posix_acl_", 17);
  if (!acl && strncmp(name, "security.", 9)) return false;
  if (!strcmp(name, "security.capability")) {
    pthread_mutex_lock(&tables_lock);
    bool has = caps_has(r->header.nodeid);
    pthread_mutex_unlock(&tables_lock);
    if (has) return false;
    if (brake_asks(r->header.nodeid, r->header.unique, (pid_t)r->header.pid)) return true;
  }
  answer(r, ENODATA, NULL, 0);
  return true;
}

static bool is_barrier(const request *r) { return r->body_len >= sizeof BARRIER_XATTR && !memcmp(r->body, BARRIER_XATTR, sizeof BARRIER_XATTR); }

/* A write that is denied its room is led here: what it should remove was never there. Or it is a barrier of ours. */
static bool serve_removexattr(const request *r) {
  if (is_barrier(r)) {
    answer(r, ENODATA, NULL, 0);
    return true;
  }
  static const char name[] = "security.capability";
  if (r->body_len < sizeof name || memcmp(r->body, name, sizeof name)) return false;
  int error = brake_denies(r->header.nodeid);
  if (error) answer(r, error, NULL, 0);
  return error;
}

/* Hands a request to the daemon on the control socket, which answers it there; false: no room to remember it. */
static bool hand_up(const request *r) {
  uint8_t head[32];
  if (nests_minds(r)) nests_forwarded(r);
  pthread_mutex_lock(&tables_lock);
  bool room = (r->header.opcode != WIRE_TMPFILE || tables_room_for_open()) &&
              pending_put(r->header.unique, r->header.nodeid, r->header.opcode, true);
  pthread_mutex_unlock(&tables_lock);
  if (!room) return false;
  store_u64(head, r->header.unique);
  store_u32(head + 8, r->header.opcode);
  store_u64(head + 12, r->header.nodeid);
  store_u32(head + 20, r->header.uid);
  store_u32(head + 24, r->header.gid);
  store_u32(head + 28, r->header.pid);
  event_send2(EV_UPCALL, 0, 0, head, sizeof head, r->body, r->body_len);
  return true;
}

static bool fits_upcall(const request *r) { return r->body_len <= PROTO_MESSAGE_MAX - PROTO_HEADER_LEN - 32; }

/* What libfuse cannot ask pyfuse3. */
static bool upcall(const request *r) {
  if (!fits_upcall(r)) answer(r, EIO, NULL, 0);
  else if (!hand_up(r)) answer(r, ENFILE, NULL, 0);
  return true;
}

/* What it could, but slowly; where there is no room it still does. */
static bool upcall_name(const request *r) { return channel.upcall_names && fits_upcall(r) && hand_up(r); }

bool serve(const request *r, uint8_t *data) {
  switch (r->header.opcode) {
    case WIRE_LOOKUP: return nests_lookup(r) || names_lookup(r, data) || upcall_name(r);
    case WIRE_GETATTR: return names_getattr(r, data) || upcall_name(r);
    case WIRE_READLINK: return names_readlink(r, data);
    case WIRE_LISTXATTR: return names_listxattr(r, data);
    case WIRE_OPENDIR: return names_opendir(r);
    case WIRE_READDIRPLUS: return names_readdir(r, data) || upcall_name(r);
    case WIRE_RELEASEDIR: return names_releasedir(r);
    case WIRE_STATFS: /* libfuse does not say of which inode */
    case WIRE_FSYNCDIR: return upcall_name(r);
    case WIRE_CREATE: return births_create(r);
    case WIRE_UNLINK: return changes_unlink(r);
    case WIRE_RMDIR: return changes_rmdir(r);
    case WIRE_RENAME:
    case WIRE_RENAME2: return changes_rename(r);
    case WIRE_LINK: return changes_link(r);
    case WIRE_MKDIR: return changes_mkdir(r);
    case WIRE_SYMLINK: return changes_symlink(r);
    case WIRE_SETATTR: return changes_setattr(r);
    case WIRE_OPEN: return opens_open(r);
    case WIRE_FSYNC: return opens_fsync(r) && upcall(r);
    case WIRE_RELEASE: append_release(r); return births_release(r) || opens_release(r);
    case WIRE_READ: return serve_read(r, data);
    case WIRE_WRITE: return append_write(r, true) || serve_write(r);
    case WIRE_GETXATTR: return serve_getxattr(r) || names_getxattr(r, data);
    case WIRE_SETXATTR: return changes_setxattr(r);
    case WIRE_REMOVEXATTR: return serve_removexattr(r) || changes_removexattr(r);
    case WIRE_LSEEK: return serve_lseek(r) || upcall(r);
    case WIRE_COPY_FILE_RANGE:
    case WIRE_COPY_FILE_RANGE_64:
      if (!opens_copies(r)) return upcall(r);
      answer(r, EOPNOTSUPP, NULL, 0); /* the kernel copies by itself: both ends are files of its own */
      return true;
    case WIRE_FALLOCATE: /* these take room: the daemon reserves it first */
    case WIRE_SYNCFS:
    case WIRE_TMPFILE: return upcall(r);
    case WIRE_IOCTL: answer(r, ENOTTY, NULL, 0); return true; /* ENOSYS would switch ioctls off */
    case WIRE_STATX:
    case WIRE_POLL:
    case WIRE_BMAP: answer(r, ENOSYS, NULL, 0); return true;
    default: return false;
  }
}
