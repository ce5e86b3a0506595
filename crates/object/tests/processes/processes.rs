//! Objects across processes: access control, the state after a process is killed, and valid
//! pointers.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::actor::{Actor, command, hear, say, told};
use crate::support::{PAGE, Place, Wrapped, attach_for, load, load_all, store};
use aquifer_check::CheckOptions;
use aquifer_object::{Access, Attachment, ObjectError, ObjectOptions, ObjectState, Objects};
use aquifer_pool::Pool;
use aquifer_pool::media;
use aquifer_testkit::campaign::{seed, steps};
use aquifer_testkit::rng::Rng;
use aquifer_testkit::watchdog::wait_until;

pub const ROLES: &[aquifer_testkit::child::Role] = &[
    ("holder", holder),
    ("counter", counter),
    ("checker", checker),
    ("builder", builder),
    ("walker", walker),
    ("stuck writer", stuck_writer),
    ("resizer", resizer),
];

fn objects() -> Objects {
    Objects::open(told("POOL")).unwrap()
}

fn attach_as_told(objects: &Objects, name: &str) -> Result<Attachment, ObjectError> {
    if told("ACCESS") == "read" { objects.attach(name) } else { objects.attach_mut(name) }
}

// ---- a holder that dies between its change and the image ----------------------------------------

/// Resizes an object, and dies in it.
fn resizer() {
    objects().resize("object", PAGE as u64).unwrap();
}

/// A process dies when its change of an object is published and not in the image yet. The next one
/// finds the object as it is then, whatever it does with it, and has no page that others get.
#[test]
fn the_next_holder_sees_the_last_change_of_a_dead_one() {
    let all = ["resize", "attach", "read", "read by a reader"];
    let points = ["transact-published", "apply-odd", "apply-stored"];
    for (point, then) in points.into_iter().flat_map(|point| all.map(|then| (point, then))) {
        let place = Place::new();
        let objects = place.create(4 << 20, 1 << 20);
        let create = |name: &str, pages: usize, value| {
            objects.create(name, (pages * PAGE) as u64)?;
            let mut attached = objects.attach_mut(name).unwrap();
            (0..pages).for_each(|page| store(&mut attached, page, value));
            attached.psync()
        };
        create("object", 8, 7).unwrap();
        let reader = place.open_for_reading();
        let told = [("AQUIFER_DIE_AT", point)];
        let mut resizer = command("resizer", &place.path(), &told);
        let died = resizer.stdout(Stdio::null()).status().unwrap();
        assert_eq!(died.signal(), Some(libc::SIGABRT));

        let (mut kept, mut pages) = (None, 1);
        match then {
            "resize" => {
                pages = 3;
                objects.resize("object", 3 * PAGE as u64).unwrap();
            }
            "attach" => kept = Some(objects.attach_mut("object").unwrap()),
            "read" => kept = Some(objects.attach("object").unwrap()),
            _ => kept = Some(reader.attach("object").unwrap()),
        }
        // Others take all pages that are free now.
        objects.pool().checkpoint().unwrap();
        let others: Vec<(String, usize)> = (0..10)
            .rev()
            .flat_map(|bits| (0..2).map(move |copy| (format!("{bits} {copy}"), 1 << bits)))
            .filter(|(name, pages)| create(name, *pages, 9).is_ok())
            .collect();
        objects.pool().checkpoint().unwrap();
        if let Some(mut attached) = kept {
            assert_eq!(load(&attached, 0), 7, "{point}, {then}");
            let found = load_all(&attached);
            assert!(found.iter().all(|value| *value == 7), "{point}, {then}: {found:?}");
            if then == "attach" {
                (0..found.len()).for_each(|page| store(&mut attached, page, 7));
                attached.psync().unwrap();
            }
        }
        let attached = objects.attach("object").unwrap();
        assert_eq!(load_all(&attached), [7, 0, 0][..pages], "{point}, {then}");
        for (name, pages) in others {
            let attached = objects.attach(&name).unwrap();
            assert_eq!(load_all(&attached), vec![9; pages], "{point}, {then}: {name}");
        }
        drop(attached);
        drop(reader);
        drop(objects);
        let report = aquifer_check::check(&place.path(), &CheckOptions::default()).unwrap();
        assert!(report.findings.is_empty(), "{point}, {then}: {report:?}");
    }
}

// ---- access control -----------------------------------------------------------------------------

