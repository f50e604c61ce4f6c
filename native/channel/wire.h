/* The FUSE wire as the kernel speaks it (7.40 and later): our own declarations.
 *
 * Debian's linux/fuse.h ends at 7.38, before passthrough. Names drop the FUSE_ prefix for WIRE_, so both headers could be
 * included. Every struct is the kernel's layout in host byte order; _Static_assert holds the sizes. Messages come at any
 * alignment: they are copied out with memcpy, never cast. Numbers are the kernel's: never renumber.
 */
#ifndef AOF2_CHANNEL_WIRE_H
#define AOF2_CHANNEL_WIRE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>

#define WIRE_MAJOR 7
#define WIRE_MINOR_MAX 45       /* the newest minor this file was written for */
#define WIRE_MINOR_PASSTHROUGH 40
#define WIRE_MINOR_URING 45     /* Linux 6.18, the first it was tried on; there since 7.42 */

enum wire_opcode {
  WIRE_LOOKUP = 1,
  WIRE_FORGET = 2,
  WIRE_GETATTR = 3,
  WIRE_SETATTR = 4,
  WIRE_READLINK = 5,
  WIRE_SYMLINK = 6,
  WIRE_MKNOD = 8,
  WIRE_MKDIR = 9,
  WIRE_UNLINK = 10,
  WIRE_RMDIR = 11,
  WIRE_RENAME = 12,
  WIRE_LINK = 13,
  WIRE_OPEN = 14,
  WIRE_READ = 15,
  WIRE_WRITE = 16,
  WIRE_STATFS = 17,
  WIRE_RELEASE = 18,
  WIRE_FSYNC = 20,
  WIRE_SETXATTR = 21,
  WIRE_GETXATTR = 22,
  WIRE_LISTXATTR = 23,
  WIRE_REMOVEXATTR = 24,
  WIRE_INIT = 26,
  WIRE_OPENDIR = 27,
  WIRE_RELEASEDIR = 29,
  WIRE_FSYNCDIR = 30,
  WIRE_ACCESS = 34,
  WIRE_CREATE = 35,
  WIRE_INTERRUPT = 36,
  WIRE_BMAP = 37,
  WIRE_IOCTL = 39,
  WIRE_POLL = 40,
  WIRE_BATCH_FORGET = 42,
  WIRE_FALLOCATE = 43,
  WIRE_READDIRPLUS = 44,
  WIRE_RENAME2 = 45,
  WIRE_LSEEK = 46,
  WIRE_COPY_FILE_RANGE = 47,
  WIRE_SYNCFS = 50,
  WIRE_TMPFILE = 51,
  WIRE_STATX = 52,
  WIRE_COPY_FILE_RANGE_64 = 53,
};

enum wire_init_flag {
  WIRE_ASYNC_READ = 1u << 0,
  WIRE_POSIX_LOCKS = 1u << 1,
  WIRE_ATOMIC_O_TRUNC = 1u << 3,
  WIRE_EXPORT_SUPPORT = 1u << 4,
  WIRE_BIG_WRITES = 1u << 5,
  WIRE_SPLICE_WRITE = 1u << 7,
  WIRE_SPLICE_MOVE = 1u << 8,
  WIRE_SPLICE_READ = 1u << 9,
  WIRE_FLOCK_LOCKS = 1u << 10,
  WIRE_AUTO_INVAL_DATA = 1u << 12,
  WIRE_DO_READDIRPLUS = 1u << 13,
  WIRE_WRITEBACK_CACHE = 1u << 16,
  WIRE_PARALLEL_DIROPS = 1u << 18,
  WIRE_POSIX_ACL = 1u << 20,
  WIRE_MAX_PAGES = 1u << 22,
  WIRE_CACHE_SYMLINKS = 1u << 23,
  WIRE_EXPLICIT_INVAL_DATA = 1u << 25,
  WIRE_HANDLE_KILLPRIV_V2 = 1u << 28,
  WIRE_INIT_EXT = 1u << 30,
};
#define WIRE2_PASSTHROUGH (1u << (37 - 32)) /* in flags2 */
#define WIRE2_OVER_IO_URING (1u << (41 - 32))

#define WIRE_FOPEN_DIRECT_IO (1u << 0)
#define WIRE_FOPEN_KEEP_CACHE (1u << 1)
#define WIRE_FOPEN_CACHE_DIR (1u << 3)
#define WIRE_FOPEN_NOFLUSH (1u << 5)
#define WIRE_FOPEN_PARALLEL_DIRECT_WRITES (1u << 6)
#define WIRE_FOPEN_PASSTHROUGH (1u << 7)
/* Any other flag beside passthrough is EIO at open(). */
#define WIRE_FOPEN_PASSTHROUGH_MASK \
  (WIRE_FOPEN_DIRECT_IO | WIRE_FOPEN_NOFLUSH | WIRE_FOPEN_PARALLEL_DIRECT_WRITES | WIRE_FOPEN_PASSTHROUGH)
#define WIRE_WRITE_KILL_SUIDGID (1u << 2)
#define WIRE_ERRORS_MAX 512 /* the kernel takes no reply with an error from here on */
#define WIRE_UNIQUE_RESEND (UINT64_C(1) << 63) /* set in the unique of a request the kernel sends again */

typedef struct {
  uint32_t len, opcode;
  uint64_t unique, nodeid;
  uint32_t uid, gid, pid;
  uint16_t total_extlen, padding;
} wire_in_header;

typedef struct {
  uint32_t len;
  int32_t error;
  uint64_t unique;
} wire_out_header;

