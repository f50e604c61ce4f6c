/* The whole C API of AOF2's core: pure functions over caller-owned memory, and a few that move bytes.
 *
 * Nothing here allocates, keeps state between calls or trusts a length it read, and nothing blocks but what reads or
 * writes files (aof2_small_*, aof2_spans_hash, aof2_segment_spread) or a socket (aof2_receive). aof2_page_take and
 * _append wait for the channel, a second at most. Every function may be called from any thread. Formats:
 * engine/FORMATS.md. Only the modules of native/ call these.
 */
#ifndef AOF2_NATIVE_H
#define AOF2_NATIVE_H
#include <stddef.h>
#include <stdint.h>

/* -- checksums ------------------------------------------------------------------------------------------------
 * crc64-nvme (reflected 0xAD93D23594C93659, init and xorout all ones) and CRC-32 (IEEE, zlib's).
 * `crc` is the checksum of everything before `buf`; 0 starts. Chained calls equal one call.
 * `impl`: 0 portable tables, 1 PCLMULQDQ, 2 VPCLMULQDQ/AVX-512. `*_with` is for tests and benchmarks: an impl this
 * CPU lacks falls back to the best below it. */
int aof2_crc_impl_best(void);
uint64_t aof2_crc64(uint64_t crc, const uint8_t *buf, size_t len);
uint32_t aof2_crc32(uint32_t crc, const uint8_t *buf, size_t len);
uint64_t aof2_crc64_with(int impl, uint64_t crc, const uint8_t *buf, size_t len);
uint32_t aof2_crc32_with(int impl, uint32_t crc, const uint8_t *buf, size_t len);
/* The checksum of A||B from those of A and B and the length of B. */
uint64_t aof2_crc64_combine(uint64_t crc_a, uint64_t crc_b, uint64_t len_b);
uint32_t aof2_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b);

/* -- SHA-256 of many ------------------------------------------------------------------------------------------
 * How many messages go side by side in the time of one; 1: none. `lanes` elsewhere is that number, or 1, for tests;
 * what this CPU lacks is done one after the other. */
int aof2_sha256_lanes(void);
/* The hashes, 32 bytes each, of len[i] bytes of `data` from offset[i] on. */
void aof2_sha256_many(size_t n, const uint8_t *data, const uint64_t *offset, const uint64_t *len, uint8_t *out);
void aof2_sha256_many_by(int lanes, size_t n, const uint8_t *data, const uint64_t *offset, const uint64_t *len,
                         uint8_t *out);
/* Stretches of a file, all of the same length, at most 16, from offset[i] on: `begin` makes their states, of 8 words each;
 * each call of `hash` goes on by `len` bytes, a multiple of piece_len, which is one of 64; `end` has the hashes, `len`
 * bytes after they were begun. crc64[i * (len / piece_len) + k]: of piece k of stretch i. 0, or an errno; ENODATA: the file
 * ends before. */
void aof2_sha256_begin(size_t n, uint32_t *state);
int aof2_spans_hash(int lanes, int fd, size_t n, const uint64_t *offset, uint64_t len, uint64_t piece_len,
                    uint8_t *scratch, size_t scratch_len, uint32_t *state, uint64_t *crc64);
void aof2_sha256_end(size_t n, uint32_t *state, uint64_t len, uint8_t *out);

/* -- scans ---------------------------------------------------------------------------------------------------- */
enum { AOF2_CLEAN = 0, AOF2_TORN = 1, AOF2_CORRUPT = 2, AOF2_MORE = 3 };
enum {
  AOF2_FAULT_NONE = 0,
  AOF2_FAULT_HEADER_PAST_END = 1,  /* fewer bytes left than a record header */
  AOF2_FAULT_PAYLOAD_PAST_END = 2, /* payload_len runs past the end */
  AOF2_FAULT_ZEROS = 3,            /* an all-zero record header: never written */
  AOF2_FAULT_CRC = 4,              /* record (segment) or payload (manifest) checksum */
  AOF2_FAULT_ORDER = 5,            /* segment: logical_offset went backwards under a valid crc */
  AOF2_FAULT_FLAGS = 6,            /* segment: reserved flag bits set under a valid crc */
  AOF2_FAULT_EMPTY = 7,            /* payload_len 0 where a format forbids it */
  AOF2_FAULT_ALIGN = 8,            /* manifest: payload_len not a multiple of 8 */
  AOF2_FAULT_MARKER = 9            /* manifest: a commit marker disagrees with the bytes before it */
};

