//! `LinearAttention` of `com.microsoft` and, from 27 on, of the default domain (operator contract, section 3.6): attention
//! whose past is one matrix a head instead of a row a token.

use super::args::{ACTIVATIONS, Want, dim, dim_of, expect, expect_if, floats, product, same_type, zeros};
use super::util::{at_most, check_type, optional, outputs_of, required};
use super::{OpDef, OpError};
use crate::ir::{Attrs, Fact};
use doyen_tensor::Tensor;

/// Places of the inputs.
pub mod input {
    /// `[B,T,Hq*dk]`.
    pub const QUERY: usize = 0;
    /// `[B,T,Hk*dk]`.
    pub const KEY: usize = 1;
    /// `[B,T,Hkv*dv]`.
    pub const VALUE: usize = 2;
    /// `[B,Hkv,dk,dv]`, optional.
    pub const PAST_STATE: usize = 3;
    /// `[B,T,Hkv]` or `[B,T,Hkv*dk]`.
    pub const DECAY: usize = 4;
    /// `[B,T,Hkv]` or `[B,T,1]`.
    pub const BETA: usize = 5;
}

/// A recurrence over the tokens of a sequence. Outputs: `[B,T,max(Hq,Hkv)*dv]` and the present state `[B,Hkv,dk,dv]`.
///
/// With `Hq >= Hkv` query head `h` reads the state of head `h / (Hq/Hkv)`; with fewer query heads than states, state `h`
/// is read by query head `h / (Hkv/Hq)`, and keys are given for the states or for the query heads, block by block.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearAttention {
    /// Query heads.
    pub q_heads: usize,
    /// State and value heads.
    pub kv_heads: usize,
    /// How a token changes the state.
    pub rule: UpdateRule,
    /// Factor on the output; `1/sqrt(dk)` when absent.
    pub scale: Option<f32>,
}

/// How a token changes the state: `S <- exp(decay) S` where the rule decays, then `S <- S + k v^T`, or where it corrects
/// `S <- S + beta k (v - S^T k)^T`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum UpdateRule {
    Linear,
    Gated,
    Delta,
    GatedDelta,
}

impl UpdateRule {
    /// Whether the state decays first.
    pub const fn decays(self) -> bool {
        matches!(self, Self::Gated | Self::GatedDelta)
    }

    /// Whether only what the state does not yet say of a value is added, times `beta`.
    pub const fn corrects(self) -> bool {
        matches!(self, Self::Delta | Self::GatedDelta)
    }
}

/// Sizes as far as the inputs tell.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: Want,
    tokens: Want,
    key_size: Want,
    value_size: Want,
}

impl LinearAttention {
    /// Output heads.
    pub const fn heads(&self) -> usize {
        if self.q_heads > self.kv_heads { self.q_heads } else { self.kv_heads }
    }

    /// The factor on the output for keys of this size.
    pub fn scale_for(&self, key_size: usize) -> f32 {
        self.scale.unwrap_or_else(|| 1.0 / (key_size as f32).sqrt())
    }

    /// Channels of a head out of a last axis.
    fn per_head(name: &str, fact: &Fact, heads: usize, attr: &str) -> Result<Want, OpError> {
        match dim_of(Some(fact), 2) {
            Some(n) if n == 0 || !n.is_multiple_of(heads) => {
                let expected = format!("a last axis that is a multiple of {heads} ({attr})");
                Err(OpError::input(name, expected, fact.shape_text()))
            }
            n => Ok(n.map(|n| n / heads)),
        }
    }

    fn sizes(&self, inputs: &[Option<&Fact>]) -> Result<Sizes, OpError> {
        let (q, k, v) = (
            required(inputs, input::QUERY, "query")?,
            required(inputs, input::KEY, "key")?,
            required(inputs, input::VALUE, "value")?,
        );
        let known = |axis| dim_of(Some(q), axis).or(dim_of(Some(k), axis)).or(dim_of(Some(v), axis));
        let (batch, tokens) = (known(0), known(1));
        for (name, fact) in [("query", q), ("key", k), ("value", v)] {
            expect(name, fact, &[batch, tokens, None], "batch, tokens, heads x head size")?;
        }
        let key_size = Self::per_head("query", q, self.q_heads, "q_num_heads")?;
        if let (Some(n), Some(size)) = (dim_of(Some(k), 2), key_size) {
            let inverse = (self.q_heads < self.kv_heads).then_some(self.q_heads);
            let heads: Vec<usize> = [Some(self.kv_heads), inverse].into_iter().flatten().collect();
            if heads.iter().all(|h| h.checked_mul(size) != Some(n)) {
                let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
                let expected = format!("{} heads of {size} (the query's head size)", heads.join(" or "));
                return Err(OpError::input("key", expected, k.shape_text()));
            }
        }
        let value_size = Self::per_head("value", v, self.kv_heads, "kv_num_heads")?;
        Ok(Sizes { batch, tokens, key_size, value_size })
    }

