/* See unfolded.h. What was read is in two halves: records go into the young one; when a picture has all of the old one, that is
 * emptied and they change places. So a log that never stands still is forgotten, too. */
#include "unfolded.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../bytes.h"
#include "../sharedpage.h"
#include "births.h"
#include "index.h"

#ifndef OVER_MAX /* the tests build with a small one, which they fill */
#define OVER_MAX 32768u
#endif
#define ARENA_LEN (OVER_MAX * 64u)
#define READ_LEN (64u << 10)

typedef struct {
  uint64_t dir, ino, end;
  uint32_t mode; /* the type alone */
  bool there;
  uint8_t len;
  uint32_t name_at;        /* in the arena */
  uint32_t value_at, value_len; /* of an xattr, there, too */
  uint32_t same, next_of_dir; /* another name with this hash; another one of this directory */
} name_entry;

typedef struct {
  uint64_t ino, end, touched_end;
  bool born, gone;
  inode_row row;
  row_time touched;
  over_field fields[OVER_FIELDS];
  uint32_t first_name; /* of a directory */
  uint32_t target_at, target_len; /* of a symlink, in the arena */
} inode_entry;

typedef struct {
  uint64_t last_end; /* of its last record */
  uint32_t names_used, inodes_used, arena_used;
  index_entry name_entries[2 * OVER_MAX], inode_entries[2 * OVER_MAX];
  name_entry names[OVER_MAX];
  inode_entry inodes[OVER_MAX];
  uint8_t arena[ARENA_LEN];
} half;

typedef struct {
  uint64_t read_to, forgotten_to;
  bool lost;
  half *young, *old;
} overlay;

_Static_assert((OVER_MAX & (OVER_MAX - 1)) == 0, "a power of two");

static pthread_mutex_t unfolded_lock = PTHREAD_MUTEX_INITIALIZER;
static overlay overlays[STREAMS_MAX];

/* -- a half, with the lock held --------------------------------------------------------------------------------- */
static index_table names_of(half *h) { return (index_table){h->name_entries, 2 * OVER_MAX - 1}; }
static index_table inodes_of(half *h) { return (index_table){h->inode_entries, 2 * OVER_MAX - 1}; }

static void empty(half *h) {
  if (h->names_used) memset(h->name_entries, 0, sizeof h->name_entries);
  if (h->inodes_used) memset(h->inode_entries, 0, sizeof h->inode_entries);
  h->names_used = h->inodes_used = h->arena_used = 0;
}

static bool is_empty(const half *h) { return !h->names_used && !h->inodes_used; }

static uint64_t hash_of(span name) {
  uint64_t h = UINT64_C(0xCBF29CE484222325);
  for (size_t i = 0; i < name.len; i++) h = (h ^ name.at[i]) * UINT64_C(0x100000001B3);
  return h;
}

static inode_entry *find_inode(half *h, uint64_t ino) {
  index_table t = inodes_of(h);
  uint32_t slot = index_get(&t, ino, 0);
  return slot == INDEX_NONE ? NULL : &h->inodes[slot];
}

static name_entry *find_name(half *h, uint64_t dir, span name, uint64_t hash) {
  index_table t = names_of(h);
  for (uint32_t slot = index_get(&t, dir, hash); slot != INDEX_NONE; slot = h->names[slot].same) {
    name_entry *e = &h->names[slot];
    if (e->len == name.len && !memcmp(h->arena + e->name_at, name.at, name.len)) return e;
  }
  return NULL;
}

/* NULL: there is no room. */
static inode_entry *have_inode(half *h, uint64_t ino) {
  inode_entry *e = find_inode(h, ino);
  if (e) return e;
  if (h->inodes_used == OVER_MAX) return NULL;
  index_table t = inodes_of(h);
  e = &h->inodes[h->inodes_used];
  *e = (inode_entry){.ino = ino, .first_name = INDEX_NONE};
  index_put(&t, ino, 0, h->inodes_used++);
  return e;
}

