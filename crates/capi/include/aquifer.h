/* Aquifer: memory as the interface to storage. Version 0.1.

   A function returns 0 or a negative number of errno(3), unless it says otherwise; aq_last_error() is
   the text of this thread's last failure. Results come last among the arguments. A handle (aq_cache *)
   is freed by the function with _free in its name; handles may be freed in any order, except that
   aq_pages_free fails while guards of pages are held. Structs that begin with their size are
   initialised by a macro: aq_cache_options options = AQ_CACHE_OPTIONS_INIT; and what is 0 then is the
   default. Lengths, offsets and budgets are in bytes. Pointers must be valid, and must not be null
   unless it is said that they may; a null pointer is -EINVAL.

   A handle that was freed is -EBADF if it is one of the last 256 that were freed: enough to find such a
   defect in tests, not to rely on. A callback must not free the handle of the call that it is part of.

   In a forked child every call with a handle of the parent returns -ECHILD, or null or 0 where it
   returns no error; only freeing it is fine. The child opens what it needs again. Pointers into memory
   of handles (mappings, objects, views, pins, pages) must not be used in a child: the memory is gone,
   and something else may lie there.

   A function that says "Threads: any" may be called from any number of threads at a time with the same
   handles. A call ending in _async that fails gives no token, and leaves its buffers to
   the program.

   Targets of calls that copy are ordinary memory, or pinned: not unpinned memory of a user-backed
   mapping, which threads of the library would have to load while they work for the cache. Functions are
   not for handlers of asynchronous signals. A thread must not be cancelled (pthread_cancel) during a
   call, and callbacks must not throw, longjmp out, call pthread_exit, or fork. The process ends by
   abort(3) if memory runs out, as in every program in Rust; a defect of the library is
   -ENOTRECOVERABLE, with a line on the standard error output.

   Made by cbindgen from crates/capi/src; docs/c.md is the manual. */

#ifndef AQUIFER_H
#define AQUIFER_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The version of this header; aq_version() is that of the library that the program runs with. */
#define AQ_VERSION_MAJOR 0
#define AQ_VERSION_MINOR 1
#define AQ_VERSION_PATCH 0
/* For comparisons: 2.1.3 is 2001003. */
#define AQ_VERSION (AQ_VERSION_MAJOR * 1000000 + AQ_VERSION_MINOR * 1000 + AQ_VERSION_PATCH)

/**
 * `aq_device_open`: for reading and writing.
 */
#define AQ_DEVICE_WRITE 1

/**
 * `aq_device_open`: through the kernel's page cache, not by direct I/O.
 */
#define AQ_DEVICE_BUFFERED 2

/**
 * `aq_device_open`: by direct I/O, or fail. Otherwise direct I/O is used where it works.
 */
#define AQ_DEVICE_DIRECT 4

/**
 * `aq_device_open`: by plain system calls, not by io_uring.
 */
#define AQ_DEVICE_NO_IO_URING 8

/**
 * `aq_device_open_dax`: refuse memory that does not survive a loss of power.
 */
#define AQ_DEVICE_PERSISTENT 16

/**
 * `aq_error::kind`: no call has failed in this thread.
 */
#define AQ_KIND_NONE 0

/**
 * Nothing has this name, or there is nothing at the path.
 */
#define AQ_KIND_NOT_FOUND 1

/**
 * The name is taken, or a directory is not empty.
 */
#define AQ_KIND_ALREADY_EXISTS 2

/**
 * Not allowed: permissions, a wrong key, an immutable file.
 */
#define AQ_KIND_PERMISSION_DENIED 3

/**
 * Opened or mapped for reading only, or on read-only media.
 */
#define AQ_KIND_READ_ONLY 4

/**
 * In use elsewhere; it works once the other use has ended.
 */
#define AQ_KIND_BUSY 5

/**
 * Another process holds what is needed, and makes no progress.
 */
#define AQ_KIND_TIMED_OUT 6

/**
 * A signal ended a wait; try again.
 */
#define AQ_KIND_INTERRUPTED 7

/**
 * The arguments are wrong: a range, a size, an option, a name, a file of another kind.
 */
#define AQ_KIND_INVALID_INPUT 8

/**
 * Not possible here: with this device, file system, kernel or version.
 */
#define AQ_KIND_UNSUPPORTED 9

/**
 * The device, file system, pool, object or heap is full.
 */
#define AQ_KIND_NO_SPACE 10

/**
 * A limit of this process or machine is reached: memory, frames, mappings, pins.
 */
#define AQ_KIND_LIMIT_REACHED 11

/**
 * The file or device is shorter than it was.
 */
#define AQ_KIND_TRUNCATED 12

/**
 * The bytes on the media are inconsistent.
 */
#define AQ_KIND_DAMAGED 13

/**
 * A transfer failed.
 */
#define AQ_KIND_IO 14

/**
 * Data written earlier may not be durable, and trying again does not make it so.
 */
#define AQ_KIND_NOT_DURABLE 15

/**
 * The process is a fork of the one that opened it; open it again here.
 */
#define AQ_KIND_FORKED 16

/**
 * None of these.
 */
#define AQ_KIND_OTHER 17

/**
 * `aq_error::offset` where the failure concerns no place.
 */
#define AQ_NO_OFFSET UINT64_MAX

/**
 * `aq_file_open`: to read.
 */
#define AQ_OPEN_READ 1

/**
 * `aq_file_open`: to write.
 */
#define AQ_OPEN_WRITE 2

/**
 * `aq_file_open`: create it if there is none; needs AQ_OPEN_WRITE.
 */
#define AQ_OPEN_CREATE 4

/**
 * `aq_file_open`: create it, or fail if there is one; needs AQ_OPEN_WRITE.
 */
#define AQ_OPEN_CREATE_NEW 8

/**
 * `aq_file_open`: cut it to no bytes; needs AQ_OPEN_WRITE.
 */
#define AQ_OPEN_TRUNCATE 16

/**
 * `aq_file_open`: all writes go to the end.
 */
#define AQ_OPEN_APPEND 32

/**
 * `aq_file_open`: fail with -ELOOP if it is a symbolic link.
 */
#define AQ_OPEN_NO_FOLLOW 64

/**
 * `aq_file_allocate`: give the range pages, and extend the file to its end.
 */
#define AQ_ALLOCATE_EXTEND 0

/**
 * `aq_file_allocate`: give the range pages, and keep the file's length.
 */
#define AQ_ALLOCATE_KEEP_SIZE 1

/**
 * `aq_file_allocate`: make the range a hole.
 */
#define AQ_ALLOCATE_PUNCH_HOLE 2

/**
 * `aq_file_allocate`: make the range zeros with pages, and extend the file to its end.
 */
#define AQ_ALLOCATE_ZERO 3

/**
 * `aq_file_allocate`: remove the range; what is behind it moves to its place.
 */
#define AQ_ALLOCATE_COLLAPSE 4

/**
 * `aq_file_allocate`: insert a hole; what is there moves back.
 */
#define AQ_ALLOCATE_INSERT 5

/**
 * `aq_file_lock`: as long as necessary.
 */
#define AQ_WAIT (-1)

/**
 * `*held` of `aq_file_lock_conflict`: no lock is in the way.
 */
#define AQ_LOCK_NONE 0

/**
 * `*held` of `aq_file_lock_conflict`: another handle has a shared lock.
 */
#define AQ_LOCK_SHARED 1

/**
 * `*held` of `aq_file_lock_conflict`: another handle has an exclusive lock.
 */
#define AQ_LOCK_EXCLUSIVE 2

/**
 * `aq_mapper_map`: to read.
 */
#define AQ_ACCESS_READ 0

/**
 * `aq_mapper_map`: to read and write, as by `MAP_SHARED`: other processes see stores at once, and the
 * kernel writes them at any time. Right for files that several processes store to, and for files that are
 * filled or changed in large parts.
 */
#define AQ_ACCESS_WRITE 1

/**
 * `aq_mapper_map`, with `AQ_ACCESS_WRITE |`: stores stay in this process, in copies of pages, until they
 * are flushed, and a flush writes exactly these pages. Right for few stores, scattered over a large file,
 * of one process.
 */
#define AQ_STORES_PRIVATE 2

/**
 * `aq_mapper_map`, with `AQ_ACCESS_WRITE |`: disk blocks are reserved for the view when it is made and when
 * it grows. Otherwise the file stays sparse, and a store may find the disk full: it stays in a copy of its
 * page, and calls return -ENOSPC until a flush has written it.
 */
#define AQ_ALLOCATE 4

/**
 * The cache chooses what serves the mapping.
 */
#define AQ_BACKEND_AUTO 0

/**
 * A kernel file mapping whose residency is kept below the budget: read-only, regular files.
 */
#define AQ_BACKEND_KERNEL 1

/**
 * The cache itself: writable mappings, any device, exact budget, the cache's policy.
 */
#define AQ_BACKEND_USER 2

/**
 * Advice: detect the pattern. Applies to the whole mapping.
 */
#define AQ_ADVICE_NORMAL 0

/**
 * Advice: read in order. Applies to the whole mapping.
 */
#define AQ_ADVICE_SEQUENTIAL 1

/**
 * Advice: read at random, never read ahead. Applies to the whole mapping.
 */
#define AQ_ADVICE_RANDOM 2

/**
 * Advice: the range is needed soon; start to load it.
 */
#define AQ_ADVICE_WILL_NEED 3

/**
 * Advice: the range is not needed; give its memory back. Nothing is lost: dirty pages are written
 * first.
 */
#define AQ_ADVICE_DONT_NEED 4

/**
 * Advice: the range is not needed soon; its pages are the next to be evicted.
 */
#define AQ_ADVICE_COLD 5

/**
 * `aq_object_info::flags`: it holds a heap.
 */
#define AQ_OBJECT_HEAP 1

/**
 * `aq_object_info::flags`: it may be moved.
 */
#define AQ_OBJECT_RELOCATABLE 2

/**
 * `aq_object_info::flags`: reading needs a key.
 */
#define AQ_OBJECT_NEEDS_READ_KEY 4

/**
 * `aq_object_info::flags`: writing needs a key.
 */
#define AQ_OBJECT_NEEDS_WRITE_KEY 8

/**
 * A time that stays as it is.
 */
#define AQ_KEEP_TIME INT64_MIN

/**
 * `aq_path_rename`: replace what has the new name.
 */
#define AQ_RENAME_REPLACE 0

/**
 * `aq_path_rename`: fail if something has the new name.
 */
#define AQ_RENAME_NO_REPLACE 1

/**
 * `aq_path_rename`: exchange the two.
 */
#define AQ_RENAME_EXCHANGE 2

/**
 * `aq_pool_options::guard`: nothing: the fastest.
 */
#define AQ_GUARD_NONE 0

/**
 * `aq_pool_options::guard`: memory protection keys; -EOPNOTSUPP where the processor has none.
 */
#define AQ_GUARD_KEYS 1

/**
 * `aq_pool_options::guard`: the pool is mapped to be read only, and written by system calls; -EOPNOTSUPP
 * where there are none for it.
 */
#define AQ_GUARD_CALLS 2

/**
 * `aq_pool_options::guard`: the first of keys, calls and nothing that is available.
 */
#define AQ_GUARD_BEST 3

/**
 * A cache: owns a budget of memory; any number of devices share it.
 */
typedef struct aq_cache aq_cache;

/**
 * A device: a file, a block device, memory, or functions of the program.
 */
typedef struct aq_device aq_device;

/**
 * A directory that is being read.
 */
typedef struct aq_dir aq_dir;

/**
 * An open file of a pool.
 */
typedef struct aq_file aq_file;

/**
 * A range of a file of a pool in memory.
 */
typedef struct aq_file_view aq_file_view;

/**
 * Maps ordinary files, and keeps mappings for reuse.
 */
typedef struct aq_mapper aq_mapper;

/**
 * A device mapped into memory.
 */
typedef struct aq_mapping aq_mapping;

/**
 * An attached object.
 */
typedef struct aq_object aq_object;

/**
 * A device accessed by page guards.
 */
typedef struct aq_pages aq_pages;

/**
 * Pinned memory of a mapping: stays in memory, and may be passed to system calls.
 */
typedef struct aq_pin aq_pin;

/**
 * An open pool.
 */
typedef struct aq_pool aq_pool;

/**
 * A set of asynchronous calls under way, with a descriptor that is readable when one has completed.
 */
typedef struct aq_ready aq_ready;

/**
 * A file of rows of one length, with a cache of rows.
 */
typedef struct aq_rows aq_rows;

/**
 * A range of a file in memory.
 */
typedef struct aq_view aq_view;

/**
 * The options of `aq_cache_new`. Initialise it with `AQ_CACHE_OPTIONS_INIT`; 0 and NULL are the
 * defaults.
 */
typedef struct aq_cache_options {
    /**
     * `sizeof(aq_cache_options)`.
     */
    size_t size;
    /**
     * Memory that the cache may use, in bytes; at least 6 MiB, more
     * with larger pages. Default: a quarter of the machine's.
     */
    uint64_t budget_bytes;
    /**
     * The size of a page, a power of two from 4096 to 65536. Default: 4096.
     */
    size_t page_bytes;
    /**
     * The eviction policy: "clock", "loop-clock", "lru", "s3-fifo" or "sieve". Copied.
     */
    const char *policy;
    /**
     * Threads that read and write in the background, at most 1024. Default: 2.
     */
    size_t io_threads;
    /**
     * A name under which `aquifer stat` shows the cache while the program runs. Copied.
     */
    const char *publish;
    /**
     * Other than 0: faults are served by a thread of the library and not in a handler of SIGBUS, so that system
     * calls may use user-backed memory that is not pinned. A miss takes longer, and the process needs
     * CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1.
     */
    uint64_t serving_thread;
} aq_cache_options;

