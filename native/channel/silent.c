/* Files that grow without reports: splice, sendfile, and mappings.
 *
 *      runs: seen to grow; looked at every few milliseconds
 *        │  ▲ there is room to run
 *        ▼  │
 *      stands: held by the backing inode's lock (hold.h), for as long as the kernel takes to be made to ask (ask.h)
 *        │
 *        ▼
 *      asks: before the next step of some pages the kernel asks us; the answer waits for room. With little room each step is held
 *            before it is let go, so that the next one asks again; without any it is denied with ENOSPC or EDQUOT
 *
 * Invariants
 * - With less room than running_room a silent writer writes one step of at most a pipe's length at a time.
 * - A question that waits holds no lock of the backing file: the daemon may read, upload and punch it meanwhile.
 * - No hold while a reported write of the file is held: what the brake asks about that takes the file's lock.
 * - Only what neither can be held nor asks (a mapping's stores; where the kernel cannot be made to ask) meets the last resort, the
 *   immutable flag.
 *
 * Where a step goes is not told. It is taken to go behind the end, where those before it went: of a silent file, and of one whose writer
 * has not been heard since its writes are reported, only what ends before its end is claimed, and nothing once it grew without becoming longer.
 */
#include <errno.h>

#include "ask.h"
#include "brake.h"
#include "brake_state.h"
#include "channel.h"
#include "hold.h"

#define SPEAKS_MS 20        /* from here on the writes of a file that is not ignored are reported, or never will be */
#define ASTRAY (8 * STEP)   /* past the room by so much: neither holding nor asking stops it */
#define HOLD_MS_MAX 200     /* then those that wait for the file's lock get their turn */
#define ASK_MS 5            /* a writer that was to ask has done so by now, if it writes */
#define INTERRUPTS 16
#define STEPS_LATE 2        /* that are done though their writer was to ask again */
#define STEPS_MAX 8         /* of so many at once; more may pass the limit by a little */

static uint64_t interrupted[INTERRUPTS]; /* uniques, the last few: the question may still be on its way to us */

void set_silent(watch *w, bool on) {
  if (w->silent != on) w->pool->silent += on ? 1 : UINT32_MAX;
  w->silent = on;
  w->unreported = 0;
  if (!on) w->splices = false, w->inside = 0;
}

static void begin_hold(watch *w, int64_t now) {
  w->hold = hold_begin(w->fd);
  w->hold_ms = now;
  w->taken = false;
}

void end_hold(watch *w) {
  hold_end(w->hold);
  w->hold = 0;
}

static void ask_for(watch *w) {
  if (!w->asked) w->asked = ask_node(w->id);
}

/* The writer stands still until the kernel was made to ask, which takes an answer of the daemon; then its questions wait. Held
 * first: attributes are not taken for new where a write ended since they were asked for. */
static void slow_down(watch *w, int64_t now) {
  w->asking = false;
  w->slipped = 0;
  if (w->hold || w->asked) return;
  begin_hold(w, now);
  if (!w->hold) ask_for(w);
}

/* Held for long: a writer may stand there that did not ask; or the daemon does, and cannot answer us. */
static void mind_hold(watch *w, int64_t now) {
  if (!w->hold || now - w->hold_ms < ASK_MS) return;
  ask_for(w);
  if (now - w->hold_ms < HOLD_MS_MAX) return;
  end_hold(w);
  begin_hold(w, now);
}

/* Whether the writer may have learned that there is nothing to ask just when it was made to ask: it waited for a core with the answer
 * in hand, or with the end of its step, which makes attributes that were on their way old. */
static bool may_be_late(const watch *w, int64_t now) { return w->stepped || (w->owed_ms && now - w->owed_ms < ALIVE_MS); }

/* One that may run is looked at often; when it has rested for long it is to ask before it runs again. */
void mind_silent(watch *w, bool idle, int64_t now) {
  mind_hold(w, now);
  if (!w->silent || (w->asking && !may_be_late(w, now)) || w->unaskable || w->pool->free || is_waiting(w)) return;
  w->pool->alert_ms = now;
  if (idle) ask_for(w);
}