    fn check_gates(&self, inputs: &[Option<&Fact>], sizes: Sizes) -> Result<(), OpError> {
        let Sizes { batch, tokens, key_size, .. } = sizes;
        let heads = Some(self.kv_heads);
        let per_key = product("decay", &[heads, key_size])?;
        let gates = [
            ("decay", input::DECAY, self.rule.decays(), [heads, per_key]),
            ("beta", input::BETA, self.rule.corrects(), [heads, Some(1)]),
        ];
        for (name, index, needed, widths) in gates {
            let gate = if needed { Some(required(inputs, index, name)?) } else { optional(inputs, index) };
            let Some(gate) = gate else { continue };
            let fits = |w: &Want| expect(name, gate, &[batch, tokens, *w], "batch, tokens, heads");
            if widths.iter().all(|w| fits(w).is_err()) {
                let wide = |w: &Want| w.map_or_else(|| "?".to_owned(), |w| w.to_string());
                let expected = format!(
                    "shape {} with a last axis of {} or {}",
                    super::args::want_text(&[batch, tokens, None]),
                    wide(&widths[0]),
                    wide(&widths[1])
                );
                return Err(OpError::input(name, expected, gate.shape_text()));
            }
        }
        Ok(())
    }
}

/// The attribute `state_window`: states of several last steps at once, which speculation asks for.
pub(super) fn refuse_state_window(attrs: &mut Attrs) -> Result<(), OpError> {
    match attrs.int("state_window")?.unwrap_or(0) {
        0 => Ok(()),
        v => Err(OpError::attribute("state_window", "0 (the state after the last token alone)", v)),
    }
}

