/* Asks: before the next write to a file of the mount, splice and sendfile included, the kernel asks this process.
 *
 * A write removes a file's capabilities. Whether it has any the kernel asks once (GETXATTR, security.capability) and then takes for
 * known, until the file's attributes come anew. So a look at the file that must not be answered from memory makes the next write ask
 * again, under the inode's lock, before a byte of it is written; its answer can wait, and an error when they are to be removed
 * (REMOVEXATTR) is the write's. Of a splice or sendfile each step of some pages counts as a write.
 *
 * The file is opened by its number, as a mere path: no OPEN, no FLUSH, and no name is needed. The descriptors on our own mount
 * live as long as one look; a caller that ends with the process, or with the connection, leaves none.
 *
 * Owner: one thread of its own, the only one of this process that waits for an answer of the mount. A crash leaves nothing.
 */
#ifndef AOF2_CHANNEL_ASK_H
#define AOF2_CHANNEL_ASK_H
#include <stdbool.h>
#include <stdint.h>

/* `done` is called on the thread: from here on the next write asks, or it cannot be made to. 0 or an errno. */
int ask_open(void (*done)(uint64_t nodeid, bool asks));
/* False: too many wait. Never waits. */
bool ask_node(uint64_t nodeid);
/* A file of the mount by its number, as a mere path; -1. Waits for an answer of the mount. */
int open_node(uint64_t nodeid);
#endif
