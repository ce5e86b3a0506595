//! One transfer, from the request to its result: the only code that interprets the results of read
//! and write system calls.
//!
//! A transfer is a small state machine shared by the blocking path, the ring and the thread pool:
//! they get the next *leg* (one system call) from it, perform that, and feed it the result, until
//! it ends. Several legs are needed when a call was interrupted or short, and where a transfer's
//! length is not a multiple of the alignment: direct I/O moves whole units only, so the tail goes
//! through the buffered descriptor. Such a tail is, or was, the end of the file: callers keep using
//! a length that they queried earlier, while other programs append.
//!
//! Allocates nothing: it runs on the fault path.

use std::io;
use std::os::fd::BorrowedFd;

use super::state::FileState;
use super::system;
use crate::{DeviceError, IoOperation, Request, bounds};

/// The kernel moves at most 2 GiB - 4 KiB per call, and a ring entry has a 32-bit length. A power
/// of two keeps every leg aligned.
const LEG_LIMIT_BYTES: usize = 1 << 30;

/// A transfer in progress.
#[derive(Debug)]
pub(super) struct Transfer {
    operation: IoOperation,
    offset_bytes: u64,
    memory: *mut u8,
    len_bytes: usize,
    /// Bytes transferred so far.
    done_bytes: usize,
    /// The furthest position at which a read stopped before the end of the file.
    stalled_at_bytes: Option<usize>,
}

// SAFETY: by the contract of `Batch` the transfer has exclusive use of the memory until it ends.
unsafe impl Send for Transfer {}

/// One system call of a transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Leg {
    pub operation: IoOperation,
    pub is_direct: bool,
    pub offset_bytes: u64,
    pub memory: *mut u8,
    pub len_bytes: usize,
}

/// The result of starting a request.
pub(super) enum Begun {
    /// Already ended: empty, or refused.
    Ended(Result<usize, DeviceError>),
    /// In progress: legs are to be performed.
    Going(Transfer),
}

impl Transfer {
    /// Checks a request against the device.
    pub(super) fn begin(file: &FileState, request: &Request) -> Begun {
        match Self::check(file, request) {
            Ok(()) if request.len_bytes == 0 => Begun::Ended(Ok(0)),
            Ok(()) => Begun::Going(Transfer {
                operation: match request.operation {
                    IoOperation::Write => IoOperation::Write,
                    _ => IoOperation::Read,
                },
                offset_bytes: request.offset_bytes,
                memory: request.memory,
                len_bytes: request.len_bytes,
                done_bytes: 0,
                stalled_at_bytes: None,
            }),
            Err(error) => Begun::Ended(Err(error)),
        }
    }

    fn check(file: &FileState, request: &Request) -> Result<(), DeviceError> {
        let Request { offset_bytes, len_bytes, memory, .. } = *request;
        let is_write = request.operation == IoOperation::Write;
        if is_write && !file.is_writable {
            return Err(DeviceError::ReadOnly);
        }
        let end_bytes = offset_bytes.checked_add(len_bytes as u64);
        if end_bytes.is_none_or(|end_bytes| end_bytes > i64::MAX as u64) {
            let device_bytes = file.len_bytes()?;
            return Err(DeviceError::OutOfBounds { offset_bytes, len_bytes, device_bytes });
        }
        let alignment_bytes = file.alignment_bytes;
        let mask = alignment_bytes - 1;
        let misaligned = DeviceError::Misaligned { offset_bytes, len_bytes, alignment_bytes };
        if (offset_bytes as usize & mask) != 0 || (memory as usize & mask) != 0 {
            return Err(misaligned);
        }
        // No descriptor takes it. A block device's length is a multiple of its alignment.
        if len_bytes & mask != 0 && file.buffered.is_none() {
            return Err(misaligned);
        }
        if is_write {
            bounds::check_write(offset_bytes, len_bytes, file.len_bytes()?)?;
        }
        Ok(())
    }

