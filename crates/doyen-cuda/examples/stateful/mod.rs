//! Nodes with a past, experts of small floats and dense experts, of random shapes: steps of several sequences against the plain
//! executor of lowered graphs, in float32.

use crate::{
    distance,
    graph::{Bank, Build, Result},
};
use bytes::Bytes;
use doyen_cuda::CudaDevice;
use doyen_graph::{
    device::{
        Device, GroupPages, GroupTables, Limits, Numerics, Program, RaggedBatch, SeqSpan, Session, Slot,
        StateSlot, StateSlots,
    },
    ir::Attrs,
    lowered::{
        Attention, CacheGroup, CachePorts, CacheSlot, CausalConv, Experts, Extent, KvFormat, LOp, LValueId,
        LatentAttention, LinearAttention, Lowered, Operand, Route, State, StateId,
    },
    naive::{Naive, NewTokens},
    ops::{Op, linear_attention::UpdateRule},
};
use doyen_tensor::{DType, PageId, Tensor};
use std::sync::Arc;

const SEQUENCES: usize = 3;

/// Steps of three sequences, and how far results may lie apart.
#[derive(Clone, Copy)]
struct Course {
    /// New tokens of each sequence, step by step.
    steps: [[usize; SEQUENCES]; 4],
    limits: Limits,
    apart: f64,
}

/// In float32: sums in another order.
const SHORT: Course = Course {
    steps: [[5, 1, 18], [1, 1, 1], [1, 1, 1], [3, 1, 2]],
    limits: Limits { tokens: 24, rows: 1, sequences: SEQUENCES, context: 64, page_size: 16 },
    apart: 2e-5,
};

/// Prompts of several tiles of queries and of keys, new and continued.
const PROMPTS: Course = Course {
    steps: [[70, 1, 131], [1, 1, 1], [33, 2, 1], [20, 75, 5]],
    limits: Limits { tokens: 202, rows: 1, sequences: SEQUENCES, context: 160, page_size: 16 },
    apart: 0.0,
};

impl Course {
    const fn pages(&self) -> usize {
        self.limits.context / self.limits.page_size
    }
}

/// Comparisons that were made, and the largest share of the limit.
#[derive(Default)]
pub struct Outcome {
    pub run: usize,
    pub failed: usize,
    pub worst: f64,
}

struct Judge<'a> {
    packed: &'a CudaDevice,
    dense: &'a CudaDevice,
    course: Course,
    outcome: Outcome,
}

/// Runs one of `every` comparisons on a device in exact numerics, and experts also on one that multiplies them densely.
pub fn run(packed: &CudaDevice, dense: &CudaDevice, every: usize) -> Result<Outcome> {
    let mut judge = Judge { packed, dense, course: SHORT, outcome: Outcome::default() };
    for seed in (0..12).step_by(every) {
        judge.convolution(seed)?;
        judge.attention(seed)?;
        judge.latent(seed)?;
        judge.small_floats(seed)?;
        for rule in [UpdateRule::Linear, UpdateRule::Gated, UpdateRule::Delta, UpdateRule::GatedDelta] {
            judge.linear(seed, rule)?;
        }
        judge.dense_codes(seed)?;
    }
    judge.memory()?;
    Ok(judge.outcome)
}

/// Compares attention over caches of 16-bit floats, on a device that keeps such, with the plain executor's; `apart` is what
/// rounding may make of it.
pub fn prompts(device: &CudaDevice, apart: f64) -> Result<Outcome> {
    let course = Course { apart, ..PROMPTS };
    let mut judge = Judge { packed: device, dense: device, course, outcome: Outcome::default() };
    for seed in 0..12 {
        judge.prompt(seed)?;
    }
    Ok(judge.outcome)
}

fn session(
    device: &CudaDevice,
    limits: &Limits,
    graph: &Arc<Lowered>,
    pages: usize,
) -> Result<Box<dyn Session>> {
    let (mut slots, mut arena) = (Vec::new(), 0usize);
    for v in &graph.values {
        let n: usize = v.dims.iter().map(|d| d.at(limits.tokens, 1)).product();
        let len = (n * v.dtype.bits() / 8).next_multiple_of(256);
        slots.push(Some(Slot { offset: arena, len }));
        arena += len;
    }
    let mut scratch = 0;
    for node in &graph.nodes {
        scratch = scratch.max(device.plan(graph, node, limits, Numerics::Exact)?.scratch);
    }
    Ok(device.load(Program {
        slots,
        arena,
        scratch,
        limits: *limits,
        pages: vec![GroupPages { pages, window: None }; graph.groups.len()],
        state_slots: 2 * SEQUENCES,
        numerics: Numerics::Exact,
        graph: Arc::clone(graph),
    })?)
}

