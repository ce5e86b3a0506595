//! The demonstration, with a small file: that it ends with times for Aquifer, and leaves nothing behind.

use std::process::{Command, Output};

fn demo(arguments: &[&str], dir: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aquifer-demo"));
    if !arguments.contains(&"--size") {
        command.args(["--size", "64M"]);
    }
    command
        .args(["--dir", dir])
        .args(arguments)
        .output()
        .expect("the program was built for this test")
}

#[test]
fn each_reader_has_a_time_or_was_stopped() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = demo(&["--json"], directory.path().to_str().unwrap());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let times = found["times"].as_array().unwrap();
    let limited = !String::from_utf8_lossy(&output.stderr).contains("not limited");
    assert_eq!(times.len(), if limited { 6 } else { 2 });
    for time in times {
        let seconds = &time["seconds"];
        assert!(
            seconds.is_null() || seconds.as_f64().is_some_and(|seconds| seconds > 0.0),
            "{time}"
        );
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn the_table_has_a_line_for_aquifer() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let output = demo(&[], directory.path().to_str().unwrap());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let ours = text.lines().find(|line| line.starts_with("Aquifer")).expect("a line about us");
    assert_eq!(ours.matches(" s").count(), 2, "{text}");
}

#[test]
fn what_it_cannot_do_is_said() {
    for (arguments, dir, reason) in [
        (&[][..], "/no/such/directory", "/no/such/directory"),
        (&["--budget", "1M"], env!("CARGO_TARGET_TMPDIR"), "--budget"),
        (&["--size", "12 parsecs"], env!("CARGO_TARGET_TMPDIR"), "is not a size"),
    ] {
        let output = demo(arguments, dir);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && message.contains(reason), "{message}");
    }
}
