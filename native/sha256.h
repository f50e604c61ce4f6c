/* Inside the hashes: what sha256.c, sha256_x86.c and those that hash many messages share. Not part of the API. */
#ifndef AOF2_SHA256_H
#define AOF2_SHA256_H
#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(AOF2_PORTABLE)
#define AOF2_SHA256_X86 1
#else
#define AOF2_SHA256_X86 0
#endif

#define AOF2_SHA256_LANES 16
#define AOF2_SHA256_WORDS 8

/* The state of a message is a column: word k of lane i is [k][i]. */
typedef uint32_t aof2_sha256_states[AOF2_SHA256_WORDS][AOF2_SHA256_LANES] __attribute__((aligned(64)));

extern const uint32_t aof2_sha256_k[64];

#if AOF2_SHA256_X86
/* `blocks` blocks of 64 bytes of each lane, from from[i] on; call only if aof2_sha256_x86_level() >= 1. */
void aof2_sha256_kernel_avx512(aof2_sha256_states states, const uint8_t *const from[AOF2_SHA256_LANES], size_t blocks);
/* 0: nothing of use; 1: AVX-512, and the CPU has no instructions for SHA-256 itself; 2: it has both. */
int aof2_sha256_x86_level(void);
#endif
#endif
