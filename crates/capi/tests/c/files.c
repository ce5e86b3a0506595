/* Files of a pool. */
#include "test.h"

#include <sys/stat.h>

int main(int count, char **arguments) {
    CHECK(count == 2);
    char path[4096];
    snprintf(path, sizeof path, "%s/data.pool", arguments[1]);
    aq_pool *pool;
    FAILS(ENOENT, aq_pool_open(path, NULL, &pool));
    CHECK(pool == NULL);
    OK(aq_pool_create(path, 16 << 20, NULL, &pool));
    aq_pool *other;
    FAILS(EEXIST, aq_pool_create(path, 16 << 20, NULL, &other));

    /* Names. */
    OK(aq_path_mkdir(pool, "/a/b", 0, 1));
    FAILS(EEXIST, aq_path_mkdir(pool, "/a", 0, 0));
    FAILS(ENOENT, aq_path_mkdir(pool, "/x/y", 0, 0));
    aq_file *file, *second;
    FAILS(ENOENT, aq_file_open(pool, "/a/f", AQ_OPEN_READ, 0, &file));
    FAILS(EINVAL, aq_file_open(pool, "/a/f", 4096, 0, &file));
    const int both = AQ_OPEN_READ | AQ_OPEN_WRITE;
    OK(aq_file_open(pool, "/a/f", both | AQ_OPEN_CREATE_NEW, 0640, &file));
    FAILS(EEXIST, aq_file_open(pool, "/a/f", both | AQ_OPEN_CREATE_NEW, 0, &second));
    OK(aq_path_symlink(pool, "f", "/a/link"));
    char *target;
    OK(aq_path_readlink(pool, "/a/link", &target));
    CHECK(strcmp(target, "f") == 0);
    aq_string_free(target);
    OK(aq_path_link(pool, "/a/f", "/a/g"));
    OK(aq_path_rename(pool, "/a/g", "/a/b/h", AQ_RENAME_REPLACE));
    FAILS(EEXIST, aq_path_rename(pool, "/a/b/h", "/a/link", AQ_RENAME_NO_REPLACE));
    FAILS(EINVAL, aq_path_rename(pool, "/a/b/h", "/a/link", 9));

    /* Bytes. */
    OK(aq_file_write(file, "some text", 9, 0));
    uint64_t end;
    OK(aq_file_append(file, "!", 1, &end));
    CHECK(end == 9);
    OK(aq_file_append(file, NULL, 0, &end));
    CHECK(end == 10);
    char buffer[100];
    size_t done;
    OK(aq_file_read(file, buffer, sizeof buffer, 5, &done));
    CHECK(done == 5 && memcmp(buffer, "text!", 5) == 0);
    OK(aq_file_write_atomic(file, "SOME", 4, 0));
    OK(aq_file_sync(file, 0));
    OK(aq_file_sync(file, 1));
    aq_file_status status = AQ_FILE_STATUS_INIT;
    OK(aq_path_stat(pool, "/a/b/h", 1, &status));
    CHECK(status.len_bytes == 10 && status.links == 2 && S_ISREG(status.mode) && (status.mode & 0777) == 0640);
    OK(aq_path_stat(pool, "/a/link", 0, &status));
    CHECK(S_ISLNK(status.mode));
    OK(aq_file_set_times(file, AQ_KEEP_TIME, -1500000000));
    OK(aq_file_chmod(file, 0600));
    OK(aq_file_stat(file, &status));
    CHECK(status.modified_ns == -1500000000 && (status.mode & 0777) == 0600);

    /* Space. */
    const aq_range range = {8192, 4096};
    OK(aq_file_allocate(file, AQ_ALLOCATE_EXTEND, range));
    FAILS(EINVAL, aq_file_allocate(file, 77, range));
    aq_range found;
    OK(aq_file_next(file, 0, 1, &found));
    CHECK(found.offset == 4096 && found.length == 4096);
    OK(aq_file_next(file, 4096, 0, &found));
    CHECK(found.offset == 8192 && found.length == 4096);
    OK(aq_file_next(file, 12288, 0, &found));
    CHECK(found.length == 0);
    OK(aq_file_set_len(file, 8192));

    /* Exchange and copy. */
    OK(aq_file_open(pool, "/new", both | AQ_OPEN_CREATE, 0, &second));
    memset(buffer, 'n', sizeof buffer);
    OK(aq_file_set_len(second, 4096));
    OK(aq_file_write(second, buffer, 10, 0));
    OK(aq_file_exchange_range(file, 0, second, 0, 4096));
    OK(aq_file_read(second, buffer, 10, 0, &done));
    CHECK(done == 10 && memcmp(buffer, "SOME text!", 10) == 0);
    FAILS(EINVAL, aq_file_exchange_range(file, 0, second, 0, 10));
    const aq_range ten = {0, 10};
    OK(aq_file_copy_range(second, ten, file, 4096, &end));
    CHECK(end == 10);

    /* Views. */
    aq_file_view *view;
    const aq_range whole = {0, UINT64_MAX};
    OK(aq_path_view(pool, "/a/f", whole, &view));
    CHECK(aq_file_view_len(view) == 8192 && aq_file_view_is_current(view) == 1);
    OK(aq_file_view_read(view, buffer, 4, 4096));
    CHECK(memcmp(buffer, "SOME", 4) == 0);
    FAILS(EROFS, aq_file_view_write(view, "x", 1, 0));
    CHECK(aq_file_view_data_mut(view) == NULL);
    aq_file_view_free(view);
    FAILS(EINVAL, aq_path_view(pool, "/a/f", range, &view));
    CHECK(view == NULL);
    OK(aq_file_view_new(file, ten, 1, &view));
    OK(aq_file_view_write(view, "seen", 4, 0));
    unsigned char *bytes = (unsigned char *)aq_file_view_data_mut(view);
    CHECK(bytes == aq_file_view_data(view) && (bytes == NULL || bytes[0] == 's'));
    OK(aq_file_view_persist(view, whole));
    aq_file_view_free(view);
    OK(aq_file_read(file, buffer, 4, 0, &done));
    CHECK(memcmp(buffer, "seen", 4) == 0);

    /* Locks. */
    aq_file *another;
    OK(aq_file_open(pool, "/a/f", both, 0, &another));
    OK(aq_file_lock(file, 1, AQ_WAIT));
    FAILS(EWOULDBLOCK, aq_file_lock(another, 0, 0));
    FAILS(EINVAL, aq_file_lock(another, 0, -5)); /* a deadline that has passed, not AQ_WAIT */
    OK(aq_file_unlock(file));
    OK(aq_file_lock(another, 0, 0));
    OK(aq_file_lock(file, 0, 1000000));
    OK(aq_file_lock_range(file, ten, 1, 0));
    FAILS(EWOULDBLOCK, aq_file_lock_range(another, ten, 0, 0));
    OK(aq_file_unlock_range(file, ten));
    OK(aq_file_lock_range(another, ten, 0, 0));
    aq_file_free(another);

    /* Attributes. */
    OK(aq_path_set_attribute(pool, "/a/f", "user.kind", "red", 3));
    OK(aq_path_get_attribute(pool, "/a/f", "user.kind", NULL, 0, &done));
    CHECK(done == 3);
    FAILS(ERANGE, aq_path_get_attribute(pool, "/a/f", "user.kind", buffer, 2, &done));
    OK(aq_path_get_attribute(pool, "/a/f", "user.kind", buffer, 3, &done));
    CHECK(memcmp(buffer, "red", 3) == 0);
    OK(aq_path_remove_attribute(pool, "/a/f", "user.kind"));
    FAILS(ENODATA, aq_path_get_attribute(pool, "/a/f", "user.kind", NULL, 0, &done));
    OK(aq_path_chmod(pool, "/a/f", 0644));
    OK(aq_path_chown(pool, "/a/f", UINT32_MAX, UINT32_MAX, 1));
    aq_file_free(file);
    OK(aq_path_set_immutable(pool, "/a/f", 1));
    FAILS(EPERM, aq_file_open(pool, "/a/f", AQ_OPEN_WRITE, 0, &file));
    OK(aq_path_set_immutable(pool, "/a/f", 0));

    /* Directories. */
    aq_dir *dir;
    OK(aq_dir_open(pool, "/a", &dir));
    unsigned entries = 0;
    for (;;) {
        const char *name;
        uint64_t inode;
        OK(aq_dir_next(dir, &name, &inode));
        if (name == NULL) break;
        CHECK(strcmp(name, "b") == 0 || strcmp(name, "f") == 0 || strcmp(name, "link") == 0);
        entries++;
    }
    CHECK(entries == 3);
    aq_dir_free(dir);
    aq_pool_info info = AQ_POOL_INFO_INIT;
    OK(aq_pool_get_info(pool, &info));
    CHECK(info.files == 2 && info.objects == 0 && info.processes >= 1);
    FAILS(ENOTEMPTY, aq_path_rmdir(pool, "/a"));
    OK(aq_path_unlink(pool, "/new"));
    OK(aq_path_remove_all(pool, "/a"));
    OK(aq_pool_sync(pool));
    OK(aq_pool_checkpoint(pool));
    aq_file_free(second);
    aq_pool_free(pool);

    aq_pool_options options = AQ_POOL_OPTIONS_INIT;
    options.read_only = 1;
    OK(aq_pool_open(path, &options, &pool));
    FAILS(EROFS, aq_path_mkdir(pool, "/a", 0, 0));
    aq_pool_free(pool);
    return 0;
}
