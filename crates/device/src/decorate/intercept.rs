//! A batch seen through a decorator.

use crate::{Batch, DeviceError, Request};

/// What a decorator does with the transfers of a batch.
pub(super) trait Intercept {
    /// What it remembers of a transfer in flight.
    type Note;

    /// A transfer is about to start: let it, or answer it at once.
    fn start(&mut self, request: &Request) -> Result<Self::Note, Result<usize, DeviceError>>;

    /// A transfer has ended; the result is passed on as returned.
    fn end(
        &mut self,
        request: &Request,
        note: Self::Note,
        result: Result<usize, DeviceError>,
    ) -> Result<usize, DeviceError>;
}

/// Stands between a device and the batch it runs. Tags towards the device are places in `in_flight`, so
/// that requests find their notes again whatever the batch's own tags are.
pub(super) struct Intercepted<'batch, I: Intercept> {
    batch: &'batch mut dyn Batch,
    intercept: I,
    in_flight: Vec<Option<(Request, I::Note)>>,
    free: Vec<usize>,
}

impl<'batch, I: Intercept> Intercepted<'batch, I> {
    pub(super) fn new(batch: &'batch mut dyn Batch, intercept: I) -> Self {
        Intercepted { batch, intercept, in_flight: Vec::new(), free: Vec::new() }
    }
}

// SAFETY: requests are passed on with the inner batch's memory, which it keeps valid until its own
// `complete`, called here only when the device has completed, or when it never saw, the request.
unsafe impl<I: Intercept> Batch for Intercepted<'_, I> {
    fn next(&mut self) -> Option<Request> {
        loop {
            let request = self.batch.next()?;
            match self.intercept.start(&request) {
                Ok(note) => {
                    let place = self.free.pop().unwrap_or_else(|| {
                        self.in_flight.push(None);
                        self.in_flight.len() - 1
                    });
                    self.in_flight[place] = Some((request, note));
                    return Some(Request { tag: place as u64, ..request });
                }
                // Answered here; the batch may have more now, so it is asked again.
                Err(answer) => self.batch.complete(request.tag, answer),
            }
        }
    }

    fn complete(&mut self, tag: u64, result: Result<usize, DeviceError>) {
        let place = tag as usize;
        let (request, note) =
            self.in_flight[place].take().expect("a device completes each request once");
        self.free.push(place);
        let result = self.intercept.end(&request, note, result);
        self.batch.complete(request.tag, result);
    }
}
