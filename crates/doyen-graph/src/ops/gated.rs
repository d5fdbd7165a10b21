//! Small gated operators of hybrid models (operator contract, section 3.6): `com.microsoft::GatedRMSNorm`,
//! `GatedAdd` and `LinearAttentionGate`.

use super::activation::{sigmoid, silu};
use super::args::{ACTIVATIONS, Want, back, expect, floats, same_type};
use super::norm::{Statistics, normalize};
use super::util::{at_most, check_type, optional, outputs_of, required};
use super::{OpDef, OpError, Trace, Traced, token_axis};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// `rms(x) * scale * activation(gate)`, the norm over each group of `len(scale)` values of the last axis.
#[derive(Debug, Clone, PartialEq)]
pub struct GatedRmsNorm {
    /// Added to the mean square.
    pub epsilon: f32,
    /// On the gate.
    pub activation: GateActivation,
}

/// What a gate goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum GateActivation {
    Silu,
    Sigmoid,
}

/// `x + y * gate`, the gate one value a row and already activated; the product is rounded to the type first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatedAdd;

/// `decay = decay_scale * softplus(a + dt_bias)` and `beta = sigmoid(b)`; the inputs are `a`, `dt_bias`,
/// `decay_scale`, `b`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearAttentionGate;

/// Refuses an input whose known shape differs from another's.
fn same_shape(name: &str, fact: &Fact, other: &Fact, of: &str) -> Result<(), OpError> {
    let Some(shape) = &other.shape else { return Ok(()) };
    let want: Vec<Want> = shape.iter().map(Dim::known).collect();
    expect(name, fact, &want, &format!("as {of}"))
}

impl OpDef for GatedRmsNorm {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let activation = match attrs.string("activation")?.as_deref().unwrap_or("silu") {
            "silu" | "swish" => GateActivation::Silu,
            "sigmoid" => GateActivation::Sigmoid,
            other => {
                return Err(OpError::attribute("activation", "silu, swish or sigmoid", format!("{other:?}")));
            }
        };
        Ok(Self { epsilon: attrs.not_negative("epsilon")?.unwrap_or(1e-5), activation })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let (x, scale) = (required(inputs, 0, "X")?, required(inputs, 1, "scale")?);
        let gate = required(inputs, 2, "gate")?;
        let dtype = check_type("X", x, ACTIVATIONS)?;
        same_type("scale", Some(scale), dtype, "X")?;
        same_type("gate", Some(gate), dtype, "X")?;
        same_shape("gate", gate, x, "X")?;
        expect("scale", scale, &[None], "one value a channel of a group")?;
        match (x.rank(), back(scale, 0), back(x, 0)) {
            (Some(0), ..) => Err(OpError::input("X", "rank 1 or more", x.shape_text())),
            (_, Some(c), Some(n)) if c == 0 || !n.is_multiple_of(c) => {
                let expected = format!("a length that divides {n} (the last axis of X)");
                Err(OpError::input("scale", expected, c))
            }
            _ => Ok(vec![Fact { constant: None, ..x.clone() }]),
        }
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = outputs_of(self, inputs)?.swap_remove(0);
        let mut x = floats("X", required(inputs, 0, "X")?)?;
        let scale = floats("scale", required(inputs, 1, "scale")?)?;
        let gate = floats("gate", required(inputs, 2, "gate")?)?;
        for (group, gate) in x.chunks_mut(scale.len()).zip(gate.chunks(scale.len())) {
            let (_, _, n) = normalize(group, Statistics::Rms, f64::from(self.epsilon));
            for (i, o) in group.iter_mut().enumerate() {
                let g = match self.activation {
                    GateActivation::Silu => silu(gate[i]),
                    GateActivation::Sigmoid => sigmoid(gate[i]),
                };
                *o = n[i] * scale[i] * g;
            }
        }
        Ok(vec![Tensor::from_f64(dtype, shape, &x)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "scale")])?;
        let (x, gate) = (inputs.first().copied().flatten(), inputs.get(2).copied().flatten());
        let out = outputs.first().ok_or("it has no output")?;
        match token_axis::pointwise(&[x, gate], out)? {
            Trace::Tokens(a) if a.axis + 1 == out.len() => Err("it sums over the token axis".into()),
            trace => Ok(vec![trace]),
        }
    }
}

