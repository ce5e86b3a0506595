//! `aquifer completions`: a shell script generated from the definitions of the command line.

use anyhow::Result;
use clap_complete::Shell;

use crate::output;

/// Arguments of `aquifer completions`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer completions bash > ~/.local/share/bash-completion/completions/aquifer
  aquifer completions fish > ~/.config/fish/completions/aquifer.fish
  aquifer completions zsh > ~/.zfunc/_aquifer        needs fpath+=~/.zfunc before compinit")]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script that completes `command`.
pub fn run(args: &Args, command: &mut clap::Command) -> Result<()> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, name, &mut script);
    output::print(&String::from_utf8(script)?)
}
