/* See segments.h. */
#include "segments.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../../bytes.h"
#include "../../native.h"
#include "../append.h"
#include "../records.h"
#include "harness.h"

#define GIVEN_MAX 4096
#define FILE_MAX (3u << 20)
#define ROWS 1024

static struct {
  int fd; /* ours; -1: it was said to begin in the middle, of which nothing can be checked */
} given[GIVEN_MAX];
static size_t given_count;

int segment_new(control_message *m) {
  int fd = memfd_create("segment", MFD_CLOEXEC);
  CHECK(fd >= 0);
  if (given_count == GIVEN_MAX) return fd;
  given[given_count].fd = m->append.end ? -1 : dup(fd);
  m->append.segment_id = ++given_count;
  return fd;
}

void segments_reset(void) {
  for (; given_count; given_count--)
    if (given[given_count - 1].fd >= 0) close(given[given_count - 1].fd);
}

static uint64_t offset[ROWS], logical[ROWS], time_ms[ROWS], ext_id[ROWS];
static uint32_t length[ROWS], flags[ROWS];

void segment_told(const uint8_t *b, size_t len) {
  struct stat st;
  CHECK(len == 56);
  uint64_t id = load_u64(b + 8), end = load_u64(b + 16), count = 0;
  if (!id || id > given_count || given[id - 1].fd < 0 || !end) return;
  CHECK(!fstat(given[id - 1].fd, &st) && (uint64_t)st.st_size >= end + RECORDS_FOOTER_LEN && st.st_size <= FILE_MAX);
  uint8_t *file = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, given[id - 1].fd, 0);
  CHECK(file != MAP_FAILED);
  aof2_segment_state state = {.pos = RECORDS_HEADER_LEN, .crc64 = aof2_crc64(0, file, RECORDS_HEADER_LEN), .next_logical = load_u64(file + 40)};
  CHECK(load_u64(file + 88) == aof2_crc64(0, file, 88) && load_u64(file + 24) == id);
  int outcome;
  do {
    outcome = aof2_segment_scan(file, (size_t)st.st_size, end, 3, end, &state, ROWS, offset, length, logical, time_ms, ext_id, flags);
    count += state.count;
  } while (outcome == AOF2_MORE);
  CHECK(outcome == AOF2_CLEAN && state.pos == end && state.next_logical == load_u64(b + 24) && count <= load_u64(b + 32));
  CHECK(state.crc64 == load_u64(b + 40) && state.last_ts_ms == load_u64(b + 48));
  CHECK(!file[end] && !memcmp(file + end, file + end + 1, (size_t)st.st_size - end - 1)); /* nothing but zeros */
  munmap(file, (size_t)st.st_size);
}

/* -- known answers ----------------------------------------------------------------------------------------------- */
#define NODE_ID UINT64_C(9)
#define TEXT_LEN 40000u

static uint8_t text[TEXT_LEN];

static void write_text(uint64_t fh, size_t from, size_t len, bool answered) {
  uint8_t m[sizeof(wire_in_header) + sizeof(wire_write_in) + TEXT_LEN], room[1];
  wire_in_header h = {.opcode = WIRE_WRITE, .unique = 2, .nodeid = NODE_ID};
  wire_write_in in = {.fh = fh, .size = (uint32_t)len};
  request r;
  h.len = (uint32_t)(sizeof h + sizeof in + len);
  memcpy(m, &h, sizeof h), memcpy(m + sizeof h, &in, sizeof in), memcpy(m + sizeof h + sizeof in, text + from, len);
  CHECK(request_parse(m, h.len, &r) && serve(&r, room) == answered);
  CHECK(!answered || (seen.last_error == 0 && load_u32(seen.last_reply) == len));
}

static control_message given_as(uint32_t framing, uint32_t record_max, uint32_t max_size) {
  return (control_message){.kind = PROTO_APPEND, .nodeid = NODE_ID, .append = {.segment_id = 1, .next_logical = 1000, .room_end = UINT64_MAX,
                           .max_size = max_size, .framing = framing, .record_max = record_max}};
}

