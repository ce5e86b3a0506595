//! Where files of a command are: in a pool, in the machine's file systems, or in an object store.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser};

use super::Place;
use super::place::is_file;
use crate::remote;

/// A source or destination.
#[derive(Debug, Clone)]
pub enum Spot {
    #[cfg(feature = "remote")]
    Url(String),
    Pool(Place),
    Local(PathBuf),
}

/// The command-line parser of URLs and places.
pub fn parser() -> impl TypedValueParser<Value = Spot> {
    OsStringValueParser::new().try_map(url_or_place)
}

/// Parses a URL or a place.
pub fn url_or_place(text: OsString) -> Result<Spot, String> {
    match url(&text)? {
        Some(url) => Ok(url),
        None => Place::parse(text).map(Spot::Pool),
    }
}

/// Parses a URL or a path of the machine, which every text is.
pub fn url_or_path(text: OsString) -> Result<Spot, String> {
    Ok(url(&text)?.unwrap_or_else(|| Spot::Local(text.into())))
}

#[cfg(feature = "remote")]
fn url(text: &OsStr) -> Result<Option<Spot>, String> {
    Ok(remote::url_in(text).map(|url| Spot::Url(url.to_owned())))
}

#[cfg(not(feature = "remote"))]
fn url(text: &OsStr) -> Result<Option<Spot>, String> {
    remote::url_in(text).map_or(Ok(None), |_| Err(remote::HELP.to_owned()))
}

impl Spot {
    /// The URL of an object.
    #[cfg(feature = "remote")]
    pub fn url(&self) -> Option<&str> {
        match self {
            Spot::Url(url) => Some(url),
            _ => None,
        }
    }

    /// What was taken for a path, as a place of a pool if the path does not exist and a pool of that name does.
    pub fn or_place(self) -> Spot {
        let Spot::Local(path) = &self else { return self };
        if path.symlink_metadata().is_ok() || !Place::is_one(path.as_os_str()) {
            return self;
        }
        match Place::parse(path.clone().into_os_string()) {
            Ok(place) if is_file(place.pool()) => Spot::Pool(place),
            _ => self,
        }
    }
}
