//! The messages between a broker and its clients: one request, one answer.
//!
//! ```text
//! request   [ magic 8 | uuid of the pool, or 0 16 | key ………… ]
//! answer    [ magic 8 | status 8 | uuid of the pool 16 | id of the segment 16 | reason, if it failed ………… ]
//! ```
//! Numbers are little-endian. An answer that grants access carries the descriptors of the pool
//! file, the segment and the pins, in this order.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use aquifer_sys::local_socket::Connection;
use uuid::Uuid;

use super::key::AccessKey;
use super::outcome::Outcome;

const REQUEST_MAGIC: &[u8; 8] = b"AQASKS01";
const ANSWER_MAGIC: &[u8; 8] = b"AQSAYS01";
const REQUEST_HEAD_BYTES: usize = 24;
const ANSWER_HEAD_BYTES: usize = 48;
/// The maximum length of a reason.
const MAX_REASON_BYTES: usize = 1024;

/// A client's request.
pub(super) struct Request {
    /// The pool's uuid, if the client knows it.
    pub pool: Option<Uuid>,
    pub key: Vec<u8>,
}

/// The status of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Granted = 0,
    WrongKey = 1,
    OtherPool = 2,
    NoRequest = 3,
    Failed = 4,
}

/// A broker's answer.
pub(super) struct Answer {
    pub status: Status,
    pub pool: Uuid,
    pub segment_id: Uuid,
    pub reason: String,
}

fn not_understood(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn uuid_at(bytes: &[u8], offset: usize) -> Uuid {
    Uuid::from_slice(&bytes[offset..offset + 16]).expect("16 bytes")
}

impl Request {
    pub fn send(pool: Option<Uuid>, key: &AccessKey, connection: &Connection) -> io::Result<()> {
        let pool = pool.unwrap_or(Uuid::nil());
        connection.send(&[REQUEST_MAGIC, pool.as_bytes().as_slice(), key.bytes()].concat(), &[])
    }

    pub fn receive(connection: &Connection) -> io::Result<Request> {
        let mut bytes = [0; REQUEST_HEAD_BYTES + AccessKey::MAX_BYTES];
        let (len_bytes, _) = connection.receive(&mut bytes)?;
        Request::parse(&bytes[..len_bytes])
    }

    fn parse(bytes: &[u8]) -> io::Result<Request> {
        if bytes.len() < REQUEST_HEAD_BYTES || bytes[..8] != REQUEST_MAGIC[..] {
            return Err(not_understood("it is no request"));
        }
        let pool = uuid_at(bytes, 8);
        let key = bytes[REQUEST_HEAD_BYTES..].to_vec();
        Ok(Request { pool: (!pool.is_nil()).then_some(pool), key })
    }
}

impl Answer {
    pub fn granted(pool: Uuid, segment_id: Uuid) -> Answer {
        Answer { status: Status::Granted, pool, segment_id, reason: String::new() }
    }

    /// Refuses a request, with as little information as possible: the peer is not trusted.
    pub fn refusal(outcome: &Outcome) -> Answer {
        let (status, reason) = match outcome {
            Outcome::WrongKey => (Status::WrongKey, ""),
            Outcome::OtherPool => (Status::OtherPool, ""),
            Outcome::Granted | Outcome::NoRequest => (Status::NoRequest, ""),
            Outcome::Failed(reason) => (Status::Failed, reason.as_str()),
        };
        let reason = reason.chars().take(MAX_REASON_BYTES / 4).collect();
        Answer { status, pool: Uuid::nil(), segment_id: Uuid::nil(), reason }
    }

    pub fn send(&self, connection: &Connection, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let status = (self.status as u64).to_le_bytes();
        let parts: [&[u8]; 5] = [
            ANSWER_MAGIC,
            &status,
            self.pool.as_bytes(),
            self.segment_id.as_bytes(),
            self.reason.as_bytes(),
        ];
        connection.send(&parts.concat(), files)
    }

    pub fn receive(connection: &Connection) -> io::Result<(Answer, Vec<OwnedFd>)> {
        let mut bytes = [0; ANSWER_HEAD_BYTES + MAX_REASON_BYTES];
        let (len_bytes, files) = connection.receive(&mut bytes)?;
        if len_bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok((Answer::parse(&bytes[..len_bytes])?, files))
    }

    fn parse(bytes: &[u8]) -> io::Result<Answer> {
        if bytes.len() < ANSWER_HEAD_BYTES || bytes[..8] != ANSWER_MAGIC[..] {
            return Err(not_understood("it is no answer"));
        }
        let status = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
        let all = [
            Status::Granted,
            Status::WrongKey,
            Status::OtherPool,
            Status::NoRequest,
            Status::Failed,
        ];
        let status = all.into_iter().find(|known| *known as u64 == status);
        Ok(Answer {
            status: status.ok_or_else(|| not_understood("its status is unknown"))?,
            pool: uuid_at(bytes, 16),
            segment_id: uuid_at(bytes, 32),
            reason: String::from_utf8_lossy(&bytes[ANSWER_HEAD_BYTES..]).into_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..200), magic in 0..3_usize
        ) {
            let magics = [REQUEST_MAGIC, ANSWER_MAGIC];
            if let Some(magic) = magics.get(magic)
                && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(&magic[..]);
                bytes.get_mut(9..16).unwrap_or_default().fill(0);
            }
            let request = Request::parse(&bytes);
            prop_assert_eq!(request.is_ok(), bytes.len() >= 24 && &bytes[..8] == REQUEST_MAGIC);
            let answer = Answer::parse(&bytes);
            let is_answer = bytes.len() >= 48 && &bytes[..8] == ANSWER_MAGIC && bytes[8] < 5;
            prop_assert_eq!(answer.is_ok(), is_answer);
        }
    }
}
