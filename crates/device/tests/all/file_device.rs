//! File devices: content against a model, files that change, unsuitable files.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::support::{ListBatch, Planned, check_against_model, seed};
use aquifer_device::{AlignedBuffer, Device, DeviceError, Direct, FileDevice, IoOperation};

/// A sparse file of this length in the temporary directory.
fn file_of(len_bytes: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len_bytes).unwrap();
    file
}

fn writable(path: &Path) -> FileDevice {
    FileDevice::options().writable(true).open(path).unwrap()
}

#[test]
fn behaves_as_a_byte_array_in_every_form() {
    for len_bytes in [4096, 300 << 10, (300 << 10) + 777, 100] {
        for direct in [Direct::Auto, Direct::Never] {
            for io_uring in [true, false] {
                let file = file_of(len_bytes);
                let options = FileDevice::options().writable(true);
                let device = options.direct(direct).io_uring(io_uring).open(file.path()).unwrap();
                check_against_model(&device, seed(len_bytes), 120);
                assert_eq!(file.as_file().metadata().unwrap().len(), len_bytes, "never extended");
            }
        }
    }
}

#[test]
fn direct_io_is_used_where_the_file_system_allows_it() {
    let file = file_of(1 << 20);
    match FileDevice::options().direct(Direct::Require).open(file.path()) {
        Ok(device) => {
            assert!(device.is_direct());
            assert!(device.access_path().starts_with("direct, "), "{}", device.access_path());
            assert!(device.alignment_bytes() >= 512 && device.alignment_bytes().is_power_of_two());
            assert!(FileDevice::open(file.path()).unwrap().is_direct());
        }
        Err(error) => eprintln!("skipped: {error}"),
    }
}

#[test]
fn asking_for_buffered_access_gives_it() {
    let file = file_of(8192);
    let device = FileDevice::options().direct(Direct::Never).open(file.path()).unwrap();
    assert!(!device.is_direct());
    assert_eq!(device.alignment_bytes(), 1);
    assert!(device.access_path().starts_with("buffered (asked for), "));
}

#[test]
fn a_file_system_in_memory_is_buffered_and_says_so() {
    let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
        eprintln!("skipped: /dev/shm is not writable");
        return;
    };
    file.as_file().set_len(10_000).unwrap();
    let device = writable(file.path());
    let path = device.access_path();
    assert!(path.starts_with("buffered (the file system keeps its files in memory), "), "{path}");
    check_against_model(&device, seed(1), 100);
    let error = FileDevice::options().direct(Direct::Require).open(file.path()).unwrap_err();
    assert!(matches!(error, DeviceError::Unsuitable { .. }), "{error}");
}

#[test]
fn a_truncated_file_gives_short_reads_and_typed_errors() {
    for direct in [Direct::Auto, Direct::Never] {
        let file = file_of(64 << 10);
        let options = FileDevice::options().writable(true).direct(direct);
        let device = options.open(file.path()).unwrap();
        let mut buffer = AlignedBuffer::new(8192, 4096);
        assert_eq!(device.read_at(56 << 10, &mut buffer).unwrap(), 8192);

        file.as_file().set_len((16 << 10) + 100).unwrap();
        assert_eq!(device.len_bytes().unwrap(), (16 << 10) + 100);
        assert_eq!(device.read_at(16 << 10, &mut buffer).unwrap(), 100);
        assert_eq!(device.read_at(12 << 10, &mut buffer).unwrap(), 4096 + 100);
        let beyond = device.read_at(20 << 10, &mut buffer).unwrap_err();
        assert!(
            matches!(beyond, DeviceError::OutOfBounds { device_bytes: 16_484, .. }),
            "{beyond}"
        );
        for offset_bytes in [12 << 10, 16 << 10, 56 << 10] {
            let refused = device.write_at(offset_bytes, &buffer).unwrap_err();
            assert!(matches!(refused, DeviceError::OutOfBounds { .. }), "{refused}");
        }
        assert_eq!(file.as_file().metadata().unwrap().len(), (16 << 10) + 100);

        file.as_file().set_len(16 << 10).unwrap();
        assert_eq!(device.read_at(16 << 10, &mut buffer).unwrap(), 0, "exactly at the end");
    }
}

