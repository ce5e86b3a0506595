//! The contenders: each is declared here, once.
//!
//! To add one, declare it: its name, what it is, and how it is opened for the kinds of work it can
//! do ([`Roles`]). Then name it in the lists of the benches it takes part in. An opener says with
//! [`Unavailable`](crate::job::Unavailable) why the contender cannot run on a machine.

use aquifer::Backend;
use aquifer::mapper::Unmap;
use aquifer_fuse::Cache;

use crate::contender::anonymous::Anonymous;
use crate::contender::aquifer::{Known, MappedFile, PagedFile, Style};
use crate::contender::direct::DirectFile;
use crate::contender::files::mapper::{MapperFiles, MapperMaps, ReadOnceFiles, WritableFile};
use crate::contender::files::plain::{self, MappedFiles, PlainMaps, ReadFiles, SharedMap};
use crate::contender::mmap::{Form, MmapFile};
use crate::contender::mounted::Home;
use crate::contender::open::{OPEN_COREUTILS, OPEN_POOL, OPEN_SQLITE};
use crate::contender::pooled::kernel::{CalledFile, CalledGrowing, CopiedPair, MappedGrowing};
use crate::contender::pooled::names::{KernelNames, PoolNames};
use crate::contender::pooled::pool::{PooledFile, PooledGrowing, PooledPair};
use crate::contender::pooled::whole::{PoolReads, PoolViews};
use crate::contender::pooled::{OpenRecords, copied_pair, kernel};
use crate::contender::regions::{self, OBJECTS, SHARED_FILES, objects, shared_file};
use crate::contender::rows::{CachedRows, MmapRows};
use crate::contender::stores::{
    Commits, HeapStore, LmdbStore, LogAlone,
    MemoryCommits::{Cells, Everything},
    MemoryStore, PmemobjStore, RedbStore, SqliteStore, single,
};
use crate::contender::user_cache::UserCache;
use crate::contender::{Contender, Roles};
use crate::workload::{anatomy, mapped, pages, read_loop, row_batches, whole_files};

const READ_AND_WRITTEN: OpenRecords = |name, _| Ok(Box::new(CalledFile::open(name)?));
const MAPPED: OpenRecords =
    |name, file_bytes| Ok(Box::new(kernel::MappedFile::open(name, file_bytes, false)?));
const POPULATED: OpenRecords =
    |name, file_bytes| Ok(Box::new(kernel::MappedFile::open(name, file_bytes, true)?));

pub const MMAP: &Contender = &Contender {
    name: "mmap",
    about: "a file mapping without advice: the usual use of mmap",
    roles: Roles {
        pages: Some(|job| pages(job, &MmapFile::open(Form::Plain, &job.source)?)),
        files: Some(|job| whole_files(job, || Ok(MappedFiles { populate: false }))),
        maps: Some(|job| mapped(job, || Ok(PlainMaps(plain::Form::Plain)))),
        records: Some(MAPPED),
        growing: Some(|file_bytes| Ok(Box::new(MappedGrowing::create(file_bytes, false)?))),
        pair: Some(|names, file_bytes| copied_pair(MAPPED, names, file_bytes)),
        ..Roles::NONE
    },
};

pub const MMAP_RANDOM: &Contender = &Contender {
    name: "mmap_random",
    about: "a file mapping with MADV_RANDOM",
    roles: Roles {
        pages: Some(|job| pages(job, &MmapFile::open(Form::Random, &job.source)?)),
        rows: Some(|job| {
            row_batches(job, |row_bytes| MmapRows::open(Form::Random, &job.source, row_bytes))
        }),
        anatomy: Some(anatomy::plain_mapping),
        maps: Some(|job| mapped(job, || Ok(PlainMaps(plain::Form::Random)))),
        ..Roles::NONE
    },
};