typedef struct {
  uint32_t major, minor, max_readahead, flags, flags2, unused[11];
} wire_init_in;

typedef struct {
  uint32_t major, minor, max_readahead, flags;
  uint16_t max_background, congestion_threshold;
  uint32_t max_write, time_gran;
  uint16_t max_pages, map_alignment;
  uint32_t flags2, max_stack_depth;
  uint16_t request_timeout, unused[11];
} wire_init_out;

typedef struct {
  uint64_t fh;
  uint32_t open_flags;
  int32_t backing_id;
} wire_open_out;

typedef struct {
  uint64_t ino, size, blocks, atime, mtime, ctime;
  uint32_t atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, blksize, flags;
} wire_attr;

typedef struct {
  uint64_t nodeid, generation, entry_valid, attr_valid;
  uint32_t entry_valid_nsec, attr_valid_nsec;
  wire_attr attr;
} wire_entry_out;
#define WIRE_ENTRY_OUT_LEN 128

typedef struct {
  uint64_t attr_valid;
  uint32_t attr_valid_nsec, padding;
  wire_attr attr;
} wire_attr_out;

typedef struct {
  uint32_t flags, mode, umask, open_flags; /* then the name */
} wire_create_in;

typedef struct {
  uint64_t fh, offset;
  uint32_t size, read_flags;
  uint64_t lock_owner;
  uint32_t flags, padding;
} wire_read_in;

typedef struct {
  uint64_t fh, offset;
  uint32_t size, write_flags;
  uint64_t lock_owner;
  uint32_t flags, padding;
} wire_write_in;

typedef struct {
  uint32_t size, padding;
} wire_write_out;

typedef struct {
  uint64_t fh;
  uint32_t flags, release_flags;
  uint64_t lock_owner;
} wire_release_in;

typedef struct {
  uint64_t fh, offset, length;
  uint32_t mode, padding;
} wire_fallocate_in;

typedef struct {
  uint64_t fh, offset;
  uint32_t whence, padding;
} wire_lseek_in;

typedef struct {
  uint64_t fh_in, off_in, nodeid_out, fh_out, off_out, len, flags;
} wire_copy_in;

typedef struct {
  uint32_t valid, padding;
  uint64_t fh, size, lock_owner, atime, mtime, ctime;
  uint32_t atimensec, mtimensec, ctimensec, mode, unused4, uid, gid, unused5;
} wire_setattr_in;
enum { /* of `valid` */
  WIRE_SET_MODE = 1u << 0,
  WIRE_SET_UID = 1u << 1,
  WIRE_SET_GID = 1u << 2,
  WIRE_SET_ATIME = 1u << 4,
  WIRE_SET_MTIME = 1u << 5,
  WIRE_SET_FH = 1u << 6,
  WIRE_SET_ATIME_NOW = 1u << 7,
  WIRE_SET_MTIME_NOW = 1u << 8,
  WIRE_SET_LOCKOWNER = 1u << 9,
  WIRE_SET_KILL_SUIDGID = 1u << 11,
};

#define WIRE_GETXATTR_IN_LEN 8 /* then the name and its NUL */
#define WIRE_INTERRUPT_IN_LEN 8

typedef struct {
  int32_t fd;
  uint32_t flags;
  uint64_t padding;
} wire_backing_map;

#define WIRE_IOC_CLONE _IOR(229, 0, uint32_t)
#define WIRE_IOC_BACKING_OPEN _IOW(229, 1, wire_backing_map)
#define WIRE_IOC_BACKING_CLOSE _IOW(229, 2, uint32_t)

/* Over io_uring a request comes in parts: its header and the operation's in here, the rest in a buffer beside it. */
typedef struct {
  uint8_t in_out[128]; /* a wire_in_header; of the answer, a wire_out_header */
  uint8_t op_in[128];
  uint64_t flags, commit_id;
  uint32_t payload_len, padding; /* of what is in the buffer beside it, of the answer, too */
  uint64_t reserved;
} wire_uring_header;

enum { WIRE_URING_REGISTER = 1, WIRE_URING_COMMIT_AND_FETCH = 2 };

typedef struct {
  uint64_t flags, commit_id;
  uint16_t queue;
  uint8_t padding[6];
} wire_uring_command;

_Static_assert(sizeof(wire_uring_header) == 288 && sizeof(wire_uring_command) == 24, "io_uring");
_Static_assert(sizeof(wire_in_header) == 40, "in_header");
_Static_assert(sizeof(wire_out_header) == 16, "out_header");
_Static_assert(sizeof(wire_init_in) == 64 && sizeof(wire_init_out) == 64, "init");
_Static_assert(offsetof(wire_init_out, max_stack_depth) == 36, "init_out");
_Static_assert(sizeof(wire_open_out) == 16 && sizeof(wire_release_in) == 24, "open");
_Static_assert(sizeof(wire_read_in) == 40 && sizeof(wire_write_in) == 40, "read, write");
_Static_assert(sizeof(wire_fallocate_in) == 32 && sizeof(wire_lseek_in) == 24 && sizeof(wire_copy_in) == 56, "ranges");
_Static_assert(sizeof(wire_attr_out) == 104 && sizeof(wire_setattr_in) == 88, "attr");
_Static_assert(sizeof(wire_entry_out) == WIRE_ENTRY_OUT_LEN && sizeof(wire_create_in) == 16, "entry, create");
_Static_assert(sizeof(wire_backing_map) == 16, "backing_map");
#endif
