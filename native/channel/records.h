/* What a WRITE brings, as records of a stream's active segment: framed, encoded, and put behind the last one.
 *
 * The segment is engine/segment's version 3: header · (record header, payload)… · zeros where the footer will be.
 *
 * Invariants
 * - All records of a WRITE are in the file, or none: what a pwrite that failed left is cut off again, and that is synced, lest it
 *   pass for records after a crash. Cut or not, `records_at` says how far the file is right.
 * - A footer's length of zeros follows the last record: no payload can pass for a footer. The file is as long as its room.
 * - A record's time is never before the last one's.
 * - Nothing is written that did not fit as a whole when it was framed.
 *
 * Owner: the thread that has the node's write_lock (append.c). A crash leaves whole records, and perhaps some of a WRITE that was not
 * answered, the last of them torn.
 */
#ifndef AOF2_CHANNEL_RECORDS_H
#define AOF2_CHANNEL_RECORDS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto.h"

#define RECORDS_HEADER_LEN 96u /* of a segment */
#define RECORDS_FOOTER_LEN 96u
#define RECORD_LEN 36u /* before each payload */

/* How far a segment is: what EV_APPENDED tells. */
typedef struct {
  uint64_t end, next_logical, record_count, crc64, last_ts_ms;
} records_at;

/* A segment file, and what its header says. */
typedef struct {
  int fd;
  uint64_t segment_id, stream_ino, base_record_count, ext_id;
  uint32_t max_size, framing, record_max;
  uint64_t len; /* of the file, at least */
} records_file;

/* A WRITE: a line that was begun before, and the data. */
typedef struct {
  const uint8_t *begun, *data;
  size_t begun_len, len;
  uint64_t ext_id;
} records_brought;

/* How it is cut: `head` bytes of the data end the line that was begun, `rows` records follow, and `left` bytes begin a line.
 * Without head and rows, the data goes on with the line that was begun. */
typedef struct {
  size_t head, rows, left;
  uint64_t file_len; /* all of it, header of the segment and records' included */
} records_plan;

/* False: it is not for this segment (no room, a line or record that is too long), or there is no memory. The plan is the calling
 * thread's, and holds until its next one. */
bool records_frame(const records_file *f, const records_at *at, const records_brought *b, uint64_t room_end, records_plan *plan);
/* Writes it, and moves `at`; false: `at` is as before, and so is the file but for its length. */
bool records_write(records_file *f, records_at *at, const records_brought *b, uint64_t room_end, const records_plan *plan);
#endif
