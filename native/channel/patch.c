/* Rewriting libfuse's answers: INIT gets what libfuse cannot ask for, OPEN and CREATE become passthrough.
 *
 * Invariants: only bytes of the reply itself are touched, after its length was checked; its length never changes. A flag is
 * set only where the kernel offered it. One backing id per node, asked for once and kept until the node is dropped.
 * Owner: the reply thread (open_patch takes the tables' lock); upcalls' replies come through the control lock.
 */
#include <errno.h>
#include <unistd.h>

#include "../bytes.h"
#include "append.h"
#include "channel.h"

/* The kernel drops an inode's pages when it is told of another size or time (AUTO_INVAL, which libfuse sets as well). That
 * is more than is needed and never wrong: a clean file's do not change by themselves. It is not what keeps pages right: a
 * writer can put both back. Whether an open keeps them is the daemon's to say (engine/files/kept.py). */
#define FLAGS_ON                                                                                                      \
  (WIRE_ASYNC_READ | WIRE_ATOMIC_O_TRUNC | WIRE_EXPORT_SUPPORT | WIRE_BIG_WRITES | WIRE_AUTO_INVAL_DATA |             \
   WIRE_DO_READDIRPLUS | WIRE_PARALLEL_DIROPS | WIRE_MAX_PAGES | WIRE_CACHE_SYMLINKS | WIRE_HANDLE_KILLPRIV_V2 |      \
   WIRE_INIT_EXT)
/* Writeback caching excludes passthrough; locks are the kernel's own; nothing is spliced through a socket. */
#define FLAGS_OFF                                                                                                     \
  (WIRE_WRITEBACK_CACHE | WIRE_POSIX_ACL | WIRE_POSIX_LOCKS | WIRE_FLOCK_LOCKS | WIRE_SPLICE_READ | WIRE_SPLICE_WRITE | \
   WIRE_SPLICE_MOVE | WIRE_EXPLICIT_INVAL_DATA)
#define BACKGROUND_MAX 64
#define BACKGROUND_CONGESTED 48
#define STACK_DEPTH 1
#define FIRST_TENANT_NODE (UINT64_C(1) << 40) /* what is below is the daemon's own: it changes by itself */

void init_offer_from(const uint8_t *body, size_t len, init_offer *out) {
  wire_init_in in = {0};
  memcpy(&in, body, len < sizeof in ? len : sizeof in);
  *out = (init_offer){in.minor, in.flags, in.flags & WIRE_INIT_EXT ? in.flags2 : 0, in.max_readahead};
}

bool init_patch(uint8_t *reply, size_t len, const init_offer *offer, bool passthrough, bool uring, uint32_t data_max,
                wire_init_out *out) {
  if (len != sizeof(wire_out_header) + sizeof *out) return false;
  memcpy(out, reply + sizeof(wire_out_header), sizeof *out);
  if (out->major != WIRE_MAJOR) return false;
  uint32_t chosen2 = out->flags & WIRE_INIT_EXT ? out->flags2 : 0;
  uint32_t page = (uint32_t)sysconf(_SC_PAGESIZE);
  out->minor = offer->kernel_minor < WIRE_MINOR_MAX ? offer->kernel_minor : WIRE_MINOR_MAX;
  out->flags = ((out->flags | FLAGS_ON) & ~FLAGS_OFF) & offer->kernel_flags;
  out->flags2 = chosen2 & offer->kernel_flags2;
  out->max_readahead = offer->kernel_readahead;
  uint32_t pages = data_max / page ? data_max / page : 1;
  out->max_pages = pages > REQUEST_DATA_MAX / page ? (uint16_t)(REQUEST_DATA_MAX / page) : (uint16_t)pages;
  out->max_write = out->max_pages * page;
  if (!out->max_background) {
    out->max_background = BACKGROUND_MAX;
    out->congestion_threshold = BACKGROUND_CONGESTED;
  }
  passthrough = passthrough && offer->kernel_minor >= WIRE_MINOR_PASSTHROUGH && (offer->kernel_flags2 & WIRE2_PASSTHROUGH);
  out->flags2 = passthrough ? out->flags2 | WIRE2_PASSTHROUGH : out->flags2 & ~WIRE2_PASSTHROUGH;
  out->flags2 = uring ? out->flags2 | WIRE2_OVER_IO_URING : out->flags2 & ~WIRE2_OVER_IO_URING;
  out->max_stack_depth = passthrough ? STACK_DEPTH : 0;
  memcpy(reply + sizeof(wire_out_header), out, sizeof *out);
  return true;
}

