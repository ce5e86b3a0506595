//! The faults of a cache with serving threads: read from the userfaultfd, and answered.
//!
//! ```text
//!  userfaultfd ──► reader ──► present, or to be unprotected: answered at once
//!                    │
//!                    └──► queue ──► servers ──► loaded, or poisoned
//!                           ▲          │ no frame can be freed
//!                           └─ stalled ◄
//! ```
//!
//! One thread, the *reader*, waits for nothing but the next fault: neither for a page, a frame nor a device. So a thread that
//! stores to a page which is there goes on whatever the others wait for. *Servers* call devices; while all of them are busy
//! the reader starts further ones, up to [`MOST_SERVERS`]. A fault for which no frame can be freed does not keep its server:
//! it is put aside until there is one, or another thread has
//! brought its page.
//!
//! A thread that faults may hold what a server needs, except where it is itself inside of a call of the cache's device:
//! then its page could need the frames, or the server, that wait for that device. Such a device is refused
//! ([`Callers`](crate::engine::duties::Callers)): its loads fail from then on. The fault that tells is still answered, by a server beyond
//! the bound if need be, so that its call of the device ends.
//!
//! Every message is answered by a wake of its page, after the page is usable and the reference to its store is given back: the
//! thread that goes on may drop the mapping.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_sys::futex::Mutex;
use aquifer_sys::uffd::FaultMessage;
use aquifer_vm::worker::{Bell, Worker};

use crate::engine::{Answer, Cleaning, Engine};
use crate::error::{CacheError, Result};
use crate::frames::BATCH;
use crate::running::{FatalPanic, Running};
use crate::stats::count;

/// The number of servers that wait for devices at a time, at most.
const MOST_SERVERS: usize = 64;
/// How long the reader waits for a fault before it checks whether the cache stops.
const IDLE_MS: i32 = 100;
/// How long a fault that failed leaves its mark, at least.
const FAILED: Duration = Duration::from_millis(50);
/// How often it looks at stalled faults.
const STALLED: Duration = Duration::from_millis(STALLED_MS as u64);
const STALLED_MS: i32 = 20;

/// The faults that servers answer.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<FaultMessage>,
    /// Faults for which no frame could be freed.
    stalled: Vec<FaultMessage>,
    /// Addresses of faults that failed, and when.
    failed: Vec<(Instant, usize)>,
    /// Servers that were started, and those that are answering a fault.
    started: usize,
    busy: usize,
}

/// The reader and the servers of a cache. See the module documentation.
pub(crate) struct Serving {
    engine: Arc<Engine>,
    queue: Mutex<Queue>,
    posted: Bell,
    servers: Worker,
}

impl Serving {
    /// Starts the reader and a first server, which end when the cache stops.
    pub fn start(running: &Running) -> Result<()> {
        let engine = running.engine.clone();
        if !engine.uffd()?.can_poison() {
            return Err(CacheError::Kernel {
                what: "serving faults in a thread (needs UFFDIO_POISON, Linux 6.6)",
                source: std::io::Error::from_raw_os_error(libc::EOPNOTSUPP),
            });
        }
        let serving = Arc::new(Serving {
            engine,
            queue: Mutex::default(),
            posted: Bell::new(),
            servers: Worker::new(),
        });
        serving.start_server().map_err(Running::no_thread)?;
        let own = serving.clone();
        running.spawn(c"aquifer-fault", move |_| own.read()).inspect_err(|_| serving.end())
    }

    fn start_server(self: &Arc<Self>) -> std::io::Result<()> {
        let own = self.clone();
        self.servers.start(c"aquifer-serve", move || {
            let _fatal = FatalPanic(c"aquifer-serve");
            own.serve();
        })?;
        self.queue.lock().started += 1;
        Ok(())
    }

    fn end(&self) {
        self.posted.stop();
        self.servers.join();
    }

