//! A batch: its transfers, merged into requests where that is cheaper, and copied out as the answers come.
//!
//! What the batch has to offer at once is sorted and merged over gaps, by the rule in `costs`. Only the calling thread
//! touches the batch's memory, so nothing refers to it when a panic of the batch leaves this function.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use aquifer_device::{Batch, DeviceError, IoOperation, Request};

use crate::engine::Engine;
use crate::mailbox::Answer;
use crate::{RemoteDevice, RemoteError};

/// A transfer of the batch that is under way.
struct Transfer {
    request: Request,
    /// Less than the request's at the end of the object.
    len_bytes: usize,
    /// Of it not answered yet.
    left_bytes: usize,
    error: Option<Arc<RemoteError>>,
}

/// A part of a transfer that one request can serve.
struct Piece {
    /// Its transfer's number.
    transfer: usize,
    range: Range<u64>,
}

/// Pieces that one request serves.
struct Group {
    range: Range<u64>,
    pieces: Vec<Piece>,
}

/// Values with numbers, which are given again when a value is taken out.
struct Numbered<T>(Vec<Option<T>>);

impl<T> Numbered<T> {
    fn put(&mut self, value: T) -> usize {
        let number = self.0.iter().position(Option::is_none).unwrap_or_else(|| {
            self.0.push(None);
            self.0.len() - 1
        });
        self.0[number] = Some(value);
        number
    }

    fn len(&self) -> usize {
        self.0.iter().flatten().count()
    }
}

/// Runs a batch. Returns early in a child that the batch forked.
pub(crate) fn run(device: &RemoteDevice, engine: &Engine, batch: &mut dyn Batch, depth: usize) {
    let inbox = Inbox::new(engine);
    let mut transfers = Numbered(vec![]);
    let mut groups = Numbered(vec![]);
    loop {
        let Some(pieces) = pull(device, engine, batch, depth.max(1), &mut transfers) else {
            return;
        };
        for group in merge(pieces, device.costs().gap_bytes(), device.costs().merged_bytes()) {
            let range = group.range.clone();
            let number = groups.put(group);
            engine.request(range, device.version(), number, Sender::clone(&inbox.sender));
        }
        if transfers.len() == 0 {
            return;
        }
        // All that have arrived, so that what the batch offers next can be merged.
        let mut next = inbox.receiver.recv().ok();
        while let Some((number, answer)) = next {
            let group: Group = groups.0[number].take().expect("answered once");
            for piece in &group.pieces {
                let slot = &mut transfers.0[piece.transfer];
                let transfer = slot.as_mut().expect("a piece of it is under way");
                deliver(group.range.start, piece, transfer, &answer);
                if transfer.left_bytes > 0 {
                    continue;
                }
                let Transfer { request, len_bytes, error, .. } = slot.take().expect("as above");
                let result = match error {
                    None => Ok(len_bytes),
                    Some(error) => Err(error.of_read(request.offset_bytes, len_bytes)),
                };
                device.delivered(*result.as_ref().unwrap_or(&0));
                batch.complete(request.tag, result);
                if !engine.is_current() {
                    return;
                }
            }
            next = inbox.receiver.try_recv().ok();
        }
    }
}

/// Takes transfers until `depth` are under way; returns their pieces, or `None` in a child that the batch forked.
fn pull(
    device: &RemoteDevice,
    engine: &Engine,
    batch: &mut dyn Batch,
    depth: usize,
    transfers: &mut Numbered<Transfer>,
) -> Option<Vec<Piece>> {
    let largest = device.largest_request_bytes() as u64;
    let mut pieces = vec![];
    while transfers.len() < depth {
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
            Ok(len_bytes @ 1..) => {
                let left_bytes = len_bytes;
                let transfer =
                    transfers.put(Transfer { request, len_bytes, left_bytes, error: None });
                let end = request.offset_bytes + len_bytes as u64;
                let mut start = request.offset_bytes;
                while start < end {
                    let range = start..end.min(start.saturating_add(largest));
                    start = range.end;
                    pieces.push(Piece { transfer, range });
                }
            }
            nothing => {
                batch.complete(request.tag, nothing);
                if !engine.is_current() {
                    return None;
                }
            }
        }
    }
    Some(pieces)
}

/// Merges pieces that are at most `gap_bytes` apart into requests of at most `merged_bytes`, or of one piece.
fn merge(mut pieces: Vec<Piece>, gap_bytes: u64, merged_bytes: u64) -> Vec<Group> {
    pieces.sort_by_key(|piece| piece.range.start);
    let mut groups: Vec<Group> = vec![];
    for piece in pieces {
        let range = piece.range.clone();
        if let Some(group) = groups.last_mut() {
            let end = group.range.end.max(range.end);
            let is_near = range.start <= group.range.end.saturating_add(gap_bytes);
            if is_near && end - group.range.start <= merged_bytes {
                group.range.end = end;
                group.pieces.push(piece);
                continue;
            }
        }
        groups.push(Group { range, pieces: vec![piece] });
    }
    groups
}

/// Copies a piece out of the answer that starts at `start`, or notes its error.
fn deliver(start: u64, piece: &Piece, transfer: &mut Transfer, answer: &Answer) {
    let len_bytes = (piece.range.end - piece.range.start) as usize;
    transfer.left_bytes -= len_bytes;
    let body = match answer {
        Ok(body) => body,
        Err(error) => {
            transfer.error.get_or_insert_with(|| error.clone());
            return;
        }
    };
    let in_memory = (piece.range.start - transfer.request.offset_bytes) as usize;
    for (at, part) in body.parts((piece.range.start - start) as usize, len_bytes) {
        // SAFETY: inside the request's memory: the piece is a part of the transfer, and this of the piece.
        let to = unsafe { transfer.request.memory.add(in_memory + at) };
        // SAFETY: the contract of `Batch`: valid, and not accessed by other code until `complete`; the part is the
        // answer's own memory.
        unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), to, part.len()) };
    }
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
        let piece =
            |&(start, len): &(u64, usize)| Piece { transfer: 0, range: start..start + len as u64 };
        merge(transfers.iter().map(piece).collect(), gap, most)
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