/**
 * A cache's state and activity at one moment. Initialise it with `AQ_CACHE_STATS_INIT`. Counts are
 * since the cache was created.
 */
typedef struct aq_cache_stats {
    /**
     * `sizeof(aq_cache_stats)`.
     */
    size_t size;
    /**
     * Memory that the cache may use.
     */
    uint64_t budget_bytes;
    /**
     * Size of a page.
     */
    uint64_t page_bytes;
    /**
     * Pages that occupy budget now.
     */
    uint64_t resident_pages;
    /**
     * Pages not yet written back.
     */
    uint64_t dirty_pages;
    /**
     * Pages kept resident by kernel-backed mappings, as last measured.
     */
    uint64_t kernel_resident_pages;
    /**
     * Accesses that found their page absent and started to load it.
     */
    uint64_t misses;
    /**
     * Pages loaded by read-ahead and prefetch, not by a miss.
     */
    uint64_t prefetched;
    /**
     * Faults that made a clean page dirty.
     */
    uint64_t write_faults;
    /**
     * Loads that failed.
     */
    uint64_t load_errors;
    /**
     * Pages evicted.
     */
    uint64_t evictions;
    /**
     * Pages written back.
     */
    uint64_t written_pages;
    /**
     * Write-back transfers that failed.
     */
    uint64_t write_errors;
    /**
     * Syncs of devices.
     */
    uint64_t syncs;
    /**
     * Misses that had to wait for a free frame.
     */
    uint64_t stalls;
    /**
     * Faults served in a signal handler or by the serving thread, not in a call.
     */
    uint64_t signals;
    /**
     * Time from a miss to its page being usable, median, in nanoseconds.
     */
    uint64_t fault_p50_ns;
    /**
     * The same at 99 %.
     */
    uint64_t fault_p99_ns;
} aq_cache_stats;

/**
 * Reads `size` bytes at `offset` into `buffer`; returns how many, less only at the end of the device, or
 * a negative number of errno(3).
 */
typedef int64_t (*aq_device_read_fn)(void *context, void *buffer, size_t size, uint64_t offset);

/**
 * Writes all `size` bytes of `buffer` to `offset`, which lie within the device; returns 0 or a negative
 * number of errno(3).
 */
typedef int (*aq_device_write_fn)(void *context, const void *buffer, size_t size, uint64_t offset);

/**
 * Makes every write that has returned durable; returns 0 or a negative number of errno(3), which is final
 * for these writes: a later call must not report success for them.
 */
typedef int (*aq_device_sync_fn)(void *context);

/**
 * Returns the length of the device in bytes, as it is now, or a negative number of errno(3).
 */
typedef int64_t (*aq_device_len_fn)(void *context);

/**
 * Called once, when nothing uses the device any more, in any thread; not in a forked child.
 */
typedef void (*aq_device_release_fn)(void *context);

/**
 * The functions of a device of the program. Initialise it with `AQ_DEVICE_FUNCTIONS_INIT`; `read` and
 * `len` must be set. All of them are called in any thread, several at a time. They must not use handles
 * of this library or memory of its mappings, throw C++ exceptions, longjmp out, call pthread_exit, or
 * fork, and must not wait for a thread that does any of the first two.
 */
typedef struct aq_device_functions {
    /**
     * `sizeof(aq_device_functions)`.
     */
    size_t size;
    /**
     * The first argument of each function.
     */
    void *context;
    /**
     * Reads.
     */
    aq_device_read_fn read;
    /**
     * Writes; null for a device that is only read.
     */
    aq_device_write_fn write;
    /**
     * Makes writes durable; null if `write` does so itself.
     */
    aq_device_sync_fn sync;
    /**
     * The length.
     */
    aq_device_len_fn len;
    /**
     * Frees `context`; may be null.
     */
    aq_device_release_fn release;
    /**
     * Offsets and lengths of transfers, and their memory, are multiples of it, except at the end of the
     * device. A power of two of at most 4096; default 1.
     */
    size_t alignment;
    /**
     * Other than 0: `read` does only what a handler of a signal may (signal-safety(7): pread(2), but not
     * malloc(3) or printf(3)), takes no lock that a thread may hold while it uses memory of a mapping, and
     * needs less than 64 KiB of stack. Otherwise the device can be used by pages and rows, and not be mapped.
     */
    uint64_t signal_safe;
    /**
     * A name for messages; default "custom". Copied.
     */
    const char *name;
} aq_device_functions;

/**
 * A failure. Set `size` before it is filled: `aq_error error = AQ_ERROR_INIT;`
 */
typedef struct aq_error {
    /**
     * `sizeof(aq_error)`.
     */
    size_t size;
    /**
     * The number of errno(3), positive; 0 if no call has failed in this thread.
     */
    int number;
    /**
     * One of `AQ_KIND_…`: what a program decides by.
     */
    int kind;
    /**
     * The first byte concerned, of the file, device, view or heap; or `AQ_NO_OFFSET`.
     */
    uint64_t offset;
    /**
     * The path concerned; "" if there is none. Valid as long as `text`.
     */
    const char *path;
    /**
     * What happened, to what, and what to do next; without a newline. Belongs to the library, and
     * is valid until this thread's next call that fails.
     */
    const char *text;
} aq_error;

/**
 * Bytes to be written.
 */
typedef struct aq_write {
    /**
     * Where the first one goes.
     */
    uint64_t offset;
    /**
     * The number of bytes.
     */
    size_t size;
    /**
     * The bytes.
     */
    const void *source;
} aq_write;

/**
 * A range of bytes.
 */
typedef struct aq_range {
    /**
     * The first byte.
     */
    uint64_t offset;
    /**
     * The number of bytes.
     */
    uint64_t length;
} aq_range;

/**
 * What is known of a file, as by stat(2). Initialise it with `AQ_FILE_STATUS_INIT`.
 */
typedef struct aq_file_status {
    /**
     * `sizeof(aq_file_status)`.
     */
    size_t size;
    /**
     * The number of the inode.
     */
    uint64_t inode;
    /**
     * The length in bytes.
     */
    uint64_t len_bytes;
    /**
     * Bytes of pages that it has.
     */
    uint64_t allocated_bytes;
    /**
     * Its names.
     */
    uint64_t links;
    /**
     * Kind and permissions, as `st_mode`.
     */
    uint32_t mode;
    /**
     * Owner.
     */
    uint32_t uid;
    /**
     * Group.
     */
    uint32_t gid;
    /**
     * 1 if it is immutable.
     */
    uint32_t immutable;
    /**
     * When it was read last, in nanoseconds since 1970, as the next ones.
     */
    int64_t accessed_ns;
    /**
     * When its content was changed last.
     */
    int64_t modified_ns;
    /**
     * When its metadata was changed last.
     */
    int64_t changed_ns;
    /**
     * Tells it from earlier files with the same number of the inode.
     */
    uint64_t generation;
    /**
     * The number of a character or block device, as `st_rdev`; otherwise 0.
     */
    uint64_t device;
} aq_file_status;

/**
 * Called with bytes of a file, which are valid during the call. It must not throw, longjmp out,
 * call pthread_exit, or fork.
 */
typedef void (*aq_bytes_fn)(void *context, const void *data, size_t size);

/**
 * The options of `aq_mapper_new`. Initialise it with `AQ_MAPPER_OPTIONS_INIT`; 0 is the default.
 */
typedef struct aq_mapper_options {
    /**
     * `sizeof(aq_mapper_options)`.
     */
    size_t size;
    /**
     * Bytes of mappings that are kept for reuse; 1 for none. Default: half of the machine's memory.
     */
    uint64_t mapping_cache_bytes;
    /**
     * Page cache that the files mapped here may occupy, in bytes; pages that were stored to through views
     * without `AQ_STORES_PRIVATE` are written and then dropped. Default: no limit.
     */
    uint64_t resident_budget_bytes;
    /**
     * The rate at which stores are written to their files before a flush. Default: none is.
     */
    uint64_t write_back_bytes_per_second;
} aq_mapper_options;

/**
 * Figures of a mapper. Initialise it with `AQ_MAPPER_STATS_INIT`.
 */
typedef struct aq_mapper_stats {
    /**
     * `sizeof(aq_mapper_stats)`.
     */
    size_t size;
    /**
     * Files whose mapping was found.
     */
    uint64_t hits;
    /**
     * Files that had to be mapped.
     */
    uint64_t misses;
    /**
     * Mappings kept for reuse.
     */
    uint64_t parked;
    /**
     * Length of the mappings kept for reuse.
     */
    uint64_t parked_bytes;
    /**
     * Page cache of the files, as last measured; 0 without a budget.
     */
    uint64_t resident_bytes;
} aq_mapper_stats;

/**
 * The options of `aq_map`. Initialise it with `AQ_MAP_OPTIONS_INIT`; 0 is the default.
 */
typedef struct aq_map_options {
    /**
     * `sizeof(aq_map_options)`.
     */
    size_t size;
    /**
     * Other than 0: for reading and writing.
     */
    int writable;
    /**
     * One of `AQ_BACKEND_…`.
     */
    int backend;
} aq_map_options;

/**
 * A range to be copied: `size` bytes from `offset` to `target`.
 */
typedef struct aq_read {
    /**
     * The first byte, in the mapping.
     */
    uint64_t offset;
    /**
     * The number of bytes.
     */
    size_t size;
    /**
     * Where they go.
     */
    void *target;
} aq_read;

/**
 * Called for a range, or a piece of one longer than 64 KiB: its position in the list, the offset of
 * the first byte, and the bytes, which are valid during the call. A value other than 0 ends the
 * visit. It must not throw, longjmp out,
 * call pthread_exit, or fork.
 */
typedef int (*aq_visit_fn)(void *context,
                           size_t index,
                           uint64_t offset,
                           const void *data,
                           size_t size);

/**
 * Names the range that `aq_mapping_visit_in_order` visits next: puts it into `*range`, which is empty
 * before, and returns 1; or 0 if there is none now. It must not throw, longjmp out, call pthread_exit, or
 * fork.
 */
typedef int (*aq_next_range_fn)(void *context, aq_range *range);

/**
 * The options of `aq_object_create`. Initialise it with `AQ_OBJECT_OPTIONS_INIT`; 0 and NULL are the
 * defaults.
 */
typedef struct aq_object_options {
    /**
     * `sizeof(aq_object_options)`.
     */
    size_t size;
    /**
     * Other than 0: it holds a heap (`aq_heap_alloc`) instead of plain bytes.
     */
    int heap;
    /**
     * Other than 0: it may be moved to another address later.
     */
    int relocatable;
    /**
     * Where it is attached; default a free random address.
     */
    uint64_t address;
    /**
     * Required to attach it for reading. Copied.
     */
    const char *read_key;
    /**
     * Required to attach it for writing, to destroy, rename, resize and move it. Copied.
     */
    const char *write_key;
    /**
     * The first `content_size` bytes of its content; those behind are zero. Not with `heap`. Copied.
     */
    const void *content;
    /**
     * The number of these bytes; default 0.
     */
    size_t content_size;
} aq_object_options;

/**
 * What is known of an object. Initialise it with `AQ_OBJECT_INFO_INIT`.
 */
typedef struct aq_object_info {
    /**
     * `sizeof(aq_object_info)`.
     */
    size_t size;
    /**
     * Its length in bytes, a multiple of 4096.
     */
    uint64_t size_bytes;
    /**
     * Where it is attached, in every process.
     */
    uint64_t address;
    /**
     * When it was created, in nanoseconds since 1970.
     */
    uint64_t created_ns;
    /**
     * When its metadata was changed last.
     */
    uint64_t changed_ns;
    /**
     * 'D' detached, 'R' attached for reading, 'W' for writing, 'P' a commit is being written, 'C' a
     * commit is durable and not yet applied.
     */
    uint32_t state;
    /**
     * A combination of `AQ_OBJECT_…`.
     */
    uint32_t flags;
} aq_object_info;

/**
 * Called for an object: its name, which may contain any bytes and is not ended by a zero, and what is
 * known of it; both are valid during the call. A value other than 0 ends the list. It must not throw,
 * longjmp out, call pthread_exit, or fork.
 */
typedef int (*aq_object_fn)(void *context,
                            const char *name,
                            size_t name_size,
                            const aq_object_info *info);

/**
 * The options of `aq_object_attach_with`. Initialise it with `AQ_ATTACH_OPTIONS_INIT`; 0 and NULL are the
 * defaults.
 */
typedef struct aq_attach_options {
    /**
     * `sizeof(aq_attach_options)`.
     */
    size_t size;
    /**
     * 1 for writing, 0 for reading.
     */
    uint64_t writable;
    /**
     * The object's key, if it has one. Copied.
     */
    const char *key;
    /**
     * Memory for copies of pages that are kept from one psync to the next, in bytes; stores between two
     * psyncs are not bounded by it. Default: a quarter of the machine's.
     */
    uint64_t shadow_budget_bytes;
} aq_attach_options;

