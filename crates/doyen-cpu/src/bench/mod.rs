//! Measuring kernels: random weights, a plain read loop as the floor, and samples of both taken in turn.
//!
//! A figure means something only beside what the machine could have done in the same moment. So every case is sampled between two
//! passes of a loop that does nothing but read, over the same pool, and reported as a share of its rate too; weights
//! come in enough copies that a call never finds those of an earlier one in a cache; routes are drawn anew for every call.
//!
//! * [`Subject`]: what is measured, with its sizes: [`MatMul`], [`ExpertLayer`], [`CachedAttention`]
//! * [`Plan`]: subjects, token counts and copies, with the bytes they take, before anything is allocated
//! * [`Suite`]: the same with its memory; [`Suite::measure`] gives a [`Report`]
//! * [`ReadLoop`]: the floor, for others who measure
//!
//! Used by the examples of this crate and by `doyen bench`. Not for tests: nothing here judges a result.

mod attention;
mod data;
mod experts;
mod linear;
mod plan;
mod read;
mod report;

pub use crate::kernel::attention::KvType;
pub use attention::CachedAttention;
pub use data::{Matrices, QuantFormat, Rng};
pub use experts::ExpertLayer;
pub use linear::{FloatMatMul, MatMul};
pub use plan::{BenchError, Env, Plan, Rounds, Suite};
pub use read::{ReadLoop, read};
pub use report::{CaseReport, Report, Spread};

/// What a case is called: names and values, in the order they are printed.
pub type Labels = Vec<(&'static str, String)>;

/// Something to measure, by its sizes alone.
pub trait Subject {
    /// Bytes of one copy of what calls read; `None` on overflow.
    fn bytes(&self) -> Option<usize>;

    /// The fewest bytes that a call reads of it.
    fn touched(&self, tokens: usize) -> usize;

    /// Bytes of activations and scratch for a call of `tokens` rows; `None` on overflow.
    ///
    /// # Errors
    /// Says what no kernel takes.
    fn call_bytes(&self, env: &Env<'_>, tokens: usize) -> Result<Option<usize>, BenchError>;

    /// Cases for each number of tokens, sharing `copies` copies.
    ///
    /// # Errors
    /// Says what no kernel takes.
    fn works<'a>(
        &self,
        env: &Env<'a>,
        rng: &mut Rng,
        copies: usize,
        tokens: &[usize],
    ) -> Result<Vec<Box<dyn Work + 'a>>, BenchError>;
}

/// A case: one subject at one number of tokens.
pub trait Work {
    /// What it is called.
    fn labels(&self) -> Labels;

    /// Multiply-adds of a call.
    fn macs(&self) -> f64;

    /// Draws what is to be new in call number `call`, outside of the time that counts. Returns the bytes it has to read.
    fn prepare(&mut self, call: usize) -> usize;

    /// The call.
    fn run(&mut self);
}
