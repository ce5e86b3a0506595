//! Identifies the current boot of the machine.
//!
//! What was written to the page cache or to shared memory survives the death of all processes, but
//! not a reboot. Comparing boot IDs tells whether the machine has rebooted since another process
//! wrote.

use once_cell::race::OnceBox;

/// Returns an ID of the current boot; 0 if unknown.
pub fn id() -> u64 {
    static ID: OnceBox<u64> = OnceBox::new();
    *ID.get_or_init(|| {
        // A UUID in text form, folded to 64 bits: half of its random bits suffice.
        let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(32).collect();
        let whole = u128::from_str_radix(&digits, 16).unwrap_or(0);
        Box::new((whole >> 64) as u64 ^ whole as u64)
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
