//! `ai.onnx::Attention` (23 on; operator contract, section 3.5). Attributes and load-time checks here, the scalar
//! reference in `eval`.

mod eval;
#[cfg(test)]
mod tests;

pub(super) use eval::softmax;

use super::args::{ACTIVATIONS, Want, dim, dim_of, expect, expect_rank, product, same_type};
use super::util::{FLOATS, at_most, check_type, optional, required};
use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Scaled dot-product attention. Inputs: `Q`, `K`, `V` (all `[B,S,N*D]` or all `[B,N,S,D]`), `attn_mask`, `past_key`,
/// `past_value` (both `[B,Nkv,P,D]`) and, from 24 on, `nonpad_kv_seqlen [B]`. Outputs: `Y` in the layout of `Q`, present
/// key, present value, and the scores `[B,Nq,S,P+L]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Query heads; required for rank 3.
    pub q_num_heads: Option<usize>,
    /// Key and value heads; required for rank 3.
    pub kv_num_heads: Option<usize>,
    /// Factor on q.k; `1/sqrt(head size)` when absent.
    pub scale: Option<f32>,
    /// `softcap * tanh(s / softcap)` before the mask, when positive.
    pub softcap: f32,
    /// Query `i` sees keys up to `offset + i`: the offset is the past, or `nonpad_kv_seqlen - S`.
    pub is_causal: bool,
    /// Keys before the query's own that it still sees, when limited (25 on).
    pub left_window: Option<usize>,
    /// Keys after the query's own that it sees, when limited (25 on).
    pub right_window: Option<usize>,
    /// What the fourth output holds.
    pub qk_output: QkOutput,
    /// A mask shorter than the keys hides the rest (24 on).
    pub short_mask: bool,
}

/// What the fourth output holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QkOutput {
    /// Scaled products.
    Raw,
    /// After the softcap.
    Capped,
    /// After the mask.
    Masked,
    /// Probabilities.
    Probabilities,
}

/// Sizes as far as the inputs tell.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: Want,
    queries: Want,
    /// New keys.
    keys: Want,
    past: Want,
    q_heads: Want,
    kv_heads: Want,
    size: Want,
    v_size: Want,
}

impl Sizes {
    fn total(&self) -> Want {
        self.past.zip(self.keys).and_then(|(p, k)| p.checked_add(k))
    }
}

impl Attention {
    /// Batch, sequence, heads and head size of `Q`, `K` or `V`.
    fn heads(name: &str, f: &Fact, attr: &str, count: Option<usize>) -> Result<[Want; 4], OpError> {
        expect_rank(name, f, &[3, 4])?;
        let d = |i: usize| dim_of(Some(f), i);
        match (f.rank(), count) {
            (None, _) => Ok([None; 4]),
            (Some(3), None) => {
                Err(OpError::attribute(attr, "a number of heads for inputs of rank 3", "nothing"))
            }
            (Some(3), Some(n)) => {
                let size = match d(2) {
                    Some(hidden) if hidden == 0 || !hidden.is_multiple_of(n) => {
                        let expected = format!("a hidden size that is a multiple of {n} ({attr})");
                        return Err(OpError::input(name, expected, f.shape_text()));
                    }
                    hidden => hidden.map(|h| h / n),
                };
                Ok([d(0), d(1), Some(n), size])
            }
            (_, count) => {
                if let (Some(n), Some(found)) = (count, d(1))
                    && n != found
                {
                    return Err(OpError::input(name, format!("{n} heads ({attr})"), f.shape_text()));
                }
                Ok([d(0), d(2), d(1), d(3)])
            }
        }
    }