    /// The loop of the reader, which alone starts servers.
    fn read(self: &Arc<Self>) {
        let uffd = self.engine.uffd_if_open().expect("opened before this thread");
        let mut looked = Instant::now();
        while !self.engine.is_stopping() {
            let is_stalled = !self.queue.lock().stalled.is_empty();
            if let Ok(Some(fault)) = uffd.next_fault(if is_stalled { STALLED_MS } else { IDLE_MS })
            {
                self.take(fault);
            }
            if is_stalled && looked.elapsed() >= STALLED {
                self.look_at_stalled();
                looked = Instant::now();
            }
            self.let_failed_try_again();
        }
        self.end();
    }

    /// Takes away the marks that faults have left which failed a while ago: system calls would fail there until the page is
    /// loaded. A thread that has not met its mark yet faults again.
    fn let_failed_try_again(&self) {
        let mut queue = self.queue.lock();
        let old = queue.failed.partition_point(|(since, _)| since.elapsed() >= FAILED);
        let old: Vec<_> = queue.failed.drain(..old).collect();
        drop(queue);
        for (_, address) in old {
            if let Some(store) = self.engine.store_at(address)
                && !store.try_again(address)
            {
                self.queue.lock().failed.push((Instant::now(), address));
            }
        }
    }

    /// Answers the stalled faults whose pages other threads have brought, and queues the others again if there are frames.
    fn look_at_stalled(&self) {
        // Clean pages, at no cost but that; the evictor writes the others back.
        self.engine.evict(&self.engine.mapped, BATCH, Cleaning::No);
        self.engine.wake_evictor();
        let mut stalled = std::mem::take(&mut self.queue.lock().stalled);
        stalled.retain(|fault| !self.answer(fault, false));
        let mut queue = self.queue.lock();
        if self.engine.mapped.free() > 0 {
            queue.waiting.extend(stalled);
        } else {
            queue.stalled.extend(stalled);
        }
        drop(queue);
        self.posted.ring_all();
    }

    /// Answers a fault, or queues it.
    fn take(self: &Arc<Self>, fault: FaultMessage) {
        count(&self.engine.counters.signals, 1);
        let is_inside = self.engine.callers.as_ref().is_some_and(|all| all.refuse(fault.thread));
        if self.answer(&fault, false) {
            return;
        }
        let mut queue = self.queue.lock();
        if is_inside {
            queue.waiting.push_front(fault);
        } else {
            queue.waiting.push_back(fault);
        }
        let is_short = queue.busy + queue.waiting.len() > queue.started;
        let may_start = is_inside || queue.started < MOST_SERVERS;
        drop(queue);
        self.posted.ring();
        if is_short && may_start {
            // If the system refuses another thread, those that there are serve one fault after the other.
            let _ = self.start_server();
        }
    }

    /// The loop of a server.
    fn serve(&self) {
        loop {
            let ticket = self.posted.ticket();
            let mut queue = self.queue.lock();
            let Some(fault) = queue.waiting.pop_front() else {
                drop(queue);
                if ticket.is_stopped() {
                    return;
                }
                self.posted.sleep(ticket, None);
                continue;
            };
            queue.busy += 1;
            drop(queue);
            let is_answered = self.answer(&fault, true);
            let mut queue = self.queue.lock();
            queue.busy -= 1;
            if !is_answered {
                queue.stalled.push(fault);
            }
        }
    }

    /// Answers a fault, unless that takes a wait and `may_wait` is not set, or no frame can be freed. Returns whether it did.
    fn answer(&self, fault: &FaultMessage, may_wait: bool) -> bool {
        let engine = &self.engine;
        // The thread that faulted may have been interrupted and have dropped the mapping: then there is no store.
        let store = engine.store_at(fault.address);
        let answer = store.map_or(Answer::Served, |store| store.answer(fault, may_wait));
        if answer == Answer::Failed {
            self.queue.lock().failed.push((Instant::now(), fault.address));
        }
        if answer != Answer::Waits {
            // Last, without the store: the thread may drop the mapping as soon as it is awake.
            let page = fault.address & !(engine.options.page_bytes - 1);
            let uffd = engine.uffd_if_open().expect("a fault was read from it");
            let _ = uffd.wake(page as *mut u8, engine.options.page_bytes);
        }
        answer != Answer::Waits
    }
}
