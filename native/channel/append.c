/* See append.h. */
#include "append.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "../bytes.h"
#include "index.h"
#include "records.h"

#define OVER_MAX_S 1
#define SHORT_MAX (64u << 10) /* of a WRITE that costs less than the way to another thread */
#define PARTIAL_LEAST 256u /* bytes that a line which was begun takes */

typedef struct {
  uint64_t nodeid, fh, ext_id;
  bool forwards;  /* its WRITEs are the daemon's, which said so */
  bool refused;   /* or has the line that it began, for there was no room here */
  uint8_t *begun; /* while its node is being written by it, that thread's */
  uint32_t begun_len, begun_room;
  uint32_t next_free;
} append_open;

typedef struct {
  pthread_mutex_t write_lock;
  uint64_t nodeid;
  uint32_t opens, next_free;
  records_file file; /* fd -1: the segment is the daemon's. Else that of the thread that has write_lock */
  records_at at;
  uint64_t room_end, low; /* from `low` on little is left of it: told once */
  const append_open *writing; /* a WRITE of this handle is in progress */
  bool broken, told;
  bool taking; /* an APPEND_TAKE of this seq waits for `writing` */
  uint32_t take_seq;
} append_node;

_Static_assert((APPENDS_MAX & (APPENDS_MAX - 1)) == 0 && (APPEND_HANDLES_MAX & (APPEND_HANDLES_MAX - 1)) == 0, "powers of two");

static pthread_mutex_t append_lock = PTHREAD_MUTEX_INITIALIZER;
static append_node nodes[APPENDS_MAX];
static append_open handles[APPEND_HANDLES_MAX];
static index_entry node_entries[2 * APPENDS_MAX], handle_entries[2 * APPEND_HANDLES_MAX];
static index_table node_index = {node_entries, 2 * APPENDS_MAX - 1}, handle_index = {handle_entries, 2 * APPEND_HANDLES_MAX - 1};
static uint32_t nodes_fresh, nodes_free = INDEX_NONE, handles_fresh, handles_free = INDEX_NONE;
static uint32_t partials;
static uint64_t partials_bytes;
static atomic_uint opens_known; /* handles, so that other WRITEs need not look */

/* -- tables; with append_lock ------------------------------------------------------------------------------------ */
static append_node *node_of(uint64_t nodeid) {
  uint32_t slot = index_get(&node_index, nodeid, 0);
  return slot == INDEX_NONE ? NULL : &nodes[slot];
}

static append_open *open_of(uint64_t nodeid, uint64_t fh) {
  uint32_t slot = index_get(&handle_index, nodeid, fh);
  return slot == INDEX_NONE ? NULL : &handles[slot];
}

/* That of the node, or a new one; NULL: no room. */
static append_node *node_make(uint64_t nodeid) {
  append_node *n = node_of(nodeid);
  uint32_t slot = nodes_free;
  if (n) return n;
  if (slot != INDEX_NONE) {
    nodes_free = nodes[slot].next_free;
  } else {
    if (nodes_fresh == APPENDS_MAX) return NULL;
    slot = nodes_fresh++;
    pthread_mutex_init(&nodes[slot].write_lock, NULL); /* stays: a thread may come late for what was here before */
  }
  n = &nodes[slot];
  n->nodeid = nodeid;
  n->file.fd = -1;
  n->opens = 0;
  index_put(&node_index, nodeid, 0, slot);
  return n;
}

static void node_end_unused(append_node *n) {
  if (n->opens || n->file.fd >= 0 || n->writing) return;
  index_remove(&node_index, n->nodeid, 0);
  n->next_free = nodes_free;
  nodes_free = (uint32_t)(n - nodes);
}

static append_open *open_make(uint64_t nodeid, uint64_t fh) {
  uint32_t slot = handles_free;
  append_node *n = slot != INDEX_NONE || handles_fresh < APPEND_HANDLES_MAX ? node_make(nodeid) : NULL;
  if (!n) return NULL;
  if (slot != INDEX_NONE) handles_free = handles[slot].next_free;
  else slot = handles_fresh++;
  handles[slot] = (append_open){.nodeid = nodeid, .fh = fh};
  index_put(&handle_index, nodeid, fh, slot);
  n->opens++;
  atomic_fetch_add(&opens_known, 1);
  return &handles[slot];
}

static void begun_end(append_open *h) {
  if (!h->begun) return;
  free(h->begun);
  partials--;
  partials_bytes -= h->begun_room;
  h->begun = NULL;
  h->begun_len = h->begun_room = 0;
}

