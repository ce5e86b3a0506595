/* Handles that are freed twice or used after they were freed: an error, no crash. Only the handles freed last
   are recognised, which is what tests of a program meet. */
#include "test.h"

#include <pthread.h>

#define FREED(call) \
    do { \
        FAILS(EBADF, call); \
        CHECK(strstr(aq_last_error(), "freed before") != NULL); \
    } while (0)

static int last_number(void) {
    aq_error error = AQ_ERROR_INIT;
    OK(aq_last_error_info(&error));
    return error.number;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    char byte = 0;
    const char *path = make_file(arguments[1], "data", 1 << 20);
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    options.budget_bytes = 8 << 20;
    aq_cache *cache;
    aq_device *device;
    aq_mapping *mapping;
    aq_pages *pages;
    aq_ready *ready;
    OK(aq_cache_new(&options, &cache));
    OK(aq_map_path(cache, path, NULL, &mapping));
    aq_mapping_free(mapping);
    FREED(aq_mapping_read(mapping, &byte, 1, 0));
    CHECK(aq_mapping_data(mapping) == NULL && aq_mapping_len(mapping) == 0);
    FAILS(EINVAL, aq_cache_new(NULL, NULL));
    aq_mapping_free(mapping);
    CHECK(last_number() == EBADF);

    OK(aq_device_memory(1 << 20, &device));
    OK(aq_pages_new(cache, device, &pages));
    OK(aq_pages_free(pages));
    aq_page guard;
    FREED(aq_pages_get(pages, 0, &guard));
    CHECK(guard.data == NULL);
    FREED(aq_pages_free(pages));
    aq_device_free(device);

    OK(aq_ready_new(&ready));
    aq_ready_free(ready);
    FREED(aq_ready_wait(ready));
    aq_ready_free(ready);

    char pool_path[4096];
    snprintf(pool_path, sizeof pool_path, "%s/misuse.pool", arguments[1]);
    aq_pool *pool;
    OK(aq_pool_create(pool_path, 16 << 20, NULL, &pool));
    aq_object *object;
    OK(aq_object_create(pool, "object", 4096, NULL, NULL));
    OK(aq_object_attach(pool, "object", 1, NULL, &object));
    OK(aq_object_detach(object));
    FREED(aq_object_detach(object));
    FREED(aq_object_psync(object));
    FREED(aq_object_rollback(object));
    aq_dir *dir;
    const char *name;
    OK(aq_dir_open(pool, "/", &dir));
    aq_dir_free(dir);
    FREED(aq_dir_next(dir, &name, NULL));
    aq_pool_free(pool);
    FREED(aq_pool_sync(pool));

    /* The memory of older ones is given back: a leak would be found by the sanitizer at the end. */
    for (int i = 0; i < 2000; i++) {
        OK(aq_device_memory(4096, &device));
        aq_device_free(device);
        aq_device_free(device);
    }
    aq_cache_free(cache);
    FREED(aq_cache_resize(cache, 16 << 20));
    return 0;
}
