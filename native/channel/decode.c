/* Control messages from bytes. Pure: no state, nothing kept but a pointer into the caller's buffer (a payload).
 *
 * Invariants: a field is read only after the length of its kind was checked; ranges cannot overflow when they are used
 * (first + count fits in u64); a segment is one that records can be added to: its end is behind the header and within its size, its
 * times are such as a footer can tell.
 */
#include "../bytes.h"
#include "proto.h"
#include "records.h"

static size_t body_len_of(uint16_t kind) {
  switch (kind) {
    case PROTO_NODE: return 32;
    case PROTO_HANDLE: return 16 + PROTO_COOKIE_LEN;
    case PROTO_BLOCKS:
    case PROTO_BYTES:
    case PROTO_COMING:
    case PROTO_BRAKE:
    case PROTO_CLAIM:
    case PROTO_UNCLAIM:
    case PROTO_CLEAR: return 24;
    case PROTO_CATALOG: return 20; /* at least */
    case PROTO_ROOM:
    case PROTO_EXPECT:
    case PROTO_GRANT: return 16;
    case PROTO_COLLECT:
    case PROTO_GROWN:
    case PROTO_DROP: return 8;
    case PROTO_WATCH:
    case PROTO_TREE:
    case PROTO_DENY:
    case PROTO_PASS:
    case PROTO_CAPS: return 12;
    case PROTO_REPLY: return 12; /* at least */
    case PROTO_APPEND: return 100;
    case PROTO_APPEND_ROOM: return 16;
    case PROTO_APPEND_TAKE:
    case PROTO_APPEND_STATE: return 8;
    case PROTO_APPEND_HANDLE: return 28;
    case PROTO_APPEND_PARTIAL: return 16; /* at least */
    case PROTO_BIRTH_DIR: return 12;
    case PROTO_BIRTH_LOG: return 16;
    case PROTO_BIRTH_INOS: return 24;
    case PROTO_NEST: return 20;
    case PROTO_NAMES: return 8; /* at least */
    case PROTO_DUMP:
    case PROTO_BIRTH_PAGE:
    case PROTO_PROBE: return 0;
    default: return SIZE_MAX;
  }
}

static bool is_open_ended(uint16_t kind) {
  return kind == PROTO_REPLY || kind == PROTO_NAMES || kind == PROTO_CATALOG || kind == PROTO_APPEND_PARTIAL;
}

static bool decode_append(const uint8_t *body, control_message *out) {
  out->append.segment_id = load_u64(body + 8);
  out->append.stream_ino = load_u64(body + 16);
  out->append.base_record_count = load_u64(body + 24);
  out->append.end = load_u64(body + 32);
  out->append.next_logical = load_u64(body + 40);
  out->append.record_count = load_u64(body + 48);
  out->append.crc64 = load_u64(body + 56);
  out->append.last_ts_ms = load_u64(body + 64);
  out->append.room_end = load_u64(body + 72);
  out->append.ext_id = load_u64(body + 80);
  out->append.max_size = load_u32(body + 88);
  out->append.framing = load_u32(body + 92);
  out->append.record_max = load_u32(body + 96);
  bool right = out->append.end ? out->append.end >= RECORDS_HEADER_LEN : !out->append.record_count && !out->append.crc64;
  return right && out->append.end <= out->append.max_size && out->append.segment_id && out->append.last_ts_ms <= INT64_MAX &&
         (out->append.framing == FRAMING_LINE || out->append.framing == FRAMING_RECORD) && out->append.record_max;
}

bool control_decode(const uint8_t *buf, size_t len, control_message *out) {
  if (len < PROTO_HEADER_LEN) return false;
  memset(out, 0, sizeof *out);
  out->kind = load_u16(buf);
  out->flags = load_u16(buf + 2);
  out->seq = load_u32(buf + 4);
  const uint8_t *body = buf + PROTO_HEADER_LEN;
  size_t left = len - PROTO_HEADER_LEN, want = body_len_of(out->kind);
  if (want == SIZE_MAX || left < want || (left > want && !is_open_ended(out->kind))) return false;
  if (out->kind == PROTO_REPLY) {
    out->reply.unique = load_u64(body);
    out->reply.error = (int32_t)load_u32(body + 8);
    out->reply.payload = body + want;
    out->reply.payload_len = left - want;
    return out->reply.error <= 0 && out->reply.error > -512 && !(out->reply.error && out->reply.payload_len);
  }
  if (want >= 8) out->nodeid = load_u64(body);
  switch (out->kind) {
    case PROTO_NODE:
      out->node.mode = load_u32(body + 8);
      out->node.node_flags = load_u32(body + 12);
      out->node.block_bytes = load_u64(body + 16);
      out->node.block_count = load_u64(body + 24);
      return out->node.mode == NODE_PASSTHROUGH || out->node.mode == NODE_RANGED;
    case PROTO_HANDLE:
      out->handle.fh = load_u64(body + 8);
      memcpy(out->handle.cookie, body + 16, PROTO_COOKIE_LEN);
      return true;
    case PROTO_BIRTH_INOS:
    case PROTO_BLOCKS:
    case PROTO_COMING:
    case PROTO_BRAKE:
    case PROTO_CLAIM:
    case PROTO_UNCLAIM:
    case PROTO_CLEAR:
      out->blocks.first = load_u64(body + 8);
      out->blocks.count = load_u64(body + 16);
      return out->blocks.count <= UINT64_MAX - out->blocks.first;
    case PROTO_APPEND: return decode_append(body, out);
    case PROTO_APPEND_HANDLE:
      out->append_open.fh = load_u64(body + 8);
      out->append_open.ext_id = load_u64(body + 16);
      out->append_open.flags = load_u32(body + 24);
      return true;
    case PROTO_APPEND_PARTIAL:
      out->append_partial.fh = load_u64(body + 8);
      out->append_partial.data = body + want;
      out->append_partial.len = left - want;
      return out->append_partial.len <= PROTO_PARTIAL_MAX;
    case PROTO_BIRTH_LOG:
    case PROTO_ROOM:
    case PROTO_APPEND_ROOM:
    case PROTO_EXPECT:
    case PROTO_GRANT: out->grant_bytes = load_u64(body + 8); return true;
    case PROTO_NEST:
      out->nest.action = load_u32(body + 8);
      out->nest.flags = load_u32(body + 12);
      out->nest.gid = load_u32(body + 16);
      return true;
    case PROTO_BYTES:
      out->bytes.offset = load_u64(body + 8);
      out->bytes.slot = load_u32(body + 16);
      out->bytes.len = load_u32(body + 20);
      return true;
    case PROTO_CATALOG:
      out->catalog.uid = load_u32(body + 8);
      out->catalog.gid = load_u32(body + 12);
      out->catalog.umask = load_u32(body + 16);
      out->catalog.path = body + want;
      out->catalog.path_len = left - want;
      return out->catalog.path_len > 0;
    case PROTO_NAMES:
      out->reply.payload = body + want;
      out->reply.payload_len = left - want;
      return true;
    case PROTO_BIRTH_DIR:
    case PROTO_TREE:
    case PROTO_WATCH:
    case PROTO_DENY:
    case PROTO_PASS:
    case PROTO_CAPS: out->caps_on = load_u32(body + 8); return true;
    default: return true;
  }
}
