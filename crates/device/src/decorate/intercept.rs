//! Interposes a decorator between a device and its caller: on single transfers and on batches.

use crate::{Batch, Device, DeviceError, IoOperation, Request};

/// A decorator's handling of transfers.
pub(super) trait Intercept: Sized {
    /// What it keeps for a transfer in flight.
    type Note;

    /// A transfer is about to start: lets it start, or completes it at once.
    fn start(&mut self, request: &Request) -> Result<Self::Note, Result<usize, DeviceError>>;

    /// A transfer has ended; the returned result is passed on.
    fn end(
        &mut self,
        request: &Request,
        note: Self::Note,
        result: Result<usize, DeviceError>,
    ) -> Result<usize, DeviceError>;

    /// One blocking read through the decorator.
    fn read_at(
        self,
        device: &impl Device,
        offset_bytes: u64,
        buffer: &mut [u8],
    ) -> Result<usize, DeviceError> {
        let request = Request {
            operation: IoOperation::Read,
            offset_bytes,
            memory: buffer.as_mut_ptr(),
            len_bytes: buffer.len(),
            tag: 0,
        };
        self.transfer(&request, || device.read_at(offset_bytes, buffer))
    }

    /// One blocking write through the decorator.
    fn write_at(
        self,
        device: &impl Device,
        offset_bytes: u64,
        buffer: &[u8],
    ) -> Result<(), DeviceError> {
        let request = Request {
            operation: IoOperation::Write,
            offset_bytes,
            // Only read from, as the operation is a write.
            memory: buffer.as_ptr().cast_mut(),
            len_bytes: buffer.len(),
            tag: 0,
        };
        let write = || device.write_at(offset_bytes, buffer).map(|()| buffer.len());
        self.transfer(&request, write).map(|_| ())
    }

    /// One transfer between its start and its end.
    fn transfer(
        mut self,
        request: &Request,
        perform: impl FnOnce() -> Result<usize, DeviceError>,
    ) -> Result<usize, DeviceError> {
        let note = match self.start(request) {
            Ok(note) => note,
            Err(answer) => return answer,
        };
        let result = perform();
        self.end(request, note, result)
    }
}

/// A batch between a device and the inner batch. Its tags towards the device are indices into
/// `in_flight`, so that requests find their notes whatever the inner batch's tags are.
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
// `complete`. That is called only after the device has completed the request, or if it never saw
// it.
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
                // Completed here; the batch may have more requests now, so call it again.
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