pub const MMAP_WILLNEED: &Contender = &Contender {
    name: "mmap_willneed",
    about: "a file mapping with MADV_WILLNEED for accesses known in advance",
    roles: Roles {
        pages: Some(|job| pages(job, &MmapFile::open(Form::WillNeed, &job.source)?)),
        rows: Some(|job| {
            row_batches(job, |row_bytes| MmapRows::open(Form::WillNeed, &job.source, row_bytes))
        }),
        maps: Some(|job| mapped(job, || Ok(PlainMaps(plain::Form::WillNeed)))),
        ..Roles::NONE
    },
};

pub const MMAP_SORTED_WILLNEED: &Contender = &Contender {
    name: "mmap_sorted_willneed",
    about: "the same for a program that sorts its accesses by hand, in groups of 1024",
    roles: Roles {
        pages: Some(|job| pages(job, &MmapFile::open(Form::Sorted { group: 1024 }, &job.source)?)),
        ..Roles::NONE
    },
};

pub const MMAP_SORTED_WILLNEED_16K: &Contender = &Contender {
    name: "mmap_sorted_willneed_16k",
    about: "the same in groups of 16,384",
    roles: Roles {
        pages: Some(|job| {
            pages(job, &MmapFile::open(Form::Sorted { group: 16 << 10 }, &job.source)?)
        }),
        ..Roles::NONE
    },
};

pub const MMAP_POPULATE: &Contender = &Contender {
    name: "mmap_populate",
    about: "a file mapping populated when it is created",
    roles: Roles {
        files: Some(|job| whole_files(job, || Ok(MappedFiles { populate: true }))),
        maps: Some(|job| mapped(job, || Ok(PlainMaps(plain::Form::Populate)))),
        records: Some(POPULATED),
        growing: Some(|file_bytes| Ok(Box::new(MappedGrowing::create(file_bytes, true)?))),
        pair: Some(|names, file_bytes| copied_pair(POPULATED, names, file_bytes)),
        ..Roles::NONE
    },
};

pub const MMAP_SEQUENTIAL: &Contender = &Contender {
    name: "mmap_sequential",
    about: "a file mapping with MADV_SEQUENTIAL",
    roles: Roles {
        pages: Some(|job| pages(job, &MmapFile::open(Form::Sequential, &job.source)?)),
        maps: Some(|job| mapped(job, || Ok(PlainMaps(plain::Form::Sequential)))),
        ..Roles::NONE
    },
};

pub const MMAP_WILLNEED_AHEAD: &Contender = &Contender {
    name: "mmap_willneed_ahead",
    about: "a file mapping with MADV_WILLNEED for the accesses after the next ones",
    roles: Roles {
        maps: Some(|job| mapped(job, || Ok(PlainMaps(plain::Form::WillNeedAhead)))),
        ..Roles::NONE
    },
};

pub const READ: &Contender = &Contender {
    name: "read",
    about: "open, fstat and pread of the whole file into a reused buffer",
    roles: Roles { files: Some(|job| whole_files(job, || Ok(ReadFiles))), ..Roles::NONE },
};

pub const READ_LOOP: &Contender = &Contender {
    name: "read_loop",
    about: "openat in the file's directory and read into 64 KiB until a short read",
    roles: Roles { files: Some(read_loop), ..Roles::NONE },
};

pub const PREAD_DIRECT: &Contender = &Contender {
    name: "pread_direct",
    about: "pread and pwrite with O_DIRECT: no cache at all",
    roles: Roles { pages: Some(|job| pages(job, &DirectFile::open(&job.source)?)), ..Roles::NONE },
};

pub const USER_CACHE: &Contender = &Contender {
    name: "user_cache",
    about: "quick_cache over direct reads: the cache a program would otherwise use",
    roles: Roles { pages: Some(|job| pages(job, &UserCache::open(&job.source)?)), ..Roles::NONE },
};

pub const ANONYMOUS: &Contender = &Contender {
    name: "anonymous",
    about: "anonymous memory that holds a copy: the lowest cost of a hit",
    roles: Roles { pages: Some(|job| pages(job, &Anonymous::open(&job.source)?)), ..Roles::NONE },
};

pub const MAPPING: &Contender = &Contender {
    name: "mapping",
    about: "Aquifer's mapping with its defaults: bare loads and stores",
    roles: Roles {
        pages: Some(|job| pages(job, &MappedFile::open(Backend::Auto, Style::Bare, &job.source)?)),
        ..Roles::NONE
    },
};

