//! Attention: query and key norms, rotary embedding, append to the cache, attend.

use super::{Binder, Context, Kernel, prefill::Prefill, ready};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::{
        caches::{Row, Store},
        io::Io,
        step::Step,
    },
    weights::{Floats, float_kind, optional},
};
use doyen_graph::{
    device::{DeviceError, Limits, SeqSpan},
    lowered::{Attention, KvFormat},
};

/// Places of the operands.
mod at {
    pub(super) const Q: usize = 0;
    pub(super) const K: usize = 1;
    pub(super) const V: usize = 2;
    pub(super) const COS: usize = 3;
    pub(super) const SIN: usize = 4;
    pub(super) const Q_NORM: usize = 5;
    pub(super) const K_NORM: usize = 6;
    pub(super) const SINK: usize = 7;
    pub(super) const K_SCALE: usize = 8;
    pub(super) const V_SCALE: usize = 9;
    pub(super) const POSITIONS: usize = 10;
    pub(super) const BIAS: usize = 11;
}

/// Rows of (query, head) of a tile, and keys it takes at a time: `ROWS` and `PIECE` of attention.cu.
const ROWS: usize = 16;
const PIECE: usize = 32;

/// Blocks of `attention_prepare` that fill a multiprocessor.
const PREPARE_BLOCKS: usize = 16;

/// How the keys of a step are split over blocks when one new token of each sequence is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Splits {
    /// Blocks that share the keys of the longest sequence.
    pub(crate) count: usize,
    /// Keys of each, a multiple of `PIECE`.
    pub(crate) keys: usize,
}

impl Splits {
    const ONE: Self = Self { count: 1, keys: 0 };
    /// Blocks at most: `MOST_SPLITS` of attention.cu.
    const MOST: usize = 64;

    /// Of `longest` keys of each of `sequences` sequences: few sequences fill the card with short splits; long contexts take
    /// longer ones where the card is full already. Powers of two, so that few steps are of a shape of their own.
    const fn of(sequences: usize, longest: usize) -> Self {
        let (mut keys, most) = match sequences {
            0..=2 => (64, Self::MOST),
            3..=16 => (128, 32),
            _ => (256, 8),
        };
        while longest > keys * most {
            keys *= 2;
        }
        Self { count: longest.div_ceil(keys).next_power_of_two(), keys }
    }
}

/// The most places for what splits leave that a step of up to `sequences` sequences takes.
pub(super) fn most_splits(sequences: usize, context: usize) -> usize {
    let all = [2, 16, sequences].into_iter().map(|n| n.min(sequences));
    all.map(|n| n * Splits::of(n, context).count).max().unwrap_or(0)
}

/// Queries of a tile: as many as share a key head's rows.
pub(crate) fn tile_queries(heads: usize, kv_heads: usize) -> usize {
    (ROWS * kv_heads / heads.max(1)).clamp(1, ROWS)
}

/// Blocks that share the keys of a step: several where every sequence has one new token, whose rows alone would leave the
/// card idle.
pub(crate) fn splits(step: &Step) -> Splits {
    if step.decode { Splits::of(step.sequences, step.longest) } else { Splits::ONE }
}

struct AttentionKernel {
    op: Attention,
    row: Row,
    per_channel: bool,
    cos: Option<Floats>,
    sin: Option<Floats>,
    q_norm: Option<Floats>,
    k_norm: Option<Floats>,
    sink: Option<Floats>,
    k_scale: Option<Floats>,
    v_scale: Option<Floats>,
    prefill: Option<Prefill>,
    functions: Option<Functions>,
}

struct Functions {
    prepare: Function,
    attend: Function,
    join: Function,
}

impl AttentionKernel {
    fn floats(&self) -> impl Iterator<Item = &Floats> {
        let all =
            [&self.cos, &self.sin, &self.q_norm, &self.k_norm, &self.sink, &self.k_scale, &self.v_scale];
        all.into_iter().filter_map(Option::as_ref)
    }

    const fn prepare_shared(&self) -> usize {
        let (k, v) = (self.op.head_size, self.op.v_head_size);
        4 * 4 * if k > v { k } else { v }
    }

    const fn attend_shared(&self) -> usize {
        let (k, v) = (self.op.head_size, self.op.v_head_size);
        4 * (PIECE * (k + 1) + PIECE * v + ROWS * k + ROWS * (PIECE + 1) + ROWS * v)
    }

    /// Bytes of the prepared queries of `tokens` tokens.
    const fn queries(&self, tokens: usize) -> usize {
        (4 * tokens * self.op.heads * self.op.head_size).next_multiple_of(256)
    }

    /// Bytes of what `splits` blocks of keys leave for each of `tokens` tokens.
    const fn parts(&self, tokens: usize, splits: usize) -> usize {
        4 * tokens * self.op.heads * splits * (self.op.v_head_size + 2)
    }

