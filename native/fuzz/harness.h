/* What an input to the fuzzer looks like: these 16 bytes, then the body. Shared by harness and driver. */
#ifndef AOF2_FUZZ_HARNESS_H
#define AOF2_FUZZ_HARNESS_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  TARGET_SEGMENT_V2,
  TARGET_SEGMENT_V3,
  TARGET_MANIFEST,
  TARGET_RESYNC_V2,
  TARGET_RESYNC_V3,
  TARGET_PROBE,
  TARGET_LINES,
  TARGET_PAGES,
  TARGET_CRC,
  TARGET_SEGMENT_ENCODE,
  TARGET_MANIFEST_ENCODE,
  TARGET_INDEX,
  TARGETS
};

enum {
  AT_TARGET = 0,
  AT_ROWS = 1,  /* u8: rows a call */
  AT_START = 2, /* u16 */
  AT_CUT = 4,   /* u16: how far before (or, top bit set, past) the end of the body `end` lies */
  AT_PARAM = 6, /* u16 */
  AT_STATE = 8, /* u64 */
  PREFIX_LEN = 16
};

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);     \
      abort();                                                                    \
    }                                                                             \
  } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void selfcheck(void);
#endif
