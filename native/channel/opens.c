/* See opens.h. */
#include "opens.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../bytes.h"
#include "view.h"

#define USED_MAX 256
#define USED_EVERY_MS 1000
#define TOLD_MAX 512 /* handles in one EV_OPENED */
#define TOLD_LEN 20
#define PATH_LEN 48

static pthread_mutex_t telling_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t used_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t next_fh; /* under tables_lock */
static uint8_t used[8 * USED_MAX];
static size_t used_count;
static int64_t used_told_ms;

void opens_reset(void) {
  used_count = 0;
  used_told_ms = 0;
  next_fh = 0;
}

/* -- uses ------------------------------------------------------------------------------------------------------- */
static void note_used(uint64_t ino) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  int64_t now_ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
  pthread_mutex_lock(&used_lock);
  if (used_count < USED_MAX) store_u64(used + 8 * used_count++, ino);
  if (used_count == USED_MAX || now_ms - used_told_ms >= USED_EVERY_MS) {
    event_try(EV_USED, 0, 0, used, 8 * used_count);
    used_count = 0;
    used_told_ms = now_ms;
  }
  pthread_mutex_unlock(&used_lock);
}

/* -- nodes of our own, with tables_lock ------------------------------------------------------------------------- */
typedef struct {
  uint64_t fh;
  int32_t backing_id;
  uint64_t generation;
} opened;

/* One more handle of a node of ours; false: no room. */
static bool add_handle(node *n, uint32_t flags, opened *out) {
  uint8_t cookie[PROTO_COOKIE_LEN];
  uint64_t fh = OPEN_FH | ++next_fh;
  store_u64(cookie, n->id);
  store_u64(cookie + 8, flags);
  if (!handle_put(n->id, fh, cookie)) return false;
  handle_opened(handle_find(n->id, fh));
  n->own++;
  atomic_fetch_add(&view_page()->opens[page_slot(n->id)], 1);
  *out = (opened){fh, n->backing_id, n->generation};
  return true;
}

/* The handle goes; with the last one of a node of ours, what that leaves is the caller's to finish. */
static aftermath remove_handle(uint64_t nodeid, uint64_t fh) {
  node *n = node_find(nodeid);
  handle_released(nodeid, fh);
  atomic_fetch_sub(&view_page()->opens[page_slot(nodeid)], 1);
  return n && n->own && !--n->own ? node_drop(nodeid) : AFTERMATH_NONE;
}

typedef enum { OPENS_HERE, OPENS_THERE, OPENS_NEW } whose;

/* Whose the file is: one that is open here has a handle more; one the daemon has, or may be about to have, is its. */
static whose join(uint64_t nodeid, uint32_t flags, opened *out) {
  node *n = node_find(nodeid);
  if (pending_of(nodeid) || (n && !n->own)) return OPENS_THERE;
  if (!tables_room_for_open() || (n && n->own == TOLD_MAX)) return OPENS_THERE;
  return !n ? OPENS_NEW : add_handle(n, flags, out) ? OPENS_HERE : OPENS_THERE;
}

/* -- opening ---------------------------------------------------------------------------------------------------- */
/* What the rows say; false: the file is the daemon's to open. */
static bool look(uint64_t ino, whole_file *out, int *dir_fd) {
  view v;
  view_result result;
  do {
    if (!view_begin(&v, ino, ANSWER_OPENS)) return false;
    result = v.dir_fd >= 0 && view_page() ? view_whole(&v, ino, atomic_load(&view_page()->block_len), out) : VIEW_ABSENT;
    *dir_fd = v.dir_fd;
    view_end();
  } while (result == VIEW_OLD);
  return result == VIEW_FOUND;
}

static bool is_same(const whole_file *a, const whole_file *b) {
  return a->generation == b->generation && a->inode == b->inode && a->size == b->size && a->mtime_ns == b->mtime_ns;
}

