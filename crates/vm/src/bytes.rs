//! Access to mapped bytes that other threads and processes may change.

use std::cmp::Ordering;
use std::fmt;
use std::io;
use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::ops::{Bound, Range, RangeBounds};

use aquifer_sys::memory::copy_racy;
use memchr::memmem::Finder;
use zerocopy::{FromBytes, Unalign};

/// The first byte of a range, and the one behind the last; an open end is `end`. The start may lie
/// behind the end.
pub fn bounds_of(range: &impl RangeBounds<u64>, end: u64) -> Range<u64> {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => end,
    };
    start..end
}

/// Bytes that are copied at a time to be searched, compared or read.
const BLOCK_BYTES: usize = 4096;

/// Bytes of a mapping, readable while this exists.
///
/// Not a slice: a writable mapping, or the file under a kernel-backed one, may change at any time.
/// Every access copies, so a result may be torn but is always valid bytes: a search, a comparison or
/// a reader sees each byte as it was at some time during the call.
///
/// ```
/// use std::io::BufRead;
/// use aquifer_vm::Bytes;
///
/// let bytes = Bytes::from(&b"first line\nsecond line\n"[..]);
/// assert_eq!(bytes.find(b"second"), Some(11));
/// assert_eq!(bytes.get::<[u8; 5]>(0), *b"first");
/// assert_eq!(bytes.slice(6..10), b"line");
/// assert_eq!(bytes.reader().lines().count(), 2);
/// assert_eq!(bytes.iter().filter(|&byte| byte == b'n').count(), 3);
/// ```
#[derive(Clone, Copy)]
pub struct Bytes<'a> {
    base: *const u8,
    len: usize,
    _borrow: PhantomData<&'a u8>,
}

impl<'a> From<&'a [u8]> for Bytes<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a slice is readable as long as it is borrowed.
        unsafe { Bytes::new(bytes.as_ptr(), bytes.len()) }
    }
}

