/* Many small files in one call: hashed where they lie, read and compared with their hashes, written as blobs of a pack, and
 * made again of what came out of one.
 *
 * What is done for each file is a handful of system calls and one pass over its bytes. From Python each of them would
 * give the interpreter away and wait to get it back, thousands of times.
 *
 * Invariants
 * - A file that is called READ did not change while it was read, and no descriptor or mapping could write to it.
 * - Bytes that are called right have the crc64 and the SHA-256 that were asked for.
 * - Descriptors that are given out are the caller's to close, whatever their status.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "bytes.h"
#include "native.h"

#define BLOB_MAGIC UINT64_C(0x414F4632424C4F42)
#define BLOB_VERSION 1
#define BLOB_ENTRY_LEN 16
#define BLOB_TRAILER_LEN 104
#define BLOB_FOOTER_LEN (BLOB_ENTRY_LEN + BLOB_TRAILER_LEN)
#define PACK_ENTRY_LEN 88
#define GROUP_MAX 256 /* files whose bytes are in memory at once, to be hashed side by side */

typedef struct {
  size_t n;
  size_t index[GROUP_MAX];
  uint64_t offset[GROUP_MAX], len[GROUP_MAX];
  uint8_t sha256[GROUP_MAX][32];
} group;

static void group_add(group *g, size_t index, uint64_t offset, uint64_t len) {
  g->index[g->n] = index;
  g->offset[g->n] = offset;
  g->len[g->n++] = len;
}

static void group_hash(group *g, const uint8_t *data) { aof2_sha256_many(g->n, data, g->offset, g->len, g->sha256[0]); }

static uint64_t ns_of(struct timespec at) { return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec; }

/* 0, or an errno; ENODATA: the file ends before `len`. */
static int read_whole(int fd, uint8_t *buf, size_t len) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pread(fd, buf + done, len - done, (off_t)done);
    if (n > 0) done += (size_t)n;
    else if (n == 0) return ENODATA;
    else if (errno != EINTR) return errno;
  }
  return 0;
}

static int open_quietly(const char *path) {
  int fd;
  do fd = open(path, O_RDONLY | O_CLOEXEC);
  while (fd < 0 && errno == EINTR);
  return fd;
}

/* A read lease is granted while no descriptor or mapping can write. 1, 0, or a negative errno. */
static int has_no_writer(int fd) {
  if (fcntl(fd, F_SETLEASE, F_RDLCK)) {
    if (errno == EAGAIN || errno == EACCES) return 0;
    if (errno == EINVAL || errno == ENOLCK) return 1; /* a filesystem without leases: the times must do */
    return -errno;
  }
  return fcntl(fd, F_SETLEASE, F_UNLCK) ? -errno : 1;
}

/* Whether every byte is on the disk, or about to be; where the filesystem does not say, it counts as that. */
static int has_no_hole(int fd, uint64_t size) {
  off_t data = lseek(fd, 0, SEEK_DATA);
  if (data < 0) return errno == EINVAL;
  return data == 0 && (uint64_t)lseek(fd, 0, SEEK_HOLE) >= size;
}

static int same(const struct stat *a, const struct stat *b) {
  return a->st_size == b->st_size && ns_of(a->st_mtim) == ns_of(b->st_mtim) && ns_of(a->st_ctim) == ns_of(b->st_ctim);
}

static uint64_t crc_of_pieces(const uint8_t *buf, uint64_t len, uint64_t piece_len, uint64_t *piece_crc64) {
  uint64_t crc = 0;
  for (uint64_t at = 0; at < len; at += piece_len, piece_crc64++) {
    uint64_t some = len - at < piece_len ? len - at : piece_len;
    *piece_crc64 = aof2_crc64(0, buf + at, (size_t)some);
    crc = at ? aof2_crc64_combine(crc, *piece_crc64, some) : *piece_crc64;
  }
  return crc;
}

