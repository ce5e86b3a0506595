//! Batches on both engines: the same semantics, whichever the kernel grants.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::support::{ListBatch, Planned, Random};
use aquifer_device::{
    AlignedBuffer, Batch, Counting, Device, DeviceError, FileDevice, IoOperation, Request,
};

const BLOCK_BYTES: usize = 4096;

/// A file of `blocks` blocks, each filled with its number.
fn numbered_file(blocks: usize) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..blocks).flat_map(|block| vec![block as u8; BLOCK_BYTES]).collect();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

fn open(path: &Path, io_uring: bool) -> FileDevice {
    FileDevice::options().writable(true).io_uring(io_uring).open(path).unwrap()
}

fn check_numbered(batch: &ListBatch) {
    for (block, planned) in batch.planned.iter().enumerate() {
        let moved = planned.result.as_ref().expect("completed").as_ref().expect("no error");
        assert_eq!(*moved, BLOCK_BYTES);
        assert!(planned.buffer.iter().all(|byte| *byte == block as u8), "block {block}");
    }
}

#[test]
fn a_batch_reaches_its_depth_and_never_exceeds_it() {
    let file = numbered_file(200);
    for io_uring in [true, false] {
        for depth in [1, 2, 7, 32] {
            let device = Counting::new(open(file.path(), io_uring));
            let mut batch = ListBatch::reads(200, BLOCK_BYTES);
            device.run(&mut batch, depth);
            check_numbered(&batch);
            let counts = device.counters().snapshot();
            assert_eq!((counts.reads, counts.batches), (200, 1));
            assert_eq!(counts.most_in_flight, depth as u64, "{}", device.access_path());
        }
    }
}

/// A batch that works for long on each completion.
struct Slow(ListBatch);

// SAFETY: as for `ListBatch`.
unsafe impl Batch for Slow {
    fn next(&mut self) -> Option<Request> {
        self.0.next()
    }

    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>) {
        let started = Instant::now();
        while started.elapsed() < Duration::from_micros(100) {}
        self.0.complete(tag, result);
    }
}

#[test]
fn a_batch_that_works_for_long_never_exceeds_its_depth() {
    let file = numbered_file(200);
    for io_uring in [true, false] {
        for depth in [1, 7, 32] {
            let device = Counting::new(open(file.path(), io_uring));
            let mut batch = Slow(ListBatch::reads(200, BLOCK_BYTES));
            device.run(&mut batch, depth);
            check_numbered(&batch.0);
            let counts = device.counters().snapshot();
            assert_eq!(counts.most_in_flight, depth as u64, "{}", device.access_path());
        }
    }
}

#[test]
fn a_batch_that_holds_back_is_asked_again() {
    let file = numbered_file(60);
    for io_uring in [true, false] {
        for window in [1, 3] {
            let mut batch = ListBatch::reads(60, BLOCK_BYTES);
            batch.window = window;
            open(file.path(), io_uring).run(&mut batch, 32);
            check_numbered(&batch);
        }
    }
}

#[test]
fn an_empty_batch_and_a_depth_of_zero_are_fine() {
    let file = numbered_file(3);
    for io_uring in [true, false] {
        let device = open(file.path(), io_uring);
        device.run(&mut ListBatch::new(Vec::new(), 8), 8);
        let mut batch = ListBatch::reads(3, BLOCK_BYTES);
        device.run(&mut batch, 0);
        check_numbered(&batch);
    }
}

