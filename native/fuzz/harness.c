/* One fuzzer input against one function of the core.
 *
 * The body is copied into an allocation of exactly its size, and every output has exactly the room it was promised,
 * so the sanitizers see one byte too many. Scans run twice, once in one call and once a few rows at a time, and must
 * tell the same story.
 */
#include "harness.h"

#include <string.h>

#include "../bytes.h"
#include "../native.h"

typedef struct {
  const uint8_t *buf;
  size_t len, start, end, rows;
  uint16_t param;
  uint64_t state;
} input;

static void *exactly(size_t size) {
  void *p = malloc(size ? size : 1);
  CHECK(p);
  return p;
}

/* -- segment ---------------------------------------------------------------------------------------------------- */
typedef struct {
  uint64_t *offset, *logical_offset, *timestamp_ms, *ext_id;
  uint32_t *length, *flags;
} segment_columns;

static segment_columns segment_columns_new(size_t rows) {
  return (segment_columns){exactly(rows * 8), exactly(rows * 8), exactly(rows * 8),
                           exactly(rows * 8), exactly(rows * 4), exactly(rows * 4)};
}

static void segment_columns_free(segment_columns *c) {
  free(c->offset), free(c->logical_offset), free(c->timestamp_ms);
  free(c->ext_id), free(c->length), free(c->flags);
}

static int segment_step(const input *in, uint32_t version, aof2_segment_state *state, size_t rows, segment_columns *c) {
  return aof2_segment_scan(in->buf, in->len, in->end, version, in->param, state, rows, c->offset, c->length,
                           c->logical_offset, c->timestamp_ms, c->ext_id, c->flags);
}

/* Rows lie end to end between `from` and the new position, and make up all of it. */
static void check_segment_rows(const input *in, size_t header_len, uint64_t from, const aof2_segment_state *state,
                               const segment_columns *c, uint64_t next_logical) {
  uint64_t at = from;
  for (uint64_t i = 0; i < state->count; i++) {
    CHECK(c->offset[i] == at && c->length[i] <= in->len && (c->flags[i] & ~3u) == 0);
    CHECK(c->logical_offset[i] >= next_logical);
    next_logical = c->logical_offset[i] + c->length[i];
    at += header_len + c->length[i];
  }
  CHECK(state->pos == at && state->next_logical == next_logical);
}

static void fuzz_segment(const input *in, uint32_t version) {
  size_t header_len = version == 2 ? 28 : 36, limit = in->end < in->len ? in->end : in->len;
  size_t rows_all = in->len / header_len + 1;
  aof2_segment_state all = {.pos = in->start, .crc64 = in->state, .next_logical = in->state >> 32}, few = all;
  segment_columns c = segment_columns_new(rows_all);
  int outcome = segment_step(in, version, &all, rows_all, &c);
  CHECK(outcome == AOF2_CLEAN || outcome == AOF2_TORN || outcome == AOF2_CORRUPT);
  CHECK((outcome == AOF2_CLEAN) == (all.fault == AOF2_FAULT_NONE));
  check_segment_rows(in, header_len, in->start, &all, &c, in->state >> 32);
  if (in->start <= limit) {
    CHECK(all.pos <= limit && (outcome != AOF2_CLEAN || all.pos == limit));
    CHECK(all.crc64 == aof2_crc64(in->state, in->buf + in->start, all.pos - in->start));
  }
  segment_columns_free(&c);

  c = segment_columns_new(in->rows);
  uint64_t total = 0;
  int again;
  do {
    uint64_t from = few.pos, next_logical = few.next_logical;
    again = segment_step(in, version, &few, in->rows, &c);
    check_segment_rows(in, header_len, from, &few, &c, next_logical);
    CHECK(again != AOF2_MORE || few.count == in->rows);
    total += few.count;
  } while (again == AOF2_MORE);
  CHECK(again == outcome && total == all.count && few.pos == all.pos && few.crc64 == all.crc64);
  CHECK(few.fault == all.fault && few.last_ts_ms == all.last_ts_ms);
  segment_columns_free(&c);
}

