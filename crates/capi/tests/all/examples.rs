//! The programs in `examples/c`: they compile without warnings as C and C++, and do what they say,
//! also under the address sanitizer.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{COMPILERS, has, here, succeeds};

/// Runs `test` with the program of an example, from each compiler that is installed.
fn each(name: &str, test: impl Fn(&Path)) {
    let source: PathBuf = here().join("../../examples/c").join(name).with_extension("c");
    let scratch = tempfile::tempdir().unwrap();
    for compiler in COMPILERS {
        if !has(compiler.program) {
            eprintln!("skipped: {name} with {}, which is not installed", compiler.program);
            continue;
        }
        let program = scratch.path().join(compiler.program);
        let mut compile = compiler.with_library(&source, &program);
        if compiler.standard == "c11" {
            compile.arg("-fsanitize=address,undefined");
        }
        succeeds(&mut compile);
        test(&program);
    }
}

#[test]
fn a_graph_larger_than_memory_is_searched() {
    each("graph", |program| {
        let directory = tempfile::tempdir().unwrap();
        let output = succeeds(
            Command::new(program).arg(directory.path().join("graph")).args(["300000", "8"]),
        );
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.ends_with("graph 18 MiB, memory 8 MiB\n"), "{text}");
    });
}

#[test]
fn a_key_value_store_has_its_page_cache() {
    each("kvcache", |program| {
        let directory = tempfile::tempdir().unwrap();
        let output =
            succeeds(Command::new(program).arg(directory.path().join("store")).arg("20000"));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.contains("20000 keys in 3335 pages, ") && text.ends_with("; 0 wrong\n"),
            "{text}"
        );
    });
}

/// Killed at any moment, the table is as its last durable transaction has left it, or as the one that
/// was under way would have.
#[test]
fn a_hash_table_survives_kill() {
    let steps = std::env::var("AQUIFER_STEPS").ok().and_then(|steps| steps.parse().ok());
    let rounds = (10 * steps.unwrap_or(100_u64)).div_ceil(100);
    each("hashtable", |program| {
        let scratch = tempfile::tempdir().unwrap();
        let pool = scratch.path().join("table.pool");
        let run = |arguments: &[&str]| -> u64 {
            let output = succeeds(Command::new(program).arg(&pool).args(arguments));
            let text = String::from_utf8(output.stdout).unwrap();
            text.lines().last().map_or(0, |line| line.parse().unwrap())
        };
        let mut durable = 0;
        for round in 0..rounds {
            let mut child = Command::new(program)
                .arg(&pool)
                .args(["fill", &(durable + 100_000).to_string()])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            // Each round ends after another number of transactions, and somewhere in the next.
            let lines = BufReader::new(child.stdout.take().unwrap()).lines();
            if let Some(line) = lines.take(1 + (round * 7 % 13) as usize).last() {
                durable = line.unwrap().parse().unwrap();
            }
            child.kill().unwrap();
            child.wait().unwrap();
            let found = run(&["check"]);
            assert!(found >= durable, "{durable} were durable, and {found} are there");
            durable = found;
        }
        assert!(durable >= rounds * 100);
        assert_eq!(run(&["get", "50"]), 2501);
    });
}

/// The programs in the documents are programs: each compiles by itself.
#[test]
fn the_documents_compile() {
    let scratch = tempfile::tempdir().unwrap();
    for document in ["README.md", "docs/c.md"] {
        let text = std::fs::read_to_string(here().join("../..").join(document)).unwrap();
        let programs: Vec<_> =
            text.split("```c\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        assert!(!programs.is_empty(), "{document} has no program in C");
        for program in programs {
            let source = scratch.path().join("program.c");
            std::fs::write(&source, program).unwrap();
            for compiler in COMPILERS.iter().filter(|compiler| has(compiler.program)) {
                succeeds(compiler.command(&source, &scratch.path().join("program")).arg("-c"));
            }
        }
    }
}