/* Segment records from state->pos up to `end`, at most `rows` of them, into columns the caller owns.
 * `durable`: bytes known to have reached the disk. A fault below it is CORRUPT, at or past it TORN (ORDER and FLAGS
 * faults carry a valid crc and are always CORRUPT). MORE: columns full, call again with the same state.
 * crc64 accumulates over every byte consumed; start it with the crc of [0, pos) to get the segment's. */
typedef struct {
  uint64_t pos;          /* in: first byte to scan; out: first byte not consumed (the fault, if any) */
  uint64_t crc64;        /* in/out */
  uint64_t next_logical; /* in/out: smallest logical_offset allowed next */
  uint64_t last_ts_ms;   /* out: of the last record consumed */
  uint64_t count;        /* out: rows filled by this call */
  uint32_t fault;        /* out: AOF2_FAULT_* */
  uint32_t reserved;
} aof2_segment_state;

int aof2_segment_scan(const uint8_t *buf, size_t len, size_t end, uint32_t version, uint64_t durable,
                      aof2_segment_state *state, size_t rows, uint64_t *offset, uint32_t *length,
                      uint64_t *logical_offset, uint64_t *timestamp_ms, uint64_t *ext_id, uint32_t *flags);

/* The first offset in [from, end) where a whole valid record with logical_offset >= min_logical starts, or `end`.
 * Work is bounded by a constant times (end - from), whatever the lengths claim. */
uint64_t aof2_segment_resync(const uint8_t *buf, size_t len, size_t from, size_t end, uint32_t version,
                             uint64_t min_logical);

/* n payloads, concatenated in `payloads` (lengths in `length`), encoded as records into `out`.
 * Returns bytes written, or -1 if `out_cap` or `payloads_len` does not fit. */
int64_t aof2_segment_encode(uint32_t version, size_t n, const uint8_t *payloads, size_t payloads_len,
                            const uint32_t *length, const uint64_t *logical_offset, const uint64_t *timestamp_ms,
                            const uint64_t *ext_id, const uint32_t *flags, uint8_t *out, size_t out_cap);

/* -- a segment in two files ------------------------------------------------------------------------------------
 * `headers`: the 36-byte headers of n v3 records that follow one another. start[i]: where payload i begins among the
 * payloads laid back to back, start[n]: where the last one ends. `payload` holds payload_len of those bytes, from
 * payload_start on.
 *
 * Fills start[0..n] from start_first on. Returns n, or the index of the first header that no segment would hold there: out
 * of order after *next_logical, unknown flags, all zero. *next_logical goes on behind what was accepted. */
size_t aof2_index_starts(const uint8_t *headers, size_t n, uint64_t *next_logical, uint64_t start_first,
                         uint64_t *start);
void aof2_index_columns(const uint8_t *headers, size_t n, uint32_t *length, uint64_t *logical_offset,
                        uint64_t *timestamp_ms, uint64_t *ext_id, uint32_t *flags);
/* The first record that was not appended before timestamp_ms, or n. */
size_t aof2_index_find_time(const uint8_t *headers, size_t n, uint64_t timestamp_ms);
/* How many records, from the first on, have the checksum that their header tells, payload included. */
size_t aof2_index_check(const uint8_t *headers, size_t n, const uint64_t *start, const uint8_t *payload,
                        size_t payload_len, uint64_t payload_start);
/* `len` bytes of the raw segment's records into `out`, from `at` on, counted from the first record's header; start[0] is
 * 0. -1: they are not all there, or need payload that is not in the buffer. */
int aof2_index_compose(const uint8_t *headers, size_t n, const uint64_t *start, const uint8_t *payload,
                       size_t payload_len, uint64_t payload_start, uint64_t at, uint8_t *out, size_t len);
/* Headers of n records, all of one time, whose payloads lie one behind the other in `payload`, into `headers`; offsets go on
 * from logical_first. *crc64 goes on over headers and payloads as the raw segment has them. Bytes of payload, or -1 if
 * they are not all there, or flags are unknown. */
int64_t aof2_index_encode(size_t n, const uint8_t *payload, size_t payload_len, const uint32_t *length,
                          const uint64_t *ext_id, const uint32_t *flags, uint64_t timestamp_ms, uint64_t logical_first,
                          uint8_t *headers, uint64_t *crc64);
/* The same records behind others: offsets go on from logical_first, no time is before *last_ts_ms, checksums are made anew;
 * *crc64 as above. How many records were whole before it: behind the first that is not, nothing is changed. */
size_t aof2_index_rebase(uint8_t *headers, size_t n, const uint64_t *start, const uint8_t *payload, size_t payload_len,
                         uint64_t payload_start, uint64_t logical_first, uint64_t *last_ts_ms, uint64_t *crc64);
