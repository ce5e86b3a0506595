/* Files of a pool: vectors, several ranges at once, files without names, leases, and what locks are in the way. */
#include "test.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static const aq_range whole = {0, UINT64_MAX};

static aq_range range_of(uint64_t offset, uint64_t length) {
    aq_range range = {offset, length};
    return range;
}

static void vectors(aq_pool *pool) {
    aq_file *file;
    OK(aq_file_open(pool, "/v", AQ_OPEN_READ | AQ_OPEN_WRITE | AQ_OPEN_CREATE, 0, &file));
    char some[] = "some ", text[] = "text", first[3], second[10] = {0};
    struct iovec out[3] = {{some, 5}, {NULL, 0}, {text, 4}}, in[2] = {{first, 3}, {second, 10}};
    size_t done = 7;
    OK(aq_file_writev(file, out, 3, 100, &done));
    CHECK(done == 9);
    OK(aq_file_readv(file, in, 2, 100, &done));
    CHECK(done == 9 && memcmp(first, "som", 3) == 0 && memcmp(second, "e text", 6) == 0);
    OK(aq_file_readv(file, in, 2, 105, &done));
    CHECK(done == 4);
    OK(aq_file_readv(file, in, 2, UINT64_MAX, &done));
    CHECK(done == 0);
    OK(aq_file_writev(file, out, 3, 0, NULL));
    struct iovec nowhere[2] = {{some, 5}, {NULL, 1}}, endless[2] = {{some, SIZE_MAX / 2}, {some, SIZE_MAX / 2}};
    FAILS(EINVAL, aq_file_readv(file, nowhere, 2, 0, &done));
    CHECK(done == 0);
    done = 7;
    FAILS(EINVAL, aq_file_writev(file, nowhere, 2, 0, &done));
    CHECK(done == 0); /* nor was the buffer before written */
    FAILS(EINVAL, aq_file_readv(file, endless, 2, 0, &done));
    FAILS(EFBIG, aq_file_writev(file, out, 3, UINT64_MAX - 2, &done));
    CHECK(done == 0);
    const aq_write writes[3] = {{0, 4, "SOME"}, {100, 4, "SOME"}, {5000, 0, NULL}};
    OK(aq_file_write_atomic_many(file, writes, 3));
    OK(aq_file_readv(file, in, 1, 0, &done));
    CHECK(memcmp(first, "SOM", 3) == 0);
    const aq_write null = {0, 4, NULL};
    FAILS(EINVAL, aq_file_write_atomic_many(file, &null, 1));
    const aq_range page = {0, 4096}, wrong = {UINT64_MAX, 2};
    OK(aq_file_begin_sync(file, page));
    FAILS(EINVAL, aq_file_begin_sync(file, wrong));
    OK(aq_file_sync_range(file, page, 1));
    OK(aq_file_sync_range(file, whole, 0));
    aq_file_free(file);
    OK(aq_file_open(pool, "/v", AQ_OPEN_WRITE | AQ_OPEN_APPEND, 0, &file));
    FAILS(EBADF, aq_file_write_atomic_many(file, writes, 1));
    aq_file_free(file);
    OK(aq_path_symlink(pool, "v", "/link"));
    FAILS(ELOOP, aq_file_open(pool, "/link", AQ_OPEN_READ | AQ_OPEN_NO_FOLLOW, 0, &file));
}

struct hand {
    aq_pool *pool;
    int socket;
};

static void *receive(void *argument) {
    struct hand *hand = (struct hand *)argument;
    aq_file *file;
    char text[4];
    size_t done;
    OK(aq_file_receive(hand->pool, hand->socket, UINT64_C(60000000000), &file));
    OK(aq_file_read(file, text, 4, 0, &done));
    CHECK(done == 4 && memcmp(text, "text", 4) == 0);
    aq_file_free(file);
    return NULL;
}

