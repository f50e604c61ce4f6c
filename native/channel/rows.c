/* See rows.h. */
#include "rows.h"

#include "../bytes.h"

#define NS UINT64_C(1000000000)
#define DEPTH_MAX 8 /* of what is skipped */

/* A msgpack integer: all 64 bits of the magnitude, and the sign apart. */
typedef struct {
  bool negative;
  uint64_t bits; /* as two's complement where negative */
} number;

static bool take(span *in, size_t len, const uint8_t **at) {
  if (in->len < len) return false;
  *at = in->at;
  in->at += len;
  in->len -= len;
  return true;
}

static uint64_t big_endian(const uint8_t *at, size_t len) {
  uint64_t n = 0;
  while (len--) n = n << 8 | *at++;
  return n;
}

static bool take_number(span *in, number *out) {
  const uint8_t *tag, *at;
  if (!take(in, 1, &tag)) return false;
  *out = (number){.bits = *tag};
  if (*tag < 0x80) return true;
  if (*tag >= 0xE0) {
    *out = (number){true, (uint64_t)(int64_t)(int8_t)*tag};
    return true;
  }
  if (*tag < 0xCC || *tag > 0xD3) return false;
  size_t len = (size_t)1 << (*tag & 3);
  if (!take(in, len, &at)) return false;
  out->bits = big_endian(at, len);
  if (*tag >= 0xD0 && at[0] & 0x80) {
    out->negative = true;
    if (len < 8) out->bits |= ~UINT64_C(0) << (8 * len);
  }
  return true;
}

static bool take_u64(span *in, uint64_t *out) {
  number n;
  if (!take_number(in, &n) || n.negative) return false;
  *out = n.bits;
  return true;
}

static bool take_u32(span *in, uint32_t *out) {
  uint64_t n;
  if (!take_u64(in, &n) || n > UINT32_MAX) return false;
  *out = (uint32_t)n;
  return true;
}

row_time row_time_of_ns(uint64_t ns) { return (row_time){(int64_t)(ns / NS), (uint32_t)(ns % NS)}; }

bool row_time_before(row_time a, row_time b) { return a.s < b.s || (a.s == b.s && a.ns < b.ns); }

static bool take_time(span *in, row_time *out) {
  number n;
  if (!take_number(in, &n)) return false;
  *out = row_time_of_ns(n.bits);
  if (n.negative) { /* towards the past */
    uint64_t before = ~n.bits; /* -n - 1 */
    *out = (row_time){-(int64_t)(before / NS) - 1, (uint32_t)(NS - 1 - before % NS)};
  }
  return true;
}

static bool take_bytes(span *in, span *out) {
  const uint8_t *tag, *at;
  if (!take(in, 1, &tag) || *tag < 0xC4 || *tag > 0xC6) return false;
  size_t width = (size_t)1 << (*tag - 0xC4);
  if (!take(in, width, &at)) return false;
  out->len = big_endian(at, width);
  return take(in, out->len, &out->at);
}

static bool take_array(span *in, uint64_t *count) {
  const uint8_t *tag, *at;
  if (!take(in, 1, &tag)) return false;
  *count = *tag & 0x0F;
  if ((*tag & 0xF0) == 0x90) return true;
  if (*tag != 0xDC && *tag != 0xDD) return false;
  size_t width = *tag == 0xDC ? 2 : 4;
  if (!take(in, width, &at)) return false;
  *count = big_endian(at, width);
  return true;
}

/* Bytes behind the tag that tell a length, and what the length counts beyond itself. */
static bool skip_sized(span *in, size_t width, size_t more) {
  const uint8_t *at;
  if (!take(in, width, &at)) return false;
  uint64_t len = big_endian(at, width);
  return len <= in->len && take(in, len + more, &at);
}

static bool skip(span *in, int depth);

static bool skip_many(span *in, uint64_t count, int depth) {
  for (; count; count--)
    if (!skip(in, depth)) return false;
  return true;
}

