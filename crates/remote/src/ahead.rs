//! Reading ahead for single reads, such as those of faults: what is read in order is requested in growing pieces.
//!
//! A read that begins where another one ended is a stream's next; each doubles what is asked for, up to the length of a
//! merged request. What was brought beyond the read is kept in memory, oldest out first, until it is asked for. What a
//! tier keeps is there instead.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::RemoteError;
use crate::body::Body;

/// Readers in order that are told apart.
const STREAMS: usize = 16;

#[derive(Default)]
pub(crate) struct Ahead {
    /// The latest last.
    streams: VecDeque<Stream>,
    kept: VecDeque<(Range<u64>, Body)>,
    kept_bytes: u64,
    /// Ranges being brought, which reads inside them wait for.
    under_way: Vec<(Range<u64>, Outcome)>,
}

/// Why a range that is under way did not come; unset otherwise.
pub(crate) type Outcome = Arc<OnceLock<Arc<RemoteError>>>;

struct Stream {
    next: u64,
    len_bytes: u64,
}

/// What to do about a read.
pub(crate) enum Step {
    /// It is here.
    Here(Body),
    /// Another read is about to bring it.
    Wait(Outcome),
    /// Bring this range, which begins with the read, and call [`Ahead::done`].
    Bring(Range<u64>),
}

impl Ahead {
    /// Decides on a read; of `most_bytes` for a request, inside an object of `end` bytes.
    pub fn step(&mut self, read: Range<u64>, most_bytes: u64, end: u64) -> Step {
        let contains = |range: &Range<u64>| range.start <= read.start && read.end <= range.end;
        if let Some((range, body)) = self.kept.iter().find(|(range, _)| contains(range)) {
            return Step::Here(body.after((read.start - range.start) as usize));
        }
        if let Some((_, outcome)) = self.under_way.iter().find(|(range, _)| contains(range)) {
            return Step::Wait(outcome.clone());
        }
        let read_bytes = read.end - read.start;
        let place = self.streams.iter().position(|stream| stream.next == read.start);
        let before = place.and_then(|place| self.streams.remove(place));
        let len_bytes = match before {
            // Whole reads, so that the last one is not torn.
            Some(stream) => {
                let len_bytes = (stream.len_bytes * 2).min(most_bytes);
                (len_bytes - len_bytes % read_bytes).max(read_bytes)
            }
            None => read_bytes,
        };
        let range = read.start..read.start.saturating_add(len_bytes).min(end).max(read.end);
        if self.streams.len() == STREAMS {
            self.streams.pop_front();
        }
        self.streams.push_back(Stream { next: range.end, len_bytes });
        self.under_way.push((range.clone(), Outcome::default()));
        Step::Bring(range)
    }

    /// Notes that a range did not come, before [`Ahead::done`], for the reads that wait for it.
    pub fn failed(&mut self, range: &Range<u64>, error: &Arc<RemoteError>) {
        if let Some((_, outcome)) = self.under_way.iter().find(|(other, _)| other == range) {
            let _ = outcome.set(error.clone());
        }
    }

    /// Notes what a range brought: of a read of `read_bytes`, the rest is kept, if `most_bytes` allow.
    pub fn done(
        &mut self,
        range: &Range<u64>,
        read_bytes: u64,
        body: Option<&Body>,
        most_bytes: u64,
    ) {
        if let Some(place) = self.under_way.iter().position(|(other, _)| other == range) {
            self.under_way.swap_remove(place);
        }
        let bytes = range.end - range.start;
        let Some(body) = body else { return };
        if bytes <= read_bytes || bytes > most_bytes {
            return;
        }
        while self.kept_bytes + bytes > most_bytes {
            let Some((oldest, _)) = self.kept.pop_front() else { break };
            self.kept_bytes -= oldest.end - oldest.start;
        }
        self.kept.push_back((range.clone(), body.clone()));
        self.kept_bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;
    const END: u64 = 1 << 30;

    /// Reads a page; what was brought for it, or none if it was there.
    fn read(ahead: &mut Ahead, page: u64, most_kept: u64) -> Option<u64> {
        let read = page * PAGE..(page + 1) * PAGE;
        match ahead.step(read.clone(), 16 * PAGE, END) {
            Step::Here(body) => {
                let (_, bytes) = body.parts(0, 8).next().unwrap();
                assert_eq!(bytes, page.to_le_bytes());
                None
            }
            Step::Wait(_) => panic!("nothing is under way"),
            Step::Bring(range) => {
                let pages = range.start / PAGE..range.end.div_ceil(PAGE);
                let bytes = pages.clone().flat_map(|page| {
                    let mut bytes = vec![0; PAGE as usize];
                    bytes[..8].copy_from_slice(&page.to_le_bytes());
                    bytes
                });
                let body = Body::of(bytes.collect::<Vec<u8>>());
                ahead.done(&range, PAGE, Some(&body), most_kept);
                Some(pages.end - pages.start)
            }
        }
    }

    #[test]
    fn streams_grow_and_single_reads_do_not() {
        let mut ahead = Ahead::default();
        let brought: Vec<_> = (100..160).filter_map(|page| read(&mut ahead, page, END)).collect();
        assert_eq!(brought, [1, 2, 4, 8, 16, 16, 16]);
        for page in [7, 900, 3, 50_000] {
            assert_eq!(read(&mut ahead, page, END), Some(1));
        }
        // Two streams in turns.
        for page in 0..10 {
            read(&mut ahead, 1000 + page, END);
            read(&mut ahead, 2000 + page, END);
        }
        assert_eq!(read(&mut ahead, 1015, END), Some(16));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut ahead = Ahead::default();
        for page in 0..1000 {
            read(&mut ahead, page, 20 * PAGE);
            assert!(ahead.kept_bytes <= 20 * PAGE);
            let sum: u64 = ahead.kept.iter().map(|(range, _)| range.end - range.start).sum();
            assert_eq!(ahead.kept_bytes, sum);
        }
        assert!(ahead.streams.len() <= STREAMS);
    }

    #[test]
    fn reads_wait_for_what_is_under_way() {
        let mut ahead = Ahead::default();
        let Step::Bring(range) = ahead.step(0..PAGE, PAGE, END) else { panic!() };
        let Step::Wait(outcome) = ahead.step(0..PAGE, PAGE, END) else { panic!() };
        let error = Arc::new(RemoteError::Stopped { url: "url".into() });
        ahead.failed(&range, &error);
        ahead.done(&range, PAGE, None, END);
        // Of this attempt; the next read makes another one.
        assert!(outcome.get().is_some_and(|got| Arc::ptr_eq(got, &error)));
        assert!(matches!(ahead.step(0..PAGE, PAGE, END), Step::Bring(_)));
    }

    #[test]
    fn nothing_is_asked_for_behind_the_end() {
        let mut ahead = Ahead::default();
        let end = 5 * PAGE + 10;
        let mut at = 0;
        while at < end {
            match ahead.step(at..(at + PAGE).min(end), 64 * PAGE, end) {
                Step::Bring(range) => {
                    assert!(range.end <= end);
                    ahead.done(&range, PAGE, None, 0);
                    at = range.end;
                }
                _ => panic!(),
            }
        }
    }
}