/* All but its hash, which needs its bytes only. */
static int take_one(const char *path, uint64_t loose_len, uint64_t len_max, uint64_t piece_len, uint8_t *buf,
                    aof2_small *out, uint64_t *piece_crc64) {
  struct stat before, after;
  out->fd = open_quietly(path);
  if (out->fd < 0) return -errno;
  int quiet = has_no_writer(out->fd);
  if (quiet <= 0) return quiet ? quiet : AOF2_SMALL_BUSY;
  if (fstat(out->fd, &before)) return -errno;
  uint64_t size = out->size = (uint64_t)before.st_size, disk_len = (uint64_t)before.st_blocks * 512;
  if (size > len_max || disk_len > (size + 4095) / 4096 * 4096 + loose_len) return AOF2_SMALL_OTHER;
  if (size && !has_no_hole(out->fd, size)) return AOF2_SMALL_OTHER;
  int error = read_whole(out->fd, buf, (size_t)size);
  if (error) return error == ENODATA ? AOF2_SMALL_CHANGED : -error;
  out->crc64 = crc_of_pieces(buf, size, piece_len, piece_crc64);
  /* It promises nothing, and an error that matters is met by the fsync that follows. */
  if (size) (void)sync_file_range(out->fd, 0, (off_t)size, SYNC_FILE_RANGE_WRITE);
  if (fstat(out->fd, &after)) return -errno;
  out->inode = (uint64_t)after.st_ino;
  out->mtime_ns = ns_of(after.st_mtim);
  out->ctime_ns = ns_of(after.st_ctim);
  out->atime_ns = ns_of(before.st_atim); /* hashing is no access */
  return same(&before, &after) ? AOF2_SMALL_READ : AOF2_SMALL_CHANGED;
}

static void hash_taken(group *g, const uint8_t *data, aof2_small *out) {
  group_hash(g, data);
  for (size_t i = 0; i < g->n; i++) memcpy(out[g->index[i]].sha256, g->sha256[i], 32);
  g->n = 0;
}

void aof2_small_hash(size_t n, const char *paths, uint64_t loose_len, uint64_t len_max, uint64_t piece_len,
                     uint8_t *scratch, size_t scratch_len, aof2_small *out, uint64_t *piece_crc64) {
  group g = {.n = 0};
  size_t at = 0, pieces = (size_t)(len_max / piece_len + (len_max % piece_len != 0));
  if (len_max > scratch_len) len_max = scratch_len;
  for (size_t i = 0; i < n; i++, paths += strlen(paths) + 1) {
    if (g.n == GROUP_MAX || scratch_len - at < len_max) hash_taken(&g, scratch, out), at = 0;
    memset(out + i, 0, sizeof *out);
    out[i].status = take_one(paths, loose_len, len_max, piece_len, scratch + at, out + i, piece_crc64 + pieces * i);
    if (out[i].status != AOF2_SMALL_READ) continue;
    group_add(&g, i, at, out[i].size);
    at += (size_t)out[i].size;
  }
  hash_taken(&g, scratch, out);
}

void aof2_small_close(size_t n, const int32_t *fd) {
  for (size_t i = 0; i < n; i++) close(fd[i]);
}

void aof2_small_disk(size_t n, const char *paths, uint64_t *disk_len) {
  for (size_t i = 0; i < n; i++, paths += strlen(paths) + 1) {
    struct stat found;
    disk_len[i] = stat(paths, &found) ? 0 : (uint64_t)found.st_blocks * 512;
  }
}

static int read_one(const char *path, uint64_t len, uint64_t crc64, uint8_t *out) {
  int fd = open_quietly(path);
  if (fd < 0) return -errno;
  int error = read_whole(fd, out, (size_t)len);
  close(fd);
  if (error) return error == ENODATA ? AOF2_SMALL_CHANGED : -error;
  return aof2_crc64(0, out, (size_t)len) == crc64 ? AOF2_SMALL_READ : AOF2_SMALL_CHANGED;
}

