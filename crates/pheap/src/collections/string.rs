//! Text in an object.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::ops::Deref;

use super::stable_hash::StableHash;
use super::vec::PVec;
use crate::heap::{HeapError, HeapRef};
use crate::persist::{Persist, Shape};

/// Text in the heap with the lifetime `'h`, like `String`; derefs to `str`.
#[repr(transparent)]
pub struct PString<'h> {
    /// UTF-8.
    bytes: PVec<'h, u8>,
}

// SAFETY: a vector of bytes; its shape marks them as text, so that other bytes are not taken for
// text.
unsafe impl<'h> Persist<'h> for PString<'h> {
    fn shape(shape: &mut Shape) {
        shape.own_parts::<Self>("string", PVec::<'h, u8>::shape);
    }
}

impl<'h> PString<'h> {
    /// Empty text, without memory.
    pub fn new_in(heap: HeapRef<'h>) -> PString<'h> {
        PString { bytes: PVec::new_in(heap) }
    }

    /// A copy of `text`.
    ///
    /// # Errors
    /// [`HeapError::Full`].
    pub fn from_str_in(text: &str, heap: HeapRef<'h>) -> Result<PString<'h>, HeapError> {
        let mut string = PString::new_in(heap);
        string.push_str(text)?;
        Ok(string)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        // SAFETY: only whole strings are appended, and only whole characters are removed.
        unsafe { str::from_utf8_unchecked(&self.bytes) }
    }

    /// Appends text.
    ///
    /// # Errors
    /// [`HeapError::Full`].
    pub fn push_str(&mut self, text: &str) -> Result<(), HeapError> {
        self.bytes.extend_from_slice(text.as_bytes())
    }

    /// Appends a character.
    ///
    /// # Errors
    /// [`HeapError::Full`].
    pub fn push(&mut self, character: char) -> Result<(), HeapError> {
        self.push_str(character.encode_utf8(&mut [0; 4]))
    }

    /// Removes the last character.
    pub fn pop(&mut self) -> Option<char> {
        let last = self.as_str().chars().next_back()?;
        self.bytes.truncate(self.bytes.len() - last.len_utf8());
        Some(last)
    }

    /// Truncates the text to `len` bytes.
    ///
    /// # Panics
    /// If that is inside a character.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len() {
            assert!(self.is_char_boundary(len), "byte {len} is inside a character");
            self.bytes.truncate(len);
        }
    }

    /// Removes all text; keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
    }
}

impl Deref for PString<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        self.as_str()
    }
}

impl Borrow<str> for PString<'_> {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

impl fmt::Debug for PString<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(formatter)
    }
}

impl fmt::Display for PString<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self)
    }
}

impl PartialEq for PString<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl PartialEq<str> for PString<'_> {
    fn eq(&self, other: &str) -> bool {
        self.as_str() == other
    }
}

impl PartialEq<&str> for PString<'_> {
    fn eq(&self, other: &&str) -> bool {
        self.as_str() == *other
    }
}

impl Eq for PString<'_> {}

impl PartialOrd for PString<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for PString<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl StableHash for PString<'_> {
    fn stable_hash(&self) -> u64 {
        self.as_str().stable_hash()
    }
}
