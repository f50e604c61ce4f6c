/* Checksum kernels with carry-less multiplication: fold the input to 16 bytes, reduce those by Barrett.
 *
 * A 16-byte block holds lo * x^64 + hi (its first byte is the highest-order one). Moving it d blocks ahead multiplies
 * it by x^(128d); a product of two reflected words comes out one bit low, so the constants are x^(n-1).
 * No load leaves [buf, buf+len): lengths below 16 are gathered, a tail is taken from a load that ends at its end.
 */
#include "crc.h"

#if AOF2_CRC_X86
#include <immintrin.h>

#include "bytes.h"

#define TARGET_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define TARGET_VPCLMUL __attribute__((target("avx512f,avx512vl,avx512bw,vpclmulqdq,pclmul")))
#define INLINE static inline __attribute__((always_inline))

int aof2_crc_x86_level(void) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("vpclmulqdq"))
    return 1;
  return 2;
}

/* -- 16 bytes at a time ----------------------------------------------------------------------------------------- */
INLINE TARGET_PCLMUL __m128i load_block(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }

INLINE TARGET_PCLMUL __m128i fold_constant(const aof2_crc_params *params, int blocks) {
  return load_block((const uint8_t *)params->fold[blocks]);
}

INLINE TARGET_PCLMUL __m128i fold(__m128i x, __m128i k) {
  return _mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11));
}

INLINE TARGET_PCLMUL __m128i fold_onto(__m128i x, __m128i k, __m128i next) { return _mm_xor_si128(fold(x, k), next); }

/* u * x^0 mod P for a 128-bit u: the quotient by mu, then the low half of quotient * P. */
INLINE TARGET_PCLMUL uint64_t reduce_barrett(const aof2_crc_params *params, __m128i u) {
  __m128i k = _mm_set_epi64x((long long)params->p65, (long long)params->mu);
  __m128i quotient = _mm_clmulepi64_si128(u, k, 0x00);
  __m128i rest = _mm_xor_si128(u, _mm_clmulepi64_si128(quotient, k, 0x10));
  return (uint64_t)_mm_extract_epi64(rest, 1) ^ ((uint64_t)_mm_cvtsi128_si64(quotient) & params->p_x0);
}

/* The register after one block from register 0: block * x^64 mod P. */
INLINE TARGET_PCLMUL uint64_t reduce_block(const aof2_crc_params *params, __m128i x) {
  __m128i high_term = _mm_clmulepi64_si128(x, fold_constant(params, 1), 0x10);
  return reduce_barrett(params, _mm_xor_si128(high_term, _mm_srli_si128(x, 8)));
}

INLINE uint64_t load_below_8(const uint8_t *p, size_t len) {
  if (len >= 4) return load_u32(p) | (uint64_t)load_u32(p + len - 4) << (8 * (len - 4));
  return p[0] | (uint64_t)p[len / 2] << (8 * (len / 2)) | (uint64_t)p[len - 1] << (8 * (len - 1));
}

/* Right-aligned in a block: zero bytes before a message do not change register 0. */
INLINE TARGET_PCLMUL uint64_t kernel_below_16(const aof2_crc_params *params, uint64_t reg, const uint8_t *buf,
                                              size_t len) {
  if (len == 0) return reg;
  if (len < 8) {
    uint64_t word = (load_below_8(buf, len) ^ reg) << (64 - 8 * len);
    return reduce_barrett(params, _mm_cvtsi64_si128((long long)word)) ^ (reg >> 8 * len);
  }
  uint64_t first = load_u64(buf) ^ reg;
  if (len == 8) return reduce_barrett(params, _mm_cvtsi64_si128((long long)first));
  unsigned shift = 8 * (unsigned)(len - 8);
  uint64_t last = load_u64(buf + len - 8) >> (64 - shift) << (64 - shift);
  return reduce_block(params, _mm_set_epi64x((long long)(first >> shift | last), (long long)(first << (64 - shift))));
}

static const uint8_t slide[48] = {
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
    0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
    0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};

/* x, then the `rest` < 16 bytes that end at `end`: the first `rest` bytes of x fold onto everything after them. */
INLINE TARGET_PCLMUL __m128i fold_tail(const aof2_crc_params *params, __m128i x, const uint8_t *end, size_t rest) {
  __m128i to_end = load_block(slide + rest);
  __m128i front = _mm_shuffle_epi8(x, to_end);
  __m128i back = _mm_shuffle_epi8(x, load_block(slide + 16 + rest));
  return fold_onto(front, fold_constant(params, 1), _mm_blendv_epi8(load_block(end - 16), back, to_end));
}

/* x stands for everything before buf, at least 16 bytes of it in memory. */
INLINE TARGET_PCLMUL uint64_t finish(const aof2_crc_params *params, __m128i x, const uint8_t *buf, size_t len) {
  __m128i k = fold_constant(params, 1);
  for (; len >= 16; buf += 16, len -= 16) x = fold_onto(x, k, load_block(buf));
  if (len) x = fold_tail(params, x, buf + len, len);
  return reduce_block(params, x);
}

