//! Bringing many scattered ranges in at once.
//!
//! Serial faults keep one page of the disk in flight. Here one call announces 256 ranges to the
//! kernel, which fills the page cache at the queue depth of the device. The ranges are mapped one
//! batch later, while the next batch is being read:
//!
//! ```text
//!   WILLNEED   batch 1 │ batch 2 │ batch 3 │
//!   mapped             │ batch 1 │ batch 2 │ batch 3
//! ```
//! Mapping them also detects bytes that cannot be read: `WILLNEED` reports no errors.
//!
//! [`FileView::touch_many`](crate::FileView::touch_many) does this in the calling thread;
//! [`FileView::prefetch`](crate::FileView::prefetch) in a thread of
//! the mapper, for a future of any executor. Dropping the future does not cancel the prefetch.
//! [`Prefetch::wait`] runs a prefetch itself if it has not started yet.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use aquifer_sys::fallible;
use aquifer_sys::memory::{self, SMALL_PAGE_BYTES};

use super::descriptors::FileName;
use super::error::{MapError, Result};
use super::mapped::Mapped;
use super::populate::{Form, Missing, Span, whole_pages};
use aquifer_vm::ProcessMark;
use aquifer_vm::worker::{self, Completer, Completion, JobThread};

/// Ranges announced to the kernel in one call.
const BATCH: usize = 256;
/// Ranges up to this length are mapped by loads, which cost less than a system call.
const TOUCHED_BYTES: usize = 4 * SMALL_PAGE_BYTES;

/// Brings in the ranges, which are offsets in the span.
pub(crate) fn bring_in(
    span: &dyn Span,
    ranges: &[Range<usize>],
) -> std::result::Result<(), Missing> {
    let mut before: &[Range<usize>] = &[];
    for batch in ranges.chunks(BATCH).chain([&[][..]]) {
        will_need(span, batch);
        for range in before {
            let touched = fallible::SUPPORTED && range.len() <= TOUCHED_BYTES;
            let form = if touched { Form::Touch } else { Form::best() };
            form.populate(span, range.clone())?;
        }
        before = batch;
    }
    Ok(())
}

/// Starts the reads. Errors are detected when the range is mapped.
fn will_need(span: &dyn Span, batch: &[Range<usize>]) {
    let told = batch.iter().map(|range| whole_pages(span, range.clone()));
    let vector: Vec<_> = told
        .filter(|range| !range.is_empty())
        .map(|range| memory::Range {
            address: span.address().wrapping_add(range.start).cast_mut(),
            len_bytes: range.len(),
        })
        .collect();
    if vector.is_empty() {
        return;
    }
    // SAFETY: mapped as long as the span lives; the advice changes no contents.
    let advised = unsafe { memory::advise_many(&vector, memory::Advice::WillNeed) };
    // Advise the remaining ranges one by one: the kernel may not support vectors, and stops at a
    // range that it rejects.
    let mut advised_bytes = advised.unwrap_or(0);
    for range in vector {
        if advised_bytes < range.len_bytes {
            // SAFETY: as above.
            let _ =
                unsafe { memory::advise(range.address, range.len_bytes, memory::Advice::WillNeed) };
        }
        advised_bytes = advised_bytes.saturating_sub(range.len_bytes);
    }
}

/// A mapping that ranges can be brought in of, and that can explain why a page is missing.
pub(crate) trait Fetched: Span {
    /// The offset in the span of a byte of the file.
    fn offset_of(&self, file_byte: u64) -> usize;
    /// Finds out why the page at an offset of the span could not be read.
    fn why(&self, name: &FileName, offset: usize) -> MapError;
}

impl Fetched for Mapped {
    fn offset_of(&self, file_byte: u64) -> usize {
        self.in_mapping(&(file_byte..file_byte)).start
    }

    fn why(&self, name: &FileName, offset: usize) -> MapError {
        let start = self.range().start + offset as u64;
        self.fault(name, start, &(start..start + 1))
    }
}

/// A mapping, and ranges of it as offsets.
pub(crate) type ToFetch = (Arc<dyn Fetched>, Vec<Range<usize>>);

/// Ranges that are brought in by the first thread that runs the job.
pub(crate) struct Job {
    span: Arc<dyn Fetched>,
    ranges: Vec<Range<usize>>,
    has_begun: AtomicBool,
    done: Completer<std::result::Result<(), Missing>>,
}

impl Job {
    /// Runs the job, unless another thread has started it.
    fn run(&self) {
        // Relaxed: the fields were written before the job was shared.
        if !self.has_begun.swap(true, Ordering::Relaxed) {
            self.done.complete(bring_in(&*self.span, &self.ranges));
        }
    }
}

