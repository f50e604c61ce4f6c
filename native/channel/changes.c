/* See changes.h. */
#include "changes.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "change.h"
#include "names.h"
#include "nests.h"
#include "rules.h"

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

bool changes_unlink(const request *r) { return change_make(r, unlink_from); }

static view_result rmdir_from(change *c) {
  inode_row above, row;
  span name = name_from(c->r, 0);
  view_result result = find(c, c->r->header.nodeid, name, &above, &row);
  if (result != VIEW_FOUND) return result;
  if (!rule_rmdir(&above, &row)) return VIEW_BROKEN;
  if ((result = is_empty(c, row.ino)) == VIEW_ABSENT) return refuse(c, ENOTEMPTY); /* git asks so of each directory it takes a file from */
  if (result != VIEW_FOUND) return result;
  begin_record(c, INTENT_RMDIR, row.ino, row.mode & S_IFMT, above.ino);
  set_owner(c, above.nlink - 1, 0);
  return named_in(record(c, name), above.ino, name);
}

bool changes_rmdir(const request *r) { return change_make(r, rmdir_from); }

/* -- names that come -------------------------------------------------------------------------------------------- */
static view_result link_from(change *c) {
  inode_row above, row;
  uint64_t ino;
  span name = name_from(c->r, sizeof ino);
  if (c->r->body_len < sizeof ino) return VIEW_BROKEN;
  memcpy(&ino, c->r->body, sizeof ino);
  if (ino >> STREAM_SHIFT != c->r->header.nodeid >> STREAM_SHIFT) return VIEW_BROKEN;
  view_result result = find_free(c, c->r->header.nodeid, name, &above);
  if (result != VIEW_FOUND) return result;
  if ((result = needed(view_inode(&c->v, ino, &row))) != VIEW_FOUND) return result;
  if (!rule_link(&row)) return VIEW_BROKEN;
  row.nlink++;
  row.ctime = row_time_of_ns(c->now_ns);
  if ((result = answer_entry(c, &row)) != VIEW_FOUND) return result;
  begin_record(c, INTENT_LINKED, ino, row.mode & S_IFMT, above.ino);
  set_owner(c, row.nlink, 0);
  return named_in(record(c, name), above.ino, name);
}

bool changes_link(const request *r) { return change_make(r, link_from); }

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

bool changes_mkdir(const request *r) { return change_make(r, mkdir_from); }

static view_result symlink_from(change *c) {
  inode_row above;
  span name = name_from(c->r, 0), target = name_from(c->r, name.len + 1);
  view_result result = find_free(c, c->r->header.nodeid, name, &above);
  if (result != VIEW_FOUND) return result;
  uint64_t ino = target.len && target.len <= RULE_TARGET_MAX ? births_ino(c->s) : 0;
  if (!ino) return VIEW_BROKEN;
  row_time now = row_time_of_ns(c->now_ns);
  inode_row row = {.ino = ino, .mode = S_IFLNK | 0777, .uid = c->r->header.uid, .gid = above.mode & S_ISGID ? above.gid : c->r->header.gid,
                   .nlink = 1, .size = target.len, .parent = above.ino, .mtime = now, .ctime = now, .atime = now};
  if ((result = answer_entry(c, &row)) != VIEW_FOUND) return result;
  begin_record(c, INTENT_SYMLINKED, ino, row.mode, above.ino);
  set_owner(c, row.uid, row.gid);
  return named_in(record_two(c, name, target), above.ino, name);
}

bool changes_symlink(const request *r) { return change_make(r, symlink_from); }
