/* rename: to a free name, over another one, and both at once (EXCHANGE). See changes.h. */
#include <string.h>
#include <sys/stat.h>

#include "change.h"
#include "changes.h"
#include "rules.h"

/* A rename, and what it is about. */
typedef struct {
  uint64_t old_dir, new_dir;
  uint32_t flags;
  span old_name, new_name;
  inode_row from, to;   /* the directories */
  inode_row row, other; /* what moves; what has the new name */
} move;

static bool parse(const request *r, move *out) {
  bool old_form = r->header.opcode == WIRE_RENAME;
  size_t fixed = old_form ? 8 : 16;
  if (r->body_len < fixed) return false;
  out->old_dir = r->header.nodeid;
  memcpy(&out->new_dir, r->body, 8);
  if (!old_form) memcpy(&out->flags, r->body + 8, 4);
  out->old_name = name_from(r, fixed);
  out->new_name = name_from(r, fixed + out->old_name.len + 1);
  return out->old_name.len && out->new_name.len && out->old_dir >> STREAM_SHIFT == out->new_dir >> STREAM_SHIFT;
}

/* Whether a directory is not the other one, nor below it. */
static view_result is_outside(const change *c, uint64_t dir, uint64_t of) {
  for (int depth = 0; depth < RULE_DEPTH_MAX; depth++) {
    inode_row row;
    if (dir == of) return VIEW_BROKEN;
    if (rule_is_top(dir)) return VIEW_FOUND;
    view_result result = needed(view_inode(&c->v, dir, &row));
    if (result != VIEW_FOUND) return result;
    dir = row.parent;
  }
  return VIEW_BROKEN;
}

/* Whether an inode may go to another directory: whatever is no directory may. */
static view_result may_go_to(const change *c, const inode_row *row, uint64_t dir) {
  return S_ISDIR(row->mode) ? is_outside(c, dir, row->ino) : VIEW_FOUND;
}

static void begin(change *c, const move *m, uint16_t kind) {
  begin_record(c, kind, m->row.ino, m->row.mode & S_IFMT, m->old_dir);
  set_fh(c, m->new_dir);
}

static view_result end(change *c, const move *m) {
  view_result result = record_two(c, m->old_name, m->new_name);
  return named_in(named_in(result, m->old_dir, m->old_name), m->new_dir, m->new_name);
}

static view_result to_free(change *c, const move *m) {
  bool moves_dir = S_ISDIR(m->row.mode) && m->old_dir != m->new_dir;
  if (moves_dir && !rule_moves_dir(&m->from, &m->to)) return VIEW_BROKEN;
  view_result result = moves_dir ? is_outside(c, m->new_dir, m->row.ino) : VIEW_FOUND;
  if (result != VIEW_FOUND) return result;
  begin(c, m, INTENT_RENAMED);
  if (moves_dir) set_owner(c, m->from.nlink - 1, m->to.nlink + 1);
  return end(c, m);
}

/* What had the new name loses it. Its maker may have it open, and the daemon not know: it keeps what was replaced until the kernel
 * forgets it, and learns of the open before that of the name. */
static view_result over_other(change *c, const move *m) {
  bool is_dir = S_ISDIR(m->row.mode), crosses = m->old_dir != m->new_dir;
  if (!rule_replace(&m->row, &m->other) || (is_dir && !rule_rmdir(&m->to, &m->other))) return VIEW_BROKEN;
  if (is_dir && crosses && m->from.nlink <= 2) return VIEW_BROKEN;
  view_result result = is_dir ? is_empty(c, m->other.ino) : VIEW_FOUND;
  if (result == VIEW_FOUND && crosses) result = may_go_to(c, &m->row, m->new_dir);
  if (result != VIEW_FOUND) return result;
  begin(c, m, INTENT_REPLACED);
  if (is_dir) set_owner(c, m->from.nlink - 1, crosses ? m->to.nlink : m->to.nlink - 1); /* one went; where it crosses, one came */
  set_flags(c, is_dir ? 0 : m->other.nlink - 1);
  set_other(c, m->other.ino);
  return end(c, m);
}

static view_result exchange(change *c, const move *m) {
  bool crosses = m->old_dir != m->new_dir, one = S_ISDIR(m->row.mode), other = S_ISDIR(m->other.mode);
  if (crosses && one && !other && !rule_moves_dir(&m->from, &m->to)) return VIEW_BROKEN;
  if (crosses && other && !one && !rule_moves_dir(&m->to, &m->from)) return VIEW_BROKEN;
  if (rule_is_top(m->other.ino)) return VIEW_BROKEN;
  view_result result = crosses ? may_go_to(c, &m->row, m->new_dir) : VIEW_FOUND;
  if (result == VIEW_FOUND && crosses) result = may_go_to(c, &m->other, m->old_dir);
  if (result != VIEW_FOUND) return result;
  begin(c, m, INTENT_EXCHANGED);
  if (crosses && one != other) set_owner(c, m->from.nlink + other - one, m->to.nlink + one - other);
  set_flags(c, m->other.mode & S_IFMT);
  set_other(c, m->other.ino);
  return end(c, m);
}

static view_result rename_from(change *c) {
  move m = {0};
  if (!parse(c->r, &m) || m.flags & ~(RULE_NOREPLACE | RULE_EXCHANGE)) return VIEW_BROKEN;
  view_result result = find(c, m.old_dir, m.old_name, &m.from, &m.row);
  if (result != VIEW_FOUND) return result;
  result = find(c, m.new_dir, m.new_name, &m.to, &m.other);
  if (result == VIEW_ABSENT) return m.flags & RULE_EXCHANGE ? VIEW_BROKEN : to_free(c, &m);
  if (result != VIEW_FOUND) return result;
  if (m.flags & RULE_NOREPLACE || m.row.ino == m.other.ino) return VIEW_BROKEN;
  return m.flags & RULE_EXCHANGE ? exchange(c, &m) : over_other(c, &m);
}

bool changes_rename(const request *r) { return change_make(r, rename_from); }
