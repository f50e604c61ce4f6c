/* The daemon's side of the shared page: see sharedpage.h. */
#include "native.h"
#include "sharedpage.h"

static intent_page *page_at(uint8_t *p) { return (intent_page *)(void *)p; }

uint64_t aof2_page_total(uint8_t *page) { return atomic_load(&page_at(page)->total); }

void aof2_page_arm(uint8_t *page) { atomic_store(&page_at(page)->armed, 1); }

uint64_t aof2_page_end(uint8_t *page, uint32_t slot) {
  return slot < STREAMS_MAX ? atomic_load(&page_at(page)->streams[slot].end) : 0;
}

uint64_t aof2_page_take(uint8_t *page, uint32_t slot) {
  intent_page *p = page_at(page);
  if (slot >= STREAMS_MAX) return 0;
  bool locked = page_lock(p, PAGE_LOCK_MAX_MS);
  uint64_t end = atomic_load(&p->streams[slot].end);
  if (!locked) return end;
  atomic_store(&p->streams[slot].taken, end);
  page_unlock(p);
  return end;
}

size_t aof2_page_len(void) { return sizeof(intent_page); }

void aof2_page_blocks(uint8_t *page, uint64_t block_len) { atomic_store(&page_at(page)->block_len, block_len); }

uint32_t aof2_page_opens(uint8_t *page, uint64_t ino) { return atomic_load(&page_at(page)->opens[page_slot(ino)]); }

void aof2_page_going(uint8_t *page, uint64_t ino, int more) {
  atomic_fetch_add(&page_at(page)->going[page_slot(ino)], more ? 1 : UINT32_MAX);
}

int64_t aof2_page_append(uint8_t *page, uint32_t slot, int fd, const uint8_t *record, size_t len) {
  intent_page *p = page_at(page);
  if (slot >= STREAMS_MAX) return -EINVAL;
  if (!page_lock(p, PAGE_APPEND_MAX_MS)) return -EBUSY;
  int64_t end = page_append(p, slot, fd, record, len) ? (int64_t)atomic_load(&p->streams[slot].end) : -errno;
  page_unlock(p);
  return end;
}
