/* A mutating main for compilers without libFuzzer: driver selfcheck | driver told | driver SECONDS [SEED] | driver FILE.
 *
 * Inputs are sequences of messages that make sense together (few inodes, few handles), some with extreme numbers; then some
 * of them are flipped, cut or spliced. A seed replays its run; the input being tried is in ./crash-input if FUZZ_KEEP is set.
 */
#include <string.h>
#include <time.h>

#include "../../bytes.h"
#include "../proto.h"
#include "../wire.h"
#include "harness.h"

#define INPUT_MAX 8192
#define STEPS_MAX 40

static uint64_t rng;

static uint64_t random_u64(void) {
  rng ^= rng << 13;
  rng ^= rng >> 7;
  rng ^= rng << 17;
  return rng * UINT64_C(0x2545F4914F6CDD1D);
}

static size_t below(size_t bound) { return (size_t)((random_u64() >> 16) % bound); }

/* Mostly small; now and then at an edge. */
static uint64_t number(uint64_t small) {
  static const uint64_t edges[] = {0, 1, 63, 64, 65, 4095, 4096, UINT32_MAX, INT64_MAX, INT64_MAX - 1, UINT64_MAX, UINT64_C(1) << 40};
  return below(8) ? below(small) : edges[below(sizeof edges / sizeof *edges)];
}

static uint8_t input[INPUT_MAX];
static size_t input_len;

static void step_put(uint8_t what, uint8_t flags, const uint8_t *data, size_t len) {
  if (input_len + STEP_HEADER_LEN + len > sizeof input) return;
  input[input_len] = what;
  input[input_len + 1] = flags;
  store_u16(input + input_len + 2, (uint16_t)len);
  memcpy(input + input_len + STEP_HEADER_LEN, data, len);
  input_len += STEP_HEADER_LEN + len;
}

static void control_put(void) {
  uint8_t m[400] = {0};
  uint16_t kind = (uint16_t)(1 + below(28));
  size_t len = PROTO_HEADER_LEN + 8;
  if (kind > 20) kind = (uint16_t)(kind - 21 + PROTO_CATALOG);
  store_u16(m, kind);
  store_u32(m + 4, (uint32_t)below(100));
  store_u64(m + 8, number(6));
  switch (kind) {
    case PROTO_NODE:
      store_u32(m + 16, (uint32_t)(1 + below(2)));
      store_u32(m + 20, (uint32_t)below(8));
      store_u64(m + 24, below(4) ? 4096 : number(5));
      store_u64(m + 32, number(200));
      len = 40;
      break;
    case PROTO_HANDLE: store_u64(m + 16, number(6)); len = 40; break;
    case PROTO_BLOCKS:
    case PROTO_CLEAR: store_u64(m + 16, number(200)); store_u64(m + 24, number(200)); len = 32; break;
    case PROTO_GRANT: store_u64(m + 16, number(100000)); len = 24; break;
    case PROTO_CAPS: store_u32(m + 16, (uint32_t)below(2)); len = 20; break;
    case PROTO_REPLY:
      store_u64(m + 8, below(20));
      store_u32(m + 16, below(2) ? 0 : (uint32_t)-5);
      len = load_u32(m + 16) ? 20 : 20 + below(40);
      break;
    case PROTO_BIRTH_DIR: store_u64(m + 8, below(2)); store_u32(m + 16, (uint32_t)number(3)); len = 20; break;
    case PROTO_BIRTH_LOG: store_u64(m + 8, below(2)); store_u64(m + 16, number(300)); len = 24; break;
    case PROTO_BIRTH_INOS:
      store_u64(m + 8, below(2));
      store_u64(m + 16, below(2) ? 1000 : number(6));
      store_u64(m + 24, number(9));
      len = 32;
      break;
    case PROTO_NEST: store_u32(m + 16, (uint32_t)number(5)); store_u32(m + 20, (uint32_t)below(2)); len = 28; break;
    case PROTO_NAMES: m[16] = (uint8_t)below(6); m[18] = 'a'; len = 16 + below(20); break;
    case PROTO_BYTES:
      store_u64(m + 16, number(3));
      store_u32(m + 24, (uint32_t)number(4));
      store_u32(m + 28, below(4) ? (uint32_t)below(9000) : (uint32_t)number(1 << 21));
      len = 32;
      break;
    case PROTO_CATALOG: m[28] = '/'; len = 28 + below(3); break;
    case PROTO_TREE: store_u32(m + 16, (uint32_t)number(256)); len = 20; break;
    case PROTO_APPEND:
      for (size_t at = 16; at < 96; at += 8) store_u64(m + at, below(3) ? 0 : number(300));
      store_u64(m + 16, 1);
      store_u64(m + 80, number(4000));
      store_u32(m + 96, (uint32_t)number(4000));
      store_u32(m + 100, (uint32_t)(1 + below(2)));
      store_u32(m + 104, (uint32_t)number(100));
      len = 108;
      break;
    case PROTO_APPEND_ROOM: store_u64(m + 16, number(8000)); len = 24; break;
    case PROTO_APPEND_HANDLE: store_u64(m + 16, number(6)); store_u32(m + 32, below(4) == 0); len = 36; break;
    case PROTO_APPEND_PARTIAL: store_u64(m + 16, number(6)); len = 24 + below(300); break;
    case PROTO_BIRTH_PAGE:
    case PROTO_DUMP:
    case PROTO_PROBE: len = 8; break;
    default: break;
  }
  bool takes_fd = kind == PROTO_NODE || kind == PROTO_APPEND || kind == PROTO_PROBE || (kind == PROTO_BYTES && below(8)) || (kind >= PROTO_BIRTH_PAGE && kind <= PROTO_BIRTH_LOG);
  step_put(STEP_CONTROL, takes_fd || below(20) == 0 ? WITH_FD : 0, m, len);
}

