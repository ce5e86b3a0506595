//! URLs of objects on the command line, and how they are reached: with the feature `remote`. Without it they are told from
//! paths, and refused.

#[cfg(feature = "remote")]
mod args;
#[cfg(feature = "remote")]
mod credentials;
#[cfg(feature = "remote")]
mod failure;
#[cfg(feature = "remote")]
mod object;

use std::ffi::OsStr;
use std::path::Path;

#[cfg(feature = "remote")]
pub use args::{RemoteArgs, StoreArgs};
#[cfg(feature = "remote")]
pub use failure::{StoreFailure, failed};
#[cfg(feature = "remote")]
pub use object::{ObjectReader, TierWay};

/// The schemes of objects.
const SCHEMES: [&str; 6] = ["s3", "gs", "az", "http", "https", "file"];

/// The help text after the examples of each command that takes URLs.
#[cfg(feature = "remote")]
pub const HELP: &str = "\
URLs are s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY, http://…, https://… and file:///PATH, with `?`, `#` and `%` of a \
key written as %3F, %23 and %25. Credentials come from the environment (AWS_…, GOOGLE_…, AZURE_…), from a web identity, from the \
instance, or from a program (--credential-process); so do endpoint and region if no option gives them (AWS_ENDPOINT_URL, AWS_REGION, AWS_ALLOW_HTTP, AWS_SKIP_SIGNATURE).";

/// The help text of each command that takes URLs, and the error for one.
#[cfg(not(feature = "remote"))]
pub const HELP: &str = "URLs need object stores, which this build does not have; `cargo install --path crates/cli` installs one that does.";

/// The help text of the groups of commands that lack some.
#[cfg(not(feature = "remote"))]
pub const ABSENT: &str = "\n
This build has no object stores, and so no `aquifer cache`, `aquifer pool publish`, `restore` and `snapshots`, and no URLs; \
`cargo install --path crates/cli` installs one that has.";

/// The help text after the examples of each command that takes the prefix of a pool's snapshots.
#[cfg(feature = "remote")]
pub const PREFIX_HELP: &str = "\
URL is the prefix of all objects: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///DIRECTORY, with the snapshots of \
one pool. Credentials come from the environment (AWS_…, GOOGLE_…, AZURE_…), from a web identity, from the instance, or from a program \
(--credential-process); so do endpoint and region if no option gives them.";

/// The URL of an object, unless the text is a path: a pool with the name of an unknown scheme is a pool.
pub fn url_in(text: &OsStr) -> Option<&str> {
    let text = text.to_str()?;
    let (scheme, _) = text.split_once("://")?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric());
    let is_known = SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(scheme));
    (is_known || (is_scheme && !Path::new(scheme).exists())).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_told_from_pools() {
        for url in ["s3://bucket/key", "S3://b/k", "https://host/x?y", "file:///x", "ftp://host/x"]
        {
            assert_eq!(url_in(OsStr::new(url)), Some(url));
        }
        for path in
            ["data.pool:/x", "data.pool://x", "/a/b", "a:/b", "./s3://b/k", "1://x", "://x", ""]
        {
            assert_eq!(url_in(OsStr::new(path)), None, "{path}");
        }
        // A directory of this crate, where tests run.
        assert_eq!(url_in(OsStr::new("src://x")), None);
    }
}
