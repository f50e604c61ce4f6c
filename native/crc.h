/* Inside the checksums: what crc.c, crc_x86.c and the scanners share. Not part of the API.
 *
 * One kernel serves both checksums. A reflected CRC shifts right, so CRC-32 is a 64-bit reflected CRC whose
 * polynomial has a zero upper half (that is, P * x^32): the register simply never leaves its lower 32 bits.
 *
 * Notation: bit i of a 64-bit word stands for x^(63-i); `poly` leaves out x^64.
 */
#ifndef AOF2_CRC_H
#define AOF2_CRC_H
#include <stddef.h>
#include <stdint.h>

/* AOF2_PORTABLE leaves the x86 kernels out, as other machines do. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(AOF2_PORTABLE)
#define AOF2_CRC_X86 1
#else
#define AOF2_CRC_X86 0
#endif

#define AOF2_FOLD_MAX 32 /* longest folding distance, in 16-byte blocks */

typedef struct {
  uint64_t poly;
  uint64_t mu;       /* floor(x^128 / P), bit i for x^(64-i); its x^0 term never matters to Barrett */
  uint64_t p65;      /* P itself, bit i for x^(64-i), without its x^0 term ... */
  uint64_t p_x0;     /* ... which is here as a mask: all ones if P has it */
  uint64_t table[8][256];
  uint64_t fold[AOF2_FOLD_MAX + 1][2]; /* [d]: x^(128d+63), x^(128d-1): move the low, high half by d blocks */
  uint64_t x2n[67];                    /* x^(2^n) */
} aof2_crc_params;

/* Advances a raw register (no final complement) over buf. */
typedef uint64_t aof2_crc_kernel(const aof2_crc_params *params, uint64_t reg, const uint8_t *buf, size_t len);

aof2_crc_kernel aof2_crc_kernel_portable;
#if AOF2_CRC_X86
aof2_crc_kernel aof2_crc_kernel_pclmul;  /* call only if aof2_crc_x86_level() >= 1 */
aof2_crc_kernel aof2_crc_kernel_vpclmul; /* ... >= 2 */
int aof2_crc_x86_level(void);
#endif

/* CRC-32 of buf with a raw 64-bit register, low 32 bits of the result. The register's upper half is xored onto
 * bytes 4..7 of buf, which lets a record be checked in place with the checksum stored there taken as zero. */
uint32_t aof2_crc32_register(uint64_t reg, const uint8_t *buf, size_t len);
#endif