/* With less room than this a silent writer is let go by the step: it could take more before it is seen. */
static int64_t running_room(const pool *p) {
  int64_t room = 2 * MARGIN_MS * RATE_A_CORE * (int64_t)(p->silent ? p->silent : 1);
  return room < brake.margin ? room : brake.margin;
}

/* Each of them may have a step on its way, which is counted when it is done; on a busy machine one that had asked before is, too. */
int64_t steps_room(const pool *p) {
  uint32_t steps = p->silent < STEPS_MAX ? p->silent : STEPS_MAX;
  return steps ? (steps + STEPS_LATE) * (int64_t)STEP : 0;
}

/* The last resort, of what cannot be held: the file becomes immutable, and its writer gets EPERM (a mapping's, SIGBUS). */
static void stop_silent(watch *w, int64_t past) {
  if (w->pool->stops && w->pool->left < -past) end_hold(w), set_stopped(w, true);
}

/* Where a step goes is not told before. Who wrote at the end only goes on there: what was written before that end is finished. */
bool is_behind(const watch *w, uint64_t end) {
  return (w->spoke && !w->silent) || (w->inside <= INSIDE_MAX && end <= w->size);
}

/* It may have written into holes. Of those that were punched the daemon takes nothing back: what went there is lost, so it ends here. */
void mind_inside(watch *w, uint64_t grown, uint64_t longer) {
  if (!w->splices) return;
  /* A step on its way has blocks before the file has its length: that comes later. */
  w->inside = w->inside + grown > longer ? w->inside + grown - longer : 0;
  if (!w->claimed || w->inside <= INSIDE_MAX || w->stopped) return;
  end_hold(w);
  set_stopped(w, true);
  note("node %llu: a splice went back into what was uploaded: its bytes are not taken", (unsigned long long)w->id);
}

void grew_silently(watch *w, uint64_t grown, int64_t now) {
  bool sure = now - w->reported_ms >= SPEAKS_MS;
  if (sure) w->pool->alert_ms = now;
  w->unreported += grown;
  w->stepped = true;
  w->owed_ms = 0;
  if (w->unaskable) {
    if (sure) stop_silent(w, SLACK);
    return;
  }
  if (w->unreported < SLACK) return; /* the file's map, which no report tells */
  if (!w->silent) set_silent(w, true);
  w->pool->alert_ms = now;
  if (w->pool->left >= running_room(w->pool)) return;
  if (w->asking && (w->slipped += grown) <= STEP) return; /* a step that had asked before */
  if (is_waiting(w)) return; /* what the brake does for a report takes the lock that a hold holds */
  slow_down(w, now);
  if (sure) stop_silent(w, ASTRAY);
}

/* The ask's thread: from here on it asks, or never will. A step that waits at the hold comes first. Behind it there is another hold,
 * until the writer did nothing from one to the next. */
void is_asking(uint64_t nodeid, bool asks) {
  pthread_mutex_lock(&brake.lock);
  watch *w = watch_of(nodeid);
  if (w && w->asked) {
    int64_t now = now_ms();
    measure(w, false, now);
    w->asked = false;
    w->asking = asks;
    w->unaskable = !asks;
    if (!is_waiting(w)) {
      uint32_t before = w->hold;
      w->hold = 0;
      if (asks && may_be_late(w, now) && w->pool->left < running_room(w->pool)) begin_hold(w, now);
      w->stepped = false;
      hold_end(before);
    }
  }
  pthread_mutex_unlock(&brake.lock);
}

void handle_holds(void) {
  pthread_mutex_lock(&brake.lock);
  for (uint32_t taken; (taken = hold_taken());)
    for (uint32_t i = brake.first_active; i != INDEX_NONE; i = brake.watches[i].next) {
      watch *w = &brake.watches[i];
      if (w->hold != taken) continue;
      w->taken = true;
      measure(w, false, now_ms());
      if (!w->asking && !is_waiting(w)) ask_for(w);
    }
  let_go(now_ms());
  pthread_mutex_unlock(&brake.lock);
}

/* A silent writer goes on as it likes, or by the step where there is little room: it is held before it is let go. What it takes is
 * seen when it has taken it. */
