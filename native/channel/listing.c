/* Open directories: see names.h. A position is the number of entries told so far, "." and ".." included. A handle remembers at which
 * names its last pages ended, fewer of those that are long ago: a page starts behind the nearest one.
 *
 * Owner: lists_lock. The kernel reads a handle one page at a time.
 */
#include <pthread.h>
#include <stdlib.h>

#include "names.h"

#ifndef LISTS_MAX
#define LISTS_MAX 4096u
#endif
#define MARKS_MAX 16u
#define FIRST_POSITION 2 /* behind "." and ".." */
#define SERIAL_SHIFT 16
#define DIRENT_LEN 24

typedef struct {
  uint64_t position;
  uint8_t len, name[255];
} mark;

typedef struct {
  uint64_t fh;
  uint32_t used;
  mark marks[MARKS_MAX];
} listing;

_Static_assert(LISTS_MAX <= 1u << SERIAL_SHIFT, "a slot is in the handle");

static pthread_mutex_t lists_lock = PTHREAD_MUTEX_INITIALIZER;
static listing *lists[LISTS_MAX];
static uint64_t serial;

uint64_t listing_open(void) {
  listing *l = malloc(sizeof *l);
  if (!l) return 0;
  pthread_mutex_lock(&lists_lock);
  uint32_t slot = 0;
  while (slot < LISTS_MAX && lists[slot]) slot++;
  uint64_t fh = 0;
  if (slot < LISTS_MAX) {
    fh = LIST_FH | ++serial << SERIAL_SHIFT | slot;
    l->fh = fh;
    l->used = 1;
    l->marks[0] = (mark){.position = FIRST_POSITION};
    lists[slot] = l;
  }
  pthread_mutex_unlock(&lists_lock);
  if (!fh) free(l);
  return fh;
}

/* With the lock. */
static listing **place_of(uint64_t fh) {
  listing **at = &lists[fh % (1u << SERIAL_SHIFT) % LISTS_MAX];
  return *at && (*at)->fh == fh ? at : NULL;
}

bool listing_close(uint64_t fh) {
  pthread_mutex_lock(&lists_lock);
  listing **at = place_of(fh), *gone = at ? *at : NULL;
  if (at) *at = NULL;
  pthread_mutex_unlock(&lists_lock);
  free(gone);
  return gone;
}

bool listing_from(uint64_t fh, uint64_t start, uint64_t *position, uint8_t *name, size_t *len) {
  pthread_mutex_lock(&lists_lock);
  listing **at = place_of(fh);
  if (at) {
    listing *l = *at;
    if (!start) l->used = 1; /* names may be others by now */
    uint32_t i = l->used - 1;
    while (i && l->marks[i].position > start) i--;
    *position = l->marks[i].position;
    *len = l->marks[i].len;
    memcpy(name, l->marks[i].name, *len);
  }
  pthread_mutex_unlock(&lists_lock);
  return at;
}

void listing_mark(uint64_t fh, uint64_t position, span name) {
  pthread_mutex_lock(&lists_lock);
  listing **at = place_of(fh);
  if (at && position > (*at)->marks[(*at)->used - 1].position) {
    listing *l = *at;
    if (l->used == MARKS_MAX) {
      for (uint32_t i = 1; 2 * i < MARKS_MAX; i++) l->marks[i] = l->marks[2 * i];
      l->used = MARKS_MAX / 2;
    }
    mark *m = &l->marks[l->used++];
    m->position = position;
    m->len = (uint8_t)name.len;
    memcpy(m->name, name.at, name.len);
  }
  pthread_mutex_unlock(&lists_lock);
}

void listing_reset(void) {
  for (uint32_t i = 0; i < LISTS_MAX; i++) {
    free(lists[i]);
    lists[i] = NULL;
  }
}

bool page_add(list_page *page, span name, uint64_t ino, uint32_t mode, uint64_t position, const wire_entry_out *entry) {
  size_t padded = (name.len + 7) & ~(size_t)7, len = sizeof *entry + DIRENT_LEN + padded;
  if (page->room - page->used < len) return false;
  uint8_t *at = page->data + page->used;
  memcpy(at, entry, sizeof *entry);
  at += sizeof *entry;
  uint32_t sizes[2] = {(uint32_t)name.len, (mode & S_IFMT) >> 12};
  memcpy(at, &ino, 8);
  memcpy(at + 8, &position, 8);
  memcpy(at + 16, sizes, 8);
  memset(at + DIRENT_LEN, 0, padded);
  memcpy(at + DIRENT_LEN, name.at, name.len);
  page->used += len;
  return true;
}
