//! Notes the commit that the program is built from, for its reports.

use std::process::Command;

fn main() {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let changed = if git(&["status", "--porcelain", "--untracked-files=no"])
        .is_some_and(|text| !text.is_empty())
    {
        "-changed"
    } else {
        ""
    };
    let commit = git(&["rev-parse", "--short=10", "HEAD"])
        .map_or_else(String::new, |commit| commit + changed);
    println!("cargo::rustc-env=AQUIFER_BENCH_COMMIT={commit}");
    // The log of HEAD grows with each commit and each change of branch.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        println!("cargo::rerun-if-changed={log}");
    }
    println!("cargo::rerun-if-changed=src");
}
