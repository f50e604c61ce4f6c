/* Known answers: bitmaps and tables against slow and obvious ones, the order of clears, what a full table does. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../births.h"
#include "../channel.h"
#include "../index.h"
#include "../keeper.h"
#include "../nests.h"
#include "harness.h"
#include "segments.h"

#define BITS 700

static uint64_t state = 88172645463325252u;

static uint64_t next(void) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static void check_bitmap(void) {
  bitmap b = {0};
  bool slow[BITS + 64] = {0};
  CHECK(!bitmap_all(&b, 0, 1) && bitmap_all(&b, 0, 0));
  CHECK(bitmap_grow(&b, BITS) && b.bits >= BITS);
  for (int round = 0; round < 20000; round++) {
    uint64_t first = next() % BITS, count = next() % (BITS - first + 1), at, n;
    switch (next() % 4) {
      case 0:
        bitmap_set(&b, first, count);
        for (uint64_t i = 0; i < count; i++) slow[first + i] = true;
        break;
      case 1:
        bitmap_clear(&b, first, count);
        for (uint64_t i = 0; i < count; i++) slow[first + i] = false;
        break;
      case 2: {
        bool all = true;
        for (uint64_t i = 0; i < count; i++) all &= slow[first + i];
        CHECK(bitmap_all(&b, first, count) == all);
        break;
      }
      default: {
        uint64_t i = first, end;
        while (i < BITS && !slow[i]) i++;
        for (end = i; end < BITS && slow[end];) end++;
        CHECK(bitmap_next(&b, first, &at, &n) == (i < BITS));
        CHECK(i == BITS || (at == i && n == end - i));
      }
    }
  }
  bitmap_set(&b, b.bits - 1, UINT64_MAX - b.bits); /* clipped */
  CHECK(bitmap_all(&b, b.bits - 1, 1) && !bitmap_all(&b, b.bits - 1, 2) && !bitmap_all(&b, UINT64_MAX, 1));
  uint64_t before = bitmap_bytes_used();
  CHECK(!bitmap_grow(&b, BITMAP_BYTES_MAX * 8 + 1) && !bitmap_grow(&b, UINT64_MAX));
  CHECK(bitmap_bytes_used() == before && before == b.bits / 8);
  bitmap_free(&b);
  CHECK(bitmap_bytes_used() == 0);
}

static void check_index(void) {
  enum { KEYS = 60, ROOM = 128 };
  static index_entry entries[ROOM];
  index_table t = {entries, ROOM - 1};
  uint32_t slow[KEYS];
  memset(slow, 0xFF, sizeof slow);
  for (int round = 0; round < 100000; round++) {
    uint64_t key = next() % KEYS;
    if (next() % 2) {
      index_put(&t, key, key * 7, (uint32_t)round);
      slow[key] = (uint32_t)round;
    } else {
      index_remove(&t, key, key * 7);
      slow[key] = INDEX_NONE;
    }
    for (uint64_t i = 0; i < KEYS; i++) CHECK(index_get(&t, i, i * 7) == slow[i]);
  }
}

static control_message node_message(uint64_t id, uint32_t flags) {
  return (control_message){.kind = PROTO_NODE, .nodeid = id, .node = {NODE_RANGED, flags, 4096, 8}};
}