#[test]
fn one_bad_transfer_does_not_harm_the_others() {
    let file = numbered_file(40);
    for io_uring in [true, false] {
        let device = open(file.path(), io_uring);
        let mut batch = ListBatch::reads(40, BLOCK_BYTES);
        batch.planned[5].offset_bytes = 1 << 40;
        batch.planned[6].operation = IoOperation::Write;
        batch.planned[6].offset_bytes = 40 * BLOCK_BYTES as u64;
        batch.planned[7].buffer = AlignedBuffer::new(0, 4096);
        batch.planned[8].offset_bytes = 40 * BLOCK_BYTES as u64;
        device.run(&mut batch, 8);
        let result = |at: usize| batch.planned[at].result.as_ref().unwrap();
        assert!(matches!(result(5), Err(DeviceError::OutOfBounds { .. })));
        assert!(matches!(result(6), Err(DeviceError::OutOfBounds { .. })));
        assert!(matches!(result(7), Ok(0)));
        assert!(matches!(result(8), Ok(0)), "a read at the very end");
        assert!((9..40).all(|at| matches!(result(at), Ok(BLOCK_BYTES))));
    }
}

#[test]
fn errors_of_the_kernel_come_back_with_their_place() {
    let file = numbered_file(8);
    for io_uring in [true, false] {
        let device = open(file.path(), io_uring);
        let mut batch = ListBatch::reads(8, BLOCK_BYTES);
        // Nothing is mapped there, so the kernel answers EFAULT.
        let mut unmapped = UnmappedRead { inner: &mut batch, done: false };
        device.run(&mut unmapped, 4);
        let result = batch.planned[3].result.as_ref().unwrap();
        let Err(DeviceError::Io { offset_bytes, operation, source, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(source.raw_os_error(), Some(libc::EFAULT));
        assert_eq!((*offset_bytes, *operation), (3 * BLOCK_BYTES as u64, IoOperation::Read));
    }
}

/// Replaces the memory of the third transfer with an unmapped address.
struct UnmappedRead<'batch> {
    inner: &'batch mut ListBatch,
    done: bool,
}

// SAFETY: as the inner batch, except for one transfer to an address the kernel refuses.
unsafe impl aquifer_device::Batch for UnmappedRead<'_> {
    fn next(&mut self) -> Option<aquifer_device::Request> {
        let mut request = self.inner.next()?;
        if request.tag == 3 && !self.done {
            self.done = true;
            request.memory = std::ptr::without_provenance_mut(4096);
        }
        Some(request)
    }

    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>) {
        self.inner.complete(tag, result);
    }
}

#[test]
fn a_panicking_batch_is_joined_and_harms_no_other_caller() {
    let file = numbered_file(100);
    for io_uring in [true, false] {
        let device = open(file.path(), io_uring);
        for at in [1, 5, 60] {
            let mut batch = ListBatch::reads(100, BLOCK_BYTES);
            batch.panic_at_completion = Some(at);
            let outcome = catch_unwind(AssertUnwindSafe(|| device.run(&mut batch, 16)));
            assert!(outcome.is_err());
            drop(batch);
            let mut batch = ListBatch::reads(100, BLOCK_BYTES);
            device.run(&mut batch, 16);
            check_numbered(&batch);
        }
    }
}

#[test]
fn a_panic_leaves_no_transfer_behind() {
    const LARGE_BYTES: usize = 64 << 10;
    let file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (1..=64u8).flat_map(|block| vec![block; LARGE_BYTES]).collect();
    std::fs::write(file.path(), bytes).unwrap();
    for io_uring in [true, false] {
        let device = open(file.path(), io_uring);
        for _ in 0..5 {
            let mut batch = ListBatch::reads(64, LARGE_BYTES);
            batch.panic_at_completion = Some(1);
            assert!(catch_unwind(AssertUnwindSafe(|| device.run(&mut batch, 64))).is_err());
            // No transfer writes to the memory any more, so everything that was started has
            // completed.
            for (block, planned) in batch.planned[..batch.started()].iter().enumerate().rev() {
                let arrived = planned.buffer.iter().all(|byte| *byte == block as u8 + 1);
                assert!(arrived, "block {block} is still being read");
            }
        }
    }
}

#[test]
fn many_threads_run_batches_at_once() {
    let file = numbered_file(64);
    for io_uring in [true, false] {
        let device = open(file.path(), io_uring);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        let mut batch = ListBatch::reads(64, BLOCK_BYTES);
                        device.run(&mut batch, 24);
                        check_numbered(&batch);
                    }
                });
            }
        });
    }
}

