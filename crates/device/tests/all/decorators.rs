//! Decorators: what they inject, and that no operation bypasses them.

use std::sync::Arc;
use std::time::Duration;

use crate::support::{ListBatch, check_against_model, seed};
use aquifer_device::{
    Counting, Device, DeviceError, Direct, Fault, FaultRule, FaultTarget, Faulty, FileDevice,
    IoOperation, MemoryDevice, Rate, Throttled, Trigger,
};

fn memory() -> MemoryDevice {
    MemoryDevice::new(64 << 10).unwrap()
}

fn errno(error: &DeviceError) -> Option<i32> {
    match error {
        DeviceError::Io { source, .. } => source.raw_os_error(),
        _ => None,
    }
}

#[test]
fn without_faults_the_content_is_the_devices() {
    let rate = Rate { latency: Duration::ZERO, bytes_per_second: Some(1 << 40) };
    let inner: Arc<dyn Device> = Arc::new(memory());
    let stack = Counting::new(Throttled::new(Faulty::new(inner), rate));
    check_against_model(&stack, seed(11), 200);
    let path = stack.access_path();
    assert_eq!(path, "memory (volatile) (with injected faults) (throttled) (counted)");
}

#[test]
fn nothing_bypasses_a_decorator() {
    assert!(memory().dax().is_some());
    let file = tempfile::NamedTempFile::new().unwrap();
    let opened: Arc<dyn Device> = Arc::new(FileDevice::open(file.path()).unwrap());
    assert!(opened.page_cache_file().is_some());
    let decorated: [Box<dyn Device>; 6] = [
        Box::new(Faulty::new(memory())),
        Box::new(Throttled::new(memory(), Rate::default())),
        Box::new(Counting::new(memory())),
        Box::new(Faulty::new(Arc::clone(&opened))),
        Box::new(Throttled::new(Arc::clone(&opened), Rate::default())),
        Box::new(Counting::new(opened)),
    ];
    for device in decorated {
        assert!(
            device.dax().is_none() && device.page_cache_file().is_none(),
            "{}",
            device.access_path()
        );
    }
}

#[test]
fn a_range_fails_and_its_neighbours_do_not() {
    let device = Faulty::new(memory());
    let rule = FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)).range(8192..12288);
    let id = device.control().inject(rule);
    let mut page = [0; 4096];
    assert!(device.read_at(4096, &mut page).is_ok());
    let error = device.read_at(8192, &mut page).unwrap_err();
    assert!(matches!(
        error,
        DeviceError::Io { operation: IoOperation::Read, offset_bytes: 8192, len_bytes: 4096, .. }
    ));
    assert!(device.read_at(12287, &mut page).is_err());
    assert!(device.read_at(12288, &mut page).is_ok());
    assert!(device.write_at(8192, &page).is_ok(), "only reads");
    assert_eq!(device.control().struck(), 2);
    assert!(device.control().remove(id));
    assert!(!device.control().remove(id));
    assert!(device.read_at(8192, &mut page).is_ok());
}

#[test]
fn a_failed_write_does_not_reach_the_device() {
    let inner = Arc::new(memory());
    let device = Faulty::new(Arc::clone(&inner));
    device
        .control()
        .inject(FaultRule::new(FaultTarget::Writes, Fault::Errno(libc::ENOSPC)).at_most(1));
    let error = device.write_at(0, &[7; 100]).unwrap_err();
    assert_eq!(errno(&error), Some(libc::ENOSPC));
    assert!(inner.to_vec().iter().all(|byte| *byte == 0));
    device.write_at(0, &[7; 100]).unwrap();
    assert_eq!(inner.to_vec()[..101], [[7].repeat(100), vec![0]].concat());
}

#[test]
fn a_countdown_lets_its_number_pass() {
    let device = Faulty::new(memory());
    let trigger = Trigger::After { operations: 3 };
    let rule = FaultRule::new(FaultTarget::Transfers, Fault::Errno(libc::EIO)).trigger(trigger);
    device.control().inject(rule.at_most(2));
    let outcomes: Vec<bool> = (0..7).map(|_| device.write_at(0, &[0; 8]).is_ok()).collect();
    assert_eq!(outcomes, [true, true, true, false, false, true, true]);
}