impl OpDef for LinearAttention {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let q_heads = attrs.required_count("q_num_heads", "heads")?;
        let kv_heads = attrs.required_count("kv_num_heads", "heads")?;
        if !q_heads.is_multiple_of(kv_heads) && !kv_heads.is_multiple_of(q_heads) {
            let expected = format!("a multiple or a divisor of kv_num_heads ({kv_heads})");
            return Err(OpError::attribute("q_num_heads", expected, q_heads));
        }
        let rule = match attrs.string("update_rule")?.as_deref().unwrap_or("gated_delta") {
            "linear" => UpdateRule::Linear,
            "gated" => UpdateRule::Gated,
            "delta" => UpdateRule::Delta,
            "gated_delta" => UpdateRule::GatedDelta,
            other => {
                let expected = "linear, gated, delta or gated_delta";
                return Err(OpError::attribute("update_rule", expected, format!("{other:?}")));
            }
        };
        refuse_state_window(attrs)?;
        // How many tokens an implementation may take together; the result does not depend on it.
        attrs.int("chunk_size")?;
        Ok(Self { q_heads, kv_heads, rule, scale: attrs.finite("scale")?.filter(|&s| s != 0.0) })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 6)?;
        let query = required(inputs, input::QUERY, "query")?;
        let dtype = check_type("query", query, ACTIVATIONS)?;
        let past = optional(inputs, input::PAST_STATE);
        for (name, index) in
            [("key", input::KEY), ("value", input::VALUE), ("decay", input::DECAY), ("beta", input::BETA)]
        {
            same_type(name, optional(inputs, index), dtype, "query")?;
        }
        let sizes = self.sizes(inputs)?;
        self.check_gates(inputs, sizes)?;
        let Sizes { batch, tokens, key_size, value_size, .. } = sizes;
        let state = [batch, Some(self.kv_heads), key_size, value_size];
        let state_type = past.map_or(Ok(dtype), |p| check_type("past_state", p, ACTIVATIONS))?;
        expect_if("past_state", past, &state, "batch, state heads, key size, value size")?;
        let width = product("value", &[Some(self.heads()), value_size])?;
        let fact = |dtype, dims: &[Want]| Fact {
            dtype,
            shape: Some(dims.iter().map(|&d| dim(d)).collect()),
            constant: None,
        };
        Ok(vec![fact(dtype, &[batch, tokens, width]), fact(state_type, &state)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let out = outputs_of(self, inputs)?;
        let &[batch, _, key_size, value_size] = out[1].1.dims() else {
            return Err(OpError::other("the state has four axes"));
        };
        let read = |i: usize, name: &str| optional(inputs, i).map(|t| floats(name, t)).transpose();
        let of = |i: usize, name: &str| Ok::<_, OpError>(read(i, name)?.unwrap_or_default());
        let mut state = match read(input::PAST_STATE, "past_state")? {
            Some(state) => state,
            None => zeros(out[1].1.iter().product())?,
        };
        let step = Step {
            op: self,
            key_size,
            value_size,
            scale: f64::from(self.scale_for(key_size)),
            query: of(input::QUERY, "query")?,
            key: of(input::KEY, "key")?,
            value: of(input::VALUE, "value")?,
            decay: of(input::DECAY, "decay")?,
            beta: of(input::BETA, "beta")?,
        };
        let mut y = zeros(out[0].1.iter().product())?;
        let tokens = out[0].1[1];
        let (width, per_sequence) = (self.heads() * value_size, self.kv_heads * key_size * value_size);
        for b in 0..batch {
            let state = &mut state[b * per_sequence..(b + 1) * per_sequence];
            for t in b * tokens..(b + 1) * tokens {
                step.token(state, t, batch * tokens, &mut y[t * width..(t + 1) * width]);
            }
        }
        [(&out[0], y), (&out[1], state)]
            .into_iter()
            .map(|((dtype, shape), v)| Ok(Tensor::from_f64(*dtype, shape.clone(), &v)?))
            .collect()
    }
}

/// The operands of a run, flat.
struct Step<'a> {
    op: &'a LinearAttention,
    key_size: usize,
    value_size: usize,
    scale: f64,
    query: Vec<f64>,
    key: Vec<f64>,
    value: Vec<f64>,
    decay: Vec<f64>,
    beta: Vec<f64>,
}