/// Runs step `number` of some of the sequences, which have `past` positions.
fn step(
    session: &mut dyn Session,
    course: &Course,
    graph: &Lowered,
    (number, past): (usize, &[usize; SEQUENCES]),
    sequences: &[usize],
    inputs: &[Tensor],
) -> Result<()> {
    let (mut first, mut spans, mut states) = (0, Vec::new(), Vec::new());
    let mut tables = GroupTables::default();
    for &i in sequences {
        let len = course.steps[number][i];
        spans.push(SeqSpan { first, len, past: past[i] });
        first += len;
        let slot = |step: usize| StateSlot((2 * i + step % 2) as u32);
        states.push(StateSlots { read: number.checked_sub(1).map(slot), write: slot(number) });
        tables.push(&(0..course.pages()).map(|p| PageId((p * SEQUENCES + i) as u32)).collect::<Vec<_>>());
    }
    Ok(session.step(&RaggedBatch {
        tokens: &vec![0; first],
        sequences: &spans,
        tables: &vec![tables; graph.groups.len()],
        states: &states,
        rows: &[],
        inputs,
    })?)
}

fn inputs(build: &mut Build, graph: &Lowered, tokens: usize) -> Result<Vec<Tensor>> {
    let dims = |&v: &LValueId| graph.value(v).dims.iter().map(|d| d.at(tokens, 1)).collect::<Vec<_>>();
    let random = |dims: Vec<usize>| {
        let n = dims.iter().product();
        Ok(Tensor::from_slice(dims, &build.floats(n, 1.0))?)
    };
    graph.inputs.iter().map(dims).map(random).collect()
}

/// Tokens `first .. first + len` of an input.
fn rows(t: &Tensor, first: usize, len: usize) -> Result<Tensor> {
    let mut dims = t.shape().to_vec();
    let axis = dims.len() - 2;
    let width = dims[axis + 1];
    dims[axis] = len;
    Ok(Tensor::from_slice(dims, &t.to_f32()?[first * width..(first + len) * width])?)
}

/// Attention over a paged cache; its name.
fn attention_node(b: &mut Build, seed: u64) -> String {
    let sizes = ([64, 40, 128, 96][seed as usize % 4], [64, 24, 128, 96][seed as usize % 4]);
    sized_attention(b, seed, sizes, seed % 3 == 1)
}

/// The same with head sizes of keys and values; `sinks`: whether heads have logits of their own in the denominator.
fn sized_attention(
    b: &mut Build,
    seed: u64,
    (head_size, v_head_size): (usize, usize),
    sinks: bool,
) -> String {
    let kv_heads = 1 + below(b, 3);
    let heads = kv_heads * (1 + below(b, 5));
    b.graph.groups.push(CacheGroup {
        kv_heads,
        k_head_size: head_size,
        v_head_size,
        format: KvFormat::Float,
        window: None,
        layers: vec![CachePorts::default()],
    });
    let op = Attention {
        slot: CacheSlot { group: 0, layer: 0 },
        heads,
        kv_heads,
        head_size,
        v_head_size,
        scale: 0.2,
        softcap: if seed % 3 == 1 { 5.0 } else { 0.0 },
        window: (seed % 4 == 2).then_some(6),
        causal: seed % 5 != 3,
        smooth_softmax: seed % 2 == 1,
        packed_qkv: false,
        rotary: None,
        qk_norm: None,
    };
    let name = format!("{op:?}");
    let widths = [heads * head_size, kv_heads * head_size, kv_heads * v_head_size];
    let mut operands: Vec<_> = widths.map(|w| Some(Operand::Value(input(b, w)))).into();
    operands.resize(12, None);
    if sinks {
        let logits = b.floats(heads, 2.0);
        operands[7] = Tensor::from_slice([heads], &logits).ok().map(|t| b.constant(t));
    }
    let y = value(b, heads * v_head_size);
    b.push("attention", LOp::Attention(op), operands, vec![y]);
    b.graph.outputs.push(y);
    name
}

