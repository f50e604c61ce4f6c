/* What the parts of the channel share: the descriptors, and each part's entry points.
 *
 * Threads: workers (kernel → daemon, forward.c), over io_uring one a core and as many as workers beside (uring.c), one for replies (daemon → kernel, forward.c), one for control (control.c),
 * one for notifications (notify.c), one for backing files ahead of and after births (keeper.c), one for the brake, once the
 * daemon asked for it (brake.c), and with it one that makes the kernel ask (ask.c), up to 64 that hold files (hold.c) and 64 that
 * wait for writes to be over (barrier.c).
 * `channel` is written before they start; later only where a field says so.
 */
#ifndef AOF2_CHANNEL_H
#define AOF2_CHANNEL_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "tables.h"
#include "wire.h"

#define WORKERS_MIN 4 /* as many as CPUs, within these: one that waits for the disk must not hold up the rest */
#define WORKERS_MAX 8
#define REQUEST_DATA_MAX (1024 * 1024)  /* payload of one READ or WRITE: fs.fuse.max_pages_limit's default */
#define REQUEST_HEADERS_MAX 4096        /* whatever stands before it */
#define BUFFER_LEN (REQUEST_DATA_MAX + 2 * REQUEST_HEADERS_MAX)
#define MESSAGE_FDS_MAX 4

typedef struct {
  int dev;        /* /dev/fuse: workers read, all threads reply */
  int dev_notify; /* a clone of it, or the same: a blocked notification does not keep `dev` open */
  int fuse, control, notify;
  int relay[2];   /* notifications that came on `fuse`, for the notify thread */
  const char *mountpoint;
  uint32_t dev_major, dev_minor;
  uint64_t mount_id;
  uint32_t data_max;     /* payload of one request that all sockets can carry */
  bool privileged;       /* CAP_SYS_ADMIN: passthrough may be asked for */
  bool uring;            /* io_uring is wanted */
  atomic_bool over_rings; /* requests come through rings, too (uring.h); set once, by uring_begin */
  uint32_t entries_max;  /* of a queue; 0: uring.c's */
  int workers;           /* that read /dev/fuse; as many serve what comes through rings and may wait */
  bool upcall_names;     /* LOOKUP, GETATTR and READDIRPLUS are upcalls: the daemon answers them faster than libfuse's way */
} channel_state;

extern channel_state channel;

/* main.c. The mount is gone: tells the daemon, and ends. */
_Noreturn void channel_gone(uint32_t reason);
/* The daemon is gone: aborts the connection, so that applications get ENOTCONN at once, and ends. */
_Noreturn void daemon_gone(const char *what);

/* log.c. One line to stderr; at most a few a second of them. */
__attribute__((format(printf, 1, 2))) void note(const char *format, ...);

/* event.c. Sends a message on the control socket, from any thread. */
void event_send(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len);
void event_send2(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len, const void *more, size_t more_len);

/* Never waits: false, and nothing sent, where the socket is full or the daemon gone. */
bool event_try(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len);

/* device.c. Writing to /dev/fuse and its ioctls. Errors that mean "the kernel waits for this no more" are not errors. */
void device_reply(uint64_t unique, int error, const void *payload, size_t len);
bool device_write(int fd, const struct iovec *parts, int n);
int device_backing_open(int fd, int32_t *id); /* 0 or an errno */
void device_backing_close(int32_t id);
void device_read_ahead(void);
/* Where the bytes of the answer to this request are best put: `otherwise`, or a place from which they are not copied once more. */
uint8_t *device_data(uint64_t unique, uint8_t *otherwise);

/* mount.c. 0, or an errno with *text saying what failed. */
typedef struct {
  const char *mountpoint, *fsname;
  bool allow_other, read_only, nosuid, nodev, noexec, default_permissions;
  uint32_t uid, gid, root_mode;
} mount_options;
int channel_mount(const mount_options *options, const char **text);
void connection_abort(void);

/* serve.c. What the channel answers itself: true when it did. `data` has room for REQUEST_DATA_MAX bytes. */
typedef struct {
  wire_in_header header;
  const uint8_t *raw, *body;
  size_t raw_len, body_len;
} request;
bool request_parse(const uint8_t *buf, size_t len, request *out);
bool serve(const request *r, uint8_t *data);
extern int read_waits_max; /* READs that may wait for blocks at once; set before the workers start */
bool serve_read(const request *r, uint8_t *data);
bool serve_read_now(const request *r, uint8_t *data); /* only what is in memory, and is not long: never waits */
void finish(aftermath after);

/* patch.c. Rewrites what libfuse answered, in place; the buffer holds `len` bytes. */
typedef struct {
  uint32_t kernel_minor, kernel_flags, kernel_flags2, kernel_readahead;
} init_offer;
void init_offer_from(const uint8_t *body, size_t len, init_offer *out);
/* False: not an INIT reply that can be patched. */
bool init_patch(uint8_t *reply, size_t len, const init_offer *offer, bool passthrough, bool uring, uint32_t data_max, wire_init_out *out);
/* A directory of a tenant: names change through the kernel alone, so it may keep the listing. */
void opendir_patch(uint8_t *reply, size_t len, const pending *asked);
/* The table handle the reply opened, so that a reply the kernel does not take can be undone; false: none. */
bool open_patch(uint8_t *reply, size_t len, const pending *asked, uint64_t *nodeid, uint64_t *fh);

/* answers.c. BYTES, and the reply to a READ that tells its slot. */
void answers_put(const control_message *m, int fd);
void answers_send(uint32_t slot, const pending *asked, uint8_t *data);
void answers_reset(void); /* tests */

/* control.c. control_open once, before any thread. */
void control_open(void);
void control_drain(void);
void control_apply(const control_message *m, int fd);
void *control_thread(void *unused);

/* forward.c, notify.c. One message each; the threads call them. `data` has room for REQUEST_DATA_MAX bytes; that of a reply
 * may be the reply's own. */
void request_handle(const uint8_t *buf, size_t len, uint8_t *data);
void reply_handle(uint8_t *buf, size_t len, uint8_t *data);
void *worker_thread(void *unused);
void *reply_thread(void *unused);
void *notify_thread(void *unused);
#endif
