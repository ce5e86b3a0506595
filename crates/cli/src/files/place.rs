//! `POOL:/PATH`: a file of a pool on the command line.
//!
//! Both halves can be any bytes. They are divided at the last `:/`, so the path of a pool may
//! contain colons. If a name *inside* the pool ends with a colon, that division is wrong: the
//! pool's path then does not exist, because its parent would be a file. So the last `:/` whose
//! preceding part exists is used; if there is none, the last one.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};

use crate::output;

/// A pool and a path in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pool: PathBuf,
    /// Begins with a slash.
    path: PathBuf,
}

/// The command-line parser of a place.
pub fn parser() -> impl TypedValueParser<Value = Place> {
    OsStringValueParser::new().try_map(Place::parse)
}

impl Place {
    /// Whether the text has the form of a place.
    pub fn is_one(text: &OsStr) -> bool {
        text.as_bytes().windows(2).any(|pair| pair == b":/")
    }

    /// Parses a place.
    pub fn parse(text: OsString) -> Result<Place, String> {
        let bytes = text.as_bytes();
        let divides: Vec<usize> =
            (1..bytes.len().saturating_sub(1)).filter(|&at| &bytes[at..at + 2] == b":/").collect();
        let Some(&last) = divides.last() else { return Err(explain(bytes)) };
        let is_there = |at: &usize| Path::new(OsStr::from_bytes(&bytes[..*at])).exists();
        let at = divides.iter().rev().copied().find(is_there).unwrap_or(last);
        Ok(Place {
            pool: PathBuf::from(OsStr::from_bytes(&bytes[..at])),
            path: PathBuf::from(OsStr::from_bytes(&bytes[at + 1..])),
        })
    }

    /// Parses a place; the file of a pool alone stands for the root of the pool.
    pub fn parse_or_root(text: OsString) -> Result<Place, String> {
        if !Place::is_one(&text) && is_file(Path::new(&text)) {
            return Ok(Place { pool: text.into(), path: PathBuf::from("/") });
        }
        Place::parse(text)
    }

    /// The file of the pool.
    pub fn pool(&self) -> &Path {
        &self.pool
    }

    /// The path in it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another path in the same pool.
    pub fn with_path(&self, path: impl Into<PathBuf>) -> Place {
        Place { pool: self.pool.clone(), path: path.into() }
    }

    /// The place as written, and as a command accepts it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = self.pool.clone().into_os_string().into_vec();
        bytes.push(b':');
        bytes.extend_from_slice(self.path.as_os_str().as_bytes());
        bytes
    }

    /// The place, escaped for a terminal.
    pub fn show(&self) -> String {
        output::escaped(&self.to_bytes())
    }

    /// Whether both are in the same pool, even if its path is spelled differently.
    pub fn is_in_pool_of(&self, other: &Place) -> bool {
        if self.pool == other.pool {
            return true;
        }
        let canonical = |place: &Place| place.pool.canonicalize().unwrap_or(place.pool.clone());
        canonical(self) == canonical(other)
    }
}

/// Whether something is there that may be a pool.
pub fn is_file(path: &Path) -> bool {
    path.metadata().is_ok_and(|there| !there.is_dir())
}

/// The last component of a path as `cp` uses it; `None` if it is not a name, as in `/`, `a/.` and
/// `..`.
pub fn last_name(path: &Path) -> Option<OsString> {
    let bytes = path.as_os_str().as_bytes();
    let end = bytes.iter().rposition(|&byte| byte != b'/')? + 1;
    let start = bytes[..end].iter().rposition(|&byte| byte == b'/').map_or(0, |slash| slash + 1);
    match &bytes[start..end] {
        b"." | b".." => None,
        name => Some(OsString::from_vec(name.to_vec())),
    }
}

fn explain(bytes: &[u8]) -> String {
    let shown = output::escaped(bytes);
    match bytes.strip_suffix(b":") {
        Some(pool) if !pool.is_empty() => {
            format!("`{shown}` names a pool, but no file in it; its root is `{shown}/`")
        }
        _ => format!(
            "`{shown}` is not a file of a pool; write POOL:/PATH, for example data.pool:/logs/today"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<(String, String), String> {
        let place = Place::parse(text.into())?;
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        Ok((text(place.pool()), text(place.path())))
    }

    #[test]
    fn the_last_colon_with_a_slash_divides() {
        let ok = |pool: &str, path: &str| Ok((pool.to_owned(), path.to_owned()));
        assert_eq!(parse("data.pool:/a/b"), ok("data.pool", "/a/b"));
        assert_eq!(parse("data.pool:/"), ok("data.pool", "/"));
        assert_eq!(parse("/mnt/a:b/c:/d"), ok("/mnt/a:b/c", "/d"));
        assert_eq!(parse("no/such:/x:/y"), ok("no/such:/x", "/y"));
        assert_eq!(parse("a:b:c:/d:e"), ok("a:b:c", "/d:e"));
        assert_eq!(parse("x:/-n\n"), ok("x", "/-n\n"));
        for wrong in ["", "data.pool", "/a/b", ":/a", "a:b", ":"] {
            assert!(parse(wrong).unwrap_err().contains("POOL:/PATH"), "{wrong}");
        }
        assert!(parse("data.pool:").unwrap_err().contains("`data.pool:/`"));
    }

    #[test]
    fn names_in_a_pool_may_end_with_a_colon() {
        let directory = tempfile::tempdir().unwrap();
        let pool = directory.path().join("data.pool");
        std::fs::write(&pool, "").unwrap();
        let pool = pool.to_str().unwrap();
        let place = |path| Ok((pool.to_owned(), String::from(path)));
        assert_eq!(parse(&format!("{pool}:/c:/d:/e")), place("/c:/d:/e"));
        assert_eq!(parse(&format!("{pool}:/e")), place("/e"));
    }

    #[test]
    fn last_names_are_those_of_cp() {
        let name = |path: &str| last_name(Path::new(path));
        assert_eq!(name("/a/b//"), Some("b".into()));
        assert_eq!(name("b"), Some("b".into()));
        for none in ["", "/", "//", ".", "a/.", "a/./", "..", "/.."] {
            assert_eq!(name(none), None, "{none}");
        }
    }
}
