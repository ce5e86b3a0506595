//! Attachments identified by address.
//!
//! For programs in the style of C, where `attach` returns a pointer, and `psync` and `detach` take
//! one. Any address inside the object identifies it.

use std::ptr::NonNull;
use std::sync::{Arc, MutexGuard, PoisonError};

use std::collections::BTreeMap;

use crate::access::Access;
use crate::attach::AttachOptions;
use crate::attachment::Attachment;
use crate::error::{ObjectError, Result};
use crate::objects::Objects;

/// The first byte of the object that contains an address.
fn start_of(raw: &BTreeMap<u64, Arc<Attachment>>, address: *const u8) -> Result<u64> {
    let address = address as u64;
    (raw.range(..=address).next_back())
        .filter(|(_, attachment)| attachment.attached.contains(address))
        .map(|(start, _)| *start)
        .ok_or(ObjectError::NotAttached { address })
}

impl Objects {
    fn raw(&self) -> Result<MutexGuard<'_, BTreeMap<u64, Arc<Attachment>>>> {
        // A thread that does not exist in a forked child may hold the lock.
        if self.shared.process.is_current() {
            Ok(self.raw.lock().unwrap_or_else(PoisonError::into_inner))
        } else {
            Err(ObjectError::Forked)
        }
    }

    fn attached_at(&self, address: *const u8) -> Result<Arc<Attachment>> {
        let raw = self.raw()?;
        Ok(raw[&start_of(&raw, address)?].clone())
    }

    /// Attaches an object like [`Objects::attach_with`], and returns its first byte. It stays
    /// attached until [`Objects::detach`] of its address, or until the last clone of these objects
    /// is dropped.
    ///
    /// # Errors
    /// As for [`Objects::attach`].
    pub fn attach_raw(
        &self,
        name: impl AsRef<[u8]>,
        access: Access,
        key: Option<&[u8]>,
        options: &AttachOptions,
    ) -> Result<NonNull<u8>> {
        let attachment = self.attach_with(name, access, key, options)?;
        let start = attachment.start();
        self.raw()?.insert(attachment.address(), Arc::new(attachment));
        Ok(start)
    }

    /// [`Attachment::psync`] of the object at an address.
    ///
    /// # Errors
    /// [`ObjectError::NotAttached`] if none was attached by [`Objects::attach_raw`] there; as for
    /// [`Attachment::psync`].
    ///
    /// # Safety
    /// No thread stores to the object during the call.
    pub unsafe fn psync_at(&self, address: *const u8) -> Result<()> {
        let attachment = self.attached_at(address)?;
        // SAFETY: forwarded to the caller.
        unsafe { attachment.psync_shared() }
    }

    /// Detaches the object at an address. The program must not use its memory any more.
    ///
    /// # Errors
    /// [`ObjectError::NotAttached`] if none was attached by [`Objects::attach_raw`] there, or it is
    /// already detached: nothing happens then. As for [`Attachment::detach`].
    pub fn detach(&self, address: *const u8) -> Result<()> {
        let attachment = {
            let mut raw = self.raw()?;
            let start = start_of(&raw, address)?;
            // If two threads race, the first detaches it, and the other gets `NotAttached`.
            raw.remove(&start).expect("it was found there")
        };
        attachment.attached.detach()
    }
}
