//! Several pieces of work at once, as many as [`Pace`] allows.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;

use crate::store::pace::Pace;

/// Work for each item, in their order.
pub(super) struct Paced {
    pace: Pace,
}

impl Paced {
    /// At most `most` at once; an answer is slow that takes a considerable part of the timeout.
    pub fn new(most: usize, timeout: Option<Duration>) -> Paced {
        Paced { pace: Pace::new(most, timeout.unwrap_or(Duration::MAX)) }
    }

    /// Does the work for each item, and passes the results to `done` in the order of the items. Ends at the first error.
    pub async fn each<Item, Work, T, E>(
        &mut self,
        mut items: impl Iterator<Item = Item>,
        work: impl Fn(Item) -> Work,
        mut done: impl FnMut(T),
    ) -> Result<(), E>
    where
        Work: Future<Output = Result<T, E>>,
    {
        let mut under_way = FuturesOrdered::new();
        loop {
            while under_way.len() < self.pace.allowed() {
                let Some(item) = items.next() else { break };
                let work = work(item);
                under_way.push_back(async {
                    let start = Instant::now();
                    (work.await, start.elapsed())
                });
            }
            let Some((result, took)) = under_way.next().await else { return Ok(()) };
            self.pace.answered(took);
            done(result?);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Does twenty pieces of work. Returns how many were under way when each began.
    fn at_once(timeout: Option<Duration>) -> Vec<usize> {
        let (under_way, seen) = (Cell::new(0), Cell::new(Vec::new()));
        let work = |item: usize| {
            let (under_way, seen) = (&under_way, &seen);
            async move {
                let start = Instant::now();
                under_way.set(under_way.get() + 1);
                let mut all = seen.take();
                all.push(under_way.get());
                seen.set(all);
                tokio::task::yield_now().await;
                while start.elapsed().is_zero() {}
                under_way.set(under_way.get() - 1);
                Ok::<_, ()>(item)
            }
        };
        let mut results = Vec::new();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut paced = Paced::new(6, timeout);
        runtime.block_on(paced.each(0..20, work, |item| results.push(item))).unwrap();
        assert!(results.into_iter().eq(0..20), "in order");
        seen.take()
    }

    #[test]
    fn slow_answers_leave_fewer_at_once() {
        let quick = at_once(None);
        assert_eq!((quick[3], quick.iter().max()), (4, Some(&6)), "{quick:?}");
        let slow = at_once(Some(Duration::ZERO));
        assert_eq!((slow[3], slow.iter().max()), (4, Some(&4)), "{slow:?}");
        assert!(slow[10..].iter().all(|&at_once| at_once == 1), "{slow:?}");
    }
}
