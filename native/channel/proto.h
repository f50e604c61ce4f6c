/* The control protocol's numbers and layouts; PROTOCOL.md says what each message means.
 *
 * All little-endian, packed, one SOCK_SEQPACKET message each: header {u16 kind, u16 flags, u32 seq}, then the fields. Spoken
 * between a daemon and the channel it started, which may be of different releases: never renumber.
 */
#ifndef AOF2_CHANNEL_PROTO_H
#define AOF2_CHANNEL_PROTO_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROTO_HEADER_LEN 8
#define PROTO_COOKIE_LEN 16
#define PROTO_MESSAGE_MAX (64 * 1024)

enum proto_kind { /* daemon to channel */
  PROTO_NODE = 1,
  PROTO_HANDLE = 2,
  PROTO_BLOCKS = 3,
  PROTO_CLEAR = 4,
  PROTO_GRANT = 5,
  PROTO_COLLECT = 6,
  PROTO_DROP = 7,
  PROTO_CAPS = 8,
  PROTO_REPLY = 9,
  PROTO_DUMP = 10,
  PROTO_PROBE = 11,
  PROTO_BIRTH_PAGE = 12,
  PROTO_BIRTH_DIR = 13,
  PROTO_BIRTH_LOG = 14,
  PROTO_BIRTH_INOS = 15,
  PROTO_NEST = 16,
  PROTO_NAMES = 17,
  PROTO_BYTES = 18,
  PROTO_COMING = 19,
  /* 20 was AHEAD */
  PROTO_BRAKE = 21,
  PROTO_WATCH = 22,
  PROTO_ROOM = 23,
  PROTO_GROWN = 24,
  PROTO_DENY = 25,
  PROTO_CLAIM = 26,
  PROTO_UNCLAIM = 27,
  PROTO_PASS = 28,
  PROTO_EXPECT = 29,
  PROTO_CATALOG = 30,
  PROTO_TREE = 31,
  PROTO_APPEND = 32,
  PROTO_APPEND_ROOM = 33,
  PROTO_APPEND_TAKE = 34,
  PROTO_APPEND_STATE = 35,
  PROTO_APPEND_HANDLE = 36,
  PROTO_APPEND_PARTIAL = 37,
};

enum proto_event { /* channel to daemon */
  EV_MOUNTED = 128,
  EV_FAILED = 129,
  EV_INIT = 130,
  EV_GONE = 131,
  EV_REFUSED = 132,
  EV_CLEARED = 133,
  EV_WRITTEN = 134,
  EV_HANDLE = 135,
  EV_DUMPED = 136,
  EV_PROBED = 137,
  EV_UPCALL = 138,
  EV_KILL = 139,
  EV_NEST = 140,
  EV_BIRTHS = 141,
  EV_BRAKED = 142,
  EV_SHORT = 143,
  EV_GROWN = 144,
  EV_CLAIMED = 145,
  EV_TOUCHED = 146,
  EV_TRANSPORT = 147,
  EV_CATALOG = 148,
  EV_APPENDED = 149,
  EV_PARTIAL = 150,
  EV_OPENED = 151,
  EV_USED = 152,
};

#define PROTO_SERVE 600 /* as the error of a READ's answer on F: its blocks are here now, serve it. Never the kernel's */
#define PROTO_HELD 700  /* and the slot: its bytes came as BYTES. libfuse passes errors below 1000 on */
#define PROTO_SLOTS 256 /* [0, this), in turn */
#define PROTO_MORE 1u   /* EV_WRITTEN: another message of the same seq follows */
#define PROTO_AGAIN 2u  /* EV_CLEARED, EV_CLAIMED: not now, ask again; EV_WRITTEN: ranges were left, collect again */
#define PROTO_SILENT 1u /* DENY: those that grow without a report, and no others */
#define PROTO_TAKE 1u   /* GROWN: what is left is the daemon's again */
#define PROTO_TAKEN 1u  /* EV_APPENDED: the segment is the daemon's */
#define PROTO_PARTIAL_MAX 60000 /* of a line that a handle began */
#define PROTO_UNTRACKED 4u /* EV_WRITTEN: something was written that no range tells */

enum { CATALOG_UID = 1u, CATALOG_GID = 2u, CATALOG_FOLLOWS = 4u };
enum { NODE_PASSTHROUGH = 1, NODE_RANGED = 2 };
enum { NODE_ALL_PRESENT = 1u, NODE_SUID = 2u, NODE_STILL = 4u };
enum { FRAMING_LINE = 1, FRAMING_RECORD = 2 };
enum { APPEND_FORWARDS = 1u };
enum { GONE_UNMOUNTED = 1, GONE_ABORTED = 2, GONE_BROKEN = 3 };

/* Any message from the daemon, decoded: the fields its kind has, the others zero. */
typedef struct {
  uint16_t kind, flags;
  uint32_t seq;
  uint64_t nodeid;
  union {
    struct {
      uint32_t mode, node_flags;
      uint64_t block_bytes, block_count;
    } node;
    struct {
      uint64_t fh;
      uint8_t cookie[PROTO_COOKIE_LEN];
    } handle;
    struct {
      uint64_t first, count;
    } blocks;
    uint64_t grant_bytes;
    struct {
      uint32_t action, flags, gid;
    } nest;
    uint32_t caps_on;
    struct { /* flags are in nodeid */
      uint32_t uid, gid, umask;
      const uint8_t *path;
      size_t path_len;
    } catalog;
    struct { /* the handle is in nodeid */
      uint64_t offset;
      uint32_t slot, len;
    } bytes;
    struct {
      uint64_t segment_id, stream_ino, base_record_count, end, next_logical, record_count, crc64, last_ts_ms, room_end, ext_id;
      uint32_t max_size, framing, record_max;
    } append;
    struct {
      uint64_t fh, ext_id;
      uint32_t flags;
    } append_open;
    struct {
      uint64_t fh;
      const uint8_t *data;
      size_t len;
    } append_partial;
    struct {
      uint64_t unique;
      int32_t error;
      const uint8_t *payload;
      size_t payload_len;
    } reply;
  };
} control_message;

/* Whether the bytes are a whole message of a known kind: the lengths are exact but for REPLY, NAMES, CATALOG and APPEND_PARTIAL,
 * whose payload is the rest (`reply.payload`, `catalog.path`, `append_partial.data`). */
bool control_decode(const uint8_t *buf, size_t len, control_message *out);
#endif
