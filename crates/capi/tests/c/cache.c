/* Caches, mappings, errors, completions. */
#include "test.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#define SIZE ((size_t)1 << 20)

static int add_up(void *context, size_t index, uint64_t offset, const void *data, size_t size) {
    uint64_t *sum = (uint64_t *)context;
    const unsigned char *bytes = (const unsigned char *)data;
    (void)index;
    (void)offset;
    for (size_t i = 0; i < size; i++) *sum += bytes[i];
    return 0;
}

/* A hundred ranges, the second half of which is known when the first has been visited. */
struct chain {
    uint64_t next;
    unsigned seen;
};

static int next_in_chain(void *context, aq_range *range) {
    struct chain *chain = (struct chain *)context;
    if (chain->next == UINT64_MAX) {
        range->offset = UINT64_MAX - 1;
        range->length = 8;
        return 1;
    }
    if (chain->next == 100 || (chain->next == 50 && chain->seen < 49)) return 0;
    range->offset = chain->next++ * 4096 % (36 * 4096);
    range->length = 1;
    return 1;
}

static int visit_chain(void *context, size_t index, uint64_t offset, const void *data, size_t size) {
    struct chain *chain = (struct chain *)context;
    CHECK(index == chain->seen && size == 1 && offset == (chain->seen + 1) * 4096 % (36 * 4096));
    CHECK(*(const unsigned char *)data == offset / 4096 * 7);
    chain->seen++;
    return 0;
}

static void sum_up(void *context, const void *data, size_t size) {
    CHECK(add_up(context, 0, 0, data, size) == 0);
}

static int end_early(void *context, size_t index, uint64_t offset, const void *data, size_t size) {
    (void)context, (void)index, (void)offset, (void)data, (void)size;
    return 42;
}

static void errors(aq_cache *cache) {
    aq_mapping *mapping = (aq_mapping *)&mapping;
    FAILS(ENOENT, aq_map_path(cache, "/no/such/file", NULL, &mapping));
    CHECK(mapping == NULL);
    CHECK(strstr(aq_last_error(), "/no/such/file") != NULL);
    aq_error error = AQ_ERROR_INIT;
    OK(aq_last_error_info(&error));
    aq_error forgotten = AQ_ERROR_INIT;
    forgotten.size = 0;
    FAILS(EINVAL, aq_last_error_info(&forgotten));
    OK(aq_last_error_info(&error));
    CHECK(error.number == ENOENT && error.kind == AQ_KIND_NOT_FOUND && error.offset == AQ_NO_OFFSET);
    CHECK(strcmp(error.path, "/no/such/file") == 0 && error.size == sizeof error);

    aq_cache *none = NULL;
    FAILS(EINVAL, aq_cache_new(NULL, NULL));
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    options.policy = "mru";
    FAILS(EINVAL, aq_cache_new(&options, &none));
    CHECK(strstr(aq_last_error(), "sieve") != NULL);
    options.policy = NULL;
    options.budget_bytes = 4096;
    FAILS(EINVAL, aq_cache_new(&options, &none));
    options.size = 0;
    FAILS(EINVAL, aq_cache_new(&options, &none));
    struct {
        aq_cache_options known;
        uint64_t later;
    } newer = {AQ_CACHE_OPTIONS_INIT, 1};
    newer.known.size = sizeof newer;
    newer.known.budget_bytes = 8 << 20;
    FAILS(E2BIG, aq_cache_new(&newer.known, &none));
    newer.later = 0;
    OK(aq_cache_new(&newer.known, &none));
    aq_cache_free(none);
    aq_cache_free(NULL);
}

