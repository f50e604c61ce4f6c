/* Mounting /dev/fuse: mount(2) where we may, fusermount3 otherwise; and aborting the connection when the daemon has died.
 *
 * Invariants: nothing is unmounted here. A dead mount must answer ENOTCONN until the user or the next mount unmounts it: the
 * directory below would take an application's files. Neither channel nor daemon keeps a descriptor on the mount.
 * Owner: the main thread before the others start; connection_abort: the thread that ends the process.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "channel.h"

#define OPTIONS_MAX 1024
#define SUBTYPE "aof2"

static bool may_mount(void) {
  struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
  struct __user_cap_data_struct caps[2] = {{0}};
  if (syscall(SYS_capget, &header, caps)) return false;
  return caps[CAP_SYS_ADMIN / 32].effective & (1u << (CAP_SYS_ADMIN % 32));
}

/* Options are separated by commas: one inside a value is escaped, as fusermount3 and mount.fuse do. */
static void escaped(char *out, size_t room, const char *value) {
  size_t at = 0;
  for (; *value && at + 2 < room; value++) {
    if (*value == ',' || *value == '\\') out[at++] = '\\';
    out[at++] = *value;
  }
  out[at] = 0;
}

static int mount_direct(const mount_options *o, const char **text) {
  char data[OPTIONS_MAX];
  int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    *text = "open /dev/fuse";
    return errno;
  }
  snprintf(data, sizeof data, "fd=%d,rootmode=%o,user_id=%u,group_id=%u%s%s", fd, o->root_mode, o->uid, o->gid,
           o->default_permissions ? ",default_permissions" : "", o->allow_other ? ",allow_other" : "");
  unsigned long flags = (o->read_only ? MS_RDONLY : 0) | (o->nosuid ? MS_NOSUID : 0) | (o->nodev ? MS_NODEV : 0) |
                        (o->noexec ? MS_NOEXEC : 0);
  if (mount(o->fsname, o->mountpoint, "fuse." SUBTYPE, flags, data)) {
    int error = errno;
    close(fd);
    *text = "mount";
    return error;
  }
  channel.dev = fd;
  return 0;
}

static int fd_received(int from) {
  char byte, room[CMSG_SPACE(sizeof(int))];
  struct iovec part = {&byte, 1};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
  ssize_t got;
  do got = recvmsg(from, &message, MSG_CMSG_CLOEXEC);
  while (got < 0 && errno == EINTR);
  struct cmsghdr *c = got > 0 ? CMSG_FIRSTHDR(&message) : NULL;
  if (!c || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(sizeof(int))) return -1;
  int fd;
  memcpy(&fd, CMSG_DATA(c), sizeof fd);
  return fd;
}

