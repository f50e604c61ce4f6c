/* A catalog in memory, in the place of store.c, and rows on stdin told as the kernel is (tests/channel/test_told.py). */
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "../../bytes.h"
#include "../rows.h"
#include "../store.h"
#include "../told.h"
#include "harness.h"

#define ROWS_MAX 64
#define KEY_MAX 64
#define VALUE_MAX 256

typedef struct {
  int which;
  size_t key_len, value_len;
  uint8_t key[KEY_MAX], *value; /* of its very length: a read past it is seen */
} fake_row;

static fake_row rows[ROWS_MAX];
static size_t used, cursor;
static bool is_open, in_picture;

static int compare(const fake_row *row, int which, span key) {
  if (row->which != which) return row->which - which;
  int order = memcmp(row->key, key.at, row->key_len < key.len ? row->key_len : key.len);
  return order ? order : row->key_len < key.len ? -1 : row->key_len > key.len;
}

void fake_put(const uint8_t *data, size_t len) {
  if (len < 2 || data[1] > KEY_MAX || len - 2 < data[1] || len - 2 - data[1] > VALUE_MAX || used == ROWS_MAX) return;
  span key = {data + 2, data[1]};
  int which = data[0] % STORES;
  size_t at = 0;
  while (at < used && compare(&rows[at], which, key) < 0) at++;
  if (at < used && !compare(&rows[at], which, key)) return;
  memmove(&rows[at + 1], &rows[at], (used - at) * sizeof rows[0]);
  used++;
  fake_row *row = &rows[at];
  *row = (fake_row){.which = which, .key_len = key.len, .value_len = len - 2 - key.len};
  memcpy(row->key, key.at, key.len);
  row->value = malloc(row->value_len ? row->value_len : 1);
  CHECK(row->value);
  memcpy(row->value, key.at + key.len, row->value_len);
}

void fake_reset(void) {
  CHECK(!in_picture);
  while (used) free(rows[--used].value);
  is_open = false;
}

int store_open(const char *path) {
  CHECK(strlen(path) > 0 || !*path);
  is_open = true;
  return 0;
}
bool store_begin(void) {
  CHECK(!in_picture);
  return in_picture = is_open;
}
void store_end(void) {
  CHECK(in_picture);
  in_picture = false;
}

static row_result told(size_t at, int which, span *key, span *value) {
  if (at >= used || rows[at].which != which) return ROW_ABSENT;
  *key = (span){rows[at].key, rows[at].key_len};
  *value = (span){rows[at].value, rows[at].value_len};
  return ROW_FOUND;
}

row_result store_get(int which, span key, span *value) {
  span found;
  CHECK(in_picture);
  for (size_t at = 0; at < used; at++)
    if (!compare(&rows[at], which, key)) return told(at, which, &found, value);
  return ROW_ABSENT;
}
row_result store_seek(span key, span *found, span *value) {
  CHECK(in_picture);
  for (cursor = 0; cursor < used && compare(&rows[cursor], STORE_NAMESPACE, key) < 0;) cursor++;
  return told(cursor, STORE_NAMESPACE, found, value);
}
row_result store_next(span *found, span *value) {
  CHECK(in_picture);
  return told(++cursor, STORE_NAMESPACE, found, value);
}

/* -- rows told -------------------------------------------------------------------------------------------------- */
static bool read_all(void *to, size_t len) {
  for (size_t done = 0; done < len;) {
    ssize_t got = read(STDIN_FILENO, (uint8_t *)to + done, len - done);
    if (got <= 0) return false;
    done += (size_t)got;
  }
  return true;
}

typedef struct {
  uint32_t row_len, flags, uid, gid, umask, zero; /* flags: 1 uid, 2 gid, 4 a backing file */
  int64_t size, blocks, mtime_s, mtime_ns, ctime_s, ctime_ns, atime_s, atime_ns;
} told_question;

void tell_rows(void) {
  told_question q;
  while (read_all(&q, sizeof q)) {
    uint8_t *row = malloc(q.row_len ? q.row_len : 1);
    CHECK(row && read_all(row, q.row_len));
    inode_row inode;
    wire_entry_out out = {0};
    told_as as = {.has_uid = q.flags & 1, .has_gid = q.flags & 2, .uid = q.uid, .gid = q.gid, .umask = q.umask};
    struct stat st = {.st_size = q.size, .st_blocks = q.blocks, .st_mtim = {q.mtime_s, q.mtime_ns},
                      .st_ctim = {q.ctime_s, q.ctime_ns}, .st_atim = {q.atime_s, q.atime_ns}};
    if (inode_row_decode((span){row, q.row_len}, &inode)) told_entry(&out, &inode, q.flags & 4 ? &st : NULL, &as);
    CHECK(write(STDOUT_FILENO, &out, sizeof out) == sizeof out);
    free(row);
  }
}