#[test]
fn a_growing_file_is_seen() {
    let file = file_of(0);
    let device = writable(file.path());
    let mut buffer = AlignedBuffer::new(4096, 4096);
    assert_eq!(device.len_bytes().unwrap(), 0);
    assert_eq!(device.read_at(0, &mut buffer).unwrap(), 0);
    assert!(matches!(device.write_at(0, &buffer), Err(DeviceError::OutOfBounds { .. })));
    device.sync().unwrap();

    file.as_file().write_all_at(&[5; 6000], 0).unwrap();
    assert_eq!(device.len_bytes().unwrap(), 6000);
    assert_eq!(device.read_at(0, &mut buffer).unwrap(), 4096);
    assert!(buffer.iter().all(|byte| *byte == 5));
    buffer.fill(6);
    device.write_at(0, &buffer).unwrap();
    device.write_at(4096, &buffer[..6000 - 4096]).unwrap();
    assert_eq!(std::fs::read(file.path()).unwrap(), [6; 6000]);
}

/// A caller that knows an earlier length (a mapping keeps the length it was made with) can still
/// transfer up to it.
#[test]
fn transfers_end_at_a_length_that_the_file_had_earlier() {
    for direct in [Direct::Auto, Direct::Never] {
        let file = file_of(10_000);
        let device = FileDevice::options().writable(true).direct(direct).open(file.path()).unwrap();
        file.as_file().write_all_at(&[5; 5000], 10_000).unwrap();
        let mut buffer = AlignedBuffer::new(12_288, 4096);
        buffer.fill(6);
        // First only the part after the last whole unit, then more than that.
        device.write_at(9728, &buffer[..10_000 - 9728]).unwrap();
        device.write_at(0, &buffer[..10_000]).unwrap();
        let mut expected = vec![6; 10_000];
        expected.resize(15_000, 5);
        assert!(std::fs::read(file.path()).unwrap() == expected, "{}", device.access_path());

        buffer.fill(0);
        assert_eq!(device.read_at(0, &mut buffer[..10_000]).unwrap(), 10_000);
        assert!(buffer[..10_000] == expected[..10_000], "{}", device.access_path());
        assert!(buffer[10_000..].iter().all(|byte| *byte == 0), "{}", device.access_path());

        let mut tail = AlignedBuffer::new(10_000 - 8192, 4096);
        tail.fill(8);
        let operation = IoOperation::Write;
        let planned = Planned { operation, offset_bytes: 8192, buffer: tail, result: None };
        let mut batch = ListBatch::new(vec![planned], 1);
        device.run(&mut batch, 4);
        let result = batch.planned[0].result.take().expect("the batch was run");
        assert_eq!(result.unwrap(), 10_000 - 8192, "{}", device.access_path());
        expected[8192..10_000].fill(8);
        assert!(std::fs::read(file.path()).unwrap() == expected, "{}", device.access_path());
    }
}

#[test]
fn offsets_beyond_what_the_kernel_counts_are_out_of_bounds() {
    let file = file_of(4096);
    let device = writable(file.path());
    let mut buffer = AlignedBuffer::new(4096, 4096);
    for offset_bytes in [!4095, 1 << 63, (1 << 63) - 4096] {
        let read = device.read_at(offset_bytes, &mut buffer).unwrap_err();
        assert!(matches!(read, DeviceError::OutOfBounds { device_bytes: 4096, .. }), "{read}");
        let write = device.write_at(offset_bytes, &buffer).unwrap_err();
        assert!(matches!(write, DeviceError::OutOfBounds { .. }), "{write}");
    }
}

#[test]
fn what_is_not_aligned_is_refused_by_a_direct_device() {
    let file = file_of(16 << 10);
    let Ok(device) = FileDevice::options().direct(Direct::Require).writable(true).open(file.path())
    else {
        eprintln!("skipped: the temporary directory's file system refuses O_DIRECT");
        return;
    };
    let unit_bytes = device.alignment_bytes();
    let mut buffer = AlignedBuffer::new(4 * unit_bytes, 4096);
    let misaligned = |result: Result<usize, DeviceError>| matches!(result, Err(DeviceError::Misaligned { alignment_bytes, .. }) if alignment_bytes == unit_bytes);
    assert!(misaligned(device.read_at(1, &mut buffer[..unit_bytes])), "offset");
    assert!(misaligned(device.read_at(0, &mut buffer[1..=unit_bytes])), "memory");
    assert!(misaligned(device.write_at(7, &buffer[..unit_bytes]).map(|()| 7)), "of a write");
    assert_eq!(device.read_at(0, &mut buffer[..0]).unwrap(), 0);
}

