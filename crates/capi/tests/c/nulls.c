/* One null at a time, where all else is right: the argument that is null is the one that the text names. */
#include "test.h"

#define NULL_IS(name, call) \
    do { \
        FAILS(EINVAL, call); \
        CHECK(strstr(aq_last_error(), name) != NULL && strstr(aq_last_error(), "null") != NULL); \
    } while (0)

static int look(void *context, size_t index, uint64_t offset, const void *data, size_t size) {
    (void)context, (void)index, (void)offset, (void)data, (void)size;
    return 0;
}

static int next_range(void *context, aq_range *range) {
    (void)context, (void)range;
    return 0;
}

static int next_page(void *context, uint64_t *page) {
    (void)context, (void)page;
    return 0;
}

static void caches(const char *path) {
    aq_cache *cache;
    aq_device *device;
    aq_mapping *mapping;
    aq_pages *pages;
    aq_ready *ready;
    OK(aq_cache_new(NULL, &cache));
    OK(aq_ready_new(&ready));
    char byte = 0;
    const aq_range range = {0, 4096};
    const uint64_t first[1] = {0};
    const aq_read read = {0, 1, &byte}, nowhere = {0, 1, NULL};
    size_t count;
    aq_completion done;
    char *text;
    NULL_IS("`stats`", aq_cache_get_stats(cache, NULL));
    OK(aq_cache_metrics(cache, NULL, &text)); /* allowed */
    aq_string_free(text);
    NULL_IS("`text`", aq_cache_metrics(cache, "name", NULL));
    NULL_IS("`file`", aq_device_open(NULL, 0, &device));
    OK(aq_device_memory(1 << 20, &device));
    NULL_IS("`device`", aq_device_open(path, 0, NULL));
    NULL_IS("`len", aq_device_len(device, NULL));
    aq_device_functions functions = AQ_DEVICE_FUNCTIONS_INIT;
    aq_device *other;
    NULL_IS("`read`", aq_device_custom(&functions, &other));
    NULL_IS("`device`", aq_device_custom(&functions, NULL));
    NULL_IS("`file`", aq_device_open_dax(NULL, 0, &other));
    NULL_IS("`device`", aq_device_open_dax(path, 0, NULL));
    NULL_IS("`cache`", aq_map(NULL, device, NULL, &mapping));
    NULL_IS("`device`", aq_map(cache, NULL, NULL, &mapping));
    NULL_IS("`mapping`", aq_map(cache, device, NULL, NULL));
    NULL_IS("`cache`", aq_map_path(NULL, path, NULL, &mapping));
    NULL_IS("`file`", aq_map_path(cache, NULL, NULL, &mapping));
    NULL_IS("`mapping`", aq_map_path(cache, path, NULL, NULL));

    aq_map_options options = AQ_MAP_OPTIONS_INIT;
    options.writable = 1;
    OK(aq_map(cache, device, &options, &mapping));
    NULL_IS("`buffer`", aq_mapping_read(mapping, NULL, 1, 0));
    NULL_IS("`buffer`", aq_mapping_write(mapping, NULL, 1, 0));
    OK(aq_mapping_read(mapping, NULL, 0, 0));
    NULL_IS("`reads`", aq_mapping_read_many(mapping, NULL, 1));
    NULL_IS("target", aq_mapping_read_many(mapping, &nowhere, 1));
    NULL_IS("`reads`", aq_mapping_read_many_async(mapping, NULL, 1, ready, 0));
    NULL_IS("target", aq_mapping_read_many_async(mapping, &nowhere, 1, ready, 0));
    NULL_IS("`ready`", aq_mapping_read_many_async(mapping, &read, 1, NULL, 0));
    NULL_IS("`ranges`", aq_mapping_visit(mapping, NULL, 1, look, NULL));
    NULL_IS("`visit`", aq_mapping_visit(mapping, &range, 1, NULL, NULL));
    NULL_IS("`look`", aq_mapping_look(mapping, range, NULL, NULL));
    NULL_IS("`next`", aq_mapping_visit_in_order(mapping, NULL, look, NULL));
    NULL_IS("`visit`", aq_mapping_visit_in_order(mapping, next_range, NULL, NULL));
    NULL_IS("`ranges`", aq_mapping_touch(mapping, NULL, 1));
    NULL_IS("`ranges`", aq_mapping_touch_async(mapping, NULL, 1, ready, 0));
    NULL_IS("`ready`", aq_mapping_touch_async(mapping, &range, 1, NULL, 0));
    NULL_IS("`ranges`", aq_mapping_prefetch(mapping, NULL, 1));
    NULL_IS("`resident`", aq_mapping_is_resident(mapping, range, NULL));
    NULL_IS("`ready`", aq_mapping_flush_async(mapping, range, NULL, 0));
    NULL_IS("`pin`", aq_mapping_pin(mapping, range, 0, NULL));
    aq_mapping_free(mapping);

    NULL_IS("`cache`", aq_pages_new(NULL, device, &pages));
    NULL_IS("`device`", aq_pages_new(cache, NULL, &pages));
    NULL_IS("`pages`", aq_pages_new(cache, device, NULL));
    OK(aq_pages_new(cache, device, &pages));
    aq_page guard;
    int resident;
    NULL_IS("`guard`", aq_pages_get(pages, 0, NULL));
    NULL_IS("`pages`", aq_pages_get(NULL, 0, &guard));
    NULL_IS("`guard`", aq_pages_get_mut(pages, 0, NULL));
    NULL_IS("`list`", aq_pages_get_many(pages, NULL, 1, &guard));
    NULL_IS("`guards`", aq_pages_get_many(pages, first, 1, NULL));
    NULL_IS("`buffer`", aq_pages_read(pages, NULL, 1, 0));
    NULL_IS("`list`", aq_pages_load(pages, NULL, 1));
    NULL_IS("`list`", aq_pages_load_async(pages, NULL, 1, ready, 0));
    NULL_IS("`ready`", aq_pages_load_async(pages, first, 1, NULL, 0));
    NULL_IS("`list`", aq_pages_visit(pages, NULL, 1, NULL, NULL));
    NULL_IS("`visit`", aq_pages_visit(pages, first, 1, NULL, NULL));
    NULL_IS("`next`", aq_pages_visit_in_order(pages, NULL, NULL, NULL));
    NULL_IS("`visit`", aq_pages_visit_in_order(pages, next_page, NULL, NULL));
    NULL_IS("`resident`", aq_pages_is_resident(pages, 0, NULL));
    NULL_IS("`pages`", aq_pages_is_resident(NULL, 0, &resident));
    OK(aq_pages_free(pages));

    aq_rows_options row_options = AQ_ROWS_OPTIONS_INIT;
    row_options.row_bytes = 64;
    row_options.budget_bytes = 4 << 20;
    aq_rows *rows;
    char row[64];
    NULL_IS("`file`", aq_rows_open(NULL, &row_options, &rows));
    NULL_IS("`rows`", aq_rows_open(path, &row_options, NULL));
    NULL_IS("`rows`", aq_rows_open_device(device, &row_options, NULL));
    NULL_IS("`device`", aq_rows_open_device(NULL, &row_options, &rows));
    OK(aq_rows_open(path, &row_options, &rows));
    NULL_IS("`list`", aq_rows_gather(rows, NULL, 1, row));
    NULL_IS("`target`", aq_rows_gather(rows, first, 1, NULL));
    NULL_IS("`list`", aq_rows_gather_async(rows, NULL, 1, row, ready, 0));
    NULL_IS("`target`", aq_rows_gather_async(rows, first, 1, NULL, ready, 0));
    NULL_IS("`ready`", aq_rows_gather_async(rows, first, 1, row, NULL, 0));
    NULL_IS("`stats`", aq_rows_get_stats(rows, NULL));
    aq_rows_free(rows);

    NULL_IS("`completions`", aq_ready_take(ready, NULL, 1, &count));
    NULL_IS("`count`", aq_ready_take(ready, &done, 1, NULL));
    CHECK(aq_ready_len(ready) == 0); /* no call that failed was started */
    aq_ready_free(ready);
    aq_device_free(device);
    aq_cache_free(cache);
}

