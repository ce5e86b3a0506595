//! The user backend: faults served in user space, exact budget, own policy.
//!
//! A fault arrives from the signal handler of the faulting thread, or, with a serving thread, as a message;
//! either way `serve` makes the page usable with the same `ensure` that every call uses. Where that fails a
//! bare access cannot be told why: the error is recorded and the fault goes on to the previous handler,
//! which by default ends the process with SIGBUS, as mmap does.

use aquifer_sys::signal::FaultContext;
use aquifer_vm::{FaultOwner, Served};

use crate::engine::BareFault;
use crate::ids::PageId;
use crate::mapped_memory::MappedMemory;
use crate::page_word::State;
use crate::stats::count;
use crate::store::{Access, Ensured, Store};

/// A device mapped by the user backend.
pub(crate) type UserStore = Store<MappedMemory>;

impl FaultOwner for UserStore {
    fn serve(&self, fault: &FaultContext) -> Served {
        // What userfaultfd leaves to us arrives as SIGBUS. SIGSEGV means that the access is not allowed at
        // all (a store to a read-only mapping, a jump into one), and repeating it would never end.
        if fault.signal == libc::SIGSEGV || !self.engine.mark.is_current() {
            return Served::No;
        }
        let offset = fault.address - self.memory.address(0) as usize;
        let page = (offset / self.geometry.page_bytes) as u64;
        if page >= self.geometry.pages() {
            return Served::No;
        }
        // Where the hardware does not tell, a fault on a page that is there can only be a store.
        let write = fault.write.unwrap_or_else(|| self.seen(page).state() == State::Clean);
        if write && !self.writable {
            return Served::No;
        }
        count(&self.engine.counters.signals, 1);
        let access = if write { Access::Write } else { Access::Read };
        match self.ensure(page, access, None, true) {
            Ok(Ensured::Came) => Served::Yes,
            Ok(Ensured::Present) => {
                count(&self.engine.counters.late_faults, 1);
                Served::Yes
            }
            Err(refused) => {
                self.engine.record_bare_fault(BareFault {
                    store: self.id,
                    page: PageId(page),
                    os_error: refused.os_error(),
                });
                Served::No
            }
        }
    }
}
