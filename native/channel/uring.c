/* See uring.h. */
#include "uring.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "append.h"
#include "channel.h"
#include "ring.h"

#define PARAMETER "/sys/module/fuse/parameters/enable_uring"
#define POSSIBLE "/sys/devices/system/cpu/possible"
#define ONLINE "/sys/devices/system/cpu/online"
#define ENTRIES_ALL 32768 /* shared out to the queues, within these */
#define ENTRIES_MAX 4096
#define ENTRIES_MIN 512
#define ENTRIES_FEW 64 /* of a core that is not there now, or where there is no memory for more */
#define HEAD_LEN 4096    /* the header; and, at its end, room to put a request's parts in a row */
#define ENTRY_LEN (HEAD_LEN + REQUEST_DATA_MAX)
#define LONG_PAYLOAD (64u << 10)
#define WARM_MAX 64 /* entries of a queue that keep the memory of a long payload */
#define BUCKETS 4096
#define BUCKET_LOCKS 64
#define ROAM_AFTER 4 /* long answers in a row; and so many other requests end it */
#define PIN_AFTER 16
#define QUEUE_NICE (-10)
#define AUTOGROUP "/proc/self/autogroup"
#define GROUP_NICE "-10" /* as QUEUE_NICE */
#define URING_CMD 46 /* IORING_OP_URING_CMD */
#define WOKEN 0      /* user_data of the read that waits for others; else an entry */

typedef struct entry {
  struct entry *same;    /* in its bucket */
  struct entry *next;    /* in one list or another */
  struct queue *queue;
  uint64_t unique, commit_id;
  wire_uring_header *head;
  uint8_t *payload, *raw;
  size_t raw_len;
  struct iovec parts[2];
  bool ours, warm;
} entry;

typedef struct {
  pthread_mutex_t lock;
  entry *first, **last;
} list;

typedef struct queue {
  ring ring;
  uint16_t number;
  uint32_t wanted; /* entries */
  int wake, error;
  uint64_t wakes;
  sem_t go;
  entry *entries;
  uint32_t entries_count, alive, warm; /* alive: those the kernel has not taken back for good */
  uint32_t long_reads, others;         /* in a row; since the last long read */
  bool roams;
  list answered; /* by other threads */
} queue;

static queue *queues;
static uint32_t queues_made;
static sem_t told; /* a queue's thread has done what it was told */
static bool given_up;
static _Thread_local queue *mine;
static uring_state status;
static cpu_set_t everywhere;
static char why[128];

/* -- entries by their request ------------------------------------------------------------------------------------ */
static entry *buckets[BUCKETS];
static pthread_mutex_t bucket_locks[BUCKET_LOCKS];

static uint32_t bucket_of(uint64_t unique) { return (uint32_t)((unique >> 1) % BUCKETS); } /* uniques are even */

static void note_entry(entry *e) {
  uint32_t b = bucket_of(e->unique);
  pthread_mutex_lock(&bucket_locks[b % BUCKET_LOCKS]);
  e->same = buckets[b];
  buckets[b] = e;
  pthread_mutex_unlock(&bucket_locks[b % BUCKET_LOCKS]);
}

static entry *find_entry(uint64_t unique, bool take) {
  uint32_t b = bucket_of(unique);
  pthread_mutex_lock(&bucket_locks[b % BUCKET_LOCKS]);
  entry **at = &buckets[b];
  while (*at && (*at)->unique != unique) at = &(*at)->same;
  entry *e = *at;
  if (e && take) *at = e->same;
  pthread_mutex_unlock(&bucket_locks[b % BUCKET_LOCKS]);
  return e;
}

/* -- lists ------------------------------------------------------------------------------------------------------- */
static void list_open(list *l) {
  pthread_mutex_init(&l->lock, NULL);
  l->first = NULL;
  l->last = &l->first;
}

/* Whether it was empty. */
static bool list_put(list *l, entry *e) {
  e->next = NULL;
  pthread_mutex_lock(&l->lock);
  bool empty = !l->first;
  *l->last = e;
  l->last = &e->next;
  pthread_mutex_unlock(&l->lock);
  return empty;
}

