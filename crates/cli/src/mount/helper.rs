//! `mount.fuse.aquifer`: this program under the name by which `mount` calls it, for `mount -t
//! fuse.aquifer` and the file systems table.
//!
//! `mount` calls it as `mount.fuse.aquifer SOURCE DIRECTORY [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t
//! TYPE]`. The arguments are translated to those of `aquifer mount`, so all options are defined once.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use super::options::{Meaning, of_table};

/// The name. A file system type `fuse.aquifer` leads to it.
const NAME: &str = "mount.fuse.aquifer";

/// The arguments of this program: translated if it was called as a helper of `mount`. `None` if
/// there is nothing to do.
///
/// # Errors
/// For arguments that cannot be translated.
pub fn translated(arguments: Vec<OsString>) -> Result<Option<Vec<OsString>>, String> {
    let name = arguments.first().and_then(|program| Path::new(program).file_name());
    if name != Some(OsStr::new(NAME)) {
        return Ok(Some(arguments));
    }
    translate(&arguments[1..])
}

fn translate(arguments: &[OsString]) -> Result<Option<Vec<OsString>>, String> {
    let (mut places, mut options) = (Vec::new(), Vec::new());
    let (mut is_sloppy, mut is_fake) = (false, false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let Some(flags) = argument.as_bytes().strip_prefix(b"-").filter(|flags| !flags.is_empty())
        else {
            places.push(argument.clone());
            continue;
        };
        for (at, flag) in flags.iter().enumerate() {
            match flag {
                b's' => is_sloppy = true,
                b'f' => is_fake = true,
                b'n' | b'v' => {}
                b'o' | b't' | b'N' => {
                    // The value may follow at once.
                    let joined = OsString::from_vec(flags[at + 1..].to_vec());
                    let value = match joined.is_empty() {
                        true => rest.next().cloned(),
                        false => Some(joined),
                    };
                    let value =
                        value.ok_or_else(|| format!("-{} needs a value", char::from(*flag)))?;
                    if *flag == b'o' {
                        options.extend(divided(&value)?);
                    }
                    break;
                }
                _ => return Err(format!("unknown option -{}", char::from(*flag))),
            }
        }
    }
    let [pool, directory] = &places[..] else {
        return Err(format!("usage: {NAME} POOL DIRECTORY [-o OPTION,…]"));
    };
    let mut translated: Vec<OsString> = ["aquifer", "mount"].map(OsString::from).into();
    for option in &options {
        match of_table(option) {
            Ok(Meaning::Argument(argument)) => translated.push(argument),
            Ok(Meaning::Nothing) => {}
            Err(_) if is_sloppy => {}
            Err(reason) => return Err(reason),
        }
    }
    translated.push("--".into());
    translated.extend([pool.clone(), directory.clone()]);
    Ok((!is_fake).then_some(translated))
}

/// Options are divided by commas, unless a backslash is before one.
fn divided(options: &OsStr) -> Result<Vec<String>, String> {
    let text = options.to_str().ok_or("options must be UTF-8")?;
    let mut all = vec![String::new()];
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        let last = all.last_mut().expect("never empty");
        match character {
            ',' => all.push(String::new()),
            '\\' => last.extend(characters.next()),
            _ => last.push(character),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn helped(arguments: &[&str]) -> Result<Option<Vec<String>>, String> {
        let all = [&["/sbin/mount.fuse.aquifer"], arguments].concat();
        let done = translated(all.into_iter().map(OsString::from).collect())?;
        let text = |arguments: Vec<OsString>| {
            arguments.into_iter().map(|argument| argument.into_string().unwrap()).collect()
        };
        Ok(done.map(text))
    }

    #[test]
    fn what_mount_says_becomes_arguments_of_the_command() {
        let options = "rw,noauto,user,x-systemd.automount,cache=write-through,allow_other,noatime";
        let done = helped(&["/srv/-p", "/mnt", "-v", "-o", options]).unwrap().unwrap();
        assert_eq!(done[2..], ["--cache=write-through", "--allow-other", "--", "/srv/-p", "/mnt"]);
        let done =
            helped(&["p", "d", "-no", "ro,noxattr,shared", "-t", "fuse.aquifer"]).unwrap().unwrap();
        assert_eq!(
            done,
            ["aquifer", "mount", "--read-only", "--no-xattrs", "--shared", "--", "p", "d"]
        );
        let done = helped(&["-oshared_memory=/a\\,b,suid", "p", "d"]).unwrap().unwrap();
        assert_eq!(done[2..4], ["--shared-memory=/a,b", "--suid"]);
        assert_eq!(helped(&["p", "d", "-f"]), Ok(None));
    }

    #[test]
    fn what_it_cannot_do_is_refused_unless_mount_is_sloppy() {
        for wrong in ["remount,ro", "sync", "uid=7", "cache"] {
            assert!(helped(&["p", "d", "-o", wrong]).is_err(), "{wrong}");
            assert!(helped(&["p", "d", "-s", "-o", wrong]).is_ok(), "{wrong}");
        }
        for wrong in [&["p"][..], &["p", "d", "e"], &["p", "d", "-o"], &["p", "d", "-x"]] {
            assert!(helped(wrong).is_err(), "{wrong:?}");
        }
        let other = vec!["aquifer".into(), "-x".into()];
        assert_eq!(translated(other.clone()), Ok(Some(other)));
    }
}
