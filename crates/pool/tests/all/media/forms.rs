//! The forms of media that are available on this machine, detected and forced.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_pool::media::PersistenceDomain::{Dax, PageCache, Volatile};
use aquifer_pool::media::{Media, OpenError, OpenOptions, PersistenceDomain, WriteWindows};

/// A form with its own file, which is removed when this is dropped.
pub struct Form {
    pub name: String,
    pub media: Arc<dyn Media>,
    /// The path to reopen the file; in /proc if it has no name.
    pub path: PathBuf,
    how: How,
    /// The unit of its length.
    pub unit_bytes: u64,
    _place: Place,
}

/// How the file is opened.
#[derive(Debug, Clone, Copy)]
struct How {
    /// The domain, if it is forced.
    forced: Option<PersistenceDomain>,
    windows: WriteWindows,
}

/// The detected domain, without a guard.
const FOUND: How = How { forced: None, windows: WriteWindows::None };

/// Keeps the file.
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
    // SAFETY: a new descriptor, which nothing else owns.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len_bytes).ok().map(|()| file)
}

impl Form {
    fn in_directory(
        directory: &Path,
        len_bytes: u64,
        how: How,
        name: &str,
    ) -> Result<Form, OpenError> {
        let file = tempfile::Builder::new().prefix("aquifer-media-").tempfile_in(directory);
        let (file, path) = file.unwrap().into_parts();
        file.set_len(len_bytes).unwrap();
        let media = how.options().open(&path)?;
        Ok(Form {
            name: format!("{name}, {}", how.describe(&*media)),
            media,
            path: path.to_path_buf(),
            how,
            unit_bytes: 1,
            _place: Place::Named(path),
        })
    }

    fn of_memfd(file: File, unit_bytes: u64, how: How, name: &str) -> Result<Form, OpenError> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let media = how.options().open(&path)?;
        Ok(Form {
            name: format!("{name}, {}", how.describe(&*media)),
            media,
            path,
            how,
            unit_bytes,
            _place: Place::Unnamed(file),
        })
    }

    /// The domain, if it was forced.
    pub fn forced(&self) -> Option<PersistenceDomain> {
        self.how.forced
    }

    /// Opens the same file again, in the same way but perhaps for reading only.
    pub fn again(&self, writable: bool) -> Arc<dyn Media> {
        self.how.options().writable(writable).open(&self.path).unwrap()
    }

    /// The file itself.
    pub fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.path).unwrap()
    }
}

impl How {
    fn options(self) -> OpenOptions {
        let options = OpenOptions::new().writable(true).write_windows(self.windows);
        self.forced.into_iter().fold(options, OpenOptions::domain)
    }

    fn describe(self, media: &dyn Media) -> String {
        let how = if self.forced.is_some() { "forced" } else { "found" };
        let (domain, windows) = (media.domain(), media.write_windows());
        format!("{how} {domain}, guarded by {windows}")
    }
}

/// Every form, each with a new file of at least `len_bytes`, rounded up to what the form needs.
pub fn all(len_bytes: u64) -> Vec<Form> {
    const HUGE_BYTES: u64 = 2 << 20;
    let mut forms = vec![];
    let guards = [WriteWindows::None, WriteWindows::Keys, WriteWindows::Calls];
    let domains = [None, Some(Dax), Some(PageCache), Some(Volatile)];
    let shared = memory_directory();
    for windows in guards {
        for forced in domains {
            let how = How { forced, windows };
            let directory = std::env::temp_dir();
            forms.push(Form::in_directory(&directory, len_bytes, how, "temporary file"));
            if let Some(directory) = shared {
                forms.push(Form::in_directory(directory, len_bytes, how, "tmpfs"));
            }
        }
    }
    for forced in [None, Some(PageCache)] {
        let file = memfd(len_bytes, 0).expect("memory files work");
        forms.push(Form::of_memfd(file, 1, How { forced, ..FOUND }, "memfd"));
    }
    for windows in [WriteWindows::None, WriteWindows::Best] {
        let huge =
            memfd(len_bytes.next_multiple_of(HUGE_BYTES), libc::MFD_HUGETLB | libc::MFD_HUGE_2MB);
        match huge.filter(|huge| aquifer_sys::io::allocate(fd(huge), 0, 1).is_ok()) {
            Some(huge) => {
                let how = How { windows, ..FOUND };
                forms.push(Form::of_memfd(huge, HUGE_BYTES, how, "huge pages"));
            }
            None => eprintln!("skipped: no huge page is free"),
        }
    }
    let had = |form: Result<Form, OpenError>| match form {
        Err(OpenError::NoWriteWindows { reason, .. }) => {
            eprintln!("skipped: {reason}");
            None
        }
        form => Some(form.unwrap()),
    };
    forms.into_iter().filter_map(had).collect()
}

fn fd(file: &File) -> std::os::fd::BorrowedFd<'_> {
    std::os::fd::AsFd::as_fd(file)
}