static void fuzz_resync(const input *in, uint32_t version) {
  uint64_t min_logical = in->state >> 32;
  uint64_t found = aof2_segment_resync(in->buf, in->len, in->start, in->end, version, min_logical);
  if (found == in->end) return;
  CHECK(found >= in->start && found < in->end && found < in->len);
  aof2_segment_state state = {.pos = found, .next_logical = min_logical};
  segment_columns c = segment_columns_new(1);
  segment_step(in, version, &state, 1, &c);
  CHECK(state.count == 1);
  segment_columns_free(&c);
}

/* -- manifest --------------------------------------------------------------------------------------------------- */
typedef struct {
  uint64_t *offset, *segment_id, *logical_offset, *timestamp_ms;
  uint32_t *payload_len;
  uint16_t *type, *flags;
} manifest_columns;

static manifest_columns manifest_columns_new(size_t rows) {
  return (manifest_columns){exactly(rows * 8), exactly(rows * 8), exactly(rows * 8), exactly(rows * 8),
                            exactly(rows * 4), exactly(rows * 2), exactly(rows * 2)};
}

static void manifest_columns_free(manifest_columns *c) {
  free(c->offset), free(c->segment_id), free(c->logical_offset), free(c->timestamp_ms);
  free(c->payload_len), free(c->type), free(c->flags);
}

static int manifest_step(const input *in, aof2_manifest_state *state, size_t rows, manifest_columns *c) {
  return aof2_manifest_scan(in->buf, in->len, in->end, state, rows, c->offset, c->type, c->flags, c->payload_len,
                            c->segment_id, c->logical_offset, c->timestamp_ms);
}

static void check_manifest_rows(const input *in, uint64_t from, const aof2_manifest_state *state,
                                const manifest_columns *c) {
  uint64_t at = from;
  for (uint64_t i = 0; i < state->count; i++) {
    CHECK(c->offset[i] == at && c->payload_len[i] >= 8 && c->payload_len[i] % 8 == 0 && c->payload_len[i] <= in->len);
    at += 40 + (uint64_t)c->payload_len[i];
  }
  CHECK(state->pos == at);
}

static void fuzz_manifest(const input *in) {
  size_t rows_all = in->len / 48 + 1, limit = in->end < in->len ? in->end : in->len;
  aof2_manifest_state all = {.pos = in->start, .crc64 = in->state, .span_start = in->start, .marker_end = in->start};
  aof2_manifest_state few = all;
  manifest_columns c = manifest_columns_new(rows_all);
  int outcome = manifest_step(in, &all, rows_all, &c);
  CHECK(outcome == AOF2_CLEAN || outcome == AOF2_TORN || outcome == AOF2_CORRUPT);
  CHECK((outcome == AOF2_CLEAN) == (all.fault == AOF2_FAULT_NONE));
  check_manifest_rows(in, in->start, &all, &c);
  CHECK(all.total == all.count && all.marker_total <= all.total);
  CHECK(all.marker_end <= all.pos && all.marker_end == all.span_start);
  if (in->start <= limit) {
    CHECK(all.pos <= limit && (outcome != AOF2_CLEAN || all.pos == limit));
    CHECK(all.crc64 == aof2_crc64(in->state, in->buf + in->start, all.pos - in->start));
    CHECK(all.span_crc64 == aof2_crc64(0, in->buf + all.span_start, all.pos - all.span_start));
  }
  manifest_columns_free(&c);

  c = manifest_columns_new(in->rows);
  int again;
  do {
    uint64_t from = few.pos;
    again = manifest_step(in, &few, in->rows, &c);
    check_manifest_rows(in, from, &few, &c);
    CHECK(again != AOF2_MORE || few.count == in->rows);
  } while (again == AOF2_MORE);
  few.count = all.count;
  CHECK(again == outcome && memcmp(&few, &all, sizeof all) == 0);
  manifest_columns_free(&c);
}

