/* A mutating main for compilers without libFuzzer: driver selfcheck | driver SECONDS [SEED] | driver FILE.
 *
 * Inputs start as valid encodings and are flipped, cut, spliced and given lengths that lie; half of them get their
 * checksums made right again, or the mutants would all die at the first crc. A seed replays its run; the input being
 * tried is in ./crash-input while it runs if FUZZ_KEEP is set.
 */
#include <string.h>
#include <time.h>

#include "../bytes.h"
#include "../native.h"
#include "harness.h"

#define INPUT_MAX 4096
#define RECORDS_MAX 10
#define POOL 64

static uint64_t rng;

static uint64_t random_u64(void) {
  rng ^= rng << 13;
  rng ^= rng >> 7;
  rng ^= rng << 17;
  return rng * UINT64_C(0x2545F4914F6CDD1D);
}

static size_t below(size_t bound) { return (size_t)((random_u64() >> 16) % bound); }

typedef struct {
  uint8_t data[INPUT_MAX];
  size_t len;
} sample;

/* -- valid inputs ----------------------------------------------------------------------------------------------- */
typedef struct {
  size_t n, total;
  uint8_t payloads[RECORDS_MAX * 96];
  uint32_t length[RECORDS_MAX], flags[RECORDS_MAX];
  uint64_t logical[RECORDS_MAX], ids[RECORDS_MAX];
  uint16_t type[RECORDS_MAX];
} batch;

static batch batch_new(void) {
  batch b = {.n = 1 + below(RECORDS_MAX)};
  uint64_t logical = below(100);
  for (size_t i = 0; i < b.n; i++) {
    b.length[i] = (uint32_t)(1 + below(96));
    b.logical[i] = logical;
    b.flags[i] = (uint32_t)below(4);
    b.ids[i] = random_u64();
    b.type[i] = (uint16_t)below(15);
    logical += b.length[i] + below(3);
    b.total += b.length[i];
  }
  for (size_t i = 0; i < b.total; i++) b.payloads[i] = below(9) ? (uint8_t)random_u64() : '\n';
  return b;
}

static size_t manifest_append(uint8_t *out, size_t at, size_t cap, const batch *b) {
  uint64_t crc64 = 0;
  int64_t written = aof2_manifest_encode(b->n, b->type, b->ids, b->logical, b->ids, b->payloads, b->total, b->length,
                                         out + at, cap - at, &crc64);
  return written < 0 ? at : at + (size_t)written;
}

static void marker_fill(uint8_t *payload, uint64_t span_start, uint64_t span_crc64, uint64_t durable_len) {
  memset(payload, 0, 32);
  store_u32(payload, 1);
  store_u16(payload + 4, 24);
  store_u64(payload + 6, span_start);
  store_u64(payload + 14, span_crc64);
  store_u64(payload + 22, durable_len);
}

static size_t manifest_with_markers(uint8_t *out, size_t cap) {
  size_t at = 0, span_start = 0;
  for (size_t spans = below(4); spans != SIZE_MAX; spans--) {
    batch b = batch_new(), marker = {.n = 1, .total = 32, .length = {32}, .type = {15}};
    at = manifest_append(out, at, cap, &b);
    marker_fill(marker.payloads, span_start, aof2_crc64(0, out + span_start, at - span_start), below(1 << 20));
    if (below(8)) span_start = at = manifest_append(out, at, cap, &marker);
  }
  return at;
}

/* Record headers of the batch, then its payloads. */
static size_t index_of(uint8_t *out, size_t cap, const batch *b) {
  uint8_t raw[INPUT_MAX];
  size_t len = (size_t)aof2_segment_encode(3, b->n, b->payloads, b->total, b->length, b->logical, b->ids, b->ids,
                                           b->flags, raw, cap);
  for (size_t i = 0, at = 0; i < b->n; at += 36 + b->length[i++]) memcpy(out + 36 * i, raw + at, 36);
  memcpy(out + 36 * b->n, b->payloads, b->total);
  return len;
}

