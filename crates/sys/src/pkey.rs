//! Protection keys: access rights to memory that each thread changes for itself without a system
//! call.
//!
//! A page carries one of 16 keys; a per-thread register (PKRU) holds for each key whether loads and
//! stores are allowed. The kernel honours it when system calls of the thread access memory, but not
//! for accesses made on the thread's behalf: `ptrace`, `process_vm_writev`, `/proc/…/mem`,
//! io_uring's threads.
//!
//! # Initial rights
//! | | loads and stores through a key |
//! |---|---|
//! | a thread that existed before the key was allocated | none: the kernel's initial PKRU |
//! | the thread that allocates it | none: requested here |
//! | a new thread | those of the thread that starts it, at that moment |
//! | a signal handler | none; the interrupted code's rights are restored afterwards |
//!
//! So memory with its own key can be accessed only where code has allowed it, and memory that any
//! thread may read must have no key.
//!
//! A freed key that pages still carry is reallocated with access to them: so keys that were handed
//! out are never freed here.

use std::io;

use crate::check;
use crate::memory::Protection;

/// `PKEY_DISABLE_ACCESS`: the calling thread's initial rights to a new key.
const DISABLE_ACCESS: libc::c_ulong = 1;

/// Checks that protection keys are supported and one is free.
///
/// # Errors
/// Those of [`Key::allocate`].
pub fn probe() -> io::Result<()> {
    let key = Key::allocate()?;
    // SAFETY: takes a number; no page carries the key.
    check(unsafe { libc::syscall(libc::SYS_pkey_free, key.0 as libc::c_int) }).map(drop)
}

/// A protection key of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u32);

/// The calling thread's rights to memory that has a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rights {
    /// Nothing.
    None,
    /// Loads and stores, if the mapping allows them.
    All,
}

impl Key {
    /// Allocates a key, to which the calling thread has no rights yet.
    ///
    /// # Errors
    /// `ENOSPC` or `EINVAL` where the CPU or the kernel has no keys, and `ENOSPC` where all are
    /// taken; [`io::ErrorKind::Unsupported`] on other architectures.
    pub fn allocate() -> io::Result<Key> {
        if !cfg!(target_arch = "x86_64") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: takes two numbers.
        let key = check(unsafe { libc::syscall(libc::SYS_pkey_alloc, 0, DISABLE_ACCESS) })?;
        Ok(Key(key as u32))
    }

    /// Gives a range this key, and changes the protection of the mapping.
    ///
    /// # Safety
    /// As for [`memory::protect`](crate::memory::protect); the key forbids accesses as well.
    pub unsafe fn protect(
        self,
        address: *mut u8,
        len_bytes: usize,
        protection: Protection,
    ) -> io::Result<()> {
        // SAFETY: forwarded to the caller.
        let result = unsafe {
            libc::syscall(
                libc::SYS_pkey_mprotect,
                address,
                len_bytes,
                protection.bits(),
                self.0 as libc::c_int,
            )
        };
        check(result).map(drop)
    }

    /// Changes the calling thread's rights to memory of this key. No load or store is reordered
    /// across it.
    #[inline]
    pub fn set_rights(self, rights: Rights) {
        let both = 0b11 << (2 * self.0);
        let others = register::read() & !both;
        register::write(match rights {
            Rights::None => others | both,
            Rights::All => others,
        });
    }

    /// Returns the calling thread's rights; `None` also if only loads are allowed.
    #[inline]
    pub fn rights(self) -> Rights {
        match register::read() >> (2 * self.0) & 0b11 {
            0 => Rights::All,
            _ => Rights::None,
        }
    }
}

/// The PKRU register. A [`Key`] exists, so the CPU has it.
#[cfg(target_arch = "x86_64")]
mod register {
    #[inline]
    pub fn read() -> u32 {
        let value: u32;
        // SAFETY: keys are supported, so the instruction is enabled; it reads a register and clears
        // edx.
        unsafe {
            std::arch::asm!("rdpkru", in("ecx") 0, out("eax") value, out("edx") _,
                options(nomem, nostack, preserves_flags));
        }
        value
    }

    #[inline]
    pub fn write(value: u32) {
        // SAFETY: as above. Without `nomem`: the compiler does not reorder memory accesses across
        // it, nor does the processor.
        unsafe {
            std::arch::asm!("wrpkru", in("eax") value, in("ecx") 0, in("edx") 0,
                options(nostack, preserves_flags));
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod register {
    pub fn read() -> u32 {
        unreachable!("a key exists only where there are keys")
    }

    pub fn write(_value: u32) {
        unreachable!("a key exists only where there are keys")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{self, SMALL_PAGE_BYTES};

    fn key() -> Option<Key> {
        let key = Key::allocate();
        if let Err(error) = &key {
            eprintln!("skipped: no protection keys here ({error})");
        }
        key.ok()
    }

    /// Returns whether the kernel may copy a byte from and to the page for this thread: it honours
    /// the rights, too, and fails instead of raising a signal.
    fn may_touch(page: *mut u8) -> bool {
        let (reading, writing) = std::io::pipe().unwrap();
        use std::os::fd::AsRawFd;
        // SAFETY: one byte of a page that stays mapped.
        let put = unsafe { libc::write(writing.as_raw_fd(), page.cast(), 1) };
        let put_errno = crate::errno();
        if put != 1 {
            assert_eq!(put_errno, libc::EFAULT);
            return false;
        }
        // SAFETY: as above.
        assert_eq!(unsafe { libc::read(reading.as_raw_fd(), page.cast(), 1) }, 1);
        true
    }

    #[test]
    fn each_thread_has_rights_of_its_own() {
        let (send, receive) = std::sync::mpsc::channel::<(usize, Key)>();
        let earlier = std::thread::spawn(move || {
            let (page, key) = receive.recv().ok()?;
            let before = may_touch(page as *mut u8);
            key.set_rights(Rights::All);
            Some((before, may_touch(page as *mut u8)))
        });
        let Some(key) = key() else { return };
        let page = memory::map_anonymous(SMALL_PAGE_BYTES).unwrap();
        // SAFETY: mapped just now.
        unsafe { key.protect(page, SMALL_PAGE_BYTES, Protection::ReadWrite) }.unwrap();
        assert_eq!((key.rights(), may_touch(page)), (Rights::None, false));
        key.set_rights(Rights::All);
        assert_eq!((key.rights(), may_touch(page)), (Rights::All, true));
        // SAFETY: inside the page.
        unsafe { page.write_volatile(7) };
        send.send((page as usize, key)).unwrap();
        assert_eq!(earlier.join().unwrap(), Some((false, true)), "a thread from before the key");
        let at = page as usize;
        let inherits = std::thread::spawn(move || may_touch(at as *mut u8)).join().unwrap();
        assert!(inherits, "a new thread has the rights of who starts it");
        key.set_rights(Rights::None);
        assert_eq!((key.rights(), may_touch(page)), (Rights::None, false));
        // SAFETY: mapped above, and not used after this.
        unsafe { memory::unmap(page, SMALL_PAGE_BYTES) }.unwrap();
    }

    #[test]
    fn keys_are_independent_of_each_other() {
        let Some(one) = key() else { return };
        let Some(other) = key() else { return };
        assert_ne!(one, other);
        one.set_rights(Rights::All);
        assert_eq!((one.rights(), other.rights()), (Rights::All, Rights::None));
        other.set_rights(Rights::All);
        one.set_rights(Rights::None);
        assert_eq!((one.rights(), other.rights()), (Rights::None, Rights::All));
        other.set_rights(Rights::None);
    }
}
