//! No static of the libraries is a lock that a fork can leave locked.
//!
//! A thread of the parent may hold a lock at the fork, or be initialising a `OnceLock`: in the child it
//! stays so for ever. So the type of each static is one that cannot be left so: an atomic, a value of one
//! process ([`PerProcess`](aquifer_vm::PerProcess)), or a value that any number of threads may make at once
//! and the first one stays (`OnceBox`, `OnceBool`). Others are named here, with the reason.

use std::path::{Path, PathBuf};

/// A prefix of the type.
const SAFE: [&str; 12] = [
    "AtomicBool",
    "AtomicI32",
    "AtomicPtr<",
    "AtomicU32",
    "AtomicU64",
    "AtomicUsize",
    "Cell<",
    "OnceBool",
    "OnceBox<",
    "PerProcess<",
    "RefCell<",
    "[AtomicPtr<",
];
/// Types without interior mutability.
const CONSTANT: [&str; 3] = ["&[", "[u8;", "u8"];

/// Path, name, and why it is none of the above.
const OTHERS: [(&str, &str, &str); 12] = [
    ("crates/cache/src/sync.rs", "FUTEXES", "of loom's models, which do not fork"),
    ("crates/mapper/src/identity.rs", "KNOWN", "`ByDevice` is made of atomics"),
    ("crates/mapper/src/read_once.rs", "BY_DEVICE", "`ByDevice` is made of atomics"),
    (
        "crates/pheap/src/heap/recorded.rs",
        "HEAPS",
        "`Registry` is an atomic, and each process makes its own table",
    ),
    (
        "crates/pheap/src/heap/shared.rs",
        "HEAPS",
        "`Registry` is an atomic, and each process makes its own table",
    ),
    ("crates/pool/src/sync.rs", "FUTEXES", "of loom's models, which do not fork"),
    ("crates/pool/src/point.rs", "DIE_AT", "of the feature `mutants`, for tests only"),
    ("crates/pool/src/point.rs", "HOLD_AT", "of the feature `mutants`, for tests only"),
    ("crates/remote/src/connection.rs", "NOTES", "a value of a task"),
    ("crates/vm/src/fork.rs", "PARENTS_FILES", "made of atomics"),
    (
        "crates/vm/src/router.rs",
        "INSTALLING",
        "the handler of `pthread_atfork` releases it in a child",
    ),
    ("crates/vm/src/sync.rs", "FUTEXES", "of loom's models, which do not fork"),
];

/// Programs and tests: crates that no program of others links.
const NO_LIBRARIES: [&str; 4] = ["bench", "crashkit", "demo", "testkit"];

#[test]
fn no_static_is_a_lock_that_a_fork_leaves_locked() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut folders = vec![root.join("py/src")];
    for found in std::fs::read_dir(root.join("crates")).unwrap() {
        let found = found.unwrap();
        if !NO_LIBRARIES.iter().any(|name| found.file_name() == *name) {
            folders.push(found.path().join("src"));
        }
    }
    let (mut seen, mut wrong) = (0, vec![]);
    let mut unused: Vec<_> = OTHERS.iter().collect();
    for file in folders.iter().flat_map(|folder| sources(folder)) {
        let text = std::fs::read_to_string(&file).unwrap();
        let path = file.strip_prefix(&root).unwrap().to_str().unwrap();
        for (name, kind) in text.lines().filter_map(item) {
            seen += 1;
            let is_safe = SAFE.iter().chain(&CONSTANT).any(|safe| kind.starts_with(safe));
            let known = unused.iter().position(|other| (other.0, other.1) == (path, name));
            match known {
                Some(known) => drop(unused.remove(known)),
                None if is_safe => {}
                None => wrong.push(format!("{path}: {name}: {kind}")),
            }
        }
    }
    assert!(seen > 50, "{seen} statics found");
    assert!(wrong.is_empty(), "use `PerProcess`, `OnceBox` or atomics: {wrong:#?}");
    assert!(unused.is_empty(), "no such static any more: {unused:#?}");
}

/// Name and type of the static that a line defines.
fn item(line: &str) -> Option<(&str, &str)> {
    let after = match line.trim_start().split_once("static ")? {
        (before, after) if before.is_empty() || before.starts_with("pub") => after,
        (before, after) if before.ends_with("thread_local!(") => after,
        _ => return None,
    };
    let (name, kind) = after.strip_prefix("ref ").unwrap_or(after).split_once(':')?;
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let kind = kind.trim_start();
    name.chars().all(is_name).then(|| (name, kind.strip_prefix("std::cell::").unwrap_or(kind)))
}

/// The sources below a folder, without those of tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return vec![] };
    let mut found = vec![];
    for entry in entries {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if stem == "tests" || stem.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}
