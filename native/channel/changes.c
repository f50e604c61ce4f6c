/* See changes.h. */
#include "changes.h"

#include <time.h>

#include "../bytes.h"
#include "births.h"
#include "names.h"
#include "nests.h"
#include "rules.h"

#define NS UINT64_C(1000000000)

/* One change, from its request to its answer. */
typedef struct {
  const request *r;
  stream *s;
  view v;
  uint64_t now_ns;
  uint8_t record[RECORD_ROOM];
  uint8_t out[WIRE_ENTRY_OUT_LEN]; /* what is answered */
  size_t out_len;
} change;

/* Checks, and records; VIEW_FOUND: it is in the log. */
typedef view_result change_from(change *c);

static bool make(const request *r, change_from *from) {
  change c = {.r = r};
  view_result result;
  struct timespec now;
  if (r->header.total_extlen || !(c.s = births_begin_change(r->header.nodeid))) return false;
  clock_gettime(CLOCK_REALTIME, &now);
  c.now_ns = (uint64_t)now.tv_sec * NS + (uint64_t)now.tv_nsec;
  do {
    result = VIEW_BROKEN;
    if (!view_begin(&c.v, r->header.nodeid, ANSWER_CHANGES)) break;
    result = from(&c);
    view_end();
  } while (result == VIEW_OLD);
  births_end_change(result == VIEW_FOUND);
  if (result != VIEW_FOUND) return false;
  device_reply(r->header.unique, 0, c.out, c.out_len);
  return true;
}

/* The fixed part of a record; fields that a kind does not have stay 0. */
static void begin_record(change *c, uint16_t kind, uint64_t ino, uint32_t mode, uint64_t parent) {
  memset(c->record, 0, INTENT_LEN);
  store_u16(c->record + 8, kind);
  store_u32(c->record + 12, mode);
  store_u64(c->record + 16, ino);
  store_u64(c->record + 24, parent);
  store_u64(c->record + 40, c->now_ns);
}

static void set_owner(change *c, uint32_t uid, uint32_t gid) {
  store_u32(c->record + 32, uid);
  store_u32(c->record + 36, gid);
}

static void set_fh(change *c, uint64_t fh) { store_u64(c->record + 48, fh); }
static void set_flags(change *c, uint32_t flags) { store_u32(c->record + 56, flags); }

static view_result record(change *c, span name) {
  return births_record(c->s, c->record, name.at, name.len) ? VIEW_FOUND : VIEW_BROKEN;
}

/* A name was given or taken: before it is answered, as the next request may be about it, and this one's bytes are gone then. */
static view_result named_in(view_result recorded, uint64_t dir, span name) {
  if (recorded == VIEW_FOUND) nests_changed(dir, name.at, name.len);
  return recorded;
}

static view_result yes_or_daemon(bool yes) { return yes ? VIEW_FOUND : VIEW_BROKEN; }

static span name_from(const request *r, size_t at) {
  span name = {NULL, 0};
  name.len = name_at(r, at, &name.at);
  return name;
}

/* A directory that is there, and what has a name in it. */
static view_result find(change *c, uint64_t dir, span name, inode_row *above, inode_row *found) {
  uint64_t ino;
  view_result result = view_inode(&c->v, dir, above);
  if (result != VIEW_FOUND || !S_ISDIR(above->mode)) return result == VIEW_OLD ? VIEW_OLD : VIEW_BROKEN;
  if (!rule_name(name)) return VIEW_BROKEN;
  result = view_name(&c->v, dir, name, &ino);
  return result == VIEW_FOUND ? view_inode(&c->v, ino, found) : result;
}

/* As find, for a name that must not be there. */
static view_result find_free(change *c, uint64_t dir, span name, inode_row *above) {
  inode_row found;
  view_result result = find(c, dir, name, above, &found);
  return result == VIEW_ABSENT ? VIEW_FOUND : result == VIEW_FOUND ? VIEW_BROKEN : result;
}

/* An entry for the answer. */
static view_result answer_entry(change *c, const inode_row *row) {
  struct stat st;
  wire_entry_out out;
  view_result dirty = view_dirty(&c->v, row, &st);
  if (dirty > VIEW_FOUND) return dirty;
  names_entry(&out, row, dirty == VIEW_FOUND ? &st : NULL);
  memcpy(c->out, &out, c->out_len = sizeof out);
  return VIEW_FOUND;
}