impl OpDef for GatedAdd {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let (x, y, gate) =
            (required(inputs, 0, "X")?, required(inputs, 1, "Y")?, required(inputs, 2, "gate")?);
        let dtype = check_type("X", x, ACTIVATIONS)?;
        same_type("Y", Some(y), dtype, "X")?;
        same_type("gate", Some(gate), dtype, "X")?;
        same_shape("Y", y, x, "X")?;
        if let Some(shape) = &x.shape {
            let mut want: Vec<Want> = shape.iter().map(Dim::known).collect();
            *want.last_mut().ok_or_else(|| OpError::input("X", "rank 1 or more", "a scalar"))? = Some(1);
            expect("gate", gate, &want, "as X, one value a row")?;
        }
        Ok(vec![Fact { constant: None, ..x.clone() }])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = outputs_of(self, inputs)?.swap_remove(0);
        let mut x = floats("X", required(inputs, 0, "X")?)?;
        let mut product = floats("Y", required(inputs, 1, "Y")?)?;
        let gate = floats("gate", required(inputs, 2, "gate")?)?;
        let row = shape.last().copied().unwrap_or(1).max(1);
        for (p, g) in product.chunks_mut(row).zip(&gate) {
            for v in p {
                *v *= g;
            }
        }
        let product = Tensor::from_f64(dtype, shape.clone(), &product)?.to_f64()?;
        for (o, p) in x.iter_mut().zip(product) {
            *o += p;
        }
        Ok(vec![Tensor::from_f64(dtype, shape, &x)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        let out = outputs.first().ok_or("it has no output")?;
        Ok(vec![token_axis::pointwise(inputs, out)?])
    }
}

impl OpDef for LinearAttentionGate {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 4)?;
        let a = required(inputs, 0, "a")?;
        let dtype = check_type("a", a, ACTIVATIONS)?;
        expect("a", a, &[None, None, None], "batch, tokens, heads")?;
        for (name, i) in [("dt_bias", 1), ("decay_scale", 2)] {
            let f = required(inputs, i, name)?;
            check_type(name, f, &[DType::F32])?;
            expect(name, f, &[back(a, 0)], "heads")?;
        }
        let decay = Fact { constant: None, ..a.clone() };
        let Some(b) = optional(inputs, 3) else { return Ok(vec![decay]) };
        same_type("b", Some(b), dtype, "a")?;
        same_shape("b", b, a, "a")?;
        Ok(vec![decay.clone(), decay])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], outputs: usize) -> Result<Vec<Tensor>, OpError> {
        let facts = outputs_of(self, inputs)?;
        if outputs > facts.len() {
            return Err(OpError::input("b", "a value where beta is wanted", "nothing"));
        }
        let (dtype, shape) = &facts[0];
        let a = floats("a", required(inputs, 0, "a")?)?;
        let bias = floats("dt_bias", required(inputs, 1, "dt_bias")?)?;
        let scale = floats("decay_scale", required(inputs, 2, "decay_scale")?)?;
        let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
        let decay: Vec<f64> = a
            .iter()
            .enumerate()
            .map(|(i, v)| scale[i % scale.len()] * softplus(v + bias[i % bias.len()]))
            .collect();
        let mut results = vec![Tensor::from_f64(*dtype, shape.clone(), &decay)?];
        if let Some(b) = optional(inputs, 3) {
            let beta: Vec<f64> = floats("b", b)?.into_iter().map(sigmoid).collect();
            results.push(Tensor::from_f64(*dtype, shape.clone(), &beta)?);
        }
        Ok(results)
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "dt_bias"), (2, "decay_scale")])?;
        let (a, b) = (inputs.first().copied().flatten(), inputs.get(3).copied().flatten());
        let out = outputs.first().ok_or("it has no output")?;
        Ok(vec![token_axis::pointwise(&[a, b], out)?; outputs.len()])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    #[test]
    fn gates_by_hand() {
        let (x, y, g) = (t(&[1, 2], &[1.0, 2.0]), t(&[1, 2], &[10.0, 20.0]), t(&[1, 1], &[0.5]));
        let out = GatedAdd.eval(&[Some(&x), Some(&y), Some(&g)], 1).unwrap();
        assert_eq!(out[0].to_f32().unwrap(), [6.0, 12.0]);
        let norm = GatedRmsNorm { epsilon: 0.0, activation: GateActivation::Sigmoid };
        let (x, s, g) = (t(&[1, 4], &[3.0, 4.0, -2.0, 0.0]), t(&[2], &[1.0, 2.0]), t(&[1, 4], &[0.0; 4]));
        let out = norm.eval(&[Some(&x), Some(&s), Some(&g)], 1).unwrap()[0].to_f32().unwrap();
        let want = [0.5 * 3.0 / 12.5f32.sqrt(), 4.0 / 12.5f32.sqrt(), -0.5 * 2f32.sqrt(), 0.0];
        assert!(out.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6), "{out:?}");
        let (a, b) = (t(&[1, 1, 2], &[0.0, 800.0]), t(&[1, 1, 2], &[0.0, -800.0]));
        let (d, s) = (t(&[2], &[0.0, 0.0]), t(&[2], &[-1.0, -2.0]));
        let out = LinearAttentionGate.eval(&[Some(&a), Some(&d), Some(&s), Some(&b)], 2).unwrap();
        assert_eq!(out[0].to_f32().unwrap(), [-std::f32::consts::LN_2, -1600.0]);
        assert_eq!(out[1].to_f32().unwrap(), [0.5, 0.0]);
        assert!(LinearAttentionGate.eval(&[Some(&a), Some(&d), Some(&s)], 2).is_err());
    }

    /// In half precision the product is rounded before the sum.
    #[test]
    fn the_product_is_rounded_first() {
        let half = |v: f32| Tensor::from_f32(DType::F16, [1, 1], &[v]).unwrap();
        let (x, y, g) = (half(-1.0), half(1.001), half(1.001));
        let out = GatedAdd.eval(&[Some(&x), Some(&y), Some(&g)], 1).unwrap()[0].to_f32().unwrap();
        let step = 2f32.powi(-10);
        assert_eq!(out, [2.0 * step]);
    }
}
