//! Which sanitizer's run-time library this process carries.
//!
//! Some sanitizers own fixed parts of the address space and end the process when a mapping is asked for
//! there, so one has to know before asking. A library linked into the program shows as a symbol; whether
//! the linker exported it or not, a weak reference finds it. One that was loaded later is found by name.

use std::ffi::CStr;
use std::fmt;

/// A sanitizer that keeps a shadow of memory at fixed addresses.
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

    /// Whether it runs in this process.
    pub fn is_running(self) -> bool {
        linked(self) || {
            // SAFETY: the name is a C string, and looking a symbol up runs no code of its library.
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

/// Whether the linker found the library: a weak reference to nothing is 0.
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