static void mappers(const char *path) {
    aq_mapper *mapper;
    aq_view *view;
    aq_ready *ready;
    const aq_range range = {0, 1};
    OK(aq_ready_new(&ready));
    OK(aq_mapper_new(NULL, &mapper));
    OK(aq_mapper_forget(mapper, NULL)); /* allowed */
    NULL_IS("`stats`", aq_mapper_get_stats(mapper, NULL));
    NULL_IS("`file`", aq_mapper_map(mapper, NULL, AQ_ACCESS_READ, 0, UINT64_MAX, &view));
    NULL_IS("`view`", aq_mapper_map(mapper, path, AQ_ACCESS_READ, 0, UINT64_MAX, NULL));
    NULL_IS("`view`", aq_mapper_map_fd(mapper, 0, AQ_ACCESS_READ, 0, UINT64_MAX, NULL));
    NULL_IS("`text`", aq_mapper_metrics(mapper, "name", NULL));
    NULL_IS("`look`", aq_mapper_read_once(mapper, path, NULL, NULL));
    OK(aq_mapper_map(mapper, path, AQ_ACCESS_WRITE, 0, UINT64_MAX, &view));
    NULL_IS("`", aq_view_file_len(view, NULL));
    NULL_IS("`buffer`", aq_view_read(view, NULL, 1, 0));
    NULL_IS("`look`", aq_view_look(view, range, NULL, NULL));
    NULL_IS("`buffer`", aq_view_write(view, NULL, 1, 0));
    OK(aq_view_flush(view, range, NULL)); /* allowed */
    NULL_IS("`dirty_bytes`", aq_view_dirty(view, NULL));
    NULL_IS("`ranges`", aq_view_touch(view, NULL, 1));
    NULL_IS("`ranges`", aq_view_touch_async(view, NULL, 1, ready, 0));
    NULL_IS("`ready`", aq_view_touch_async(view, &range, 1, NULL, 0));
    aq_view_free(view);
    aq_mapper_free(mapper);
    aq_ready_free(ready);
}

