//! The grouped feed-forward of a mixture of experts.
//!
//! ```text
//! h = W1[e] x + b1[e]     a = act(h)     y = W2[e] a + b2[e]     out[t] = sum_j weight[t,j] * y of expert[t,j]
//! ```
//!
//! Routes come from [`super::route`]; they are sorted by expert over the whole batch, so that the weights of an expert
//! are read once for all of its tokens. Phases, each a region of the pool:
//! 1. group the routes (caller alone) and prepare the activations, once per token;
//! 2. FC1, and FC3 where there is one, in chunks of rows, each chunk's activation function while it is in cache;
//! 3. prepare the results for FC2; 4. FC2 in chunks of rows; 5. add up the routes of each token in slot order.
//!
//! Chunks are taken by whoever is free. Every number is computed as [`super::linear`] does it for a token alone, so
//! neither the batch nor the threads change a bit of the output. Weights of routes count as given, negative or zero.
//!
//! # Use
//! [`Experts::new`] binds formats and activation when a step is made; the weights themselves come through [`Bank`] at
//! each call, as borrowed views. [`Experts::run`] needs [`Experts::scratch_len`] bytes and allocates nothing.

mod activation;
mod inner;
mod phases;
mod scratch;
#[cfg(test)]
mod tests;

pub use activation::{Activation, Gate};

use super::linear::{Format, Linear, Mode, Weights};
use crate::{detect::Isa, pool::Pool};
use doyen_tensor::{FloatView, TensorError};

/// A matrix of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Projection {
    /// Hidden to intermediate (gate, or gate and linear rows).
    Fc1,
    /// Intermediate to hidden.
    Fc2,
    /// Hidden to intermediate, linear rows; with [`Gate::Separate`] only.
    Fc3,
}

/// The weights of a layer's experts. Every expert of a projection has the format and the rows of the others.
pub trait Bank: Sync {
    /// The matrix of an expert.
    fn weights(&self, projection: Projection, expert: usize) -> Weights<'_>;
    /// The bias of an expert: one number a row.
    fn bias(&self, projection: Projection, expert: usize) -> Option<FloatView<'_>>;
}

/// Where tokens go: `[tokens, k]` experts and weights.
#[derive(Debug, Clone, Copy)]
pub struct Routes<'a> {
    /// Routes per token.
    pub k: usize,
    /// Expert of each route.
    pub experts: &'a [u32],
    /// Weight of each route.
    pub weights: &'a [f32],
}

/// Extents of a bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Number of experts.
    pub experts: usize,
    /// Hidden size: inputs of FC1, rows of FC2.
    pub hidden: usize,
    /// Intermediate size: inputs of FC2. FC1 has as many rows, or twice as many when gate and linear rows are fused.
    pub inter: usize,
}

/// Formats of a bank's projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Formats {
    /// Of FC1, over the hidden size.
    pub fc1: Format,
    /// Of FC2, over the intermediate size.
    pub fc2: Format,
    /// Of FC3, over the hidden size; with [`Gate::Separate`] only.
    pub fc3: Option<Format>,
}

/// A bank's products, bound to formats, activation and instruction set.
#[derive(Debug, Clone, Copy)]
pub struct Experts {
    shape: Shape,
    fc1: Linear,
    fc2: Linear,
    fc3: Option<Linear>,
    activation: Activation,
    gate: Gate,
    isa: Isa,
}

