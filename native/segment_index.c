/* A sealed v3 segment in two files: its payloads back to back, and its record headers back to back (the index).
 *
 * Record i lies at 36 * i + start[i] of the raw segment's record area, where start[i] is the sum of the payload lengths
 * before it: what was split can be composed again at any range. The checksum of a record covers both of its halves.
 *
 * Invariants
 * - Headers that aof2_index_starts accepted keep the order of a segment and add up without overflow: the other functions
 *   rely on `start` being of that kind, and read no byte outside of the buffers whatever the headers say.
 * - A composed range is written whole, or not called composed.
 */
#include <errno.h>
#include <unistd.h>

#include "bytes.h"
#include "crc.h"
#include "native.h"

#define HEADER_LEN 36
#define FLAGS_KNOWN 3u

static int is_zero(const uint8_t *p) {
  uint8_t any = 0;
  for (size_t i = 0; i < HEADER_LEN; i++) any |= p[i];
  return !any;
}

size_t aof2_index_starts(const uint8_t *headers, size_t n, uint64_t *next_logical, uint64_t start_first,
                         uint64_t *start) {
  start[0] = start_first;
  for (size_t i = 0; i < n; i++) {
    const uint8_t *p = headers + i * HEADER_LEN;
    uint64_t length = load_u32(p), logical = load_u64(p + 8);
    if (logical < *next_logical || logical > UINT64_MAX - length || start[i] > UINT64_MAX - length) return i;
    if (load_u32(p + 24) & ~FLAGS_KNOWN || is_zero(p)) return i;
    *next_logical = logical + length;
    start[i + 1] = start[i] + length;
  }
  return n;
}

void aof2_index_columns(const uint8_t *headers, size_t n, uint32_t *length, uint64_t *logical_offset,
                        uint64_t *timestamp_ms, uint64_t *ext_id, uint32_t *flags) {
  for (size_t i = 0; i < n; i++) {
    const uint8_t *p = headers + i * HEADER_LEN;
    length[i] = load_u32(p);
    logical_offset[i] = load_u64(p + 8);
    timestamp_ms[i] = load_u64(p + 16);
    flags[i] = load_u32(p + 24);
    ext_id[i] = load_u64(p + 28);
  }
}

size_t aof2_index_find_time(const uint8_t *headers, size_t n, uint64_t timestamp_ms) {
  size_t i = 0;
  while (i < n && load_u64(headers + i * HEADER_LEN + 16) < timestamp_ms) i++;
  return i;
}

/* Whether payload [from, to) is in the buffer that begins with payload `at`. */
static int holds(uint64_t at, size_t len, uint64_t from, uint64_t to) {
  return from >= at && from <= to && to - at <= len;
}

/* The checksum of a header, with its own field as zero, and of the payload behind it. */
static uint32_t record_crc(const uint8_t *header, const uint8_t *payload, uint32_t payload_len) {
  uint64_t stored = load_u32(header + 4); /* cancelled by the upper half of the register */
  uint32_t crc = ~aof2_crc32_register(stored << 32 | UINT32_MAX, header, HEADER_LEN);
  return payload_len ? aof2_crc32(crc, payload, payload_len) : crc;
}

size_t aof2_index_check(const uint8_t *headers, size_t n, const uint64_t *start, const uint8_t *payload,
                        size_t payload_len, uint64_t payload_start) {
  for (size_t i = 0; i < n; i++) {
    const uint8_t *p = headers + i * HEADER_LEN;
    if (!holds(payload_start, payload_len, start[i], start[i + 1]) || load_u32(p) != start[i + 1] - start[i]) return i;
    if (record_crc(p, payload + (start[i] - payload_start), load_u32(p)) != load_u32(p + 4)) return i;
  }
  return n;
}

/* The last record that begins at or before `at` of the record area; n > 0. */
static size_t record_at(size_t n, const uint64_t *start, uint64_t at) {
  size_t low = 0, high = n;
  while (high - low > 1) {
    size_t middle = low + (high - low) / 2;
    if (HEADER_LEN * (uint64_t)middle + start[middle] <= at) low = middle;
    else high = middle;
  }
  return low;
}

int aof2_index_compose(const uint8_t *headers, size_t n, const uint64_t *start, const uint8_t *payload,
                       size_t payload_len, uint64_t payload_start, uint64_t at, uint8_t *out, size_t len) {
  if (len == 0) return 0;
  uint64_t area_len = HEADER_LEN * (uint64_t)n + start[n];
  if (n == 0 || start[0] || at > area_len || len > area_len - at) return -1;
  for (size_t i = record_at(n, start, at), done = 0; done < len; i++) {
    uint64_t record_start = HEADER_LEN * (uint64_t)i + start[i], into = at + done - record_start;
    if (into < HEADER_LEN) {
      size_t piece = HEADER_LEN - (size_t)into < len - done ? HEADER_LEN - (size_t)into : len - done;
      memcpy(out + done, headers + i * HEADER_LEN + into, piece);
      done += piece;
      into += piece;
    }
    uint64_t from = start[i] + (into < HEADER_LEN ? 0 : into - HEADER_LEN), left = start[i + 1] - from;
    size_t piece = left < len - done ? (size_t)left : len - done;
    if (piece == 0) continue;
    if (!holds(payload_start, payload_len, from, from + piece)) return -1;
    memcpy(out + done, payload + (from - payload_start), piece);
    done += piece;
  }
  return 0;
}

