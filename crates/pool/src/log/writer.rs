//! Taking room in the log, and waiting until everything before a position is durable, which completes
//! what other processes have left. The top of [`locks`](super::locks) describes it.

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use aquifer_sys::patience::WaitedFor;

use crate::error::Result;
use crate::format::FormatError;
use crate::format::record::skip_page;
use crate::log::append::Append;
use crate::log::locks::{Locked, Log};
use crate::mutant::{self, Mutant};
use crate::point;
use crate::shared::appends::{Appends, append};
use crate::shared::heartbeat::Held;

/// How long a waiter sleeps before it checks whether the first pending append still has an owner.
const LOOK_AFTER: Duration = Duration::from_millis(20);

impl Locked<'_> {
    /// Reserves space for a record of `len_bytes`; `None` if there is not enough now. A record
    /// never crosses the end of the ring: a separate append fills the rest before it.
    pub fn reserve(
        &self,
        len_bytes: u64,
        is_metadata: bool,
    ) -> Result<Option<(Append, Option<Append>)>> {
        self.close_packed()?;
        let control = self.control();
        if !self.has_room(len_bytes) || !control.appends.has_entries(2) {
            return Ok(None);
        }
        let log_bytes = self.handle().layout.log().len_bytes;
        let acknowledged_lsn = control.appends.durable_lsn.load(Relaxed);
        let take = |lsn: u64, len_bytes: u64, is_metadata, depends_lsn| Append {
            handle: self.log().handle.clone(),
            index: self.push_pending(
                lsn,
                lsn + len_bytes,
                append::RESERVED,
                is_metadata,
                depends_lsn,
            ),
            lsn,
            end_lsn: lsn + len_bytes,
            acknowledged_lsn,
            is_complete: false,
        };
        let mut lsn = control.appends.head_lsn();
        let to_end = log_bytes - lsn % log_bytes;
        let filler = (len_bytes > to_end).then(|| {
            let filler = take(lsn, to_end, false, append::NOTHING);
            lsn += to_end;
            point::pass("reserve-filler");
            filler
        });
        let mut depends_lsn = append::NOTHING;
        if !is_metadata {
            let before_lsn = self.log().last_commit_lsn.swap(lsn, Relaxed);
            if before_lsn != append::NOTHING && before_lsn >= acknowledged_lsn {
                depends_lsn = before_lsn;
            }
            control.content_end_lsn.store(lsn + len_bytes, Relaxed);
        }
        let append = take(lsn, len_bytes, is_metadata, depends_lsn);
        point::pass("reserve-pending");
        Ok(Some((append, filler)))
    }
}

impl Log {
    /// Waits until everything before `lsn` is durable, and completes abandoned appends.
    pub fn wait_durable(&self, lsn: u64) -> Result<()> {
        self.wait_durable_and_flush(lsn).map(drop)
    }

    /// As [`Log::wait_durable`]. Returns whether this thread has made durable what was handed to the
    /// media before the call.
    pub fn wait_durable_and_flush(&self, lsn: u64) -> Result<bool> {
        let has_flushed = Cell::new(false);
        if self.control().appends.durable_lsn() < lsn {
            let wait = || self.wait_until_durable(lsn, &has_flushed);
            self.handle.heartbeat.while_media_work(Held::Files, wait)?;
        }
        Ok(has_flushed.get())
    }

    fn wait_until_durable(&self, lsn: u64, has_flushed: &Cell<bool>) -> Result<()> {
        let control = self.control();
        let mut waited = WaitedFor::new(self.progress());
        loop {
            let signal = control.signal.now();
            if control.appends.durable_lsn() >= lsn {
                return Ok(());
            }
            control.check_not_failed()?;
            if self.is_waiting() {
                self.help(has_flushed)?;
                continue;
            }
            if !control.signal.wait(signal, LOOK_AFTER)
                && !self.help(has_flushed)?
                && waited.look(self.progress()) > self.handle.members.stall_timeout
            {
                return Err(self.stalled_append());
            }
        }
    }

