//! `CausalConvWithState` of `com.microsoft` and, from 27 on, of the default domain (operator contract, section 3.6): a
//! convolution over the tokens, each channel by itself, whose last inputs are its state.

use super::activation::silu;
use super::args::{ACTIVATIONS, Want, dim_of, expect, expect_if, floats, product, same_type, zeros};
use super::linear_attention::refuse_state_window;
use super::util::{at_most, check_type, optional, outputs_of, required};
use super::{OpDef, OpError};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::Tensor;

/// Places of the inputs.
pub mod input {
    /// `[B,C,L]`, or `[B,L,C]` channels last.
    pub const INPUT: usize = 0;
    /// `[C,1,k]`.
    pub const WEIGHT: usize = 1;
    /// `[C]`, optional.
    pub const BIAS: usize = 2;
    /// `[B,C,(k-1)*dilation]`, or `[B,(k-1)*dilation,C]` channels last; optional.
    pub const PAST_STATE: usize = 3;
}

/// `y[t] = act(bias + sum_j w[j] * xx[t + j*dilation])`, `xx` the state (or zeros) and then the input. Outputs: `y` in the
/// input's layout and the present state, the last `(k-1)*dilation` of `xx`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CausalConv {
    /// Whether the sum goes through `x * sigmoid(x)`.
    pub silu: bool,
    /// Tokens between two taps.
    pub dilation: usize,
    /// Whether channels are the last axis rather than the middle one.
    pub channels_last: bool,
}

impl CausalConv {
    /// Tokens of state for `taps` taps.
    fn state_len(self, taps: Want) -> Result<Want, OpError> {
        product("weight", &[taps.map(|k| k.saturating_sub(1)), Some(self.dilation)])
    }

    /// `[batch, channels, length]` in the layout of activations and states.
    const fn layout(self, batch: Want, channels: Want, length: Want) -> [Want; 3] {
        if self.channels_last { [batch, length, channels] } else { [batch, channels, length] }
    }
}

