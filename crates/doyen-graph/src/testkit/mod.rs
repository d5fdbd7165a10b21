//! The conformance kit: runs folders of operator cases on any backend and judges the results.
//!
//! A [`case::Case`] is a folder in the layout of ONNX's backend tests, with or without a `case.json` that says what is
//! expected. A [`Runner`] is a backend; [`Reference`] is the interpreter. [`run`] loads and runs every case inside
//! `catch_unwind`, so that a panic is that case's failure, and returns a [`Report`].

mod case;
mod compare;
mod exceptions;
mod report;
mod runner;

pub use case::{Case, CaseFileError, DataSet, Expect, Source};
pub use compare::{Tolerance, compare};
pub use exceptions::{Exception, Exceptions};
pub use report::{Outcome, Report, Verdict};
pub use runner::{CaseError, Model, Reference, Runner, run, run_case};
