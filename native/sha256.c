/* SHA-256 of many messages at once.
 *
 * Where the CPU has AVX-512 and no instructions for SHA-256, sixteen messages go side by side, each in a lane: that is six
 * times as fast as one after the other. A lane whose message ends takes the next one; the last few, and every message on
 * other machines, are OpenSSL's.
 *
 * Invariants
 * - A lane reads whole blocks of its own message, and its padded end; an idle one reads what a busy one does.
 * - What comes out is the same, whichever way it went.
 */
#define OPENSSL_SUPPRESS_DEPRECATED
#include "sha256.h"

#include <errno.h>
#include <openssl/sha.h>
#include <string.h>
#include <unistd.h>

#include "bytes.h"
#include "native.h"

#define BLOCK_LEN 64
#define END_LEN_MAX (2 * BLOCK_LEN)
#define FEW 4 /* side by side these are no faster than one after the other */

const uint32_t aof2_sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static const uint32_t initial[AOF2_SHA256_WORDS] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

static void store_big(uint8_t *p, const uint32_t words[AOF2_SHA256_WORDS]) {
  for (int i = 0; i < AOF2_SHA256_WORDS; i++)
    for (int byte = 0; byte < 4; byte++) p[4 * i + byte] = (uint8_t)(words[i] >> (24 - 8 * byte));
}

/* The end of a message of `len` bytes, `rest` of which are not in a whole block: those, and the padding. Its blocks. */
static size_t pad(uint8_t end[END_LEN_MAX], const uint8_t *rest, uint64_t len) {
  size_t left = (size_t)(len % BLOCK_LEN), total = left < BLOCK_LEN - 8 ? BLOCK_LEN : 2 * BLOCK_LEN;
  if (left) memcpy(end, rest, left);
  end[left] = 0x80;
  memset(end + left + 1, 0, total - left - 1);
  for (int byte = 0; byte < 8; byte++) end[total - 8 + byte] = (uint8_t)(8 * len >> (56 - 8 * byte));
  return total / BLOCK_LEN;
}

/* One message, by OpenSSL: further blocks onto its state. */
static void go_on_alone(uint32_t state[AOF2_SHA256_WORDS], const uint8_t *from, size_t blocks) {
  SHA256_CTX one;
  SHA256_Init(&one);
  for (int i = 0; i < AOF2_SHA256_WORDS; i++) one.h[i] = state[i];
  SHA256_Update(&one, from, blocks * BLOCK_LEN);
  for (int i = 0; i < AOF2_SHA256_WORDS; i++) state[i] = one.h[i];
}

static int best = 1;

__attribute__((constructor)) static void choose_lanes(void) {
#if AOF2_SHA256_X86
  if (aof2_sha256_x86_level() == 1) best = AOF2_SHA256_LANES;
#endif
}

int aof2_sha256_lanes(void) { return best; }

/* -- many messages, each to its end -------------------------------------------------------------------------------- */
#if AOF2_SHA256_X86
typedef struct {
  const uint8_t *from;
  size_t blocks; /* left there; then come those of `end` */
  size_t end_blocks;
  size_t index;
  int busy;
  uint8_t end[END_LEN_MAX];
} lane;

typedef struct {
  size_t n, next, busy;
  const uint8_t *data;
  const uint64_t *offset, *len;
  uint8_t *out;
  aof2_sha256_states states;
  lane lanes[AOF2_SHA256_LANES];
} crowd;

static void column_of(const crowd *c, int i, uint32_t words[AOF2_SHA256_WORDS]) {
  for (int k = 0; k < AOF2_SHA256_WORDS; k++) words[k] = c->states[k][i];
}

static void to_end(lane *l) {
  l->from = l->end;
  l->blocks = l->end_blocks;
  l->end_blocks = 0;
}

static void take_next(crowd *c, int i) {
  lane *l = &c->lanes[i];
  if (c->next == c->n) {
    l->busy = 0;
    return;
  }
  l->index = c->next++;
  uint64_t len = c->len[l->index];
  l->from = c->data + c->offset[l->index];
  l->blocks = (size_t)(len / BLOCK_LEN);
  l->end_blocks = pad(l->end, l->from + l->blocks * BLOCK_LEN, len);
  if (!l->blocks) to_end(l);
  for (int k = 0; k < AOF2_SHA256_WORDS; k++) c->states[k][i] = initial[k];
  l->busy = 1;
  c->busy++;
}

/* As many blocks as every busy lane has. */
static void step(crowd *c) {
  const uint8_t *from[AOF2_SHA256_LANES], *any = NULL;
  size_t blocks = SIZE_MAX;
  for (int i = 0; i < AOF2_SHA256_LANES; i++) {
    from[i] = c->lanes[i].from;
    if (!c->lanes[i].busy || c->lanes[i].blocks > blocks) continue;
    blocks = c->lanes[i].blocks;
  }
  for (int i = 0; i < AOF2_SHA256_LANES && !any; i++)
    if (c->lanes[i].busy) any = from[i];
  for (int i = 0; i < AOF2_SHA256_LANES; i++)
    if (!c->lanes[i].busy) from[i] = any;
  aof2_sha256_kernel_avx512(c->states, from, blocks);
  for (int i = 0; i < AOF2_SHA256_LANES; i++) {
    lane *l = &c->lanes[i];
    if (!l->busy) continue;
    l->from += blocks * BLOCK_LEN;
    l->blocks -= blocks;
    if (l->blocks) continue;
    if (l->end_blocks) {
      to_end(l);
      continue;
    }
    uint32_t words[AOF2_SHA256_WORDS];
    column_of(c, i, words);
    store_big(c->out + 32 * l->index, words);
    c->busy--;
    take_next(c, i);
  }
}