/* Writes the n records that lie at offset[] of `buf` to two files: payloads back to back from payload_at on, headers
 * from index_at on, by way of `scratch`. 0 or an errno (EINVAL: a record is not inside `buf`). */
int aof2_segment_spread(const uint8_t *buf, size_t len, size_t n, const uint64_t *offset, const uint32_t *length,
                        int payload_fd, uint64_t payload_at, int index_fd, uint64_t index_at, uint8_t *scratch,
                        size_t scratch_len);

/* Manifest records from state->pos up to `end`. Checks structure, each payload's crc and each commit marker
 * (CustomEvent of schema 1: crc64 of the bytes since the marker before it). TORN: ran past the end or met zeros;
 * CORRUPT: everything else. */
typedef struct {
  uint64_t pos;            /* in/out as above */
  uint64_t crc64;          /* in/out: over every byte consumed */
  uint64_t count;          /* out: rows filled by this call */
  uint64_t span_start;     /* in/out: where the current marker span begins */
  uint64_t span_crc64;     /* in/out: crc of [span_start, pos) */
  uint64_t total;          /* in/out: records consumed over all calls */
  uint64_t marker_end;     /* in/out: end of the last valid marker, or what the caller put there */
  uint64_t marker_total;   /* in/out: `total` at marker_end */
  uint64_t marker_crc64;   /* in/out: crc64 at marker_end */
  uint64_t durable_len;    /* in/out: largest durable_len a valid marker told */
  uint32_t fault;
  uint32_t reserved;
} aof2_manifest_state;

int aof2_manifest_scan(const uint8_t *buf, size_t len, size_t end, aof2_manifest_state *state, size_t rows,
                       uint64_t *offset, uint16_t *type, uint16_t *flags, uint32_t *payload_len,
                       uint64_t *segment_id, uint64_t *logical_offset, uint64_t *timestamp_ms);

/* Looks, at every multiple of 8 in [from, end), for a commit marker whose own payload crc holds, and returns the
 * largest durable_len they tell (0: none found). What a damaged chunk says about how much of it had been synced. */
uint64_t aof2_manifest_probe_durable(const uint8_t *buf, size_t len, size_t from, size_t end);

/* n records from columns into `out`: header, payload, zero padding to 8, payload crc. *crc64 is advanced over the
 * bytes written. Returns bytes written, or -1 if a buffer is too small or a payload is empty. */
int64_t aof2_manifest_encode(size_t n, const uint16_t *type, const uint64_t *segment_id,
                             const uint64_t *logical_offset, const uint64_t *timestamp_ms, const uint8_t *payloads,
                             size_t payloads_len, const uint32_t *payload_len, uint8_t *out, size_t out_cap,
                             uint64_t *crc64);

/* -- framing and diff ------------------------------------------------------------------------------------------
 * Lines: fills `length` with the lengths of whole lines (newline included) at the start of buf; a line longer than
 * max_record is cut there. Returns how many (at most rows); *consumed is their total length. The rest is a partial
 * line (or rows ran out). */
size_t aof2_frame_lines(const uint8_t *buf, size_t len, uint32_t max_record, size_t rows, uint32_t *length,
                        size_t *consumed);

/* Bit i of `bitmap` (LSB first) is set when page i differs; a page only one side has differs, a short last page
 * differs from a longer one. Returns the number of set bits, or -1 if bitmap_len is too small or page_len is 0. */
int64_t aof2_page_diff(const uint8_t *a, size_t a_len, const uint8_t *b, size_t b_len, size_t page_len,
                       uint8_t *bitmap, size_t bitmap_len);

/* -- the page shared with the channel (sharedpage.h) -------------------------------------------------------------
 * `page` is a mapping of at least aof2_page_len bytes, aligned to 8. `take` reads how far a stream's log is and says that the daemon
 * has taken it so far, in one step that no drop of a node by the channel can come between; a slot past the last is 0.
 * `append` puts a record behind the last one of the slot's log, `fd`: where that ends then, or -errno. */
uint64_t aof2_page_total(uint8_t *page);
uint64_t aof2_page_end(uint8_t *page, uint32_t slot);
uint64_t aof2_page_take(uint8_t *page, uint32_t slot);
void aof2_page_arm(uint8_t *page);
/* Files that the channel opened by itself: how many of its handles the slot of an inode has; whether the inode is about to lose its
 * bytes, which is said before `opens` is asked; and how long blocks are. */
size_t aof2_page_len(void);
void aof2_page_blocks(uint8_t *page, uint64_t block_len);
uint32_t aof2_page_opens(uint8_t *page, uint64_t ino);
void aof2_page_going(uint8_t *page, uint64_t ino, int more);
int64_t aof2_page_append(uint8_t *page, uint32_t slot, int fd, const uint8_t *record, size_t len);

