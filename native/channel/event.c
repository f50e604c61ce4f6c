/* Events to the daemon on the control socket. A SEQPACKET send is whole or not at all, so any thread may send. It waits
 * while the socket is full: the daemon reads events without ever waiting for the channel. */
#include <errno.h>
#include <sys/socket.h>

#include "../bytes.h"
#include "channel.h"

void event_send2(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len, const void *more,
                 size_t more_len) {
  uint8_t header[PROTO_HEADER_LEN];
  store_u16(header, kind);
  store_u16(header + 2, flags);
  store_u32(header + 4, seq);
  struct iovec parts[3] = {{header, sizeof header}, {(void *)body, len}, {(void *)more, more_len}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
  while (sendmsg(channel.control, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) daemon_gone("control");
    note("event %u not sent: %s", kind, strerror(errno));
    return;
  }
}

void event_send(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len) {
  event_send2(kind, flags, seq, body, len, NULL, 0);
}

bool event_try(uint16_t kind, uint16_t flags, uint32_t seq, const void *body, size_t len) {
  uint8_t header[PROTO_HEADER_LEN];
  store_u16(header, kind);
  store_u16(header + 2, flags);
  store_u32(header + 4, seq);
  struct iovec parts[2] = {{header, sizeof header}, {(void *)body, len}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  return sendmsg(channel.control, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}
