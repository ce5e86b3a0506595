//! The memory that a device takes for answers, of which a cache takes off its own.
//!
//! Half is for requests under way and for what waits to be written to the tier, a quarter for bytes that were brought beyond
//! what was asked for (`ahead`), and a quarter for the answers that a batch has not copied yet. Each batch counts for itself,
//! because it calls the application, which may wait for another.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::{Either, select};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// A page.
pub(crate) const SMALLEST_REQUEST_BYTES: usize = 4 << 10;
/// What a permit stands for.
const UNIT_BYTES: usize = 4 << 10;
/// A request's share: of what requests may take together, a quarter.
const REQUEST_DIVISOR: usize = 8;
pub(crate) const SMALLEST_BUFFER_BYTES: usize = REQUEST_DIVISOR * SMALLEST_REQUEST_BYTES;

pub(crate) struct Buffers {
    limit_bytes: AtomicUsize,
    under_way: Arc<Semaphore>,
    /// Permits that were in use when the limit was lowered, and are forgotten when they come back.
    owed_units: AtomicUsize,
    /// What a request waits for may now be more than there is.
    lowered: Notify,
}

impl Buffers {
    pub fn new(limit_bytes: usize) -> Buffers {
        let under_way = Arc::new(Semaphore::new(units(limit_bytes)));
        let limit_bytes = AtomicUsize::new(limit_bytes);
        Buffers { limit_bytes, under_way, owed_units: AtomicUsize::new(0), lowered: Notify::new() }
    }

    // Relaxed: a number that orders nothing.
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes.load(Ordering::Relaxed)
    }

    /// Lowers the limit to `bytes`, if it is higher; returns what it is.
    pub fn lower(&self, bytes: usize) -> usize {
        let bytes = bytes.max(SMALLEST_BUFFER_BYTES);
        let before = self.limit_bytes.fetch_min(bytes, Ordering::Relaxed);
        if bytes < before {
            let less = units(before) - units(bytes);
            let owed = less - self.under_way.forget_permits(less);
            self.owed_units.fetch_add(owed, Ordering::Relaxed);
            self.lowered.notify_waiters();
        }
        before.min(bytes)
    }

    /// Most bytes of one request.
    pub fn request_bytes(&self) -> usize {
        self.limit_bytes() / REQUEST_DIVISOR
    }

    /// Most bytes that wait to be written to a tier.
    pub fn waiting_bytes(&self) -> u64 {
        self.limit_bytes() as u64 / 4
    }

    /// Most bytes of answers that one batch has not copied yet.
    pub fn batch_bytes(&self) -> usize {
        self.limit_bytes() / 4
    }

    /// Most bytes kept of what was brought beyond what was asked for.
    pub fn ahead_bytes(&self) -> usize {
        self.limit_bytes() / 4
    }

    /// Waits for memory.
    pub async fn take(&self, bytes: u64) -> OwnedSemaphorePermit {
        loop {
            let wanted = self.wanted(bytes);
            if let Some(mut taken) = self.acquire(wanted).await
                && !self.pay(&mut taken)
            {
                return taken;
            }
        }
    }

    /// How many permits to wait for; and for what may make them more than there are, from now on.
    fn wanted(&self, bytes: u64) -> (u32, Notified<'_>) {
        let lowered = self.lowered.notified();
        let most = units(self.limit_bytes());
        let units = usize::try_from(bytes).map_or(most, |bytes| bytes.div_ceil(UNIT_BYTES));
        (units.min(most) as u32, lowered)
    }

    /// `None` if the limit was lowered since the number was computed.
    async fn acquire(&self, (units, lowered): (u32, Notified<'_>)) -> Option<OwnedSemaphorePermit> {
        let taken = pin!(self.under_way.clone().acquire_many_owned(units));
        match select(taken, pin!(lowered)).await {
            Either::Left((taken, _)) => Some(taken.expect("never closed")),
            Either::Right(_) => None,
        }
    }

    /// Takes memory if there is some at once.
    pub fn try_take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES as u64)).ok()?;
        let mut taken = self.under_way.clone().try_acquire_many_owned(units).ok()?;
        (!self.pay(&mut taken)).then_some(taken)
    }

    /// Forgets of the permits what is owed; whether anything was.
    fn pay(&self, taken: &mut OwnedSemaphorePermit) -> bool {
        let less =
            |owed: usize| owed.checked_sub(owed.min(taken.num_permits())).filter(|_| owed > 0);
        let owed = self.owed_units.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        let Ok(owed) = owed else { return false };
        let paid = taken.split(owed.min(taken.num_permits()));
        paid.expect("as many as there are").forget();
        true
    }
}

fn units(limit_bytes: usize) -> usize {
    limit_bytes / 2 / UNIT_BYTES
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_limit_that_is_lowered_ends_waits_for_more() {
        let buffers = Buffers::new(1 << 20);
        let wanted = buffers.wanted(u64::MAX);
        assert_eq!(wanted.0 as usize, units(1 << 20));
        buffers.lower(1);
        let acquired = tokio::time::timeout(Duration::from_secs(60), buffers.acquire(wanted)).await;
        assert!(acquired.expect("in vain").is_none());
        assert_eq!(buffers.take(u64::MAX).await.num_permits(), units(SMALLEST_BUFFER_BYTES));
    }

    #[tokio::test]
    async fn memory_is_waited_for_and_lowered() {
        let buffers = Arc::new(Buffers::new(1 << 20));
        let one = buffers.take(300 << 10).await;
        let waiting = tokio::spawn({
            let buffers = buffers.clone();
            async move { drop(buffers.take(300 << 10).await) }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(one);
        waiting.await.unwrap();
        assert_eq!(buffers.lower(2 << 20), 1 << 20);
        assert_eq!(buffers.lower(1), SMALLEST_BUFFER_BYTES);
        assert_eq!(buffers.under_way.available_permits(), SMALLEST_BUFFER_BYTES / 2 / UNIT_BYTES);
        // What was in use when the limit was lowered does not come back.
        let lowered = Buffers::new(1 << 20);
        let (one, two) = (lowered.take(300 << 10).await, lowered.take(200 << 10).await);
        lowered.lower(SMALLEST_BUFFER_BYTES);
        drop((one, two));
        drop(lowered.take(1).await);
        assert_eq!(lowered.under_way.available_permits(), units(SMALLEST_BUFFER_BYTES));
        // More than all there is: all.
        drop(buffers.take(u64::MAX).await);
        assert!(buffers.request_bytes() >= SMALLEST_REQUEST_BYTES);
    }
}