static void reading(aq_cache *cache, const char *path, int backend) {
    aq_map_options options = AQ_MAP_OPTIONS_INIT;
    options.backend = backend;
    aq_mapping *mapping;
    OK(aq_map_path(cache, path, &options, &mapping));
    CHECK(aq_mapping_len(mapping) == SIZE && aq_mapping_backend(mapping) == backend);
    const unsigned char *bytes = (const unsigned char *)aq_mapping_data(mapping);
    CHECK(bytes[0] == 0 && bytes[4096 * 5 + 17] == 35);
    CHECK(aq_mapping_data_mut(mapping) == NULL);
    FAILS(EROFS, aq_mapping_write(mapping, "x", 1, 0));
    unsigned char pair[2];
    OK(aq_mapping_read(mapping, pair, 2, 8191));
    CHECK(pair[0] == 7 && pair[1] == 14);
    FAILS(EINVAL, aq_mapping_read(mapping, pair, 2, SIZE - 1));

    unsigned char rows[3][64];
    aq_read reads[3] = {{4096 * 200, 64, rows[0]}, {0, 64, rows[1]}, {4096 * 9 - 32, 64, rows[2]}};
    OK(aq_mapping_read_many(mapping, reads, 3));
    CHECK(rows[0][63] == 200 * 7 % 256 && rows[1][0] == 0 && rows[2][0] == 56 && rows[2][63] == 63);

    aq_range ranges[2] = {{4096, 10}, {8192, 10}};
    uint64_t sum = 0;
    OK(aq_mapping_visit(mapping, ranges, 2, add_up, &sum));
    CHECK(sum == 10 * 7 + 10 * 14);
    CHECK(aq_mapping_visit(mapping, ranges, 2, end_early, NULL) == 42);
    FAILS(EINVAL, aq_mapping_visit(mapping, ranges, 2, NULL, NULL));

    struct chain chain = {1, 0};
    OK(aq_mapping_visit_in_order(mapping, next_in_chain, visit_chain, &chain));
    CHECK(chain.seen == 99);
    chain.next = UINT64_MAX;
    FAILS(EINVAL, aq_mapping_visit_in_order(mapping, next_in_chain, visit_chain, &chain));

    sum = 0;
    OK(aq_mapping_look(mapping, ranges[1], sum_up, &sum));
    CHECK(sum == 140);
    const aq_range beyond = {SIZE, 1};
    FAILS(EINVAL, aq_mapping_look(mapping, beyond, sum_up, &sum));
    FAILS(EROFS, aq_mapping_touch_mut(mapping, 0));
    OK(aq_mapping_touch(mapping, ranges, 2));
    OK(aq_mapping_prefetch(mapping, ranges, 2));
    OK(aq_mapping_advise(mapping, ranges[0], AQ_ADVICE_RANDOM));
    FAILS(EINVAL, aq_mapping_advise(mapping, ranges[0], 99));
    aq_pin *pin;
    OK(aq_mapping_pin(mapping, ranges[0], 0, &pin));
    int resident = 0;
    OK(aq_mapping_is_resident(mapping, ranges[0], &resident));
    CHECK(resident == 1);
    aq_unpin(pin);
    FAILS(EROFS, aq_mapping_pin(mapping, ranges[0], 1, &pin));
    CHECK(pin == NULL);
    OK(aq_mapping_pin(mapping, ranges[0], 0, &pin));
    aq_mapping_free(mapping);
    CHECK(aq_pin_data_mut(pin) == NULL);
    CHECK(((const unsigned char *)aq_pin_data(pin))[9] == 7); /* the pin keeps the mapping */
    aq_unpin(pin);
}

static void writing(aq_cache *cache, const char *path) {
    aq_map_options options = AQ_MAP_OPTIONS_INIT;
    options.writable = 1;
    aq_mapping *mapping;
    OK(aq_map_path(cache, path, &options, &mapping));
    unsigned char *bytes = (unsigned char *)aq_mapping_data_mut(mapping);
    bytes[100] = 1;
    OK(aq_mapping_write(mapping, "\2", 1, SIZE - 1));
    const aq_range whole = {0, UINT64_MAX};
    OK(aq_mapping_flush(mapping, whole));
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 100, SEEK_SET) == 0 && fgetc(file) == 1);
    CHECK(fseek(file, -1, SEEK_END) == 0 && fgetc(file) == 2 && fclose(file) == 0);
    CHECK(aq_mapping_last_fault(mapping) == 0);
    aq_pin *pin;
    const aq_range first = {0, 4096};
    OK(aq_mapping_pin(mapping, first, 1, &pin));
    CHECK(aq_pin_data_mut(pin) == bytes && aq_pin_data(pin) == bytes);
    aq_unpin(pin);

    /* Completions by a descriptor. */
    aq_ready *ready;
    OK(aq_ready_new(&ready));
    unsigned char row[16];
    const aq_read reads[1] = {{4096 * 100, sizeof row, row}};
    const aq_range range = {0, 4096};
    OK(aq_mapping_read_many_async(mapping, reads, 1, ready, 1));
    OK(aq_mapping_touch_async(mapping, &range, 1, ready, 2));
    OK(aq_mapping_flush_async(mapping, whole, ready, 3));
    const aq_range outside = {SIZE, 4096};
    OK(aq_mapping_touch_async(mapping, &outside, 1, ready, 4));
    size_t seen = 0, count;
    aq_completion results[5];
    while (seen < 4) {
        struct pollfd poll_ready = {aq_ready_fd(ready), POLLIN, 0};
        CHECK(poll(&poll_ready, 1, 60000) == 1);
        aq_completion completions[2];
        OK(aq_ready_take(ready, completions, 2, &count));
        for (size_t i = 0; i < count; i++, seen++) results[completions[i].token] = completions[i];
    }
    for (int i = 1; i < 4; i++) {
        CHECK(results[i].result == 0 && results[i].kind == AQ_KIND_NONE && results[i].offset == AQ_NO_OFFSET);
    }
    CHECK(results[4].result == -EINVAL && results[4].kind == AQ_KIND_INVALID_INPUT);
    CHECK(row[15] == 100 * 7 % 256);
    OK(aq_ready_wait(ready));
    OK(aq_mapping_touch_async(mapping, &range, 1, ready, 5));
    aq_mapping_free(mapping);
    aq_ready_free(ready);
}