/// Attaches, and detaches on the parent's command.
fn holder() {
    let objects = objects();
    let attached = attach_as_told(&objects, "object").unwrap();
    say(format!("attached at {:#x}", attached.address()));
    hear();
    attached.detach().unwrap();
    say("detached");
    hear();
}

fn outcome(objects: &Objects, access: Access) -> Result<Attachment, Option<u32>> {
    attach_for(access, ObjectOptions::new(), objects, "object").map_err(|error| match error {
        ObjectError::Attached { holder, .. } => holder,
        other => panic!("{other}"),
    })
}

/// The table of the paper's second figure, row by row.
#[test]
fn one_process_writes_or_many_read() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    objects.create("object", 1).unwrap();
    let start = |access| {
        let mut holder = Actor::start("holder", &place.path(), &[("ACCESS", access)]);
        let pid = holder.pid();
        assert!(holder.hears().unwrap().starts_with("attached at 0x"));
        (holder, pid)
    };
    let (mut writer, pid) = start("write");
    for access in [Access::Read, Access::Write] {
        assert_eq!(outcome(&objects, access).map(drop), Err(Some(pid)));
    }
    assert_eq!(objects.state_of("object").unwrap(), ObjectState::Writing);
    writer.tell("detach");
    writer.until("detached");
    let (readers, pid) = (start("read"), start("read").1);
    drop(outcome(&objects, Access::Read).unwrap());
    let held = outcome(&objects, Access::Write).map(drop).unwrap_err();
    assert!(held == Some(pid) || held == Some(readers.1), "{held:?}");
    assert_eq!(objects.state_of("object").unwrap(), ObjectState::Reading);
    assert!(matches!(objects.destroy("object"), Err(ObjectError::Attached { .. })));
    writer.finish();
}

#[test]
fn a_dead_owner_does_not_block() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    objects.create("object", 1).unwrap();
    for access in ["read", "write"] {
        for _ in 0..steps(5) {
            let mut holder = Actor::start("holder", &place.path(), &[("ACCESS", access)]);
            holder.hears().unwrap();
            outcome(&objects, Access::Write).unwrap_err();
            holder.kill();
            outcome(&objects, Access::Write).unwrap().detach().unwrap();
        }
    }
}

#[test]
fn namespaces_of_processes_are_seen_through() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    objects.create("object", 1).unwrap();
    let told = [("ACCESS", "write")];
    let mut holder = match Actor::start_in_namespace("holder", &place.path(), &told) {
        Ok(holder) => holder,
        Err(error) => return eprintln!("skipped: no PID namespace can be made here: {error}"),
    };
    assert!(holder.hears().unwrap().starts_with("attached at 0x"));
    for access in [Access::Read, Access::Write] {
        let told_as = outcome(&objects, access).map(drop).unwrap_err();
        assert_eq!(told_as, Some(1), "as it numbers itself");
    }
    holder.kill();
    // The process in the namespace is killed a moment after its parent process.
    wait_until("a killed holder's object", || objects.attach_mut("object").is_ok());
}

// ---- killed writers -----------------------------------------------------------------------------

const COUNTED: usize = 40;

/// Counts in all pages of one object, or of two together, and reports each number that is durable.
fn counter() {
    let objects = objects();
    let mut a = objects.attach_mut("a").unwrap();
    let mut b = objects.attach_mut("b").unwrap();
    let mut rng = Rng::new(told("SEED").parse().unwrap());
    say("counting");
    for number in load(&a, 0) + 1.. {
        // Sometimes more than fits in the log, sometimes only the pages that identify the number.
        let pages = if rng.chance(0.2) { COUNTED } else { 2 };
        for page in 0..pages {
            store(&mut a, page, number);
        }
        store(&mut a, COUNTED, pages as u64);
        store(&mut b, 0, number);
        match rng.below(3) {
            0 => {
                let pending = objects.psync_many_begin(&mut [&mut a, &mut b]).unwrap();
                if rng.chance(0.5) {
                    pending.wait().unwrap();
                } else {
                    continue;
                }
            }
            _ => objects.psync_many(&mut [&mut b, &mut a]).unwrap(),
        }
        say(number);
    }
}

/// Reads both objects, separately and together.
fn checker() {
    let objects = match told("ACCESS").as_str() {
        "read" => {
            let options = Pool::options().read_only(true);
            Objects::new(options.open(told("POOL")).unwrap())
        }
        _ => objects(),
    };
    let a = attach_as_told(&objects, "a").unwrap();
    let b = attach_as_told(&objects, "b").unwrap();
    assert_eq!(load(&a, 0), load(&b, 0), "both are of one commit");
    assert_eq!(load(&a, 0), load(&a, 1));
    if load(&a, COUNTED) == COUNTED as u64 {
        assert!(load_all(&a)[..COUNTED].iter().all(|&number| number == load(&a, 0)), "torn");
    }
    say(load(&a, 0));
    hear();
}

