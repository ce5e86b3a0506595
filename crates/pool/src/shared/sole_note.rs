//! What the [sole writer](crate::open::sole) of a pool tells the others, in the segment.

use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::PoolError;
use crate::sync::AtomicU64;

/// The longest note.
pub(crate) const NOTE_BYTES: usize = 256;

/// What the sole writer tells the others, in the segment. Changed only by a process that is opening
/// the pool for writing. Meaningless while no handle has locked [`Byte::Sole`](crate::shared::membership::Byte::Sole).
#[repr(C)]
pub(crate) struct SoleNote {
    /// As numbered in its own PID namespace.
    pid: AtomicU64,
    nonce: AtomicU64,
    len_bytes: AtomicU64,
    text: [AtomicU64; NOTE_BYTES / 8],
}

/// The start of a text that has room in a note.
fn cut(text: &str) -> &[u8] {
    let mut ends = (0..=text.len().min(NOTE_BYTES)).rev();
    let end = ends.find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text.as_bytes()[..end]
}

impl SoleNote {
    // Relaxed, here and below: the lock of `Byte::Recovery` orders it.
    pub fn set(&self, text: &str, nonce: u64) {
        let text = cut(text);
        let mut bytes = [0; NOTE_BYTES];
        bytes[..text.len()].copy_from_slice(text);
        for (word, bytes) in self.text.iter().zip(bytes.as_chunks().0) {
            word.store(u64::from_le_bytes(*bytes), Relaxed);
        }
        self.len_bytes.store(text.len() as u64, Relaxed);
        self.pid.store(u64::from(std::process::id()), Relaxed);
        self.nonce.store(nonce, Relaxed);
    }

    /// By which others may join the sole writer. That keeps it itself: once it has lost its locks, this
    /// may be that of the next one.
    pub fn nonce(&self) -> u64 {
        self.nonce.load(Relaxed)
    }

    pub fn error(&self, path: PathBuf) -> PoolError {
        let bytes: Vec<u8> =
            self.text.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        let len_bytes = (self.len_bytes.load(Relaxed) as usize).min(NOTE_BYTES);
        // Any writer of the pool may have stored this, and it is printed.
        let text = String::from_utf8_lossy(&bytes[..len_bytes]);
        let note = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        PoolError::SoleWriter { path, pid: self.pid.load(Relaxed) as u32, note }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_cut_between_characters_and_shows_no_control_characters() {
        let long = "ä".repeat(200);
        assert_eq!(cut(&long), "ä".repeat(128).as_bytes());
        assert_eq!(cut(&format!("x{long}")), format!("x{}", "ä".repeat(127)).as_bytes());
        let note: SoleNote = SoleNote {
            pid: AtomicU64::new(0),
            nonce: AtomicU64::new(0),
            len_bytes: AtomicU64::new(0),
            text: [(); NOTE_BYTES / 8].map(|()| AtomicU64::new(0)),
        };
        note.set("mounted at /m\u{1b}[2J", 7);
        let text = |note: &SoleNote| note.error("/pool".into()).to_string();
        assert!(text(&note).contains("mounted at /m\u{fffd}[2J"), "{}", text(&note));
        // Another process may store anything.
        note.len_bytes.store(u64::MAX, Relaxed);
        note.text[0].store(u64::MAX, Relaxed);
        assert!(text(&note).contains('\u{fffd}'));
    }
}
