//! Detects which sanitizer's runtime library is in this process.
//!
//! Some sanitizers own fixed parts of the address space and end the process if a mapping is
//! requested there, so a caller must check first. A library linked into the program is found
//! through a weak reference to a symbol, whether or not the linker exported it. One loaded later is
//! found by name.

use std::ffi::CStr;
use std::fmt;

/// A sanitizer that keeps shadow memory at fixed addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sanitizer {
    /// ThreadSanitizer.
    Thread,
    /// MemorySanitizer.
    Memory,
    /// AddressSanitizer.
    Address,
}

impl Sanitizer {
    /// All of them.
    pub const ALL: [Sanitizer; 3] = [Sanitizer::Thread, Sanitizer::Memory, Sanitizer::Address];

    fn symbol(self) -> &'static CStr {
        match self {
            Sanitizer::Thread => c"__tsan_init",
            Sanitizer::Memory => c"__msan_init",
            Sanitizer::Address => c"__asan_init",
        }
    }

    /// Returns whether the sanitizer is present in this process.
    pub fn is_running(self) -> bool {
        linked(self) || {
            // SAFETY: the name is a C string, and the look-up runs no code of the library.
            !unsafe { libc::dlsym(libc::RTLD_DEFAULT, self.symbol().as_ptr()) }.is_null()
        }
    }
}

impl fmt::Display for Sanitizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Sanitizer::Thread => "ThreadSanitizer",
            Sanitizer::Memory => "MemorySanitizer",
            Sanitizer::Address => "AddressSanitizer",
        })
    }
}

/// Returns whether the linker found the library: an unresolved weak reference is 0.
#[cfg(target_arch = "x86_64")]
fn linked(sanitizer: Sanitizer) -> bool {
    macro_rules! weak_address {
        ($name:literal) => {{
            let address: usize;
            // SAFETY: loads one word of the global offset table.
            unsafe {
                std::arch::asm!(
                    concat!(".weak ", $name),
                    concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                    out(reg) address,
                    options(nostack, pure, readonly, preserves_flags),
                );
            }
            address
        }};
    }
    let address = match sanitizer {
        Sanitizer::Thread => weak_address!("__tsan_init"),
        Sanitizer::Memory => weak_address!("__msan_init"),
        Sanitizer::Address => weak_address!("__asan_init"),
    };
    address != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn linked(_sanitizer: Sanitizer) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_carries_at_most_one() {
        let running: Vec<_> = Sanitizer::ALL.into_iter().filter(|one| one.is_running()).collect();
        assert!(running.len() <= 1, "{running:?}");
    }
}
