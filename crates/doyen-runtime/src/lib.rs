//! From a lowered graph and a device to tokens: planning, paged KV, sampling, the engine.
//!
//! | module | what lives there |
//! |---|---|
//! | [`plan`] | the byte ledger and the arena, computed before anything large is allocated |
//! | [`kv`] | page pools and the block tables of sequences |
//! | [`sample`] | logits to a token |
//! | [`engine`] | the public API: load, submit, stream tokens |
//!
//! The runtime sees a device through the traits of `doyen_graph::device` and never names a backend. It deals in token
//! ids; text is the caller's (`doyen-text`).

#![forbid(unsafe_code)]

pub mod engine;
pub mod kv;
pub mod plan;
pub mod sample;

pub use engine::{Engine, EngineError, Event, FinishReason, Request, RequestId};
pub use plan::{Ledger, Plan, PlanError, PlanOptions};
pub use sample::{Sampler, SamplingParams};