static void compare_read(group *g, const uint8_t *data, const uint8_t *sha256, int32_t *status) {
  group_hash(g, data);
  for (size_t i = 0; i < g->n; i++)
    if (memcmp(g->sha256[i], sha256 + 32 * g->index[i], 32)) status[g->index[i]] = AOF2_SMALL_CHANGED;
  g->n = 0;
}

int aof2_small_read(size_t n, const char *paths, const uint64_t *len, const uint64_t *crc64, const uint8_t *sha256,
                    uint8_t *out, size_t out_cap, int32_t *status) {
  group g = {.n = 0};
  uint64_t at = 0;
  for (size_t i = 0; i < n; i++, paths += strlen(paths) + 1) {
    if (len[i] > out_cap - at) return -1;
    status[i] = read_one(paths, len[i], crc64[i], out + at);
    if (status[i] == AOF2_SMALL_READ) group_add(&g, i, at, len[i]);
    if (g.n == GROUP_MAX) compare_read(&g, out, sha256, status);
    at += len[i];
  }
  compare_read(&g, out, sha256, status);
  return 0;
}

/* A new file under this name; a leftover of a crash under it goes. */
static int create_new(const char *path) {
  for (int again = 0;; again++) {
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EINTR && (errno != EEXIST || again > 1 || unlink(path)))) return fd;
  }
}

static int write_whole(int fd, const uint8_t *data, size_t len) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pwrite(fd, data + done, len - done, (off_t)done);
    if (n >= 0) done += (size_t)n;
    else if (errno != EINTR) return errno;
  }
  return 0;
}

typedef struct {
  size_t left, taken;
  const char *next;
} spare_list;

/* An empty file under this name, one of the spares if there are any: over what was left under it. */
static int make_empty(const char *path, spare_list *spares) {
  while (spares->left) {
    const char *spare = spares->next;
    spares->left--, spares->taken++, spares->next += strlen(spare) + 1;
    if (rename(spare, path)) continue;
    int fd = open(path, O_RDWR | O_TRUNC | O_CLOEXEC);
    if (fd >= 0) return fd;
  }
  return create_new(path);
}

static int land_one(const char *path, const uint8_t *data, size_t len, spare_list *spares, aof2_small *out) {
  struct stat made;
  int fd = make_empty(path, spares);
  if (fd < 0) return -errno;
  int error = write_whole(fd, data, len);
  if (!error && fstat(fd, &made)) error = errno;
  if (error) {
    close(fd);
    unlink(path);
    return -error;
  }
  out->fd = fd;
  out->size = (uint64_t)made.st_size;
  out->inode = (uint64_t)made.st_ino;
  out->mtime_ns = ns_of(made.st_mtim);
  out->ctime_ns = ns_of(made.st_ctim);
  out->atime_ns = ns_of(made.st_atim);
  return AOF2_SMALL_READ;
}

/* Which of these stretches, GROUP_MAX at most, are what they should be; their hashes go into `out`. */
static void prove(size_t n, const uint8_t *data, size_t data_len, const uint64_t *offset, const uint64_t *len,
                  const uint64_t *crc64, const uint8_t *sha256, aof2_small *out) {
  group g = {.n = 0};
  for (size_t i = 0; i < n; i++) {
    memset(out + i, 0, sizeof *out);
    out[i].fd = -1;
    out[i].status = AOF2_SMALL_CHANGED;
    if (offset[i] > data_len || len[i] > data_len - offset[i]) continue;
    out[i].crc64 = aof2_crc64(0, data + offset[i], (size_t)len[i]);
    if (out[i].crc64 == crc64[i]) group_add(&g, i, offset[i], len[i]);
  }
  group_hash(&g, data);
  for (size_t i = 0; i < g.n; i++) {
    aof2_small *one = out + g.index[i];
    memcpy(one->sha256, g.sha256[i], 32);
    if (!memcmp(one->sha256, sha256 + 32 * g.index[i], 32)) one->status = AOF2_SMALL_READ;
  }
}

