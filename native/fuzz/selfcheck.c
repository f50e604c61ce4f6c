/* Known answers, and every length at every alignment, under the sanitizers: each buffer is exactly as long as it says,
 * so a kernel that loads one byte too many is caught. */
#include <string.h>

#include "../native.h"
#include "harness.h"

#define LENGTH_MAX 1100

static uint64_t crc_bitwise(uint64_t poly, uint64_t reg, const uint8_t *buf, size_t len) {
  for (; len--; buf++) {
    reg ^= *buf;
    for (int bit = 0; bit < 8; bit++) reg = (reg >> 1) ^ (reg & 1 ? poly : 0);
  }
  return reg;
}

static void check_length(const uint8_t *buf, size_t len, uint64_t crc64, uint32_t crc32) {
  for (int impl = 0; impl <= aof2_crc_impl_best(); impl++) {
    CHECK(aof2_crc64_with(impl, 0, buf, len) == crc64);
    CHECK(aof2_crc32_with(impl, 0, buf, len) == crc32);
  }
}

static void check_alignment(size_t alignment) {
  uint8_t data[LENGTH_MAX];
  uint64_t reg64 = ~UINT64_C(0), reg32 = UINT32_MAX;
  for (size_t len = 0; len <= LENGTH_MAX; len++) {
    uint8_t *block = malloc(alignment + len + 1); /* +1: malloc(0) may be NULL; an empty buffer is never read */
    CHECK(block);
    uint8_t *buf = len ? realloc(block, alignment + len) : block;
    CHECK(buf);
    memcpy(buf + alignment, data, len);
    check_length(buf + alignment, len, ~reg64, (uint32_t)~reg32);
    free(buf);
    if (len == LENGTH_MAX) break;
    data[len] = (uint8_t)(len * 167 + (len >> 3) + alignment);
    reg64 = crc_bitwise(UINT64_C(0x9A6C9329AC4BC9B5), reg64, data + len, 1);
    reg32 = crc_bitwise(0xEDB88320, reg32, data + len, 1);
  }
}

/* Messages that end where their memory does, all lengths of them, by lanes and one after the other. */
static void check_hashes(size_t n, size_t len_step) {
  uint64_t offset[64], len[64], total = 0;
  uint8_t side_by_side[64][32], alone[64][32];
  for (size_t i = 0; i < n; i++) {
    offset[i] = total;
    total += len[i] = i * len_step % 331;
  }
  uint8_t *data = malloc(total + 1);
  CHECK(data);
  data = total ? realloc(data, total) : data;
  CHECK(data);
  for (uint64_t i = 0; i < total; i++) data[i] = (uint8_t)(i * 31 + (i >> 5));
  aof2_sha256_many_by(aof2_sha256_lanes(), n, data, offset, len, side_by_side[0]);
  aof2_sha256_many_by(1, n, data, offset, len, alone[0]);
  CHECK(!memcmp(side_by_side, alone, 32 * n));
  free(data);
}

void selfcheck(void) {
  for (size_t n = 0; n <= 64; n++)
    for (size_t len_step = 0; len_step < 140; len_step += 1 + n / 8) check_hashes(n, len_step);
  check_length((const uint8_t *)"123456789", 9, UINT64_C(0xAE8B14860A799888), 0xCBF43926);
  for (size_t alignment = 0; alignment < 64; alignment += alignment < 17 ? 1 : 5) check_alignment(alignment);
}