static void request_put(void) {
  static const uint32_t opcodes[] = {WIRE_OPEN, WIRE_READ, WIRE_WRITE, WIRE_RELEASE, WIRE_GETXATTR, WIRE_CREATE, WIRE_INTERRUPT,
                                     WIRE_FALLOCATE, WIRE_LSEEK, WIRE_COPY_FILE_RANGE, WIRE_COPY_FILE_RANGE_64, WIRE_TMPFILE,
                                     WIRE_INIT, WIRE_STATX, WIRE_READ, WIRE_WRITE, WIRE_LOOKUP, WIRE_GETATTR, WIRE_SETATTR,
                                     WIRE_READDIRPLUS, WIRE_LOOKUP, WIRE_READLINK, WIRE_LISTXATTR, WIRE_OPENDIR, WIRE_RELEASEDIR, WIRE_MKDIR, WIRE_RMDIR, WIRE_UNLINK, WIRE_RENAME, WIRE_RENAME2, WIRE_LINK,
                                     WIRE_SYMLINK, WIRE_SETXATTR, WIRE_REMOVEXATTR, WIRE_FSYNC, WIRE_OPEN};
  static const char *names[] = {"security.selinux", "security.capability", "system.posix_acl_access", "user.x", ""};
  uint8_t m[400] = {0};
  wire_in_header h = {.opcode = opcodes[below(sizeof opcodes / sizeof *opcodes)], .unique = below(20), .nodeid = number(6)};
  size_t at = sizeof h;
  uint8_t *body = m + at;
  for (size_t i = 0; i < 64; i += 8) store_u64(body + i, number(6));
  store_u64(body + 8, number(300000)); /* an offset, mostly */
  size_t len = 24 + 8 * below(6);
  switch (h.opcode) {
    case WIRE_WRITE: store_u32(body + 16, (uint32_t)number(200)); len = 40 + below(240); break;
    case WIRE_READ: store_u32(body + 16, (uint32_t)number(9000)); len = 40; break;
    case WIRE_FALLOCATE: store_u64(body + 16, number(9000)); store_u32(body + 24, (uint32_t)number(4)); len = 32; break;
    case WIRE_LSEEK: store_u32(body + 16, (uint32_t)(3 + below(2))); len = 24; break;
    case WIRE_COPY_FILE_RANGE:
    case WIRE_COPY_FILE_RANGE_64: store_u64(body + 40, number(9000)); store_u64(body + 48, 0); len = 56; break;
    case WIRE_GETXATTR: strcpy((char *)body + 8, names[below(5)]); len = 8 + strlen((char *)body + 8) + (below(9) > 0); break;
    case WIRE_INIT: len = below(3) ? 64 : 16; break;
    case WIRE_CREATE: store_u32(body + 4, 0100644); body[16] = (uint8_t)('a' + below(3)), body[17] = 0, len = 16 + below(4); break;
    case WIRE_LOOKUP: body[0] = (uint8_t)('a' + below(3)), body[1] = 0, len = below(4); break;
    case WIRE_READDIRPLUS:
      store_u64(body, UINT64_C(1) << 60 | (1 + below(3)) << 16 | below(2));
      store_u64(body + 8, below(5));
      store_u32(body + 16, (uint32_t)number(2000));
      len = 40;
      break;
    case WIRE_OPEN: store_u32(body, (uint32_t)number(4)), len = 8; break;
    case WIRE_FSYNC:
    case WIRE_RELEASE: store_u64(body, below(3) ? load_u64(body) : UINT64_C(1) << (61 + below(2)) | (1 + below(4))), len = 24; break;
    default: break;
  }
  h.len = (uint32_t)(at + len);
  memcpy(m, &h, sizeof h);
  step_put(STEP_REQUEST, (uint8_t)below(2), m, at + len);
}

