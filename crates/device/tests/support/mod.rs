//! Shared support of the integration tests: a batch from a list, and the model test of a device.

#![allow(dead_code, reason = "each test file uses its part")]

use aquifer_device::{AlignedBuffer, Batch, Device, DeviceError, IoOperation, Request};

/// A deterministic random number generator (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// Returns the seed of a model test: `AQUIFER_SEED`, or the one given.
pub fn seed(usual: u64) -> u64 {
    std::env::var("AQUIFER_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(usual)
}

/// One planned transfer of a [`ListBatch`].
pub struct Planned {
    pub operation: IoOperation,
    pub offset_bytes: u64,
    pub buffer: AlignedBuffer,
    pub result: Option<Result<usize, DeviceError>>,
}

/// A batch of transfers from a list, at most `window` of them in flight.
pub struct ListBatch {
    pub planned: Vec<Planned>,
    pub window: usize,
    next: usize,
    in_flight: usize,
    pub panic_at_completion: Option<usize>,
    completed: usize,
}

impl ListBatch {
    pub fn new(planned: Vec<Planned>, window: usize) -> Self {
        ListBatch {
            planned,
            window,
            next: 0,
            in_flight: 0,
            panic_at_completion: None,
            completed: 0,
        }
    }

    /// Returns how many transfers were started.
    pub fn started(&self) -> usize {
        self.next
    }

    /// Reads of `count` blocks of `block_bytes` from the start.
    pub fn reads(count: usize, block_bytes: usize) -> Self {
        let planned = (0..count).map(|at| Planned {
            operation: IoOperation::Read,
            offset_bytes: (at * block_bytes) as u64,
            buffer: AlignedBuffer::new(block_bytes, 4096),
            result: None,
        });
        Self::new(planned.collect(), usize::MAX)
    }
}

// SAFETY: each request has its own buffer, which is not touched before its completion and lives as
// long as the batch.
unsafe impl Batch for ListBatch {
    fn next(&mut self) -> Option<Request> {
        if self.next == self.planned.len() || self.in_flight >= self.window {
            return None;
        }
        let tag = self.next as u64;
        let planned = &mut self.planned[self.next];
        self.next += 1;
        self.in_flight += 1;
        Some(Request {
            operation: planned.operation,
            offset_bytes: planned.offset_bytes,
            memory: planned.buffer.as_mut_ptr(),
            len_bytes: planned.buffer.len(),
            tag,
        })
    }

    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>) {
        self.in_flight -= 1;
        self.completed += 1;
        if self.panic_at_completion == Some(self.completed) {
            // Unwinds without a panic message, which would look like a failure.
            std::panic::resume_unwind(Box::new("the batch panics, as told"));
        }
        let before = self.planned[tag as usize].result.replace(result);
        assert!(before.is_none(), "transfer {tag} completed twice");
    }
}

/// Performs random reads, writes, syncs and batches on `device` and compares it with a byte array.
/// The device's content is overwritten.
pub fn check_against_model(device: &dyn Device, seed: u64, rounds: usize) {
    let replay = format!("{}, replay with AQUIFER_SEED={seed}", device.access_path());
    let mut random = Random(seed);
    let len_bytes = device.len_bytes().unwrap() as usize;
    let unit_bytes = device.alignment_bytes();
    // Whole units, plus the part after the last one.
    let units = len_bytes.div_ceil(unit_bytes);

    let mut model = vec![0u8; len_bytes];
    random.fill(&mut model);
    let mut all = AlignedBuffer::new(len_bytes, 4096);
    all.copy_from_slice(&model);
    device.write_at(0, &all).unwrap();

    for round in 0..rounds {
        let what = format!("round {round}: {replay}");
        let first = random.below(units);
        let most = (units - first).min(64 << 10 >> unit_bytes.trailing_zeros().min(12));
        let count = 1 + random.below(most);
        let start = first * unit_bytes;
        let end = (start + count * unit_bytes).min(len_bytes);
        match random.below(8) {
            0..=2 => {
                let mut bytes = AlignedBuffer::new(end - start, 4096);
                random.fill(&mut bytes);
                device.write_at(start as u64, &bytes).expect(&what);
                model[start..end].copy_from_slice(&bytes);
            }
            3..=4 => {
                let mut bytes = AlignedBuffer::new(end - start, 4096);
                assert_eq!(device.read_at(start as u64, &mut bytes).expect(&what), end - start);
                assert!(bytes[..] == model[start..end], "{what}");
            }
            5 => {
                // An aligned range across the end is cut at the end.
                let mut bytes = AlignedBuffer::new(count * unit_bytes + unit_bytes, 4096);
                let expected = bytes.len().min(len_bytes - start);
                assert_eq!(device.read_at(start as u64, &mut bytes).expect(&what), expected);
                assert!(bytes[..expected] == model[start..start + expected], "{what}");
            }
            6 => device.sync().expect(&what),
            _ => check_batch(device, &mut random, &mut model, &what),
        }
    }
    let got = device.read_at(0, &mut all).unwrap();
    assert_eq!(got, len_bytes);
    assert!(all[..] == model[..], "at the end: {replay}");
}

/// One batch over disjoint blocks in random order, some written and some read.
fn check_batch(device: &dyn Device, random: &mut Random, model: &mut [u8], what: &str) {
    let block_bytes = 4096.max(device.alignment_bytes());
    let mut blocks: Vec<usize> = (0..model.len().div_ceil(block_bytes)).collect();
    for at in (1..blocks.len()).rev() {
        blocks.swap(at, random.below(at + 1));
    }
    blocks.truncate(1 + random.below(blocks.len()));
    let planned = blocks.iter().map(|block| {
        let start = block * block_bytes;
        let end = (start + block_bytes).min(model.len());
        let mut buffer = AlignedBuffer::new(end - start, 4096);
        let operation = if random.below(2) == 0 {
            random.fill(&mut buffer);
            IoOperation::Write
        } else {
            IoOperation::Read
        };
        Planned { operation, offset_bytes: start as u64, buffer, result: None }
    });
    let planned = planned.collect();
    let mut batch = ListBatch::new(planned, 1 + random.below(40));
    device.run(&mut batch, 1 + random.below(40));
    for planned in &batch.planned {
        let start = planned.offset_bytes as usize;
        let range = start..start + planned.buffer.len();
        let moved = planned.result.as_ref().expect(what).as_ref().expect(what);
        assert_eq!(*moved, range.len(), "{what}");
        match planned.operation {
            IoOperation::Write => model[range].copy_from_slice(&planned.buffer),
            _ => assert!(planned.buffer[..] == model[range], "{what}"),
        }
    }
}
