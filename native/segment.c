/* Segment records: scan, resynchronise, encode.
 *
 * v2 header, 28 bytes: u32 payload_len, u32 crc32 (of the payload), u64 logical_offset, u64 append_ts_ms, u32 flags.
 * v3 header, 36 bytes: the same, then u64 ext_id; crc32 covers the header (its own field as zero) and the payload.
 *
 * Invariants: a length is compared with what is left before anything past the header is read; a record counts as
 * consumed only when all of it held; crc64 covers exactly the bytes consumed.
 */
#include "bytes.h"
#include "crc.h"
#include "native.h"

#define V2_HEADER_LEN 28
#define V3_HEADER_LEN 36
#define FLAGS_KNOWN 3u
#define CRC64_BLOCK_LEN (16 * 1024) /* summed while still in the nearest cache */
#define RESYNC_BUDGET_FACTOR 8
#define RESYNC_BUDGET_BASE (64 * 1024)

typedef struct {
  uint32_t payload_len, crc32, flags;
  uint64_t logical_offset, timestamp_ms, ext_id;
} record;

static size_t header_len_of(uint32_t version) {
  return version == 2 ? V2_HEADER_LEN : version == 3 ? V3_HEADER_LEN : 0;
}

static inline void record_load(const uint8_t *p, size_t header_len, record *r) {
  r->payload_len = load_u32(p);
  r->crc32 = load_u32(p + 4);
  r->logical_offset = load_u64(p + 8);
  r->timestamp_ms = load_u64(p + 16);
  r->flags = load_u32(p + 24);
  r->ext_id = header_len == V3_HEADER_LEN ? load_u64(p + 28) : 0;
}

static inline int record_is_zero(const record *r) {
  return !(r->payload_len | r->crc32 | r->flags | r->logical_offset | r->timestamp_ms | r->ext_id);
}

/* Reads the header at p and says whether the record fits in the `left` bytes there. */
static inline uint32_t structure_fault(const uint8_t *p, size_t left, size_t header_len, record *r) {
  if (left < header_len) return AOF2_FAULT_HEADER_PAST_END;
  record_load(p, header_len, r);
  if (r->payload_len == 0) {
    if (record_is_zero(r)) return AOF2_FAULT_ZEROS;
    if (header_len == V2_HEADER_LEN) return AOF2_FAULT_EMPTY;
  }
  if (r->payload_len > left - header_len) return AOF2_FAULT_PAYLOAD_PAST_END;
  return AOF2_FAULT_NONE;
}

/* v3: the upper half of the register cancels the stored checksum, so the record is summed where it lies. */
static inline uint32_t record_crc32(const uint8_t *p, size_t header_len, uint32_t payload_len, uint32_t stored) {
  if (header_len == V2_HEADER_LEN) return aof2_crc32(0, p + header_len, payload_len);
  return ~aof2_crc32_register((uint64_t)stored << 32 | UINT32_MAX, p, header_len + payload_len);
}

static inline uint32_t sense_fault(const record *r, uint64_t next_logical) {
  if (r->logical_offset < next_logical || r->logical_offset > UINT64_MAX - r->payload_len) return AOF2_FAULT_ORDER;
  if (r->flags & ~FLAGS_KNOWN) return AOF2_FAULT_FLAGS;
  return AOF2_FAULT_NONE;
}

static int outcome_of(uint32_t fault, uint64_t pos, uint64_t durable) {
  if (fault == AOF2_FAULT_NONE) return AOF2_CLEAN;
  if (fault == AOF2_FAULT_ORDER || fault == AOF2_FAULT_FLAGS) return AOF2_CORRUPT;
  return pos < durable ? AOF2_CORRUPT : AOF2_TORN;
}