static void check_clears(void) {
  aftermath after;
  bool again;
  tables_open(4, 4, 4);
  control_message m = node_message(1, 0);
  node *n = node_put(&m, 5, &after);
  node_blocks(n, 0, 8);
  CHECK(node_present(n, 0, 8 * 4096) && !node_present(n, 1, 8 * 4096) && !node_present(n, UINT64_MAX, 1));
  CHECK(node_clear(n, 7, 1, 1, &again) && !node_present(n, 7 * 4096, 1));
  unsigned a = node_enter(n);
  CHECK(!node_clear(n, 6, 1, 2, &again) && !again); /* waits for a */
  unsigned b = node_enter(n);
  CHECK(!node_clear(n, 5, 1, 3, &again)); /* waits for a and b */
  unsigned c = node_enter(n);
  after = node_leave(n, c);
  CHECK(!after.cleared);
  after = node_leave(n, b);
  CHECK(!after.cleared);
  after = node_leave(n, a);
  CHECK(after.cleared && after.cleared->next && !after.cleared->next->next); /* both */
  clears_release(after.cleared);
  a = node_enter(n);
  CHECK(!node_clear(n, 0, 1, 4, &again));
  after = node_drop(1);
  CHECK(after.fd == -1 && !node_find(1)); /* still in use */
  after = node_leave(n, a);
  CHECK(after.fd == 5 && after.cleared && after.cleared->seq == 4);
  clears_release(after.cleared);
  m = node_message(2, 0);
  n = node_put(&m, 6, &after);
  a = node_enter(n);
  int noted = 0;
  while (!node_clear(n, 0, 1, 9, &again) && !again) noted++;
  CHECK(again && noted == CLEARS_MAX);
  after = node_leave(n, a);
  clears_release(after.cleared);
  after = node_drop(2);
  CHECK(after.fd == 6);
  tables_reset();
}

static void check_budget(void) {
  aftermath after;
  tables_open(4, 4, 4);
  control_message m = node_message(1, NODE_ALL_PRESENT);
  node *n = node_put(&m, 5, &after);
  uint64_t first, count;
  CHECK(!node_write_begin(n, 0, 1));
  n->budget_bytes = 10000;
  CHECK(node_write_begin(n, 5000, 8000) && n->budget_bytes == 2000);
  node_write_end(n, 5000, 8000, 100);
  CHECK(n->budget_bytes == 9900 && n->written_bytes == 100);
  CHECK(bitmap_next(&n->dirty, 0, &first, &count) && first == 1 && count == 1);
  CHECK(!node_write_begin(n, INT64_MAX, 2) && !node_write_begin(n, (uint64_t)INT64_MAX - 4096, 4096)); /* no such mask */
  CHECK(n->budget_bytes == 9900);
  node_drop(1);
  tables_reset();
}

static void check_full(void) {
  aftermath after;
  uint8_t cookie[PROTO_COOKIE_LEN] = {1};
  pending asked;
  tables_open(2, 2, 2);
  for (uint64_t i = 1; i <= 3; i++) {
    control_message m = node_message(i, 0);
    CHECK((node_put(&m, 10 + (int)i, &after) != NULL) == (i < 3));
    CHECK(handle_put(i, 7, cookie) == (i < 3));
    CHECK(pending_put(i * 2, i, WIRE_OPEN, false) == (i < 3));
  }
  control_message m = node_message(1, 0);
  CHECK(node_put(&m, 20, &after) && after.fd == 11); /* another file for one that is there */
  unsigned phase = node_enter(node_find(1));
  node *busy = node_find(1);
  CHECK(!node_put(&m, 21, &after) && !node_find(1)); /* in use: its slot is not free yet */
  after = node_leave(busy, phase);
  CHECK(after.fd == 20 && node_put(&m, 21, &after));
  CHECK(pending_put(2 | WIRE_UNIQUE_RESEND, 1, WIRE_OPEN, false)); /* the same request again */
  CHECK(pending_find(2, true, &asked) && asked.unique == (2 | WIRE_UNIQUE_RESEND) && !pending_find(2, false, &asked));
  handle_opened(handle_find(1, 7));
  handle_opened(handle_find(1, 7));
  handle_released(1, 7);
  CHECK(handle_find(1, 7));
  handle_released(1, 7);
  CHECK(!handle_find(1, 7) && handle_put(9, 9, cookie));
  uint32_t slot = 0;
  int handles = 0;
  while (handle_next(&slot)) handles++;
  CHECK(handles == 2);
  CHECK(!tables_room_for_open());
  node_drop(1), node_drop(2);
  tables_reset();
  for (uint64_t i = 0; i <= CAPS_MAX; i++) {
    CHECK(!caps_has(UINT64_MAX));
    caps_set(i, true);
    caps_set(i, true);
  }
  CHECK(caps_has(UINT64_MAX)); /* overflowed: everything is asked */
  tables_reset();
  CHECK(!caps_has(1));
}