/**
 * The psyncs of an attachment so far. Initialise it with `AQ_OBJECT_STATS_INIT`.
 */
typedef struct aq_object_stats {
    /**
     * `sizeof(aq_object_stats)`.
     */
    size_t size;
    /**
     * Commits with changes of this object.
     */
    uint64_t psyncs;
    /**
     * Pages stored to before these commits.
     */
    uint64_t pages;
    /**
     * Bytes written for them: changed parts and whole pages in the log, and pages put aside.
     */
    uint64_t bytes;
} aq_object_stats;

/**
 * What a heap holds. Initialise it with `AQ_HEAP_STATS_INIT`.
 */
typedef struct aq_heap_stats {
    /**
     * `sizeof(aq_heap_stats)`.
     */
    size_t size;
    /**
     * Allocations.
     */
    uint64_t allocations;
    /**
     * Their bytes.
     */
    uint64_t allocated_bytes;
    /**
     * Bytes that are free.
     */
    uint64_t free_bytes;
    /**
     * The longest run of free pages, in bytes.
     */
    uint64_t largest_run_bytes;
} aq_heap_stats;

/**
 * A shared guard on a page: its bytes do not change and stay in memory until `aq_page_release`. Two
 * copies of the struct are one guard.
 */
typedef struct aq_page {
    /**
     * The page's bytes; null after the release.
     */
    const void *data;
    /**
     * The page.
     */
    uint64_t page;
    /**
     * Where it belongs to.
     */
    aq_pages *pages;
} aq_page;

/**
 * An exclusive guard on a page, which is dirty afterwards. Two copies of the struct are one guard.
 */
typedef struct aq_page_mut {
    /**
     * The page's bytes; null after the release.
     */
    void *data;
    /**
     * The page.
     */
    uint64_t page;
    /**
     * Where it belongs to.
     */
    aq_pages *pages;
} aq_page_mut;

/**
 * Called for a page: its bytes are valid during the call, and do not change. A value other than 0
 * ends the visit. It must not throw, longjmp out,
 * call pthread_exit, or fork.
 */
typedef int (*aq_page_fn)(void *context, uint64_t page, const void *data, size_t size);

/**
 * Names the page that `aq_pages_visit_in_order` visits next: puts it into `*page` and returns 1; or 0 if
 * there is none now. It must not throw, longjmp out, call pthread_exit, or fork.
 */
typedef int (*aq_next_page_fn)(void *context, uint64_t *page);

/**
 * The options of `aq_pool_create` and `aq_pool_open`. Initialise it with `AQ_POOL_OPTIONS_INIT`; 0 and
 * NULL are the defaults.
 */
typedef struct aq_pool_options {
    /**
     * `sizeof(aq_pool_options)`.
     */
    size_t size;
    /**
     * Open: other than 0: only to read; needs no permission to write.
     */
    int read_only;
    /**
     * Other than 0: fail with -EBUSY if another process has it open, and keep others out.
     */
    int exclusive;
    /**
     * Create: other than 0: replace what is at the path.
     */
    int overwrite;
    /**
     * Create: permissions of the file, minus the umask. Default: 0600.
     */
    uint32_t mode;
    /**
     * Create: the length of the log.
     */
    uint64_t log_bytes;
    /**
     * Create: the number of slots for objects, files and directories.
     */
    uint64_t inodes;
    /**
     * The directory for the memory that the processes share; default /dev/shm. Copied.
     */
    const char *segment_directory;
    /**
     * How long to wait for a process that holds a lock and makes no progress, before -ETIMEDOUT.
     * Default: 10 s.
     */
    uint64_t stall_timeout_ns;
    /**
     * Permissions of the memory that the processes share. Default: 0600.
     */
    uint32_t segment_mode;
    /**
     * One of `AQ_GUARD_…`: what guards the pool against stray stores of this process.
     */
    int guard;
    /**
     * The socket of the pool's broker (`aq_pool_open_granted`); default beside the pool. Copied.
     */
    const char *broker_socket;
} aq_pool_options;

/**
 * What a pool holds. Initialise it with `AQ_POOL_INFO_INIT`.
 */
typedef struct aq_pool_info {
    /**
     * `sizeof(aq_pool_info)`.
     */
    size_t size;
    /**
     * Pages of 4096 bytes that are free.
     */
    uint64_t free_pages;
    /**
     * The longest run of free pages.
     */
    uint64_t largest_free_pages;
    /**
     * Slots that are free.
     */
    uint64_t free_slots;
    /**
     * Objects.
     */
    uint64_t objects;
    /**
     * Regular files.
     */
    uint64_t files;
    /**
     * Directories.
     */
    uint64_t directories;
    /**
     * Processes that have it open for writing.
     */
    uint64_t processes;
    /**
     * Records that opening it has recovered.
     */
    uint64_t recovered_records;
} aq_pool_info;

/**
 * How much room a pool has, as by statvfs(3). Initialise it with `AQ_POOL_SPACE_INIT`.
 */
typedef struct aq_pool_space {
    /**
     * `sizeof(aq_pool_space)`.
     */
    size_t size;
    /**
     * Bytes for content, used or free.
     */
    uint64_t total_bytes;
    /**
     * Free bytes, also those that were freed a moment ago.
     */
    uint64_t free_bytes;
    /**
     * The longest run of bytes that are free at once.
     */
    uint64_t largest_free_bytes;
    /**
     * Slots for objects, files and directories, used or free.
     */
    uint64_t total_slots;
    /**
     * Free slots.
     */
    uint64_t free_slots;
} aq_pool_space;

/**
 * The completion of an asynchronous call.
 */
typedef struct aq_completion {
    /**
     * The token that was given to the call.
     */
    uint64_t token;
    /**
     * What the call would have returned: 0, or a negative number of errno(3).
     */
    int result;
    /**
     * Of a failure, one of `AQ_KIND_…`; otherwise `AQ_KIND_NONE`.
     */
    int kind;
    /**
     * Of a failure, the first byte concerned; otherwise, or if it concerns no place, `AQ_NO_OFFSET`.
     */
    uint64_t offset;
    /**
     * 0.
     */
    uint64_t reserved;
} aq_completion;

/**
 * The options of `aq_rows_open`. Initialise it with `AQ_ROWS_OPTIONS_INIT`; `row_bytes` must be set.
 */
typedef struct aq_rows_options {
    /**
     * `sizeof(aq_rows_options)`.
     */
    size_t size;
    /**
     * The length of a row in bytes.
     */
    size_t row_bytes;
    /**
     * Bytes of the file before the first row.
     */
    uint64_t header_bytes;
    /**
     * Memory for rows, in bytes. Default: a quarter of the machine's.
     */
    uint64_t budget_bytes;
} aq_rows_options;

/**
 * The activity of rows. Initialise it with `AQ_ROWS_STATS_INIT`.
 */
typedef struct aq_rows_stats {
    /**
     * `sizeof(aq_rows_stats)`.
     */
    size_t size;
    /**
     * Rows that were in memory.
     */
    uint64_t hits;
    /**
     * Rows that were not.
     */
    uint64_t misses;
    /**
     * Rows that were replaced.
     */
    uint64_t evictions;
    /**
     * Transfers.
     */
    uint64_t reads;
    /**
     * Their bytes.
     */
    uint64_t read_bytes;
    /**
     * Rows in memory now.
     */
    uint64_t resident_rows;
    /**
     * Rows that memory has room for.
     */
    uint64_t capacity_rows;
} aq_rows_stats;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Creates a cache; `*cache` is null if it fails. `options` may be null.
 *
 * Threads: any. Errors: -EINVAL for a budget, page size or policy that does not exist, -E2BIG for an
 * option of a later version, -ENOMEM. Frees: the caller, by `aq_cache_free`.
 */
int aq_cache_new(const aq_cache_options *options,
                 aq_cache **cache);

/**
 * Frees a cache; null is fine. Mappings and pages made with it stay valid, and keep its memory until
 * the last one is freed.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_cache_free(aq_cache *cache);

/**
 * Changes the budget. Raising it takes effect at once; lowering it evicts in the background.
 *
 * Threads: any. Errors: -EINVAL if the budget is below the minimum or above the machine's memory.
 */
int aq_cache_resize(aq_cache *cache, uint64_t budget_bytes);

/**
 * Whether pages are still being evicted because the budget was lowered: 1 or 0; 0 if `cache` is null.
 *
 * Threads: any.
 */
int aq_cache_is_shrinking(aq_cache *cache);

/**
 * Fills `stats`.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_cache_get_stats(aq_cache *cache, aq_cache_stats *stats);

/**
 * The statistics of a cache as OpenMetrics text, as Prometheus scrapes it; `name` is the value of
 * the label `cache`, and may be null.
 *
 * Threads: any. Errors: -EINVAL. Frees: the caller, by `aq_string_free`.
 */
int aq_cache_metrics(aq_cache *cache, const char *name, char **text);

/**
 * Makes a device of functions of the program; `*device` is null if it fails, and then `release` is not
 * called. What uses the device reads and writes one transfer at a time in each thread. Two devices made
 * by two calls are two devices: a cache would keep two copies of bytes that both have.
 *
 * Threads: any. Errors: -EINVAL, -E2BIG. Frees: the caller, by `aq_device_free`; `context` is the
 * program's until `release` is called.
 */
int aq_device_custom(const aq_device_functions *functions,
                     aq_device **device);

/**
 * Opens a file or block device; `*device` is null if it fails. `flags` is 0 or a combination of
 * `AQ_DEVICE_…`.
 *
 * Threads: any. Errors: those of open(2), -EINVAL, -EOPNOTSUPP for what is no file or block device.
 * Frees: the caller, by `aq_device_free`.
 */
int aq_device_open(const char *file, int flags, aq_device **device);

/**
 * Makes a device of memory, all zeros, for tests; `*device` is null if it fails.
 *
 * Threads: any. Errors: -EINVAL, -ENOMEM. Frees: the caller, by `aq_device_free`.
 */
int aq_device_memory(size_t len_bytes, aq_device **device);

/**
 * Opens a file whose bytes are memory: on tmpfs or hugetlbfs, on a DAX file system, or a /dev/dax device.
 * `*device` is null if it fails. `flags` is 0 or a combination of `AQ_DEVICE_WRITE` and
 * `AQ_DEVICE_PERSISTENT`.
 *
 * Threads: any. Errors: those of open(2), -EINVAL, -ENOSPC, -EOPNOTSUPP for what is not in memory. Frees:
 * the caller, by `aq_device_free`.
 */
int aq_device_open_dax(const char *file,
                       int flags,
                       aq_device **device);

/**
 * Puts the length of a device in bytes, as it is now, into `*len_bytes`.
 *
 * Threads: any. Errors: -EINVAL, -EIO.
 */
int aq_device_len(aq_device *device, uint64_t *len_bytes);

/**
 * Frees a device; null is fine. What was made with it keeps it open.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_device_free(aq_device *device);

/**
 * The text of this thread's last failure; "" if no call has failed. Never null.
 *
 * Threads: any; each has its own. Frees: nothing; the text belongs to the library and is valid until
 * this thread's next call that fails, or its end.
 */
const char *aq_last_error(void);

/**
 * This thread's last failure in full. A call that succeeds does not clear it, nor does a failure of
 * this one replace it.
 *
 * Threads: any; each has its own. Errors: -EINVAL.
 */
int aq_last_error_info(aq_error *error);

/**
 * Opens a file of a pool; `*file` is null if it fails. `flags` is a combination of `AQ_OPEN_…`; `mode`
 * has the permissions of a file that is created, minus the umask; 0 is 0666.
 *
 * Threads: any. Errors: those of open(2). Durable: a file that was created after `aq_pool_sync` or
 * `aq_file_sync`. Frees: the caller, by `aq_file_free`.
 */
int aq_file_open(aq_pool *pool,
                 const char *name,
                 int flags,
                 uint32_t mode,
                 aq_file **file);

/**
 * Creates a file without a name: it is seen by no other process until `aq_file_link` gives it a name,
 * and is gone if it is freed before. `flags` and `mode` are as for `aq_file_open`; `*file` is null if it
 * fails.
 *
 * Threads: any. Errors: -EINVAL, -ENOSPC, -EROFS. Frees: the caller, by `aq_file_free`.
 */
int aq_file_open_unnamed(aq_pool *pool,
                         int flags,
                         uint32_t mode,
                         aq_file **file);

/**
 * Gives an open file a name, its first or another one. If `replace` is not 0, what has the name is
 * replaced: at any moment, also in a crash, it is the one file or the other.
 *
 * Threads: any. Errors: those of link(2). Durable: after `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_link(aq_file *file, const char *name, int replace);

/**
 * Hands an open file to another process, through a connected socket of the kind AF_UNIX, SOCK_STREAM:
 * that process calls `aq_file_receive` with the other end. For files without a name, which no other
 * process can open. Waits at most `timeout_ns`.
 *
 * Threads: any; nothing else may use the socket meanwhile. Errors: -ETIMEDOUT; -ECONNREFUSED if the other
 * process could not take it; -EPIPE and others if it ended: it may have the file then or not.
 */
int aq_file_send(aq_file *file,
                 int socket,
                 uint64_t timeout_ns);