static void statistics(aq_cache *cache) {
    aq_cache_stats stats = AQ_CACHE_STATS_INIT;
    OK(aq_cache_get_stats(cache, &stats));
    CHECK(stats.budget_bytes == 8 << 20 && stats.page_bytes == 4096 && stats.misses > 0);
    OK(aq_cache_resize(cache, 16 << 20));
    CHECK(aq_cache_is_shrinking(cache) <= 1 && aq_cache_is_shrinking(NULL) == 0);
    /* A program of before the library had `page_bytes`. */
    uint64_t older[3] = {16, 0, 77};
    OK(aq_cache_get_stats(cache, (aq_cache_stats *)older));
    CHECK(older[1] == 16 << 20 && older[2] == 77);
    char *text;
    OK(aq_cache_metrics(cache, "test", &text));
    CHECK(strstr(text, "aquifer_cache_budget_bytes{cache=\"test\"} 16777216") != NULL);
    aq_string_free(text);
}

static void in_a_child(aq_cache *cache, const char *path) {
    aq_mapping *mapping;
    OK(aq_map_path(cache, path, NULL, &mapping));
    aq_pin *pin;
    const aq_range page = {0, 4096};
    OK(aq_mapping_pin(mapping, page, 0, &pin));
    aq_ready *ready;
    OK(aq_ready_new(&ready));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte;
        const aq_range range = {0, 1};
        CHECK(aq_mapping_data(mapping) == NULL && aq_mapping_len(mapping) == 0 && aq_pin_data(pin) == NULL);
        aq_unpin(pin);
        aq_cache_stats stats = AQ_CACHE_STATS_INIT;
        FAILS(ECHILD, aq_cache_get_stats(cache, &stats));
        aq_completion done;
        size_t count;
        FAILS(ECHILD, aq_ready_take(ready, &done, 1, &count));
        FAILS(ECHILD, aq_ready_wait(ready));
        FAILS(ECHILD, aq_mapping_read(mapping, &byte, 1, 0));
        FAILS(ECHILD, aq_mapping_touch_async(mapping, &range, 1, ready, 1));
        aq_mapping_free(mapping);
        aq_cache *own;
        OK(aq_cache_new(NULL, &own));
        OK(aq_map_path(own, path, NULL, &mapping));
        OK(aq_mapping_read(mapping, &byte, 1, 4096));
        CHECK(byte == 7);
        /* With the parent's set no token would come, so nothing may start to write to the target. */
        const aq_read read = {4096, 1, &byte};
        byte = 1;
        FAILS(ECHILD, aq_mapping_read_many_async(mapping, &read, 1, ready, 2));
        aq_mapping_free(mapping); /* waits for what is under way */
        CHECK(byte == 1);
        aq_ready_free(ready);
        aq_cache_free(own);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    aq_ready_free(ready);
    aq_unpin(pin);
    aq_mapping_free(mapping);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", AQ_VERSION_MAJOR, AQ_VERSION_MINOR, AQ_VERSION_PATCH);
    CHECK(strcmp(aq_version(), version) == 0 && AQ_VERSION >= 1000);
    CHECK(strcmp(aq_last_error(), "") == 0);
    OK(aq_prepare_thread());
    const char *path = make_file(arguments[1], "data", SIZE);
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    options.budget_bytes = 8 << 20;
    options.page_bytes = 4096;
    options.policy = "sieve";
    aq_cache *cache;
    OK(aq_cache_new(&options, &cache));
    errors(cache);
    reading(cache, path, AQ_BACKEND_KERNEL);
    reading(cache, path, AQ_BACKEND_USER);
    in_a_child(cache, path);
    writing(cache, path);
    statistics(cache);
    aq_cache_free(cache);
    return 0;
}
