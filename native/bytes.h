/* Little-endian loads and stores at any alignment: the formats are packed, so no pointer is ever cast. */
#ifndef AOF2_BYTES_H
#define AOF2_BYTES_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define AOF2_LE16(v) __builtin_bswap16(v)
#define AOF2_LE32(v) __builtin_bswap32(v)
#define AOF2_LE64(v) __builtin_bswap64(v)
#else
#define AOF2_LE16(v) (v)
#define AOF2_LE32(v) (v)
#define AOF2_LE64(v) (v)
#endif

static inline uint16_t load_u16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, sizeof v);
  return AOF2_LE16(v);
}

static inline uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  memcpy(&v, p, sizeof v);
  return AOF2_LE32(v);
}

static inline uint64_t load_u64(const uint8_t *p) {
  uint64_t v;
  memcpy(&v, p, sizeof v);
  return AOF2_LE64(v);
}

static inline void store_u16(uint8_t *p, uint16_t v) {
  v = AOF2_LE16(v);
  memcpy(p, &v, sizeof v);
}

static inline void store_u32(uint8_t *p, uint32_t v) {
  v = AOF2_LE32(v);
  memcpy(p, &v, sizeof v);
}

static inline void store_u64(uint8_t *p, uint64_t v) {
  v = AOF2_LE64(v);
  memcpy(p, &v, sizeof v);
}
#endif