static name_entry *have_name(half *h, uint64_t dir, span name) {
  uint64_t hash = hash_of(name);
  name_entry *e = find_name(h, dir, name, hash);
  if (e) return e;
  inode_entry *above = have_inode(h, dir);
  if (!above || h->names_used == OVER_MAX || ARENA_LEN - h->arena_used < name.len) return NULL;
  index_table t = names_of(h);
  uint32_t slot = h->names_used++;
  e = &h->names[slot];
  *e = (name_entry){.dir = dir, .len = (uint8_t)name.len, .name_at = h->arena_used, .same = index_get(&t, dir, hash),
                    .next_of_dir = above->first_name};
  memcpy(h->arena + h->arena_used, name.at, name.len);
  h->arena_used += (uint32_t)name.len;
  above->first_name = slot;
  index_put(&t, dir, hash, slot);
  return e;
}

/* -- records ---------------------------------------------------------------------------------------------------- */
typedef struct {
  uint16_t kind;
  uint32_t mode, uid, gid, flags;
  uint64_t ino, parent, time_ns, fh, other, end;
  span name;
} intent;

static void set_field(inode_entry *e, int field, uint64_t value, uint64_t end) { e->fields[field] = (over_field){end, value}; }

static void touch(inode_entry *e, const intent *i) {
  row_time when = row_time_of_ns(i->time_ns);
  if (!e->touched_end || row_time_before(e->touched, when)) e->touched = when;
  e->touched_end = i->end;
}

typedef struct {
  uint64_t ino;
  uint32_t mode;
} meant;

static meant own(const intent *i) { return (meant){i->ino, i->mode}; }

/* A name of a directory that means this inode now, or no more. */
static bool lay_name(half *h, const intent *i, uint64_t dir, span text, meant what, bool there) {
  name_entry *name = text.len <= 255 ? have_name(h, dir, text) : NULL;
  if (!name) return false;
  name->ino = what.ino;
  name->mode = what.mode & S_IFMT;
  name->there = there;
  name->end = i->end;
  touch(find_inode(h, dir), i);
  return true;
}

static bool lay_links(half *h, uint64_t ino, uint64_t links, uint64_t end) {
  inode_entry *e = links ? have_inode(h, ino) : NULL;
  if (e) set_field(e, OVER_NLINK, links, end);
  return e || !links;
}

/* A file, or a directory: `flags` are the links of the one it is in. */
static bool lay_new(half *h, const intent *i) {
  bool is_dir = i->kind == INTENT_MADE;
  inode_entry *e = have_inode(h, i->ino);
  if (!e || !lay_name(h, i, i->parent, i->name, own(i), true)) return false;
  row_time when = row_time_of_ns(i->time_ns);
  e->born = true;
  e->gone = false;
  e->end = i->end;
  e->row = (inode_row){.ino = i->ino, .mode = (is_dir ? S_IFDIR : S_IFREG) | (i->mode & 07777), .uid = i->uid, .gid = i->gid,
                       .nlink = is_dir ? 2 : 1, .generation = !is_dir, .parent = i->parent, .mtime = when, .ctime = when, .atime = when};
  return !is_dir || lay_links(h, i->parent, i->flags, i->end);
}

/* A name is gone: `uid` links of the inode are left, or, of a removed directory, of the one it was in. */
static bool lay_gone(half *h, const intent *i) {
  bool is_dir = i->kind == INTENT_RMDIR;
  inode_entry *e = have_inode(h, i->ino);
  if (!e || !lay_name(h, i, i->parent, i->name, own(i), false)) return false;
  if (is_dir || !i->uid) {
    e->gone = true;
    e->end = i->end;
  }
  set_field(e, OVER_CTIME, i->time_ns, i->end);
  return lay_links(h, is_dir ? i->parent : i->ino, i->uid, i->end);
}

/* An inode has a name in another directory, or another name. */
static bool lay_moved(half *h, const intent *i, uint64_t ino, uint64_t dir) {
  inode_entry *e = have_inode(h, ino);
  if (!e) return false;
  set_field(e, OVER_CTIME, i->time_ns, i->end);
  set_field(e, OVER_PARENT, dir, i->end);
  return true;
}

/* The names stand one behind the other, with a zero between them. `uid` and `gid`: the links of the directories, where they change. What
 * takes the old name is `other`, of EXCHANGED, whose type is in `flags`; else nothing does. */
