//! The bytes of a range, in pieces.

use bytes::Bytes;

/// The bytes of a range: one piece, or those that a tier joined.
#[derive(Debug, Clone, Default)]
pub(crate) struct Body {
    pieces: Vec<Bytes>,
    /// Bytes before the range.
    skip: usize,
}

impl Body {
    pub fn of(bytes: impl Into<Bytes>) -> Body {
        Body { pieces: vec![bytes.into()], skip: 0 }
    }

    /// The body without its first bytes.
    pub fn after(&self, bytes: usize) -> Body {
        Body { skip: self.skip + bytes, ..self.clone() }
    }

    /// Bodies of ranges that follow each other, of which a caller wants what is behind the first `skip` bytes.
    pub fn joined(bodies: impl Iterator<Item = Body>, skip: usize) -> Body {
        let pieces = bodies.flat_map(|body| {
            debug_assert_eq!(body.skip, 0);
            body.pieces
        });
        Body { pieces: pieces.collect(), skip }
    }

    /// Hands out the parts of `len_bytes` bytes from an offset on, with the offset of each among them. Allocates
    /// nothing.
    pub fn parts(&self, start: usize, len_bytes: usize) -> impl Iterator<Item = (usize, &[u8])> {
        let (mut skip, mut done) = (self.skip + start, 0);
        self.pieces.iter().filter_map(move |piece| {
            let skipped = skip.min(piece.len());
            skip -= skipped;
            let part = &piece[skipped..];
            let part = &part[..part.len().min(len_bytes - done)];
            let at = done;
            done += part.len();
            (!part.is_empty()).then_some((at, part))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_body_are_any_range() {
        let all: Vec<u8> = (0..30).collect();
        for skip in [0, 5, 9] {
            let pieces = [all[..7].to_vec(), vec![], all[7..].to_vec()];
            let body = Body::joined(pieces.into_iter().map(Body::of), skip);
            for start in 0..30 - skip {
                for len_bytes in 0..=30 - skip - start {
                    let mut got = vec![255; len_bytes];
                    for (at, part) in body.parts(start, len_bytes) {
                        got[at..at + part.len()].copy_from_slice(part);
                    }
                    assert_eq!(got, all[skip + start..skip + start + len_bytes]);
                }
            }
        }
    }
}