    /// Returns the next call to make.
    pub(super) fn leg(&self, file: &FileState) -> Leg {
        let left_bytes = self.len_bytes - self.done_bytes;
        let aligned_bytes = left_bytes & !(file.alignment_bytes - 1);
        let is_direct = file.is_direct() && aligned_bytes > 0;
        Leg {
            operation: self.operation,
            is_direct,
            offset_bytes: self.offset_bytes + self.done_bytes as u64,
            memory: self.memory.wrapping_add(self.done_bytes),
            len_bytes: if is_direct { aligned_bytes } else { left_bytes }.min(LEG_LIMIT_BYTES),
        }
    }

    /// Processes the result of `leg`: the bytes moved, or an errno. Returns the transfer's result
    /// if it has ended; otherwise the next leg is to be performed.
    pub(super) fn absorb(
        &mut self,
        file: &FileState,
        leg: Leg,
        result: Result<usize, i32>,
    ) -> Option<Result<usize, DeviceError>> {
        match result {
            Err(libc::EINTR) => None,
            Err(libc::EINVAL) if leg.is_direct && file.give_up_direct() => None,
            Err(errno) => Some(Err(self.error(leg, io::Error::from_raw_os_error(errno)))),
            Ok(moved_bytes) => {
                let through_bytes = self.done_bytes + moved_bytes;
                if through_bytes >= self.len_bytes {
                    return Some(Ok(self.len_bytes));
                }
                if moved_bytes == leg.len_bytes {
                    self.done_bytes = through_bytes;
                    return None;
                }
                match self.operation {
                    IoOperation::Write => self.continue_short_write(file, leg, through_bytes),
                    _ => self.continue_short_read(file, through_bytes),
                }
            }
        }
    }

    fn continue_short_write(
        &mut self,
        file: &FileState,
        leg: Leg,
        through_bytes: usize,
    ) -> Option<Result<usize, DeviceError>> {
        let resume_bytes = self.resume_point(file, through_bytes);
        if resume_bytes <= self.done_bytes {
            return Some(Err(self.error(leg, io::ErrorKind::WriteZero.into())));
        }
        self.done_bytes = resume_bytes;
        None
    }

    /// Handles a short read: at the end of the file it is the result; otherwise the transfer
    /// continues where the read stopped, and fails if it stops there again.
    fn continue_short_read(
        &mut self,
        file: &FileState,
        through_bytes: usize,
    ) -> Option<Result<usize, DeviceError>> {
        let device_bytes = match file.len_bytes() {
            Ok(device_bytes) => device_bytes,
            Err(error) => return Some(Err(error)),
        };
        let present_bytes =
            match bounds::readable_bytes(self.offset_bytes, self.len_bytes, device_bytes) {
                Ok(present_bytes) => present_bytes,
                Err(error) => return Some(Err(error)),
            };
        if through_bytes >= present_bytes {
            // Also when the file was truncated below the bytes just read.
            return Some(Ok(present_bytes));
        }
        if self.stalled_at_bytes.is_some_and(|stalled_at| through_bytes <= stalled_at) {
            return Some(Err(DeviceError::ShortRead {
                offset_bytes: self.offset_bytes,
                len_bytes: self.len_bytes,
                got_bytes: through_bytes,
            }));
        }
        self.stalled_at_bytes = Some(through_bytes);
        self.done_bytes = self.resume_point(file, through_bytes);
        None
    }

    /// Returns where to continue: direct I/O only at a multiple of the alignment, so some bytes
    /// move twice.
    fn resume_point(&self, file: &FileState, through_bytes: usize) -> usize {
        if file.is_direct() { through_bytes & !(file.alignment_bytes - 1) } else { through_bytes }
    }

    fn error(&self, leg: Leg, source: io::Error) -> DeviceError {
        DeviceError::Io {
            operation: leg.operation,
            offset_bytes: leg.offset_bytes,
            len_bytes: leg.len_bytes,
            source,
        }
    }
}

