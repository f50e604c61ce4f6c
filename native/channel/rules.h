/* What POSIX and this filesystem allow of changes that are made in the channel (changes.h), over rows. No is never an answer: the
 * daemon is asked, which knows the error, or allows it after all (engine/namespace).
 *
 * Owner: pure functions. tests/posix holds the mount, with them in it, against a plain directory.
 */
#ifndef AOF2_CHANNEL_RULES_H
#define AOF2_CHANNEL_RULES_H
#include <stdbool.h>
#include <stdint.h>

#include "rows.h"

#define RULE_LINKS_MAX 65000u          /* of a file */
#define RULE_DIR_LINKS_MAX 0x7FFFFFFFu /* of a directory */
#define RULE_DEPTH_MAX 1000            /* of directories that a move is checked against */
#define RULE_NOREPLACE 1u             /* flags of rename */
#define RULE_EXCHANGE 2u
#define RULE_TARGET_MAX 4095u
#define RULE_XATTRS_LEN_MAX (256u << 10) /* names and values of an inode */
#define RULE_TIME_S_MAX UINT64_C(9000000000) /* in nanoseconds it fits in 63 bits */

bool rule_name(span name);
bool rule_is_top(uint64_t ino); /* of a tenant */
bool rule_unlink(const inode_row *row);
bool rule_rmdir(const inode_row *above, const inode_row *row);
bool rule_new_dir(const inode_row *above);
/* A directory goes from one to another. */
bool rule_moves_dir(const inode_row *from, const inode_row *to);
/* One takes the name of the other, which loses it; not whether a directory is empty. */
bool rule_replace(const inode_row *row, const inode_row *other);
bool rule_link(const inode_row *row);
/* xattrs that are only kept: those of the daemon's own, and those that mean something to the kernel, are the daemon's. */
bool rule_xattr(span name);
/* `flags` are setxattr(2)'s; `others_len`: names and values of the inode's other ones. */
bool rule_set_xattr(span name, size_t len, uint32_t flags, bool there, size_t others_len);
/* chmod, chown and utimens; `valid` is the kernel's mask. */
bool rule_set(const inode_row *row, uint32_t valid, uint32_t mode);
#endif
