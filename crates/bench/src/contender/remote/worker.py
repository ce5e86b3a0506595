"""Reads an object by s3fs, as told on standard input: started by a process of the bench.

The first line says how; then each line is one piece of work, answered by a line with its sum. Interpreter and imports are not timed.
"""

import fcntl
import json
import os
import sys

try:
    import fsspec
    import numpy as np
    import s3fs
except ImportError as error:
    print(json.dumps({"missing": str(error)}), flush=True)
    sys.exit()

PART = 4 << 20


def lines(data):
    """Of each 64 bytes the first word."""
    return int(np.frombuffer(data, "<u8")[::8].sum(dtype=np.uint64))


class Direct:
    """Concurrent requests, without a cache."""

    def __init__(self, told, store, path):
        self.store, self.path, self.told = store, path, told

    def ranges(self, starts, ends):
        found = self.store.cat_ranges([self.path] * len(starts), starts, ends, batch_size=self.told["in_flight"], on_error="raise")
        return sum(map(lines, found))

    def whole(self):
        total, end = 0, self.told["bytes"]
        for first in range(0, end, 8 * PART):
            starts = list(range(first, min(first + 8 * PART, end), PART))
            total += self.ranges(starts, [min(start + PART, end) for start in starts])
        return total


class Blocks:
    """Blocks in a sparse local file. Small ones for rows."""

    def __init__(self, told, store, path):
        self.told = told
        self.cache = fsspec.filesystem("blockcache", fs=store, cache_storage=told["directory"], check_files=False)
        # Not divisors of the length: a read up to a block's end asks for the next one as well, which must exist.
        block = 64_000 if told["kind"] == "random_cold" else 4_000_000
        self.file = self.cache.open(path, "rb", block_size=block)

    def ranges(self, starts, ends):
        total = 0
        for start, end in sorted(zip(starts, ends)):
            self.file.seek(start)
            total += lines(self.file.read(end - start))
        return total

    def whole(self):
        total = 0
        self.file.seek(0)
        while data := self.file.read(PART):
            total += lines(data)
        return total

    def close(self):
        # Writes down which blocks there are.
        self.file.close()
        self.cache.save_cache()


class Copy:
    """A local copy of the whole file for all processes of a node, made when it is first read; then what is best for a local file."""

    def __init__(self, told, store, path):
        self.told, self.path, self.store = told, path, store
        self.descriptor = None

    def local(self):
        if self.descriptor is None:
            directory = self.told["shared_directory"]
            os.makedirs(directory, exist_ok=True)
            with open(directory + ".lock", "w") as lock:
                # One process downloads. The others know that it has if they look at the directory only then.
                fcntl.flock(lock, fcntl.LOCK_EX)
                cache = fsspec.filesystem("filecache", fs=self.store, cache_storage=directory, check_files=False)
                with cache.open(self.path, "rb") as file:
                    self.descriptor = os.open(file.name, os.O_RDONLY)
        return self.descriptor

    def ranges(self, starts, ends):
        descriptor = self.local()
        wanted = sorted(zip(starts, ends))
        for start, end in wanted:
            os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_WILLNEED)
        return sum(lines(os.pread(descriptor, end - start, start)) for start, end in wanted)

    def whole(self):
        descriptor, total, at = self.local(), 0, 0
        buffer = bytearray(1 << 20)
        while got := os.preadv(descriptor, [buffer], at):
            total += lines(memoryview(buffer)[:got])
            at += got
        return total


def main():
    told = json.loads(sys.stdin.readline())
    store = s3fs.S3FileSystem(
        anon=True,
        endpoint_url=told["endpoint"],
        client_kwargs={"region_name": "us-east-1"},
        config_kwargs={"max_pool_connections": told["in_flight"]},
        default_cache_type="none",
        # A whole file is downloaded in ten parts of this at once. By default they take 500 MiB.
        default_block_size=PART,
    )
    reader = {"s3fs": Direct, "s3fs_blockcache": Blocks, "s3fs_filecache": Copy}[told["contender"]](told, store, told["path"])
    print(json.dumps({"sum": 0}), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        total = reader.whole() if wanted is None else reader.ranges(*wanted)
        print(json.dumps({"sum": total % 2**64}), flush=True)
    if hasattr(reader, "close"):
        reader.close()


main()
