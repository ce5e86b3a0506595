//! Structures that the examples keep in objects. Each is a file to copy.

#![allow(dead_code, reason = "each example uses its part")]

pub mod lru_cache;
pub mod plain_list;
pub mod sorted_list;
pub mod word_index;

use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::Path;
use std::process::ExitCode;

use aquifer_object::{Attachment, CreateObject, ObjectError, Objects};
use aquifer_pool::Pool;

/// The result of an example: errors of Aquifer, of parsing, of files.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Calls an example with its pool and the other arguments; prints errors with their own text, which
/// includes the remedy.
pub fn run(usage: &str, example: impl FnOnce(&Path, &[String]) -> Result<()>) -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let pool = match arguments.next() {
        // An option is not a pool name.
        Some(first) if !first.as_encoded_bytes().starts_with(b"-") => first,
        _ => {
            eprintln!("usage: {usage}");
            return ExitCode::from(2);
        }
    };
    match text(arguments).and_then(|arguments| example(Path::new(&pool), &arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn text(arguments: impl Iterator<Item = OsString>) -> Result<Vec<String>> {
    arguments
        .map(|argument| argument.into_string().map_err(|it| format!("{it:?} is not UTF-8").into()))
        .collect()
}

/// An argument that is a number.
pub fn number(argument: &str) -> Result<u64> {
    argument.parse().map_err(|error| format!("`{argument}` is no number: {error}").into())
}

/// Attaches an object with a heap for writing; creates it, and the pool, if necessary.
pub fn attach_heap(pool: &Path, name: &str) -> Result<Attachment> {
    if !pool.exists() {
        make_pool(pool)?;
    }
    let objects = Objects::open(pool)?;
    match CreateObject::new().heap(true).create(&objects, name, 8 << 20) {
        Ok(_) | Err(ObjectError::Exists { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(objects.attach_mut(name)?)
}

/// The pool is renamed when it is complete: if the process is killed before, the next run starts
/// again and never finds a partial pool.
fn make_pool(path: &Path) -> Result<()> {
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(".unfinished");
    if Path::new(&unfinished).exists() {
        fs::remove_file(&unfinished)?;
    }
    drop(Pool::create(&unfinished, 64 << 20)?);
    fs::rename(&unfinished, path)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    // The new directory entry must survive a power cut too.
    Ok(File::open(directory.unwrap_or(Path::new(".")))?.sync_all()?)
}
