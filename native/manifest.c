/* Manifest records: scan, probe, encode.
 *
 * Header, 40 bytes: u16 record_type, u16 flags, u32 payload_len, u64 segment_id, u64 logical_offset,
 * u64 timestamp_ms, u64 payload_crc64. The payload's length is a nonzero multiple of 8, padding included.
 *
 * A commit marker is a CustomEvent of schema 1: u32 schema_id, u16 blob_len = 24, u64 span_start, u64 span_crc64,
 * u64 durable_len, two zero bytes. It vouches for every byte since the marker before it.
 *
 * Invariants: a length is compared with what is left before a payload is read; a record counts as consumed only when
 * all of it held; crc64 and span_crc64 cover exactly the bytes consumed.
 */
#include "bytes.h"
#include "native.h"

#define HEADER_LEN 40
#define CUSTOM_EVENT 15
#define MARKER_SCHEMA_ID 1
#define MARKER_BLOB_LEN 24
#define MARKER_PAYLOAD_LEN 32
#define CRC64_BLOCK_LEN (16 * 1024) /* summed while still in the nearest cache */

static inline int header_is_zero(const uint8_t *p) {
  return !(load_u64(p) | load_u64(p + 8) | load_u64(p + 16) | load_u64(p + 24) | load_u64(p + 32));
}

static inline uint32_t structure_fault(const uint8_t *p, size_t left) {
  if (left < HEADER_LEN) return AOF2_FAULT_HEADER_PAST_END;
  uint32_t payload_len = load_u32(p + 4);
  if (payload_len == 0) return header_is_zero(p) ? AOF2_FAULT_ZEROS : AOF2_FAULT_EMPTY;
  if (payload_len % 8) return AOF2_FAULT_ALIGN;
  if (payload_len > left - HEADER_LEN) return AOF2_FAULT_PAYLOAD_PAST_END;
  return AOF2_FAULT_NONE;
}

static inline int payload_crc_holds(const uint8_t *p) {
  return aof2_crc64(0, p + HEADER_LEN, load_u32(p + 4)) == load_u64(p + 32);
}

static int outcome_of(uint32_t fault) {
  if (fault == AOF2_FAULT_NONE) return AOF2_CLEAN;
  int torn = fault == AOF2_FAULT_HEADER_PAST_END || fault == AOF2_FAULT_PAYLOAD_PAST_END || fault == AOF2_FAULT_ZEROS;
  return torn ? AOF2_TORN : AOF2_CORRUPT;
}

/* -- commit markers --------------------------------------------------------------------------------------------- */
typedef struct {
  uint64_t span_start, span_crc64, durable_len;
} marker;

/* Whether the structurally valid record at p claims to be a marker. */
static inline int claims_marker(const uint8_t *p) {
  return load_u16(p) == CUSTOM_EVENT && load_u32(p + HEADER_LEN) == MARKER_SCHEMA_ID;
}

static int marker_load(const uint8_t *p, marker *m) {
  const uint8_t *payload = p + HEADER_LEN;
  if (load_u32(p + 4) != MARKER_PAYLOAD_LEN || load_u16(payload + 4) != MARKER_BLOB_LEN) return 0;
  m->span_start = load_u64(payload + 6);
  m->span_crc64 = load_u64(payload + 14);
  m->durable_len = load_u64(payload + 22);
  return load_u16(payload + 30) == 0;
}

/* -- scan ------------------------------------------------------------------------------------------------------- */
static void sum_up_to(aof2_manifest_state *state, const uint8_t *buf, size_t *summed, size_t pos) {
  state->crc64 = aof2_crc64(state->crc64, buf + *summed, pos - *summed);
  state->span_crc64 = aof2_crc64(state->span_crc64, buf + *summed, pos - *summed);
  *summed = pos;
}

/* The marker at pos, everything before it summed already. Consumes it if it holds. */
static uint32_t take_marker(aof2_manifest_state *state, const uint8_t *buf, size_t *summed, size_t pos) {
  marker m;
  if (!marker_load(buf + pos, &m)) return AOF2_FAULT_MARKER;
  if (m.span_start != state->span_start || m.span_crc64 != state->span_crc64) return AOF2_FAULT_MARKER;
  *summed = pos + HEADER_LEN + MARKER_PAYLOAD_LEN;
  state->crc64 = aof2_crc64(state->crc64, buf + pos, *summed - pos);
  state->span_start = state->marker_end = *summed;
  state->span_crc64 = 0;
  state->marker_total = state->total + 1;
  state->marker_crc64 = state->crc64;
  if (m.durable_len > state->durable_len) state->durable_len = m.durable_len;
  return AOF2_FAULT_NONE;
}

