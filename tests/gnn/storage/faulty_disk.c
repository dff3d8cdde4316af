/* Loaded before libc (LD_PRELOAD): makes reads of files whose path contains FAULT_PATH fail.

   FAULT_MODE   short  every read gives at most half of what is asked (at least 512 bytes)
                eio    reads that cover byte FAULT_OFFSET fail with EIO
                eintr  every second read is interrupted
                eof    reads that cover byte FAULT_OFFSET say that the file ends there
   For io_uring the queue entries are changed before the kernel sees them: shorter lengths for
   short, a bad descriptor (EBADF) for eio, a place behind the end of the file for eof. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int mode_is(const char *name) {
  const char *mode = getenv("FAULT_MODE");
  return mode && strcmp(mode, name) == 0;
}

static off_t fault_offset(void) {
  const char *text = getenv("FAULT_OFFSET");
  return text ? atoll(text) : -1;
}

static int ours(int fd) {
  char link[64], path[4096];
  const char *part = getenv("FAULT_PATH");
  if (!part) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return strstr(path, part) != NULL;
}

static int covers(off_t offset, size_t count) {
  off_t place = fault_offset();
  return place >= offset && place < offset + (off_t)count;
}

static size_t shorter(size_t count) {
  return count > 512 ? (count / 2 + 511) / 512 * 512 : count;
}

static __thread unsigned calls;

/* 0: go on with *count; 1: fail with errno; 2: end of file. */
static int fault(int fd, size_t *count, off_t offset) {
  if (!ours(fd)) return 0;
  if (mode_is("short")) *count = shorter(*count);
  if (mode_is("eintr") && calls++ % 2 == 0) { errno = EINTR; return 1; }
  if (mode_is("eio") && covers(offset, *count)) { errno = EIO; return 1; }
  if (mode_is("eof") && covers(offset, *count)) {
    if (offset == fault_offset()) return 2;
    *count = fault_offset() - offset;
  }
  return 0;
}

static ssize_t read_with_fault(int fd, void *buffer, size_t count, off_t offset) {
  static ssize_t (*real)(int, void *, size_t, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "pread64");
  switch (fault(fd, &count, offset)) {
    case 1: return -1;
    case 2: return 0;
    default: return real(fd, buffer, count, offset);
  }
}

ssize_t pread(int fd, void *buffer, size_t count, off_t offset) {
  return read_with_fault(fd, buffer, count, offset);
}

ssize_t pread64(int fd, void *buffer, size_t count, off_t offset) {
  return read_with_fault(fd, buffer, count, offset);
}

/* The callers in the tests give one part. */
ssize_t preadv64(int fd, const struct iovec *parts, int number, off_t offset) {
  return read_with_fault(fd, parts[0].iov_base, parts[0].iov_len, offset);
}

ssize_t preadv(int fd, const struct iovec *parts, int number, off_t offset) {
  return preadv64(fd, parts, number, offset);
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int number, off_t offset, int flags) {
  return preadv64(fd, parts, number, offset);
}

ssize_t preadv2(int fd, const struct iovec *parts, int number, off_t offset, int flags) {
  return preadv64(fd, parts, number, offset);
}

/* --- io_uring: SETUP 425, ENTER 426 --------------------------------------------------------- */

struct sqe {
  uint8_t opcode, flags;
  uint16_t priority;
  int32_t fd;
  uint64_t offset, address;
  uint32_t length, operation_flags;
  uint64_t rest[4];
};

struct ring {
  uint32_t offsets[8]; /* head, tail, mask, entries, flags, dropped, array, - */
  char *queue;
  struct sqe *entries;
};

static struct ring rings[4096];

void *mmap64(void *at, size_t length, int protection, int flags, int fd, off_t offset) {
  static void *(*real)(void *, size_t, int, int, int, off_t);
  if (!real) real = dlsym(RTLD_NEXT, "mmap64");
  void *memory = real(at, length, protection, flags, fd, offset);
  if (fd >= 0 && fd < 4096 && rings[fd].offsets[3]) {
    if (offset == 0) rings[fd].queue = memory;
    if (offset == 0x10000000) rings[fd].entries = memory;
  }
  return memory;
}

void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset) {
  return mmap64(at, length, protection, flags, fd, offset);
}

static void spoil(struct ring *ring) {
  uint32_t head = *(uint32_t *)(ring->queue + ring->offsets[0]);
  uint32_t tail = *(uint32_t *)(ring->queue + ring->offsets[1]);
  uint32_t mask = *(uint32_t *)(ring->queue + ring->offsets[2]);
  uint32_t *array = (uint32_t *)(ring->queue + ring->offsets[6]);
  for (; head != tail; head++) {
    struct sqe *entry = ring->entries + array[head & mask];
    if (!ours(entry->fd)) continue;
    if (mode_is("short")) entry->length = shorter(entry->length);
    if (mode_is("eio") && covers(entry->offset, entry->length)) entry->fd = -1;
    if (mode_is("eof") && covers(entry->offset, entry->length)) entry->offset = 1ull << 40;
  }
}

long syscall(long number, ...) {
  static long (*real)(long, ...);
  if (!real) real = dlsym(RTLD_NEXT, "syscall");
  va_list list;
  long a[6];
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  if (number == 426 && a[0] >= 0 && a[0] < 4096 && rings[a[0]].entries) spoil(&rings[a[0]]);
  long result = real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number == 425 && result >= 0 && result < 4096)
    memcpy(rings[result].offsets, (char *)a[1] + 40, sizeof rings[result].offsets);
  return result;
}
