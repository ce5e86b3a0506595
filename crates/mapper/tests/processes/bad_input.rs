//! Files that cannot be mapped or read, and unusual circumstances under which they can. Truncated
//! files are tested in `views.rs`.

use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use aquifer_mapper::{
    Advice, FaultCause, FileAccess, FileView, MapError, Mapper, Stores, Unmap, ViewOptions,
};
use aquifer_testkit::campaign::steps;
use aquifer_testkit::child;
use aquifer_testkit::watchdog::wait_until;
use tempfile::TempDir;

/// A view whose stores are private until they are flushed.
const PRIVATE: ViewOptions = ViewOptions::write().stores(Stores::Private);

const PAGE: usize = 4096;

fn mapper() -> Mapper {
    Mapper::builder().build().unwrap()
}

fn map(mapper: &Mapper, path: &Path) -> Result<FileView, MapError> {
    mapper.map(path, FileAccess::Read, ..)
}

fn content(view: &FileView) -> Vec<u8> {
    view.read(|bytes| bytes.to_vec()).unwrap()
}

/// The system's error for a path that could not be opened.
fn refusal(mapper: &Mapper, path: &Path) -> Option<i32> {
    match map(mapper, path) {
        Err(MapError::Open { path: named, source }) => {
            assert_eq!(named, path);
            source.raw_os_error()
        }
        other => panic!("{}: {other:?}", path.display()),
    }
}

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("no permission", no_permission),
    ("SIGBUS blocked", sigbus_blocked),
    ("prepared thread", prepared_thread),
    ("bare load", bare_load),
    ("forks", forks),
    ("scattered looks", scattered_looks),
];

// ---- names ----------------------------------------------------------------------------------------

#[test]
fn any_name_that_the_system_takes_is_taken() {
    let (directory, mapper) = (tempfile::tempdir().unwrap(), mapper());
    let longest = "n".repeat(255);
    for (number, name) in [
        b" ".as_slice(),
        b"two\nlines",
        b"\xff\xfe not text",
        b"(deleted)",
        b"%s {} \\ \"",
        b"-",
        longest.as_bytes(),
    ]
    .iter()
    .enumerate()
    {
        let path = directory.path().join(OsStr::from_bytes(name));
        fs::write(&path, [number as u8; 10]).unwrap();
        let view = map(&mapper, &path).unwrap();
        assert_eq!((view.path(), content(&view)), (&*path, vec![number as u8; 10]));
        let file = File::open(&path).unwrap();
        let same = mapper.map_file(&file, FileAccess::Read, ..).unwrap();
        assert_eq!(content(&same), content(&view));
    }
}

#[test]
fn names_that_lead_nowhere_are_refused_with_the_systems_reason() {
    let (directory, mapper) = (tempfile::tempdir().unwrap(), mapper());
    let path = |name: &str| directory.path().join(name);
    fs::write(path("file"), "text").unwrap();
    symlink(path("b"), path("a")).unwrap();
    symlink(path("a"), path("b")).unwrap();
    symlink(path("itself"), path("itself")).unwrap();
    symlink(path("none"), path("dangling")).unwrap();
    for (bad, wanted) in [
        (path("a"), Some(libc::ELOOP)),
        (path("itself/below"), Some(libc::ELOOP)),
        (path("dangling"), Some(libc::ENOENT)),
        (path(&"n".repeat(256)), Some(libc::ENAMETOOLONG)),
        (path(&"d/".repeat(3000)), Some(libc::ENAMETOOLONG)),
        (path("file/below"), Some(libc::ENOTDIR)),
        (path("file/"), Some(libc::ENOTDIR)),
        (PathBuf::new(), Some(libc::ENOENT)),
        (path("nul\0inside"), None),
    ] {
        assert_eq!(refusal(&mapper, &bad), wanted, "{}", bad.display());
    }
}

