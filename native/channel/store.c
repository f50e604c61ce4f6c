/* See store.h. */
#include "store.h"

#include <errno.h>
#include <lmdb.h>
#include <stdatomic.h>

#include "channel.h"

#define MAP_BYTES (UINT64_C(1) << 40) /* as the daemon's: address space, no memory */
#define DATABASES_MAX 16

static MDB_env *env;
static MDB_dbi dbs[STORES];
static atomic_bool opened;
static _Thread_local MDB_txn *txn;
static _Thread_local MDB_cursor *cursor;

static int errno_of(int error) { return error > 0 ? error : error == MDB_VERSION_MISMATCH ? EPROTO : EIO; }

static int open_databases(void) {
  static const char *const names[STORES] = {"namespace", "meta", "chunk_catalog"};
  MDB_txn *first;
  int error = mdb_txn_begin(env, NULL, MDB_RDONLY, &first);
  if (error) return error;
  for (int i = 0; i < STORES && !error; i++) error = mdb_dbi_open(first, names[i], 0, &dbs[i]);
  if (error) {
    mdb_txn_abort(first);
    return error;
  }
  return mdb_txn_commit(first); /* the handles stay */
}

int store_open(const char *path) {
  if (env) return EALREADY;
  int error = mdb_env_create(&env);
  if (error) return errno_of(error);
  error = mdb_env_set_maxdbs(env, DATABASES_MAX);
  if (!error) error = mdb_env_set_mapsize(env, MAP_BYTES);
  if (!error) error = mdb_env_open(env, path, MDB_RDONLY | MDB_NOTLS, 0600);
  if (!error) error = open_databases();
  if (error) { /* `env` stays: it is not tried again */
    note("names are the daemon's: %s: %s", path, mdb_strerror(error));
    return errno_of(error);
  }
  atomic_store(&opened, true);
  return 0;
}

bool store_begin(void) {
  if (!atomic_load(&opened)) return false;
  int error = txn ? mdb_txn_renew(txn) : mdb_txn_begin(env, NULL, MDB_RDONLY, &txn);
  if (!error) return true;
  if (atomic_exchange(&opened, false)) note("names are the daemon's from here on: %s", mdb_strerror(error));
  return false;
}

void store_end(void) { mdb_txn_reset(txn); }

static span of_value(MDB_val v) { return (span){v.mv_data, v.mv_size}; }

static row_result result_of(int error) { return !error ? ROW_FOUND : error == MDB_NOTFOUND ? ROW_ABSENT : ROW_BROKEN; }

row_result store_get(int which, span key, span *value) {
  MDB_val k = {key.len, (void *)key.at}, v;
  int error = mdb_get(txn, dbs[which], &k, &v);
  if (!error) *value = of_value(v);
  return result_of(error);
}

static row_result move(MDB_val k, MDB_cursor_op how, span *found, span *value) {
  MDB_val v;
  int error = mdb_cursor_get(cursor, &k, &v, how);
  if (!error) *found = of_value(k), *value = of_value(v);
  return result_of(error);
}

row_result store_seek(span key, span *found, span *value) {
  int error = cursor ? mdb_cursor_renew(txn, cursor) : mdb_cursor_open(txn, dbs[STORE_NAMESPACE], &cursor);
  if (error) return ROW_BROKEN;
  return move((MDB_val){key.len, (void *)key.at}, MDB_SET_RANGE, found, value);
}

row_result store_next(span *found, span *value) { return move((MDB_val){0}, MDB_NEXT, found, value); }