int aof2_manifest_scan(const uint8_t *buf, size_t len, size_t end, aof2_manifest_state *state, size_t rows,
                       uint64_t *offset, uint16_t *type, uint16_t *flags, uint32_t *payload_len,
                       uint64_t *segment_id, uint64_t *logical_offset, uint64_t *timestamp_ms) {
  uint32_t fault = AOF2_FAULT_NONE;
  size_t n = 0;
  if (end > len) end = len;
  state->count = 0;
  state->fault = AOF2_FAULT_HEADER_PAST_END;
  if (state->pos > end) return AOF2_TORN;

  size_t pos = (size_t)state->pos, summed = pos;
  while (pos < end && n < rows) {
    const uint8_t *p = buf + pos;
    fault = structure_fault(p, end - pos);
    if (!fault && !payload_crc_holds(p)) fault = AOF2_FAULT_CRC;
    if (!fault && claims_marker(p)) {
      sum_up_to(state, buf, &summed, pos);
      fault = take_marker(state, buf, &summed, pos);
    }
    if (fault) break;
    offset[n] = pos;
    type[n] = load_u16(p);
    flags[n] = load_u16(p + 2);
    payload_len[n] = load_u32(p + 4);
    segment_id[n] = load_u64(p + 8);
    logical_offset[n] = load_u64(p + 16);
    timestamp_ms[n] = load_u64(p + 24);
    pos += HEADER_LEN + (size_t)payload_len[n++];
    state->total++;
    if (pos - summed >= CRC64_BLOCK_LEN) sum_up_to(state, buf, &summed, pos);
  }
  sum_up_to(state, buf, &summed, pos);
  state->pos = pos;
  state->count = n;
  state->fault = fault;
  return !fault && pos < end ? AOF2_MORE : outcome_of(fault);
}

/* Markers have one length, so a probe costs at most 32 bytes of checksum for 8 of input. */
uint64_t aof2_manifest_probe_durable(const uint8_t *buf, size_t len, size_t from, size_t end) {
  uint64_t durable_len_max = 0;
  size_t record_len = HEADER_LEN + MARKER_PAYLOAD_LEN;
  if (end > len) end = len;
  if (end < record_len || from > end - record_len) return 0;
  for (size_t pos = (from + 7) / 8 * 8; pos <= end - record_len; pos += 8) {
    const uint8_t *p = buf + pos;
    marker m;
    if (claims_marker(p) && marker_load(p, &m) && m.durable_len > durable_len_max && payload_crc_holds(p))
      durable_len_max = m.durable_len;
  }
  return durable_len_max;
}

/* -- encode ----------------------------------------------------------------------------------------------------- */
int64_t aof2_manifest_encode(size_t n, const uint16_t *type, const uint64_t *segment_id,
                             const uint64_t *logical_offset, const uint64_t *timestamp_ms, const uint8_t *payloads,
                             size_t payloads_len, const uint32_t *payload_len, uint8_t *out, size_t out_cap,
                             uint64_t *crc64) {
  size_t at = 0, summed = 0, taken = 0;
  uint64_t crc = *crc64;
  for (size_t i = 0; i < n; i++) {
    uint32_t len = payload_len[i], padding = -len % 8;
    if (len == 0 || len > UINT32_MAX - padding || len > payloads_len - taken) return -1;
    if (out_cap - at < HEADER_LEN || len + padding > out_cap - at - HEADER_LEN) return -1;
    uint8_t *p = out + at;
    memset(p + HEADER_LEN + len + padding - 8, 0, 8); /* the padding, and the end of a payload written next */
    memcpy(p + HEADER_LEN, payloads + taken, len);
    store_u16(p, type[i]);
    store_u16(p + 2, 0);
    store_u32(p + 4, len + padding);
    store_u64(p + 8, segment_id[i]);
    store_u64(p + 16, logical_offset[i]);
    store_u64(p + 24, timestamp_ms[i]);
    store_u64(p + 32, aof2_crc64(0, p + HEADER_LEN, len + padding));
    taken += len;
    at += HEADER_LEN + (size_t)(len + padding);
    if (at - summed >= CRC64_BLOCK_LEN) {
      crc = aof2_crc64(crc, out + summed, at - summed);
      summed = at;
    }
  }
  *crc64 = aof2_crc64(crc, out + summed, at - summed);
  return (int64_t)at;
}
