//! Reserving pages of a pool.

use super::Pool;
use crate::error::{PoolError, Result};
use crate::format::run::Run;
use crate::metadata::reservation::Reservation;
use crate::metadata::space::Space;
use crate::metadata::turn::Turn;

impl Pool {
    /// Reserves `pages` contiguous pages, the first a multiple of `align_pages`, to be written to.
    /// Their content is undefined.
    ///
    /// # Errors
    /// [`PoolError::Full`]; those of [`Pool::transact`].
    pub fn reserve(&self, pages: u64, align_pages: u64) -> Result<Reservation<'_>> {
        self.take_pages(|space| space.reserve_pages(pages, align_pages, false))
    }

    /// Reserves pages as [`Pool::reserve`] does, and makes sure that they are zero. That costs
    /// nothing as long as there are pages known to be zero
    /// ([`PoolInfo::zeroed_pages`](crate::PoolInfo::zeroed_pages)).
    ///
    /// # Errors
    /// [`PoolError::Full`], [`PoolError::Media`]; those of [`Pool::transact`].
    pub fn reserve_zeroed(&self, pages: u64, align_pages: u64) -> Result<Reservation<'_>> {
        let reservation = self.take_pages(|space| space.reserve_pages(pages, align_pages, true))?;
        self.zero_rest(&reservation)?;
        Ok(reservation)
    }

    /// Reserves the `pages` pages from `start_page` on, zeroed as by [`Pool::reserve_zeroed`];
    /// `None` if not all of them are free.
    ///
    /// # Errors
    /// [`PoolError::Media`]; those of [`Pool::transact`].
    pub fn reserve_zeroed_at(
        &self,
        start_page: u64,
        pages: u64,
    ) -> Result<Option<Reservation<'_>>> {
        let core = self.core();
        core.handle.check_may_change()?;
        let Some(reservation) = core.space.reserve_exactly(Run { start_page, pages })? else {
            return Ok(None);
        };
        core.use_fresh_pages(reservation.whole().end_page())?;
        self.zero_rest(&reservation)?;
        Ok(Some(reservation))
    }

    /// Reserves contiguous pages, at most `pages` of them and at least one: from `near_page` on if
    /// that is free, so that a file grows in place; else the longest piece available, aligned to 2
    /// MiB if that yields as many. With `must_be_zero` they are zero, and pages already known to be
    /// zero are preferred; otherwise their content is undefined. They can be written to before
    /// anything names them.
    ///
    /// # Errors
    /// As for [`Pool::reserve_zeroed`]; [`PoolError::Full`] if not one page is free.
    pub fn reserve_some(
        &self,
        pages: u64,
        near_page: Option<u64>,
        must_be_zero: bool,
    ) -> Result<Reservation<'_>> {
        let reservation =
            self.take_pages(|space| space.reserve_some(pages, near_page, must_be_zero))?;
        if must_be_zero {
            self.zero_rest(&reservation)?;
        }
        Ok(reservation)
    }

    /// Reserves pages already known to be zero, in one run and at most `pages` of them; `None` if
    /// no run is long enough for that many. Writes nothing.
    ///
    /// # Errors
    /// Those of [`Pool::transact`].
    pub fn reserve_ready(&self, pages: u64) -> Result<Option<Reservation<'_>>> {
        let core = self.core();
        core.handle.check_may_change()?;
        let Some(reservation) = core.space.reserve_ready(pages)? else {
            core.space.zero_soon();
            return Ok(None);
        };
        core.use_fresh_pages(reservation.whole().end_page())?;
        Ok(Some(reservation))
    }

    /// Waits for the turn to wait for the reservations of other calls: for a call that could not
    /// get as many at once as it needs. The caller must release its own reservations first.
    ///
    /// # Errors
    /// [`PoolError::ReadOnly`], [`PoolError::Failed`].
    pub fn take_turn(&self) -> Result<Turn<'_>> {
        self.core().space.take_turn()
    }

    fn take_pages<'a>(
        &'a self,
        reserve: impl Fn(&'a Space) -> Result<Reservation<'a>>,
    ) -> Result<Reservation<'a>> {
        let core = self.core();
        core.handle.check_may_change()?;
        let reservation = match reserve(&core.space) {
            // Freed pages may only be waiting for the tail, and free ones may be reserved for
            // zeroing.
            Err(PoolError::Full { .. }) => {
                core.checkpoint()?;
                core.space.without_zeroing(|| reserve(&core.space))
            }
            outcome => outcome,
        }?;
        core.use_fresh_pages(reservation.whole().end_page())?;
        Ok(reservation)
    }

    /// Zeroes the pages not known to be zero.
    fn zero_rest(&self, reservation: &Reservation<'_>) -> Result<()> {
        let space = &self.core().space;
        if !reservation.unzeroed.is_empty() {
            // The background thread should have zeroed these already.
            space.zero_soon();
        }
        reservation.unzeroed.iter().try_for_each(|run| space.zero(run.bytes()))
    }

    /// Zeroes free pages that are not known to be zero, at most `pages`, and returns how many.
    /// Background threads and other processes do the same: if one is zeroing, this returns early.
    ///
    /// # Errors
    /// [`PoolError::Media`], [`PoolError::Stalled`].
    #[cfg(feature = "mutants")]
    #[doc(hidden)]
    pub fn zero_free_pages(&self, pages: u64) -> Result<u64> {
        let mut zeroed = 0;
        while zeroed < pages {
            match self.core().space.zero_some(pages - zeroed)? {
                0 => break,
                more => zeroed += more,
            }
        }
        Ok(zeroed)
    }
}
