//! What the engine promises, on real models and the CPU.

mod batches;
#[path = "../common/mod.rs"]
mod common;
mod nan;
mod plan;
mod reference;
mod requests;
mod windows;
