//! Conversions as a whole: synthetic checkpoints, broken ones, and real ones against recorded outputs.

mod bad_input;
mod common;
mod families;
mod gguf;
mod gguf_faults;
mod goldens;
mod lowered;
mod packages;
mod packed;
mod wrappers;
