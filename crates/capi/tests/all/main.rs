//! Tests of the library as programs in C meet it: linked once for all of them.

mod examples;
mod install;
mod programs;
mod support;
mod symbols;
mod valgrind;