pub const MAPPING_KERNEL: &Contender = &Contender {
    name: "mapping_kernel",
    about: "Aquifer's mapping with the kernel backend",
    roles: Roles {
        pages: Some(|job| {
            pages(job, &MappedFile::open(Backend::Kernel, Style::Bare, &job.source)?)
        }),
        ..Roles::NONE
    },
};

pub const MAPPING_USER: &Contender = &Contender {
    name: "mapping_user",
    about: "Aquifer's mapping with the user backend",
    roles: Roles {
        pages: Some(|job| pages(job, &MappedFile::open(Backend::User, Style::Bare, &job.source)?)),
        anatomy: Some(anatomy::mapping),
        ..Roles::NONE
    },
};

pub const MAPPING_TOUCH: &Contender = &Contender {
    name: "mapping_touch",
    about: "Aquifer's mapping with the user backend, each access preceded by a touch",
    roles: Roles {
        pages: Some(|job| pages(job, &MappedFile::open(Backend::User, Style::Touch, &job.source)?)),
        ..Roles::NONE
    },
};

pub const MAPPING_BATCHED: &Contender = &Contender {
    name: "mapping_batched",
    about: "Aquifer's mapping, with accesses known in advance touched together",
    roles: Roles {
        pages: Some(|job| {
            pages(job, &MappedFile::open(Backend::Auto, Style::Batched, &job.source)?)
        }),
        ..Roles::NONE
    },
};

pub const MAPPING_VISITED: &Contender = &Contender {
    name: "mapping_visited",
    about: "Aquifer's mapping, with accesses known in advance visited together",
    roles: Roles {
        pages: Some(|job| {
            pages(job, &MappedFile::open(Backend::Auto, Style::Visited, &job.source)?)
        }),
        ..Roles::NONE
    },
};

pub const MAPPING_USER_VISITED: &Contender = &Contender {
    name: "mapping_user_visited",
    about: "the same with the user backend",
    roles: Roles {
        pages: Some(|job| {
            pages(job, &MappedFile::open(Backend::User, Style::Visited, &job.source)?)
        }),
        ..Roles::NONE
    },
};

pub const PAGES: &Contender = &Contender {
    name: "pages",
    about: "Aquifer's page guards: optimistic reads, exclusive guards for stores",
    roles: Roles {
        pages: Some(|job| pages(job, &PagedFile::open(Known::Single, &job.source)?)),
        anatomy: Some(anatomy::pages),
        ..Roles::NONE
    },
};

pub const PAGES_BATCHED: &Contender = &Contender {
    name: "pages_batched",
    about: "Aquifer's page guards, with pages known in advance acquired together",
    roles: Roles {
        pages: Some(|job| pages(job, &PagedFile::open(Known::Batched, &job.source)?)),
        ..Roles::NONE
    },
};

pub const PAGES_VISITED: &Contender = &Contender {
    name: "pages_visited",
    about: "Aquifer's pages, with those known in advance visited together",
    roles: Roles {
        pages: Some(|job| pages(job, &PagedFile::open(Known::Visited, &job.source)?)),
        ..Roles::NONE
    },
};

pub const ROWS: &Contender = &Contender {
    name: "rows",
    about: "Aquifer's cache of rows: sector reads, batches in any order",
    roles: Roles {
        rows: Some(|job| row_batches(job, |row_bytes| CachedRows::open(&job.source, row_bytes))),
        ..Roles::NONE
    },
};

pub const OBJECT: &Contender = &Contender {
    name: "object",
    about: "a persistent object of Aquifer, made durable by psync",
    roles: Roles {
        commits: Some(Commits {
            create: |home, array, lanes| {
                MemoryStore::create(objects::create, Everything, home, array, lanes)
            },
            open: |home, array, lanes| {
                MemoryStore::open(objects::open, Everything, home, array, lanes)
            },
        }),
        regions: Some(OBJECTS),
        ..Roles::NONE
    },
};