static bool lay_renamed(half *h, const intent *i) {
  const uint8_t *zero = memchr(i->name.at, 0, i->name.len);
  if (!zero) return false;
  span old = {i->name.at, (size_t)(zero - i->name.at)}, new = {zero + 1, i->name.len - old.len - 1};
  bool exchanged = i->kind == INTENT_EXCHANGED;
  if (exchanged && !lay_moved(h, i, i->other, i->parent)) return false;
  return lay_moved(h, i, i->ino, i->fh) && lay_name(h, i, i->parent, old, exchanged ? (meant){i->other, i->flags} : own(i), exchanged) &&
         lay_name(h, i, i->fh, new, own(i), true) && lay_links(h, i->parent, i->uid, i->end) && lay_links(h, i->fh, i->gid, i->end);
}

/* `other` lost a name: `flags` links are left. */
static bool lay_replaced(half *h, const intent *i) {
  inode_entry *e = have_inode(h, i->other);
  if (!e) return false;
  if (!i->flags) {
    e->gone = true;
    e->end = i->end;
  }
  set_field(e, OVER_CTIME, i->time_ns, i->end);
  return lay_links(h, i->other, i->flags, i->end) && lay_renamed(h, i);
}

/* One more name; `uid` are the links then. */
static bool lay_linked(half *h, const intent *i) {
  inode_entry *e = have_inode(h, i->ino);
  if (!e || !lay_name(h, i, i->parent, i->name, own(i), true)) return false;
  set_field(e, OVER_CTIME, i->time_ns, i->end);
  return lay_links(h, i->ino, i->uid, i->end);
}

/* The target stands behind the name and a zero. */
static bool lay_symlinked(half *h, const intent *i) {
  const uint8_t *zero = memchr(i->name.at, 0, i->name.len);
  inode_entry *e = zero ? have_inode(h, i->ino) : NULL;
  span name = {i->name.at, zero ? (size_t)(zero - i->name.at) : 0};
  if (!e || !lay_name(h, i, i->parent, name, own(i), true)) return false;
  e->target_at = h->arena_used;
  e->target_len = (uint32_t)(i->name.len - name.len - 1);
  if (ARENA_LEN - h->arena_used < e->target_len) return false;
  memcpy(h->arena + e->target_at, zero + 1, e->target_len);
  h->arena_used += e->target_len;
  row_time when = row_time_of_ns(i->time_ns);
  e->born = true;
  e->gone = false;
  e->end = i->end;
  e->row = (inode_row){.ino = i->ino, .mode = S_IFLNK | 0777, .uid = i->uid, .gid = i->gid, .nlink = 1, .size = e->target_len,
                       .parent = i->parent, .mtime = when, .ctime = when, .atime = when};
  return true;
}

/* `name` is the xattr's; of one that is set its value stands behind it, and a zero. */
static bool lay_xattr(half *h, const intent *i) {
  bool there = i->kind == INTENT_XATTR_SET;
  const uint8_t *zero = there ? memchr(i->name.at, 0, i->name.len) : i->name.at + i->name.len;
  span text = {i->name.at, zero ? (size_t)(zero - i->name.at) : 0};
  inode_entry *e = have_inode(h, i->ino);
  name_entry *name = text.len && text.len <= 255 ? have_name(h, XATTRS_OF(i->ino), text) : NULL;
  if (!e || !name) return false;
  set_field(e, OVER_CTIME, i->time_ns, i->end);
  uint32_t len = there ? (uint32_t)(i->name.len - text.len - 1) : 0;
  if (len > name->value_len) { /* else it goes where the last one was */
    if (ARENA_LEN - h->arena_used < len) return false;
    name->value_at = h->arena_used;
    h->arena_used += len;
  }
  if (len) memcpy(h->arena + name->value_at, zero + 1, len);
  name->value_len = len;
  name->there = there;
  name->end = i->end;
  return true;
}

static bool lay_closed(half *h, const intent *i) {
  inode_entry *e = have_inode(h, i->ino);
  if (e) set_field(e, OVER_CLOSED, 1, i->end);
  return e;
}

