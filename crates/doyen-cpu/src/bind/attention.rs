//! Attention: query and key norms, rotary embedding, append to the cache, attend.

use super::{Binder, Context, Kernel, weights::Floats};
use crate::{
    kernel::{
        attention::{Attention as Kernels, AttentionParams, Batch, Bias, KvScales, Rows, Sink},
        norm::Norm,
        rotary::{Heads, RotaryCache, RotaryKernel},
    },
    session::{cast_mut, io::Io},
};
use doyen_graph::{
    device::{Limits, SeqSpan},
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

struct HeadNorms {
    norm: Norm,
    q: Vec<f32>,
    k: Vec<f32>,
    eps: f32,
}

struct RotaryEmbedding {
    kernel: RotaryKernel,
    cos: Floats,
    sin: Floats,
    half: usize,
}

/// Scales of a coded cache.
enum Scales {
    Tensor(f32),
    Channel(Vec<f32>),
}

impl Scales {
    fn view(&self) -> KvScales<'_> {
        match self {
            Self::Tensor(s) => KvScales::Tensor(*s),
            Self::Channel(s) => KvScales::Channel(s),
        }
    }
}

struct AttentionKernel {
    op: Attention,
    params: AttentionParams,
    kernels: Kernels,
    norms: Option<HeadNorms>,
    rotary: Option<RotaryEmbedding>,
    sink: Option<Vec<f32>>,
    k_scales: Scales,
    v_scales: Scales,
    threads: usize,
}

/// Elements of scratch for a step's own copies of queries, keys and positions.
struct Copies {
    q: usize,
    k: usize,
    positions: usize,
}

impl AttentionKernel {
    /// Whether queries and keys change before they are used, so that they are copied.
    const fn changes(&self) -> bool {
        self.norms.is_some() || self.rotary.is_some()
    }

    const fn copies(&self, tokens: usize) -> Copies {
        if self.changes() {
            let size = tokens * self.op.head_size;
            Copies { q: size * self.op.heads, k: size * self.op.kv_heads, positions: tokens }
        } else {
            Copies { q: 0, k: 0, positions: 0 }
        }
    }

