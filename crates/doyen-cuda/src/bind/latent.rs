//! Latent attention: queries are absorbed, then all heads attend over the one row that a position has, and the sums of rows are
//! projected.

use super::{
    Binder, Context, Kernel,
    attention::{Splits, most_splits, splits},
    cols, linear, ready,
};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::{caches::Row, io::Io},
    weights::{Bank, float_kind},
};
use doyen_graph::{
    device::{DeviceError, Limits},
    lowered::{KvFormat, LatentAttention},
    ops::Op,
};
use doyen_tensor::{FloatType, Tensor};

/// Places of the operands.
mod at {
    pub(super) const Q: usize = 0;
    pub(super) const ROWS: usize = 1;
    pub(super) const SHARED: usize = 2;
    pub(super) const UP: usize = 3;
}

/// Heads of a block and keys at a time: `HEADS` and `PIECE` of latent.cu.
const HEADS: usize = 16;
const PIECE: usize = 16;
/// `QUERY_TOKENS`, `VALUE_TOKENS`, `WARPS` of absorb.cu, and the columns of a block.
const QUERY_TOKENS: usize = 2;
const VALUE_TOKENS: usize = 4;
const WARPS: usize = 8;
const COLUMNS: usize = 512;
/// Latent channels whose sums a block keeps in registers.
const MOST_RANK: usize = 1024;

struct LatentKernel {
    op: LatentAttention,
    kv: FloatType,
    up: Bank,
    functions: Option<Functions>,
}

struct Functions {
    queries: Function,
    append: Function,
    attend: Function,
    join: Function,
    values: Function,
}

/// Bytes of scratch, one part after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Layout {
    /// Absorbed queries.
    q: usize,
    /// Sums of rows.
    sums: usize,
    /// What splits of keys leave.
    parts: usize,
}

impl LatentKernel {
    const fn width(&self) -> usize {
        self.op.rank + self.op.rope
    }

    /// For a step of `tokens` tokens with `places` places for what splits of keys leave.
    const fn layout(&self, tokens: usize, places: usize) -> Layout {
        let rows = 4 * tokens * self.op.heads;
        Layout {
            q: (rows * self.width()).next_multiple_of(256),
            sums: (rows * self.op.rank).next_multiple_of(256),
            parts: 4 * places * self.op.heads * (self.op.rank + 2),
        }
    }

    const fn shared(&self) -> usize {
        4 * ((PIECE + HEADS) * (self.width() | 1) + PIECE * HEADS + HEADS)
    }

    const fn entry(&self) -> &'static str {
        match self.op.rank {
            0..=256 => "latent_256",
            257..=512 => "latent_512",
            _ => "latent_1024",
        }
    }

    fn absorb(&self, x: Addr, y: Addr, tokens: usize) -> Result<params::Absorb, CudaError> {
        Ok(params::Absorb {
            w: self.up.params()?,
            x,
            y,
            tokens: tokens as u32,
            heads: self.op.heads as u32,
            nope: self.op.nope as u32,
            rope: self.op.rope as u32,
            v: self.op.v_head_size as u32,
        })
    }

    fn attend(
        &self,
        io: &Io<'_>,
        cx: &Context<'_>,
        (q, sums, part): (Addr, Addr, Addr),
    ) -> Result<(), CudaError> {
        let functions = ready(self.functions.as_ref())?;
        let (op, Splits { count: splits, keys: split_keys }) = (&self.op, splits(cx.step));
        let (stored, _) = cx.caches.layer(op.slot)?;
        let (table_start, pages) = cx.step.tables[op.slot.group];
        let params = params::Latent {
            batch: params::Batch {
                token_sequence: cx.step.token_sequence,
                first: cx.step.first,
                len: cx.step.len,
                past: cx.step.past,
                table_start,
                pages,
                page_shift: stored.page_shift(),
                kv_heads: 1,
            },
            rows: stored.addr(),
            own: io.input(at::ROWS)?,
            shared: io.input(at::SHARED)?,
            q,
            y: sums,
            part,
            kind: float_kind(self.kv),
            rank: op.rank as u32,
            rope: op.rope as u32,
            heads: op.heads as u32,
            window: op.window.map_or(0, |w| u32::try_from(w).unwrap_or(0)),
            causal: u32::from(op.causal),
            splits: splits as u32,
            split_keys: split_keys as u32,
            scale: op.scale,
            softcap: op.softcap,
        };
        cx.gpu.launch(&functions.append, Grid::new([io.tokens, 1, 1], 256), params)?;
        let grid = Grid::new([io.tokens, op.heads.div_ceil(HEADS), splits], 256).shared(self.shared());
        cx.gpu.launch(&functions.attend, grid, params)?;
        if splits > 1 {
            cx.gpu.launch(&functions.join, Grid::new([io.tokens, op.heads, 1], 128), params)?;
        }
        Ok(())
    }
}