size_t aof2_small_land(size_t n, const char *paths, const uint8_t *data, size_t data_len, const uint64_t *offset,
                       const uint64_t *len, const uint64_t *crc64, const uint8_t *sha256, size_t n_spares,
                       const char *spares, aof2_small *out) {
  spare_list list = {.left = n_spares, .next = spares};
  for (size_t i = 0; i < n; i++, paths += strlen(paths) + 1) {
    size_t some = n - i < GROUP_MAX ? n - i : GROUP_MAX;
    if (i % GROUP_MAX == 0) prove(some, data, data_len, offset + i, len + i, crc64 + i, sha256 + 32 * i, out + i);
    if (out[i].status == AOF2_SMALL_READ)
      out[i].status = land_one(paths, data + offset[i], (size_t)len[i], &list, out + i);
  }
  return list.taken;
}

static void put_footer(uint8_t *p, uint32_t block_len, uint64_t raw_len, uint64_t stored_len, int is_packed,
                       uint64_t chunk_id, uint64_t generation, const uint8_t *sha256, uint64_t crc64) {
  uint8_t *t = p + BLOB_ENTRY_LEN;
  store_u32(p, (uint32_t)stored_len);
  store_u32(p + 4, (uint32_t)is_packed);
  store_u64(p + 8, crc64);
  store_u64(t, BLOB_MAGIC);
  store_u32(t + 8, BLOB_VERSION);
  store_u32(t + 12, BLOB_FOOTER_LEN);
  store_u32(t + 16, 1);
  store_u32(t + 20, block_len);
  store_u64(t + 24, raw_len);
  store_u64(t + 32, chunk_id);
  store_u64(t + 40, generation);
  memcpy(t + 48, sha256, 32);
  store_u64(t + 80, crc64); /* of the chunk, which is its one block */
  store_u64(t + 88, 0);
  store_u64(t + 96, aof2_crc64(0, p, BLOB_FOOTER_LEN - 8));
}

static void put_entry(uint8_t *p, uint64_t chunk_id, uint64_t generation, uint64_t offset, uint64_t blob_len,
                      uint64_t raw_len, int is_packed, uint64_t crc64, const uint8_t *sha256) {
  store_u64(p, chunk_id);
  store_u64(p + 8, generation);
  store_u64(p + 16, offset);
  store_u64(p + 24, blob_len);
  store_u64(p + 32, raw_len);
  store_u32(p + 40, (uint32_t)is_packed);
  store_u32(p + 44, 0);
  store_u64(p + 48, crc64);
  memcpy(p + 56, sha256, 32);
}

int64_t aof2_pack_encode(size_t n, const uint8_t *raw, const uint64_t *raw_len, const uint8_t *packed,
                         const uint64_t *packed_len, uint32_t saved_shift, const uint64_t *chunk_id,
                         const uint64_t *generation, const uint64_t *crc64, const uint8_t *sha256, uint32_t block_len,
                         uint64_t base, uint8_t *out, size_t out_cap, uint8_t *entries) {
  size_t at = 0;
  for (size_t i = 0; i < n; i++) {
    uint64_t len = raw_len[i], saved = len >> saved_shift ? len >> saved_shift : 1;
    int is_packed = packed_len && packed_len[i] && packed_len[i] + saved <= len;
    uint64_t stored = is_packed ? packed_len[i] : len;
    if (!len || len > block_len || stored + BLOB_FOOTER_LEN > out_cap - at) return -1;
    memcpy(out + at, is_packed ? packed : raw, (size_t)stored);
    put_footer(out + at + stored, block_len, len, stored, is_packed, chunk_id[i], generation[i], sha256 + 32 * i, crc64[i]);
    put_entry(entries + PACK_ENTRY_LEN * i, chunk_id[i], generation[i], base + at, stored + BLOB_FOOTER_LEN, len, is_packed,
              crc64[i], sha256 + 32 * i);
    at += (size_t)stored + BLOB_FOOTER_LEN;
    raw += len;
    if (packed_len) packed += packed_len[i];
  }
  return (int64_t)at;
}