/* -- moving ----------------------------------------------------------------------------------------------------
 * Takes `len` bytes off a connected socket and writes them to `file` at `offset`, by way of `scratch`. They are pieces of
 * `piece_len` (> 0), of the first of which `into` bytes (< piece_len) were there before; crc64[i] goes on over piece i.
 * *done says how many bytes there are, whatever the answer: 0, the peer ended, nothing came for timeout_ms, or the
 * socket's or the file's *error (an errno). */
enum {
  AOF2_RECEIVE_ENDED = 1,
  AOF2_RECEIVE_SILENT = 2,
  AOF2_RECEIVE_SOCKET = 3,
  AOF2_RECEIVE_FILE = 4
};
int aof2_receive(int sock, int file, uint64_t offset, uint64_t len, uint64_t piece_len, uint64_t into, uint8_t *scratch,
                 size_t scratch_len, int timeout_ms, uint64_t *crc64, uint64_t *done, int *error);

/* -- small files, many at once -----------------------------------------------------------------------------------
 * `paths` are n names, each with a zero byte behind it. A status is AOF2_SMALL_*, or a negative errno. */
enum {
  AOF2_SMALL_READ = 0,
  AOF2_SMALL_BUSY = 1,    /* a descriptor or a mapping can write to it */
  AOF2_SMALL_CHANGED = 2, /* while it was read, or since its hash was taken */
  AOF2_SMALL_OTHER = 3    /* larger than was allowed, or not all of it data: look at it by itself */
};
typedef struct {
  uint64_t size, inode, mtime_ns, ctime_ns, atime_ns; /* of the file; the access before this one */
  uint64_t crc64;
  int32_t fd; /* to be synced and closed by the caller; -1: none */
  int32_t status;
  uint8_t sha256[32];
} aof2_small;

/* Opens, hashes and begins to write out each file, as many at once as `scratch` holds. One of more than `len_max` bytes, or
 * that has `loose_len` more on the disk than its bytes take, is OTHER. piece_crc64 has a row a file, of as many as len_max
 * bytes have pieces of `piece_len` (> 0): the crc64 of each. */
void aof2_small_hash(size_t n, const char *paths, uint64_t loose_len, uint64_t len_max, uint64_t piece_len,
                     uint8_t *scratch, size_t scratch_len, aof2_small *out, uint64_t *piece_crc64);
void aof2_small_close(size_t n, const int32_t *fd);

/* What each file takes on the disk; 0 where there is none. */
void aof2_small_disk(size_t n, const char *paths, uint64_t *disk_len);

/* New files of len[i] bytes each, out of `data` from offset[i] on, where those have crc64[i] and the i-th 32 bytes of `sha256`: else
 * CHANGED, and no file. What was left under a path goes. Of `spares`, empty files, each becomes one of them, in their order, by a rename;
 * how many were taken is returned. `out` says what was made, and its descriptor is the caller's to sync and to close. A negative status
 * leaves no file. */
size_t aof2_small_land(size_t n, const char *paths, const uint8_t *data, size_t data_len, const uint64_t *offset,
                       const uint64_t *len, const uint64_t *crc64, const uint8_t *sha256, size_t n_spares,
                       const char *spares, aof2_small *out);

/* The first len[i] bytes of each file, one behind the other into `out`, compared with crc64[i] and the i-th 32 bytes of
 * `sha256`. -1: `out_cap` is too small. */
int aof2_small_read(size_t n, const char *paths, const uint64_t *len, const uint64_t *crc64, const uint8_t *sha256,
                    uint8_t *out, size_t out_cap, int32_t *status);

/* Blobs of one block each (engine/blob/format.py), one behind the other into `out`, and their entries in the directory of
 * a pack (engine/blob/pack.py), 88 bytes each, into `entries`; `base`: where in the pack `out` begins. Block i is raw_len[i]
 * bytes of `raw`, and as a zstd frame packed_len[i] bytes of `packed`, which is stored where it is raw_len[i] >> saved_shift
 * shorter; `packed_len` NULL: no frames. Bytes written, or -1 if a length or `out_cap` does not fit. */
int64_t aof2_pack_encode(size_t n, const uint8_t *raw, const uint64_t *raw_len, const uint8_t *packed,
                         const uint64_t *packed_len, uint32_t saved_shift, const uint64_t *chunk_id,
                         const uint64_t *generation, const uint64_t *crc64, const uint8_t *sha256, uint32_t block_len,
                         uint64_t base, uint8_t *out, size_t out_cap, uint8_t *entries);
#endif
