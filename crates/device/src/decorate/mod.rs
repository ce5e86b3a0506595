//! Decorators: devices around a device.
//!
//! They wrap anything that implements [`Device`], an `Arc<dyn Device>` included, and pass
//! everything through, including batches at full depth. Only [`Device::dax`] and
//! [`Device::page_cache_file`] are hidden: accesses through a mapping of those bytes would bypass
//! the decorator.
//!
//! [`Device`]: crate::Device
//! [`Device::dax`]: crate::Device::dax
//! [`Device::page_cache_file`]: crate::Device::page_cache_file

mod counting;
mod faulty;
mod intercept;
mod throttled;

pub use counting::{CountSnapshot, Counters, Counting};
pub use faulty::{Fault, FaultControl, FaultRule, FaultTarget, Faulty, RuleId, Trigger};
pub use throttled::{Rate, Throttled};