    fn sizes(&self, inputs: &[Option<&Fact>]) -> Result<Sizes, OpError> {
        let (q, k, v) = (required(inputs, 0, "Q")?, required(inputs, 1, "K")?, required(inputs, 2, "V")?);
        for (name, f) in [("K", k), ("V", v)] {
            if let (Some(a), Some(b)) = (q.rank(), f.rank())
                && a != b
            {
                return Err(OpError::input(name, format!("rank {a} as Q"), f.shape_text()));
            }
        }
        let [batch, queries, q_heads, size] = Self::heads("Q", q, "q_num_heads", self.q_num_heads)?;
        let kv_attr = ("kv_num_heads", self.kv_num_heads);
        let [k_batch, keys, k_heads, k_size] = Self::heads("K", k, kv_attr.0, kv_attr.1)?;
        let [v_batch, v_keys, v_heads, v_size] = Self::heads("V", v, kv_attr.0, kv_attr.1)?;
        let agree = |name: &str, what: &str, want: Want, found: Want| match (want, found) {
            (Some(w), Some(f)) if w != f => Err(OpError::input(name, format!("{what} {w}"), f)),
            _ => Ok(want.or(found)),
        };
        let batch = agree("V", "batch", agree("K", "batch", batch, k_batch)?, v_batch)?;
        let size = agree("K", "head size", size, k_size)?;
        if size == Some(0) {
            return Err(OpError::input("Q", "a head size of at least 1", 0));
        }
        let kv_heads = agree("V", "heads", k_heads, v_heads)?;
        let keys = agree("V", "sequence length", keys, v_keys)?;
        if let (Some(q), Some(kv)) = (q_heads, kv_heads)
            && (kv == 0 || !q.is_multiple_of(kv))
        {
            return Err(OpError::input("Q", format!("heads in a multiple of {kv} (kv_num_heads)"), q));
        }
        let past = past(inputs, [batch, kv_heads, size, v_size])?;
        Ok(Sizes { batch, queries, keys, past, q_heads, kv_heads, size, v_size })
    }

    fn check_types(inputs: &[Option<&Fact>]) -> Result<(), OpError> {
        let (q, k, v) = (required(inputs, 0, "Q")?, required(inputs, 1, "K")?, required(inputs, 2, "V")?);
        let dtype = check_type("Q", q, FLOATS)?;
        let v_dtype = check_type("V", v, FLOATS)?;
        same_type("K", Some(k), dtype, "Q")?;
        same_type("past_key", optional(inputs, 4), dtype, "Q")?;
        same_type("past_value", optional(inputs, 5), v_dtype, "V")?;
        if let Some(mask) = optional(inputs, 3) {
            check_type("attn_mask", mask, &[ACTIVATIONS, &[DType::F64, DType::Bool]].concat())?;
        }
        Ok(())
    }

    fn check_mask(&self, mask: &Fact, sizes: Sizes) -> Result<(), OpError> {
        let Some(shape) = &mask.shape else { return Ok(()) };
        let total = sizes.total();
        let want = [sizes.batch, sizes.q_heads, sizes.queries, total];
        let lead = want.len().checked_sub(shape.len());
        let fits = lead.filter(|&l| l < want.len()).is_some_and(|lead| {
            shape.iter().zip(&want[lead..]).enumerate().all(|(i, (d, w))| match (d.known(), w) {
                (Some(d), Some(w)) if lead + i == 3 && self.short_mask => d <= *w,
                (Some(d), Some(w)) => d == *w || d == 1,
                _ => true,
            })
        });
        if fits {
            return Ok(());
        }
        let short = if self.short_mask { ", its last extent or less" } else { "" };
        let expected = format!("a shape that broadcasts to {}{short}", super::args::want_text(&want));
        Err(OpError::input("attn_mask", expected, mask.shape_text()))
    }
}

