/* A hash table that survives kill -9: in the heap of a persistent object, with plain pointers.

       hashtable POOL fill N       puts the keys up to N, in transactions of 100; prints how many are durable
       hashtable POOL get KEY
       hashtable POOL check        whether the table is as some transaction has left it

   The object is at the same address in every run, so the table is an ordinary data structure of C. psync
   makes all stores since the last one durable, or none: there is no log here, and no recovery. */
#include <aquifer.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TABLE 1 /* what the root of the heap is */
#define BATCH 100

struct entry {
    struct entry *next;
    uint64_t key, value;
};

struct table {
    uint64_t count, buckets;
    struct entry **bucket;
};

static uint64_t hash(uint64_t key) {
    key *= 0x9E3779B97F4A7C15u;
    return key ^ key >> 32;
}

static uint64_t value_of(uint64_t key) {
    return key * key + 1;
}

static struct entry *find(struct table *table, uint64_t key) {
    struct entry *entry = table->bucket[hash(key) % table->buckets];
    while (entry != NULL && entry->key != key) entry = entry->next;
    return entry;
}

static int create(aq_object *object, struct table **table) {
    void *memory;
    int failed = aq_heap_alloc_zeroed(object, sizeof **table, 0, &memory);
    if (failed) return failed;
    *table = (struct table *)memory;
    (*table)->buckets = 64;
    failed = aq_heap_alloc_zeroed(object, 64 * sizeof(struct entry *), 0, &memory);
    if (failed) return failed;
    (*table)->bucket = (struct entry **)memory;
    return aq_heap_set_root(object, TABLE, *table);
}

static int grow(aq_object *object, struct table *table) {
    uint64_t buckets = table->buckets * 2;
    void *memory;
    int failed = aq_heap_alloc_zeroed(object, buckets * sizeof(struct entry *), 0, &memory);
    if (failed) return failed;
    struct entry **bucket = (struct entry **)memory;
    for (uint64_t i = 0; i < table->buckets; i++) {
        for (struct entry *entry = table->bucket[i], *next; entry != NULL; entry = next) {
            next = entry->next;
            entry->next = bucket[hash(entry->key) % buckets];
            bucket[hash(entry->key) % buckets] = entry;
        }
    }
    failed = aq_heap_free(object, table->bucket);
    table->bucket = bucket;
    table->buckets = buckets;
    return failed;
}

static int put(aq_object *object, struct table *table, uint64_t key, uint64_t value) {
    struct entry *entry = find(table, key);
    if (entry == NULL) {
        void *memory;
        int failed = table->count >= 2 * table->buckets ? grow(object, table) : 0;
        if (!failed) failed = aq_heap_alloc(object, sizeof *entry, 0, &memory);
        if (failed) return failed;
        entry = (struct entry *)memory;
        struct entry **first = &table->bucket[hash(key) % table->buckets];
        entry->key = key;
        entry->next = *first;
        *first = entry;
        table->count++;
    }
    entry->value = value;
    return 0;
}

static int fill(aq_object *object, struct table *table, uint64_t keys) {
    while (table->count < keys) {
        for (int i = 0; i < BATCH; i++) {
            int failed = put(object, table, table->count, value_of(table->count));
            if (failed) return failed;
        }
        int failed = aq_object_psync(object);
        if (failed) return failed;
        printf("%" PRIu64 "\n", table->count);
        fflush(stdout);
    }
    return 0;
}

/* All keys of whole transactions, each with its value, and no other. */
static int check(aq_object *object, struct table *table) {
    uint64_t entries = 0;
    int failed = aq_heap_check(object, NULL);
    if (failed) return failed;
    for (uint64_t i = 0; i < table->buckets; i++)
        for (struct entry *entry = table->bucket[i]; entry != NULL; entry = entry->next) entries++;
    for (uint64_t key = 0; key < table->count; key++) {
        struct entry *entry = find(table, key);
        if (entry == NULL || entry->value != value_of(key)) {
            printf("key %" PRIu64 " is lost\n", key);
            exit(3);
        }
    }
    if (entries != table->count || table->count % BATCH != 0) {
        printf("%" PRIu64 " entries, but %" PRIu64 " are counted\n", entries, table->count);
        exit(3);
    }
    printf("%" PRIu64 "\n", table->count);
    return 0;
}

/* Whether the last call has failed because something is not there. */
static int is_missing(void) {
    aq_error error = AQ_ERROR_INIT;
    return aq_last_error_info(&error) == 0 && error.kind == AQ_KIND_NOT_FOUND;
}

int main(int count, char **arguments) {
    if (count < 3) {
        fprintf(stderr, "usage: hashtable POOL fill N | get KEY | check\n");
        return 2;
    }
    const char *path = arguments[1], *command = arguments[2];
    uint64_t number = count > 3 ? strtoull(arguments[3], NULL, 10) : 0;
    aq_object_options options = AQ_OBJECT_OPTIONS_INIT;
    options.heap = 1;

    aq_pool *pool = NULL;
    aq_object *object = NULL;
    void *root;
    struct table *table;
    int failed = aq_pool_open(path, NULL, &pool);
    if (failed && is_missing()) failed = aq_pool_create(path, 64 << 20, NULL, &pool);
    if (!failed) {
        failed = aq_object_attach(pool, "table", 1, NULL, &object);
        if (failed && is_missing()) {
            failed = aq_object_create(pool, "table", 32 << 20, &options, NULL);
            if (!failed) failed = aq_object_attach(pool, "table", 1, NULL, &object);
        }
    }
    if (!failed) failed = aq_heap_root(object, TABLE, &root);
    if (!failed) {
        table = (struct table *)root;
        if (table == NULL) failed = create(object, &table);
    }
    if (failed) goto end;

    if (strcmp(command, "fill") == 0) {
        failed = fill(object, table, number);
    } else if (strcmp(command, "check") == 0) {
        failed = check(object, table);
    } else {
        struct entry *entry = find(table, number);
        if (entry != NULL) printf("%" PRIu64 "\n", entry->value);
    }
end:
    if (failed) fprintf(stderr, "hashtable: %s\n", aq_last_error());
    aq_object_detach(object);
    aq_pool_free(pool);
    return failed != 0;
}
