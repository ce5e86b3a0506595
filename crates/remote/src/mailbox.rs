//! The mailbox of a device: its readers ring by an eventfd, which the runtime of the thread watches.

use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use aquifer_vm::mailbox::Mailbox as Slots;
pub(crate) use aquifer_vm::mailbox::TooLate;
use rustix::event::{EventfdFlags, eventfd};

use crate::RemoteError;
use crate::body::Body;

/// More readers at once wait for a slot.
const SLOTS: usize = 256;

pub(crate) type Answer = Result<Body, Arc<RemoteError>>;

/// See [`aquifer_vm::mailbox`].
pub(crate) struct Mailbox {
    slots: Slots<Answer>,
    event: OwnedFd,
    /// The errors that readers were given, by address. A reader drops its share of one in a fault handler, perhaps after
    /// all others: so one is kept here, until it is the only one.
    given: Mutex<HashMap<usize, Arc<RemoteError>>>,
}

impl Mailbox {
    pub fn new() -> std::io::Result<Mailbox> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { slots: Slots::new(SLOTS), event, given: Mutex::default() })
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
        if let Err(error) = &answer {
            self.keep(error);
        }
        self.slots.answer(number, answer);
    }

    /// In the thread.
    fn keep(&self, error: &Arc<RemoteError>) {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        if given.len() == given.capacity() {
            // Without another share there is no way to a new one.
            given.retain(|_, error| Arc::strong_count(error) > 1);
            // Also if most are in use, the next search is as far away as it is long.
            let len = given.len();
            given.reserve(len + 1);
        }
        given.insert(Arc::as_ptr(error).addr(), error.clone());
    }
}