bool may_splice(held *h, watch *w, bool first_in_turn, int64_t now) {
  pool *p = w->pool;
  bool room = first_in_turn && p->left >= steps_room(p) + SLACK, little = p->left < running_room(p);
  if (!room || !little) end_hold(w); /* the daemon may want to punch meanwhile */
  else if (!w->hold) begin_hold(w, now);
  h->settles = room && w->hold && !w->taken;
  if (!room || h->settles) return false;
  w->asking = false;
  w->slipped = 0;
  w->owed_ms = now;
  w->moved_ms = p->alert_ms = now;
  activate(w);
  return true;
}

/* A silent writer was let go, and stands at the hold, if there is little room: its next step is to ask again. */
void step(watch *w) {
  if (w && (w->hold || w->pool->left < running_room(w->pool))) ask_for(w);
}

/* -- questions and answers --------------------------------------------------------------------------------------- */
/* To a question: yes, there are capabilities, or none. */
static void answer_question(uint64_t unique, bool some) {
  static const uint32_t length[2] = {20};
  device_reply(unique, some ? 0 : ENODATA, length, sizeof length);
}

static void deny(watch *w, pid_t tid, int error) {
  w->denied = error;
  w->denied_tid = tid;
  w->asking = true; /* it asks until it is told that there are none */
}

/* A call that wrote something before it was denied says how much; its caller calls again for the rest, to learn why. */
static bool wants_to_know(const watch *w, pid_t tid, int64_t now) {
  return w->denied_before && w->denied_tid == tid && now - w->denied_ms < ALIVE_MS && w->pool->left < steps_room(w->pool) + SLACK;
}

/* 0: it goes on. An error goes by a detour: there is something to remove, and that fails (brake_denies). */
void answer_silent(const held *h, watch *w, int error) {
  if (error && w) deny(w, h->e.tid, error);
  answer_question(h->unique, error && w);
}

/* A silent writer's question waits until there is room for a step. With the lock. */
static void take_question(watch *w, uint64_t unique, pid_t tid, int64_t now) {
  end_held(is_of_node, w->id, 0);
  measure(w, true, now);
  set_silent(w, true);
  w->splices = true;
  fan_event nowhere = {.fd = -1, .tid = tid, .offset = w->size};
  brake.waiting[brake.held_count++] = (held){.e = nowhere, .unique = unique, .nodeid = w->id, .number = ++brake.next_number};
  grant_claims(w->id);
  let_go(now);
}

static bool was_interrupted(uint64_t unique) {
  for (int i = 0; i < INTERRUPTS; i++)
    if (interrupted[i] == unique) return true;
  return false;
}

bool brake_asks(uint64_t nodeid, uint64_t unique, pid_t tid) {
  if (fan_fd() < 0) return false;
  int64_t now = now_ms();
  pthread_mutex_lock(&brake.lock);
  watch *w = watch_of(nodeid);
  if (w && wants_to_know(w, tid, now)) deny(w, tid, w->denied_before);
  bool denied = w && w->denied && w->denied_tid == tid; /* the kernel asks twice before it removes any */
  bool keeps = w && !denied && !w->pool->free && brake.held_count < HELD_MAX && !was_interrupted(unique) && fan_splices(tid, w->silent);
  if (w) w->denied_before = 0;
  if (denied) answer_question(unique, true);
  else if (w) w->asking = false, w->denied = 0;
  if (keeps) take_question(w, unique, tid, now);
  pthread_mutex_unlock(&brake.lock);
  if (keeps) wake_thread();
  return keeps || denied;
}

int brake_denies(uint64_t nodeid) {
  if (fan_fd() < 0) return 0;
  pthread_mutex_lock(&brake.lock);
  watch *w = watch_of(nodeid);
  int error = w ? w->denied : 0;
  if (error) w->denied_before = error, w->denied_ms = now_ms(), w->denied = 0;
  pthread_mutex_unlock(&brake.lock);
  return error;
}

static bool is_question(const held *h, uint64_t unique) { return h->unique == unique; }

bool brake_interrupted(uint64_t unique) {
  static uint32_t next;
  if (fan_fd() < 0) return false;
  pthread_mutex_lock(&brake.lock);
  uint32_t before = brake.held_count;
  end_held(is_question, unique, 0);
  bool found = brake.held_count != before;
  if (!found) interrupted[next++ % INTERRUPTS] = unique;
  else let_go(now_ms());
  pthread_mutex_unlock(&brake.lock);
  return found;
}