impl Step<'_> {
    /// Token `t` of `rows` over batch and tokens, on the states `[Hkv,dk,dv]` of its sequence.
    fn token(&self, states: &mut [f64], t: usize, rows: usize, y: &mut [f64]) {
        let (q_heads, kv_heads) = (self.op.q_heads, self.op.kv_heads);
        let (dk, dv) = (self.key_size, self.value_size);
        let row = |x: &[f64], head: usize, size: usize| -> Vec<f64> {
            let width = x.len() / rows;
            x[t * width + head * size..][..size].to_vec()
        };
        let key_heads = self.key.len() / (rows * dk);
        for h in 0..kv_heads {
            let state = &mut states[h * dk * dv..(h + 1) * dk * dv];
            let k = row(&self.key, h / (kv_heads / key_heads), dk);
            let v = row(&self.value, h, dv);
            if self.op.rule.decays() {
                let per_key = self.decay.len() / (rows * kv_heads);
                let decay = row(&self.decay, h, per_key);
                for (i, s) in state.chunks_mut(dv).enumerate() {
                    let factor = decay[i % per_key].exp();
                    for s in s.iter_mut() {
                        *s *= factor;
                    }
                }
            }
            let mut delta = v;
            if self.op.rule.corrects() {
                let betas = self.beta.len() / rows;
                let beta = row(&self.beta, h % betas, 1)[0];
                for (j, d) in delta.iter_mut().enumerate() {
                    let said: f64 = (0..dk).map(|i| state[i * dv + j] * k[i]).sum();
                    *d = beta * (*d - said);
                }
            }
            for (i, s) in state.chunks_mut(dv).enumerate() {
                s.iter_mut().zip(&delta).for_each(|(s, d)| *s += k[i] * d);
            }
        }
        let heads = self.op.heads();
        for (h, y) in y.chunks_mut(dv).enumerate() {
            let state = &states[h / (heads / kv_heads) * dk * dv..][..dk * dv];
            let q = row(&self.query, h / (heads / q_heads), dk);
            for (j, y) in y.iter_mut().enumerate() {
                *y = self.scale * (0..dk).map(|i| state[i * dv + j] * q[i]).sum::<f64>();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    fn op(q_heads: usize, kv_heads: usize, rule: UpdateRule) -> LinearAttention {
        LinearAttention { q_heads, kv_heads, rule, scale: Some(1.0) }
    }

    /// One head of two channels, by hand: the second token finds what the first left.
    #[test]
    fn two_tokens_of_the_gated_delta_rule() {
        let rule = op(1, 1, UpdateRule::GatedDelta);
        let (q, k) = (t(&[1, 2, 2], &[1.0, 0.0, 0.0, 1.0]), t(&[1, 2, 2], &[1.0, 0.0, 0.6, 0.8]));
        let v = t(&[1, 2, 1], &[2.0, 3.0]);
        let (decay, beta) = (t(&[1, 2, 1], &[0.0, 0.5f32.ln()]), t(&[1, 2, 1], &[0.5, 1.0]));
        let out = rule.eval(&[Some(&q), Some(&k), Some(&v), None, Some(&decay), Some(&beta)], 2).unwrap();
        // S1 = [1, 0]; decayed [0.5, 0]; S^T k = 0.3; delta = 2.7; S2 = [0.5 + 1.62, 2.16].
        let near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(near(&out[0].to_f32().unwrap(), &[1.0, 2.16]), "{:?}", out[0]);
        assert!(near(&out[1].to_f32().unwrap(), &[2.12, 2.16]), "{:?}", out[1]);
    }

    #[test]
    fn a_state_carries_a_sequence_on() {
        let rule = op(2, 1, UpdateRule::Gated);
        let n = |len: usize, f: f32| (0..len).map(|i| (i as f32 * f).sin()).collect::<Vec<_>>();
        let (q, k, v, d) = (n(24, 0.3), n(12, 0.7), n(18, 1.1), n(6, 0.9));
        let part = |from: usize, to: usize, past: Option<&Tensor>| {
            let cut = |x: &[f32]| {
                let width = x.len() / 6;
                t(&[1, to - from, width], &x[from * width..to * width])
            };
            let (q, k, v, d) = (cut(&q), cut(&k), cut(&v), cut(&d));
            rule.eval(&[Some(&q), Some(&k), Some(&v), past, Some(&d)], 2).unwrap()
        };
        let whole = part(0, 6, None);
        let first = part(0, 4, None);
        let second = part(4, 6, Some(&first[1]));
        let mut joined = first[0].to_f32().unwrap();
        joined.extend(second[0].to_f32().unwrap());
        let far = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(far(&joined, &whole[0].to_f32().unwrap()) < 1e-6);
        assert!(far(&second[1].to_f32().unwrap(), &whole[1].to_f32().unwrap()) < 1e-6);
    }

    #[test]
    fn wrong_shapes_are_named() {
        let rule = op(2, 4, UpdateRule::GatedDelta);
        let fact = |dims: &[usize]| {
            Fact::new(doyen_tensor::DType::F32, dims.iter().map(|&d| d.into()).collect::<Vec<_>>())
        };
        let infer = |k: &[usize], decay: &[usize]| {
            let (q, k, v) = (fact(&[1, 3, 8]), fact(k), fact(&[1, 3, 20]));
            let (decay, beta) = (fact(decay), fact(&[1, 3, 1]));
            rule.infer(&[Some(&q), Some(&k), Some(&v), None, Some(&decay), Some(&beta)])
                .map(|f| f[1].shape_text())
                .map_err(|e| e.to_string())
        };
        assert_eq!(infer(&[1, 3, 8], &[1, 3, 4]).unwrap(), "[1,4,4,5]");
        assert_eq!(infer(&[1, 3, 16], &[1, 3, 16]).unwrap(), "[1,4,4,5]");
        assert!(infer(&[1, 3, 12], &[1, 3, 4]).unwrap_err().contains("input key: expected 4 or 2 heads"));
        assert!(infer(&[1, 3, 8], &[1, 3, 3]).unwrap_err().contains("a last axis of 4 or 16"));
    }
}
