//! Random runs on the crash-enumerating media against a second, plain model of what a crash may
//! leave.

use std::collections::BTreeSet;

use aquifer_crashkit::unguarded::UnguardedMedia;
use aquifer_crashkit::{CrashMedia, Fault, Left, Mark, Trigger};
use aquifer_pool::media::{Media, MediaOperation, PersistenceDomain};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

use crate::support::{DOMAINS, range};

/// A second, plain model of the units: all contents ever written to each, and the first that still
/// counts.
struct Plain {
    unit_bytes: usize,
    visible: Vec<u8>,
    /// For each unit its contents, oldest first.
    history: Vec<Vec<Vec<u8>>>,
    durable: Vec<usize>,
    handed_over: Vec<Option<usize>>,
    poisoned: Vec<Option<usize>>,
    /// After each event, the contents that each unit may have.
    allowed: Vec<Vec<Vec<Vec<u8>>>>,
    /// After each event, how many notes there were.
    notes: Vec<usize>,
}

impl Plain {
    fn new(image: &[u8], unit_bytes: usize) -> Plain {
        let units: Vec<Vec<u8>> = image.chunks(unit_bytes).map(<[u8]>::to_vec).collect();
        let mut plain = Plain {
            unit_bytes,
            visible: image.to_vec(),
            durable: vec![0; units.len()],
            handed_over: vec![None; units.len()],
            poisoned: vec![None; units.len()],
            history: units.into_iter().map(|unit| vec![unit]).collect(),
            allowed: vec![],
            notes: vec![],
        };
        plain.event();
        plain
    }

    /// Records that another event has happened.
    fn event(&mut self) {
        let allowed = self.history.iter().zip(&self.durable);
        self.allowed.push(allowed.map(|(history, &durable)| history[durable..].to_vec()).collect());
        self.notes.push(self.notes.last().copied().unwrap_or(0));
    }

    fn note(&mut self) {
        self.event();
        *self.notes.last_mut().unwrap() += 1;
    }

    fn units(&self, offset: usize, len: usize) -> std::ops::Range<usize> {
        if len == 0 {
            0..0
        } else {
            offset / self.unit_bytes..(offset + len - 1) / self.unit_bytes + 1
        }
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.visible[offset..offset + bytes.len()].copy_from_slice(bytes);
        for unit in self.units(offset, bytes.len()) {
            let start = unit * self.unit_bytes;
            let end = (start + self.unit_bytes).min(self.visible.len());
            self.history[unit].push(self.visible[start..end].to_vec());
        }
        self.event();
    }

    /// Called directly after its write.
    fn persist(&mut self, offset: usize, len: usize) {
        for unit in self.units(offset, len) {
            self.durable[unit] = self.history[unit].len() - 1;
        }
        self.event();
    }

    fn write_back(&mut self, offset: usize, len: usize, fails: bool) {
        self.event();
        for unit in self.units(offset, len) {
            let newest = self.history[unit].len() - 1;
            if fails {
                self.poisoned[unit] = Some(newest)
            } else {
                self.handed_over[unit] = Some(newest)
            }
        }
        self.event();
    }

    fn flush(&mut self, fails: bool) {
        self.event();
        for unit in 0..self.history.len() {
            let Some(handed_over) = self.handed_over[unit].take() else { continue };
            if fails {
                self.poisoned[unit] = self.poisoned[unit].max(Some(handed_over));
            } else if self.poisoned[unit].is_none_or(|poisoned| handed_over > poisoned) {
                self.durable[unit] = self.durable[unit].max(handed_over);
            }
        }
        self.event();
    }

    fn allows(&self, prefix: usize, image: &[u8]) -> bool {
        let mut units = image.chunks(self.unit_bytes).zip(&self.allowed[prefix]);
        units.all(|(unit, allowed)| allowed.iter().any(|content| content == unit))
    }

    /// Returns all possible images after an event.
    fn images(&self, prefix: usize) -> Vec<Vec<u8>> {
        self.allowed[prefix].iter().fold(vec![vec![]], |images, contents| {
            let longer = |image: &Vec<u8>| -> Vec<Vec<u8>> {
                contents.iter().map(|content| [&image[..], content].concat()).collect()
            };
            images.iter().flat_map(longer).collect()
        })
    }
}

