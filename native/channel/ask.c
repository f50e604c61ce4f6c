/* See ask.h. */
#include "ask.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "channel.h"

#define ASKS_MAX 1024
#define HANDLE_TYPE 0x81 /* FILEID_INO64_GEN: u32 high, u32 low of the nodeid, u32 generation, which is 0 */
#define HANDLE_LEN 12

static pthread_mutex_t asks_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER;
static uint64_t ring[ASKS_MAX];
static uint32_t first, end; /* those that wait are [first, end) */
static void (*tell)(uint64_t nodeid, bool asks);

/* The mount's root; -1 where it is no longer to be found by its name. */
static int open_root(void) {
  struct stat st;
  int fd = open(channel.mountpoint, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return -1;
  if (!fstat(fd, &st) && st.st_dev == makedev(channel.dev_major, channel.dev_minor)) return fd;
  close(fd);
  errno = ESTALE;
  return -1;
}

int open_node(uint64_t nodeid) {
  int root = open_root();
  if (root < 0) return -1;
  union {
    struct file_handle handle;
    uint8_t room[sizeof(struct file_handle) + HANDLE_LEN];
  } name = {.handle = {.handle_bytes = HANDLE_LEN, .handle_type = HANDLE_TYPE}};
  uint32_t parts[3] = {(uint32_t)(nodeid >> 32), (uint32_t)nodeid, 0};
  memcpy(name.room + sizeof(struct file_handle), parts, sizeof parts);
  int fd = open_by_handle_at(root, &name.handle, O_PATH | O_CLOEXEC), error = errno;
  close(root);
  errno = error;
  return fd;
}

static bool look_at(uint64_t nodeid) {
  struct statx st;
  int fd = open_node(nodeid);
  bool fresh = fd >= 0 && !statx(fd, "", AT_EMPTY_PATH | AT_STATX_FORCE_SYNC, STATX_BASIC_STATS, &st);
  if (!fresh) note("node %llu: the kernel cannot be made to ask before a write: %s", (unsigned long long)nodeid, strerror(errno));
  if (fd >= 0) close(fd);
  return fresh;
}

static void *ask_thread(void *unused) {
  (void)unused;
  for (;;) {
    pthread_mutex_lock(&asks_lock);
    while (first == end) pthread_cond_wait(&asked, &asks_lock);
    uint64_t nodeid = ring[first++ % ASKS_MAX];
    pthread_mutex_unlock(&asks_lock);
    tell(nodeid, look_at(nodeid));
  }
  return NULL; /* never */
}

int ask_open(void (*done)(uint64_t nodeid, bool asks)) {
  pthread_t thread;
  tell = done;
  return pthread_create(&thread, NULL, ask_thread, NULL);
}

bool ask_node(uint64_t nodeid) {
  pthread_mutex_lock(&asks_lock);
  bool room = end - first < ASKS_MAX;
  if (room) ring[end++ % ASKS_MAX] = nodeid;
  pthread_cond_signal(&asked);
  pthread_mutex_unlock(&asks_lock);
  return room;
}
