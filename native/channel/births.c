/* See births.h. Hashes are FNV-1a of 64 bits; two names with one hash cost a forwarded request, nothing else. */
#include "births.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../bytes.h"
#include "index.h"
#include "keeper.h"

#ifndef NESTS_MAX /* the tests build with small ones, which they fill */
#define NESTS_MAX 4096
#define NAMES_MAX (1u << 19)
#endif
#ifndef CRADLES_MAX
#define CRADLES_MAX 1024u
#endif
#define CRADLES_MIN 16u
#define UNFOLDED_MAX (UINT64_C(4) << 20)
#define LOG_MAX (UINT64_C(1) << 30)
#define NAME_MAX_LEN 255
#define STREAM_SHIFT 40
#define ENTRY_VALID_S 3600
#define ATTR_VALID_S 1
#define WAITERS_MAX 256

typedef struct {
  uint64_t dir, key; /* `key` marks its names: never used again */
  bool serving, has_gid, attr_known;
  uint32_t gid;
  uint64_t attr_moves; /* of `moves` when `attr` was learned */
  wire_attr attr;
} nest;

typedef struct {
  uint64_t id;
  int dir_fd, log_fd;
  uint32_t slot;
  uint64_t offset, next_ino, end_ino;
  bool granted;             /* births are allowed: the last grant was not of 0 */
  uint32_t wanted, ordered; /* cradles there should be; and are being made */
  uint32_t first, ready;    /* of the ring */
  cradle cradles[CRADLES_MAX];
} stream;

static pthread_mutex_t births_lock = PTHREAD_MUTEX_INITIALIZER;
static nest nests[NESTS_MAX];
static index_entry nest_entries[2 * NESTS_MAX], name_entries[2 * NAMES_MAX];
static index_table nest_index = {nest_entries, 2 * NESTS_MAX - 1}, name_index = {name_entries, 2 * NAMES_MAX - 1};
static uint32_t nests_used, names_used;
static uint64_t next_key = 1;
static stream streams[STREAMS_MAX];
static uint32_t streams_used;
static birth_page *page;
static uint64_t next_fh;
static uint32_t names_pending; /* forwarded requests that change names and are not answered */
static uint64_t changes;       /* of names by the daemon, begun or answered */
static uint32_t waiting[WAITERS_MAX], waiting_used; /* seqs of NEST_OPENs that wait for names_pending to be 0 */
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

static uint64_t hash_of(const uint8_t *name, size_t len) {
  uint64_t h = UINT64_C(0xCBF29CE484222325);
  while (len--) h = (h ^ *name++) * UINT64_C(0x100000001B3);
  return h;
}

/* -- nests, with the lock held ---------------------------------------------------------------------------------- */
static void forget_all(void) {
  memset(nest_entries, 0, sizeof nest_entries);
  memset(name_entries, 0, sizeof name_entries);
  nests_used = names_used = 0;
}

static nest *nest_find(uint64_t dir) {
  uint32_t slot = index_get(&nest_index, dir, 0);
  return slot == INDEX_NONE ? NULL : &nests[slot];
}

static bool has_name(const nest *n, uint64_t hash) { return index_get(&name_index, n->key, hash) != INDEX_NONE; }

/* False: there was no room, and every nest is forgotten. */
static bool add_name(const nest *n, uint64_t hash) {
  if (has_name(n, hash)) return true;
  if (names_used == NAMES_MAX) {
    forget_all();
    return false;
  }
  index_put(&name_index, n->key, hash, 0);
  names_used++;
  return true;
}

static nest *nest_add(uint64_t dir, bool serving, bool has_gid, uint32_t gid) {
  nest *n = nest_find(dir);
  if (!n) {
    if (nests_used == NESTS_MAX) forget_all();
    n = &nests[nests_used];
    index_put(&nest_index, dir, 0, nests_used++);
  }
  *n = (nest){.dir = dir, .key = next_key++, .serving = serving, .has_gid = has_gid, .gid = gid};
  return n;
}

/* Its slot stays, serving nobody: slots come back when all are forgotten. */
static void nest_end(uint64_t dir) {
  nest *n = nest_find(dir);
  if (n) {
    index_remove(&nest_index, dir, 0);
    n->serving = false;
  }
}