static void reply_put(void) {
  uint8_t m[200] = {0};
  wire_out_header h = {.unique = below(20), .error = below(5) ? 0 : -2};
  if (!below(4)) h.error = below(4) ? -PROTO_HELD - (int32_t)number(4) : -PROTO_SERVE;
  size_t body = below(2) ? 16 : below(2) ? WIRE_ENTRY_OUT_LEN + 16 : 64;
  for (size_t i = 0; i < body; i += 8) store_u64(m + sizeof h + i, number(6));
  h.len = (uint32_t)(sizeof h + (h.error ? 0 : body));
  memcpy(m, &h, sizeof h);
  step_put(STEP_REPLY, (uint8_t)below(4), m, h.len);
}

/* READs, their long answers and the replies that tell their slots; now and then one of them is missing. */
static void long_answers_put(void) {
  uint64_t n = 1 + below(4), fh = number(6);
  uint8_t m[80] = {0};
  for (uint64_t i = 0; i < n; i++) {
    wire_in_header h = {.len = sizeof h + sizeof(wire_read_in), .opcode = WIRE_READ, .unique = 20 + i, .nodeid = 99};
    wire_read_in in = {.fh = fh, .offset = 4096 * i, .size = (uint32_t)number(9000)};
    memcpy(m, &h, sizeof h);
    memcpy(m + sizeof h, &in, sizeof in);
    if (below(8)) step_put(STEP_REQUEST, 0, m, h.len);
    store_u64(m, PROTO_BYTES);
    store_u64(m + 8, fh);
    store_u64(m + 16, 4096 * i);
    store_u32(m + 24, (uint32_t)i);
    store_u32(m + 28, below(8) ? (uint32_t)below(9000) : (uint32_t)number(1 << 21));
    if (below(8)) step_put(STEP_CONTROL, WITH_FD, m, 32);
  }
  for (uint64_t i = 0; i < n; i++) {
    wire_out_header h = {.len = sizeof h, .unique = 20 + i, .error = -PROTO_HELD - (int32_t)i};
    memcpy(m, &h, sizeof h);
    if (below(8)) step_put(STEP_REPLY, 0, m, sizeof h);
  }
}

static size_t put_key(uint8_t *at, char tag, uint64_t ino, const char *name) {
  memset(at, 0, 13);
  at[4] = (uint8_t)tag;
  for (int i = 0; i < 8; i++) at[5 + i] = (uint8_t)(ino >> (56 - 8 * i));
  memcpy(at + 13, name, strlen(name));
  return 13 + strlen(name);
}

