//! Filling the tier ahead of use.

use std::ops::Range;
use std::sync::{Arc, mpsc};

use crate::{RemoteDevice, RemoteError};

/// What [`RemoteDevice::warm`] has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Warmed {
    /// Bytes of the range that were in the tier already.
    pub present_bytes: u64,
    /// Bytes downloaded, by this process.
    pub downloaded_bytes: u64,
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
        let before = self.stats().received_bytes;
        let (sender, answers) = mpsc::channel();
        let (mut next, mut under_way, mut done, mut warmed) = (start, 0, 0, Warmed::default());
        while next < end || under_way > 0 {
            while next < end && under_way < self.options.in_flight {
                let piece = next..end.min(next + self.largest_request_bytes() as u64);
                next = piece.end;
                let bytes = piece.end - piece.start;
                if tier.has(piece.clone()) {
                    warmed.present_bytes += bytes;
                    done += bytes;
                    progress(done, end - start);
                } else {
                    // The length is the number that comes back with the answer.
                    engine.request(piece, bytes as usize, sender.clone());
                    under_way += 1;
                }
            }
            if under_way == 0 {
                continue;
            }
            let (bytes, answer) = answers.recv().expect("a sender is kept");
            under_way -= 1;
            answer?;
            done += bytes as u64;
            progress(done, end - start);
        }
        tier.flush();
        if let Some(error) = tier.problem() {
            return Err(problem(error.to_string()));
        }
        warmed.downloaded_bytes = self.stats().received_bytes - before;
        warmed.present_bytes = (end - start).saturating_sub(warmed.downloaded_bytes);
        Ok(warmed)
    }
}
