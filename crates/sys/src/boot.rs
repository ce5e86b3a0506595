//! Which start of the machine this is.
//!
//! What was written to the page cache, or to shared memory, is there as long as the kernel runs, also when all processes
//! have died. A number that is the kernel's own for each start tells whether it still is the one that somebody else
//! wrote to.

use std::sync::OnceLock;

/// A number of this start of the machine; 0 if there is none to be had, and then nothing is known.
pub fn id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(|| {
        // A UUID in text: half of its random bits will do.
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(32).collect();
        let whole = u128::from_str_radix(&digits, 16).unwrap_or(0);
        (whole >> 64) as u64 ^ whole as u64
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_start_has_one_number() {
        assert_ne!(super::id(), 0, "/proc is mounted where tests run");
        assert_eq!(super::id(), super::id());
    }
}
