//! The mailbox of a device: its readers ring by an eventfd, which the runtime of the thread watches.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use aquifer_vm::mailbox::Mailbox as Slots;
pub(crate) use aquifer_vm::mailbox::TooLate;
use rustix::event::{EventfdFlags, eventfd};

use crate::RemoteError;
use crate::fetch::Body;

/// More readers at once wait for a slot.
const SLOTS: usize = 256;

pub(crate) type Answer = Result<Body, Arc<RemoteError>>;

/// See [`aquifer_vm::mailbox`].
pub(crate) struct Mailbox {
    slots: Slots<Answer>,
    event: OwnedFd,
}

impl Mailbox {
    pub fn new() -> std::io::Result<Mailbox> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { slots: Slots::new(SLOTS), event })
    }

    /// The descriptor that [`Mailbox::ring`] makes readable.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Makes the thread look. Async-signal-safe.
    pub fn ring(&self) {
        // Fails only if the counter is full, and then it is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Takes the event, before the thread looks at the slots.
    pub fn hear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    /// Reads a range: hands the answer to `use_answer`. Async-signal-safe if that is.
    pub fn read<T>(
        &self,
        range: Range<u64>,
        limit: Duration,
        use_answer: impl FnOnce(&Answer) -> T,
    ) -> Result<T, TooLate> {
        self.slots.read(range, limit, || self.ring(), use_answer)
    }

    /// See [`Slots::look`].
    pub fn look(&self, start: impl FnMut(usize, Range<u64>)) {
        self.slots.look(start);
    }

    /// See [`Slots::answer`].
    pub fn answer(&self, number: usize, answer: Answer) {
        self.slots.answer(number, answer);
    }
}
