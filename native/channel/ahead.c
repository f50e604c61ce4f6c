/* See ahead.h. */
#include "ahead.h"

#include <pthread.h>
#include <time.h>

#define HANDS_MAX 8 /* of names told together: so many may walk through directories at a time */
#define ENTRIES_MAX 512
#define GOOD_NS INT64_C(1000000000)

typedef struct {
  uint64_t dir;
  int64_t until_ns;
  uint32_t used, at; /* entries; where the next one is looked for first */
  uint32_t offsets[ENTRIES_MAX];
  uint8_t packed[PROTO_MESSAGE_MAX];
} hand;

static pthread_mutex_t ahead_lock = PTHREAD_MUTEX_INITIALIZER;
static hand hands[HANDS_MAX];
static uint32_t next_hand;
static bool any; /* hands that are not empty */
static uint32_t moves;

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

bool ahead_harmless(uint32_t opcode) {
  switch (opcode) {
    case WIRE_LOOKUP:
    case WIRE_FORGET:
    case WIRE_BATCH_FORGET:
    case WIRE_GETATTR:
    case WIRE_READLINK:
    case WIRE_READ:
    case WIRE_STATFS:
    case WIRE_GETXATTR:
    case WIRE_LISTXATTR:
    case WIRE_OPENDIR:
    case WIRE_READDIRPLUS:
    case WIRE_RELEASEDIR:
    case WIRE_ACCESS:
    case WIRE_INTERRUPT:
    case WIRE_LSEEK:
    case WIRE_STATX: return true;
    default: return false;
  }
}

uint32_t ahead_moves(void) {
  pthread_mutex_lock(&ahead_lock);
  uint32_t now = moves;
  pthread_mutex_unlock(&ahead_lock);
  return now;
}

void ahead_forget(void) {
  pthread_mutex_lock(&ahead_lock);
  moves++;
  for (uint32_t i = 0; any && i < HANDS_MAX; i++) hands[i].used = 0;
  any = false;
  pthread_mutex_unlock(&ahead_lock);
}

/* Where the entries are; 0: they are not whole. */
static uint32_t index_entries(hand *h, size_t len) {
  size_t at = 0;
  uint32_t n = 0;
  while (at < len && n < ENTRIES_MAX) {
    if (len - at <= WIRE_ENTRY_OUT_LEN) return 0;
    size_t name_len = h->packed[at + WIRE_ENTRY_OUT_LEN];
    if (len - at - WIRE_ENTRY_OUT_LEN - 1 < name_len) return 0;
    h->offsets[n++] = (uint32_t)at;
    at += WIRE_ENTRY_OUT_LEN + 1 + name_len;
  }
  return n;
}

void ahead_put(uint64_t dir, uint32_t seq, const uint8_t *packed, size_t len) {
  pthread_mutex_lock(&ahead_lock);
  hand *h = &hands[next_hand];
  if (seq == moves && len <= sizeof h->packed) {
    memcpy(h->packed, packed, len);
    h->dir = dir;
    h->until_ns = now_ns() + GOOD_NS;
    h->at = 0;
    h->used = index_entries(h, len);
    any = any || h->used;
    next_hand = (next_hand + 1) % HANDS_MAX;
  }
  pthread_mutex_unlock(&ahead_lock);
}

/* With the lock. Who walks asks for one after the other: the search begins behind the last that was asked for. */
static const uint8_t *find(hand *h, const uint8_t *name, size_t len) {
  for (uint32_t i = 0; i < h->used; i++) {
    uint32_t which = (h->at + i) % h->used;
    const uint8_t *entry = h->packed + h->offsets[which], *has = entry + WIRE_ENTRY_OUT_LEN;
    if (has[0] != len || memcmp(has + 1, name, len)) continue;
    h->at = which + 1;
    return entry;
  }
  return NULL;
}

bool ahead_lookup(const request *r) {
  uint8_t out[WIRE_ENTRY_OUT_LEN];
  const uint8_t *end = r->body_len ? memchr(r->body, 0, r->body_len) : NULL, *found = NULL;
  if (!end) return false;
  pthread_mutex_lock(&ahead_lock);
  int64_t now = any ? now_ns() : 0;
  for (uint32_t i = 0; any && !found && i < HANDS_MAX; i++)
    if (hands[i].used && hands[i].dir == r->header.nodeid && now < hands[i].until_ns)
      found = find(&hands[i], r->body, (size_t)(end - r->body));
  if (found) memcpy(out, found, sizeof out);
  pthread_mutex_unlock(&ahead_lock);
  if (found) device_reply(r->header.unique, 0, out, sizeof out);
  return found;
}
