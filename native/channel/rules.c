/* See rules.h. */
#include "rules.h"

#include <string.h>
#include <sys/stat.h>

#include "view.h"
#include "wire.h"

bool rule_name(span name) {
  if (!name.len || name.len > 255 || memchr(name.at, '/', name.len)) return false;
  return !(name.at[0] == '.' && (name.len == 1 || (name.len == 2 && name.at[1] == '.')));
}

bool rule_is_top(uint64_t ino) { return (ino & ((UINT64_C(1) << STREAM_SHIFT) - 1)) == ROOT_INO; }

bool rule_unlink(const inode_row *row) { return !S_ISDIR(row->mode) && row->nlink > 0; }

bool rule_rmdir(const inode_row *above, const inode_row *row) { return S_ISDIR(row->mode) && above->nlink > 2 && !rule_is_top(row->ino); }

bool rule_new_dir(const inode_row *above) { return above->nlink >= 2 && above->nlink < RULE_DIR_LINKS_MAX; }

bool rule_moves_dir(const inode_row *from, const inode_row *to) { return from->nlink > 2 && rule_new_dir(to); }

bool rule_replace(const inode_row *row, const inode_row *other) {
  return !S_ISDIR(row->mode) == !S_ISDIR(other->mode) && other->nlink > 0 && !rule_is_top(other->ino);
}

bool rule_link(const inode_row *row) { return !S_ISDIR(row->mode) && row->nlink > 0 && row->nlink < RULE_LINKS_MAX; }

bool rule_xattr(span name) {
  static const char ours[] = "user.aof2."; /* what only the daemon knows */
  if (name.len <= 5 || name.len > 255 || memcmp(name.at, "user.", 5)) return false;
  return name.len < sizeof ours - 1 || memcmp(name.at, ours, sizeof ours - 1);
}

bool rule_set_xattr(span name, size_t len, uint32_t flags, bool there, size_t others_len) {
  const uint32_t create = 1, replace = 2;
  if (flags & ~(create | replace) || (flags & create && there) || (flags & replace && !there)) return false;
  return others_len + name.len + len <= RULE_XATTRS_LEN_MAX;
}

bool rule_set(const inode_row *row, uint32_t valid, uint32_t mode) {
  const uint32_t what = WIRE_SET_MODE | WIRE_SET_UID | WIRE_SET_GID | WIRE_SET_ATIME | WIRE_SET_MTIME;
  const uint32_t with = WIRE_SET_ATIME_NOW | WIRE_SET_MTIME_NOW | WIRE_SET_FH | WIRE_SET_LOCKOWNER | WIRE_SET_KILL_SUIDGID;
  if (!(valid & what) || valid & ~(what | with)) return false;
  /* Of a file they decide how it is opened, of a directory who owns what is made there. Without them there are none to take away. */
  return !((row->mode | (valid & WIRE_SET_MODE ? mode : 0)) & (S_ISUID | S_ISGID));
}