static void without_names(aq_pool *pool) {
    aq_file *file;
    aq_file_status status = AQ_FILE_STATUS_INIT;
    OK(aq_file_open_unnamed(pool, AQ_OPEN_READ | AQ_OPEN_WRITE, 0600, &file));
    OK(aq_file_write(file, "text", 4, 0));
    OK(aq_file_stat(file, &status));
    CHECK(status.links == 0 && (status.mode & 0777) == 0600);

    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    struct hand hand = {pool, sockets[1]};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, receive, &hand) == 0);
    OK(aq_file_send(file, sockets[0], UINT64_C(60000000000)));
    CHECK(pthread_join(thread, NULL) == 0);
    FAILS(EBADF, aq_file_send(file, -1, 0));
    aq_file *none;
    FAILS(ETIMEDOUT, aq_file_receive(pool, sockets[1], 1000000, &none));
    CHECK(none == NULL && close(sockets[0]) == 0 && close(sockets[1]) == 0);

    FAILS(EEXIST, aq_file_link(file, "/v", 0));
    OK(aq_file_link(file, "/named", 0));
    OK(aq_file_link(file, "/v", 1));
    OK(aq_path_stat(pool, "/v", 1, &status));
    CHECK(status.links == 2 && status.len_bytes == 4);
    uint64_t generation = status.generation;
    OK(aq_file_stat(file, &status));
    CHECK(status.generation == generation);
    aq_file_free(file);
}

static int count_bytes(const unsigned char *bytes, size_t size, int byte) {
    int found = 0;
    for (size_t i = 0; i < size; i++) found += bytes[i] == byte;
    return found;
}

static void look(void *context, const void *data, size_t size) {
    *(int *)context += count_bytes((const unsigned char *)data, size, 't');
}

static void views(aq_pool *pool) {
    aq_file *file;
    aq_file_view *view;
    int found = 0;
    OK(aq_file_open(pool, "/leased", AQ_OPEN_READ | AQ_OPEN_WRITE | AQ_OPEN_CREATE, 0, &file));
    OK(aq_file_append_view(file, 9, &view));
    OK(aq_file_view_write(view, "some text", 9, 0));
    OK(aq_file_view_look(view, range_of(0, 9), look, &found));
    CHECK(found == 2);
    FAILS(EINVAL, aq_file_view_look(view, range_of(5, 5), look, &found));
    aq_file_view_free(view);
    size_t runs = 0;
    OK(aq_file_defragment(file, &runs));
    CHECK(runs == 1);
    FAILS(EPERM, aq_path_lease(pool, "/leased", whole, &view));
    CHECK(view == NULL);
    aq_file_free(file);
    OK(aq_path_set_immutable(pool, "/leased", 1));
    OK(aq_path_lease(pool, "/leased", whole, &view));
    const char *bytes = (const char *)aq_file_view_data(view);
    CHECK(bytes != NULL && memcmp(bytes, "some text", 9) == 0 && aq_file_view_len(view) == 9);
    CHECK(aq_file_view_data_mut(view) == NULL && aq_file_view_is_current(view) == 1);
    FAILS(EROFS, aq_file_view_write(view, "x", 1, 0));
    FAILS(EBUSY, aq_path_set_immutable(pool, "/leased", 0));
    OK(aq_file_open(pool, "/leased", AQ_OPEN_READ, 0, &file));
    aq_file_view *second;
    OK(aq_file_lease(file, range_of(5, UINT64_MAX), &second));
    CHECK(aq_file_view_len(second) == 4);
    aq_file_view_free(second);
    aq_file_view_free(view);
    aq_file_free(file);
    OK(aq_path_set_immutable(pool, "/leased", 0));
}