/**
 * Takes the file that another process hands over by `aq_file_send`; `*file` is null if it fails.
 *
 * Threads: any; nothing else may use the socket meanwhile. Errors: -ETIMEDOUT; -EXDEV for a file of
 * another pool; -ESTALE if it is gone; others of the socket. Frees: the caller, by `aq_file_free`.
 */
int aq_file_receive(aq_pool *pool, int socket, uint64_t timeout_ns, aq_file **file);

/**
 * Closes a file; null is fine. Its locks are released, and its views stay valid.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_file_free(aq_file *file);

/**
 * Reads at most `size` bytes from `offset`, and puts their number into `*done`: less only at the end of
 * the file.
 *
 * Threads: any; a read beside a write sees aligned words of eight bytes whole. Errors: -EBADF if it is
 * not open to read, -EIO.
 */
int aq_file_read(aq_file *file,
                 void *buffer,
                 size_t size,
                 uint64_t offset,
                 size_t *done);

/**
 * Writes all `size` bytes to `offset`; to the end if the file was opened with AQ_OPEN_APPEND. Other
 * processes see them at once.
 *
 * Threads: any. Errors: -EBADF if it is not open to write, -ENOSPC, -EFBIG, -EIO; bytes before may be
 * written. Durable: after `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_write(aq_file *file,
                  const void *buffer,
                  size_t size,
                  uint64_t offset);

/**
 * Reads at most the length of `count` buffers from `offset`, one after the other, and puts the number of
 * bytes into `*done`, also if it fails: otherwise less only at the end of the file. Each buffer is filled
 * as by a call of `aq_file_read`.
 *
 * Threads: any. Errors: as `aq_file_read`.
 */
int aq_file_readv(aq_file *file,
                  const struct iovec *buffers,
                  size_t count,
                  uint64_t offset,
                  size_t *done);

/**
 * Writes `count` buffers one after the other to `offset`; to the end if the file was opened with
 * AQ_OPEN_APPEND. `*done`, which may be null, gets the number of bytes written, also if it fails. Each
 * buffer is written as by a call of `aq_file_write`.
 *
 * Threads: any. Errors and Durable: as `aq_file_write`.
 */
int aq_file_writev(aq_file *file,
                   const struct iovec *buffers,
                   size_t count,
                   uint64_t offset,
                   size_t *done);

/**
 * Writes all `size` bytes to the end of the file, and puts the offset where they are into `*offset`, which
 * may be null. Appends of several threads and processes do not overwrite each other. If it fails, a part
 * of the bytes may be at the end of the file, and `*offset` is as before.
 *
 * Threads: any. Errors and Durable: as `aq_file_write`.
 */
int aq_file_append(aq_file *file,
                   const void *buffer,
                   size_t size,
                   uint64_t *offset);

/**
 * Writes `size` bytes to `offset`, all or nothing: no reader and no crash sees a part of them.
 *
 * Threads: any. Errors: as `aq_file_write`; -EINVAL. Durable: as `aq_file_write`.
 */
int aq_file_write_atomic(aq_file *file, const void *buffer, size_t size, uint64_t offset);

/**
 * Writes `count` ranges of a file, all or nothing: no reader and no crash sees some of them. Where ranges
 * overlap, the later one counts.
 *
 * Threads: any. Errors: as `aq_file_write_atomic`; -EBADF if it was opened with AQ_OPEN_APPEND; -ENOSPC
 * or -E2BIG for too many ranges at once. Durable: as `aq_file_write`.
 */
int aq_file_write_atomic_many(aq_file *file,
                              const aq_write *writes,
                              size_t count);

/**
 * Exchanges `size` bytes of two files of one pool, in whole pages of 4096 bytes, without copying them:
 * all at once for readers and after a crash.
 *
 * Threads: any. Errors: -EINVAL for what are not whole pages, -EXDEV, -EBUSY if one has a writable
 * view, -ENOSPC. Durable: as `aq_file_write`.
 */
int aq_file_exchange_range(aq_file *file,
                           uint64_t offset,
                           aq_file *other,
                           uint64_t other_offset,
                           uint64_t size);

/**
 * Copies a range of a file to `to_offset` of another, or of the same. `*done`, which may be null, gets the
 * number of bytes copied, also if it fails: otherwise less only if the file ends before the range.
 *
 * Threads: any. Errors and Durable: as `aq_file_write`.
 */
int aq_file_copy_range(aq_file *file,
                       aq_range range,
                       aq_file *to,
                       uint64_t to_offset,
                       uint64_t *done);

/**
 * Makes a file durable: with all its metadata if `data_only` is 0, otherwise with what reading it
 * needs.
 *
 * Threads: any. Durable: every change of the file before the call, when it returns 0. Errors: -EIO:
 * the pool is read-only from then on.
 */
int aq_file_sync(aq_file *file, int data_only);

/**
 * Makes a range of a file durable: with all changes of the pool before it if `data_only` is 0,
 * otherwise with what reading it needs. A length of UINT64_MAX is all from the offset on.
 *
 * Threads: any. Durable: every change of the range before the call, when it returns 0. Errors: as
 * `aq_file_sync`.
 */
int aq_file_sync_range(aq_file *file, aq_range range, int data_only);

/**
 * Lets the media begin with what a later `aq_file_sync_range` of this range will write, without waiting:
 * a hint, whose failures are those of the sync.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_file_begin_sync(aq_file *file,
                       aq_range range);

/**
 * Makes a file longer, with zeros, or shorter.
 *
 * Threads: any. Errors: -EBADF, -EFBIG. Durable: as `aq_file_write`.
 */
int aq_file_set_len(aq_file *file, uint64_t len_bytes);

/**
 * Allocates, zeroes, frees or moves a range of a file, as fallocate(2): `how` is one of
 * `AQ_ALLOCATE_…`.
 *
 * Threads: any. Errors: -EBADF, -ENOSPC, -EINVAL. Durable: as `aq_file_write`.
 */
int aq_file_allocate(aq_file *file, int how, aq_range range);

/**
 * Puts the first range with data (`hole` is 0) or the first hole at or after `offset` into `*range`;
 * one of length 0 if there is none.
 *
 * Threads: any. Errors: -EINVAL, -EIO.
 */
int aq_file_next(aq_file *file,
                 uint64_t offset,
                 int hole,
                 aq_range *range);

/**
 * Moves the pages of a file so that they lie in as few runs as possible; `*runs`, which may be null, gets
 * the number of runs that are left.
 *
 * Threads: any. Errors: -EBADF if it is not open to write, -EBUSY if it has a writable view, -ENOSPC.
 */
int aq_file_defragment(aq_file *file,
                       size_t *runs);

/**
 * Fills `status`.
 *
 * Threads: any. Errors: -EINVAL, -EIO.
 */
int aq_file_stat(aq_file *file, aq_file_status *status);

/**
 * Changes the permissions of a file.
 *
 * Threads: any. Errors: -EPERM, -EROFS. Durable: after `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_chmod(aq_file *file, uint32_t mode);

/**
 * Changes owner and group; UINT32_MAX leaves one as it is.
 *
 * Threads: any. Errors: -EPERM, -EROFS. Durable: after `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_chown(aq_file *file, uint32_t uid, uint32_t gid);

/**
 * As `aq_path_get_attribute`, of an open file.
 *
 * Threads: any. Errors: as `aq_path_get_attribute`.
 */
int aq_file_get_attribute(aq_file *file,
                          const char *attribute,
                          void *buffer,
                          size_t size,
                          size_t *value_size);

/**
 * As `aq_path_list_attributes`, of an open file.
 *
 * Threads: any. Errors: as `aq_path_list_attributes`.
 */
int aq_file_list_attributes(aq_file *file, char *buffer, size_t size, size_t *names_size);

/**
 * As `aq_path_set_attribute`, of an open file.
 *
 * Threads: any. Errors: those of setxattr(2). Durable: after `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_set_attribute(aq_file *file,
                          const char *attribute,
                          const void *value,
                          size_t size);

/**
 * As `aq_path_remove_attribute`, of an open file.
 *
 * Threads: any. Errors: those of removexattr(2). Durable: after `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_remove_attribute(aq_file *file, const char *attribute);

/**
 * Sets when a file was read and modified last, in nanoseconds since 1970; `AQ_KEEP_TIME` leaves one as
 * it is.
 *
 * Threads: any. Errors: -EROFS, -EINVAL. Durable: after `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_set_times(aq_file *file,
                      int64_t accessed_ns,
                      int64_t modified_ns);

/**
 * Locks a whole file for this handle, until `aq_file_unlock` or the file is freed: exclusively if
 * `exclusive` is not 0, otherwise shared with other readers. The lock is advice, and ends with the
 * process. Waits at most `timeout_ns`: 0 not at all, `AQ_WAIT` as long as necessary.
 *
 * Threads: any. Errors: -EWOULDBLOCK if it is locked otherwise, -EINTR after a signal, -EINVAL for another negative time.
 */
int aq_file_lock(aq_file *file,
                 int exclusive,
                 int64_t timeout_ns);

/**
 * Releases the lock of `aq_file_lock`.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_file_unlock(aq_file *file);

/**
 * Locks a range of a file; a length of UINT64_MAX is all from the offset on, also what is appended
 * later. Otherwise as `aq_file_lock`, apart from which these locks are.
 *
 * Threads: any. Errors: as `aq_file_lock`; -EOVERFLOW for a range that is too far.
 */
int aq_file_lock_range(aq_file *file,
                       aq_range range,
                       int exclusive,
                       int64_t timeout_ns);

/**
 * Puts one of `AQ_LOCK_…` into `*held`: the lock of the whole file that another handle has and that
 * `aq_file_lock` would wait for.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_file_lock_conflict(aq_file *file,
                          int exclusive,
                          int *held);

/**
 * As `aq_file_lock_conflict`, for `aq_file_lock_range`; `*held_range`, which may be null, gets the bytes
 * that the other handle has locked, with a length of UINT64_MAX if that lock has no end.
 *
 * Threads: any. Errors: -EINVAL; -EOVERFLOW for a range that is too far.
 */
int aq_file_range_lock_conflict(aq_file *file,
                                aq_range range,
                                int exclusive,
                                int *held,
                                aq_range *held_range);

/**
 * Releases the locks of this handle in a range.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_file_unlock_range(aq_file *file, aq_range range);

/**
 * Makes a view of a range of a file, which must be open to read; `*view` is null if it fails. A length
 * of UINT64_MAX is all from the offset on. `writable`, if it is not 0, gives holes in the range pages;
 * the file must be open to write as well. What is seen changes when the file is written to.
 *
 * Threads: any. Errors: -EINVAL beyond the end, -EBADF, -ENOMEM, -ENOSPC. Frees: the caller, by
 * `aq_file_view_free`.
 */
int aq_file_view_new(aq_file *file,
                     aq_range range,
                     int writable,
                     aq_file_view **view);

/**
 * As `aq_file_view_new`, to read, for the file at a path: opening and viewing in one step.
 *
 * Threads: any. Errors: as `aq_file_view_new`; those of open(2). Frees: the caller, by
 * `aq_file_view_free`.
 */
int aq_path_view(aq_pool *pool,
                 const char *name,
                 aq_range range,
                 aq_file_view **view);

/**
 * Extends a file by `len_bytes` zeros, and makes a writable view of them: new content needs no other
 * copy. The file must be open to read and write; `*view` is null if it fails.
 *
 * Threads: any; of two calls each gets its own bytes. Errors: as `aq_file_view_new`. Frees: the caller,
 * by `aq_file_view_free`.
 */
int aq_file_append_view(aq_file *file,
                        uint64_t len_bytes,
                        aq_file_view **view);

/**
 * Leases a range of an immutable file (`aq_path_set_immutable`): as `aq_file_view_new`, but its bytes do
 * not change, and until the lease is freed no process can make the file changeable again. `*view` is null
 * if it fails.
 *
 * Threads: any. Errors: as `aq_file_view_new`; -EPERM if the file is not immutable; -EOPNOTSUPP if its
 * bytes cannot lie one after the other in memory. Frees: the caller, by `aq_file_view_free`.
 */
int aq_file_lease(aq_file *file,
                  aq_range range,
                  aq_file_view **view);

/**
 * As `aq_file_lease`, for the file at a path: opening and leasing in one step.
 *
 * Threads: any. Errors: as `aq_file_lease`; those of open(2). Frees: the caller, by `aq_file_view_free`.
 */
int aq_path_lease(aq_pool *pool,
                  const char *name,
                  aq_range range,
                  aq_file_view **view);

/**
 * Frees a view; null is fine.
 *
 * Threads: none may be in a call with this handle, or use the memory.
 */
void aq_file_view_free(aq_file_view *view);

/**
 * The first byte of a view, valid until it is freed; null if the bytes do not lie one after the other
 * in memory (then `aq_file_view_read` copies them), or if `view` is null.
 *
 * Threads: any.
 */
const void *aq_file_view_data(aq_file_view *view);

/**
 * The first byte of a view, to load and store; null if the view is not writable. Otherwise as
 * `aq_file_view_data`.
 *
 * Threads: any. Durable: after `aq_file_view_persist`.
 */
void *aq_file_view_data_mut(aq_file_view *view);

/**
 * The length of a view in bytes. 0 if `view` is null.
 *
 * Threads: any.
 */
uint64_t aq_file_view_len(aq_file_view *view);

/**
 * Copies `size` bytes from `offset` of the view.
 *
 * Threads: any. Errors: -EINVAL outside of the view, -EIO.
 */
