//! A batch: its transfers, merged into requests where that is cheaper, and copied out as the answers come.
//!
//! What the batch has to offer at once is sorted and merged over gaps, by the rule in `costs`. Only the calling thread
//! touches the batch's memory, so nothing refers to it when a panic of the batch leaves this function.
//!
//! Requests whose answers would not fit into the batch's memory are held back: it counts each from its start until its
//! answer is copied, with its gaps. One is always under way.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use aquifer_device::{Batch, DeviceError, IoOperation, Request};

use crate::engine::Engine;
use crate::mailbox::Answer;
use crate::{RemoteDevice, RemoteError, THREAD_LIMIT};

/// Most bytes that the disk is asked for ahead of their reading: the memory that they are copied to stays in a core's cache.
const NEAR_BYTES: u64 = 1 << 20;
/// Longer runs in the tier are left to the kernel's reading ahead: with `POSIX_FADV_WILLNEED` it fills single pages.
const LONG_RUN_BYTES: u64 = 256 << 10;

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

impl Piece {
    fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Pieces that one request serves.
struct Group {
    range: Range<u64>,
    pieces: Vec<Piece>,
}

impl Group {
    fn len_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// Values with numbers, which are given again when a value is taken out.
struct Numbered<T> {
    values: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Numbered<T> {
    fn new() -> Numbered<T> {
        Numbered { values: vec![], free: vec![] }
    }

    fn put(&mut self, value: T) -> usize {
        let number = self.free.pop().unwrap_or_else(|| {
            self.values.push(None);
            self.values.len() - 1
        });
        self.values[number] = Some(value);
        number
    }

    fn at(&mut self, number: usize) -> &mut T {
        self.values[number].as_mut().expect("it is under way")
    }

    fn take(&mut self, number: usize) -> T {
        self.free.push(number);
        self.values[number].take().expect("it is under way")
    }

    fn take_all(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::replace(self, Numbered::new()).values.into_iter().flatten()
    }

    fn len(&self) -> usize {
        self.values.len() - self.free.len()
    }
}

/// Runs a batch. Returns early in a child that the batch forked.
pub(crate) fn run(device: &RemoteDevice, engine: &Engine, batch: &mut dyn Batch, depth: usize) {
    let mut running = Running {
        device,
        engine,
        inbox: Inbox::new(engine),
        transfers: Numbered::new(),
        groups: Numbered::new(),
        held: VecDeque::new(),
        requested_bytes: 0,
        near: VecDeque::new(),
        limit: device.options.timeout.saturating_add(THREAD_LIMIT),
    };
    // `None` in a child.
    let _ = running.run(batch, depth.max(1));
}

/// A batch's transfers, and the requests that bring their pieces.
struct Running<'a> {
    device: &'a RemoteDevice,
    engine: &'a Engine,
    inbox: Inbox<'a>,
    transfers: Numbered<Transfer>,
    groups: Numbered<Group>,
    /// Those that wait for memory.
    held: VecDeque<Group>,
    /// Of the requests under way, and of answers that are not copied yet.
    requested_bytes: u64,
    /// Pieces that seem to be in the tier, in the order in which the disk was asked for them.
    near: VecDeque<Piece>,
    /// How long the next answer is waited for.
    limit: Duration,
}

// Of the methods that call the batch, the result is `None` in a child that the batch forked: there the rest is not this
// process's to do.
impl Running<'_> {
    fn run(&mut self, batch: &mut dyn Batch, depth: usize) -> Option<()> {
        loop {
            let far = self.pull(batch, depth)?;
            self.request(far);
            let first = if self.near.is_empty() {
                if self.transfers.len() == 0 {
                    return Some(());
                }
                match self.inbox.receiver.recv_timeout(self.limit) {
                    Ok(answer) => Some(answer),
                    // The thread is stuck, or has ended.
                    Err(_) => return self.give_up(batch),
                }
            } else {
                // The other half keeps the disk busy while the batch offers more.
                self.read_near(batch, self.near.len().div_ceil(2))?;
                self.inbox.receiver.try_recv().ok()
            };
            // All that have arrived, so that what the batch offers next can be merged.
            let mut next = first;
            while let Some((number, answer)) = next {
                self.take_answer(batch, number, &answer)?;
                next = self.inbox.receiver.try_recv().ok();
            }
        }
    }

