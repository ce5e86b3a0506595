/* What several threads do with the same handles. A deadlock ends at the time limit of the test. */
#include "test.h"

#include <pthread.h>

#define ROUNDS 2000

static void *wait_and_take(void *argument) {
    aq_ready *ready = (aq_ready *)argument;
    while (aq_ready_len(ready) > 0) {
        aq_completion done;
        size_t count;
        OK(aq_ready_wait(ready));
        OK(aq_ready_take(ready, &done, 1, &count));
        /* Another thread may have taken it. */
        if (count == 1) CHECK(done.result == 0 && done.token == 1);
    }
    return NULL;
}

/* One completion, and two threads that wait for it: both return. */
static void completions(void) {
    aq_cache *cache;
    aq_device *device;
    aq_mapping *mapping;
    aq_ready *ready;
    OK(aq_cache_new(NULL, &cache));
    OK(aq_device_memory(4 << 20, &device));
    OK(aq_map(cache, device, NULL, &mapping));
    OK(aq_ready_new(&ready));
    for (uint64_t round = 0; round < ROUNDS; round++) {
        const aq_range range = {round % 1024 * 4096, 4096};
        OK(aq_mapping_advise(mapping, range, AQ_ADVICE_DONT_NEED));
        OK(aq_mapping_touch_async(mapping, &range, 1, ready, 1));
        pthread_t threads[2];
        for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, wait_and_take, ready) == 0);
        for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK(aq_ready_len(ready) == 0);
    }
    aq_ready_free(ready);
    aq_mapping_free(mapping);
    aq_device_free(device);
    aq_cache_free(cache);
}

static void *psync_all(void *argument) {
    for (int i = 0; i < ROUNDS / 10; i++) OK(aq_objects_psync((aq_object **)argument, 3));
    return NULL;
}

static void *fail_here(void *argument) {
    CHECK(strcmp(aq_last_error(), "") == 0);
    FAILS(EINVAL, aq_cache_new(NULL, NULL));
    CHECK(strcmp(aq_last_error(), "") != 0);
    return argument;
}

/* A thread's data is destroyed, and with it its last failure: calls go on, and there is no failure. */
static void at_the_end(void *value) {
    aq_error error = AQ_ERROR_INIT;
    error.number = error.kind = 77;
    FAILS(EINVAL, aq_cache_new(NULL, NULL));
    CHECK(aq_last_error() != NULL && *aq_last_error() == 0);
    OK(aq_last_error_info(&error));
    CHECK(error.number == 0 && error.kind == AQ_KIND_NONE && *error.text == 0 && *error.path == 0);
    *(int *)value = 1;
}

static pthread_key_t key;

static void *with_key(void *argument) {
    FAILS(EINVAL, aq_cache_new(NULL, NULL));
    CHECK(pthread_setspecific(key, argument) == 0);
    return NULL;
}

/* Lists of objects with heaps in any order, and with one twice. */
static void objects(const char *directory) {
    char path[4096];
    snprintf(path, sizeof path, "%s/threads.pool", directory);
    aq_pool *pool;
    OK(aq_pool_create(path, 64 << 20, NULL, &pool));
    aq_object_options options = AQ_OBJECT_OPTIONS_INIT;
    options.heap = 1;
    aq_object *a, *b;
    OK(aq_object_create(pool, "a", 1 << 20, &options, NULL));
    OK(aq_object_create(pool, "b", 1 << 20, &options, NULL));
    OK(aq_object_attach(pool, "a", 1, NULL, &a));
    OK(aq_object_attach(pool, "b", 1, NULL, &b));
    aq_object *orders[2][3] = {{a, b, a}, {b, a, b}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&threads[i], NULL, psync_all, orders[i]) == 0);
    for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    void *memory;
    OK(aq_heap_alloc(a, 100, 0, &memory));
    OK(aq_object_detach(a));
    OK(aq_object_detach(b));
    aq_pool_free(pool);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    completions();
    objects(arguments[1]);
    pthread_t thread;
    FAILS(ENOENT, aq_detach_at(NULL));
    const char *mine = aq_last_error();
    CHECK(pthread_create(&thread, NULL, fail_here, NULL) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(mine == aq_last_error());
    int ended = 0;
    CHECK(pthread_key_create(&key, at_the_end) == 0);
    CHECK(pthread_create(&thread, NULL, with_key, &ended) == 0 && pthread_join(thread, NULL) == 0);
    CHECK(ended == 1);
    return 0;
}