impl Experts {
    /// Binds a bank. [`Mode::Fast`] becomes [`Mode::Wide`].
    ///
    /// # Errors
    /// When a format is not over the columns that the shape demands, FC3 is there without a separate gate or the other
    /// way round, SwiGLU has no gate, an extent is 0, or the mode has two terms, of which experts cannot pick rows.
    pub fn new(
        shape: Shape,
        formats: Formats,
        activation: Activation,
        gate: Gate,
        mode: Mode,
        isa: Isa,
    ) -> Result<Self, TensorError> {
        let Shape { experts, hidden, inter } = shape;
        let mode = if mode == Mode::Fast { Mode::Wide } else { mode };
        let cols = |name: &str, expected: usize, format: Format| {
            if format.cols() == expected {
                Ok(Linear::new(format, mode, isa))
            } else {
                let found = format.cols();
                Err(TensorError::Format(format!(
                    "{name} of experts: expected {expected} columns, found {found}"
                )))
            }
        };
        if experts == 0 || hidden == 0 || inter == 0 || u32::try_from(experts).is_err() {
            return Err(TensorError::Format(format!("{experts} experts of {hidden} by {inter}")));
        }
        if mode == Mode::Fine {
            return Err(TensorError::Format(
                "experts: activations have one int8 term, two were asked for".into(),
            ));
        }
        if (gate == Gate::Separate) != formats.fc3.is_some() {
            return Err(TensorError::Format("experts: FC3 and a separate gate go together".into()));
        }
        if gate == Gate::None && matches!(activation, Activation::SwiGlu { .. }) {
            return Err(TensorError::Format("experts: SwiGLU needs gate and linear rows".into()));
        }
        Ok(Self {
            shape,
            fc1: cols("FC1", hidden, formats.fc1)?,
            fc2: cols("FC2", inter, formats.fc2)?,
            fc3: formats.fc3.map(|f| cols("FC3", hidden, f)).transpose()?,
            activation,
            gate,
            isa,
        })
    }

    /// Extents.
    pub const fn shape(&self) -> Shape {
        self.shape
    }

    /// The product of a projection.
    pub fn linear(&self, projection: Projection) -> Option<&Linear> {
        match projection {
            Projection::Fc1 => Some(&self.fc1),
            Projection::Fc2 => Some(&self.fc2),
            Projection::Fc3 => self.fc3.as_ref(),
        }
    }

    /// Rows that each matrix of a projection has.
    pub const fn rows(&self, projection: Projection) -> usize {
        match (projection, self.gate) {
            (Projection::Fc1, Gate::Interleaved | Gate::Concatenated) => 2 * self.shape.inter,
            (Projection::Fc1 | Projection::Fc3, _) => self.shape.inter,
            (Projection::Fc2, _) => self.shape.hidden,
        }
    }

    /// Checks every matrix and bias of a bank against what this was bound for; for the time a model is loaded.
    ///
    /// # Errors
    /// Names projection and expert.
    pub fn check(&self, bank: &dyn Bank) -> Result<(), TensorError> {
        for projection in [Projection::Fc1, Projection::Fc2, Projection::Fc3] {
            let Some(linear) = self.linear(projection) else { continue };
            let rows = self.rows(projection);
            for expert in 0..self.shape.experts {
                let at =
                    |what: String| TensorError::Format(format!("{projection:?} of expert {expert}: {what}"));
                let weights = bank.weights(projection, expert);
                linear.check(&weights).map_err(|e| at(e.to_string()))?;
                if weights.rows() != rows {
                    return Err(at(format!("expected {rows} rows, found {}", weights.rows())));
                }
                if let Some(found) = bank.bias(projection, expert).map(FloatView::len).filter(|&n| n != rows)
                {
                    return Err(at(format!("expected a bias of {rows} numbers, found {found}")));
                }
            }
        }
        Ok(())
    }

    /// Bytes of scratch for a batch of `tokens` with `k` routes each; `None` on overflow.
    pub fn scratch_len(&self, tokens: usize, k: usize) -> Option<usize> {
        phases::Plan::new(self, tokens, k)?.bytes()
    }

    /// `out[t] = sum_j weight[t, j] * expert[t, j](x[t])`; `x` and `out` are `[tokens, hidden]`.
    ///
    /// # Panics
    /// When a length does not fit, a route names no expert, or the bank fails [`Experts::check`].
    pub fn run(
        &self,
        pool: &Pool,
        bank: &dyn Bank,
        x: &[f32],
        routes: Routes<'_>,
        out: &mut [f32],
        scratch: &mut [u8],
    ) {
        let tokens = x.len() / self.shape.hidden;
        assert!(x.len() == tokens * self.shape.hidden && out.len() == x.len(), "tokens of the experts");
        let n = tokens.checked_mul(routes.k);
        assert!(n == Some(routes.experts.len()) && n == Some(routes.weights.len()), "routes of the experts");
        if n == Some(0) {
            return out.fill(0.0);
        }
        let plan = phases::Plan::new(self, tokens, routes.k)
            .filter(|p| p.bytes().is_some_and(|b| b <= scratch.len()));
        let Some(plan) = plan else { panic!("{} bytes of scratch for {tokens} tokens", scratch.len()) };
        plan.run(pool, bank, x, routes, out, scratch);
    }
}