/* A marker a scan believes is one a probe finds, if it is where probes look. */
static void fuzz_probe(const input *in) {
  uint64_t durable_len = aof2_manifest_probe_durable(in->buf, in->len, in->start, in->end);
  if (in->start % 8 || in->start > in->len) return;
  size_t rows = in->len / 48 + 1;
  manifest_columns c = manifest_columns_new(rows);
  aof2_manifest_state state = {.pos = in->start, .span_start = in->start};
  manifest_step(in, &state, rows, &c);
  CHECK(durable_len >= state.durable_len);
  manifest_columns_free(&c);
}

/* -- framing, diff, checksums ----------------------------------------------------------------------------------- */
static void fuzz_lines(const input *in) {
  size_t rows = in->rows, consumed = 0, total = 0;
  uint32_t *length = exactly(rows * 4);
  size_t n = aof2_frame_lines(in->buf, in->len, in->param, rows, length, &consumed);
  CHECK(n <= rows && consumed <= in->len);
  for (size_t i = 0; i < n; i++) {
    CHECK(length[i] >= 1 && length[i] <= in->param);
    total += length[i];
    CHECK(in->buf[total - 1] == '\n' || length[i] == in->param);
  }
  CHECK(total == consumed);
  free(length);
}

static void fuzz_pages(const input *in) {
  size_t a_len = in->start < in->len ? in->start : in->len, b_len = in->len - a_len, page_len = in->param;
  size_t longer = a_len > b_len ? a_len : b_len;
  size_t bitmap_len = page_len ? (longer + 8 * page_len - 1) / (8 * page_len) : 0;
  uint8_t *bitmap = exactly(bitmap_len), *b = exactly(b_len);
  memcpy(b, in->buf + a_len, b_len);
  int64_t changed = aof2_page_diff(in->buf, a_len, b, b_len, page_len, bitmap, bitmap_len), bits = 0;
  CHECK((changed < 0) == (page_len == 0));
  for (size_t i = 0; changed >= 0 && i < bitmap_len; i++) bits += __builtin_popcount(bitmap[i]);
  CHECK(changed < 0 || bits == changed);
  if (bitmap_len) CHECK(aof2_page_diff(in->buf, a_len, b, b_len, page_len, bitmap, bitmap_len - 1) == -1);
  free(bitmap), free(b);
}

static void fuzz_crc(const input *in) {
  size_t cut = in->start < in->len ? in->start : in->len;
  uint64_t crc64 = aof2_crc64_with(0, in->state, in->buf, in->len);
  uint32_t crc32 = aof2_crc32_with(0, (uint32_t)in->state, in->buf, in->len);
  for (int impl = 0; impl <= 3; impl++) {
    uint64_t head64 = aof2_crc64_with(impl, in->state, in->buf, cut);
    uint32_t head32 = aof2_crc32_with(impl, (uint32_t)in->state, in->buf, cut);
    CHECK(aof2_crc64_with(impl, head64, in->buf + cut, in->len - cut) == crc64);
    CHECK(aof2_crc32_with(impl, head32, in->buf + cut, in->len - cut) == crc32);
  }
  uint64_t tail64 = aof2_crc64(0, in->buf + cut, in->len - cut);
  uint32_t tail32 = aof2_crc32(0, in->buf + cut, in->len - cut);
  CHECK(aof2_crc64_combine(aof2_crc64(in->state, in->buf, cut), tail64, in->len - cut) == crc64);
  CHECK(aof2_crc32_combine(aof2_crc32((uint32_t)in->state, in->buf, cut), tail32, in->len - cut) == crc32);
}

/* -- encoders --------------------------------------------------------------------------------------------------- */
/* The body is n lengths (their low bits mostly, so that they fit now and then), then payloads. */
static size_t lengths_of(const input *in, uint32_t **length) {
  size_t n = in->rows < in->len / 4 ? in->rows : in->len / 4;
  *length = exactly(n * 4);
  for (size_t i = 0; i < n; i++) {
    uint32_t raw = load_u32(in->buf + 4 * i);
    (*length)[i] = raw >> 28 == 15 ? raw : raw % 64;
  }
  return n;
}

