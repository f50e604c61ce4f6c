/* The tree as it was answered: a picture of the rows (store.h) with the intents that it does not have laid over it (unfolded.h).
 *
 * Which tenants' trees are read here, and for which questions, is the daemon's to say (CATALOG, TREE): a kind knows whether its rows
 * and its intents are all there is.
 *
 * Invariants
 * - Begun after a request was read, a view has every change that was answered before that.
 * - A row is never trusted: one that is damaged is VIEW_BROKEN, and the daemon is asked, which says so.
 *
 * Owner: view_open and view_tree under control_lock; a view is its thread's, which has one at a time.
 */
#ifndef AOF2_CHANNEL_VIEW_H
#define AOF2_CHANNEL_VIEW_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#include "../sharedpage.h"
#include "rows.h"
#include "unfolded.h"

#define STREAM_SHIFT 40
#define ROOT_INO 1 /* of a tenant, and of the mount */

/* What is answered here of a tenant's inodes. */
enum {
  ANSWER_LOOKUP = 1u,
  ANSWER_ATTR = 2u,
  ANSWER_LIST = 4u,
  ANSWER_LINK = 8u,   /* targets of symlinks */
  ANSWER_XATTR = 16u,
  ANSWER_CHANGES = 64u, /* made here (changes.h) */
  ANSWER_OPENS = 128u,  /* of files that are here whole, to be read (opens.h) */
  ANSWER_INTENTS = 32u, /* there is an intent log: the rows alone are not all */
};

typedef struct {
  uint64_t stream;
  int dir_fd; /* of its backing files, or -1 */
  bool laid;  /* something is not in the rows */
  over_view over;
} view;

typedef enum { VIEW_ABSENT, VIEW_FOUND, VIEW_BROKEN, VIEW_OLD } view_result; /* OLD: begin again */

int view_open(const char *path); /* 0 or an errno */
/* False: its intent log is not known here. */
bool view_tree(uint64_t stream_id, uint32_t answers);

/* False: not answered here. What is found is good until view_end. */
bool view_begin(view *v, uint64_t nodeid, uint32_t answer);
void view_end(void);

view_result view_name(const view *v, uint64_t dir, span name, uint64_t *ino);
/* An inode that has a name; ABSENT: none that rows know. */
view_result view_inode(const view *v, uint64_t ino, inode_row *out);
/* The target of a symlink into `out`, which has room for INTENT_NAME_MAX; 0: the daemon knows. */
size_t view_target(const view *v, const inode_row *row, uint8_t *out);
/* Of a file that was made here, and that the daemon does not know of. */
typedef enum { BIRTH_NONE, BIRTH_OPEN, BIRTH_CLOSED } birth_state; /* OPEN: its maker has it open */
birth_state view_birth(const view *v, uint64_t ino);
/* Sets times of such a file's backing file; UTIME_OMIT leaves one. */
bool view_set_times(const view *v, const inode_row *row, const struct timespec times[2]);
/* Whether the file is being written: size and times are those of its backing file, in *st. BROKEN: it is, and that is not here. */
view_result view_dirty(const view *v, const inode_row *row, struct stat *st);

/* Whether the file's bytes are in the remote, as the row names them; ABSENT: not, or not yet. */
view_result view_published(const view *v, const inode_row *row);

/* A closed or clean file that is here whole: its one chunk has all its blocks, and this is what its backing file is like. ABSENT: not so,
 * or not known. */
typedef struct {
  uint64_t generation, inode, size, mtime_ns;
} whole_file;
view_result view_whole(const view *v, uint64_t ino, uint64_t block_len, whole_file *out);
/* The page that both sides see; NULL: there is none. */
intent_page *view_page(void);

/* The names of a directory, or of an inode's xattrs, behind one that need not be there, in order. A walk may end early: the next one goes on. */
typedef struct {
  span name;
  uint64_t ino;
  uint32_t mode; /* the type alone */
  size_t size;   /* of an xattr: its value's */
} named;
typedef struct {
  bool xattrs; /* those of an inode, not the names of a directory */
  bool begun, rows_end;
  uint32_t over_at;
  uint8_t lead[13]; /* of the directory's keys */
  named row;
  over_names *over; /* the caller's room */
} walk;
view_result view_walk(const view *v, walk *w, uint64_t dir, span after, named *out);

/* `room`, for INTENT_NAME_MAX bytes, has the value where the rows do not. */
view_result view_xattr(const view *v, uint64_t ino, span name, uint8_t *room, span *value);
void view_reset(void); /* tests */
#endif
