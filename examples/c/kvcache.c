/* A key-value store whose page cache is Aquifer's: pages of a file, guarded while they are used.

       kvcache FILE [KEYS]

   A key lives in the page of its hash, or in one of the next pages if that is full. Lookups of many keys
   load their pages together, at the disk's queue depth. The cache holds 8 MiB, whatever the file has. */
#include <aquifer.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 4096
#define SLOTS ((PAGE - sizeof(uint64_t)) / sizeof(struct pair))
#define FILLED (SLOTS / 40) /* keys in a page: few, so that a small store is larger than memory */

struct pair {
    uint64_t key, value;
};

struct page {
    uint64_t count;
    struct pair pairs[(PAGE - sizeof(uint64_t)) / sizeof(struct pair)];
};

struct store {
    aq_cache *cache;
    aq_pages *pages;
};

static int open_store(struct store *store, const char *path, uint64_t pages) {
    int file = open(path, O_RDWR | O_CREAT, 0644);
    if (file < 0 || ftruncate(file, (off_t)(pages * PAGE)) != 0 || close(file) != 0) {
        perror(path);
        return -1;
    }
    aq_cache_options options = AQ_CACHE_OPTIONS_INIT;
    options.budget_bytes = 8 << 20;
    options.page_bytes = PAGE;
    options.policy = "s3-fifo";
    aq_device *device = NULL;
    int failed = aq_cache_new(&options, &store->cache);
    if (!failed) failed = aq_device_open(path, AQ_DEVICE_WRITE, &device);
    if (!failed) failed = aq_pages_new(store->cache, device, &store->pages);
    aq_device_free(device); /* the pages keep it */
    return failed;
}

static void close_store(struct store *store) {
    aq_pages_free(store->pages);
    aq_cache_free(store->cache);
}

static uint64_t page_of(struct store *store, uint64_t key) {
    uint64_t hash = key * 0x9E3779B97F4A7C15u;
    return (hash ^ hash >> 32) % aq_pages_count(store->pages);
}

static const struct pair *find(const struct page *page, uint64_t key) {
    for (uint64_t i = 0; i < page->count; i++)
        if (page->pairs[i].key == key) return &page->pairs[i];
    return NULL;
}

/* Puts a value; 0, or a negative error. */
static int put(struct store *store, uint64_t key, uint64_t value) {
    for (uint64_t number = page_of(store, key);; number = (number + 1) % aq_pages_count(store->pages)) {
        aq_page_mut guard;
        int failed = aq_pages_get_mut(store->pages, number, &guard);
        if (failed) return failed;
        struct page *page = (struct page *)guard.data;
        struct pair *pair = (struct pair *)(uintptr_t)find(page, key);
        if (pair == NULL && page->count < SLOTS) pair = &page->pairs[page->count++];
        if (pair != NULL) {
            pair->key = key;
            pair->value = value;
        }
        aq_page_mut_release(&guard);
        if (pair != NULL) return 0;
    }
}

/* The value of a key: 1 if there is one, 0 if not, or a negative error. */
static int get(struct store *store, uint64_t key, uint64_t *value) {
    for (uint64_t number = page_of(store, key);; number = (number + 1) % aq_pages_count(store->pages)) {
        aq_page guard;
        int failed = aq_pages_get(store->pages, number, &guard);
        if (failed) return failed;
        const struct page *page = (const struct page *)guard.data;
        const struct pair *pair = find(page, key);
        int is_full = page->count == SLOTS;
        if (pair != NULL) *value = pair->value;
        aq_page_release(&guard);
        if (pair != NULL) return 1;
        if (!is_full) return 0;
    }
}

/* The values of many keys; the pages are loaded together first. */
static int get_many(struct store *store, const uint64_t *keys, size_t count, uint64_t *values) {
    uint64_t *numbers = (uint64_t *)malloc(count * sizeof *numbers);
    if (numbers == NULL) return -ENOMEM; /* as the library, though without a text */
    for (size_t i = 0; i < count; i++) numbers[i] = page_of(store, keys[i]);
    int failed = aq_pages_load(store->pages, numbers, count);
    for (size_t i = 0; i < count && !failed; i++) {
        int found = get(store, keys[i], &values[i]);
        if (found < 0) failed = found;
        if (found == 0) values[i] = 0;
    }
    free(numbers);
    return failed;
}

int main(int count, char **arguments) {
    if (count < 2) {
        fprintf(stderr, "usage: kvcache FILE [KEYS]\n");
        return 2;
    }
    uint64_t keys = count > 2 ? strtoull(arguments[2], NULL, 10) : 100000;
    struct store store = {NULL, NULL};
    int failed = open_store(&store, arguments[1], keys / FILLED + 2);
    for (uint64_t key = 0; key < keys && !failed; key++) failed = put(&store, key, key + 1);
    if (!failed) failed = aq_pages_flush(store.pages, 0, UINT64_MAX); /* durable from here on */

    /* Opened again, as in another run. */
    close_store(&store);
    store.cache = NULL;
    store.pages = NULL;
    if (!failed) failed = open_store(&store, arguments[1], keys / FILLED + 2);
    uint64_t wrong = 0;
    for (uint64_t key = 0; key < keys && !failed; key += 256) {
        uint64_t wanted[256], values[256];
        for (int i = 0; i < 256; i++) wanted[i] = (key + (uint64_t)i) * 7919 % keys;
        failed = get_many(&store, wanted, 256, values);
        for (int i = 0; i < 256 && !failed; i++) wrong += values[i] != wanted[i] + 1;
    }
    uint64_t value;
    if (!failed && get(&store, keys + 1, &value) != 0) wrong++;
    if (!failed) {
        aq_cache_stats stats = AQ_CACHE_STATS_INIT;
        failed = aq_cache_get_stats(store.cache, &stats);
        printf("%" PRIu64 " keys in %" PRIu64 " pages, %" PRIu64 " of them in memory; %" PRIu64 " wrong\n", keys,
               aq_pages_count(store.pages), stats.resident_pages, wrong);
    }
    if (failed) fprintf(stderr, "kvcache: %s\n", aq_last_error());
    close_store(&store);
    return failed != 0 || wrong != 0;
}
