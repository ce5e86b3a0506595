//! `aquifer bench` starts `aquifer-bench`, a separate program, so that the command can be built without the
//! systems Aquifer is compared with.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

const PROGRAM: &str = "aquifer-bench";

/// Arguments, all of which are for `aquifer-bench`.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of `aquifer-bench`; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Replaces this process by `aquifer-bench` ; returns only on an error.
pub fn run(args: &Args) -> Result<()> {
    // Next to this command, where both are built and installed; otherwise on the path.
    let own = std::env::current_exe().ok();
    let directory = own.as_deref().and_then(Path::parent);
    let beside = directory.map(|directory| directory.join(PROGRAM));
    for program in beside.into_iter().chain([PathBuf::from(PROGRAM)]) {
        let error = Command::new(&program).arg("bench").args(&args.arguments).exec();
        if error.kind() != io::ErrorKind::NotFound {
            bail!("cannot start {}: {error}", program.display());
        }
    }
    bail!(
        "cannot start {PROGRAM}: No such file or directory in {} or on the PATH; build this program with \
         `cargo build --release --package {PROGRAM}`",
        directory.unwrap_or(Path::new(".")).display()
    )
}