    /// Rows of queries, keys and values as they arrive.
    fn arriving<'a>(&self, io: &Io<'a>) -> [Rows<'a>; 3] {
        let (q_size, k_size) = (self.op.heads * self.op.head_size, self.op.kv_heads * self.op.head_size);
        let v_size = self.op.kv_heads * self.op.v_head_size;
        let x = io.input::<f32>(at::Q);
        if self.op.packed_qkv {
            let stride = q_size + k_size + v_size;
            let from = |start: usize| Rows::new(x.get(start..).unwrap_or_default(), stride);
            [from(0), from(q_size), from(q_size + k_size)]
        } else {
            [Rows::new(x, q_size), Rows::new(io.input(at::K), k_size), Rows::new(io.input(at::V), v_size)]
        }
    }

    /// The bias of a step, checked against its sequences.
    fn bias<'a>(&self, io: &Io<'a>, sequences: &[SeqSpan]) -> Result<Option<Bias<'a>>, String> {
        if !io.has_input(at::BIAS) {
            return Ok(None);
        }
        let mut dims = [0; 4];
        let dims = io.input_dims(at::BIAS, &mut dims);
        let longest = |of: fn(&SeqSpan) -> usize| sequences.iter().map(of).max().unwrap_or(0);
        let reach = (longest(|s| s.len), longest(|s| s.past + s.len));
        let strides = self.op.bias_strides(dims, sequences.len(), reach)?;
        Ok(Some(Bias { data: io.input(at::BIAS), strides, keys: dims[3] }))
    }

    /// Norms and rotates copies of queries and keys.
    fn change(
        &self,
        cx: &Context<'_>,
        io: &Io<'_>,
        [q_in, k_in]: [Rows<'_>; 2],
        (q, k, positions): (&mut [f32], &mut [f32], &mut [u32]),
    ) -> Result<(), String> {
        let d = self.op.head_size;
        for (x, rows, heads) in [(&mut *q, q_in, self.op.heads), (&mut *k, k_in, self.op.kv_heads)] {
            for (t, out) in x.chunks_exact_mut((heads * d).max(1)).take(io.tokens).enumerate() {
                out.copy_from_slice(rows.part(t, 0, heads * d));
            }
        }
        if let Some(n) = &self.norms {
            n.norm.rms_heads(cx.pool, q, (io.tokens, self.op.heads * d, self.op.heads), &n.q, n.eps);
            n.norm.rms_heads(cx.pool, k, (io.tokens, self.op.kv_heads * d, self.op.kv_heads), &n.k, n.eps);
        }
        if let Some(r) = &self.rotary {
            let cache = RotaryCache::new(r.cos.view(), r.sin.view(), r.half).map_err(|e| e.to_string())?;
            if io.has_input(at::POSITIONS) {
                given_positions(io.input(at::POSITIONS), cache.positions(), positions)?;
            } else {
                for &SeqSpan { first, len, past } in cx.batch.sequences {
                    let running = positions[first..first + len].iter_mut().zip(past..);
                    running.for_each(|(p, at)| *p = at as u32);
                }
            }
            for (x, heads) in [(q, self.op.heads), (k, self.op.kv_heads)] {
                let heads = Heads { token_stride: heads * d, heads, head_size: d };
                r.kernel.apply(cx.pool, x, heads, positions, &cache).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }
}

/// Positions that the step gives, of `rows` that the rotary caches have.
fn given_positions(ids: &[i64], rows: usize, out: &mut [u32]) -> Result<(), String> {
    for (&id, p) in ids.iter().zip(out) {
        *p = u32::try_from(id).ok().filter(|&p| (p as usize) < rows).ok_or_else(|| {
            format!("position_ids: expected positions below {rows} (rows of cos_cache), found {id}")
        })?;
    }
    Ok(())
}

impl Kernel for AttentionKernel {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let tokens = io.tokens;
        let sizes = self.copies(tokens);
        let scratch = std::mem::take(&mut cx.scratch);
        let (own, rest) = scratch.split_at_mut(4 * (sizes.q + sizes.k));
        let (positions, rest) = rest.split_at_mut(4 * sizes.positions);
        let (q_own, k_own) = cast_mut::<f32>(own).split_at_mut(sizes.q);
        let [mut q, mut k, v] = self.arriving(io);
        if self.changes() {
            self.change(cx, io, [q, k], (&mut *q_own, &mut *k_own, cast_mut(positions)))?;
            q = Rows::new(q_own, self.op.heads * self.op.head_size);
            k = Rows::new(k_own, self.op.kv_heads * self.op.head_size);
        }
        let bias = self.bias(io, cx.batch.sequences)?;
        let (keys, values) = cx.caches.layer(self.op.slot)?;
        let layout = keys.layout;
        let tables = &cx.batch.tables[self.op.slot.group];
        let batch = Batch::new(cx.batch.sequences, tables, layout.page_size, layout.pages, self.op.window)
            .map_err(|e| e.to_string())?;
        keys.append(self.k_scales.view(), &self.kernels, cx.pool, k, &batch)?;
        values.append(self.v_scales.view(), &self.kernels, cx.pool, v, &batch)?;
        let stores = (keys.view(self.k_scales.view())?, values.view(self.v_scales.view())?);
        let sink = match &self.sink {
            Some(s) => Sink::Heads(s),
            None if self.op.smooth_softmax => Sink::Zero,
            None => Sink::None,
        };
        let rest = cast_mut(rest);
        let out = io.output(0);
        self.kernels.attend(cx.pool, &self.params, q, stores, &batch, (sink, bias), rest, out);
        keys.spread_nan(&self.params, &batch, out);
        values.spread_nan(&self.params, &batch, out);
        cx.scratch = scratch;
        Ok(())
    }

    fn name(&self) -> String {
        let qk_norm = if self.norms.is_some() { " + qk_norm" } else { "" };
        let rotary = if self.rotary.is_some() { " + rotary" } else { "" };
        format!("paged_attention{qk_norm}{rotary}")
    }

    fn scratch(&self, limits: &Limits) -> usize {
        let Copies { q, k, positions } = self.copies(limits.tokens);
        4 * (q + k + positions + Kernels::scratch_len(&self.params, self.threads, limits.context))
    }
}

pub(super) fn bind(b: &mut Binder<'_>, op: &Attention) -> Result<Box<dyn Kernel>, String> {
    let params = AttentionParams {
        heads: op.heads,
        kv_heads: op.kv_heads,
        k_head_size: op.head_size,
        v_head_size: op.v_head_size,
        scale: op.scale,
        softcap: op.softcap,
        window: op.window,
        causal: op.causal,
    };
    params.group().map_err(|e| e.to_string())?;
    for (i, name) in [(at::POSITIONS, "position_ids"), (at::BIAS, "attention_bias")] {
        let rank = if i == at::BIAS { 4 } else { 2 };
        if b.operand(i).is_some() && b.value(i).is_none_or(|v| v.dims.len() != rank) {
            return Err(format!("{name}: expected a value of the step of rank {rank}"));
        }
    }
    let norms = match op.qk_norm {
        None => None,
        Some(eps) => Some(HeadNorms {
            norm: Norm::new(b.isa),
            q: sized(b, at::Q_NORM, "q_norm", op.head_size)?,
            k: sized(b, at::K_NORM, "k_norm", op.head_size)?,
            eps,
        }),
    };
    let rotary = match op.rotary {
        None => None,
        Some(r) => Some(RotaryEmbedding {
            kernel: RotaryKernel::new(b.isa, r.interleaved),
            cos: floats(b, at::COS, "cos_cache")?,
            sin: floats(b, at::SIN, "sin_cache")?,
            half: r.dim / 2,
        }),
    };
    if let Some(r) = &rotary {
        RotaryCache::new(r.cos.view(), r.sin.view(), r.half).map_err(|e| e.to_string())?;
        if 2 * r.half > op.head_size {
            return Err(format!("{} of {} channels rotate", 2 * r.half, op.head_size));
        }
    }
    let sink = b.operand(at::SINK).map(|_| sized(b, at::SINK, "head_sink", op.heads)).transpose()?;
    let format = b.graph.groups.get(op.slot.group).map_or(KvFormat::Float, |g| g.format);
    let k_scales = scales(b, at::K_SCALE, format, op.kv_heads * op.head_size)?;
    let v_scales = scales(b, at::V_SCALE, format, op.kv_heads * op.v_head_size)?;
    let (kernels, threads) = (Kernels::new(b.isa), b.threads);
    Ok(Box::new(AttentionKernel {
        op: op.clone(),
        params,
        kernels,
        norms,
        rotary,
        sink,
        k_scales,
        v_scales,
        threads,
    }))
}

fn floats(b: &mut Binder<'_>, i: usize, name: &str) -> Result<Floats, String> {
    let t = b.constant(i)?.ok_or_else(|| format!("{name} is not a constant"))?;
    Floats::of(&t).map_err(|e| format!("{name}: {e}"))
}

/// A constant of `len` numbers, widened.
fn sized(b: &mut Binder<'_>, i: usize, name: &str, len: usize) -> Result<Vec<f32>, String> {
    let t = b.constant(i)?.ok_or_else(|| format!("{name} is not a constant"))?;
    let v = t.to_f32().map_err(|e| format!("{name}: {e}"))?;
    if v.len() != len {
        return Err(format!("{name}: expected {len} numbers, found {}", v.len()));
    }
    b.resident += 4 * len;
    Ok(v)
}

fn scales(b: &mut Binder<'_>, i: usize, format: KvFormat, channels: usize) -> Result<Scales, String> {
    match format {
        KvFormat::Float => Ok(Scales::Tensor(1.0)),
        KvFormat::Int8 { per_channel: false } | KvFormat::Int4 { per_channel: false } => {
            Ok(Scales::Tensor(sized(b, i, "cache scale", 1)?[0]))
        }
        KvFormat::Int8 { per_channel: true } | KvFormat::Int4 { per_channel: true } => {
            Ok(Scales::Channel(sized(b, i, "cache scales", channels)?))
        }
    }
}
