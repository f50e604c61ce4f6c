/* Answers to the kernel, and the ioctls of /dev/fuse.
 *
 * Invariants: a reply to a request that came through a ring goes there (uring.h), any other to the descriptor its request was read from (`channel.dev`: requests of a clone answered elsewhere
 * are lost). ENOENT and EINVAL from a write mean the request was interrupted or aborted, and are dropped; ENODEV is
 * for the workers, who see it too. Any thread.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "channel.h"
#include "uring.h"

#define READ_AHEAD_KIB "1024"

bool device_write(int fd, const struct iovec *parts, int n) {
  if (uring_reply(parts, n)) return true; /* the kernel waits for each of these, or for nothing any more */
  for (;;) {
    if (writev(fd, parts, n) >= 0) return true;
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != ENOENT && errno != EINVAL && errno != ENODEV && errno != EPERM) note("write to /dev/fuse: %s", strerror(errno));
    return false;
  }
}

void device_reply(uint64_t unique, int error, const void *payload, size_t len) {
  if (error) len = 0;
  wire_out_header header = {.len = (uint32_t)(sizeof header + len), .error = -error, .unique = unique};
  struct iovec parts[2] = {{&header, sizeof header}, {(void *)payload, len}};
  device_write(channel.dev, parts, len ? 2 : 1);
}

uint8_t *device_data(uint64_t unique, uint8_t *otherwise) { return uring_data(unique, otherwise); }

int device_backing_open(int fd, int32_t *id) {
  wire_backing_map map = {.fd = fd};
  int got = ioctl(channel.dev, WIRE_IOC_BACKING_OPEN, &map);
  if (got < 0) return errno;
  *id = got;
  return 0;
}

void device_backing_close(int32_t id) {
  uint32_t closing = (uint32_t)id;
  if (ioctl(channel.dev, WIRE_IOC_BACKING_CLOSE, &closing) < 0) note("BACKING_CLOSE %d: %s", id, strerror(errno));
}

void device_read_ahead(void) {
  char path[64];
  snprintf(path, sizeof path, "/sys/class/bdi/%u:%u/read_ahead_kb", channel.dev_major, channel.dev_minor);
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return; /* only speed is lost */
  ssize_t done = write(fd, READ_AHEAD_KIB, sizeof READ_AHEAD_KIB - 1);
  (void)done;
  close(fd);
}
