/* See records.h. Long WRITEs are encoded and written by the piece: each is summed and copied while it is in the nearest caches. */
#include "records.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../bytes.h"
#include "../native.h"
#include "channel.h"

#define MAGIC UINT64_C(0x414F46325345474D) /* "AOF2SEGM" */
#define VERSION 3u
#define PIECE_LEN (256u << 10)
#define PIECE_ROWS 512
#define PAGE_LEN 4096u
#define RECORD_MAX (RECORD_LEN + PROTO_PARTIAL_MAX + REQUEST_DATA_MAX)

/* A thread's room to work in. Most of it is never touched. */
typedef struct {
  uint32_t length[REQUEST_DATA_MAX]; /* of the rows of the last plan: each has a byte */
  uint64_t logical[PIECE_ROWS], time_ms[PIECE_ROWS], ext_id[PIECE_ROWS];
  uint32_t flags[PIECE_ROWS]; /* none is ever set */
  uint8_t line[PROTO_PARTIAL_MAX + REQUEST_DATA_MAX]; /* that which was begun, whole */
  uint8_t out[RECORDS_HEADER_LEN + PIECE_LEN + (RECORD_MAX > PIECE_LEN ? RECORD_MAX : PIECE_LEN)] __attribute__((aligned(PAGE_LEN)));
} workroom;

static _Thread_local workroom *mine;

static workroom *room_of_thread(void) {
  if (mine) return mine;
  void *at = mmap(NULL, sizeof *mine, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mine = at == MAP_FAILED ? NULL : at;
}

/* -- framing ----------------------------------------------------------------------------------------------------- */
/* The end of the line that was begun; false: it is longer than a record already. */
static bool end_begun(const records_file *f, const records_brought *b, records_plan *plan) {
  if (b->begun_len >= f->record_max) return false;
  size_t most = f->record_max - b->begun_len, reach = b->len < most ? b->len : most;
  const uint8_t *newline = memchr(b->data, '\n', reach);
  plan->head = newline ? (size_t)(newline - b->data) + 1 : reach == most ? most : 0;
  return true;
}

static bool frame(const records_file *f, const records_brought *b, workroom *w, records_plan *plan) {
  size_t consumed = b->len;
  if (f->framing == FRAMING_RECORD) {
    plan->rows = 1;
    w->length[0] = (uint32_t)b->len;
    return !b->begun_len && b->len <= f->record_max;
  }
  if (b->begun_len) {
    if (!end_begun(f, b, plan)) return false;
    if (!plan->head) {
      plan->left = b->len;
      return true;
    }
  }
  plan->rows = aof2_frame_lines(b->data + plan->head, b->len - plan->head, f->record_max, REQUEST_DATA_MAX, w->length, &consumed);
  plan->left = b->len - plan->head - consumed;
  return true;
}

bool records_frame(const records_file *f, const records_at *at, const records_brought *b, uint64_t room_end, records_plan *plan) {
  workroom *w = room_of_thread();
  *plan = (records_plan){0};
  if (!w || b->len > REQUEST_DATA_MAX || b->begun_len > PROTO_PARTIAL_MAX || !frame(f, b, w, plan)) return false;
  size_t records = plan->rows + (plan->head > 0);
  if (!records) return true;
  uint64_t most = room_end < f->max_size ? room_end : f->max_size, payload = b->len - plan->left + (plan->head ? b->begun_len : 0);
  plan->file_len = (at->end ? 0 : RECORDS_HEADER_LEN) + records * RECORD_LEN + payload;
  return at->end + plan->file_len + RECORDS_FOOTER_LEN <= most && payload <= UINT64_MAX - at->next_logical;
}

/* -- encoding ---------------------------------------------------------------------------------------------------- */
/* As engine/segment/format.py has it. */
static size_t put_header(uint8_t *p, const records_file *f, uint64_t base_offset, uint64_t time_ms) {
  store_u64(p, MAGIC);
  store_u32(p + 8, VERSION);
  store_u32(p + 12, RECORDS_HEADER_LEN);
  store_u64(p + 16, f->stream_ino);
  store_u64(p + 24, f->segment_id);
  store_u64(p + 32, time_ms);
  store_u64(p + 40, base_offset);
  store_u64(p + 48, f->base_record_count);
  store_u32(p + 56, f->max_size);
  store_u32(p + 60, 0);
  store_u64(p + 64, f->ext_id);
  store_u64(p + 72, 0);
  store_u64(p + 80, 0);
  store_u64(p + 88, aof2_crc64(0, p, 88));
  return RECORDS_HEADER_LEN;
}

/* Records of these lengths, from payloads in a row; 0: they cannot be. */
static size_t put_rows(workroom *w, size_t out_len, const uint8_t *payloads, const uint32_t *length, size_t rows, uint64_t ext_id, records_at *at) {
  size_t taken = 0;
  for (size_t i = 0; i < rows; i++) {
    w->logical[i] = at->next_logical + taken;
    w->time_ms[i] = at->last_ts_ms;
    w->ext_id[i] = ext_id;
    taken += length[i];
  }
  int64_t len = aof2_segment_encode(VERSION, rows, payloads, taken, length, w->logical, w->time_ms, w->ext_id, w->flags, w->out + out_len,
                                    sizeof w->out - out_len);
  if (len < 0) return 0;
  at->next_logical += taken;
  at->record_count += rows;
  return (size_t)len;
}

/* How many of the rows go into one piece: at least one. */
static size_t rows_of_piece(const uint32_t *length, size_t rows, size_t *payload_len) {
  size_t n = 0, len = 0;
  *payload_len = 0;
  while (n < rows && n < PIECE_ROWS && (len += RECORD_LEN + length[n], !n || len <= PIECE_LEN)) *payload_len += length[n++];
  return n;
}

/* -- writing ----------------------------------------------------------------------------------------------------- */
static bool put(const records_file *f, const uint8_t *out, size_t len, records_at *at) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pwrite(f->fd, out + done, len - done, (off_t)(at->end + done));
    if (n > 0) done += (size_t)n;
    else if (n == 0 || errno != EINTR) return false;
  }
  at->crc64 = aof2_crc64(at->crc64, out, len);
  at->end += len;
  return true;
}

