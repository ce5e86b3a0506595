//! Write windows, during which a thread can store to guarded memory.
//!
//! Guarded memory is mapped with the process's protection key ([`aquifer_sys::pkey`]), and no
//! thread has rights to the key except inside a window. A stray store, through a stale pointer or
//! an index out of bounds, in this or another thread, raises SIGSEGV instead of reaching the
//! medium. Opening and closing take two instructions each, and no system call.
//!
//! # Limits
//! * The process has one key for everything it guards: a window opened for one pool lets the thread
//!   store to all.
//! * A thread started inside a window inherits its rights, and keeps them until its own first
//!   window closes. Threads of this library give them up when they start
//!   ([`give_up_inherited`]).
//! * Signal handlers run without rights, even if they interrupt a window. So do threads that were
//!   started before the key was allocated. Memory that all threads must be able to read is mapped a
//!   second time, without the key.
//! * Rights apply to this thread's accesses and system calls; not to `ptrace`, `process_vm_writev`
//!   and `/proc/…/mem`, and not to kernel threads (io_uring). Any code can open a window itself:
//!   this guards against mistakes only.

use std::cell::Cell;
use std::io;
use std::marker::PhantomData;

use aquifer_sys::futex::Mutex;
use aquifer_sys::pkey::{Key, Rights};
use once_cell::race::OnceBox;

use crate::fork::PerProcess;

/// The key of the process; the error of its allocation otherwise.
static KEY: OnceBox<Result<WindowKey, Option<i32>>> = OnceBox::new();
/// Two threads would allocate two keys, and there are few. A child has a lock of its own.
static ALLOCATING: PerProcess<Mutex<()>> = PerProcess::new();

/// Takes the rights away from a thread that was started inside a window of another one.
pub fn give_up_inherited() {
    if let Some(Ok(key)) = KEY.get() {
        drop(key.open());
    }
}

thread_local! {
    /// Number of open windows of this thread.
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

/// The protection key of the process's guarded memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowKey(Key);

impl WindowKey {
    /// Returns the key of the process, allocated at the first call and kept.
    ///
    /// # Errors
    /// Those of [`Key::allocate`]: the CPU or the kernel does not support keys, or all are in use.
    pub fn of_process() -> io::Result<WindowKey> {
        let allocate =
            || Box::new(Key::allocate().map(WindowKey).map_err(|error| error.raw_os_error()));
        let made = match KEY.get() {
            Some(made) => made,
            None => {
                let _allocating = ALLOCATING.get().lock();
                KEY.get_or_init(allocate)
            }
        };
        made.map_err(|errno| match errno {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => io::ErrorKind::Unsupported.into(),
        })
    }

    /// The key to map guarded memory with.
    pub fn key(self) -> Key {
        self.0
    }

    /// Opens a window for the calling thread, until the result is dropped.
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

/// An open window of one thread. Windows can be nested and closed in any order: closing the last
/// one removes the rights.
///
/// ```
/// use aquifer_vm::window::WindowKey;
///
/// if let Ok(key) = WindowKey::of_process() {
///     let window = key.open();
///     // Stores to guarded memory work here, and only in this thread,
///     drop(window);
///     // and here they fault.
/// }
/// ```
///
/// It cannot be sent to another thread:
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
        // A thread started inside a window loses its rights when its own window closes, and one of
        // this library at once.
        std::thread::spawn(move || {
            assert_eq!(key.key().rights(), Rights::All);
            drop(key.open());
            assert_eq!(key.key().rights(), Rights::None);
        })
        .join()
        .unwrap();
        let (send, receive) = std::sync::mpsc::channel();
        let worker = crate::worker::Worker::new();
        worker.start_once(c"test", move || send.send(key.key().rights()).unwrap()).unwrap();
        assert_eq!(receive.recv().unwrap(), Rights::None);
        drop(inner);
        assert_eq!(rights(), Rights::None);
    }
}