/// Past caches; their rows, 0 when they are absent.
fn past(inputs: &[Option<&Fact>], [batch, kv_heads, size, v_size]: [Want; 4]) -> Result<Want, OpError> {
    let (key, value) = (optional(inputs, 4), optional(inputs, 5));
    let (Some(key), Some(value)) = (key, value) else {
        return match (key, value) {
            (None, None) => Ok(Some(0)),
            (None, _) => Err(OpError::input("past_key", "a value beside past_value", "nothing")),
            _ => Err(OpError::input("past_value", "a value beside past_key", "nothing")),
        };
    };
    let rows = dim_of(Some(key), 2).or(dim_of(Some(value), 2));
    let why = "batch, kv heads, rows, head size";
    expect("past_key", key, &[batch, kv_heads, rows, size], why)?;
    expect("past_value", value, &[batch, kv_heads, rows, v_size], why)?;
    Ok(rows)
}

impl OpDef for Attention {
    fn parse(_: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let q_num_heads = attrs.count("q_num_heads", "heads")?;
        let kv_num_heads = attrs.count("kv_num_heads", "heads")?;
        if let Some(v) = attrs.int("softmax_precision")?
            && ![1, 10, 11, 16].contains(&v)
        {
            return Err(OpError::attribute("softmax_precision", "1, 10, 11 or 16 (a float type)", v));
        }
        let qk_output = match attrs.int("qk_matmul_output_mode")?.unwrap_or(0) {
            0 => QkOutput::Raw,
            1 => QkOutput::Capped,
            2 => QkOutput::Masked,
            3 => QkOutput::Probabilities,
            v => return Err(OpError::attribute("qk_matmul_output_mode", "0 to 3", v)),
        };
        let mut window = |name: &'static str| {
            if opset < 25 {
                return Ok(None);
            }
            match attrs.int(name)?.unwrap_or(-1) {
                -1 => Ok(None),
                v => usize::try_from(v).map(Some).map_err(|_| OpError::attribute(name, "-1 or more", v)),
            }
        };
        let (left_window, right_window) = (window("left_window_size")?, window("right_window_size")?);
        Ok(Self {
            q_num_heads,
            kv_num_heads,
            scale: attrs.finite("scale")?,
            softcap: attrs.not_negative("softcap")?.unwrap_or(0.0),
            is_causal: attrs.flag("is_causal", false)?,
            left_window,
            right_window,
            qk_output,
            short_mask: opset >= 24,
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, if self.short_mask { 7 } else { 6 })?;
        Self::check_types(inputs)?;
        let sizes = self.sizes(inputs)?;
        if let Some(mask) = optional(inputs, 3) {
            self.check_mask(mask, sizes)?;
        }
        if let Some(n) = optional(inputs, 6) {
            check_type("nonpad_kv_seqlen", n, &[DType::I64])?;
            expect("nonpad_kv_seqlen", n, &[sizes.batch], "batch")?;
            if optional(inputs, 4).is_some() {
                return Err(OpError::input("nonpad_kv_seqlen", "nothing beside past_key", "lengths"));
            }
        }
        let (q, v) = (required(inputs, 0, "Q")?, required(inputs, 2, "V")?);
        let fact = |dtype: Option<DType>, dims: &[Want]| Fact {
            dtype,
            shape: Some(dims.iter().map(|&d| dim(d)).collect()),
            constant: None,
        };
        let Sizes { batch, queries, q_heads, kv_heads, size, v_size, .. } = sizes;
        let y = match q.rank() {
            None => Fact::of_type(q.dtype),
            Some(3) => fact(q.dtype, &[batch, queries, product("V", &[q_heads, v_size])?]),
            Some(_) => fact(q.dtype, &[batch, q_heads, queries, v_size]),
        };
        let total = sizes.total();
        Ok(vec![
            y,
            fact(q.dtype, &[batch, kv_heads, total, size]),
            fact(v.dtype, &[batch, kv_heads, total, v_size]),
            fact(q.dtype, &[batch, q_heads, queries, total]),
        ])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], outputs: usize) -> Result<Vec<Tensor>, OpError> {
        eval::run(self, inputs, outputs)
    }

    fn trace(&self, _: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        Err("it owns state: attention over the sequence".into())
    }
}