/* All of it. */
static entry *list_take(list *l) {
  pthread_mutex_lock(&l->lock);
  entry *first = l->first;
  l->first = NULL;
  l->last = &l->first;
  pthread_mutex_unlock(&l->lock);
  return first;
}

/* -- the pool ---------------------------------------------------------------------------------------------------- */
static list waiting;
static sem_t waits;

static void *pool_thread(void *unused) {
  (void)unused;
  for (;;) {
    while (sem_wait(&waits)) {}
    pthread_mutex_lock(&waiting.lock);
    entry *e = waiting.first;
    waiting.first = e->next;
    if (!waiting.first) waiting.last = &waiting.first;
    pthread_mutex_unlock(&waiting.lock);
    request_handle(e->raw, e->raw_len, e->payload);
  }
  return NULL; /* never */
}

/* -- answers ----------------------------------------------------------------------------------------------------- */
static void grow_warm(entry *e, size_t payload_len) {
  if (payload_len >= LONG_PAYLOAD && !e->warm) e->warm = true, e->queue->warm++;
}

/* The queue's thread: the kernel gets answer and entry at the next call. */
static void commit(entry *e) {
  queue *q = e->queue;
  wire_uring_command c = {.commit_id = e->commit_id, .queue = q->number};
  ring_command *r = ring_next(&q->ring);
  r->opcode = URING_CMD;
  r->fd = channel.dev;
  r->number = WIRE_URING_COMMIT_AND_FETCH;
  r->user_data = (uintptr_t)e;
  memcpy(r->cmd, &c, sizeof c);
  e->ours = false;
  grow_warm(e, e->head->payload_len);
}

static void hand_over(entry *e) {
  if (list_put(&e->queue->answered, e)) eventfd_write(e->queue->wake, 1);
}

static size_t copy_payload(entry *e, const struct iovec *parts, int n) {
  size_t len = 0, skip = sizeof(wire_out_header);
  for (int i = 0; i < n; i++) {
    const uint8_t *from = (const uint8_t *)parts[i].iov_base + skip;
    size_t more = parts[i].iov_len - skip;
    skip = 0;
    if (len + more > REQUEST_DATA_MAX) return SIZE_MAX;
    if (from != e->payload + len) memcpy(e->payload + len, from, more);
    len += more;
  }
  return len;
}

bool uring_reply(const struct iovec *parts, int n) {
  wire_out_header header;
  memcpy(&header, parts->iov_base, sizeof header);
  entry *e = atomic_load(&channel.over_rings) && header.unique ? find_entry(header.unique, true) : NULL;
  if (!e) return false;
  size_t len = copy_payload(e, parts, n);
  if (len == SIZE_MAX) {
    note("an answer longer than any request can want");
    header.error = -EIO;
    len = 0;
  }
  header.len = (uint32_t)(sizeof header + len);
  memcpy(e->head->in_out, &header, sizeof header);
  e->head->payload_len = (uint32_t)len;
  if (e->queue == mine) commit(e);
  else hand_over(e);
  return true;
}

uint8_t *uring_data(uint64_t unique, uint8_t *otherwise) {
  const entry *e = atomic_load(&channel.over_rings) ? find_entry(unique, false) : NULL;
  return e ? e->payload : otherwise;
}

/* -- a queue's thread -------------------------------------------------------------------------------------------- */
static void register_entry(queue *q, entry *e) {
  wire_uring_command c = {.queue = q->number};
  ring_command *r = ring_next(&q->ring);
  r->opcode = URING_CMD;
  r->fd = channel.dev;
  r->number = WIRE_URING_REGISTER;
  r->addr = (uintptr_t)e->parts;
  r->len = 2;
  r->user_data = (uintptr_t)e;
  memcpy(r->cmd, &c, sizeof c);
}