    fn store(
        &self,
        store: &Store,
        scales: Option<&Floats>,
        head_size: usize,
    ) -> Result<params::Store, CudaError> {
        Ok(params::Store {
            rows: store.addr(),
            scales: optional(scales).0,
            lost: store.lost()?,
            kind: self.row.kind(),
            per_channel: u32::from(self.per_channel),
            head_size: head_size as u32,
        })
    }

    /// Addresses and strides in elements of queries, keys and values as they arrive.
    fn arriving(&self, io: &Io<'_>) -> Result<[(Addr, u64); 3], CudaError> {
        let (q, k) = (self.op.heads * self.op.head_size, self.op.kv_heads * self.op.head_size);
        let v = self.op.kv_heads * self.op.v_head_size;
        if self.op.packed_qkv {
            let all = (q + k + v) as u64;
            return Ok([
                (io.input_at(at::Q, 0)?, all),
                (io.input_at(at::Q, q)?, all),
                (io.input_at(at::Q, q + k)?, all),
            ]);
        }
        Ok([(io.input(at::Q)?, q as u64), (io.input(at::K)?, k as u64), (io.input(at::V)?, v as u64)])
    }

    /// Address, strides and keys of a step's bias.
    fn bias(&self, io: &Io<'_>, sequences: &[SeqSpan]) -> Result<(Addr, [u64; 4], u32), CudaError> {
        if io.input_ref(at::BIAS).is_none() {
            return Ok((Addr::NONE, [0; 4], 0));
        }
        let dims = io.input_dims(at::BIAS);
        let longest = |of: fn(&SeqSpan) -> usize| sequences.iter().map(of).max().unwrap_or(0);
        let reach = (longest(|s| s.len), longest(|s| s.past + s.len));
        let strides = self
            .op
            .bias_strides(&dims, sequences.len(), reach)
            .map_err(|reason| CudaError::Driver { what: "attention".into(), reason })?;
        Ok((io.input(at::BIAS)?, strides.map(|s| s as u64), dims.last().map_or(0, |&k| k as u32)))
    }

    fn prepare(
        &self,
        io: &Io<'_>,
        cx: &Context<'_>,
        (batch, keys, values): (params::Batch, params::Store, params::Store),
        (q_out, number): (Addr, usize),
    ) -> Result<(), CudaError> {
        let [(q, q_stride), (k, k_stride), (v, v_stride)] = self.arriving(io)?;
        let (q_norm, q_norm_float) = optional(self.q_norm.as_ref());
        let (k_norm, k_norm_float) = optional(self.k_norm.as_ref());
        let (cos, rotary_float) = optional(self.cos.as_ref());
        let half = self.op.rotary.map_or(0, |r| r.dim / 2);
        let rows = self.cos.as_ref().map_or(0, |c| c.len() / half.max(1));
        let params = params::Prepare {
            batch,
            keys,
            values,
            q,
            k,
            v,
            q_out,
            q_norm,
            k_norm,
            cos,
            sin: optional(self.sin.as_ref()).0,
            positions: io.input(at::POSITIONS)?,
            fault: cx.fault,
            q_stride,
            k_stride,
            v_stride,
            heads: self.op.heads as u32,
            q_norm_float,
            k_norm_float,
            rotary_float,
            rotary_half: half as u32,
            rotary_rows: rows as u32,
            interleaved: u32::from(self.op.rotary.is_some_and(|r| r.interleaved)),
            eps: self.op.qk_norm.unwrap_or(0.0),
            node: number as u32,
        };
        let heads = self.op.heads + 2 * self.op.kv_heads;
        // Warps take several heads of a token where the card is full without: what they know of the token serves for all.
        let full = (PREPARE_BLOCKS * cx.gpu.multiprocessors()).div_ceil(io.tokens.max(1));
        let grid = Grid::new([io.tokens, heads.div_ceil(4).min(full), 1], 128).shared(self.prepare_shared());
        cx.gpu.launch(&ready(self.functions.as_ref())?.prepare, grid, params)
    }
}

impl Kernel for AttentionKernel {
    fn name(&self) -> String {
        let qk_norm = if self.op.qk_norm.is_some() { " + qk_norm" } else { "" };
        let rotary = if self.op.rotary.is_some() { " + rotary" } else { "" };
        format!("paged_attention{qk_norm}{rotary}")
    }

    fn scratch(&self, limits: &Limits) -> usize {
        // Keys are split only in steps of one token a sequence.
        self.queries(limits.tokens) + self.parts(most_splits(limits.sequences, limits.context), 1)
    }