impl Kernel for LatentKernel {
    fn name(&self) -> String {
        format!("latent_attention rank {} + {}", self.op.rank, self.op.rope)
    }

    fn scratch(&self, limits: &Limits) -> usize {
        // Keys are split only in steps of one token a sequence.
        let Layout { q, sums, parts } =
            self.layout(limits.tokens, most_splits(limits.sequences, limits.context));
        q + sums + parts
    }

    fn resident(&self) -> usize {
        self.up.bytes()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        self.up.upload(gpu, constants)?;
        let absorb = Module::Absorb(self.up.width());
        self.functions = Some(Functions {
            queries: gpu.function(absorb, "absorb_queries", 0)?,
            append: gpu.function(Module::Latent, "latent_append", 0)?,
            attend: gpu.function(Module::Latent, self.entry(), self.shared())?,
            join: gpu.function(Module::Latent, "latent_join", 0)?,
            values: gpu.function(absorb, "absorb_values", 0)?,
        });
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let functions = ready(self.functions.as_ref())?;
        let (op, splits) = (&self.op, splits(cx.step).count);
        let at = self.layout(io.tokens, if splits > 1 { io.tokens * splits } else { 0 });
        let q = cx.scratch.at(0, at.q)?;
        let sums = cx.scratch.at(at.q, at.sums)?;
        let part = if splits > 1 { cx.scratch.at(at.q + at.sums, at.parts)? } else { Addr::NONE };
        let grid = [op.heads, io.tokens.div_ceil(QUERY_TOKENS), op.rank.div_ceil(COLUMNS)];
        let queries = self.absorb(io.input(at::Q)?, q, io.tokens)?;
        cx.gpu.launch(&functions.queries, Grid::new(grid, 32 * WARPS as u32), queries)?;
        self.attend(io, cx, (q, sums, part))?;
        let grid = [op.v_head_size.div_ceil(WARPS), op.heads, io.tokens.div_ceil(VALUE_TOKENS)];
        let values = self.absorb(sums, io.output(0)?, io.tokens)?;
        cx.gpu.launch(&functions.values, Grid::new(grid, 32 * WARPS as u32), values)
    }
}

pub(super) fn bind(b: &Binder<'_>, op: &LatentAttention) -> Result<Box<dyn Kernel>, String> {
    let widths =
        [("q", op.heads * (op.nope + op.rope)), ("latent rows", op.rank), ("shared channels", op.rope)];
    for ((name, width), i) in widths.into_iter().zip([at::Q, at::ROWS, at::SHARED]) {
        let found = b.float_value(i).ok_or_else(|| format!("input {name} is no float value of the step"))?;
        if cols(found) != Some(width) {
            return Err(format!("input {name}: expected {width} channels, found {:?}", found.dims));
        }
    }
    let format = b.graph.groups.get(op.slot.group).map_or(KvFormat::Float, |g| g.format);
    let Row::Float(kv) = Row::new(format, b.setting.kv) else {
        return Err("latent rows are cached as floats: give --kv-dtype bf16, f16 or f32".into());
    };
    let up = match &op.up {
        Op::MatMulNBits(m) => {
            let tensors = b.constants(at::UP)?;
            let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
            let operands = m.operands(&refs).map_err(|e| e.to_string())?;
            if operands.groups.is_some() {
                return Err("the groups of its up-projection are permuted".into());
            }
            let (Some(codes), Some(scales)) = (refs[0], refs[1]) else {
                return Err("weights or scales of the up-projection are absent".into());
            };
            Bank::quantized(&operands.matrix, 1, codes, scales, refs.get(2).copied().flatten())?
        }
        Op::MatMul(_) => {
            linear::float_matrix(b, at::UP)?.ok_or("its up-projection is no constant matrix of floats")?
        }
        other => return Err(format!("{other:?} is no projection")),
    };
    let expected = (op.heads * (op.nope + op.v_head_size), op.rank);
    if (up.rows(), up.cols()) != expected {
        return Err(format!("up-projection: expected {expected:?}, found {:?}", (up.rows(), up.cols())));
    }
    let kernel = LatentKernel { op: op.clone(), kv, up, functions: None };
    if kernel.shared() > b.setting.shared || op.rank > MOST_RANK {
        return Err(format!(
            "rows of {} and {} channels: expected at most {MOST_RANK} latent ones, and {} bytes of shared memory \
             where a block has {}",
            op.rank,
            op.rope,
            kernel.shared(),
            b.setting.shared
        ));
    }
    Ok(Box::new(kernel))
}
