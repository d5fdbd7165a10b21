//! Element-wise f32 operators: functions of one number, of two under broadcasting, and the fused ones.
//!
//! Every element is computed by itself, so results never depend on shapes or threads. Operators on other types, and
//! the rare ones, are left to the interpreter of the graph crate.

mod binary;
mod broadcast;
mod unary;

pub use binary::{Binary, BinaryKernel, add_scaled, silu_mul};
pub use broadcast::{Broadcast, BroadcastError};
pub use unary::{Unary, UnaryKernel};
