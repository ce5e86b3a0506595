//! Names of objects: like file names, any bytes but NUL.
//!
//! A name is displayed in shell syntax, so that no two names look the same, none affects the
//! terminal, and text from a message can be pasted into a command:
//!
//! | name | shown |
//! |---|---|
//! | text | `"größe 1"` |
//! | other bytes, control characters, combining ones, and characters special to a shell | `$'caf\xe9\x0a'` |

use std::fmt;

/// The name of an object. Displayed in shell syntax: as `"text"`, or as `$'caf\xe9'`.
///
/// ```
/// use aquifer_object::ObjectName;
///
/// assert_eq!(ObjectName::from("a name").to_string(), "\"a name\"");
/// assert_eq!(ObjectName::from(b"caf\xe9").to_string(), r"$'caf\xe9'");
/// assert_eq!(ObjectName::from(b"caf\xe9").to_str(), None);
/// assert_eq!(ObjectName::from("a name"), *"a name");
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName(Vec<u8>);

impl ObjectName {
    /// The name itself.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The name itself, if it is UTF-8.
    pub fn to_str(&self) -> Option<&str> {
        str::from_utf8(&self.0).ok()
    }
}

impl<T: AsRef<[u8]> + ?Sized> From<&T> for ObjectName {
    fn from(name: &T) -> ObjectName {
        ObjectName(name.as_ref().to_vec())
    }
}

impl AsRef<[u8]> for ObjectName {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl PartialEq<str> for ObjectName {
    fn eq(&self, other: &str) -> bool {
        self.0 == other.as_bytes()
    }
}

impl PartialEq<&str> for ObjectName {
    fn eq(&self, other: &&str) -> bool {
        self.0 == other.as_bytes()
    }
}

/// Whether a character is visible and cannot combine with a following one.
fn is_plain(character: char) -> bool {
    matches!(character, '\'' | '"' | '\\') || character.escape_debug().len() == 1
}

impl fmt::Display for ObjectName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let means_something = |character| matches!(character, '"' | '\\' | '$' | '`' | '!');
        if let Some(text) = self.to_str()
            && text.chars().all(|character| is_plain(character) && !means_something(character))
        {
            return write!(formatter, "\"{text}\"");
        }
        formatter.write_str("$'")?;
        for chunk in self.0.utf8_chunks() {
            for character in chunk.valid().chars() {
                match character {
                    '\'' | '\\' => write!(formatter, "\\{character}")?,
                    _ if is_plain(character) => write!(formatter, "{character}")?,
                    _ => write_bytes(formatter, character.encode_utf8(&mut [0; 4]).as_bytes())?,
                }
            }
            write_bytes(formatter, chunk.invalid())?;
        }
        formatter.write_str("'")
    }
}

fn write_bytes(formatter: &mut fmt::Formatter<'_>, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(formatter, "\\x{byte:02x}"))
}

impl fmt::Debug for ObjectName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;
    use std::process::Command;

    use aquifer_testkit::rng::Rng;

    fn shown(name: &[u8]) -> String {
        ObjectName::from(name).to_string()
    }

    #[test]
    fn names_are_shown_as_a_shell_takes_them() {
        for (name, expected) in [
            (&b"plain"[..], "\"plain\""),
            (b"", "\"\""),
            (b"it's", "\"it's\""),
            ("größe 1".as_bytes(), "\"größe 1\""),
            ("e\u{301}".as_bytes(), "$'e\\xcc\\x81'"),
            ("\u{202e}gpj".as_bytes(), "$'\\xe2\\x80\\xaegpj'"),
            (b"caf\xe9", "$'caf\\xe9'"),
            (b"caf\xef\xbf\xbd", "\"caf\u{fffd}\""),
            (b"a\n\x1b[2J", "$'a\\x0a\\x1b[2J'"),
            (b"$HOME `id` !", "$'$HOME `id` !'"),
            (b"\\'\"", "$'\\\\\\'\"'"),
        ] {
            assert_eq!(shown(name), expected);
        }
    }

    /// The displayed form, pasted into a shell, gives the name back.
    #[test]
    fn a_shell_reads_what_is_shown() {
        let mut rng = Rng::new(7);
        let mut names: Vec<Vec<u8>> = (1..=255).map(|byte| vec![b'a', byte, b'1']).collect();
        names.extend(
            (0..200).map(|_| (0..rng.below(20)).map(|_| 1 + rng.below(255) as u8).collect()),
        );
        names.push("größe e\u{301} \u{202e} \u{a0}".as_bytes().to_vec());
        let mut script = "printf '%s\\0'".to_owned();
        names.iter().for_each(|name| script.extend([" ", &shown(name)]));
        // Pass the script as an argument; it is UTF-8, because other bytes are escaped.
        let script = std::ffi::OsString::from_vec(script.into_bytes());
        let output = match Command::new("bash").arg("-c").arg(script).env("LC_ALL", "C").output() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("skipped: there is no bash");
                return;
            }
            output => output.unwrap(),
        };
        let mut expected = names.join(&0);
        expected.push(0);
        assert!(output.status.success() && output.stdout == expected, "{output:?}");
    }
}
