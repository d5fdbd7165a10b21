//! Times experts and products on a card: chains of layers with their own random weights, so that no cache holds them, run
//! as steps of a session. Prints time a layer, the bytes that must move, and the share of the card's copy bandwidth.
//!
//! Usage: bench [CUBIN_FOLDER]

use bytes::Bytes;
use doyen_cuda::{CudaDevice, CudaOptions, module::Operand};
use doyen_graph::{
    device::{Device, Limits, Numerics, Program, RaggedBatch, SeqSpan, Slot},
    ir::{Attrs, Constant},
    lowered::{
        ConstId, Experts, Extent, LConst, LNode, LOp, LValue, LValueId, Lowered, Operand as Input, Route,
    },
    ops::Op,
};
use doyen_tensor::{DType, FloatType, Tensor};
use std::{error::Error, sync::Arc, time::Instant};

const EXPERTS: usize = 128;
const K: usize = 8;
const HIDDEN: usize = 2048;
const INTER: usize = 768;
const BLOCK: usize = 64;

/// A graph under construction, with a generator for its weights.
struct Build {
    graph: Lowered,
    state: u64,
}

impl Build {
    fn new() -> Self {
        Self { graph: Lowered::default(), state: 0x9e37_79b9_7f4a_7c15 }
    }

    fn random(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn value(&mut self, dtype: DType, dims: Vec<Extent>) -> LValueId {
        let id = LValueId(self.graph.values.len() as u32);
        self.graph.values.push(LValue { name: format!("v{}", id.0), dtype, declared: dtype, dims });
        id
    }

    fn constant(&mut self, t: Tensor) -> Input {
        let id = ConstId(self.graph.constants.len() as u32);
        self.graph.constants.push(LConst { name: format!("c{}", id.0), data: Arc::new(Constant::from(t)) });
        Input::Const(id)
    }

    fn codes(&mut self, dims: [usize; 3]) -> Result<Tensor, Box<dyn Error>> {
        let n: usize = dims.iter().product();
        let bytes: Vec<u8> = (0..n.div_ceil(8)).flat_map(|_| self.random().to_le_bytes()).take(n).collect();
        Ok(Tensor::from_bytes(DType::U8, dims, Bytes::from(bytes))?)
    }

    fn scales(&mut self, dims: [usize; 3]) -> Result<Tensor, Box<dyn Error>> {
        let n: usize = dims.iter().product();
        let values: Vec<f32> = (0..n).map(|_| 0.002 + (self.random() % 1000) as f32 * 4e-6).collect();
        Ok(Tensor::from_f32(DType::F16, dims, &values)?)
    }

    /// A layer: routing by the logits given with the step, then experts. Its output has the shape of `x`.
    fn experts(&mut self, x: LValueId, (b1, b2): (usize, usize)) -> Result<LValueId, Box<dyn Error>> {
        let tokens = Extent::Tokens(1);
        let logits = self.value(DType::F32, vec![tokens, Extent::Fixed(EXPERTS)]);
        self.graph.inputs.push(logits);
        let ids = self.value(DType::I32, vec![tokens, Extent::Fixed(K)]);
        let mix = self.value(DType::F32, vec![tokens, Extent::Fixed(K)]);
        let y = self.value(DType::F32, vec![tokens, Extent::Fixed(HIDDEN)]);
        let route = Route { experts: EXPERTS, k: K, normalize: true, sparse_mixer: false };
        self.push("route", LOp::Route(route), vec![Some(Input::Value(logits)), None], vec![ids, mix]);
        let mut attrs = Attrs::default();
        for (name, v) in [
            ("k", K),
            ("swiglu_fusion", 1),
            ("normalize_routing_weights", 1),
            ("expert_weight_bits", b2),
            ("fc1_expert_weight_bits", b1),
            ("fc3_expert_weight_bits", b1),
            ("block_size", BLOCK),
        ] {
            attrs.set(name, v as i64);
        }
        attrs.set("activation_type", "swiglu");
        let op = Op::parse("com.microsoft", "QMoE", 1, &attrs)?;
        let w1 = self.codes([EXPERTS, 2 * INTER, HIDDEN * b1 / 8])?;
        let s1 = self.scales([EXPERTS, 2 * INTER, HIDDEN / BLOCK])?;
        let w2 = self.codes([EXPERTS, HIDDEN, INTER * b2 / 8])?;
        let s2 = self.scales([EXPERTS, HIDDEN, INTER / BLOCK])?;
        let mut inputs = vec![Some(Input::Value(x)), Some(Input::Value(ids)), Some(Input::Value(mix))];
        inputs.extend([Some(self.constant(w1)), Some(self.constant(s1)), None]);
        inputs.extend([Some(self.constant(w2)), Some(self.constant(s2))]);
        let bank = Experts { op, experts: EXPERTS, k: K };
        self.push("experts", LOp::Experts(bank), inputs, vec![y]);
        Ok(y)
    }

    fn product(&mut self, x: LValueId, (n, k): (usize, usize)) -> Result<LValueId, Box<dyn Error>> {
        let y = self.value(DType::F32, vec![Extent::Tokens(1), Extent::Fixed(n)]);
        let mut attrs = Attrs::default();
        for (name, v) in [("K", k), ("N", n), ("bits", 4), ("block_size", 32)] {
            attrs.set(name, v as i64);
        }
        let op = Op::parse("com.microsoft", "MatMulNBits", 1, &attrs)?;
        let codes = self.codes([n, k / 32, 16])?;
        let scales = self.scales([n, k / 32, 1])?;
        let inputs = vec![Some(Input::Value(x)), Some(self.constant(codes)), Some(self.constant(scales))];
        self.push("matmul", LOp::Op(op), inputs, vec![y]);
        Ok(y)
    }

    fn push(&mut self, name: &str, op: LOp, inputs: Vec<Option<Input>>, outputs: Vec<LValueId>) {
        let name = format!("{name}{}", self.graph.nodes.len());
        let outputs = outputs.into_iter().map(Some).collect();
        self.graph.nodes.push(LNode { name, op, inputs, outputs });
    }
}

/// Every value at its own place.
fn program(device: &CudaDevice, graph: Lowered, tokens: usize) -> Result<Program, Box<dyn Error>> {
    let limits = Limits { tokens, rows: 1, sequences: 1, context: tokens, page_size: 32 };
    let (mut slots, mut arena) = (Vec::new(), 0usize);
    for v in &graph.values {
        let n: usize = v.dims.iter().map(|d| d.at(tokens, 1)).product();
        let len = (n * v.dtype.bits() / 8).next_multiple_of(256);
        slots.push(Some(Slot { offset: arena, len }));
        arena += len;
    }
    let mut scratch = 0;
    for node in &graph.nodes {
        scratch = scratch.max(device.plan(&graph, node, &limits, Numerics::Fast)?.scratch);
    }
    let graph = Arc::new(graph);
    Ok(Program { graph, slots, arena, scratch, limits, pages: vec![], numerics: Numerics::Fast })
}

/// Median seconds of a step.
fn time(device: &CudaDevice, build: Build, tokens: usize, x: &[f32]) -> Result<f64, Box<dyn Error>> {
    let mut noise = Build::new();
    let mut inputs = Vec::new();
    for &v in &build.graph.inputs {
        let width = build.graph.value(v).dims[1].at(tokens, 1);
        let values: Vec<f32> = if width == EXPERTS {
            (0..tokens * width).map(|_| (noise.random() % 100_000) as f32 * 1e-4).collect()
        } else {
            x[..tokens * width].to_vec()
        };
        inputs.push(Tensor::from_slice([tokens, width], &values)?);
    }
    let mut session = device.load(program(device, build.graph, tokens)?)?;
    let ids = vec![0u32; tokens];
    let spans = [SeqSpan { first: 0, len: tokens, past: 0 }];
    let batch = RaggedBatch { tokens: &ids, sequences: &spans, tables: &[], rows: &[], inputs: &inputs };
    let mut times = Vec::new();
    for i in 0..12 {
        let start = Instant::now();
        session.step(&batch)?;
        if i >= 3 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Adds layers that read a value.
type Make<'a> = &'a dyn Fn(&mut Build, LValueId, usize) -> Result<(), Box<dyn Error>>;

/// Seconds a layer: the difference of two depths, so that copies and waiting of a step drop out.
fn layer(
    device: &CudaDevice,
    tokens: usize,
    x: &[f32],
    make: Make<'_>,
    width: usize,
    depths: (usize, usize),
) -> Result<f64, Box<dyn Error>> {
    let run = |depth: usize| {
        let mut build = Build::new();
        let input = build.value(DType::F32, vec![Extent::Tokens(1), Extent::Fixed(width)]);
        build.graph.inputs.push(input);
        make(&mut build, input, depth)?;
        time(device, build, tokens, x)
    };
    Ok((run(depths.1)? - run(depths.0)?) / (depths.1 - depths.0) as f64)
}

fn main() -> Result<(), Box<dyn Error>> {
    let cache = std::env::args().nth(1).map(Into::into);
    let options = CudaOptions { ordinal: 0, operand: Some(Operand::F16), kv: FloatType::F16, cache };
    let device = CudaDevice::new(&options)?;
    println!("{}", device.describe());
    let mut noise = Build::new();
    let x: Vec<f32> = (0..4096 * 4096).map(|_| (noise.random() % 2000) as f32 * 1e-3 - 1.0).collect();

    println!("experts E={EXPERTS} k={K} H={HIDDEN} I={INTER} block {BLOCK}, us a layer with routing");
    println!("{:>6} {:>8} {:>10} {:>10} {:>10}", "bits", "tokens", "us", "GB/s", "TFLOP/s");
    for pair in [(4, 4), (2, 4), (8, 8)] {
        for tokens in [1usize, 8, 64, 512, 4096] {
            let make = |b: &mut Build, x: LValueId, depth: usize| {
                let mut at = x;
                for _ in 0..depth {
                    at = b.experts(at, pair)?;
                }
                b.graph.outputs.push(at);
                Ok(())
            };
            let seconds = layer(&device, tokens, &x, &make, HIDDEN, (1, 5))?;
            // Expected distinct experts of random routes.
            let distinct = EXPERTS as f64 * (1.0 - (1.0 - K as f64 / EXPERTS as f64).powi(tokens as i32));
            let codes = 2 * INTER * HIDDEN * pair.0 / 8 + INTER * HIDDEN * pair.1 / 8;
            let scales = 3 * INTER * HIDDEN / BLOCK * 2;
            let bytes = distinct * (codes + scales) as f64;
            let flops = (tokens * K * 3 * 2 * INTER * HIDDEN) as f64;
            println!(
                "{:>6} {tokens:>8} {:>10.1} {:>10.0} {:>10.1}",
                format!("{}/{}", pair.0, pair.1),
                seconds * 1e6,
                bytes / seconds / 1e9,
                flops / seconds / 1e12
            );
        }
    }
    println!("MatMulNBits 4 bits, block 32");
    for (n, k, tokens, depths) in
        [(151_936, 2048, 1, (1, 5)), (4096, 4096, 1, (1, 9)), (4096, 4096, 512, (1, 5))]
    {
        let make = |b: &mut Build, x: LValueId, depth: usize| {
            for _ in 0..depth {
                b.product(x, (n, k))?;
            }
            Ok(())
        };
        let seconds = layer(&device, tokens, &x, &make, k, depths)?;
        let bytes = (n * k / 2 + n * k / 32 * 2) as f64;
        let flops = (2 * n * k * tokens) as f64;
        println!(
            "N={n} K={k} M={tokens}: {:.1} us, {:.0} GB/s, {:.1} TFLOP/s",
            seconds * 1e6,
            bytes / seconds / 1e9,
            flops / seconds / 1e12
        );
    }
    Ok(())
}
