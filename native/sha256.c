/* SHA-256 (FIPS 180-4) of bytes in memory, for what hashes many small files in one call (bulk.c).
 *
 * `impl`: 0 portable, 1 the SHA extensions of x86. Both work on whole blocks; the padding is the caller's, below.
 */
#include "bytes.h"
#include "native.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(AOF2_PORTABLE)
#define SHA_X86 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define SHA_X86 0
#endif

#define BLOCK_LEN 64

typedef void blocks(uint32_t state[8], const uint8_t *buf, size_t count);

static const uint32_t round_constants[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotated(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void blocks_portable(uint32_t state[8], const uint8_t *buf, size_t count) {
  for (; count; count--, buf += BLOCK_LEN) {
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++) w[i] = __builtin_bswap32(load_u32(buf + 4 * i));
    for (int i = 16; i < 64; i++) {
      uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + w[i - 7] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
    }
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; i++) {
      uint32_t e = v[4], a = v[0];
      uint32_t t1 = v[7] + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + round_constants[i] + w[i];
      uint32_t t2 = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      memmove(v + 1, v, 7 * sizeof *v);
      v[4] += t1;
      v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
  }
}

#if SHA_X86
/* Two rounds an instruction, on the state as ABEF and CDGH; four words of the schedule at a time. */
__attribute__((target("sha,sse4.1"))) static void blocks_x86(uint32_t state[8], const uint8_t *buf, size_t count) {
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  __m128i low = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
  __m128i high = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
  __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
  for (; count; count--, buf += BLOCK_LEN) {
    __m128i abef_before = abef, cdgh_before = cdgh, w[4];
    for (int i = 0; i < 4; i++) w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)buf + i), big_endian);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      __m128i last = w[(i + 3) & 3], k = _mm_add_epi32(w[i & 3], _mm_load_si128((const __m128i *)round_constants + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, k);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(k, 0x0E));
      if (i >= 12) continue;
      __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]), _mm_alignr_epi8(last, w[(i + 2) & 3], 4));
      w[i & 3] = _mm_sha256msg2_epu32(sum, last);
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  low = _mm_shuffle_epi32(abef, 0x1B);
  high = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(low, high, 0xF0));
  _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(high, low, 8));
}

static int has_x86(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1;
}
#endif

int aof2_sha256_impl_best(void) {
#if SHA_X86
  static int best = -1; /* every thread finds the same */
  int known = __atomic_load_n(&best, __ATOMIC_RELAXED);
  if (known < 0) __atomic_store_n(&best, known = has_x86(), __ATOMIC_RELAXED);
  return known;
#else
  return 0;
#endif
}

void aof2_sha256_with(int impl, const uint8_t *buf, size_t len, uint8_t *digest) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t tail[2 * BLOCK_LEN] = {0};
  size_t whole = len / BLOCK_LEN, rest = len % BLOCK_LEN, tail_len = rest < BLOCK_LEN - 8 ? BLOCK_LEN : 2 * BLOCK_LEN;
  blocks *work = blocks_portable;
#if SHA_X86
  if (impl > 0 && aof2_sha256_impl_best()) work = blocks_x86;
#else
  (void)impl;
#endif
  work(state, buf, whole);
  if (rest) memcpy(tail, buf + whole * BLOCK_LEN, rest);
  tail[rest] = 0x80;
  uint64_t bits = (uint64_t)len * 8;
  for (int i = 0; i < 8; i++) tail[tail_len - 1 - i] = (uint8_t)(bits >> 8 * i);
  work(state, tail, tail_len / BLOCK_LEN);
  for (int i = 0; i < 32; i++) digest[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

void aof2_sha256(const uint8_t *buf, size_t len, uint8_t *digest) { aof2_sha256_with(1, buf, len, digest); }
