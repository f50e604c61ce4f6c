/* aof2-channel: stands between /dev/fuse and the daemon. PROTOCOL.md is how they talk, channel.h what runs.
 *
 * Started by the daemon with three inherited SOCK_SEQPACKET sockets (FUSE messages, control, notifications). It mounts,
 * forwards what it cannot answer, and ends with the mount, or at once with the daemon. It writes no file of its own.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../bytes.h"
#include "append.h"
#include "births.h"
#include "brake.h"
#include "channel.h"
#include "keeper.h"
#include "uring.h"

#define SOCKET_ROOM (32 << 20)
#define FILES_WANTED (1 << 20)
#define GOODBYE_MS 1000

channel_state channel = {.dev = -1, .dev_notify = -1, .fuse = -1, .control = -1, .notify = -1};

/* How the process is ending: the first thread to notice sees it through, the others keep still. */
enum { RUNNING, UNMOUNTED, ORPHANED };
static atomic_int ending = RUNNING;

void channel_gone(uint32_t reason) {
  uint8_t body[4];
  int running = RUNNING;
  if (!atomic_compare_exchange_strong(&ending, &running, UNMOUNTED)) {
    for (;;) pause();
  }
  births_over();
  append_over();
  store_u32(body, reason);
  event_send(EV_GONE, 0, 0, body, sizeof body);
  /* The daemon has its libfuse session to end: it would log the end of its socket as an error. It hangs up when it is done. */
  struct pollfd at = {.fd = channel.control, .events = POLLRDHUP};
  while (poll(&at, 1, GOODBYE_MS) < 0 && errno == EINTR) {}
  shutdown(channel.fuse, SHUT_RDWR);
  shutdown(channel.control, SHUT_RDWR);
  shutdown(channel.notify, SHUT_RDWR);
  _exit(0);
}

void daemon_gone(const char *what) {
  int running = RUNNING;
  if (!atomic_compare_exchange_strong(&ending, &running, ORPHANED)) {
    for (;;) pause(); /* the connection is being aborted, or what was made ahead removed: exiting now would cut that short */
  }
  note("the daemon is gone (%s): the mount answers ENOTCONN until it is unmounted", what);
  brake_abandon();
  connection_abort();
  _exit(0);
}

/* What one message on the socket may hold, after asking for much more. */
static uint32_t socket_room(int fd, bool privileged) {
  int want = SOCKET_ROOM, got = 0;
  socklen_t len = sizeof got;
  if (!privileged || setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &want, sizeof want))
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &want, sizeof want);
  if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &got, &len) || got < 0) return 0;
  return (uint32_t)got;
}

static uint32_t data_max_for(uint32_t room) {
  if (room < 4 * REQUEST_HEADERS_MAX) return REQUEST_HEADERS_MAX;
  uint32_t fits = (room - 2 * REQUEST_HEADERS_MAX) & ~(uint32_t)(REQUEST_HEADERS_MAX - 1);
  return fits < REQUEST_DATA_MAX ? fits : REQUEST_DATA_MAX;
}

static void raise_files(void) {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit)) return;
  struct rlimit wanted = {FILES_WANTED, FILES_WANTED};
  if (limit.rlim_max >= FILES_WANTED || setrlimit(RLIMIT_NOFILE, &wanted)) {
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
  }
}

static _Noreturn void failed(int error, const char *text) {
  uint8_t body[4];
  store_u32(body, (uint32_t)error);
  event_send2(EV_FAILED, 0, 0, body, sizeof body, text, strlen(text));
  exit(1);
}

static void start(void *(*run)(void *)) {
  pthread_t thread;
  int error = pthread_create(&thread, NULL, run, NULL);
  if (!error) return;
  note("no thread: %s", strerror(error));
  channel_gone(GONE_BROKEN);
}

enum { O_FUSE = 1, O_CONTROL, O_NOTIFY, O_MOUNTPOINT, O_FSNAME, O_UID, O_GID, O_ROOT_MODE, O_REPLY_ROOM, O_NODES, O_HANDLES,
       O_PENDING, O_ALLOW_OTHER, O_READ_ONLY, O_NOSUID, O_NODEV, O_NOEXEC, O_PERMISSIONS, O_UPCALL_NAMES, O_URING,
       O_ENTRIES };

