//! Rewrites of a graph between its file and a device, in the order they run.
//!
//! [`fold`] turns everything that depends on constants alone into constants, as views where bytes need not change;
//! [`dead`] drops what nothing reads; [`lower`] makes the stateful graph over ragged tokens. Called by the package
//! loader, the conformance kit and the converter's self-check.

pub mod dead;
pub mod fold;
pub mod lower;
