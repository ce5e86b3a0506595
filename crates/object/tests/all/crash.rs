//! Crash states: after any power cut, every object has the content of its last completed psync, or
//! of the one in flight.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::support::{PAGE, alone, fill, filled, load_all, store, stored};
use aquifer_crashkit::{
    CrashFailure, CrashMedia, CrashState, Explored, Plan, Recording, Verdict, campaign, explore,
};
use aquifer_object::{Attachment, CreateObject, ObjectError, Objects};
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Mutant, PoolError};
use aquifer_testkit::rng::Rng;

const POOL_BYTES: u64 = 768 << 10;
/// More pages than fit into a commit in the log: a quarter of 64 KiB.
const LARGE: usize = 6;

type Model = BTreeMap<String, Vec<u64>>;

fn open(media: &Arc<CrashMedia>, mutant: Option<Mutant>) -> Result<Objects, PoolError> {
    let options = alone().mutant(mutant);
    options.open_on(media.clone()).map(Objects::new)
}

/// A simulated program: its attached objects and their expected content.
struct Program {
    media: Arc<CrashMedia>,
    mutant: Option<Mutant>,
    objects: Option<Objects>,
    attached: BTreeMap<String, Attachment>,
    /// What is durable.
    model: Model,
    /// What is only in the memory of attached objects, by page.
    stored: BTreeMap<String, BTreeMap<usize, u64>>,
}

impl Program {
    fn objects(&self) -> &Objects {
        self.objects.as_ref().unwrap()
    }

    fn any(&self, rng: &mut Rng) -> Option<String> {
        let names: Vec<&String> = self.model.keys().collect();
        (!names.is_empty()).then(|| names[rng.below(names.len() as u64) as usize].clone())
    }

    fn attach(&mut self, name: &str) -> &mut Attachment {
        let objects = self.objects.as_ref().unwrap();
        (self.attached.entry(name.to_owned())).or_insert_with(|| objects.attach_mut(name).unwrap())
    }

    fn detach(&mut self, name: &str) {
        if let Some(attachment) = self.attached.remove(name) {
            attachment.detach().unwrap();
        }
        self.stored.remove(name);
    }

    /// A psync of everything in these objects.
    fn committed(&mut self, names: &[&str]) {
        for name in names {
            for (page, number) in self.stored.remove(*name).unwrap_or_default() {
                self.model.get_mut(*name).unwrap()[page] = number;
            }
        }
    }

    /// Stores to some pages of an object, and commits some of them by name.
    fn psync_ranges(&mut self, rng: &mut Rng, name: &str, value: u64) {
        self.store(rng, name, value);
        let pages = self.stored[name].clone();
        let mut named = Vec::new();
        for (page, number) in pages {
            let start = (page * PAGE) as u64;
            match rng.below(3) {
                // The rest of the page stays uncommitted.
                0 => {
                    named.push(start..start + 8);
                    let durable = &mut self.model.get_mut(name).unwrap()[page];
                    *durable = *durable >> 32 << 32 | number & 0xffff_ffff;
                }
                1 => {
                    named.push(start..start + PAGE as u64);
                    self.model.get_mut(name).unwrap()[page] = number;
                }
                _ => {}
            }
        }
        self.attach(name).psync_ranges(&named).unwrap();
    }

    /// Stores to some pages of an object.
    fn store(&mut self, rng: &mut Rng, name: &str, value: u64) {
        let pages = self.model[name].len();
        let most = if rng.chance(0.3) { pages } else { 2.min(pages) };
        let chosen: Vec<usize> =
            (0..1 + rng.below(most as u64 * 2)).map(|_| rng.below(pages as u64) as usize).collect();
        for page in chosen {
            let is_whole = rng.chance(0.4);
            // Sometimes the previous content.
            let value = if rng.chance(0.3) { rng.below(2) } else { value };
            let object = self.attach(name);
            let change = if is_whole { fill } else { store };
            change(object, page, value);
            let before = self.model[name][page];
            let number =
                self.stored.entry(name.to_owned()).or_default().entry(page).or_insert(before);
            *number = if is_whole { filled(value) } else { stored(*number, value) };
        }
    }

