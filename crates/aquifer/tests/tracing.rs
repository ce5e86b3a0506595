//! What the feature `tracing` shows of opening, checkpoints, attaching, and failing write-back. A
//! program of its own: a process has one subscriber.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquifer::device::{Fault, FaultRule, FaultTarget};
use aquifer::{Cache, Faulty, MemoryDevice, Objects, Pool};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Keeps each event as a line: level, crate, message and fields.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    fn contain(&self, parts: &[&str]) -> bool {
        let lines = self.0.lock().unwrap();
        lines.iter().any(|line| parts.iter().all(|part| line.contains(part)))
    }
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("aquifer")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut fields = Fields(format!("{} {}", metadata.level(), metadata.target()));
        event.record(&mut fields);
        self.0.lock().unwrap().push(fields.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn what_a_user_looks_for_is_an_event() {
    let lines = Lines::default();
    tracing::subscriber::set_global_default(lines.clone()).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("traced.pool");
    let pool = Pool::create(&path, 16 << 20).unwrap();
    assert!(lines.contain(&["INFO aquifer_pool", "pool opened", "traced.pool", "writable=true"]));
    let objects = Objects::new(pool.clone());
    objects.create("counter", 4096).unwrap();
    objects.attach_mut("counter").unwrap();
    assert!(lines.contain(&["DEBUG aquifer_object", "object attached", "counter", "Write"]));
    pool.checkpoint().unwrap();
    assert!(lines.contain(&["DEBUG aquifer_pool", "checkpoint", "traced.pool"]));

    let device = Faulty::new(MemoryDevice::from_bytes(&[0; 1 << 20]).unwrap());
    let faults = device.control();
    let cache = Cache::builder().budget_bytes(8 << 20).build().unwrap();
    let mapping = cache.map_mut(device).unwrap();
    mapping.set(0, 1u64).unwrap();
    let rule = faults.inject(FaultRule::new(FaultTarget::Writes, Fault::Errno(libc::EIO)));
    mapping.flush_all().unwrap_err();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !lines.contain(&["WARN aquifer_cache", "write-back failed", "failed=1"]) {
        assert!(Instant::now() < deadline, "{:?}", lines.0.lock().unwrap());
        std::thread::sleep(Duration::from_millis(20));
    }
    faults.remove(rule);
    mapping.flush_all().unwrap();
}