#[test]
fn a_killed_writer_leaves_its_last_psync_or_the_one_in_flight() {
    let place = Place::new();
    let path = place.path();
    let objects = place.create(8 << 20, 64 << 10);
    let size = (PAGE * (COUNTED + 1)) as u64;
    ["a", "b"].iter().for_each(|name| drop(objects.create(name, size)));
    drop(objects);
    let seed = seed(21);
    let mut rng = Rng::new(seed);
    let mut reached = 0;
    for round in 0..steps(40) {
        // Sometimes another process keeps the pool open; sometimes the pool is recovered.
        let staying = rng.chance(0.5).then(|| place.open());
        let mut writer = Actor::start("counter", &path, &[("SEED", &rng.next_u64().to_string())]);
        writer.until("counting");
        let mut said: Vec<String> =
            (0..rng.below(20)).map(|_| writer.hears().expect("it counts")).collect();
        for _ in 0..rng.below(500) {
            std::thread::yield_now();
        }
        said.extend(writer.kill());
        let acknowledged =
            said.iter().filter_map(|line| line.parse().ok()).max().unwrap_or(reached);
        let mut found = None;
        for access in [["read", "write"], ["write", "read"]][rng.below(2) as usize] {
            let mut checker = Actor::start("checker", &path, &[("ACCESS", access)]);
            let number: u64 = checker.hears().expect("whole objects").parse().unwrap();
            checker.finish();
            // A reader that cannot resolve the commit in flight sees the previous content; once
            // resolved, it stays so.
            assert!(
                number >= acknowledged,
                "round {round}, seed {seed}: {number} < {acknowledged}"
            );
            assert!(found.is_none_or(|before| before <= number), "round {round}, seed {seed}");
            found = Some(number);
        }
        reached = found.unwrap();
        drop(staying);
    }
    println!("counted to {reached}");
}

// ---- pointers -----------------------------------------------------------------------------------

#[repr(C)]
struct Node {
    number: u64,
    next: *mut Node,
}

/// Builds a list with plain pointers, whose nodes alternate between two objects.
fn builder() {
    let objects = objects();
    let mut one = objects.attach_mut("one").unwrap();
    let mut other = objects.attach_mut("other").unwrap();
    let starts = [one.start(), other.start()].map(|start| start.cast::<Node>().as_ptr());
    for number in 0..100usize {
        // SAFETY: both objects have room for fifty nodes, and no other code uses them.
        let (node, next) = unsafe {
            (starts[number % 2].add(number / 2), starts[(number + 1) % 2].add(number.div_ceil(2)))
        };
        let next = if number == 99 { std::ptr::null_mut() } else { next };
        // SAFETY: as above.
        unsafe { node.write(Node { number: number as u64, next }) };
    }
    objects.psync_many(&mut [&mut one, &mut other]).unwrap();
}

/// Follows the list.
fn walker() {
    let objects = objects();
    let one = objects.attach("one").unwrap();
    let _other = objects.attach("other").unwrap();
    let mut numbers = Vec::new();
    let mut node = one.start().cast::<Node>().as_ptr();
    while !node.is_null() {
        // SAFETY: a node that another process left in an attached object.
        let found = unsafe { node.read() };
        numbers.push(found.number);
        node = found.next;
    }
    assert!(numbers.iter().copied().eq(0..100), "{numbers:?}");
    say("walked");
}

#[test]
fn plain_pointers_hold_between_processes_and_restarts() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    for name in ["one", "other"] {
        objects.create(name, PAGE as u64).unwrap();
    }
    Actor::start("builder", &place.path(), &[]).finish();
    Actor::start("walker", &place.path(), &[]).until("walked");
    drop(objects);
    // No process has the pool open: the next one recovers it.
    Actor::start("walker", &place.path(), &[]).until("walked");
    Actor::start("walker", &place.path(), &[]).until("walked");
    // Removes the shared memory of the killed process.
    drop(place.open());
}

// ---- states -------------------------------------------------------------------------------------

