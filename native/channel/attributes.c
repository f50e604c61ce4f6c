/* chmod, chown and utimens; setxattr and removexattr: see changes.h. */
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "change.h"
#include "changes.h"
#include "names.h"
#include "rules.h"

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
  uint8_t room[INTENT_NAME_MAX];
  span value;
  return view_xattr(v, ino, (span){(const uint8_t *)name, sizeof name - 1}, room, &value) != VIEW_ABSENT;
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
  view_result result = needed(view_inode(&c->v, c->r->header.nodeid, &row));
  if (result != VIEW_FOUND) return result;
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

bool changes_setattr(const request *r) { return change_make(r, setattr_from); }

/* -- xattrs ----------------------------------------------------------------------------------------------------- */
/* What the other xattrs of the inode take, and whether it has this one. */
static view_result other_xattrs(const change *c, uint64_t ino, span name, size_t *len, bool *there) {
  over_names over; /* not thread-local: that is part of every thread's stack, and some have little */
  over.count = 0, over.cut = false;
  walk w = {.xattrs = true, .over = &over};
  named one;
  view_result result;
  *len = 0;
  *there = false;
  while ((result = view_walk(&c->v, &w, ino, (span){(const uint8_t *)"", 0}, &one)) == VIEW_FOUND) {
    bool same = one.name.len == name.len && !memcmp(one.name.at, name.at, name.len);
    if (same) *there = true;
    else *len += one.name.len + one.size;
  }
  return result == VIEW_ABSENT && !over.cut ? VIEW_FOUND : needed(result);
}

static view_result setxattr_from(change *c) {
  uint32_t in[2]; /* size, flags */
  inode_row row;
  size_t others_len;
  bool there;
  const request *r = c->r;
  span name = name_from(r, sizeof in);
  /* Of another layout, which newer kernels have where they were told so, the lengths do not add up. */
  if (r->body_len < sizeof in || !rule_xattr(name)) return VIEW_BROKEN;
  memcpy(in, r->body, sizeof in);
  if (r->body_len - sizeof in - name.len - 1 != in[0]) return VIEW_BROKEN;
  span value = {r->body + sizeof in + name.len + 1, in[0]};
  view_result result = needed(view_inode(&c->v, r->header.nodeid, &row));
  if (result != VIEW_FOUND) return result;
  if ((result = other_xattrs(c, row.ino, name, &others_len, &there)) != VIEW_FOUND) return result;
  if (!rule_set_xattr(name, value.len, in[1], there, others_len)) return VIEW_BROKEN;
  begin_record(c, INTENT_XATTR_SET, row.ino, row.mode & S_IFMT, 0);
  return record_two(c, name, value); /* a long one is the daemon's */
}

bool changes_setxattr(const request *r) { return change_make(r, setxattr_from); }

static view_result removexattr_from(change *c) {
  inode_row row;
  uint8_t room[INTENT_NAME_MAX];
  span name = name_from(c->r, 0), value;
  if (!rule_xattr(name)) return VIEW_BROKEN;
  view_result result = needed(view_inode(&c->v, c->r->header.nodeid, &row));
  if (result == VIEW_FOUND) result = needed(view_xattr(&c->v, row.ino, name, room, &value));
  if (result != VIEW_FOUND) return result;
  begin_record(c, INTENT_XATTR_REMOVED, row.ino, row.mode & S_IFMT, 0);
  return record(c, name);
}

bool changes_removexattr(const request *r) { return change_make(r, removexattr_from); }
