//! The `aquifer` command.
//!
//! | command | |
//! |---|---|
//! | `demo` | what Aquifer is for, in a minute |
//! | `doctor` | what this machine offers and what its primitives cost |
//! | `stat` | what the caches of running processes do |
//! | `pool` | pools of persistent objects: made, looked into, verified, grown |
//! | `object` | the objects of a pool |
//! | `ls`, `cat`, `put`, `get`, `cp`, `mv`, `rm`, `mkdir`, `ln`, `stat`, `du`, `find` | the files of a pool |
//! | `bench` | Aquifer beside mmap, direct reads and user-space caches |
//! | `completions` | what a shell needs to complete these commands |
//! | `version` | which build this is |
//!
//! Results go to standard output, errors and progress to standard error. Exit status: 0 when it
//! worked, 1 when it did not, 2 when the command line is wrong. A reader that closes the pipe early
//! is no failure.
#![deny(unsafe_code)]

mod access;
mod bench;
mod completions;
mod doctor;
mod files;
mod object;
mod output;
mod pool;
mod progress;
mod stat;
mod version;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Memory as the interface to storage.
///
/// Aquifer maps files and devices through a DRAM cache whose size, policy and write-back the
/// application chooses, and keeps data structures in pools that survive crashes. This command shows
/// what that is good for on this machine, measures it, looks into programs that use it, and looks
/// after pools.
#[derive(Debug, Parser)]
#[command(name = "aquifer", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  aquifer demo                              search a graph larger than its memory, beside mmap
  aquifer doctor --dir /mnt/nvme            what this machine offers for files on that disk
  aquifer stat --watch 1                    what running caches do, every second
  aquifer pool create data.pool --size 1G   a place for files and persistent objects
  aquifer put -r notes data.pool:/          a tree into it
  aquifer bench out-of-core                 compare with mmap and others

Exit status: 0 if it worked, 1 if it did not, 2 if the command line is wrong.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Search a graph larger than memory, beside mmap under the same limit
    Demo(bench::Args),
    /// Show what this machine offers, which form each mechanism takes, and what it costs
    Doctor(doctor::Args),
    /// Show what the caches of running processes hold and do, or what files of a pool are
    Stat(stat::Args),
    /// Make, look into, verify and grow pools of files and persistent objects
    Pool(pool::Args),
    /// Create, list, look into, resize and destroy the persistent objects of a pool
    Object(object::Args),
    #[command(flatten)]
    Files(files::Command),
    /// Compare Aquifer with what a program would use otherwise
    Bench(bench::Args),
    /// Print a script that lets a shell complete the commands and options of `aquifer`
    Completions(completions::Args),
    /// Show which build this is
    Version(version::Args),
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Demo(args) => bench::run("demo", args),
        Command::Doctor(args) => doctor::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Pool(args) => pool::run(args),
        Command::Object(args) => object::run(args),
        Command::Files(command) => files::run(command),
        Command::Bench(args) => bench::run("bench", args),
        Command::Completions(args) => completions::run(args, &mut Cli::command()),
        Command::Version(args) => version::run(args),
    }
}

fn main() -> ExitCode {
    let arguments = files::with_two_dashes(std::env::args_os());
    match run(&Cli::parse_from(arguments).command) {
        Err(error) if error.is::<output::Said>() => ExitCode::FAILURE,
        Err(error) if !output::is_closed_pipe(&error) => {
            output::print_error(&error);
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
