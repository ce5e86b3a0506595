//! Per-thread I/O accounting of the kernel.

use std::fs::File;
use std::io::{self, Read};

/// Returns the bytes of page cache that the calling thread has dirtied so far, from
/// `/proc/thread-self/io`.
///
/// A page counts each time it changes from clean to dirty, by a store or by a system call, and
/// counts with its *whole folio*: so the increase caused by the first store to clean page cache is
/// the size of the folio. Takes 20 to 60 µs.
///
/// # Errors
/// If the kernel lacks this accounting, or `/proc` is not mounted.
pub fn dirtied_bytes() -> io::Result<u64> {
    let mut text = [0; 512];
    let mut len = 0;
    let mut file = File::open("/proc/thread-self/io")?;
    while len < text.len() {
        match file.read(&mut text[len..])? {
            0 => break,
            got => len += got,
        }
    }
    std::str::from_utf8(&text[..len])
        .ok()
        .and_then(|text| text.lines().find_map(|line| line.strip_prefix("write_bytes: ")))
        .and_then(|number| number.trim().parse().ok())
        .ok_or_else(|| io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_dirties_is_on_its_account() {
        let Ok(before) = dirtied_bytes() else { return println!("skipped: no accounts") };
        let path = std::env::temp_dir().join(format!("aquifer-accounting-{}", std::process::id()));
        std::fs::write(&path, vec![1; 100_000]).unwrap();
        std::fs::remove_file(&path).unwrap();
        let others = std::thread::spawn(dirtied_bytes).join().unwrap().unwrap();
        let own = dirtied_bytes().unwrap() - before;
        // Files in memory are not accounted.
        assert!(own == 0 || own >= 100_000, "{own}");
        assert_eq!(others, 0);
    }
}