impl Judge<'_> {
    /// Compares the outputs of every step with the plain executor's, and those of every sequence with what it gets alone.
    fn compare(&mut self, name: &str, device: &CudaDevice, build: &mut Build) -> Result<()> {
        let graph = Arc::new(build.graph.clone());
        let mut naive = Naive::new(build.graph.clone())?;
        let course = self.course;
        let session = || session(device, &course.limits, &graph, course.pages() * SEQUENCES);
        let mut together = session()?;
        let mut alone = (0..SEQUENCES).map(|_| session()).collect::<Result<Vec<_>>>()?;
        let mut past = [0; SEQUENCES];
        for (number, lens) in course.steps.iter().enumerate() {
            let tokens: usize = lens.iter().sum();
            let inputs = inputs(build, &graph, tokens)?;
            step(together.as_mut(), &course, &graph, (number, &past), &[0, 1, 2], &inputs)?;
            let ids = vec![0u32; tokens];
            let mut first = 0;
            let mut batch = Vec::new();
            for (sequence, &len) in lens.iter().enumerate() {
                batch.push(NewTokens { sequence, tokens: &ids[first..first + len] });
                let own = inputs.iter().map(|t| rows(t, first, len)).collect::<Result<Vec<_>>>()?;
                step(alone[sequence].as_mut(), &course, &graph, (number, &past), &[sequence], &own)?;
                for i in 0..graph.outputs.len() {
                    let width = together.output(i).len() / tokens;
                    let here = &together.output(i)[first * width..(first + len) * width];
                    self.judge(&format!("{name}, step {number}, alone"), alone[sequence].output(i), here);
                }
                first += len;
            }
            for (i, want) in naive.step(&batch, &[], &inputs)?.iter().enumerate() {
                self.judge(&format!("{name}, step {number}"), together.output(i), &want.to_f32()?);
            }
            past.iter_mut().zip(lens).for_each(|(p, l)| *p += l);
        }
        Ok(())
    }

    fn judge(&mut self, name: &str, got: &[f32], want: &[f32]) {
        let found = distance(got, want);
        self.outcome.run += 1;
        let limit = self.course.apart;
        self.outcome.worst = self.outcome.worst.max(found / limit);
        if found.is_nan() || found > limit {
            self.outcome.failed += 1;
            println!("DIFFERS {name}: {found:.2e} (limit {limit:.0e})");
        }
    }

    /// More memory than the card has is refused with a number, and the card goes on.
    fn memory(&mut self) -> Result<()> {
        let mut b = Build::new(0x3E);
        attention_node(&mut b, 0);
        let graph = Arc::new(b.graph.clone());
        self.outcome.run += 1;
        match session(self.packed, &self.course.limits, &graph, 1 << 26).map(|_| ()) {
            Err(e) if e.to_string().contains("cannot allocate") && e.to_string().contains("GiB") => {}
            other => {
                self.outcome.failed += 1;
                println!("DIFFERS memory: {other:?}");
            }
        }
        self.compare("after a refusal", self.packed, &mut b)
    }

    fn attention(&mut self, seed: u64) -> Result<()> {
        let mut b = Build::new(0xA7 + seed);
        let name = attention_node(&mut b, seed);
        self.compare(&name, self.packed, &mut b)
    }

    fn prompt(&mut self, seed: u64) -> Result<()> {
        let mut b = Build::new(0x9F + seed);
        // The last has no kernel on the tensor cores.
        let size = [64, 128, 96, 256, 40][seed as usize % 5];
        let name = sized_attention(&mut b, seed, (size, size), seed.is_multiple_of(2));
        self.compare(&name, self.packed, &mut b)
    }

    fn convolution(&mut self, seed: u64) -> Result<()> {
        let mut b = Build::new(0xC0 + seed);
        let (channels, taps, dilation) = (1 + below(&mut b, 300), 1 + below(&mut b, 5), 1 + below(&mut b, 3));
        let x = input(&mut b, channels);
        let y = value(&mut b, channels);
        let state = state(&mut b, vec![(taps - 1) * dilation, channels]);
        let weight = b.floats(channels * taps, 1.0);
        let weight = b.constant(Tensor::from_slice([channels, 1, taps], &weight)?);
        let bias = b.floats(channels, 1.0);
        let bias = b.constant(Tensor::from_f32(DType::F16, [channels], &bias)?);
        let op = CausalConv { state, channels, taps, dilation, silu: seed.is_multiple_of(2) };
        let name = format!("{op:?}");
        let inputs = vec![Some(Operand::Value(x)), Some(weight), (!seed.is_multiple_of(3)).then_some(bias)];
        b.push("conv", LOp::CausalConv(op), inputs, vec![y]);
        b.graph.outputs.push(y);
        self.compare(&name, self.packed, &mut b)
    }

    fn linear(&mut self, seed: u64, rule: UpdateRule) -> Result<()> {
        let mut b = Build::new(0x11_0000 + seed);
        let key_size = [16, 30, 64, 128, 96, 200, 256, 40, 300, 512, 520, 8][seed as usize % 12];
        let value_size = 1 + below(&mut b, 70);
        let (key_heads, per_key, per_query) =
            (1 + below(&mut b, 2), 1 + below(&mut b, 2), 1 + below(&mut b, 2));
        let kv_heads = key_heads * per_key;
        // More query heads than states, or fewer, as the keys.
        let q_heads = if seed.is_multiple_of(2) { key_heads } else { kv_heads * per_query };
        let op = LinearAttention {
            state: state(&mut b, vec![kv_heads, key_size, value_size]),
            q_heads,
            key_heads: if seed.is_multiple_of(2) { key_heads } else { kv_heads },
            kv_heads,
            key_size,
            value_size,
            rule,
            scale: 0.3,
            decay_per_key: seed.is_multiple_of(3),
            shared_beta: seed.is_multiple_of(4),
        };
        let widths = [
            op.q_heads * key_size,
            op.key_heads * key_size,
            kv_heads * value_size,
            op.decay_width(),
            if op.shared_beta { 1 } else { kv_heads },
        ];
        let given = [true, true, true, rule.decays(), rule.corrects()];
        let mut inputs = Vec::new();
        for (i, (width, given)) in widths.into_iter().zip(given).enumerate() {
            if !given {
                inputs.push(None);
                continue;
            }
            let x = input(&mut b, width);
            // Keys and decays small enough that no state grows without bound.
            inputs.push(Some(Operand::Value(match i {
                1 => scaled(&mut b, x, width, 1.0 / (key_size as f32).sqrt())?,
                3 => {
                    let half = scaled(&mut b, x, width, 0.4)?;
                    shifted(&mut b, half, width, -0.5)?
                }
                4 => scaled(&mut b, x, width, 0.9)?,
                _ => x,
            })));
        }
        let y = value(&mut b, op.heads() * value_size);
        let name = format!("{op:?}");
        b.push("linear", LOp::LinearAttention(op), inputs, vec![y]);
        b.graph.outputs.push(y);
        self.compare(&name, self.packed, &mut b)
    }

    fn latent(&mut self, seed: u64) -> Result<()> {
        let mut b = Build::new(0x1A + seed);
        let heads = [1, 3, 16, 20][seed as usize % 4];
        let rank = [32, 64, 256, 512, 128, 768][seed as usize % 6];
        let (nope, rope, v_head_size) = (1 + below(&mut b, 24), below(&mut b, 9), 1 + below(&mut b, 24));
        let rows = heads * (nope + v_head_size);
        b.graph.groups.push(CacheGroup {
            kv_heads: 1,
            k_head_size: rank + rope,
            v_head_size: 0,
            format: KvFormat::Float,
            window: None,
            layers: vec![CachePorts::default()],
        });
        let (up, operands) = if seed.is_multiple_of(2) {
            let weight = b.floats(rank * rows, 0.3);
            let op = Op::parse("", "MatMul", 13, &Attrs::default())?;
            (op, vec![Some(b.constant(Tensor::from_slice([rank, rows], &weight)?))])
        } else {
            let bits = [2, 4, 8][seed as usize / 2 % 3];
            let mut attrs = Attrs::default();
            for (name, v) in [("K", rank), ("N", rows), ("bits", bits), ("block_size", 32)] {
                attrs.set(name, v as i64);
            }
            let codes = b.bytes(&[rows, rank / 32, 4 * bits])?;
            let scales = b.floats(rows * rank / 32, 1.0 / (1 << bits) as f32);
            let scales = b.constant(Tensor::from_f32(DType::F16, [rows, rank / 32], &scales)?);
            (Op::parse("com.microsoft", "MatMulNBits", 1, &attrs)?, vec![Some(codes), Some(scales)])
        };
        let op = LatentAttention {
            slot: CacheSlot { group: 0, layer: 0 },
            heads,
            rank,
            nope,
            rope,
            v_head_size,
            scale: 0.2,
            softcap: if seed.is_multiple_of(3) { 4.0 } else { 0.0 },
            window: (seed % 4 == 1).then_some(7),
            causal: !seed.is_multiple_of(5),
            up,
        };
        let name =
            format!("latent {heads} heads, rank {rank} + {rope}, nope {nope}, v {v_head_size}, {seed}");
        let widths = [heads * (nope + rope), rank, rope];
        let mut inputs: Vec<_> = widths.map(|w| Some(Operand::Value(input(&mut b, w)))).into();
        inputs.extend(operands);
        let y = value(&mut b, heads * v_head_size);
        b.push("latent", LOp::LatentAttention(op), inputs, vec![y]);
        b.graph.outputs.push(y);
        self.compare(&name, self.packed, &mut b)
    }

    fn small_floats(&mut self, seed: u64) -> Result<()> {
        let mut b = Build::new(0xF4 + seed);
        let kind = ["fp4", "nvfp4", "fp8", "fp8"][seed as usize % 4];
        let tiled = seed % 4 == 3;
        let (experts, k) = (2 + below(&mut b, 7), 2);
        let (hidden, inter) = (32 * (1 + below(&mut b, 4)), 32 * (2 + below(&mut b, 4)));
        let x = input(&mut b, hidden);
        let [ids, mix] = routes(&mut b, experts, k);
        let y = value(&mut b, hidden);
        let mut attrs = Attrs::default();
        attrs.set("k", k as i64).set("activation_type", "swiglu").set("quant_type", kind);
        attrs.set("swiglu_fusion", i64::from(!tiled));
        attrs.set("expert_weight_bits", if kind == "fp8" { 8i64 } else { 4 });
        if tiled {
            attrs.set("block_size", 32i64);
        }
        // Lines of columns for every second bank of 4 bits.
        let transposed = kind != "fp8" && seed % 8 >= 4 && inter != hidden;
        let mut operands = Vec::new();
        let fc1_rows = if tiled { inter } else { 2 * inter };
        let there = [(fc1_rows, hidden, true), (hidden, inter, true), (inter, hidden, tiled)];
        for (rows, cols, there) in there {
            if !there {
                operands.extend([None, None, None]);
                continue;
            }
            operands.push(Some(match kind {
                "fp8" => {
                    let n = experts * rows * cols;
                    // No NaN.
                    let codes: Vec<u8> = (0..n).map(|_| (b.next() % 256) as u8 & 0xf7 & 0xbf).collect();
                    b.constant(Tensor::from_bytes(
                        DType::F8E4M3FN,
                        [experts, rows, cols],
                        Bytes::from(codes),
                    )?)
                }
                _ if transposed => b.bytes(&[experts, cols, rows / 2])?,
                _ => b.bytes(&[experts, rows, cols / 2])?,
            }));
            let (dtype, blocks, near) = match kind {
                "fp4" => (DType::F8E8M0, vec![experts, rows, cols / 32], 120),
                "nvfp4" => (DType::F8E4M3FN, vec![experts, rows, cols / 16], 24),
                _ => (DType::F32, vec![experts, rows.div_ceil(32), cols.div_ceil(32)], 0),
            };
            operands.push(if near > 0 {
                let n: usize = blocks.iter().product();
                let codes: Vec<u8> = (0..n).map(|_| near + (b.next() % 5) as u8).collect();
                Some(b.constant(Tensor::from_bytes(dtype, blocks, Bytes::from(codes))?))
            } else if tiled {
                let scales = b.floats(blocks.iter().product(), 0.1);
                Some(b.constant(Tensor::from_slice(blocks, &scales)?))
            } else {
                None
            });
            operands.push(if seed.is_multiple_of(2) {
                let bias = b.floats(experts * rows, 0.2);
                Some(b.constant(Tensor::from_slice([experts, rows], &bias)?))
            } else {
                None
            });
        }
        // Zero points and router weights, which there are none of, then a factor an expert.
        operands.resize(13, None);
        if !tiled {
            for _ in 0..2 {
                let globals = b.floats(experts, 0.5);
                operands.push(Some(b.constant(Tensor::from_slice([experts], &globals)?)));
            }
        }
        let op = Op::parse("com.microsoft", "QMoE", 1, &attrs)?;
        let name = format!("{kind} {experts} experts, {hidden} x {inter}, transposed {transposed}");
        let mut inputs = vec![Some(Operand::Value(x)), Some(Operand::Value(ids)), Some(Operand::Value(mix))];
        inputs.extend(operands);
        b.push("experts", LOp::Experts(Experts { op, experts, k }), inputs, vec![y]);
        b.graph.outputs.push(y);
        self.compare(&name, self.packed, &mut b)?;
        self.compare(&format!("dense {name}"), self.dense, &mut b)
    }

    fn dense_codes(&mut self, seed: u64) -> Result<()> {
        let mut b = Build::new(0xDE + seed);
        let bits = |b: &mut Build| [2, 4, 8][below(b, 3)];
        let bank = Bank {
            experts: 4 + below(&mut b, 8),
            k: 1 + below(&mut b, 4),
            hidden: 32 * (1 + below(&mut b, 4)),
            inter: 32 * (1 + below(&mut b, 4)),
            bits: (bits(&mut b), bits(&mut b)),
            block: [0, 16, 32][below(&mut b, 3)],
            zero_points: seed.is_multiple_of(2),
            biases: seed.is_multiple_of(3),
            fusion: [None, Some(0), Some(1), Some(2)][seed as usize % 4],
            scales: DType::F32,
        };
        let x = b.input(bank.hidden);
        let y = b.experts(x, bank)?;
        b.graph.outputs.push(y);
        self.compare(&format!("dense {bank:?}"), self.dense, &mut b)
    }
}