static bool lay_set(half *h, const intent *i) {
  inode_entry *e = have_inode(h, i->ino);
  if (!e) return false;
  set_field(e, OVER_CTIME, i->time_ns, i->end);
  if (i->flags & INTENT_SET_MODE) set_field(e, OVER_MODE, i->mode & 07777, i->end);
  if (i->flags & INTENT_SET_UID) set_field(e, OVER_UID, i->uid, i->end);
  if (i->flags & INTENT_SET_GID) set_field(e, OVER_GID, i->gid, i->end);
  if (i->flags & INTENT_SET_ATIME) set_field(e, OVER_ATIME, i->fh, i->end);
  if (i->flags & INTENT_SET_MTIME) set_field(e, OVER_MTIME, i->parent, i->end);
  return true;
}

/* False: there is no room, or it is no record of ours. */
static bool lay(half *h, const intent *i) {
  h->last_end = i->end;
  switch (i->kind) {
    case INTENT_BORN:
    case INTENT_MADE: return lay_new(h, i);
    case INTENT_CLOSED: return lay_closed(h, i);
    case INTENT_UNLINKED:
    case INTENT_RMDIR: return lay_gone(h, i);
    case INTENT_RENAMED:
    case INTENT_EXCHANGED: return lay_renamed(h, i);
    case INTENT_REPLACED: return lay_replaced(h, i);
    case INTENT_LINKED: return lay_linked(h, i);
    case INTENT_SYMLINKED: return lay_symlinked(h, i);
    case INTENT_SET: return lay_set(h, i);
    case INTENT_XATTR_SET:
    case INTENT_XATTR_REMOVED: return lay_xattr(h, i);
    default: return false;
  }
}

/* The record at the start of `data`; how long it is, 0: not whole, or none. */
static size_t parse(const uint8_t *data, size_t len, uint64_t at, intent *out) {
  if (len < INTENT_LEN) return 0;
  size_t size = load_u32(data);
  *out = (intent){.kind = load_u16(data + 8), .mode = load_u32(data + 12), .uid = load_u32(data + 32), .gid = load_u32(data + 36),
                  .ino = load_u64(data + 16), .parent = load_u64(data + 24), .time_ns = load_u64(data + 40), .fh = load_u64(data + 48), .flags = load_u32(data + 56),
                  .other = load_u64(data + 64), .end = at + size, .name = {data + INTENT_LEN, load_u16(data + 10)}};
  return size < INTENT_LEN || size > len || size % 8 || out->name.len > size - INTENT_LEN || out->name.len > INTENT_NAME_MAX ? 0 : size;
}

/* Of a buffer full; how much was taken of it. -1: no room, or something that is no record. */
static ssize_t lay_all(half *h, const uint8_t *data, size_t len, uint64_t at, bool last) {
  size_t done = 0, size;
  intent i;
  while (done < len && (size = parse(data + done, len - done, at + done, &i))) {
    if (!lay(h, &i)) return -1;
    done += size;
  }
  return done == len || (!last && done) ? (ssize_t)done : -1;
}

static bool read_log(overlay *o, int log_fd, uint64_t end) {
  static uint8_t buf[READ_LEN]; /* under the lock */
  while (o->read_to < end) {
    uint64_t want = end - o->read_to < sizeof buf ? end - o->read_to : sizeof buf;
    ssize_t got = pread(log_fd, buf, want, (off_t)o->read_to);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    ssize_t done = lay_all(o->young, buf, (size_t)got, o->read_to, o->read_to + (uint64_t)got >= end);
    if (done < 0) return false;
    o->read_to += (uint64_t)done;
  }
  return true;
}

static bool have_halves(overlay *o) {
  if (!o->young) o->young = calloc(1, sizeof(half));
  if (!o->old) o->old = calloc(1, sizeof(half));
  return o->young && o->old;
}

/* What a picture has by now need not be remembered. */
static void forget(overlay *o, uint64_t folded) {
  if (o->lost && folded < o->read_to) return;
  if (folded >= o->read_to) { /* all of it */
    empty(o->young);
    empty(o->old);
    o->read_to = o->forgotten_to = folded;
    o->lost = false;
  } else if (folded >= o->old->last_end && !is_empty(o->young)) {
    if (!is_empty(o->old)) o->forgotten_to = o->old->last_end;
    half *spare = o->old;
    empty(spare);
    o->old = o->young;
    o->young = spare;
  }
}

