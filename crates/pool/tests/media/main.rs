//! Media over every form that this machine has: the same bytes come back, and what cannot be done is an error.

mod create;
mod durable;
mod forms;
mod model;
mod open;