#[test]
fn a_device_opened_for_reading_refuses_writes() {
    let file = file_of(4096);
    let device = FileDevice::open(file.path()).unwrap();
    assert!(!device.is_writable());
    let refused = device.write_at(0, &AlignedBuffer::new(4096, 4096)).unwrap_err();
    assert!(matches!(refused, DeviceError::ReadOnly), "{refused}");
}

#[test]
fn what_is_no_storage_is_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let paths: [(PathBuf, &str); 5] = [
        (directory.path().into(), "directory"),
        (pipe, "pipe"),
        (socket, "socket"),
        ("/dev/null".into(), "character device"),
        ("/proc/self/status".into(), "proc"),
    ];
    for (path, word) in paths {
        let error = FileDevice::open(&path).unwrap_err();
        let DeviceError::Unsuitable { path: named, reason } = &error else { panic!("{error}") };
        assert_eq!(named, path.to_str().unwrap());
        assert!(reason.contains(word), "{reason}");
    }
}

#[test]
fn what_cannot_be_opened_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let missing = FileDevice::open(directory.path().join("missing")).unwrap_err();
    assert!(
        matches!(&missing, DeviceError::Open { source, .. } if source.raw_os_error() == Some(libc::ENOENT))
    );

    let path = directory.path().join("unreadable");
    std::fs::write(&path, [0; 4096]).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o0)).unwrap();
    if File::open(&path).is_ok() {
        eprintln!("skipped: this user may open any file");
        return;
    }
    let unreadable = FileDevice::open(&path).unwrap_err();
    assert!(
        matches!(&unreadable, DeviceError::Open { source, .. } if source.raw_os_error() == Some(libc::EACCES))
    );
}

#[test]
fn regular_files_offer_their_page_cache() {
    use std::os::fd::AsRawFd;
    let file = file_of(8192);
    for direct in [Direct::Auto, Direct::Never] {
        let device = FileDevice::options().direct(direct).open(file.path()).unwrap();
        let descriptor = device.page_cache_file().expect("a regular file").as_raw_fd();
        // SAFETY: no memory is involved.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
        assert_eq!(flags & libc::O_DIRECT, 0, "must be buffered");
    }
}

#[test]
fn buffered_and_direct_writes_of_one_device_are_coherent() {
    let file = file_of(4096 + 100);
    let device = writable(file.path());
    let mut buffer = AlignedBuffer::new(8192, 4096);
    for value in 1..=20u8 {
        buffer[..4196].fill(value);
        device.write_at(0, &buffer[..4196]).unwrap();
        buffer.fill(0);
        assert_eq!(device.read_at(0, &mut buffer).unwrap(), 4196);
        assert!(buffer[..4196].iter().all(|byte| *byte == value));
    }
    device.sync().unwrap();
    assert_eq!(std::fs::read(file.path()).unwrap(), [20; 4196]);
}

/// A loop device over a file, detached when dropped.
struct LoopDevice(String);