static void finish_alone(crowd *c, int i) {
  lane *l = &c->lanes[i];
  uint32_t words[AOF2_SHA256_WORDS];
  column_of(c, i, words);
  go_on_alone(words, l->from, l->blocks);
  if (l->end_blocks) go_on_alone(words, l->end, l->end_blocks);
  store_big(c->out + 32 * l->index, words);
}

static void side_by_side(size_t n, const uint8_t *data, const uint64_t *offset, const uint64_t *len, uint8_t *out) {
  crowd c = {.n = n, .data = data, .offset = offset, .len = len, .out = out};
  for (int i = 0; i < AOF2_SHA256_LANES; i++) take_next(&c, i);
  while (c.busy > FEW) step(&c);
  for (int i = 0; i < AOF2_SHA256_LANES; i++)
    if (c.lanes[i].busy) finish_alone(&c, i);
}
#endif

void aof2_sha256_many_by(int lanes, size_t n, const uint8_t *data, const uint64_t *offset, const uint64_t *len,
                         uint8_t *out) {
#if AOF2_SHA256_X86
  if (lanes > 1 && best > 1 && n > FEW) {
    side_by_side(n, data, offset, len, out);
    return;
  }
#else
  (void)lanes;
#endif
  for (size_t i = 0; i < n; i++) SHA256(data + offset[i], (size_t)len[i], out + 32 * i);
}

void aof2_sha256_many(size_t n, const uint8_t *data, const uint64_t *offset, const uint64_t *len, uint8_t *out) {
  aof2_sha256_many_by(aof2_sha256_lanes(), n, data, offset, len, out);
}

/* -- stretches of a file, side by side ----------------------------------------------------------------------------- */
void aof2_sha256_begin(size_t n, uint32_t *state) {
  for (size_t i = 0; i < n; i++) memcpy(state + AOF2_SHA256_WORDS * i, initial, sizeof initial);
}

static void go_on_all(int lanes, size_t n, uint32_t *state, const uint8_t *data, size_t len) {
#if AOF2_SHA256_X86
  if (lanes > 1 && best > 1 && n > FEW) {
    aof2_sha256_states states;
    const uint8_t *from[AOF2_SHA256_LANES];
    for (size_t i = 0; i < AOF2_SHA256_LANES; i++) {
      size_t of = i < n ? i : 0;
      from[i] = data + len * of;
      for (size_t k = 0; k < AOF2_SHA256_WORDS; k++) states[k][i] = state[AOF2_SHA256_WORDS * of + k];
    }
    aof2_sha256_kernel_avx512(states, from, len / BLOCK_LEN);
    for (size_t i = 0; i < n; i++)
      for (size_t k = 0; k < AOF2_SHA256_WORDS; k++) state[AOF2_SHA256_WORDS * i + k] = states[k][i];
    return;
  }
#else
  (void)lanes;
#endif
  for (size_t i = 0; i < n; i++) go_on_alone(state + AOF2_SHA256_WORDS * i, data + len * i, len / BLOCK_LEN);
}

static int read_piece(int fd, uint64_t offset, uint8_t *out, size_t len) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pread(fd, out + done, len - done, (off_t)(offset + done));
    if (n > 0) done += (size_t)n;
    else if (n == 0) return ENODATA;
    else if (errno != EINTR) return errno;
  }
  return 0;
}

int aof2_spans_hash(int lanes, int fd, size_t n, const uint64_t *offset, uint64_t len, uint64_t piece_len,
                    uint8_t *scratch, size_t scratch_len, uint32_t *state, uint64_t *crc64) {
  if (!n || n > AOF2_SHA256_LANES || !piece_len || piece_len % BLOCK_LEN || len % piece_len || scratch_len / n < piece_len)
    return EINVAL;
  size_t pieces = (size_t)(len / piece_len), size = (size_t)piece_len;
  for (size_t piece = 0; piece < pieces; piece++) {
    for (size_t i = 0; i < n; i++) {
      int error = read_piece(fd, offset[i] + piece * piece_len, scratch + size * i, size);
      if (error) return error;
      crc64[pieces * i + piece] = aof2_crc64(0, scratch + size * i, size);
    }
    go_on_all(lanes, n, state, scratch, size);
  }
  return 0;
}

void aof2_sha256_end(size_t n, uint32_t *state, uint64_t len, uint8_t *out) {
  uint8_t end[END_LEN_MAX];
  size_t blocks = pad(end, NULL, len / BLOCK_LEN * BLOCK_LEN);
  for (size_t i = 0; i < n; i++) {
    go_on_alone(state + AOF2_SHA256_WORDS * i, end, blocks);
    store_big(out + 32 * i, state + AOF2_SHA256_WORDS * i);
  }
}