pub const OBJECT_RANGES: &Contender = &Contender {
    name: "object_ranges",
    about: "a persistent object of Aquifer, whose psync is told what was stored (psync_ranges)",
    roles: Roles {
        commits: Some(Commits {
            create: |home, array, lanes| {
                MemoryStore::create(objects::create, Cells, home, array, lanes)
            },
            open: |home, array, lanes| MemoryStore::open(objects::open, Cells, home, array, lanes),
        }),
        ..Roles::NONE
    },
};

pub const OBJECT_HEAP: &Contender = &Contender {
    name: "object_heap",
    about: "a vector in the heap of an object of Aquifer; the heap records what is stored",
    roles: Roles {
        commits: Some(Commits {
            create: |home, array, lanes| single(lanes, || HeapStore::create(home, array)),
            open: |home, array, lanes| single(lanes, || HeapStore::open(home, array)),
        }),
        ..Roles::NONE
    },
};

pub const LMDB: &Contender = &Contender {
    name: "lmdb",
    about: "LMDB, with its default flags",
    roles: Roles { commits: Some(Commits::on_device::<LmdbStore>()), ..Roles::NONE },
};

pub const SQLITE: &Contender = &Contender {
    name: "sqlite",
    about: "SQLite with a write-ahead log and synchronous=FULL",
    roles: Roles {
        commits: Some(Commits::on_device::<SqliteStore>()),
        open: Some(OPEN_SQLITE),
        ..Roles::NONE
    },
};

pub const REDB: &Contender = &Contender {
    name: "redb",
    about: "redb with its default durability",
    roles: Roles { commits: Some(Commits::on_device::<RedbStore>()), ..Roles::NONE },
};

pub const LIBPMEMOBJ: &Contender = &Contender {
    name: "libpmemobj",
    about: "libpmemobj: a transaction that logs each range before it is stored to",
    roles: Roles {
        commits: Some(Commits {
            create: |home, array, lanes| single(lanes, || PmemobjStore::create(home, array, false)),
            open: |home, array, lanes| single(lanes, || PmemobjStore::open(home, array, false)),
        }),
        ..Roles::NONE
    },
};

pub const LIBPMEMOBJ_RECORDS: &Contender = &Contender {
    name: "libpmemobj_records",
    about: "libpmemobj: a transaction that logs whole records",
    roles: Roles {
        commits: Some(Commits {
            create: |home, array, lanes| single(lanes, || PmemobjStore::create(home, array, true)),
            open: |home, array, lanes| single(lanes, || PmemobjStore::open(home, array, true)),
        }),
        ..Roles::NONE
    },
};

pub const MSYNC: &Contender = &Contender {
    name: "msync",
    about: "a shared file mapping and msync: a crash leaves only some of the stores",
    roles: Roles {
        commits: Some(Commits {
            create: |home, array, lanes| {
                MemoryStore::create(shared_file::create, Everything, home, array, lanes)
            },
            open: |home, array, lanes| {
                MemoryStore::open(shared_file::open, Everything, home, array, lanes)
            },
        }),
        regions: Some(SHARED_FILES),
        stored: Some(|path, len_bytes| Ok(Box::new(SharedMap::open(path, len_bytes)?))),
        ..Roles::NONE
    },
};

pub const MAPPER: &Contender = &Contender {
    name: "mapper",
    about: "Aquifer's mapper with its defaults, including its cache of mappings",
    roles: Roles {
        files: Some(|job| whole_files(job, || MapperFiles::new(&job.source))),
        maps: Some(|job| mapped(job, || MapperMaps::new(true))),
        stored: Some(|path, len_bytes| Ok(Box::new(WritableFile::open(path, len_bytes)?))),
        ..Roles::NONE
    },
};

pub const MAPPER_UNADVISED: &Contender = &Contender {
    name: "mapper_unadvised",
    about: "Aquifer's mapper without advice about how a file will be used",
    roles: Roles { maps: Some(|job| mapped(job, || MapperMaps::new(false))), ..Roles::NONE },
};

