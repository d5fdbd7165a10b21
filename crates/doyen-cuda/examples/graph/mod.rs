//! Lowered graphs with random weights, made by hand: layers of experts and products; and sessions over them.

use bytes::Bytes;
use doyen_cuda::CudaDevice;
use doyen_graph::{
    device::{Choice, Device, Draw, Limits, Numerics, Program, RaggedBatch, SeqSpan, Session, Slot},
    ir::{Attrs, Constant},
    lowered::{ConstId, Experts, Extent, LConst, LNode, LOp, LValue, LValueId, Lowered, Operand, Route},
    ops::Op,
};
use doyen_tensor::{DType, Tensor};
use std::{error::Error, sync::Arc};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A layer of experts.
#[derive(Debug, Clone, Copy)]
pub struct Bank {
    pub experts: usize,
    pub k: usize,
    pub hidden: usize,
    pub inter: usize,
    /// Bits of FC1 (and FC3), and of FC2.
    pub bits: (usize, usize),
    /// Columns that share a scale; 0: whole rows.
    pub block: usize,
    pub zero_points: bool,
    pub biases: bool,
    /// `swiglu_fusion`; `None`: silu without a linear part.
    pub fusion: Option<i64>,
    pub scales: DType,
}

/// A graph under construction, with a generator for its weights.
pub struct Build {
    pub graph: Lowered,
    state: u64,
}

impl Build {
    pub fn new(seed: u64) -> Self {
        let mut build = Self { graph: Lowered::default(), state: 0x9e37_79b9_7f4a_7c15 ^ (seed << 20) };
        // Graphs with token ids have their steps recorded.
        build.graph.tokens = Some(build.value(DType::I64, vec![Extent::Fixed(1), Extent::Tokens(1)]));
        build
    }

    pub fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    /// Numbers of mean 0, `size` at most.
    pub fn floats(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| ((self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0) * size).collect()
    }

    pub fn value(&mut self, dtype: DType, dims: Vec<Extent>) -> LValueId {
        let id = LValueId(self.graph.values.len() as u32);
        self.graph.values.push(LValue { name: format!("v{}", id.0), dtype, declared: dtype, dims });
        id
    }

    /// A float32 input of `width` channels.
    pub fn input(&mut self, width: usize) -> LValueId {
        let id = self.value(DType::F32, vec![Extent::Tokens(1), Extent::Fixed(width)]);
        self.graph.inputs.push(id);
        id
    }

    pub fn constant(&mut self, t: Tensor) -> Operand {
        let id = ConstId(self.graph.constants.len() as u32);
        self.graph.constants.push(LConst { name: format!("c{}", id.0), data: Arc::new(Constant::from(t)) });
        Operand::Const(id)
    }

