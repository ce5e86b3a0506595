//! Crash states of objects: whatever a power cut leaves, each object is as its last completed psync left it, or the one in
//! flight, and is attached at the address it always had.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_object::{Access, AttachOptions, Attachment, CreateObject, Objects};
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{CreateOptions, OpenOptions, Pool};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::crash::{CrashMedia, CrashState, Plan, Recording, Verdict, explore};
use aquifer_testkit::rng::Rng;
use aquifer_vm::dirty::TrackerForm;

const PAGE: usize = 4096;
const POOL_BYTES: u64 = 1 << 20;

/// Each page of an object by the stamp it is filled with.
type Content = Vec<u64>;
type Model = BTreeMap<String, Content>;

fn alone() -> OpenOptions {
    OpenOptions { exclusive: true, background: false, ..OpenOptions::default() }
}

fn open(media: &Arc<CrashMedia>) -> Objects {
    Objects::new(Pool::open_on(media.clone(), &alone()).unwrap())
}

/// What the program does: one psync, or one change of the set of objects.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Change {
    Create {
        name: String,
        pages: usize,
    },
    Destroy {
        name: String,
    },
    Resize {
        name: String,
        pages: usize,
    },
    /// Stores to pages of several objects, made durable together.
    Psync {
        pages: Vec<(String, usize)>,
        how: How,
    },
    Checkpoint,
    Reopen,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    /// One call that returns when all is durable.
    Wait,
    /// The program goes on, and stores to the same pages, while it becomes durable.
    Begin,
}

impl Change {
    fn random(rng: &mut Rng, model: &Model, id: u64) -> Change {
        let names: Vec<&String> = model.keys().collect();
        let kind = rng.below(100);
        if names.is_empty() || (kind < 10 && names.len() < 4) {
            return Change::Create {
                name: format!("object-{id}"),
                pages: 1 + rng.below(6) as usize,
            };
        }
        let name = names[rng.below(names.len() as u64) as usize].clone();
        match kind {
            10..18 => Change::Destroy { name },
            18..26 => Change::Resize { name, pages: 1 + rng.below(8) as usize },
            26..31 => Change::Checkpoint,
            31..35 => Change::Reopen,
            _ => {
                let several = if rng.chance(0.25) { 2 } else { 1 };
                let mut pages = Vec::new();
                let from = rng.below(names.len() as u64) as usize;
                for name in names.iter().cycle().skip(from).take(several.min(names.len())) {
                    let len = model[*name].len() as u64;
                    // Now and then more than a quarter of the log.
                    let count = if rng.chance(0.15) { len } else { 1 + rng.below(len.min(3)) };
                    let first = rng.below(len - count + 1);
                    pages.extend(
                        (first..first + count).map(|page| ((*name).clone(), page as usize)),
                    );
                }
                let how = if rng.chance(0.3) { How::Begin } else { How::Wait };
                Change::Psync { pages, how }
            }
        }
    }

    fn apply(&self, model: &mut Model, id: u64) {
        match self {
            Change::Create { name, pages } => {
                model.insert(name.clone(), vec![0; *pages]);
            }
            Change::Destroy { name } => {
                model.remove(name);
            }
            Change::Resize { name, pages } => {
                model.get_mut(name).expect("chosen from it").resize(*pages, 0);
            }
            Change::Psync { pages, .. } => {
                for (name, page) in pages {
                    model.get_mut(name).expect("chosen from it")[*page] = id;
                }
            }
            Change::Checkpoint | Change::Reopen => {}
        }
    }
}

/// The program: objects, and those it has attached.
struct Program {
    objects: Objects,
    attached: BTreeMap<String, Attachment>,
    form: Option<TrackerForm>,
}

fn store(attachment: &mut Attachment, page: usize, stamp: u64) {
    let bytes = attachment.as_mut_slice().unwrap();
    for word in bytes[page * PAGE..][..PAGE].chunks_exact_mut(8) {
        word.copy_from_slice(&stamp.to_le_bytes());
    }
}

impl Program {
    fn run(&mut self, media: &Arc<CrashMedia>, change: &Change, id: u64) {
        match change {
            Change::Create { name, pages } => {
                let how = CreateObject { relocatable: true, ..CreateObject::default() };
                self.objects.create(name, (pages * PAGE) as u64, &how).unwrap();
            }
            Change::Destroy { name } => {
                self.attached.remove(name);
                self.objects.destroy(name, None).unwrap();
            }
            Change::Resize { name, pages } => {
                self.attached.remove(name);
                self.objects.resize(name, (pages * PAGE) as u64, None).unwrap();
            }
            Change::Psync { pages, how } => self.psync(pages, *how, id),
            Change::Checkpoint => self.objects.pool().checkpoint().unwrap(),
            Change::Reopen => {
                self.attached.clear();
                // The old handle goes first: the media serve one open pool at a time.
                let placeholder =
                    Arc::new(CrashMedia::new(POOL_BYTES, media_domain(media)).unwrap());
                self.objects = make(&placeholder);
                self.objects = open(media);
            }
        }
    }

