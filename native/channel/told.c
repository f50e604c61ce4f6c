/* See told.h. */
#include "told.h"

#define BLOCK_BYTES 4096u

static row_time time_of(struct timespec t) { return (row_time){t.tv_sec, (uint32_t)t.tv_nsec}; }

void told_attr(wire_attr *out, const inode_row *row, const struct stat *backing, const told_as *as) {
  row_time mtime = row->mtime, ctime = row->ctime, atime = row->atime;
  uint64_t size = row->size, data = row->size - row->hole_bytes;
  uint64_t blocks = (data / BLOCK_BYTES + !!(data % BLOCK_BYTES)) * (BLOCK_BYTES / 512);
  if (backing) {
    size = (uint64_t)backing->st_size;
    blocks = (uint64_t)backing->st_blocks;
    mtime = time_of(backing->st_mtim);
    atime = time_of(backing->st_atim);
    if (row_time_before(ctime, time_of(backing->st_ctim))) ctime = time_of(backing->st_ctim);
  } else if (S_ISDIR(row->mode)) {
    size = BLOCK_BYTES;
    blocks = BLOCK_BYTES / 512;
  }
  *out = (wire_attr){.ino = row->ino, .size = size, .blocks = blocks, .mode = row->mode & ~as->umask, .nlink = row->nlink,
                     .uid = as->has_uid ? as->uid : row->uid, .gid = as->has_gid ? as->gid : row->gid, .rdev = row->rdev,
                     .blksize = BLOCK_BYTES, .atime = (uint64_t)atime.s, .atimensec = atime.ns, .mtime = (uint64_t)mtime.s,
                     .mtimensec = mtime.ns, .ctime = (uint64_t)ctime.s, .ctimensec = ctime.ns};
}

void told_entry(wire_entry_out *out, const inode_row *row, const struct stat *backing, const told_as *as) {
  uint64_t long_s = as->follows ? TOLD_DIRTY_S : TOLD_LONG_S;
  *out = (wire_entry_out){.nodeid = row->ino, .entry_valid = long_s, .attr_valid = backing ? TOLD_DIRTY_S : long_s};
  told_attr(&out->attr, row, backing, as);
}
