/* See view.h. Keys are engine/catalog/tables.py's: u32 stream, the table's tag, its own key, all big-endian. */
#include "view.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "births.h"
#include "store.h"

#define TREES_MAX 256
#define KEY_LEN_MAX (4 + 1 + 8 + 255)
#define COUNTER_INTENTS "nintents" /* the tag, then the counter's name */
#define POSITION_MASK ((UINT64_C(1) << 40) - 1)
#define NAME_PATH_LEN 48

typedef struct {
  uint64_t stream;
  atomic_uint answers;
  uint32_t slot;
  int log_fd, dir_fd;
} tree;

static tree trees[TREES_MAX];
static atomic_uint trees_used;
static intent_page *page;

/* -- what the daemon says --------------------------------------------------------------------------------------- */
int view_open(const char *path) { return store_open(path); }

static tree *tree_of(uint64_t stream) {
  unsigned used = atomic_load(&trees_used);
  for (unsigned i = 0; i < used; i++)
    if (trees[i].stream == stream) return &trees[i];
  return NULL;
}

bool view_tree(uint64_t stream_id, uint32_t answers) {
  tree *t = tree_of(stream_id);
  if (t) {
    bool known = !(answers & ANSWER_INTENTS) || t->log_fd >= 0;
    if (known) atomic_store(&t->answers, answers);
    return known;
  }
  unsigned used = atomic_load(&trees_used);
  if (used == TREES_MAX) return false;
  t = &trees[used];
  *t = (tree){.stream = stream_id, .log_fd = -1, .dir_fd = -1};
  intent_page *shared;
  bool has_log = births_stream(stream_id, &shared, &t->slot, &t->log_fd, &t->dir_fd);
  if (has_log && !page) page = shared;
  if ((answers & ANSWER_INTENTS) && !has_log) return false;
  atomic_store(&t->answers, answers);
  atomic_store(&trees_used, used + 1);
  return true;
}

void view_reset(void) {
  atomic_store(&trees_used, 0);
  page = NULL;
  unfolded_reset();
}

/* -- keys ------------------------------------------------------------------------------------------------------- */
static uint8_t *put_u64(uint8_t *at, uint64_t n) {
  for (int i = 0; i < 8; i++) at[i] = (uint8_t)(n >> (56 - 8 * i));
  return at + 8;
}

static size_t lead_of(const view *v, char tag, uint8_t *key) {
  for (int i = 0; i < 4; i++) key[i] = (uint8_t)(v->stream >> (24 - 8 * i));
  key[4] = (uint8_t)tag;
  return 5;
}

static row_result get(const view *v, char tag, uint64_t ino, span more, span *value) {
  uint8_t key[KEY_LEN_MAX];
  if (more.len > 255) return ROW_ABSENT;
  uint8_t *end = put_u64(key + lead_of(v, tag, key), ino);
  memcpy(end, more.at, more.len);
  return store_get(STORE_NAMESPACE, (span){key, (size_t)(end - key) + more.len}, value);
}

static const span NOTHING = {(const uint8_t *)"", 0};

/* -- a view ----------------------------------------------------------------------------------------------------- */
/* How far the picture has the tenant's log. */
static bool folded_of(const view *v, uint64_t *out) {
  uint8_t key[4 + sizeof COUNTER_INTENTS];
  span value;
  lead_of(v, 0, key);
  memcpy(key + 4, COUNTER_INTENTS, sizeof COUNTER_INTENTS - 1);
  if (store_get(STORE_META, (span){key, 4 + sizeof COUNTER_INTENTS - 1}, &value) != ROW_FOUND) return false;
  if (!number_row_decode(value, out)) return false;
  *out &= POSITION_MASK;
  return true;
}

/* Lays over the picture what it does not have. */
static over_state lay(view *v, const tree *t, uint64_t end) {
  v->over = (over_view){.slot = t->slot};
  if (!folded_of(v, &v->over.folded)) return OVER_LOST;
  v->laid = v->over.folded < end;
  return v->laid ? unfolded_read(v->over, t->log_fd, end) : OVER_READY;
}

