//! Products with quantized and with float weights.

use super::{BenchError, Env, Labels, Matrices, QuantFormat, Rng, Subject, Work, data::memory};
use crate::{
    kernel::linear::{FloatMatrix, Format, Linear, Mode, Orientation, Output, Weights},
    pool::Pool,
    session::Memory,
};
use doyen_tensor::{FloatType, FloatView};
use std::sync::Arc;

/// `y = x W^T` with a quantized `W [rows, cols]`, as MatMulNBits computes it.
#[derive(Debug, Clone, Copy)]
pub struct MatMul {
    /// Output rows N.
    pub rows: usize,
    /// Input columns K.
    pub cols: usize,
    /// How the weight is stored.
    pub format: QuantFormat,
}

/// The same with float weights.
#[derive(Debug, Clone, Copy)]
pub struct FloatMatMul {
    /// Output rows N.
    pub rows: usize,
    /// Input columns K.
    pub cols: usize,
    /// Stored type.
    pub ty: FloatType,
    /// Which axis is contiguous.
    pub orientation: Orientation,
}

/// Copies of a weight.
trait Copies {
    fn get(&self, i: usize) -> Weights<'_>;
    fn labels(&self) -> Labels;
}

struct Quantized {
    matrices: Matrices,
    shape: (usize, usize),
    format: QuantFormat,
}

impl Copies for Quantized {
    fn get(&self, i: usize) -> Weights<'_> {
        Weights::Int(self.matrices.get(i))
    }

    fn labels(&self) -> Labels {
        let mut labels = vec![("n", self.shape.0.to_string()), ("k", self.shape.1.to_string())];
        labels.push(("bits", self.format.bits.get().to_string()));
        labels.extend(self.format.labels());
        labels
    }
}

struct Floats {
    shape: FloatMatMul,
    bytes: Memory,
}

impl Copies for Floats {
    fn get(&self, i: usize) -> Weights<'_> {
        let FloatMatMul { rows, cols, ty, orientation } = self.shape;
        let n = rows * cols;
        let values = FloatView::new(ty, &self.bytes).expect("whole numbers").slice(i * n, n);
        let stride = if orientation == Orientation::RowMajor { cols } else { rows };
        Weights::Float(FloatMatrix { rows, cols, orientation, stride, values })
    }

    fn labels(&self) -> Labels {
        let FloatMatMul { rows, cols, ty, orientation } = self.shape;
        let order = if orientation == Orientation::RowMajor { "rows" } else { "columns" };
        vec![
            ("n", rows.to_string()),
            ("k", cols.to_string()),
            ("type", ty.dtype().to_string()),
            ("contiguous", order.to_owned()),
        ]
    }
}

impl MatMul {
    /// Refuses sizes of 0.
    fn check(&self) -> Result<(), BenchError> {
        [("rows", self.rows), ("columns", self.cols), ("block", self.format.block)]
            .into_iter()
            .find(|(_, n)| *n == 0)
            .map_or(Ok(()), |(what, _)| Err(BenchError::Zero(what)))
    }

    fn linear(&self, env: &Env<'_>) -> Linear {
        let QuantFormat { bits, block, .. } = self.format;
        Linear::new(Format::Int { bits, block: block.min(self.cols), cols: self.cols }, env.mode, env.isa)
    }
}

impl Subject for MatMul {
    fn bytes(&self) -> Option<usize> {
        self.format.bytes(self.rows, self.cols)
    }

    fn touched(&self, _tokens: usize) -> usize {
        self.bytes().unwrap_or(usize::MAX)
    }

    fn call_bytes(&self, env: &Env<'_>, tokens: usize) -> Result<Option<usize>, BenchError> {
        self.check()?;
        Ok(call_bytes(&self.linear(env), self.rows, tokens))
    }

    fn works<'a>(
        &self,
        env: &Env<'a>,
        rng: &mut Rng,
        copies: usize,
        tokens: &[usize],
    ) -> Result<Vec<Box<dyn Work + 'a>>, BenchError> {
        self.check()?;
        let shape = (self.rows, self.cols);
        let matrices = Matrices::random(rng, copies, shape, self.format)?;
        let weights: Arc<dyn Copies> = Arc::new(Quantized { matrices, shape, format: self.format });
        works(env, rng, self.linear(env), &weights, copies, tokens)
    }
}