static void locks(aq_pool *pool) {
    aq_file *one, *other;
    int held = 9;
    aq_range range;
    OK(aq_file_open(pool, "/v", AQ_OPEN_READ | AQ_OPEN_WRITE, 0, &one));
    OK(aq_file_open(pool, "/v", AQ_OPEN_READ | AQ_OPEN_WRITE, 0, &other));
    OK(aq_file_lock_conflict(other, 1, &held));
    CHECK(held == AQ_LOCK_NONE);
    OK(aq_file_lock(one, 0, 0));
    OK(aq_file_lock_conflict(other, 1, &held));
    CHECK(held == AQ_LOCK_SHARED);
    OK(aq_file_lock_conflict(other, 0, &held));
    CHECK(held == AQ_LOCK_NONE);
    OK(aq_file_lock_range(one, range_of(100, 50), 1, 0));
    OK(aq_file_range_lock_conflict(other, range_of(0, 120), 0, &held, &range));
    CHECK(held == AQ_LOCK_EXCLUSIVE && range.offset == 100 && range.length == 50);
    OK(aq_file_range_lock_conflict(other, range_of(0, 100), 0, &held, &range));
    CHECK(held == AQ_LOCK_NONE && range.length == 0);
    OK(aq_file_lock_range(one, range_of(200, UINT64_MAX), 0, 0));
    OK(aq_file_range_lock_conflict(other, range_of(300, 1), 1, &held, NULL));
    CHECK(held == AQ_LOCK_SHARED);
    OK(aq_file_range_lock_conflict(other, range_of(300, 1), 1, &held, &range));
    CHECK(range.offset == 200 && range.length == UINT64_MAX);
    aq_file_free(one);
    aq_file_free(other);
}

static void names(aq_pool *pool) {
    aq_file *file;
    char buffer[100], *absolute;
    size_t size;
    aq_file_status status = AQ_FILE_STATUS_INIT;
    OK(aq_file_open(pool, "/v", AQ_OPEN_READ | AQ_OPEN_WRITE, 0, &file));
    OK(aq_file_set_attribute(file, "user.one", "1", 1));
    OK(aq_path_set_attribute(pool, "/v", "user.two", "22", 2));
    OK(aq_file_get_attribute(file, "user.two", buffer, sizeof buffer, &size));
    CHECK(size == 2 && memcmp(buffer, "22", 2) == 0);
    OK(aq_file_list_attributes(file, NULL, 0, &size));
    CHECK(size == 18);
    FAILS(ERANGE, aq_path_list_attributes(pool, "/v", buffer, 17, &size));
    OK(aq_path_list_attributes(pool, "/v", buffer, sizeof buffer, &size));
    CHECK(size == 18 && memcmp(buffer + 5, "one", 4) == 0 && memcmp(buffer + 14, "two", 4) == 0);
    OK(aq_file_remove_attribute(file, "user.one"));
    FAILS(ENODATA, aq_file_get_attribute(file, "user.one", NULL, 0, &size));
    OK(aq_file_chown(file, UINT32_MAX, UINT32_MAX));
    aq_file_free(file);

    OK(aq_path_realpath(pool, "/./link", &absolute));
    CHECK(strcmp(absolute, "/v") == 0);
    aq_string_free(absolute);
    FAILS(ENOENT, aq_path_realpath(pool, "/nothing", &absolute));
    CHECK(absolute == NULL);
    uint64_t copied;
    OK(aq_path_copy(pool, "/v", "/copy", &copied));
    CHECK(copied == 4);
    OK(aq_path_copy(pool, "/v", "/copy", NULL));
    FAILS(EINVAL, aq_path_copy(pool, "/link", "/v", NULL)); /* the same file, which stays as it is */
    OK(aq_path_stat(pool, "/v", 1, &status));
    CHECK(status.len_bytes == 4);
    OK(aq_path_set_times(pool, "/link", 0, AQ_KEEP_TIME, 5));
    OK(aq_path_stat(pool, "/link", 0, &status));
    CHECK(status.modified_ns == 5);
    OK(aq_path_set_times(pool, "/link", 1, 6, 7));
    OK(aq_path_stat(pool, "/v", 1, &status));
    CHECK(status.accessed_ns == 6 && status.modified_ns == 7 && status.device == 0);
    OK(aq_path_mknod(pool, "/null", S_IFCHR | 0666, makedev(1, 3)));
    OK(aq_path_stat(pool, "/null", 1, &status));
    CHECK(S_ISCHR(status.mode) && status.device == makedev(1, 3));
    FAILS(EINVAL, aq_path_mknod(pool, "/file", S_IFREG | 0666, 0));

    aq_pool_space space = AQ_POOL_SPACE_INIT;
    OK(aq_pool_get_space(pool, &space));
    CHECK(space.free_bytes > 0 && space.free_bytes < space.total_bytes && space.free_slots < space.total_slots);
    char *text;
    OK(aq_pool_metrics(pool, "test", &text));
    CHECK(strstr(text, "pool=\"test\"") != NULL);
    aq_string_free(text);
}

