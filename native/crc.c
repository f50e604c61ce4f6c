/* Checksums: constants, the portable kernel, choice of kernel, combination.
 *
 * Every constant is derived from the two polynomials when the library loads (a constructor, so before any thread can
 * call), and is read-only from then on.
 */
#include "crc.h"

#include "bytes.h"
#include "native.h"

#define POLY_CRC64_NVME UINT64_C(0x9A6C9329AC4BC9B5) /* 0xAD93D23594C93659 reflected */
#define POLY_CRC32_IEEE UINT64_C(0x00000000EDB88320) /* 0x04C11DB7 reflected, times x^32 */
#define X_TO_0 (UINT64_C(1) << 63)

static aof2_crc_params crc64_params, crc32_params;
static int impl_best;

/* -- constants -------------------------------------------------------------------------------------------------- */
static uint64_t times_x(uint64_t v, uint64_t poly) { return (v >> 1) ^ ((v & 1) ? poly : 0); }

static uint64_t multiply(uint64_t a, uint64_t b, uint64_t poly) {
  uint64_t product = 0;
  for (; a; a <<= 1) {
    if (a & X_TO_0) product ^= b;
    b = times_x(b, poly);
  }
  return product;
}

static uint64_t quotient_x128(uint64_t poly) {
  uint64_t quotient = 1, rest = poly; /* after the first step of the division: x^64 taken, P - x^64 left */
  for (int bit = 1; bit < 64; bit++) {
    quotient |= (rest & 1) << bit;
    rest = times_x(rest, poly);
  }
  return quotient;
}

static void derive_tables(aof2_crc_params *params) {
  for (unsigned byte = 0; byte < 256; byte++) {
    uint64_t reg = byte;
    for (int bit = 0; bit < 8; bit++) reg = times_x(reg, params->poly);
    params->table[0][byte] = reg;
  }
  for (unsigned byte = 0; byte < 256; byte++)
    for (int i = 1; i < 8; i++) {
      uint64_t before = params->table[i - 1][byte];
      params->table[i][byte] = (before >> 8) ^ params->table[0][before & 255];
    }
}

static void derive_folds(aof2_crc_params *params) {
  uint64_t power = X_TO_0;
  for (int n = 0; n < 128 * AOF2_FOLD_MAX + 64; n++, power = times_x(power, params->poly)) {
    if (n % 128 == 63) params->fold[n / 128][0] = power;
    if (n % 128 == 127) params->fold[n / 128 + 1][1] = power;
  }
}

static void derive(aof2_crc_params *params, uint64_t poly) {
  params->poly = poly;
  params->mu = quotient_x128(poly);
  params->p65 = (poly << 1) | 1;
  params->p_x0 = (poly >> 63) ? ~UINT64_C(0) : 0;
  derive_tables(params);
  derive_folds(params);
  params->x2n[0] = X_TO_0 >> 1;
  for (int n = 1; n < 67; n++) params->x2n[n] = multiply(params->x2n[n - 1], params->x2n[n - 1], poly);
}

/* -- kernels ---------------------------------------------------------------------------------------------------- */
uint64_t aof2_crc_kernel_portable(const aof2_crc_params *params, uint64_t reg, const uint8_t *buf, size_t len) {
  const uint64_t(*t)[256] = params->table;
  for (; len >= 8; buf += 8, len -= 8) {
    uint64_t w = reg ^ load_u64(buf);
    reg = t[7][w & 255] ^ t[6][w >> 8 & 255] ^ t[5][w >> 16 & 255] ^ t[4][w >> 24 & 255] ^ t[3][w >> 32 & 255] ^
          t[2][w >> 40 & 255] ^ t[1][w >> 48 & 255] ^ t[0][w >> 56];
  }
  for (; len; buf++, len--) reg = (reg >> 8) ^ t[0][(reg ^ *buf) & 255];
  return reg;
}

static aof2_crc_kernel *kernel_of(int impl) {
  if (impl > impl_best) impl = impl_best;
#if AOF2_CRC_X86
  if (impl >= 2) return aof2_crc_kernel_vpclmul;
  if (impl == 1) return aof2_crc_kernel_pclmul;
#endif
  return aof2_crc_kernel_portable;
}

static aof2_crc_kernel *kernel_best = aof2_crc_kernel_portable;

__attribute__((constructor)) static void derive_all(void) {
  derive(&crc64_params, POLY_CRC64_NVME);
  derive(&crc32_params, POLY_CRC32_IEEE);
#if AOF2_CRC_X86
  impl_best = aof2_crc_x86_level();
#endif
  kernel_best = kernel_of(impl_best);
}

/* -- the API ---------------------------------------------------------------------------------------------------- */
int aof2_crc_impl_best(void) { return impl_best; }

uint64_t aof2_crc64(uint64_t crc, const uint8_t *buf, size_t len) {
  return ~kernel_best(&crc64_params, ~crc, buf, len);
}

uint32_t aof2_crc32_register(uint64_t reg, const uint8_t *buf, size_t len) {
  return (uint32_t)kernel_best(&crc32_params, reg, buf, len);
}

uint32_t aof2_crc32(uint32_t crc, const uint8_t *buf, size_t len) {
  return ~aof2_crc32_register((uint32_t)~crc, buf, len);
}

uint64_t aof2_crc64_with(int impl, uint64_t crc, const uint8_t *buf, size_t len) {
  return ~kernel_of(impl)(&crc64_params, ~crc, buf, len);
}

uint32_t aof2_crc32_with(int impl, uint32_t crc, const uint8_t *buf, size_t len) {
  return ~(uint32_t)kernel_of(impl)(&crc32_params, (uint32_t)~crc, buf, len);
}

/* crc(A||B) = crc(A) * x^(8 len_b) + crc(B): the complements before and after cancel out. */
static uint64_t combine(const aof2_crc_params *params, uint64_t crc_a, uint64_t crc_b, uint64_t len_b) {
  uint64_t shift = X_TO_0;
  for (int n = 3; len_b; n++, len_b >>= 1)
    if (len_b & 1) shift = multiply(params->x2n[n], shift, params->poly);
  return multiply(shift, crc_a, params->poly) ^ crc_b;
}

uint64_t aof2_crc64_combine(uint64_t crc_a, uint64_t crc_b, uint64_t len_b) {
  return combine(&crc64_params, crc_a, crc_b, len_b);
}

uint32_t aof2_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t len_b) {
  return (uint32_t)combine(&crc32_params, crc_a, crc_b, len_b);
}