bool view_begin(view *v, uint64_t nodeid, uint32_t answer) {
  const tree *t = tree_of(nodeid >> STREAM_SHIFT);
  uint32_t answers = t ? atomic_load(&t->answers) : 0;
  if (!(answers & answer)) return false;
  for (over_state state = OVER_OLD; state == OVER_OLD;) {
    *v = (view){.stream = t->stream, .dir_fd = t->dir_fd};
    /* Read before the picture is taken: what is in the log by now is in one of the two. */
    uint64_t end = answers & ANSWER_INTENTS ? atomic_load(&page->streams[t->slot].end) : 0;
    if (!store_begin()) return false;
    state = end ? lay(v, t, end) : OVER_READY;
    if (state == OVER_READY) return true;
    store_end();
    if (state == OVER_LOST) return false;
  }
  return false;
}

void view_end(void) { store_end(); }

static view_result from_state(over_state state) { return state == OVER_OLD ? VIEW_OLD : VIEW_BROKEN; }

view_result view_name(const view *v, uint64_t dir, span name, uint64_t *ino) {
  if (v->laid) {
    over_what what;
    over_state state = unfolded_name(v->over, dir, name, &what, ino);
    if (state != OVER_READY) return from_state(state);
    if (what != OVER_NOTHING) return what == OVER_THERE ? VIEW_FOUND : VIEW_ABSENT;
  }
  span value;
  uint32_t mode;
  row_result got = get(v, 'e', dir, name, &value);
  if (got == ROW_ABSENT) return VIEW_ABSENT;
  return got == ROW_FOUND && dentry_row_decode(value, ino, &mode) ? VIEW_FOUND : VIEW_BROKEN;
}

view_result view_inode(const view *v, uint64_t ino, inode_row *out) {
  over_inode over = {0};
  if (v->laid) {
    over_state state = unfolded_inode(v->over, ino, &over);
    if (state != OVER_READY) return from_state(state);
    if (over.gone) return VIEW_ABSENT;
  }
  span value;
  if (over.born) {
    *out = over.row;
  } else {
    row_result got = get(v, 'i', ino, NOTHING, &value);
    if (got == ROW_ABSENT) return VIEW_ABSENT;
    if (got != ROW_FOUND || !inode_row_decode(value, out) || out->ino != ino) return VIEW_BROKEN;
  }
  over_apply(&over, out);
  if (!out->nlink) return VIEW_ABSENT;
  return VIEW_FOUND;
}

size_t view_target(const view *v, const inode_row *row, uint8_t *out) {
  if (!S_ISLNK(row->mode)) return 0;
  if (!row->target.len) return v->laid ? unfolded_target(v->over, row->ino, out) : 0;
  if (row->target.len > INTENT_NAME_MAX) return 0;
  memcpy(out, row->target.at, row->target.len);
  return row->target.len;
}

birth_state view_birth(const view *v, uint64_t ino) {
  over_inode over;
  if (!v->laid || unfolded_inode(v->over, ino, &over) != OVER_READY || !over.born || !S_ISREG(over.row.mode)) return BIRTH_NONE;
  return over.fields[OVER_CLOSED].end ? BIRTH_CLOSED : BIRTH_OPEN;
}

static void backing_path(const inode_row *row, char path[NAME_PATH_LEN]) {
  snprintf(path, NAME_PATH_LEN, "%llu.%llu", (unsigned long long)row->ino, (unsigned long long)row->generation);
}

bool view_set_times(const view *v, const inode_row *row, const struct timespec times[2]) {
  char path[NAME_PATH_LEN];
  backing_path(row, path);
  return v->dir_fd >= 0 && !utimensat(v->dir_fd, path, times, AT_SYMLINK_NOFOLLOW);
}

