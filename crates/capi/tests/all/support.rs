//! Links the library once, and compiles and runs programs in C with it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The directory of the crate.
pub fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The directory of the linked library: libaquifer.so, libaquifer.a.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lib");
        succeeds(Command::new(here().join("link")).arg(static_library()).arg(&directory));
        directory
    })
}

/// What cargo has built beside this test.
fn static_library() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    let profile = executable.parent().unwrap().parent().unwrap();
    let newest = |directory: &Path| {
        let entries = std::fs::read_dir(directory).ok()?.flatten().filter(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.starts_with("libaquifer_capi") && name.ends_with(".a")
        });
        let entries =
            entries.map(|entry| (entry.metadata().unwrap().modified().unwrap(), entry.path()));
        entries.max().map(|(_, path)| path)
    };
    newest(&profile.join("deps")).or_else(|| newest(profile)).expect("cargo builds the library")
}

/// Runs a program that must succeed; what it printed.
pub fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// Whether a program is installed.
pub fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", "command -v \"$0\"", program]).output();
    found.is_ok_and(|output| output.status.success())
}

/// A compiler with a language: each must accept the header without a warning.
#[derive(Clone, Copy)]
pub struct Compiler {
    pub program: &'static str,
    pub standard: &'static str,
}

pub const COMPILERS: [Compiler; 4] = [
    Compiler { program: "gcc", standard: "c11" },
    Compiler { program: "g++", standard: "c++17" },
    Compiler { program: "clang", standard: "c11" },
    Compiler { program: "clang++", standard: "c++17" },
];

impl Compiler {
    /// The first one of C that is installed.
    pub fn of_c() -> Compiler {
        let mut of_c = COMPILERS.into_iter().filter(|compiler| compiler.standard == "c11");
        of_c.find(|compiler| has(compiler.program)).expect("gcc or clang is installed")
    }

    /// A command that compiles `source` to `program`.
    pub fn command(self, source: &Path, program: &Path) -> Command {
        let language = if self.standard.starts_with("c++") { "c++" } else { "c" };
        let mut command = Command::new(self.program);
        command
            .arg(format!("-std={}", self.standard))
            .args(["-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pedantic", "-g", "-O1"])
            .arg("-I")
            .arg(here().join("include"))
            .args(["-x", language])
            .arg(source)
            .args(["-x", "none", "-pthread", "-o"])
            .arg(program);
        command
    }

    /// [`Compiler::command`], with the shared library.
    pub fn with_library(self, source: &Path, program: &Path) -> Command {
        let mut command = self.command(source, program);
        command.arg("-L").arg(library()).arg("-laquifer");
        command.arg(format!("-Wl,-rpath,{}", library().display()));
        command
    }
}
