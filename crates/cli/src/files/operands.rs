//! Sources and a destination, which is the last operand of a command.
//!
//! Options may stand anywhere between them. The parser of the command line cannot tell then which operand is the last, if
//! sources and destination are two arguments: an option ends the first. So they are one list, which is divided here,
//! and what is wrong with it is said as the parser would say it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;

use clap::error::ErrorKind;

use crate::output;

/// Something is wrong with operands, other than the parser could find.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Misused {
    command: &'static str,
    kind: ErrorKind,
    message: String,
}

impl Misused {
    /// Says so with the usage of the command, and ends the process.
    pub fn exit(&self, mut cli: clap::Command) -> ! {
        // Gives the commands their full names.
        cli.build();
        let command = cli.find_subcommand_mut(self.command).expect("one of the commands");
        clap::Error::raw(self.kind, &self.message).format(command).exit()
    }
}

/// The operands of a command, with the names that its usage has for a source and the destination.
pub struct Operands<'a> {
    pub command: &'static str,
    pub names: [&'static str; 2],
    pub all: &'a [OsString],
}

impl Operands<'_> {
    /// Divides and parses them.
    pub fn divide<Source, Destination>(
        &self,
        source: impl Fn(OsString) -> Result<Source, String>,
        destination: impl Fn(OsString) -> Result<Destination, String>,
    ) -> Result<(Vec<Source>, Destination), Misused> {
        let [source_name, destination_name] = self.names;
        let [sources @ .., last] = self.all else { return Err(self.missing()) };
        if sources.is_empty() {
            return Err(self.missing());
        }
        let sources = sources
            .iter()
            .map(|text| source(text.clone()).map_err(|why| self.wrong(text, source_name, &why)))
            .collect::<Result<_, _>>()?;
        let last =
            destination(last.clone()).map_err(|why| self.wrong(last, destination_name, &why))?;
        Ok((sources, last))
    }

    fn missing(&self) -> Misused {
        let message =
            format!("the following required arguments were not provided:\n  <{}>", self.names[1]);
        Misused { command: self.command, kind: ErrorKind::MissingRequiredArgument, message }
    }

    fn wrong(&self, text: &OsString, name: &str, why: &str) -> Misused {
        let shown = output::escaped(text.as_bytes());
        let message = format!("invalid value '{shown}' for '<{name}>': {why}");
        Misused { command: self.command, kind: ErrorKind::ValueValidation, message }
    }
}