    /// Fails the transfers under way, and what the batch still offers.
    fn give_up(&mut self, batch: &mut dyn Batch) -> Option<()> {
        let stopped = &self.device.stopped;
        for transfer in self.transfers.take_all() {
            let Transfer { request, len_bytes, .. } = transfer;
            let error = stopped.clone().of_read(request.offset_bytes, len_bytes);
            self.complete(batch, request.tag, Err(error))?;
        }
        loop {
            let request = batch.next();
            if !self.engine.is_current() {
                return None;
            }
            let Some(request) = request else { return Some(()) };
            let error = stopped.clone().of_read(request.offset_bytes, request.len_bytes);
            self.complete(batch, request.tag, Err(error))?;
        }
    }

    /// Asks the disk for a run of pieces.
    fn prefetch(&self, run: Range<u64>) {
        // The kernel reads ahead of long runs by itself, into larger pages of its cache.
        if run.end - run.start < LONG_RUN_BYTES
            && let Some(tier) = self.engine.tier()
        {
            tier.prefetch(run);
        }
    }

    /// Takes transfers until enough are under way. Asks the disk for the pieces that seem to be in the tier, each while the
    /// next ones are taken, and returns the others.
    fn pull(&mut self, batch: &mut dyn Batch, depth: usize) -> Option<Vec<Piece>> {
        let mut far = vec![];
        let mut run = 0..0;
        let mut near_bytes: u64 = self.near.iter().map(Piece::len_bytes).sum();
        let mut outstanding_bytes = self.outstanding_bytes();
        let most_bytes = self.device.batch_bytes();
        // At least one, so that each transfer is started at some time.
        while self.transfers.len() < depth
            && near_bytes < NEAR_BYTES
            && outstanding_bytes < most_bytes
        {
            let request = batch.next();
            if !self.engine.is_current() {
                return None;
            }
            let Some(request) = request else { break };
            let readable = match request.operation {
                IoOperation::Write => Err(DeviceError::ReadOnly),
                _ => self.device.readable_bytes(request.offset_bytes, request.len_bytes),
            };
            match readable {
                Ok(len_bytes @ 1..) => {
                    let left_bytes = len_bytes;
                    outstanding_bytes += len_bytes;
                    let transfer = Transfer { request, len_bytes, left_bytes, error: None };
                    let transfer = self.transfers.put(transfer);
                    let end = request.offset_bytes + len_bytes as u64;
                    let mut start = request.offset_bytes;
                    while start < end {
                        let piece_end = self.device.piece_end(self.engine, start, u64::MAX);
                        let range = start..piece_end.min(end);
                        start = range.end;
                        let piece = Piece { transfer, range };
                        let tier = self.engine.tier();
                        if tier.is_some_and(|tier| tier.has(piece.range.clone())) {
                            near_bytes += piece.len_bytes();
                            if piece.range.start == run.end {
                                run.end = piece.range.end;
                            } else {
                                self.prefetch(run);
                                run = piece.range.clone();
                            }
                            self.near.push_back(piece);
                        } else {
                            far.push(piece);
                        }
                    }
                }
                nothing => self.complete(batch, request.tag, nothing)?,
            }
        }
        self.prefetch(run);
        Some(far)
    }

    fn outstanding_bytes(&self) -> usize {
        self.transfers.values.iter().flatten().map(|transfer| transfer.left_bytes).sum()
    }

    /// Reads pieces from the tier, and requests those that turn out not to be there.
    fn read_near(&mut self, batch: &mut dyn Batch, count: usize) -> Option<()> {
        let mut gone = vec![];
        for _ in 0..count {
            let piece = self.near.pop_front().expect("so many");
            let len_bytes = piece.len_bytes() as usize;
            let transfer = self.transfers.at(piece.transfer);
            let in_memory = (piece.range.start - transfer.request.offset_bytes) as usize;
            // SAFETY: inside the request's memory: the piece is a part of the transfer.
            let to = unsafe { transfer.request.memory.add(in_memory) };
            // SAFETY: the contract of `Batch`: valid, and not accessed by other code until `complete`.
            let to = unsafe { std::slice::from_raw_parts_mut(to, len_bytes) };
            let tier = self.engine.tier().expect("some pieces seemed to be there");
            if tier.read(piece.range.start, to) {
                self.device.read_from_tier(len_bytes);
                transfer.left_bytes -= len_bytes;
                self.finish(batch, piece.transfer)?;
            } else {
                gone.push(piece);
            }
        }
        self.request(gone);
        Some(())
    }