pub const MAPPER_ASYNC: &Contender = &Contender {
    name: "mapper_async",
    about: "Aquifer's mapper without a cache, unmapping many mappings at a time",
    roles: Roles {
        files: Some(|job| whole_files(job, || MapperFiles::without_cache(Unmap::default()))),
        ..Roles::NONE
    },
};

pub const MAPPER_SYNC: &Contender = &Contender {
    name: "mapper_sync",
    about: "Aquifer's mapper without a cache, unmapping each when it is dropped",
    roles: Roles {
        files: Some(|job| whole_files(job, || MapperFiles::without_cache(Unmap::Sync))),
        ..Roles::NONE
    },
};

pub const MAPPER_READ_ONCE: &Contender = &Contender {
    name: "mapper_read_once",
    about: "Aquifer's read_once: reads or maps, whichever is cheaper",
    roles: Roles {
        files: Some(|job| whole_files(job, || ReadOnceFiles::new(&job.source))),
        ..Roles::NONE
    },
};

pub const SYSCALLS: &Contender = &Contender {
    name: "syscalls",
    about: "files of the kernel by system calls: pread, pwrite, open, stat, unlink",
    roles: Roles {
        records: Some(READ_AND_WRITTEN),
        growing: Some(|_| Ok(Box::new(CalledGrowing::create()?))),
        pair: Some(|names, file_bytes| copied_pair(READ_AND_WRITTEN, names, file_bytes)),
        names: Some(|directory| Ok(Box::new(KernelNames::create(directory)?))),
        ..Roles::NONE
    },
};

pub const COREUTILS: &Contender = &Contender {
    name: "coreutils",
    about: "the commands cat and mkdir on files of the kernel",
    roles: Roles { open: Some(OPEN_COREUTILS), ..Roles::NONE },
};

pub const POOL: &Contender = &Contender {
    name: "pool",
    about: "files of an Aquifer pool, read and written without system calls",
    roles: Roles {
        files: Some(|job| whole_files(job, PoolReads::open)),
        records: Some(|name, _| Ok(Box::new(PooledFile::open(name)?))),
        growing: Some(|file_bytes| Ok(Box::new(PooledGrowing::create(file_bytes, false)?))),
        pair: Some(|names, file_bytes| Ok(Box::new(PooledPair::open(names, file_bytes)?))),
        names: Some(|directory| Ok(Box::new(PoolNames::create(directory)?))),
        open: Some(OPEN_POOL),
        ..Roles::NONE
    },
};

pub const POOL_COPY: &Contender = &Contender {
    name: "pool_copy",
    about: "files of an Aquifer pool, copied where exchanging pages is cheaper",
    roles: Roles {
        pair: Some(|[to, from], file_bytes| {
            let records = PooledFile::open_two(to, from)?;
            Ok(Box::new(CopiedPair::new(records, file_bytes)))
        }),
        ..Roles::NONE
    },
};

pub const VIEW: &Contender = &Contender {
    name: "view",
    about: "files of an Aquifer pool, accessed in place",
    roles: Roles {
        files: Some(|job| whole_files(job, PoolViews::open)),
        growing: Some(|file_bytes| Ok(Box::new(PooledGrowing::create(file_bytes, true)?))),
        ..Roles::NONE
    },
};

pub const MEMORY: &Contender = &Contender {
    name: "memory",
    about: "plain memory",
    roles: Roles { regions: Some(regions::ANONYMOUS), ..Roles::NONE },
};

pub const LOG_ALONE: &Contender = &Contender {
    name: "log_alone",
    about: "appends to a log and device flushes: the lower bound of a commit",
    roles: Roles { commits: Some(Commits::on_device::<LogAlone>()), ..Roles::NONE },
};

pub const DISK: &Contender = &Contender {
    name: "disk",
    about: "a directory on the disk",
    roles: Roles { home: Some(Home::Disk), ..Roles::NONE },
};

pub const TMPFS: &Contender = &Contender {
    name: "tmpfs",
    about: "a directory in memory, which fsync leaves as it is",
    roles: Roles { home: Some(Home::Memory), ..Roles::NONE },
};

