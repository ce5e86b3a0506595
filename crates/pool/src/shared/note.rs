//! Notes: whether a transaction was published before its process died.
//!
//! A server that must not do a request twice, and that may die at any instruction, needs an exact
//! answer to that. Looking at the files afterwards gives none: others may have changed them since.
//! So a request has a *note* in memory that outlives the process, and the thread that publishes a
//! transaction of the request leaves two traces, both with the metadata mutex held:
//!
//! | step | a death after it | the note says | the list says | verdict |
//! |---|---|---|---|---|
//! | the record is written behind the end of the log | nothing has happened | *n* | | *n* |
//! | the segment: this note, transaction *n* + 1, and the position that the end of the log is to get | the next holder lists it | *n* | *n* + 1 | *n* |
//! | the note: *n* + 1 transactions, and the result | the next holder lists it | *n* + 1 | *n* + 1 | *n* |
//! | the end of the log is moved: published | it has happened | *n* + 1 | | *n* + 1 |
//! | the segment: no note | | *n* + 1 | | *n* + 1 |
//!
//! The next holder of the mutex repairs before it publishes anything. If it finds a note in the
//! segment, and the end of the log is before the position, then the transaction was not published
//! and never will be, and the repair adds it to a list in the segment. To compare positions any
//! later would be wrong: another thread or process may publish something else at the same place.
//!
//! So transaction *n* of a note was published if the note counts it and the list lacks it, for a
//! caller that looks at the list after all threads of the dead process have ended, and has taken the
//! mutex since ([`Pool::unpublished`](crate::Pool::unpublished)). The list is a ring, and a death with the mutex adds at most
//! one entry to it.
//!
//! The list ends with the segment: some process has the pool open for writing from before the death
//! until the question, such as a keeper. If the last process that has closed the pool had repaired what
//! the dead one left, the next segment knows nothing of it.
//!
//! A request of several transactions is continued under another id ([`TransactionNote::resume`]): a
//! number that is listed for an id is never used for it again.

use std::cell::Cell;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::point;

/// How many transactions that were not published the segment remembers.
const REMEMBERED: usize = 64;
/// Words of a note.
pub(crate) const NOTE_WORDS: usize = 8;
const RESULT_WORDS: usize = 3;

/// What becomes of the transactions of one request: in memory that outlives the process, such as
/// shared memory that another process has open as well. Until the request is answered, one thread
/// uses it.
///
/// ```
/// # let directory = tempfile::tempdir()?;
/// # let pool = aquifer_pool::Pool::create(directory.path().join("data.pool"), 1 << 20)?;
/// use std::sync::atomic::AtomicU64;
///
/// use aquifer_pool::TransactionNote;
///
/// static WORDS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
/// let note = TransactionNote::new(&WORDS);
/// note.begin(17); // never used before
/// pool.noting(note, || { /* changes */ });
/// // If the process had died in there, another one would ask the same:
/// let published = note.published(&pool.unpublished()?);
/// assert_eq!((published.transactions, published.result), (0, [0; 3]));
/// note.end();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct TransactionNote {
    /// Id; number of transactions that were published or are about to be; for odd and for even
    /// numbers of transactions, the result of the last.
    words: &'static [AtomicU64; NOTE_WORDS],
}

/// What was published of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Published {
    /// How many of its transactions were.
    pub transactions: u64,
    /// What the last of them has left by [`Pool::note_result`](crate::Pool::note_result).
    pub result: [u64; 3],
}

/// A transaction that was not published, though its note counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unpublished {
    /// The id of the note.
    pub id: u64,
    /// Which of its transactions, from 1 on.
    pub transaction: u64,
}

impl TransactionNote {
    /// The note in these words. All zeros are a note without a request.
    pub fn new(words: &'static [AtomicU64; 8]) -> TransactionNote {
        TransactionNote { words }
    }

    /// Begins a request. `id` is not 0, and no request in this pool ever had it.
    pub fn begin(&self, id: u64) {
        // Release, here and below: the memory of a dead process has its stores in program order up
        // to some instruction, and these are not to be exchanged with others by the compiler.
        self.end();
        self.words[1].store(0, Release);
        self.words[0].store(id, Release);
    }

    /// Continues the request of a process that has died, and returns what was published of it: the
    /// transactions that follow are counted on. `id` is a new one, as for [`TransactionNote::begin`];
    /// `unpublished` is from after the death. If this process dies as well, the next one does the same,
    /// also if this had begun.
    ///
    /// Work that is noted again without it would be counted behind transactions that never happened.
    ///
    /// ```
    /// # let directory = tempfile::tempdir()?;
    /// # let pool = aquifer_pool::Pool::create(directory.path().join("data.pool"), 1 << 20)?;
    /// # use std::sync::atomic::AtomicU64;
    /// # use aquifer_pool::TransactionNote;
    /// # static WORDS: [AtomicU64; 8] = [const { AtomicU64::new(0) }; 8];
    /// let note = TransactionNote::new(&WORDS);
    /// note.begin(17);
    /// // Its process dies here, and another one finds the note.
    /// let before = note.resume(18, &pool.unpublished()?);
    /// assert_eq!((before.transactions, note.id()), (0, Some(18)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn resume(&self, id: u64, unpublished: &[Unpublished]) -> Published {
        let published = self.published(unpublished);
        // The count first: with the old id it is the same answer, because it is that of a transaction
        // that was published. The result of that one is at its place for even or odd counts.
        self.words[1].store(published.transactions, Release);
        self.words[0].store(id, Release);
        published
    }

    /// Ends the request.
    pub fn end(&self) {
        self.words[0].store(0, Release);
    }

    /// The request that was begun and not ended; `None` without one.
    pub fn id(&self) -> Option<u64> {
        Some(self.words[0].load(Acquire)).filter(|id| *id != 0)
    }

    /// What was published of the request. If the process that has begun it died, `unpublished` is
    /// from after its death, and some process has had the pool open for writing all the time since
    /// before; if it lives, this is called by the thread that uses the note, and what is not finished
    /// there is not counted.
    pub fn published(&self, unpublished: &[Unpublished]) -> Published {
        let Some(id) = self.id() else { return Published::default() };
        let counted = self.words[1].load(Acquire);
        let is_listed = unpublished.contains(&Unpublished { id, transaction: counted });
        match counted.saturating_sub(is_listed.into()) {
            0 => Published::default(),
            transactions => {
                let result = self.result_of(transaction_parity(transactions));
                Published { transactions, result: [0, 1, 2].map(|at| result[at].load(Acquire)) }
            }
        }
    }

    fn result_of(&self, parity: usize) -> &[AtomicU64] {
        let first = 2 + parity * RESULT_WORDS;
        &self.words[first..first + RESULT_WORDS]
    }
}

