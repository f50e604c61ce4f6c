/* See births.h. */
#include "births.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../bytes.h"
#include "brake.h"
#include "keeper.h"
#include "nests.h"
#include "rules.h"
#include "view.h"

#ifndef CRADLES_MAX /* the tests build with a small one, which they fill */
#define CRADLES_MAX 1024u
#endif
#define CRADLES_MIN 16u
#define UNFOLDED_MAX (UINT64_C(4) << 20)
#define LOG_MAX (UINT64_C(1) << 39)
#define ATTR_VALID_S 1

struct stream {
  uint64_t id;
  int dir_fd, log_fd;
  uint32_t slot;
  uint64_t next_ino, end_ino;
  bool granted;             /* changes are allowed: the last grant was not of 0 */
  bool bears;               /* and births */
  uint32_t stops;           /* how often they were forbidden: what was looked at before that is out of date */
  uint32_t wanted, ordered; /* cradles there should be; and are being made */
  uint32_t first, ready;    /* of the ring */
  cradle cradles[CRADLES_MAX];
};

pthread_mutex_t births_lock = PTHREAD_MUTEX_INITIALIZER;
static stream streams[STREAMS_MAX];
static uint32_t streams_used;
static intent_page *page;
static uint64_t next_fh;
static uint32_t crc_table[256];

static uint32_t crc32_of(const uint8_t *p, size_t len) {
  if (!crc_table[1]) {
    for (uint32_t i = 0; i < 256; i++) {
      uint32_t c = i;
      for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      crc_table[i] = c;
    }
  }
  uint32_t c = UINT32_MAX;
  while (len--) c = crc_table[(c ^ *p++) & 0xFF] ^ (c >> 8);
  return ~c;
}

/* -- streams, with the lock held -------------------------------------------------------------------------------- */
static stream *stream_find(uint64_t id) {
  for (uint32_t i = 0; i < streams_used; i++)
    if (streams[i].id == id) return &streams[i];
  return NULL;
}

static stream *stream_of(uint64_t nodeid) { return stream_find(nodeid >> STREAM_SHIFT); }

bool births_have_page(void) { return page; }

bool births_have_stream(uint64_t nodeid) { return stream_of(nodeid); }

bool births_stream(uint64_t stream_id, intent_page **with_page, uint32_t *slot, int *log_fd, int *dir_fd) {
  pthread_mutex_lock(&births_lock);
  const stream *s = page ? stream_find(stream_id) : NULL;
  bool found = s && s->log_fd >= 0;
  if (found) *with_page = page, *slot = s->slot, *log_fd = s->log_fd, *dir_fd = s->dir_fd;
  pthread_mutex_unlock(&births_lock);
  return found;
}

void backing_name(uint64_t ino, char name[BACKING_NAME_LEN]) {
  snprintf(name, BACKING_NAME_LEN, "%llu.1", (unsigned long long)ino);
}

/* Removes what was made ahead. With the lock. */
static void empty_cradles(stream *s) {
  char name[BACKING_NAME_LEN];
  for (; s->ready; s->ready--) {
    const cradle *c = &s->cradles[s->first];
    backing_name(c->ino, name);
    unlinkat(s->dir_fd, name, 0);
    finish((aftermath){.fd = c->fd, .backing_id = c->backing_id});
    s->first = (s->first + 1) % CRADLES_MAX;
  }
}

/* -- the end of all --------------------------------------------------------------------------------------------- */
void births_reset(void) {
  pthread_mutex_lock(&births_lock);
  nests_reset();
  for (uint32_t i = 0; i < streams_used; i++) {
    empty_cradles(&streams[i]);
    if (streams[i].dir_fd >= 0) close(streams[i].dir_fd);
    if (streams[i].log_fd >= 0) close(streams[i].log_fd);
  }
  streams_used = 0;
  if (page) munmap(page, sizeof *page);
  page = NULL;
  pthread_mutex_unlock(&births_lock);
}

void births_over(void) {
  pthread_mutex_lock(&births_lock);
  for (uint32_t i = 0; i < streams_used; i++) {
    streams[i].granted = false;
    empty_cradles(&streams[i]);
  }
  pthread_mutex_unlock(&births_lock);
}