/* Returns -1, touching nothing, for a version there is not. */
int aof2_segment_scan(const uint8_t *buf, size_t len, size_t end, uint32_t version, uint64_t durable,
                      aof2_segment_state *state, size_t rows, uint64_t *offset, uint32_t *length,
                      uint64_t *logical_offset, uint64_t *timestamp_ms, uint64_t *ext_id, uint32_t *flags) {
  size_t header_len = header_len_of(version), n = 0;
  uint32_t fault = AOF2_FAULT_NONE;
  if (header_len == 0) return -1;
  if (end > len) end = len;
  state->count = 0;
  state->fault = AOF2_FAULT_HEADER_PAST_END;
  if (state->pos > end) return AOF2_TORN;

  size_t pos = (size_t)state->pos, summed = pos;
  while (pos < end && n < rows) {
    record r;
    fault = structure_fault(buf + pos, end - pos, header_len, &r);
    if (fault) break;
    if (record_crc32(buf + pos, header_len, r.payload_len, r.crc32) != r.crc32) fault = AOF2_FAULT_CRC;
    if (!fault) fault = sense_fault(&r, state->next_logical);
    if (fault) break;
    offset[n] = pos;
    length[n] = r.payload_len;
    logical_offset[n] = r.logical_offset;
    timestamp_ms[n] = r.timestamp_ms;
    ext_id[n] = r.ext_id;
    flags[n++] = r.flags;
    state->next_logical = r.logical_offset + r.payload_len;
    state->last_ts_ms = r.timestamp_ms;
    pos += header_len + r.payload_len;
    if (pos - summed >= CRC64_BLOCK_LEN) {
      state->crc64 = aof2_crc64(state->crc64, buf + summed, pos - summed);
      summed = pos;
    }
  }
  state->crc64 = aof2_crc64(state->crc64, buf + summed, pos - summed);
  state->pos = pos;
  state->count = n;
  state->fault = fault;
  if (!fault && pos < end) return AOF2_MORE;
  return outcome_of(fault, pos, durable);
}

/* Header fields are tested before the checksum, and a candidate dearer than what is left of the budget is passed
 * over: lengths that lie cost no more than lengths that do not. */
uint64_t aof2_segment_resync(const uint8_t *buf, size_t len, size_t from, size_t end, uint32_t version,
                             uint64_t min_logical) {
  size_t header_len = header_len_of(version);
  size_t limit = end > len ? len : end;
  if (header_len == 0 || from >= limit) return end;
  uint64_t budget = (uint64_t)RESYNC_BUDGET_FACTOR * (limit - from) + RESYNC_BUDGET_BASE;
  for (size_t pos = from; pos < limit && limit - pos >= header_len; pos++) {
    record r;
    if (load_u32(buf + pos + 24) & ~FLAGS_KNOWN) continue;
    if (structure_fault(buf + pos, limit - pos, header_len, &r) || sense_fault(&r, min_logical)) continue;
    uint64_t cost = header_len + (uint64_t)r.payload_len;
    if (cost > budget) continue;
    budget -= cost;
    if (record_crc32(buf + pos, header_len, r.payload_len, r.crc32) == r.crc32) return pos;
  }
  return end;
}

/* -1 also for what a scan would refuse: an empty v2 payload, unknown flags, a logical offset going backwards. */
int64_t aof2_segment_encode(uint32_t version, size_t n, const uint8_t *payloads, size_t payloads_len,
                            const uint32_t *length, const uint64_t *logical_offset, const uint64_t *timestamp_ms,
                            const uint64_t *ext_id, const uint32_t *flags, uint8_t *out, size_t out_cap) {
  size_t header_len = header_len_of(version), at = 0, taken = 0;
  uint64_t next_logical = 0;
  if (header_len == 0) return -1;
  for (size_t i = 0; i < n; i++) {
    record r = {.payload_len = length[i], .flags = flags[i], .logical_offset = logical_offset[i]};
    if (r.payload_len == 0 && header_len == V2_HEADER_LEN) return -1;
    if (r.payload_len > payloads_len - taken) return -1;
    if (header_len > out_cap - at || r.payload_len > out_cap - at - header_len) return -1;
    if (sense_fault(&r, next_logical)) return -1;
    uint8_t *p = out + at;
    store_u32(p, r.payload_len);
    store_u32(p + 4, 0);
    store_u64(p + 8, r.logical_offset);
    store_u64(p + 16, timestamp_ms[i]);
    store_u32(p + 24, r.flags);
    if (header_len == V3_HEADER_LEN) store_u64(p + 28, ext_id[i]);
    if (r.payload_len) memcpy(p + header_len, payloads + taken, r.payload_len);
    store_u32(p + 4, record_crc32(p, header_len, r.payload_len, 0));
    next_logical = r.logical_offset + r.payload_len;
    taken += r.payload_len;
    at += header_len + r.payload_len;
  }
  return (int64_t)at;
}