static int mount_by_helper(const mount_options *o, const char **text) {
  char options[OPTIONS_MAX], fsname[OPTIONS_MAX / 2], number[16];
  int pair[2];
  escaped(fsname, sizeof fsname, o->fsname);
  snprintf(options, sizeof options, "fsname=%s,subtype=" SUBTYPE "%s%s%s%s%s%s", fsname,
           o->default_permissions ? ",default_permissions" : "", o->allow_other ? ",allow_other" : "",
           o->read_only ? ",ro" : "", o->nosuid ? ",nosuid" : "", o->nodev ? ",nodev" : "", o->noexec ? ",noexec" : "");
  *text = "fusermount3";
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return errno;
  fcntl(pair[0], F_SETFD, FD_CLOEXEC);
  pid_t child = fork();
  if (child < 0) return errno;
  if (!child) {
    snprintf(number, sizeof number, "%d", pair[1]);
    setenv("_FUSE_COMMFD", number, 1);
    execlp("fusermount3", "fusermount3", "-o", options, "--", o->mountpoint, (char *)NULL);
    fprintf(stderr, "aof2-channel: fusermount3: %s\n", strerror(errno));
    _exit(127);
  }
  close(pair[1]);
  channel.dev = fd_received(pair[0]);
  close(pair[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
  if (channel.dev >= 0) return 0;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    *text = "fusermount3 is not installed (package fuse3)";
    return ENOENT;
  }
  return EPERM; /* why is on stderr, in fusermount3's words */
}

/* mountinfo writes space, tab, newline and backslash in octal. */
static void unescape(char *s) {
  char *out = s;
  while (*s) {
    if (s[0] == '\\' && s[1] && s[2] && s[3]) {
      *out++ = (char)((s[1] - '0') * 64 + (s[2] - '0') * 8 + (s[3] - '0'));
      s += 4;
    } else {
      *out++ = *s++;
    }
  }
  *out = 0;
}

/* Device number and mount id without asking the filesystem, which cannot answer yet: from the last mount on that path. */
static bool find_mount(const char *mountpoint, uint64_t *id, uint32_t *dev_major, uint32_t *dev_minor) {
  FILE *info = fopen("/proc/self/mountinfo", "re");
  char *line = NULL;
  size_t room = 0;
  bool found = false;
  while (info && getline(&line, &room, info) > 0) {
    unsigned long long mount_id;
    unsigned major_no, minor_no;
    int at = 0;
    if (sscanf(line, "%llu %*u %u:%u %*s %n", &mount_id, &major_no, &minor_no, &at) < 3 || !at) continue;
    char *path = line + at;
    path[strcspn(path, " \n")] = 0;
    unescape(path);
    if (strcmp(path, mountpoint)) continue;
    *id = mount_id, *dev_major = major_no, *dev_minor = minor_no;
    found = true;
  }
  free(line);
  if (info) fclose(info);
  return found;
}

int channel_mount(const mount_options *options, const char **text) {
  mount_options o = *options;
  channel.privileged = may_mount();
  o.mountpoint = realpath(options->mountpoint, NULL); /* for the life of the process */
  if (!o.mountpoint) {
    *text = "the mount point";
    return errno;
  }
  channel.mountpoint = o.mountpoint;
  int error = channel.privileged ? mount_direct(&o, text) : mount_by_helper(&o, text);
  if (error) return error;
  if (!find_mount(o.mountpoint, &channel.mount_id, &channel.dev_major, &channel.dev_minor)) note("not in mountinfo");
  channel.dev_notify = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  uint32_t source = (uint32_t)channel.dev;
  if (channel.dev_notify >= 0 && ioctl(channel.dev_notify, WIRE_IOC_CLONE, &source)) {
    close(channel.dev_notify);
    channel.dev_notify = -1;
  }
  if (channel.dev_notify < 0) channel.dev_notify = channel.dev;
  return 0;
}

/* The mount an O_PATH descriptor stands on, without asking the filesystem. */
static uint64_t mount_id_of(int fd) {
  char path[64], line[128];
  unsigned long long id = 0;
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
  FILE *info = fopen(path, "re");
  while (info && fgets(line, sizeof line, info) && sscanf(line, "mnt_id: %llu", &id) != 1) {}
  if (info) fclose(info);
  return id;
}

/* Exiting closes the device and so ends the connection, unless a thread of ours hangs in a notification behind a page that
 * only an answer unlocks: the exit would wait for it for ever. So the connection is aborted first. Forcing an umount of a
 * mount that is kept busy does just that: the abort happens, the umount is refused. */
void connection_abort(void) {
  char path[64];
  snprintf(path, sizeof path, "/sys/fs/fuse/connections/%u/abort", channel.dev_minor);
  int fd = channel.dev_major ? -1 : open(path, O_WRONLY | O_CLOEXEC);
  if (fd >= 0) {
    bool done = write(fd, "1", 1) == 1;
    close(fd);
    if (done) return;
  }
  if (!channel.privileged || !channel.mount_id) return;
  fd = open(channel.mountpoint, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  if (mount_id_of(fd) == channel.mount_id) umount2(channel.mountpoint, MNT_FORCE);
  close(fd);
}
