/* See tables.h. Slots are handed out from a free list threaded through the arrays; indexes find them by key. */
#include "tables.h"

#include <string.h>
#include <time.h>

#include "index.h"
#include "wire.h"

pthread_mutex_t tables_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t tables_changed;

static node nodes[NODES_MAX];
static handle handles[HANDLES_MAX];
static pending pendings[PENDING_MAX];
static clear_wait clears[CLEARS_MAX];
static index_entry node_entries[2 * NODES_MAX], handle_entries[2 * HANDLES_MAX], pending_entries[2 * PENDING_MAX],
    caps_entries[2 * CAPS_MAX];
static index_table node_index = {node_entries, 2 * NODES_MAX - 1}, handle_index = {handle_entries, 2 * HANDLES_MAX - 1},
                   pending_index = {pending_entries, 2 * PENDING_MAX - 1}, caps_index = {caps_entries, 2 * CAPS_MAX - 1};

_Static_assert((NODES_MAX & (NODES_MAX - 1)) == 0 && (HANDLES_MAX & (HANDLES_MAX - 1)) == 0, "powers of two");
_Static_assert((PENDING_MAX & (PENDING_MAX - 1)) == 0 && (CAPS_MAX & (CAPS_MAX - 1)) == 0, "powers of two");

/* A table's slots: those never used yet start at `fresh`, those given back are a list. */
typedef struct {
  uint32_t limit, fresh, used, free;
} slots;

static slots node_slots, handle_slots, pending_slots;
static uint32_t caps_count, pending_opens;
static bool caps_overflow;
#define ASKED_SLOTS 4096u
static uint32_t asked_opens[ASKED_SLOTS]; /* OPENs and SETATTRs that the daemon has, by inode */
static clear_wait *clears_free;

static void slots_open(slots *s, uint32_t limit, uint32_t room) {
  *s = (slots){.limit = limit && limit < room ? limit : room, .free = INDEX_NONE};
}

/* A free slot or INDEX_NONE; *next_free is read through the caller's array by this macro's user. */
#define SLOT_TAKE(s, array)                                           \
  ((s).used == (s).limit       ? INDEX_NONE                           \
   : (s).free != INDEX_NONE ? slot_pop(&(s), (array)[(s).free].next_free) \
                            : ((s).used++, (s).fresh++))
#define SLOT_GIVE(s, array, i) ((array)[i].next_free = (s).free, (s).free = (i), (s).used--)

static uint32_t slot_pop(slots *s, uint32_t next) {
  uint32_t slot = s->free;
  s->free = next;
  s->used++;
  return slot;
}

void tables_open(uint32_t nodes_max, uint32_t handles_max, uint32_t pending_max) {
  slots_open(&node_slots, nodes_max, NODES_MAX);
  slots_open(&handle_slots, handles_max, HANDLES_MAX);
  slots_open(&pending_slots, pending_max, PENDING_MAX);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&tables_changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  clears_free = NULL;
  for (size_t i = CLEARS_MAX; i-- > 0;) clears[i].next = clears_free, clears_free = &clears[i];
}

void tables_reset(void) {
  for (uint32_t i = 0; i < node_slots.fresh; i++) bitmap_free(&nodes[i].present), bitmap_free(&nodes[i].dirty);
  memset(nodes, 0, sizeof nodes[0] * node_slots.fresh);
  memset(handles, 0, sizeof handles[0] * handle_slots.fresh);
  memset(node_entries, 0, sizeof node_entries);
  memset(handle_entries, 0, sizeof handle_entries);
  memset(pending_entries, 0, sizeof pending_entries);
  memset(caps_entries, 0, sizeof caps_entries);
  caps_count = pending_opens = 0;
  memset(asked_opens, 0, sizeof asked_opens);
  caps_overflow = false;
  tables_open(node_slots.limit, handle_slots.limit, pending_slots.limit);
}

/* -- nodes ------------------------------------------------------------------------------------------------------ */
node *node_find(uint64_t id) {
  uint32_t slot = index_get(&node_index, id, 0);
  return slot == INDEX_NONE ? NULL : &nodes[slot];
}

static uint32_t users_of(const node *n) { return n->users[0] + n->users[1]; }

/* The old phase is empty: its answers are due, and those that came meanwhile wait for what is in use now. */
static clear_wait *clears_due(node *n) {
  clear_wait *due = NULL;
  while (!n->users[n->phase ^ 1]) {
    clear_wait **tail = &due;
    while (*tail) tail = &(*tail)->next;
    *tail = n->waiting;
    n->waiting = n->queued;
    n->queued = NULL;
    if (!n->waiting) break;
    n->phase ^= 1;
  }
  return due;
}

