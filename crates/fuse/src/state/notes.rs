//! Requests under way, and what became of those whose server died.
//!
//! Each worker has a *note*: which request it does, and for one that changes names or attributes, how
//! many of its transactions were published ([`TransactionNote`]). The kernel sends a request again that
//! was handed out and not answered, so a note that is not empty when a server dies is of a request
//! that comes again, or was answered a moment before.
//!
//! ```text
//!  empty ──begin: shape, id, then the request's name──► under way ──answer written, end──► empty
//!                                                        │ death
//!                                  the next server, before it reads any request:
//!                                                        ▼
//!                  settled: the name, whether it has happened, with which result, how many servers it ended
//! ```
//!
//! A request that has happened is answered from there and not done again; one that has not is done.
//! Only requests need it that would fail, or do something else, the second time: those of
//! [`Shape::of`]. Reading, writing at an offset, setting attributes but the length may be done again as long as they
//! are not answered, because the client waits for them, and so does what the kernel orders behind them.
//!
//! A request that was under way when two servers died by themselves is not tried a third time: it gets
//! `EIO`. A server that is killed from outside counts much less, as the request is hardly the reason,
//! unless it takes more memory than there is.
//!
//! Of those that were under way when one died, each may be the reason. So they are done one at a time
//! by the next ([`Notes::trial`]), and if that dies as well, one of them has ended both.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, MutexGuard, PoisonError};

use aquifer_pool::{Published, TransactionNote, Unpublished};
use aquifer_sys::shared_words::SharedWords;

use super::memory::{NOTE_COUNT, NOTE_WORDS, NOTES, SETTLED, SETTLED_COUNT, SETTLED_WORDS, Word};
use super::{Memory, Waits};
use crate::point;
use crate::wire::{Operation, Request, set, write};

/// How much a death counts: of a server by itself, and of one that was killed from outside.
const DEATHS: (u64, u64) = (50, 1);
/// With so much a request is given up.
const MOST_DEATHS: u64 = 2 * DEATHS.0;
/// Where the number of the server begins whose death was counted last.
const LAST_DEATH: u32 = 32;

// Words of a note.
const UNIQUE: usize = 0;
const SHAPE: usize = 1;
const LINKED: usize = 2;
const ANSWERED: usize = 3;
const HIGHEST: usize = 4;
const CLOSED: usize = 5; // and the next
const TRANSACTION: usize = 8;

// Words of what was settled; the last one is stored last.
const SETTLED_SHAPE: usize = 1;
const SETTLED_DEATHS: usize = 2;
const SETTLED_RESULT: usize = 3;
const SETTLED_HAPPENED: usize = 5;
const SETTLED_UNIQUE: usize = 7;

/// What the answer to a request looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Shape {
    /// Not one that needs to be done once.
    Repeatable,
    /// Nothing.
    Empty,
    /// The entry of what was created.
    Born,
    /// As well, and it is open.
    BornOpen,
    /// The entry of an inode that got a name.
    Linked,
    /// How many bytes were written.
    Appended,
    /// The attributes of a file that got a length. May be done again, but must not fail when it has
    /// happened: the kernel would keep the length and the pages of before.
    Resized,
    /// Nothing: a process has closed a descriptor. May be done again, but not left out.
    Flushed,
    /// Nothing: an open file was closed. As well.
    Released,
}

impl Shape {
    /// That of a request.
    pub fn of(operation: &Operation<'_>) -> Shape {
        use Operation as Op;
        match operation {
            Op::Symlink { .. } | Op::MakeNode { .. } | Op::MakeDirectory { .. } => Shape::Born,
            Op::Create { .. } | Op::TemporaryFile { .. } => Shape::BornOpen,
            Op::Link { .. } => Shape::Linked,
            // Others write where they did before. Of pages, all must be written.
            Op::Write(write, _)
                if write.flags & libc::O_APPEND as u32 != 0
                    && write.write_flags & write::CACHE == 0 =>
            {
                Shape::Appended
            }
            Op::Unlink { .. }
            | Op::RemoveDirectory { .. }
            | Op::Rename { .. }
            | Op::SetXattr { .. }
            | Op::RemoveXattr { .. } => Shape::Empty,
            Op::SetAttributes(wanted) if wanted.valid & set::SIZE != 0 => Shape::Resized,
            Op::Flush { .. } => Shape::Flushed,
            Op::Release(_) => Shape::Released,
            _ => Shape::Repeatable,
        }
    }

