/* Objects of a pool, and heaps in them. */
#define AQUIFER_PMO_NAMES
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

struct list {
    struct list *next;
    uint64_t value;
};

static int find_heap(void *context, const char *name, size_t name_size, const aq_object_info *info) {
    if (name_size == 4 && memcmp(name, "heap", 4) == 0) {
        CHECK(info->flags == AQ_OBJECT_HEAP && info->state == 'D');
        *(int *)context += 1;
    }
    return 0;
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    char path[4096];
    snprintf(path, sizeof path, "%s/objects.pool", arguments[1]);
    aq_pool *pool;
    OK(aq_pool_create(path, 64 << 20, NULL, &pool));

    /* Bytes. */
    aq_object_info info = AQ_OBJECT_INFO_INIT;
    OK(aq_object_create(pool, "counters", 5000, NULL, &info));
    CHECK(info.size_bytes == 8192 && info.address % 4096 == 0);
    FAILS(EEXIST, aq_object_create(pool, "counters", 5000, NULL, NULL));
    aq_object *object;
    FAILS(ENOENT, aq_object_attach(pool, "nothing", 0, NULL, &object));
    OK(aq_object_attach(pool, "counters", 1, NULL, &object));
    CHECK((uint64_t)(uintptr_t)aq_object_data(object) == info.address && aq_object_len(object) == 8192);
    uint64_t *words = (uint64_t *)aq_object_data_mut(object);
    CHECK(words == aq_object_data(object));
    words[0] = 1;
    words[600] = 2;
    OK(aq_object_psync(object));
    words[0] = 3;
    words[1] = 4;
    const aq_range first = {0, 8};
    OK(aq_object_psync_ranges(object, &first, 1));
    words[0] = 5;
    words[600] = 6;
    OK(aq_object_rollback(object));
    CHECK(words[0] == 3 && words[1] == 0 && words[600] == 2);
    words[1] = 7;
    OK(aq_object_psync(object)); /* and goes on from there */
    words[1] = 0;
    OK(aq_object_psync(object));
    void *memory;
    FAILS(EINVAL, aq_heap_alloc(object, 10, 0, &memory));
    OK(aq_object_detach(object));
    OK(aq_object_attach(pool, "counters", 0, NULL, &object));
    const uint64_t *stored = (const uint64_t *)aq_object_data(object);
    CHECK(aq_object_data_mut(object) == NULL);
    CHECK(stored[0] == 3 && stored[1] == 0 && stored[600] == 2);
    OK(aq_object_detach(object));
    OK(aq_object_detach(NULL));

    /* Content from the beginning. */
    aq_object_options options = AQ_OBJECT_OPTIONS_INIT;
    options.content = "header";
    options.content_size = 6;
    OK(aq_object_create(pool, "table", 4096, &options, NULL));
    OK(aq_object_attach(pool, "table", 0, NULL, &object));
    CHECK(memcmp(aq_object_data(object), "header\0", 8) == 0);
    OK(aq_object_rollback(object)); /* nothing to undo */
    OK(aq_object_detach(object));
    options.content_size = 4097;
    FAILS(EINVAL, aq_object_create(pool, "other", 4096, &options, NULL));
    options.content = NULL;
    FAILS(EINVAL, aq_object_create(pool, "other", 4096, &options, NULL));
    options.content_size = 0;

    /* A heap, over a restart. */
    options.heap = 1;
    OK(aq_object_create(pool, "heap", 1 << 20, &options, NULL));
    int heaps = 0;
    OK(aq_object_list(pool, find_heap, &heaps));
    CHECK(heaps == 1);
    OK(aq_object_attach(pool, "heap", 1, NULL, &object));
    OK(aq_heap_root(object, 7, &memory));
    CHECK(memory == NULL);
    FAILS(EINVAL, aq_object_rollback(object));
    struct list *root = NULL;
    for (uint64_t i = 0; i < 100; i++) {
        struct list *one;
        OK(aq_heap_alloc(object, sizeof *one, 0, (void **)&one));
        one->next = root;
        one->value = i;
        root = one;
    }
    OK(aq_heap_set_root(object, 7, root));
    OK(aq_heap_alloc_zeroed(object, 5000, 64, &memory));
    CHECK((uintptr_t)memory % 64 == 0 && ((char *)memory)[4999] == 0);
    OK(aq_heap_realloc(object, 100000, 64, &memory));
    size_t usable;
    OK(aq_heap_usable_size(object, memory, &usable));
    CHECK(usable >= 100000);
    OK(aq_heap_free(object, memory));
    FAILS(EINVAL, aq_heap_free(object, &usable));
    OK(aq_heap_free(object, NULL));
    FAILS(ENOSPC, aq_heap_alloc(object, 2 << 20, 0, &memory));
    FAILS(EINVAL, aq_heap_alloc(object, 1, 3, &memory));
    aq_ready *ready;
    OK(aq_ready_new(&ready));
    OK(aq_object_psync_async(object, ready, 11));
    OK(aq_ready_wait(ready));
    aq_completion done;
    size_t taken;
    OK(aq_ready_take(ready, &done, 1, &taken));
    CHECK(taken == 1 && done.token == 11 && done.result == 0);
    aq_ready_free(ready);
    OK(aq_object_detach(object));
    aq_pool_free(pool);

    OK(aq_pool_open(path, NULL, &pool));
    OK(aq_object_attach(pool, "heap", 1, NULL, &object));
    FAILS(EINVAL, aq_heap_root(object, 8, &memory));
    OK(aq_heap_root(object, 7, &memory));
    uint64_t sum = 0;
    for (struct list *one = (struct list *)memory; one != NULL; one = one->next) sum += one->value;
    CHECK(sum == 4950);
    aq_heap_stats stats = AQ_HEAP_STATS_INIT;
    OK(aq_heap_check(object, &stats));
    CHECK(stats.allocations == 100 && stats.allocated_bytes >= 1600);

    /* Several at once, keys, and a child. */
    aq_object *pair[2] = {object, NULL};
    aq_object_options keyed = AQ_OBJECT_OPTIONS_INIT;
    keyed.write_key = "secret";
    keyed.relocatable = 1;
    OK(aq_object_create(pool, "keyed", 4096, &keyed, NULL));
    FAILS(EACCES, aq_object_attach(pool, "keyed", 1, "wrong", &pair[1]));
    OK(aq_object_attach(pool, "keyed", 1, "secret", &pair[1]));
    ((char *)aq_object_data_mut(pair[1]))[0] = 'k';
    OK(aq_objects_psync(pair, 2));
    aq_object_stats psyncs = AQ_OBJECT_STATS_INIT;
    OK(aq_object_get_stats(pair[1], &psyncs));
    CHECK(psyncs.psyncs == 1 && psyncs.pages == 1 && psyncs.bytes > 0);
    ((char *)aq_object_data_mut(pair[1]))[0] = 'K';
    uint64_t shadow = 0;
    OK(aq_object_shadow_bytes(pair[1], &shadow));
    CHECK(shadow == 4096);
    OK(aq_ready_new(&ready));
    OK(aq_objects_psync_async(pair, 2, ready, 12));
    FAILS(EINVAL, aq_objects_psync_async(pair, 0, ready, 13));
    OK(aq_ready_wait(ready));
    OK(aq_ready_take(ready, &done, 1, &taken));
    CHECK(taken == 1 && done.token == 12 && done.result == 0);
    aq_ready_free(ready);
    OK(aq_object_get_stats(pair[1], &psyncs));
    CHECK(psyncs.psyncs == 2);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        FAILS(ECHILD, aq_object_psync(object));
        FAILS(ECHILD, aq_heap_alloc(object, 1, 0, &memory));
        FAILS(ECHILD, aq_object_detach(object));
        aq_pool_free(pool);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    FAILS(EBUSY, aq_object_destroy(pool, "keyed", "secret"));
    OK(aq_object_detach(pair[0]));
    OK(aq_object_detach(pair[1]));
    uint64_t address = 0;
    OK(aq_object_resize(pool, "keyed", 8192, "secret", &address));
    CHECK(address != 0);
    OK(aq_object_rename(pool, "keyed", "named", "secret"));
    OK(aq_object_get_info(pool, "named", &info));
    CHECK(info.size_bytes == 8192 && info.flags == (AQ_OBJECT_RELOCATABLE | AQ_OBJECT_NEEDS_WRITE_KEY));
    aq_attach_options attach_options = AQ_ATTACH_OPTIONS_INIT;
    attach_options.writable = 1;
    attach_options.shadow_budget_bytes = 1 << 20;
    FAILS(EACCES, aq_object_attach_with(pool, "named", &attach_options, &object));
    CHECK(object == NULL);
    attach_options.key = "secret";
    OK(aq_object_attach_with(pool, "named", &attach_options, &object));
    CHECK(*(char *)aq_object_data_mut(object) == 'K');
    OK(aq_object_detach(object));
    OK(aq_object_attach_with(pool, "named", NULL, &object));
    CHECK(aq_object_data_mut(object) == NULL);
    OK(aq_object_detach(object));
    const uint64_t before = info.address;
    address = 0;
    OK(aq_object_relocate(pool, "named", "secret", &address));
    CHECK(address != 0 && address != before);
    address = before;
    OK(aq_object_relocate(pool, "named", "secret", &address));
    CHECK(address == before);
    address = 4095;
    FAILS(EINVAL, aq_object_relocate(pool, "named", "secret", &address));
    FAILS(EINVAL, aq_object_relocate(pool, "heap", NULL, &address));
    FAILS(EACCES, aq_object_destroy(pool, "named", NULL));
    OK(aq_object_destroy(pool, "named", "secret"));

    /* The paper's names. */
    CHECK(pcreate(pool, "pmo", 4096) == 0);
    char *bytes = (char *)attach(pool, "pmo", 1, NULL);
    CHECK(bytes != NULL);
    strcpy(bytes + 100, "persistent");
    CHECK(psync(bytes + 4095) == 0);
    strcpy(bytes + 100, "lost");
    CHECK(detach(bytes) == 0);
    FAILS(ENOENT, detach(bytes));
    FAILS(ENOENT, psync(bytes));
    CHECK(attach(pool, "pmo", 0, NULL) == (void *)bytes && strcmp(bytes + 100, "persistent") == 0);
    CHECK(detach(bytes) == 0 && pdestroy(pool, "pmo") == 0);
    CHECK(attach(pool, "pmo", 0, NULL) == NULL && strstr(aq_last_error(), "pmo") != NULL);
    aq_pool_free(pool);
    return 0;
}