static void sample_new(sample *s) {
  uint8_t target = (uint8_t)below(TARGETS);
  uint8_t *body = s->data + PREFIX_LEN;
  size_t cap = INPUT_MAX - PREFIX_LEN, len;
  batch b = batch_new();
  if (target == TARGET_MANIFEST || target == TARGET_PROBE) {
    len = manifest_with_markers(body, cap);
  } else if (target <= TARGET_RESYNC_V3) {
    uint32_t version = target == TARGET_SEGMENT_V2 || target == TARGET_RESYNC_V2 ? 2 : 3;
    len = (size_t)aof2_segment_encode(version, b.n, b.payloads, b.total, b.length, b.logical, b.ids, b.ids, b.flags,
                                      body, cap);
  } else if (target == TARGET_INDEX) {
    len = index_of(body, cap, &b);
  } else {
    len = b.total;
    memcpy(body, b.payloads, len);
  }
  memset(s->data, 0, PREFIX_LEN);
  s->data[AT_TARGET] = target;
  s->data[AT_ROWS] = (uint8_t)random_u64();
  store_u16(s->data + AT_PARAM, (uint16_t)below(200));
  if (target == TARGET_INDEX) {
    s->data[AT_ROWS] = (uint8_t)(b.n - 1);
    store_u16(s->data + AT_PARAM, (uint16_t)below(b.logical[0] + 2));
  }
  if (target >= TARGET_PAGES) store_u16(s->data + AT_START, (uint16_t)below(2 * len + 1));
  s->len = PREFIX_LEN + len;
}

/* -- checksums made right again --------------------------------------------------------------------------------- */
static void fix_segment(uint8_t *body, size_t len, size_t at, uint32_t version) {
  size_t header_len = version == 2 ? 28 : 36;
  while (at <= len && len - at >= header_len) {
    uint32_t payload_len = load_u32(body + at);
    if (payload_len > len - at - header_len) return;
    store_u32(body + at + 4, 0);
    size_t skip = version == 2 ? header_len : 0;
    store_u32(body + at + 4, aof2_crc32(0, body + at + skip, header_len - skip + payload_len));
    at += header_len + payload_len;
  }
}

static void fix_index(uint8_t *body, size_t len, size_t n) {
  if (n > len / 36) n = len / 36;
  uint8_t *payload = body + 36 * n;
  for (size_t i = 0, left = len - 36 * n; i < n; i++) {
    uint8_t *header = body + 36 * i;
    uint32_t payload_len = load_u32(header);
    if (payload_len > left) return;
    store_u32(header + 4, 0);
    store_u32(header + 4, aof2_crc32(aof2_crc32(0, header, 36), payload, payload_len));
    payload += payload_len;
    left -= payload_len;
  }
}

static void fix_manifest(uint8_t *body, size_t len, size_t at) {
  size_t span_start = at;
  while (at <= len && len - at >= 40) {
    uint32_t payload_len = load_u32(body + at + 4);
    uint8_t *payload = body + at + 40;
    if (payload_len > len - at - 40) return;
    int is_marker = load_u16(body + at) == 15 && payload_len == 32 && load_u32(payload) == 1;
    if (is_marker && below(4))
      marker_fill(payload, span_start, aof2_crc64(0, body + span_start, at - span_start), load_u64(payload + 22));
    store_u64(body + at + 32, aof2_crc64(0, payload, payload_len));
    at += 40 + (size_t)payload_len;
    if (is_marker) span_start = at;
  }
}

static void fix_checksums(sample *s) {
  uint8_t *body = s->data + PREFIX_LEN;
  size_t len = s->len - PREFIX_LEN, start = load_u16(s->data + AT_START);
  switch (s->data[AT_TARGET] % TARGETS) {
    case TARGET_SEGMENT_V2:
    case TARGET_RESYNC_V2: return fix_segment(body, len, start, 2);
    case TARGET_SEGMENT_V3:
    case TARGET_RESYNC_V3: return fix_segment(body, len, start, 3);
    case TARGET_MANIFEST:
    case TARGET_PROBE: return fix_manifest(body, len, start);
    case TARGET_INDEX: return fix_index(body, len, 1 + (size_t)s->data[AT_ROWS] % 16);
  }
}

