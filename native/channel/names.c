/* See names.h. */
#include "names.h"

#include <errno.h>

#include "nests.h"
#include "rules.h"
#include "tables.h"

#define PAGE_BYTES (64u << 10) /* of a listing: more would hold a picture of the rows for long */

static told_as look;

void names_look(const told_as *as) { look = *as; }

/* What an answer consists of: `error`, or `len` bytes of `data`. */
typedef struct {
  const request *r;
  uint8_t *data;
  size_t len;
  int error;
} answer;

typedef view_result answer_from(const view *v, answer *a);

/* Makes an answer and sends it; false: it is the daemon's to make. */
static bool answer_by(const request *r, uint8_t *data, uint32_t what, answer_from *from) {
  view v;
  view_result result;
  answer a;
  do {
    if (!view_begin(&v, r->header.nodeid, what)) return false;
    a = (answer){.r = r, .data = data};
    result = from(&v, &a);
    view_end();
  } while (result == VIEW_OLD);
  if (result != VIEW_FOUND) return false;
  device_reply(r->header.unique, a.error, a.data, a.len);
  return true;
}

void names_entry(wire_entry_out *out, const inode_row *row, const struct stat *backing) { told_entry(out, row, backing, &look); }

/* On a follower the daemon knows which generation a file is shown at: the one that is open here, or, while the row's is not in the
 * remote yet, the last that is. */
static bool shown_otherwise(const view *v, const inode_row *row) {
  if (!S_ISREG(row->mode)) return false;
  pthread_mutex_lock(&tables_lock);
  bool is_open = node_find(row->ino);
  pthread_mutex_unlock(&tables_lock);
  return is_open || view_published(v, row) != VIEW_FOUND;
}

/* An inode as it is told. */
static view_result entry_of(const view *v, uint64_t ino, wire_entry_out *out) {
  inode_row row;
  struct stat st;
  view_result result = view_inode(v, ino, &row);
  if (result != VIEW_FOUND) return result;
  if (look.follows && shown_otherwise(v, &row)) return VIEW_BROKEN;
  result = view_dirty(v, &row, &st);
  if (result > VIEW_FOUND) return result;
  told_entry(out, &row, result == VIEW_FOUND ? &st : NULL, &look);
  return VIEW_FOUND;
}

/* -- one inode -------------------------------------------------------------------------------------------------- */
static bool is_plain(span name) {
  return name.len && !(name.at[0] == '.' && (name.len == 1 || (name.len == 2 && name.at[1] == '.')));
}

static view_result lookup(const view *v, answer *a) {
  wire_entry_out out = {.entry_valid = TOLD_LONG_S}; /* no such name, and that may be remembered */
  span name;
  uint64_t ino;
  name.len = name_at(a->r, 0, &name.at);
  if (name.len > NAME_MAX_LEN) {
    a->error = ENAMETOOLONG;
    return VIEW_FOUND;
  }
  if (!is_plain(name)) return VIEW_BROKEN;
  view_result result = view_name(v, a->r->header.nodeid, name, &ino);
  if (result > VIEW_FOUND) return result;
  if (result == VIEW_ABSENT && look.follows) return VIEW_BROKEN; /* the daemon asks the log's end first */
  if (result == VIEW_FOUND) {
    result = entry_of(v, ino, &out);
    if (result != VIEW_FOUND) return result;
  }
  memcpy(a->data, &out, a->len = sizeof out);
  return VIEW_FOUND;
}

bool names_lookup(const request *r, uint8_t *data) { return answer_by(r, data, ANSWER_LOOKUP, lookup); }

static view_result getattr(const view *v, answer *a) {
  wire_entry_out entry;
  view_result result = entry_of(v, a->r->header.nodeid, &entry);
  if (result != VIEW_FOUND) return result;
  wire_attr_out out = {.attr_valid = entry.attr_valid, .attr = entry.attr};
  memcpy(a->data, &out, a->len = sizeof out);
  return VIEW_FOUND;
}

bool names_getattr(const request *r, uint8_t *data) { return answer_by(r, data, ANSWER_ATTR, getattr); }

static view_result readlink_of(const view *v, answer *a) {
  inode_row row;
  view_result result = view_inode(v, a->r->header.nodeid, &row);
  if (result != VIEW_FOUND) return result;
  a->len = view_target(v, &row, a->data);
  return a->len ? VIEW_FOUND : VIEW_BROKEN;
}

bool names_readlink(const request *r, uint8_t *data) { return answer_by(r, data, ANSWER_LINK, readlink_of); }

/* -- xattrs ----------------------------------------------------------------------------------------------------- */
/* The caller gives `size` bytes of room; 0: it asks how many there are. */
static void sized(answer *a, uint32_t size, size_t len) {
  if (!size) {
    uint32_t out[2] = {(uint32_t)len, 0};
    memcpy(a->data, out, a->len = sizeof out);
  } else if (len > size) {
    a->error = ERANGE;
  } else {
    a->len = len;
  }
}

static view_result getxattr(const view *v, answer *a) {
  inode_row row;
  uint32_t size;
  span name, value;
  name.len = name_at(a->r, WIRE_GETXATTR_IN_LEN, &name.at);
  if (!name.len || name.len > NAME_MAX_LEN) return VIEW_BROKEN;
  memcpy(&size, a->r->body, sizeof size);
  view_result result = view_inode(v, a->r->header.nodeid, &row);
  if (result != VIEW_FOUND) return result;
  result = view_xattr(v, row.ino, name, a->data, &value);
  if (result == VIEW_ABSENT) {
    a->error = ENODATA;
    return VIEW_FOUND;
  }
  if (result != VIEW_FOUND || value.len > REQUEST_DATA_MAX) return VIEW_BROKEN;
  if (value.at != a->data) memcpy(a->data, value.at, value.len);
  sized(a, size, value.len);
  return VIEW_FOUND;
}