/* -- names that go ---------------------------------------------------------------------------------------------- */
static view_result unlink_from(change *c) {
  inode_row above, row;
  span name = name_from(c->r, 0);
  view_result result = find(c, c->r->header.nodeid, name, &above, &row);
  if (result != VIEW_FOUND) return result;
  if (!rule_unlink(&row) || view_birth(&c->v, row.ino) == BIRTH_OPEN) return VIEW_BROKEN; /* it must learn of the open first */
  begin_record(c, INTENT_UNLINKED, row.ino, row.mode & S_IFMT, above.ino);
  set_owner(c, row.nlink - 1, 0);
  set_flags(c, INTENT_OURS);
  return named_in(record(c, name), above.ino, name);
}

bool changes_unlink(const request *r) { return make(r, unlink_from); }

static view_result is_empty(const change *c, uint64_t dir) {
  over_names over; /* not thread-local: that is part of every thread's stack, and some have little */
  over.count = 0, over.cut = false;
  walk w = {.over = &over};
  named first;
  view_result result = view_walk(&c->v, &w, dir, (span){(const uint8_t *)"", 0}, &first);
  return result == VIEW_ABSENT ? yes_or_daemon(!over.cut) : result == VIEW_OLD ? VIEW_OLD : VIEW_BROKEN;
}

static view_result rmdir_from(change *c) {
  inode_row above, row;
  span name = name_from(c->r, 0);
  view_result result = find(c, c->r->header.nodeid, name, &above, &row);
  if (result != VIEW_FOUND) return result;
  if (!rule_rmdir(&above, &row)) return VIEW_BROKEN;
  if ((result = is_empty(c, row.ino)) != VIEW_FOUND) return result;
  begin_record(c, INTENT_RMDIR, row.ino, row.mode & S_IFMT, above.ino);
  set_owner(c, above.nlink - 1, 0);
  return named_in(record(c, name), above.ino, name);
}

bool changes_rmdir(const request *r) { return make(r, rmdir_from); }

/* -- names that move or come ------------------------------------------------------------------------------------ */
/* Whether a directory is not the other one, nor below it. */
static view_result is_outside(const change *c, uint64_t dir, uint64_t of) {
  for (int depth = 0; depth < RULE_DEPTH_MAX; depth++) {
    inode_row row;
    if (dir == of) return VIEW_BROKEN;
    if (rule_is_top(dir)) return VIEW_FOUND;
    view_result result = view_inode(&c->v, dir, &row);
    if (result != VIEW_FOUND) return result == VIEW_OLD ? VIEW_OLD : VIEW_BROKEN;
    dir = row.parent;
  }
  return VIEW_BROKEN;
}

typedef struct {
  uint64_t new_dir;
  uint32_t flags;
  span old_name, new_name;
} rename_request;

static bool rename_parse(const request *r, rename_request *out) {
  bool old_form = r->header.opcode == WIRE_RENAME;
  size_t fixed = old_form ? 8 : 16;
  if (r->body_len < fixed) return false;
  memcpy(&out->new_dir, r->body, 8);
  out->flags = 0;
  if (!old_form) memcpy(&out->flags, r->body + 8, 4);
  out->old_name = name_from(r, fixed);
  out->new_name = name_from(r, fixed + out->old_name.len + 1);
  return out->old_name.len && out->new_name.len;
}

static view_result rename_from(change *c) {
  inode_row from, to, row;
  rename_request q;
  uint8_t names[2 * NAME_MAX_LEN + 1];
  uint64_t dir = c->r->header.nodeid;
  if (!rename_parse(c->r, &q) || q.flags & ~RULE_NOREPLACE || q.new_dir >> STREAM_SHIFT != dir >> STREAM_SHIFT) return VIEW_BROKEN;
  view_result result = find(c, dir, q.old_name, &from, &row);
  if (result != VIEW_FOUND) return result;
  if ((result = find_free(c, q.new_dir, q.new_name, &to)) != VIEW_FOUND) return result;
  bool moves_dir = S_ISDIR(row.mode) && dir != q.new_dir;
  if (moves_dir && !rule_moves_dir(&from, &to)) return VIEW_BROKEN;
  if (moves_dir && (result = is_outside(c, q.new_dir, row.ino)) != VIEW_FOUND) return result;
  memcpy(names, q.old_name.at, q.old_name.len);
  names[q.old_name.len] = 0;
  memcpy(names + q.old_name.len + 1, q.new_name.at, q.new_name.len);
  begin_record(c, INTENT_RENAMED, row.ino, row.mode & S_IFMT, dir);
  if (moves_dir) set_owner(c, from.nlink - 1, to.nlink + 1);
  set_fh(c, q.new_dir);
  result = record(c, (span){names, q.old_name.len + 1 + q.new_name.len});
  return named_in(named_in(result, dir, q.old_name), q.new_dir, q.new_name);
}