view_result view_dirty(const view *v, const inode_row *row, struct stat *st) {
  if (!S_ISREG(row->mode)) return VIEW_ABSENT;
  over_inode over = {0};
  if (v->laid) {
    over_state state = unfolded_inode(v->over, row->ino, &over);
    if (state != OVER_READY) return from_state(state);
  }
  if (!over.born) {
    span value;
    row_result got = get(v, 'y', row->ino, NOTHING, &value);
    if (got == ROW_ABSENT) return VIEW_ABSENT;
    if (got != ROW_FOUND) return VIEW_BROKEN;
  }
  char path[NAME_PATH_LEN];
  backing_path(row, path);
  if (v->dir_fd < 0 || fstatat(v->dir_fd, path, st, AT_SYMLINK_NOFOLLOW)) return VIEW_BROKEN;
  return VIEW_FOUND;
}

/* -- bytes ------------------------------------------------------------------------------------------------------ */
intent_page *view_page(void) { return atomic_load(&trees_used) ? page : NULL; }

static view_result object_of(const view *v, const inode_row *row, object_row *out) {
  uint8_t generation[8];
  span value;
  put_u64(generation, row->generation);
  row_result got = get(v, 'o', row->ino, (span){generation, sizeof generation}, &value);
  if (got != ROW_FOUND) return got == ROW_ABSENT ? VIEW_ABSENT : VIEW_BROKEN;
  return object_row_decode(value, out) && out->ino == row->ino && out->generation == row->generation ? VIEW_FOUND : VIEW_BROKEN;
}

view_result view_published(const view *v, const inode_row *row) {
  object_row object;
  view_result result = object_of(v, row, &object);
  if (result != VIEW_FOUND) return result;
  return object.state == OBJECT_PUBLISHED || object.state == OBJECT_TOMBSTONED ? VIEW_FOUND : VIEW_ABSENT;
}

static view_result mask_of(const view *v, uint64_t chunk, uint64_t *mask) {
  uint8_t key[5 + 8];
  span value;
  put_u64(key + lead_of(v, 'r', key), chunk);
  row_result got = store_get(STORE_CHUNKS, (span){key, sizeof key}, &value);
  if (got != ROW_FOUND) return got == ROW_ABSENT ? VIEW_ABSENT : VIEW_BROKEN;
  return residency_row_decode(value, mask) ? VIEW_FOUND : VIEW_BROKEN;
}

/* Whether the mask has every block of a chunk of so many bytes. */
static bool is_full(uint64_t mask, uint64_t len, uint64_t block_len) {
  uint64_t blocks = block_len ? (len - 1) / block_len + 1 : 0;
  return blocks && blocks <= 64 && mask == UINT64_MAX >> (64 - blocks);
}

view_result view_whole(const view *v, uint64_t ino, uint64_t block_len, whole_file *out) {
  inode_row row;
  object_row object;
  over_inode over = {0};
  uint64_t mask;
  span dirty;
  view_result result = view_inode(v, ino, &row);
  if (result != VIEW_FOUND) return result;
  if (v->laid) {
    over_state state = unfolded_inode(v->over, ino, &over);
    if (state != OVER_READY) return from_state(state);
  }
  if (over.born || !S_ISREG(row.mode) || get(v, 'y', ino, NOTHING, &dirty) != ROW_ABSENT) return VIEW_ABSENT;
  result = object_of(v, &row, &object);
  if (result != VIEW_FOUND) return result;
  if (object.state != OBJECT_SEALED && object.state != OBJECT_PUBLISHED) return VIEW_ABSENT;
  if (!object.chunk || !object.size || !object.has_backing || object.backing_size != object.size) return VIEW_ABSENT;
  result = mask_of(v, object.chunk, &mask);
  if (result != VIEW_FOUND) return result;
  if (!is_full(mask, object.size, block_len)) return VIEW_ABSENT;
  *out = (whole_file){object.generation, object.backing_inode, object.backing_size, object.backing_mtime_ns};
  return VIEW_FOUND;
}