/* Any value, of a field that this release does not know. */
static bool skip(span *in, int depth) {
  const uint8_t *tag, *at;
  if (depth > DEPTH_MAX || !take(in, 1, &tag)) return false;
  if (*tag < 0x80 || *tag >= 0xE0) return true;
  if (*tag < 0x90) return skip_many(in, 2 * (uint64_t)(*tag & 0x0F), depth + 1);
  if (*tag < 0xA0) return skip_many(in, *tag & 0x0F, depth + 1);
  if (*tag < 0xC0) return take(in, *tag & 0x1F, &at);
  switch (*tag) {
    case 0xC0: case 0xC2: case 0xC3: return true;
    case 0xC4: case 0xC5: case 0xC6: return skip_sized(in, (size_t)1 << (*tag - 0xC4), 0);
    case 0xC7: case 0xC8: case 0xC9: return skip_sized(in, (size_t)1 << (*tag - 0xC7), 1);
    case 0xCA: return take(in, 4, &at);
    case 0xCB: return take(in, 8, &at);
    case 0xCC: case 0xCD: case 0xCE: case 0xCF: return take(in, (size_t)1 << (*tag - 0xCC), &at);
    case 0xD0: case 0xD1: case 0xD2: case 0xD3: return take(in, (size_t)1 << (*tag - 0xD0), &at);
    case 0xD4: case 0xD5: case 0xD6: case 0xD7: case 0xD8: return take(in, 1 + ((size_t)1 << (*tag - 0xD4)), &at);
    case 0xD9: case 0xDA: case 0xDB: return skip_sized(in, (size_t)1 << (*tag - 0xD9), 0);
    case 0xDC: return take(in, 2, &at) && skip_many(in, big_endian(at, 2), depth + 1);
    case 0xDD: return take(in, 4, &at) && skip_many(in, big_endian(at, 4), depth + 1);
    case 0xDE: return take(in, 2, &at) && skip_many(in, 2 * big_endian(at, 2), depth + 1);
    case 0xDF: return take(in, 4, &at) && skip_many(in, 2 * big_endian(at, 4), depth + 1);
    default: return false;
  }
}

/* The field in its place, and whether it is whole; those behind the last one keep their defaults. */
static bool take_inode_field(span *in, unsigned field, inode_row *out) {
  uint64_t rdev;
  switch (field) {
    case 0: return take_u64(in, &out->ino);
    case 1: return take_u32(in, &out->mode);
    case 2: return take_u32(in, &out->uid);
    case 3: return take_u32(in, &out->gid);
    case 4: return take_u64(in, &out->size);
    case 5: return take_u32(in, &out->nlink);
    case 6: return take_time(in, &out->mtime);
    case 7: return take_time(in, &out->ctime);
    case 8: return take_time(in, &out->atime);
    case 9:
      if (!take_u64(in, &rdev)) return false;
      out->rdev = (uint32_t)rdev;
      return true;
    case 10: return take_u64(in, &out->generation);
    case 11: return take_u64(in, &out->parent);
    case 12: return take_bytes(in, &out->target);
    case 13: return take_bytes(in, &out->last_name);
    case 14: return take_u64(in, &out->hole_bytes);
    default: return skip(in, 0);
  }
}

bool inode_row_decode(span row, inode_row *out) {
  uint64_t fields;
  *out = (inode_row){.nlink = 1};
  if (!take_array(&row, &fields) || fields < 2) return false;
  for (uint64_t i = 0; i < fields; i++)
    if (!take_inode_field(&row, i < 15 ? (unsigned)i : 15, out)) return false;
  return !row.len && out->hole_bytes <= out->size;
}

static bool take_chunks(span *in, object_row *out) {
  uint64_t count;
  if (!take_array(in, &count)) return false;
  if (count != 1) return skip_many(in, count, 0);
  return take_u64(in, &out->chunk);
}

static bool take_backing(span *in, object_row *out) {
  uint64_t count;
  if (in->len && *in->at == 0xC0) return skip(in, 0);
  out->has_backing = true;
  return take_array(in, &count) && count == 3 && take_u64(in, &out->backing_inode) && take_u64(in, &out->backing_size) &&
         take_u64(in, &out->backing_mtime_ns);
}

static bool take_object_field(span *in, unsigned field, object_row *out) {
  switch (field) {
    case 0: return take_u64(in, &out->ino);
    case 1: return take_u64(in, &out->generation);
    case 2: return take_u64(in, &out->state);
    case 3: return take_u64(in, &out->size);
    case 5: return take_chunks(in, out);
    case 7: return take_backing(in, out);
    default: return skip(in, 0);
  }
}

bool object_row_decode(span row, object_row *out) {
  uint64_t fields;
  *out = (object_row){0};
  if (!take_array(&row, &fields) || fields < 3) return false;
  for (uint64_t i = 0; i < fields; i++)
    if (!take_object_field(&row, i < 15 ? (unsigned)i : 15, out)) return false;
  return !row.len;
}

bool residency_row_decode(span row, uint64_t *mask) {
  uint64_t fields;
  *mask = 0;
  if (!take_array(&row, &fields)) return false;
  if (!fields) return !row.len;
  return take_u64(&row, mask) && skip_many(&row, fields - 1, 0) && !row.len;
}

bool dentry_row_decode(span row, uint64_t *ino, uint32_t *mode) {
  uint64_t fields;
  if (!take_array(&row, &fields) || fields < 2 || !take_u64(&row, ino) || !take_u32(&row, mode)) return false;
  return skip_many(&row, fields - 2, 0) && !row.len;
}

bool number_row_decode(span row, uint64_t *out) { return take_u64(&row, out) && !row.len; }

bool bytes_row_decode(span row, span *out) { return take_bytes(&row, out) && !row.len; }
