//! What a stray store of a process that may write can reach, in each mode of write windows.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc;

use aquifer_crashkit::unguarded::{UnguardedMedia, UnguardedPool};
use aquifer_pool::media::WriteWindows::{self, Best, Calls, Keys, None as Unguarded};
use aquifer_pool::media::{OpenError, PersistenceDomain};
use aquifer_pool::{Pool, PoolError, PoolOptions};
use aquifer_testkit::child;
use aquifer_vm::WindowKey;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("stray, not guarded", || stray(Unguarded)),
    ("stray, calls", || stray(Calls)),
    ("stray, keys", || stray(Keys)),
    ("stray, page cache", stray_on_a_disk),
    ("stray into what is guarded", stray_into_what_is_guarded),
    ("stray of another thread", stray_of_another_thread),
    ("stray of a signal handler", stray_of_a_signal_handler),
    ("stray of a thread born in a window", stray_of_a_thread_born_in_a_window),
    ("through a window", through_a_window),
];

/// A pool in memory, in its own directory.
struct Scene {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Scene {
    fn new(directory: tempfile::TempDir) -> Scene {
        let path = directory.path().join("data.pool");
        Pool::create(&path, 4 << 20).unwrap();
        Scene { path, _directory: directory }
    }

    fn in_memory() -> Scene {
        Scene::new(tempfile::tempdir_in("/dev/shm").unwrap())
    }

    fn open(&self, write_windows: WriteWindows) -> Pool {
        options(write_windows).open(&self.path).unwrap()
    }
}

/// Exclusive: a process that will die leaves no shared memory.
fn options(write_windows: WriteWindows) -> PoolOptions {
    Pool::options().write_windows(write_windows).exclusive(true)
}

/// The last page of the pool, which nothing uses.
fn last_page(pool: &Pool) -> u64 {
    pool.layout().len_bytes() - 4096
}

/// The address at which a file is mapped with these permissions.
fn mapped(path: &Path, permissions: &str) -> Option<usize> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        line.ends_with(path.to_str().unwrap())
            && line.split_whitespace().nth(1) == Some(permissions)
    })?;
    Some(usize::from_str_radix(line.split('-').next()?, 16).unwrap())
}

fn store(address: usize) {
    // SAFETY: the address is mapped; the test is whether the kernel allows the store.
    unsafe { (address as *mut u64).write_volatile(u64::MAX) };
}