impl LoopDevice {
    fn attach(file: &Path) -> Option<Self> {
        let output =
            std::process::Command::new("losetup").args(["-f", "--show"]).arg(file).output();
        let output = output.ok().filter(|output| output.status.success())?;
        Some(LoopDevice(String::from_utf8(output.stdout).ok()?.trim().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["-d", &self.0]).status();
    }
}

#[test]
fn a_block_device_works_as_a_file_does() {
    let file = file_of(300 << 10);
    let Some(block) = LoopDevice::attach(file.path()) else {
        eprintln!("skipped: cannot attach a loop device");
        return;
    };
    for io_uring in [true, false] {
        let options = FileDevice::options().writable(true).io_uring(io_uring);
        let device = options.open(&block.0).unwrap();
        assert_eq!(device.len_bytes().unwrap(), 300 << 10);
        assert!(device.is_direct(), "{}", device.access_path());
        assert!(device.page_cache_file().is_none());
        check_against_model(&device, seed(9), 60);
        let end = device.write_at(300 << 10, &AlignedBuffer::new(4096, 4096)).unwrap_err();
        assert!(matches!(end, DeviceError::OutOfBounds { .. }), "{end}");
    }
}

/// A small tmpfs, unmounted when dropped.
struct SmallFileSystem(tempfile::TempDir);

impl SmallFileSystem {
    fn mount(len_bytes: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let target = std::ffi::CString::new(directory.path().to_str().unwrap()).unwrap();
        let options = std::ffi::CString::new(format!("size={len_bytes}")).unwrap();
        // SAFETY: all arguments are NUL-terminated strings that outlive the call.
        let result = unsafe {
            libc::mount(
                c"tmpfs".as_ptr(),
                target.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                options.as_ptr().cast(),
            )
        };
        (result == 0).then_some(SmallFileSystem(directory))
    }
}

impl Drop for SmallFileSystem {
    fn drop(&mut self) {
        let target = std::ffi::CString::new(self.0.path().to_str().unwrap()).unwrap();
        // SAFETY: a NUL-terminated string that outlives the call.
        unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn a_full_file_system_is_named_and_a_write_can_be_repeated() {
    let Some(small) = SmallFileSystem::mount(64 << 10) else {
        eprintln!("skipped: cannot mount a small tmpfs without privilege");
        return;
    };
    let ballast = small.0.path().join("ballast");
    std::fs::write(&ballast, vec![0; 60 << 10]).unwrap();
    let path = small.0.path().join("sparse");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let device = writable(&path);
    let page = AlignedBuffer::new(16 << 10, 4096);
    let full = device.write_at(128 << 10, &page).unwrap_err();
    let DeviceError::Io { offset_bytes, source, .. } = &full else { panic!("{full}") };
    assert_eq!(source.raw_os_error(), Some(libc::ENOSPC));
    assert!((128 << 10..144 << 10).contains(offset_bytes), "names where it failed: {offset_bytes}");
    std::fs::remove_file(&ballast).unwrap();
    device.write_at(128 << 10, &page).unwrap();
    device.sync().unwrap();

    let mapped = aquifer_device::DaxDevice::options().writable(true).open(&path).unwrap_err();
    assert!(
        matches!(&mapped, DeviceError::Open { source, .. } if source.raw_os_error() == Some(libc::ENOSPC)),
        "a mapping of more than there is must not be had: {mapped}"
    );
}

/// Makes this thread's first `fdatasync` calls fail with errnos, and lets the kernel perform the
/// later ones: with a seccomp filter that notifies another thread. `None` where the system has no
/// such filters.
fn interrupt_syncs(errnos: Vec<i32>) -> Option<std::thread::JoinHandle<usize>> {
    const NOTIFY: u32 = 0x7fc0_0000;
    const ALLOW: u32 = 0x7fff_0000;
    const NEW_LISTENER: libc::c_ulong = 1 << 3;
    let statement = |code: u32, k: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_fdatasync as u32, 0, 1),
        statement(libc::BPF_RET | libc::BPF_K, NOTIFY, 0, 0),
        statement(libc::BPF_RET | libc::BPF_K, ALLOW, 0, 0),
    ];
    // Started first: a thread inherits its creator's filter.
    let (give, given) = std::sync::mpsc::channel();
    let answering = std::thread::spawn(move || answer_syncs(given.recv().ok(), errnos));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: integers only.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: a valid program that outlives the call; it concerns this thread only.
    let listener = unsafe {
        let program = &raw const program;
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, NEW_LISTENER, program)
    };
    if listener < 0 {
        return None;
    }
    // SAFETY: just made, so nothing else owns the descriptor.
    give.send(unsafe { OwnedFd::from_raw_fd(listener as i32) }).unwrap();
    Some(answering)
}

