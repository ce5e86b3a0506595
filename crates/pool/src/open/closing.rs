//! Closing a pool.
//!
//! The last writer brings the media up to date: one last checkpoint writes the changed pages of the
//! image and the [saved state](crate::metadata::saved), flushes once, and writes one pair of superblocks, which
//! says that no process has the pool open, and names the state.

use aquifer_sys::lock::LockKind;

use crate::metadata::checkpoint::Purpose;
use crate::metadata::core::Core;
use crate::point;
use crate::shared::failure::FailureKind;
use crate::shared::membership::Byte;

impl Core {
    /// Leaves the pool. The last writer brings the media up to date, and removes the segment if no
    /// reader uses it. If this fails, the next opener makes up for it, unless the machine is
    /// restarted before.
    ///
    /// Readers can hold locks that hide from a writer that it is the last: then the segment stays,
    /// and the media are brought up to date all the same, which needs no lock of the file.
    pub fn close(&self) {
        let (members, control) = (&self.handle.members, self.handle.control());
        if members.check_kept_now().is_err() {
            // What it shared belongs to others.
            return;
        }
        let recovery =
            || members.locks.lock(Byte::Recovery, LockKind::Exclusive, members.stall_timeout);
        if members.is_writable
            && let Err(error) = self.handle.media.check_kept()
        {
            // If the kernel reported the loss to another program earlier, a process that opened the
            // pool later does not get it.
            self.handle.fail_at_media(FailureKind::Data, &error.source);
            self.log.note_loss();
        }
        if members.is_writable {
            let knows_others = recovery().unwrap_or(false);
            let is_last = knows_others
                && members.locks.try_lock(Byte::Openers, LockKind::Exclusive).unwrap_or(false);
            if is_last {
                point::pass("close-last");
                self.handle.heartbeat.be_alone();
                // If it cannot be lowered, some free pages are no longer known to be zero.
                let _ = self.lower_fresh();
                let closed = self.checkpoint_for(Purpose::Close);
                point::pass("close-superblock");
                // Then the superblock tells the next opener that there is no segment, or that bytes
                // are lost. Otherwise the segment stays, which records whether they are.
                if closed.is_ok() || (control.check_not_failed().is_err() && self.log.note_loss()) {
                    self.places.remove(self.handle.segment_id);
                }
                point::pass("close-removed");
            } else if !knows_others || !members.locks.has_writers() {
                // Readers stay, and write nothing when they close: changes that are not durable now
                // would be lost at a restart of the machine. Without the lock, other writers may be
                // closing as well, and each may rely on the other.
                let _ = self.checkpoint();
            }
        }
        point::pass("close-leave");
        // Lost meanwhile: then its blocks of pins and its slot may be another handle's by now.
        if members.check_kept_now().is_ok() {
            self.pins.places.leave();
            members.locks.leave_slot(control);
        }
    }
}
