/* See nests.h. Hashes are FNV-1a of 64 bits; two names with one hash cost a forwarded request, nothing else. */
#include "nests.h"

#include <pthread.h>
#include <string.h>
#include <sys/stat.h>

#include "births.h"
#include "index.h"

#ifndef NESTS_MAX /* the tests build with small ones, which they fill */
#define NESTS_MAX 4096
#define NAMES_MAX (1u << 19)
#endif
#define WAITERS_MAX 256

typedef struct {
  uint64_t dir, key; /* `key` marks its names: never used again */
  bool serving, has_gid;
  uint32_t gid;
} nest;

static nest nests[NESTS_MAX];
static index_entry nest_entries[2 * NESTS_MAX], name_entries[2 * NAMES_MAX];
static index_table nest_index = {nest_entries, 2 * NESTS_MAX - 1}, name_index = {name_entries, 2 * NAMES_MAX - 1};
static uint32_t nests_used, names_used;
static uint64_t next_key = 1;
static uint32_t names_pending; /* forwarded requests that change names and are not answered */
static uint32_t waiting[WAITERS_MAX], waiting_used; /* seqs of NEST_OPENs that wait for names_pending to be 0 */

static uint64_t hash_of(const uint8_t *name, size_t len) {
  uint64_t h = UINT64_C(0xCBF29CE484222325);
  while (len--) h = (h ^ *name++) * UINT64_C(0x100000001B3);
  return h;
}

/* -- nests, with the lock held ---------------------------------------------------------------------------------- */
static void forget_all(void) {
  memset(nest_entries, 0, sizeof nest_entries);
  memset(name_entries, 0, sizeof name_entries);
  nests_used = names_used = 0;
}

static nest *nest_find(uint64_t dir) {
  uint32_t slot = index_get(&nest_index, dir, 0);
  return slot == INDEX_NONE ? NULL : &nests[slot];
}

static bool has_name(const nest *n, uint64_t hash) { return index_get(&name_index, n->key, hash) != INDEX_NONE; }

/* False: there was no room, and every nest is forgotten. */
static bool add_name(const nest *n, uint64_t hash) {
  if (has_name(n, hash)) return true;
  if (names_used == NAMES_MAX) {
    forget_all();
    return false;
  }
  index_put(&name_index, n->key, hash, 0);
  names_used++;
  return true;
}

static nest *nest_add(uint64_t dir, bool serving, bool has_gid, uint32_t gid) {
  nest *n = nest_find(dir);
  if (!n) {
    if (nests_used == NESTS_MAX) forget_all();
    n = &nests[nests_used];
    index_put(&nest_index, dir, 0, nests_used++);
  }
  *n = (nest){.dir = dir, .key = next_key++, .serving = serving, .has_gid = has_gid, .gid = gid};
  return n;
}

/* Its slot stays, and serves no request: slots come back when all are forgotten. */
static void nest_end(uint64_t dir) {
  nest *n = nest_find(dir);
  if (n) {
    index_remove(&nest_index, dir, 0);
    n->serving = false;
  }
}

/* -- what the daemon says --------------------------------------------------------------------------------------- */
int nests_change(uint64_t dir, uint32_t action, bool has_gid, uint32_t gid, uint32_t seq) {
  int result = 0;
  pthread_mutex_lock(&births_lock);
  nest *n = nest_find(dir);
  switch (action) {
    case NEST_OPEN:
      if (!births_have_stream(dir) || waiting_used == WAITERS_MAX) {
        result = 2;
      } else {
        nest_add(dir, false, has_gid, gid);
        if (names_pending) {
          waiting[waiting_used++] = seq;
          result = 1;
        }
      }
      break;
    case NEST_SERVE:
      if (n) n->serving = true;
      else result = 2;
      break;
    case NEST_END: nest_end(dir); break;
    default: forget_all(); break;
  }
  pthread_mutex_unlock(&births_lock);
  return result;
}

void nests_names(uint64_t dir, const uint8_t *packed, size_t len) {
  pthread_mutex_lock(&births_lock);
  nest *n = nest_find(dir);
  while (n && len && len > packed[0]) {
    if (!add_name(n, hash_of(packed + 1, packed[0]))) n = NULL;
    len -= 1u + packed[0];
    packed += 1u + packed[0];
  }
  pthread_mutex_unlock(&births_lock);
}

/* -- names in requests ------------------------------------------------------------------------------------------ */
size_t name_at(const request *r, size_t at, const uint8_t **name) {
  if (at >= r->body_len) return 0;
  *name = r->body + at;
  const uint8_t *end = memchr(*name, 0, r->body_len - at);
  return end ? (size_t)(end - *name) : 0;
}