    /// One random change; `id` is the value it stores.
    fn change(&mut self, rng: &mut Rng, id: u64) {
        let kind = rng.below(100);
        let Some(name) = self.any(rng).filter(|_| kind >= 12 || self.model.len() >= 4) else {
            let (name, pages) = (format!("object {id}"), 1 + rng.below(2 * LARGE as u64) as usize);
            let with_content = rng.below(pages as u64 + 1) as usize;
            let content = id.to_le_bytes().repeat(with_content * PAGE / 8);
            let options = CreateObject::new().relocatable(rng.chance(0.5)).content(&content);
            match options.create(self.objects(), &name, (pages * PAGE) as u64) {
                Ok(_) => {
                    let mut model = vec![filled(id); with_content];
                    model.resize(pages, 0);
                    self.model.insert(name, model);
                }
                Err(ObjectError::Pool(PoolError::Full { .. })) => {}
                Err(error) => panic!("{error}"),
            }
            return;
        };
        match kind {
            0..20 => {
                self.detach(&name);
                self.objects().destroy(&name).unwrap();
                self.model.remove(&name);
            }
            20..28 => {
                self.detach(&name);
                let pages = 1 + rng.below(2 * LARGE as u64) as usize;
                match self.objects().resize(&name, (pages * PAGE) as u64) {
                    Ok(_) => self.model.get_mut(&name).unwrap().resize(pages, 0),
                    Err(ObjectError::Pool(PoolError::Full { .. })) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            28..32 => {
                self.detach(&name);
                let other = format!("renamed {id}");
                self.objects().rename(&name, &other).unwrap();
                let content = self.model.remove(&name).unwrap();
                self.model.insert(other, content);
            }
            32..38 => self.objects().pool().checkpoint().unwrap(),
            38..41 => self.detach(&name),
            41..44 => {
                self.attach(&name).rollback().unwrap();
                self.stored.remove(&name);
                let found = load_all(&self.attached[&name]);
                assert_eq!(found, self.model[&name]);
            }
            44..48 => {
                self.attached.clear();
                self.stored.clear();
                self.objects = None;
                self.objects = Some(open(&self.media, self.mutant).unwrap());
            }
            48..60 => {
                let other = self.any(rng).unwrap();
                self.store(rng, &name, id);
                self.store(rng, &other, id);
                let mut both: Vec<&mut Attachment> = (self.attached.iter_mut())
                    .filter(|(one, _)| **one == name || **one == other)
                    .map(|(_, attachment)| attachment)
                    .collect();
                self.objects.as_ref().unwrap().psync_many(&mut both).unwrap();
                self.committed(&[&name, &other]);
            }
            60..75 => self.psync_ranges(rng, &name, id),
            _ => {
                self.store(rng, &name, id);
                let object = self.attach(&name);
                match rng.below(3) {
                    0 => object.psync_begin().unwrap().wait().unwrap(),
                    _ => object.psync().unwrap(),
                }
                self.committed(&[&name]);
            }
        }
    }
}

/// The states of a run; the state with index `id` is acknowledged by mark `id`.
fn record(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    mutant: Option<Mutant>,
) -> (Recording, Vec<Model>) {
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    alone().log_bytes(64 << 10).inodes(15).create_on(fresh.clone()).unwrap();
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap());
    let mut rng = Rng::new(seed);
    let objects = Some(open(&media, mutant).unwrap());
    let (attached, model) = (BTreeMap::new(), Model::new());
    let stored = BTreeMap::new();
    let mut program = Program { media: media.clone(), mutant, objects, attached, model, stored };
    let mut states = vec![Model::new()];
    media.begin(0);
    media.acknowledge(0);
    for id in 1..=changes {
        media.begin(id);
        program.change(&mut rng, id);
        states.push(program.model.clone());
        media.acknowledge(id);
    }
    // The program is lost in the crash: its drop is not part of the recording.
    let recording = media.recording();
    drop(program);
    (recording, states)
}

fn contents(objects: &Objects) -> Result<Model, ObjectError> {
    let mut contents = Model::new();
    for info in objects.list()? {
        let attached = objects.attach(&info.name)?;
        contents.insert(info.name.to_str().expect("text").to_owned(), load_all(&attached));
    }
    Ok(contents)
}

fn check(state: &CrashState<'_>, states: &[Model], mutant: Option<Mutant>) -> Verdict {
    let media = Arc::new(state.media()?);
    let objects = open(&media, mutant)?;
    let mut found = contents(&objects)?;
    // Created by a check whose recovery was crashed.
    let _ = found.remove("after");
    campaign::settle(state, &media, states, &found)?;
    // The pool stays usable.
    if objects.info("after").is_err() {
        objects.create("after", 1)?;
    }
    let recording = media.recording();
    drop(objects);
    Ok(Some(recording))
}

fn run(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    budget: u64,
    mutant: Option<Mutant>,
) -> Result<Explored, Box<CrashFailure>> {
    let (recording, states) = record(seed, changes, domain, mutant);
    let plan = Plan { depth: 1, budget, seed };
    explore(&recording, plan, |state| check(state, &states, mutant))
}

fn survives(domain: PersistenceDomain) {
    campaign::survives(domain, 5, |seed| run(seed, 40, domain, 400, None));
}

#[test]
fn every_crash_state_on_a_disk_recovers() {
    survives(PersistenceDomain::PageCache);
}

#[test]
fn every_crash_state_on_persistent_memory_recovers() {
    survives(PersistenceDomain::Dax);
}

#[test]
fn every_killed_process_in_memory_files_recovers() {
    survives(PersistenceDomain::Volatile);
}

/// Deliberate bugs in the pool must be detected through objects.
#[test]
fn mutants_are_caught() {
    let mutants = [
        Mutant::NoRevoke,
        Mutant::EarlyReuse,
        Mutant::CommitBeforeData,
        Mutant::TrustStoredState,
        Mutant::NoFlush,
    ];
    let domain = PersistenceDomain::PageCache;
    campaign::catches(&mutants, |seed, mutant| run(seed, 50, domain, 600, Some(mutant)));
}
