//! Credentials from a program, as `credential_process` of AWS's configuration has them: it prints one JSON object.
//!
//! Nothing that the program prints on standard output appears in a message, nor do its arguments: both may be secret.

use std::fmt;
use std::io;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aquifer::remote::Credentials;
use serde::Deserialize;

use crate::output;

/// Kept credentials are used again if they are good for longer than this. A store asks again not earlier.
const MARGIN: Duration = Duration::from_secs(90);
/// Most bytes of what the program says that are repeated.
const MOST_SAID_BYTES: usize = 300;

/// Why a program supplies no credentials.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error(
        "--credential-process: the command has no words, a quotation mark without its end, or bytes that are no text"
    )]
    Words,
    #[error(
        "--credential-process: the first word is an assignment, which takes a shell: name `env` before it"
    )]
    Assignment,
    #[error("cannot run {program}, which --credential-process names: {source}")]
    NotRun { program: String, source: io::Error },
    #[error("{program} supplied no credentials ({status}){}", if said.is_empty() { String::new() } else { format!(": {said}") })]
    Failed { program: String, status: String, said: String },
    #[error("what {program} printed are no credentials: {reason}")]
    Output { program: String, reason: &'static str },
}

/// A program and its arguments, with what it supplied last. Clones share that.
#[derive(Clone)]
pub struct Program {
    words: Vec<String>,
    last: Arc<Mutex<Option<Supplied>>>,
}

type Supplied = (Credentials, Option<SystemTime>);

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    version: Option<u64>,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<String>,
}

impl Program {
    /// Of a command line, which is split into words as a shell does, and not given to one.
    pub fn parse(command: &str) -> Result<Program, ProgramError> {
        let words = shlex::split(command).filter(|words| !words.is_empty());
        let words = words.ok_or(ProgramError::Words)?;
        // May be a secret.
        if words[0].contains('=') {
            return Err(ProgramError::Assignment);
        }
        Ok(Program { words, last: Arc::default() })
    }

    /// What it supplies. Runs it, unless what it supplied last is good for a while.
    pub fn credentials(&self) -> Result<Credentials, ProgramError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let good_until = SystemTime::now() + MARGIN;
        if let Some((credentials, end)) = &*last
            && end.is_none_or(|end| end > good_until)
        {
            return Ok(credentials.clone());
        }
        let supplied = self.run()?;
        Ok(last.insert(supplied).0.clone())
    }

    /// As [`Program::credentials`], for a store, which tells nothing of a failure.
    pub fn renewed(&self) -> Result<Credentials, ProgramError> {
        self.credentials().inspect_err(|error| output::warn(&error.to_string()))
    }

    fn run(&self) -> Result<Supplied, ProgramError> {
        let program = || output::escaped(self.words[0].as_bytes());
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).stdin(Stdio::null());
        let not_run = |source| ProgramError::NotRun { program: program(), source };
        let done = command.output().map_err(not_run)?;
        if !done.status.success() {
            let lines = done.stderr.split(|byte| *byte == b'\n');
            let first = { lines }.find(|line| !line.trim_ascii().is_empty()).unwrap_or_default();
            let said = output::escaped(&first[..first.len().min(MOST_SAID_BYTES)]);
            let status = done.status.to_string();
            return Err(ProgramError::Failed { program: program(), status, said });
        }
        read(&done.stdout).map_err(|reason| ProgramError::Output { program: program(), reason })
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

fn read(printed: &[u8]) -> Result<Supplied, &'static str> {
    let printed: Printed = serde_json::from_slice(printed).map_err(
        // The parser would quote them.
        |_| "they must be one JSON object with AccessKeyId and SecretAccessKey, as of `aws configure export-credentials --format process`",
    )?;
    if printed.version.is_some_and(|version| version != 1) {
        return Err("their Version is not 1");
    }
    let (id, secret) = (printed.access_key_id, printed.secret_access_key);
    let token = printed.session_token.as_deref().unwrap_or_default();
    if ![&id, &secret, token].iter().all(|text| text.bytes().all(|byte| byte.is_ascii_graphic())) {
        return Err("they have a character that is no printable one of ASCII");
    }
    let credentials = match printed.session_token.filter(|token| !token.is_empty()) {
        Some(token) => Credentials::session_key(id, secret, token),
        None => Credentials::key(id, secret),
    };
    let Some(expiration) = printed.expiration else { return Ok((credentials, None)) };
    let end = time(&expiration).ok_or("their Expiration is no time of ISO 8601")?;
    Ok((credentials.expires(end), Some(end)))
}

/// Parses a time of ISO 8601, with a zone.
fn time(text: &str) -> Option<SystemTime> {
    let at = text.rfind(['Z', '+', '-'])?;
    let (local, zone) = text.split_at(at);
    let time = humantime::parse_rfc3339(&format!("{local}Z")).ok()?;
    if zone == "Z" {
        return Some(time);
    }
    let (hours, minutes) = zone[1..].split_once(':').unwrap_or((zone.get(1..3)?, zone.get(3..)?));
    let number = |text: &str| text.parse::<u64>().ok().filter(|_| text.len() == 2);
    let offset = Duration::from_secs(number(hours)? * 3600 + number(minutes)? * 60);
    if zone.starts_with('+') { time.checked_sub(offset) } else { time.checked_add(offset) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_zone() {
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        for (text, seconds) in [
            ("1970-01-02T00:00:00Z", 86_400),
            ("1970-01-02T00:00:00.000Z", 86_400),
            ("1970-01-02T00:00:00+00:00", 86_400),
            ("1970-01-02T01:30:00+01:30", 86_400),
            ("1970-01-01T22:00:00-0200", 86_400),
        ] {
            assert_eq!(time(text), at(seconds), "{text}");
        }
        for wrong in [
            "",
            "Z",
            "+",
            "1970-01-02",
            "1970-01-02T00:00:00",
            "1970-01-02T00:00:00+é1:00",
            "soon+1",
        ] {
            assert_eq!(time(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_is_printed_is_read_and_not_repeated() {
        let (_, end) = read(br#"{"AccessKeyId": "a", "SecretAccessKey": "hunter2"}"#).unwrap();
        assert_eq!(end, None);
        for wrong in [
            "",
            "hunter2",
            r#"{"AccessKeyId": "a"}"#,
            r#"{"AccessKeyId": "a", "SecretAccessKey": ["hunter2"]}"#,
            r#"{"Version": 2, "AccessKeyId": "a", "SecretAccessKey": "hunter2"}"#,
            r#"{"AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": "hunter2"}"#,
            r#"{"AccessKeyId": "a", "SecretAccessKey": "b", "SessionToken": "hunter2\n"}"#,
        ] {
            let Err(reason) = read(wrong.as_bytes()) else { panic!("{wrong}") };
            assert!(!reason.contains("hunter2"), "{reason}");
        }
    }

    #[test]
    fn assignments_are_refused_and_not_repeated() {
        let Err(error) = Program::parse("SECRET=hunter2 program") else { panic!("it was taken") };
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}
