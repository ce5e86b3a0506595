//! The answers to `READDIR` and `READDIRPLUS`: entries with names, one after another.
//!
//! ```text
//!  READDIR:             DirectoryEntry │ name │ zeros up to a multiple of 8
//!  READDIRPLUS: Entry │ DirectoryEntry │ name │ zeros up to a multiple of 8
//! ```

use zerocopy::{FromBytes, IntoBytes};

use super::answer::{DirectoryEntry, Entry};

/// Entries of a directory, in the buffer from which they are answered.
pub struct Listing<'b> {
    buffer: &'b mut [u8],
    used: usize,
    is_plus: bool,
}

impl<'b> Listing<'b> {
    /// An empty one that may get as long as the buffer.
    pub fn new(buffer: &'b mut [u8], is_plus: bool) -> Listing<'b> {
        Listing { buffer, used: 0, is_plus }
    }

    /// Whether each entry has one of [`Listing::push`]'s entries.
    pub fn is_plus(&self) -> bool {
        self.is_plus
    }

    /// How many bytes an entry with a name this long takes.
    pub fn len_bytes_of(&self, name_len: usize) -> usize {
        let before = if self.is_plus { size_of::<Entry>() } else { 0 };
        before + (size_of::<DirectoryEntry>() + name_len).next_multiple_of(8)
    }

    /// How many bytes are left.
    pub fn left_bytes(&self) -> usize {
        self.buffer.len() - self.used
    }

    /// Whether it has no entries.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Appends an entry: `kind` is a constant `DT_…`; a reader that continues behind it passes
    /// `offset`. Returns false, and changes nothing, where it does not fit.
    pub fn push(&mut self, ino: u64, offset: u64, kind: u8, name: &[u8], plus: &Entry) -> bool {
        let len = self.len_bytes_of(name.len());
        if len > self.left_bytes() {
            return false;
        }
        let target = &mut self.buffer[self.used..self.used + len];
        target.fill(0);
        let target = if self.is_plus {
            let (before, target) = target.split_at_mut(size_of::<Entry>());
            before.copy_from_slice(plus.as_bytes());
            target
        } else {
            target
        };
        let header =
            DirectoryEntry { ino, offset, name_len: name.len() as u32, kind: u32::from(kind) };
        let (before, target) = target.split_at_mut(size_of::<DirectoryEntry>());
        before.copy_from_slice(header.as_bytes());
        target[..name.len()].copy_from_slice(name);
        self.used += len;
        true
    }

    /// The bytes to answer.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[..self.used]
    }

    /// The node IDs of the entries that have one.
    pub fn nodes(&self) -> impl Iterator<Item = u64> + '_ {
        let mut left = if self.is_plus { self.bytes() } else { &[] };
        std::iter::from_fn(move || {
            let (entry, rest) = Entry::read_from_prefix(left).ok()?;
            let (header, _) = DirectoryEntry::read_from_prefix(rest).ok()?;
            left = left.get(self.len_bytes_of(header.name_len as usize)..)?;
            Some(entry.nodeid)
        })
        .filter(|&node| node != 0)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn entries_are_aligned_and_those_that_do_not_fit_change_nothing() {
        let mut buffer = [0xff; 2 * (128 + 24 + 8) + 7];
        let mut listing = Listing::new(&mut buffer, true);
        let plus = |nodeid| Entry { nodeid, ..Entry::new_zeroed() };
        assert!(listing.push(5, 7, libc::DT_REG, b"a", &plus(5)));
        assert!(!listing.push(6, 8, libc::DT_REG, b"123456789", &plus(6)));
        assert!(listing.push(7, 9, libc::DT_DIR, b"12345678", &plus(0)));
        assert!(!listing.push(8, 10, libc::DT_DIR, b"", &plus(8)));
        assert_eq!(listing.bytes().len(), 2 * (128 + 24 + 8));
        assert_eq!(listing.bytes()[152..160], *b"a\0\0\0\0\0\0\0");
        assert_eq!(listing.nodes().collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn without_attributes_an_entry_is_its_header_and_its_name() {
        let mut buffer = [0xff; 32];
        let mut listing = Listing::new(&mut buffer, false);
        assert!(listing.push(5, 7, libc::DT_LNK, b"name", &Entry::new_zeroed()));
        let mut expected = [5_u64, 7, 4 | u64::from(libc::DT_LNK) << 32, 0];
        expected[3] = u64::from_ne_bytes(*b"name\0\0\0\0");
        assert_eq!(listing.bytes(), expected.as_bytes());
        assert_eq!(listing.nodes().count(), 0);
    }
}
