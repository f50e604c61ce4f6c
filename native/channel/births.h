/* Births: files the channel creates by itself, so that making many small ones does not wait for the daemon each time.
 *
 * In a *nest* (nests.h), where a name that is not known is not there, or under a name that the view (view.h) does not find, as after
 * an unlink, CREATE takes a backing file under an inode number that the daemon granted, made ahead (keeper.h) or now, writes a record
 * to the tenant's intent log, and answers with a passthrough handle. RELEASE of such a handle is a record, too. A *stream* is what a tenant has for that: folder, log and numbers.
 * The daemon folds the records into the catalog soon after, always before it looks at any later request.
 *
 * Invariants
 * - A record is in the log (the page cache: it survives both processes) before its request is answered.
 * - A name that was free is free when its birth is recorded: the kernel holds the directory's lock, and where the daemon forbade births
 *   meanwhile, as it does before it gives names by itself, the birth is not recorded.
 * - Fixed room: with more than UNFOLDED_MAX bytes of records ahead of the daemon, or no inode numbers left, requests are
 *   forwarded as ever.
 * - Records that the daemon had not folded when either process died are in the logs: it folds them at its next start.
 *
 * Owner: births_lock, which guards everything in births.c and in nests.c: whether a name is free and that it is taken are one
 * step. (The page and a stream's folder stay once they are there,
 * and are used without it.) Any thread may call. The functions of both headers take the lock themselves, but those under "with
 * births_lock held", which births.c and nests.c have for each other. It and tables_lock are never held together, and who
 * calls the others holds neither; the page's lock is taken before either. Nothing is sent under it.
 */
#ifndef AOF2_CHANNEL_BIRTHS_H
#define AOF2_CHANNEL_BIRTHS_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../sharedpage.h"
#include "channel.h"

extern pthread_mutex_t births_lock;

#define BIRTH_FH (UINT64_C(1) << 61) /* set in the handles of births */
#define INTENT_BORN 1 /* kinds of records of an intent log: engine/FORMATS.md */
#define INTENT_CLOSED 2
#define INTENT_UNLINKED 3
#define INTENT_RENAMED 4
#define INTENT_MADE 5 /* a directory */
#define INTENT_RMDIR 6
#define INTENT_SET 7 /* attributes */
#define INTENT_LINKED 8
#define INTENT_SYMLINKED 9
#define INTENT_REPLACED 10 /* renamed, over another name */
#define INTENT_EXCHANGED 11
#define INTENT_XATTR_SET 12
#define INTENT_XATTR_REMOVED 13
#define INTENT_OURS 1u /* flag of UNLINKED: the channel's, not the daemon's */
#define INTENT_SET_MODE 1u
#define INTENT_SET_ATIME 2u
#define INTENT_SET_MTIME 4u
#define INTENT_SET_UID 8u
#define INTENT_SET_GID 16u
#define INTENT_DROPPED 1u /* flag of CLOSED: the node was dropped, too */
#define INTENT_LEN 72

/* A backing file whose inode the kernel was not told yet. */
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
void births_log(uint64_t stream_id, int fd);
/* Without `bears` the numbers are for what is no file; with a count of 0 those there are stay. */
void births_inos(uint64_t stream_id, uint64_t first, uint64_t count, bool bears);

/* view.c: the page, and a stream's place in it, log and folder, which stay; false: there is no such stream, or no log of it yet. */
bool births_stream(uint64_t stream_id, intent_page **with_page, uint32_t *slot, int *log_fd, int *dir_fd);

/* keeper.c: an inode number to make a file for, if one is wanted; and what became of it. False: it is the keeper's to undo. */
bool births_order(cradle *out, int *dir_fd);
bool births_made(const cradle *c, bool made);

/* serve.c: true when the request was answered. */
bool births_create(const request *r);
bool births_release(const request *r);

/* changes.c: a change of names that is checked and recorded in one step. Between the two calls the caller holds the page's lock: no
 * record comes in between. False: the daemon is to make the change. */
typedef struct stream stream;
stream *births_begin_change(uint64_t nodeid);
void births_end_change(bool recorded);
/* A record of INTENT_LEN bytes with a name behind it, whose length is in it; false: it is not in the log. */
bool births_record(stream *s, uint8_t *record, const uint8_t *name, size_t len);
/* A number for what is new; 0: there is none left. */
uint64_t births_ino(stream *s);
#define INTENT_NAME_MAX (255 + 1 + 4095) /* a name, a zero and a link's target, or what an xattr is; or two names */
#define RECORD_ROOM (INTENT_LEN + INTENT_NAME_MAX + 8)

/* nests.c, with births_lock held: whether records can be told of, and whether the node's tenant has a stream. */
bool births_have_page(void);
bool births_have_stream(uint64_t nodeid);
#endif