void opendir_patch(uint8_t *reply, size_t len, const pending *asked) {
  wire_out_header header;
  wire_open_out out;
  memcpy(&header, reply, sizeof header);
  if (header.error || len != sizeof header + sizeof out || asked->nodeid < FIRST_TENANT_NODE) return;
  memcpy(&out, reply + sizeof header, sizeof out);
  out.open_flags |= WIRE_FOPEN_CACHE_DIR | WIRE_FOPEN_KEEP_CACHE;
  memcpy(reply + sizeof header, &out, sizeof out);
}

static void refused(uint64_t nodeid, int error) {
  uint8_t body[12];
  store_u64(body, nodeid);
  store_u32(body + 8, (uint32_t)error);
  event_send(EV_REFUSED, 0, 0, body, sizeof body);
}

bool open_patch(uint8_t *reply, size_t len, const pending *asked, uint64_t *nodeid, uint64_t *fh) {
  wire_out_header header;
  wire_open_out out;
  size_t at = sizeof header;
  memcpy(&header, reply, sizeof header);
  *nodeid = asked->nodeid;
  if (asked->opcode != WIRE_OPEN) { /* an entry first: the node is the new one, not the directory */
    if (header.error || len != at + WIRE_ENTRY_OUT_LEN + sizeof out) return false;
    memcpy(nodeid, reply + at, sizeof *nodeid);
    at += WIRE_ENTRY_OUT_LEN;
  }
  if (header.error || len != at + sizeof out) return false;
  memcpy(&out, reply + at, sizeof out);
  *fh = out.fh;

  if (append_opened(*nodeid, out.fh)) { /* nothing is cached of it, and no close is told before the last */
    out.open_flags = (out.open_flags | WIRE_FOPEN_DIRECT_IO | WIRE_FOPEN_NOFLUSH) & ~WIRE_FOPEN_KEEP_CACHE;
    memcpy(reply + at, &out, sizeof out);
    return true;
  }
  int error = 0;
  pthread_mutex_lock(&tables_lock);
  handle *h = handle_find(*nodeid, out.fh);
  node *n = h ? node_find(*nodeid) : NULL;
  if (h) handle_opened(h);
  if (n) {
    if (n->mode == NODE_PASSTHROUGH && !n->backing_id) error = device_backing_open(n->fd, &n->backing_id);
    if (error) { /* served by preads from here on; the daemon is told, and grants a budget for writes */
      n->mode = NODE_RANGED;
      n->flags |= NODE_ALL_PRESENT;
    }
    out.open_flags |= WIRE_FOPEN_NOFLUSH;
    if (n->mode == NODE_PASSTHROUGH) {
      out.open_flags = (out.open_flags | WIRE_FOPEN_PASSTHROUGH) & WIRE_FOPEN_PASSTHROUGH_MASK;
      out.backing_id = n->backing_id;
    }
  }
  pthread_mutex_unlock(&tables_lock);
  if (error) {
    static _Atomic bool told;
    if (!atomic_exchange(&told, true)) note("no passthrough: BACKING_OPEN: %s", strerror(error));
    refused(*nodeid, error);
  }
  if (n) memcpy(reply + at, &out, sizeof out);
  return h != NULL;
}