#[test]
fn the_same_seed_gives_the_same_faults() {
    let outcomes = |seed| {
        let device = Faulty::new(memory());
        let trigger = Trigger::Probability { probability: 0.25, seed };
        let rule = FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)).trigger(trigger);
        device.control().inject(rule);
        (0..4000).map(|_| device.read_at(0, &mut [0; 8]).is_ok()).collect::<Vec<_>>()
    };
    let first = outcomes(1);
    assert_eq!(first, outcomes(1));
    assert_ne!(first, outcomes(2));
    let failed = first.iter().filter(|is_ok| !**is_ok).count();
    assert!((800..1200).contains(&failed), "a quarter of 4000, not {failed}");
}

#[test]
fn short_reads_come_in_both_forms() {
    let device = Faulty::new(MemoryDevice::from_bytes(&[3; 8192]).unwrap());
    let short = Fault::ShortRead { got_bytes: 100 };
    device.control().inject(FaultRule::new(FaultTarget::Transfers, short).at_most(1));
    device.write_at(0, &[3; 10]).unwrap();
    let error = device.read_at(0, &mut [0; 4096]).unwrap_err();
    assert!(matches!(error, DeviceError::ShortRead { got_bytes: 100, len_bytes: 4096, .. }));
    let early = Fault::EndsEarly { got_bytes: 100 };
    device.control().inject(FaultRule::new(FaultTarget::Reads, early));
    assert_eq!(device.read_at(0, &mut [0; 4096]).unwrap(), 100);
    assert_eq!(device.read_at(0, &mut [0; 50]).unwrap(), 50);
}

#[test]
fn syncs_fail_until_switched_back() {
    let device = Counting::new(Faulty::new(memory()));
    let faulty = Faulty::new(memory());
    let control = faulty.control();
    control.inject(FaultRule::new(FaultTarget::Syncs, Fault::Errno(libc::EIO)));
    for _ in 0..2 {
        assert_eq!(errno(&faulty.sync().unwrap_err()), Some(libc::EIO));
    }
    control.clear();
    faulty.sync().unwrap();
    device.sync().unwrap();
    assert_eq!(device.counters().snapshot().syncs, 1);
}

#[test]
fn a_batch_keeps_its_depth_and_fails_where_told() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(100 * 4096).unwrap();
    for io_uring in [true, false] {
        let inner = FileDevice::options().io_uring(io_uring).open(file.path()).unwrap();
        let counting = Counting::new(inner);
        let counters = counting.counters();
        let device = Faulty::new(Throttled::new(counting, Rate::default()));
        let rule = |fault, page: u64| {
            FaultRule::new(FaultTarget::Reads, fault).range(page * 4096..(page + 1) * 4096)
        };
        device.control().inject(rule(Fault::Errno(libc::EIO), 40));
        device.control().inject(rule(Fault::ShortRead { got_bytes: 9 }, 50));
        let mut batch = ListBatch::reads(100, 4096);
        device.run(&mut batch, 16);
        for (page, planned) in batch.planned.iter().enumerate() {
            match (page, planned.result.as_ref().unwrap()) {
                (40, Err(error)) => assert_eq!(errno(error), Some(libc::EIO)),
                (50, Err(DeviceError::ShortRead { got_bytes: 9, .. })) => {}
                (_, Ok(4096)) if page != 40 && page != 50 => {}
                (_, other) => panic!("page {page}: {other:?}"),
            }
        }
        let counts = counters.snapshot();
        assert_eq!((counts.reads, counts.most_in_flight, counts.batches), (99, 16, 1));
    }
}

#[test]
fn a_batch_that_only_fails_still_ends() {
    let device = Faulty::new(memory());
    device.control().inject(FaultRule::new(FaultTarget::Reads, Fault::Errno(libc::EIO)));
    let mut batch = ListBatch::reads(16, 4096);
    batch.window = 1;
    device.run(&mut batch, 4);
    assert!(batch.planned.iter().all(|planned| matches!(planned.result, Some(Err(_)))));
}

