//! `aquifer man`: manual pages, generated from the definitions of the command line.
//!
//! The options are rendered by `clap_mangen`. What `--help` shows behind them, examples and remarks,
//! is rendered here, because lines of examples must stay lines.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap_mangen::Man;

/// Arguments of `aquifer man`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  aquifer man ~/.local/share/man/man1      `man aquifer-mount` then shows one of them")]
pub struct Args {
    /// The directory, which is created if it is missing
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Writes a page for the command and one for each of its commands.
pub fn run(args: &Args, command: clap::Command) -> Result<()> {
    let directory = &args.directory;
    // Names the commands of commands.
    let mut command = command.disable_help_subcommand(true);
    command.build();
    std::fs::create_dir_all(directory)
        .and_then(|()| write_all(&command, directory))
        .with_context(|| format!("cannot write manual pages into {}", directory.display()))
}

fn write_all(command: &clap::Command, directory: &Path) -> io::Result<()> {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        write_all(inner, directory)?;
    }
    let source = format!("aquifer {}", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).source(source).manual("Aquifer");
    let mut page = BufWriter::new(File::create(directory.join(man.get_filename()))?);
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(&mut page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let help = command.get_after_long_help().or(command.get_after_help());
    let help = help.map(ToString::to_string).unwrap_or_default();
    page.write_all(notes(&help).as_bytes())?;
    page.flush()
}

/// The text behind the options: paragraphs with indented lines stay as they are.
fn notes(help: &str) -> String {
    let mut page = String::new();
    for (at, paragraph) in help.split("\n\n").filter(|text| !text.is_empty()).enumerate() {
        let (title, text) = match paragraph.split_once('\n') {
            Some((title, text)) if title.ends_with(':') => (title.trim_end_matches(':'), text),
            _ => ("", paragraph),
        };
        page.push_str(&match (title, at) {
            ("Examples", _) => ".SH EXAMPLES\n".to_owned(),
            ("", 0) => ".SH NOTES\n".to_owned(),
            ("", _) if page.contains(".SH EXAMPLES") && !page.contains(".SH NOTES") => {
                ".SH NOTES\n".to_owned()
            }
            ("", _) => ".PP\n".to_owned(),
            _ => format!(".PP\n{}:\n", escaped(title)),
        });
        let is_literal = text.lines().any(|line| line.starts_with("  "));
        let around = if is_literal { (".nf\n", ".fi\n") } else { ("", "") };
        page.push_str(around.0);
        for line in text.lines() {
            page.push_str(&escaped(line));
            page.push('\n');
        }
        page.push_str(around.1);
    }
    page
}

/// A line as the formatter shows it.
fn escaped(line: &str) -> String {
    let text = line.replace('\\', "\\e").replace('-', "\\-");
    // At the beginning of a line they introduce requests.
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_stay_lines() {
        let help =
            "Examples:\n  a --b\n  c\\d\n\n.text that\nflows\n\nIn a table, like:\n  x  y\n\nmore";
        assert_eq!(
            notes(help),
            ".SH EXAMPLES\n.nf\n  a \\-\\-b\n  c\\ed\n.fi\n.SH NOTES\n\\&.text that\nflows\n.PP\nIn a table, \
             like:\n.nf\n  x  y\n.fi\n.PP\nmore\n"
        );
    }
}