/* Memory for `n` entries; false: there is none. */
static bool make_entries(queue *q, uint32_t n) {
  size_t len = (size_t)n * ENTRY_LEN;
  uint8_t *room = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return false;
  q->entries = calloc(n, sizeof *q->entries);
  if (!q->entries) {
    munmap(room, len);
    return false;
  }
  madvise(room, len, MADV_NOHUGEPAGE); /* most are never touched */
  for (uint32_t i = 0; i < n; i++, room += ENTRY_LEN) {
    entry *e = &q->entries[i];
    *e = (entry){.queue = q, .head = (wire_uring_header *)(void *)room, .payload = room + HEAD_LEN};
    e->parts[0] = (struct iovec){e->head, sizeof *e->head};
    e->parts[1] = (struct iovec){e->payload, REQUEST_DATA_MAX};
  }
  q->entries_count = q->alive = n;
  return true;
}

static void wait_for_others(queue *q) {
  ring_command *r = ring_next(&q->ring);
  r->opcode = IORING_OP_READ;
  r->fd = q->wake;
  r->addr = (uintptr_t)&q->wakes;
  r->len = sizeof q->wakes;
  r->user_data = WOKEN;
}

/* Puts the parts of a request in a row, right before its payload; false: it is none. */
static bool assemble(entry *e) {
  wire_in_header h;
  memcpy(&h, e->head->in_out, sizeof h);
  e->unique = h.unique;
  e->commit_id = e->head->commit_id;
  size_t payload = e->head->payload_len;
  if (payload > REQUEST_DATA_MAX || h.len < sizeof h + payload || h.len - sizeof h - payload > sizeof e->head->op_in) return false;
  size_t op = h.len - sizeof h - payload;
  e->raw = e->payload - op - sizeof h;
  e->raw_len = h.len;
  memcpy(e->raw, &h, sizeof h);
  memcpy(e->raw + sizeof h, e->head->op_in, op);
  grow_warm(e, payload);
  return true;
}

static void pin(uint32_t core);

/* A long answer takes its core for as long as its reader takes to use it. Read one behind the other, as read-ahead does, they go to
 * whichever core is idle: reader and queue work side by side, which is worth far more than a wake-up. */
static void choose_core(queue *q, const request *r) {
  wire_read_in in;
  bool is_long = r->header.opcode == WIRE_READ && r->body_len >= sizeof in;
  if (is_long) memcpy(&in, r->body, sizeof in), is_long = in.size >= LONG_PAYLOAD;
  if (is_long) {
    q->others = 0;
    if (!q->roams && ++q->long_reads >= ROAM_AFTER) q->roams = !sched_setaffinity(0, sizeof everywhere, &everywhere);
  } else {
    q->long_reads = 0;
    if (q->roams && ++q->others >= PIN_AFTER) q->roams = false, pin(q->number);
  }
}

static void arrived(entry *e) {
  request r;
  e->ours = true;
  bool whole = assemble(e);
  note_entry(e);
  if (!whole || !request_parse(e->raw, e->raw_len, &r)) {
    note("a request over io_uring that is none");
    return device_reply(e->unique, EIO, NULL, 0);
  }
  bool reads = r.header.opcode == WIRE_READ;
  choose_core(e->queue, &r);
  if (reads && serve_read_now(&r, e->payload)) return;
  if (r.header.opcode == WIRE_WRITE && append_write(&r, false)) return;
  if (!reads && r.header.opcode != WIRE_WRITE) return request_handle(e->raw, e->raw_len, e->payload);
  list_put(&waiting, e);
  sem_post(&waits);
}

/* Memory of long payloads, when more entries have some than are used together but in a burst. There is no completion to be looked
 * at: so what is the kernel's has nothing in it, and gets nothing while we are not in a call. */
static void cool_down(queue *q) {
  for (entry *e = q->entries; e < q->entries + q->entries_count && q->warm > WARM_MAX / 2; e++) {
    if (!e->warm || e->ours) continue;
    madvise(e->payload, REQUEST_DATA_MAX, MADV_DONTNEED);
    e->warm = false;
    q->warm--;
  }
}