/* -- files made ahead ------------------------------------------------------------------------------------------- */
bool births_order(cradle *out, int *dir_fd) {
  bool found = false;
  pthread_mutex_lock(&births_lock);
  for (uint32_t i = 0; i < streams_used && !found; i++) {
    stream *s = &streams[i];
    found = s->granted && s->bears && s->ready + s->ordered < s->wanted && s->next_ino < s->end_ino;
    if (!found) continue;
    *out = (cradle){.ino = s->next_ino++, .fd = -1};
    *dir_fd = s->dir_fd;
    s->ordered++;
  }
  pthread_mutex_unlock(&births_lock);
  return found;
}

bool births_made(const cradle *c, bool made) {
  pthread_mutex_lock(&births_lock);
  stream *s = stream_of(c->ino);
  s->ordered--;
  bool keep = made && s->granted && s->bears;
  if (keep) s->cradles[(s->first + s->ready++) % CRADLES_MAX] = *c;
  else s->wanted = 0; /* no room, perhaps: the next that is missed begins anew */
  pthread_mutex_unlock(&births_lock);
  return keep;
}

/* -- what the daemon says --------------------------------------------------------------------------------------- */
void births_page(int fd) {
  pthread_mutex_lock(&births_lock);
  struct stat st;
  if (!page && fd >= 0 && !fstat(fd, &st) && st.st_size >= (off_t)sizeof *page) {
    void *p = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p != MAP_FAILED) page = p;
  }
  pthread_mutex_unlock(&births_lock);
  if (fd >= 0) close(fd);
}

void births_dir(uint64_t stream_id, uint32_t slot, int fd) {
  pthread_mutex_lock(&births_lock);
  stream *s = stream_find(stream_id);
  if (!s && fd >= 0 && slot < STREAMS_MAX && streams_used < STREAMS_MAX) {
    s = &streams[streams_used++];
    *s = (stream){.id = stream_id, .dir_fd = fd, .log_fd = -1, .slot = slot};
    fd = -1;
  }
  pthread_mutex_unlock(&births_lock);
  if (fd >= 0) close(fd);
}

void births_log(uint64_t stream_id, int fd) {
  int old = fd;
  pthread_mutex_lock(&births_lock);
  stream *s = stream_find(stream_id);
  if (s && fd >= 0) {
    old = s->log_fd;
    s->log_fd = fd;
  }
  pthread_mutex_unlock(&births_lock);
  if (old >= 0) close(old);
}

void births_inos(uint64_t stream_id, uint64_t first, uint64_t count, bool bears) {
  pthread_mutex_lock(&births_lock);
  stream *s = stream_find(stream_id);
  if (s && first >> STREAM_SHIFT == stream_id && (first + count) >> STREAM_SHIFT == stream_id) {
    if (count || bears) {
      s->next_ino = first;
      s->end_ino = first + count;
      s->granted = count > 0; /* with a count of 0 nothing is made here any more */
      s->stops += !count;
    }
    s->bears = bears && count;
    if (!s->bears) empty_cradles(s); /* the disk may need their inodes */
  }
  pthread_mutex_unlock(&births_lock);
}

/* -- records ---------------------------------------------------------------------------------------------------- */
static uint64_t end_of(const stream *s) { return atomic_load(&page->streams[s->slot].end); }

/* A record behind the last of the log, which the daemon appends to, too; false: not written. With the page's lock. */
static bool append(stream *s, uint8_t *record, size_t len) {
  store_u32(record, (uint32_t)len);
  store_u32(record + 4, crc32_of(record + 8, len - 8));
  return page_append(page, s->slot, s->log_fd, record, len);
}

static void tell_daemon(void) {
  if (atomic_exchange(&page->armed, 0)) event_send(EV_BIRTHS, 0, 0, NULL, 0);
}

/* -- a birth ---------------------------------------------------------------------------------------------------- */
typedef struct {
  stream *s;
  cradle in; /* its fd is -1 where the file is still to be made */
  uint64_t fh;
  uint32_t gid, stops;
} claim;

/* With the lock. A file made ahead, or a number to make one for now; whether more should be made ahead. */
static bool take_cradle(stream *s, cradle *out) {
  if (s->ready) {
    *out = s->cradles[s->first];
    s->first = (s->first + 1) % CRADLES_MAX;
    s->ready--;
  } else {
    *out = (cradle){.ino = s->next_ino++, .fd = -1};
    s->wanted = s->wanted < CRADLES_MIN ? CRADLES_MIN : s->wanted < CRADLES_MAX / 2 ? 2 * s->wanted : CRADLES_MAX;
  }
  return s->ready + s->ordered < s->wanted / 2;
}