static void check_init(void) {
  uint8_t reply[sizeof(wire_out_header) + sizeof(wire_init_out)] = {0};
  wire_init_out out = {.major = 7, .minor = 38, .flags = WIRE_WRITEBACK_CACHE | WIRE_POSIX_ACL | WIRE_SPLICE_READ};
  init_offer offer = {.kernel_minor = 45, .kernel_flags = UINT32_MAX, .kernel_flags2 = UINT32_MAX, .kernel_readahead = 131072};
  memcpy(reply + sizeof(wire_out_header), &out, sizeof out);
  CHECK(init_patch(reply, sizeof reply, &offer, true, false, REQUEST_DATA_MAX, &out));
  CHECK(out.minor == 45 && out.max_write == 1 << 20 && out.max_stack_depth == 1 && (out.flags2 & WIRE2_PASSTHROUGH));
  CHECK((out.flags & WIRE_HANDLE_KILLPRIV_V2) && !(out.flags & (WIRE_WRITEBACK_CACHE | WIRE_POSIX_ACL | WIRE_SPLICE_READ)));
  offer.kernel_flags2 = 0;
  CHECK(init_patch(reply, sizeof reply, &offer, true, false, 150000, &out) && !(out.flags2 & WIRE2_PASSTHROUGH));
  CHECK(out.max_write == 147456 && out.max_pages == 36 && out.max_stack_depth == 0);
  offer.kernel_flags = WIRE_ASYNC_READ;
  CHECK(init_patch(reply, sizeof reply, &offer, true, false, 1, &out) && out.flags == WIRE_ASYNC_READ && out.max_pages == 1);
  CHECK(!init_patch(reply, sizeof reply - 1, &offer, true, false, 1, &out));
}

/* An OPEN reply of a node the kernel refuses: served as ranged from then on. */
static void check_refused(void) {
  uint8_t cookie[PROTO_COOKIE_LEN] = {0}, reply[32] = {0};
  uint64_t nodeid, fh;
  tables_open(4, 4, 4);
  control_message m = {.kind = PROTO_NODE, .nodeid = 3, .node = {NODE_PASSTHROUGH, 0, 0, 0}};
  control_apply(&m, backing_new());
  handle_put(3, 8, cookie);
  pending asked = {.nodeid = 3, .opcode = WIRE_OPEN};
  wire_out_header header = {.len = 32, .unique = 4};
  wire_open_out out = {.fh = 8, .open_flags = 2};
  memcpy(reply, &header, sizeof header);
  memcpy(reply + sizeof header, &out, sizeof out);
  seen.backing_error = EPERM;
  CHECK(open_patch(reply, sizeof reply, &asked, &nodeid, &fh) && nodeid == 3 && fh == 8);
  CHECK(seen.last_event == EV_REFUSED && node_find(3)->mode == NODE_RANGED && node_present(node_find(3), 1 << 30, 1));
  memcpy(&out, reply + sizeof header, sizeof out);
  CHECK(out.open_flags == (2 | WIRE_FOPEN_NOFLUSH) && out.backing_id == 0);
  aftermath after = node_drop(3);
  close(after.fd);
  m.nodeid = 4;
  control_apply(&m, backing_new());
  handle_put(4, 8, cookie);
  asked.nodeid = 4;
  seen.backing_error = 0;
  CHECK(open_patch(reply, sizeof reply, &asked, &nodeid, &fh));
  memcpy(&out, reply + sizeof header, sizeof out);
  CHECK(out.open_flags == (WIRE_FOPEN_NOFLUSH | WIRE_FOPEN_PASSTHROUGH) && out.backing_id > 0);
  after = node_drop(4);
  CHECK(after.backing_id == out.backing_id);
  finish(after);
  tables_reset();
}

static void ask(uint64_t unique, uint64_t fh, uint64_t offset, uint32_t size) {
  wire_read_in in = {.fh = fh, .offset = offset, .size = size};
  CHECK(pending_put(unique, 3, WIRE_READ, false));
  pending_read(unique, &in);
}