static void complete(queue *q, uint64_t which, int32_t result) {
  if (which == WOKEN) {
    wait_for_others(q);
    for (entry *e = list_take(&q->answered), *next; e; e = next) next = e->next, commit(e);
    return;
  }
  if (!result) return arrived((entry *)(uintptr_t)which);
  q->alive--;
  q->error = -result;
  /* The mount is gone or going, which those who read /dev/fuse see, too. */
  if (result != -ENOTCONN && result != -ECONNABORTED && result != -ECANCELED) note("an entry of queue %u is lost: %s", q->number, strerror(-result));
}

static void serve_queue(queue *q) {
  uint64_t which;
  int32_t result;
  bool cool = true; /* since the last completion was looked at */
  for (;;) {
    bool any = ring_take(&q->ring, &which, &result);
    if (any) {
      complete(q, which, result);
      cool = q->warm <= WARM_MAX;
      if (!ring_prepared(&q->ring)) continue;
    }
    int error = ring_wait(&q->ring, cool); /* an answer goes out at once, and with it we wait for the next request */
    if (!any && !cool && !ring_prepared(&q->ring) && !ring_ready(&q->ring)) cool_down(q);
    if (!any) cool = true;
    if (!error || error == EINTR || error == EAGAIN || error == EBUSY) continue;
    note("queue %u: %s", q->number, strerror(error));
    channel_gone(GONE_BROKEN);
  }
}

/* Where the kernel shares a core out to sessions first (sched_autogroup), a thread's own nice counts among those of its session alone,
 * and the channel is a session of its own: its threads would wait for their turn behind every other session that computes. */
static void group_first(void) {
  int fd = open(AUTOGROUP, O_WRONLY | O_CLOEXEC);
  if (fd < 0) return; /* there are no such groups */
  ssize_t done = write(fd, GROUP_NICE, sizeof GROUP_NICE - 1); /* refused where we may not: only speed is lost */
  (void)done;
  close(fd);
}

static void be_nice(int nice) { setpriority(PRIO_PROCESS, (id_t)gettid(), nice); }

void uring_unpin(void) {
  if (!atomic_load(&channel.over_rings)) return;
  sched_setaffinity(0, sizeof everywhere, &everywhere);
  be_nice(0);
}

/* The thread cannot go where there is less to do, and its callers wait for it: it goes before those that compute there. */
static void pin(uint32_t core) {
  cpu_set_t one;
  be_nice(QUEUE_NICE);
  if (core >= CPU_SETSIZE) return;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one); /* one that is not there now, or not for us: anywhere */
}

/* 0 when the kernel has entries; it may use them at once. */
static int begin_queue(queue *q) {
  uint64_t which;
  int32_t result;
  wait_for_others(q);
  for (uint32_t i = 0; i < q->entries_count; i++) register_entry(q, &q->entries[i]);
  int error = ring_wait(&q->ring, false);
  while (!error && ring_take(&q->ring, &which, &result)) complete(q, which, result);
  return error ? error : q->alive ? 0 : q->error;
}

static void *queue_thread(void *arg) {
  queue *q = mine = arg;
  pin(q->number);
  q->wake = eventfd(0, EFD_CLOEXEC);
  q->error = q->wake < 0 ? errno : ring_open(&q->ring, q->wanted + 1);
  if (!q->error && !make_entries(q, q->wanted) && !make_entries(q, ENTRIES_FEW)) q->error = ENOMEM;
  sem_post(&told);
  while (sem_wait(&q->go)) {}
  if (!given_up) q->error = begin_queue(q);
  bool serves = !given_up && !q->error;
  sem_post(&told);
  if (serves) serve_queue(q);
  return NULL;
}

/* -- the beginning ----------------------------------------------------------------------------------------------- */
void uring_prepare(void) {
  char now = 0;
  status.why = "[mount] uring is off";
  if (!channel.uring) return;
  int fd = open(PARAMETER, O_RDONLY | O_CLOEXEC);
  ssize_t got = fd < 0 ? 0 : read(fd, &now, 1);
  if (fd >= 0) close(fd);
  status.why = "the kernel does not offer it";
  if (got != 1 || now != 'N') return;
  fd = open(PARAMETER, O_WRONLY | O_CLOEXEC);
  status.enabled = fd >= 0 && write(fd, "Y", 1) == 1;
  if (fd >= 0) close(fd);
  if (!status.enabled) status.why = PARAMETER " is N and only root may change it";
}