/* The text by pieces of this length, so that every line is cut everywhere: records are its lines, cut at record_max. */
static void check_pieces(size_t piece, uint32_t record_max) {
  control_message m = given_as(FRAMING_LINE, record_max, 3 << 20), take = {.kind = PROTO_APPEND_TAKE, .nodeid = NODE_ID};
  control_message open = {.kind = PROTO_APPEND_HANDLE, .nodeid = NODE_ID, .append_open = {.fh = 4, .ext_id = 8}};
  int fd = segment_new(&m), ours = dup(fd);
  control_apply(&open, -1);
  control_apply(&m, fd);
  for (size_t from = 0; from < TEXT_LEN; from += piece) write_text(4, from, TEXT_LEN - from < piece ? TEXT_LEN - from : piece, true);
  control_apply(&take, -1);
  CHECK(seen.last_event == EV_APPENDED);
  write_text(4, 0, 1, false); /* it is the daemon's */
  CHECK(append_bytes_used() == 0);
  append_reset();
  size_t at = RECORDS_HEADER_LEN, from = 0;
  uint8_t header[RECORD_LEN], payload[TEXT_LEN];
  for (;;) {
    size_t len = 0;
    while (from + len < TEXT_LEN && len < record_max && (!len || text[from + len - 1] != '\n')) len++;
    if (!len || (text[from + len - 1] != '\n' && len < record_max)) break;
    CHECK(pread(ours, header, sizeof header, (off_t)at) == sizeof header && load_u32(header) == len && load_u64(header + 8) == 1000 + from);
    CHECK(load_u64(header + 28) == 8 && pread(ours, payload, len, (off_t)(at + RECORD_LEN)) == (ssize_t)len && !memcmp(payload, text + from, len));
    at += RECORD_LEN + len;
    from += len;
  }
  CHECK(pread(ours, header, 1, (off_t)at) == 1 && !header[0]);
  close(ours);
  segments_reset();
}

/* Lines are begun by as many handles as may; what another one begins is the daemon's, and so is what it writes next. */
static void check_partials_full(void) {
  control_message m = given_as(FRAMING_LINE, 1000, 1 << 20), open = {.kind = PROTO_APPEND_HANDLE, .nodeid = NODE_ID};
  control_message partial = {.kind = PROTO_APPEND_PARTIAL, .nodeid = NODE_ID, .append_partial = {.fh = PARTIALS_MAX, .data = text, .len = 5}};
  for (open.append_open.fh = 0; open.append_open.fh <= PARTIALS_MAX; open.append_open.fh++) control_apply(&open, -1);
  control_apply(&m, segment_new(&m));
  memcpy(text, "begun\n", 6);
  for (uint64_t fh = 0; fh < PARTIALS_MAX; fh++) write_text(fh, 0, 5, true);
  write_text(PARTIALS_MAX, 0, 5, false);
  write_text(PARTIALS_MAX, 0, 6, true); /* a whole line needs no memory */
  seen.last_event = 0;
  control_apply(&partial, -1);
  CHECK(seen.last_event == EV_PARTIAL);
  write_text(PARTIALS_MAX, 0, 6, false); /* the daemon has what was before */
  write_text(0, 5, 1, true);
  seen.last_event = 0;
  control_apply(&partial, -1);
  CHECK(seen.last_event == 0);
  write_text(PARTIALS_MAX, 5, 1, true);
  partial.append_partial.fh = 1, partial.append_partial.len = 0;
  control_apply(&partial, -1); /* it has begun none */
  write_text(1, 0, 6, true);
  control_message state = {.kind = PROTO_APPEND_STATE, .nodeid = NODE_ID};
  control_apply(&state, -1);
  append_reset();
  CHECK(append_bytes_used() == 0);
  segments_reset();
}

void check_append(void) {
  static const uint32_t maxima[] = {1, 7, 60, 3000, 1 << 20};
  uint64_t random = 1;
  seen = (outside){0};
  for (size_t i = 0; i < TEXT_LEN; i++) {
    random = random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    text[i] = random >> 33 & 63 ? (uint8_t)(random >> 40) : '\n';
  }
  for (size_t i = 0; i < sizeof maxima / sizeof *maxima; i++)
    for (size_t piece = 1; piece < TEXT_LEN; piece += 1 + piece / 2) check_pieces(piece, maxima[i]);
  check_partials_full();
}
