/* Devices whose bytes the program provides. */
#include "test.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#define PAGES 512
#define SIZE (PAGES * 4096)

struct store {
    int file;
    int syncs;
    int released;
    int broken; /* what the next calls return instead */
};

/* Only what a handler of a signal may do. */
static int64_t read_store(void *context, void *buffer, size_t size, uint64_t offset) {
    struct store *store = (struct store *)context;
    int broken = __atomic_load_n(&store->broken, __ATOMIC_RELAXED);
    if (broken != 0) return broken == 1 ? (int64_t)size + 1 : broken;
    int saved = errno;
    ssize_t got = pread(store->file, buffer, size, (off_t)offset);
    int64_t result = got < 0 ? -errno : got;
    errno = saved;
    return result;
}

static int write_store(void *context, const void *buffer, size_t size, uint64_t offset) {
    struct store *store = (struct store *)context;
    int broken = __atomic_load_n(&store->broken, __ATOMIC_RELAXED);
    if (broken != 0) return broken;
    ssize_t written = pwrite(store->file, buffer, size, (off_t)offset);
    return written < 0 ? -errno : written == (ssize_t)size ? 0 : -EIO;
}

static int sync_store(void *context) {
    struct store *store = (struct store *)context;
    __atomic_fetch_add(&store->syncs, 1, __ATOMIC_RELAXED);
    return fdatasync(store->file) == 0 ? 0 : -errno;
}

static int64_t len_store(void *context) {
    off_t len = lseek(((struct store *)context)->file, 0, SEEK_END);
    return len < 0 ? -errno : len;
}

static void release_store(void *context) {
    struct store *store = (struct store *)context;
    close(store->file);
    store->released++;
}

static aq_device_functions functions(struct store *store, const char *path) {
    aq_device_functions given = AQ_DEVICE_FUNCTIONS_INIT;
    memset(store, 0, sizeof *store);
    store->file = open(path, O_RDWR | O_CLOEXEC);
    CHECK(store->file >= 0);
    given.context = store;
    given.read = read_store;
    given.write = write_store;
    given.sync = sync_store;
    given.len = len_store;
    given.release = release_store;
    return given;
}

static void break_store(struct store *store, int how) {
    __atomic_store_n(&store->broken, how, __ATOMIC_RELAXED);
}

static void *load_all(void *argument) {
    const unsigned char *bytes = (const unsigned char *)argument;
    unsigned long sum = 0;
    for (size_t page = 0; page < PAGES; page++) sum += bytes[page * 4096];
    return (void *)sum;
}

static void mapped(aq_cache *cache, const char *path) {
    struct store store;
    aq_device_functions given = functions(&store, path);
    given.signal_safe = 1;
    given.name = "the store";
    aq_device *device;
    OK(aq_device_custom(&given, &device));
    uint64_t length;
    OK(aq_device_len(device, &length));
    CHECK(length == SIZE);
    aq_map_options options = AQ_MAP_OPTIONS_INIT;
    options.writable = 1;
    aq_mapping *mapping;
    OK(aq_map(cache, device, &options, &mapping));
    CHECK(aq_mapping_backend(mapping) == AQ_BACKEND_USER);
    unsigned char *bytes = (unsigned char *)aq_mapping_data_mut(mapping);
    pthread_t threads[4];
    void *sums[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, load_all, bytes) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], &sums[i]) == 0);
    unsigned long expected = 0;
    for (size_t page = 0; page < PAGES; page++) expected += page * 7 % 256;
    for (int i = 0; i < 4; i++) CHECK((unsigned long)sums[i] == expected);
    for (size_t page = 0; page < PAGES; page++) bytes[page * 4096 + 1] = 99;
    const aq_range whole = {0, UINT64_MAX};
    OK(aq_mapping_flush(mapping, whole));
    CHECK(store.syncs > 0);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    unsigned char byte;
    CHECK(pread(file, &byte, 1, (PAGES - 1) * 4096 + 1) == 1 && byte == 99 && close(file) == 0);

    /* Errors have number, offset and name; what is no result of a read is an error as well. */
    const aq_range one = {4096 * 5, 4096};
    OK(aq_mapping_advise(mapping, one, AQ_ADVICE_DONT_NEED));
    break_store(&store, -EREMOTEIO);
    FAILS(EREMOTEIO, aq_mapping_read(mapping, &byte, 1, 4096 * 5));
    aq_error error = AQ_ERROR_INIT;
    OK(aq_last_error_info(&error));
    CHECK(error.kind == AQ_KIND_IO && error.offset == 4096 * 5 && strstr(error.text, "the store") != NULL);
    break_store(&store, 1);
    FAILS(EIO, aq_mapping_read(mapping, &byte, 1, 4096 * 5));
    break_store(&store, -1000000);
    FAILS(EIO, aq_mapping_read(mapping, &byte, 1, 4096 * 5));
    break_store(&store, 0);
    bytes[0] = 1;
    break_store(&store, -ENOSPC);
    FAILS(ENOSPC, aq_mapping_flush(mapping, whole));
    break_store(&store, 0);
    OK(aq_mapping_flush(mapping, whole));
    aq_device_free(device);
    CHECK(store.released == 0);
    aq_mapping_free(mapping);
    CHECK(store.released == 1);
}

