//! Which lines of a text a word is in. The index is built once and is there in every run after that.
//!
//! ```sh
//! cargo run --example word_index -- words.pool --add README.md
//! cargo run --example word_index -- words.pool psync
//! ```

mod common;

use std::path::Path;

use common::word_index::WordIndex;

const ROOT: u64 = 0x776f_7264;
/// Lines that become durable together: a crash loses no more than these.
const LINES_PER_PSYNC: usize = 10_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: word_index POOL [--add FILE | WORD]…";
    let pool = arguments.next().ok_or(usage)?;
    let mut attached = common::attach_heap(Path::new(&pool), "words")?;
    attached.heap()?.enter_with(|scope, commit| -> Result<(), Box<dyn std::error::Error>> {
        let heap = scope.heap();
        scope.root_or_insert_with(ROOT, |heap| Ok(WordIndex::new_in(heap)))?;
        while let Some(argument) = arguments.next() {
            if argument == "--add" {
                let text = std::fs::read_to_string(arguments.next().ok_or(usage)?)?;
                let lines: Vec<&str> = text.lines().collect();
                for lines in lines.chunks(LINES_PER_PSYNC) {
                    let index = scope.root_mut::<WordIndex>(ROOT)?;
                    for line in lines {
                        index.add_line(line, heap)?;
                    }
                    commit.psync(scope)?;
                }
            } else {
                let index = scope.root::<WordIndex>(ROOT)?;
                println!("{argument}: lines {:?}", index.lines_with(&argument.to_lowercase()));
            }
        }
        let index = scope.root::<WordIndex>(ROOT)?;
        println!("{} lines, {} words", index.lines(), index.words());
        Ok(())
    })?;
    attached.psync()?;
    attached.detach()?;
    Ok(())
}