/// Performs one request on the calling thread.
pub(super) fn run(file: &FileState, request: &Request) -> Result<usize, DeviceError> {
    match Transfer::begin(file, request) {
        Begun::Ended(result) => result,
        Begun::Going(transfer) => finish_blocking(file, transfer),
    }
}

/// Performs all legs of a transfer on the calling thread.
pub(super) fn finish_blocking(
    file: &FileState,
    mut transfer: Transfer,
) -> Result<usize, DeviceError> {
    loop {
        let leg = transfer.leg(file);
        let result = perform(file.descriptor(leg.is_direct), leg);
        if let Some(result) = transfer.absorb(file, leg, result) {
            return result;
        }
    }
}

fn perform(descriptor: BorrowedFd<'_>, leg: Leg) -> Result<usize, i32> {
    match leg.operation {
        IoOperation::Write => {
            // SAFETY: a leg is within the memory of a request, which is valid until its transfer
            // ends (contract of `Batch`, or the borrow that `write_at` holds).
            unsafe { system::write(descriptor, leg.offset_bytes, leg.memory, leg.len_bytes) }
        }
        _ => {
            // SAFETY: as above, and during a read no other code accesses it.
            unsafe { system::read(descriptor, leg.offset_bytes, leg.memory, leg.len_bytes) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AlignedBuffer, Device, Direct, FileDevice};

    /// A transfer of `len_bytes` at `offset_bytes` on a file of `file_bytes`, fed by the test.
    struct Rig {
        device: FileDevice,
        file: tempfile::NamedTempFile,
        _buffer: AlignedBuffer,
        transfer: Transfer,
    }

    impl Rig {
        fn new(operation: IoOperation, direct: Direct, file_bytes: u64, len_bytes: usize) -> Self {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(file_bytes).unwrap();
            let device =
                FileDevice::options().writable(true).direct(direct).open(file.path()).unwrap();
            let mut buffer = AlignedBuffer::new(len_bytes, 4096);
            let memory = buffer.as_mut_ptr();
            let request = Request { operation, offset_bytes: 0, memory, len_bytes, tag: 0 };
            let Begun::Going(transfer) = Transfer::begin(&device.state, &request) else {
                panic!("refused")
            };
            Rig { device, file, _buffer: buffer, transfer }
        }

        /// Feeds one result and returns the outcome.
        fn feed(&mut self, result: Result<usize, i32>) -> Option<Result<usize, DeviceError>> {
            let leg = self.leg();
            self.transfer.absorb(&self.device.state, leg, result)
        }

        fn leg(&self) -> Leg {
            self.transfer.leg(&self.device.state)
        }
    }

    #[test]
    fn an_interrupted_call_is_made_again() {
        let mut rig = Rig::new(IoOperation::Read, Direct::Never, 8192, 8192);
        assert!(rig.feed(Err(libc::EINTR)).is_none());
        assert_eq!((rig.leg().offset_bytes, rig.leg().len_bytes), (0, 8192));
        assert!(matches!(rig.feed(Ok(8192)), Some(Ok(8192))));
    }

    #[test]
    fn a_short_read_goes_on_and_fails_if_it_stays_where_it_is() {
        let mut rig = Rig::new(IoOperation::Read, Direct::Never, 8192, 8192);
        assert!(rig.feed(Ok(1000)).is_none());
        assert_eq!((rig.leg().offset_bytes, rig.leg().len_bytes), (1000, 7192));
        assert!(rig.feed(Ok(24)).is_none());
        let stuck = rig.feed(Ok(0)).expect("no progress").unwrap_err();
        assert!(matches!(stuck, DeviceError::ShortRead { got_bytes: 1024, len_bytes: 8192, .. }));
    }

    #[test]
    fn a_short_read_at_the_end_is_the_answer() {
        let mut rig = Rig::new(IoOperation::Read, Direct::Never, 5000, 8192);
        assert!(matches!(rig.feed(Ok(5000)), Some(Ok(5000))));
    }

    #[test]
    fn a_file_cut_during_a_read_counts_as_it_is_now() {
        let mut rig = Rig::new(IoOperation::Read, Direct::Never, 8192, 8192);
        rig.file.as_file().set_len(100).unwrap();
        assert!(matches!(rig.feed(Ok(4096)), Some(Ok(100))));
    }

    #[test]
    fn a_short_write_goes_on_and_fails_if_it_stays_where_it_is() {
        let mut rig = Rig::new(IoOperation::Write, Direct::Never, 8192, 8192);
        assert!(rig.feed(Ok(4096)).is_none());
        assert_eq!(rig.leg().offset_bytes, 4096);
        let stuck = rig.feed(Ok(0)).expect("no progress").unwrap_err();
        let DeviceError::Io { offset_bytes: 4096, source, .. } = stuck else { panic!("{stuck}") };
        assert_eq!(source.kind(), io::ErrorKind::WriteZero);
    }

    #[test]
    fn an_error_names_the_part_that_failed() {
        let mut rig = Rig::new(IoOperation::Write, Direct::Never, 8192, 8192);
        assert!(rig.feed(Ok(4096)).is_none());
        let error = rig.feed(Err(libc::ENOSPC)).expect("an error").unwrap_err();
        let DeviceError::Io { offset_bytes: 4096, len_bytes: 4096, source, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(source.raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn direct_io_goes_on_at_whole_units_and_writes_tails_buffered() {
        let mut rig = Rig::new(IoOperation::Write, Direct::Auto, 8192 + 100, 8192 + 100);
        if !rig.device.is_direct() {
            eprintln!("skipped: {}", rig.device.access_path());
            return;
        }
        let unit_bytes = rig.device.alignment_bytes();
        assert_eq!((rig.leg().is_direct, rig.leg().len_bytes), (true, 8192));
        assert!(rig.feed(Ok(unit_bytes + 1)).is_none());
        assert_eq!(rig.leg().offset_bytes, unit_bytes as u64);
        assert!(rig.feed(Ok(8192 - unit_bytes)).is_none());
        assert_eq!((rig.leg().is_direct, rig.leg().len_bytes), (false, 100));
        assert!(matches!(rig.feed(Ok(100)), Some(Ok(8292))));
    }

    #[test]
    fn direct_io_refused_at_a_transfer_is_given_up() {
        let mut rig = Rig::new(IoOperation::Read, Direct::Auto, 8192, 8192);
        if !rig.device.is_direct() {
            eprintln!("skipped: {}", rig.device.access_path());
            return;
        }
        assert!(rig.feed(Err(libc::EINVAL)).is_none());
        assert!(!rig.leg().is_direct);
        assert!(!rig.device.is_direct());
        let path = rig.device.access_path();
        assert!(path.starts_with("buffered (direct transfers refused by the file system), "));
        // EINVAL again, now from the buffered descriptor, is an error.
        assert!(matches!(rig.feed(Err(libc::EINVAL)), Some(Err(DeviceError::Io { .. }))));
        let mut buffer = AlignedBuffer::new(8192, 4096);
        assert_eq!(rig.device.read_at(0, &mut buffer).unwrap(), 8192);
    }

    #[test]
    fn required_direct_io_is_not_given_up() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(8192).unwrap();
        if let Err(error) = FileDevice::options().direct(Direct::Require).open(file.path()) {
            eprintln!("skipped: {error}");
            return;
        }
        let mut rig = Rig::new(IoOperation::Read, Direct::Require, 8192, 8192);
        assert!(matches!(rig.feed(Err(libc::EINVAL)), Some(Err(DeviceError::Io { .. }))));
        assert!(rig.device.is_direct());
    }
}