/* Functions that are not for handlers of signals serve pages and rows. */
static void not_mapped(aq_cache *cache, const char *path) {
    struct store store;
    aq_device_functions given = functions(&store, path);
    given.sync = NULL;
    aq_device *device;
    aq_mapping *mapping;
    OK(aq_device_custom(&given, &device));
    FAILS(EOPNOTSUPP, aq_map(cache, device, NULL, &mapping));
    CHECK(mapping == NULL && strstr(aq_last_error(), "signal_safe") != NULL);
    aq_pages *pages;
    OK(aq_pages_new(cache, device, &pages));
    CHECK(aq_pages_len(pages) == SIZE);
    aq_page_mut mine;
    OK(aq_pages_get_mut(pages, 7, &mine));
    CHECK(((unsigned char *)mine.data)[1] == 99);
    ((unsigned char *)mine.data)[1] = 98;
    aq_page_mut_release(&mine);
    OK(aq_pages_flush(pages, 0, UINT64_MAX));
    OK(aq_pages_free(pages));
    aq_rows_options options = AQ_ROWS_OPTIONS_INIT;
    options.row_bytes = 4096;
    options.budget_bytes = 4 << 20;
    aq_rows *rows;
    OK(aq_rows_open_device(device, &options, &rows));
    static unsigned char row[4096];
    const uint64_t wanted = 7;
    OK(aq_rows_gather(rows, &wanted, 1, row));
    CHECK(row[0] == 49 && row[1] == 98);
    aq_rows_free(rows);
    aq_device_free(device);
    CHECK(store.released == 1);
}

static void refused(aq_cache *cache, const char *path) {
    struct store store;
    aq_device_functions given = functions(&store, path);
    aq_device *device;
    FAILS(EINVAL, aq_device_custom(NULL, &device));
    given.alignment = 3;
    FAILS(EINVAL, aq_device_custom(&given, &device));
    given.alignment = 8192;
    FAILS(EINVAL, aq_device_custom(&given, &device));
    given.alignment = 512;
    given.read = NULL;
    FAILS(EINVAL, aq_device_custom(&given, &device));
    given.read = read_store;
    given.len = NULL;
    FAILS(EINVAL, aq_device_custom(&given, &device));
    CHECK(device == NULL && store.released == 0);
    given.len = len_store;
    given.write = NULL;
    given.signal_safe = 1;
    OK(aq_device_custom(&given, &device));
    aq_map_options options = AQ_MAP_OPTIONS_INIT;
    options.writable = 1;
    aq_mapping *mapping;
    FAILS(EROFS, aq_map(cache, device, &options, &mapping));
    OK(aq_map(cache, device, NULL, &mapping));
    aq_mapping_free(mapping);
    aq_device_free(device);
    CHECK(store.released == 1);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    const char *path = make_file(arguments[1], "store", SIZE);
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    options.budget_bytes = 8 << 20;
    aq_cache *cache;
    OK(aq_cache_new(&options, &cache));
    mapped(cache, path);
    not_mapped(cache, path);
    refused(cache, path);
    aq_cache_free(cache);
    return 0;
}
