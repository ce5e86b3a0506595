//! Filling the tier ahead of use.
//!
//! Each piece has the timeout for itself, from its start, so few are started at a time: as many as `Pace` allows, and not
//! more bytes than may wait to be written.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use crate::store::pace::Pace;
use crate::store::received;
use crate::tier::Tally;
use crate::{RemoteDevice, RemoteError};

/// Shorter pieces would cost more requests.
const SHORTEST_PIECE_BYTES: u64 = 1 << 20;

/// What [`RemoteDevice::warm`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Warmed {
    /// Bytes of the range that were in the tier already, or that others brought meanwhile.
    pub present_bytes: u64,
    /// Bytes that this call downloaded: what was missing, in sub-blocks of 4 KiB, and short gaps that requests read along.
    pub downloaded_bytes: u64,
    /// Of what was missing, the bytes that were not written: the tier's budget is smaller than a request, all that it holds
    /// was being downloaded, or the disk or another process held up the writing for as long as the timeout.
    pub unstored_bytes: u64,
}

impl RemoteDevice {
    /// Downloads what of a range is not in the tier yet, and returns when it has been written. Of an object larger than the
    /// tier's budget, what is downloaded last stays. `progress` is told the bytes done and the bytes in all.
    ///
    /// # Errors
    /// [`RemoteError::Tier`] if the device has no tier or it cannot be written; those of reads. What was written stays.
    pub fn warm(
        &self,
        range: Range<u64>,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Warmed, Arc<RemoteError>> {
        let problem = |problem| {
            let url = self.location.shown.clone();
            Arc::new(RemoteError::Tier { url, problem })
        };
        let engine = self.engine()?;
        let Some(tier) = engine.tier() else {
            let none = "the device was opened without one, or its object has no strong ETag";
            let said = self.stats().tier_problem;
            return Err(problem(said.unwrap_or_else(|| none.to_owned())));
        };
        let end = range.end.min(self.version.len_bytes);
        let start = range.start.min(end);
        let most_bytes = self.batch_bytes() as u64;
        let mut pace = Pace::new(self.options.in_flight, self.options.timeout);
        let tally = Arc::new(Tally::default());
        let (sender, answers) = mpsc::channel();
        let mut under_way: HashMap<usize, (Instant, u64)> = HashMap::new();
        let (mut next, mut done, mut number, mut under_way_bytes) = (start, 0, 0, 0);
        while next < end || !under_way.is_empty() {
            let piece_bytes = self.costs().merged_bytes().max(SHORTEST_PIECE_BYTES);
            let piece = next..self.piece_end(engine, next, piece_bytes).min(end);
            let bytes = piece.end - piece.start;
            let is_allowed = under_way.is_empty()
                || (under_way.len() < pace.allowed() && under_way_bytes + bytes <= most_bytes);
            if bytes > 0 && is_allowed {
                next = piece.end;
                if tier.is_in_file(piece.clone()) {
                    done += bytes;
                    progress(done, end - start);
                } else {
                    engine.warm(piece, number, tally.clone(), sender.clone());
                    under_way.insert(number, (Instant::now(), bytes));
                    under_way_bytes += bytes;
                    number += 1;
                }
                continue;
            }
            let cancel = self.options.cancel.as_ref();
            // Never disconnected: a sender is kept.
            let answer = received(&answers, &self.location.shown, cancel);
            let (number, answer) = answer.map_err(Arc::new)?;
            let (since, bytes) = under_way.remove(&number).expect("it is under way");
            under_way_bytes -= bytes;
            pace.answered(since.elapsed());
            answer?;
            done += bytes;
            progress(done, end - start);
        }
        tier.flush();
        if let Some(error) = tier.problem() {
            return Err(problem(error.to_string()));
        }
        // Relaxed: what has changed them has answered, or was flushed.
        let missing_bytes = tally.missing_bytes.load(Ordering::Relaxed);
        Ok(Warmed {
            present_bytes: (end - start).saturating_sub(missing_bytes),
            downloaded_bytes: tally.downloaded_bytes.load(Ordering::Relaxed),
            unstored_bytes: missing_bytes - tally.stored_bytes.load(Ordering::Relaxed),
        })
    }
}
