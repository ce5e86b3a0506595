//! A batch: its transfers, merged into requests where that is cheaper, and copied out as the answers come.
//!
//! What the batch has to offer at once is sorted and merged over gaps, by the rule in `costs`. Only the calling thread
//! touches the batch's memory, so nothing refers to it when a panic of the batch leaves this function.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};

use aquifer_device::{Batch, DeviceError, IoOperation, Request};

use crate::RemoteDevice;
use crate::engine::Engine;
use crate::mailbox::Answer;

/// Transfers that one request serves.
struct Group {
    range: Range<u64>,
    transfers: Vec<Transfer>,
}

struct Transfer {
    request: Request,
    /// Less than the request's at the end of the object.
    len_bytes: usize,
}

impl Transfer {
    fn range(&self) -> Range<u64> {
        self.request.offset_bytes..self.request.offset_bytes + self.len_bytes as u64
    }
}

/// Runs a batch. Returns early in a child that the batch forked.
pub(crate) fn run(device: &RemoteDevice, engine: &Engine, batch: &mut dyn Batch, depth: usize) {
    let inbox = Inbox::new(engine);
    let mut under_way: Vec<Option<Group>> = vec![];
    let mut in_flight = 0;
    loop {
        let Some(transfers) = pull(device, engine, batch, depth.max(1) - in_flight) else { return };
        in_flight += transfers.len();
        for group in merge(transfers, device.costs().gap_bytes(), device.costs().merged_bytes()) {
            let range = group.range.clone();
            let number = under_way.iter().position(Option::is_none).unwrap_or_else(|| {
                under_way.push(None);
                under_way.len() - 1
            });
            under_way[number] = Some(group);
            engine.request(range, device.version(), number, Sender::clone(&inbox.sender));
        }
        if in_flight == 0 {
            return;
        }
        // All that have arrived, so that what the batch offers next can be merged.
        let mut next = inbox.receiver.recv().ok();
        while let Some((number, answer)) = next {
            let group = under_way[number].take().expect("answered once");
            in_flight -= group.transfers.len();
            for transfer in &group.transfers {
                let result = deliver(device, &group, transfer, &answer);
                batch.complete(transfer.request.tag, result);
                if !engine.is_current() {
                    return;
                }
            }
            next = inbox.receiver.try_recv().ok();
        }
    }
}

/// Takes up to `most` transfers that need a request; `None` in a child that the batch forked.
fn pull(
    device: &RemoteDevice,
    engine: &Engine,
    batch: &mut dyn Batch,
    most: usize,
) -> Option<Vec<Transfer>> {
    let mut transfers = vec![];
    while transfers.len() < most {
        let request = batch.next();
        if !engine.is_current() {
            return None;
        }
        let Some(request) = request else { break };
        let readable = match request.operation {
            IoOperation::Write => Err(DeviceError::ReadOnly),
            _ => device.readable_bytes(request.offset_bytes, request.len_bytes),
        };
        match readable {
            Ok(len_bytes @ 1..) if len_bytes <= device.largest_request_bytes() => {
                transfers.push(Transfer { request, len_bytes });
            }
            // Longer than one request, or nothing to ask for.
            Ok(_) => batch.complete(request.tag, aquifer_device::run_one(device, &request)),
            Err(error) => batch.complete(request.tag, Err(error)),
        }
        if !engine.is_current() {
            return None;
        }
    }
    Some(transfers)
}

/// Merges transfers that are at most `gap_bytes` apart into requests of at most `merged_bytes`, or of one transfer.
fn merge(mut transfers: Vec<Transfer>, gap_bytes: u64, merged_bytes: u64) -> Vec<Group> {
    transfers.sort_by_key(|transfer| transfer.request.offset_bytes);
    let mut groups: Vec<Group> = vec![];
    for transfer in transfers {
        let range = transfer.range();
        if let Some(group) = groups.last_mut() {
            let end = group.range.end.max(range.end);
            let is_near = range.start <= group.range.end.saturating_add(gap_bytes);
            if is_near && end - group.range.start <= merged_bytes {
                group.range.end = end;
                group.transfers.push(transfer);
                continue;
            }
        }
        groups.push(Group { range, transfers: vec![transfer] });
    }
    groups
}

fn deliver(
    device: &RemoteDevice,
    group: &Group,
    transfer: &Transfer,
    answer: &Answer,
) -> Result<usize, DeviceError> {
    let Request { offset_bytes, memory, .. } = transfer.request;
    let len_bytes = transfer.len_bytes;
    let body = answer.as_ref().map_err(|error| error.clone().of_read(offset_bytes, len_bytes))?;
    let start = (offset_bytes - group.range.start) as usize;
    let mut done = 0;
    for (at, part) in body.parts(start, len_bytes) {
        // SAFETY: inside the request's memory, by `parts`.
        let to = unsafe { memory.add(at) };
        // SAFETY: the contract of `Batch`: valid, and not accessed by other code until `complete`; the part is the
        // answer's own memory.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
        done += part.len();
    }
    device.delivered(done);
    Ok(done)
}

/// Where the answers of one batch arrive.
struct Inbox<'a> {
    engine: &'a Engine,
    /// In a child a thread that does not exist there may hold its lock: it is leaked.
    sender: ManuallyDrop<Sender<(usize, Answer)>>,
    receiver: ManuallyDrop<Receiver<(usize, Answer)>>,
}

impl<'a> Inbox<'a> {
    fn new(engine: &'a Engine) -> Inbox<'a> {
        let (sender, receiver) = mpsc::channel();
        let (sender, receiver) = (ManuallyDrop::new(sender), ManuallyDrop::new(receiver));
        Inbox { engine, sender, receiver }
    }
}

impl Drop for Inbox<'_> {
    fn drop(&mut self) {
        if self.engine.is_current() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.sender) };
            // SAFETY: as above.
            unsafe { ManuallyDrop::drop(&mut self.receiver) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(transfers: &[(u64, usize)], gap: u64, most: u64) -> Vec<(u64, u64)> {
        let transfer = |&(offset_bytes, len_bytes): &(u64, usize)| Transfer {
            request: Request {
                operation: IoOperation::Read,
                offset_bytes,
                memory: std::ptr::null_mut(),
                len_bytes,
                tag: 0,
            },
            len_bytes,
        };
        merge(transfers.iter().map(transfer).collect(), gap, most)
            .into_iter()
            .map(|group| (group.range.start, group.range.end))
            .collect()
    }

    #[test]
    fn near_transfers_share_a_request() {
        assert_eq!(ends(&[(20, 5), (0, 10)], 10, 100), [(0, 25)]);
        assert_eq!(ends(&[(21, 5), (0, 10)], 10, 100), [(0, 10), (21, 26)]);
        assert_eq!(ends(&[(0, 10), (10, 10), (20, 10)], 0, 20), [(0, 20), (20, 30)]);
        assert_eq!(ends(&[(0, 50), (10, 10)], 0, 60), [(0, 50)]);
        assert_eq!(ends(&[(0, 50)], 0, 10), [(0, 50)]);
        assert_eq!(ends(&[], 0, 10), []);
    }
}
