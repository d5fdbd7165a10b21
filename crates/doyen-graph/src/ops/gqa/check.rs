//! Load-time checks of every input, and the sizes that follow from them.

use super::super::OpError;
use super::super::args::{
    ACTIVATIONS, Want, dim, dim_of, expect, expect_if, expect_rank, product, same_type,
};
use super::super::util::{at_most, check_type, constant_int, optional, required};
use super::input::{
    ATTENTION_BIAS, COS_CACHE, HEAD_SINK, K_NORM_WEIGHT, K_SCALE, KEY, PAST_KEY, PAST_VALUE, POSITION_IDS,
    Q_NORM_WEIGHT, QUERY, SEQLENS_K, SIN_CACHE, TOTAL_SEQUENCE_LENGTH, V_SCALE, VALUE,
};
use super::{Granularity, GroupQueryAttention, KvCache, QkOutput};
use crate::ir::Fact;
use doyen_tensor::DType;

/// Sizes as far as the inputs tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: Want,
    /// New tokens of every sequence.
    pub(super) seq: Want,
    pub(super) head_size: Want,
    /// Rows of the past caches; 0 when they are absent.
    pub(super) capacity: Want,
}

/// Checks all inputs; returns the facts of all outputs.
pub(super) fn inputs(op: &GroupQueryAttention, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
    let sizes = sizes(op, inputs)?;
    let query = required(inputs, QUERY, "query")?;
    let dtype = query.dtype;
    lengths(inputs, sizes)?;
    rotary(op, inputs, sizes, dtype)?;
    scores(op, inputs, sizes, dtype)?;
    kv_scales(op, inputs, sizes)?;
    let total = match optional(inputs, TOTAL_SEQUENCE_LENGTH) {
        Some(f) => constant_int("total_sequence_length", f)?.and_then(|v| usize::try_from(v).ok()),
        None => None,
    };
    let present =
        if op.window_cache { sizes.capacity } else { sizes.capacity.zip(total).map(|(c, t)| c.max(t)) };
    let hidden = product("query", &[sizes.head_size, Some(op.num_heads)])?;
    let columns = cache_columns(op, sizes.head_size);
    let fact = |dtype: Option<DType>, dims: &[Want]| Fact {
        dtype,
        shape: Some(dims.iter().map(|&d| dim(d)).collect()),
        constant: None,
    };
    let cache = fact(cache_type(op, dtype), &[sizes.batch, Some(op.kv_num_heads), present, columns]);
    let mut out = vec![fact(dtype, &[sizes.batch, sizes.seq, hidden]), cache.clone(), cache];
    if op.qk_output != QkOutput::None {
        out.push(fact(dtype, &[sizes.batch, Some(op.num_heads), sizes.seq, total]));
    }
    Ok(out)
}

/// The caches' element type.
pub(super) fn cache_type(op: &GroupQueryAttention, dtype: Option<DType>) -> Option<DType> {
    match op.kv {
        KvCache::Float => dtype,
        KvCache::Int8(_) => Some(DType::I8),
        KvCache::Int4(_) => Some(DType::U8),
    }
}

fn cache_columns(op: &GroupQueryAttention, head_size: Want) -> Want {
    match op.kv {
        KvCache::Int4(_) => head_size.map(|d| d / 2),
        _ => head_size,
    }
}

