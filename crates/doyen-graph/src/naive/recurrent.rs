//! Recurrent nodes by the operators' scalar references, one sequence at a time, the state carried in float32.

use super::{Naive, Span, text};
use crate::{
    lowered::{CausalConv, LOp, LinearAttention, StateId},
    ops::{OpDef, causal_conv, linear_attention},
};
use doyen_tensor::{Shape, Tensor};

/// Tokens `span` of a value `[1,T,width]`, whatever its extents say, as `[1,len,width]`.
fn part(t: &Tensor, width: usize, span: &Span) -> Result<Tensor, String> {
    let values = t.to_f32().map_err(text)?;
    let own = &values[span.first * width..(span.first + span.len) * width];
    Tensor::from_slice([1, span.len, width], own).map_err(text)
}

impl Naive {
    /// A node that owns a state of fixed size.
    pub(super) fn recurrent(
        &mut self,
        op: &LOp,
        inputs: &[Option<Tensor>],
        spans: &[Span],
        out: &Shape,
    ) -> Result<Tensor, String> {
        let mut y = Vec::new();
        for span in spans {
            let results = match op {
                LOp::LinearAttention(op) => self.linear_attention(op, inputs, span)?,
                LOp::CausalConv(op) => self.causal_conv(op, inputs, span)?,
                _ => return Err("it is no recurrent node".into()),
            };
            let [own, state] = &results[..] else { return Err("no state came out".into()) };
            y.extend(own.to_f32().map_err(text)?);
            let id = match op {
                LOp::LinearAttention(op) => op.state,
                LOp::CausalConv(op) => op.state,
                _ => return Err("it is no recurrent node".into()),
            };
            *self.state_mut(span.sequence, id) = Some(state.to_f32().map_err(text)?);
        }
        Tensor::from_slice(out.clone(), &y).map_err(text)
    }

    /// The state of a sequence under these extents.
    fn past(&mut self, span: &Span, id: StateId, dims: &[usize]) -> Result<Option<Tensor>, String> {
        let state = self.state_mut(span.sequence, id);
        state.as_ref().map(|s| Tensor::from_slice(dims.to_vec(), s).map_err(text)).transpose()
    }

    fn linear_attention(
        &mut self,
        op: &LinearAttention,
        inputs: &[Option<Tensor>],
        span: &Span,
    ) -> Result<Vec<Tensor>, String> {
        let widths = [
            op.q_heads * op.key_size,
            op.key_heads * op.key_size,
            op.kv_heads * op.value_size,
            op.decay_width(),
            if op.shared_beta { 1 } else { op.kv_heads },
        ];
        let mut parts = Vec::with_capacity(widths.len());
        for (input, &width) in inputs.iter().zip(&widths) {
            parts.push(input.as_ref().map(|t| part(t, width, span)).transpose()?);
        }
        let past = self.past(span, op.state, &[1, op.kv_heads, op.key_size, op.value_size])?;
        let [q, k, v, decay, beta] = [0, 1, 2, 3, 4].map(|i| parts.get(i).and_then(Option::as_ref));
        let reference = linear_attention::LinearAttention {
            q_heads: op.q_heads,
            kv_heads: op.kv_heads,
            rule: op.rule,
            scale: Some(op.scale),
        };
        reference.eval(&[q, k, v, past.as_ref(), decay, beta], 2).map_err(text)
    }

    fn causal_conv(
        &mut self,
        op: &CausalConv,
        inputs: &[Option<Tensor>],
        span: &Span,
    ) -> Result<Vec<Tensor>, String> {
        let operand = |i: usize| inputs.get(i).and_then(Option::as_ref);
        let x = operand(0).map(|x| part(x, op.channels, span)).transpose()?;
        let past = self.past(span, op.state, &[1, op.held(), op.channels])?;
        let reference = causal_conv::CausalConv { silu: op.silu, dilation: op.dilation, channels_last: true };
        reference.eval(&[x.as_ref(), operand(1), operand(2), past.as_ref()], 2).map_err(text)
    }
}