/* -- mutations -------------------------------------------------------------------------------------------------- */
static uint32_t lie(void) {
  static const uint32_t lies[] = {0, 1, 7, 8, 9, 0x7fffffff, 0x80000000, 0xfffffff8, 0xffffffff, 0xffffffd8, 0xffffffdc};
  return below(2) ? lies[below(sizeof lies / sizeof *lies)] : (uint32_t)below(INPUT_MAX);
}

static void splice(sample *s, const sample *other) {
  size_t at = PREFIX_LEN + below(s->len - PREFIX_LEN + 1), from = PREFIX_LEN + below(other->len - PREFIX_LEN + 1);
  size_t len = below(other->len - from + 1);
  if (len > INPUT_MAX - at) len = INPUT_MAX - at;
  memmove(s->data + at, other->data + from, len);
  if (at + len > s->len) s->len = at + len;
}

static void mutate(sample *s, const sample *other) {
  size_t at = below(s->len);
  switch (below(8)) {
    case 0: s->data[at] ^= (uint8_t)(1u << below(8)); break;
    case 1: s->data[at] = (uint8_t)random_u64(); break;
    case 2: s->len = PREFIX_LEN + below(s->len - PREFIX_LEN + 1); break;
    case 3: splice(s, other); break;
    case 4:
      if (s->len >= 4 + PREFIX_LEN) store_u32(s->data + PREFIX_LEN + below(s->len - PREFIX_LEN - 3), lie());
      break;
    case 5: memset(s->data + at, 0, below(s->len - at + 1)); break;
    case 6: store_u16(s->data + AT_CUT, (uint16_t)(below(3) ? below(64) : random_u64())); break;
    default: store_u16(s->data + 2 * (1 + below(7)), (uint16_t)(below(3) ? below(300) : random_u64() | 0xff00)); break;
  }
}

/* -- running ---------------------------------------------------------------------------------------------------- */
static void keep(const sample *s) {
  FILE *file = fopen("crash-input", "wb");
  CHECK(file && fwrite(s->data, 1, s->len, file) == s->len && fclose(file) == 0);
}

static uint64_t fuzz(double seconds, uint64_t seed) {
  static sample pool[POOL];
  struct timespec began, now;
  uint64_t executions = 0;
  int keeps = getenv("FUZZ_KEEP") != NULL;
  rng = seed * 2 + 1;
  for (int i = 0; i < 20; i++) random_u64();
  for (int i = 0; i < POOL; i++) sample_new(&pool[i]);
  clock_gettime(CLOCK_MONOTONIC, &began);
  do {
    for (int i = 0; i < 1000; i++, executions++) {
      sample *slot = &pool[below(POOL)], s;
      if (!below(8)) sample_new(slot);
      s = *slot;
      for (size_t mutations = below(5); mutations; mutations--) mutate(&s, &pool[below(POOL)]);
      if (below(2)) fix_checksums(&s);
      if (keeps) keep(&s);
      LLVMFuzzerTestOneInput(s.data, s.len);
      if (!below(16)) *slot = s; /* let damage pile up for a while */
    }
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while ((double)(now.tv_sec - began.tv_sec) + (double)(now.tv_nsec - began.tv_nsec) / 1e9 < seconds);
  return executions;
}

static int replay(const char *path) {
  static uint8_t data[1 << 20];
  FILE *file = fopen(path, "rb");
  if (!file) {
    fprintf(stderr, "usage: driver selfcheck | driver SECONDS [SEED] | driver FILE\n");
    return 2;
  }
  size_t len = fread(data, 1, sizeof data, file);
  fclose(file);
  return LLVMFuzzerTestOneInput(data, len);
}

int main(int argc, char **argv) {
  const char *what = argc > 1 ? argv[1] : "10";
  if (strcmp(what, "selfcheck") == 0) {
    selfcheck();
    printf("selfcheck: checksums hold\n");
    return 0;
  }
  char *rest;
  double seconds = strtod(what, &rest);
  if (*rest || rest == what) return replay(what);
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
  printf("seed %llu\n", (unsigned long long)seed);
  fflush(stdout);
  printf("%llu executions\n", (unsigned long long)fuzz(seconds, seed));
  return 0;
}
