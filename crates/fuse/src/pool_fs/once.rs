//! Requests that must not be done twice, of a server that may die at any moment.
//!
//! See [`Notes`] for how. Here: around each request its note, and the answers to those that a dead
//! server has done and not answered.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use aquifer_fs::node::Node;
use aquifer_pool::PoolError;

use super::{Errno, PoolFs, reply};
use crate::answer::{Answer, Channel};
use crate::point;
use crate::state::{Done, Notes, Outcome, Shape};
use crate::team::Worker;
use crate::wire::{Operation, Request, Unique, WriteOut};

/// How far before and behind the highest request with a note others are that were handed out and have
/// none yet, where the kernel does not hand them out again: few, as each is in a thread between two
/// calls. Those that wait for locks have words of their own.
const WINDOW: (u64, u64) = (4096, 512);

impl PoolFs {
    /// What is left of the last server, before any request is read. Deaths in it leave the same.
    pub(crate) fn take_over(&self) -> aquifer_fs::Result<()> {
        let Some(notes) = &self.notes else { return Ok(()) };
        // Repairs as well what the dead have left in the pool. A process that was stopped inside a
        // transaction holds up all calls; another server would only wait again.
        let unpublished = loop {
            match self.files.pool().unpublished() {
                Err(PoolError::Stalled { .. }) => {}
                done => break done?,
            }
        };
        notes.settle(&unpublished, |shape, id, name| {
            let (Some(number), Some(locks)) = (self.table.number(id), &self.locks) else { return };
            match shape {
                // The kernel may not send it again, and then their locks would not end.
                Shape::Flushed => locks.flushed(number, name),
                Shape::Released => locks.released(number, name),
                _ => {}
            }
        });
        let settled = notes.all_settled();
        let born: HashSet<u64> = born(&settled).map(|node| node.number).collect();
        self.orphans.take_over(&self.table, &self.nodes, |number| born.contains(&number));
        self.watch_again(self.orphans.pinned().into_iter());
        Ok(())
    }

    /// Frees what has no names and is not kept: after a take-over, or when all is unmounted.
    pub(crate) fn free_unnamed(&self, is_unmounted: bool) {
        if is_unmounted {
            self.handles.close_all();
            self.orphans.release_all(&self.table);
        }
        self.files.reap_orphans();
    }

    /// Makes everything durable, as far as that is possible.
    pub(crate) fn sync_all(&self) {
        let _ = self.files.sync();
    }

    /// Answers what a dead server was about to answer, where the kernel does not hand it out again:
    /// with `EIO` unless it has happened. Numbers of no request are refused, and nothing happens.
    pub(crate) fn answer_left(&self, channels: &[&dyn Channel]) {
        let Some(notes) = &self.notes else { return };
        let settled = notes.all_settled();
        // A request is refused by all channels but the one that has read it, and then what the answer
        // gives is taken back. What was born without a name must not be freed by that.
        let born = born(&settled).filter(|node| self.nodes.metadata(*node).is_ok());
        let born: Vec<u64> = born.filter_map(|node| self.table.remember(node).ok()).collect();
        // Whether the client of an append wants it to be durable is not known any more.
        let is_append = |outcome: &Outcome| {
            matches!(outcome, Outcome::Done(Done { shape: Shape::Appended, .. }))
        };
        let has_appends =
            settled.iter().any(|(_, outcome)| outcome.is_some_and(|it| is_append(&it)));
        let is_durable = !has_appends || self.files.sync().is_ok();
        for channel in channels {
            for (key, outcome) in &settled {
                let answer = Answer::new(*channel, Unique(*key));
                let outcome = outcome.filter(|it| is_durable || !is_append(it));
                self.answer_settled(answer, Unique(*key), outcome.unwrap_or(Outcome::GivenUp));
            }
            let highest = notes.highest();
            // Names are even.
            for key in
                (highest.saturating_sub(WINDOW.0)..=highest + WINDOW.1).filter(|key| key % 2 == 0)
            {
                let _ = Answer::new(*channel, Unique(key)).error(libc::EIO);
            }
            for key in notes.waits().all() {
                let _ = Answer::new(*channel, Unique(key)).error(libc::EIO);
            }
        }
        notes.waits().clear();
        notes.forget_settled();
        born.iter().for_each(|id| self.forget(*id, 1));
    }

