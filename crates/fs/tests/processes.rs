//! Several processes at random operations on one pool, each of them killed at some time. Afterwards the pool is sound, everything
//! that a process said it had done is there, and nothing is kept for the dead.
//!
//! Each process works in a directory of its own, and replaces files of a shared one, whole and atomically: a file there has the
//! bytes of one writer. Before it does something it says what it will do, and after that that it has done it; so its parent knows the state
//! of its directory, give or take the operation that it was killed in.

#[path = "../../object/tests/support/actor.rs"]
mod actor;
mod scratch;

use std::collections::BTreeMap;

use actor::{Actor, hear, say, told};
use aquifer_fs::{FileOptions, Files};
use aquifer_pool::{CreateOptions, OpenOptions};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::child;
use aquifer_testkit::rng::Rng;
use scratch::soundness::assert_sound;
use scratch::{Scratch, names, read_all};

const WORKERS: usize = 3;
const SHARED: u64 = 3;

/// The roles of children. Not a test by itself.
#[test]
fn child() {
    child::play(&[("worker", worker)]);
}

/// One operation in a worker's own directory, or on the shared one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Writes a file anew: a byte, and how often.
    Put {
        file: u64,
        byte: u8,
        len: u64,
    },
    /// Writes at the end.
    Append {
        file: u64,
        byte: u8,
        len: u64,
    },
    Remove {
        file: u64,
    },
    Rename {
        from: u64,
        to: u64,
    },
    /// Replaces a file of the shared directory.
    Publish {
        file: u64,
        byte: u8,
        len: u64,
    },
    /// Opens a file, removes it, and keeps it open.
    Orphan {
        byte: u8,
        len: u64,
    },
}

impl Step {
    fn random(rng: &mut Rng) -> Step {
        let (file, byte) = (rng.below(4), 1 + rng.below(255) as u8);
        let len = if rng.chance(0.5) { 1 + rng.below(100) } else { 1 + rng.below(30_000) };
        match rng.below(10) {
            0..3 => Step::Put { file, byte, len },
            3..5 => Step::Append { file, byte, len },
            5 => Step::Remove { file },
            6 => Step::Rename { from: file, to: rng.below(4) },
            7..9 => Step::Publish { file: rng.below(SHARED), byte, len },
            _ => Step::Orphan { byte, len },
        }
    }

    fn run(self, files: &Files, own: &str, kept: &mut Vec<aquifer_fs::File>) {
        let path = |file: u64| format!("{own}/{file}");
        let is_fine = |outcome: Result<(), aquifer_fs::FsError>| match outcome {
            Err(error) if error.errno() == libc::ENOENT => {}
            outcome => outcome.unwrap_or_else(|error| panic!("{self:?}: {error}")),
        };
        match self {
            Step::Put { file, byte, len } => {
                // Made beside it, and moved into its place: so that a kill leaves the old or the new one.
                let new = format!("{own}/new");
                files.create_file(&new).unwrap().write_at(&vec![byte; len as usize], 0).unwrap();
                files.rename(&new, path(file)).unwrap();
            }
            Step::Append { file, byte, len } => {
                let options = FileOptions::new().append(true).create(true);
                let file = files.open_with(path(file), &options).unwrap();
                file.write_at(&vec![byte; len as usize], 0).unwrap();
            }
            Step::Remove { file } => is_fine(files.remove_file(path(file))),
            Step::Rename { from, to } => is_fine(files.rename(path(from), path(to))),
            Step::Publish { file, byte, len } => {
                let new = format!("{own}/new");
                let open = files.create_file(&new).unwrap();
                for part in 0..3 {
                    open.write_at(&vec![byte; len as usize], part * len).unwrap();
                }
                drop(open);
                files.rename(&new, format!("shared/{file}")).unwrap();
            }
            Step::Orphan { byte, len } => {
                let orphan = format!("{own}/orphan");
                let open = files.create_file(&orphan).unwrap();
                files.remove_file(&orphan).unwrap();
                open.write_at(&vec![byte; len as usize], 0).unwrap();
                kept.truncate(3);
                kept.insert(0, open);
            }
        }
    }

    fn apply(self, model: &mut BTreeMap<u64, Vec<u8>>) {
        match self {
            Step::Put { file, byte, len } => drop(model.insert(file, vec![byte; len as usize])),
            Step::Append { file, byte, len } => {
                model.entry(file).or_default().extend(std::iter::repeat_n(byte, len as usize));
            }
            Step::Remove { file } => drop(model.remove(&file)),
            Step::Rename { from, to } if from != to => {
                if let Some(content) = model.remove(&from) {
                    model.insert(to, content);
                }
            }
            _ => {}
        }
    }
}

/// Works until it is killed.
fn worker() {
    let files = Files::open(told("POOL"), &OpenOptions::default()).unwrap();
    let own = told("OWN");
    let mut rng = Rng::new(told("SEED").parse().unwrap());
    let mut kept = Vec::new();
    say("ready");
    hear();
    for count in 0u64.. {
        Step::random(&mut rng).run(&files, &own, &mut kept);
        say(count);
        if rng.chance(0.02) {
            files.sync().unwrap();
        }
        let shared = format!("shared/{}", rng.below(SHARED));
        if let Ok(content) = read_all_of_shared(&files, &shared) {
            assert_uniform(&content, &shared);
        }
    }
}