/* What a reply with the slot's error becomes: the length of the answer, or -errno. */
static ssize_t told(uint64_t unique, uint32_t slot) {
  static uint8_t data[REQUEST_DATA_MAX];
  wire_out_header header = {.len = sizeof header, .error = -PROTO_HELD - (int32_t)slot, .unique = unique};
  seen.replies = 0;
  reply_handle((uint8_t *)&header, sizeof header, data);
  CHECK(seen.replies == 1);
  return seen.last_error ? -seen.last_error : (ssize_t)seen.last_reply_len;
}

static int open_count(void) {
  int n = 0;
  for (int fd = 0; fd < 200; fd++) n += fcntl(fd, F_GETFD) >= 0;
  return n;
}

/* Long answers find their reads, in order, and no other read; what is lost on the way is closed. */
static void check_answers(void) {
  tables_open(4, 4, 60);
  close(backing_new());
  int before = open_count();
  control_message m = {.kind = PROTO_BYTES, .nodeid = 7, .bytes = {.offset = 4096, .slot = 5, .len = 200}};
  ask(2, 7, 4096, 200), control_apply(&m, backing_new());
  CHECK(told(2, 5) == 200);
  ask(2, 7, 4096, 100), control_apply(&m, backing_new());
  CHECK(told(2, 5) == 100); /* never more than was asked for */
  ask(2, 7, 4096, 200);
  CHECK(told(2, 5) == -EIO && open_count() == before); /* used up */
  CHECK(told(2, 5) == -EIO); /* and no READ waits for it */

  ask(2, 7, 0, 200), ask(4, 8, 4096, 200), control_apply(&m, backing_new());
  CHECK(told(2, 5) == -EIO && told(4, 5) == -EIO); /* another offset, another handle */
  ask(2, 7, 4096, 200);
  CHECK(told(2, 6) == -EIO); /* another slot */
  pending_put(6, 3, WIRE_OPEN, false);
  CHECK(told(6, 5) == -EIO); /* not a READ */
  ask(2, 7, 4096, 200);
  CHECK(told(2, 5) == 200);

  m.bytes.len = 64 * 1024 + 1, ask(2, 7, 4096, 1 << 20), control_apply(&m, backing_new());
  CHECK(told(2, 5) == -EIO); /* the file is shorter than it was said to be */
  m.bytes.len = REQUEST_DATA_MAX + 1, control_apply(&m, backing_new());
  m.bytes.len = 200, m.bytes.slot = PROTO_SLOTS, control_apply(&m, backing_new());
  m.bytes.slot = 5, control_apply(&m, -1);
  CHECK(open_count() == before);

  for (uint32_t i = 0; i < 20; i++) m.bytes.slot = i, ask(2 + 2 * i, 7, 4096, 200), control_apply(&m, backing_new());
  CHECK(open_count() == before + 8); /* ANSWERS_MAX */
  CHECK(told(2 + 2 * 9, 9) == -EIO); /* found no room, and the others keep theirs */
  CHECK(told(2 + 2 * 3, 3) == 200 && open_count() == before + 4); /* those before it lost their replies */
  CHECK(told(2 + 2 * 2, 2) == -EIO && told(2 + 2 * 7, 7) == 200 && open_count() == before);
  answers_reset();
  tables_reset();
}

/* -- births, in a folder ----------------------------------------------------------------------------------------- */
#define TENANT UINT64_C(1)
#define INO(n) (TENANT << 40 | (n))
#define NEST INO(1)

static char folder[] = "/tmp/aof2-cradles-XXXXXX";

static struct stat file_of(unsigned n) {
  char path[80];
  struct stat st = {0};
  snprintf(path, sizeof path, "%s/%llu.1", folder, (unsigned long long)INO(n));
  stat(path, &st); /* zeros where there is none */
  return st;
}

static unsigned files_from(unsigned first, unsigned end) {
  unsigned n = 0;
  for (; first < end; first++) n += file_of(first).st_nlink > 0;
  return n;
}

