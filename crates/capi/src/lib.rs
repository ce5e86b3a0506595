//! The C interface of Aquifer: what `aquifer.h` declares.
//!
//! `aquifer.h` is made from these sources by cbindgen and committed; `.ci/capi` compares. The library
//! is linked by `link`, which exports the functions listed in `symbols/` and nothing else.
//!
//! # Conventions
//! * A function returns 0 or a negative number of `errno(3)`, unless it returns something that it
//!   always has. It runs inside `call::call`, where panics end and the text of an error is kept.
//! * A handle is a pointer to a box of one of our types, opaque in C (`memory`). It holds what it
//!   needs of other handles, so they are freed in any order; guards are the exception.
//! * A struct of options or statistics begins with its size, and grows at its end (`sized`). Zero
//!   is the default of each option.
//! * Constants are `int`s with the prefix `AQ_`: an enumeration of Rust must not have a value that it
//!   does not know.
//!
//! Safety: pointers are what the documentation of a function says, as everywhere in C. That is not
//! repeated at each function.
#![allow(non_camel_case_types, reason = "the names of C")]
#![allow(clippy::missing_safety_doc, reason = "see above")]

pub mod cache;
mod call;
pub mod custom_device;
pub mod device;
pub mod error;
pub mod file;
pub mod mapper;
pub mod mapping;
mod memory;
pub mod object;
pub mod pages;
pub mod path;
pub mod pool;
pub mod process;
pub mod range;
pub mod ready;
pub mod rows;
mod sized;
