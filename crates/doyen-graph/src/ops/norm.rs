//! Layer and RMS normalisation without a skip (operator contract, section 3.4): `ai.onnx::LayerNormalization`,
//! `RMSNormalization` and `SimplifiedLayerNormalization`, statistics in f64 over everything from `axis` on.

use super::args::floats;
use super::util::{FLOATS, at_most, check_type, normalize_axis, optional, outputs_of, required};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Which statistics a normalisation uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Statistics {
    /// `x * rsqrt(mean(x^2) + eps)`.
    Rms,
    /// `(x - mean) * rsqrt(var + eps)`.
    MeanVariance,
}

/// Inputs: `X`, `scale`, and for mean and variance a bias `B` (optional), both broadcast over the normalised axes.
/// Outputs: `Y` in the type of the scale, then the mean (mean and variance only) and the inverse deviation.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// Statistics.
    pub statistics: Statistics,
    /// First normalised axis, as written (may be negative).
    pub axis: i64,
    /// Added to the mean square or the variance.
    pub epsilon: f32,
    /// Outputs beside `Y`, in order.
    outputs: &'static [Extra],
}

/// An output beside `Y`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extra {
    Mean,
    InverseDeviation,
}

/// Mean, inverse deviation and normalised values of one group.
pub(super) fn normalize(x: &[f64], statistics: Statistics, epsilon: f64) -> (f64, f64, Vec<f64>) {
    let n = x.len().max(1) as f64;
    let mean = x.iter().sum::<f64>() / n;
    let shift = if statistics == Statistics::MeanVariance { mean } else { 0.0 };
    let power = x.iter().map(|v| (v - shift) * (v - shift)).sum::<f64>() / n;
    let inverse = 1.0 / (power + epsilon).sqrt();
    (mean, inverse, x.iter().map(|v| (v - shift) * inverse).collect())
}

impl Norm {
    fn scale_fits(name: &str, fact: &Fact, group: Option<&[Dim]>) -> Result<(), OpError> {
        let (Some(shape), Some(group)) = (&fact.shape, group) else { return Ok(()) };
        let fits = shape.len() <= group.len()
            && shape
                .iter()
                .rev()
                .zip(group.iter().rev())
                .all(|(s, g)| s.known() == Some(1) || s.compatible(g));
        if fits {
            return Ok(());
        }
        let group: Vec<String> = group.iter().map(ToString::to_string).collect();
        let expected = format!("a shape that broadcasts to [{}] (the normalised axes)", group.join(","));
        Err(OpError::input(name, expected, fact.shape_text()))
    }
}