fn transaction_parity(transaction: u64) -> usize {
    (transaction % 2) as usize
}

/// The transaction that is about to be published, if it has a note, and those that were not
/// published. In the segment, guarded by the metadata mutex.
#[repr(C)]
pub(crate) struct Noting {
    /// The note's id; 0: none.
    id: AtomicU64,
    transaction: AtomicU64,
    /// Where the log will end.
    end_lsn: AtomicU64,
    /// A ring: id and transaction.
    unpublished: [[AtomicU64; 2]; REMEMBERED],
    unpublished_count: AtomicU64,
}

impl Noting {
    // Relaxed in all of these: the mutex orders them; Release where the order matters to the next
    // holder after a death.
    fn begin(&self, id: u64, transaction: u64, end_lsn: u64) {
        self.transaction.store(transaction, Relaxed);
        self.end_lsn.store(end_lsn, Relaxed);
        self.id.store(id, Release);
    }

    /// Runs `work`, and counts in the note the transactions that this thread publishes in it.
    pub fn counting<T>(&self, note: TransactionNote, work: impl FnOnce() -> T) -> T {
        let pool = std::ptr::from_ref(self).addr();
        with_current(Some(Current { note, pool, result: [0; RESULT_WORDS] }), work)
    }

    /// Leaves the traces of a transaction whose record is written, and which is published when the
    /// end of the log is moved to `end_lsn`. Returns whether it has a note. With the metadata mutex.
    pub fn publishing(&self, end_lsn: u64) -> bool {
        let own = |current: &Current| current.pool == std::ptr::from_ref(self).addr();
        let Some(current) = CURRENT.get().filter(own) else { return false };
        let TransactionNote { words } = current.note;
        // Relaxed: of this thread.
        let (id, transaction) = (words[0].load(Relaxed), words[1].load(Relaxed).wrapping_add(1));
        if id == 0 {
            return false;
        }
        self.begin(id, transaction, end_lsn);
        point::pass("note-begun");
        let result = current.note.result_of(transaction_parity(transaction));
        for (word, value) in result.iter().zip(current.result) {
            word.store(value, Relaxed);
        }
        words[1].store(transaction, Release);
        point::pass("note-counted");
        true
    }

    /// Removes the trace in the segment once the transaction is published.
    pub fn published(&self) {
        self.end();
        point::pass("note-ended");
    }

    fn end(&self) {
        self.id.store(0, Release);
    }

    /// Lists the transaction that a dead holder of the mutex was about to publish, if it did not.
    /// Before anything else is published.
    pub fn repair(&self, head_lsn: u64) {
        let id = self.id.load(Acquire);
        if id != 0 && head_lsn < self.end_lsn.load(Relaxed) {
            let count = self.unpublished_count.load(Relaxed);
            let entry = &self.unpublished[count as usize % REMEMBERED];
            entry[0].store(id, Relaxed);
            entry[1].store(self.transaction.load(Relaxed), Relaxed);
            // A death before the next store lists it once more at the same place, and a death behind
            // it twice.
            self.unpublished_count.store(count.wrapping_add(1), Release);
            point::pass("note-listed");
        }
        self.end();
    }

    /// The last transactions that were not published.
    pub fn unpublished(&self) -> Vec<Unpublished> {
        let count = (self.unpublished_count.load(Relaxed) as usize).min(REMEMBERED);
        let entries = self.unpublished[..count].iter();
        let loaded = entries.map(|entry| entry.each_ref().map(|word| word.load(Relaxed)));
        loaded.map(|[id, transaction]| Unpublished { id, transaction }).collect()
    }
}

/// What this thread notes.
#[derive(Clone, Copy)]
struct Current {
    note: TransactionNote,
    /// The address of the pool's [`Noting`].
    pool: usize,
    /// Of the transaction that is being made.
    result: [u64; RESULT_WORDS],
}

thread_local! {
    static CURRENT: Cell<Option<Current>> = const { Cell::new(None) };
}

/// Puts back what the thread noted before, also if the work panics.
struct Before(Option<Current>);

impl Drop for Before {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

fn with_current<T>(current: Option<Current>, work: impl FnOnce() -> T) -> T {
    let _before = Before(CURRENT.replace(current));
    work()
}

/// Runs `work` without counting its transactions.
pub(crate) fn without<T>(work: impl FnOnce() -> T) -> T {
    with_current(None, work)
}

/// Sets the result that the next transactions of this thread leave in its note.
pub(crate) fn set_result(result: [u64; RESULT_WORDS]) {
    CURRENT.set(CURRENT.get().map(|current| Current { result, ..current }));
}