static void pools(const char *directory) {
    char path[4096];
    snprintf(path, sizeof path, "%s/nulls.pool", directory);
    aq_pool *pool;
    NULL_IS("`file`", aq_pool_create(NULL, 64 << 20, NULL, &pool));
    NULL_IS("`pool`", aq_pool_create(path, 64 << 20, NULL, NULL));
    OK(aq_pool_create(path, 64 << 20, NULL, &pool));
    NULL_IS("`info`", aq_pool_get_info(pool, NULL));
    NULL_IS("`space`", aq_pool_get_space(pool, NULL));
    NULL_IS("`text`", aq_pool_metrics(pool, "name", NULL));
    aq_pool *second;
    NULL_IS("`file`", aq_pool_open_granted(NULL, "key", 3, NULL, &second));
    NULL_IS("`key`", aq_pool_open_granted(path, NULL, 3, NULL, &second));
    NULL_IS("`pool`", aq_pool_open_granted(path, "key", 3, NULL, NULL));
    NULL_IS("`name`", aq_object_create(pool, NULL, 4096, NULL, NULL));
    aq_object_options options = AQ_OBJECT_OPTIONS_INIT;
    options.heap = 1;
    OK(aq_object_create(pool, "object", 1 << 20, &options, NULL));
    NULL_IS("`name`", aq_object_destroy(pool, NULL, NULL));
    NULL_IS("`name`", aq_object_rename(pool, NULL, "other", NULL));
    NULL_IS("`new_name`", aq_object_rename(pool, "object", NULL, NULL));
    NULL_IS("`name`", aq_object_resize(pool, NULL, 2 << 20, NULL, NULL));
    NULL_IS("`info`", aq_object_get_info(pool, "object", NULL));
    uint64_t place = 0;
    NULL_IS("`name`", aq_object_relocate(pool, NULL, NULL, &place));
    NULL_IS("`address`", aq_object_relocate(pool, "object", NULL, NULL));
    NULL_IS("`visit`", aq_object_list(pool, NULL, NULL));
    aq_object *object;
    void *memory;
    size_t size;
    NULL_IS("`name`", aq_object_attach(pool, NULL, 1, NULL, &object));
    NULL_IS("`object`", aq_object_attach(pool, "object", 1, NULL, NULL));
    NULL_IS("`name`", aq_attach_at(pool, NULL, 1, NULL, &memory));
    NULL_IS("`address`", aq_attach_at(pool, "object", 1, NULL, NULL));
    OK(aq_object_attach(pool, "object", 1, NULL, &object));
    aq_object *pair[2] = {object, NULL}, *none;
    aq_ready *ready;
    OK(aq_ready_new(&ready));
    NULL_IS("`objects`", aq_objects_psync(pair, 2));
    NULL_IS("`objects`", aq_objects_psync_async(pair, 2, ready, 0));
    NULL_IS("`ready`", aq_objects_psync_async(pair, 1, NULL, 0));
    CHECK(aq_ready_len(ready) == 0);
    aq_ready_free(ready);
    NULL_IS("`name`", aq_object_attach_with(pool, NULL, NULL, &none));
    NULL_IS("`object`", aq_object_attach_with(pool, "object", NULL, NULL));
    NULL_IS("`stats`", aq_object_get_stats(object, NULL));
    NULL_IS("`shadow_bytes`", aq_object_shadow_bytes(object, NULL));
    NULL_IS("`ready`", aq_object_psync_async(object, NULL, 0));
    NULL_IS("`ranges`", aq_object_psync_ranges(object, NULL, 1));
    NULL_IS("`memory`", aq_heap_alloc(object, 1, 0, NULL));
    NULL_IS("`memory`", aq_heap_alloc_zeroed(object, 1, 0, NULL));
    NULL_IS("`memory`", aq_heap_realloc(object, 1, 0, NULL));
    NULL_IS("`memory`", aq_heap_usable_size(object, NULL, &size));
    OK(aq_heap_alloc(object, 1, 0, &memory));
    NULL_IS("`size`", aq_heap_usable_size(object, memory, NULL));
    NULL_IS("`root`", aq_heap_root(object, 1, NULL));
    OK(aq_heap_check(object, NULL)); /* allowed */
    OK(aq_object_detach(object));

    aq_file *file;
    aq_file_view *view;
    aq_dir *dir;
    const aq_range range = {0, 1};
    const int flags = AQ_OPEN_READ | AQ_OPEN_WRITE | AQ_OPEN_CREATE;
    char byte = 1;
    const char *name;
    char *target;
    uint64_t number;
    NULL_IS("`name`", aq_file_open(pool, NULL, flags, 0600, &file));
    NULL_IS("`file`", aq_file_open(pool, "/file", flags, 0600, NULL));
    OK(aq_file_open(pool, "/file", flags, 0600, &file));
    OK(aq_file_write(file, &byte, 1, 0));
    NULL_IS("`buffer`", aq_file_read(file, NULL, 1, 0, &size));
    NULL_IS("`done`", aq_file_read(file, &byte, 1, 0, NULL));
    NULL_IS("`buffer`", aq_file_write(file, NULL, 1, 0));
    NULL_IS("`buffer`", aq_file_append(file, NULL, 1, &number));
    NULL_IS("`buffer`", aq_file_write_atomic(file, NULL, 1, 0));
    int held;
    const aq_write nothing = {0, 1, NULL};
    struct iovec nowhere = {NULL, 1};
    NULL_IS("`buffers`", aq_file_readv(file, NULL, 1, 0, &size));
    NULL_IS("`buffers`", aq_file_readv(file, &nowhere, 1, 0, &size));
    NULL_IS("`done`", aq_file_readv(file, NULL, 0, 0, NULL));
    NULL_IS("`buffers`", aq_file_writev(file, NULL, 1, 0, NULL));
    NULL_IS("`buffers`", aq_file_writev(file, &nowhere, 1, 0, NULL));
    NULL_IS("`writes`", aq_file_write_atomic_many(file, NULL, 1));
    NULL_IS("`source`", aq_file_write_atomic_many(file, &nothing, 1));
    NULL_IS("`file`", aq_file_open_unnamed(pool, flags, 0600, NULL));
    NULL_IS("`name`", aq_file_link(file, NULL, 0));
    NULL_IS("`file`", aq_file_receive(pool, 0, 0, NULL));
    NULL_IS("`held`", aq_file_lock_conflict(file, 0, NULL));
    NULL_IS("`held`", aq_file_range_lock_conflict(file, range, 0, NULL, NULL));
    OK(aq_file_range_lock_conflict(file, range, 0, &held, NULL)); /* allowed */
    NULL_IS("`attribute`", aq_file_set_attribute(file, NULL, "x", 1));
    NULL_IS("`value`", aq_file_set_attribute(file, "user.b", NULL, 1));
    NULL_IS("`attribute`", aq_file_get_attribute(file, NULL, &byte, 1, &size));
    NULL_IS("`value_size`", aq_file_get_attribute(file, "user.b", &byte, 1, NULL));
    NULL_IS("`attribute`", aq_file_remove_attribute(file, NULL));
    NULL_IS("`buffer`", aq_file_list_attributes(file, NULL, 1, &size));
    NULL_IS("`names_size`", aq_file_list_attributes(file, NULL, 0, NULL));
    NULL_IS("`view`", aq_file_append_view(file, 1, NULL));
    NULL_IS("`view`", aq_file_lease(file, range, NULL));
    OK(aq_file_defragment(file, NULL)); /* allowed */
    NULL_IS("`other`", aq_file_exchange_range(file, 0, NULL, 0, 1));
    NULL_IS("`to`", aq_file_copy_range(file, range, NULL, 0, &number));
    NULL_IS("`range`", aq_file_next(file, 0, 0, NULL));
    NULL_IS("`status`", aq_file_stat(file, NULL));
    NULL_IS("`view`", aq_file_view_new(file, range, 0, NULL));
    OK(aq_file_view_new(file, range, 1, &view));
    NULL_IS("`buffer`", aq_file_view_read(view, NULL, 1, 0));
    NULL_IS("`buffer`", aq_file_view_write(view, NULL, 1, 0));
    NULL_IS("`look`", aq_file_view_look(view, range, NULL, NULL));
    aq_file_view_free(view);
    aq_file_free(file);
    aq_file_status status = AQ_FILE_STATUS_INIT;
    NULL_IS("`name`", aq_path_view(pool, NULL, range, &view));
    NULL_IS("`view`", aq_path_view(pool, "/file", range, NULL));
    NULL_IS("`name`", aq_path_lease(pool, NULL, range, &view));
    NULL_IS("`view`", aq_path_lease(pool, "/file", range, NULL));
    NULL_IS("`name`", aq_path_realpath(pool, NULL, &target));
    NULL_IS("`absolute`", aq_path_realpath(pool, "/file", NULL));
    NULL_IS("`name`", aq_path_copy(pool, NULL, "/other", NULL));
    NULL_IS("`new_name`", aq_path_copy(pool, "/file", NULL, NULL));
    NULL_IS("`name`", aq_path_mknod(pool, NULL, 0, 0));
    NULL_IS("`name`", aq_path_set_times(pool, NULL, 1, 0, 0));
    NULL_IS("`name`", aq_path_list_attributes(pool, NULL, NULL, 0, &size));
    NULL_IS("`names_size`", aq_path_list_attributes(pool, "/file", NULL, 0, NULL));
    NULL_IS("`name`", aq_path_stat(pool, NULL, 1, &status));
    NULL_IS("`status`", aq_path_stat(pool, "/file", 1, NULL));
    NULL_IS("`name`", aq_path_mkdir(pool, NULL, 0700, 0));
    NULL_IS("`name`", aq_path_rmdir(pool, NULL));
    NULL_IS("`name`", aq_path_unlink(pool, NULL));
    NULL_IS("`name`", aq_path_remove_all(pool, NULL));
    NULL_IS("`name`", aq_path_rename(pool, NULL, "/other", 0));
    NULL_IS("`new_name`", aq_path_rename(pool, "/file", NULL, 0));
    NULL_IS("`name`", aq_path_link(pool, NULL, "/other"));
    NULL_IS("`new_name`", aq_path_link(pool, "/file", NULL));
    NULL_IS("`target`", aq_path_symlink(pool, NULL, "/link"));
    NULL_IS("`name`", aq_path_symlink(pool, "file", NULL));
    OK(aq_path_symlink(pool, "file", "/link"));
    NULL_IS("`name`", aq_path_readlink(pool, NULL, &target));
    NULL_IS("`target`", aq_path_readlink(pool, "/link", NULL));
    NULL_IS("`name`", aq_path_chmod(pool, NULL, 0600));
    NULL_IS("`name`", aq_path_chown(pool, NULL, 0, 0, 1));
    NULL_IS("`name`", aq_path_set_immutable(pool, NULL, 0));
    OK(aq_path_set_attribute(pool, "/file", "user.a", "x", 1));
    NULL_IS("`name`", aq_path_set_attribute(pool, NULL, "user.a", "x", 1));
    NULL_IS("`attribute`", aq_path_set_attribute(pool, "/file", NULL, "x", 1));
    NULL_IS("`value`", aq_path_set_attribute(pool, "/file", "user.a", NULL, 1));
    NULL_IS("`name`", aq_path_get_attribute(pool, NULL, "user.a", &byte, 1, &size));
    NULL_IS("`attribute`", aq_path_get_attribute(pool, "/file", NULL, &byte, 1, &size));
    NULL_IS("`buffer`", aq_path_get_attribute(pool, "/file", "user.a", NULL, 1, &size));
    NULL_IS("`value_size`", aq_path_get_attribute(pool, "/file", "user.a", &byte, 1, NULL));
    NULL_IS("`name`", aq_path_remove_attribute(pool, NULL, "user.a"));
    NULL_IS("`attribute`", aq_path_remove_attribute(pool, "/file", NULL));
    NULL_IS("`name`", aq_dir_open(pool, NULL, &dir));
    NULL_IS("`dir`", aq_dir_open(pool, "/", NULL));
    OK(aq_dir_open(pool, "/", &dir));
    NULL_IS("`name`", aq_dir_next(dir, NULL, &number));
    OK(aq_dir_next(dir, &name, NULL)); /* allowed */
    aq_dir_free(dir);
    aq_pool_free(pool);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    const char *path = make_file(arguments[1], "data", 1 << 20);
    caches(path);
    mappers(path);
    pools(arguments[1]);
    return 0;
}
