/* Mapped files. */
#include "test.h"

#include <fcntl.h>
#include <unistd.h>

#define SIZE ((size_t)1 << 20)

static void add_up(void *context, const void *data, size_t size) {
    uint64_t *sum = (uint64_t *)context;
    for (size_t i = 0; i < size; i++) *sum += ((const unsigned char *)data)[i];
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    aq_mapper_options options = AQ_MAPPER_OPTIONS_INIT;
    options.resident_budget_bytes = 64 << 20;
    aq_mapper *mapper;
    OK(aq_mapper_new(&options, &mapper));
    const char *path = make_file(arguments[1], "file", SIZE);
    aq_view *view;
    FAILS(ENOENT, aq_mapper_map(mapper, "/no/such/file", AQ_ACCESS_READ, 0, UINT64_MAX, &view));
    CHECK(view == NULL);
    FAILS(EINVAL, aq_mapper_map(mapper, path, 9, 0, UINT64_MAX, &view));
    OK(aq_mapper_map(mapper, path, AQ_ACCESS_READ, 4096, 8192, &view));
    CHECK(aq_view_len(view) == 8192 && *(const unsigned char *)aq_view_data(view) == 7);
    CHECK(aq_view_data_mut(view) == NULL && *aq_last_error() != 0);
    FAILS(EROFS, aq_view_write(view, "x", 1, 0));
    unsigned char pair[2];
    OK(aq_view_read(view, pair, 2, 4095));
    CHECK(pair[0] == 7 && pair[1] == 14);
    FAILS(EINVAL, aq_view_read(view, pair, 2, 8191));
    const aq_range range = {4096, 10};
    uint64_t sum = 0;
    OK(aq_view_look(view, range, add_up, &sum));
    CHECK(sum == 140);
    OK(aq_view_touch(view, &range, 1));
    OK(aq_view_advise(view, range, AQ_ADVICE_RANDOM));
    FAILS(EINVAL, aq_view_advise(view, range, AQ_ADVICE_COLD));
    aq_ready *ready;
    OK(aq_ready_new(&ready));
    OK(aq_view_touch_async(view, &range, 1, ready, 3));
    aq_completion done;
    size_t taken;
    OK(aq_ready_wait(ready));
    OK(aq_ready_take(ready, &done, 1, &taken));
    CHECK(taken == 1 && done.token == 3 && done.result == 0);
    aq_ready_free(ready);

    /* A file that is cut off: an error, not a signal. */
    CHECK(truncate(path, 4096) == 0);
    FAILS(ENODATA, aq_view_read(view, pair, 2, 100));
    aq_error error = AQ_ERROR_INIT;
    OK(aq_last_error_info(&error));
    CHECK(error.kind == AQ_KIND_TRUNCATED && strcmp(error.path, path) == 0 && error.offset == 4196);
    uint64_t length;
    OK(aq_view_file_len(view, &length));
    CHECK(length == 4096);
    aq_view_free(view);

    /* Stores are private until they are flushed, which writes their pages alone. */
    path = make_file(arguments[1], "stores", SIZE);
    FAILS(EINVAL, aq_mapper_map(mapper, path, AQ_STORES_PRIVATE, 0, UINT64_MAX, &view));
    OK(aq_mapper_map(mapper, path, AQ_ACCESS_WRITE | AQ_STORES_PRIVATE, 0, UINT64_MAX, &view));
    OK(aq_view_write(view, "\1", 1, 5000));
    ((unsigned char *)aq_view_data_mut(view))[SIZE - 1] = 2;
    uint64_t bytes;
    OK(aq_view_dirty(view, &bytes));
    CHECK(bytes == 8192);
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 5000, SEEK_SET) == 0 && fgetc(file) == 7);
    const aq_range whole = {0, UINT64_MAX};
    OK(aq_view_flush(view, whole, &bytes));
    CHECK(bytes == 8192);
    OK(aq_view_flush(view, whole, NULL));
    CHECK(fseek(file, 5000, SEEK_SET) == 0 && fflush(file) == 0 && fclose(file) == 0);
    file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 5000, SEEK_SET) == 0 && fgetc(file) == 1 && fclose(file) == 0);
    OK(aq_view_write(view, "\3", 1, 5000));
    OK(aq_view_write_out(view, &bytes));
    CHECK(bytes > 0);
    file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 5000, SEEK_SET) == 0 && fgetc(file) == 3 && fclose(file) == 0);
    OK(aq_view_write_out(view, NULL));
    OK(aq_view_grow(view, SIZE + 4096));
    CHECK(aq_view_len(view) == SIZE + 4096);
    aq_view_free(view);

    /* By default others see them at once. */
    OK(aq_mapper_map(mapper, path, AQ_ACCESS_WRITE, 0, UINT64_MAX, &view));
    OK(aq_view_write(view, "\4", 1, 6000));
    file = fopen(path, "rb");
    CHECK(file != NULL && fseek(file, 6000, SEEK_SET) == 0 && fgetc(file) == 4 && fclose(file) == 0);
    OK(aq_view_flush(view, whole, NULL));
    OK(aq_view_write_out(view, &bytes));
    CHECK(bytes == 0);
    aq_view_free(view);

    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    OK(aq_mapper_map_fd(mapper, descriptor, AQ_ACCESS_READ, 4096, UINT64_MAX, &view));
    CHECK(close(descriptor) == 0 && aq_view_len(view) == SIZE);
    OK(aq_view_read(view, pair, 1, 5000 - 4096));
    CHECK(pair[0] == 3);
    aq_view_free(view);
    FAILS(EBADF, aq_mapper_map_fd(mapper, -1, AQ_ACCESS_READ, 0, 1, &view));
    FAILS(EBADF, aq_mapper_map_fd(mapper, descriptor, AQ_ACCESS_READ, 0, 1, &view));
    OK(aq_last_error_info(&error));
    CHECK(error.kind == AQ_KIND_INVALID_INPUT && strstr(error.text, "`file`"));
    CHECK(view == NULL);

    sum = 0;
    path = make_file(arguments[1], "once", 8192);
    OK(aq_mapper_read_once(mapper, path, add_up, &sum));
    CHECK(sum == 7 * 4096);
    aq_mapper_stats stats = AQ_MAPPER_STATS_INIT;
    OK(aq_mapper_get_stats(mapper, &stats));
    CHECK(stats.misses > 0);
    char *text;
    OK(aq_mapper_metrics(mapper, "test", &text));
    CHECK(strstr(text, "aquifer_mapper_hits_total{mapper=\"test\"}") != NULL);
    aq_string_free(text);
    OK(aq_mapper_forget(mapper, path));
    OK(aq_mapper_forget(mapper, NULL));
    FAILS(ENOENT, aq_mapper_forget(mapper, "/no/such/file"));
    aq_mapper_free(mapper);
    return 0;
}
