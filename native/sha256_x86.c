/* SHA-256 of sixteen messages side by side, a lane of AVX-512 each. Words of a block are turned so that a register holds
 * the same word of all messages; from there on it is FIPS 180-4 as it is written. */
#include "sha256.h"

#if AOF2_SHA256_X86
#include <cpuid.h>
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw")))
#define INLINE static inline __attribute__((always_inline))
#define CPUID_7_EBX_SHA (1u << 29)

int aof2_sha256_x86_level(void) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw")) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  return b & CPUID_7_EBX_SHA ? 2 : 1;
}

INLINE TARGET __m512i xor3(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }

INLINE TARGET __m512i sum2(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

INLINE TARGET __m512i big_sigma_0(__m512i x) {
  return xor3(_mm512_ror_epi32(x, 2), _mm512_ror_epi32(x, 13), _mm512_ror_epi32(x, 22));
}

INLINE TARGET __m512i big_sigma_1(__m512i x) {
  return xor3(_mm512_ror_epi32(x, 6), _mm512_ror_epi32(x, 11), _mm512_ror_epi32(x, 25));
}

INLINE TARGET __m512i small_sigma_0(__m512i x) {
  return xor3(_mm512_ror_epi32(x, 7), _mm512_ror_epi32(x, 18), _mm512_srli_epi32(x, 3));
}

INLINE TARGET __m512i small_sigma_1(__m512i x) {
  return xor3(_mm512_ror_epi32(x, 17), _mm512_ror_epi32(x, 19), _mm512_srli_epi32(x, 10));
}

INLINE TARGET __m512i choose(__m512i e, __m512i f, __m512i g) { return _mm512_ternarylogic_epi32(e, f, g, 0xCA); }

INLINE TARGET __m512i majority(__m512i a, __m512i b, __m512i c) { return _mm512_ternarylogic_epi32(a, b, c, 0xE8); }

/* Row i, sixteen words of message i, becomes column i. */
INLINE TARGET void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int g = 0; g < 16; g += 4) {
    r[g] = _mm512_unpacklo_epi64(t[g], t[g + 2]);
    r[g + 1] = _mm512_unpackhi_epi64(t[g], t[g + 2]);
    r[g + 2] = _mm512_unpacklo_epi64(t[g + 1], t[g + 3]);
    r[g + 3] = _mm512_unpackhi_epi64(t[g + 1], t[g + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512i even_ab = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), odd_ab = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xDD);
    __m512i even_cd = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88),
            odd_cd = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xDD);
    t[j] = _mm512_shuffle_i32x4(even_ab, even_cd, 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(odd_ab, odd_cd, 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even_ab, even_cd, 0xDD);
    t[12 + j] = _mm512_shuffle_i32x4(odd_ab, odd_cd, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* Round t. The eight words go round by one: what is a in one round is b in the next, and no register moves. */
INLINE TARGET void round_of(__m512i s[8], const int t, __m512i word_and_k) {
#define AT(n) s[((n) - t) & 7]
  __m512i t1 = sum2(sum2(AT(7), big_sigma_1(AT(4))), sum2(choose(AT(4), AT(5), AT(6)), word_and_k));
  AT(3) = sum2(AT(3), t1);
  AT(7) = sum2(t1, sum2(big_sigma_0(AT(0)), majority(AT(0), AT(1), AT(2))));
#undef AT
}

TARGET void aof2_sha256_kernel_avx512(aof2_sha256_states states, const uint8_t *const from[AOF2_SHA256_LANES],
                                      size_t blocks) {
  const __m512i big_endian = _mm512_broadcast_i32x4(_mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
  __m512i h[8];
  for (int i = 0; i < 8; i++) h[i] = _mm512_load_si512(states[i]);
  for (size_t at = 0; at < 64 * blocks; at += 64) {
    __m512i s[8], w[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) w[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(from[i] + at), big_endian);
    transpose(w);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) s[i] = h[i];
    for (int base = 0; base < 64; base += 16) {
#pragma GCC unroll 16
      for (int t = 0; t < 16; t++) {
        round_of(s, t, sum2(w[t], _mm512_set1_epi32((int)aof2_sha256_k[base + t])));
        w[t] = sum2(sum2(w[t], small_sigma_0(w[(t + 1) & 15])), sum2(w[(t + 9) & 15], small_sigma_1(w[(t + 14) & 15])));
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) h[i] = sum2(h[i], s[i]);
  }
  for (int i = 0; i < 8; i++) _mm512_store_si512(states[i], h[i]);
}
#endif
