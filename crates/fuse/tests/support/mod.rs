//! The test of arbitrary bytes as a request: run by the fuzzer for hours, and by a test for a moment.

use aquifer_fuse::wire::{Operation, Request, parse};

/// The length of a header, and where its own length and that of the extensions are in it.
const HEADER_BYTES: usize = 40;

/// Tests any bytes as a request: as they are, and again with the right length, or only that would
/// ever be tested.
pub fn request(data: &[u8]) {
    accept(data);
    let mut bytes = data.to_vec();
    if bytes.len() >= HEADER_BYTES {
        let len = bytes.len() as u32;
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        accept(&bytes);
    }
}

fn accept(bytes: &[u8]) {
    match parse(bytes) {
        Ok(request) => check(bytes, &request),
        Err(malformed) => {
            assert_eq!(malformed.unique.is_some(), bytes.len() >= HEADER_BYTES);
            assert!(!malformed.to_string().is_empty());
        }
    }
}

/// What a request refers to lies in its bytes, and each name ends at the first NUL.
fn check(bytes: &[u8], request: &Request<'_>) {
    let inside = |part: &[u8]| {
        let (all, part) = (bytes.as_ptr_range(), part.as_ptr_range());
        assert!(all.start <= part.start && part.end < all.end || part.is_empty());
    };
    let name = |name: &[u8]| {
        inside(name);
        assert!(!name.contains(&0));
    };
    match &request.operation {
        Operation::Lookup { name: one }
        | Operation::Unlink { name: one }
        | Operation::RemoveDirectory { name: one }
        | Operation::Link { name: one, .. }
        | Operation::MakeNode { name: one, .. }
        | Operation::MakeDirectory { name: one, .. }
        | Operation::Create { name: one, .. }
        | Operation::GetXattr { name: one, .. }
        | Operation::RemoveXattr { name: one } => name(one),
        Operation::Symlink { name: one, target: two }
        | Operation::Rename { name: one, new_name: two, .. } => {
            name(one);
            name(two);
        }
        Operation::Write(write, data) => {
            assert_eq!(write.size as usize, data.len());
            assert!(data.is_empty() || bytes.as_ptr_range().contains(&data.as_ptr()));
        }
        Operation::SetXattr { name: one, .. } => name(one),
        Operation::BatchForget(forgets) => {
            assert!(forgets.clone().count() * 16 <= bytes.len());
        }
        _ => {}
    }
}