/* A directory with a few names in it, as the catalog has it, and the word that it is answered for here. */
static void tree_put(void) {
  static const char *const names[] = {"a", "b", "c", "user.x", ""};
  uint8_t m[200];
  for (size_t n = 1 + below(8); n; n--) {
    uint64_t ino = 1 + below(5);
    size_t what = below(6), len = 2;
    const char *name = names[below(5)];
    m[0] = what == 5;
    if (what == 5) memcpy(m + 2, "\0\0\0\0nintents", 12), m[1] = 12;
    else m[1] = (uint8_t)put_key(m + 2, "ieyxi"[what], ino, what == 1 || what == 3 ? name : "");
    len += m[1];
    if (what == 0 || what == 4) {
      static const uint32_t modes[] = {0040755, 0100644, 0120777};
      uint32_t mode = modes[below(3)];
      const uint8_t row[] = {0x9F, (uint8_t)ino, 0xCD, (uint8_t)(mode >> 8), (uint8_t)mode, 1, 2, 0xCC, (uint8_t)below(256), (uint8_t)below(3),
                             0xD3, (uint8_t)below(256), 0, 0, 0, 0, 0, 0, 9, 3, 0xFF, 0, (uint8_t)below(3), 1, 0xC4, 2, 'x', 'y', 0xC4, 1, 'z', 0};
      memcpy(m + len, row, sizeof row);
      len += sizeof row;
    } else if (what == 1) {
      const uint8_t row[] = {0x92, (uint8_t)(1 + below(5)), 0xCD, 0x81, 0xA4};
      memcpy(m + len, row, sizeof row);
      len += sizeof row;
    } else if (what == 3) {
      memcpy(m + len, "\xC4\x03" "abc", 5);
      len += 5;
    } else {
      m[len++] = (uint8_t)below(128);
    }
    step_put(STEP_ROW, 0, m, len);
  }
  memset(m, 0, sizeof m);
  store_u16(m, PROTO_CATALOG);
  m[28] = '/';
  step_put(STEP_CONTROL, 0, m, 29);
  store_u16(m, PROTO_TREE);
  store_u32(m + 16, (uint32_t)(below(4) ? 255 : below(256)));
  step_put(STEP_CONTROL, 0, m, 20);
}

static void tell(uint16_t kind, uint8_t flags, uint64_t first, uint64_t second, uint64_t third, size_t len) {
  uint8_t m[40] = {0};
  store_u16(m, kind);
  store_u64(m + 8, first);
  store_u64(m + 16, second);
  store_u64(m + 24, third);
  step_put(STEP_CONTROL, flags, m, len);
}

static const char *const TEXTS[] = {"a", "b", "c", "user.x", "user.y", "..", ""};

/* A tenant with a page, a log and numbers, in the order the daemon says so: changes of its names are made here. */
static void stream_put(void) {
  static const uint8_t folded[] = "\1\14\0\0\0\0nintents"; /* and how far */
  tell(PROTO_BIRTH_PAGE, WITH_FD, 0, 0, 0, 8);
  tell(PROTO_BIRTH_DIR, WITH_FD, 0, below(3), 0, 20);
  tell(PROTO_BIRTH_LOG, WITH_FD, 0, 0, 0, 24);
  tell(PROTO_BIRTH_INOS, 0, 0, 1000, number(9), 32);
  step_put(STEP_ROW, 0, folded, sizeof folded);
  for (uint8_t ino = 1; ino <= 5; ino++) { /* 1 and 2 are directories; the others have names in them, some two */
    uint8_t m[100] = {0};
    const uint8_t row[] = {0x9C, ino, 0xCD, ino < 3 ? 0x41 : 0x81, 0xED, 1, 2, 7, (uint8_t)(1 + below(3)), 9, 9, 9, 0, 1, 1};
    const uint8_t name[] = {0x92, ino, 0xCD, ino < 3 ? 0x40 : 0x80, 0};
    m[1] = (uint8_t)put_key(m + 2, 'i', ino, "");
    memcpy(m + 2 + m[1], row, sizeof row);
    step_put(STEP_ROW, 0, m, 2 + m[1] + sizeof row);
    if (ino > 2) { /* files that are here whole, if their backing files were */
      const uint8_t object[] = {0x98, ino, 1, (uint8_t)below(3), 7, 64, 0x91, ino, 0xC4, 1, 'h', 0x93, 5, 7, 9}, mask[] = {0x92, (uint8_t)below(3), 0};
      m[1] = (uint8_t)(put_key(m + 2, 'o', ino, "") + 8);
      memset(m + 2 + 13, 0, 7), m[2 + 20] = 1;
      memcpy(m + 2 + m[1], object, sizeof object);
      step_put(STEP_ROW, 0, m, 2 + m[1] + sizeof object);
      m[0] = 2, m[1] = (uint8_t)put_key(m + 2, 'r', ino, "");
      memcpy(m + 2 + m[1], mask, sizeof mask);
      step_put(STEP_ROW, 0, m, 2 + m[1] + sizeof mask);
      m[0] = 0;
    }
    if (ino == 1) continue;
    m[1] = (uint8_t)put_key(m + 2, 'e', 1 + below(2), TEXTS[below(3)]);
    memcpy(m + 2 + m[1], name, sizeof name);
    step_put(STEP_ROW, 0, m, 2 + m[1] + sizeof name);
  }
}