/// The thread of one mapper that prefetches. Dropping it completes all prefetches.
pub(crate) type Prefetcher = JobThread<Arc<Job>>;

/// Starts no thread yet.
pub(crate) fn prefetcher() -> Prefetcher {
    JobThread::new(c"aquifer-fetch", |job: Arc<Job>| job.run())
}

/// Ranges of a view that are being brought in: await it or call [`Prefetch::wait`]. Dropping it
/// does not cancel them. Once it has returned the result, it returns the same again.
#[must_use = "it reports errors only when it is awaited or waited for"]
pub struct Prefetch {
    coming: ManuallyDrop<Option<Coming>>,
    name: FileName,
    mark: ProcessMark,
}

struct Coming {
    job: Arc<Job>,
    completion: Completion<std::result::Result<(), Missing>>,
    /// The result, once it was returned.
    outcome: Option<std::result::Result<(), Missing>>,
}

impl Prefetch {
    /// Hands ranges, which are offsets in the span, to the mapper's thread; `None` if there are none.
    pub(crate) fn start(
        ranges: Option<ToFetch>,
        prefetcher: &Prefetcher,
        name: FileName,
        mark: ProcessMark,
    ) -> Prefetch {
        let coming = ranges.map(|(span, ranges)| {
            let (done, completion) = worker::completion();
            let job = Arc::new(Job { span, ranges, has_begun: AtomicBool::new(false), done });
            prefetcher.run(job.clone());
            Coming { job, completion, outcome: None }
        });
        Prefetch { coming: ManuallyDrop::new(coming), name, mark }
    }

    /// Blocks until all ranges are in memory.
    ///
    /// # Errors
    /// [`MapError::Fault`] with the first byte that could not be read; later ranges may be missing
    /// too.
    pub fn wait(mut self) -> Result<()> {
        if !self.mark.is_current() {
            return Err(MapError::Forked);
        }
        let Some(coming) = &mut *self.coming else { return Ok(()) };
        coming.job.run();
        let result = match coming.outcome {
            Some(result) => result,
            None => coming.completion.wait()?,
        };
        self.explain(result)
    }

    fn explain(&self, result: std::result::Result<(), Missing>) -> Result<()> {
        let (Err(missing), Some(coming)) = (result, &*self.coming) else { return Ok(()) };
        Err(coming.job.span.why(&self.name, missing.offset))
    }
}

impl Future for Prefetch {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.mark.is_current() {
            return Poll::Ready(Err(MapError::Forked));
        }
        let Some(coming) = &mut *self.coming else { return Poll::Ready(Ok(())) };
        let result = match coming.outcome {
            Some(result) => result,
            None => ready!(Pin::new(&mut coming.completion).poll(context))?,
        };
        coming.outcome = Some(result);
        Poll::Ready(self.explain(result))
    }
}

impl fmt::Debug for Prefetch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let completion = self.coming.as_ref().map(|coming| &coming.completion);
        formatter.debug_struct("Prefetch").field("completion", &completion).finish_non_exhaustive()
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        // In a child, the mapping is the parent's: leak it.
        if self.mark.is_current() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.coming) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::populate::tests::Mapping;
    use super::*;
    use std::os::fd::AsFd;

    /// A hole in the mapping stands for the zero page of a failed load, on kernels that reject the
    /// advice there.
    #[test]
    fn ranges_behind_one_that_is_refused_are_read_as_well() {
        const PAGES: usize = 4096;
        let page = SMALL_PAGE_BYTES;
        let mapping = Mapping::of_pages(PAGES);
        mapping.file.sync_all().unwrap();
        memory::drop_cached(mapping.file.as_fd(), 0, (PAGES * page) as u64).unwrap();
        let hole = 1000 * page..1001 * page;
        // SAFETY: this test does not access these pages; unmapping the whole mapping later skips
        // the hole.
        unsafe { memory::unmap(mapping.address().cast_mut().wrapping_add(hole.start), page) }
            .unwrap();
        let last = 3000 * page..3001 * page;
        let cached = || {
            memory::cachestat(mapping.file.as_fd(), last.start as u64, page as u64).unwrap().cached
        };
        match memory::cachestat(mapping.file.as_fd(), 0, 1) {
            Err(error) => return println!("skipped: {error}"),
            Ok(_) if cached() > 0 => return println!("skipped: the page cache keeps the file"),
            Ok(_) => {}
        }
        will_need(&*mapping, &[0..page, hole, last.clone()]);
        assert_eq!(cached(), 1);
    }
}
