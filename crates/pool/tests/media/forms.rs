//! The forms of media that can be had on this machine, found and forced.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_pool::media::PersistenceDomain::{Dax, PageCache, Volatile};
use aquifer_pool::media::{Media, OpenOptions, PersistenceDomain};

/// A form with a file of its own, which is removed when this is dropped.
pub struct Form {
    pub name: String,
    pub media: Arc<dyn Media>,
    /// Opens the same file once more; through /proc where it has no name.
    pub path: PathBuf,
    /// Whether the domain was forced.
    pub forced: Option<PersistenceDomain>,
    /// The unit of its length.
    pub unit_bytes: u64,
    _place: Place,
}

/// What holds the file.
enum Place {
    Named(#[allow(dead_code, reason = "removes the file")] tempfile::TempPath),
    Unnamed(#[allow(dead_code, reason = "keeps the file")] File),
}

/// A directory in memory, if there is one.
pub fn memory_directory() -> Option<&'static Path> {
    let path = Path::new("/dev/shm");
    let usable = tempfile::tempfile_in(path).is_ok();
    if !usable {
        eprintln!("skipped: /dev/shm is not writable");
    }
    usable.then_some(path)
}

/// A memory file. `flags` are those of `memfd_create`.
fn memfd(len_bytes: u64, flags: libc::c_uint) -> Option<File> {
    // SAFETY: a NUL-terminated name.
    let fd = unsafe { libc::memfd_create(c"media".as_ptr(), libc::MFD_CLOEXEC | flags) };
    if fd < 0 {
        return None;
    }
    // SAFETY: just made, owned by nobody else.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len_bytes).ok().map(|()| file)
}

impl Form {
    fn in_directory(
        directory: &Path,
        len_bytes: u64,
        forced: Option<PersistenceDomain>,
        name: &str,
    ) -> Form {
        let file = tempfile::Builder::new().prefix("aquifer-media-").tempfile_in(directory);
        let (file, path) = file.unwrap().into_parts();
        file.set_len(len_bytes).unwrap();
        let media = options(forced).open(&path).unwrap();
        Form {
            name: format!("{name}, {} {}", how(forced), media.domain()),
            media,
            path: path.to_path_buf(),
            forced,
            unit_bytes: 1,
            _place: Place::Named(path),
        }
    }

    fn of_memfd(
        file: File,
        unit_bytes: u64,
        forced: Option<PersistenceDomain>,
        name: &str,
    ) -> Form {
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let media = options(forced).open(&path).unwrap();
        Form {
            name: format!("{name}, {} {}", how(forced), media.domain()),
            media,
            path,
            forced,
            unit_bytes,
            _place: Place::Unnamed(file),
        }
    }

    /// Opens the same file again, in the same way but perhaps for reading only.
    pub fn again(&self, writable: bool) -> Arc<dyn Media> {
        let options = OpenOptions::new().writable(writable);
        let options = self.forced.into_iter().fold(options, OpenOptions::domain);
        options.open(&self.path).unwrap()
    }

    /// The file itself.
    pub fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }
}

fn options(forced: Option<PersistenceDomain>) -> OpenOptions {
    forced.into_iter().fold(OpenOptions::new().writable(true), OpenOptions::domain)
}

fn how(forced: Option<PersistenceDomain>) -> &'static str {
    if forced.is_some() { "forced" } else { "found" }
}

/// Every form, each with a new file of at least `len_bytes`, rounded up to what the form needs.
pub fn all(len_bytes: u64) -> Vec<Form> {
    let mut forms = vec![];
    let domains = [None, Some(Dax), Some(PageCache), Some(Volatile)];
    for forced in domains {
        forms.push(Form::in_directory(&std::env::temp_dir(), len_bytes, forced, "temporary file"));
    }
    if let Some(directory) = memory_directory() {
        for forced in domains {
            forms.push(Form::in_directory(directory, len_bytes, forced, "tmpfs"));
        }
    }
    for forced in [None, Some(PageCache)] {
        let file = memfd(len_bytes, 0).expect("memory files work");
        forms.push(Form::of_memfd(file, 1, forced, "memfd"));
    }
    const HUGE_BYTES: u64 = 2 << 20;
    let huge =
        memfd(len_bytes.next_multiple_of(HUGE_BYTES), libc::MFD_HUGETLB | libc::MFD_HUGE_2MB);
    match huge.filter(|huge| aquifer_sys::io::allocate(fd(huge), 0, 1).is_ok()) {
        Some(huge) => forms.push(Form::of_memfd(huge, HUGE_BYTES, None, "huge pages")),
        None => eprintln!("skipped: no huge page is free"),
    }
    forms
}

fn fd(file: &File) -> std::os::fd::BorrowedFd<'_> {
    std::os::fd::AsFd::as_fd(file)
}
