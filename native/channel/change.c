/* See change.h. */
#include "change.h"

#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "../bytes.h"
#include "nests.h"
#include "rules.h"

bool change_make(const request *r, change_from *from) {
  change c = {.r = r};
  view_result result;
  struct timespec now;
  if (r->header.total_extlen || !(c.s = births_begin_change(r->header.nodeid))) return false;
  clock_gettime(CLOCK_REALTIME, &now);
  c.now_ns = (uint64_t)now.tv_sec * NS + (uint64_t)now.tv_nsec;
  do {
    result = VIEW_BROKEN;
    c.error = 0;
    if (!view_begin(&c.v, r->header.nodeid, ANSWER_CHANGES)) break;
    result = from(&c);
    view_end();
  } while (result == VIEW_OLD);
  births_end_change(result == VIEW_FOUND);
  if (result != VIEW_FOUND && !c.error) return false;
  device_reply(r->header.unique, c.error, c.out, c.error ? 0 : c.out_len);
  return true;
}

view_result refuse(change *c, int error) {
  c->error = error;
  return VIEW_BROKEN;
}

/* -- records ---------------------------------------------------------------------------------------------------- */
void begin_record(change *c, uint16_t kind, uint64_t ino, uint32_t mode, uint64_t parent) {
  memset(c->record, 0, INTENT_LEN);
  store_u16(c->record + 8, kind);
  store_u32(c->record + 12, mode);
  store_u64(c->record + 16, ino);
  store_u64(c->record + 24, parent);
  store_u64(c->record + 40, c->now_ns);
}

void set_owner(change *c, uint32_t uid, uint32_t gid) {
  store_u32(c->record + 32, uid);
  store_u32(c->record + 36, gid);
}

void set_fh(change *c, uint64_t fh) { store_u64(c->record + 48, fh); }
void set_flags(change *c, uint32_t flags) { store_u32(c->record + 56, flags); }
void set_other(change *c, uint64_t ino) { store_u64(c->record + 64, ino); }

view_result record(change *c, span name) {
  return births_record(c->s, c->record, name.at, name.len) ? VIEW_FOUND : VIEW_BROKEN;
}

view_result record_two(change *c, span first, span second) {
  uint8_t both[INTENT_NAME_MAX];
  if (first.len + 1 + second.len > sizeof both) return VIEW_BROKEN;
  memcpy(both, first.at, first.len);
  both[first.len] = 0;
  memcpy(both + first.len + 1, second.at, second.len);
  return record(c, (span){both, first.len + 1 + second.len});
}

view_result named_in(view_result recorded, uint64_t dir, span name) {
  if (recorded == VIEW_FOUND) nests_changed(dir, name.at, name.len);
  return recorded;
}

/* -- looking ---------------------------------------------------------------------------------------------------- */
span name_from(const request *r, size_t at) {
  span name = {NULL, 0};
  name.len = name_at(r, at, &name.at);
  return name;
}

view_result needed(view_result result) { return result == VIEW_ABSENT ? VIEW_BROKEN : result; }

view_result find(change *c, uint64_t dir, span name, inode_row *above, inode_row *found) {
  uint64_t ino;
  view_result result = needed(view_inode(&c->v, dir, above));
  if (result != VIEW_FOUND) return result;
  if (!S_ISDIR(above->mode) || !rule_name(name)) return VIEW_BROKEN;
  result = view_name(&c->v, dir, name, &ino);
  return result == VIEW_FOUND ? needed(view_inode(&c->v, ino, found)) : result;
}

view_result is_empty(const change *c, uint64_t dir) {
  over_names over; /* not thread-local: that is part of every thread's stack, and some have little */
  over.count = 0, over.cut = false;
  walk w = {.over = &over};
  named first;
  view_result result = view_walk(&c->v, &w, dir, (span){(const uint8_t *)"", 0}, &first);
  if (result == VIEW_ABSENT) return over.cut ? VIEW_BROKEN : VIEW_FOUND;
  return result == VIEW_FOUND ? VIEW_ABSENT : result;
}