/* Room for a line that was begun, of this length; what there is stays. */
static bool begun_make(append_open *h, size_t len) {
  uint32_t room = PARTIAL_LEAST;
  if (len <= h->begun_room) return true;
  while (room < len) room *= 2;
  if ((!h->begun && partials == PARTIALS_MAX) || room - h->begun_room > PARTIALS_BYTES_MAX - partials_bytes) return false;
  uint8_t *at = realloc(h->begun, room);
  if (!at) return false;
  partials += !h->begun;
  partials_bytes += room - h->begun_room;
  h->begun = at;
  h->begun_room = room;
  return true;
}

static void open_end(append_open *h) {
  append_node *n = node_of(h->nodeid);
  begun_end(h);
  index_remove(&handle_index, h->nodeid, h->fh);
  h->next_free = handles_free;
  handles_free = (uint32_t)(h - handles);
  atomic_fetch_sub(&opens_known, 1);
  n->opens--;
  node_end_unused(n);
}

/* -- events; with append_lock ------------------------------------------------------------------------------------ */
static void tell_appended(uint64_t nodeid, const append_node *n, uint16_t flags, uint32_t seq) {
  uint8_t body[56] = {0};
  store_u64(body, nodeid);
  if (n) {
    store_u64(body + 8, n->file.segment_id);
    store_u64(body + 16, n->at.end);
    store_u64(body + 24, n->at.next_logical);
    store_u64(body + 32, n->at.record_count);
    store_u64(body + 40, n->at.crc64);
    store_u64(body + 48, n->at.last_ts_ms);
  }
  event_send(EV_APPENDED, flags, seq, body, sizeof body);
}

static void tell_partial(uint64_t nodeid, uint64_t fh, const uint8_t *data, size_t len) {
  uint8_t body[16];
  store_u64(body, nodeid);
  store_u64(body + 8, fh);
  event_send2(EV_PARTIAL, 0, 0, body, sizeof body, data, len);
}

/* The line that the handle began is the daemon's from here on. */
static void begun_to_daemon(append_open *h) {
  if (h->begun_len) tell_partial(h->nodeid, h->fh, h->begun, h->begun_len);
  begun_end(h);
}

/* The records that come next may go so far. */
static void give_room(append_node *n, uint64_t room_end) {
  n->room_end = room_end;
  n->low = n->at.end < room_end ? n->at.end + (room_end - n->at.end) / 2 : room_end;
}

/* Whether records that were just written are to be told of. */
static bool is_news(append_node *n) {
  bool low = n->at.end >= n->low, news = low || !n->told;
  if (low) n->low = UINT64_MAX;
  n->told = true;
  return news;
}

static void hand_over(append_node *n, uint32_t seq) {
  close(n->file.fd);
  n->file.fd = -1;
  tell_appended(n->nodeid, n, PROTO_TAKEN, seq);
}

/* -- a WRITE ----------------------------------------------------------------------------------------------------- */
/* Begins to write, with write_lock: the handle's own line and the segment are this thread's until `end_write`. NULL: it is the
 * daemon's, which has the line that was begun, if this thread may tell it. */
static append_open *begin_write(append_node *n, uint64_t nodeid, uint64_t fh, bool waits, uint64_t *room_end, uint64_t *ext_id) {
  pthread_mutex_lock(&append_lock);
  append_open *h = open_of(nodeid, fh);
  bool ours = h && node_of(nodeid) == n && n->file.fd >= 0 && !n->broken && !n->taking && !h->forwards && !h->refused;
  if (ours) n->writing = h, *room_end = n->room_end, *ext_id = h->ext_id;
  else if (h && waits) begun_to_daemon(h);
  pthread_mutex_unlock(&append_lock);
  return ours ? h : NULL;
}

/* The segment is as far as `at`. `gives_up`: the WRITE is forwarded. */
static void end_write(append_node *n, append_open *h, const records_at *at, bool gives_up) {
  pthread_mutex_lock(&append_lock);
  bool more = at->end != n->at.end;
  n->at = *at;
  n->writing = NULL;
  if (gives_up) begun_to_daemon(h);
  else if (!h->begun_len) begun_end(h);
  if (n->taking) {
    n->taking = false;
    hand_over(n, n->take_seq);
  } else if (more && is_news(n)) {
    tell_appended(n->nodeid, n, 0, 0);
  }
  pthread_mutex_unlock(&append_lock);
}

