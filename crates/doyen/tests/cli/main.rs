//! The binary as its users meet it: exit codes, what is on stdout, and the words on stderr.
//!
//! The careful user expects documented behaviour; the hostile one hands in broken files and closed pipes.

mod bench;
mod chat;
mod common;
mod convert_faults;
mod doctor;
#[cfg(unix)]
mod interrupts;
mod package_faults;
mod reports;
mod run;
#[cfg(unix)]
mod streams;
#[cfg(unix)]
mod terminal;