/* -- directories ------------------------------------------------------------------------------------------------ */
static int compare(span a, span b) {
  int order = memcmp(a.at, b.at, a.len < b.len ? a.len : b.len);
  return order ? order : a.len < b.len ? -1 : a.len > b.len;
}

/* The name in a key found, if the key is one of the walk's. */
static view_result take_row(walk *w, row_result got, span key, span value) {
  w->rows_end = got != ROW_FOUND || key.len < sizeof w->lead || memcmp(key.at, w->lead, sizeof w->lead);
  if (got == ROW_BROKEN) return VIEW_BROKEN;
  if (w->rows_end) return VIEW_ABSENT;
  w->row.name = (span){key.at + sizeof w->lead, key.len - sizeof w->lead};
  if (w->row.name.len > 255) return VIEW_BROKEN;
  if (!w->xattrs) return dentry_row_decode(value, &w->row.ino, &w->row.mode) ? VIEW_FOUND : VIEW_BROKEN;
  span bytes;
  if (!bytes_row_decode(value, &bytes)) return VIEW_BROKEN;
  w->row.size = bytes.len;
  return VIEW_FOUND;
}

static view_result next_row(walk *w) {
  span key, value;
  row_result got = store_next(&key, &value);
  return take_row(w, got, key, value);
}

static view_result begin_walk(const view *v, walk *w, uint64_t dir, span after) {
  uint8_t key[KEY_LEN_MAX];
  span found = NOTHING, value = NOTHING;
  w->begun = true;
  w->over->count = 0;
  w->over->cut = false;
  if (v->laid) {
    over_state state = unfolded_names(v->over, w->xattrs ? XATTRS_OF(dir) : dir, after, w->over);
    if (state != OVER_READY) return from_state(state);
  }
  put_u64(w->lead + lead_of(v, w->xattrs ? 'x' : 'e', w->lead), dir);
  memcpy(key, w->lead, sizeof w->lead);
  memcpy(key + sizeof w->lead, after.at, after.len);
  row_result got = store_seek((span){key, sizeof w->lead + after.len}, &found, &value);
  view_result result = take_row(w, got, found, value);
  if (result == VIEW_FOUND && !compare(w->row.name, after)) return next_row(w);
  return result;
}

view_result view_walk(const view *v, walk *w, uint64_t dir, span after, named *out) {
  view_result begun = w->begun ? VIEW_FOUND : begin_walk(v, w, dir, after);
  if (begun > VIEW_FOUND) return begun;
  for (;;) {
    const over_name *over = w->over_at < w->over->count ? &w->over->names[w->over_at] : NULL;
    if (!over && (w->rows_end || w->over->cut)) return VIEW_ABSENT;
    int order = !over ? -1 : w->rows_end ? 1 : compare(w->row.name, (span){over->name, over->len});
    *out = w->row;
    if (order >= 0) {
      *out = (named){{over->name, over->len}, over->ino, over->mode, over->size};
      w->over_at++;
    }
    if (order <= 0 && next_row(w) == VIEW_BROKEN) return VIEW_BROKEN;
    if (order < 0 || over->there) return VIEW_FOUND;
  }
}

/* -- xattrs ----------------------------------------------------------------------------------------------------- */
view_result view_xattr(const view *v, uint64_t ino, span name, uint8_t *room, span *value) {
  if (v->laid) {
    over_what what;
    *value = (span){room, 0};
    over_state state = unfolded_xattr(v->over, ino, name, &what, room, &value->len);
    if (state != OVER_READY) return from_state(state);
    if (what != OVER_NOTHING) return what == OVER_THERE ? VIEW_FOUND : VIEW_ABSENT;
  }
  span row;
  row_result got = get(v, 'x', ino, name, &row);
  if (got == ROW_ABSENT) return VIEW_ABSENT;
  return got == ROW_FOUND && bytes_row_decode(row, value) ? VIEW_FOUND : VIEW_BROKEN;
}