int aq_file_view_read(aq_file_view *view, void *buffer, size_t size, uint64_t offset);

/**
 * Passes a range of the view to `look`, in one piece: without a copy if its bytes lie one after the other
 * in memory, and otherwise as a copy.
 *
 * Threads: any; `look` runs in the calling one. Errors: as `aq_file_view_read`; what `look` has seen is
 * then not to be used.
 */
int aq_file_view_look(aq_file_view *view,
                      aq_range range,
                      aq_bytes_fn look,
                      void *context);

/**
 * Copies `size` bytes to `offset` of a writable view. Other processes see them at once.
 *
 * Threads: any. Errors: -EROFS, -EINVAL outside of the view, -EIO. Durable: after
 * `aq_file_view_persist`, `aq_file_sync` or `aq_pool_sync`.
 */
int aq_file_view_write(aq_file_view *view, const void *buffer, size_t size, uint64_t offset);

/**
 * Makes a range of a writable view durable, with what is needed to find it again; a length of
 * UINT64_MAX is all from the offset on.
 *
 * Threads: any. Durable: every store before the call, when it returns 0. Errors: -EROFS, -EINVAL,
 * -ESTALE if the bytes do not belong to the file any more, -EIO.
 */
int aq_file_view_persist(aq_file_view *view, aq_range range);

/**
 * Whether the file still has the layout that the view was made from: 1 or 0. If not, some of the bytes
 * may not belong to the file any more.
 *
 * Threads: any.
 */
int aq_file_view_is_current(aq_file_view *view);

/**
 * Creates a mapper; `*mapper` is null if it fails. `options` may be null.
 *
 * Threads: any. Errors: -EINVAL, -E2BIG, -ENOMEM. Frees: the caller, by `aq_mapper_free`.
 */
int aq_mapper_new(const aq_mapper_options *options, aq_mapper **mapper);

/**
 * Frees a mapper; null is fine. Its views stay valid.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_mapper_free(aq_mapper *mapper);

/**
 * Lets go of the mapping of a file that is kept for reuse; of all if `file` is null.
 *
 * Threads: any. Errors: -ENOENT, -EINVAL.
 */
int aq_mapper_forget(aq_mapper *mapper, const char *file);

/**
 * Fills `stats`.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_mapper_get_stats(aq_mapper *mapper, aq_mapper_stats *stats);

/**
 * The statistics of a mapper as OpenMetrics text, as Prometheus scrapes it; `name`, which may be null, is
 * the value of the label `mapper`.
 *
 * Threads: any. Errors: -EINVAL. Frees: the caller, by `aq_string_free`.
 */
int aq_mapper_metrics(aq_mapper *mapper,
                      const char *name,
                      char **text);

/**
 * Maps `length` bytes of a file from `offset` on, or all from there if it is UINT64_MAX; `*view` is
 * null if it fails.
 *
 * Threads: any. Errors: those of open(2); -EINVAL for a range outside of the file, -EOPNOTSUPP for
 * what is no regular file, -ENOMEM. Frees: the caller, by `aq_view_free`.
 */
int aq_mapper_map(aq_mapper *mapper,
                  const char *file,
                  int access,
                  uint64_t offset,
                  uint64_t length,
                  aq_view **view);

/**
 * As `aq_mapper_map`, for an open file. The program may close the descriptor afterwards.
 *
 * Threads: any. Errors: as `aq_mapper_map`; -EBADF. Frees: the caller, by `aq_view_free`.
 */
int aq_mapper_map_fd(aq_mapper *mapper,
                     int file,
                     int access,
                     uint64_t offset,
                     uint64_t length,
                     aq_view **view);

/**
 * Passes the whole content of a file to `look`, read or mapped, whichever costs less: for files that
 * are read once.
 *
 * Threads: any; `look` runs in the calling one. Errors: those of open(2), -EIO, -ENODATA if the file
 * is cut off meanwhile: what `look` has seen is then not to be used.
 */
int aq_mapper_read_once(aq_mapper *mapper,
                        const char *file,
                        aq_bytes_fn look,
                        void *context);

/**
 * Frees a view; null is fine. Stores that were not flushed are lost with `AQ_STORES_PRIVATE`, and in the
 * file otherwise.
 *
 * Threads: none may be in a call with this handle, or use the memory.
 */
void aq_view_free(aq_view *view);

/**
 * The first byte; null if `view` is null. A load of a page that is gone raises SIGBUS, as with
 * mmap(2); `aq_view_look` and `aq_view_read` return an error instead.
 *
 * Threads: any. Frees: nothing.
 */
const void *aq_view_data(aq_view *view);

/**
 * The first byte, to load and store; null if it cannot be stored to, with a failure to be asked for.
 * From now on a view with `AQ_STORES_PRIVATE` keeps its copies of pages when it is flushed.
 *
 * Threads: any. Durable: stores before a call of `aq_view_flush` that returns 0.
 */
void *aq_view_data_mut(aq_view *view);

/**
 * The length in bytes. 0 if `view` is null.
 *
 * Threads: any.
 */
uint64_t aq_view_len(aq_view *view);

/**
 * Puts the current length of the file into `*len_bytes`, wherever the view ends.
 *
 * Threads: any. Errors: -EINVAL, -ENOENT.
 */
int aq_view_file_len(aq_view *view, uint64_t *len_bytes);

/**
 * Copies `size` bytes from `offset` of the view.
 *
 * Threads: any. Errors: -EINVAL outside of the view, -ENODATA if the file was truncated, -EIO.
 */
int aq_view_read(aq_view *view, void *buffer, size_t size, uint64_t offset);

/**
 * Passes a range of the view to `look`, without a copy. A page that is gone reads as zeros there, and
 * the call fails afterwards: what `look` has seen is then not to be used.
 *
 * Threads: any; `look` runs in the calling one. Errors: as `aq_view_read`.
 */
int aq_view_look(aq_view *view,
                 aq_range range,
                 aq_bytes_fn look,
                 void *context);

/**
 * Copies `size` bytes to `offset` of the view.
 *
 * Threads: any. Errors: as `aq_view_read`; -EROFS. Durable: after `aq_view_flush`.
 */
int aq_view_write(aq_view *view, const void *buffer, size_t size, uint64_t offset);

/**
 * Writes the pages of a range that were stored to, and makes them durable: of a view with
 * `AQ_STORES_PRIVATE` exactly these, otherwise also what is dirty beside them. A length of
 * UINT64_MAX is all from the offset on. `written_bytes` may be null; otherwise it gets the number of
 * bytes written.
 *
 * Threads: any; stores during the call are in the file or wait for the next flush. Durable: every
 * store before the call, when it returns 0. Errors: -EROFS, -ENOSPC, -EIO, -ENODATA if the file was
 * truncated. The next flush of a view with `AQ_STORES_PRIVATE` writes again what was not written; of
 * another view every later flush fails after one of the device's errors.
 */
int aq_view_flush(aq_view *view,
                  aq_range range,
                  uint64_t *written_bytes);

/**
 * Hands stores to the file, where other processes see them, without waiting for the disk.
 * `written_bytes` may be null; otherwise it gets the number of bytes handed over: 0 without
 * `AQ_STORES_PRIVATE`.
 *
 * Threads: any. Errors: as `aq_view_flush`. Durable: after `aq_view_flush`.
 */
int aq_view_write_out(aq_view *view, uint64_t *written_bytes);

/**
 * Puts the number of bytes that the next flush would write into `*dirty_bytes`.
 *
 * Threads: any. Errors: -EROFS, -EINVAL.
 */
int aq_view_dirty(aq_view *view, uint64_t *dirty_bytes);

/**
 * Makes a view that can be stored to, and its file, longer; the view stays where it is.
 *
 * Threads: any. Errors: -EROFS, -ENOSPC, -EINVAL if there is no room at these addresses or the view
 * does not reach the end of its file.
 */
int aq_view_grow(aq_view *view, uint64_t len_bytes);

/**
 * Applies one of `AQ_ADVICE_…` to a range; `AQ_ADVICE_COLD` is not one for views.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_view_advise(aq_view *view, aq_range range, int advice);

/**
 * Loads the pages of `count` ranges at the disk's queue depth, and waits for them.
 *
 * Threads: any. Errors: as `aq_view_read`.
 */
int aq_view_touch(aq_view *view, const aq_range *list, size_t count);

/**
 * As `aq_view_touch`, without waiting: `ready` gets `token` when the pages are in memory. The list is
 * copied.
 *
 * Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
 */
int aq_view_touch_async(aq_view *view,
                        const aq_range *list,
                        size_t count,
                        aq_ready *ready,
                        uint64_t token);

/**
 * Maps a whole device; `*mapping` is null if it fails. `options` may be null.
 *
 * Threads: any. Errors: -EINVAL, -EROFS, -EOPNOTSUPP for a backend that cannot serve it, -EBUSY if
 * the device is used otherwise and one side writes, -ENOMEM. Frees: the caller, by
 * `aq_mapping_free`.
 */
int aq_map(aq_cache *cache,
           aq_device *device,
           const aq_map_options *options,
           aq_mapping **mapping);

/**
 * Maps a whole file; `*mapping` is null if it fails. `options` may be null.
 *
 * Threads: any. Errors: those of open(2) and of `aq_map`. Frees: the caller, by `aq_mapping_free`.
 */
int aq_map_path(aq_cache *cache,
                const char *file,
                const aq_map_options *options,
                aq_mapping **mapping);

/**
 * Frees a mapping; null is fine. Its memory is gone when its pins are released as well. Dirty pages
 * are written back, without being made durable and without errors: call `aq_mapping_flush` first
 * where that matters. Waits for asynchronous calls under way with it.
 *
 * Threads: none may be in a call with this handle, or use the memory.
 */
void aq_mapping_free(aq_mapping *mapping);

/**
 * The first byte; null if `mapping` is null. Loads anywhere in the mapping are valid until it is
 * freed; a page that cannot be loaded raises SIGBUS, as with mmap(2). Memory for system calls must be
 * pinned first: user-backed pages that are absent fail with EFAULT there.
 *
 * Threads: any; also the loads, except in handlers of asynchronous signals. Frees: nothing.
 */
const void *aq_mapping_data(aq_mapping *mapping);

/**
 * The first byte, to load and store; null if the mapping is read-only or null. Otherwise as
 * `aq_mapping_data`.
 *
 * Threads: any. Durable: stores before a call of `aq_mapping_flush` that returns 0.
 */
void *aq_mapping_data_mut(aq_mapping *mapping);

/**
 * The length in bytes: the device's when it was mapped. 0 if `mapping` is null.
 *
 * Threads: any.
 */
uint64_t aq_mapping_len(aq_mapping *mapping);

/**
 * What serves the mapping: `AQ_BACKEND_KERNEL` or `AQ_BACKEND_USER`; `AQ_BACKEND_AUTO` if `mapping`
 * is null.
 *
 * Threads: any.
 */
int aq_mapping_backend(aq_mapping *mapping);

/**
 * Copies `size` bytes from `offset`. The range may be longer than the budget.
 *
 * Threads: any. Errors: -EINVAL beyond the end, -EIO and others of the device, -ENODATA if the file
 * was truncated, -ENOMEM if all pages of the budget are pinned.
 */
int aq_mapping_read(aq_mapping *mapping, void *buffer, size_t size, uint64_t offset);

/**
 * Passes a range to `look`, in one piece and without a copy where that is safe; its pages stay in memory
 * during the call, so it must fit into the mappings' part of the budget: half of it while the cache has
 * pages (`aq_pages_new`) as well.
 *
 * Threads: any; `look` runs in the calling one. Stores that other threads make meanwhile may be seen in
 * part. Errors: as `aq_mapping_read`; what `look` has seen is then not to be used.
 */
int aq_mapping_look(aq_mapping *mapping,
                    aq_range range,
                    aq_bytes_fn look,
                    void *context);

/**
 * Copies `size` bytes to `offset`.
 *
 * Threads: any; of two that write to the same bytes, either may win. Errors: as `aq_mapping_read`;
 * -EROFS; pages before the one that failed are written. Durable: after `aq_mapping_flush`.
 */
int aq_mapping_write(aq_mapping *mapping, const void *buffer, size_t size, uint64_t offset);

/**
 * Copies `count` ranges to their targets in the order that costs least: sorted, neighbours in one
 * read, many reads in flight. Several times faster than loads in the order of discovery where the
 * data is on a disk.
 *
 * Threads: any. Errors: as `aq_mapping_read`; targets may have been written or not.
 */
int aq_mapping_read_many(aq_mapping *mapping, const aq_read *reads, size_t count);

/**
 * As `aq_mapping_read_many`, without waiting: `ready` gets `token` when all is copied. The list is
 * copied; the targets are the library's until the token is taken.
 *
 * Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
 */
int aq_mapping_read_many_async(aq_mapping *mapping,
                               const aq_read *reads,
                               size_t count,
                               aq_ready *ready,
                               uint64_t token);

/**
 * Calls `visit` for each of `count` ranges, in the order that costs least; see
 * `aq_mapping_read_many`. The bytes of a user-backed mapping are the cache's own; those of a kernel-backed one
 * are a copy. Returns 0, the value other
 * than 0 with which `visit` ended it, or an error.
 *
 * Threads: any; `visit` runs in the calling one, and may use the mapping. Stores that other threads
 * make meanwhile may be seen in part. Errors: as `aq_mapping_read`; ranges may have been visited or
 * not.
 */
