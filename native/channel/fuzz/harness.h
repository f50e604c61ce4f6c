/* What an input to the channel's fuzzer looks like, and what harness, driver and selfcheck share.
 *
 * An input is a sequence of steps: u8 step, u8 flags, u16 length (little-endian), then so many bytes. Steps are messages from
 * each side, handled one after the other as the threads would, on files in memory; or rows that the catalog has: u8 database, u8
 * length of the key, key, value; or a record that the daemon puts into the first intent log there is.
 */
#ifndef AOF2_CHANNEL_FUZZ_HARNESS_H
#define AOF2_CHANNEL_FUZZ_HARNESS_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { STEP_CONTROL, STEP_REQUEST, STEP_REPLY, STEP_ROW, STEP_INTENT, STEPS };
enum { STEP_HEADER_LEN = 4, WITH_FD = 1 };

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);     \
      abort();                                                                    \
    }                                                                             \
  } while (0)

/* What was sent since it was last zeroed. */
typedef struct {
  size_t events, replies, backings_open;
  uint16_t last_event;
  int last_error;
  uint8_t last_reply[256];
  size_t last_reply_len;
  int backing_error; /* what BACKING_OPEN answers */
} outside;
extern outside seen;

int backing_new(void); /* a descriptor of a file in memory */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void selfcheck(void);

/* rows.c: what the catalog has; and the answers to rows on stdin. */
void fake_put(const uint8_t *data, size_t len);
void fake_reset(void);
void tell_rows(void);
#endif