/* All but what lies in the file's last page: a page that is written twice costs more than a copy. */
static bool put_pages(const records_file *f, uint8_t *out, size_t *len, records_at *at) {
  size_t rest = (at->end + *len) % PAGE_LEN;
  if (!put(f, out, *len - rest, at)) return false;
  memmove(out, out + *len - rest, rest);
  *len = rest;
  return true;
}

/* The file reaches to the end of its room, which the daemon may have seen to. */
static bool lengthen(records_file *f, uint64_t need, uint64_t room_end) {
  struct stat st;
  if (need <= f->len) return true;
  if (fstat(f->fd, &st)) return false;
  f->len = (uint64_t)st.st_size;
  if (need <= f->len) return true;
  uint64_t target = room_end < f->max_size ? room_end : f->max_size;
  if (ftruncate(f->fd, (off_t)target)) return false;
  f->len = target;
  return true;
}

static void cut_back(records_file *f, uint64_t end) {
  f->len = 0;
  if (ftruncate(f->fd, (off_t)end) || (end && ftruncate(f->fd, (off_t)(end + RECORDS_FOOTER_LEN))) || fdatasync(f->fd))
    note("segment %llu: what a failed write left could not be cut off: %s", (unsigned long long)f->segment_id, strerror(errno));
}

static uint64_t now_ms(uint64_t at_least) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  uint64_t ms = now.tv_sec < 0 ? 0 : (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
  return ms > at_least ? ms : at_least;
}

/* All of it, by the piece. */
static bool write_all(const records_file *f, records_at *at, const records_brought *b, const records_plan *plan, workroom *w) {
  const uint8_t *payloads = b->data + plan->head;
  const uint32_t *length = w->length;
  size_t rows = plan->rows, len = at->end ? 0 : put_header(w->out, f, at->next_logical, at->last_ts_ms), more, payload_len;
  if (plan->head) {
    uint32_t line_len = (uint32_t)(b->begun_len + plan->head);
    memcpy(w->line, b->begun, b->begun_len);
    memcpy(w->line + b->begun_len, b->data, plan->head);
    len += more = put_rows(w, len, w->line, &line_len, 1, b->ext_id, at);
    if (!more) return false;
  }
  while (rows) {
    if (len >= PIECE_LEN && !put_pages(f, w->out, &len, at)) return false;
    size_t n = rows_of_piece(length, rows, &payload_len);
    len += more = put_rows(w, len, payloads, length, n, b->ext_id, at);
    if (!more) return false;
    payloads += payload_len;
    length += n;
    rows -= n;
  }
  return put(f, w->out, len, at);
}

bool records_write(records_file *f, records_at *at, const records_brought *b, uint64_t room_end, const records_plan *plan) {
  records_at then = *at;
  if (!plan->file_len) return true;
  then.last_ts_ms = now_ms(at->last_ts_ms);
  if (lengthen(f, at->end + plan->file_len + RECORDS_FOOTER_LEN, room_end) && write_all(f, &then, b, plan, mine)) {
    *at = then;
    return true;
  }
  cut_back(f, at->end);
  return false;
}