static const struct option known[] = {
    {"fuse", required_argument, NULL, O_FUSE},
    {"control", required_argument, NULL, O_CONTROL},
    {"notify", required_argument, NULL, O_NOTIFY},
    {"mountpoint", required_argument, NULL, O_MOUNTPOINT},
    {"fsname", required_argument, NULL, O_FSNAME},
    {"uid", required_argument, NULL, O_UID},
    {"gid", required_argument, NULL, O_GID},
    {"root-mode", required_argument, NULL, O_ROOT_MODE}, /* octal */
    {"reply-room", required_argument, NULL, O_REPLY_ROOM}, /* the daemon's send buffer on the fuse socket */
    {"nodes-max", required_argument, NULL, O_NODES},
    {"handles-max", required_argument, NULL, O_HANDLES},
    {"pending-max", required_argument, NULL, O_PENDING},
    {"allow-other", no_argument, NULL, O_ALLOW_OTHER},
    {"read-only", no_argument, NULL, O_READ_ONLY},
    {"nosuid", no_argument, NULL, O_NOSUID},
    {"nodev", no_argument, NULL, O_NODEV},
    {"noexec", no_argument, NULL, O_NOEXEC},
    {"default-permissions", no_argument, NULL, O_PERMISSIONS},
    {"upcall-names", no_argument, NULL, O_UPCALL_NAMES},
    {"uring", no_argument, NULL, O_URING},
    {"entries-max", required_argument, NULL, O_ENTRIES},
    {0}};

int main(int argc, char **argv) {
  mount_options options = {.fsname = "aof2", .uid = geteuid(), .gid = getegid(), .root_mode = 040755};
  uint32_t reply_room = UINT32_MAX, nodes_max = 0, handles_max = 0, pending_max = 0;
  for (int which; (which = getopt_long(argc, argv, "", known, NULL)) != -1;) {
    uint32_t number = optarg ? (uint32_t)strtoul(optarg, NULL, which == O_ROOT_MODE ? 8 : 10) : 0;
    switch (which) {
      case O_FUSE: channel.fuse = (int)number; break;
      case O_CONTROL: channel.control = (int)number; break;
      case O_NOTIFY: channel.notify = (int)number; break;
      case O_MOUNTPOINT: options.mountpoint = optarg; break;
      case O_FSNAME: options.fsname = optarg; break;
      case O_UID: options.uid = number; break;
      case O_GID: options.gid = number; break;
      case O_ROOT_MODE: options.root_mode = number; break;
      case O_REPLY_ROOM: reply_room = number; break;
      case O_NODES: nodes_max = number; break;
      case O_HANDLES: handles_max = number; break;
      case O_PENDING: pending_max = number; break;
      case O_ALLOW_OTHER: options.allow_other = true; break;
      case O_READ_ONLY: options.read_only = true; break;
      case O_NOSUID: options.nosuid = true; break;
      case O_NODEV: options.nodev = true; break;
      case O_NOEXEC: options.noexec = true; break;
      case O_PERMISSIONS: options.default_permissions = true; break;
      case O_UPCALL_NAMES: channel.upcall_names = true; break;
      case O_URING: channel.uring = true; break;
      case O_ENTRIES: channel.entries_max = number; break;
      default: return 2;
    }
  }
  if (channel.fuse < 0 || channel.control < 0 || channel.notify < 0 || !options.mountpoint) {
    fprintf(stderr, "aof2-channel is started by the aof2 daemon: see native/channel/PROTOCOL.md\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is an error of that write, and no end of the mount */
  struct stat err;
  if (!fstat(STDERR_FILENO, &err) && S_ISFIFO(err.st_mode)) fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK);
  raise_files();
  tables_open(nodes_max, handles_max, pending_max);
  control_open();
  keeper_open();
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channel.relay)) failed(errno, "socketpair");

  uring_prepare();
  const char *text = "";
  int error = channel_mount(&options, &text);
  if (error) failed(error, text);
  uint32_t room = socket_room(channel.fuse, channel.privileged);
  channel.data_max = data_max_for(room < reply_room ? room : reply_room);
  socket_room(channel.control, channel.privileged);
  socket_room(channel.relay[0], channel.privileged);

  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  channel.workers = cores < WORKERS_MIN ? WORKERS_MIN : cores > WORKERS_MAX ? WORKERS_MAX : (int)cores;
  read_waits_max = channel.workers - 2;
  uint8_t body[8];
  store_u32(body, channel.dev_major);
  store_u32(body + 4, channel.dev_minor);
  event_send(EV_MOUNTED, 0, 0, body, sizeof body);
  start(control_thread);
  start(notify_thread);
  start(keeper_thread);
  start(reply_thread);
  for (int i = 1; i < channel.workers; i++) start(worker_thread);
  worker_thread(NULL);
}
