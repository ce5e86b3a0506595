//! What the library exports: the functions of the header, with their versions, and nothing else.

use std::collections::BTreeSet;
use std::process::Command;

use crate::support::{here, library, succeeds};

fn lines(command: &mut Command) -> Vec<String> {
    let output = succeeds(command);
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

/// The functions of `symbols/`, with their versions.
fn listed() -> BTreeSet<(String, String)> {
    let mut listed = BTreeSet::new();
    for file in std::fs::read_dir(here().join("symbols")).unwrap().flatten() {
        let version = format!("AQUIFER_{}", file.file_name().to_str().unwrap());
        for name in std::fs::read_to_string(file.path()).unwrap().lines() {
            assert!(listed.insert((name.to_owned(), version.clone())), "{name} is listed twice");
        }
    }
    listed
}

#[test]
fn the_header_declares_what_is_listed() {
    let header = std::fs::read_to_string(here().join("include/aquifer.h")).unwrap();
    let declared: BTreeSet<String> = header
        .lines()
        .filter(|line| !line.starts_with([' ', '/', '*', '#', '}']) && line.contains('('))
        .filter(|line| !line.starts_with("typedef"))
        .filter_map(|line| line.split('(').next()?.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("aq_"))
        .map(str::to_owned)
        .collect();
    assert!(declared.contains("aq_map") && declared.contains("aq_last_error"), "{declared:?}");
    let listed: BTreeSet<String> = listed().into_iter().map(|(name, _)| name).collect();
    assert_eq!(declared, listed, "aquifer.h and symbols/ differ");
}

#[test]
fn the_shared_library_exports_what_is_listed_with_its_version() {
    let table = lines(Command::new("objdump").arg("-T").arg(library().join("libaquifer.so")));
    let mut exported = BTreeSet::new();
    for line in table.iter().filter(|line| line.contains("\t") && !line.contains("*UND*")) {
        let mut fields = line.split_whitespace().rev();
        let (name, version) = (fields.next().unwrap(), fields.next().unwrap());
        // The definition of a version is a symbol as well.
        if !line.contains("*ABS*") {
            exported.insert((name.to_owned(), version.to_owned()));
        }
    }
    assert_eq!(exported, listed());
}

#[test]
fn the_shared_library_has_its_name_and_needs_only_the_systems() {
    let path = library().join("libaquifer.so");
    let dynamic = lines(Command::new("objdump").arg("-p").arg(path));
    let of = |key: &str| -> Vec<&str> {
        let values = dynamic.iter().filter_map(|line| line.trim().strip_prefix(key));
        values.map(str::trim).collect()
    };
    assert_eq!(of("SONAME"), ["libaquifer.so.0"]);
    for needed in of("NEEDED") {
        let system = ["libc.", "libgcc_s.", "libm.", "ld-linux"];
        assert!(system.iter().any(|name| needed.starts_with(name)), "needs {needed}");
    }
}

#[test]
fn the_static_library_has_no_other_global_symbols() {
    let mut nm = Command::new("nm");
    let table =
        lines(nm.args(["--defined-only", "--extern-only"]).arg(library().join("libaquifer.a")));
    let names: BTreeSet<String> =
        table.iter().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect();
    assert_eq!(names, listed().into_iter().map(|(name, _)| name).collect());
}
