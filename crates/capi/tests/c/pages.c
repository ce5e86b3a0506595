/* Devices and pages. */
#include "test.h"

#include <sys/mman.h>
#include <unistd.h>

#define PAGES 64

static int count_pages(void *context, uint64_t page, const void *data, size_t size) {
    unsigned *visits = (unsigned *)context;
    CHECK(size == 4096);
    visits[page] += 1 + *(const unsigned char *)data;
    return 0;
}

/* The first element of the context, which `count_pages` does not get to see, is where it has come to. */
static int every_other(void *context, uint64_t *page) {
    unsigned *visits = (unsigned *)context;
    if (visits[0] == PAGES - 2) return 0;
    *page = visits[0] += 2;
    return 1;
}

static int one_beyond(void *context, uint64_t *page) {
    (void)context;
    *page = PAGES;
    return 1;
}

static int stop(void *context, uint64_t page, const void *data, size_t size) {
    (void)context, (void)page, (void)data, (void)size;
    return -7;
}

static void rows(const char *path) {
    aq_rows_options options = AQ_ROWS_OPTIONS_INIT;
    aq_rows *rows;
    FAILS(EINVAL, aq_rows_open(path, &options, &rows));
    CHECK(rows == NULL);
    options.row_bytes = 64;
    options.header_bytes = 4096;
    options.budget_bytes = 4 << 20;
    OK(aq_rows_open(path, &options, &rows));
    CHECK(aq_rows_count(rows) == (PAGES - 1) * 64);
    const uint64_t wanted[3] = {64, 0, 64};
    unsigned char target[3][64];
    OK(aq_rows_gather(rows, wanted, 3, target));
    CHECK(target[0][0] == 14 && target[1][63] == 7 && target[2][63] == 14);
    const uint64_t outside = (PAGES - 1) * 64;
    FAILS(EINVAL, aq_rows_gather(rows, &outside, 1, target));
    aq_ready *ready;
    OK(aq_ready_new(&ready));
    memset(target, 0, sizeof target);
    OK(aq_rows_gather_async(rows, wanted, 3, target, ready, 5));
    OK(aq_ready_wait(ready));
    aq_completion done;
    size_t count;
    OK(aq_ready_take(ready, &done, 1, &count));
    CHECK(count == 1 && done.result == 0 && target[0][0] == 14 && target[1][63] == 7);
    aq_ready_free(ready);
    OK(aq_rows_invalidate(rows, 0, 100));
    aq_rows_stats stats = AQ_ROWS_STATS_INIT;
    OK(aq_rows_get_stats(rows, &stats));
    CHECK(stats.hits + stats.misses == 6 && stats.reads > 0);
    aq_rows_free(rows);
}

/* A file whose bytes are memory. */
static void in_memory(aq_cache *cache) {
    int memory = memfd_create("memory", MFD_CLOEXEC);
    CHECK(memory >= 0 && ftruncate(memory, 1 << 20) == 0);
    char path[64], byte = 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
    aq_device *device;
    aq_mapping *mapping;
    FAILS(EINVAL, aq_device_open_dax(path, AQ_DEVICE_DIRECT, &device));
    FAILS(EOPNOTSUPP, aq_device_open_dax("/proc/self/status", 0, &device));
    CHECK(device == NULL);
    OK(aq_device_open_dax(path, AQ_DEVICE_WRITE, &device));
    uint64_t length;
    OK(aq_device_len(device, &length));
    CHECK(length == 1 << 20);
    aq_map_options options = AQ_MAP_OPTIONS_INIT;
    options.writable = 1;
    OK(aq_map(cache, device, &options, &mapping));
    aq_device_free(device);
    OK(aq_mapping_write(mapping, "x", 1, 5000));
    const aq_range all = {0, UINT64_MAX};
    OK(aq_mapping_flush(mapping, all));
    CHECK(pread(memory, &byte, 1, 5000) == 1 && byte == 'x');
    aq_mapping_free(mapping);
    close(memory);
}

