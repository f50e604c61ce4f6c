/* What need not happen while a caller waits for a birth (births.h): backing files are made and registered ahead of it, and
 * let go of after its RELEASE. One thread does both.
 *
 * Invariants
 * - Fixed room. Without a file made ahead the worker makes one; without room to note what to let go of, it lets go itself.
 * - A file made ahead bears the name of an inode number that was granted and not given yet. Those that are not born are
 *   removed when the mount goes; after a crash they are files no row speaks of, and go with the others.
 * - As many are made as were missed, doubling: nothing is made where nothing was born. Without work the thread sleeps.
 *
 * Owner: the keeper's thread makes and lets go; any thread may call the rest. Never called with births_lock or tables_lock
 * held, but keeper_call.
 */
#ifndef AOF2_CHANNEL_KEEPER_H
#define AOF2_CHANNEL_KEEPER_H
#include <stdbool.h>

#include "tables.h"

void keeper_open(void); /* once, before any thread */
void *keeper_thread(void *unused);
/* All there is to do now; whether there was anything. The thread's, and the tests'. */
bool keeper_round(void);
/* There is something to make. */
void keeper_call(void);
/* Closes soon what a dropped node leaves. */
void keeper_let_go(aftermath after);
/* Returns when what was let go of before is closed. */
void keeper_settle(void);
#endif
