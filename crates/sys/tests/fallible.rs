//! Accesses that report failure, on inaccessible memory. A separate test binary: it installs a
//! handler.

use aquifer_sys::fallible::{self, try_copy, try_store, try_touch};
use aquifer_sys::memory::{self, Protection, SMALL_PAGE_BYTES};
use aquifer_sys::signal;

extern "C" fn handler(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the handler's own arguments.
    let fault = unsafe { signal::fault_context(signal, info, context) };
    // SAFETY: as above.
    if !fault.fallible || !unsafe { fallible::fail(context.cast()) } {
        std::process::abort();
    }
}

#[test]
fn accesses_that_fail_anywhere_in_their_range_say_so() {
    if !fallible::SUPPORTED {
        eprintln!("skipped: not on this architecture");
        return;
    }
    signal::install(libc::SIGSEGV, handler).unwrap();
    let page = memory::map_anonymous(2 * SMALL_PAGE_BYTES).unwrap();
    let gone = page.wrapping_add(SMALL_PAGE_BYTES);
    // SAFETY: this test's own mapping.
    unsafe { memory::protect(gone, SMALL_PAGE_BYTES, Protection::None) }.unwrap();
    let mut bytes = [7u8; 400];
    for len in 1..300 {
        for there in [0, 1, 7, 8, 9, 64, 65, 200].into_iter().filter(|there| *there < len) {
            let at = gone.wrapping_sub(there);
            // SAFETY: mapped, though possibly not readable; the target is this test's own.
            assert!(!unsafe { try_copy(at, bytes.as_mut_ptr(), len) }, "{there} of {len}");
            // SAFETY: as above.
            assert!(!unsafe { try_store(bytes.as_ptr(), at, len) }, "{there} of {len}");
        }
        let at = gone.wrapping_sub(len);
        // SAFETY: as above.
        assert!(unsafe {
            try_store(bytes.as_ptr(), at, len) && try_copy(at, bytes.as_mut_ptr(), len)
        });
    }
    // SAFETY: as above.
    assert!(unsafe { try_touch(page) && !try_touch(gone) });
}