over_state unfolded_read(over_view v, int log_fd, uint64_t end) {
  overlay *o = &overlays[v.slot];
  over_state state = OVER_READY;
  pthread_mutex_lock(&unfolded_lock);
  if (!have_halves(o)) {
    state = OVER_LOST;
  } else if (v.folded < o->forgotten_to) {
    state = OVER_OLD;
  } else {
    forget(o, v.folded);
    if (!o->lost && !read_log(o, log_fd, end)) {
      o->lost = true;
      o->read_to = end; /* from here on, once the rows have that much */
    }
    if (o->lost) state = OVER_LOST;
  }
  pthread_mutex_unlock(&unfolded_lock);
  return state;
}

/* -- looking ---------------------------------------------------------------------------------------------------- */
/* With the lock: NULL and what is wrong, or the overlay. */
static overlay *look(over_view v, over_state *state) {
  overlay *o = &overlays[v.slot];
  *state = v.folded < o->forgotten_to ? OVER_OLD : o->lost || !o->young ? OVER_LOST : OVER_READY;
  return *state == OVER_READY ? o : NULL;
}

static name_entry *newest_name(overlay *o, uint64_t folded, uint64_t dir, span name) {
  uint64_t hash = hash_of(name);
  name_entry *e = find_name(o->young, dir, name, hash);
  if (!e) e = find_name(o->old, dir, name, hash);
  return e && e->end > folded ? e : NULL;
}

over_state unfolded_name(over_view v, uint64_t dir, span name, over_what *what, uint64_t *ino) {
  over_state state;
  *what = OVER_NOTHING;
  pthread_mutex_lock(&unfolded_lock);
  overlay *o = look(v, &state);
  const name_entry *e = o ? newest_name(o, v.folded, dir, name) : NULL;
  if (e) *what = e->there ? OVER_THERE : OVER_GONE, *ino = e->ino;
  pthread_mutex_unlock(&unfolded_lock);
  return state;
}

over_state unfolded_xattr(over_view v, uint64_t ino, span name, over_what *what, uint8_t *out, size_t *len) {
  over_state state;
  uint64_t hash = hash_of(name);
  *what = OVER_NOTHING;
  pthread_mutex_lock(&unfolded_lock);
  overlay *o = look(v, &state);
  half *h = o ? o->young : NULL;
  const name_entry *e = h ? find_name(h, XATTRS_OF(ino), name, hash) : NULL;
  if (o && !e) e = find_name(h = o->old, XATTRS_OF(ino), name, hash);
  if (e && e->end > v.folded && e->value_len <= INTENT_NAME_MAX) {
    *what = e->there ? OVER_THERE : OVER_GONE;
    memcpy(out, h->arena + e->value_at, *len = e->value_len);
  }
  pthread_mutex_unlock(&unfolded_lock);
  return state;
}

static void lay_inode(half *h, uint64_t folded, uint64_t ino, over_inode *out) {
  const inode_entry *e = find_inode(h, ino);
  if (!e) return;
  if (e->end > folded) {
    out->gone = e->gone;
    if (e->born) out->born = true, out->row = e->row;
  }
  for (int i = 0; i < OVER_FIELDS; i++)
    if (e->fields[i].end > folded) out->fields[i] = e->fields[i];
  if (e->touched_end > folded && (!out->touched || row_time_before(out->when, e->touched)))
    out->touched = true, out->when = e->touched, out->touched_end = e->touched_end;
}