/* How many cores the list in that file has ("0-3,8-11"), and whether one is among them; 0: not known. */
static uint32_t cores_in(const char *path, uint32_t core, bool *among) {
  unsigned first, last;
  uint32_t n = 0;
  FILE *f = fopen(path, "re");
  *among = false;
  for (int got; f && (got = fscanf(f, "%u-%u", &first, &last)) > 0;) {
    if (got == 1) last = first;
    n += last - first + 1;
    if (core >= first && core <= last) *among = true;
    if (fgetc(f) != ',') break;
  }
  if (f) fclose(f);
  return n;
}

static uint32_t entries_wanted(uint32_t core) {
  bool online;
  uint32_t cores = cores_in(ONLINE, core, &online), share = ENTRIES_ALL / (cores ? cores : 1);
  if (channel.entries_max) return channel.entries_max;
  return !online ? ENTRIES_FEW : share < ENTRIES_MIN ? ENTRIES_MIN : share > ENTRIES_MAX ? ENTRIES_MAX : share;
}

static bool failed(const char *what, int error) {
  snprintf(why, sizeof why, "%s: %s", what, strerror(error));
  status.why = why;
  return false;
}

/* Has each thread do its next step; the first error. */
static int each_queue(bool go) {
  int error = 0;
  for (uint32_t i = 0; go && i < queues_made; i++) sem_post(&queues[i].go);
  for (uint32_t i = 0; i < queues_made; i++)
    while (sem_wait(&told)) {}
  for (uint32_t i = 0; i < queues_made && !error; i++) error = queues[i].error;
  return error;
}

static int start_thread(void *(*run)(void *), void *arg) {
  pthread_t thread;
  return pthread_create(&thread, NULL, run, arg);
}

static int start_queues(uint32_t n) {
  int error = 0;
  queues = calloc(n, sizeof *queues);
  if (!queues) return ENOMEM;
  sem_init(&told, 0, 0);
  for (uint32_t i = 0; i < n && !error; i++) {
    queue *q = &queues[i];
    q->number = (uint16_t)i;
    q->wanted = entries_wanted(i);
    list_open(&q->answered);
    sem_init(&q->go, 0, 0);
    error = start_thread(queue_thread, q);
    if (!error) queues_made++;
  }
  int opened = each_queue(false);
  return error ? error : opened;
}

bool uring_open(uint32_t kernel_minor, uint32_t kernel_flags2) {
  if (!channel.uring || !(kernel_flags2 & WIRE2_OVER_IO_URING)) return false;
  if (kernel_minor < WIRE_MINOR_URING) {
    status.why = "the kernel is older than 6.18";
    return false;
  }
  bool unused;
  uint32_t n = cores_in(POSSIBLE, 0, &unused);
  if (!n || n > UINT16_MAX) return failed(POSSIBLE, ERANGE);
  for (int i = 0; i < BUCKET_LOCKS; i++) pthread_mutex_init(&bucket_locks[i], NULL);
  if (sched_getaffinity(0, sizeof everywhere, &everywhere)) return failed("sched_getaffinity", errno);
  list_open(&waiting);
  sem_init(&waits, 0, 0);
  group_first();
  int error = start_queues(n);
  for (int i = 0; i < channel.workers && !error; i++) error = start_thread(pool_thread, NULL);
  if (!error) return true;
  given_up = true;
  each_queue(true);
  return failed("io_uring", error);
}

void uring_begin(void) {
  atomic_store(&channel.over_rings, true);
  int error = each_queue(true);
  if (error) failed("the kernel refused a queue", error);
  else status.queues = queues_made;
}

uring_state uring_status(void) { return status; }
