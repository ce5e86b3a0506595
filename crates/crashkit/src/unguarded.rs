//! The unsafe operations of pools and media, for tests.
//!
//! [`Media`] and [`Pool`] declare unsafe every operation that can change bytes under a lease or
//! inside an attached object. Tests of the pool itself, and of damaged or forged metadata, have
//! neither leases nor attached objects, so these wrappers can uphold that contract for the whole
//! test.

use aquifer_pool::media::{Media, MediaError};
use aquifer_pool::{Commit, CommitContent, Pool, PoolError, Reservation, Transaction};

/// Writes to media that no lease or attached object refers to.
pub trait UnguardedMedia: Media {
    /// [`Media::write_at`].
    ///
    /// # Errors
    /// The same.
    fn write_unguarded(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: see the module's documentation.
        unsafe { self.write_at(offset_bytes, bytes) }
    }

    /// [`Media::store_at`].
    ///
    /// # Errors
    /// The same.
    fn store_unguarded(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: see the module's documentation.
        unsafe { self.store_at(offset_bytes, bytes) }
    }

    /// [`Media::write_durable`].
    ///
    /// # Errors
    /// The same.
    fn write_durable_unguarded(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), MediaError> {
        // SAFETY: see the module's documentation.
        unsafe { self.write_durable(offset_bytes, bytes) }
    }
}

impl<M: Media + ?Sized> UnguardedMedia for M {}

/// Changes of a pool without leases and attached objects.
pub trait UnguardedPool {
    /// [`Pool::store`].
    ///
    /// # Errors
    /// The same.
    fn store_unguarded(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), PoolError>;

    /// [`Pool::capture`].
    ///
    /// # Errors
    /// The same.
    fn capture_unguarded(
        &self,
        content: &CommitContent<'_>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Commit, PoolError>;

    /// [`Pool::transact`].
    ///
    /// # Errors
    /// The same.
    fn transact_unguarded<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T, PoolError>,
    ) -> Result<T, PoolError>;

    /// [`Pool::change`].
    ///
    /// # Errors
    /// The same.
    fn change_unguarded<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        self.try_change_unguarded(reservations, change)
    }

    /// [`Pool::try_change`].
    ///
    /// # Errors
    /// The same.
    fn try_change_unguarded<'a, T, E: From<PoolError>>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T, E>,
    ) -> Result<T, E>;
}

impl UnguardedPool for Pool {
    fn store_unguarded(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), PoolError> {
        // SAFETY: see the module's documentation.
        unsafe { self.store(offset_bytes, bytes) }
    }

    fn capture_unguarded(
        &self,
        content: &CommitContent<'_>,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<Commit, PoolError> {
        // SAFETY: see the module's documentation.
        unsafe { self.capture(content, fill) }
    }

    fn transact_unguarded<'a, T>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T, PoolError>,
    ) -> Result<T, PoolError> {
        // SAFETY: see the module's documentation.
        unsafe { self.transact(reservations, change) }
    }

    fn try_change_unguarded<'a, T, E: From<PoolError>>(
        &'a self,
        reservations: Vec<Reservation<'a>>,
        change: impl FnMut(&mut Transaction<'a>) -> Result<T, E>,
    ) -> Result<T, E> {
        // SAFETY: see the module's documentation.
        unsafe { self.try_change(reservations, change) }
    }
}
