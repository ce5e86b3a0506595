/* Sizes, offsets and counts at the ends of their types: errors or nothing to do, never a defect of the library. */
#include "test.h"

/* A call that may succeed or fail, and does not fail inside. */
#define SOUND(call) \
    do { \
        int result_ = (call); \
        if (result_ == -ENOTRECOVERABLE) is_equal(result_, 0, #call, __FILE__, __LINE__); \
    } while (0)
/* A call that must fail, with whichever number. */
#define REFUSED(call) \
    do { \
        SOUND(result = (call)); \
        CHECK(result < 0); \
    } while (0)

static int result;

static const uint64_t numbers[] = {
    0, 1, 4095, 4096, INT32_MAX, UINT32_MAX, (uint64_t)1 << 62, INT64_MAX, (uint64_t)INT64_MAX + 1,
    UINT64_MAX - 4096, UINT64_MAX - 4095, UINT64_MAX - 1, UINT64_MAX};
#define COUNT (sizeof numbers / sizeof numbers[0])

static void look(void *context, const void *data, size_t size) {
    (void)context, (void)data, (void)size;
}

static int visit(void *context, size_t index, uint64_t offset, const void *data, size_t size) {
    (void)context, (void)index, (void)offset, (void)data, (void)size;
    return 0;
}

static int visit_page(void *context, uint64_t page, const void *data, size_t size) {
    (void)context, (void)page, (void)data, (void)size;
    return 0;
}

static void caches(const char *path) {
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    aq_cache *cache;
    options.budget_bytes = UINT64_MAX;
    REFUSED(aq_cache_new(&options, &cache));
    options.budget_bytes = 8 << 20;
    options.page_bytes = SIZE_MAX;
    REFUSED(aq_cache_new(&options, &cache));
    options.page_bytes = 0;
    options.io_threads = SIZE_MAX; /* not as many as the system can bear */
    FAILS(EINVAL, aq_cache_new(&options, &cache));
    options.io_threads = 0;
    options.publish = "not a name/";
    REFUSED(aq_cache_new(&options, &cache));
    options.publish = NULL;
    options.policy = "\xff";
    REFUSED(aq_cache_new(&options, &cache));
    options.policy = NULL;
    OK(aq_cache_new(&options, &cache));
    char *text;
    OK(aq_cache_metrics(cache, "a\"b\\c\nd", &text));
    CHECK(strstr(text, "a\\\"b\\\\c\\nd") != NULL);
    aq_string_free(text);
    FAILS(EINVAL, aq_cache_metrics(cache, "\xff", &text));

    aq_device *device;
    aq_mapping *mapping;
    aq_pages *pages;
    aq_rows *rows;
    aq_pin *pin;
    aq_page guard;
    aq_page_mut mine;
    aq_ready *ready;
    OK(aq_ready_new(&ready));
    REFUSED(aq_device_memory(SIZE_MAX, &device));
    SOUND(aq_device_memory(0, &device));
    if (device != NULL) {
        REFUSED(aq_map(cache, device, NULL, &mapping));
        REFUSED(aq_pages_new(cache, device, &pages));
        aq_device_free(device);
    }
    OK(aq_device_memory(1 << 20, &device));
    aq_rows_options row_options = AQ_ROWS_OPTIONS_INIT;
    for (size_t i = 0; i < COUNT; i++) {
        row_options.row_bytes = numbers[i];
        for (size_t j = 0; j < COUNT; j++) {
            row_options.header_bytes = numbers[j];
            row_options.budget_bytes = 4 << 20;
            SOUND(aq_rows_open_device(device, &row_options, &rows));
            if (rows == NULL) continue;
            for (size_t k = 0; k < COUNT; k++) {
                static char row[4096];
                if (row_options.row_bytes <= sizeof row) SOUND(aq_rows_gather(rows, &numbers[k], 1, row));
                SOUND(aq_rows_invalidate(rows, numbers[k], numbers[j]));
            }
            REFUSED(aq_rows_gather(rows, numbers, SIZE_MAX / 4, NULL));
            aq_rows_free(rows);
        }
    }

    aq_map_options map_options = AQ_MAP_OPTIONS_INIT;
    map_options.writable = 1;
    for (int writable = 0; writable < 2; writable++) {
        if (writable) OK(aq_map(cache, device, &map_options, &mapping));
        else OK(aq_map_path(cache, path, NULL, &mapping));
        char *memory = (char *)malloc(4096);
        for (size_t i = 0; i < COUNT; i++) {
            SOUND(aq_mapping_read(mapping, memory, 4096, numbers[i]));
            SOUND(aq_mapping_write(mapping, memory, 4096, numbers[i]));
            if (writable) SOUND(aq_mapping_touch_mut(mapping, numbers[i]));
            for (size_t j = 0; j < COUNT; j++) {
                const aq_range range = {numbers[i], numbers[j]};
                int resident;
                SOUND(aq_mapping_look(mapping, range, look, NULL));
                SOUND(aq_mapping_visit(mapping, &range, 1, visit, NULL));
                SOUND(aq_mapping_touch(mapping, &range, 1));
                SOUND(aq_mapping_touch_async(mapping, &range, 1, ready, 1));
                SOUND(aq_mapping_prefetch(mapping, &range, 1));
                for (int advice = 0; advice < 7; advice++) SOUND(aq_mapping_advise(mapping, range, advice));
                SOUND(aq_mapping_is_resident(mapping, range, &resident));
                SOUND(aq_mapping_flush(mapping, range));
                SOUND(aq_mapping_flush_async(mapping, range, ready, 2));
                SOUND(aq_mapping_pin(mapping, range, writable, &pin));
                aq_unpin(pin);
            }
            REFUSED(aq_mapping_read(mapping, memory, SIZE_MAX, numbers[i]));
            REFUSED(aq_mapping_write(mapping, memory, SIZE_MAX, numbers[i]));
        }
        const aq_read reads[2] = {{1, SIZE_MAX, memory}, {UINT64_MAX, 1, memory}};
        REFUSED(aq_mapping_read_many(mapping, &reads[0], 1));
        REFUSED(aq_mapping_read_many(mapping, &reads[1], 1));
        REFUSED(aq_mapping_read_many(mapping, reads, SIZE_MAX));
        REFUSED(aq_mapping_touch(mapping, (const aq_range *)memory, SIZE_MAX));
        for (;;) {
            aq_completion done[64];
            size_t count;
            OK(aq_ready_wait(ready));
            OK(aq_ready_take(ready, done, 64, &count));
            if (count == 0) break;
            for (size_t i = 0; i < count; i++) CHECK(done[i].result != -ENOTRECOVERABLE);
        }
        size_t count;
        REFUSED(aq_ready_take(ready, (aq_completion *)memory, SIZE_MAX, &count));
        free(memory);
        aq_mapping_free(mapping);
    }

    OK(aq_pages_new(cache, device, &pages));
    for (size_t i = 0; i < COUNT; i++) {
        int resident;
        static char bytes[4096];
        SOUND(aq_pages_get(pages, numbers[i], &guard));
        aq_page_release(&guard);
        SOUND(aq_pages_get_mut(pages, numbers[i], &mine));
        aq_page_mut_release(&mine);
        SOUND(aq_pages_is_resident(pages, numbers[i], &resident));
        SOUND(aq_pages_read(pages, bytes, sizeof bytes, numbers[i]));
        SOUND(aq_pages_load(pages, &numbers[i], 1));
        SOUND(aq_pages_visit(pages, &numbers[i], 1, visit_page, NULL));
        for (size_t j = 0; j < COUNT; j++) {
            SOUND(aq_pages_prefetch(pages, numbers[i], numbers[j]));
            SOUND(aq_pages_flush(pages, numbers[i], numbers[j]));
        }
    }
    REFUSED(aq_pages_load(pages, numbers, SIZE_MAX));
    REFUSED(aq_pages_get_many(pages, numbers, SIZE_MAX / 8, &guard));
    OK(aq_pages_free(pages));
    aq_device_free(device);
    aq_ready_free(ready);
    for (size_t i = 0; i < COUNT; i++) {
        if (numbers[i] > UINT32_MAX) REFUSED(aq_cache_resize(cache, numbers[i]));
    }
    aq_cache_free(cache);
}

static void mappers(const char *path) {
    aq_mapper_options options = AQ_MAPPER_OPTIONS_INIT;
    options.mapping_cache_bytes = options.resident_budget_bytes = options.write_back_bytes_per_second = UINT64_MAX;
    aq_mapper *mapper;
    SOUND(aq_mapper_new(&options, &mapper));
    aq_mapper_free(mapper);
    OK(aq_mapper_new(NULL, &mapper));
    char memory[16];
    for (size_t i = 0; i < COUNT; i++) {
        for (size_t j = 0; j < COUNT; j++) {
            const aq_range range = {numbers[i], numbers[j]};
            aq_view *view;
            for (int access = AQ_ACCESS_READ; access <= (AQ_ACCESS_WRITE | AQ_STORES_PRIVATE | AQ_ALLOCATE); access++) {
                SOUND(aq_mapper_map(mapper, path, access, numbers[i], numbers[j], &view));
                aq_view_free(view);
            }
            OK(aq_mapper_map(mapper, path, AQ_ACCESS_WRITE, 0, UINT64_MAX, &view));
            SOUND(aq_view_look(view, range, look, NULL));
            SOUND(aq_view_read(view, memory, sizeof memory, numbers[i]));
            SOUND(aq_view_write(view, memory, sizeof memory, numbers[i]));
            SOUND(aq_view_flush(view, range, NULL));
            SOUND(aq_view_touch(view, &range, 1));
            for (int advice = 0; advice < 7; advice++) SOUND(aq_view_advise(view, range, advice));
            if (numbers[i] < 1 << 21 || numbers[i] > INT64_MAX / 2) SOUND(aq_view_grow(view, numbers[i]));
            aq_view_free(view);
        }
    }
    aq_mapper_free(mapper);
}

static void pools(const char *directory) {
    char path[4096], other[4096];
    snprintf(path, sizeof path, "%s/extremes.pool", directory);
    snprintf(other, sizeof other, "%s/other.pool", directory);
    aq_pool *pool;
    OK(aq_pool_create(path, 32 << 20, NULL, &pool));
    for (size_t i = 0; i < COUNT; i++) {
        aq_pool_options options = AQ_POOL_OPTIONS_INIT;
        aq_pool *made;
        options.overwrite = 1;
        if (numbers[i] <= 4096 || numbers[i] > INT64_MAX / 2) REFUSED(aq_pool_create(other, numbers[i], &options, &made));
        options.log_bytes = numbers[i];
        SOUND(aq_pool_create(other, 16 << 20, &options, &made));
        aq_pool_free(made);
        options.log_bytes = 0;
        options.inodes = numbers[i];
        SOUND(aq_pool_create(other, 16 << 20, &options, &made));
        aq_pool_free(made);
        options.inodes = 0;
        options.stall_timeout_ns = numbers[i];
        OK(aq_pool_create(other, 16 << 20, &options, &made));
        aq_pool_free(made);
    }
    aq_object_options options = AQ_OBJECT_OPTIONS_INIT;
    aq_object *object;
    void *memory;
    options.relocatable = 1;
    for (size_t i = 0; i < COUNT; i++) {
        uint64_t address = numbers[i];
        options.address = numbers[i];
        SOUND(aq_object_create(pool, "at", 4096, &options, NULL));
        SOUND(aq_object_relocate(pool, "at", NULL, &address));
        SOUND(aq_object_destroy(pool, "at", NULL));
        options.address = 0;
        SOUND(aq_object_create(pool, "long", numbers[i], &options, NULL));
        SOUND(aq_object_resize(pool, "long", numbers[COUNT - 1 - i], NULL, NULL));
        SOUND(aq_object_destroy(pool, "long", NULL));
    }
    options.heap = 1;
    OK(aq_object_create(pool, "heap", 1 << 20, &options, NULL));
    OK(aq_object_attach(pool, "heap", 1, NULL, &object));
    for (size_t i = 0; i < COUNT; i++) {
        for (size_t j = 0; j < COUNT; j++) {
            SOUND(result = aq_heap_alloc(object, numbers[i], numbers[j], &memory));
            if (result == 0) {
                SOUND(aq_heap_realloc(object, numbers[COUNT - 1 - i], numbers[j], &memory));
                OK(aq_heap_free(object, memory));
            }
        }
        size_t size;
        SOUND(aq_heap_usable_size(object, (void *)(uintptr_t)numbers[i], &size));
        SOUND(aq_heap_free(object, (void *)(uintptr_t)numbers[i]));
        SOUND(aq_heap_set_root(object, 1, (void *)(uintptr_t)numbers[i]));
        SOUND(aq_psync_at((void *)(uintptr_t)numbers[i]));
    }
    OK(aq_object_detach(object));
    OK(aq_object_create(pool, "bytes", 8192, NULL, NULL));
    OK(aq_object_attach(pool, "bytes", 1, NULL, &object));
    for (size_t i = 0; i < COUNT; i++) {
        for (size_t j = 0; j < COUNT; j++) {
            const aq_range range = {numbers[i], numbers[j]};
            SOUND(aq_object_psync_ranges(object, &range, 1));
        }
    }
    REFUSED(aq_objects_psync(&object, SIZE_MAX));
    OK(aq_object_detach(object));
    /* One object, attached twice by its address. */
    void *twice;
    OK(aq_attach_at(pool, "bytes", 0, NULL, &memory));
    SOUND(result = aq_attach_at(pool, "bytes", 0, NULL, &twice));
    CHECK(*(const char *)memory == 0);
    if (result == 0) OK(aq_detach_at(twice));
    OK(aq_detach_at(memory));
    aq_pool_free(pool);
}

static void files(const char *directory) {
    char path[4096], bytes[4096] = {0};
    snprintf(path, sizeof path, "%s/files.pool", directory);
    aq_pool *pool;
    aq_file *file, *other;
    OK(aq_pool_create(path, 32 << 20, NULL, &pool));
    const int both = AQ_OPEN_READ | AQ_OPEN_WRITE | AQ_OPEN_CREATE;
    OK(aq_file_open(pool, "/not UTF-8: \xff", both, 0, &file));
    FAILS(EEXIST, aq_file_open(pool, "/not UTF-8: \xff", both | AQ_OPEN_CREATE_NEW, 0, &other));
    CHECK(strstr(aq_last_error(), "not UTF-8: ") != NULL);
    aq_error error = AQ_ERROR_INIT;
    OK(aq_last_error_info(&error));
    CHECK(strcmp(error.path, "/not UTF-8: \xff") == 0);
    OK(aq_file_open(pool, "/other", both, 0, &other));
    for (size_t i = 0; i < COUNT; i++) {
        size_t done;
        aq_range found;
        struct iovec vector = {bytes, sizeof bytes};
        const aq_write write = {numbers[i], 16, bytes};
        SOUND(aq_file_read(file, bytes, sizeof bytes, numbers[i], &done));
        REFUSED(aq_file_read(file, bytes, SIZE_MAX, numbers[i], &done));
        SOUND(aq_file_readv(file, &vector, 1, numbers[i], &done));
        SOUND(aq_file_write(file, bytes, 16, numbers[i]));
        REFUSED(aq_file_write(file, bytes, SIZE_MAX, numbers[i]));
        SOUND(aq_file_writev(file, &vector, 1, numbers[i], &done));
        SOUND(aq_file_write_atomic(file, bytes, 16, numbers[i]));
        SOUND(aq_file_write_atomic_many(file, &write, 1));
        SOUND(aq_file_next(file, numbers[i], 0, &found));
        SOUND(aq_file_next(file, numbers[i], 1, &found));
        SOUND(aq_file_set_times(file, (int64_t)numbers[i], (int64_t)numbers[COUNT - 1 - i]));
        SOUND(aq_path_set_times(pool, "/other", 1, (int64_t)numbers[i], (int64_t)numbers[i]));
        SOUND(aq_file_lock(file, 0, (int64_t)numbers[i] < 0 ? 0 : (int64_t)numbers[i]));
        SOUND(aq_file_chmod(file, (uint32_t)numbers[i]));
        SOUND(aq_path_mkdir(pool, "/dir", (uint32_t)numbers[i], 0));
        SOUND(aq_path_mknod(pool, "/fifo", (uint32_t)numbers[i], numbers[i]));
        aq_file_view *view;
        if (numbers[i] > INT64_MAX / 2) REFUSED(aq_file_append_view(file, numbers[i], &view));
        for (size_t j = 0; j < COUNT; j++) {
            const aq_range range = {numbers[i], numbers[j]};
            int held;
            /* What is short enough would fill the pool. */
            for (int how = 0; how < 7; how++) SOUND(aq_file_allocate(file, how, range));
            OK(aq_file_set_len(file, 16384));
            SOUND(aq_file_exchange_range(file, numbers[i], other, numbers[j], 4096));
            SOUND(aq_file_exchange_range(file, 0, other, numbers[i], numbers[j]));
            SOUND(aq_file_copy_range(file, range, other, numbers[j], NULL));
            SOUND(aq_file_copy_range(file, range, file, 0, NULL));
            SOUND(aq_file_lock_range(file, range, 1, 0));
            SOUND(aq_file_range_lock_conflict(other, range, 1, &held, &found));
            SOUND(aq_file_unlock_range(file, range));
            SOUND(aq_file_sync_range(file, range, 1));
            SOUND(aq_file_begin_sync(file, range));
            OK(aq_file_set_len(file, 16384));
            OK(aq_file_set_len(other, 16384));
            for (int writable = 0; writable < 2; writable++) {
                SOUND(aq_file_view_new(file, range, writable, &view));
                aq_file_view_free(view);
                const aq_range all = {0, 16384};
                OK(aq_file_view_new(file, all, writable, &view));
                SOUND(aq_file_view_look(view, range, look, NULL));
                SOUND(aq_file_view_read(view, bytes, 16, numbers[i]));
                SOUND(aq_file_view_write(view, bytes, 16, numbers[i]));
                SOUND(aq_file_view_persist(view, range));
                aq_file_view_free(view);
            }
        }
        if (numbers[i] > INT64_MAX / 2) SOUND(aq_file_set_len(file, numbers[i]));
        SOUND(aq_path_rmdir(pool, "/dir"));
        SOUND(aq_path_unlink(pool, "/fifo"));
    }
    aq_file_free(file);
    aq_file_free(other);
    aq_pool_free(pool);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    const char *path = make_file(arguments[1], "data", 1 << 20);
    caches(path);
    mappers(path);
    pools(arguments[1]);
    files(arguments[1]);
    return 0;
}