/* Room in more pieces than one step of a write takes: all of the bytes, or the error. */
static void pieces(const char *directory) {
    enum { PIECES = 300, SIZE = 4 << 20 };
    char path[4096], name[32];
    snprintf(path, sizeof path, "%s/pieces.pool", directory);
    aq_pool *pool;
    aq_file *file, *copy;
    OK(aq_pool_create(path, 16 << 20, NULL, &pool));
    char *bytes = (char *)malloc(SIZE);
    CHECK(bytes != NULL);
    memset(bytes, 7, SIZE);
    const int both = AQ_OPEN_READ | AQ_OPEN_WRITE | AQ_OPEN_CREATE;
    for (int index = 0; index < 2 * PIECES; index++) {
        snprintf(name, sizeof name, "/small%d", index);
        OK(aq_file_open(pool, name, both, 0, &file));
        OK(aq_file_write(file, bytes, 8192, 0));
        aq_file_free(file);
    }
    OK(aq_file_open(pool, "/rest", both, 0, &file));
    int full = 0;
    for (uint64_t offset = 0; full == 0; offset += 8192) full = aq_file_write(file, bytes, 8192, offset);
    CHECK(full == -ENOSPC);
    aq_file_free(file);
    for (int index = 0; index < PIECES; index++) {
        snprintf(name, sizeof name, "/small%d", 2 * index);
        OK(aq_path_unlink(pool, name));
    }
    OK(aq_pool_checkpoint(pool));
    OK(aq_file_open(pool, "/big", both, 0, &file));
    uint64_t offset = 77, done = 77;
    FAILS(ENOSPC, aq_file_append(file, bytes, SIZE, &offset));
    CHECK(offset == 77);
    aq_file_status status = AQ_FILE_STATUS_INIT;
    OK(aq_file_stat(file, &status));
    CHECK(status.len_bytes > 0 && status.len_bytes < SIZE); /* a part, and the error says so */
    OK(aq_file_set_len(file, 0));
    OK(aq_pool_checkpoint(pool));
    OK(aq_file_append(file, bytes, 1600 << 10, &offset));
    CHECK(offset == 0);
    OK(aq_file_open(pool, "/copy", both, 0, &copy));
    aq_range range = {0, 1600 << 10};
    FAILS(ENOSPC, aq_file_copy_range(file, range, copy, 0, &done));
    OK(aq_file_stat(copy, &status));
    CHECK(done > 0 && done == status.len_bytes);
    aq_file_free(copy);
    aq_file_free(file);
    free(bytes);
    aq_pool_free(pool);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    pieces(arguments[1]);
    char path[4096];
    snprintf(path, sizeof path, "%s/more.pool", arguments[1]);
    aq_pool *pool;
    aq_pool_options options = AQ_POOL_OPTIONS_INIT;
    options.segment_mode = 0600;
    options.stall_timeout_ns = UINT64_C(60000000000);
    options.guard = 77;
    FAILS(EINVAL, aq_pool_create(path, 16 << 20, &options, &pool));
    options.guard = AQ_GUARD_BEST;
    OK(aq_pool_create(path, 16 << 20, &options, &pool));
    vectors(pool);
    without_names(pool);
    views(pool);
    locks(pool);
    names(pool);
    aq_pool *second;
    FAILS(EINVAL, aq_pool_open_granted(path, "short", 5, NULL, &second));
    FAILS(ENOENT, aq_pool_open_granted(path, "a key that is long enough", 25, NULL, &second));
    CHECK(second == NULL);
    aq_pool_free(pool);
    return 0;
}
