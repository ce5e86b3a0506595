//! Answering a request: once.

use std::io::IoSlice;

use crate::wire::{Bytes, ERRNO_END, InvalidateInode, OutHeader, Unique, notify};
use zerocopy::IntoBytes;

/// Where answers go.
pub trait Channel: Sync {
    /// Passes on an answer, whole or not at all.
    fn send(&self, parts: &[IoSlice<'_>]) -> Delivered;

    /// The same channel, for an answer that is given later, by any thread; `None` where that is not
    /// possible.
    fn another(&self) -> Option<Box<dyn Channel + Send>> {
        None
    }
}

/// What became of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Delivered {
    /// The client has it.
    Yes,
    /// The client was killed meanwhile: what the answer would have given it, it does not have.
    ClientGone,
    /// The connection has ended.
    Ended,
    /// The kernel does not accept it.
    Refused,
}

/// The answer to one request. If it is dropped before it is given, the answer is `EIO`.
pub struct Answer<'c> {
    to: To<'c>,
    /// `None` once it was given, or if none is wanted.
    unique: Option<Unique>,
}

enum To<'c> {
    Borrowed(&'c dyn Channel),
    Own(Box<dyn Channel + Send>),
}

impl To<'_> {
    fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
        match self {
            To::Borrowed(to) => to.send(parts),
            To::Own(to) => to.send(parts),
        }
    }
}

impl<'c> Answer<'c> {
    /// To the request of this name.
    pub fn new(to: &'c dyn Channel, unique: Unique) -> Answer<'c> {
        Answer { to: To::Borrowed(to), unique: Some(unique) }
    }

    /// The same answer, to be given later by any thread. Where the channel does not permit that, it is
    /// `EIO`, given now.
    pub fn detach(mut self) -> Option<Answer<'static>> {
        let to = match &self.to {
            To::Borrowed(to) => to.another()?,
            To::Own(to) => to.another()?,
        };
        Some(Answer { to: To::Own(to), unique: self.unique.take() })
    }

    fn send(&mut self, error: i32, parts: [IoSlice<'_>; 2]) -> Delivered {
        let Some(unique) = self.unique.take() else { return Delivered::Yes };
        let len = size_of::<OutHeader>() + parts[0].len() + parts[1].len();
        let header = OutHeader { len: len as u32, error: -error, unique: unique.0 };
        let sent = self.to.send(&[header.slice(), parts[0], parts[1]]);
        if sent == Delivered::Refused && error == 0 {
            let header =
                OutHeader { len: size_of::<OutHeader>() as u32, error: -libc::EIO, ..header };
            return match self.to.send(&[IoSlice::new(header.as_bytes())]) {
                Delivered::Yes => Delivered::ClientGone,
                other => other,
            };
        }
        sent
    }

    /// Tells the kernel, before the answer, that the attributes of an inode are not as it has cached them.
    pub(crate) fn attributes_changed(&self, node: u64) {
        let changed = InvalidateInode { ino: node, offset: -1, len: 0 };
        let len = size_of::<OutHeader>() + size_of::<InvalidateInode>();
        let header = OutHeader { len: len as u32, error: notify::INVAL_INODE, unique: 0 };
        // Refused if the kernel does not know the inode, so that it has nothing cached.
        let _ = self.to.send(&[header.slice(), changed.slice()]);
    }

    /// That it failed, with an error number as `errno` has it.
    pub fn error(mut self, errno: i32) -> Delivered {
        debug_assert!((1..ERRNO_END).contains(&errno), "the kernel does not take {errno}");
        let errno = if (1..ERRNO_END).contains(&errno) { errno } else { libc::EIO };
        self.send(errno, [IoSlice::new(&[]), IoSlice::new(&[])])
    }

    /// That it is done.
    pub fn empty(self) -> Delivered {
        self.bytes(&[])
    }

    /// Bytes: what was read.
    pub fn bytes(mut self, bytes: &[u8]) -> Delivered {
        self.send(0, [IoSlice::new(bytes), IoSlice::new(&[])])
    }

    /// A structure of the protocol.
    pub fn value(mut self, value: &impl Bytes) -> Delivered {
        self.send(0, [value.slice(), IoSlice::new(&[])])
    }

    /// Two structures of the protocol.
    pub fn values(mut self, first: &impl Bytes, second: &impl Bytes) -> Delivered {
        self.send(0, [first.slice(), second.slice()])
    }

    /// Nothing: the request has no answer.
    pub fn none(mut self) {
        self.unique = None;
    }
}

impl Drop for Answer<'_> {
    fn drop(&mut self) {
        let _ = self.send(libc::EIO, [IoSlice::new(&[]), IoSlice::new(&[])]);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Keeps answers; refuses those that are longer.
    struct Kept(Mutex<Vec<Vec<u8>>>, usize);

    impl Channel for Kept {
        fn send(&self, parts: &[IoSlice<'_>]) -> Delivered {
            let whole: Vec<u8> = parts.iter().flat_map(|part| part.iter().copied()).collect();
            if whole.len() > self.1 {
                return Delivered::Refused;
            }
            self.0.lock().unwrap().push(whole);
            Delivered::Yes
        }
    }

    fn header(len: u32, error: i32) -> Vec<u8> {
        OutHeader { len, error, unique: 7 }.as_bytes().to_vec()
    }

    #[test]
    fn an_answer_is_given_once_and_a_forgotten_one_is_an_error() {
        let kept = Kept(Mutex::default(), 100);
        let answer = || Answer::new(&kept, Unique(7));
        assert_eq!(answer().bytes(b"abc"), Delivered::Yes);
        assert_eq!(answer().error(libc::ENOENT), Delivered::Yes);
        answer().none();
        drop(answer());
        let expected = [[header(19, 0), b"abc".to_vec()].concat(), header(16, -2), header(16, -5)];
        assert_eq!(kept.0.into_inner().unwrap(), expected);
    }

    #[test]
    fn an_answer_that_the_kernel_refuses_is_an_error_for_the_client() {
        let kept = Kept(Mutex::default(), 20);
        assert_eq!(Answer::new(&kept, Unique(7)).bytes(&[0; 30]), Delivered::ClientGone);
        assert_eq!(kept.0.into_inner().unwrap(), [header(16, -5)]);
    }
}
