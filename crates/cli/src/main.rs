//! The `aquifer` command.
//!
//! | command | |
//! |---|---|
//! | `demo` | a demonstration that takes 20 seconds |
//! | `doctor` | the mechanisms that this machine offers, and their costs |
//! | `stat` | the state and activity of caches in running processes |
//! | `pool` | pools of files and persistent objects: create, inspect, verify, grow, keep, serve, publish, restore |
//! | `object` | the objects of a pool |
//! | `ls`, `cat`, `put`, `get`, `cp`, `mv`, `rm`, `mkdir`, `ln`, `stat` | the files of a pool |
//! | `cache` | the local cache of objects in object stores: show, fill, verify, drop |
//! | `mount`, `umount`, `run` | pools as file systems for every program |
//! | `bench` | Aquifer compared with mmap, direct reads and user-space caches |
//! | `completions` | completion scripts for shells |
//! | `version` | version and build |
//!
//! Results go to standard output, errors and progress to standard error. Exit status: 0 for
//! success, 1 for a failure, 2 for an invalid command line. A reader that closes the pipe early
//! is not a failure.
#![deny(unsafe_code)]

mod access;
mod bench;
#[cfg(feature = "remote")]
mod cache;
mod completions;
mod doctor;
mod failure;
mod files;
mod keep;
#[cfg(feature = "man")]
mod man;
mod mount;
mod object;
mod output;
mod pool;
mod progress;
mod remote;
mod stat;
mod version;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

/// Memory as the interface to storage.
///
/// Aquifer maps files and devices through a DRAM cache whose size, policy and write-back the
/// application chooses, and keeps files and data structures in pools that survive crashes. This
/// command demonstrates and measures Aquifer on this machine, shows the caches of running programs,
/// and manages pools.
#[derive(Debug, Parser)]
#[command(name = "aquifer", version, after_help = format!("{EXAMPLES}{NOTE}"))]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  aquifer demo                              search and read a file larger than memory, next to mmap
  aquifer doctor --dir /mnt/nvme            show what this machine offers for files on that disk
  aquifer stat --watch 1                    show the activity of running caches, every second
  aquifer pool create data.pool --size 1G   create a pool for files and persistent objects
  aquifer put -r notes data.pool:/          copy a tree into it
  aquifer mount data.pool /mnt              let every program use its files
  aquifer bench out-of-core                 compare Aquifer with mmap and others

Exit status: 0 for success, 1 for a failure, 2 for an invalid command line.";

#[cfg(feature = "remote")]
const NOTE: &str = "";
#[cfg(not(feature = "remote"))]
use remote::ABSENT as NOTE;

#[derive(Debug, Subcommand)]
enum Command {
    /// Search and read a file larger than memory, next to mmap under the same limit
    Demo(aquifer_demo::DemoArgs),
    /// Show which mechanisms this machine offers, which form each takes, and their cost
    Doctor(doctor::Args),
    /// Show the caches of running processes, or the metadata of files in a pool
    Stat(stat::Args),
    /// Create, inspect, verify, grow, keep, serve, publish and restore pools of files and persistent objects
    Pool(pool::Args),
    /// Create, list, inspect, resize, destroy and dump the persistent objects of a pool
    Object(object::Args),
    #[command(flatten)]
    Files(files::Command),
    #[cfg(feature = "remote")]
    /// Show, fill, verify and empty the cache of objects downloaded from object stores
    Cache(cache::Args),
    /// Mount a pool as a file system for every program, or show which pools are mounted
    Mount(mount::Args),
    /// Unmount pools, and wait until they are closed
    Umount(mount::umount::Args),
    /// Run a command that sees pools as directories
    Run(mount::run::Args),
    /// Compare Aquifer with mmap, direct reads, user-space caches and databases
    Bench(bench::Args),
    /// Print a script that completes the commands and options of `aquifer` in a shell
    Completions(completions::Args),
    /// Show the version and kind of this build
    Version(version::Args),
    #[cfg(feature = "man")]
    /// Write the manual pages of all commands into a directory
    #[command(hide = true)]
    Man(man::Args),
    /// Serves a mount, by other processes: started by `mount`
    #[command(hide = true)]
    MountKeeper,
    /// Answers the requests of a mount: started by its keeper
    #[command(hide = true)]
    MountServer,
}

fn run(command: &Command) -> Result<()> {
    match command {
        Command::Demo(args) => aquifer_demo::main(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Pool(args) => pool::run(args),
        Command::Object(args) => object::run(args),
        Command::Files(command) => files::run(command),
        #[cfg(feature = "remote")]
        Command::Cache(args) => cache::run(args),
        Command::Mount(args) => mount::run(args),
        Command::Umount(args) => mount::umount::run(args),
        Command::Run(args) => mount::run::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Completions(args) => completions::run(args, &mut Cli::command()),
        Command::Version(args) => version::run(args),
        #[cfg(feature = "man")]
        Command::Man(args) => man::run(args, Cli::command()),
        Command::MountKeeper => ended(aquifer::fuse::keeper_main()),
        Command::MountServer => ended(aquifer::fuse::server_main()),
    }
}

/// What a process has to say that another program started, it has said.
fn ended(status: ExitCode) -> Result<()> {
    if status == ExitCode::SUCCESS { Ok(()) } else { Err(output::Said.into()) }
}

fn main() -> ExitCode {
    let arguments = match mount::translated(std::env::args_os().collect()) {
        Ok(Some(arguments)) => arguments,
        Ok(None) => return ExitCode::SUCCESS,
        Err(reason) => {
            output::print_error(&anyhow::anyhow!(reason));
            return ExitCode::FAILURE;
        }
    };
    match run(&Cli::parse_from(arguments).command) {
        Err(error) if error.is::<output::Said>() => ExitCode::FAILURE,
        Err(error) if error.is::<files::Misused>() => {
            let misused: files::Misused = error.downcast().expect("just looked at");
            misused.exit(Cli::command())
        }
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
