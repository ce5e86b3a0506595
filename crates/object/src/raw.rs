//! Attachments identified by address.
//!
//! For programs in the style of C, where `attach` returns a pointer, and `psync` and `detach` take
//! one. Any address inside the object identifies it.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, MutexGuard, PoisonError};

use crate::attachment::Attachment;
use crate::error::{ObjectError, Result};
use crate::objects::Objects;
use crate::options::ObjectOptions;

/// The first byte of the object that contains an address.
fn start_of(raw: &BTreeMap<u64, Arc<Attachment>>, address: *const u8) -> Result<u64> {
    let address = address as u64;
    (raw.range(..=address).next_back())
        .filter(|(_, attachment)| attachment.attached.object.contains(address))
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

    fn keep(&self, attachment: Attachment) -> Result<NonNull<u8>> {
        let start = attachment.start();
        self.raw()?.insert(attachment.address(), Arc::new(attachment));
        Ok(start)
    }

    /// [`Attachment::psync`] of the object at an address.
    ///
    /// # Errors
    /// [`ObjectError::NotAttached`] if none was attached by [`ObjectOptions::attach_raw`] or
    /// [`ObjectOptions::attach_raw_mut`] there; as for [`Attachment::psync`].
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
    /// [`ObjectError::NotAttached`] if none was attached by [`ObjectOptions::attach_raw`] or
    /// [`ObjectOptions::attach_raw_mut`] there, or it is already detached: nothing happens then. As
    /// for [`Attachment::detach`].
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

impl ObjectOptions<'_> {
    /// Attaches an object like [`Objects::attach`], and returns its first byte. It stays attached
    /// until [`Objects::detach`] of its address, or until the last clone of these objects is
    /// dropped.
    ///
    /// # Errors
    /// As for [`Objects::attach`].
    pub fn attach_raw(&self, objects: &Objects, name: impl AsRef<[u8]>) -> Result<NonNull<u8>> {
        objects.keep(self.attach(objects, name)?)
    }

    /// Attaches an object like [`Objects::attach_mut`], and returns its first byte. It stays
    /// attached as with [`ObjectOptions::attach_raw`].
    ///
    /// # Errors
    /// As for [`Objects::attach_mut`].
    pub fn attach_raw_mut(&self, objects: &Objects, name: impl AsRef<[u8]>) -> Result<NonNull<u8>> {
        objects.keep(self.attach_mut(objects, name)?)
    }
}
