/* What the channel knows: nodes (inodes with a backing file), handles, requests it must recognise the answers of, and the
 * inodes with capabilities. Pure memory: no descriptor is opened or closed and nothing is sent from here.
 *
 * Invariants
 * - Fixed room, nothing allocated but bitmaps. A full table refuses; it never overwrites.
 * - A node that is in use by a request (node_enter) keeps its slot and descriptor until the last node_leave, also after it
 *   was dropped. Slots are found by id each time: a pointer is valid only under the lock or between enter and leave.
 * - The order of a CLEAR: bits go at once; the answer is due when every user that entered before it has left.
 *
 * Owner: `tables_lock`. Every function here is called with it held, but tables_open.
 */
#ifndef AOF2_CHANNEL_TABLES_H
#define AOF2_CHANNEL_TABLES_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bitmap.h"
#include "proto.h"
#include "wire.h"

#ifndef NODES_MAX /* the fuzzer builds with small ones, which it fills */
#define NODES_MAX 65536
#define HANDLES_MAX 65536
#define PENDING_MAX 16384
#define CAPS_MAX 16384
#define CLEARS_MAX 4096
#endif

typedef struct clear_wait {
  struct clear_wait *next;
  uint32_t seq;
} clear_wait;

typedef struct {
  uint64_t id;
  int fd;
  uint32_t mode, flags;
  int32_t backing_id; /* 0: not registered with the kernel */
  bool dropped, untracked;
  uint32_t own; /* handles that the channel gave by itself, and the daemon was not told of (opens.h); 0: the daemon's node */
  uint64_t generation; /* of such a node: what of its inode is open */
  atomic_bool still; /* until a CLEAR: no application writes to the file, and the daemon does not cut it */
  uint64_t block_bytes;
  bitmap present, dirty;
  uint64_t coming_first, coming_end; /* blocks that are being fetched: a READ of them may wait a little */
  uint64_t budget_bytes, written_bytes;
  unsigned phase; /* users enter with the current phase; a CLEAR flips it and waits for the other */
  uint32_t users[2];
  clear_wait *waiting, *queued; /* for the old phase to empty; for the next flip */
  uint32_t next_free;
} node;

typedef struct {
  uint64_t nodeid, fh;
  uint8_t cookie[PROTO_COOKIE_LEN];
  uint32_t opens; /* OPEN replies that carried it, less RELEASEs */
  uint32_t next_free;
} handle;

typedef struct {
  uint64_t unique, nodeid;
  uint32_t opcode;
  bool upcall;
  wire_read_in read; /* of a READ: the daemon may say that it can be served here now */
  uint32_t next_free;
} pending;

/* What is left to do, without the lock, after a node was left or dropped. */
typedef struct {
  clear_wait *cleared; /* answer each, then give them back by clears_release */
  int fd;              /* to close, or -1 */
  int32_t backing_id;  /* to BACKING_CLOSE, or 0 */
} aftermath;
#define AFTERMATH_NONE ((aftermath){.fd = -1})

extern pthread_mutex_t tables_lock;
/* For tables_lock: blocks came, or a node is not what it was. On the monotonic clock. */
extern pthread_cond_t tables_changed;

/* Once, before any thread. The limits are for tests; 0 is the table's whole room. */
void tables_open(uint32_t nodes_max, uint32_t handles_max, uint32_t pending_max);
/* Forgets everything (tests). Descriptors are the caller's to have closed. */
void tables_reset(void);

node *node_find(uint64_t id);
/* Adds a node, or gives an existing one another file: what it had comes back in `after`. NULL: no room, fd stays the
 * caller's. */
node *node_put(const control_message *m, int fd, aftermath *after);
aftermath node_drop(uint64_t id);
unsigned node_enter(node *n);
aftermath node_leave(node *n, unsigned phase);
void node_blocks(node *n, uint64_t first, uint64_t count);
/* Clears bits; true: the answer is due now; false: aftermath of a leave brings it, or, with *again, it was not noted. */
bool node_clear(node *n, uint64_t first, uint64_t count, uint32_t seq, bool *again);
/* Whether all of bytes [offset, offset + size) that is not present is being fetched. */
bool node_coming(const node *n, uint64_t offset, uint64_t size);
/* Whether bytes [offset, offset + size) lie in present blocks; size > 0. */
bool node_present(const node *n, uint64_t offset, uint64_t size);
/* Takes `size` from the budget when the write may be made here: budget, blocks and room to note it. */
bool node_write_begin(node *n, uint64_t offset, uint64_t size);
void node_write_end(node *n, uint64_t offset, uint64_t size, uint64_t done);
void clears_release(clear_wait *list);

handle *handle_find(uint64_t nodeid, uint64_t fh);
bool handle_put(uint64_t nodeid, uint64_t fh, const uint8_t *cookie);
void handle_opened(handle *h);
/* One RELEASE: the handle goes with the last. */
void handle_released(uint64_t nodeid, uint64_t fh);
/* The first handle in a slot at or after *slot, which moves past it; NULL at the end. */
const handle *handle_next(uint32_t *slot);

/* Room for one more OPEN to be answered with a node and a handle of its own. */
bool tables_room_for_open(void);
/* False: the table is full. */
bool pending_put(uint64_t unique, uint64_t nodeid, uint32_t opcode, bool upcall);
void pending_read(uint64_t unique, const wire_read_in *in);
/* Whether an OPEN or SETATTR of the inode is with the daemon, which may make the file its own; of another inode, perhaps. */
bool pending_of(uint64_t nodeid);
/* Finds the request, and forgets it when `take`. */
bool pending_find(uint64_t unique, bool take, pending *out);

void caps_set(uint64_t nodeid, bool on);
/* Whether a look-up of security.capability must reach the daemon. */
bool caps_has(uint64_t nodeid);
#endif