/// The current word of the file at an offset.
fn in_file(path: &Path, offset_bytes: u64) -> u64 {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; 8];
    std::fs::File::open(path).unwrap().read_exact_at(&mut bytes, offset_bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

fn stray(windows: WriteWindows) {
    let scene = Scene::in_memory();
    let pool = scene.open(windows);
    assert_eq!(pool.media().write_windows(), windows);
    pool.store_unguarded(last_page(&pool), &[7; 8]).unwrap();
    let permissions = if windows == Unguarded { "rw-s" } else { "r--s" };
    let linear = mapped(&scene.path, permissions).unwrap();
    // A role that will die leaves nothing behind.
    let at = last_page(&pool);
    std::fs::remove_dir_all(scene.path.parent().unwrap()).unwrap();
    if windows != Unguarded {
        println!("storing");
    }
    store(linear + at as usize);
    let mut bytes = [0; 8];
    pool.load(at, &mut bytes).unwrap();
    assert_eq!(bytes, [0xff; 8], "it is in the pool");
}

fn stray_on_a_disk() {
    let scene = Scene::new(tempfile::tempdir().unwrap());
    let options = options(Best).domain(PersistenceDomain::PageCache);
    let pool = options.open(&scene.path).unwrap();
    assert_eq!(pool.media().write_windows(), Calls);
    pool.load(last_page(&pool), &mut [0; 8]).unwrap();
    let linear = mapped(&scene.path, "r--s").unwrap();
    std::fs::remove_dir_all(scene.path.parent().unwrap()).unwrap();
    println!("storing");
    store(linear);
}

/// A pool guarded by keys, removed from its directory, and the address of its guarded mapping;
/// `None` if there are no keys.
fn guarded() -> Option<(Pool, usize)> {
    if let Err(error) = WindowKey::of_process() {
        println!("skipped: no protection keys here ({error})");
        return None;
    }
    let scene = Scene::in_memory();
    let pool = scene.open(Keys);
    let address = mapped(&scene.path, "rw-s").unwrap();
    std::fs::remove_dir_all(scene.path.parent().unwrap()).unwrap();
    let at = last_page(&pool);
    Some((pool, address + at as usize))
}

fn stray_into_what_is_guarded() {
    let Some((pool, address)) = guarded() else { return };
    // Its own windows are closed again.
    pool.store_unguarded(last_page(&pool), &[7; 8]).unwrap();
    println!("storing");
    store(address);
}

fn stray_of_another_thread() {
    let (send, receive) = mpsc::channel();
    let another = std::thread::spawn(move || {
        if let Ok(address) = receive.recv() {
            println!("storing");
            store(address);
        }
    });
    let Some((pool, address)) = guarded() else { return };
    let _window = pool.media().write_window().unwrap();
    store(address);
    send.send(address).unwrap();
    let _ = another.join();
}

static TARGET: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn stores(_signal: libc::c_int) {
    store(TARGET.load(Ordering::Relaxed) as usize);
}

fn stray_of_a_signal_handler() {
    let Some((pool, address)) = guarded() else { return };
    TARGET.store(address as *mut u64, Ordering::Relaxed);
    // SAFETY: the handler only makes one store, which is async-signal-safe.
    unsafe { libc::signal(libc::SIGUSR1, stores as *const () as libc::sighandler_t) };
    let _window = pool.media().write_window().unwrap();
    store(address);
    println!("storing");
    // SAFETY: a signal to this thread, which has a handler.
    unsafe { libc::raise(libc::SIGUSR1) };
}

fn stray_of_a_thread_born_in_a_window() {
    let Some((pool, address)) = guarded() else { return };
    let window = pool.media().write_window().unwrap();
    let born = std::thread::spawn(move || {
        store(address);
        // From here on the pool's own windows belong to this thread.
        pool.store_unguarded(last_page(&pool), &[7; 8]).unwrap();
        println!("storing");
        store(address);
    });
    drop(window);
    let _ = born.join();
}

fn through_a_window() {
    let (send, receive) = mpsc::channel::<Pool>();
    let earlier = std::thread::spawn(move || {
        let Ok(pool) = receive.recv() else { return };
        let at = last_page(&pool);
        let mut bytes = [0; 8];
        pool.load(at, &mut bytes).unwrap();
        assert_eq!(bytes, [0xff; 8], "a thread from before the key reads");
        pool.store_unguarded(at, &[9; 8]).unwrap();
    });
    let Some((pool, address)) = guarded() else { return };
    let window = pool.media().write_window().unwrap();
    store(address);
    pool.store_unguarded(last_page(&pool) + 8, &[8; 8]).unwrap();
    store(address);
    drop(window);
    send.send(pool.clone()).unwrap();
    earlier.join().unwrap();
    let mut bytes = [0; 16];
    pool.load(last_page(&pool), &mut bytes).unwrap();
    assert_eq!(bytes[..8], [9; 8]);
    assert_eq!(bytes[8..], [8; 8]);
}

fn has_keys() -> bool {
    let found = WindowKey::of_process();
    if let Err(error) = &found {
        eprintln!("skipped: no protection keys here ({error})");
    }
    found.is_ok()
}

fn has_memory_directory() -> bool {
    let usable = tempfile::tempdir_in("/dev/shm").is_ok();
    if !usable {
        eprintln!("skipped: /dev/shm is not writable");
    }
    usable
}

#[test]
fn without_windows_a_stray_store_is_a_write() {
    if has_memory_directory() {
        child::succeeds("stray, not guarded");
    }
}

#[test]
fn where_calls_write_a_stray_store_ends_the_process() {
    if has_memory_directory() {
        child::dies("stray, calls", libc::SIGSEGV, "storing");
    }
    child::dies("stray, page cache", libc::SIGSEGV, "storing");
}

#[test]
fn where_keys_guard_stray_stores_end_the_process() {
    if !has_memory_directory() || !has_keys() {
        return;
    }
    for role in [
        "stray, keys",
        "stray into what is guarded",
        "stray of another thread",
        "stray of a signal handler",
        "stray of a thread born in a window",
    ] {
        child::dies(role, libc::SIGSEGV, "storing");
    }
}

#[test]
fn through_an_open_window_stores_arrive() {
    if has_memory_directory() && has_keys() {
        child::succeeds("through a window");
    }
}

/// A guard that is requested and not available is an error; the best one is always available.
#[test]
fn windows_that_cannot_be_had_are_refused() {
    if !has_memory_directory() {
        return;
    }
    let scene = Scene::in_memory();
    let best = scene.open(Best).media().write_windows();
    match options(Keys).open(&scene.path) {
        Ok(pool) => assert_eq!((best, pool.media().write_windows()), (Keys, Keys)),
        Err(error) => {
            let PoolError::NotOpened(OpenError::NoWriteWindows { windows, .. }) = error else {
                panic!("{error}");
            };
            assert_eq!((best, windows), (Calls, Keys));
        }
    }
    let reading = options(Keys).read_only(true).exclusive(false);
    let pool = reading.open(&scene.path).unwrap();
    assert_eq!(pool.media().write_windows(), Unguarded, "there is nothing to guard");
}

/// Guarded mappings grow with the media, also in other handles.
#[test]
fn guarded_media_grow() {
    use aquifer_pool::media::CreateOptions;
    if !has_memory_directory() {
        return;
    }
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    for windows in [Best, Calls] {
        let path = directory.path().join(format!("{windows}"));
        let options = CreateOptions::new().write_windows(windows);
        let media = options.create(&path, 1 << 20, &mut |_, _| {}).unwrap();
        let other = aquifer_pool::media::OpenOptions::new().writable(true).write_windows(windows);
        let other = other.open(&path).unwrap();
        // Inside of the address reservation, and beyond it.
        for len_bytes in [(1 << 20) + 4096, 8 << 20] {
            media.grow(len_bytes).unwrap();
            for media in [&media, &other] {
                media.store_unguarded(len_bytes - 8, &[5; 8]).unwrap();
                media.write_durable_unguarded(len_bytes - 16, &[6; 8]).unwrap();
            }
            assert_eq!(in_file(&path, len_bytes - 8), 0x0505_0505_0505_0505);
            assert_eq!(in_file(&path, len_bytes - 16), 0x0606_0606_0606_0606);
        }
        // A handle can find new bytes without writing.
        media.grow(16 << 20).unwrap();
        other.extend_mapping();
        other.store_unguarded((16 << 20) - 8, &[7; 8]).unwrap();
        assert_eq!(in_file(&path, (16 << 20) - 8), 0x0707_0707_0707_0707);
        assert!(media.store_unguarded(16 << 20, &[1]).is_err(), "behind the end");
    }
}
