//! The search example finds the same in all modes, and the same as a naive search.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs the example, which is built with the tests of this package.
fn search(arguments: &[&str], path: &Path) -> Output {
    let mut program = std::env::current_exe().unwrap();
    program.pop();
    program.pop();
    let program = program.join("examples/search");
    if !program.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--package", "aquifer", "--example", "search"]);
        assert!(build.status().unwrap().success());
    }
    Command::new(program).args(arguments).arg(path).output().unwrap()
}

/// Creates a tree with text, binary and hidden files; returns those to be searched.
fn tree(root: &Path) -> Vec<PathBuf> {
    let mut texts = Vec::new();
    let mut write = |name: &str, bytes: &[u8], is_text: bool| {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        if is_text {
            texts.push(path);
        }
    };
    for file in 0..150 {
        let lines = (0..file * 3).map(|line| match line % 7 {
            3 => format!("line {line} has a needle, and a needle\n"),
            5 => "nee\ndle\n".to_owned(),
            _ => format!("line {line}\n"),
        });
        write(
            &format!("d{}/e{}/f{file}", file % 5, file % 3),
            lines.collect::<String>().as_bytes(),
            true,
        );
    }
    write("empty", b"", true);
    write("no line break", b"needle", true);
    write("not utf8", b"\xff\xfe needle\n\n", true);
    write("page", &[b"x".repeat(4090), b"needle".to_vec()].concat(), true);
    write(
        "large",
        &[b"needle".to_vec(), b"\n".repeat(300_000), b"needle\n".to_vec()].concat(),
        true,
    );
    write("binary", b"needle\0", false);
    write(".hidden", b"needle", false);
    write(".git/objects/needle", b"needle", false);
    write("d1/.git/needle", b"needle", false);
    symlink(root.join("large"), root.join("link")).unwrap();
    symlink(root, root.join("circle")).unwrap();
    texts
}

/// Returns the expected output, line by line.
fn naive(texts: &[PathBuf], needle: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    for path in texts {
        let bytes = fs::read(path).unwrap();
        for (number, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
            if line.windows(needle.len()).any(|window| window == needle) {
                let place = format!("{}:{}:", path.display(), number + 1);
                found.push([place.as_bytes(), line].concat());
            }
        }
    }
    found.sort();
    found
}

#[test]
fn all_ways_find_what_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("tree");
    let texts = tree(&root);
    let wanted = naive(&texts, b"needle");
    assert!(wanted.len() > 1000);
    let bytes: u64 = texts.iter().map(|path| path.metadata().unwrap().len()).sum();
    for way in ["read", "mmap", "mapper"] {
        for threads in ["1", "4"] {
            let output = search(&["--with", way, "--threads", threads, "needle"], &root);
            assert!(output.status.success(), "{output:?}");
            assert!(output.stderr.is_empty(), "{output:?}");
            let mut found: Vec<_> =
                output.stdout.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
            assert_eq!(found.pop().unwrap(), b"");
            found.sort();
            assert!(
                found == wanted,
                "{way}, {threads} threads: {} of {}",
                found.len(),
                wanted.len()
            );
        }
        let output = search(&["--with", way, "--count", "--repeat", "3", "needle"], &root);
        let said = String::from_utf8(output.stdout).unwrap();
        let files = texts.len() + 1;
        let summary =
            format!("{files} files and {} bytes searched, 1 binary, 0 failed\n", bytes + 7);
        assert!(said.starts_with(&format!("{} lines in", wanted.len())), "{said}");
        assert!(said.ends_with(&summary), "{said} instead of {summary}");
        let rounds = String::from_utf8(output.stderr).unwrap();
        assert_eq!(rounds.lines().filter(|line| line.starts_with("round ")).count(), 3);
    }
}

#[test]
fn what_is_not_there_and_what_is_wrong_is_said() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "text").unwrap();
    for way in ["read", "mmap", "mapper"] {
        let none = search(&["--with", way, "needle"], directory.path());
        assert_eq!((none.status.code(), none.stdout.len(), none.stderr.len()), (Some(1), 0, 0));
        // A file may be named, and also a path that does not exist.
        let one = search(&["--with", way, "text"], &directory.path().join("file"));
        assert_eq!(one.status.code(), Some(0));
        let missing = search(&["--with", way, "text"], &directory.path().join("missing"));
        assert_eq!(missing.status.code(), Some(2));
        let said = String::from_utf8(missing.stderr).unwrap();
        assert!(said.contains("missing: No such file or directory"), "{said}");
    }
    for wrong in [
        &["--with", "telepathy", "text"][..],
        &["--threads", "0", "text"],
        &["--repeat", "many", "text"],
        &["--unknown", "text"],
        &["two\nlines"],
        &[""],
    ] {
        let refused = search(wrong, directory.path());
        assert_eq!(refused.status.code(), Some(2), "{wrong:?}");
        assert!(!refused.stderr.is_empty());
    }
}
