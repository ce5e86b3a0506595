//! Programs in C and C++ with the library: each source in `tests/c`, with every compiler that is
//! installed, and once under the address sanitizer. See `valgrind.rs` as well.

use std::path::Path;
use std::process::Command;

use crate::support::{COMPILERS, Compiler, has, here, library, succeeds};

fn run(name: &str) {
    let source = here().join("tests/c").join(name).with_extension("c");
    let scratch = tempfile::tempdir().unwrap();
    let run = |program: &Path| {
        let data = tempfile::tempdir().unwrap();
        // A program that hangs has failed; a machine that is busy has not.
        succeeds(Command::new("timeout").arg("300").arg(program).arg(data.path()));
    };
    for compiler in COMPILERS {
        if !has(compiler.program) {
            eprintln!("skipped: {name} with {}, which is not installed", compiler.program);
            continue;
        }
        let program = scratch.path().join(compiler.program);
        succeeds(&mut compiler.with_library(&source, &program));
        run(&program);
    }
    let program = scratch.path().join("sanitized");
    let mut compile = Compiler::of_c().with_library(&source, &program);
    succeeds(compile.arg("-fsanitize=address,undefined"));
    run(&program);
}

#[test]
fn caches_mappings_errors_and_completions() {
    run("cache");
}

#[test]
fn devices_and_pages() {
    run("pages");
}

#[test]
fn mappers_and_views() {
    run("mapper");
}

#[test]
fn files_of_a_pool() {
    run("files");
}

#[test]
fn more_of_files() {
    run("more_files");
}

#[test]
fn devices_of_the_program() {
    run("custom_device");
}

#[test]
fn sizes_and_offsets_at_the_ends_of_their_types() {
    run("extremes");
}

#[test]
fn handles_freed_before() {
    run("misuse");
}

#[test]
fn objects_and_heaps() {
    run("objects");
}

#[test]
fn threads_with_the_same_handles() {
    run("threads");
}

#[test]
fn layouts_are_those_of_the_first_version() {
    run("layout");
}

#[test]
fn null_is_an_error() {
    run("null");
}

#[test]
fn one_null_among_valid_arguments_is_an_error() {
    run("nulls");
}

/// The static library has no symbols that could clash with those of another library in Rust, also one
/// that unwinds.
#[test]
fn the_static_library_links_beside_another_one_in_rust() {
    let scratch = tempfile::tempdir().unwrap();
    let other = scratch.path().join("other.rs");
    let source = "#[unsafe(no_mangle)] pub extern \"C\" fn other() -> i32 {
        std::panic::set_hook(Box::new(|_| ()));
        std::panic::catch_unwind(|| std::hint::black_box(Vec::<i32>::new())[0]).unwrap_or(7)
    }";
    std::fs::write(&other, source).unwrap();
    let built = scratch.path().join("libother.a");
    let mut compile = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    compile.args(["--edition=2024", "--crate-type=staticlib", "-o"]).arg(&built).arg(&other);
    succeeds(&mut compile);

    let pages = here().join("tests/c/pages.c");
    let program = scratch.path().join("program.c");
    let source = format!(
        "#define main pages_main\n#include \"{}\"\n#undef main\nextern int other(void);\n\
         int main(int count, char **arguments) {{\n\
             return other() == 7 && pages_main(count, arguments) == 0 && other() == 7 ? 0 : 1;\n\
         }}\n",
        pages.display()
    );
    std::fs::write(&program, source).unwrap();
    let executable = scratch.path().join("program");
    let mut compile = Compiler::of_c().command(&program, &executable);
    compile.arg(library().join("libaquifer.a")).arg(&built).args(["-lgcc_s", "-lm", "-ldl"]);
    succeeds(&mut compile);
    succeeds(Command::new(&executable).arg(scratch.path()));
}

/// A function that `null.c` leaves out could crash for null.
#[test]
fn each_function_is_called_with_null() {
    let program = std::fs::read_to_string(here().join("tests/c/null.c")).unwrap();
    for file in std::fs::read_dir(here().join("symbols")).unwrap().flatten() {
        for name in std::fs::read_to_string(file.path()).unwrap().lines() {
            let takes_nothing = ["aq_version", "aq_last_error", "aq_prepare_thread"];
            let called = program.contains(&format!("{name}("));
            assert!(called || takes_nothing.contains(&name), "{name}");
        }
    }
}