static bool make_room(append_open *h, size_t len) {
  pthread_mutex_lock(&append_lock);
  bool room = len <= PROTO_PARTIAL_MAX && begun_make(h, len);
  pthread_mutex_unlock(&append_lock);
  return room;
}

/* With the records in the file, what is left of the data begins a line, or goes on with that which was begun. */
static void keep_left(append_open *h, const records_brought *b, const records_plan *plan) {
  if (plan->file_len) h->begun_len = 0;
  if (plan->left) memcpy(h->begun + h->begun_len, b->data + b->len - plan->left, plan->left);
  h->begun_len += (uint32_t)plan->left;
}

static bool write_locked(append_node *n, uint64_t nodeid, const wire_write_in *in, const uint8_t *data, bool waits) {
  uint64_t room_end, ext_id;
  append_open *h = begin_write(n, nodeid, in->fh, waits, &room_end, &ext_id);
  if (!h) return false;
  records_at at = n->at;
  records_brought b = {.begun = h->begun, .begun_len = h->begun_len, .data = data, .len = in->size, .ext_id = ext_id};
  records_plan plan;
  bool fits = records_frame(&n->file, &at, &b, room_end, &plan) && make_room(h, plan.left + (plan.file_len ? 0 : h->begun_len));
  b.begun = h->begun; /* may have moved */
  bool done = fits && records_write(&n->file, &at, &b, room_end, &plan);
  if (fits && !done) n->broken = true;
  if (done) keep_left(h, &b, &plan);
  end_write(n, h, &at, !done && waits);
  return done;
}

bool append_write(const request *r, bool waits) {
  wire_write_in in;
  if (!atomic_load(&opens_known) || r->body_len < sizeof in) return false;
  memcpy(&in, r->body, sizeof in);
  if (!in.size || in.size > r->body_len - sizeof in || (!waits && in.size > SHORT_MAX)) return false;
  pthread_mutex_lock(&append_lock);
  append_node *n = open_of(r->header.nodeid, in.fh) ? node_of(r->header.nodeid) : NULL;
  pthread_mutex_unlock(&append_lock);
  if (!n) return false;
  if (waits) pthread_mutex_lock(&n->write_lock);
  else if (pthread_mutex_trylock(&n->write_lock)) return false;
  bool done = write_locked(n, r->header.nodeid, &in, r->body + sizeof in, waits);
  pthread_mutex_unlock(&n->write_lock);
  wire_write_out out = {.size = in.size};
  if (done) device_reply(r->header.unique, 0, &out, sizeof out);
  return done;
}

/* -- handles ----------------------------------------------------------------------------------------------------- */
void append_release(const request *r) {
  wire_release_in in;
  if (!atomic_load(&opens_known) || r->body_len < sizeof in) return;
  memcpy(&in, r->body, sizeof in);
  pthread_mutex_lock(&append_lock);
  append_node *n = open_of(r->header.nodeid, in.fh) ? node_of(r->header.nodeid) : NULL;
  pthread_mutex_unlock(&append_lock);
  if (!n) return;
  pthread_mutex_lock(&n->write_lock); /* no WRITE of it is in progress: it would have to be answered first */
  pthread_mutex_lock(&append_lock);
  append_open *h = open_of(r->header.nodeid, in.fh);
  if (h) {
    begun_to_daemon(h);
    open_end(h);
  }
  pthread_mutex_unlock(&append_lock);
  pthread_mutex_unlock(&n->write_lock);
}

bool append_opened(uint64_t nodeid, uint64_t fh) {
  if (!atomic_load(&opens_known)) return false;
  pthread_mutex_lock(&append_lock);
  bool known = open_of(nodeid, fh);
  pthread_mutex_unlock(&append_lock);
  return known;
}

void append_unopened(uint64_t nodeid, uint64_t fh) {
  if (!atomic_load(&opens_known)) return;
  pthread_mutex_lock(&append_lock);
  append_open *h = open_of(nodeid, fh);
  if (h && node_of(nodeid)->writing != h) open_end(h);
  pthread_mutex_unlock(&append_lock);
}