fn stuck_writer() {
    let media = media::open(Path::new(&told("POOL")), true, None).unwrap();
    let mut media = Wrapped::new(media);
    let is_armed = Arc::new(AtomicBool::new(false));
    let (armed, is_written) = (is_armed.clone(), std::env::var("WRITTEN").is_ok());
    // Blocks the next durable write until it is released: before the write, or after it.
    media.on_write_durable = Box::new(move |write| {
        let is_armed = armed.swap(false, Ordering::SeqCst);
        if is_armed && is_written {
            write()?;
        }
        if is_armed {
            say("writing");
            hear();
        }
        write()
    });
    let options = Pool::options().background(false);
    let objects = Objects::new(options.open_on(Arc::new(media)).unwrap());
    let mut attached = objects.attach_mut("object").unwrap();
    store(&mut attached, 0, 5);
    say("stored");
    hear();
    is_armed.store(true, Ordering::SeqCst);
    attached.psync().unwrap();
    say("committed");
    hear();
    attached.detach().unwrap();
    say("detached");
    hear();
}

#[test]
fn the_states_are_seen_by_other_processes() {
    let place = Place::new();
    let objects = place.create(8 << 20, 1 << 20);
    objects.create("object", 1).unwrap();
    let state = || objects.state_of("object").unwrap();
    let mut writer = Actor::start("stuck writer", &place.path(), &[]);
    writer.until("stored");
    assert_eq!(state(), ObjectState::Writing);
    writer.tell("commit");
    writer.until("writing");
    assert_eq!(state(), ObjectState::Persisting);
    let holder = objects.info("object").unwrap().holders[0];
    assert_eq!((holder.pid, holder.is_committing), (writer.pid(), true));
    writer.tell("go on");
    writer.until("committed");
    assert_eq!(state(), ObjectState::Copying);
    writer.tell("detach");
    writer.until("detached");
    assert_eq!(state(), ObjectState::Copying);
    let attached = objects.attach("object").unwrap();
    assert_eq!((state(), load(&attached, 0)), (ObjectState::Reading, 5));
    attached.detach().unwrap();
    assert_eq!(state(), ObjectState::Detached);
    writer.finish();
}

/// Killed with its record reserved, written or not: the next writer resolves it, and the paper's
/// recovery figure holds for one process as well. The result does not change afterwards.
#[test]
fn a_writer_killed_while_persisting_leaves_one_state_or_the_other() {
    for (told, decided) in [(&[][..], 0), (&[("WRITTEN", "yes")], 5)] {
        let place = Place::new();
        let objects = place.create(8 << 20, 1 << 20);
        objects.create("object", 2 * PAGE as u64).unwrap();
        let reading = place.open_for_reading();
        let mut writer = Actor::start("stuck writer", &place.path(), told);
        writer.until("stored");
        writer.tell("commit");
        writer.until("writing");
        writer.kill();
        // A process that cannot resolve the commit sees the previous content, even after another
        // process has resolved it.
        let undecided = reading.attach("object").unwrap();
        assert_eq!(load(&undecided, 0), 0);
        objects.create("other", 1).unwrap();
        objects.pool().checkpoint().unwrap();
        assert_eq!(load(&undecided, 0), 0);
        drop(undecided);
        let mut attached = objects.attach_mut("object").unwrap();
        assert_eq!(load(&attached, 0), decided);
        store(&mut attached, 1, 9);
        attached.psync().unwrap();
        attached.detach().unwrap();
        drop((objects, reading));
        let objects = place.open();
        let attached = objects.attach("object").unwrap();
        assert_eq!((load(&attached, 0), load(&attached, 1)), (decided, 9));
    }
}

/// The same, with the next writer as the first process to look.
#[test]
fn the_next_writer_decides_before_it_sees_anything() {
    for (told, decided) in [(&[][..], 0), (&[("WRITTEN", "yes")], 5)] {
        let place = Place::new();
        let objects = place.create(8 << 20, 1 << 20);
        objects.create("object", 2 * PAGE as u64).unwrap();
        let mut writer = Actor::start("stuck writer", &place.path(), told);
        writer.until("stored");
        writer.tell("commit");
        writer.until("writing");
        writer.kill();
        let mut attached = objects.attach_mut("object").unwrap();
        let seen = load(&attached, 0);
        store(&mut attached, 1, 9);
        attached.psync().unwrap();
        drop((attached, objects));
        let objects = place.open();
        let attached = objects.attach("object").unwrap();
        assert_eq!((load(&attached, 0), load(&attached, 1)), (seen, 9));
        assert_eq!(seen, decided);
    }
}