impl Subject for FloatMatMul {
    fn bytes(&self) -> Option<usize> {
        self.rows.checked_mul(self.cols)?.checked_mul(self.ty.size())
    }

    fn touched(&self, _tokens: usize) -> usize {
        self.bytes().unwrap_or(usize::MAX)
    }

    fn call_bytes(&self, env: &Env<'_>, tokens: usize) -> Result<Option<usize>, BenchError> {
        if self.rows == 0 || self.cols == 0 {
            return Err(BenchError::Zero("rows and columns"));
        }
        Ok(call_bytes(&self.linear(env), self.rows, tokens))
    }

    fn works<'a>(
        &self,
        env: &Env<'a>,
        rng: &mut Rng,
        copies: usize,
        tokens: &[usize],
    ) -> Result<Vec<Box<dyn Work + 'a>>, BenchError> {
        let mut bytes = memory(copies * self.rows * self.cols * self.ty.size(), "weights")?;
        rng.fill_stored(self.ty, 1.0, &mut bytes);
        let weights: Arc<dyn Copies> = Arc::new(Floats { shape: *self, bytes });
        works(env, rng, self.linear(env), &weights, copies, tokens)
    }
}

impl FloatMatMul {
    fn linear(&self, env: &Env<'_>) -> Linear {
        let Self { cols, ty, orientation, .. } = *self;
        Linear::new(Format::Float { ty, orientation, cols }, env.mode, env.isa)
    }
}

fn call_bytes(linear: &Linear, rows: usize, tokens: usize) -> Option<usize> {
    let values = rows.checked_add(linear.format().cols())?.checked_mul(tokens)?;
    values.checked_mul(size_of::<f32>())?.checked_add(linear.scratch_len(tokens)?)
}

fn works<'a>(
    env: &Env<'a>,
    rng: &mut Rng,
    linear: Linear,
    weights: &Arc<dyn Copies>,
    copies: usize,
    tokens: &[usize],
) -> Result<Vec<Box<dyn Work + 'a>>, BenchError> {
    let rows = weights.get(0).rows();
    let work = |&tokens: &usize| -> Result<Box<dyn Work + 'a>, BenchError> {
        let scratch = linear.scratch_len(tokens).ok_or(BenchError::Overflow("the scratch of a product"))?;
        Ok(Box::new(Product {
            pool: env.pool,
            linear,
            mode: env.mode,
            weights: Arc::clone(weights),
            copies,
            copy: 0,
            tokens,
            x: rng.floats(tokens * linear.format().cols()),
            y: vec![0.0; tokens * rows],
            scratch: memory(scratch, "scratch")?,
        }))
    };
    tokens.iter().map(work).collect()
}

struct Product<'a> {
    pool: &'a Pool,
    linear: Linear,
    mode: Mode,
    weights: Arc<dyn Copies>,
    copies: usize,
    copy: usize,
    tokens: usize,
    x: Vec<f32>,
    y: Vec<f32>,
    scratch: Memory,
}

impl Work for Product<'_> {
    fn labels(&self) -> Labels {
        let mut labels = vec![("m", self.tokens.to_string())];
        labels.extend(self.weights.labels());
        labels.push(("numerics", numerics(self.mode)));
        labels.push(("kernel", self.linear.kernel().to_string()));
        labels
    }

    fn macs(&self) -> f64 {
        let weights = self.weights.get(0);
        self.tokens as f64 * weights.rows() as f64 * weights.cols() as f64
    }

    fn prepare(&mut self, call: usize) -> usize {
        self.copy = call % self.copies;
        self.weights.get(self.copy).bytes()
    }

    fn run(&mut self) {
        let weights = self.weights.get(self.copy);
        let mut y = Output::new(&mut self.y, self.tokens, weights.rows());
        self.linear.run(self.pool, &weights, &self.x, None, &mut y, &mut self.scratch);
    }
}

/// The name of a mode.
pub(super) fn numerics(mode: Mode) -> String {
    match mode {
        Mode::Exact => "exact",
        Mode::Fast | Mode::Wide => "fast",
        Mode::Fine => "fine",
    }
    .to_owned()
}
