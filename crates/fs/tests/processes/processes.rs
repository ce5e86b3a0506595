//! Several processes run random operations on one pool and are killed at random times, on all
//! persistence domains. Afterwards the pool is sound, every step that a process reported is there,
//! and nothing is kept for the dead.
//!
//! Each domain has about 45 kills, and 450 in the full suite.

use std::collections::BTreeMap;

use crate::actor::{Actor, hear, say, told};
use crate::killed::{LOG, SHARED, State, Step, Turn, Worker, assert_uniform, read_open, records};
use crate::scratch::soundness::assert_sound;
use crate::scratch::{Scratch, names, read_all};
use aquifer_fs::Files;
use aquifer_pool::media::PersistenceDomain;
use aquifer_pool::{Pool, PoolOptions};
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;

const WORKERS: usize = 3;

pub const ROLES: &[aquifer_testkit::child::Role] = &[("worker", worker), ("reader", reader)];

fn options(domain: PersistenceDomain) -> PoolOptions {
    Pool::options().domain(domain)
}

fn domain_told() -> PersistenceDomain {
    let told = told("DOMAIN");
    let all = [PersistenceDomain::Dax, PersistenceDomain::PageCache, PersistenceDomain::Volatile];
    all.into_iter().find(|domain| domain.to_string() == told).expect("a domain")
}

/// Works until it is killed.
fn worker() {
    let files = Files::new(options(domain_told()).open(told("POOL")).unwrap());
    let mut rng = Rng::new(told("SEED").parse().unwrap());
    let mut worker = Worker::new(files, &told("OWN"), told("NUMBER").parse().unwrap());
    say("ready");
    hear();
    for count in 0u64.. {
        worker.take(Turn::random(&mut rng));
        say(count);
    }
}

/// Reads everything until it is killed; has the pool open read-only.
fn reader() {
    let reading = options(domain_told()).read_only(true);
    let files = Files::new(reading.open(told("POOL")).unwrap());
    say("ready");
    loop {
        for path in ["shared", "own 0", "own 1", "own 2"] {
            for name in names(&files, path).unwrap() {
                let path = format!("{path}/{}", name.display());
                // It may have been removed, or be a directory or a symbolic link.
                let Ok(content) = read_open(&files, &path) else { continue };
                match path.strip_prefix("shared/") {
                    Some("log") => drop(records(&content)),
                    Some(_) => assert_uniform(&content, &path),
                    None => {}
                }
            }
        }
    }
}

/// Checks the directory of a killed worker: `done` turns were completed, and perhaps a part of one
/// more. Returns the possible numbers of its records.
fn check_own(
    files: &Files,
    own: &str,
    before: &mut State,
    seed: u64,
    done: u64,
) -> std::ops::RangeInclusive<u32> {
    let mut rng = Rng::new(seed);
    let mut turns = std::iter::repeat_with(|| Turn::random(&mut rng).step);
    let mut recorded = 0;
    for step in turns.by_ref().take(done as usize) {
        before.apply(step);
        recorded += u32::from(matches!(step, Step::Record { .. }));
    }
    let next = turns.next().expect("it never ends");
    let found = State::found(files, own);
    assert!(
        found.may_be_between(before, next),
        "{own}, seed {seed}, {done} done, then {next:?}: found {}\nbefore {}",
        found.summary(),
        before.summary()
    );
    *before = found;
    recorded..=recorded + u32::from(matches!(next, Step::Record { .. }))
}