bool changes_rename(const request *r) { return make(r, rename_from); }

static view_result link_from(change *c) {
  inode_row above, row;
  uint64_t ino;
  span name = name_from(c->r, sizeof ino);
  if (c->r->body_len < sizeof ino) return VIEW_BROKEN;
  memcpy(&ino, c->r->body, sizeof ino);
  if (ino >> STREAM_SHIFT != c->r->header.nodeid >> STREAM_SHIFT) return VIEW_BROKEN;
  view_result result = find_free(c, c->r->header.nodeid, name, &above);
  if (result != VIEW_FOUND) return result;
  result = view_inode(&c->v, ino, &row);
  if (result != VIEW_FOUND || !rule_link(&row)) return result == VIEW_OLD ? VIEW_OLD : VIEW_BROKEN;
  row.nlink++;
  row.ctime = row_time_of_ns(c->now_ns);
  if ((result = answer_entry(c, &row)) != VIEW_FOUND) return result;
  begin_record(c, INTENT_LINKED, ino, row.mode & S_IFMT, above.ino);
  set_owner(c, row.nlink, 0);
  return named_in(record(c, name), above.ino, name);
}

bool changes_link(const request *r) { return make(r, link_from); }

static view_result mkdir_from(change *c) {
  uint32_t in[2]; /* mode, umask: which the kernel has applied */
  inode_row above;
  span name = name_from(c->r, sizeof in);
  if (c->r->body_len < sizeof in) return VIEW_BROKEN;
  memcpy(in, c->r->body, sizeof in);
  view_result result = find_free(c, c->r->header.nodeid, name, &above);
  if (result != VIEW_FOUND) return result;
  uint64_t ino = rule_new_dir(&above) ? births_ino(c->s) : 0;
  if (!ino) return VIEW_BROKEN;
  row_time now = row_time_of_ns(c->now_ns);
  bool inherits = above.mode & S_ISGID;
  inode_row row = {.ino = ino, .mode = S_IFDIR | (in[0] & 07777) | (inherits ? S_ISGID : 0), .uid = c->r->header.uid,
                   .gid = inherits ? above.gid : c->r->header.gid, .nlink = 2, .parent = above.ino, .mtime = now, .ctime = now, .atime = now};
  if ((result = answer_entry(c, &row)) != VIEW_FOUND) return result;
  begin_record(c, INTENT_MADE, ino, row.mode, above.ino);
  set_owner(c, row.uid, row.gid);
  set_flags(c, above.nlink + 1);
  result = record(c, name);
  if (result == VIEW_FOUND) nests_made(ino, row.mode, row.gid); /* before any request about it */
  return named_in(result, above.ino, name);
}

bool changes_mkdir(const request *r) { return make(r, mkdir_from); }

static view_result symlink_from(change *c) {
  inode_row above;
  span name = name_from(c->r, 0), target = name_from(c->r, name.len + 1);
  uint8_t both[INTENT_NAME_MAX];
  view_result result = find_free(c, c->r->header.nodeid, name, &above);
  if (result != VIEW_FOUND) return result;
  uint64_t ino = target.len && target.len <= RULE_TARGET_MAX ? births_ino(c->s) : 0;
  if (!ino) return VIEW_BROKEN;
  row_time now = row_time_of_ns(c->now_ns);
  inode_row row = {.ino = ino, .mode = S_IFLNK | 0777, .uid = c->r->header.uid, .gid = above.mode & S_ISGID ? above.gid : c->r->header.gid,
                   .nlink = 1, .size = target.len, .parent = above.ino, .mtime = now, .ctime = now, .atime = now};
  if ((result = answer_entry(c, &row)) != VIEW_FOUND) return result;
  memcpy(both, name.at, name.len);
  both[name.len] = 0;
  memcpy(both + name.len + 1, target.at, target.len);
  begin_record(c, INTENT_SYMLINKED, ino, row.mode, above.ino);
  set_owner(c, row.uid, row.gid);
  return named_in(record(c, (span){both, name.len + 1 + target.len}), above.ino, name);
}

bool changes_symlink(const request *r) { return make(r, symlink_from); }

