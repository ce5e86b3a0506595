//! Structs that begin with their size, so that programs and libraries of different versions
//! understand each other, as with `openat2(2)`: what a program does not know is zero for the
//! library, and what the library does not know has to be zero.

use std::mem::MaybeUninit;

use crate::call::{Failure, Result};
use crate::memory::Place;

/// A struct of C that begins with its size.
///
/// # Safety
/// `#[repr(C)]`, the first field is `size: usize`, all fields are integers, floating-point numbers
/// or nullable pointers, and there is no padding.
pub(crate) unsafe trait Sized: Copy {}

/// Implements [`Sized`]; the fields are listed so that padding is found when it is compiled.
macro_rules! sized {
    ($name:ty { $($field:ident: $type:ty),* $(,)? }) => {
        // SAFETY: the fields are those listed: they have the size of the whole, and plain types.
        unsafe impl $crate::sized::Sized for $name {}
        const _: () = {
            assert!(std::mem::offset_of!($name, size) == 0);
            assert!(size_of::<$name>() == size_of::<usize>() $(+ size_of::<$type>())*);
            $(let _ = std::mem::offset_of!($name, $field);)*
        };
    };
}
pub(crate) use sized;

/// The options at `pointer`; the defaults if it is null.
///
/// # Safety
/// Null, or a `T` of some version of this library with its size in its first field.
pub(crate) unsafe fn options<T: Sized>(pointer: *const T) -> Result<T> {
    let mut known = MaybeUninit::<T>::zeroed();
    if pointer.is_null() {
        // SAFETY: zeros are a value of each field.
        return Ok(unsafe { known.assume_init() });
    }
    // SAFETY: guaranteed by the caller.
    let size = unsafe { pointer.cast::<usize>().read_unaligned() };
    check(size)?;
    // SAFETY: guaranteed by the caller: `size` bytes are there.
    let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), size) };
    let common = size.min(size_of::<T>());
    if bytes[common..].iter().any(|&byte| byte != 0) {
        let text = "an option is set that this version of the library does not know";
        return Err(Failure::new(libc::E2BIG, aquifer::ErrorKind::Unsupported, text));
    }
    // SAFETY: both are at least that long; any bytes are a value of each field.
    unsafe { bytes.as_ptr().copy_to_nonoverlapping(known.as_mut_ptr().cast(), common) };
    // SAFETY: zeros, and fields that the program set.
    Ok(unsafe { known.assume_init() })
}

/// Where a function puts a struct that begins with its size, which its caller has set.
pub(crate) struct SizedPlace<T> {
    pointer: *mut u8,
    size: usize,
    _type: std::marker::PhantomData<T>,
}

impl<T: Sized> SizedPlace<T> {
    /// # Safety
    /// Null, or writable until the function returns for as many bytes as its first field says.
    pub unsafe fn new(pointer: *mut T, name: &str) -> Result<SizedPlace<T>> {
        // SAFETY: guaranteed by the caller.
        unsafe { Place::new(pointer, name) }?;
        // SAFETY: guaranteed by the caller.
        let size = unsafe { pointer.cast::<usize>().read_unaligned() };
        check(size)?;
        Ok(SizedPlace { pointer: pointer.cast(), size, _type: std::marker::PhantomData })
    }

    /// Puts what the caller has room for; its size stays, and fields that this library does not
    /// have are zero.
    pub fn put(self, value: &T) {
        let (start, common) = (size_of::<usize>(), self.size.min(size_of::<T>()));
        // SAFETY: `T` has no padding, and is that long.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const *value).cast::<u8>(), common) };
        // SAFETY: `new`: the caller's struct has `size` bytes.
        let target = unsafe { std::slice::from_raw_parts_mut(self.pointer, self.size) };
        target[start..common].copy_from_slice(&bytes[start..]);
        target[common..].fill(0);
    }
}

fn check(size: usize) -> Result {
    if (size_of::<usize>()..=4096).contains(&size) {
        return Ok(());
    }
    Err(Failure::invalid(format!(
        "a struct has {size} as its size: initialise it with its macro, AQ_…_INIT"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Now {
        size: usize,
        first: u64,
        second: u64,
    }
    sized!(Now { first: u64, second: u64 });

    fn of(words: &[u64]) -> std::result::Result<Now, i32> {
        // SAFETY: the words are the struct, of another version.
        unsafe { options(words.as_ptr().cast::<Now>()) }.map_err(|failure| failure.errno)
    }

    #[test]
    fn options_of_other_versions() {
        assert_eq!(of(&[24, 1, 2]), Ok(Now { size: 24, first: 1, second: 2 }));
        assert_eq!(of(&[16, 1]), Ok(Now { size: 16, first: 1, second: 0 }), "older");
        assert_eq!(of(&[32, 1, 2, 0]), Ok(Now { size: 32, first: 1, second: 2 }), "newer");
        assert_eq!(of(&[32, 1, 2, 3]), Err(libc::E2BIG), "newer, and asks for more");
        assert_eq!(of(&[0, 1, 2]), Err(libc::EINVAL), "not initialised");
        // SAFETY: null.
        let defaults = unsafe { options(std::ptr::null::<Now>()) }.ok();
        assert_eq!(defaults, Some(Now { size: 0, first: 0, second: 0 }));
    }

    #[test]
    fn results_of_other_versions() {
        for (size, expected) in [(16_u64, [16, 1, 9, 9]), (24, [24, 1, 2, 9]), (32, [32, 1, 2, 0])]
        {
            let mut words = [size, 9, 9, 9];
            // SAFETY: the words are the struct, of another version.
            let place = unsafe { SizedPlace::new(words.as_mut_ptr().cast::<Now>(), "now") };
            place.ok().unwrap().put(&Now { size: 0, first: 1, second: 2 });
            assert_eq!(words, expected);
        }
    }
}