/* Where a request that adds a name says so: the directory and the name's place. */
static bool target_of(const request *r, uint64_t *dir, const uint8_t **name, size_t *len) {
  size_t at = 0;
  *dir = r->header.nodeid;
  switch (r->header.opcode) {
    case WIRE_SYMLINK: break;
    case WIRE_MKDIR:
    case WIRE_LINK: at = 8; break;
    case WIRE_MKNOD:
    case WIRE_CREATE: at = 16; break;
    case WIRE_RENAME:
    case WIRE_RENAME2: {
      size_t fixed = r->header.opcode == WIRE_RENAME ? 8 : 16;
      if (r->body_len < fixed) return false;
      memcpy(dir, r->body, sizeof *dir);
      const uint8_t *old;
      size_t old_len = name_at(r, fixed, &old);
      at = fixed + old_len + 1;
      break;
    }
    default: return false;
  }
  *len = name_at(r, at, name);
  return *len > 0;
}

static bool changes_names(uint32_t opcode) {
  switch (opcode) {
    case WIRE_SYMLINK:
    case WIRE_MKDIR:
    case WIRE_LINK:
    case WIRE_MKNOD:
    case WIRE_CREATE:
    case WIRE_UNLINK:
    case WIRE_RMDIR:
    case WIRE_RENAME:
    case WIRE_RENAME2: return true;
    default: return false;
  }
}

/* -- what is forwarded, and its answer -------------------------------------------------------------------------- */
bool nests_minds(const request *r) { return changes_names(r->header.opcode); }

void nests_forwarded(const request *r) {
  uint64_t dir;
  const uint8_t *name;
  size_t len;
  pthread_mutex_lock(&births_lock);
  if (r->header.opcode == WIRE_SETATTR) {
    nest_end(r->header.nodeid); /* who owns what is made there may change */
  } else if (changes_names(r->header.opcode)) {
    names_pending++;
    nest *n = target_of(r, &dir, &name, &len) ? nest_find(dir) : NULL;
    if (n) add_name(n, hash_of(name, len));
  }
  pthread_mutex_unlock(&births_lock);
}

/* Answers to what was forwarded, with the lock held. `len` is that of the whole reply. */
static void heard_of_change(const pending *asked, const wire_out_header *header, const uint8_t *reply, size_t len) {
  wire_entry_out entry;
  if (names_pending) names_pending--;
  /* A new directory is empty: a nest from the start. */
  if (asked->opcode != WIRE_MKDIR || header->error || len != sizeof *header + sizeof entry) return;
  memcpy(&entry, reply + sizeof *header, sizeof entry);
  if (births_have_page() && births_have_stream(entry.nodeid)) nest_add(entry.nodeid, true, entry.attr.mode & S_ISGID, entry.attr.gid);
}

void nests_answered(const pending *asked, const uint8_t *reply, size_t len) {
  wire_out_header header;
  memcpy(&header, reply, sizeof header);
  uint32_t due[WAITERS_MAX], n_due = 0;
  pthread_mutex_lock(&births_lock);
  if (changes_names(asked->opcode)) {
    heard_of_change(asked, &header, reply, len);
    if (!names_pending) {
      memcpy(due, waiting, waiting_used * sizeof due[0]);
      n_due = waiting_used;
      waiting_used = 0;
    }
  }
  pthread_mutex_unlock(&births_lock);
  for (uint32_t i = 0; i < n_due; i++) event_send(EV_NEST, 0, due[i], NULL, 0);
}

/* -- answering -------------------------------------------------------------------------------------------------- */
bool nests_lookup(const request *r) {
  const uint8_t *name;
  size_t len = name_at(r, 0, &name);
  if (!len || len > NAME_MAX_LEN || name[0] == '.') return false;
  pthread_mutex_lock(&births_lock);
  const nest *n = nest_find(r->header.nodeid);
  bool absent = n && n->serving && !has_name(n, hash_of(name, len));
  pthread_mutex_unlock(&births_lock);
  if (!absent) return false;
  wire_entry_out out = {.entry_valid = ENTRY_VALID_S};
  device_reply(r->header.unique, 0, &out, sizeof out);
  return true;
}

/* -- changes that were made here -------------------------------------------------------------------------------- */
void nests_changed(uint64_t dir, const uint8_t *name, size_t len) {
  pthread_mutex_lock(&births_lock);
  nest *n = nest_find(dir);
  if (n) add_name(n, hash_of(name, len));
  pthread_mutex_unlock(&births_lock);
}

void nests_made(uint64_t dir, uint32_t mode, uint32_t gid) {
  pthread_mutex_lock(&births_lock);
  nest_add(dir, true, mode & S_ISGID, gid);
  pthread_mutex_unlock(&births_lock);
}

/* -- births, with the lock held --------------------------------------------------------------------------------- */
bool nests_take_name(uint64_t dir, const uint8_t *name, size_t len, uint32_t *gid) {
  const nest *n = nest_find(dir);
  if (!n || !n->serving) return false;
  uint64_t hash = hash_of(name, len);
  if (has_name(n, hash) || !add_name(n, hash)) return false;
  if (n->has_gid) *gid = n->gid;
  return true;
}

void nests_reset(void) {
  forget_all();
  names_pending = waiting_used = 0;
}
