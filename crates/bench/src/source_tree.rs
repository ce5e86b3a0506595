//! A tree of real source files to search, copied from the machine.
//!
//! It is a copy, so that the files are on the measured file system and do not change. They keep
//! their names and directories, which determine the cost of looking them up.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::data::check_space;
use crate::scratch::Scratch;
use aquifer_sys::interrupt;

/// The file name extensions of source code.
const EXTENSIONS: &[&str] = &[
    "c", "cc", "cpp", "go", "h", "hpp", "html", "java", "js", "json", "md", "pl", "pm", "py", "rb",
    "rs", "sh", "tcl", "toml", "ts", "vim", "yaml", "yml",
];

/// Common locations of source files, the home directory's first.
pub fn usual_roots() -> Vec<PathBuf> {
    let home = std::env::home_dir();
    let home = home.iter().flat_map(|home| {
        [".cargo/registry", ".rustup", ".pyenv/versions"].map(|name| home.join(name))
    });
    let system = ["/usr/include", "/usr/src", "/usr/share", "/usr/lib"].map(PathBuf::from);
    home.chain(system).filter(|root| root.is_dir()).collect()
}

/// A directory and the source files that are directly in it, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Folder {
    /// The path of the directory.
    pub path: PathBuf,
    /// The files.
    pub names: Vec<OsString>,
}

/// The source files below `root`, up to `limit` of them, in name order. Links are not followed;
/// unreadable directories are skipped.
pub fn folders_below(root: &Path, limit: usize) -> Result<Vec<Folder>> {
    let mut found = Vec::new();
    let mut left = limit;
    // A stack, so that folders come in order.
    let mut open = vec![root.to_owned()];
    while let Some(path) = open.pop() {
        interrupt::check()?;
        if left == 0 {
            break;
        }
        let Ok(entries) = fs::read_dir(&path) else { continue };
        let (mut names, mut folders) = (Vec::new(), Vec::new());
        for entry in entries.flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() && is_source(&entry.file_name()) => {
                    names.push(entry.file_name());
                }
                _ => {}
            }
        }
        names.sort_unstable();
        names.truncate(left);
        left -= names.len();
        folders.sort_unstable_by(|one, other| other.cmp(one));
        open.append(&mut folders);
        if !names.is_empty() {
            found.push(Folder { path, names });
        }
    }
    Ok(found)
}

fn is_source(name: &OsStr) -> bool {
    let extension = Path::new(name).extension().and_then(OsStr::to_str);
    extension.is_some_and(|extension| EXTENSIONS.contains(&extension))
}

/// The copied tree, removed when dropped.
#[derive(Debug)]
pub struct SourceTree {
    directory: Scratch,
    /// Number of files.
    pub files: u32,
    /// Their total length.
    pub bytes: u64,
    /// How many of them are repeated copies, because there were too few source files.
    pub repeated: u32,
}

impl SourceTree {
    /// Copies `wanted` files found below `roots` to `directory`. `progress` is called after each
    /// file.
    pub fn copy(
        directory: Scratch,
        roots: &[PathBuf],
        wanted: u32,
        mut progress: impl FnMut(),
    ) -> Result<Self> {
        let found = find(roots, wanted as usize)?;
        ensure!(
            !found.is_empty(),
            "there are no source files below {}: name directories that have some with --tree",
            roots.iter().map(|root| root.display().to_string()).collect::<Vec<_>>().join(", ")
        );
        let bytes = found.iter().map(|source| source.len_bytes + 4096).sum::<u64>();
        let rounds = u64::from(wanted).div_ceil(found.len() as u64);
        check_space(directory.path(), bytes * rounds)?;
        let mut tree = Self { directory, files: 0, bytes: 0, repeated: 0 };
        let mut made = HashSet::new();
        'all: for round in 0.. {
            for source in &found {
                if tree.files == wanted {
                    break 'all;
                }
                interrupt::check()?;
                let target = tree.path().join(round.to_string()).join(&source.place);
                let folder = target.parent().expect("below the scratch directory").to_owned();
                if !made.contains(&folder) {
                    fs::create_dir_all(&folder)
                        .with_context(|| format!("cannot make {}", folder.display()))?;
                    made.insert(folder);
                }
                let copied = fs::copy(&source.path, &target);
                if copied.is_err() {
                    // A signal may have interrupted the call.
                    interrupt::check()?;
                }
                tree.bytes += copied.with_context(|| {
                    format!("cannot copy {} to {}", source.path.display(), target.display())
                })?;
                tree.files += 1;
                tree.repeated += u32::from(round > 0);
                progress();
            }
        }
        Ok(tree)
    }

    /// Its root.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// A file to copy.
struct Source {
    path: PathBuf,
    /// Its path below the root of the copy.
    place: PathBuf,
    len_bytes: u64,
}

fn find(roots: &[PathBuf], limit: usize) -> Result<Vec<Source>> {
    let mut found = Vec::new();
    for (root, number) in roots.iter().zip(0_u32..) {
        for folder in folders_below(root, limit - found.len())? {
            let below = folder.path.strip_prefix(root).expect("found below it");
            for name in &folder.names {
                let path = folder.path.join(name);
                // Open the file, because an unreadable file cannot be copied.
                let Ok(metadata) = fs::File::open(&path).and_then(|file| file.metadata()) else {
                    continue;
                };
                let place = Path::new(&number.to_string()).join(below).join(name);
                found.push(Source { path, place, len_bytes: metadata.len() });
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::scratch_directory;

    fn directory() -> Scratch {
        scratch_directory(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap()
    }

    #[test]
    fn source_files_are_found_in_order_and_others_are_not() {
        let root = directory();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("b/c")).unwrap();
        fs::create_dir(at("a")).unwrap();
        for name in ["z.rs", "y.c", "y.o", "b/c/x.py", "a/no-extension"] {
            fs::write(at(name), name).unwrap();
        }
        std::os::unix::fs::symlink(at("z.rs"), at("a/link.rs")).unwrap();
        let found = folders_below(root.path(), 10).unwrap();
        let expected = [
            Folder { path: root.path().to_owned(), names: vec!["y.c".into(), "z.rs".into()] },
            Folder { path: at("b/c"), names: vec!["x.py".into()] },
        ];
        assert_eq!(found, expected);
        assert_eq!(folders_below(root.path(), 1).unwrap()[0].names, ["y.c"]);
    }

    #[test]
    fn too_few_files_are_copied_again_under_other_names() {
        let root = directory();
        fs::create_dir(root.path().join("inner")).unwrap();
        fs::write(root.path().join("inner/one.rs"), "1").unwrap();
        fs::write(root.path().join("two.rs"), "22").unwrap();
        let roots = [root.path().to_owned()];
        let tree = SourceTree::copy(directory(), &roots, 5, || {}).unwrap();
        assert_eq!((tree.files, tree.repeated, tree.bytes), (5, 3, 8));
        let folders = folders_below(tree.path(), 10).unwrap();
        assert_eq!(folders.iter().map(|folder| folder.names.len()).sum::<usize>(), 5);
        let path = tree.path().to_owned();
        drop(tree);
        assert!(!path.exists());
        let none = SourceTree::copy(directory(), &[path], 5, || {}).unwrap_err().to_string();
        assert!(none.contains("--tree"), "{none}");
    }
}
