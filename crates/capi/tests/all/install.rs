//! `./install` puts the library where a package of a distribution wants it, and takes it away again.

use std::path::Path;
use std::process::Command;

use crate::support::{Compiler, has, here, library, succeeds};

#[test]
fn an_installed_library_is_found_by_pkg_config() {
    let scratch = tempfile::tempdir().unwrap();
    let root = here().join("../..");
    let install = |more: &[&str]| {
        let mut command = Command::new(root.join("install"));
        command.arg("--built").arg(library()).env("DESTDIR", scratch.path());
        succeeds(command.args(["--prefix", "/opt/aquifer", "--libdir=lib64"]).args(more));
    };
    install(&[]);
    let installed = scratch.path().join("opt/aquifer");
    for name in ["lib64/libaquifer.so", "lib64/libaquifer.a", "include/aquifer.h"] {
        assert!(installed.join(name).exists(), "{name}");
    }

    if has("pkg-config") {
        let flags = |what: &[&str]| {
            let mut command = Command::new("pkg-config");
            command.env("PKG_CONFIG_PATH", installed.join("lib64/pkgconfig"));
            command.env("PKG_CONFIG_SYSROOT_DIR", scratch.path());
            let output = succeeds(command.args(what).arg("aquifer"));
            String::from_utf8(output.stdout).unwrap()
        };
        let elsewhere = tempfile::tempdir().unwrap();
        let program = elsewhere.path().join("program");
        let mut compile = Command::new(Compiler::of_c().program);
        compile.args(flags(&["--cflags"]).split_whitespace()).arg("-D_GNU_SOURCE");
        compile.arg(here().join("tests/c/null.c")).arg("-o").arg(&program);
        succeeds(compile.args(flags(&["--libs"]).split_whitespace()));
        succeeds(Command::new(&program).env("LD_LIBRARY_PATH", installed.join("lib64")));

        let mut compile = Command::new(Compiler::of_c().program);
        compile.args(["-static", "-D_GNU_SOURCE"]).arg(here().join("tests/c/null.c"));
        compile.arg("-o").arg(&program);
        succeeds(compile.args(flags(&["--static", "--cflags", "--libs"]).split_whitespace()));
        succeeds(&mut Command::new(&program));
    } else {
        eprintln!("skipped: what pkg-config finds; it is not installed");
    }

    install(&["--uninstall", "--destdir", scratch.path().to_str().unwrap()]);
    assert_eq!(files_below(scratch.path()), 0, "nothing is left");
}

fn files_below(directory: &Path) -> usize {
    let entries = std::fs::read_dir(directory).unwrap().flatten();
    entries.map(|entry| if entry.path().is_dir() { files_below(&entry.path()) } else { 1 }).sum()
}