/* -- control messages -------------------------------------------------------------------------------------------- */
void append_give(const control_message *m, int fd) {
  const char *why = "no descriptor";
  if (fd >= 0) {
    pthread_mutex_lock(&append_lock);
    append_node *n = node_make(m->nodeid);
    why = !n ? "no room" : n->file.fd >= 0 ? "it has one" : NULL;
    if (!why) {
      n->file = (records_file){.fd = fd, .segment_id = m->append.segment_id, .stream_ino = m->append.stream_ino,
                               .base_record_count = m->append.base_record_count, .ext_id = m->append.ext_id,
                               .max_size = m->append.max_size, .framing = m->append.framing, .record_max = m->append.record_max};
      n->at = (records_at){m->append.end, m->append.next_logical, m->append.record_count, m->append.crc64, m->append.last_ts_ms};
      give_room(n, m->append.room_end);
      n->broken = n->told = n->taking = false;
    }
    pthread_mutex_unlock(&append_lock);
  }
  if (!why) return;
  note("segment %llu of node %llu is not appended to here: %s", (unsigned long long)m->append.segment_id, (unsigned long long)m->nodeid, why);
  if (fd >= 0) close(fd);
}

void append_room(const control_message *m) {
  pthread_mutex_lock(&append_lock);
  append_node *n = node_of(m->nodeid);
  if (n && n->room_end < m->grant_bytes) give_room(n, m->grant_bytes);
  pthread_mutex_unlock(&append_lock);
}

void append_take(const control_message *m) {
  pthread_mutex_lock(&append_lock);
  append_node *n = node_of(m->nodeid);
  if (!n || n->file.fd < 0 || n->taking) {
    tell_appended(m->nodeid, NULL, PROTO_TAKEN, m->seq);
  } else if (n->writing) {
    n->taking = true;
    n->take_seq = m->seq;
  } else {
    hand_over(n, m->seq);
    node_end_unused(n);
  }
  pthread_mutex_unlock(&append_lock);
}

void append_tell(const control_message *m) {
  pthread_mutex_lock(&append_lock);
  append_node *n = node_of(m->nodeid);
  if (n && n->file.fd < 0) n = NULL;
  if (n) n->told = false;
  tell_appended(m->nodeid, n, 0, m->seq);
  pthread_mutex_unlock(&append_lock);
}

void append_handle(const control_message *m) {
  pthread_mutex_lock(&append_lock);
  append_open *h = open_of(m->nodeid, m->append_open.fh);
  if (!h) h = open_make(m->nodeid, m->append_open.fh);
  if (h) {
    h->ext_id = m->append_open.ext_id;
    h->forwards = m->append_open.flags & APPEND_FORWARDS;
    h->refused = false;
  }
  pthread_mutex_unlock(&append_lock);
  if (!h) note("append handle %llu of node %llu: the table is full", (unsigned long long)m->append_open.fh, (unsigned long long)m->nodeid);
}

/* What cannot be kept comes back, and what the handle writes next goes where it is. */
void append_partial(const control_message *m) {
  const uint8_t *data = m->append_partial.data;
  size_t len = m->append_partial.len;
  pthread_mutex_lock(&append_lock);
  append_open *h = open_of(m->nodeid, m->append_partial.fh);
  bool busy = h && node_of(m->nodeid)->writing == h;
  if (h && !busy && begun_make(h, len)) {
    if (len) memcpy(h->begun, data, len);
    h->begun_len = (uint32_t)len;
    h->refused = false;
    if (!len) begun_end(h);
  } else if (len) {
    if (h) h->refused = true;
    tell_partial(m->nodeid, m->append_partial.fh, data, len);
  }
  pthread_mutex_unlock(&append_lock);
}

/* -- the end ----------------------------------------------------------------------------------------------------- */
void append_over(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += OVER_MAX_S;
  if (pthread_mutex_timedlock(&append_lock, &until)) return; /* the daemon is gone, too, and its thread waits for the end */
  for (uint32_t i = 0; i < handles_fresh; i++) {
    append_open *h = &handles[i];
    if (h->begun && node_of(h->nodeid)->writing != h) begun_to_daemon(h);
  }
  pthread_mutex_unlock(&append_lock);
}

void append_reset(void) {
  for (uint32_t i = 0; i < handles_fresh; i++) begun_end(&handles[i]);
  for (uint32_t i = 0; i < nodes_fresh; i++) {
    if (index_get(&node_index, nodes[i].nodeid, 0) == i && nodes[i].file.fd >= 0) close(nodes[i].file.fd);
    nodes[i] = (append_node){0};
  }
  memset(node_entries, 0, sizeof node_entries);
  memset(handle_entries, 0, sizeof handle_entries);
  nodes_fresh = handles_fresh = 0;
  nodes_free = handles_free = INDEX_NONE;
  atomic_store(&opens_known, 0);
}

uint64_t append_bytes_used(void) { return partials_bytes; }
