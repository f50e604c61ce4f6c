/* Births: files the channel creates by itself, so that making many small ones does not wait for the daemon each time.
 *
 * A *nest* is a directory whose every name the channel has seen, by hash: a name that is not among them is not there. In a
 * nest LOOKUP of such a name and GETATTR of the directory are answered, and CREATE takes a backing file under an inode number
 * that the daemon granted, made ahead (keeper.h) or now, writes a record to the tenant's birth log, and answers with a
 * passthrough handle. RELEASE of such a handle is a record, too.
 * The daemon folds the records into the catalog soon after, always before it looks at any later request.
 *
 * Invariants
 * - A record is in the log (the page cache: it survives both processes) before its request is answered.
 * - The names of a nest are a superset of the directory's: what was forwarded is added before it is forwarded, what goes
 *   stays. Forgetting a nest is always right.
 * - A nest's attributes are the daemon's last answer, with the times of later births; any other change to names forgets
 *   them, and an answer that such a change may have overtaken is not remembered.
 * - Fixed room: a full table forgets all nests; with more than UNFOLDED_MAX bytes of records ahead of the daemon, or no
 *   inode numbers left, requests are forwarded as ever.
 *
 * Owner: births_lock inside; any thread may call. Never called with tables_lock held.
 */
#ifndef AOF2_CHANNEL_BIRTHS_H
#define AOF2_CHANNEL_BIRTHS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "channel.h"

#define BIRTH_FH (UINT64_C(1) << 61) /* set in the handles of births */
#define BIRTH_BORN 1
#define BIRTH_RELEASED 2
#define BIRTH_DROPPED 1u /* flag of RELEASED: the node was dropped, too */
#define BIRTH_RECORD_LEN 72
#define STREAMS_MAX 16

/* The page both sides see. The channel writes `end`, the daemon the rest. */
typedef struct {
  uint32_t armed; /* 1: the daemon wants an event for the next record */
  uint32_t padding;
  uint64_t total; /* bytes of all logs: differs from what the daemon has folded when it is behind */
  struct {
    uint64_t end, taken;
  } streams[STREAMS_MAX];
} birth_page;

/* A backing file whose inode nobody has yet. */
typedef struct {
  uint64_t ino;
  int fd;
  int32_t backing_id;
} cradle;

#define BACKING_NAME_LEN 24
void backing_name(uint64_t ino, char name[BACKING_NAME_LEN]);

void births_reset(void); /* tests */
/* The mount is gone: what was made ahead is removed, and nothing is born any more. */
void births_over(void);
/* control.c hands these on; they own the descriptor. */
void births_page(int fd);
void births_dir(uint64_t stream_id, uint32_t slot, int fd);
void births_log(uint64_t stream_id, uint64_t offset, int fd);
void births_inos(uint64_t stream_id, uint64_t first, uint64_t count);
/* 0: answer now, 1: answered later by EV_NEST, 2: there is no room. */
enum { NEST_OPEN = 1, NEST_SERVE = 2, NEST_END = 3, NEST_END_ALL = 4 };
int births_nest(uint64_t dir, uint32_t action, bool has_gid, uint32_t gid, uint32_t seq);
void births_names(uint64_t dir, const uint8_t *packed, size_t len);

/* keeper.c: an inode number to make a file for, if one is wanted; and what became of it. False: it is the keeper's to undo. */
bool births_order(cradle *out, int *dir_fd);
bool births_made(const cradle *c, bool made);

/* serve.c: true when the request was answered. */
bool births_lookup(const request *r);
bool births_getattr(const request *r);
bool births_create(const request *r);
bool births_release(const request *r);
/* forward.c: whether the answer of a request matters here, the request when it is about to be forwarded (what comes back is
 * for its pending's tag), and its answer. */
bool births_minds(const request *r);
uint64_t births_forwarded(const request *r);
void births_answered(const pending *asked, const uint8_t *reply, size_t len);
#endif
