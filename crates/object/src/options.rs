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
            .finish()
    }
}