impl OpDef for CausalConv {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        if let Some(v) = attrs.int("ndim")?.filter(|&v| v != 1) {
            return Err(OpError::attribute("ndim", "1 (a convolution along the tokens)", v));
        }
        let silu = match attrs.string("activation")?.as_deref().unwrap_or("none") {
            "none" | "" => false,
            "silu" | "swish" => true,
            other => {
                return Err(OpError::attribute("activation", "none, silu or swish", format!("{other:?}")));
            }
        };
        let found = attrs.int("dilation")?.unwrap_or(1);
        let dilation = usize::try_from(found).ok().filter(|&d| d > 0);
        let dilation = dilation.ok_or_else(|| OpError::attribute("dilation", "1 or more", found))?;
        refuse_state_window(attrs)?;
        Ok(Self { silu, dilation, channels_last: attrs.flag("channels_last", false)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 4)?;
        let x = required(inputs, input::INPUT, "input")?;
        let weight = required(inputs, input::WEIGHT, "weight")?;
        let past = optional(inputs, input::PAST_STATE);
        let dtype = check_type("input", x, ACTIVATIONS)?;
        for (name, index) in
            [("weight", input::WEIGHT), ("bias", input::BIAS), ("past_state", input::PAST_STATE)]
        {
            same_type(name, optional(inputs, index), dtype, "input")?;
        }
        let (channel_axis, length_axis) = if self.channels_last { (2, 1) } else { (1, 2) };
        let channels = dim_of(Some(weight), 0).or(dim_of(Some(x), channel_axis));
        let (batch, length) = (dim_of(Some(x), 0), dim_of(Some(x), length_axis));
        expect("input", x, &self.layout(batch, channels, length), "channels as weight")?;
        let taps = dim_of(Some(weight), 2);
        expect("weight", weight, &[channels, Some(1), taps], "channels, 1, taps")?;
        if taps == Some(0) {
            return Err(OpError::input("weight", "1 tap or more", weight.shape_text()));
        }
        expect_if("bias", optional(inputs, input::BIAS), &[channels], "channels")?;
        let state = self.layout(batch, channels, self.state_len(taps)?);
        expect_if("past_state", past, &state, "batch, channels and (taps - 1) x dilation")?;
        let shape = |dims: &[Want]| Some(dims.iter().map(|d| d.map_or(Dim::Unknown, Dim::Known)).collect());
        Ok(vec![
            Fact { dtype, shape: shape(&self.layout(batch, channels, length)), constant: None },
            Fact { dtype, shape: shape(&state), constant: None },
        ])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let out = outputs_of(self, inputs)?;
        let x = floats("input", required(inputs, input::INPUT, "input")?)?;
        let weight = required(inputs, input::WEIGHT, "weight")?;
        let (channels, taps) = (weight.shape()[0], weight.shape()[2]);
        let weight = floats("weight", weight)?;
        let bias = optional(inputs, input::BIAS).map(|t| floats("bias", t)).transpose()?;
        let past = optional(inputs, input::PAST_STATE).map(|t| floats("past_state", t)).transpose()?;
        let (shape, state_shape) = (&out[0].1, &out[1].1);
        let length_axis = if self.channels_last { 1 } else { 2 };
        let (length, held) = (shape[length_axis], state_shape[length_axis]);
        let at = |b: usize, c: usize, t: usize, length: usize| {
            if self.channels_last { (b * length + t) * channels + c } else { (b * channels + c) * length + t }
        };
        let mut y = zeros(x.len())?;
        let mut present = zeros(state_shape.iter().product())?;
        for b in 0..shape[0] {
            for c in 0..channels {
                // The state, then the input.
                let all = |t: usize| match t.checked_sub(held) {
                    Some(t) => x[at(b, c, t, length)],
                    None => past.as_ref().map_or(0.0, |p| p[at(b, c, t, held)]),
                };
                for t in 0..length {
                    let sum: f64 = (0..taps).map(|j| weight[c * taps + j] * all(t + j * self.dilation)).sum();
                    let sum = sum + bias.as_ref().map_or(0.0, |b| b[c]);
                    y[at(b, c, t, length)] = if self.silu { silu(sum) } else { sum };
                }
                for t in 0..held {
                    present[at(b, c, t, held)] = all(length + t);
                }
            }
        }
        [y, present]
            .into_iter()
            .zip(&out)
            .map(|(v, (dtype, shape))| Ok(Tensor::from_f64(*dtype, shape.clone(), &v)?))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    #[test]
    fn taps_look_back_over_the_state() {
        let conv = CausalConv { silu: false, dilation: 2, channels_last: false };
        let (x, w) = (t(&[1, 1, 3], &[1.0, 2.0, 3.0]), t(&[1, 1, 2], &[10.0, 1.0]));
        let (bias, past) = (t(&[1], &[0.5]), t(&[1, 1, 2], &[-1.0, -2.0]));
        let out = conv.eval(&[Some(&x), Some(&w), Some(&bias), Some(&past)], 2).unwrap();
        assert_eq!(out[0].to_f32().unwrap(), [-8.5, -17.5, 13.5]);
        assert_eq!(out[1].to_f32().unwrap(), [2.0, 3.0]);
    }

    /// Fewer tokens than the state holds: the older part moves up.
    #[test]
    fn a_short_input_keeps_old_state() {
        let conv = CausalConv { silu: false, dilation: 1, channels_last: true };
        let (x, w) = (t(&[1, 1, 2], &[5.0, 6.0]), t(&[2, 1, 3], &[0.0; 6]));
        let past = t(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let out = conv.eval(&[Some(&x), Some(&w), None, Some(&past)], 2).unwrap();
        assert_eq!(out[1].to_f32().unwrap(), [3.0, 4.0, 5.0, 6.0]);
    }

    #[test]
    fn an_enormous_dilation_is_refused_before_anything_is_allocated() {
        let conv = CausalConv { silu: false, dilation: usize::MAX / 2, channels_last: false };
        let (x, w) = (t(&[1, 1, 3], &[1.0, 2.0, 3.0]), t(&[1, 1, 4], &[1.0; 4]));
        assert!(conv.eval(&[Some(&x), Some(&w)], 2).is_err());
        let conv = CausalConv { dilation: 1 << 40, ..conv };
        assert!(conv.eval(&[Some(&x), Some(&w)], 2).is_err());
    }
}