#[test]
fn a_truncation_during_a_batch_gives_ends_or_errors_never_foreign_bytes() {
    let mut random = Random(crate::support::seed(3));
    for io_uring in [true, false] {
        let file = numbered_file(200);
        let device = open(file.path(), io_uring);
        let cut_to = (1 + random.below(150)) * BLOCK_BYTES + random.below(BLOCK_BYTES);
        let mut batch = ListBatch::reads(200, BLOCK_BYTES);
        std::thread::scope(|scope| {
            scope.spawn(|| file.as_file().set_len(cut_to as u64).unwrap());
            device.run(&mut batch, 16);
        });
        for (block, planned) in batch.planned.iter().enumerate() {
            match planned.result.as_ref().unwrap() {
                Ok(moved) => {
                    let expected = &planned.buffer[..*moved];
                    // A page truncated while it was being read may already show zeros.
                    assert!(expected.iter().all(|byte| *byte == block as u8 || *byte == 0));
                    assert!(block * BLOCK_BYTES + moved >= cut_to.min((block + 1) * BLOCK_BYTES));
                }
                Err(DeviceError::OutOfBounds { .. } | DeviceError::ShortRead { .. }) => {
                    assert!(block * BLOCK_BYTES + BLOCK_BYTES > cut_to);
                }
                Err(error) => panic!("block {block}: {error}"),
            }
        }
    }
}

#[test]
fn writes_of_a_batch_arrive() {
    let file = numbered_file(50);
    for (io_uring, shift) in [(true, 100), (false, 50)] {
        let planned = (0..50).map(|block| {
            let mut buffer = AlignedBuffer::new(BLOCK_BYTES, 4096);
            buffer.fill(block as u8 + shift);
            let offset_bytes = (block * BLOCK_BYTES) as u64;
            Planned { operation: IoOperation::Write, offset_bytes, buffer, result: None }
        });
        let mut batch = ListBatch::new(planned.collect(), 16);
        let device = open(file.path(), io_uring);
        device.run(&mut batch, 32);
        device.sync().unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        for (at, byte) in bytes.iter().enumerate() {
            assert_eq!(*byte, (at / BLOCK_BYTES) as u8 + shift);
        }
    }
}

#[test]
fn a_forked_child_has_its_own_queue() {
    let file = numbered_file(64);
    for io_uring in [true, false] {
        let device = open(file.path(), io_uring);
        // Creates this thread's ring, or the process's pool, which the child then inherits.
        device.run(&mut ListBatch::reads(64, BLOCK_BYTES), 16);
        // SAFETY: the child runs one batch and leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let mut batch = ListBatch::reads(64, BLOCK_BYTES);
                device.run(&mut batch, 16);
                check_numbered(&batch);
                device.sync().unwrap();
            }));
            // SAFETY: ends the child without running any of the parent's code.
            unsafe { libc::_exit(i32::from(outcome.is_err())) };
        }
        let mut batch = ListBatch::reads(64, BLOCK_BYTES);
        device.run(&mut batch, 16);
        check_numbered(&batch);
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child's batch failed (io_uring: {io_uring})");
    }
}

/// A batch that forks when it is asked for, or told about, a transfer; the parent waits for the child.
struct Forking {
    inner: ListBatch,
    calls_left: usize,
    is_child: bool,
}

impl Forking {
    fn count(&mut self) {
        self.calls_left = self.calls_left.wrapping_sub(1);
        if self.calls_left != 0 {
            return;
        }
        // SAFETY: the child leaves by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            self.is_child = true;
            // SAFETY: ends a child that hangs.
            unsafe { libc::alarm(600) };
            return;
        }
        let mut status = 0;
        // SAFETY: waits for the child made above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child failed");
    }
}

// SAFETY: as for `ListBatch`.
unsafe impl Batch for Forking {
    fn next(&mut self) -> Option<Request> {
        let request = self.inner.next();
        self.count();
        request
    }

    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>) {
        self.inner.complete(tag, result);
        self.count();
    }
}