static void fuzz_segment_encode(const input *in) {
  uint32_t *length, version = 2 + (in->param & 1);
  size_t n = lengths_of(in, &length), out_cap = in->start;
  uint64_t *columns = exactly(n * 8), logical = in->state >> 8;
  uint32_t *flags = exactly(n * 4);
  uint8_t *out = exactly(out_cap);
  for (size_t i = 0; i < n; logical += length[i++]) columns[i] = logical, flags[i] = i % 4;
  int64_t written = aof2_segment_encode(version, n, in->buf + 4 * n, in->len - 4 * n, length, columns, columns,
                                        columns, flags, out, out_cap);
  if (written >= 0) {
    CHECK((size_t)written <= out_cap);
    input back = {out, (size_t)written, 0, (size_t)written, 1, 0, 0};
    aof2_segment_state state = {0};
    segment_columns c = segment_columns_new(n);
    CHECK(segment_step(&back, version, &state, n, &c) == AOF2_CLEAN && state.count == n);
    CHECK(memcmp(c.length, length, n * 4) == 0 && memcmp(c.logical_offset, columns, n * 8) == 0);
    segment_columns_free(&c);
  }
  free(length), free(columns), free(flags), free(out);
}

static void fuzz_manifest_encode(const input *in) {
  uint32_t *length;
  size_t n = lengths_of(in, &length), out_cap = in->start;
  uint64_t *columns = exactly(n * 8), crc64 = in->state;
  uint16_t *type = exactly(n * 2);
  uint8_t *out = exactly(out_cap);
  for (size_t i = 0; i < n; i++) columns[i] = in->state + i, type[i] = (uint16_t)(i % 15);
  int64_t written = aof2_manifest_encode(n, type, columns, columns, columns, in->buf + 4 * n, in->len - 4 * n, length,
                                         out, out_cap, &crc64);
  if (written >= 0) {
    CHECK((size_t)written <= out_cap && crc64 == aof2_crc64(in->state, out, (size_t)written));
    input back = {out, (size_t)written, 0, (size_t)written, 1, 0, 0};
    aof2_manifest_state state = {0};
    manifest_columns c = manifest_columns_new(n);
    CHECK(manifest_step(&back, &state, n, &c) == AOF2_CLEAN && state.count == n);
    CHECK(memcmp(c.segment_id, columns, n * 8) == 0 && memcmp(c.type, type, n * 2) == 0);
    manifest_columns_free(&c);
  }
  free(length), free(columns), free(type), free(out);
}

/* -- a segment in two files -------------------------------------------------------------------------------------- */
/* The body is n record headers, then payload that begins with payload `state`. What is composed of the headers that hold
 * is, piece by piece, what is composed of them in one go; a record that is called whole is one to the scan as well. */
