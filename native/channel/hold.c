/* See hold.h. */
#include "hold.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "uring.h"

#define HANDS_MAX 64
#define PAGE 4096
#define STACK_BYTES (64 << 10)

typedef struct {
  uint8_t *pages; /* the first ends with the question, the second, where the answer goes, is missing while it holds */
  sem_t go;
  int fd;
  bool made, busy, ended; /* busy: from hold_begin until its call is over and hold_end came */
} hand;

static pthread_mutex_t hands_lock = PTHREAD_MUTEX_INITIALIZER; /* never held over anything that waits */
static hand hands[HANDS_MAX];
static atomic_int faults = -1;

bool hold_hurry(void) {
  struct sched_param least = {.sched_priority = 1};
  return !sched_setscheduler(0, SCHED_RR | SCHED_RESET_ON_FORK, &least) || !setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), -15);
}

int hold_open(void) {
  struct uffdio_api api = {.api = UFFD_API};
  int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return errno;
  if (ioctl(fd, UFFDIO_API, &api)) {
    int error = errno;
    close(fd);
    return error;
  }
  faults = fd;
  return 0;
}

static void ask_for_extents(const hand *h) {
  struct fiemap *question = (struct fiemap *)(void *)(h->pages + PAGE - sizeof *question);
  memset(question, 0, sizeof *question);
  question->fm_length = ~UINT64_C(0);
  question->fm_extent_count = 1;
  ioctl(h->fd, FS_IOC_FIEMAP, question);
}

static void *hand_thread(void *arg) {
  hand *h = arg;
  uring_unpin();
  hold_hurry();
  for (;;) {
    while (sem_wait(&h->go)) {}
    ask_for_extents(h);
    (void)*(volatile uint8_t *)(h->pages + PAGE); /* without an extent there was nothing to copy: taken it counts all the same */
    close(h->fd);
    pthread_mutex_lock(&hands_lock);
    if (h->ended) h->busy = false;
    h->ended = true;
    pthread_mutex_unlock(&hands_lock);
  }
  return NULL; /* never */
}

static bool make(hand *h) {
  pthread_t thread;
  pthread_attr_t attributes;
  void *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return false;
  h->pages = pages;
  struct uffdio_register second = {.range = {(uintptr_t)h->pages + PAGE, PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  sem_init(&h->go, 0, 0);
  h->made = !ioctl(faults, UFFDIO_REGISTER, &second) && !pthread_create(&thread, &attributes, hand_thread, h);
  pthread_attr_destroy(&attributes);
  if (!h->made) munmap(pages, 2 * PAGE);
  return h->made;
}

/* For reading: a lease on the file may be asked for while the hand has not closed it yet. */
static int open_again(int fd) {
  char path[40];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  return open(path, O_RDONLY | O_CLOEXEC | O_NOATIME);
}

uint32_t hold_begin(int fd) {
  uint32_t found = 0;
  if (faults < 0) return 0;
  pthread_mutex_lock(&hands_lock);
  while (found < HANDS_MAX && hands[found].busy) found++;
  hand *h = found < HANDS_MAX ? &hands[found] : NULL;
  bool ready = h && (h->made || make(h)) && (h->fd = open_again(fd)) >= 0;
  if (ready) {
    h->busy = true;
    h->ended = false;
    madvise(h->pages + PAGE, PAGE, MADV_DONTNEED);
    sem_post(&h->go);
  }
  pthread_mutex_unlock(&hands_lock);
  return ready ? found + 1 : 0;
}

int hold_fd(void) { return faults; }

uint32_t hold_taken(void) {
  struct uffd_msg message;
  if (faults < 0 || read(faults, &message, sizeof message) != sizeof message) return 0;
  uint8_t *at = (uint8_t *)(uintptr_t)message.arg.pagefault.address;
  for (uint32_t i = 0; i < HANDS_MAX; i++)
    if (hands[i].made && at >= hands[i].pages && at < hands[i].pages + 2 * PAGE) return i + 1;
  return 0;
}

void hold_end(uint32_t hold) {
  if (!hold) return;
  hand *h = &hands[hold - 1];
  struct uffdio_zeropage second = {.range = {(uintptr_t)h->pages + PAGE, PAGE}};
  while (ioctl(faults, UFFDIO_ZEROPAGE, &second) && errno == EAGAIN) {}
  pthread_mutex_lock(&hands_lock);
  if (h->ended) h->busy = false; /* the call was over before */
  h->ended = true;
  pthread_mutex_unlock(&hands_lock);
}
