//! Caches: a budget of memory that mappings and pages share.

use std::ffi::{c_char, c_int};

use aquifer::metrics::Metrics;
use aquifer::policy::PolicyKind;
use aquifer::{Cache, Stats};

use crate::call::{Failure, always, call};
use crate::memory::{Place, free, handle, usable, utf8};
use crate::process::give_string;
use crate::sized::{SizedPlace, sized};

/// A cache: owns a budget of memory; any number of devices share it.
pub struct aq_cache {
    pub(crate) cache: Cache,
}

/// The options of `aq_cache_new`. Initialise it with `AQ_CACHE_OPTIONS_INIT`; 0 and NULL are the
/// defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_cache_options {
    /// `sizeof(aq_cache_options)`.
    pub size: usize,
    /// Memory that the cache may use, in bytes; at least 6 MiB, more
    /// with larger pages. Default: a quarter of the machine's.
    pub budget_bytes: u64,
    /// The size of a page, a power of two from 4096 to 65536. Default: 4096.
    pub page_bytes: usize,
    /// The eviction policy: "clock", "loop-clock", "lru", "s3-fifo" or "sieve". Copied.
    pub policy: *const c_char,
    /// Threads that read and write in the background, at most 1024. Default: 2.
    pub io_threads: usize,
    /// A name under which `aquifer stat` shows the cache while the program runs. Copied.
    pub publish: *const c_char,
    /// Other than 0: faults are served by a thread of the library and not in a handler of SIGBUS, so that system
    /// calls may use user-backed memory that is not pinned. A miss takes longer, and the process needs
    /// CAP_SYS_PTRACE, or vm.unprivileged_userfaultfd=1.
    pub serving_thread: u64,
}
sized!(aq_cache_options {
    budget_bytes: u64,
    page_bytes: usize,
    policy: *const c_char,
    io_threads: usize,
    publish: *const c_char,
    serving_thread: u64,
});

/// Creates a cache; `*cache` is null if it fails. `options` may be null.
///
/// Threads: any. Errors: -EINVAL for a budget, page size or policy that does not exist, -E2BIG for an
/// option of a later version, -ENOMEM. Frees: the caller, by `aq_cache_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_cache_new(
    options: *const aq_cache_options,
    cache: *mut *mut aq_cache,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(cache, "cache") }?;
        // SAFETY: documented.
        let options = unsafe { crate::sized::options(options) }?;
        let mut builder = Cache::builder();
        if options.budget_bytes != 0 {
            builder = builder.budget_bytes(options.budget_bytes);
        }
        if options.page_bytes != 0 {
            builder = builder.page_bytes(options.page_bytes);
        }
        if options.io_threads > 1024 {
            return Err(Failure::invalid("`io_threads` is more than 1024"));
        }
        if options.io_threads != 0 {
            builder = builder.io_threads(options.io_threads);
        }
        if options.serving_thread != 0 {
            builder = builder.serving_thread(true);
        }
        // SAFETY: documented.
        if let Some(name) = unsafe { utf8(options.policy, "policy") }? {
            let kind: PolicyKind =
                name.parse().map_err(|unknown| Failure::invalid(format!("{unknown}")))?;
            builder = builder.policy(kind);
        }
        // SAFETY: documented.
        if let Some(name) = unsafe { utf8(options.publish, "publish") }? {
            builder = builder.publish(name);
        }
        place.give(aq_cache { cache: builder.build()? });
        Ok(())
    })
}

/// Frees a cache; null is fine. Mappings and pages made with it stay valid, and keep its memory until
/// the last one is freed.
///
/// Threads: none may be in a call with this handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_cache_free(cache: *mut aq_cache) {
    // SAFETY: documented.
    unsafe { free(cache) }
}

/// Changes the budget. Raising it takes effect at once; lowering it evicts in the background.
///
/// Threads: any. Errors: -EINVAL if the budget is below the minimum or above the machine's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_cache_resize(cache: *mut aq_cache, budget_bytes: u64) -> c_int {
    call(|| {
        // SAFETY: documented.
        let cache = unsafe { handle(cache, "cache") }?;
        Ok(cache.cache.resize(budget_bytes)?)
    })
}

