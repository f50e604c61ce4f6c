/* What the files of the brake share: rooms, watched files, writes that are held. brake.h says how it works.
 *
 *      brake.c     what a file took, what a write needs, who goes on; the thread
 *      watches.c   the tables, claims, and files that come and go
 *      silent.c    files that grow without reports: they are held, made to ask, and let go by the step
 *      claims.c    blocks that the daemon takes from under a writer
 *      orders.c    what else the daemon says
 *
 * Owner: brake.lock, held by the caller of everything here but now_ms and wake_thread.
 */
#ifndef AOF2_CHANNEL_BRAKE_STATE_H
#define AOF2_CHANNEL_BRAKE_STATE_H
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "fan.h"
#include "index.h"

#define POOLS_MAX 256
#ifndef WATCHES_MAX /* the fuzzer builds with a small one, which it fills */
#define WATCHES_MAX 131072
#endif
#define HELD_MAX 1024
#define STREAM_SHIFT 40
#define RATE_A_CORE 3000000 /* bytes a core can write into the page cache in a millisecond */
#define RATE_CORES_MAX 8    /* more of them copy no faster: it is the memory's speed by then */
#define MARGIN_MS 5         /* of writing on all cores, kept back while files are free */
#define ALIVE_MS 1000
#define STEP (1 << 20)      /* bytes: what a silent writer may write before the kernel asks again; a pipe is no longer */
#define SLACK 65536         /* bytes: a file also takes blocks for its map, which no range tells */
#define INSIDE_MAX (STEP + SLACK)
#define CLAIM_BITS_MAX (UINT64_C(1) << 24)

typedef struct {
  uint64_t stream;
  int64_t left, high; /* room that no writer took yet; what it was after the last ROOM */
  uint32_t active, waiting, silent;
  bool free, told_low, told_held;
  bool stops; /* the daemon has no room either: what can neither be held nor asks is stopped */
  int64_t alert_ms; /* when it ceased to be free, or a file grew that reported nothing */
} pool;

typedef struct {
  uint64_t id;
  int fd;
  pool *pool;
  bool append, ignored, active, stopped;
  bool ahead; /* made ahead, and never opened: it cannot grow */
  bool spoke; /* a write of it was reported since it was last ignored: it does not splice, as far as is known */
  uint64_t seen, size; /* bytes on the disk, and its length, when it was last looked at */
  uint64_t pending; /* taken from the room for the write that is on its way */
  uint64_t expected; /* that the daemon itself is about to add, out of room of its own */
  uint64_t told;
  int64_t moved_ms, reported_ms;
  /* Of a file that grows without reports: */
  bool silent, asking; /* asking: the next write asks before it writes */
  bool splices;        /* it asked: it is not a mapping */
  bool stepped;        /* it wrote since the kernel was last made to ask */
  int64_t owed_ms;     /* not 0: let go of then, and not seen to write since: it may not have gone on yet */
  bool taken;          /* the hold holds */
  bool asked;          /* the kernel is being made to ask */
  bool unaskable;      /* the kernel cannot be made to ask */
  uint32_t hold;
  int64_t hold_ms;
  uint64_t inside;              /* bytes that it took, and did not become longer by */
  uint64_t unreported, slipped; /* since a report; since the kernel was to ask */
  int denied, denied_before;    /* what the write that asked is to fail with, and the last one did, */
  pid_t denied_tid;             /* of this thread, */
  int64_t denied_ms;            /* then */
  uint64_t *claims, claim_words, claimed;
  uint32_t prev, next, next_free; /* of the active */
} watch;

typedef struct {
  fan_event e;
  uint64_t unique; /* not 0: no event, but a silent writer's question */
  uint64_t number, nodeid;
  bool touched, told;
  bool settles; /* there is room: it goes on when the hold holds */
} held;

typedef struct {
  pthread_mutex_t lock;
  pool pools[POOLS_MAX];
  uint32_t pools_used;
  watch *watches; /* WATCHES_MAX */
  uint32_t watches_fresh, watches_free, first_active;
  index_table by_id, by_fd;
  uint32_t by_fd_count;
  held waiting[HELD_MAX]; /* in the order they came */
  uint32_t held_count;
  uint64_t next_number, block_bytes;
  int64_t margin, rate;
  pid_t daemon_pid;
  int woken;
  bool tell_again;
} brake_state;

extern brake_state brake;

/* watches.c */
int64_t now_ms(void);
pool *pool_of(uint64_t stream);
watch *watch_of(uint64_t id);
void activate(watch *w);
void deactivate(watch *w);
void set_ignored(watch *w, bool on, int64_t now);
void set_stopped(watch *w, bool on);
bool is_claimed(const watch *w, uint64_t offset, uint64_t length);
bool claims_grow(watch *w, uint64_t bits);
void set_claims(watch *w, uint64_t first, uint64_t count, bool on);

/* brake.c */
void measure(watch *w, bool at_rest, int64_t now);
void update(pool *p, int64_t now);
void tell_all(void);
bool is_waiting(const watch *w);
void let_go(int64_t now);
void end_held(bool (*which)(const held *, uint64_t), uint64_t arg, int error);
bool is_of_node(const held *h, uint64_t nodeid);
void wake_thread(void);

/* claims.c */
void grant_claims(uint64_t nodeid); /* writes of the file from before its claims are over */
void tell_claims(void);

/* silent.c */
void set_silent(watch *w, bool on);
void end_hold(watch *w);
void mind_silent(watch *w, bool idle, int64_t now);
void grew_silently(watch *w, uint64_t grown, int64_t now);
void mind_inside(watch *w, uint64_t grown, uint64_t longer);
bool is_behind(const watch *w, uint64_t end);
void is_asking(uint64_t nodeid, bool asks); /* takes the lock itself */
void handle_holds(void);                    /* so does this */
bool may_splice(held *h, watch *w, bool first_in_turn, int64_t now);
int64_t steps_room(const pool *p);
void step(watch *w);
void answer_silent(const held *h, watch *w, int error);
#endif
