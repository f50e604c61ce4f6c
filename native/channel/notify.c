/* Notifications: raw FUSE notify messages from the daemon (and those libfuse sends among its replies), written to /dev/fuse.
 *
 * In a thread of its own because the write waits for page locks, which a READ in progress may hold until the daemon answers.
 * It writes to a clone of /dev/fuse, so that a write that hangs does not keep the device the requests came from open.
 * Invariants: only messages with unique 0 pass, or a forged reply could answer a request.
 */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include "channel.h"

#define NOTIFY_MAX (64 * 1024)

/* False at the end of the socket. */
static bool pass_one(int from) {
  static uint8_t buf[NOTIFY_MAX];
  wire_out_header header;
  ssize_t len = recv(from, buf, sizeof buf, MSG_DONTWAIT | MSG_TRUNC);
  if (len < 0) return errno == EINTR || errno == EAGAIN;
  if (len == 0) {
    struct pollfd at = {.fd = from, .events = POLLIN | POLLRDHUP};
    return !(poll(&at, 1, 0) > 0 && (at.revents & (POLLRDHUP | POLLHUP | POLLERR)));
  }
  bool whole = (size_t)len >= sizeof header && (size_t)len <= sizeof buf;
  if (!whole || (memcpy(&header, buf, sizeof header), header.len != (size_t)len) || header.unique || header.error <= 0) {
    note("a notification of %zd bytes that is none", len);
    return true;
  }
  struct iovec part = {buf, (size_t)len};
  device_write(channel.dev_notify, &part, 1);
  return true;
}

void *notify_thread(void *unused) {
  (void)unused;
  struct pollfd at[2] = {{.fd = channel.relay[1], .events = POLLIN}, {.fd = channel.notify, .events = POLLIN | POLLRDHUP}};
  for (;;) {
    if (poll(at, 2, -1) < 0) continue;
    if (at[0].revents) pass_one(channel.relay[1]);
    if (at[1].revents && !pass_one(channel.notify)) at[1].fd = -1; /* the other sockets say whether the daemon is gone */
  }
}