/// Query, key, value and the past caches.
pub(super) fn sizes(op: &GroupQueryAttention, inputs: &[Option<&Fact>]) -> Result<Sizes, OpError> {
    at_most(inputs, 16)?;
    let query = required(inputs, QUERY, "query")?;
    let dtype = check_type("query", query, ACTIVATIONS)?;
    expect_rank("query", query, &[3])?;
    let (key, value) = (optional(inputs, KEY), optional(inputs, VALUE));
    if key.is_some() != value.is_some() {
        let (name, other) = if key.is_some() { ("value", "key") } else { ("key", "value") };
        return Err(OpError::input(
            name,
            format!("a value beside {other} (both, or packed in query)"),
            "nothing",
        ));
    }
    let parts = if key.is_some() { op.num_heads } else { op.num_heads + 2 * op.kv_num_heads };
    let head_size = match dim_of(Some(query), 2) {
        Some(n) if n == 0 || !n.is_multiple_of(parts) => {
            let packed = if key.is_some() { "num_heads" } else { "num_heads + 2 * kv_num_heads, packed QKV" };
            let expected = format!("a hidden size that is a multiple of {parts} ({packed})");
            return Err(OpError::input("query", expected, query.shape_text()));
        }
        n => n.map(|n| n / parts),
    };
    if let (KvCache::Int4(_), Some(d)) = (op.kv, head_size)
        && !d.is_multiple_of(2)
    {
        return Err(OpError::input("query", "an even head size with 4-bit caches", d));
    }
    let (batch, seq) = (dim_of(Some(query), 0), dim_of(Some(query), 1));
    let kv_hidden = product("key", &[head_size, Some(op.kv_num_heads)])?;
    for (name, f) in [("key", key), ("value", value)] {
        same_type(name, f, dtype, "query")?;
        expect_if(name, f, &[batch, seq, kv_hidden], "batch, sequence, kv_num_heads * head size")?;
    }
    let capacity = past(op, inputs, (batch, head_size), dtype)?;
    Ok(Sizes { batch, seq, head_size, capacity })
}

fn past(
    op: &GroupQueryAttention,
    inputs: &[Option<&Fact>],
    (batch, head_size): (Want, Want),
    dtype: Option<DType>,
) -> Result<Want, OpError> {
    let (key, value) = (optional(inputs, PAST_KEY), optional(inputs, PAST_VALUE));
    if key.is_some() != value.is_some() {
        let name = if key.is_some() { "past_value" } else { "past_key" };
        return Err(OpError::input(name, "a value (past_key and past_value go together)", "nothing"));
    }
    let rows = dim_of(key, 2).or(dim_of(value, 2));
    let want = [batch, Some(op.kv_num_heads), rows, cache_columns(op, head_size)];
    for (name, f) in [("past_key", key), ("past_value", value)] {
        let Some(f) = f else { continue };
        if let Some(t) = cache_type(op, dtype) {
            check_type(name, f, &[t])?;
        }
        expect(name, f, &want, "batch, kv_num_heads, rows, channels")?;
    }
    match (op.window, rows) {
        (_, _) if op.window_cache && key.is_none() => {
            Err(OpError::input("past_key", "a window-sized buffer with sliding_window_cache", "nothing"))
        }
        (Some(w), Some(c)) if op.window_cache && c < w => {
            Err(OpError::input("past_key", format!("at least {w} rows (local_window_size)"), c))
        }
        _ => Ok(if key.is_some() { rows } else { Some(0) }),
    }
}

fn lengths(inputs: &[Option<&Fact>], sizes: Sizes) -> Result<(), OpError> {
    let seqlens = required(inputs, SEQLENS_K, "seqlens_k")?;
    check_type("seqlens_k", seqlens, &[DType::I32])?;
    match seqlens.rank() {
        // A producer keeps the summed axis of the mask.
        Some(2) => expect("seqlens_k", seqlens, &[sizes.batch, Some(1)], "batch, 1")?,
        _ => expect("seqlens_k", seqlens, &[sizes.batch], "batch")?,
    }
    let total = required(inputs, TOTAL_SEQUENCE_LENGTH, "total_sequence_length")?;
    check_type("total_sequence_length", total, &[DType::I32])?;
    match total.rank() {
        Some(0) | None => Ok(()),
        _ => expect("total_sequence_length", total, &[Some(1)], "one number"),
    }
}

