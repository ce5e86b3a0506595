//! Looks rows of an embedding table up, in batches, with memory for a small part of the table.
//!
//! ```text
//! cargo run --release --example embeddings -- /tmp/table.bin
//! ```
//! The table is made if it does not exist: a header of 64 bytes, then 200,000 rows of 128 floats.
//! Each batch is the words of a sentence; the result is the mean of their rows.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use aquifer::Rows;

const HEADER_BYTES: usize = 64;
const ROWS: u32 = 200_000;
const FLOATS: usize = 128;
const SENTENCES: u64 = 2_000;
const WORDS: u64 = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: embeddings FILE")?;
    let path = Path::new(&path);
    if !path.exists() {
        make(path)?;
    }
    let rows = Rows::options(FLOATS * size_of::<f32>())
        .header_bytes(HEADER_BYTES as u64)
        .budget_bytes(16 << 20)
        .open(path)?;
    println!("{} rows of {} bytes, {}", rows.len(), rows.row_bytes(), rows.access_path());

    let mut random = 1_u64;
    let mut words = Vec::new();
    let mut checksum = 0.0;
    for _ in 0..SENTENCES {
        words.clear();
        words.extend((0..WORDS).map(|_| word(&mut random, rows.len())));
        let mut mean = [0.0; FLOATS];
        // In any order, each as soon as it is there.
        rows.get_many(&words, |_, bytes| {
            for (sum, float) in mean.iter_mut().zip(bytes.chunks_exact(size_of::<f32>())) {
                let float = f32::from_le_bytes(float.try_into().expect("four bytes"));
                *sum += float / WORDS as f32;
            }
        })?;
        checksum += mean[0];
    }
    let stats = rows.stats();
    println!(
        "{} rows from memory, {} from the device in {} reads; {} of {} places used; {checksum}",
        stats.hits, stats.misses, stats.reads, stats.resident_rows, stats.capacity_rows
    );
    Ok(())
}

/// A random word; a few are frequent.
fn word(random: &mut u64, words: u64) -> u64 {
    *random =
        random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let share = (*random >> 33) as f64 / (1_u64 << 31) as f64;
    (share.powi(4) * words as f64) as u64
}

fn make(path: &Path) -> Result<(), Box<dyn Error>> {
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&[0; HEADER_BYTES])?;
    for row in 0..ROWS {
        for column in 0..FLOATS {
            file.write_all(&(row as f32 / (column + 1) as f32).to_le_bytes())?;
        }
    }
    Ok(file.into_inner()?.sync_all()?)
}