    fn from_word(word: u64) -> Shape {
        [
            Shape::Empty,
            Shape::Born,
            Shape::BornOpen,
            Shape::Linked,
            Shape::Appended,
            Shape::Resized,
            Shape::Flushed,
            Shape::Released,
        ]
        .into_iter()
        .find(|shape| *shape as u64 == word)
        .unwrap_or(Shape::Repeatable)
    }

    /// Whether it is to be done once.
    fn is_once(self) -> bool {
        !matches!(self, Shape::Repeatable | Shape::Flushed | Shape::Released)
    }
}

/// A request that has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// What its answer looks like.
    pub shape: Shape,
    /// For an entry: number and generation of the inode, or 0 where only the number is known. For an
    /// append: its start and end.
    pub inode: [u64; 2],
}

/// What became of a request whose server died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It has happened.
    Done(Done),
    /// It has ended too many servers.
    GivenUp,
}

/// The notes of all workers, and what was settled. See the [module](self).
pub struct Notes {
    memory: Memory,
    words: &'static SharedWords,
    /// Of those that were settled when this server began, by their names: their places.
    settled: Mutex<HashMap<u64, usize>>,
    /// Held by the one that does a request that may have ended a server.
    trying: Mutex<()>,
}

/// A note that was begun.
#[derive(Clone, Copy)]
pub struct Begun {
    words: &'static [AtomicU64],
    key: u64,
    /// Of a request that is to be done once.
    pub transaction: Option<TransactionNote>,
}

impl Begun {
    /// The name of the request.
    pub fn key(&self) -> u64 {
        self.key
    }
}

impl Notes {
    /// Those in this memory, which stays mapped as long as the process lives: a note outlives all of
    /// its threads.
    pub fn new(memory: Memory) -> Notes {
        let words: &'static SharedWords = Box::leak(Box::new(memory.words().clone()));
        let notes = Notes { memory, words, settled: Mutex::default(), trying: Mutex::default() };
        let settled = (0..SETTLED_COUNT).filter_map(|at| {
            Some((notes.settled_words(at)[SETTLED_UNIQUE].load(Acquire), at)).filter(|it| it.0 != 0)
        });
        let settled = settled.collect();
        *notes.settled() = settled;
        notes
    }

    fn settled(&self) -> MutexGuard<'_, HashMap<u64, usize>> {
        // No panic leaves it half changed.
        self.settled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The requests that wait for locks.
    pub fn waits(&self) -> Waits {
        self.memory.waits()
    }