int aq_mapping_visit(aq_mapping *mapping,
                     const aq_range *list,
                     size_t count,
                     aq_visit_fn visit,
                     void *context);

/**
 * Calls `visit` for ranges in the order in which `next` names them, with many reads in flight: for
 * programs that must process in order and know what comes next. `next` is asked for up to 32,768 ranges
 * ahead, and again after it has returned 0: its answer may depend on what was visited; the call ends when
 * it returns 0 and nothing is under way. Empty ranges are skipped. Returns as `aq_mapping_visit`.
 *
 * Threads: any; `next` and `visit` run in the calling one. Errors: as `aq_mapping_visit`.
 */
int aq_mapping_visit_in_order(aq_mapping *mapping,
                              aq_next_range_fn next,
                              aq_visit_fn visit,
                              void *context);

/**
 * Loads the pages of `count` ranges at the device's queue depth, and waits for them. If the budget
 * cannot hold them all, later pages may evict earlier ones.
 *
 * Threads: any. Errors: as `aq_mapping_read`.
 */
int aq_mapping_touch(aq_mapping *mapping, const aq_range *list, size_t count);

/**
 * Loads the page at `offset` and makes it dirty, so that a store to it does not fault a second time.
 *
 * Threads: any. Errors: as `aq_mapping_read`; -EROFS.
 */
int aq_mapping_touch_mut(aq_mapping *mapping,
                         uint64_t offset);

/**
 * As `aq_mapping_touch`, without waiting: `ready` gets `token` when the pages are in memory. The list
 * is copied.
 *
 * Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
 */
int aq_mapping_touch_async(aq_mapping *mapping,
                           const aq_range *list,
                           size_t count,
                           aq_ready *ready,
                           uint64_t token);

/**
 * Starts to load `count` ranges in the background: a hint.
 *
 * Threads: any. Errors: -EINVAL beyond the end.
 */
int aq_mapping_prefetch(aq_mapping *mapping, const aq_range *list, size_t count);

/**
 * Applies one of `AQ_ADVICE_…` to a range.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_mapping_advise(aq_mapping *mapping, aq_range range, int advice);

/**
 * Whether every page of a range is in memory now: 1 or 0 into `*resident`.
 *
 * Threads: any. Errors: -EINVAL beyond the end.
 */
int aq_mapping_is_resident(aq_mapping *mapping, aq_range range, int *resident);

/**
 * Writes the dirty pages of a range back and makes them durable. A length of UINT64_MAX is all from
 * the offset on.
 *
 * Threads: any. Durable: every store before the call, when it returns 0. Errors: -EROFS; -EIO and
 * others of the device: what was not written stays dirty, and the next flush tries again, unless the
 * kind of the failure is `AQ_KIND_NOT_DURABLE`.
 */
int aq_mapping_flush(aq_mapping *mapping,
                     aq_range range);

/**
 * As `aq_mapping_flush`, without waiting: `ready` gets `token` when the range is durable.
 *
 * Threads: any. Errors: -EROFS, -EINVAL, -ECHILD; others with the completion. Durable: every store before the
 * call, when the result of the completion is 0.
 */
int aq_mapping_flush_async(aq_mapping *mapping,
                           aq_range range,
                           aq_ready *ready,
                           uint64_t token);

/**
 * Makes a range resident and pins it; `*pin` is null if it fails. `for_writing`, if it is not 0,
 * makes its pages dirty: system calls may write there.
 *
 * Threads: any. Errors: as `aq_mapping_read`; -EROFS. Frees: the caller, by `aq_unpin`.
 */
int aq_mapping_pin(aq_mapping *mapping,
                   aq_range range,
                   int for_writing,
                   aq_pin **pin);

/**
 * The first byte of pinned memory; null if `pin` is null.
 *
 * Threads: any.
 */
const void *aq_pin_data(aq_pin *pin);

/**
 * The first byte of pinned memory, to load and store; null if it was not pinned for writing, or `pin`
 * is null.
 *
 * Threads: any.
 */
void *aq_pin_data_mut(aq_pin *pin);

/**
 * Releases pinned memory; null is fine.
 *
 * Threads: any, also another than the one that pinned it.
 */
void aq_unpin(aq_pin *pin);

/**
 * The last plain load or store that could not be served in any mapping of its cache, as a failure:
 * returns its negative number, and keeps it as this thread's last failure. 0 if there was none. Nothing
 * clears it: for a handler of SIGBUS, not to be polled.
 *
 * Threads: any.
 */
int aq_mapping_last_fault(aq_mapping *mapping);

/**
 * Creates an object of `size_bytes`, rounded up to pages, zeroed but for the content that `options` names:
 * the object is never seen without it, after a crash neither. `options` and `info` may be null; `info`
 * gets what `aq_object_get_info` says.
 *
 * Threads: any. Errors: -EEXIST, -EINVAL, -ENOSPC, -EROFS. Durable: on return.
 */
int aq_object_create(aq_pool *pool,
                     const char *name,
                     uint64_t size_bytes,
                     const aq_object_options *options,
                     aq_object_info *info);

/**
 * Destroys an object that no process has attached. `key` may be null.
 *
 * Threads: any. Errors: -ENOENT, -EACCES for a wrong key, -EBUSY, -EROFS. Durable: on return.
 */
int aq_object_destroy(aq_pool *pool, const char *name, const char *key);

/**
 * Renames an object that no process has attached. `key` may be null.
 *
 * Threads: any. Errors: as `aq_object_destroy`; -EEXIST. Durable: on return.
 */
int aq_object_rename(aq_pool *pool, const char *name, const char *new_name, const char *key);

/**
 * Makes an object that no process has attached larger or smaller. `key` may be null; `address`, which
 * may be null, gets its address, which changes only if it is relocatable.
 *
 * Threads: any. Errors: as `aq_object_destroy`; -EINVAL if it must move and cannot, or holds a heap and
 * would shrink; -ENOSPC. Durable: on return.
 */
int aq_object_resize(aq_pool *pool,
                     const char *name,
                     uint64_t size_bytes,
                     const char *key,
                     uint64_t *address);

/**
 * Moves a relocatable object that no process has attached to `*address`, or to a free random address if
 * that is 0; `*address` gets where it is then. `key` may be null.
 *
 * Threads: any. Errors: as `aq_object_destroy`; -EINVAL if it is not relocatable, or the address is none
 * for objects; -EEXIST if another object lies there. Durable: on return.
 */
int aq_object_relocate(aq_pool *pool,
                       const char *name,
                       const char *key,
                       uint64_t *address);

/**
 * Fills `info` with what is known of an object.
 *
 * Threads: any. Errors: -ENOENT, -EINVAL.
 */
int aq_object_get_info(aq_pool *pool, const char *name, aq_object_info *info);

/**
 * Calls `visit` for each object of a pool, by name. Returns 0, the value other than 0 with which
 * `visit` ended it, or an error.
 *
 * Threads: any; `visit` runs in the calling one. Errors: -EINVAL, -EIO, -EUCLEAN.
 */
int aq_object_list(aq_pool *pool, aq_object_fn visit, void *context);

/**
 * Attaches an object, and creates its heap at the first time for writing if it holds one; `*object` is
 * null if it fails. `writable`, if it is not 0, excludes all other attachments; otherwise there may
 * be others for reading. `key` may be null.
 *
 * Threads: any. Errors: -ENOENT, -EACCES for a wrong key, -EBUSY if it is attached otherwise or its
 * addresses are taken, -EROFS, -EUCLEAN for a damaged heap, -EOPNOTSUPP under ThreadSanitizer,
 * which owns the addresses. Frees: the caller, by `aq_object_detach`.
 */
int aq_object_attach(aq_pool *pool,
                     const char *name,
                     int writable,
                     const char *key,
                     aq_object **object);

/**
 * As `aq_object_attach`, with more options.
 *
 * Threads: any. Errors: as `aq_object_attach`; -E2BIG for an option of a later version. Frees: the
 * caller, by `aq_object_detach`.
 */
int aq_object_attach_with(aq_pool *pool,
                          const char *name,
                          const aq_attach_options *options,
                          aq_object **object);

/**
 * Detaches an object and frees the handle, also if it fails; null is fine. Stores since the last psync
 * are lost. Waits for commits under way.
 *
 * Threads: none may be in a call with this handle, or use the memory. Errors: -EIO if a psync failed
 * and no later one has committed its pages.
 */
int aq_object_detach(aq_object *object);

/**
 * The first byte of an object; null if `object` is null. It is at the same address in every process
 * and after every restart, so pointers in it stay valid.
 *
 * Threads: any.
 */
const void *aq_object_data(aq_object *object);

/**
 * The first byte of an object, to load and store; null if it is attached for reading, or `object` is
 * null. Otherwise as `aq_object_data`.
 *
 * Threads: any. Durable: stores before a call of `aq_object_psync` that returns 0.
 */
void *aq_object_data_mut(aq_object *object);

/**
 * The length of an object in bytes. 0 if `object` is null.
 *
 * Threads: any.
 */
uint64_t aq_object_len(aq_object *object);

/**
 * Makes everything stored to an object so far durable, all or nothing: after a crash it has the content
 * of this psync or, if the call had not returned, possibly that of the previous one. Does nothing for
 * one attached for reading.
 *
 * Threads: any, but none may store to the object during the call; allocations and frees of other
 * threads in its heap wait. Durable: every store before the call, when it returns 0. Errors: -ENOSPC
 * if the commit is too large for the log and the pool is full; -EIO if the media failed: the pool is
 * read-only from then on.
 */
int aq_object_psync(aq_object *object);

/**
 * Undoes every store to an object since its last psync, with which psyncs count that are under way: it
 * has the content that a crash would leave. Does nothing for one without a heap that is attached for
 * reading. If it fails, each page has the content of before or after, and another call undoes the rest.
 *
 * Threads: any, but none may use the memory of the object during the call. Errors: -EINVAL if it holds a
 * heap, which is detached and attached instead; -EIO, also if an earlier psync failed by the media; -ENOMEM.
 */
int aq_object_rollback(aq_object *object);

/**
 * As `aq_object_psync`, without waiting for the media: the call captures what was stored, and `ready`
 * gets `token` when it is durable. The object may be stored to again when the call has returned.
 *
 * Threads: any, but none may store to the object during the call. Errors: those known at the capture;
 * others with the completion. Durable: every store before the call, when the result of the completion
 * is 0.
 */
int aq_object_psync_async(aq_object *object,
                          aq_ready *ready,
                          uint64_t token);

/**
 * Makes the bytes of `count` ranges durable, all or nothing, and no others: for programs that know
 * where they have stored. Costs one write, whatever the length of the object.
 *
 * Threads: any, but none may store to these bytes during the call. Durable: these bytes, when it
 * returns 0. Errors: -EINVAL outside of the object or for one that holds a heap; -ENOSPC if it is too
 * much for the log; as `aq_object_psync`.
 */
int aq_object_psync_ranges(aq_object *object,
                           const aq_range *list,
                           size_t count);

/**
 * `aq_object_psync` of `count` objects of one pool handle: all of them or none, with one write. One
 * that is listed twice counts once.
 *
 * Threads: any, but none may store to these objects during the call. Durable: every store to them
 * before the call, when it returns 0. Errors: as `aq_object_psync`; -EINVAL for several pools.
 */
int aq_objects_psync(aq_object *const *objects, size_t count);

/**
 * As `aq_objects_psync`, without waiting for the media: the call captures what was stored, and `ready`
 * gets `token` when all of it is durable. The objects may be stored to again when the call has returned.
 *
 * Threads: any, but none may store to these objects during the call. Errors: those known at the capture,
 * -EINVAL also for no objects; others with the completion. Durable: every store to them before the call,
 * when the result of the completion is 0.
 */
int aq_objects_psync_async(aq_object *const *objects,
                           size_t count,
                           aq_ready *ready,
                           uint64_t token);

/**
 * Fills `stats`.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_object_get_stats(aq_object *object, aq_object_stats *stats);

/**
 * Puts the length of the private copies of pages that an attachment for writing has into
 * `*shadow_bytes`: what was stored to since the last psync, and what is kept from before. Scans the
 * whole mapping.
 *
 * Threads: any. Errors: -EINVAL, -ENOMEM.
 */
int aq_object_shadow_bytes(aq_object *object, uint64_t *shadow_bytes);

/**
 * Allocates `size` bytes aligned to `alignment`, a power of two or 0 for 16, in the heap of an object.
 *
 * Threads: any, also for the other functions of heaps. Errors: -EINVAL for an object without a heap,
 * -ENOSPC, -EROFS, -EUCLEAN. Durable: with the next psync, as all of the object. Frees: the program,
 * by `aq_heap_free`, also in a later run.
 */
int aq_heap_alloc(aq_object *object,
                  size_t size,
                  size_t alignment,
                  void **memory);

/**
 * As `aq_heap_alloc`, zeroed.
 *
 * Threads: any. Errors, Durable, Frees: as `aq_heap_alloc`.
 */
int aq_heap_alloc_zeroed(aq_object *object, size_t size, size_t alignment, void **memory);