    fn request(&mut self, pieces: Vec<Piece>) {
        let costs = self.device.costs();
        let most = self.device.largest_request_bytes() as u64;
        // So that groups that share a sub-block do not both bring it.
        let whole = |range| match self.engine.tier() {
            Some(tier) => tier.whole(range),
            None => range,
        };
        let groups = merge(pieces, costs.gap_bytes(), costs.merged_bytes().min(most), whole);
        self.held.extend(groups);
        self.start_held();
    }

    /// Starts the requests whose answers fit into the batch's memory.
    fn start_held(&mut self) {
        let most_bytes = self.device.batch_bytes() as u64;
        while let Some(group) = self.held.front() {
            let bytes = group.len_bytes();
            if self.requested_bytes > 0 && self.requested_bytes + bytes > most_bytes {
                break;
            }
            self.requested_bytes += bytes;
            let range = group.range.clone();
            let group = self.held.pop_front().expect("it was there");
            let number = self.groups.put(group);
            self.engine.request(range, number, Sender::clone(&self.inbox.sender));
        }
    }

    fn take_answer(&mut self, batch: &mut dyn Batch, number: usize, answer: &Answer) -> Option<()> {
        let group = self.groups.take(number);
        self.requested_bytes -= group.len_bytes();
        for piece in &group.pieces {
            deliver(group.range.start, piece, self.transfers.at(piece.transfer), answer);
            self.finish(batch, piece.transfer)?;
        }
        Some(())
    }

    /// Completes a transfer of which nothing is left.
    fn finish(&mut self, batch: &mut dyn Batch, number: usize) -> Option<()> {
        if self.transfers.at(number).left_bytes > 0 {
            return Some(());
        }
        let Transfer { request, len_bytes, error, .. } = self.transfers.take(number);
        let result = match error {
            None => Ok(len_bytes),
            Some(error) => Err(error.of_read(request.offset_bytes, len_bytes)),
        };
        self.device.delivered(*result.as_ref().unwrap_or(&0));
        self.complete(batch, request.tag, result)
    }

    fn complete(
        &self,
        batch: &mut dyn Batch,
        tag: u64,
        result: Result<usize, DeviceError>,
    ) -> Option<()> {
        batch.complete(tag, result);
        self.engine.is_current().then_some(())
    }
}

/// Merges pieces that are at most `gap_bytes` apart into requests of at most `merged_bytes`, or of one piece; each piece's
/// request brings the `whole` range around it.
fn merge(
    mut pieces: Vec<Piece>,
    gap_bytes: u64,
    merged_bytes: u64,
    whole: impl Fn(Range<u64>) -> Range<u64>,
) -> Vec<Group> {
    pieces.sort_by_key(|piece| piece.range.start);
    let mut groups: Vec<Group> = vec![];
    for piece in pieces {
        let range = whole(piece.range.clone());
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
    let len_bytes = piece.len_bytes() as usize;
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
        merge(transfers.iter().map(piece).collect(), gap, most, |range| range)
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

    /// Which the limit counts.
    #[test]
    fn requests_bring_the_whole_around_their_pieces() {
        let piece = |range| Piece { transfer: 0, range };
        let pieces = || vec![piece(5..12), piece(28..29), piece(41..42)];
        let whole = |range: Range<u64>| range.start / 10 * 10..range.end.next_multiple_of(10);
        let ends = |most| {
            let groups = merge(pieces(), 10, most, whole);
            groups.into_iter().map(|group| (group.range.start, group.range.end)).collect::<Vec<_>>()
        };
        assert_eq!(ends(50), [(0, 50)]);
        assert_eq!(ends(49), [(0, 30), (40, 50)]);
    }
}
