//! `com.microsoft::SkipSimplifiedLayerNormalization` and `SkipLayerNormalization` (operator contract, section 3.4):
//! adds the residual stream, then normalises the sum.

use super::args::{ACTIVATIONS, Want, back, expect, expect_if, expect_rank, floats, same_type};
use super::norm::{Statistics, normalize};
use super::util::{at_most, check_type, optional, outputs_of, required};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Inputs: `input`, `skip`, `gamma`, then `bias` (RMS) or `beta`, `bias` (mean and variance). Outputs: `Y`, mean,
/// inverse deviation, `input + skip + bias`.
#[derive(Debug, Clone, PartialEq)]
pub struct SkipNorm {
    /// RMS for the simplified operator.
    pub statistics: Statistics,
    /// Added to the mean square or the variance.
    pub epsilon: f32,
}

impl SkipNorm {
    /// Index of `beta`, if the operator has it.
    pub const fn beta(&self) -> Option<usize> {
        match self.statistics {
            Statistics::Rms => None,
            Statistics::MeanVariance => Some(3),
        }
    }

    /// Index of `bias`.
    pub const fn bias(&self) -> usize {
        match self.statistics {
            Statistics::Rms => 3,
            Statistics::MeanVariance => 4,
        }
    }

    /// `skip` has the shape of `input`, or lacks its batch axis, or has 1 there.
    fn check_skip(input: &Fact, skip: &Fact) -> Result<(), OpError> {
        let (Some(shape), Some(own)) = (&input.shape, &skip.shape) else { return Ok(()) };
        let lead = shape.len().saturating_sub(own.len());
        let tail = &shape[lead..];
        let fits = lead <= 1
            && own.len() <= shape.len()
            && own.iter().zip(tail).enumerate().all(|(i, (s, x))| {
                s.compatible(x) || (i == 0 && lead == 0 && shape.len() == 3 && s.known() == Some(1))
            });
        if fits {
            return Ok(());
        }
        Err(OpError::input("skip", format!("shape {} as input", input.shape_text()), skip.shape_text()))
    }
}

impl OpDef for SkipNorm {
    fn parse(op_type: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let statistics =
            if op_type == "SkipLayerNormalization" { Statistics::MeanVariance } else { Statistics::Rms };
        Ok(Self { statistics, epsilon: attrs.not_negative("epsilon")?.unwrap_or(1e-12) })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, self.bias() + 1)?;
        let x = required(inputs, 0, "input")?;
        let dtype = check_type("input", x, ACTIVATIONS)?;
        expect_rank("input", x, &[2, 3])?;
        let skip = required(inputs, 1, "skip")?;
        same_type("skip", Some(skip), dtype, "input")?;
        Self::check_skip(x, skip)?;
        let hidden: [Want; 1] = [back(x, 0)];
        let gamma = required(inputs, 2, "gamma")?;
        same_type("gamma", Some(gamma), dtype, "input")?;
        expect("gamma", gamma, &hidden, "hidden size")?;
        for (name, i) in [("beta", self.beta()), ("bias", Some(self.bias()))] {
            let fact = i.and_then(|i| optional(inputs, i));
            same_type(name, fact, dtype, "input")?;
            expect_if(name, fact, &hidden, "hidden size")?;
        }
        let y = Fact { constant: None, ..x.clone() };
        let reduced = x.shape.as_ref().map(|s| {
            let mut s = s.clone();
            if let Some(last) = s.last_mut() {
                *last = Dim::Known(1);
            }
            s
        });
        let statistic = Fact { dtype: Some(DType::F32), shape: reduced, constant: None };
        Ok(vec![y.clone(), statistic.clone(), statistic, y])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let outputs = outputs_of(self, inputs)?;
        let t = required(inputs, 0, "input")?;
        let hidden = t.shape().last().copied().unwrap_or(0);
        if hidden == 0 {
            return Err(OpError::input("input", "a hidden size of at least 1", t.shape()));
        }
        let mut sum = floats("input", t)?;
        let skip = floats("skip", required(inputs, 1, "skip")?)?;
        let gamma = floats("gamma", required(inputs, 2, "gamma")?)?;
        let get = |name: &str, i: Option<usize>| {
            i.and_then(|i| optional(inputs, i)).map(|t| floats(name, t)).transpose()
        };
        let (beta, bias) = (get("beta", self.beta())?, get("bias", Some(self.bias()))?);
        for (i, v) in sum.iter_mut().enumerate() {
            *v += skip[i % skip.len()] + bias.as_ref().map_or(0.0, |b| b[i % hidden]);
        }
        let (mut y, mut means, mut inverses) = (Vec::with_capacity(sum.len()), Vec::new(), Vec::new());
        for row in sum.chunks(hidden) {
            let (mean, inverse, n) = normalize(row, self.statistics, f64::from(self.epsilon));
            y.extend(n.iter().enumerate().map(|(i, v)| v * gamma[i] + beta.as_ref().map_or(0.0, |b| b[i])));
            means.push(mean);
            inverses.push(inverse);
        }
        [y, means, inverses, sum]
            .iter()
            .zip(&outputs)
            .map(|(v, (dtype, shape))| Ok(Tensor::from_f64(*dtype, shape.clone(), v)?))
            .collect()
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(2, "gamma"), (3, "beta or bias"), (4, "bias")])?;
        let Some(x) = inputs.first().copied().flatten() else { return Err("it has no input".into()) };
        let sum = token_axis::pointwise(&inputs[..inputs.len().min(2)], x.shape)?;
        match sum {
            Trace::Tokens(a) if a.axis + 1 == x.shape.len() => Err("it sums over the token axis".into()),
            trace => Ok(vec![trace; outputs.len()]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Op;

    fn t(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    #[test]
    fn the_fourth_output_is_the_plain_sum() {
        let op =
            Op::parse("com.microsoft", "SkipSimplifiedLayerNormalization", 1, &Attrs::default()).unwrap();
        let (x, s) = (t(&[2, 1, 2], &[1.0, 2.0, 0.0, 0.0]), t(&[1, 1, 2], &[2.0, 2.0]));
        let (g, b) = (t(&[2], &[1.0, 1.0]), t(&[2], &[0.0, 1.0]));
        let out = op.eval(&[Some(&x), Some(&s), Some(&g), Some(&b)], 4).unwrap();
        assert_eq!(out[3].to_f32().unwrap(), [3.0, 5.0, 2.0, 3.0]);
        let rms = 17f32.sqrt();
        assert!((out[0].to_f32().unwrap()[0] - 3.0 / rms).abs() < 1e-6);
        assert_eq!(out[2].shape().dims(), [2, 1, 1]);
        let short = t(&[1], &[1.0]);
        let e = op.eval(&[Some(&x), Some(&s), Some(&short)], 1).unwrap_err().to_string();
        assert!(e.contains("gamma"), "{e}");
        let e = op.eval(&[Some(&x), Some(&t(&[2, 2, 2], &[0.0; 8])), Some(&g)], 1).unwrap_err().to_string();
        assert!(e.contains("skip"), "{e}");
    }
}
