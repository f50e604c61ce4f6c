/* From a socket into a file, checksummed on the way: what a hydration does with every byte.
 *
 * The bytes pass through a scratch buffer small enough to stay in the processor's cache, so each is fetched from memory
 * once instead of three times (copied out, summed, copied in).
 *
 * Invariants
 * - *done bytes are in the file and in crc64[], whatever is returned; no byte past `len` is taken off the socket.
 * - Writes end at multiples of 4096 where they can: no page is written twice.
 */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <unistd.h>

#include "native.h"

#define PAGE_LEN 4096

/* 0, or AOF2_RECEIVE_*: `want` bytes are in `scratch`. */
static int fill(int sock, uint8_t *scratch, size_t want, int timeout_ms, size_t *got, int *error) {
  for (*got = 0; *got < want;) {
    ssize_t n = recv(sock, scratch + *got, want - *got, MSG_DONTWAIT);
    if (n > 0) *got += (size_t)n;
    else if (n == 0) return AOF2_RECEIVE_ENDED;
    else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      struct pollfd at = {.fd = sock, .events = POLLIN};
      int ready = poll(&at, 1, timeout_ms);
      if (ready == 0) return AOF2_RECEIVE_SILENT;
      if (ready < 0 && errno != EINTR) return *error = errno, AOF2_RECEIVE_SOCKET;
    } else if (errno != EINTR) return *error = errno, AOF2_RECEIVE_SOCKET;
  }
  return 0;
}

static int put(int file, const uint8_t *data, size_t len, uint64_t offset, int *error) {
  for (size_t done = 0; done < len;) {
    ssize_t n = pwrite(file, data + done, len - done, (off_t)(offset + done));
    if (n >= 0) done += (size_t)n;
    else if (errno != EINTR) return *error = errno, AOF2_RECEIVE_FILE;
  }
  return 0;
}

/* `at`: the first byte's place, counted from the start of piece 0. */
static void sum(uint64_t *crc64, uint64_t piece_len, uint64_t at, const uint8_t *data, size_t len) {
  while (len) {
    uint64_t room = piece_len - at % piece_len;
    size_t n = room < len ? (size_t)room : len;
    crc64[at / piece_len] = aof2_crc64(crc64[at / piece_len], data, n);
    at += n;
    data += n;
    len -= n;
  }
}

int aof2_receive(int sock, int file, uint64_t offset, uint64_t len, uint64_t piece_len, uint64_t into, uint8_t *scratch,
                 size_t scratch_len, int timeout_ms, uint64_t *crc64, uint64_t *done, int *error) {
  *done = 0;
  *error = 0;
  while (*done < len) {
    uint64_t at = offset + *done, left = len - *done;
    size_t want = left < scratch_len ? (size_t)left : scratch_len, over = (size_t)((at + want) % PAGE_LEN), got;
    if (want < left && over < want) want -= over;
    int why = fill(sock, scratch, want, timeout_ms, &got, error);
    int bad = put(file, scratch, got, at, error);
    if (bad) return bad;
    sum(crc64, piece_len, into + *done, scratch, got);
    *done += got;
    if (why) return why;
  }
  return 0;
}