    pub fn bytes(&mut self, dims: &[usize]) -> Result<Operand> {
        let n: usize = dims.iter().product();
        let bytes: Vec<u8> = (0..n.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(n).collect();
        let t = Tensor::from_bytes(DType::U8, dims.to_vec(), Bytes::from(bytes))?;
        Ok(self.constant(t))
    }

    fn scales(&mut self, dtype: DType, dims: &[usize], size: f32) -> Result<Operand> {
        let values: Vec<f32> = self.floats(dims.iter().product(), size);
        let t = Tensor::from_f32(dtype, dims.to_vec(), &values)?;
        Ok(self.constant(t))
    }

    pub fn push(&mut self, name: &str, op: LOp, inputs: Vec<Option<Operand>>, outputs: Vec<LValueId>) {
        let name = format!("{name}{}", self.graph.nodes.len());
        let outputs = outputs.into_iter().map(Some).collect();
        self.graph.nodes.push(LNode { name, op, inputs, outputs });
    }

    /// The wanted rows of `x`, of `width` channels.
    #[allow(dead_code)] // not by every example
    pub fn selected(&mut self, x: LValueId, width: usize) -> LValueId {
        let y = self.value(DType::F32, vec![Extent::Rows(1), Extent::Fixed(width)]);
        self.push("select", LOp::SelectRows { axis: 0 }, vec![Some(Operand::Value(x))], vec![y]);
        y
    }

    /// Routing by logits that are an input of their own, then experts. The result has the shape of `x`.
    #[allow(dead_code)] // not by every example
    pub fn experts(&mut self, x: LValueId, b: Bank) -> Result<LValueId> {
        let logits = self.input(b.experts);
        self.routed(x, logits, b)
    }

    /// Routing by `logits`, then experts.
    pub fn routed(&mut self, x: LValueId, logits: LValueId, b: Bank) -> Result<LValueId> {
        let of_routes = vec![Extent::Tokens(1), Extent::Fixed(b.k)];
        let ids = self.value(DType::I32, of_routes.clone());
        let mix = self.value(DType::F32, of_routes);
        let y = self.value(DType::F32, vec![Extent::Tokens(1), Extent::Fixed(b.hidden)]);
        let route = Route { experts: b.experts, k: b.k, normalize: true, sparse_mixer: false };
        self.push("route", LOp::Route(route), vec![Some(Operand::Value(logits)), None], vec![ids, mix]);
        let mut attrs = Attrs::default();
        attrs.set("k", b.k as i64).set("normalize_routing_weights", 1i64);
        attrs.set("expert_weight_bits", b.bits.1 as i64);
        attrs.set("fc1_expert_weight_bits", b.bits.0 as i64).set("fc3_expert_weight_bits", b.bits.0 as i64);
        attrs.set("activation_type", if b.fusion.is_some() { "swiglu" } else { "silu" });
        if let Some(fusion) = b.fusion {
            attrs
                .set("swiglu_fusion", fusion)
                .set("activation_alpha", 1.702f32)
                .set("activation_beta", 1.0f32);
            attrs.set("swiglu_limit", 7.0f32);
        }
        if b.block > 0 {
            attrs.set("block_size", b.block as i64);
        }
        let op = Op::parse("com.microsoft", "QMoE", 1, &attrs)?;
        let fused = matches!(b.fusion, Some(1 | 2));
        let separate = b.fusion == Some(0);
        let fc1_rows = if fused { 2 * b.inter } else { b.inter };
        let mut operands = Vec::new();
        let mut zeros = Vec::new();
        for (rows, cols, bits, there) in [
            (fc1_rows, b.hidden, b.bits.0, true),
            (b.hidden, b.inter, b.bits.1, true),
            (b.inter, b.hidden, b.bits.0, separate),
        ] {
            if !there {
                operands.extend([None, None, None]);
                zeros.push(None);
                continue;
            }
            let blocks = cols.checked_div(b.block).unwrap_or(1);
            let per_row = [b.experts, rows, blocks];
            let scale_dims = if b.block > 0 { &per_row[..] } else { &per_row[..2] };
            // Sums of `cols` products of codes around their middle keep to about 1.
            let size = 4.0 / ((1 << bits) as f32 * (cols as f32).sqrt());
            operands.push(Some(self.bytes(&[b.experts, rows, cols * bits / 8])?));
            operands.push(Some(self.scales(b.scales, scale_dims, size)?));
            operands.push(if b.biases {
                Some(self.scales(DType::F32, &[b.experts, rows], 0.2)?)
            } else {
                None
            });
            let zero_dims = if b.block > 0 {
                vec![b.experts, rows, (blocks * bits).div_ceil(8)]
            } else {
                vec![b.experts, (rows * bits).div_ceil(8)]
            };
            zeros.push(if b.zero_points { Some(self.bytes(&zero_dims)?) } else { None });
        }
        operands.extend(zeros);
        let mut inputs = vec![Some(Operand::Value(x)), Some(Operand::Value(ids)), Some(Operand::Value(mix))];
        inputs.extend(operands);
        let bank = Experts { op, experts: b.experts, k: b.k };
        self.push("experts", LOp::Experts(bank), inputs, vec![y]);
        Ok(y)
    }

    /// MatMulNBits of `bits` in blocks, with float16 scales.
    pub fn product(
        &mut self,
        x: LValueId,
        (n, k): (usize, usize),
        (bits, block): (usize, usize),
    ) -> Result<LValueId> {
        let y = self.value(DType::F32, vec![Extent::Tokens(1), Extent::Fixed(n)]);
        let mut attrs = Attrs::default();
        for (name, v) in [("K", k), ("N", n), ("bits", bits), ("block_size", block)] {
            attrs.set(name, v as i64);
        }
        let op = Op::parse("com.microsoft", "MatMulNBits", 1, &attrs)?;
        let blocks = k.div_ceil(block);
        let codes = self.bytes(&[n, blocks, block * bits / 8])?;
        let size = 4.0 / ((1 << bits) as f32 * (k as f32).sqrt());
        let scales = self.scales(DType::F16, &[n, blocks], size)?;
        let inputs = vec![Some(Operand::Value(x)), Some(codes), Some(scales)];
        self.push("matmul", LOp::Op(op), inputs, vec![y]);
        Ok(y)
    }
}

/// A session over a graph, every value at its own place.
pub fn session(
    device: &CudaDevice,
    graph: &Lowered,
    tokens: usize,
    numerics: Numerics,
) -> Result<Box<dyn Session>> {
    let limits = Limits { tokens, rows: tokens, sequences: tokens, context: 1, page_size: 32 };
    let (mut slots, mut arena) = (Vec::new(), 0usize);
    for v in &graph.values {
        let n: usize = v.dims.iter().map(|d| d.at(tokens, tokens)).product();
        let len = (n * v.dtype.bits() / 8).next_multiple_of(256);
        slots.push(Some(Slot { offset: arena, len }));
        arena += len;
    }
    let mut scratch = 0;
    for node in &graph.nodes {
        scratch = scratch.max(device.plan(graph, node, &limits, numerics)?.scratch);
    }
    let graph = Arc::new(graph.clone());
    Ok(device.load(Program {
        graph,
        slots,
        arena,
        scratch,
        limits,
        pages: vec![],
        state_slots: 0,
        numerics,
    })?)
}

/// Runs a step of one sequence whose rows are all wanted, and has tokens chosen from them.
#[allow(dead_code)] // not by every example
pub fn choose(session: &mut dyn Session, draws: &[Draw], inputs: &[Tensor]) -> Result<Vec<Option<Choice>>> {
    let ids = vec![0u32; draws.len()];
    let rows: Vec<u32> = (0..draws.len() as u32).collect();
    let spans: Vec<SeqSpan> = (0..draws.len()).map(|first| SeqSpan { first, len: 1, past: 0 }).collect();
    let batch =
        RaggedBatch { tokens: &ids, sequences: &spans, tables: &[], states: &[], rows: &rows, inputs };
    let (wanted, mut choices): (Vec<_>, _) = (draws.iter().copied().map(Some).collect(), Vec::new());
    session.step_choosing(&batch, &wanted, &mut choices)?;
    Ok(choices)
}

/// Runs a step of `tokens` sequences of one token.
pub fn step(session: &mut dyn Session, tokens: usize, inputs: &[Tensor]) -> Result<()> {
    let ids = vec![0u32; tokens];
    let spans: Vec<SeqSpan> = (0..tokens).map(|first| SeqSpan { first, len: 1, past: 0 }).collect();
    Ok(session.step(&RaggedBatch {
        tokens: &ids,
        sequences: &spans,
        tables: &[],
        states: &[],
        rows: &[],
        inputs,
    })?)
}

/// Random inputs of a graph, as many as it has.
pub fn inputs(build: &mut Build, tokens: usize) -> Result<Vec<Tensor>> {
    let widths: Vec<usize> =
        build.graph.inputs.iter().map(|&v| build.graph.value(v).dims[1].at(tokens, 1)).collect();
    widths
        .into_iter()
        .map(|w| {
            let values = build.floats(tokens * w, 2.0);
            Ok(Tensor::from_slice([tokens, w], &values)?)
        })
        .collect()
}
