//! Programs under valgrind, which looks at the library's accesses to memory as well: AddressSanitizer sees only those of
//! the program.
//!
//! valgrind does not know userfaultfd(2), so that user-backed mappings fail there with `-ENOSYS`: tests of them are not
//! run. All else is: kernel-backed mappings, pages, mapped files, pools, objects, files. Leaks are looked for under
//! AddressSanitizer.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Compiler, has, here, succeeds};

/// Runs `test` with a function that runs a program under valgrind.
fn under_valgrind(source: &str, test: impl Fn(&dyn Fn(&[&str]) -> String, &Path)) {
    let compiler = Compiler::of_c();
    if !has("valgrind") {
        eprintln!("skipped: {source} under valgrind, which is not installed");
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let program = scratch.path().join("program");
    let source: PathBuf = here().join(source);
    succeeds(&mut compiler.with_library(&source, &program));
    let run = |arguments: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["600", "valgrind", "--quiet", "--error-exitcode=99", "--leak-check=no"]);
        let suppressions = here().join("tests/valgrind.supp");
        command.arg(format!("--suppressions={}", suppressions.display()));
        let output = succeeds(command.arg(&program).args(arguments));
        String::from_utf8(output.stdout).unwrap()
    };
    test(&run, scratch.path());
}

fn runs(name: &str) {
    under_valgrind(&format!("tests/c/{name}.c"), |run, scratch| {
        run(&[scratch.to_str().unwrap()]);
    });
}

#[test]
fn null() {
    runs("null");
}

#[test]
fn misuse() {
    runs("misuse");
}

#[test]
fn mapped_files() {
    runs("mapper");
}

#[test]
fn files_of_a_pool() {
    runs("files");
}

#[test]
fn more_of_files() {
    runs("more_files");
}

#[test]
fn a_kernel_backed_mapping() {
    under_valgrind("../../examples/c/graph.c", |run, scratch| {
        let text = run(&[scratch.join("graph").to_str().unwrap(), "30000", "8"]);
        assert!(text.contains("30000 of 30000 nodes reached"), "{text}");
    });
}

#[test]
fn pages() {
    under_valgrind("../../examples/c/kvcache.c", |run, scratch| {
        let text = run(&[scratch.join("store").to_str().unwrap(), "2000"]);
        assert!(text.ends_with("; 0 wrong\n"), "{text}");
    });
}

#[test]
fn objects() {
    under_valgrind("../../examples/c/hashtable.c", |run, scratch| {
        let pool = scratch.join("pool");
        let pool = pool.to_str().unwrap();
        run(&[pool, "fill", "300"]);
        assert_eq!(run(&[pool, "check"]), "300\n");
    });
}
