//! What a process is to be told that may not read it: it may be stopped, or dead.
//!
//! The keeper must go on then. So it sends what there is room for, and the rest when there is room again.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use aquifer_sys::local_socket::{Connection, MAX_DESCRIPTORS};

use super::message::{FILES, Message};

/// Messages with their descriptors, the next one first.
#[derive(Default)]
pub(super) struct Outgoing(VecDeque<(Vec<u8>, Vec<Rc<OwnedFd>>)>);

impl Outgoing {
    /// Adds a message with at most one descriptor.
    pub fn add(&mut self, message: &Message, file: Option<Rc<OwnedFd>>) {
        self.0.push_back((message.to_bytes(), file.into_iter().collect()));
    }

    /// Adds descriptors that follow a message: see [`Message::send`].
    pub fn add_files(&mut self, files: &[Rc<OwnedFd>]) {
        let messages = files.chunks(MAX_DESCRIPTORS);
        self.0.extend(messages.map(|files| (FILES.to_vec(), files.to_vec())));
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Sends as much as there is room for.
    ///
    /// # Errors
    /// Those of `sendmsg`: the other end was closed, or too many descriptors are on their way.
    pub fn send(&mut self, to: &Connection) -> io::Result<()> {
        while let Some((bytes, files)) = self.0.front() {
            let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
            if !to.try_send(bytes, &files)? {
                return Ok(());
            }
            self.0.pop_front();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_read_is_not_waited_for() {
        let (one, other) = Connection::pair().unwrap();
        let other = Connection::from(other);
        let file = Rc::new(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()));
        let mut outgoing = Outgoing::default();
        outgoing.add(&Message::Locks(3000), None);
        outgoing.add_files(&vec![file.clone(); MAX_DESCRIPTORS + 1]);
        (0..3000).for_each(|count| outgoing.add(&Message::Locks(count), None));
        outgoing.send(&one).unwrap();
        assert!((1..3000).contains(&outgoing.len()));
        let next = |outgoing: &mut Outgoing| {
            outgoing.send(&one).unwrap();
            Message::receive(&other).unwrap()
        };
        assert_eq!(next(&mut outgoing), Some(Message::Locks(3000)));
        let files = super::super::message::receive_files(&other, MAX_DESCRIPTORS + 1).unwrap();
        assert_eq!(files.len(), MAX_DESCRIPTORS + 1);
        for count in 0..3000 {
            assert_eq!(next(&mut outgoing), Some(Message::Locks(count)));
        }
        assert_eq!((outgoing.len(), Rc::strong_count(&file)), (0, 1));
        drop(other);
        outgoing.add(&Message::Ready, None);
        assert_eq!(outgoing.send(&one).unwrap_err().raw_os_error(), Some(libc::EPIPE));
    }
}