impl OpDef for Norm {
    fn parse(op_type: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let (statistics, outputs): (_, &'static [Extra]) = match op_type {
            "LayerNormalization" => (Statistics::MeanVariance, &[Extra::Mean, Extra::InverseDeviation]),
            "SimplifiedLayerNormalization" => (Statistics::Rms, &[Extra::InverseDeviation]),
            _ => (Statistics::Rms, &[]),
        };
        attrs.int("stash_type")?;
        let axis = attrs.int("axis")?.unwrap_or(-1);
        let epsilon = attrs.not_negative("epsilon")?.unwrap_or(1e-5);
        Ok(Self { statistics, axis, epsilon, outputs })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        let with_bias = self.statistics == Statistics::MeanVariance;
        at_most(inputs, if with_bias { 3 } else { 2 })?;
        let x = required(inputs, 0, "X")?;
        let scale = required(inputs, 1, "scale")?;
        check_type("X", x, FLOATS)?;
        check_type("scale", scale, FLOATS)?;
        let axis = x.rank().map(|r| normalize_axis("axis", self.axis, r)).transpose()?;
        let group = axis.and_then(|a| x.shape.as_ref().map(|s| &s[a..]));
        Self::scale_fits("scale", scale, group)?;
        if let Some(b) = optional(inputs, 2) {
            check_type("B", b, FLOATS)?;
            Self::scale_fits("B", b, group)?;
        }
        let reduced = x.shape.as_ref().zip(axis).map(|(s, a)| {
            s.iter().enumerate().map(|(i, d)| if i < a { d.clone() } else { Dim::Known(1) }).collect()
        });
        let mut out = vec![Fact { dtype: scale.dtype, shape: x.shape.clone(), constant: None }];
        let statistic = Fact { dtype: Some(DType::F32), shape: reduced, constant: None };
        out.extend(self.outputs.iter().map(|_| statistic.clone()));
        Ok(out)
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let outputs = outputs_of(self, inputs)?;
        let t = required(inputs, 0, "X")?;
        let x = floats("X", t)?;
        let axis = normalize_axis("axis", self.axis, t.shape().len())?;
        let group_dims = &t.shape()[axis..];
        let group: usize = group_dims.iter().product();
        if group == 0 {
            return Err(OpError::input("X", "at least one element to normalise over", t.shape()));
        }
        let spread = |name: &str, t: &Tensor| -> Result<Vec<f64>, OpError> {
            let v = floats(name, t)?;
            Ok(super::strided::Offsets::broadcast(t.shape(), group_dims).map(|o| v[o]).collect())
        };
        let scale = spread("scale", required(inputs, 1, "scale")?)?;
        let bias = optional(inputs, 2).map(|b| spread("B", b)).transpose()?;
        let (mut y, mut means, mut inverses) = (Vec::with_capacity(x.len()), Vec::new(), Vec::new());
        for chunk in x.chunks(group) {
            let (mean, inverse, n) = normalize(chunk, self.statistics, f64::from(self.epsilon));
            y.extend(n.iter().enumerate().map(|(i, v)| v * scale[i] + bias.as_ref().map_or(0.0, |b| b[i])));
            means.push(mean);
            inverses.push(inverse);
        }
        let mut results = vec![Tensor::from_f64(outputs[0].0, outputs[0].1.clone(), &y)?];
        for (extra, (dtype, shape)) in self.outputs.iter().zip(&outputs[1..]) {
            let values = if *extra == Extra::Mean { &means } else { &inverses };
            results.push(Tensor::from_f64(*dtype, shape.clone(), values)?);
        }
        Ok(results)
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "scale"), (2, "B")])?;
        let rank = inputs.first().copied().flatten().map_or(0, |t| t.shape.len());
        let axis = super::util::wrap_axis(self.axis, rank).ok_or("its axis is out of range")?;
        let axes: Vec<usize> = (axis..rank).collect();
        Ok(vec![token_axis::off_axes(inputs.first(), &axes, false)?; outputs.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attr;
    use crate::ops::Op;

    fn t(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    #[test]
    fn rms_by_hand() {
        let op =
            Op::parse("", "RMSNormalization", 23, &Attrs::from([("epsilon", Attr::Float(0.0))])).unwrap();
        let (x, s) = (t(&[1, 2], &[3.0, 4.0]), t(&[2], &[1.0, 2.0]));
        let y = op.eval(&[Some(&x), Some(&s)], 1).unwrap()[0].to_f32().unwrap();
        let rms = 12.5f32.sqrt();
        assert!((y[0] - 3.0 / rms).abs() < 1e-6 && (y[1] - 8.0 / rms).abs() < 1e-6);
        let bad = t(&[3], &[1.0; 3]);
        let e = op.eval(&[Some(&x), Some(&bad)], 1).unwrap_err().to_string();
        assert!(e.contains("scale"), "{e}");
    }

    #[test]
    fn layer_norm_centres_and_reports_statistics() {
        let op =
            Op::parse("", "LayerNormalization", 17, &Attrs::from([("epsilon", Attr::Float(0.0))])).unwrap();
        let (x, s, b) = (t(&[1, 2], &[1.0, 3.0]), t(&[2], &[1.0, 1.0]), t(&[2], &[0.5, 0.5]));
        let out = op.eval(&[Some(&x), Some(&s), Some(&b)], 3).unwrap();
        assert_eq!(out[0].to_f32().unwrap(), [-0.5, 1.5]);
        assert_eq!((out[1].to_f32().unwrap(), out[2].to_f32().unwrap()), (vec![2.0], vec![1.0]));
        assert_eq!(out[1].shape().dims(), [1, 1]);
    }
}