/// Others replace it meanwhile: what is open stays what it was.
fn read_all_of_shared(files: &Files, path: &str) -> Result<Vec<u8>, aquifer_fs::FsError> {
    let file = files.open_file(path)?;
    let mut content = vec![0; file.metadata()?.len() as usize];
    let got = file.read_at(&mut content, 0)?;
    assert_eq!(got, content.len(), "{path}");
    Ok(content)
}

fn assert_uniform(content: &[u8], path: &str) {
    assert!(
        !content.is_empty() && content.iter().all(|byte| *byte == content[0]),
        "{path} is mixed"
    );
}

/// What a killed worker's directory may be: `done` operations are, and one more may be, in part if it is an append.
fn check_own(files: &Files, own: &str, before: &mut BTreeMap<u64, Vec<u8>>, seed: u64, done: u64) {
    let mut rng = Rng::new(seed);
    let mut expected = before.clone();
    let mut next = None;
    for count in 0..=done {
        let step = Step::random(&mut rng);
        match count == done {
            true => next = Some(step),
            false => step.apply(&mut expected),
        }
        // As the worker draws.
        if count < done {
            rng.chance(0.02);
            rng.below(SHARED);
        }
    }
    let mut found = BTreeMap::new();
    for name in names(files, own).unwrap() {
        let path = format!("{own}/{}", name.display());
        match name.to_str().unwrap().parse::<u64>() {
            Ok(file) => drop(found.insert(file, read_all(files, &path).unwrap())),
            // What was being made.
            Err(_) => files.remove_file(&path).unwrap(),
        }
    }
    let step = next.unwrap();
    let mut after = expected.clone();
    step.apply(&mut after);
    // An append makes the file first.
    let mut empty = expected.clone();
    if let Step::Append { file, .. } = step {
        empty.entry(file).or_default();
    }
    let lens = |model: &BTreeMap<u64, Vec<u8>>| -> Vec<(u64, usize)> {
        model.iter().map(|(file, content)| (*file, content.len())).collect()
    };
    assert!(
        [&expected, &after, &empty].contains(&&found),
        "{own}, seed {seed}, {done} done, then {step:?}: found {:?}, before {:?}, after {:?}",
        lens(&found),
        lens(&expected),
        lens(&after)
    );
    *before = found;
}

#[test]
fn killed_processes_leave_what_they_had_done() {
    let create = CreateOptions { inodes: Some(1023), ..CreateOptions::default() };
    let scratch = Scratch::with_pool(16 << 20, &create);
    let files = scratch.open();
    files.create_dir("shared").unwrap();
    let owns: Vec<String> = (0..WORKERS).map(|worker| format!("own {worker}")).collect();
    owns.iter().for_each(|own| files.create_dir(own).unwrap());
    drop(files);
    let mut models = vec![BTreeMap::new(); WORKERS];
    let mut rng = Rng::new(seed(5));
    let (mut kills, mut done) = (0, 0);
    for _ in 0..steps(34) {
        // Sometimes somebody stays, and the pool lives on; sometimes it is recovered.
        let staying = rng.chance(0.5).then(|| scratch.open());
        let mut workers: Vec<(usize, u64, Actor)> = (owns.iter().enumerate())
            .map(|(index, own)| {
                let seed = rng.next_u64();
                let told = [("OWN", own.as_str()), ("SEED", &seed.to_string())];
                (index, seed, Actor::start("worker", &scratch.path, &told))
            })
            .collect();
        for (_, _, worker) in &mut workers {
            worker.until("ready");
        }
        // Who opens the pool reaps inodes without names, so all have it open before one makes such.
        workers.iter_mut().for_each(|(_, _, worker)| worker.tell("go"));
        let mut ended = Vec::new();
        while !workers.is_empty() {
            let chosen = rng.below(workers.len() as u64) as usize;
            let (index, seed, mut worker) = workers.swap_remove(chosen);
            let mut said: Vec<String> =
                (0..rng.below(60)).map(|_| worker.hears().expect("it works")).collect();
            for _ in 0..rng.below(300) {
                std::thread::yield_now();
            }
            said.extend(worker.kill());
            kills += 1;
            let counted = said.iter().filter_map(|line| line.parse::<u64>().ok()).max();
            ended.push((index, seed, counted.map_or(0, |last| last + 1)));
        }
        let files = scratch.open();
        for (index, seed, count) in ended {
            done += count;
            check_own(&files, &owns[index], &mut models[index], seed, count);
        }
        for name in names(&files, "shared").unwrap() {
            let path = format!("shared/{}", name.display());
            assert_uniform(&read_all(&files, &path).unwrap(), &path);
        }
        assert_sound(files.pool());
        let is_alone = staying.is_none();
        drop((files, staying));
        if is_alone {
            let files = scratch.open();
            assert!(files.pool().orphans().unwrap().is_empty(), "what the dead had open is kept");
            drop(files);
            scratch.assert_clean();
        }
    }
    println!("{kills} kills, {done} operations");
}
