//! Accesses through bare pointers into a mapping: the only ones this command makes.
#![allow(unsafe_code, reason = "bare loads are what is measured")]

use aquifer::Mapping;

/// The time of one load at a random place.
pub fn random_load_ns(mapping: &Mapping) -> f64 {
    let len_bytes = usize::try_from(mapping.len()).expect("a mapping fits in the address space");
    assert!(len_bytes >= 8);
    // SAFETY: a mapping is page-aligned and readable while it lives; its device is memory, or a
    // file this process keeps at its length.
    unsafe { aquifer_sys::cost::random_load_ns(mapping.as_ptr(), len_bytes) }
}

/// Loads the first byte of a page.
pub fn load(mapping: &Mapping, offset_bytes: u64) -> u8 {
    assert!(offset_bytes < mapping.len());
    // SAFETY: inside the mapping, as above.
    unsafe { mapping.as_ptr().wrapping_add(offset_bytes as usize).read_volatile() }
}
