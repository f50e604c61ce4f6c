/* Nests: directories whose every name the channel has seen, by hash: a name that is not among them is not there.
 *
 * LOOKUP of such a name is answered from here, and births (births.h) take names here. The daemon
 * makes a nest by telling all names of a directory; a new directory is one from the start, as it is empty.
 *
 * Invariants
 * - The names of a nest are a superset of the directory's: what was forwarded is added before it is forwarded, what goes
 *   stays. Forgetting a nest is always right.
 * - Fixed room: a full table forgets all nests.
 *
 * Owner: births_lock, which births.h declares and speaks of. Memory only: a crash leaves nothing.
 */
#ifndef AOF2_CHANNEL_NESTS_H
#define AOF2_CHANNEL_NESTS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "channel.h"

#define NAME_MAX_LEN 255
#define ENTRY_VALID_S 3600 /* what is said of a nest and its names holds: the kernel sees every change of them */

/* The name that starts at `at` of the body; its length, or 0 where there is none that ends. */
size_t name_at(const request *r, size_t at, const uint8_t **name);

/* control.c hands these on. 0: answer now, 1: answered later by EV_NEST, 2: there is no room. */
enum { NEST_OPEN = 1, NEST_SERVE = 2, NEST_END = 3, NEST_END_ALL = 4 };
int nests_change(uint64_t dir, uint32_t action, bool has_gid, uint32_t gid, uint32_t seq);
void nests_names(uint64_t dir, const uint8_t *packed, size_t len);

/* serve.c: true when the request was answered. */
bool nests_lookup(const request *r);

/* forward.c: whether the answer of a request matters here, the request when it is about to be forwarded, and its answer. */
bool nests_minds(const request *r);
void nests_forwarded(const request *r);
void nests_answered(const pending *asked, const uint8_t *reply, size_t len);

/* changes.c: a name was given or taken, by a change that the channel made itself. */
void nests_changed(uint64_t dir, const uint8_t *name, size_t len);
/* A directory was made: it is empty, so its names are known. */
void nests_made(uint64_t dir, uint32_t mode, uint32_t gid);

/* births.c, with births_lock held. */
/* A name for a birth: true when nothing has it in a directory that is served here. It has it then, and *gid is the group that
 * the directory gives to what is made there, if it does. */
bool nests_take_name(uint64_t dir, const uint8_t *name, size_t len, uint32_t *gid);
void nests_reset(void); /* tests */
#endif