static void node_free(node *n) {
  bitmap_free(&n->present);
  bitmap_free(&n->dirty);
  uint32_t slot = (uint32_t)(n - nodes);
  SLOT_GIVE(node_slots, nodes, slot);
}

aftermath node_drop(uint64_t id) {
  aftermath after = AFTERMATH_NONE;
  node *n = node_find(id);
  if (!n) return after;
  index_remove(&node_index, id, 0);
  after.backing_id = n->backing_id;
  n->backing_id = 0;
  n->dropped = true;
  if (users_of(n)) return after; /* the last to leave brings the rest */
  after.cleared = clears_due(n);
  after.fd = n->fd;
  node_free(n);
  return after;
}

node *node_put(const control_message *m, int fd, aftermath *after) {
  *after = AFTERMATH_NONE;
  if (!node_find(m->nodeid) && node_slots.used == node_slots.limit) return NULL;
  *after = node_drop(m->nodeid);
  uint32_t slot = SLOT_TAKE(node_slots, nodes);
  if (slot == INDEX_NONE) return NULL; /* the one it replaces is in use, and the table full */
  node *n = &nodes[slot];
  *n = (node){.id = m->nodeid, .fd = fd, .mode = m->node.mode, .flags = m->node.node_flags};
  n->still = n->flags & NODE_STILL;
  n->block_bytes = m->node.block_bytes;
  if (n->mode == NODE_RANGED && n->block_bytes && !(n->flags & NODE_ALL_PRESENT)) bitmap_grow(&n->present, m->node.block_count);
  index_put(&node_index, m->nodeid, 0, slot);
  return n;
}

unsigned node_enter(node *n) {
  n->users[n->phase]++;
  return n->phase;
}

aftermath node_leave(node *n, unsigned phase) {
  aftermath after = AFTERMATH_NONE;
  n->users[phase]--;
  if (phase != n->phase) after.cleared = clears_due(n);
  if (n->dropped && !users_of(n)) {
    after.fd = n->fd;
    node_free(n);
  }
  return after;
}

void node_blocks(node *n, uint64_t first, uint64_t count) {
  if (!n->block_bytes || (n->flags & NODE_ALL_PRESENT) || !count) return;
  bitmap_grow(&n->present, first + count); /* without room the bits past the end stay absent: the daemon is asked */
  bitmap_set(&n->present, first, count);
}

bool node_clear(node *n, uint64_t first, uint64_t count, uint32_t seq, bool *again) {
  *again = false;
  n->still = false;
  bitmap_clear(&n->present, first, count);
  if (!users_of(n)) return true;
  if (!clears_free) {
    *again = true;
    return false;
  }
  clear_wait *w = clears_free;
  clears_free = w->next;
  w->seq = seq;
  clear_wait **list = n->waiting ? &n->queued : &n->waiting;
  w->next = *list;
  *list = w;
  if (list == &n->waiting && !n->users[n->phase ^ 1]) n->phase ^= 1;
  return false;
}

void clears_release(clear_wait *list) {
  while (list) {
    clear_wait *next = list->next;
    list->next = clears_free;
    clears_free = list;
    list = next;
  }
}

static bool blocks_of(const node *n, uint64_t offset, uint64_t size, uint64_t *first, uint64_t *count) {
  if (!n->block_bytes || !size || offset > INT64_MAX || size > INT64_MAX - offset) return false;
  *first = offset / n->block_bytes;
  *count = (offset + size - 1) / n->block_bytes - *first + 1;
  return true;
}

bool node_present(const node *n, uint64_t offset, uint64_t size) {
  uint64_t first, count;
  if (n->mode != NODE_RANGED || !size || offset > INT64_MAX || size > INT64_MAX - offset) return false;
  if (n->flags & NODE_ALL_PRESENT) return true;
  return blocks_of(n, offset, size, &first, &count) && bitmap_all(&n->present, first, count);
}

bool node_coming(const node *n, uint64_t offset, uint64_t size) {
  uint64_t first, count;
  if (n->mode != NODE_RANGED || !blocks_of(n, offset, size, &first, &count)) return false;
  for (; count; first++, count--)
    if (!bitmap_all(&n->present, first, 1) && (first < n->coming_first || first >= n->coming_end)) return false;
  return true;
}

bool node_write_begin(node *n, uint64_t offset, uint64_t size) {
  uint64_t first, count;
  if (n->budget_bytes < size || !node_present(n, offset, size)) return false;
  if (n->block_bytes) {
    if (!blocks_of(n, offset, size, &first, &count) || !bitmap_grow(&n->dirty, first + count)) return false;
  }
  n->budget_bytes -= size;
  return true;
}