/* Texts with a zero behind each; the length of all. */
static size_t texts_put(uint8_t *at, size_t n) {
  size_t len = 0;
  for (; n; n--) {
    const char *text = TEXTS[below(sizeof TEXTS / sizeof *TEXTS)];
    memcpy(at + len, text, strlen(text) + 1);
    len += strlen(text) + 1;
  }
  return len;
}

/* A request that changes names, with names in it. */
static void change_put(void) {
  static const struct {
    uint32_t opcode;
    size_t fixed, texts;
  } kinds[] = {{WIRE_UNLINK, 0, 1}, {WIRE_RMDIR, 0, 1}, {WIRE_RENAME, 8, 2}, {WIRE_RENAME2, 16, 2}, {WIRE_LINK, 8, 1}, {WIRE_MKDIR, 8, 1},
               {WIRE_SYMLINK, 0, 2}, {WIRE_SETXATTR, 8, 2}, {WIRE_REMOVEXATTR, 0, 1}, {WIRE_SETATTR, 88, 0}};
  size_t kind = below(sizeof kinds / sizeof *kinds);
  uint8_t m[400] = {0}, *body = m + sizeof(wire_in_header);
  wire_in_header h = {.opcode = kinds[kind].opcode, .unique = below(20), .nodeid = below(8) ? 1 + below(5) : 1000 + below(4)};
  size_t len = kinds[kind].fixed + texts_put(body + kinds[kind].fixed, kinds[kind].texts);
  if (kinds[kind].fixed) store_u64(body, below(8) ? 1 + below(5) : number(1003)); /* a directory, an inode, or what is set */
  if (h.opcode == WIRE_RENAME2) store_u32(body + 8, (uint32_t)below(4));
  if (h.opcode == WIRE_MKDIR) store_u32(body, 0755);
  if (h.opcode == WIRE_SETATTR)
    for (size_t at = 0; at < 88; at += 4) store_u32(body + at, (uint32_t)number(4096));
  if (h.opcode == WIRE_SETXATTR) { /* the value is as long as is said, mostly */
    size_t name_len = strlen((char *)body + 8) + 1;
    store_u32(body, (uint32_t)(len - 8 - name_len));
    store_u32(body + 4, (uint32_t)below(4));
  }
  h.len = (uint32_t)(sizeof h + len);
  memcpy(m, &h, sizeof h);
  step_put(STEP_REQUEST, (uint8_t)below(2), m, h.len);
}

/* A record of any kind, as the daemon appends it. */
static void intent_put(void) {
  uint8_t m[200] = {0};
  size_t name_len = texts_put(m + 72, 1 + below(2)) - below(2), len = (72 + name_len + 7) & ~(size_t)7;
  store_u32(m, (uint32_t)(below(20) ? len : number(300)));
  store_u16(m + 8, (uint16_t)below(16));
  store_u16(m + 10, (uint16_t)(below(20) ? name_len : number(300)));
  store_u32(m + 12, below(2) ? 0040755 : 0100644);
  store_u64(m + 16, 1 + below(5));
  store_u64(m + 24, 1 + below(5));
  store_u32(m + 32, (uint32_t)number(4));
  store_u32(m + 36, (uint32_t)number(4));
  store_u64(m + 40, number(1000));
  store_u64(m + 48, number(6));
  store_u32(m + 56, (uint32_t)number(32));
  store_u64(m + 64, 1 + below(5));
  step_put(STEP_INTENT, 0, m, len);
}