/* With the lock, and the page. A daemon that falls behind is asked itself: what is not folded stays little. */
static bool has_log_room(const stream *s) {
  return end_of(s) < LOG_MAX && end_of(s) - atomic_load(&page->streams[s->slot].taken) < UNFOLDED_MAX;
}

/* The same; whether there is a log with room for a record, and a number. */
static bool can_bear(const stream *s) {
  return s->log_fd >= 0 && s->granted && s->bears && (s->ready || s->next_ino < s->end_ino) && has_log_room(s);
}

/* Whether a name that its nest has, or that is in no nest, is free all the same: it was unlinked, or renamed. So it stays until the birth
 * is recorded, if `stops` does: the kernel holds the directory's lock. */
static bool is_free(uint64_t dir, span name, uint32_t *gid) {
  view v;
  view_result result;
  inode_row above;
  uint64_t ino;
  do {
    if (!rule_name(name) || !view_begin(&v, dir, ANSWER_CHANGES)) return false;
    result = view_inode(&v, dir, &above);
    if (result == VIEW_FOUND) result = S_ISDIR(above.mode) ? view_name(&v, dir, name, &ino) : VIEW_BROKEN;
    else if (result == VIEW_ABSENT) result = VIEW_BROKEN;
    view_end();
  } while (result == VIEW_OLD);
  if (result == VIEW_ABSENT && above.mode & S_ISGID) *gid = above.gid;
  return result == VIEW_ABSENT;
}

/* An inode number and the name, taken; false: not here. */
static bool claim_birth(const request *r, span name, claim *out) {
  bool can = false, taken = false, low = false;
  *out = (claim){.gid = r->header.gid};
  pthread_mutex_lock(&births_lock);
  stream *s = page ? stream_of(r->header.nodeid) : NULL;
  if (s) out->stops = s->stops;
  can = s && can_bear(s);
  taken = can && nests_take_name(r->header.nodeid, name.at, name.len, &out->gid);
  pthread_mutex_unlock(&births_lock);
  if (!can || (!taken && !is_free(r->header.nodeid, name, &out->gid))) return false;
  pthread_mutex_lock(&births_lock);
  can = can_bear(s); /* or another thread took the last number */
  if (can) {
    out->s = s;
    out->fh = BIRTH_FH | ++next_fh;
    low = take_cradle(s, &out->in);
  }
  pthread_mutex_unlock(&births_lock);
  if (low) keeper_call();
  return can;
}

