//! Load-time checks of MultiHeadAttention's inputs, and the sizes that follow from them.

use super::super::OpError;
use super::super::args::{ACTIVATIONS, Want, dim, dim_of, expect, expect_rank, product, same_type};
use super::super::util::{at_most, check_type, optional, required};
use super::{MultiHeadAttention, input as at};
use crate::ir::Fact;
use doyen_tensor::DType;

/// How queries, keys and values arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `[B,S,N*D]`, `[B,L,N*D]`, `[B,L,N*Dv]`.
    Separate,
    /// Keys and values `[B,N,L,D]` and `[B,N,L,Dv]`, as a cache of another sequence holds them.
    HeadMajor,
    /// Keys and values side by side in `key`, `[B,L,N,2,D]`.
    PackedKv,
    /// All three side by side in `query`, `[B,S,N,3,D]`.
    PackedQkv,
}

/// Sizes as far as the inputs tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) form: Form,
    pub(super) batch: Want,
    pub(super) queries: Want,
    /// New keys.
    pub(super) keys: Want,
    pub(super) past: Want,
    pub(super) size: Want,
    pub(super) v_size: Want,
}

impl Sizes {
    pub(super) fn total(&self) -> Want {
        self.past.zip(self.keys).and_then(|(p, k)| p.checked_add(k))
    }
}

impl MultiHeadAttention {
    /// How the inputs arrive.
    ///
    /// # Errors
    /// When key and value are absent or of ranks that mean nothing together.
    pub fn form(&self, inputs: &[Option<&Fact>]) -> Result<Form, OpError> {
        let query = required(inputs, at::QUERY, "query")?;
        expect_rank("query", query, &[3, 5])?;
        let (key, value) = (optional(inputs, at::KEY), optional(inputs, at::VALUE));
        let nothing = |name: &str, f: Option<&Fact>, with: &str| match f {
            None => Ok(()),
            Some(f) => Err(OpError::input(name, format!("nothing beside {with}"), f.shape_text())),
        };
        if query.rank() == Some(5) {
            nothing("key", key, "a packed query")?;
            nothing("value", value, "a packed query")?;
            return Ok(Form::PackedQkv);
        }
        let key = required(inputs, at::KEY, "key")?;
        expect_rank("key", key, &[3, 4, 5])?;
        if key.rank() == Some(5) {
            nothing("value", value, "packed keys and values")?;
            return Ok(Form::PackedKv);
        }
        let value = required(inputs, at::VALUE, "value")?;
        expect_rank("value", value, &[3, 4])?;
        match (key.rank(), value.rank()) {
            (Some(k), Some(v)) if k != v => {
                Err(OpError::input("value", format!("rank {k} as key"), value.shape_text()))
            }
            (Some(4), _) | (_, Some(4)) => Ok(Form::HeadMajor),
            _ => Ok(Form::Separate),
        }
    }

    fn head_size(&self, name: &str, f: &Fact) -> Result<Want, OpError> {
        match f.dim(2).known() {
            Some(hidden) if hidden == 0 || !hidden.is_multiple_of(self.num_heads) => {
                let expected = format!("a hidden size that is a multiple of {} (num_heads)", self.num_heads);
                Err(OpError::input(name, expected, f.shape_text()))
            }
            hidden => Ok(hidden.map(|h| h / self.num_heads)),
        }
    }

    /// The sizes, from query, key and value and the past; the shapes of these agree.
    pub(super) fn sizes(&self, inputs: &[Option<&Fact>]) -> Result<Sizes, OpError> {
        let form = self.form(inputs)?;
        let query = required(inputs, at::QUERY, "query")?;
        let (key, value) = (optional(inputs, at::KEY), optional(inputs, at::VALUE));
        let heads = Some(self.num_heads);
        let (batch, queries) = (dim_of(Some(query), 0), dim_of(Some(query), 1));
        let mut s = Sizes { form, batch, queries, keys: queries, past: None, size: None, v_size: None };
        if form == Form::PackedQkv {
            s.size = dim_of(Some(query), 4);
            let want = [s.batch, s.queries, heads, Some(3), s.size];
            expect("query", query, &want, "batch, sequence, num_heads, 3, head size")?;
        } else {
            s.size = self.head_size("query", query)?;
        }
        s.v_size = s.size;
        let hidden = product("query", &[heads, s.size])?;
        match (form, key, value) {
            (Form::PackedKv, Some(key), _) => {
                s.keys = dim_of(Some(key), 1);
                let want = [s.batch, s.keys, heads, Some(2), s.size];
                expect("key", key, &want, "batch, sequence, num_heads, 2, head size")?;
            }
            (Form::HeadMajor, Some(key), Some(value)) => {
                (s.keys, s.v_size) = (dim_of(Some(key), 2), dim_of(Some(value), 3));
                let why = "batch, num_heads, sequence, head size";
                expect("key", key, &[s.batch, heads, s.keys, s.size], why)?;
                expect("value", value, &[s.batch, heads, s.keys, s.v_size], why)?;
            }
            (Form::Separate, Some(key), Some(value)) => {
                (s.keys, s.v_size) = (dim_of(Some(key), 1), self.head_size("value", value)?);
                expect("key", key, &[s.batch, s.keys, hidden], "batch, sequence, the query's channels")?;
                expect("value", value, &[s.batch, s.keys, dim_of(Some(value), 2)], "as key")?;
            }
            _ => {}
        }
        if s.size == Some(0) || s.v_size == Some(0) {
            return Err(OpError::input("query", "head sizes of at least 1", 0));
        }
        s.past = self.past(inputs, &s)?;
        Ok(s)
    }