void node_write_end(node *n, uint64_t offset, uint64_t size, uint64_t done) {
  uint64_t first, count;
  n->budget_bytes += size - done;
  n->written_bytes += done;
  if (!done) return;
  if (blocks_of(n, offset, done, &first, &count)) {
    bitmap_set(&n->dirty, first, count);
  } else {
    n->untracked = true;
  }
}

/* -- handles ---------------------------------------------------------------------------------------------------- */
handle *handle_find(uint64_t nodeid, uint64_t fh) {
  uint32_t slot = index_get(&handle_index, nodeid, fh);
  return slot == INDEX_NONE ? NULL : &handles[slot];
}

bool handle_put(uint64_t nodeid, uint64_t fh, const uint8_t *cookie) {
  handle *h = handle_find(nodeid, fh);
  if (!h) {
    uint32_t slot = SLOT_TAKE(handle_slots, handles);
    if (slot == INDEX_NONE) return false;
    h = &handles[slot];
    *h = (handle){.nodeid = nodeid, .fh = fh};
    index_put(&handle_index, nodeid, fh, slot);
  }
  memcpy(h->cookie, cookie, PROTO_COOKIE_LEN);
  return true;
}

void handle_opened(handle *h) { h->opens++; }

void handle_released(uint64_t nodeid, uint64_t fh) {
  handle *h = handle_find(nodeid, fh);
  if (!h || (h->opens && --h->opens)) return;
  index_remove(&handle_index, nodeid, fh);
  uint32_t slot = (uint32_t)(h - handles);
  SLOT_GIVE(handle_slots, handles, slot);
}

const handle *handle_next(uint32_t *slot) {
  while (*slot < handle_slots.fresh) {
    const handle *h = &handles[*slot];
    if (index_get(&handle_index, h->nodeid, h->fh) == (*slot)++) return h;
  }
  return NULL;
}

/* -- requests whose answers matter ------------------------------------------------------------------------------- */
static bool opens(uint32_t opcode) { return opcode == WIRE_OPEN || opcode == WIRE_CREATE || opcode == WIRE_TMPFILE; }

static bool claims_file(uint32_t opcode) { return opcode == WIRE_OPEN || opcode == WIRE_SETATTR; }

static uint32_t *asked_slot(uint64_t nodeid) { return &asked_opens[(nodeid * UINT64_C(0x9E3779B97F4A7C15)) >> 52]; }

bool pending_of(uint64_t nodeid) { return *asked_slot(nodeid); }

bool tables_room_for_open(void) {
  return node_slots.limit - node_slots.used > pending_opens && handle_slots.limit - handle_slots.used > pending_opens &&
         pending_slots.used < pending_slots.limit;
}

bool pending_put(uint64_t unique, uint64_t nodeid, uint32_t opcode, bool upcall) {
  pending_find(unique, true, &(pending){0}); /* sent again by the kernel */
  uint32_t slot = SLOT_TAKE(pending_slots, pendings);
  if (slot == INDEX_NONE) return false;
  uint64_t key = unique & ~WIRE_UNIQUE_RESEND;
  pendings[slot] = (pending){.unique = unique, .nodeid = nodeid, .opcode = opcode, .upcall = upcall};
  index_put(&pending_index, key, 0, slot);
  pending_opens += opens(opcode);
  if (claims_file(opcode)) ++*asked_slot(nodeid);
  return true;
}

void pending_read(uint64_t unique, const wire_read_in *in) {
  uint32_t slot = index_get(&pending_index, unique & ~WIRE_UNIQUE_RESEND, 0);
  if (slot != INDEX_NONE) pendings[slot].read = *in;
}

bool pending_find(uint64_t unique, bool take, pending *out) {
  uint64_t key = unique & ~WIRE_UNIQUE_RESEND;
  uint32_t slot = index_get(&pending_index, key, 0);
  if (slot == INDEX_NONE) return false;
  *out = pendings[slot];
  if (take) {
    pending_opens -= opens(out->opcode);
    if (claims_file(out->opcode)) --*asked_slot(out->nodeid);
    index_remove(&pending_index, key, 0);
    SLOT_GIVE(pending_slots, pendings, slot);
  }
  return true;
}

/* -- capabilities ----------------------------------------------------------------------------------------------- */
void caps_set(uint64_t nodeid, bool on) {
  bool has = index_get(&caps_index, nodeid, 0) != INDEX_NONE;
  if (on && !has && caps_count == CAPS_MAX) {
    caps_overflow = true;
  } else if (on && !has) {
    index_put(&caps_index, nodeid, 0, 0);
    caps_count++;
  } else if (!on && has) {
    index_remove(&caps_index, nodeid, 0);
    caps_count--;
  }
}

bool caps_has(uint64_t nodeid) { return caps_overflow || index_get(&caps_index, nodeid, 0) != INDEX_NONE; }
