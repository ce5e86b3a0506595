//! What tests see and break: a journal of all changes of a tier's files, and deliberate mistakes.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use super::layout::Key;

/// A deliberate mistake, which the enumeration of crashes must find, or for which it must show that it does no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// A reader believes each proof.
    Unchecked,
    /// A proof does not depend on the place.
    WithoutPlace,
    /// A proof does not depend on the object and its version.
    WithoutKey,
    /// Proofs are written before the bytes.
    ProofsFirst,
    /// Eviction leaves the proofs.
    KeepProofs,
}

/// A change of a file.
#[derive(Debug, Clone)]
pub enum Change {
    /// The file appears, with these bytes.
    New(Vec<u8>),
    Write {
        at: u64,
        bytes: Vec<u8>,
    },
    Hole {
        at: u64,
        len: u64,
    },
    Extend {
        len: u64,
    },
    /// The file's name disappears.
    Remove,
}

type Journal = Vec<(String, Change)>;

#[derive(Debug, Default)]
pub struct Hooks {
    mutants: HashSet<Mutant>,
    journal: Option<Mutex<Journal>>,
}

thread_local! {
    static CURRENT: RefCell<Arc<Hooks>> = RefCell::default();
}

impl Hooks {
    /// Those of the tiers that the calling thread opens while `work` runs.
    pub fn with<T>(mutants: &[Mutant], is_journaled: bool, work: impl FnOnce(&Hooks) -> T) -> T {
        let mutants = mutants.iter().copied().collect();
        let hooks = Arc::new(Hooks { mutants, journal: is_journaled.then(Mutex::default) });
        let before = CURRENT.replace(hooks.clone());
        let result = work(&hooks);
        CURRENT.set(before);
        result
    }

    pub fn of_thread() -> Arc<Hooks> {
        CURRENT.with_borrow(Arc::clone)
    }

    pub fn has(&self, mutant: Mutant) -> bool {
        self.mutants.contains(&mutant)
    }

    pub fn proof(&self, key: Key, sub_block: u64, bytes: &[u8]) -> Option<u128> {
        let any = Key([0; 16]);
        if self.has(Mutant::WithoutPlace) {
            return Some(key.proof(0, bytes));
        }
        self.has(Mutant::WithoutKey).then(|| any.proof(sub_block, bytes))
    }

    /// Notes a change, which is made while the result is held: then the journal has the order of the changes.
    pub fn note(&self, name: &str, change: Change) -> Noted<'_> {
        Noted(self.journal.as_ref().map(|journal| {
            let mut journal = journal.lock().unwrap();
            journal.push((name.to_owned(), change));
            journal
        }))
    }

    pub fn note_new(&self, path: &Path, file: &File) -> Noted<'_> {
        let mut bytes = vec![];
        if self.journal.is_some() {
            bytes.resize(file.metadata().unwrap().len() as usize, 0);
            file.read_exact_at(&mut bytes, 0).unwrap();
        }
        self.note(path.file_name().unwrap().to_str().unwrap(), Change::New(bytes))
    }

    pub fn journal(&self) -> Journal {
        self.journal.as_ref().unwrap().lock().unwrap().clone()
    }
}

#[expect(dead_code, reason = "a guard")]
pub struct Noted<'a>(Option<MutexGuard<'a, Journal>>);

impl Drop for Noted<'_> {
    fn drop(&mut self) {}
}