static stream *stream_find(uint64_t id) {
  for (uint32_t i = 0; i < streams_used; i++)
    if (streams[i].id == id) return &streams[i];
  return NULL;
}

void backing_name(uint64_t ino, char name[BACKING_NAME_LEN]) {
  snprintf(name, BACKING_NAME_LEN, "%llu.1", (unsigned long long)ino);
}

/* Removes what was made ahead. */
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

static stream *stream_of(uint64_t nodeid) { return stream_find(nodeid >> STREAM_SHIFT); }

void births_reset(void) {
  pthread_mutex_lock(&births_lock);
  forget_all();
  for (uint32_t i = 0; i < streams_used; i++) {
    empty_cradles(&streams[i]);
    if (streams[i].dir_fd >= 0) close(streams[i].dir_fd);
    if (streams[i].log_fd >= 0) close(streams[i].log_fd);
  }
  streams_used = names_pending = waiting_used = 0;
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

bool births_order(cradle *out, int *dir_fd) {
  bool found = false;
  pthread_mutex_lock(&births_lock);
  for (uint32_t i = 0; i < streams_used && !found; i++) {
    stream *s = &streams[i];
    found = s->granted && s->ready + s->ordered < s->wanted && s->next_ino < s->end_ino;
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
  bool keep = made && s->granted;
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

void births_log(uint64_t stream_id, uint64_t offset, int fd) {
  int old = fd;
  pthread_mutex_lock(&births_lock);
  stream *s = stream_find(stream_id);
  if (s && fd >= 0) {
    old = s->log_fd;
    s->log_fd = fd;
    s->offset = offset;
  }
  pthread_mutex_unlock(&births_lock);
  if (old >= 0) close(old);
}

void births_inos(uint64_t stream_id, uint64_t first, uint64_t count) {
  pthread_mutex_lock(&births_lock);
  stream *s = stream_find(stream_id);
  /* With a count of 0 nothing is born any more. */
  if (s && first >> STREAM_SHIFT == stream_id && (first + count) >> STREAM_SHIFT == stream_id) {
    s->next_ino = first;
    s->end_ino = first + count;
    s->granted = count > 0;
  }
  pthread_mutex_unlock(&births_lock);
}

int births_nest(uint64_t dir, uint32_t action, bool has_gid, uint32_t gid, uint32_t seq) {
  int result = 0;
  pthread_mutex_lock(&births_lock);
  nest *n = nest_find(dir);
  switch (action) {
    case NEST_OPEN:
      if (!stream_of(dir) || waiting_used == WAITERS_MAX) {
        result = 2;
      } else {
        nest_add(dir, false, has_gid, gid);
        if (names_pending) {
          waiting[waiting_used++] = seq;
          result = 1;
        }
      }
      break;
    case NEST_SERVE:
      if (n) n->serving = true;
      else result = 2;
      break;
    case NEST_END: nest_end(dir); break;
    default: forget_all(); break;
  }
  pthread_mutex_unlock(&births_lock);
  return result;
}

void births_names(uint64_t dir, const uint8_t *packed, size_t len) {
  pthread_mutex_lock(&births_lock);
  nest *n = nest_find(dir);
  while (n && len && len > packed[0]) {
    if (!add_name(n, hash_of(packed + 1, packed[0]))) n = NULL;
    len -= 1u + packed[0];
    packed += 1u + packed[0];
  }
  pthread_mutex_unlock(&births_lock);
}

/* -- names in requests ------------------------------------------------------------------------------------------ */
/* The name that starts at `at` of the body; its length, or 0 where there is none that ends. */
static size_t name_at(const request *r, size_t at, const uint8_t **name) {
  if (at >= r->body_len) return 0;
  *name = r->body + at;
  const uint8_t *end = memchr(*name, 0, r->body_len - at);
  return end ? (size_t)(end - *name) : 0;
}

/* Where a request that adds a name says so: the directory and the name's place. */
static bool target_of(const request *r, uint64_t *dir, const uint8_t **name, size_t *len) {
  size_t at = 0;
  *dir = r->header.nodeid;
  switch (r->header.opcode) {
    case WIRE_SYMLINK: break;
    case WIRE_MKDIR:
    case WIRE_LINK: at = 8; break;
    case WIRE_MKNOD:
    case WIRE_CREATE: at = 16; break;
    case WIRE_RENAME:
    case WIRE_RENAME2: {
      size_t fixed = r->header.opcode == WIRE_RENAME ? 8 : 16;
      if (r->body_len < fixed) return false;
      memcpy(dir, r->body, sizeof *dir);
      const uint8_t *old;
      size_t old_len = name_at(r, fixed, &old);
      at = fixed + old_len + 1;
      break;
    }
    default: return false;
  }
  *len = name_at(r, at, name);
  return *len > 0;
}

static bool changes_names(uint32_t opcode) {
  switch (opcode) {
    case WIRE_SYMLINK:
    case WIRE_MKDIR:
    case WIRE_LINK:
    case WIRE_MKNOD:
    case WIRE_CREATE:
    case WIRE_UNLINK:
    case WIRE_RMDIR:
    case WIRE_RENAME:
    case WIRE_RENAME2: return true;
    default: return false;
  }
}

bool births_minds(const request *r) {
  if (changes_names(r->header.opcode)) return true;
  if (r->header.opcode != WIRE_GETATTR) return false;
  pthread_mutex_lock(&births_lock);
  bool is_nest = nest_find(r->header.nodeid) != NULL;
  pthread_mutex_unlock(&births_lock);
  return is_nest;
}

/* Requests that change directories which they name by their names only: what is known of any of them is old then. */
static uint64_t moves;

static bool moves_unnamed(uint32_t opcode) {
  return opcode == WIRE_RMDIR || opcode == WIRE_RENAME || opcode == WIRE_RENAME2;
}

static void learn_attr(nest *n, const wire_attr *attr) {
  n->attr = *attr;
  n->attr_known = true;
  n->attr_moves = moves;
}

static void forget_attr(uint64_t dir) {
  nest *n = nest_find(dir);
  if (n) n->attr_known = false;
}

uint64_t births_forwarded(const request *r) {
  uint64_t dir;
  const uint8_t *name;
  size_t len;
  pthread_mutex_lock(&births_lock);
  if (r->header.opcode == WIRE_SETATTR) {
    nest_end(r->header.nodeid); /* who owns what is made there may change */
  } else if (changes_names(r->header.opcode)) {
    names_pending++;
    changes++;
    if (moves_unnamed(r->header.opcode)) moves++;
    forget_attr(r->header.nodeid);
    nest *n = target_of(r, &dir, &name, &len) ? nest_find(dir) : NULL;
    if (n) {
      n->attr_known = false;
      add_name(n, hash_of(name, len));
    }
  } else if (r->header.opcode == WIRE_SETXATTR || r->header.opcode == WIRE_REMOVEXATTR) {
    changes++;
    forget_attr(r->header.nodeid);
  }
  uint64_t tag = changes;
  pthread_mutex_unlock(&births_lock);
  return tag;
}

void births_answered(const pending *asked, const uint8_t *reply, size_t len) {
  wire_out_header header;
  wire_entry_out entry;
  wire_attr_out attr;
  memcpy(&header, reply, sizeof header);
  uint32_t due[WAITERS_MAX], n_due = 0;
  pthread_mutex_lock(&births_lock);
  if (changes_names(asked->opcode)) {
    changes++;
    if (names_pending) names_pending--;
    if (!names_pending) {
      memcpy(due, waiting, waiting_used * sizeof due[0]);
      n_due = waiting_used;
      waiting_used = 0;
    }
    /* A new directory is empty: a nest from the start. */
    if (asked->opcode == WIRE_MKDIR && !header.error && len == sizeof header + sizeof entry) {
      memcpy(&entry, reply + sizeof header, sizeof entry);
      if (page && stream_of(entry.nodeid)) {
        nest *n = nest_add(entry.nodeid, true, entry.attr.mode & S_ISGID, entry.attr.gid);
        learn_attr(n, &entry.attr);
      }
    }
  } else if (asked->opcode == WIRE_GETATTR && !header.error && len == sizeof header + sizeof attr) {
    nest *n = nest_find(asked->nodeid);
    memcpy(&attr, reply + sizeof header, sizeof attr);
    if (n && !names_pending && changes == asked->tag) {
      learn_attr(n, &attr.attr);
    }
  }
  pthread_mutex_unlock(&births_lock);
  for (uint32_t i = 0; i < n_due; i++) event_send(EV_NEST, 0, due[i], NULL, 0);
}

/* -- answering -------------------------------------------------------------------------------------------------- */
bool births_lookup(const request *r) {
  const uint8_t *name;
  size_t len = name_at(r, 0, &name);
  if (!len || len > NAME_MAX_LEN || name[0] == '.') return false;
  pthread_mutex_lock(&births_lock);
  const nest *n = nest_find(r->header.nodeid);
  bool absent = n && n->serving && !has_name(n, hash_of(name, len));
  pthread_mutex_unlock(&births_lock);
  if (!absent) return false;
  wire_entry_out out = {.entry_valid = ENTRY_VALID_S};
  device_reply(r->header.unique, 0, &out, sizeof out);
  return true;
}

bool births_getattr(const request *r) {
  wire_attr_out out = {.attr_valid = ENTRY_VALID_S};
  pthread_mutex_lock(&births_lock);
  const nest *n = nest_find(r->header.nodeid);
  bool known = n && n->serving && n->attr_known && n->attr_moves == moves;
  if (known) out.attr = n->attr;
  pthread_mutex_unlock(&births_lock);
  if (known) device_reply(r->header.unique, 0, &out, sizeof out);
  return known;
}

/* A record at the end of the log; false: not written. With the lock. */
static bool append(stream *s, uint8_t *record, size_t len) {
  store_u32(record, (uint32_t)len);
  store_u32(record + 4, crc32_of(record + 8, len - 8));
  ssize_t done;
  do done = pwrite(s->log_fd, record, len, (off_t)s->offset);
  while (done < 0 && errno == EINTR);
  if (done != (ssize_t)len) return false; /* what is there of it is written over, or fails its checksum */
  s->offset += len;
  atomic_store((_Atomic uint64_t *)&page->streams[s->slot].end, s->offset);
  atomic_fetch_add((_Atomic uint64_t *)&page->total, len);
  return true;
}

static void tell_daemon(void) {
  if (atomic_exchange((_Atomic uint32_t *)&page->armed, 0)) event_send(EV_BIRTHS, 0, 0, NULL, 0);
}

typedef struct {
  stream *s;
  cradle in; /* its fd is -1 where the file is still to be made */
  uint64_t fh;
  uint32_t gid;
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

/* An inode number and the name, taken; false: not here. */
static bool claim_birth(const request *r, const uint8_t *name, size_t len, claim *out) {
  bool ok = false, low = false;
  uint64_t hash = hash_of(name, len);
  pthread_mutex_lock(&births_lock);
  nest *n = nest_find(r->header.nodeid);
  stream *s = n && n->serving && page ? stream_of(r->header.nodeid) : NULL;
  if (s && s->log_fd >= 0 && s->granted && (s->ready || s->next_ino < s->end_ino) && s->offset < LOG_MAX && !has_name(n, hash) &&
      s->offset - atomic_load((_Atomic uint64_t *)&page->streams[s->slot].taken) < UNFOLDED_MAX && add_name(n, hash)) {
    *out = (claim){.s = s, .fh = BIRTH_FH | ++next_fh, .gid = n->has_gid ? n->gid : r->header.gid};
    low = take_cradle(s, &out->in);
    ok = true;
  }
  pthread_mutex_unlock(&births_lock);
  if (low) keeper_call();
  return ok;
}

static bool record_birth(const request *r, const claim *c, const wire_create_in *in, const struct stat *st,
                         const uint8_t *name, size_t name_len) {
  uint8_t record[BIRTH_RECORD_LEN + NAME_MAX_LEN + 8] = {0};
  size_t len = (BIRTH_RECORD_LEN + name_len + 7) & ~(size_t)7;
  store_u16(record + 8, BIRTH_BORN);
  store_u16(record + 10, (uint16_t)name_len);
  store_u32(record + 12, in->mode);
  store_u64(record + 16, c->in.ino);
  store_u64(record + 24, r->header.nodeid);
  store_u32(record + 32, r->header.uid);
  store_u32(record + 36, c->gid);
  store_u64(record + 40, (uint64_t)st->st_mtim.tv_sec * 1000000000u + (uint64_t)st->st_mtim.tv_nsec);
  store_u64(record + 48, c->fh);
  store_u32(record + 56, in->flags);
  memcpy(record + BIRTH_RECORD_LEN, name, name_len);
  pthread_mutex_lock(&births_lock);
  bool ok = append(c->s, record, len);
  nest *n = ok ? nest_find(r->header.nodeid) : NULL;
  if (n && n->attr_known) {
    n->attr.mtime = n->attr.ctime = (uint64_t)st->st_mtim.tv_sec;
    n->attr.mtimensec = n->attr.ctimensec = (uint32_t)st->st_mtim.tv_nsec;
  }
  changes += ok; /* an answer about the directory that is on its way is older */
  pthread_mutex_unlock(&births_lock);
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
  store_u64(cookie, c->s->offset);
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
  if (!device_write(channel.dev, parts, 2)) released(c->in.ino, c->fh); /* interrupted: nobody will release it */
}

bool births_create(const request *r) {
  wire_create_in in;
  const uint8_t *name;
  size_t len = r->body_len > sizeof in ? name_at(r, sizeof in, &name) : 0;
  claim c;
  if (!len || len > NAME_MAX_LEN || r->header.total_extlen) return false;
  memcpy(&in, r->body, sizeof in);
  /* O_SYNC promises that the name is durable, too: the daemon syncs its log. */
  if (!S_ISREG(in.mode) || (in.mode & (S_ISUID | S_ISGID)) || (in.flags & (O_SYNC | O_DSYNC))) return false;
  if (!claim_birth(r, name, len, &c)) return false;
  char path[BACKING_NAME_LEN];
  struct stat st;
  backing_name(c.in.ino, path);
  bool filled = fill_cradle(c.s, &c.in, path, &st), entered = filled && enter_tables(&c);
  if (!entered || !record_birth(r, &c, &in, &st, name, len)) {
    if (entered) leave_tables(&c);
    else finish((aftermath){.fd = c.in.fd, .backing_id = c.in.backing_id});
    unlinkat(c.s->dir_fd, path, 0);
    return false;
  }
  answer_birth(r, &c, in.mode, &st);
  tell_daemon();
  return true;
}

/* The record of a close. The node goes, too, while the daemon cannot have heard of it: nobody else can have it open. */
static void released(uint64_t nodeid, uint64_t fh) {
  uint8_t record[BIRTH_RECORD_LEN] = {0};
  uint64_t born_at = 0;
  pthread_mutex_lock(&tables_lock);
  const handle *h = handle_find(nodeid, fh);
  if (h) born_at = load_u64(h->cookie);
  if (h) handle_released(nodeid, fh);
  pthread_mutex_unlock(&tables_lock);
  if (!h) return;
  pthread_mutex_lock(&births_lock);
  stream *s = stream_of(nodeid);
  bool unknown = s && born_at >= atomic_load((_Atomic uint64_t *)&page->streams[s->slot].taken);
  store_u16(record + 8, BIRTH_RELEASED);
  store_u64(record + 16, nodeid);
  store_u64(record + 48, fh);
  store_u32(record + 56, unknown ? BIRTH_DROPPED : 0);
  bool ok = s && append(s, record, sizeof record);
  pthread_mutex_unlock(&births_lock);
  if (!ok) note("the close of a new file could not be recorded: %s", strerror(errno)); /* it stays dirty until the next start */
  if (!ok || !unknown) return;
  pthread_mutex_lock(&tables_lock);
  aftermath after = node_drop(nodeid);
  pthread_mutex_unlock(&tables_lock);
  keeper_let_go(after);
}

bool births_release(const request *r) {
  wire_release_in in;
  if (r->body_len < sizeof in) return false;
  memcpy(&in, r->body, sizeof in);
  if (!(in.fh & BIRTH_FH)) return false;
  pthread_mutex_lock(&births_lock);
  bool none = !page; /* then nothing was ever born, and the handle is somebody else's */
  pthread_mutex_unlock(&births_lock);
  if (none) return false;
  released(r->header.nodeid, in.fh);
  device_reply(r->header.unique, 0, NULL, 0);
  tell_daemon();
  return true;
}
