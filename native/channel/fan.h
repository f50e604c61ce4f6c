/* fanotify's pre-content events, as far as the brake needs them (brake.h): the group, marks on backing files, one event at
 * a time, its answer, and what can be found out about the caller.
 *
 * Debian's linux/fanotify.h ends before FAN_PRE_ACCESS (Linux 6.14): declared here, with the kernel's numbers.
 * Owner: the brake's thread reads and answers; marks may be set by any thread. When the process ends, the group goes with
 * it and the kernel lets every caller that is held go on.
 */
#ifndef AOF2_CHANNEL_FAN_H
#define AOF2_CHANNEL_FAN_H
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct {
  int fd;    /* of the backing file, and the event's name in the answer; fan_answer closes it */
  pid_t tid; /* the calling thread */
  uint64_t offset, length;
} fan_event;

/* The group; 0 or an errno. `probe` is a file of the filesystem that matters: whether it takes such marks. */
int fan_open(int probe);
int fan_fd(void); /* -1: there is no group */
/* Accesses to the file are reported, of descriptors that are opened from here on. */
bool fan_mark(int fd);
void fan_unmark(int fd);
/* Not for now: and again. */
void fan_ignore(int fd, bool on);

/* Events that have arrived, at most `max`. */
int fan_read(fan_event *out, int max);
/* 0 lets the caller go on; an errno (ENOSPC, EDQUOT, EIO) makes its call fail. */
void fan_answer(const fan_event *e, int error);

/* The inode number in the name of a backing file (`<ino>.<generation>`); 0: it is none. */
uint64_t fan_ino(const fan_event *e);
/* Whether the thread is one of process `pid`, or of ours. */
bool fan_is_ours(pid_t tid, pid_t pid);
/* Whether the call that is held is certainly none that writes. */
bool fan_only_reads(pid_t tid);
/* Whether the call is one that writes without a report; `otherwise` where that cannot be seen. */
bool fan_splices(pid_t tid, bool otherwise);
/* Whether the thread still waits. One that was killed does not. */
bool fan_is_alive(pid_t tid);
/* Bytes that the file takes on the disk. */
uint64_t fan_disk_bytes(int fd);
uint64_t fan_size(int fd);
/* How much more it may take when this range has been written. */
uint64_t fan_need(int fd, uint64_t offset, uint64_t length, bool append);
#endif