/* A segment, handles, and what they write: lines and the beginnings of some. */
static void append_put(void) {
  uint64_t nodeid = 1 + below(3);
  uint8_t m[400] = {0};
  store_u16(m, PROTO_APPEND);
  store_u64(m + 8, nodeid);
  store_u64(m + 16, 1);
  store_u64(m + 80, below(4) ? 1 << 16 : number(2 << 20));
  store_u32(m + 96, below(4) ? 1 << 16 : (uint32_t)number(2 << 20));
  store_u32(m + 100, (uint32_t)(1 + !below(4)));
  store_u32(m + 104, (uint32_t)(below(4) ? 1000 : 1 + below(50)));
  for (uint64_t fh = 1; fh <= 3; fh++) tell(PROTO_APPEND_HANDLE, 0, nodeid, fh, fh, 36);
  step_put(STEP_CONTROL, WITH_FD, m, 108);
  for (size_t n = below(24); n; n--) {
    memset(m, 0, sizeof m);
    wire_in_header h = {.opcode = below(20) ? WIRE_WRITE : WIRE_RELEASE, .unique = below(20), .nodeid = nodeid};
    wire_write_in in = {.fh = 1 + below(3), .offset = number(9), .size = (uint32_t)(1 + below(300))};
    h.len = (uint32_t)(sizeof h + sizeof in + in.size);
    memcpy(m, &h, sizeof h);
    memcpy(m + sizeof h, &in, sizeof in);
    for (size_t i = 0, every = 1 + below(200); i < in.size; i++) m[sizeof h + sizeof in + i] = below(every) ? 'x' : '\n';
    step_put(STEP_REQUEST, 0, m, h.len);
    if (!below(8)) tell((uint16_t)(PROTO_APPEND_TAKE + below(2)), 0, nodeid, 0, 0, 16);
    if (!below(16)) tell(PROTO_APPEND_ROOM, 0, nodeid, number(1 << 17), 0, 24);
    if (!below(16)) tell(PROTO_APPEND_PARTIAL, 0, nodeid, 1 + below(3), 0, 24 + below(8));
  }
}

static void make(void) {
  input_len = 0;
  bool changes = below(2);
  if (changes) stream_put();
  if (changes || below(2)) tree_put();
  for (size_t n = changes ? below(12) : 0; n; n--) below(3) ? change_put() : intent_put();
  for (size_t steps = 1 + below(STEPS_MAX); steps; steps--) {
    size_t what = below(12);
    if (what < 4) control_put();
    else if (what < 8) request_put();
    else if (what < 10) reply_put();
    else if (what < 11) append_put();
    else long_answers_put();
  }
  for (size_t flips = below(3) ? 0 : 1 + below(6); flips && input_len; flips--) {
    size_t at = below(input_len);
    switch (below(4)) {
      case 0: input[at] ^= (uint8_t)(1u << below(8)); break;
      case 1: input[at] = (uint8_t)random_u64(); break;
      case 2: input_len = at; break;
      default: memmove(input + at / 2, input + at, input_len - at); break;
    }
  }
}

static int one_file(const char *path) {
  FILE *f = fopen(path, "rb");
  if (!f) return 2;
  input_len = fread(input, 1, sizeof input, f);
  fclose(f);
  return LLVMFuzzerTestOneInput(input, input_len);
}

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  if (!strcmp(argv[1], "told")) {
    tell_rows();
    return 0;
  }
  if (!strcmp(argv[1], "selfcheck")) {
    selfcheck();
    return 0;
  }
  char *end;
  long seconds = strtol(argv[1], &end, 10);
  if (*end) return one_file(argv[1]);
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : (uint64_t)time(NULL);
  rng = seed * 2 + 1;
  printf("seed %llu\n", (unsigned long long)seed);
  fflush(stdout);
  unsigned long long runs = 0;
  for (time_t stop = time(NULL) + seconds; time(NULL) < stop;) {
    for (int i = 0; i < 64; i++, runs++) {
      make();
      if (getenv("FUZZ_KEEP")) {
        FILE *f = fopen("crash-input", "wb");
        if (f) fwrite(input, 1, input_len, f), fclose(f);
      }
      LLVMFuzzerTestOneInput(input, input_len);
    }
  }
  printf("%llu executions\n", runs);
  return 0;
}
