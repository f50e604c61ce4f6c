/* One change of names, from its request to its answer: what changes.c, moves.c and attributes.c share (changes.h says why it is right).
 *
 * Owner: the worker that read the request; between checking and recording it holds the page's lock.
 */
#ifndef AOF2_CHANNEL_CHANGE_H
#define AOF2_CHANNEL_CHANGE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "births.h"
#include "channel.h"
#include "rows.h"
#include "view.h"

#define NS UINT64_C(1000000000)

typedef struct {
  const request *r;
  stream *s;
  view v;
  uint64_t now_ns;
  uint8_t record[RECORD_ROOM];
  uint8_t out[WIRE_ENTRY_OUT_LEN]; /* what is answered */
  size_t out_len;
  int error; /* or this */
} change;

/* Checks, and records; VIEW_FOUND: it is in the log, and is answered. VIEW_OLD: again, with a new picture. Else it is the daemon's, but
 * for what was refused. */
typedef view_result change_from(change *c);
bool change_make(const request *r, change_from *from);

/* The fixed part of a record; fields that a kind does not have stay 0. */
void begin_record(change *c, uint16_t kind, uint64_t ino, uint32_t mode, uint64_t parent);
void set_owner(change *c, uint32_t uid, uint32_t gid);
void set_fh(change *c, uint64_t fh);
void set_flags(change *c, uint32_t flags);
void set_other(change *c, uint64_t ino);
view_result record(change *c, span name);
/* With two texts: a zero is between them. */
view_result record_two(change *c, span first, span second);

/* A name was given or taken: before it is answered, as the next request may be about it, and this one's bytes are gone then. */
view_result named_in(view_result recorded, uint64_t dir, span name);

span name_from(const request *r, size_t at);
/* What an answer of the view is to a change that cannot do without it. */
view_result needed(view_result result);
/* A directory that is there, and what has a name in it; ABSENT: the name is free. */
view_result find(change *c, uint64_t dir, span name, inode_row *above, inode_row *found);
/* Nothing is changed, and that is the answer. */
view_result refuse(change *c, int error);
/* FOUND: there is no name in it; ABSENT: there is one. */
view_result is_empty(const change *c, uint64_t dir);
#endif