    fn note(&self, worker: usize) -> &'static [AtomicU64] {
        &self.words[NOTES + worker * NOTE_WORDS..][..NOTE_WORDS]
    }

    fn settled_words(&self, at: usize) -> &'static [AtomicU64] {
        &self.words[SETTLED + at * SETTLED_WORDS..][..SETTLED_WORDS]
    }

    /// Begins a request.
    pub fn begin(&self, worker: usize, request: &Request<'_>) -> Begun {
        let words = self.note(worker % NOTE_COUNT);
        let (key, shape) = (request.unique.key(), Shape::of(&request.operation));
        let closed = match request.operation {
            Operation::Flush { lock_owner } => lock_owner,
            Operation::Release(ref release) => release.fh,
            _ => 0,
        };
        // Relaxed: the shape that says what they are is stored behind them.
        words[CLOSED].store(request.node, Relaxed);
        words[CLOSED + 1].store(closed, Relaxed);
        let transaction = shape.is_once().then(|| {
            if let Operation::Link { node, .. } = request.operation {
                words[LINKED].store(node, Relaxed);
            }
            let transaction = transaction_of(words);
            // Relaxed: only the number counts.
            transaction.begin(self.memory.word(Word::NextId).fetch_add(1, Relaxed));
            transaction
        });
        // Release, here and below: the memory of a dead process has its stores in program order up to
        // some instruction, and these are not to be exchanged with others by the compiler.
        words[SHAPE].store(shape as u64, Release);
        if key > words[HIGHEST].load(Relaxed) {
            words[HIGHEST].store(key, Release);
        }
        words[UNIQUE].store(key, Release);
        Begun { words, key, transaction }
    }

    /// What became of a request that is handed out again. `None`: it is to be done.
    pub fn outcome(&self, key: u64) -> Option<Outcome> {
        let place = self.settled().get(&key).copied()?;
        self.outcome_at(place)
    }

    fn outcome_at(&self, place: usize) -> Option<Outcome> {
        let words = self.settled_words(place);
        let word = |at: usize| words[at].load(Acquire);
        if word(SETTLED_HAPPENED) != 0 {
            let inode = [word(SETTLED_RESULT), word(SETTLED_RESULT + 1)];
            return Some(Outcome::Done(Done {
                shape: Shape::from_word(word(SETTLED_SHAPE)),
                inode,
            }));
        }
        (deaths_in(word(SETTLED_DEATHS)) >= MOST_DEATHS).then_some(Outcome::GivenUp)
    }

    /// Waits until no other request is done that may have ended a server, if this is one that is to be
    /// done. Before it [begins](Notes::begin), so that it is not under way if that one ends this server.
    pub fn trial(&self, key: u64) -> Option<MutexGuard<'_, ()>> {
        let place = self.settled().get(&key).copied()?;
        let has_deaths = deaths_in(self.settled_words(place)[SETTLED_DEATHS].load(Acquire)) > 0;
        let is_to_be_done = has_deaths && self.outcome_at(place).is_none();
        is_to_be_done.then(|| self.trying.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends a request that was answered. `was_resent` if it may have been settled.
    pub fn end(&self, begun: Begun, was_resent: bool) {
        if was_resent && let Some(place) = self.settled().remove(&begun.key) {
            self.settled_words(place)[SETTLED_UNIQUE].store(0, Release);
        }
        point("end-settled");
        begun.words[UNIQUE].store(0, Release);
        point("end-note");
        if let Some(transaction) = begun.transaction {
            transaction.end();
        }
        // Relaxed: a statistic, of one thread.
        let answered = begun.words[ANSWERED].load(Relaxed);
        begun.words[ANSWERED].store(answered + 1, Relaxed);
    }

    /// Settles what the last server has left: before any request is read, and with what was not
    /// [published](aquifer_pool::Pool::unpublished) since its death. May be repeated after a death in it.
    /// Calls `closed` for what was just being closed: with the inode and the owner of locks, or the open
    /// file.
    pub fn settle(&self, unpublished: &[Unpublished], closed: impl Fn(Shape, u64, u64)) {
        let (server, by_itself) = self.memory.death();
        let death = (server, if by_itself { DEATHS.0 } else { DEATHS.1 });
        for worker in 0..NOTE_COUNT {
            let words = self.note(worker);
            let key = words[UNIQUE].load(Acquire);
            if key != 0 {
                let published = transaction_of(words).published(unpublished);
                let word = |at: usize| words[at].load(Acquire);
                closed(Shape::from_word(word(SHAPE)), word(CLOSED), word(CLOSED + 1));
                self.settle_one(key, words, published, death);
                // A death before this settles it once more, in the same way.
                words[UNIQUE].store(0, Release);
            }
            transaction_of(words).end();
        }
        // From here on the notes are those of this server.
        self.memory.set(Word::TookOver, self.memory.get(Word::Servers));
    }

    fn settle_one(
        &self,
        key: u64,
        note: &[AtomicU64],
        published: Published,
        (server, weight): (u64, u64),
    ) {
        let place = self.settled().get(&key).copied().unwrap_or_else(|| {
            // A ring, whose oldest ones were answered long ago, or never come again.
            self.memory.word(Word::NextSettled).fetch_add(1, Relaxed) as usize % SETTLED_COUNT
        });
        let words = self.settled_words(place);
        let before = words[SETTLED_UNIQUE].load(Acquire);
        if before != key {
            self.settled().remove(&before);
            words[SETTLED_UNIQUE].store(0, Release);
            words[SETTLED_DEATHS].store(0, Release);
            words[SETTLED_HAPPENED].store(0, Release);
        }
        let shape = Shape::from_word(note[SHAPE].load(Acquire));
        let [number, generation, _] = published.result;
        // A transaction that has made no inode only prepared the one that does.
        let is_done = match shape {
            Shape::Repeatable | Shape::Flushed | Shape::Released => false,
            // Nor one that only made a file somewhat shorter.
            Shape::Born | Shape::BornOpen | Shape::Resized => number != 0,
            Shape::Empty | Shape::Linked => published.transactions > 0,
            // If not all of it, the client gets a short count.
            Shape::Appended => published.transactions > 0 && generation > number,
        };
        if is_done {
            let linked = [note[LINKED].load(Acquire), 0];
            let result = if shape == Shape::Linked { linked } else { [number, generation] };
            words[SETTLED_SHAPE].store(shape as u64, Release);
            words[SETTLED_RESULT].store(result[0], Release);
            words[SETTLED_RESULT + 1].store(result[1], Release);
            point("settle-result");
            words[SETTLED_HAPPENED].store(1, Release);
        }
        // One word, so that each death counts once, wherever this server dies.
        let deaths = words[SETTLED_DEATHS].load(Acquire);
        if deaths >> LAST_DEATH != server {
            let counted = server << LAST_DEATH | (deaths_in(deaths) + weight);
            words[SETTLED_DEATHS].store(counted, Release);
        }
        point("settle-deaths");
        words[SETTLED_UNIQUE].store(key, Release);
        self.settled().insert(key, place);
        point("settle-listed");
    }

    /// All that was settled and not answered: names, and what became of them.
    pub fn all_settled(&self) -> Vec<(u64, Option<Outcome>)> {
        self.settled().iter().map(|(key, place)| (*key, self.outcome_at(*place))).collect()
    }

    /// All that was settled was answered, or is not asked for again.
    pub fn forget_settled(&self) {
        for (_, place) in self.settled().drain() {
            self.settled_words(place)[SETTLED_UNIQUE].store(0, Release);
        }
    }

    /// The highest name of a request that was handed out.
    pub fn highest(&self) -> u64 {
        (0..NOTE_COUNT).map(|at| self.note(at)[HIGHEST].load(Acquire)).max().unwrap_or(0)
    }

    /// How many requests were answered by all servers.
    pub fn answered(memory: &Memory) -> u64 {
        let count = |at: usize| memory.words()[NOTES + at * NOTE_WORDS + ANSWERED].load(Relaxed);
        (0..NOTE_COUNT).map(count).sum()
    }
}