fn below(b: &mut Build, n: usize) -> usize {
    (b.next() >> 20) as usize % n
}

fn dims(width: usize) -> Vec<Extent> {
    vec![Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(width)]
}

fn value(b: &mut Build, width: usize) -> LValueId {
    b.value(DType::F32, dims(width))
}

fn input(b: &mut Build, width: usize) -> LValueId {
    let v = value(b, width);
    b.graph.inputs.push(v);
    v
}

fn state(b: &mut Build, dims: Vec<usize>) -> StateId {
    b.graph.states.push(State { dims, past: String::new(), present: String::new() });
    StateId(b.graph.states.len() as u32 - 1)
}

/// Expert ids and weights of random logits.
fn routes(b: &mut Build, experts: usize, k: usize) -> [LValueId; 2] {
    let logits = b.value(DType::F32, vec![Extent::Tokens(1), Extent::Fixed(experts)]);
    b.graph.inputs.push(logits);
    let of = vec![Extent::Tokens(1), Extent::Fixed(k)];
    let (ids, mix) = (b.value(DType::I32, of.clone()), b.value(DType::F32, of));
    let route = Route { experts, k, normalize: true, sparse_mixer: false };
    b.push("route", LOp::Route(route), vec![Some(Operand::Value(logits)), None], vec![ids, mix]);
    [ids, mix]
}

fn scaled(b: &mut Build, x: LValueId, width: usize, by: f32) -> Result<LValueId> {
    with_number(b, "Mul", x, width, by)
}

fn shifted(b: &mut Build, x: LValueId, width: usize, by: f32) -> Result<LValueId> {
    with_number(b, "Add", x, width, by)
}

fn with_number(b: &mut Build, op: &str, x: LValueId, width: usize, number: f32) -> Result<LValueId> {
    let y = value(b, width);
    let number = b.constant(Tensor::from_slice([1], &[number])?);
    let op = Op::parse("", op, 14, &Attrs::default())?;
    b.push("number", LOp::Op(op), vec![Some(Operand::Value(x)), Some(number)], vec![y]);
    Ok(y)
}