/**
 * Resizes an allocation, in place where that is possible; otherwise it moves with its content.
 * `*memory` is the allocation, and gets its new place; null there allocates.
 *
 * Threads: any; none may use the allocation meanwhile. Errors: as `aq_heap_alloc`; -EINVAL for what is
 * no allocation. The allocation is unchanged then. Frees: the caller, by `aq_heap_free`.
 */
int aq_heap_realloc(aq_object *object,
                    size_t size,
                    size_t alignment,
                    void **memory);

/**
 * Frees an allocation; null is fine.
 *
 * Threads: any. Errors: -EINVAL for what is no allocation of this heap, -EROFS, -EUCLEAN.
 */
int aq_heap_free(aq_object *object, void *memory);

/**
 * Puts the number of bytes of an allocation that may be used into `*size`.
 *
 * Threads: any. Errors: -EINVAL for what is no allocation of this heap.
 */
int aq_heap_usable_size(aq_object *object, void *memory, size_t *size);

/**
 * Makes an allocation the root of the heap: where the program finds its data after a restart.
 * `type_id` says what is there: `aq_heap_root` must be called with the same. Null clears the root.
 *
 * Threads: any. Errors: -EINVAL for what is no allocation of this heap, -EROFS. Durable: with the next
 * psync.
 */
int aq_heap_set_root(aq_object *object,
                     uint64_t type_id,
                     void *root);

/**
 * Puts the root of the heap into `*root`; null if there is none.
 *
 * Threads: any. Errors: -EINVAL if it was set with another `type_id`, -EUCLEAN. Frees: nothing; the root is
 * an allocation of the heap.
 */
int aq_heap_root(aq_object *object,
                 uint64_t type_id,
                 void **root);

/**
 * Checks that a heap is consistent, and fills `stats`, which may be null. Reads the header of every
 * slab.
 *
 * Threads: any. Errors: -EUCLEAN with the offset of what is damaged.
 */
int aq_heap_check(aq_object *object, aq_heap_stats *stats);

/**
 * As `aq_object_attach`, for programs that know the object by any address in it: `*address` gets its
 * first byte, or null if it fails.
 *
 * Threads: any. Errors: as `aq_object_attach`. Frees: the caller, by `aq_detach_at`.
 */
int aq_attach_at(aq_pool *pool,
                 const char *name,
                 int writable,
                 const char *key,
                 void **address);

/**
 * `aq_object_psync` of the object at an address.
 *
 * Threads: as `aq_object_psync`. Errors: as there; -ENOENT if none was attached there by
 * `aq_attach_at`.
 */
int aq_psync_at(const void *address);

/**
 * Detaches the object at an address. While another thread is in `aq_psync_at` of it, that call detaches
 * it when it ends, and returns the error; this one returns 0 at once.
 *
 * Threads: none may use the memory any more. Errors: as `aq_object_detach`; -ENOENT if none was
 * attached there by `aq_attach_at`.
 */
int aq_detach_at(const void *address);

/**
 * Opens the pages of a device; `*pages` is null if it fails. All `aq_pages` of one device in one
 * cache share their pages.
 *
 * Threads: any. Errors: -EINVAL, -EBUSY if the device is used by a mapping or another cache and one
 * side writes, -ENOMEM. Frees: the caller, by `aq_pages_free`.
 */
int aq_pages_new(aq_cache *cache, aq_device *device, aq_pages **pages);

/**
 * Frees pages; null is fine. Dirty pages are written back, without being made durable and without
 * errors: call `aq_pages_flush` first where that matters.
 *
 * Threads: none may be in a call with this handle. Errors: -EBUSY if guards are held: nothing is freed,
 * and the call can be made again when they are released.
 */
int aq_pages_free(aq_pages *pages);

/**
 * The number of pages of the device; the rest of the last one reads as zeros. 0 if `pages` is null.
 *
 * Threads: any.
 */
uint64_t aq_pages_count(aq_pages *pages);

/**
 * The length of the device in bytes, when its pages were opened. 0 if `pages` is null.
 *
 * Threads: any.
 */
uint64_t aq_pages_len(aq_pages *pages);

/**
 * The size of a page in bytes. 0 if `pages` is null.
 *
 * Threads: any.
 */
size_t aq_pages_page_bytes(aq_pages *pages);

/**
 * Takes a shared guard on a page, which is loaded if necessary. If it fails, `data` of the guard is
 * null, and it may be released.
 *
 * Threads: any; any number of shared guards may be held, and by other threads released. Errors:
 * -EINVAL beyond the end, -EIO and others of the device, -ENOMEM if all pages of the budget are
 * guarded. Frees: the caller, by `aq_page_release`.
 */
int aq_pages_get(aq_pages *pages, uint64_t page, aq_page *guard);

/**
 * Takes an exclusive guard on a page, which is loaded if necessary and dirty afterwards. It waits for
 * other guards on the page: a thread that holds one itself deadlocks. If it fails, `data` of the guard
 * is null, and it may be released.
 *
 * Threads: any. Errors: as `aq_pages_get`; -EROFS. Durable: after `aq_pages_flush`. Frees: the
 * caller, by `aq_page_mut_release`.
 */
int aq_pages_get_mut(aq_pages *pages,
                     uint64_t page,
                     aq_page_mut *guard);

/**
 * Takes shared guards on `count` pages, loaded at the device's queue depth, in the order of `list`.
 * If it fails, none is held: `data` of each is null, and they may be released.
 *
 * Threads: any. Errors: as `aq_pages_get`. Frees: the caller, each by `aq_page_release`.
 */
int aq_pages_get_many(aq_pages *pages,
                      const uint64_t *list,
                      size_t count,
                      aq_page *guards);

/**
 * Releases a shared guard; one that was released already or not taken, and null, are fine.
 *
 * Threads: any, also another than the one that took it.
 */
void aq_page_release(aq_page *guard);

/**
 * Releases an exclusive guard; one that was released already or not taken, and null, are fine.
 *
 * Threads: any, also another than the one that took it.
 */
void aq_page_mut_release(aq_page_mut *guard);

/**
 * Copies `size` bytes from `offset`, which may span pages, without guards: the cheapest way to a few
 * bytes. Each page's bytes are those of one moment.
 *
 * Threads: any. Errors: as `aq_pages_get`.
 */
int aq_pages_read(aq_pages *pages,
                  void *buffer,
                  size_t size,
                  uint64_t offset);

/**
 * Loads `count` pages at the device's queue depth, and waits for them.
 *
 * Threads: any. Errors: as `aq_pages_get`.
 */
int aq_pages_load(aq_pages *pages, const uint64_t *list, size_t count);

/**
 * As `aq_pages_load`, without waiting: `ready` gets `token` when the pages are in memory. The list is
 * copied.
 *
 * Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
 */
int aq_pages_load_async(aq_pages *pages,
                        const uint64_t *list,
                        size_t count,
                        aq_ready *ready,
                        uint64_t token);

/**
 * Calls `visit` once for each of `count` pages, in the order that costs least: sorted, with many reads
 * in flight, and without evicting others for them. A page that is listed twice is visited once.
 * Returns 0, the value other than 0 with which `visit` ended it, or an error.
 *
 * Threads: any; `visit` runs in the calling one, and may take shared guards. Errors: as
 * `aq_pages_get`; pages may have been visited or not.
 */
int aq_pages_visit(aq_pages *pages,
                   const uint64_t *list,
                   size_t count,
                   aq_page_fn visit,
                   void *context);

/**
 * Calls `visit` for pages in the order in which `next` names them: see `aq_mapping_visit_in_order`.
 * Returns as `aq_pages_visit`.
 *
 * Threads: any; `next` and `visit` run in the calling one, and may take shared guards. Errors: as
 * `aq_pages_visit`.
 */
int aq_pages_visit_in_order(aq_pages *pages,
                            aq_next_page_fn next,
                            aq_page_fn visit,
                            void *context);

/**
 * Starts to load `count` pages from `first` on in the background: a hint.
 *
 * Threads: any. Errors: -EINVAL beyond the end.
 */
int aq_pages_prefetch(aq_pages *pages, uint64_t first, uint64_t count);

/**
 * Whether a page is in memory now: 1 or 0 into `*resident`.
 *
 * Threads: any. Errors: -EINVAL beyond the end.
 */
int aq_pages_is_resident(aq_pages *pages, uint64_t page, int *resident);

/**
 * Writes the dirty ones of `count` pages from `first` on back and makes them durable;
 * `count` = UINT64_MAX is all from there. It waits for writing guards on them: a thread that holds
 * one itself deadlocks.
 *
 * Threads: any. Durable: every change before the call, when it returns 0. Errors: -EINVAL beyond the
 * end; -EIO and others of the device: what was not written stays dirty, and the next flush tries again, unless the kind of
 * the failure is `AQ_KIND_NOT_DURABLE`.
 */
int aq_pages_flush(aq_pages *pages,
                   uint64_t first,
                   uint64_t count);

/**
 * Fills `status` with what is known of the file at a path; of a symbolic link itself if `follow` is 0.
 *
 * Threads: any. Errors: those of stat(2).
 */
int aq_path_stat(aq_pool *pool,
                 const char *name,
                 int follow,
                 aq_file_status *status);

/**
 * Creates a directory, with those above it if `parents` is not 0: then one that exists is fine. `mode`
 * has its permissions, minus the umask; 0 is 0777.
 *
 * Threads: any. Errors: those of mkdir(2). Durable: after `aq_pool_sync`.
 */
int aq_path_mkdir(aq_pool *pool,
                  const char *name,
                  uint32_t mode,
                  int parents);

/**
 * Removes an empty directory.
 *
 * Threads: any. Errors: those of rmdir(2). Durable: after `aq_pool_sync`.
 */
int aq_path_rmdir(aq_pool *pool, const char *name);

/**
 * Removes a name of a file, and the file with its last one when no process has it open.
 *
 * Threads: any. Errors: those of unlink(2). Durable: after `aq_pool_sync`.
 */
int aq_path_unlink(aq_pool *pool, const char *name);

/**
 * Removes a directory with all that is in it.
 *
 * Threads: any. Errors: those of unlink(2) and rmdir(2); a part may be removed then. Durable: after
 * `aq_pool_sync`.
 */
int aq_path_remove_all(aq_pool *pool, const char *name);

/**
 * Renames a file or directory, atomically, also in a crash. `how` is one of `AQ_RENAME_…`.
 *
 * Threads: any. Errors: those of renameat2(2). Durable: after `aq_pool_sync`.
 */
int aq_path_rename(aq_pool *pool, const char *name, const char *new_name, int how);

/**
 * Gives a file another name.
 *
 * Threads: any. Errors: those of link(2). Durable: after `aq_pool_sync`.
 */
int aq_path_link(aq_pool *pool, const char *name, const char *new_name);

/**
 * Creates a symbolic link to `target`, any text.
 *
 * Threads: any. Errors: those of symlink(2). Durable: after `aq_pool_sync`.
 */
int aq_path_symlink(aq_pool *pool, const char *target, const char *name);

/**
 * Puts the target of a symbolic link into `*target`; null if it fails.
 *
 * Threads: any. Errors: those of readlink(2). Frees: the caller, by `aq_string_free`.
 */
int aq_path_readlink(aq_pool *pool, const char *name, char **target);

/**
 * Changes the permissions of a file.
 *
 * Threads: any. Errors: those of chmod(2). Durable: after `aq_pool_sync`.
 */
int aq_path_chmod(aq_pool *pool, const char *name, uint32_t mode);

/**
 * Puts the path of a file without symbolic links, "." and ".." into `*absolute`; null if it fails.
 *
 * Threads: any. Errors: those of realpath(3). Frees: the caller, by `aq_string_free`.
 */
int aq_path_realpath(aq_pool *pool, const char *name, char **absolute);

/**
 * Copies a regular file with its permissions; what has the new name is overwritten. `*copied`, which may
 * be null, gets the number of bytes.
 *
 * Threads: any. Errors: those of open(2), -ENOSPC, -EIO; -EINVAL if both are the same file, also by links:
 * nothing is changed then. Durable: after `aq_pool_sync`.
 */
int aq_path_copy(aq_pool *pool,
                 const char *name,
                 const char *new_name,
                 uint64_t *copied);

/**
 * Makes a named pipe, socket or device, which the pool keeps and does not open. `mode` has its kind
 * (`S_IFIFO`, `S_IFSOCK`, `S_IFCHR`, `S_IFBLK`) and permissions, minus the umask; `device` is the number
 * of a device as of makedev(3), and otherwise not used.
 *
 * Threads: any. Errors: those of mknod(2); -EINVAL for another kind. Durable: after `aq_pool_sync`.
 */
int aq_path_mknod(aq_pool *pool,
                  const char *name,
                  uint32_t mode,
                  uint64_t device);

/**
 * Sets when a file was read and modified last, in nanoseconds since 1970; `AQ_KEEP_TIME` leaves one as it
 * is. Of a symbolic link itself if `follow` is 0.
 *
 * Threads: any. Errors: those of utimensat(2). Durable: after `aq_pool_sync`.
 */
int aq_path_set_times(aq_pool *pool,
                      const char *name,
                      int follow,
                      int64_t accessed_ns,
                      int64_t modified_ns);

/**
 * Changes owner and group; UINT32_MAX leaves one as it is. Of a symbolic link itself if `follow` is 0.
 *
 * Threads: any. Errors: those of chown(2). Durable: after `aq_pool_sync`.
 */
