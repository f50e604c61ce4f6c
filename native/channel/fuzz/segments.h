/* Segments that the channel appends to, on files in memory: what it tells of one is compared with the file. */
#ifndef AOF2_CHANNEL_FUZZ_SEGMENTS_H
#define AOF2_CHANNEL_FUZZ_SEGMENTS_H
#include "../proto.h"

int segment_new(control_message *m); /* the descriptor for an APPEND, whose segment_id becomes one of its own */
void segment_told(const uint8_t *appended, size_t len);
void segments_reset(void);
void check_append(void); /* known answers */
#endif