    /// The kernel hands out again all that was not answered.
    pub(crate) fn comes_again(&self) {
        if let Some(notes) = &self.notes {
            notes.waits().clear();
        }
    }

    /// Does a request at most once, and answers it: `perform` does both.
    pub(super) fn once(
        &self,
        request: &Request<'_>,
        answer: Answer<'_>,
        worker: &Worker<'_>,
        perform: impl FnOnce(Answer<'_>),
    ) {
        let Some(notes) = &self.notes else { return perform(answer) };
        let resent = request.unique.is_resent();
        let _trial =
            if resent { worker.blocking(|| notes.trial(request.unique.key())) } else { None };
        let begun = notes.begin(worker.index(), request);
        let outcome = if resent { notes.outcome(begun.key()) } else { None };
        match (outcome, begun.transaction) {
            (Some(outcome), _) => match self.sync_settled(request, outcome, worker) {
                Ok(()) => self.answer_settled(answer, request.unique, outcome),
                Err(Errno(errno)) => drop(answer.error(errno)),
            },
            (None, Some(note)) => self.files.pool().noting(note, || perform(answer)),
            (None, None) => perform(answer),
        }
        point("answered");
        notes.end(begun, resent);
    }

    /// Makes an append durable that a dead server has done, where its client wants that.
    fn sync_settled(
        &self,
        request: &Request<'_>,
        outcome: Outcome,
        worker: &Worker<'_>,
    ) -> super::Result<()> {
        match (&request.operation, outcome) {
            (
                Operation::Write(write, _),
                Outcome::Done(Done { shape: Shape::Appended, inode: [start, end] }),
            ) => {
                let file = self.file(self.node(request.node)?)?;
                self.sync_written(&file, write, start..end, worker)
            }
            _ => Ok(()),
        }
    }

    fn answer_settled(&self, answer: Answer<'_>, unique: Unique, outcome: Outcome) {
        let done = match outcome {
            Outcome::Done(done) => done,
            Outcome::GivenUp => {
                let _ = answer.error(libc::EIO);
                return;
            }
        };
        match done.shape {
            Shape::Repeatable | Shape::Flushed | Shape::Released | Shape::Empty => {
                let _ = answer.empty();
            }
            Shape::Linked | Shape::Born => self.remember(answer, self.settled_inode(done)),
            Shape::BornOpen => self.remember_open(answer, unique, self.settled_inode(done)),
            Shape::Resized => {
                let [number, generation] = done.inode;
                reply(answer, self.attributes_of(Node { number, generation }));
            }
            Shape::Appended => {
                let [start, end] = done.inode;
                reply(answer, Ok(WriteOut { size: (end - start) as u32, padding: 0 }));
            }
        }
    }

    fn settled_inode(&self, done: Done) -> super::Result<aquifer_fs::Metadata> {
        let [number, generation] = done.inode;
        let node = match generation {
            0 => self.node(number)?,
            _ => Node { number, generation },
        };
        Ok(self.nodes.metadata(node)?)
    }
}

/// What was created by requests that have happened.
fn born(settled: &[(u64, Option<Outcome>)]) -> impl Iterator<Item = Node> {
    settled.iter().filter_map(|(_, outcome)| match outcome {
        Some(Outcome::Done(Done { shape: Shape::Born | Shape::BornOpen, inode })) => {
            let [number, generation] = *inode;
            Some(Node { number, generation })
        }
        _ => None,
    })
}

/// What outlives the server.
pub(crate) struct Lasting {
    pub table: crate::state::NodeTable,
    pub orphans: super::orphans::Orphans,
    pub notes: Option<Notes>,
    pub keeps_locks: Box<dyn super::KeepsLocks>,
    pub kept_locks: Vec<(super::OpenOwner, OwnedFd)>,
}