int aq_path_chown(aq_pool *pool,
                  const char *name,
                  uint32_t uid,
                  uint32_t gid,
                  int follow);

/**
 * Makes a file immutable if `immutable` is not 0, otherwise changeable: an immutable file can be viewed
 * as memory that does not change.
 *
 * Threads: any. Errors: -EPERM, -EBUSY while it is leased. Durable: after `aq_pool_sync`.
 */
int aq_path_set_immutable(aq_pool *pool,
                          const char *name,
                          int immutable);

/**
 * Puts the value of an extended attribute into `buffer`, and its size into `*value_size`. With a
 * `size` of 0 only the latter.
 *
 * Threads: any. Errors: -ENODATA if there is none, -ERANGE if `size` is too small.
 */
int aq_path_get_attribute(aq_pool *pool,
                          const char *name,
                          const char *attribute,
                          void *buffer,
                          size_t size,
                          size_t *value_size);

/**
 * Puts the names of the extended attributes into `buffer`, one after the other, each ended by a zero
 * byte, and their size into `*names_size`. With a `size` of 0 only the latter.
 *
 * Threads: any. Errors: -ENOENT, -ERANGE if `size` is too small.
 */
int aq_path_list_attributes(aq_pool *pool,
                            const char *name,
                            char *buffer,
                            size_t size,
                            size_t *names_size);

/**
 * Sets an extended attribute, whether there is one or not.
 *
 * Threads: any. Errors: those of setxattr(2). Durable: after `aq_pool_sync`.
 */
int aq_path_set_attribute(aq_pool *pool,
                          const char *name,
                          const char *attribute,
                          const void *value,
                          size_t size);

/**
 * Removes an extended attribute.
 *
 * Threads: any. Errors: those of removexattr(2). Durable: after `aq_pool_sync`.
 */
int aq_path_remove_attribute(aq_pool *pool, const char *name, const char *attribute);

/**
 * Opens a directory to read its entries; `*dir` is null if it fails.
 *
 * Threads: any. Errors: those of opendir(3). Frees: the caller, by `aq_dir_free`.
 */
int aq_dir_open(aq_pool *pool, const char *name, aq_dir **dir);

/**
 * Puts the name of the next entry, without "." and "..", into `*name`; null at the end. `inode`, which may
 * be null, gets the number of its inode.
 *
 * Threads: one at a time for each handle. Errors: -EIO, -EUCLEAN. Frees: nothing; the name belongs to the
 * directory, and is valid until the next call with it.
 */
int aq_dir_next(aq_dir *dir,
                const char **name,
                uint64_t *inode);

/**
 * Closes a directory; null is fine.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_dir_free(aq_dir *dir);

/**
 * Creates a pool of `len_bytes` and opens it; `*pool` is null if it fails. `options` may be null.
 *
 * Threads: any. Errors: -EEXIST, those of open(2), -ENOSPC, -EINVAL. Durable: on return. Frees: the
 * caller, by `aq_pool_free`.
 */
int aq_pool_create(const char *file,
                   uint64_t len_bytes,
                   const aq_pool_options *options,
                   aq_pool **pool);

/**
 * Opens a pool, and recovers it if no other process has it open and it was not closed; `*pool` is null
 * if it fails. `options` may be null.
 *
 * Threads: any. Errors: those of open(2), -EINVAL for what is no pool, -EUCLEAN for a damaged one,
 * -EOPNOTSUPP for one of a later version, -EBUSY. Frees: the caller, by `aq_pool_free`.
 */
int aq_pool_open(const char *file,
                 const aq_pool_options *options,
                 aq_pool **pool);

/**
 * Opens a pool for writing that this process may not open itself: the pool's broker, which runs in a
 * process of its owner (`aquifer pool serve`), passes it on to a process that has the key. `*pool` is null
 * if it fails. `options` may be null.
 *
 * Threads: any. Errors: -EACCES for a wrong key, -ENOENT without a broker, -EINVAL for a key that is too
 * short, and those of `aq_pool_open`. Frees: the caller, by `aq_pool_free`.
 */
int aq_pool_open_granted(const char *file,
                         const void *key,
                         size_t key_size,
                         const aq_pool_options *options,
                         aq_pool **pool);

/**
 * Frees a pool; null is fine. It is closed when what was opened in it is freed as well.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_pool_free(aq_pool *pool);

/**
 * Makes every change of files and directories so far durable, those of other processes as well.
 *
 * Threads: any. Durable: all before the call, when it returns 0. Errors: -EIO: the pool is read-only
 * from then on.
 */
int aq_pool_sync(aq_pool *pool);

/**
 * Applies the log, so that the next recovery has little to do. It happens by itself as well.
 *
 * Threads: any. Errors: as `aq_pool_sync`.
 */
int aq_pool_checkpoint(aq_pool *pool);

/**
 * Fills `info`. Takes time in proportion to the number of objects and files.
 *
 * Threads: any. Errors: -EINVAL, -EIO, -EUCLEAN.
 */
int aq_pool_get_info(aq_pool *pool, aq_pool_info *info);

/**
 * Fills `space`. Does not depend on the number of objects and files, as `aq_pool_get_info` does.
 *
 * Threads: any. Errors: -EINVAL, -EIO.
 */
int aq_pool_get_space(aq_pool *pool, aq_pool_space *space);

/**
 * The figures of a pool as OpenMetrics text, as Prometheus scrapes it; `name`, which may be null, is the
 * value of the label `pool`. Takes as long as `aq_pool_get_info`.
 *
 * Threads: any. Errors: as `aq_pool_get_info`. Frees: the caller, by `aq_string_free`.
 */
int aq_pool_metrics(aq_pool *pool,
                    const char *name,
                    char **text);

/**
 * The version of the library that the program runs with, such as "0.1.0".
 *
 * Threads: any. Frees: nothing; the text is constant.
 */
const char *aq_version(void);

/**
 * Prepares this thread to load pages by plain loads from user-backed mappings: unblocks SIGBUS and
 * SIGSEGV, and gives it a signal stack of 64 KiB where it has none or a smaller one. Only a thread that
 * blocks all signals, or may touch a mapping with its stack nearly full, needs it.
 *
 * Threads: the calling one. Errors: -ENOMEM and those of sigaltstack(2).
 */
int aq_prepare_thread(void);

/**
 * Frees a string that a function of the library has made. Null is fine.
 *
 * Threads: any.
 */
void aq_string_free(char *string);

/**
 * Creates an empty set; `*ready` is null if it fails.
 *
 * Threads: any. Errors: -EMFILE, -EINVAL. Frees: the caller, by `aq_ready_free`.
 */
int aq_ready_new(aq_ready **ready);

/**
 * Waits for all calls under way, then frees the set: no buffer is written to afterwards. Null is
 * fine; in a forked child it does not wait.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_ready_free(aq_ready *ready);

/**
 * The descriptor of a set, for poll(2), epoll(7) or an event loop: readable when `aq_ready_take` may
 * have something. It belongs to the set: not to be read, written or closed. Negative if `ready` is
 * null.
 *
 * Threads: any.
 */
int aq_ready_fd(aq_ready *ready);

/**
 * The number of calls that were started and whose completions have not been taken. 0 if `ready` is null.
 *
 * Threads: any.
 */
size_t aq_ready_len(aq_ready *ready);

/**
 * Takes at most `room` completions, and puts their number into `*count`: 0 if none is there. Does
 * not wait. The failure of a call that has completed becomes this thread's last failure: for the texts
 * of all, take one at a time.
 *
 * Threads: any; each completion is taken once. Errors: -EINVAL, -ECHILD.
 */
int aq_ready_take(aq_ready *ready,
                  aq_completion *completions,
                  size_t room,
                  size_t *count);

/**
 * Waits until a completion is there, or no call is under way: because none was started, or other
 * threads have taken all that completed.
 *
 * Threads: any; if several wait, one of them may find nothing to take. A thread that waits for the
 * descriptor itself may miss what another takes: use this function where several threads take.
 * Errors: -EINTR after a signal, -EINVAL, -ECHILD.
 */
int aq_ready_wait(aq_ready *ready);

/**
 * Opens a file of rows; `*rows` is null if it fails. Reads bypass the page cache where they can.
 *
 * Threads: any. Errors: those of open(2), -EINVAL, -EBUSY if a cache of this process uses the file to
 * write. Frees: the caller, by `aq_rows_free`.
 */
int aq_rows_open(const char *file,
                 const aq_rows_options *options,
                 aq_rows **rows);

/**
 * As `aq_rows_open`, for rows on a device.
 *
 * Threads: any. Errors: -EINVAL, -EBUSY if a cache of this process uses the device to write. Frees: the
 * caller, by `aq_rows_free`.
 */
int aq_rows_open_device(aq_device *device,
                        const aq_rows_options *options,
                        aq_rows **rows);

/**
 * Frees rows; null is fine.
 *
 * Threads: none may be in a call with this handle.
 */
void aq_rows_free(aq_rows *rows);

/**
 * The number of rows. 0 if `rows` is null.
 *
 * Threads: any.
 */
uint64_t aq_rows_count(aq_rows *rows);

/**
 * Copies `count` rows, in the order of `list`, one after the other to `target`, which has room for all
 * of them. Those that are not in memory are read together.
 *
 * Threads: any. Errors: -EINVAL for a row that does not exist, -EIO, -ENODATA if the file was
 * truncated.
 */
int aq_rows_gather(aq_rows *rows,
                   const uint64_t *list,
                   size_t count,
                   void *target);

/**
 * As `aq_rows_gather`, without waiting: `ready` gets `token` when all is copied. The list is copied;
 * the target is the library's until the token is taken.
 *
 * Threads: any. Errors: -EINVAL, -ECHILD; others with the completion, also for a range beyond the end.
 */
int aq_rows_gather_async(aq_rows *rows,
                         const uint64_t *list,
                         size_t count,
                         void *target,
                         aq_ready *ready,
                         uint64_t token);

/**
 * Forgets `count` rows from `first` on, after the program has written them to the file: the next call
 * reads them again.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_rows_invalidate(aq_rows *rows,
                       uint64_t first,
                       uint64_t count);

/**
 * Fills `stats`.
 *
 * Threads: any. Errors: -EINVAL.
 */
int aq_rows_get_stats(aq_rows *rows, aq_rows_stats *stats);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus


/* Initial values: the size, and 0 for the rest. */
#define AQ_ERROR_INIT {sizeof(aq_error), 0, 0, 0, NULL, NULL}
#define AQ_CACHE_OPTIONS_INIT {sizeof(aq_cache_options), 0, 0, NULL, 0, NULL, 0}
#define AQ_CACHE_STATS_INIT {sizeof(aq_cache_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
#define AQ_MAP_OPTIONS_INIT {sizeof(aq_map_options), 0, 0}
#define AQ_ROWS_OPTIONS_INIT {sizeof(aq_rows_options), 0, 0, 0}
#define AQ_ROWS_STATS_INIT {sizeof(aq_rows_stats), 0, 0, 0, 0, 0, 0, 0}
#define AQ_MAPPER_OPTIONS_INIT {sizeof(aq_mapper_options), 0, 0, 0}
#define AQ_MAPPER_STATS_INIT {sizeof(aq_mapper_stats), 0, 0, 0, 0, 0}
#define AQ_DEVICE_FUNCTIONS_INIT \
    {sizeof(aq_device_functions), NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, NULL}
#define AQ_POOL_OPTIONS_INIT {sizeof(aq_pool_options), 0, 0, 0, 0, 0, 0, NULL, 0, 0, 0, NULL}
#define AQ_POOL_SPACE_INIT {sizeof(aq_pool_space), 0, 0, 0, 0, 0}
#define AQ_POOL_INFO_INIT {sizeof(aq_pool_info), 0, 0, 0, 0, 0, 0, 0, 0}
#define AQ_OBJECT_OPTIONS_INIT {sizeof(aq_object_options), 0, 0, 0, NULL, NULL, NULL, 0}
#define AQ_ATTACH_OPTIONS_INIT {sizeof(aq_attach_options), 0, NULL, 0}
#define AQ_OBJECT_STATS_INIT {sizeof(aq_object_stats), 0, 0, 0}
#define AQ_OBJECT_INFO_INIT {sizeof(aq_object_info), 0, 0, 0, 0, 0, 0}
#define AQ_HEAP_STATS_INIT {sizeof(aq_heap_stats), 0, 0, 0, 0}
#define AQ_FILE_STATUS_INIT {sizeof(aq_file_status), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

#ifdef AQUIFER_PMO_NAMES
/* The names of the paper on persistent memory objects, for programs that define AQUIFER_PMO_NAMES
   before they include this. attach returns null if it fails; addresses may lie anywhere in an object. */
static inline int pcreate(aq_pool *pool, const char *name, uint64_t size_bytes) {
    return aq_object_create(pool, name, size_bytes, NULL, NULL);
}
static inline void *attach(aq_pool *pool, const char *name, int writable, const char *key) {
    void *address;
    return aq_attach_at(pool, name, writable, key, &address) == 0 ? address : NULL;
}
static inline int psync(const void *address) { return aq_psync_at(address); }
static inline int detach(const void *address) { return aq_detach_at(address); }
static inline int pdestroy(aq_pool *pool, const char *name) {
    return aq_object_destroy(pool, name, NULL);
}
#endif

#endif  /* AQUIFER_H */