/* -- making ------------------------------------------------------------------------------------------------------ */
static uint64_t summed(uint64_t crc64, const uint8_t *header, const uint8_t *payload, uint32_t payload_len) {
  crc64 = aof2_crc64(crc64, header, HEADER_LEN);
  return payload_len ? aof2_crc64(crc64, payload, payload_len) : crc64;
}

int64_t aof2_index_encode(size_t n, const uint8_t *payload, size_t payload_len, const uint32_t *length,
                          const uint64_t *ext_id, const uint32_t *flags, uint64_t timestamp_ms, uint64_t logical_first,
                          uint8_t *headers, uint64_t *crc64) {
  size_t taken = 0;
  if (logical_first > UINT64_MAX - payload_len) return -1;
  for (size_t i = 0; i < n; i++) {
    uint8_t *p = headers + i * HEADER_LEN;
    if (length[i] > payload_len - taken || flags[i] & ~FLAGS_KNOWN) return -1;
    store_u32(p, length[i]);
    store_u32(p + 4, 0);
    store_u64(p + 8, logical_first + taken);
    store_u64(p + 16, timestamp_ms);
    store_u32(p + 24, flags[i]);
    store_u64(p + 28, ext_id[i]);
    store_u32(p + 4, record_crc(p, payload + taken, length[i]));
    *crc64 = summed(*crc64, p, payload + taken, length[i]);
    taken += length[i];
  }
  return (int64_t)taken;
}

size_t aof2_index_rebase(uint8_t *headers, size_t n, const uint64_t *start, const uint8_t *payload, size_t payload_len,
                         uint64_t payload_start, uint64_t logical_first, uint64_t *last_ts_ms, uint64_t *crc64) {
  for (size_t i = 0; i < n; i++) {
    uint8_t *p = headers + i * HEADER_LEN;
    if (aof2_index_check(p, 1, start + i, payload, payload_len, payload_start) != 1) return i;
    const uint8_t *bytes = payload + (start[i] - payload_start);
    if (load_u64(p + 16) > *last_ts_ms) *last_ts_ms = load_u64(p + 16);
    store_u64(p + 8, logical_first + (start[i] - start[0]));
    store_u64(p + 16, *last_ts_ms);
    store_u32(p + 4, record_crc(p, bytes, load_u32(p)));
    *crc64 = summed(*crc64, p, bytes, load_u32(p));
  }
  return n;
}

/* -- splitting --------------------------------------------------------------------------------------------------- */
static int put(int file, const uint8_t *data, size_t len, uint64_t offset) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pwrite(file, data + done, len - done, (off_t)(offset + done));
    if (n >= 0) done += (size_t)n;
    else if (errno != EINTR) return errno;
  }
  return 0;
}

/* What is written to one file by way of a buffer: `held` bytes of it belong at `offset`. */
typedef struct {
  int fd;
  uint8_t *buf;
  size_t cap, held;
  uint64_t offset;
} sink;

static int drain(sink *s) {
  int error = put(s->fd, s->buf, s->held, s->offset);
  s->offset += s->held;
  s->held = 0;
  return error;
}

static int pour(sink *s, const uint8_t *data, size_t len) {
  int error = len > s->cap - s->held ? drain(s) : 0;
  if (error) return error;
  if (len > s->cap) { /* longer than the buffer: from where it lies */
    error = put(s->fd, data, len, s->offset);
    s->offset += len;
    return error;
  }
  memcpy(s->buf + s->held, data, len);
  s->held += len;
  return 0;
}

int aof2_segment_spread(const uint8_t *buf, size_t len, size_t n, const uint64_t *offset, const uint32_t *length,
                        int payload_fd, uint64_t payload_at, int index_fd, uint64_t index_at, uint8_t *scratch,
                        size_t scratch_len) {
  size_t half = scratch_len / 2;
  sink payloads = {payload_fd, scratch, half, 0, payload_at}, headers = {index_fd, scratch + half, half, 0, index_at};
  int error = 0;
  for (size_t i = 0; i < n && !error; i++) {
    if (offset[i] > len || len - offset[i] < HEADER_LEN || length[i] > len - offset[i] - HEADER_LEN) return EINVAL;
    error = pour(&headers, buf + offset[i], HEADER_LEN);
    if (!error && length[i]) error = pour(&payloads, buf + offset[i] + HEADER_LEN, length[i]);
  }
  if (!error) error = drain(&headers);
  return error ? error : drain(&payloads);
}
