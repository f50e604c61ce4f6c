/* One line to stderr, written at once. Invariants: never waits (stderr may be a pipe no process reads: main
 * makes it non-blocking), never more than LINES_MAX lines in a second, from any thread. */
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "channel.h"

#define LINES_MAX 20

void note(const char *format, ...) {
  static _Atomic int64_t second;
  static _Atomic int lines;
  int64_t now = time(NULL);
  if (atomic_exchange(&second, now) != now) atomic_store(&lines, 0);
  if (atomic_fetch_add(&lines, 1) >= LINES_MAX) return;
  char line[512] = "aof2-channel: ";
  size_t at = strlen(line);
  va_list args;
  va_start(args, format);
  int n = vsnprintf(line + at, sizeof line - at - 1, format, args);
  va_end(args);
  if (n < 0) return;
  at += (size_t)n < sizeof line - at - 1 ? (size_t)n : sizeof line - at - 2;
  line[at++] = '\n';
  ssize_t done = write(STDERR_FILENO, line, at);
  (void)done; /* nowhere left to say it */
}
