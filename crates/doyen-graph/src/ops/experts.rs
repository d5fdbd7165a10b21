//! The scalar reference of an expert's feed-forward, shared by QMoE and MoE, and the token-axis rule of both.
//!
//! Weights come as rows of f64, whatever their format; a row is dequantized once for all tokens of its expert.

use super::activation::Activation;
use super::args::{floats, zeros};
use super::route::{Chosen, Routing};
use super::{OpError, Trace, Traced};
use doyen_tensor::{
    FloatView, Tensor,
    format::{MiniMatrix, QuantMatrix},
};

/// A weight matrix in any format, row by row.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rows<'a> {
    Quant(QuantMatrix<'a>),
    Mini(MiniMatrix<'a>),
    Float { rows: usize, cols: usize, values: FloatView<'a> },
}

/// One projection of one expert.
#[derive(Debug, Clone, Copy)]
pub(super) struct Linear<'a> {
    pub(super) rows: Rows<'a>,
    pub(super) bias: Option<FloatView<'a>>,
}

/// One expert.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expert<'a> {
    pub(super) fc1: Linear<'a>,
    pub(super) fc2: Linear<'a>,
    pub(super) fc3: Option<Linear<'a>>,
}

/// Row `n` of a quantized matrix as f64.
pub(super) fn dequantize_row(m: &QuantMatrix<'_>, n: usize, out: &mut [f64]) {
    let row = m.row(n);
    for (b, chunk) in out[..m.cols].chunks_mut(m.block).enumerate() {
        let (zp, scale) = (f64::from(m.zero_point(n, b)), f64::from(m.scale(n, b)));
        for (i, o) in chunk.iter_mut().enumerate() {
            *o = (f64::from(m.bits.code(row, b * m.block + i)) - zp) * scale;
        }
    }
}

/// `sum a * b`.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

impl Linear<'_> {
    fn shape(&self) -> (usize, usize) {
        match self.rows {
            Rows::Quant(m) => (m.rows, m.cols),
            Rows::Mini(m) => (m.rows, m.cols),
            Rows::Float { rows, cols, .. } => (rows, cols),
        }
    }

    /// `W x + b` for every `x` in `xs`, as one vector each.
    fn apply(&self, xs: &[&[f64]]) -> Result<Vec<Vec<f64>>, OpError> {
        let (rows, cols) = self.shape();
        let mut row = zeros(cols)?;
        let mut out = xs.iter().map(|_| zeros(rows)).collect::<Result<Vec<_>, _>>()?;
        for n in 0..rows {
            match self.rows {
                Rows::Quant(m) => dequantize_row(&m, n, &mut row),
                Rows::Mini(m) => m.dequantize_row(n, &mut row),
                Rows::Float { values, .. } => {
                    row.iter_mut().enumerate().for_each(|(c, o)| *o = f64::from(values.get(n * cols + c)));
                }
            }
            let bias = self.bias.map_or(0.0, |b| f64::from(b.get(n)));
            for (y, x) in out.iter_mut().zip(xs) {
                y[n] = dot(&row, x) + bias;
            }
        }
        Ok(out)
    }
}

impl Expert<'_> {
    fn apply(&self, xs: &[&[f64]], activation: Activation) -> Result<Vec<Vec<f64>>, OpError> {
        let h1 = self.fc1.apply(xs)?;
        let h3 = self.fc3.as_ref().map(|f| f.apply(xs)).transpose()?;
        let a: Vec<Vec<f64>> = h1
            .iter()
            .enumerate()
            .map(|(t, h)| activation.apply(h, h3.as_ref().map(|h3| h3[t].as_slice())))
            .collect();
        self.fc2.apply(&a.iter().map(Vec::as_slice).collect::<Vec<_>>())
    }
}

/// The routes of every token: `probs` and `given` are `[tokens, experts]`.
pub(super) fn routes(
    rule: &Routing,
    probs: &Tensor,
    given: Option<&Tensor>,
) -> Result<Vec<Vec<Chosen>>, OpError> {
    let experts = probs.shape().last().copied().unwrap_or(0).max(1);
    let logits = probs.to_f32()?;
    let given = given.map(Tensor::to_f32).transpose()?;
    Ok(logits
        .chunks(experts)
        .enumerate()
        .map(|(t, l)| rule.route(l, given.as_ref().map(|g| &g[t * experts..(t + 1) * experts])))
        .collect())
}

/// `out[t] = sum_j w_j * expert_j(x[t])`, in the type and shape of `x`.
pub(super) fn run<'a>(
    x: &Tensor,
    hidden: usize,
    routes: &[Vec<Chosen>],
    experts: usize,
    activation: Activation,
    expert: impl Fn(usize) -> Result<Expert<'a>, OpError>,
) -> Result<Tensor, OpError> {
    let values = floats("input", x)?;
    let mut out = zeros(values.len())?;
    let mut by_expert: Vec<Vec<(usize, f64)>> = vec![Vec::new(); experts];
    for (t, chosen) in routes.iter().enumerate() {
        for c in chosen {
            by_expert[c.expert].push((t, c.weight));
        }
    }
    for (e, tokens) in by_expert.iter().enumerate().filter(|(_, t)| !t.is_empty()) {
        let xs: Vec<&[f64]> = tokens.iter().map(|&(t, _)| &values[t * hidden..(t + 1) * hidden]).collect();
        for (y, &(t, w)) in expert(e)?.apply(&xs, activation)?.iter().zip(tokens) {
            for (o, v) in out[t * hidden..(t + 1) * hidden].iter_mut().zip(y) {
                *o += w * v;
            }
        }
    }
    Ok(Tensor::from_f64(x.dtype(), x.shape().clone(), &out)?)
}

/// Rows of `[.., hidden]` that one token owns when the axes before the token axis are 1: what makes row `r` of the
/// flattened input belong to token `r / rows`.
fn rows_per_token(t: &Traced<'_>) -> Option<usize> {
    let Trace::Tokens(a) = t.trace else { return None };
    let last = t.shape.len().checked_sub(1)?;
    let alone = a.axis < last && t.shape[..a.axis].iter().all(|&d| d == 1);
    alone.then(|| a.inner * t.shape[a.axis + 1..last].iter().product::<usize>())
}

/// The token-axis rule: input and router carry the tokens alike, weights do not carry them.
pub(super) fn trace(inputs: &[Option<Traced<'_>>], routers: &[usize]) -> Result<Vec<Trace>, String> {
    let per_token = |i: usize| inputs.get(i).and_then(Option::as_ref).map(|t| (t.trace, rows_per_token(t)));
    let Some((input, rows)) = per_token(0) else { return Err("it has no input".into()) };
    for (i, t) in inputs.iter().enumerate() {
        if i > 0 && !routers.contains(&i) && t.is_some_and(|t| t.trace != Trace::Absent) {
            return Err("its weights depend on the tokens".into());
        }
    }
    let routing: Vec<_> = routers.iter().filter_map(|&i| per_token(i)).collect();
    if input == Trace::Absent && routing.iter().all(|(t, _)| *t == Trace::Absent) {
        return Ok(vec![Trace::Absent]);
    }
    if rows.is_none() || routing.iter().any(|(_, r)| *r != rows) {
        return Err("its input and its router do not carry the tokens in the same rows".into());
    }
    Ok(vec![input])
}