void over_apply(const over_inode *over, inode_row *row) {
  const over_field *f = over->fields;
  if (f[OVER_NLINK].end) row->nlink = (uint32_t)f[OVER_NLINK].value;
  if (f[OVER_PARENT].end) row->parent = f[OVER_PARENT].value;
  if (f[OVER_MODE].end) row->mode = (row->mode & S_IFMT) | (uint32_t)f[OVER_MODE].value;
  if (f[OVER_UID].end) row->uid = (uint32_t)f[OVER_UID].value;
  if (f[OVER_GID].end) row->gid = (uint32_t)f[OVER_GID].value;
  if (f[OVER_CTIME].end) row->ctime = row_time_of_ns(f[OVER_CTIME].value);
  if (f[OVER_ATIME].end) row->atime = row_time_of_ns(f[OVER_ATIME].value);
  bool set_later = f[OVER_MTIME].end > over->touched_end;
  if (f[OVER_MTIME].end) row->mtime = row_time_of_ns(f[OVER_MTIME].value);
  if (over->touched && !set_later && row_time_before(row->mtime, over->when)) {
    row->mtime = over->when;
    if (row_time_before(row->ctime, over->when)) row->ctime = over->when;
  }
}

over_state unfolded_inode(over_view v, uint64_t ino, over_inode *out) {
  over_state state;
  *out = (over_inode){0};
  pthread_mutex_lock(&unfolded_lock);
  overlay *o = look(v, &state);
  if (o) {
    lay_inode(o->old, v.folded, ino, out);
    lay_inode(o->young, v.folded, ino, out);
  }
  pthread_mutex_unlock(&unfolded_lock);
  return state;
}

static size_t target_of(half *h, uint64_t folded, uint64_t ino, uint8_t *out) {
  const inode_entry *e = find_inode(h, ino);
  if (!e || !e->born || e->end <= folded || e->target_len > INTENT_NAME_MAX) return 0;
  memcpy(out, h->arena + e->target_at, e->target_len);
  return e->target_len;
}

size_t unfolded_target(over_view v, uint64_t ino, uint8_t *out) {
  over_state state;
  pthread_mutex_lock(&unfolded_lock);
  overlay *o = look(v, &state);
  size_t len = o ? target_of(o->young, v.folded, ino, out) : 0;
  if (o && !len) len = target_of(o->old, v.folded, ino, out);
  pthread_mutex_unlock(&unfolded_lock);
  return len;
}

static int compare(span a, const uint8_t *b, size_t b_len) {
  int order = memcmp(a.at, b, a.len < b_len ? a.len : b_len);
  return order ? order : a.len < b_len ? -1 : a.len > b_len;
}

/* Keeps the first OVER_NAMES_MAX, in order; one that is there already is newer. */
static void put_name(over_names *out, const name_entry *e, span name) {
  uint32_t low = 0, high = out->count;
  while (low < high) {
    uint32_t middle = (low + high) / 2;
    int order = compare(name, out->names[middle].name, out->names[middle].len);
    if (!order) return;
    if (order < 0) high = middle;
    else low = middle + 1;
  }
  if (low == OVER_NAMES_MAX) {
    out->cut = true;
    return;
  }
  uint32_t behind = out->count - low;
  if (out->count == OVER_NAMES_MAX) out->cut = true, behind--;
  else out->count++;
  memmove(&out->names[low + 1], &out->names[low], behind * sizeof out->names[0]);
  out->names[low] = (over_name){.ino = e->ino, .mode = e->mode, .size = e->value_len, .there = e->there, .len = e->len};
  memcpy(out->names[low].name, name.at, name.len);
}

static void list(half *h, uint64_t folded, uint64_t dir, span after, over_names *out) {
  const inode_entry *above = find_inode(h, dir);
  for (uint32_t slot = above ? above->first_name : INDEX_NONE; slot != INDEX_NONE; slot = h->names[slot].next_of_dir) {
    const name_entry *e = &h->names[slot];
    span name = {h->arena + e->name_at, e->len};
    if (e->end > folded && compare(name, after.at, after.len) > 0) put_name(out, e, name);
  }
}

over_state unfolded_names(over_view v, uint64_t dir, span after, over_names *out) {
  over_state state;
  out->count = 0;
  out->cut = false;
  pthread_mutex_lock(&unfolded_lock);
  overlay *o = look(v, &state);
  if (o) {
    list(o->young, v.folded, dir, after, out);
    list(o->old, v.folded, dir, after, out);
  }
  pthread_mutex_unlock(&unfolded_lock);
  return state;
}

void unfolded_reset(void) {
  for (uint32_t i = 0; i < STREAMS_MAX; i++) {
    free(overlays[i].young);
    free(overlays[i].old);
    overlays[i] = (overlay){0};
  }
}
