//! Error reports of the programs.

use std::io::{self, Write};

/// Writes an error and its causes to standard error.
pub fn print_error(error: &anyhow::Error) {
    // If standard error is closed, the message is lost.
    let _ = writeln!(io::stderr(), "error: {}", explain(error));
}

/// Formats an error and its causes, each once: many errors already include their cause's message.
fn explain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| {
        match (text.is_empty(), text.contains(&cause)) {
            (true, _) => cause,
            (_, true) => text,
            (_, false) => format!("{text}: {cause}"),
        }
    })
}

/// Returns whether the error is that standard output was closed by its reader.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        let json = cause.downcast_ref::<serde_json::Error>();
        kind.or(json.and_then(serde_json::Error::io_error_kind)) == Some(io::ErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_said_once() {
        let cause = || anyhow::anyhow!("disk full");
        assert_eq!(explain(&cause()), "disk full");
        assert_eq!(explain(&cause().context("writing a")), "writing a: disk full");
        let named = cause().context("no room (disk full); make some");
        assert_eq!(explain(&named), "no room (disk full); make some");
    }

    #[test]
    fn a_closed_pipe_is_recognised() {
        let closed = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_closed_pipe(&anyhow::Error::from(closed()).context("printing")));
        assert!(is_closed_pipe(&serde_json::Error::io(closed()).into()));
        assert!(!is_closed_pipe(&io::Error::from(io::ErrorKind::NotFound).into()));
    }
}
