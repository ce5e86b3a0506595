//! How to use an existing object.

use std::fmt;

use aquifer_vm::dirty::TrackerForm;

/// How to use an existing object: with which key, and what an attachment for writing may take.
///
/// The methods of [`Objects`](crate::Objects) for an existing object use the defaults, and no key.
/// The methods of the same name here do the same with other options.
///
/// ```
/// # use aquifer_object::{CreateObject, ObjectOptions, Objects};
/// # use aquifer_pool::Pool;
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("pool");
/// # let pool = Pool::create(&path, 16 << 20)?;
/// # let objects = Objects::new(pool);
/// CreateObject::new().write_key("secret").create(&objects, "numbers", 1 << 20)?;
/// assert!(objects.attach_mut("numbers").is_err(), "without a key for reading only");
///
/// let with_key = ObjectOptions::new().key("secret");
/// with_key.attach_mut(&objects, "numbers")?.as_mut_slice()?[0] = 1;
/// with_key.destroy(&objects, "numbers")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Default)]
pub struct ObjectOptions<'a> {
    pub(crate) key: Option<&'a [u8]>,
    pub(crate) shadow_budget_bytes: Option<u64>,
    pub(crate) tracker: Option<TrackerForm>,
    pub(crate) records_stores: bool,
}

impl<'a> ObjectOptions<'a> {
    /// The defaults, which are those of the methods of [`Objects`](crate::Objects).
    pub fn new() -> ObjectOptions<'a> {
        ObjectOptions::default()
    }

    /// The object's key. The write key permits everything, the read key only attaching for reading.
    /// By default none is given.
    #[must_use]
    pub fn key(self, key: &'a (impl AsRef<[u8]> + ?Sized)) -> ObjectOptions<'a> {
        ObjectOptions { key: Some(key.as_ref()), ..self }
    }

    /// The budget, in bytes, for copies kept by an attachment for writing: private copies of pages
    /// stored to, and their content as of the last psync, which the next psync compares with. Clean
    /// copies beyond the budget are dropped. Stores between two psyncs are not bounded by it. By
    /// default a quarter of the machine's memory, or of the memory cgroup's limit.
    #[must_use]
    pub fn shadow_budget_bytes(self, budget_bytes: u64) -> ObjectOptions<'a> {
        ObjectOptions { shadow_budget_bytes: Some(budget_bytes), ..self }
    }

    /// Whether the heap of an object attached for writing, and the collections in it, record where
    /// they store. [`Attachment::psync`](crate::Attachment::psync) then commits these bytes, and
    /// neither looks for stores nor compares pages: for many small commits of a large heap. A store
    /// takes about 15 ns longer. Objects without a heap are not affected. By default off.
    ///
    /// All stores of safe code are recorded. A psync looks for stores as without this option
    /// * if it is the first one, or follows a psync in the middle of a scope or a failed one;
    /// * if more than about 48 KiB or 192 places were stored to, or lent mutably: iterating over a
    ///   [`PVec`](crate::collections::PVec) lends all of it, indexing one element;
    /// * from now and then, when committed pages reach
    ///   [`shadow_budget_bytes`](ObjectOptions::shadow_budget_bytes);
    /// * always, once unsafe code can store through raw pointers:
    ///   [`ObjectHeap::record_stores`](crate::heap::ObjectHeap::record_stores) says when;
    /// * in all forms but [`Attachment::psync`](crate::Attachment::psync), such as for several
    ///   objects or in the background.
    ///
    /// What is not seen: stores by unsafe code through pointers that it made from references and
    /// used after their scope, or computed from the object's address, and stores by other processes
    /// (a debugger). They become durable with a psync that looks for stores. Do not use the option
    /// with such code.
    ///
    /// ```
    /// # use aquifer_object::{CreateObject, ObjectOptions, Objects};
    /// # use aquifer_object::collections::PVec;
    /// # use aquifer_object::heap::HeapError;
    /// # use aquifer_pool::Pool;
    /// # let directory = tempfile::tempdir()?;
    /// # let objects = Objects::new(Pool::create(directory.path().join("pool"), 16 << 20)?);
    /// CreateObject::new().heap(true).create(&objects, "numbers", 8 << 20)?;
    /// let mut numbers = ObjectOptions::new().record_stores(true).attach_mut(&objects, "numbers")?;
    /// for number in 0..3u64 {
    ///     numbers.heap()?.enter(|scope| {
    ///         let all = scope.root_or_insert_with(1, |heap| Ok(PVec::new_in(heap)))?;
    ///         all.push(number)
    ///     })?;
    ///     numbers.psync()?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn record_stores(self, records_stores: bool) -> ObjectOptions<'a> {
        ObjectOptions { records_stores, ..self }
    }

    /// How an attachment for writing tracks stores; by default the better of the available methods.
    #[must_use]
    pub fn tracker(self, form: TrackerForm) -> ObjectOptions<'a> {
        ObjectOptions { tracker: Some(form), ..self }
    }
}

impl fmt::Debug for ObjectOptions<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("ObjectOptions")
            // Not the key itself, which does not belong into logs.
            .field("has_key", &self.key.is_some())
            .field("shadow_budget_bytes", &self.shadow_budget_bytes)
            .field("tracker", &self.tracker)
            .field("records_stores", &self.records_stores)
            .finish()
    }
}