#[test]
fn a_child_of_the_batch_itself_returns_and_leaves_the_queue_to_its_parent() {
    let file = numbered_file(64);
    for (io_uring, calls_left) in
        [true, false].into_iter().flat_map(|on| [(on, 1), (on, 20), (on, 50)])
    {
        let device = open(file.path(), io_uring);
        let inner = ListBatch::reads(64, BLOCK_BYTES);
        let mut batch = Forking { inner, calls_left, is_child: false };
        device.run(&mut batch, 16);
        if batch.is_child {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                assert!(batch.inner.planned.iter().any(|planned| planned.result.is_none()));
                let mut batch = ListBatch::reads(64, BLOCK_BYTES);
                device.run(&mut batch, 16);
                check_numbered(&batch);
            }));
            // SAFETY: ends the child without running any of the parent's code.
            unsafe { libc::_exit(i32::from(outcome.is_err())) };
        }
        check_numbered(&batch.inner);
    }
}

/// Runs one ignored test of this file in a separate process.
fn run_alone(test: &str, environment: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("queue::{test}"), "--ignored", "--nocapture"])
        .env_remove("AQUIFER_NO_IO_URING")
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test}: {text}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{test} did not run");
}

#[test]
fn the_environment_switches_io_uring_off() {
    run_alone("alone_io_uring_is_off_by_environment", &[("AQUIFER_NO_IO_URING", "1")]);
}

#[test]
#[ignore = "run by the_environment_switches_io_uring_off, in its environment"]
fn alone_io_uring_is_off_by_environment() {
    let file = numbered_file(20);
    let device = open(file.path(), true);
    let path = device.access_path();
    assert!(path.ends_with(", threads (AQUIFER_NO_IO_URING is set)"), "{path}");
    assert_eq!(device.queue_depth(), 32);
    let mut batch = ListBatch::reads(20, BLOCK_BYTES);
    device.run(&mut batch, 8);
    check_numbered(&batch);
}

/// Makes `call` fail with `errno` in this thread and the threads it starts, permanently.
fn forbid(call: libc::c_long, errno: i32) -> bool {
    let filter = [
        // Loads the number of the system call; fails it if it equals `call`, else allows it.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: call as u32,
        },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: no memory is involved.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return false;
    }
    // SAFETY: `program` and `filter` outlive the call, which copies them.
    unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0) == 0
    }
}

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

#[test]
fn a_sandbox_without_io_uring_gets_threads() {
    run_alone("alone_io_uring_setup_is_forbidden", &[]);
}

#[test]
#[ignore = "run by a_sandbox_without_io_uring_gets_threads, as it restricts its process"]
fn alone_io_uring_setup_is_forbidden() {
    if !forbid(libc::SYS_io_uring_setup, libc::EPERM) {
        eprintln!("skipped: cannot install a seccomp filter");
        return;
    }
    let file = numbered_file(20);
    let device = open(file.path(), true);
    let path = device.access_path();
    assert!(path.ends_with(", threads (io_uring is not permitted)"), "{path}");
    let mut batch = ListBatch::reads(20, BLOCK_BYTES);
    device.run(&mut batch, 8);
    check_numbered(&batch);
}

#[test]
fn a_sandbox_entered_later_gets_threads() {
    run_alone("alone_io_uring_enter_is_forbidden_later", &[]);
}

#[test]
#[ignore = "run by a_sandbox_entered_later_gets_threads, as it restricts its process"]
fn alone_io_uring_enter_is_forbidden_later() {
    let file = numbered_file(40);
    let device = open(file.path(), true);
    device.run(&mut ListBatch::reads(40, BLOCK_BYTES), 8);
    if !forbid(libc::SYS_io_uring_enter, libc::ENOSYS) {
        eprintln!("skipped: cannot install a seccomp filter");
        return;
    }
    for _ in 0..2 {
        let mut batch = ListBatch::reads(40, BLOCK_BYTES);
        device.run(&mut batch, 8);
        check_numbered(&batch);
    }
}