/* -- attributes ------------------------------------------------------------------------------------------------- */
/* The record's flags for the kernel's mask. */
static uint32_t set_flags_of(uint32_t valid) {
  static const uint32_t pairs[][2] = {{WIRE_SET_MODE, INTENT_SET_MODE}, {WIRE_SET_UID, INTENT_SET_UID}, {WIRE_SET_GID, INTENT_SET_GID},
                                      {WIRE_SET_ATIME, INTENT_SET_ATIME}, {WIRE_SET_MTIME, INTENT_SET_MTIME}};
  uint32_t flags = 0;
  for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) flags |= valid & pairs[i][0] ? pairs[i][1] : 0;
  return flags;
}

/* A time that is asked for; false: it is none that a record can hold. */
static bool time_of(bool set, bool now, uint64_t s, uint32_t ns, uint64_t now_ns, uint64_t *out, struct timespec *spec) {
  *out = !set ? 0 : now ? now_ns : s * NS + ns;
  *spec = (struct timespec){(time_t)(*out / NS), set ? (long)(*out % NS) : UTIME_OMIT};
  return !set || now || (s < RULE_TIME_S_MAX && ns < NS);
}

/* Whether a new owner would take something away from the file: what it may do. */
static bool has_capability(const view *v, uint64_t ino) {
  static const char name[] = "security.capability";
  span value;
  return view_xattr(v, ino, (span){(const uint8_t *)name, sizeof name - 1}, &value) != VIEW_ABSENT;
}

/* A file that is being written has the times of its backing file. Only of one that the daemon does not know of they are set here: it
 * could be sealing another with the times it had before. */
static view_result set_backing(change *c, const inode_row *row, const struct timespec times[2], bool any, struct stat *st) {
  view_result dirty = view_dirty(&c->v, row, st);
  if (dirty != VIEW_FOUND || !any) return dirty;
  if (view_birth(&c->v, row->ino) == BIRTH_NONE || !view_set_times(&c->v, row, times)) return VIEW_BROKEN;
  return view_dirty(&c->v, row, st);
}

static view_result setattr_from(change *c) {
  wire_setattr_in in;
  inode_row row;
  struct stat st;
  struct timespec times[2];
  uint64_t atime, mtime;
  if (c->r->body_len < sizeof in) return VIEW_BROKEN;
  memcpy(&in, c->r->body, sizeof in);
  uint32_t set = set_flags_of(in.valid);
  bool a = set & INTENT_SET_ATIME, m = set & INTENT_SET_MTIME;
  view_result result = view_inode(&c->v, c->r->header.nodeid, &row);
  if (result != VIEW_FOUND) return result == VIEW_OLD ? VIEW_OLD : VIEW_BROKEN;
  if (!rule_set(&row, in.valid, in.mode)) return VIEW_BROKEN;
  if (in.valid & (WIRE_SET_UID | WIRE_SET_GID | WIRE_SET_KILL_SUIDGID) && has_capability(&c->v, row.ino)) return VIEW_BROKEN;
  if (!time_of(a, in.valid & WIRE_SET_ATIME_NOW, in.atime, in.atimensec, c->now_ns, &atime, &times[0])) return VIEW_BROKEN;
  if (!time_of(m, in.valid & WIRE_SET_MTIME_NOW, in.mtime, in.mtimensec, c->now_ns, &mtime, &times[1])) return VIEW_BROKEN;
  result = set_backing(c, &row, times, a || m, &st);
  if (result > VIEW_FOUND) return result;
  if (set & INTENT_SET_MODE) row.mode = (row.mode & S_IFMT) | (in.mode & 07777);
  if (set & INTENT_SET_UID) row.uid = in.uid;
  if (set & INTENT_SET_GID) row.gid = in.gid;
  if (a) row.atime = row_time_of_ns(atime);
  if (m) row.mtime = row_time_of_ns(mtime);
  row.ctime = row_time_of_ns(c->now_ns);
  wire_entry_out entry;
  names_entry(&entry, &row, result == VIEW_FOUND ? &st : NULL);
  wire_attr_out out = {.attr_valid = entry.attr_valid, .attr = entry.attr};
  memcpy(c->out, &out, c->out_len = sizeof out);
  begin_record(c, INTENT_SET, row.ino, row.mode, mtime);
  set_owner(c, row.uid, row.gid);
  set_fh(c, atime);
  set_flags(c, set);
  return record(c, (span){(const uint8_t *)"", 0});
}

bool changes_setattr(const request *r) { return make(r, setattr_from); }