static bool record_birth(const request *r, const claim *c, const wire_create_in *in, const struct stat *st, span name) {
  uint8_t record[INTENT_LEN + NAME_MAX_LEN + 8] = {0};
  size_t len = (INTENT_LEN + name.len + 7) & ~(size_t)7;
  store_u16(record + 8, INTENT_BORN);
  store_u16(record + 10, (uint16_t)name.len);
  store_u32(record + 12, in->mode);
  store_u64(record + 16, c->in.ino);
  store_u64(record + 24, r->header.nodeid);
  store_u32(record + 32, r->header.uid);
  store_u32(record + 36, c->gid);
  store_u64(record + 40, (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec);
  store_u64(record + 48, c->fh);
  store_u32(record + 56, in->flags);
  memcpy(record + INTENT_LEN, name.at, name.len);
  page_lock(page, 0); /* before births_lock, as a close has them */
  pthread_mutex_lock(&births_lock);
  bool ok = c->s->stops == c->stops && append(c->s, record, len);
  pthread_mutex_unlock(&births_lock);
  if (ok) nests_changed(r->header.nodeid, name.at, name.len); /* of a nest that was begun meanwhile */
  page_unlock(page);
  return ok;
}

/* The backing file, made now or ahead, registered, with the times of now; false: not to be had. */
static bool fill_cradle(const stream *s, cradle *c, const char *name, struct stat *st) {
  if (c->fd >= 0) return !futimens(c->fd, NULL) && !fstat(c->fd, st);
  c->fd = openat(s->dir_fd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  return c->fd >= 0 && !fstat(c->fd, st) && !device_backing_open(c->fd, &c->backing_id);
}

/* Node and handle in the tables, opened; they have descriptor and backing id then. False: there is no room. */
static bool enter_tables(const claim *c) {
  control_message m = {.kind = PROTO_NODE, .nodeid = c->in.ino, .node = {.mode = NODE_PASSTHROUGH, .node_flags = NODE_ALL_PRESENT}};
  uint8_t cookie[PROTO_COOKIE_LEN];
  aftermath after = AFTERMATH_NONE;
  /* A lower bound of where the record will be: it is written last, when nothing can fail any more but itself. */
  pthread_mutex_lock(&births_lock);
  store_u64(cookie, end_of(c->s));
  pthread_mutex_unlock(&births_lock);
  store_u64(cookie + 8, c->in.ino);
  pthread_mutex_lock(&tables_lock);
  node *n = tables_room_for_open() && handle_put(c->in.ino, c->fh, cookie) ? node_put(&m, c->in.fd, &after) : NULL;
  if (n) {
    n->backing_id = c->in.backing_id;
    handle_opened(handle_find(c->in.ino, c->fh));
  } else {
    handle_released(c->in.ino, c->fh);
  }
  pthread_mutex_unlock(&tables_lock);
  finish(after); /* of a node that was there by mistake */
  return n;
}

static void leave_tables(const claim *c) {
  pthread_mutex_lock(&tables_lock);
  handle_released(c->in.ino, c->fh);
  aftermath after = node_drop(c->in.ino);
  pthread_mutex_unlock(&tables_lock);
  finish(after);
}

static void fill_entry(wire_entry_out *out, const request *r, const claim *c, uint32_t mode, const struct stat *st) {
  *out = (wire_entry_out){.nodeid = c->in.ino, .entry_valid = ENTRY_VALID_S, .attr_valid = ATTR_VALID_S};
  out->attr = (wire_attr){.ino = c->in.ino, .mode = mode, .nlink = 1, .uid = r->header.uid, .gid = c->gid, .blksize = 4096,
                          .atime = (uint64_t)st->st_atim.tv_sec, .atimensec = (uint32_t)st->st_atim.tv_nsec,
                          .mtime = (uint64_t)st->st_mtim.tv_sec, .mtimensec = (uint32_t)st->st_mtim.tv_nsec,
                          .ctime = (uint64_t)st->st_ctim.tv_sec, .ctimensec = (uint32_t)st->st_ctim.tv_nsec};
}

static void released(uint64_t nodeid, uint64_t fh);

static void answer_birth(const request *r, const claim *c, uint32_t mode, const struct stat *st) {
  struct {
    wire_entry_out entry;
    wire_open_out open;
  } out;
  fill_entry(&out.entry, r, c, mode, st);
  out.open = (wire_open_out){
      .fh = c->fh, .open_flags = WIRE_FOPEN_PASSTHROUGH | WIRE_FOPEN_NOFLUSH, .backing_id = c->in.backing_id};
  wire_out_header header = {.len = (uint32_t)(sizeof header + sizeof out), .unique = r->header.unique};
  struct iovec parts[2] = {{&header, sizeof header}, {&out, sizeof out}};
  if (!device_write(channel.dev, parts, 2)) released(c->in.ino, c->fh); /* interrupted: the kernel will not release it */
}

bool births_create(const request *r) {
  wire_create_in in;
  span name = {NULL, 0};
  claim c;
  if (r->body_len > sizeof in) name.len = name_at(r, sizeof in, &name.at);
  if (!name.len || name.len > NAME_MAX_LEN || r->header.total_extlen) return false;
  memcpy(&in, r->body, sizeof in);
  /* O_SYNC promises that the name is durable, too: the daemon syncs its log. */
  if (!S_ISREG(in.mode) || (in.mode & (S_ISUID | S_ISGID)) || (in.flags & (O_SYNC | O_DSYNC))) return false;
  if (!claim_birth(r, name, &c)) return false;
  char path[BACKING_NAME_LEN];
  struct stat st;
  backing_name(c.in.ino, path);
  bool filled = fill_cradle(c.s, &c.in, path, &st), entered = filled && enter_tables(&c);
  if (entered) brake_watch(c.in.ino, c.in.fd, in.flags & O_APPEND ? WATCH_APPEND : 0);
  if (!entered || !record_birth(r, &c, &in, &st, name)) {
    if (entered) leave_tables(&c);
    else finish((aftermath){.fd = c.in.fd, .backing_id = c.in.backing_id});
    unlinkat(c.s->dir_fd, path, 0);
    return false;
  }
  answer_birth(r, &c, in.mode, &st);
  tell_daemon();
  return true;
}

/* -- other changes ---------------------------------------------------------------------------------------------- */
stream *births_begin_change(uint64_t nodeid) {
  if (!page) return NULL;
  page_lock(page, 0);
  pthread_mutex_lock(&births_lock);
  stream *s = stream_of(nodeid);
  if (s && !(s->log_fd >= 0 && s->granted && has_log_room(s))) s = NULL;
  pthread_mutex_unlock(&births_lock);
  if (!s) page_unlock(page);
  return s;
}

void births_end_change(bool recorded) {
  page_unlock(page);
  if (recorded) tell_daemon();
}

bool births_record(stream *s, uint8_t *record, const uint8_t *name, size_t len) {
  size_t size = (INTENT_LEN + len + 7) & ~(size_t)7;
  memset(record + INTENT_LEN, 0, size - INTENT_LEN);
  memcpy(record + INTENT_LEN, name, len);
  store_u16(record + 10, (uint16_t)len);
  return append(s, record, size);
}

uint64_t births_ino(stream *s) {
  pthread_mutex_lock(&births_lock);
  uint64_t ino = s->next_ino < s->end_ino ? s->next_ino++ : 0;
  pthread_mutex_unlock(&births_lock);
  return ino;
}

/* -- its close -------------------------------------------------------------------------------------------------- */
/* Takes the handle out; where its birth was recorded at the earliest, or false: there is no such handle. */
static bool take_handle(uint64_t nodeid, uint64_t fh, uint64_t *born_at) {
  pthread_mutex_lock(&tables_lock);
  const handle *h = handle_find(nodeid, fh);
  if (h) *born_at = load_u64(h->cookie);
  if (h) handle_released(nodeid, fh);
  pthread_mutex_unlock(&tables_lock);
  return h;
}

/* Whether the close is in the log; *unknown: the daemon has not taken the birth. */
static bool record_close(uint64_t nodeid, uint64_t fh, uint64_t born_at, bool *unknown) {
  uint8_t record[INTENT_LEN] = {0};
  pthread_mutex_lock(&births_lock);
  stream *s = stream_of(nodeid);
  *unknown = s && born_at >= atomic_load(&page->streams[s->slot].taken);
  store_u16(record + 8, INTENT_CLOSED);
  store_u64(record + 16, nodeid);
  store_u64(record + 48, fh);
  store_u32(record + 56, *unknown ? INTENT_DROPPED : 0);
  bool ok = s && append(s, record, sizeof record);
  pthread_mutex_unlock(&births_lock);
  return ok;
}

/* The record of a close. The node goes, too, while the daemon has not taken the birth: no other open can rely on it. The
 * page's lock keeps the daemon from taking it in between, and from giving the inode another node before this one went. */
static void released(uint64_t nodeid, uint64_t fh) {
  uint64_t born_at;
  bool unknown;
  aftermath after = AFTERMATH_NONE;
  if (!take_handle(nodeid, fh, &born_at)) return;
  page_lock(page, 0);
  bool ok = record_close(nodeid, fh, born_at, &unknown);
  if (ok && unknown) {
    pthread_mutex_lock(&tables_lock);
    after = node_drop(nodeid);
    pthread_mutex_unlock(&tables_lock);
  }
  page_unlock(page);
  if (!ok) note("the close of a new file could not be recorded: %s", strerror(errno)); /* it stays dirty until the next start */
  if (ok && unknown) keeper_let_go(after);
}

bool births_release(const request *r) {
  wire_release_in in;
  if (r->body_len < sizeof in) return false;
  memcpy(&in, r->body, sizeof in);
  if (!(in.fh & BIRTH_FH)) return false;
  pthread_mutex_lock(&births_lock);
  bool none = !page; /* then nothing was ever born, and the handle is the daemon's */
  pthread_mutex_unlock(&births_lock);
  if (none) return false;
  released(r->header.nodeid, in.fh);
  device_reply(r->header.unique, 0, NULL, 0);
  tell_daemon();
  return true;
}