impl<'a> Bytes<'a> {
    /// `len` bytes from `base`.
    ///
    /// # Safety
    /// `base` is readable for `len` bytes during `'a`.
    pub unsafe fn new(base: *const u8, len: usize) -> Bytes<'a> {
        Bytes { base, len, _borrow: PhantomData }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A pointer to the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.base
    }

    /// A range of the bytes.
    ///
    /// # Panics
    /// If it does not lie inside, like slice indexing.
    pub fn slice(&self, range: Range<usize>) -> Bytes<'a> {
        assert!(range.start <= range.end && range.end <= self.len, "range outside the bytes");
        // SAFETY: inside the bytes, which are readable during `'a`.
        unsafe { Bytes::new(self.base.add(range.start), range.len()) }
    }

    /// Copies `target.len()` bytes from `offset`.
    ///
    /// # Panics
    /// If they do not lie inside, like slice indexing.
    pub fn copy_to(&self, offset: usize, target: &mut [u8]) {
        let end = offset.checked_add(target.len());
        assert!(end.is_some_and(|end| end <= self.len), "range outside the bytes");
        // SAFETY: inside the bytes, which are readable; the target belongs to the caller.
        unsafe { copy_racy(self.base.add(offset), target.as_mut_ptr(), target.len()) };
    }

    /// The value at `offset`, in the machine's byte order; any alignment. One load where the
    /// machine can.
    ///
    /// # Panics
    /// If it does not lie inside, like slice indexing.
    pub fn get<T: FromBytes>(&self, offset: usize) -> T {
        let end = offset.checked_add(size_of::<T>());
        assert!(end.is_some_and(|end| end <= self.len), "value outside the bytes");
        // SAFETY: inside the bytes, which are readable.
        let source = unsafe { self.base.add(offset) }.cast::<Unalign<T>>();
        // SAFETY: the wrapper has alignment 1, and `FromBytes`: any bytes are a `T`. Volatile,
        // because the bytes may change concurrently.
        unsafe { source.read_volatile() }.into_inner()
    }

    /// The bytes, one by one. Where more than a few are needed, [`Bytes::for_each_block`] and
    /// [`Bytes::reader`] are faster.
    pub fn iter(&self) -> Iter<'a> {
        Iter { rest: *self }
    }

    /// Consecutive pieces of `len` bytes; the last may be shorter.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn chunks(&self, len: usize) -> Chunks<'a> {
        assert!(len > 0, "pieces have at least one byte");
        Chunks { rest: *self, len }
    }

    /// Calls `visit` with consecutive blocks, each a private copy.
    pub fn for_each_block(&self, mut visit: impl FnMut(&[u8])) {
        let mut block = [0u8; BLOCK_BYTES];
        for chunk in self.chunks(BLOCK_BYTES) {
            let copy = &mut block[..chunk.len()];
            chunk.copy_to(0, copy);
            visit(copy);
        }
    }

    /// The offset of the first occurrence of `needle`; 0 if that is empty.
    ///
    /// A needle that another thread writes or removes during the search may be missed.
    pub fn find(&self, needle: &[u8]) -> Option<usize> {
        let finder = Finder::new(needle);
        let overlap = needle.len().saturating_sub(1);
        // Blocks overlap, because an occurrence may begin in one and end in the next. They are longer
        // than a long needle, so that no byte is copied more than twice.
        let step = BLOCK_BYTES.max(needle.len());
        let mut block = vec![0; (step + overlap).min(self.len)];
        let mut offset = 0;
        while self.len - offset >= needle.len() {
            let copy_len = block.len().min(self.len - offset);
            let copy = &mut block[..copy_len];
            self.copy_to(offset, copy);
            if let Some(found) = finder.find(copy) {
                return Some(offset + found);
            }
            if copy_len == self.len - offset {
                return None;
            }
            offset += step;
        }
        None
    }

    /// Reads the bytes from the first to the last, through a private buffer.
    pub fn reader(&self) -> BytesReader<'a> {
        BytesReader { rest: *self, block: Box::new([0; BLOCK_BYTES]), filled: 0..0 }
    }

    /// Returns a private copy.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut copy = vec![0; self.len];
        self.copy_to(0, &mut copy);
        copy
    }

    /// The bytes as a slice.
    ///
    /// # Safety
    /// No thread changes them during `'a`: none stores to the mapping through a pointer or a call,
    /// and for a kernel-backed mapping no process writes to the file.
    pub unsafe fn as_slice(&self) -> &'a [u8] {
        // SAFETY: readable during `'a`; the caller guarantees that they do not change.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    /// Takes the first `len` bytes off.
    fn split_off_first(&mut self, len: usize) -> Bytes<'a> {
        let first = self.slice(0..len);
        *self = self.slice(len..self.len);
        first
    }

    /// Compares byte by byte, as slices are compared.
    fn compare(self, other: Bytes<'_>) -> Ordering {
        let (mut ours, mut theirs) = ([0u8; BLOCK_BYTES], [0u8; BLOCK_BYTES]);
        for (our_chunk, their_chunk) in self.chunks(BLOCK_BYTES).zip(other.chunks(BLOCK_BYTES)) {
            let (ours, theirs) = (&mut ours[..our_chunk.len()], &mut theirs[..their_chunk.len()]);
            our_chunk.copy_to(0, ours);
            their_chunk.copy_to(0, theirs);
            let order = ours.cmp(&theirs);
            if order.is_ne() {
                return order;
            }
        }
        self.len.cmp(&other.len)
    }
}

/// Shows the length and the first bytes.
impl fmt::Debug for Bytes<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_BYTES: usize = 32;
        let shown = self.slice(0..self.len.min(SHOWN_BYTES)).to_vec();
        let more = if self.len > SHOWN_BYTES { "…" } else { "" };
        write!(formatter, "Bytes({} bytes: b\"{}\"{more})", self.len, shown.escape_ascii())
    }
}

// `Eq` and `Ord` are left out: the bytes may change between two comparisons.

impl PartialEq<Bytes<'_>> for Bytes<'_> {
    fn eq(&self, other: &Bytes<'_>) -> bool {
        self.len == other.len && self.compare(*other).is_eq()
    }
}

impl PartialOrd<Bytes<'_>> for Bytes<'_> {
    fn partial_cmp(&self, other: &Bytes<'_>) -> Option<Ordering> {
        Some(self.compare(*other))
    }
}