/* The backing file, as the rows know it; -1: it is not. A lease on it means that it is about to go. */
static int open_backing(uint64_t ino, const whole_file *file, int dir_fd) {
  char path[PATH_LEN];
  struct stat st;
  snprintf(path, sizeof path, "%llu.%llu", (unsigned long long)ino, (unsigned long long)file->generation);
  int fd = openat(dir_fd, path, O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return -1;
  whole_file found = {.generation = file->generation};
  if (!fstat(fd, &st)) {
    found.inode = (uint64_t)st.st_ino, found.size = (uint64_t)st.st_size;
    found.mtime_ns = (uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec;
  }
  if (is_same(file, &found)) return fd;
  close(fd);
  return -1;
}

/* Node and handle in the tables, with the descriptor and the backing id (NEW); or a handle of what another thread was quicker to put
 * there (HERE); or neither. */
static whose enter(uint64_t ino, uint64_t generation, int fd, int32_t backing_id, uint32_t flags, opened *out) {
  control_message m = {.kind = PROTO_NODE, .nodeid = ino, .node = {.mode = NODE_PASSTHROUGH, .node_flags = NODE_ALL_PRESENT}};
  aftermath after;
  pthread_mutex_lock(&tables_lock);
  whose w = join(ino, flags, out);
  node *n = w == OPENS_NEW ? node_put(&m, fd, &after) : NULL; /* there was none: nothing comes after */
  if (n) n->backing_id = backing_id, n->generation = generation;
  if (n && !add_handle(n, flags, out)) {
    n->fd = -1, n->backing_id = 0;
    node_drop(ino);
    n = NULL;
  }
  pthread_mutex_unlock(&tables_lock);
  return w == OPENS_NEW && !n ? OPENS_THERE : w;
}

static void leave(uint64_t nodeid, uint64_t fh) {
  pthread_mutex_lock(&tables_lock);
  aftermath after = remove_handle(nodeid, fh);
  pthread_mutex_unlock(&tables_lock);
  finish(after);
}

/* A first open of a file that is here whole; false: the daemon's. */
static bool open_new(uint64_t ino, uint32_t flags, opened *out) {
  whole_file file;
  int dir_fd;
  int32_t backing_id;
  if (!look(ino, &file, &dir_fd)) return false;
  int fd = open_backing(ino, &file, dir_fd);
  if (fd < 0) return false;
  if (device_backing_open(fd, &backing_id)) {
    close(fd);
    return false;
  }
  whose w = enter(ino, file.generation, fd, backing_id, flags, out);
  if (w != OPENS_NEW) {
    device_backing_close(backing_id);
    close(fd);
  }
  return w != OPENS_THERE;
}

/* It is open, and counted. Had it been going before that, the page or the rows would say so. */
static bool stays(uint64_t ino, const opened *it) {
  whole_file file;
  int dir_fd;
  return !atomic_load(&view_page()->going[page_slot(ino)]) && look(ino, &file, &dir_fd) && file.generation == it->generation;
}

bool opens_open(const request *r) {
  struct {
    uint32_t flags, open_flags;
  } in;
  opened it;
  uint64_t ino = r->header.nodeid;
  if (r->body_len < sizeof in || !view_page()) return false;
  memcpy(&in, r->body, sizeof in);
  if ((in.flags & O_ACCMODE) != O_RDONLY || (in.flags & O_TRUNC)) return false;
  pthread_mutex_lock(&tables_lock);
  whose w = join(ino, in.flags, &it);
  pthread_mutex_unlock(&tables_lock);
  if (w == OPENS_THERE || (w == OPENS_NEW && !open_new(ino, in.flags, &it))) return false;
  if (!stays(ino, &it)) {
    leave(ino, it.fh);
    return false;
  }
  wire_open_out out = {.fh = it.fh, .open_flags = WIRE_FOPEN_PASSTHROUGH | WIRE_FOPEN_NOFLUSH, .backing_id = it.backing_id};
  wire_out_header header = {.len = (uint32_t)(sizeof header + sizeof out), .unique = r->header.unique};
  struct iovec parts[2] = {{&header, sizeof header}, {&out, sizeof out}};
  if (!device_write(channel.dev, parts, 2)) leave(ino, it.fh); /* interrupted: the kernel will not release it */
  else note_used(ino);
  return true;
}

/* -- closing ---------------------------------------------------------------------------------------------------- */
static bool takes_handle(const request *r, uint64_t *fh) {
  if (r->body_len < sizeof *fh) return false;
  memcpy(fh, r->body, sizeof *fh);
  return *fh & OPEN_FH && view_page();
}

bool opens_release(const request *r) {
  uint64_t fh;
  if (!takes_handle(r, &fh)) return false;
  aftermath after = AFTERMATH_NONE;
  pthread_mutex_lock(&tables_lock);
  const node *n = handle_find(r->header.nodeid, fh) ? node_find(r->header.nodeid) : NULL;
  bool ours = n && n->own;
  if (ours) after = remove_handle(r->header.nodeid, fh);
  else if (handle_find(r->header.nodeid, fh)) atomic_fetch_sub(&view_page()->opens[page_slot(r->header.nodeid)], 1);
  pthread_mutex_unlock(&tables_lock);
  if (!ours) return false; /* the daemon was told of it */
  finish(after);
  device_reply(r->header.unique, 0, NULL, 0);
  return true;
}

bool opens_fsync(const request *r) {
  uint64_t fh;
  return takes_handle(r, &fh);
}

bool opens_copies(const request *r) {
  uint64_t fh;
  return takes_handle(r, &fh);
}

/* -- telling ---------------------------------------------------------------------------------------------------- */
/* The handles of a node of ours, which is the daemon's from here on. With tables_lock. */
static size_t hand_over(node *n, uint8_t *rows) {
  uint32_t slot = 0;
  size_t count = 0;
  const handle *h;
  while (count < TOLD_MAX && (h = handle_next(&slot)))
    if (h->nodeid == n->id) {
      store_u64(rows + TOLD_LEN * count, h->nodeid);
      store_u64(rows + TOLD_LEN * count + 8, h->fh);
      store_u32(rows + TOLD_LEN * count + 16, (uint32_t)load_u64(h->cookie + 8));
      count++;
    }
  n->own = 0;
  return count;
}

void opens_tell(uint64_t nodeid) {
  uint8_t rows[TOLD_LEN * TOLD_MAX];
  size_t count = 0;
  if (!view_page()) return;
  pthread_mutex_lock(&telling_lock);
  pthread_mutex_lock(&tables_lock);
  node *n = node_find(nodeid);
  if (n && n->own) count = hand_over(n, rows);
  pthread_mutex_unlock(&tables_lock);
  if (count) event_send(EV_OPENED, 0, 0, rows, TOLD_LEN * count);
  pthread_mutex_unlock(&telling_lock);
}