fn deaths_in(word: u64) -> u64 {
    word & ((1 << LAST_DEATH) - 1)
}

fn transaction_of(words: &'static [AtomicU64]) -> TransactionNote {
    let words = words[TRANSACTION..].first_chunk().expect("a note has as many words");
    TransactionNote::new(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Unique;

    fn request(unique: u64, operation: Operation<'_>) -> Request<'_> {
        let unique = Unique(unique);
        Request { unique, node: 1, uid: 0, gid: 0, pid: 0, also_in_group: None, operation }
    }

    fn next_server(memory: &Memory, unpublished: &[Unpublished]) -> Notes {
        let notes = Notes::new(memory.clone());
        notes.settle(unpublished, |_, _, _| {});
        notes
    }

    /// What the pool does in a transaction of a noted request.
    fn publish(begun: Begun, result: [u64; 3]) {
        let words = &begun.words[TRANSACTION..];
        let count = words[1].load(Relaxed) + 1;
        let first = 2 + (count % 2) as usize * 3;
        (0..3).for_each(|at| words[first + at].store(result[at], Relaxed));
        words[1].store(count, Relaxed);
    }

    #[test]
    fn what_has_happened_is_known_to_all_later_servers() {
        let memory = Memory::new(10).unwrap();
        memory.set(Word::NextId, 100);
        let notes = Notes::new(memory.clone());
        let made =
            notes.begin(0, &request(2, Operation::MakeDirectory { name: b"d", mode: 0, umask: 0 }));
        publish(made, [5, 9, 0]);
        publish(notes.begin(1, &request(4, Operation::Link { node: 7, name: b"l" })), [0; 3]);
        let unpublished = notes.begin(2, &request(6, Operation::Unlink { name: b"u" }));
        publish(unpublished, [0; 3]);
        let answered = notes.begin(3, &request(8, Operation::Unlink { name: b"v" }));
        publish(answered, [0; 3]);
        notes.end(answered, false);
        notes.begin(4, &request(10, Operation::GetAttributes));
        let listed =
            Unpublished { id: unpublished.transaction.unwrap().id().unwrap(), transaction: 1 };
        let notes = next_server(&memory, &[listed]);
        let check = |notes: &Notes| {
            let born = Done { shape: Shape::Born, inode: [5, 9] };
            assert_eq!(notes.outcome(2), Some(Outcome::Done(born)));
            let linked = Done { shape: Shape::Linked, inode: [7, 0] };
            assert_eq!(notes.outcome(4), Some(Outcome::Done(linked)));
            assert_eq!([6, 8, 10].map(|key| notes.outcome(key)), [None; 3]);
            assert_eq!((notes.highest(), Notes::answered(&memory)), (10, 1));
        };
        check(&notes);
        check(&next_server(&memory, &[]));
        // It dies again before the answer is written, and behind it.
        let again = notes.begin(
            0,
            &request(2 | 1 << 63, Operation::MakeDirectory { name: b"d", mode: 0, umask: 0 }),
        );
        let notes = next_server(&memory, &[]);
        assert!(notes.outcome(2).is_some());
        notes.end(again, true);
        assert_eq!((notes.outcome(2), next_server(&memory, &[]).outcome(2)), (None, None));
    }

    #[test]
    fn a_request_that_ends_servers_is_given_up() {
        let memory = Memory::new(10).unwrap();
        let die = |by_itself| {
            memory.set(Word::Servers, memory.get(Word::Servers) + 1);
            let notes = next_server(&memory, &[]);
            notes.begin(0, &request(2, Operation::GetAttributes));
            memory.note_death(by_itself);
            // The next ones do not get as far as to settle anything, and do not count.
            memory.set(Word::Servers, memory.get(Word::Servers) + 1);
            memory.note_death(!by_itself);
            // The same note again, as after a death in `settle`.
            let key = || memory.words()[NOTES + UNIQUE].load(Relaxed);
            let (before, notes) = (key(), next_server(&memory, &[]));
            memory.words()[NOTES + UNIQUE].store(before, Relaxed);
            drop(notes);
            next_server(&memory, &[]).outcome(2)
        };
        // Killed from outside, which counts little.
        let killed = [false; 20].map(die);
        assert_eq!(killed, [None; 20]);
        assert_eq!([die(true), die(false)], [None; 2]);
        assert_eq!(die(true), Some(Outcome::GivenUp));
        let often = (0..200).position(|_| {
            let memory = &memory;
            memory.words()[SETTLED + SETTLED_DEATHS].store(0, Relaxed);
            die(true);
            (1..DEATHS.0 - 1).for_each(|_| assert_eq!(die(false), None));
            die(false).is_none() && die(false).is_some()
        });
        assert_eq!(often, Some(0));
    }

    #[test]
    fn what_may_have_ended_a_server_is_done_one_at_a_time() {
        let memory = Memory::new(10).unwrap();
        memory.set(Word::Servers, 1);
        memory.set(Word::NextId, 1);
        let notes = next_server(&memory, &[]);
        for (worker, key) in [(0, 2), (1, 4)] {
            notes.begin(worker, &request(key, Operation::GetAttributes));
        }
        publish(notes.begin(2, &request(6, Operation::Unlink { name: b"u" })), [0; 3]);
        memory.note_death(true);
        memory.set(Word::Servers, 2);
        let notes = next_server(&memory, &[]);
        let first = notes.trial(2).expect("it may have");
        assert!(notes.trying.try_lock().is_err());
        // What has happened is only answered, and others are not concerned.
        assert!(notes.trial(6).is_none() && notes.trial(8).is_none());
        // It has: the other one waits, and is not under way.
        notes.begin(0, &request(2 | 1 << 63, Operation::GetAttributes));
        std::mem::forget(first);
        memory.note_death(true);
        memory.set(Word::Servers, 3);
        let notes = next_server(&memory, &[]);
        assert_eq!((notes.outcome(2), notes.outcome(4)), (Some(Outcome::GivenUp), None));
        assert!(notes.trial(2).is_none());
        let second = notes.trial(4);
        drop(second.expect("it is tried again"));
    }

    #[test]
    fn settled_requests_that_never_come_again_make_room() {
        let memory = Memory::new(10).unwrap();
        memory.set(Word::NextId, 1);
        for round in 1..=400 {
            let notes = Notes::new(memory.clone());
            for worker in 0..NOTE_COUNT {
                let key = round * 1000 + worker as u64 * 2;
                publish(
                    notes.begin(worker, &request(key, Operation::Unlink { name: b"u" })),
                    [0; 3],
                );
            }
            let notes = next_server(&memory, &[]);
            assert!(notes.outcome(round * 1000).is_some());
            assert_eq!(notes.all_settled().len(), SETTLED_COUNT.min(round as usize * NOTE_COUNT));
        }
    }
}