impl PartialEq<[u8]> for Bytes<'_> {
    fn eq(&self, other: &[u8]) -> bool {
        *self == Bytes::from(other)
    }
}

impl PartialEq<&[u8]> for Bytes<'_> {
    fn eq(&self, other: &&[u8]) -> bool {
        *self == Bytes::from(*other)
    }
}

impl<const N: usize> PartialEq<[u8; N]> for Bytes<'_> {
    fn eq(&self, other: &[u8; N]) -> bool {
        *self == Bytes::from(&other[..])
    }
}

impl<const N: usize> PartialEq<&[u8; N]> for Bytes<'_> {
    fn eq(&self, other: &&[u8; N]) -> bool {
        *self == Bytes::from(&other[..])
    }
}

impl PartialEq<Vec<u8>> for Bytes<'_> {
    fn eq(&self, other: &Vec<u8>) -> bool {
        *self == Bytes::from(&other[..])
    }
}

impl PartialOrd<[u8]> for Bytes<'_> {
    fn partial_cmp(&self, other: &[u8]) -> Option<Ordering> {
        Some(self.compare(Bytes::from(other)))
    }
}

impl<'a> IntoIterator for Bytes<'a> {
    type Item = u8;
    type IntoIter = Iter<'a>;
    fn into_iter(self) -> Iter<'a> {
        self.iter()
    }
}

/// The bytes of a [`Bytes`], one by one. See [`Bytes::iter`].
#[derive(Debug, Clone)]
pub struct Iter<'a> {
    rest: Bytes<'a>,
}

impl Iterator for Iter<'_> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        (!self.rest.is_empty()).then(|| self.rest.split_off_first(1).get(0))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.rest.len, Some(self.rest.len))
    }

    fn nth(&mut self, skipped: usize) -> Option<u8> {
        self.rest.split_off_first(skipped.min(self.rest.len));
        self.next()
    }
}

impl DoubleEndedIterator for Iter<'_> {
    fn next_back(&mut self) -> Option<u8> {
        let last = self.rest.len.checked_sub(1)?;
        let byte = self.rest.get(last);
        self.rest = self.rest.slice(0..last);
        Some(byte)
    }
}

impl ExactSizeIterator for Iter<'_> {}
impl FusedIterator for Iter<'_> {}

/// Consecutive pieces of a [`Bytes`]. See [`Bytes::chunks`].
#[derive(Debug, Clone)]
pub struct Chunks<'a> {
    rest: Bytes<'a>,
    len: usize,
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Bytes<'a>;

    fn next(&mut self) -> Option<Bytes<'a>> {
        let len = self.len.min(self.rest.len);
        (len > 0).then(|| self.rest.split_off_first(len))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let count = self.rest.len.div_ceil(self.len);
        (count, Some(count))
    }
}

impl ExactSizeIterator for Chunks<'_> {}
impl FusedIterator for Chunks<'_> {}

/// Reads the bytes of a [`Bytes`] in order. See [`Bytes::reader`]. No read fails.
#[derive(Debug)]
pub struct BytesReader<'a> {
    /// The bytes behind those of the block.
    rest: Bytes<'a>,
    block: Box<[u8; BLOCK_BYTES]>,
    /// The part of the block that is not read yet.
    filled: Range<usize>,
}

impl io::Read for BytesReader<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        if self.filled.is_empty() && target.len() >= BLOCK_BYTES {
            let direct = self.rest.split_off_first(target.len().min(self.rest.len));
            direct.copy_to(0, &mut target[..direct.len()]);
            return Ok(direct.len());
        }
        let mut buffered = io::BufRead::fill_buf(self)?;
        let read = io::Read::read(&mut buffered, target)?;
        io::BufRead::consume(self, read);
        Ok(read)
    }
}