/// Whether pages are still being evicted because the budget was lowered: 1 or 0; 0 if `cache` is null.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_cache_is_shrinking(cache: *mut aq_cache) -> c_int {
    // SAFETY: documented.
    let cache = unsafe { usable(cache) };
    always(0, || cache.is_some_and(|cache| cache.cache.is_shrinking()).into())
}

/// A cache's state and activity at one moment. Initialise it with `AQ_CACHE_STATS_INIT`. Counts are
/// since the cache was created.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct aq_cache_stats {
    /// `sizeof(aq_cache_stats)`.
    pub size: usize,
    /// Memory that the cache may use.
    pub budget_bytes: u64,
    /// Size of a page.
    pub page_bytes: u64,
    /// Pages that occupy budget now.
    pub resident_pages: u64,
    /// Pages not yet written back.
    pub dirty_pages: u64,
    /// Pages kept resident by kernel-backed mappings, as last measured.
    pub kernel_resident_pages: u64,
    /// Accesses that found their page absent and started to load it.
    pub misses: u64,
    /// Pages loaded by read-ahead and prefetch, not by a miss.
    pub prefetched: u64,
    /// Faults that made a clean page dirty.
    pub write_faults: u64,
    /// Loads that failed.
    pub load_errors: u64,
    /// Pages evicted.
    pub evictions: u64,
    /// Pages written back.
    pub written_pages: u64,
    /// Write-back transfers that failed.
    pub write_errors: u64,
    /// Syncs of devices.
    pub syncs: u64,
    /// Misses that had to wait for a free frame.
    pub stalls: u64,
    /// Faults served in a signal handler or by the serving thread, not in a call.
    pub signals: u64,
    /// Time from a miss to its page being usable, median, in nanoseconds.
    pub fault_p50_ns: u64,
    /// The same at 99 %.
    pub fault_p99_ns: u64,
}
sized!(aq_cache_stats {
    budget_bytes: u64,
    page_bytes: u64,
    resident_pages: u64,
    dirty_pages: u64,
    kernel_resident_pages: u64,
    misses: u64,
    prefetched: u64,
    write_faults: u64,
    load_errors: u64,
    evictions: u64,
    written_pages: u64,
    write_errors: u64,
    syncs: u64,
    stalls: u64,
    signals: u64,
    fault_p50_ns: u64,
    fault_p99_ns: u64,
});

impl From<&Stats> for aq_cache_stats {
    fn from(stats: &Stats) -> aq_cache_stats {
        aq_cache_stats {
            size: 0,
            budget_bytes: stats.budget_bytes,
            page_bytes: stats.page_bytes,
            resident_pages: stats.resident_pages,
            dirty_pages: stats.dirty_pages,
            kernel_resident_pages: stats.kernel_resident_pages,
            misses: stats.misses,
            prefetched: stats.prefetched,
            write_faults: stats.write_faults,
            load_errors: stats.load_errors,
            evictions: stats.evictions,
            written_pages: stats.written_pages,
            write_errors: stats.write_errors,
            syncs: stats.syncs,
            stalls: stats.stalls,
            signals: stats.signals,
            fault_p50_ns: stats.fault_service_ns.quantile(0.5),
            fault_p99_ns: stats.fault_service_ns.quantile(0.99),
        }
    }
}

/// Fills `stats`.
///
/// Threads: any. Errors: -EINVAL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_cache_get_stats(
    cache: *mut aq_cache,
    stats: *mut aq_cache_stats,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let (cache, place) = unsafe { (handle(cache, "cache")?, SizedPlace::new(stats, "stats")?) };
        place.put(&(&cache.cache.stats()).into());
        Ok(())
    })
}

/// The statistics of a cache as OpenMetrics text, as Prometheus scrapes it; `name` is the value of
/// the label `cache`, and may be null.
///
/// Threads: any. Errors: -EINVAL. Frees: the caller, by `aq_string_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_cache_metrics(
    cache: *mut aq_cache,
    name: *const c_char,
    text: *mut *mut c_char,
) -> c_int {
    call(|| {
        // SAFETY: documented.
        let place = unsafe { Place::of_handle(text, "text") }?;
        // SAFETY: documented.
        let (cache, name) = unsafe { (handle(cache, "cache")?, utf8(name, "name")?) };
        let mut metrics = Metrics::new();
        metrics.cache(&[("cache", name.unwrap_or_default())], &cache.cache.stats());
        place.put(give_string(metrics.to_string())?);
        Ok(())
    })
}