    /// Rows of the past caches, 0 when they are absent.
    fn past(&self, inputs: &[Option<&Fact>], s: &Sizes) -> Result<Want, OpError> {
        let (key, value) = (optional(inputs, at::PAST_KEY), optional(inputs, at::PAST_VALUE));
        let (Some(key), Some(value)) = (key, value) else {
            return match (key, value) {
                (None, None) => Ok(Some(0)),
                (None, _) => Err(OpError::input("past_key", "a value beside past_value", "nothing")),
                _ => Err(OpError::input("past_value", "a value beside past_key", "nothing")),
            };
        };
        if s.form == Form::HeadMajor {
            return Err(OpError::input("past_key", "nothing beside keys of rank 4", key.shape_text()));
        }
        let rows = dim_of(Some(key), 2).or(dim_of(Some(value), 2));
        let (heads, why) = (Some(self.num_heads), "batch, num_heads, rows, head size");
        expect("past_key", key, &[s.batch, heads, rows, s.size], why)?;
        expect("past_value", value, &[s.batch, heads, rows, s.v_size], why)?;
        Ok(rows)
    }
}

/// The extents a padding mask may have: lengths `[B]`, keys `[B,T]`, or keys of every query `[B,S,T]`.
fn padding_mask(mask: &Fact, s: &Sizes) -> Result<(), OpError> {
    check_type("key_padding_mask", mask, &[DType::I32])?;
    expect_rank("key_padding_mask", mask, &[1, 2, 3])?;
    let total = s.total();
    let want: &[Want] = match mask.rank() {
        Some(1) => &[s.batch],
        Some(2) => &[s.batch, total],
        Some(3) => &[s.batch, s.queries, total],
        _ => return Ok(()),
    };
    expect("key_padding_mask", mask, want, "[batch], [batch, keys] or [batch, queries, keys]")
}

fn attention_bias(op: &MultiHeadAttention, bias: &Fact, s: &Sizes) -> Result<(), OpError> {
    expect_rank("attention_bias", bias, &[4])?;
    let axis = |i: usize, want: Want| if bias.dim(i).known() == Some(1) { Some(1) } else { want };
    let want = [axis(0, s.batch), axis(1, Some(op.num_heads)), s.queries, s.total()];
    expect("attention_bias", bias, &want, "batch or 1, num_heads or 1, queries, keys")
}

/// Checks all inputs; the outputs.
pub(super) fn inputs(op: &MultiHeadAttention, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
    at_most(inputs, 10)?;
    for (i, name) in
        [(at::PAST_SEQUENCE_LENGTH, "past_sequence_length"), (at::CACHE_INDIRECTION, "cache_indirection")]
    {
        if let Some(f) = optional(inputs, i) {
            let expected = "nothing: the past is as long as past_key, and beams do not share it";
            return Err(OpError::input(name, expected, f.shape_text()));
        }
    }
    let query = required(inputs, at::QUERY, "query")?;
    let dtype = check_type("query", query, ACTIVATIONS)?;
    let typed = [
        (at::KEY, "key"),
        (at::VALUE, "value"),
        (at::BIAS, "bias"),
        (at::ATTENTION_BIAS, "attention_bias"),
        (at::PAST_KEY, "past_key"),
        (at::PAST_VALUE, "past_value"),
    ];
    for (i, name) in typed {
        same_type(name, optional(inputs, i), dtype, "query")?;
    }
    let s = op.sizes(inputs)?;
    let heads = Some(op.num_heads);
    let per_token =
        product("bias", &[heads, s.size.zip(s.v_size).and_then(|(k, v)| (2 * k).checked_add(v))])?;
    if let Some(bias) = optional(inputs, at::BIAS) {
        if s.form == Form::HeadMajor {
            return Err(OpError::input("bias", "nothing beside keys of rank 4", bias.shape_text()));
        }
        expect("bias", bias, &[per_token], "channels of query, key and value")?;
    }
    if let Some(mask) = optional(inputs, at::KEY_PADDING_MASK) {
        padding_mask(mask, &s)?;
    }
    if let Some(bias) = optional(inputs, at::ATTENTION_BIAS) {
        attention_bias(op, bias, &s)?;
    }
    let fact =
        |dims: &[Want]| Fact { dtype, shape: Some(dims.iter().map(|&d| dim(d)).collect()), constant: None };
    Ok(vec![
        fact(&[s.batch, s.queries, product("value", &[heads, s.v_size])?]),
        fact(&[s.batch, heads, s.total(), s.size]),
        fact(&[s.batch, heads, s.total(), s.v_size]),
        fact(&[s.batch, heads, s.queries, s.total()]),
    ])
}