impl io::BufRead for BytesReader<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.filled.is_empty() {
            let next = self.rest.split_off_first(BLOCK_BYTES.min(self.rest.len));
            next.copy_to(0, &mut self.block[..next.len()]);
            self.filled = 0..next.len();
        }
        Ok(&self.block[self.filled.clone()])
    }

    fn consume(&mut self, read: usize) {
        self.filled.start = (self.filled.start + read).min(self.filled.end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, Read};

    /// Bytes that repeat after 251, a length that divides no block.
    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|index| (index % 251) as u8).collect()
    }

    #[test]
    fn iterates_from_both_ends_and_in_pieces() {
        let all = pattern(3 * BLOCK_BYTES + 5);
        let bytes = Bytes::from(&all[..]);
        assert!(bytes.iter().eq(all.iter().copied()));
        assert!(bytes.iter().rev().eq(all.iter().rev().copied()));
        assert!(bytes.iter().step_by(1000).eq(all.iter().copied().step_by(1000)));
        assert_eq!((bytes.iter().len(), bytes.iter().nth(all.len())), (all.len(), None));
        for len in [1, 7, BLOCK_BYTES, all.len(), all.len() + 1] {
            assert_eq!(bytes.chunks(len).len(), all.chunks(len).len());
            assert!(bytes.chunks(len).zip(all.chunks(len)).all(|(ours, theirs)| ours == theirs));
        }
        assert_eq!(Bytes::from(&[][..]).chunks(3).next(), None);
    }

    #[test]
    fn finds_what_spans_blocks() {
        let mut all = vec![0u8; 4 * BLOCK_BYTES];
        for needle in [&b"x"[..], b"needle", &[7; BLOCK_BYTES + 3]] {
            let last = all.len() - needle.len();
            for at in [0, 1, BLOCK_BYTES - 3, BLOCK_BYTES, 2 * BLOCK_BYTES - 1, last] {
                all.fill(0);
                all[at..at + needle.len()].copy_from_slice(needle);
                let bytes = Bytes::from(&all[..]);
                assert_eq!(bytes.find(needle), Some(at), "{} bytes at {at}", needle.len());
                let cut = bytes.slice(0..at + needle.len() - 1);
                assert_eq!(cut.find(needle), None, "{} bytes at {at}", needle.len());
            }
        }
        let bytes = Bytes::from(&all[..]);
        assert_eq!((bytes.find(b""), bytes.find(&vec![0; all.len() + 1])), (Some(0), None));
    }

    #[test]
    fn reads_like_a_slice() {
        let all = pattern(2 * BLOCK_BYTES + 77);
        let bytes = Bytes::from(&all[..]);
        let mut whole = vec![];
        assert_eq!(bytes.reader().read_to_end(&mut whole).unwrap(), all.len());
        assert_eq!(whole, all);
        let mut reader = bytes.reader();
        let mut pieces = vec![0; all.len()];
        let (head, tail) = pieces.split_at_mut(100);
        reader.read_exact(head).unwrap();
        reader.read_exact(tail).unwrap();
        assert!(pieces == all && reader.fill_buf().unwrap().is_empty());
        let lines: Vec<Vec<u8>> = bytes.reader().split(250).map(Result::unwrap).collect();
        let expected: Vec<&[u8]> = all.split(|&byte| byte == 250).collect();
        assert_eq!(lines, expected);
    }

    #[test]
    fn compares_like_a_slice() {
        let all = pattern(BLOCK_BYTES + 10);
        let mut larger = all.clone();
        larger[BLOCK_BYTES + 3] += 1;
        let bytes = Bytes::from(&all[..]);
        assert!(bytes == all && bytes != larger && bytes != all[1..]);
        assert!(bytes < Bytes::from(&larger[..]));
        assert!(bytes > all[..BLOCK_BYTES + 9]);
        assert_eq!(format!("{:?}", bytes.slice(65..67)), "Bytes(2 bytes: b\"AB\")");
    }

    #[test]
    fn values_are_read_at_any_alignment() {
        let bytes = [1u8, 2, 3, 4, 5, 6, 7, 8, 9];
        let bytes = Bytes::from(&bytes[..]);
        assert_eq!(bytes.get::<u64>(1), u64::from_ne_bytes([2, 3, 4, 5, 6, 7, 8, 9]));
        assert_eq!(bytes.get::<[u8; 2]>(7), [8, 9]);
    }
}
