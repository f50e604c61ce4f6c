/* chmod, chown and utimens: see changes.h. */
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