pub const PASS_THROUGH: &Contender = &Contender {
    name: "pass_through",
    about: "a FUSE server that passes on to a directory on the disk: the least that a mount costs",
    roles: Roles { home: Some(Home::PassThrough), ..Roles::NONE },
};

pub const MOUNT: &Contender = &Contender {
    name: "mount",
    about: "an Aquifer pool, mounted with write-back",
    roles: Roles { home: Some(Home::Pool(Cache::WriteBack)), ..Roles::NONE },
};

pub const MOUNT_WRITE_THROUGH: &Contender = &Contender {
    name: "mount_write_through",
    about: "an Aquifer pool, mounted with write-through",
    roles: Roles { home: Some(Home::Pool(Cache::WriteThrough)), ..Roles::NONE },
};

pub const MOUNT_SHARED: &Contender = &Contender {
    name: "mount_shared",
    about: "an Aquifer pool, mounted so that others can change it too: the kernel caches nothing",
    roles: Roles { home: Some(Home::Pool(Cache::Shared)), ..Roles::NONE },
};

/// The contenders of `remote`.
#[cfg(feature = "remote")]
pub mod remote {
    use crate::contender::remote::{
        CachedRows, Mapped, Mounted, NO_SERVICE, Plain, Way, Worker, mount,
    };
    use crate::contender::{Contender, Roles};

    macro_rules! contender {
        ($constant:ident, $name:literal, $about:literal, $serve:expr, $open:expr) => {
            pub const $constant: &Contender = &Contender {
                name: $name,
                about: $about,
                roles: Roles { remote: Some(Way { serve: $serve, open: $open }), ..Roles::NONE },
            };
        };
    }

    contender!(
        AQUIFER,
        "aquifer",
        "a remote device with a tier, mapped, and visited by ranges",
        NO_SERVICE,
        |site| Ok(Box::new(Mapped::open(site)?))
    );
    contender!(
        AQUIFER_ROWS,
        "aquifer_rows",
        "the same, with a cache of rows instead of the mapping for rows",
        NO_SERVICE,
        CachedRows::open
    );
    contender!(
        OBJECT_STORE,
        "object_store",
        "concurrent get_range of the crate object_store; a local copy for what is read again",
        NO_SERVICE,
        |site| Ok(Box::new(Plain::open(site, false, site.work.in_flight, true)?))
    );
    contender!(
        OBJECT_STORE_RANGES,
        "object_store_ranges",
        "get_ranges, which merges near ranges; a local copy for what is read again",
        NO_SERVICE,
        |site| Ok(Box::new(Plain::open(site, true, site.work.in_flight, true)?))
    );
    contender!(
        OBJECT_STORE_UNCOPIED,
        "object_store_uncopied",
        "get_ranges, and concurrent requests in a pass; keeps nothing",
        NO_SERVICE,
        |site| Ok(Box::new(Plain::open(site, true, site.work.in_flight, false)?))
    );
    contender!(S3FS, "s3fs", "s3fs in Python, cat_ranges without a cache", NO_SERVICE, |site| Ok(
        Box::new(Worker::open(site, "s3fs")?)
    ));
    contender!(
        S3FS_BLOCKCACHE,
        "s3fs_blockcache",
        "s3fs with fsspec's cache of blocks",
        NO_SERVICE,
        |site| Ok(Box::new(Worker::open(site, "s3fs_blockcache")?))
    );
    contender!(
        S3FS_FILECACHE,
        "s3fs_filecache",
        "s3fs with fsspec's cache of whole files, and preads of the copy",
        NO_SERVICE,
        |site| Ok(Box::new(Worker::open(site, "s3fs_filecache")?))
    );
    contender!(
        RCLONE,
        "rclone",
        "rclone mount with its VFS cache, read by 64 threads or in sequence",
        mount,
        |site| Ok(Box::new(Mounted::open(site)?))
    );
    contender!(
        LINE,
        "line",
        "the time of the bytes at the line's rate: not measured",
        NO_SERVICE,
        |_| anyhow::bail!("nothing reads it")
    );
}