INLINE TARGET_PCLMUL __m128i first_block(uint64_t reg, const uint8_t *buf) {
  return _mm_xor_si128(load_block(buf), _mm_cvtsi64_si128((long long)reg));
}

/* Four blocks side by side hide the multiplier's latency. */
TARGET_PCLMUL uint64_t aof2_crc_kernel_pclmul(const aof2_crc_params *params, uint64_t reg, const uint8_t *buf,
                                              size_t len) {
  if (len < 16) return kernel_below_16(params, reg, buf, len);
  __m128i x0 = first_block(reg, buf);
  if (len < 64) return finish(params, x0, buf + 16, len - 16);
  __m128i x1 = load_block(buf + 16), x2 = load_block(buf + 32), x3 = load_block(buf + 48);
  __m128i k4 = fold_constant(params, 4);
  for (buf += 64, len -= 64; len >= 64; buf += 64, len -= 64) {
    x0 = fold_onto(x0, k4, load_block(buf));
    x1 = fold_onto(x1, k4, load_block(buf + 16));
    x2 = fold_onto(x2, k4, load_block(buf + 32));
    x3 = fold_onto(x3, k4, load_block(buf + 48));
  }
  __m128i k2 = fold_constant(params, 2);
  x2 = fold_onto(x0, k2, x2);
  x3 = fold_onto(x1, k2, x3);
  return finish(params, fold_onto(x2, fold_constant(params, 1), x3), buf, len);
}

/* -- 64 bytes at a time ----------------------------------------------------------------------------------------- */
INLINE TARGET_VPCLMUL __m512i load_wide(const uint8_t *p) { return _mm512_loadu_si512(p); }

INLINE TARGET_VPCLMUL __m512i wide_constant(const aof2_crc_params *params, int blocks) {
  return _mm512_broadcast_i32x4(fold_constant(params, blocks));
}

INLINE TARGET_VPCLMUL __m512i wide_onto(__m512i x, __m512i k, __m512i next) {
  __m512i lo = _mm512_clmulepi64_epi128(x, k, 0x00), hi = _mm512_clmulepi64_epi128(x, k, 0x11);
  return _mm512_ternarylogic_epi64(lo, hi, next, 0x96); /* three-way xor */
}

/* The four blocks of x onto the last of them. */
INLINE TARGET_VPCLMUL __m128i narrow(const aof2_crc_params *params, __m512i x) {
  __m128i x3 = _mm512_extracti32x4_epi32(x, 3);
  __m128i x0 = fold(_mm512_castsi512_si128(x), fold_constant(params, 3));
  __m128i x1 = fold(_mm512_extracti32x4_epi32(x, 1), fold_constant(params, 2));
  __m128i x2 = fold(_mm512_extracti32x4_epi32(x, 2), fold_constant(params, 1));
  return _mm_xor_si128(_mm_xor_si128(x0, x1), _mm_xor_si128(x2, x3));
}

/* `lanes` registers side by side, a power of two, down to one. Takes whole strides of buf, of which there is one. */
INLINE TARGET_VPCLMUL __m512i fold_lanes(const aof2_crc_params *params, uint64_t reg, const uint8_t **buf, size_t *len,
                                         const int lanes) {
  const size_t stride = 64 * (size_t)lanes;
  const uint8_t *p = *buf;
  size_t left = *len;
  __m512i x[8], k = wide_constant(params, 4 * lanes);
#pragma GCC unroll 8
  for (int i = 0; i < lanes; i++) x[i] = load_wide(p + 64 * i);
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi64_si128((long long)reg)));
  for (p += stride, left -= stride; left >= stride; p += stride, left -= stride) {
#pragma GCC unroll 8
    for (int i = 0; i < lanes; i++) x[i] = wide_onto(x[i], k, load_wide(p + 64 * i));
  }
#pragma GCC unroll 3
  for (int half = lanes / 2; half; half /= 2) {
    k = wide_constant(params, 4 * half);
#pragma GCC unroll 4
    for (int i = 0; i < half; i++) x[i] = wide_onto(x[i], k, x[i + half]);
  }
  *buf = p;
  *len = left;
  return x[0];
}

TARGET_VPCLMUL uint64_t aof2_crc_kernel_vpclmul(const aof2_crc_params *params, uint64_t reg, const uint8_t *buf,
                                                size_t len) {
  if (len < 256) return aof2_crc_kernel_pclmul(params, reg, buf, len);
  __m512i x = len < 1024 ? fold_lanes(params, reg, &buf, &len, 4) : fold_lanes(params, reg, &buf, &len, 8);
  __m512i k = wide_constant(params, 4);
  for (; len >= 64; buf += 64, len -= 64) x = wide_onto(x, k, load_wide(buf));
  return finish(params, narrow(params, x), buf, len);
}
#endif