fn rotary(
    op: &GroupQueryAttention,
    inputs: &[Option<&Fact>],
    sizes: Sizes,
    dtype: Option<DType>,
) -> Result<(), OpError> {
    if let Some(ids) = optional(inputs, POSITION_IDS) {
        check_type("position_ids", ids, &[DType::I64])?;
        expect("position_ids", ids, &[sizes.batch, sizes.seq], "batch, sequence")?;
    }
    let Some(rotary) = op.rotary else { return Ok(()) };
    let missing = |name: &str| OpError::input(name, "a value with do_rotary 1", "nothing");
    let cos = optional(inputs, COS_CACHE).ok_or_else(|| missing("cos_cache"))?;
    let sin = optional(inputs, SIN_CACHE).ok_or_else(|| missing("sin_cache"))?;
    let half = dim_of(Some(cos), 1).or(dim_of(Some(sin), 1));
    let rows = dim_of(Some(cos), 0).or(dim_of(Some(sin), 0));
    for (name, f) in [("cos_cache", cos), ("sin_cache", sin)] {
        same_type(name, Some(f), dtype, "query")?;
        expect(name, f, &[rows, half], "positions, half the rotated channels")?;
    }
    let Some(half) = half else { return Ok(()) };
    let fits = sizes.head_size.is_none_or(|d| half.checked_mul(2).is_some_and(|r| r <= d));
    if !fits || half == 0 || !half.is_multiple_of(8) {
        let size = sizes.head_size.map_or_else(|| "?".to_owned(), |d| (d / 2).to_string());
        let expected = format!("a multiple of 8 columns, at most {size} (half a head)");
        return Err(OpError::input("cos_cache", expected, half));
    }
    match rotary.dim {
        Some(d) if d != 2 * half => {
            let expected = format!("{} (twice the columns of cos_cache)", 2 * half);
            Err(OpError::attribute("rotary_embedding_dim", expected, d))
        }
        _ => Ok(()),
    }
}

/// Bias, sinks and norm weights.
fn scores(
    op: &GroupQueryAttention,
    inputs: &[Option<&Fact>],
    sizes: Sizes,
    dtype: Option<DType>,
) -> Result<(), OpError> {
    if let Some(bias) = optional(inputs, ATTENTION_BIAS) {
        same_type("attention_bias", Some(bias), dtype, "query")?;
        let total = match optional(inputs, TOTAL_SEQUENCE_LENGTH) {
            Some(f) => constant_int("total_sequence_length", f)?.and_then(|v| usize::try_from(v).ok()),
            None => None,
        };
        let one = |axis: usize, full: Want| match dim_of(Some(bias), axis) {
            Some(1) => Some(1),
            _ => full,
        };
        let want = [one(0, sizes.batch), one(1, Some(op.num_heads)), sizes.seq, total];
        expect("attention_bias", bias, &want, "batch or 1, num_heads or 1, sequence, total_sequence_length")?;
    }
    let sink = optional(inputs, HEAD_SINK);
    same_type("head_sink", sink, dtype, "query")?;
    expect_if("head_sink", sink, &[Some(op.num_heads)], "num_heads")?;
    let (q, k) = (optional(inputs, Q_NORM_WEIGHT), optional(inputs, K_NORM_WEIGHT));
    if q.is_some() != k.is_some() {
        let name = if q.is_some() { "k_norm_weight" } else { "q_norm_weight" };
        return Err(OpError::input(name, "a value (q_norm_weight and k_norm_weight go together)", "nothing"));
    }
    for (name, f) in [("q_norm_weight", q), ("k_norm_weight", k)] {
        same_type(name, f, dtype, "query")?;
        expect_if(name, f, &[sizes.head_size], "head size")?;
    }
    Ok(())
}

fn kv_scales(op: &GroupQueryAttention, inputs: &[Option<&Fact>], sizes: Sizes) -> Result<(), OpError> {
    let scales = op.kv.scales();
    for (name, i, granularity) in
        [("k_scale", K_SCALE, scales.map(|s| s.key)), ("v_scale", V_SCALE, scales.map(|s| s.value))]
    {
        match (optional(inputs, i), granularity) {
            (None, None) => {}
            (Some(_), None) => {
                return Err(OpError::input(name, "nothing with float caches", "scales"));
            }
            (None, Some(_)) => {
                return Err(OpError::input(name, "scales with quantized caches", "nothing"));
            }
            (Some(f), Some(g)) => {
                check_type(name, f, &[DType::F32])?;
                match g {
                    Granularity::Tensor if f.rank() == Some(0) => {}
                    Granularity::Tensor => expect(name, f, &[Some(1)], "PER_TENSOR")?,
                    Granularity::Channel => {
                        let want = [Some(1), Some(op.kv_num_heads), Some(1), sizes.head_size];
                        expect(name, f, &want, "PER_CHANNEL: 1, kv_num_heads, 1, head size")?;
                    }
                }
            }
        }
    }
    Ok(())
}