static void fuzz_index(const input *in) {
  size_t n = in->rows < in->len / 36 ? in->rows : in->len / 36, payload_len = in->len - 36 * n;
  const uint8_t *payload = in->buf + 36 * n;
  uint64_t *start = exactly((n + 1) * 8), floor = in->param, next = floor, shift = in->state >> 40;
  size_t good = aof2_index_starts(in->buf, n, &next, 0, start);
  CHECK(good <= n && start[0] == 0 && next >= floor);
  for (size_t i = 0; i < good; i++) CHECK(start[i + 1] - start[i] == load_u32(in->buf + 36 * i));
  CHECK(aof2_index_find_time(in->buf, n, in->state) <= n);

  segment_columns c = segment_columns_new(n);
  aof2_index_columns(in->buf, n, c.length, c.logical_offset, c.timestamp_ms, c.ext_id, c.flags);
  for (size_t i = 0; i < good; i++) CHECK(c.logical_offset[i] >= floor && (c.flags[i] & ~3u) == 0);
  segment_columns_free(&c);

  CHECK(aof2_index_check(in->buf, good, start, payload, payload_len, shift) <= good);
  size_t whole = aof2_index_check(in->buf, good, start, payload, payload_len, 0);
  CHECK(whole <= good && start[whole] <= payload_len);
  size_t raw_len = 36 * whole + (size_t)start[whole];
  uint8_t *raw = exactly(raw_len);
  CHECK(aof2_index_compose(in->buf, whole, start, payload, payload_len, 0, 0, raw, raw_len) == 0);
  if (raw_len && in->start) /* past its end */
    CHECK(aof2_index_compose(in->buf, whole, start, payload, payload_len, 0, in->start, raw, raw_len) == -1);
  for (size_t at = 0, step = 1 + in->param % 50; at < raw_len; at += step) {
    size_t piece_len = raw_len - at < step ? raw_len - at : step;
    uint8_t *piece = exactly(piece_len);
    CHECK(aof2_index_compose(in->buf, whole, start, payload, payload_len, 0, at, piece, piece_len) == 0);
    CHECK(memcmp(piece, raw + at, piece_len) == 0);
    free(piece);
  }
  input back = {raw, raw_len, 0, raw_len, 1, 0, 0};
  aof2_segment_state state = {.next_logical = floor};
  c = segment_columns_new(whole + 1);
  CHECK(segment_step(&back, 3, &state, whole + 1, &c) == AOF2_CLEAN && state.count == whole);
  segment_columns_free(&c);

  uint8_t *moved = exactly(36 * whole);
  memcpy(moved, in->buf, 36 * whole);
  uint64_t last_ts_ms = in->state, crc64 = 0;
  CHECK(aof2_index_rebase(moved, whole, start, payload, payload_len, 0, floor, &last_ts_ms, &crc64) == whole);
  CHECK(aof2_index_check(moved, whole, start, payload, payload_len, 0) == whole && last_ts_ms >= in->state);
  CHECK(aof2_index_compose(moved, whole, start, payload, payload_len, 0, 0, raw, raw_len) == 0);
  CHECK(crc64 == aof2_crc64(0, raw, raw_len));
  free(moved), free(raw), free(start);
}

/* -- dispatch --------------------------------------------------------------------------------------------------- */
static void fuzz_target(uint8_t target, const input *in) {
  switch (target % TARGETS) {
    case TARGET_SEGMENT_V2: return fuzz_segment(in, 2);
    case TARGET_SEGMENT_V3: return fuzz_segment(in, 3);
    case TARGET_MANIFEST: return fuzz_manifest(in);
    case TARGET_RESYNC_V2: return fuzz_resync(in, 2);
    case TARGET_RESYNC_V3: return fuzz_resync(in, 3);
    case TARGET_PROBE: return fuzz_probe(in);
    case TARGET_LINES: return fuzz_lines(in);
    case TARGET_PAGES: return fuzz_pages(in);
    case TARGET_CRC: return fuzz_crc(in);
    case TARGET_SEGMENT_ENCODE: return fuzz_segment_encode(in);
    case TARGET_MANIFEST_ENCODE: return fuzz_manifest_encode(in);
    case TARGET_INDEX: return fuzz_index(in);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size < PREFIX_LEN) return 0;
  size_t len = size - PREFIX_LEN;
  uint8_t *body = exactly(len);
  memcpy(body, data + PREFIX_LEN, len);
  uint16_t cut = load_u16(data + AT_CUT), by = cut & 0x7fff;
  input in = {.buf = body,
              .len = len,
              .start = load_u16(data + AT_START),
              .end = cut & 0x8000 ? len + by : by < len ? len - by : 0,
              .rows = 1 + (size_t)data[AT_ROWS] % 16,
              .param = load_u16(data + AT_PARAM),
              .state = load_u64(data + AT_STATE)};
  if (cut == UINT16_MAX) in.end = SIZE_MAX;
  if (in.start == UINT16_MAX) in.start = SIZE_MAX - (in.state & 63);
  if (in.start > UINT16_MAX && data[AT_TARGET] % TARGETS >= TARGET_SEGMENT_ENCODE) in.start = UINT16_MAX;
  fuzz_target(data[AT_TARGET], &in);
  free(body);
  return 0;
}