    /// Whether the first append is one that any waiter may complete.
    fn is_waiting(&self) -> bool {
        let appends = &self.control().appends;
        let state = || appends.first().state.load(Relaxed);
        !appends.are_none() && matches!(state(), append::PACKED | append::ABANDONED)
    }

    /// Completes the first pending append if its owner will not. Returns whether it did.
    fn help(&self, has_flushed: &Cell<bool>) -> Result<bool> {
        let locked = self.lock()?;
        let control = self.control();
        let appends = &control.appends;
        let Some(first) = appends.indexes().next() else { return Ok(false) };
        let pending = appends.entry(first);
        if pending.state.load(Relaxed) == append::PACKED {
            // It is the last append as well.
            locked.close_packed()?;
            if appends.are_none() {
                return Ok(true);
            }
        }
        let owner = pending.owner.load(Relaxed) as usize;
        let is_abandoned = appends.is_given_up(first);
        // An append that was given up because it cannot be written is not tried a third time, or a
        // record behind it might be acknowledged.
        control.check_not_failed()?;
        if !is_abandoned && self.handle.members.locks.is_alive(owner) {
            // It may be complete, with an owner that has died before it advanced the prefix.
            let has_moved = locked.advance();
            drop(locked);
            if has_moved {
                control.signal.ring();
            }
            return Ok(has_moved);
        }
        if pending.state.load(Relaxed) == append::DURABLE {
            let has_moved = locked.advance();
            drop(locked);
            control.signal.ring();
            return Ok(has_moved);
        }
        appends.adopt(first, self.handle.members.locks.index() as u64);
        let mut adopted = Append {
            handle: self.handle.clone(),
            index: first,
            lsn: pending.lsn.load(Relaxed),
            end_lsn: pending.end_lsn.load(Relaxed),
            acknowledged_lsn: control.appends.durable_lsn.load(Relaxed),
            is_complete: false,
        };
        let is_metadata = pending.is_metadata.load(Relaxed) != 0;
        let is_packed = pending.is_packed.load(Relaxed) != 0;
        drop(locked);
        point::pass("help-adopted");
        if is_packed {
            self.harden(adopted)?;
            has_flushed.set(self.hardening_flushes());
            return Ok(true);
        }
        match self.handle.log_reader().read(adopted.lsn) {
            Ok(record) if record.header.end_lsn() == adopted.end_lsn => {
                if is_metadata {
                    let locked = self.lock()?;
                    if control.appends.metadata_lsn.load(Relaxed) < adopted.end_lsn {
                        self.metadata.apply(&locked, &record);
                    }
                }
                point::pass("help-decided");
                self.write_append(&mut adopted, record.bytes())?;
            }
            unread => {
                if is_metadata {
                    let _locked = self.lock()?;
                    if control.appends.metadata_lsn.load(Relaxed) >= adopted.end_lsn {
                        // Other processes have seen the change, and the record cannot be written
                        // again.
                        let error = unread.err().unwrap_or(FormatError::Short.into());
                        return Err(self.fail_unreadable(adopted.lsn, error));
                    }
                    // It never became visible; no image change is due for it.
                    appends.entry(adopted.index).is_metadata.store(0, Relaxed);
                }
                point::pass("help-decided");
                self.close_hole(adopted)?;
            }
        }
        Ok(true)
    }

    /// Fills the space of a missing append, after that of the commits that depend on it. Their
    /// process is dead.
    fn close_hole(&self, mut hole: Append) -> Result<()> {
        let locked = self.lock()?;
        let dependents = if mutant::is(self.handle.mutant, Mutant::KeepDependents) {
            Vec::new()
        } else {
            locked.control().appends.dependents_of(hole.index)
        };
        drop(locked);
        Appends::close_hole(&dependents, (hole.lsn, hole.end_lsn), |lsn, end_lsn| {
            if lsn == hole.lsn {
                point::pass("help-void");
            }
            let page = skip_page(lsn, end_lsn - lsn, hole.acknowledged_lsn, self.handle.identity());
            self.write_log(lsn, &page)
        })?;
        point::pass("append-written");
        self.complete(&mut hole)
    }
}
