//! Media in every form that this machine has: the same bytes are read back, and impossible
//! operations give errors.

mod create;
mod durable;
mod forms;
mod model;
mod open;
