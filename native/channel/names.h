/* Questions about names that are answered here, from the view (view.h): LOOKUP, GETATTR, OPENDIR, READDIRPLUS, RELEASEDIR, READLINK,
 * GETXATTR, LISTXATTR.
 *
 * Invariants
 * - An answer is what the daemon would say (fs/tree.py), but that a file being written is good for a second at most whether or not
 *   a writer has it open.
 * - What the view cannot say for sure goes to the daemon: tenants of other kinds, names that are no more, damaged rows. In a
 *   listing such a name stands without attributes, so that the kernel looks it up.
 *
 * Owner: the worker that read the request; open directories under lists_lock (listing.c).
 */
#ifndef AOF2_CHANNEL_NAMES_H
#define AOF2_CHANNEL_NAMES_H
#include <stdbool.h>
#include <stdint.h>

#include "channel.h"
#include "told.h"
#include "view.h"

#define LIST_FH (UINT64_C(1) << 60) /* set in the handles of directories that were opened here */

/* How everything looks: before view_open. */
void names_look(const told_as *as);
/* True: answered. `data` has room for REQUEST_DATA_MAX bytes. */
bool names_lookup(const request *r, uint8_t *data);
bool names_getattr(const request *r, uint8_t *data);
bool names_readlink(const request *r, uint8_t *data);
bool names_getxattr(const request *r, uint8_t *data);
bool names_listxattr(const request *r, uint8_t *data);
bool names_opendir(const request *r);
bool names_readdir(const request *r, uint8_t *data);
bool names_releasedir(const request *r);

/* changes.c: an entry as everything looks. */
void names_entry(wire_entry_out *out, const inode_row *row, const struct stat *backing);

/* listing.c, for names.c: one page of a directory that was opened here. */
typedef struct {
  uint8_t *data;
  size_t room, used;
} list_page;
uint64_t listing_open(void); /* 0: no room */
bool listing_close(uint64_t fh);
/* The last name that was told before a position, into name[255], and that position; false: no such handle. */
bool listing_from(uint64_t fh, uint64_t start, uint64_t *position, uint8_t *name, size_t *len);
/* A page ended there. */
void listing_mark(uint64_t fh, uint64_t position, span name);
/* False: it is full. */
bool page_add(list_page *page, span name, uint64_t ino, uint32_t mode, uint64_t position, const wire_entry_out *entry);
void listing_reset(void); /* tests */
#endif