bool names_getxattr(const request *r, uint8_t *data) {
  span name;
  name.len = name_at(r, WIRE_GETXATTR_IN_LEN, &name.at);
  return rule_xattr(name) && answer_by(r, data, ANSWER_XATTR, getxattr);
}

static view_result listxattr(const view *v, answer *a) {
  over_names over; /* not thread-local: that is part of every thread's stack, and some have little */
  over.count = 0, over.cut = false;
  walk w = {.xattrs = true, .over = &over};
  inode_row row;
  uint32_t size;
  named one;
  size_t len = 0;
  view_result result = view_inode(v, a->r->header.nodeid, &row);
  if (result != VIEW_FOUND) return result;
  memcpy(&size, a->r->body, sizeof size);
  while ((result = view_walk(v, &w, row.ino, (span){(const uint8_t *)"", 0}, &one)) == VIEW_FOUND) {
    if (!one.name.len || len + one.name.len + 1 > REQUEST_DATA_MAX) return VIEW_BROKEN;
    memcpy(a->data + len, one.name.at, one.name.len);
    a->data[len + one.name.len] = 0;
    len += one.name.len + 1;
  }
  if (result != VIEW_ABSENT || over.cut) return result == VIEW_ABSENT ? VIEW_BROKEN : result;
  sized(a, size, len);
  return VIEW_FOUND;
}

bool names_listxattr(const request *r, uint8_t *data) {
  return r->body_len >= WIRE_GETXATTR_IN_LEN && answer_by(r, data, ANSWER_XATTR, listxattr);
}

/* -- directories ------------------------------------------------------------------------------------------------ */
bool names_opendir(const request *r) {
  view v;
  if (!view_begin(&v, r->header.nodeid, ANSWER_LIST)) return false;
  view_end();
  wire_open_out out = {.fh = listing_open(), .open_flags = look.follows ? 0 : WIRE_FOPEN_CACHE_DIR | WIRE_FOPEN_KEEP_CACHE};
  if (out.fh) device_reply(r->header.unique, 0, &out, sizeof out);
  return out.fh;
}

bool names_releasedir(const request *r) {
  wire_release_in in;
  if (r->body_len < sizeof in) return false;
  memcpy(&in, r->body, sizeof in);
  if (!listing_close(in.fh)) return false;
  device_reply(r->header.unique, 0, NULL, 0);
  return true;
}

/* "." and "..": the kernel looks at their numbers alone. False: the page is full. */
static bool add_dots(list_page *page, const inode_row *dir, uint64_t start) {
  const wire_entry_out none = {0};
  bool is_top = (dir->ino & ((UINT64_C(1) << STREAM_SHIFT) - 1)) == ROOT_INO;
  uint64_t above = is_top ? ROOT_INO : dir->parent;
  if (start < 1 && !page_add(page, (span){(const uint8_t *)".", 1}, dir->ino, S_IFDIR, 1, &none)) return false;
  return start >= 2 || page_add(page, (span){(const uint8_t *)"..", 2}, above, S_IFDIR, 2, &none);
}

static view_result readdir_from(const view *v, answer *a) {
  over_names over; /* not thread-local: that is part of every thread's stack, and some have little */
  over.count = 0, over.cut = false;
  wire_read_in in;
  inode_row dir;
  uint8_t last[NAME_MAX_LEN];
  span after = {last, 0};
  uint64_t position;
  memcpy(&in, a->r->body, sizeof in);
  if (!listing_from(in.fh, in.offset, &position, last, &after.len)) return VIEW_BROKEN;
  view_result result = view_inode(v, a->r->header.nodeid, &dir);
  if (result == VIEW_OLD || result == VIEW_BROKEN) return result;
  list_page page = {.data = a->data, .room = in.size < PAGE_BYTES ? in.size : PAGE_BYTES};
  walk w = {.over = &over};
  named one;
  uint64_t told = 0;
  span told_name = {0};
  bool room = result == VIEW_ABSENT || add_dots(&page, &dir, in.offset); /* of one that was removed there is nothing to tell */
  while (room && (result = view_walk(v, &w, a->r->header.nodeid, after, &one)) == VIEW_FOUND) {
    wire_entry_out entry = {0};
    view_result known = entry_of(v, one.ino, &entry);
    if (known == VIEW_OLD) return VIEW_OLD;
    if (known == VIEW_ABSENT) continue;
    if (known == VIEW_BROKEN) entry = (wire_entry_out){0};
    if (++position <= in.offset) continue;
    room = page_add(&page, one.name, one.ino, known == VIEW_FOUND ? entry.attr.mode : one.mode, position, &entry);
    if (room) told = position, told_name = one.name;
  }
  if (room && result > VIEW_FOUND) return result;
  if (told) listing_mark(in.fh, told, told_name);
  a->len = page.used;
  return VIEW_FOUND;
}

bool names_readdir(const request *r, uint8_t *data) {
  wire_read_in in;
  if (r->body_len < sizeof in) return false;
  memcpy(&in, r->body, sizeof in);
  return in.fh & LIST_FH && answer_by(r, data, ANSWER_LIST, readdir_from);
}