static bool born(const char *name) {
  uint8_t m[128] = {0}, room[1];
  wire_create_in in = {.flags = O_WRONLY | O_CREAT | O_EXCL, .mode = S_IFREG | 0644};
  wire_in_header h = {.opcode = WIRE_CREATE, .unique = 2, .nodeid = NEST};
  request r;
  h.len = (uint32_t)(sizeof h + sizeof in + strlen(name) + 1);
  memcpy(m, &h, sizeof h), memcpy(m + sizeof h, &in, sizeof in), strcpy((char *)m + sizeof h + sizeof in, name);
  return request_parse(m, h.len, &r) && serve(&r, room);
}

static void close_born(unsigned ino, unsigned fh) {
  uint8_t m[sizeof(wire_in_header) + sizeof(wire_release_in)], room[1];
  wire_release_in in = {.fh = BIRTH_FH | fh};
  wire_in_header h = {.len = sizeof m, .opcode = WIRE_RELEASE, .unique = 4, .nodeid = INO(ino)};
  request r;
  memcpy(m, &h, sizeof h), memcpy(m + sizeof h, &in, sizeof in);
  CHECK(request_parse(m, sizeof m, &r) && serve(&r, room));
}

/* Files made ahead are born in their order with the times of their births; what is left goes. */
static void check_cradles(void) {
  char path[80];
  int page = memfd_create("page", MFD_CLOEXEC), before = open_count();
  tables_open(0, 0, 0);
  seen = (outside){0};
  CHECK(mkdtemp(folder) && !ftruncate(page, sizeof(intent_page)));
  births_page(page);
  births_dir(TENANT, 0, open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  births_log(TENANT, memfd_create("log", MFD_CLOEXEC));
  births_inos(TENANT, INO(100), 1000, true);
  CHECK(!nests_change(NEST, NEST_OPEN, false, 0, 1) && !nests_change(NEST, NEST_SERVE, false, 0, 2));
  CHECK(!keeper_round() && !files_from(100, 1100)); /* nothing is made where nothing was born */

  CHECK(born("a") && file_of(100).st_nlink && keeper_round());
  CHECK(files_from(101, 1100) == 16 && files_from(101, 117) == 16 && seen.backings_open == 17);
  snprintf(path, sizeof path, "%s/%llu.1", folder, (unsigned long long)INO(101));
  CHECK(!utimensat(AT_FDCWD, path, (struct timespec[2]){{1, 0}, {1, 0}}, 0));
  CHECK(born("b") && !born("b") && file_of(101).st_mtime > 1 && seen.backings_open == 17);
  for (char name[] = "c"; *name < 's'; ++*name) CHECK(born(name));
  CHECK(files_from(100, 1100) == 18 && seen.backings_open == 18); /* they were used up, and one more made */
  CHECK(keeper_round() && files_from(100, 1100) == 18 + 32 && !keeper_round());

  close_born(100, 1), close_born(101, 2);
  CHECK(seen.backings_open == 18 + 32);
  keeper_settle();
  CHECK(seen.backings_open == 16 + 32 && files_from(100, 102) == 2);
  seen.backing_error = EPERM;
  for (char name[] = "A"; *name <= 'P'; ++*name) CHECK(born(name));
  CHECK(!keeper_round() && born("Q")); /* cannot be made now: those there are do */
  births_inos(TENANT, INO(0), 0, false);
  CHECK(!born("R") && births_begin_change(NEST));
  births_end_change(false);
  births_inos(TENANT, INO(0), 0, true);
  CHECK(!born("R") && !births_begin_change(NEST));
  births_over();
  CHECK(files_from(100, 1100) == 18 + 17 && seen.backings_open == 16 + 17);

  for (unsigned n = 102; n < 100 + 18 + 17; n++) close_born(n, n - 99);
  keeper_settle();
  births_reset();
  CHECK(seen.backings_open == 0 && open_count() == before - 1);
  for (unsigned n = 100; n < 100 + 18 + 17; n++) {
    snprintf(path, sizeof path, "%s/%llu.1", folder, (unsigned long long)INO(n));
    CHECK(!unlink(path));
  }
  CHECK(!rmdir(folder));
  tables_reset();
}

void selfcheck(void) {
  check_cradles();
  check_append();
  check_bitmap();
  check_index();
  check_clears();
  check_budget();
  check_full();
  check_init();
  check_refused();
  check_answers();
}
