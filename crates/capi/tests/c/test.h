/* What the tests in C share. They compile as C11 and as C++17. */
#ifndef TEST_H
#define TEST_H

#include "aquifer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A call that must succeed. */
#define OK(call) is_equal((call), 0, #call, __FILE__, __LINE__)
/* A call that must fail with an error number. */
#define FAILS(number, call) is_equal((call), -(number), #call, __FILE__, __LINE__)
/* Something that must be so. */
#define CHECK(what) is_equal(!(what), 0, #what, __FILE__, __LINE__)

static inline void is_equal(long long got, long long expected, const char *what, const char *file, int line) {
    if (got == expected) return;
    fprintf(stderr, "%s:%d: %s is %lld, not %lld; the last failure: %s\n", file, line, what, got, expected,
            aq_last_error());
    exit(1);
}

/* A file of `size` bytes in the directory that the program was given, byte i being i * 7 / 4096. */
static inline const char *make_file(const char *directory, const char *name, size_t size) {
    static char path[4096];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL);
    for (size_t i = 0; i < size; i++) fputc((int)(i / 4096 * 7 % 256), file);
    CHECK(fclose(file) == 0);
    return path;
}

#endif