fn killed_processes_leave_what_they_had_done(
    domain: PersistenceDomain,
    scratch: Scratch,
    rounds: usize,
    start: impl Fn(&[(&str, &str)]) -> std::io::Result<Actor>,
) {
    let open = || Files::new(options(domain).open(&scratch.path).unwrap());
    let files = open();
    files.create_dir("shared").unwrap();
    let owns: Vec<String> = (0..WORKERS).map(|worker| format!("own {worker}")).collect();
    owns.iter().for_each(|own| files.create_dir(own).unwrap());
    drop(files);
    let domain_name = domain.to_string();
    let mut states = vec![State::default(); WORKERS];
    let mut rng = Rng::new(seed(5));
    let (mut kills, mut done) = (0, 0);
    for _ in 0..steps(rounds) {
        // Sometimes another process keeps the pool open; otherwise it is recovered.
        let files = open();
        files.create_file(LOG).unwrap();
        let staying = rng.chance(0.5).then_some(files);
        let mut workers: Vec<(usize, u64, Actor)> = Vec::new();
        for (index, own) in owns.iter().enumerate() {
            let seed = rng.next_u64();
            let told = [
                ("OWN", own.as_str()),
                ("SEED", &seed.to_string()),
                ("NUMBER", &index.to_string()),
                ("DOMAIN", &domain_name),
            ];
            match start(&told) {
                Ok(worker) => workers.push((index, seed, worker)),
                Err(error) => return eprintln!("skipped: no worker can be started: {error}"),
            }
        }
        for (_, _, worker) in &mut workers {
            worker.until("ready");
        }
        // Not earlier: a reader that opens the pool first keeps writers out.
        let mut reader = rng
            .chance(0.5)
            .then(|| Actor::start("reader", &scratch.path, &[("DOMAIN", domain_name.as_str())]));
        if let Some(reader) = &mut reader {
            reader.until("ready");
        }
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
            assert!(worker.is_running(), "worker {index}, seed {seed}, has ended by itself");
            said.extend(worker.kill());
            kills += 1;
            let counted = said.iter().filter_map(|line| line.parse::<u64>().ok()).max();
            ended.push((index, seed, counted.map_or(0, |last| last + 1)));
            // End the reader at a random time: the last process with the pool open may be either
            // kind.
            if workers.len() as u64 == rng.below(WORKERS as u64)
                && let Some(reader) = reader.take()
            {
                kills += end_reader(reader);
            }
        }
        let files = open();
        let mut recorded = BTreeMap::new();
        for (index, seed, count) in ended {
            done += count;
            let range = check_own(&files, &owns[index], &mut states[index], seed, count);
            recorded.insert(index as u8, range);
        }
        let found = records(&read_all(&files, LOG).unwrap());
        for (worker, allowed) in recorded {
            let count = found.get(&worker).copied().unwrap_or(0);
            assert!(allowed.contains(&count), "{count} records of {worker}, not {allowed:?}");
        }
        for name in names(&files, "shared").unwrap().into_iter().filter(|name| name != "log") {
            let path = format!("shared/{}", name.display());
            assert!(name.to_str().unwrap().parse::<u64>().is_ok_and(|name| name < SHARED));
            assert_uniform(&read_all(&files, &path).unwrap(), &path);
        }
        assert_sound(files.pool());
        kills += reader.map_or(0, end_reader);
        let is_alone = staying.is_none();
        drop((files, staying));
        if is_alone {
            let files = open();
            assert!(files.pool().orphans().unwrap().is_empty(), "what the dead had open is kept");
            drop(files);
            scratch.assert_clean();
        }
    }
    println!("{domain}: {kills} kills, {done} turns");
}

/// Ends the reader, which must still be running.
fn end_reader(mut reader: Actor) -> u64 {
    assert!(reader.is_running(), "a reader found something wrong");
    reader.kill();
    1
}

fn create(options: PoolOptions) -> PoolOptions {
    // A log small enough to be checkpointed now and then.
    options.inodes(1023).log_bytes(512 << 10)
}

fn run(domain: PersistenceDomain, scratch: Scratch) {
    let path = scratch.path.clone();
    let start = |told: &[(&str, &str)]| Ok(Actor::start("worker", &path, told));
    killed_processes_leave_what_they_had_done(domain, scratch, 14, start);
}

#[test]
fn killed_in_memory() {
    run(PersistenceDomain::Volatile, Scratch::with_pool(16 << 20, &create(Pool::options())));
}

#[test]
fn killed_on_persistent_memory() {
    run(PersistenceDomain::Dax, Scratch::with_pool(16 << 20, &create(Pool::options())));
}

#[test]
fn killed_on_a_disk() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool");
    let domain = PersistenceDomain::PageCache;
    drop(create(options(domain)).create(&path, 16 << 20).unwrap());
    run(domain, Scratch { directory, path });
}

/// Each of them sees itself as process number 1.
#[test]
fn killed_in_namespaces_of_processes() {
    let scratch = Scratch::with_pool(16 << 20, &create(Pool::options()));
    let path = scratch.path.clone();
    let start = |told: &[(&str, &str)]| Actor::start_in_namespace("worker", &path, told);
    killed_processes_leave_what_they_had_done(PersistenceDomain::Volatile, scratch, 4, start);
}