    fn psync(&mut self, pages: &[(String, usize)], how: How, id: u64) {
        for (name, page) in pages {
            let (objects, form) = (&self.objects, self.form);
            let attachment = self.attached.entry(name.clone()).or_insert_with(|| {
                let mut options = AttachOptions::default();
                options.tracker = form;
                // Some of the pages that hold nothing new are dropped all the time.
                options.shadow_budget_bytes = Some(2 * PAGE as u64);
                objects.attach_with(name, Access::Write, None, &options).unwrap()
            });
            store(attachment, *page, id);
        }
        let mut parts: Vec<&mut Attachment> = (self.attached.iter_mut())
            .filter(|(name, _)| pages.iter().any(|(other, _)| other == *name))
            .map(|(_, attachment)| attachment)
            .collect();
        match how {
            How::Wait => self.objects.psync_many(&mut parts).unwrap(),
            How::Begin => {
                let pending = self.objects.psync_many_begin(&mut parts).unwrap();
                // Not part of it: undone before the next psync, but a crash must not show it.
                let torn = u64::MAX;
                for (name, page) in pages {
                    store(self.attached.get_mut(name).unwrap(), *page, torn);
                }
                pending.wait().unwrap();
                for (name, page) in pages {
                    store(self.attached.get_mut(name).unwrap(), *page, id);
                }
            }
        }
    }
}

fn media_domain(media: &Arc<CrashMedia>) -> PersistenceDomain {
    aquifer_pool::media::Media::domain(&**media)
}

fn make(media: &Arc<CrashMedia>) -> Objects {
    let options =
        CreateOptions { inodes: Some(15), log_bytes: Some(64 << 10), ..CreateOptions::default() };
    Objects::new(Pool::create_on(media.clone(), &options, &alone()).unwrap())
}

fn record(
    seed: u64,
    changes: u64,
    domain: PersistenceDomain,
    form: Option<TrackerForm>,
) -> (Recording, Vec<Model>) {
    let fresh = Arc::new(CrashMedia::new(POOL_BYTES, domain).unwrap());
    drop(make(&fresh));
    let media = Arc::new(CrashMedia::from_image(&fresh.image(), domain).unwrap());
    let mut program = Program { objects: open(&media), attached: BTreeMap::new(), form };
    let mut rng = Rng::new(seed);
    let mut states = vec![Model::new()];
    media.begin(0);
    media.acknowledge(0);
    for id in 1..=changes {
        let mut model = states.last().unwrap().clone();
        let change = Change::random(&mut rng, &model, id);
        change.apply(&mut model, id);
        states.push(model);
        media.begin(id);
        program.run(&media, &change, id);
        media.acknowledge(id);
    }
    let recording = media.recording();
    drop(program);
    (recording, states)
}

/// All objects, read at their addresses.
fn contents(objects: &Objects) -> Result<Model, Box<dyn std::error::Error>> {
    let mut model = Model::new();
    for info in objects.list()? {
        let attachment = objects.attach(&info.name, Access::Read, None)?;
        if attachment.address() != info.address {
            return Err("attached elsewhere".into());
        }
        let mut content = Vec::new();
        for page in attachment.as_slice()?.chunks_exact(PAGE) {
            let words = page.as_chunks::<8>().0;
            if words.iter().any(|word| *word != words[0]) {
                return Err(format!("a page of {} holds two psyncs' bytes", info.name).into());
            }
            content.push(u64::from_le_bytes(words[0]));
        }
        model.insert(info.name.to_string(), content);
    }
    Ok(model)
}

fn check(state: &CrashState<'_>, states: &[Model]) -> Verdict {
    let media = Arc::new(state.media()?);
    let objects = Objects::new(Pool::open_on(media.clone(), &alone())?);
    let found = contents(&objects)?;
    let acknowledged = state.marks().last_acknowledged().unwrap_or(0);
    let in_flight = state.marks().in_flight().iter().next().copied();
    let mut allowed = [Some(acknowledged), in_flight].into_iter().flatten();
    match allowed.any(|id| states[id as usize] == found) {
        true => Ok(None),
        false => Err(format!(
            "found {found:?}, allowed are {:?} and {:?}",
            states[acknowledged as usize],
            in_flight.map(|id| &states[id as usize])
        )
        .into()),
    }
}

fn survives(domain: PersistenceDomain, form: Option<TrackerForm>) {
    if let Some(form) = form
        && let Err(error) = form.available()
    {
        println!("skipped: {error}");
        return;
    }
    let first = seed(100);
    let mut count = 0;
    for seed in first..first + steps(3) as u64 {
        let (recording, states) = record(seed, 40, domain, form);
        let plan = Plan { depth: 0, budget: 1200, seed };
        match explore(&recording, plan, |state| check(state, &states)) {
            Ok(explored) => count += explored.states(),
            Err(failure) => panic!("seed {seed}: {failure}"),
        }
    }
    println!("{count} crash states on {domain}");
}

#[test]
fn objects_survive_every_crash_on_a_disk() {
    survives(PersistenceDomain::PageCache, None);
}

#[test]
fn objects_survive_every_crash_on_persistent_memory() {
    survives(PersistenceDomain::Dax, None);
}

#[test]
fn objects_survive_every_crash_when_pages_are_compared() {
    survives(PersistenceDomain::PageCache, Some(TrackerForm::Compare));
}