int main(int argument_count, char **arguments) {
    CHECK(argument_count == 2);
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    options.budget_bytes = 8 << 20;
    options.page_bytes = 4096;
    aq_cache *cache;
    OK(aq_cache_new(&options, &cache));
    aq_device *device;
    FAILS(ENOENT, aq_device_open("/no/such/device", 0, &device));
    CHECK(device == NULL);
    FAILS(EINVAL, aq_device_open("/dev/null", AQ_DEVICE_BUFFERED | AQ_DEVICE_DIRECT, &device));
    FAILS(EINVAL, aq_device_open("/dev/null", 64, &device));
    const char *path = make_file(arguments[1], "pages", PAGES * 4096);
    rows(path);
    in_memory(cache);
    OK(aq_device_open(path, AQ_DEVICE_WRITE | AQ_DEVICE_NO_IO_URING, &device));
    uint64_t length;
    OK(aq_device_len(device, &length));
    CHECK(length == PAGES * 4096);
    aq_pages *pages;
    OK(aq_pages_new(cache, device, &pages));
    aq_device_free(device);
    CHECK(aq_pages_count(pages) == PAGES && aq_pages_page_bytes(pages) == 4096);

    /* Guards. */
    aq_page one, two;
    OK(aq_pages_get(pages, 3, &one));
    OK(aq_pages_get(pages, 3, &two));
    CHECK(one.data == two.data && *(const unsigned char *)one.data == 21 && one.page == 3);
    aq_page_release(&one);
    CHECK(one.data == NULL);
    aq_page_release(&one);
    aq_page_release(&two);
    aq_page_release(NULL);
    memset(&one, 0xaa, sizeof one);
    FAILS(EINVAL, aq_pages_get(pages, PAGES, &one));
    CHECK(one.data == NULL);
    aq_page_release(&one);
    memset(&one, 0xaa, sizeof one);
    FAILS(EINVAL, aq_pages_get(NULL, 0, &one));
    aq_page_release(&one);
    aq_page_mut mine;
    memset(&mine, 0xaa, sizeof mine);
    FAILS(EINVAL, aq_pages_get_mut(pages, PAGES, &mine));
    aq_page_mut_release(&mine);
    OK(aq_pages_get_mut(pages, 3, &mine));
    memset(mine.data, 200, 4096);
    aq_page_mut_release(&mine);
    CHECK(mine.data == NULL);
    aq_page_mut_release(&mine);
    OK(aq_pages_get(pages, 3, &one));
    CHECK(*(const unsigned char *)one.data == 200);
    aq_page_release(&one);

    /* Batches. */
    const uint64_t list[4] = {60, 2, 3, 2};
    aq_page guards[4];
    const uint64_t beyond[4] = {1, 2, PAGES, 3};
    memset(guards, 0xaa, sizeof guards);
    FAILS(EINVAL, aq_pages_get_many(pages, beyond, 4, guards));
    for (int i = 0; i < 4; i++) aq_page_release(&guards[i]);
    OK(aq_pages_get_many(pages, list, 4, guards));
    CHECK(guards[0].page == 60 && *(const unsigned char *)guards[1].data == 14);
    for (int i = 0; i < 4; i++) aq_page_release(&guards[i]);
    OK(aq_pages_load(pages, list, 4));
    int resident = 0;
    OK(aq_pages_is_resident(pages, 60, &resident));
    CHECK(resident == 1);
    unsigned visits[PAGES] = {0};
    OK(aq_pages_visit(pages, list, 4, count_pages, visits));
    CHECK(visits[2] == 15 && visits[3] == 201);
    CHECK(aq_pages_visit(pages, list, 4, stop, NULL) == -7);
    unsigned order[PAGES] = {0};
    OK(aq_pages_visit_in_order(pages, every_other, count_pages, order));
    CHECK(order[PAGES - 2] == 1 + (PAGES - 2) * 7 % 256 && order[PAGES - 1] == 0 && order[0] == PAGES - 2);
    FAILS(EINVAL, aq_pages_visit_in_order(pages, one_beyond, count_pages, order));
    OK(aq_pages_prefetch(pages, 10, 4));
    unsigned char few[8];
    OK(aq_pages_read(pages, few, 8, 4096 * 3 - 4));
    CHECK(few[3] == 14 && few[4] == 200);

    aq_ready *ready;
    OK(aq_ready_new(&ready));
    for (uint64_t token = 0; token < 20; token++) OK(aq_pages_load_async(pages, list, 4, ready, token));
    unsigned tokens = 0;
    while (tokens != (1u << 20) - 1) {
        aq_completion completions[7];
        size_t count;
        OK(aq_ready_wait(ready));
        OK(aq_ready_take(ready, completions, 7, &count));
        for (size_t i = 0; i < count; i++) {
            CHECK(completions[i].result == 0);
            tokens |= 1u << completions[i].token;
        }
    }
    aq_ready_free(ready);

    OK(aq_pages_flush(pages, 0, UINT64_MAX));
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 4096 * 3, SEEK_SET) == 0 && fgetc(file) == 200 && fclose(file) == 0);
    FAILS(EINVAL, aq_pages_flush(pages, PAGES + 1, 1));
    aq_cache_free(cache);
    OK(aq_pages_get(pages, 3, &one));
    OK(aq_pages_get_mut(pages, 4, &mine));
    FAILS(EBUSY, aq_pages_free(pages));
    aq_page_release(&one);
    FAILS(EBUSY, aq_pages_free(pages));
    aq_page_mut_release(&mine);
    OK(aq_pages_free(pages));
    OK(aq_pages_free(NULL));

    /* Memory. */
    OK(aq_cache_new(NULL, &cache));
    OK(aq_device_memory(1 << 20, &device));
    OK(aq_pages_new(cache, device, &pages));
    aq_mapping *mapping;
    FAILS(EBUSY, aq_map(cache, device, NULL, &mapping));
    aq_pages_free(pages);
    aq_device_free(device);
    aq_cache_free(cache);
    return 0;
}