#[test]
fn counts_add_up() {
    let faulty = Faulty::new(memory());
    let control = faulty.control();
    let device = Counting::new(faulty);
    let counters = device.counters();
    device.write_at(0, &[0; 4096]).unwrap();
    device.write_at(0, &[0; 5000]).unwrap();
    device.read_at(60 << 10, &mut [0; 8192]).unwrap();
    control.inject(FaultRule::new(FaultTarget::Transfers, Fault::Errno(libc::EIO)));
    control.inject(FaultRule::new(FaultTarget::Syncs, Fault::Errno(libc::EIO)));
    device.read_at(0, &mut [0; 1]).unwrap_err();
    device.read_at(0, &mut []).unwrap_err();
    device.sync().unwrap_err();
    let counts = counters.snapshot();
    assert_eq!((counts.writes, counts.written_bytes), (2, 9096));
    assert_eq!((counts.reads, counts.read_bytes), (1, 4096));
    assert_eq!((counts.transfer_errors, counts.syncs, counts.sync_errors), (2, 0, 1));
    assert_eq!((counts.sizes[0], counts.sizes[12], counts.sizes[13]), (2, 2, 1));
    assert_eq!(counts.sizes.iter().sum::<u64>(), 5);
    assert_eq!(counts.most_in_flight, 1);
}

/// Devices of the same bytes have equal identities, devices of different bytes have different ones.
#[test]
fn devices_of_the_same_bytes_have_one_identity() {
    let directory = tempfile::tempdir().unwrap();
    let [one, other, link] = ["one", "other", "link"].map(|name| directory.path().join(name));
    std::fs::write(&one, [1; 4096]).unwrap();
    std::fs::write(&other, [1; 4096]).unwrap();
    std::fs::hard_link(&one, &link).unwrap();
    let open = |path| FileDevice::open(path).unwrap();
    let buffered = FileDevice::options().direct(Direct::Never).open(&one).unwrap();
    assert_eq!(open(&one).identity(), open(&link).identity());
    assert_eq!(open(&one).identity(), buffered.identity());
    assert_ne!(open(&one).identity(), open(&other).identity());

    let memory = Arc::new(MemoryDevice::new(4096).unwrap());
    let decorated = Counting::new(Faulty::new(Throttled::new(memory.clone(), Rate::default())));
    assert_eq!(memory.identity(), decorated.identity());
    assert_eq!(memory.identity(), Arc::new(memory.clone()).identity());
    assert_ne!(memory.identity(), MemoryDevice::new(4096).unwrap().identity());
}

/// A device that counts something itself.
struct Counted(MemoryDevice);

impl Device for Counted {
    fn name(&self) -> &str {
        "counted"
    }

    fn len_bytes(&self) -> Result<u64, DeviceError> {
        self.0.len_bytes()
    }

    fn is_writable(&self) -> bool {
        false
    }

    fn read_at(&self, offset_bytes: u64, buffer: &mut [u8]) -> Result<usize, DeviceError> {
        self.0.read_at(offset_bytes, buffer)
    }

    fn write_at(&self, _offset_bytes: u64, _buffer: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::ReadOnly)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("requests", 7)]
    }

    fn access_path(&self) -> String {
        self.0.access_path()
    }
}

#[test]
fn what_a_device_counts_itself_is_passed_on() {
    assert_eq!(memory().counters(), []);
    fn counts(device: impl Device) -> Vec<(&'static str, u64)> {
        device.counters()
    }
    let counted = || Counted(memory());
    let expected = [("requests", 7)];
    assert_eq!(counts(Arc::new(counted())), expected);
    assert_eq!(counts(Counting::new(counted())), expected);
    assert_eq!(counts(Throttled::new(counted(), Rate::default())), expected);
    assert_eq!(counts(Faulty::new(counted())), expected);
}
