//! An index from words to the lines of a text that contain them.

use std::ops::Bound;

use aquifer_object::collections::{PBTreeMap, PString, PVec};
use aquifer_object::heap::{HeapError, HeapRef};
use aquifer_object::persist;

persist! {
    /// Words in order, each with the numbers of its lines.
    pub struct WordIndex<'h> {
        lines_of: PBTreeMap<'h, PString<'h>, PVec<'h, u32>>,
        lines: u32,
    }
}

impl<'h> WordIndex<'h> {
    /// An empty index.
    pub fn new_in(heap: HeapRef<'h>) -> WordIndex<'h> {
        WordIndex { lines_of: PBTreeMap::new_in(heap), lines: 0 }
    }

    /// Adds the next line; returns its number. Words are separated by characters that are not
    /// letters or digits, and are stored in lower case.
    ///
    /// If the object is full, some of the line's words are indexed and the line is not counted.
    pub fn add_line(&mut self, line: &str, heap: HeapRef<'h>) -> Result<u32, HeapError> {
        let number = self.lines;
        for word in line.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.is_empty()) {
            let word = word.to_lowercase();
            if !self.lines_of.contains_key(word.as_str()) {
                self.lines_of.insert(PString::from_str_in(&word, heap)?, PVec::new_in(heap))?;
            }
            let lines = self.lines_of.get_mut(word.as_str()).expect("it was put there");
            if lines.last() != Some(&number) {
                lines.push(number)?;
            }
        }
        self.lines += 1;
        Ok(number)
    }

    /// The number of lines.
    pub fn lines(&self) -> u32 {
        self.lines
    }

    /// The number of different words.
    pub fn words(&self) -> usize {
        self.lines_of.len()
    }

    /// The numbers of the lines with a word, in order.
    pub fn lines_with(&self, word: &str) -> &[u32] {
        self.lines_of.get(word).map_or(&[], |lines| lines)
    }

    /// The words with this prefix, in order.
    pub fn words_from<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let words = self.lines_of.range::<str, _>(from).map(|(word, _)| word.as_str());
        words.take_while(move |word| word.starts_with(prefix))
    }
}