/// Performs the same random operations on media and on the plain model; a note after every few.
fn random_run(rng: &mut Rng, media: &CrashMedia, operations: usize) -> Plain {
    let len = media.len_bytes();
    let mut plain = Plain::new(&media.image(), media.recording().unit_bytes());
    for _ in 0..operations {
        let offset = rng.below(len);
        let bytes_len = 1 + rng.below((len - offset).min(len / 2));
        let (at, count) = (offset as usize, bytes_len as usize);
        // Few values, so that contents repeat.
        let bytes = vec![b'A' + rng.below(3) as u8; count];
        let fails = rng.chance(0.1);
        let kind = [
            MediaOperation::Write,
            MediaOperation::Write,
            MediaOperation::WriteDurable,
            MediaOperation::WriteBack,
            MediaOperation::Flush,
        ][rng.below(5) as usize];
        if fails {
            media.fail(Fault::io_error(Trigger::on(kind)).leaving(Left::First(count / 2)));
        }
        let written = if fails { &bytes[..count / 2] } else { &bytes[..] };
        let result = match kind {
            MediaOperation::Write => {
                plain.write(at, written);
                media.write_unguarded(offset, &bytes)
            }
            MediaOperation::WriteDurable => {
                plain.write(at, written);
                if !fails {
                    plain.persist(at, count);
                }
                media.write_durable_unguarded(offset, &bytes)
            }
            MediaOperation::WriteBack => {
                plain.write_back(at, count, fails);
                media.write_back(&[range(offset, bytes_len)])
            }
            _ => {
                plain.flush(fails);
                media.flush()
            }
        };
        assert_eq!(result.is_err(), fails);
        if fails && matches!(kind, MediaOperation::Write | MediaOperation::WriteDurable) {
            plain.event(); // the failure
        }
        if rng.chance(0.3) {
            media.mark(Mark::Note(0));
            plain.note();
        }
    }
    assert_eq!(plain.allowed.len(), media.recording().event_count() + 1);
    plain
}

/// With a budget for everything, exactly the images of the plain model, each once between two
/// marks.
#[test]
fn small_runs_have_exactly_the_states_of_a_plain_model() {
    let seed = seed(1);
    for run in 0..steps(60) {
        for domain in DOMAINS {
            let mut rng = Rng::new(seed + run as u64);
            // The last unit is partial.
            let len = 4 * domain.atomic_bytes() as u64 - 3;
            let media = CrashMedia::new(len, domain).unwrap();
            let plain = random_run(&mut rng, &media, 8);
            let recording = media.recording();
            let mut expected = BTreeSet::new();
            for (prefix, &notes) in plain.notes.iter().enumerate() {
                expected.extend(plain.images(prefix).into_iter().map(|image| (notes, image)));
            }
            let states: Vec<(usize, Vec<u8>)> = recording
                .crash_states(seed, u64::MAX)
                .map(|state| (state.marks.notes().len(), state.image))
                .collect();
            let found: BTreeSet<_> = states.iter().cloned().collect();
            assert_eq!(found.len(), states.len(), "run {run}: a state came twice");
            assert!(found == expected, "run {run} in {domain}:\n{recording}");
        }
    }
}

/// With a small budget: only possible states, each once, not more than the budget, the extremes
/// among them.
#[test]
fn a_selection_has_only_states_that_a_plain_model_allows() {
    let seed = seed(2);
    for run in 0..steps(20) {
        for domain in DOMAINS {
            let mut rng = Rng::new(seed + run as u64);
            let media = CrashMedia::new(100 * domain.atomic_bytes() as u64, domain).unwrap();
            let plain = random_run(&mut rng, &media, 30);
            let recording = media.recording();
            let budget = [5, 100, 3000][run % 3];
            let mut seen = BTreeSet::new();
            let mut states = recording.crash_states(seed + run as u64, budget);
            while let Some(state) = states.lend() {
                assert!(
                    plain.allows(state.prefix(), state.image()),
                    "run {run} in {domain}: {}\n{recording}",
                    state.description()
                );
                let demands = state.marks().notes().len();
                assert!(seen.insert((demands, state.image().to_vec())), "a state came twice");
            }
            let enumerated = states.enumerated();
            assert_eq!(enumerated.states, seen.len() as u64);
            assert!(enumerated.states <= budget);
            assert!(enumerated.states > budget * 8 / 10, "{enumerated:?}, run {run} in {domain}");
            if budget == 3000 {
                assert!(seen.iter().any(|(_, image)| *image == media.image()));
            }
        }
    }
}

#[test]
fn a_seed_names_a_selection() {
    let media = CrashMedia::new(1 << 16, PersistenceDomain::PageCache).unwrap();
    random_run(&mut Rng::new(3), &media, 20);
    let recording = media.recording();
    let states = |seed| -> Vec<(String, Vec<u8>)> {
        let states = recording.crash_states(seed, 500);
        states.map(|state| (state.description, state.image)).collect()
    };
    assert!(states(1) == states(1));
    assert!(states(1) != states(2));
}