/// Answers until the thread with the filter has ended; returns the number of requests.
fn answer_syncs(listener: Option<OwnedFd>, errnos: Vec<i32>) -> usize {
    const LISTEN: libc::c_ulong = 0xc050_2100; // SECCOMP_IOCTL_NOTIF_RECV
    const ANSWER: libc::c_ulong = 0xc018_2101; // SECCOMP_IOCTL_NOTIF_SEND
    const GO_ON: u32 = 1;
    let Some(listener) = listener else { return 0 };
    let mut errnos = errnos.into_iter();
    let mut asked = 0;
    loop {
        let mut ready = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry, which outlives the call.
        let found = unsafe { libc::poll(&raw mut ready, 1, -1) };
        if found == 1 && ready.revents & libc::POLLIN == 0 {
            return asked;
        }
        // SAFETY: all-zero is valid, and what the kernel requires.
        let mut notice: libc::seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the request writes one `seccomp_notif`.
        if unsafe { libc::ioctl(listener.as_raw_fd(), LISTEN, &raw mut notice) } != 0 {
            continue;
        }
        asked += 1;
        let errno = errnos.next();
        let answer = libc::seccomp_notif_resp {
            id: notice.id,
            val: 0,
            error: errno.map_or(0, |errno| -errno),
            flags: if errno.is_some() { 0 } else { GO_ON },
        };
        // SAFETY: the request reads one `seccomp_notif_resp`.
        unsafe { libc::ioctl(listener.as_raw_fd(), ANSWER, &raw const answer) };
    }
}

#[test]
fn a_sync_that_a_signal_interrupts_is_made_again() {
    let asked = std::thread::spawn(|| {
        let file = file_of(4096);
        let device = writable(file.path());
        device.write_at(0, &AlignedBuffer::new(4096, 4096)).unwrap();
        let answering = interrupt_syncs(vec![libc::EINTR, libc::EINTR])?;
        device.sync().unwrap();
        device.sync().unwrap();
        Some(answering)
    });
    // The thread with the filter has ended, which also ends the answering thread.
    let Some(answering) = asked.join().unwrap() else {
        eprintln!("skipped: the system has no filters of system calls that ask another thread");
        return;
    };
    assert_eq!(answering.join().unwrap(), 4, "two interrupted, one made again, one more");
}

/// In a separate process, which closes descriptors and raises its limit.
#[test]
fn a_device_writes_to_no_file_that_has_its_number() {
    let test = "file_device::alone_the_numbers_of_a_device_are_given_to_other_files";
    let arguments = ["--exact", test, "--ignored", "--nocapture"];
    let program = std::env::current_exe().unwrap();
    let output = std::process::Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"));
}

#[test]
#[ignore = "run by a_device_writes_to_no_file_that_has_its_number, as it closes descriptors"]
fn alone_the_numbers_of_a_device_are_given_to_other_files() {
    // SAFETY: zeros are a value of the structure, and the calls only read and write it.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
    let file = file_of(1 << 20);
    let open = |direct| FileDevice::options().writable(true).direct(direct).open(file.path());
    let devices = [Direct::Auto, Direct::Never].map(|direct| open(direct).unwrap());
    let page = AlignedBuffer::new(4096, 4096);
    devices[0].write_at(0, &page).unwrap();
    let own = file_of(1 << 20);
    own.as_file().write_all_at(&[3; 4096], 0).unwrap();
    let link = |number: &i32| std::fs::read_link(format!("/proc/self/fd/{number}"));
    let numbers = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers =
        numbers.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap());
    let is_its = |number: &i32| {
        *number != file.as_file().as_raw_fd()
            && link(number).is_ok_and(|target| target == file.path())
    };
    let numbers: Vec<i32> = numbers.filter(is_its).collect();
    assert!(!numbers.is_empty());
    for &number in &numbers {
        // SAFETY: replaces what the device uses, on purpose.
        assert_eq!(unsafe { libc::dup2(own.as_file().as_raw_fd(), number) }, number);
    }
    let before = aquifer_sys::clock::coarse_ns();
    while aquifer_sys::clock::coarse_ns() == before {
        std::thread::yield_now();
    }
    for device in &devices {
        let error = device.write_at(0, &page).unwrap_err();
        let DeviceError::Io { source, .. } = error else { panic!("{error}") };
        assert_eq!(source.raw_os_error(), Some(libc::EBADF));
        assert!(device.sync().is_err());
    }
    drop(devices);
    let mut bytes = [7; 4096];
    own.as_file().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes, [3; 4096], "what the program wrote");
    // SAFETY: changes no memory.
    let is_open = |number: &i32| unsafe { libc::fcntl(*number, libc::F_GETFD) } >= 0;
    assert!(numbers.iter().all(is_open), "the device closed them");
}
