//! Write windows: the moments in which a thread can store to guarded memory.
//!
//! Guarded memory carries the process's protection key ([`aquifer_sys::pkey`]), and every thread is without rights to it, except
//! inside a window. A store that goes astray, through a stale pointer or an index out of bounds, in this or another thread,
//! meets no rights and ends in SIGSEGV instead of on media. Opening and closing takes two instructions each, and no system call.
//!
//! # What to mind
//! * The key is one for all that this process guards: a window opened for one pool lets the thread store to all.
//! * A thread that is started inside a window is born with its rights, and keeps them until the first window of its own closes.
//! * Signal handlers run without rights, also inside a window of the interrupted code. Threads that were there before the key
//!   have none either. Whoever is to be read by everybody is mapped a second time, without the key.
//! * Rights bind what this thread does, and system calls that it makes; not `ptrace`, `process_vm_writev` and
//!   `/proc/…/mem`, and not threads of the kernel (io_uring). Code that wants to can open a window itself: this is a
//!   guard against mistakes.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;
use std::sync::OnceLock;

use aquifer_sys::pkey::{Key, Rights};

thread_local! {
    /// Windows of this thread that are open.
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

/// The key of what this process guards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowKey(Key);

impl WindowKey {
    /// The one there is, made when it is first asked for, and kept.
    ///
    /// # Errors
    /// Those of [`Key::allocate`]: the CPU or the kernel has none, or all are taken.
    pub fn of_process() -> io::Result<WindowKey> {
        static KEY: OnceLock<Result<WindowKey, Option<i32>>> = OnceLock::new();
        let made = KEY
            .get_or_init(|| Key::allocate().map(WindowKey).map_err(|error| error.raw_os_error()));
        made.map_err(|errno| match errno {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::ErrorKind::Unsupported.into(),
        })
    }

    /// What guarded memory is mapped with.
    pub fn key(self) -> Key {
        self.0
    }

    /// Opens a window of the calling thread, until the result is dropped.
    #[inline]
    pub fn open(self) -> WriteWindow {
        OPEN.with(|open| {
            if open.replace(open.get() + 1) == 0 {
                self.0.set_rights(Rights::All);
            }
        });
        WriteWindow { key: self, _of_this_thread: PhantomData }
    }
}

/// A window of one thread, open. Windows can be nested, and closed in any order: the last one counts.
///
/// ```
/// use aquifer_vm::window::WindowKey;
///
/// if let Ok(key) = WindowKey::of_process() {
///     let window = key.open();
///     // Stores to what is guarded work here, and only in this thread,
///     drop(window);
///     // and here no more.
/// }
/// ```
///
/// It stays with its thread:
///
/// ```compile_fail
/// fn sent<T: Send>() {}
/// sent::<aquifer_vm::window::WriteWindow>();
/// ```
#[derive(Debug)]
#[must_use = "it closes when it is dropped"]
pub struct WriteWindow {
    key: WindowKey,
    _of_this_thread: PhantomData<*mut ()>,
}

impl Drop for WriteWindow {
    #[inline]
    fn drop(&mut self) {
        OPEN.with(|open| {
            open.set(open.get() - 1);
            if open.get() == 0 {
                self.key.0.set_rights(Rights::None);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_window_that_closes_takes_the_rights_away() {
        let key = match WindowKey::of_process() {
            Ok(key) => key,
            Err(error) => return eprintln!("skipped: no protection keys here ({error})"),
        };
        assert_eq!(WindowKey::of_process().unwrap(), key, "one for all");
        let rights = || key.key().rights();
        assert_eq!(rights(), Rights::None);
        let outer = key.open();
        let inner = key.open();
        assert_eq!(rights(), Rights::All);
        drop(outer);
        assert_eq!(rights(), Rights::All);
        // A thread that is born into a window: its own windows end that.
        std::thread::spawn(move || {
            assert_eq!(key.key().rights(), Rights::All);
            drop(key.open());
            assert_eq!(key.key().rights(), Rights::None);
        })
        .join()
        .unwrap();
        drop(inner);
        assert_eq!(rights(), Rights::None);
    }
}
