//! Finds the lines of a text that contain a word. The index is built once and survives in the pool.
//!
//! ```sh
//! cargo run --example word_index -- words.pool --add README.md
//! cargo run --example word_index -- words.pool psync
//! ```

mod common;

use std::process::ExitCode;

use common::word_index::WordIndex;

const ROOT: u64 = 0x776f_7264;
/// Lines that become durable together: a crash loses at most these.
const LINES_PER_PSYNC: usize = 10_000;

fn main() -> ExitCode {
    common::run("word_index POOL [--add FILE | WORD]…", |pool, arguments| {
        let mut arguments = arguments.iter();
        let mut attached = common::attach_heap(pool, "words")?;
        attached.heap()?.enter_with(|scope, commit| -> common::Result<()> {
            let heap = scope.heap();
            scope.root_or_insert_with(ROOT, |heap| Ok(WordIndex::new_in(heap)))?;
            while let Some(argument) = arguments.next() {
                if argument == "--add" {
                    let file = arguments.next().ok_or("--add needs a FILE behind it")?;
                    let text = std::fs::read_to_string(file)
                        .map_err(|error| format!("{file}: {error}"))?;
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
    })
}