    fn resident(&self) -> usize {
        self.floats().map(Floats::bytes).sum()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        let all = [
            &mut self.cos,
            &mut self.sin,
            &mut self.q_norm,
            &mut self.k_norm,
            &mut self.sink,
            &mut self.k_scale,
            &mut self.v_scale,
        ];
        for floats in all.into_iter().filter_map(Option::as_mut) {
            floats.upload(gpu, constants)?;
        }
        if let Some(prefill) = &mut self.prefill {
            prefill.load(gpu)?;
        }
        self.functions = Some(Functions {
            prepare: gpu.function(Module::Attention, "attention_prepare", self.prepare_shared())?,
            attend: gpu.function(Module::Attention, "attend", self.attend_shared())?,
            join: gpu.function(Module::Attention, "attention_join", 0)?,
        });
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, number: usize) -> Result<(), CudaError> {
        let functions = ready(self.functions.as_ref())?;
        let (stored_keys, stored_values) = cx.caches.layer(self.op.slot)?;
        let keys = self.store(stored_keys, self.k_scale.as_ref(), self.op.head_size)?;
        let values = self.store(stored_values, self.v_scale.as_ref(), self.op.v_head_size)?;
        let (table_start, pages) = cx.step.tables[self.op.slot.group];
        let batch = params::Batch {
            token_sequence: cx.step.token_sequence,
            first: cx.step.first,
            len: cx.step.len,
            past: cx.step.past,
            table_start,
            pages,
            page_shift: stored_keys.page_shift(),
            kv_heads: self.op.kv_heads as u32,
        };
        let q = cx.scratch.at(0, self.queries(io.tokens))?;
        self.prepare(io, cx, (batch, keys, values), (q, number))?;

        let Splits { count: splits, keys: split_keys } = splits(cx.step);
        let part = if splits > 1 {
            cx.scratch.at(self.queries(io.tokens), self.parts(io.tokens, splits))?
        } else {
            Addr::NONE
        };
        let prefill = self.prefill.as_ref().filter(|_| Prefill::takes(cx.step.decode, batch.page_shift));
        let queries = prefill.map_or_else(|| tile_queries(self.op.heads, self.op.kv_heads), |p| p.queries);
        let (tiles, count) = cx.step.tiles(queries)?;
        let (bias, bias_stride, bias_keys) = self.bias(io, cx.batch.sequences)?;
        let params = params::Attend {
            batch,
            keys,
            values,
            q,
            y: io.output(0)?,
            part,
            tiles,
            sink: optional(self.sink.as_ref()).0,
            bias,
            bias_stride,
            bias_keys,
            heads: self.op.heads as u32,
            queries: queries as u32,
            window: self.op.window.map_or(0, |w| u32::try_from(w).unwrap_or(0)),
            causal: u32::from(self.op.causal),
            zero_sink: u32::from(self.op.smooth_softmax && self.sink.is_none()),
            splits: splits as u32,
            split_keys: split_keys as u32,
            scale: self.op.scale,
            softcap: self.op.softcap,
        };
        if let Some(prefill) = prefill {
            return prefill.launch(cx.gpu, count, params);
        }
        let grid = Grid::new([count, self.op.kv_heads, splits], 128).shared(self.attend_shared());
        cx.gpu.launch(&functions.attend, grid, params)?;
        if splits > 1 {
            cx.gpu.launch(&functions.join, Grid::new([io.tokens, self.op.heads, 1], 128), params)?;
        }
        Ok(())
    }

    fn fault(&self) -> String {
        let half = self.op.rotary.map_or(1, |r| (r.dim / 2).max(1));
        let rows = self.cos.as_ref().map_or(0, |c| c.len() / half);
        format!("position_ids: expected positions below {rows} (rows of cos_cache), found one beyond")
    }
}

/// A float constant, with a number of elements where one is due.
fn floats(b: &Binder<'_>, i: usize, name: &str, len: Option<usize>) -> Result<Floats, String> {
    let t = b.constant(i)?.ok_or_else(|| format!("{name} is not a constant"))?;
    let found = Floats::of(&t).map_err(|e| format!("{name}: {e}"))?;
    match len {
        Some(len) if len != found.len() => {
            Err(format!("{name}: expected {len} numbers, found {}", found.len()))
        }
        _ => Ok(found),
    }
}

/// As [`floats`], widened to float32.
fn wide(b: &Binder<'_>, i: usize, name: &str, len: usize) -> Result<Floats, String> {
    let t = b.constant(i)?.ok_or_else(|| format!("{name} is not a constant"))?;
    let values = t.to_f32().map_err(|e| format!("{name}: {e}"))?;
    if values.len() != len {
        return Err(format!("{name}: expected {len} numbers, found {}", values.len()));
    }
    let t = doyen_tensor::Tensor::from_slice([len], &values).map_err(|e| e.to_string())?;
    Floats::of(&t).map_err(|e| e.to_string())
}