#[test]
fn a_file_of_huge_pages_is_refused_and_can_be_read_once() {
    // SAFETY: a NUL-terminated name.
    let descriptor =
        unsafe { libc::memfd_create(c"huge".as_ptr(), libc::MFD_HUGETLB | libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        eprintln!("skipped: no files of huge pages: {}", io::Error::last_os_error());
        return;
    }
    // SAFETY: made above, and owned by nothing else.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(4 << 20).unwrap();
    let mapper = mapper();
    for access in [ViewOptions::read(), PRIVATE, ViewOptions::write()] {
        match mapper.map_file(&file, access, ..).unwrap_err() {
            MapError::NotMappable { kind, .. } => assert_eq!(kind, "a file of huge pages"),
            error => panic!("{error}"),
        }
    }
    let path = format!("/proc/self/fd/{descriptor}");
    assert_eq!(mapper.read_once(path, |bytes| bytes.to_vec()).unwrap(), vec![0; 4 << 20]);
}

// ---- permission -----------------------------------------------------------------------------------

/// Drops the superuser's effective user ID until the result is dropped.
struct Ordinary {
    user: libc::uid_t,
}

impl Ordinary {
    fn new() -> Ordinary {
        // SAFETY: `geteuid` has no preconditions.
        let user = unsafe { libc::geteuid() };
        // SAFETY: changes the effective user of this process, a child made for the test.
        assert!(user != 0 || unsafe { libc::seteuid(65_534) } == 0);
        Ordinary { user }
    }
}

impl Drop for Ordinary {
    fn drop(&mut self) {
        // SAFETY: restores the effective user.
        unsafe { libc::seteuid(self.user) };
    }
}

fn no_permission() {
    let (directory, mapper) = (tempfile::tempdir().unwrap(), mapper());
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    mode(directory.path(), 0o755);
    let (closed, below) = (directory.path().join("closed"), directory.path().join("below"));
    fs::write(&closed, "secret").unwrap();
    fs::create_dir(&below).unwrap();
    fs::write(below.join("file"), "secret").unwrap();
    // Mapped by a privileged user, and parked: other users gain no access by that.
    for path in [&closed, &below.join("file")] {
        assert_eq!(content(&map(&mapper, path).unwrap()), b"secret");
    }
    assert_eq!(mapper.stats().cache.parked, 2);
    mode(&closed, 0);
    mode(&below, 0);
    {
        let _ordinary = Ordinary::new();
        for path in [&closed, &below.join("file")] {
            assert_eq!(refusal(&mapper, path), Some(libc::EACCES));
        }
        assert!(mapper.forget(below.join("file")).is_err());
    }
    mode(&below, 0o700);
}

#[test]
fn a_file_that_may_not_be_read_is_not_shown_even_if_it_is_parked() {
    child::succeeds("no permission");
}

// ---- length ---------------------------------------------------------------------------------------

#[test]
fn files_larger_than_the_addresses_there_are_get_an_error() {
    // SAFETY: a NUL-terminated name.
    let memory = unsafe { libc::memfd_create(c"sparse".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: made above, and owned by nothing else.
    let file = unsafe { File::from_raw_fd(memory) };
    let mapper = mapper();
    let mut mapped = 0;
    for len_bytes in [1 << 40, 15 << 40, 64 << 40, 1 << 47, 1 << 62, i64::MAX as u64 - 4095] {
        file.set_len(len_bytes).unwrap();
        file.write_all_at(b"end", len_bytes - 3).unwrap();
        match mapper.map_file(&file, FileAccess::Read, ..) {
            Ok(view) => {
                assert_eq!(view.len_bytes(), len_bytes);
                assert_eq!(
                    view.read_range(len_bytes - 3..len_bytes, |bytes| bytes.to_vec()).unwrap(),
                    b"end"
                );
                mapped += 1;
            }
            Err(error) => {
                assert!(
                    matches!(error, MapError::Memory(_) | MapError::Map { .. }),
                    "{len_bytes}: {error}"
                );
            }
        }
        mapper.forget_all().unwrap();
    }
    assert!((1..6).contains(&mapped), "{mapped} of 6");
}

// ---- file systems that fail or are unmounted
// ------------------------------------------------------

/// A small ext4 on a loop device over a file. Removed when dropped.
struct Disk {
    directory: TempDir,
    device: String,
}

impl Disk {
    fn new() -> Option<Disk> {
        let disk = Disk::try_new();
        if disk.is_none() {
            eprintln!("skipped: mounting an ext4 on a loop device needs privilege and mkfs.ext4");
        }
        disk
    }

    fn try_new() -> Option<Disk> {
        // SAFETY: `geteuid` has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        fs::create_dir(directory.path().join("mounted")).unwrap();
        let made =
            Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal"]).arg(&image).status();
        made.ok().filter(|status| status.success())?;
        let attached = Command::new("losetup").args(["-f", "--show"]).arg(&image).output().ok()?;
        let device = String::from_utf8(attached.stdout).ok()?.trim().to_owned();
        if !attached.status.success() {
            return None;
        }
        let disk = Disk { directory, device };
        let (device, target) = (c_string(disk.device.as_ref()), c_string(&disk.path("")));
        // SAFETY: NUL-terminated strings that outlive the call.
        let mounted = unsafe {
            let none = std::ptr::null();
            libc::mount(device.as_ptr(), target.as_ptr(), c"ext4".as_ptr(), 0, none)
        };
        (mounted == 0).then_some(disk)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("mounted").join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        path
    }

    /// Makes all later reads fail, as if all sectors were bad.
    fn break_down(&self) {
        let image = self.directory.path().join("image");
        OpenOptions::new().write(true).open(image).unwrap().set_len(0).unwrap();
    }

    fn unmount(&self, flags: i32) -> io::Result<()> {
        let target = c_string(&self.path(""));
        // SAFETY: a NUL-terminated string that outlives the call.
        match unsafe { libc::umount2(target.as_ptr(), flags) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn c_string(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.unmount(libc::MNT_DETACH);
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
    }
}

/// Drops the page cache of a file.
fn evict(path: &Path) {
    use std::os::fd::AsFd;
    aquifer_sys::memory::drop_cached(File::open(path).unwrap().as_fd(), 0, 0).unwrap();
}

#[test]
fn a_disk_with_bad_sectors_is_an_error_that_names_the_byte() {
    let Some(disk) = Disk::new() else { return };
    let path = disk.write("file", &[7; 64 * PAGE]);
    let small = disk.write("small", &[7; 100]);
    for limit in [None, Some(0)] {
        let builder = Mapper::builder();
        let mapper = match limit {
            Some(limit) => builder.mappings_limit(limit),
            None => builder,
        };
        let mapper = mapper.build().unwrap();
        if limit.is_none() {
            assert_eq!(content(&map(&mapper, &path).unwrap()), [7; 64 * PAGE]);
            // Mapped pages stay cached.
            mapper.forget_all().unwrap();
            disk.break_down();
            evict(&path);
            evict(&small);
        }
        // Nothing can be mapped, so the file is read at once.
        if limit.is_some() {
            let error = map(&mapper, &small).unwrap_err();
            assert!(
                matches!(error, MapError::Fault { cause: FaultCause::Io(libc::EIO), .. }),
                "{error}"
            );
            continue;
        }
        let view = map(&mapper, &path).unwrap();
        let mut target = [0; 8];
        for error in [
            view.read_range(5 * PAGE as u64..9 * PAGE as u64, |bytes| bytes.to_vec().len())
                .map(drop),
            view.read_exact_at(&mut target, 5 * PAGE as u64),
            view.get::<u64>(5 * PAGE as u64).map(drop),
        ] {
            let error = error.unwrap_err();
            let MapError::Fault { path: named, offset_bytes, cause } = &error else {
                panic!("{error}");
            };
            assert_eq!((&**named, *cause), (&*path, FaultCause::Io(libc::EIO)), "{error}");
            assert!((5 * PAGE as u64..9 * PAGE as u64).contains(offset_bytes), "{error}");
        }
    }
}

#[test]
fn a_file_system_can_be_unmounted_once_its_files_are_forgotten() {
    let Some(disk) = Disk::new() else { return };
    // Unmaps only on request.
    let never = Unmap::Async { threshold_pages: 1 << 30, delay: Duration::from_secs(3600) };
    for round in 0..3 {
        let path = disk.write("file", &[round; 4 * PAGE]);
        let mapper = Mapper::builder()
            .unmap([Unmap::Sync, never][usize::from(round) % 2])
            .resident_budget_bytes(1 << 20)
            .build()
            .unwrap();
        drop(map(&mapper, &path).unwrap());
        let busy = disk.unmount(0).unwrap_err();
        assert_eq!(busy.raw_os_error(), Some(libc::EBUSY), "parked");
        match round {
            0 => mapper.forget(&path).unwrap(),
            1 => mapper.forget_all().unwrap(),
            _ => drop(mapper),
        }
        // A child that another test has just forked may hold copies of descriptors for a moment.
        wait_until(&format!("unmounting in round {round}"), || disk.unmount(0).is_ok());
        let (device, target) = (c_string(disk.device.as_ref()), c_string(&disk.path("")));
        // SAFETY: NUL-terminated strings that outlive the call.
        let mounted = unsafe {
            let none = std::ptr::null();
            libc::mount(device.as_ptr(), target.as_ptr(), c"ext4".as_ptr(), 0, none)
        };
        assert_eq!(mounted, 0);
    }
}

#[test]
fn a_file_system_that_is_detached_keeps_showing_what_is_mapped() {
    let Some(disk) = Disk::new() else { return };
    let (path, parked) = (disk.write("file", &[7; 9 * PAGE]), disk.write("parked", &[8; PAGE]));
    let mapper = mapper();
    let view = map(&mapper, &path).unwrap();
    drop(map(&mapper, &parked).unwrap());
    evict(&path);
    disk.unmount(libc::MNT_DETACH).unwrap();
    assert_eq!(content(&view), [7; 9 * PAGE]);
    assert_eq!(view.file_len_bytes().unwrap(), 9 * PAGE as u64, "it is still open");
    assert_eq!(refusal(&mapper, &parked), Some(libc::ENOENT));
    assert!(mapper.forget(&parked).is_err(), "by its path it cannot be found");
    mapper.forget_all().unwrap();
    drop(view);
}

// ---- signals and threads --------------------------------------------------------------------------

static ALARMS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count_alarm(_: libc::c_int) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_thread_that_is_interrupted_all_the_time_notices_nothing() {
    // SAFETY: a zeroed action without flags: interrupted calls are not restarted.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = count_alarm as *const () as usize;
    // SAFETY: the handler only counts, and no other code in this process uses the signal.
    let set = unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
    assert_eq!(set, 0);
    let directory = tempfile::tempdir().unwrap();
    let mappers =
        [mapper(), Mapper::builder().mapping_cache_bytes(0).mappings_limit(0).build().unwrap()];
    let path = directory.path().join("file");
    fs::write(&path, vec![7; 16 * PAGE]).unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    // SAFETY: returns the thread's own handle.
    let thread = unsafe { libc::pthread_self() };
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                // SAFETY: the thread lives as long as the scope.
                unsafe { libc::pthread_kill(thread, libc::SIGALRM) };
                std::thread::yield_now();
            }
        });
        let first = ALARMS.load(Ordering::Relaxed);
        for step in 0.. {
            for mapper in &mappers {
                let view = map(mapper, &path).unwrap();
                assert_eq!(content(&view), [7; 16 * PAGE]);
                mapper.forget(&path).unwrap();
            }
            let view = map(&mappers[0], &path).unwrap();
            // Populated by system calls, in this thread and in others.
            let all = 0..16 * PAGE as u64;
            view.touch_many(std::slice::from_ref(&all)).unwrap();
            view.prefetch(std::slice::from_ref(&all)).unwrap().wait().unwrap();
            view.advise(Advice::Sequential, all).unwrap();
            assert_eq!(content(&view), [7; 16 * PAGE]);
            file.set_len(PAGE as u64).unwrap();
            let cut = view.read(|bytes| bytes.to_vec().len()).unwrap_err();
            assert!(matches!(cut, MapError::Fault { cause: FaultCause::Truncated, .. }), "{cut}");
            file.write_all_at(&[7; 16 * PAGE], 0).unwrap();
            let alarms = ALARMS.load(Ordering::Relaxed) - first;
            if step >= steps(200) && alarms >= 1000 {
                break;
            }
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

/// A view of a file that was truncated after it was mapped.
fn cut_short(directory: &TempDir, mapper: &Mapper) -> FileView {
    let path = directory.path().join("file");
    fs::write(&path, vec![7; 4 * PAGE]).unwrap();
    let view = map(mapper, &path).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
    view
}

fn block_sigbus() {
    // SAFETY: a set on this stack, filled in by the next call.
    let mut set = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::sigemptyset(&raw mut set) };
    // SAFETY: as above.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGBUS) };
    // SAFETY: changes the mask of this thread only.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
}

/// As documented, the process is killed: a blocked SIGBUS cannot be handled.
fn sigbus_blocked() {
    let (directory, mapper) = (tempfile::tempdir().unwrap(), mapper());
    let view = cut_short(&directory, &mapper);
    drop(directory);
    block_sigbus();
    println!("before the fault");
    let _ = view.read(|bytes| bytes.to_vec());
}

#[test]
fn a_fault_in_a_thread_that_blocks_sigbus_ends_the_process() {
    child::dies("SIGBUS blocked", libc::SIGBUS, "before the fault");
}

fn prepared_thread() {
    let (directory, mapper) = (tempfile::tempdir().unwrap(), mapper());
    let view = cut_short(&directory, &mapper);
    block_sigbus();
    aquifer_vm::prepare_thread().unwrap();
    let error = view.read(|bytes| bytes.to_vec()).unwrap_err();
    assert!(matches!(error, MapError::Fault { cause: FaultCause::Truncated, .. }), "{error}");
}

#[test]
fn a_thread_that_was_prepared_gets_an_error() {
    child::succeeds("prepared thread");
}

/// As documented, a load through a pointer cannot return an error.
fn bare_load() {
    let (directory, mapper) = (tempfile::tempdir().unwrap(), mapper());
    let view = cut_short(&directory, &mapper);
    drop(directory);
    assert!(view.get::<u8>(0).is_err());
    println!("before the load");
    // SAFETY: inside the view; the test expects the fault on the missing page.
    unsafe { view.as_ptr().read_volatile() };
}

#[test]
fn a_bare_load_behind_the_end_of_a_file_ends_the_process() {
    child::dies("bare load", libc::SIGBUS, "before the load");
}

/// More missing pages than a process may have mappings, each followed by one that is not accessed.
fn scattered_looks() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let file = File::create(&path).unwrap();
    let len_bytes = 80_000 * PAGE as u64;
    let mapper = mapper();
    for access in [ViewOptions::read(), PRIVATE, ViewOptions::write()] {
        for is_upwards in [true, false] {
            file.set_len(len_bytes).unwrap();
            let view = mapper.map(&path, access, ..).unwrap();
            file.set_len(3 * PAGE as u64).unwrap();
            let look = |bytes: aquifer_vm::Bytes<'_>, at: usize| u64::from(bytes.get::<u8>(at));
            let sum = view.read(|bytes| -> u64 {
                let places = (0..bytes.len()).step_by(2 * PAGE);
                if is_upwards {
                    places.map(|at| look(bytes, at)).sum()
                } else {
                    places.rev().map(|at| look(bytes, at)).sum()
                }
            });
            let error = sum.unwrap_err();
            let MapError::Fault { offset_bytes, cause: FaultCause::Truncated, .. } = error else {
                panic!("{access:?}: {error}");
            };
            assert!(offset_bytes >= 3 * PAGE as u64, "{access:?}: {offset_bytes}");
            file.set_len(len_bytes).unwrap();
            assert_eq!(view.read(|bytes| look(bytes, 70_000 * PAGE)).unwrap(), 0);
        }
    }
}

#[test]
fn scattered_looks_at_a_file_that_was_cut_short_are_an_error() {
    child::succeeds("scattered looks");
}

/// Only the range that was accessed is checked for the cause.
#[test]
fn a_fault_that_has_passed_does_not_have_the_whole_file_read() {
    use std::os::fd::AsFd;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let file = File::create(&path).unwrap();
    let len_bytes = 16_384 * PAGE as u64;
    for access in [ViewOptions::read(), PRIVATE] {
        file.set_len(len_bytes).unwrap();
        let view = mapper().map(&path, access, ..).unwrap();
        let error = view.read(|bytes| {
            file.set_len(0).unwrap();
            let byte = bytes.get::<u8>(0);
            file.set_len(len_bytes).unwrap();
            byte
        });
        let error = error.unwrap_err();
        assert!(matches!(error, MapError::Fault { .. }), "{error}");
        match aquifer_sys::memory::cachestat(file.as_fd(), 0, 0) {
            Ok(stat) => assert!(stat.cached < 1024, "{} pages", stat.cached),
            Err(error) => eprintln!("skipped: cachestat: {error}"),
        }
    }
}

/// On tmpfs even a load from a hole needs space.
#[test]
fn a_hole_on_a_full_file_system_in_memory_is_named_so() {
    // SAFETY: `geteuid` has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("skipped: mounting a file system needs privilege");
    }
    let directory = tempfile::tempdir().unwrap();
    let target = c_string(directory.path());
    // SAFETY: NUL-terminated strings that outlive the call.
    let mounted = unsafe {
        let (kind, options) = (c"tmpfs".as_ptr(), c"size=64k".as_ptr());
        libc::mount(kind, target.as_ptr(), kind, 0, options.cast())
    };
    if mounted != 0 {
        return eprintln!("skipped: a tmpfs cannot be mounted");
    }
    let (path, filler) = (directory.path().join("file"), directory.path().join("filler"));
    let file = File::create(&path).unwrap();
    file.set_len(8 * PAGE as u64).unwrap();
    let full = fs::write(&filler, [7; 1 << 20]).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    let mapper = mapper();
    for access in [ViewOptions::read(), PRIVATE, ViewOptions::write()] {
        let view = mapper.map(&path, access, ..).unwrap();
        let mut target = [0; 8];
        for error in [
            view.read(|bytes| bytes.get::<u64>(5000)).map(drop),
            view.read_exact_at(&mut target, 5000),
        ] {
            let error = error.unwrap_err();
            assert!(
                matches!(error, MapError::Fault { cause: FaultCause::NoSpace, .. }),
                "{access:?}: {error}"
            );
        }
    }
    drop((mapper, file));
    // SAFETY: a NUL-terminated string that outlives the call.
    unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
}

// ---- fork -----------------------------------------------------------------------------------------

/// Forks while other threads map, read and drop.
fn forks() {
    let directory = tempfile::tempdir().unwrap();
    let mapper = Mapper::builder().resident_budget_bytes(1 << 20).build().unwrap();
    let path = |file: usize| directory.path().join(file.to_string());
    for file in 0..8 {
        fs::write(path(file), vec![file as u8; (file + 1) * PAGE]).unwrap();
    }
    let is_done = AtomicBool::new(false);
    let check = |mapper: &Mapper, file: usize| {
        let view = map(mapper, &path(file)).unwrap();
        assert_eq!(content(&view), vec![file as u8; (file + 1) * PAGE]);
        view
    };
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (is_done, check, mapper) = (&is_done, &check, &mapper);
            scope.spawn(move || {
                let mut views = Vec::new();
                for step in 0.. {
                    if is_done.load(Ordering::Relaxed) {
                        break;
                    }
                    views.push(check(mapper, (step + thread) % 8));
                    if views.len() == 5 {
                        views.clear();
                    }
                    if step % 50 == 0 {
                        mapper.forget_all().unwrap();
                    }
                }
            });
        }
        for _ in 0..steps(40) {
            let view = check(&mapper, 3);
            // SAFETY: the child makes calls that are inert there and uses its own mapper, and
            // leaves by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                aquifer_testkit::child::dies_with_its_parent();
                let refused =
                    [map(&mapper, &path(1)).map(drop), view.read(|_| ()), mapper.forget_all()];
                let all = refused.iter().all(|outcome| matches!(outcome, Err(MapError::Forked)));
                drop(view);
                let own = Mapper::builder().build().unwrap();
                let same = content(&map(&own, &path(2)).unwrap()) == vec![2; 3 * PAGE];
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(!(all && same))) };
            }
            let mut status = 0;
            // SAFETY: waits for the child made above.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0);
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_process_forks_while_its_threads_map() {
    child::succeeds("forks");
}
