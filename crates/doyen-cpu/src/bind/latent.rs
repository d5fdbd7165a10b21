//! Latent attention: queries are absorbed, then all heads attend over the one row that a position has.

use super::{
    Binder, Context, Kernel, linear,
    weights::{OwnedQuant, OwnedWeights},
};
use crate::{
    kernel::{
        attention::{Attention as Kernels, AttentionParams, Batch, KvScales, Rows, Sink},
        latent::{Absorb, LatentShape},
    },
    session::{cast_mut, io::Io},
};
use doyen_graph::{device::Limits, lowered::LatentAttention, ops::Op};
use doyen_tensor::Tensor;

/// Places of the operands.
mod at {
    pub(super) const Q: usize = 0;
    pub(super) const ROWS: usize = 1;
    pub(super) const SHARED: usize = 2;
    pub(super) const UP: usize = 3;
}

/// Of a cache of floats.
const UNSCALED: KvScales<'static> = KvScales::Tensor(1.0);

struct LatentKernel {
    op: LatentAttention,
    shape: LatentShape,
    /// Values are the cached rows themselves, their shared channels included; nobody reads what these sum up to.
    params: AttentionParams,
    kernels: Kernels,
    absorb: Absorb,
    up: OwnedWeights,
    threads: usize,
}

impl LatentKernel {
    /// f32 numbers of scratch: the step's cached rows, absorbed queries, and sums of rows.
    const fn parts(&self, tokens: usize) -> [usize; 3] {
        let rows = tokens * self.shape.width();
        [rows, rows * self.shape.heads, rows * self.shape.heads]
    }
}

impl Kernel for LatentKernel {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let (tokens, width) = (io.tokens, self.shape.width());
        let scratch = std::mem::take(&mut cx.scratch);
        let [rows_len, q_len, y_len] = self.parts(tokens);
        let (rows, rest) = cast_mut::<f32>(&mut *scratch).split_at_mut(rows_len);
        let (q, rest) = rest.split_at_mut(q_len);
        let (y, rest) = rest.split_at_mut(y_len);
        let (latent, shared) = (io.input::<f32>(at::ROWS), io.input::<f32>(at::SHARED));
        for (t, row) in rows.chunks_exact_mut(width).enumerate() {
            let (own, rotated) = row.split_at_mut(self.shape.rank);
            own.copy_from_slice(&latent[t * own.len()..][..own.len()]);
            rotated.copy_from_slice(&shared[t * rotated.len()..][..rotated.len()]);
        }
        let up = self.up.view();
        self.absorb.queries(cx.pool, &up, self.shape, io.input(at::Q), q);
        let (keys, _) = cx.caches.layer(self.op.slot)?;
        let layout = keys.layout;
        let tables = &cx.batch.tables[self.op.slot.group];
        let batch = Batch::new(cx.batch.sequences, tables, layout.page_size, layout.pages, self.op.window)
            .map_err(|e| e.to_string())?;
        keys.append(UNSCALED, &self.kernels, cx.pool, Rows::new(rows, width), &batch)?;
        let stores = (keys.view(UNSCALED)?, keys.view(UNSCALED)?);
        let q = Rows::new(q, self.shape.heads * width);
        self.kernels.attend(cx.pool, &self.params, q, stores, &batch, (Sink::None, None), rest, y);
        self.absorb.values(cx.pool, &up, self.shape, y, io.output(0));
        cx.scratch = scratch;
        Ok(())
    }

    fn name(&self) -> String {
        format!("latent_attention rank {} + {}", self.shape.rank, self.shape.rope)
    }

    fn scratch(&self, limits: &Limits) -> usize {
        let own: usize = self.parts(limits.tokens).iter().sum();
        4 * (own + Kernels::scratch_len(&self.params, self.threads, limits.context))
    }
}

pub(super) fn bind(b: &mut Binder<'_>, op: &LatentAttention) -> Result<Box<dyn Kernel>, String> {
    let shape = LatentShape {
        heads: op.heads,
        rank: op.rank,
        nope: op.nope,
        rope: op.rope,
        v_head_size: op.v_head_size,
    };
    let width = shape.width();
    let params = AttentionParams {
        heads: op.heads,
        kv_heads: 1,
        k_head_size: width,
        v_head_size: width,
        scale: op.scale,
        softcap: op.softcap,
        window: op.window,
        causal: op.causal,
    };
    params.group().map_err(|e| e.to_string())?;
    let up = match &op.up {
        Op::MatMulNBits(m) => {
            let tensors = b.constants(at::UP)?;
            let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
            let operands = m.operands(&refs).map_err(|e| e.to_string())?;
            let (Some(codes), Some(scales)) = (refs[0], refs[1]) else {
                return Err("weights or scales of the up-projection are absent".into());
            };
            let zero_points = refs.get(2).copied().flatten();
            OwnedWeights::Int(OwnedQuant::new(&operands.matrix, codes, scales, zero_points))
        }
        Op::MatMul(_) => linear::float_matrix(b, at::UP)?.ok_or("its up-projection is no constant matrix")?,
        other => return Err(format!("{other:?} is no projection")),
    };
    Absorb::check(&up.view(), shape).map_err(|e| e.to_string())?;
    Ok(Box::new(LatentKernel {
        op: op.clone(),
        shape,
        params,
        kernels: Kernels::new(b.isa),
        absorb: Absorb::new(b.isa),
        up,
        threads: b.threads,
    }))
}