pub(super) fn bind(b: &Binder<'_>, op: &Attention) -> Result<Box<dyn Kernel>, String> {
    if op.kv_heads == 0 || !op.heads.is_multiple_of(op.kv_heads) {
        return Err(format!("{} query heads over {} key heads", op.heads, op.kv_heads));
    }
    for (i, name) in [(at::POSITIONS, "position_ids"), (at::BIAS, "attention_bias")] {
        let rank = if i == at::BIAS { 4 } else { 2 };
        if b.operand(i).is_some() && b.value(i).is_none_or(|v| v.dims.len() != rank) {
            return Err(format!("{name}: expected a value of the step of rank {rank}"));
        }
    }
    let format = b.graph.groups.get(op.slot.group).map_or(KvFormat::Float, |g| g.format);
    let row = Row::new(format, b.setting.kv);
    if row == Row::Int4 && !(op.head_size.is_multiple_of(2) && op.v_head_size.is_multiple_of(2)) {
        return Err(format!(
            "4-bit caches need even head sizes, not {} and {}",
            op.head_size, op.v_head_size
        ));
    }
    if row == Row::Scaled && !(op.head_size.is_multiple_of(4) && op.v_head_size.is_multiple_of(4)) {
        return Err(format!(
            "int8 caches need head sizes that are multiples of 4, not {} and {}: give --kv-dtype bf16, f16 or f32",
            op.head_size, op.v_head_size
        ));
    }
    let norm = |i, name| op.qk_norm.map(|_| floats(b, i, name, Some(op.head_size))).transpose();
    let (q_norm, k_norm) = (norm(at::Q_NORM, "q_norm")?, norm(at::K_NORM, "k_norm")?);
    let (cos, sin) = match op.rotary {
        None => (None, None),
        Some(r) => {
            let cos = floats(b, at::COS, "cos_cache", None)?;
            let sin = floats(b, at::SIN, "sin_cache", Some(cos.len()))?;
            let half = r.dim / 2;
            if half == 0 || r.dim > op.head_size || !cos.len().is_multiple_of(half) {
                return Err(format!("{} of {} channels rotate", r.dim, op.head_size));
            }
            if float_kind(cos.float_type()) != float_kind(sin.float_type()) {
                return Err("cos_cache and sin_cache have different types".into());
            }
            (Some(cos), Some(sin))
        }
    };
    let sink = b.operand(at::SINK).map(|_| wide(b, at::SINK, "head_sink", op.heads)).transpose()?;
    let per_channel =
        matches!(format, KvFormat::Int8 { per_channel: true } | KvFormat::Int4 { per_channel: true });
    let scales = |i: usize, head_size: usize| match row {
        Row::Float(_) | Row::Scaled => Ok(None),
        _ if per_channel => wide(b, i, "cache scales", op.kv_heads * head_size).map(Some),
        _ => wide(b, i, "cache scale", 1).map(Some),
    };
    let (k_scale, v_scale) = (scales(at::K_SCALE, op.head_size)?, scales(at::V_SCALE, op.v_head_size)?);
    let biased = b.operand(at::BIAS).is_some();
    let kernel = AttentionKernel {
        prefill: if biased { None } else { Prefill::new(op, row, b.setting.shared) },
        op: op.clone(),
        row,
        per_channel,
        cos,
        sin,
        q_norm,
        k_norm,
        sink,
        k_scale,
        v_scale,
        functions: None,
    };
    if kernel.attend_shared() > b.setting.shared {
        return Err(format!(
            "heads of {} and {} channels take {} bytes of shared memory, a block has {}",
            op.head_size,
            op.v_head_size,
            kernel.attend_shared(),
            b.setting.shared
        ));
    }
    Ok(Box::new(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_fit_every_step() {
        for (limit, context) in [(1, 100), (5, 4096), (64, 8192), (300, 777)] {
            for sequences in 1..=limit {
                for longest in [1, 64, 65, context / 2 + 1, context] {
                    let places = sequences * Splits::of(sequences, longest).count;
                    assert!(
                        places <= most_splits(limit, context),
                        "{sequences} x {longest} of {limit} x {context}"
                    );
                }
            }
        }
        let of = |sequences, longest| {
            let Splits { count, keys } = Splits::of(sequences, longest);
            (count, keys)
        };
        assert_eq!((of(1, 64), of(1, 65), of(1, 4097)), ((1, 64), (2, 64), (64, 128)));
        assert_eq!((of(64, 2048), of(64, 2049), of(64, 8192)), ((8, 256), (8, 512), (8, 1024)));
    }

    #[test]
    fn tiles_hold_the_queries_that_share_a_key_head() {
        for (heads, kv_heads, queries) in [(32, 4, 2), (16, 16, 16), (64, 8, 2), (6, 2, 5), (40, 1, 1)] {
            assert_eq!(tile_queries(heads, kv_heads), queries);
        }
    }
}
