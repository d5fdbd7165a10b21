//! Times attention over paged caches of 16-bit floats: one new token of every sequence over long caches, filled with random keys
//! and values by a step of their own, and whole prompts.

use crate::graph::{Build, Result};
use doyen_cuda::CudaDevice;
use doyen_graph::{
    device::{
        Device, GroupPages, GroupTables, Limits, Numerics, Program, RaggedBatch, SeqSpan, Session, Slot,
    },
    lowered::{Attention, CacheGroup, CachePorts, CacheSlot, Extent, KvFormat, LOp, LValueId, Operand},
};
use doyen_tensor::{DType, PageId, Tensor};
use std::{sync::Arc, time::Instant};

const PAGE: usize = 32;

/// What is timed: sequences of so many positions; query and key heads, and their channels.
struct Case {
    sequences: usize,
    context: usize,
    heads: usize,
    kv_heads: usize,
    head: usize,
}

impl Case {
    const fn pages(&self) -> usize {
        self.context.div_ceil(PAGE)
    }

    /// Bytes of the keys and values that a layer reads.
    const fn bytes(&self) -> usize {
        self.sequences * self.context * self.kv_heads * self.head * 2 * 2
    }

    /// Operations of a layer that reads prompts of the whole context, each query up to itself.
    const fn operations(&self) -> usize {
        self.sequences * self.context * self.context / 2 * self.heads * self.head * 4
    }

    /// Layers that read the same queries, keys and values, each with a cache of its own.
    fn graph(&self, layers: usize) -> Build {
        let mut b = Build::new(layers as u64);
        b.graph.groups.push(CacheGroup {
            kv_heads: self.kv_heads,
            k_head_size: self.head,
            v_head_size: self.head,
            format: KvFormat::Float,
            window: None,
            layers: vec![CachePorts::default(); layers],
        });
        let dims = |heads: usize| vec![Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(heads * self.head)];
        let inputs = [self.heads, self.kv_heads, self.kv_heads].map(|heads| {
            let v = b.value(DType::F32, dims(heads));
            b.graph.inputs.push(v);
            Some(Operand::Value(v))
        });
        for layer in 0..layers {
            let op = Attention {
                slot: CacheSlot { group: 0, layer },
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_size: self.head,
                v_head_size: self.head,
                scale: 0.088,
                softcap: 0.0,
                window: None,
                causal: true,
                smooth_softmax: false,
                packed_qkv: false,
                rotary: None,
                qk_norm: None,
            };
            let mut operands = inputs.to_vec();
            operands.resize(12, None);
            let y = b.value(DType::F32, dims(self.heads));
            b.push("attention", LOp::Attention(op), operands, vec![y]);
        }
        b
    }

    fn session(&self, device: &CudaDevice, b: &Build) -> Result<Box<dyn Session>> {
        let limits = Limits {
            tokens: self.context.max(self.sequences),
            rows: 1,
            sequences: self.sequences,
            context: self.context,
            page_size: PAGE,
        };
        let (mut slots, mut arena) = (Vec::new(), 0usize);
        for v in &b.graph.values {
            let n: usize = v.dims.iter().map(|d| d.at(limits.tokens, 1)).product();
            let len = (n * v.dtype.bits() / 8).next_multiple_of(256);
            slots.push(Some(Slot { offset: arena, len }));
            arena += len;
        }
        let mut scratch = 0;
        for node in &b.graph.nodes {
            scratch = scratch.max(device.plan(&b.graph, node, &limits, Numerics::Fast)?.scratch);
        }
        Ok(device.load(Program {
            graph: Arc::new(b.graph.clone()),
            slots,
            arena,
            scratch,
            limits,
            pages: vec![GroupPages { pages: self.sequences * self.pages(), window: None }],
            state_slots: 0,
            numerics: Numerics::Fast,
        })?)
    }

    /// Runs a step of `sequences`, each with `past` positions.
    fn step(
        &self,
        session: &mut dyn Session,
        sequences: std::ops::Range<usize>,
        (past, len): (usize, usize),
        inputs: &[Tensor],
    ) -> Result<()> {
        let mut tables = GroupTables::default();
        for i in sequences.clone() {
            // Pages of a sequence lie apart, as those of sequences that grew together.
            tables.push(
                &(0..self.pages()).map(|p| PageId((p * self.sequences + i) as u32)).collect::<Vec<_>>(),
            );
        }
        let spans: Vec<SeqSpan> =
            (0..sequences.len()).map(|i| SeqSpan { first: i * len, len, past }).collect();
        Ok(session.step(&RaggedBatch {
            tokens: &vec![0; sequences.len() * len],
            sequences: &spans,
            tables: &[tables],
            states: &[],
            rows: &[],
            inputs,
        })?)
    }

    /// Median seconds of a decoding step of `layers` layers.
    fn seconds(&self, device: &CudaDevice, layers: usize) -> Result<f64> {
        let mut b = self.graph(layers);
        let mut session = self.session(device, &b)?;
        let given = inputs(&mut b, self.context - 1)?;
        for i in 0..self.sequences {
            self.step(session.as_mut(), i..i + 1, (0, self.context - 1), &given)?;
        }
        let given = inputs(&mut b, self.sequences)?;
        let mut seconds: Vec<f64> = Vec::new();
        // The first steps are launched one by one, then recorded.
        for i in 0..24 {
            let start = Instant::now();
            self.step(session.as_mut(), 0..self.sequences, (self.context - 1, 1), &given)?;
            if i >= 4 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }

    /// Least seconds of a step of `layers` layers that reads a whole prompt: its inputs come from the host, at a pace that
    /// wanders.
    fn prompt_seconds(&self, device: &CudaDevice, layers: usize) -> Result<f64> {
        let mut b = self.graph(layers);
        let mut session = self.session(device, &b)?;
        let given = inputs(&mut b, self.context)?;
        let mut least = f64::INFINITY;
        for _ in 0..12 {
            let start = Instant::now();
            self.step(session.as_mut(), 0..1, (0, self.context), &given)?;
            least = least.min(start.elapsed().as_secs_f64());
        }
        Ok(least)
    }
}

/// Random inputs of `tokens` tokens.
fn inputs(b: &mut Build, tokens: usize) -> Result<Vec<Tensor>> {
    let inputs: Vec<LValueId> = b.graph.inputs.clone();
    let random = |v: LValueId| {
        let dims: Vec<usize> = b.graph.value(v).dims.iter().map(|d| d.at(tokens, 1)).collect();
        let n = dims.iter().product();
        Ok(Tensor::from_slice(dims, &b.floats(n, 1.0))?)
    };
    inputs.into_iter().map(random).collect()
}

/// Times attention of one new token of every sequence and prints it.
pub fn print(device: &CudaDevice) -> Result<()> {
    println!("attention of one new token of every sequence, head size 128, float16 caches");
    for case in [
        Case { sequences: 32, context: 8192, heads: 32, kv_heads: 8, head: 128 },
        Case { sequences: 32, context: 8192, heads: 32, kv_heads: 4, head: 128 },
        Case { sequences: 1, context: 1024, heads: 32, kv_heads: 4, head: 128 },
    ] {
        let seconds = (case.seconds(device, 3)? - case.seconds(device, 1)?) / 2.0;
        let Case { sequences, context, heads, kv_heads, .. } = case;
        println!(
            "{sequences} sequences of {context}, {heads} heads over {kv_heads}: {:.1} us, {:.0} GB/s",
            seconds * 1e6,
            case.bytes() as f64 / seconds / 1e9
        );
    }
    Ok(())
}

/// Times attention of whole prompts of as many tokens as are wanted and prints it.
pub fn print_prompts(device: &CudaDevice, wanted: impl Fn(usize) -> bool) -> Result<()> {
    println!(
        "attention of a prompt, float16 caches, with norms, rotation and append; operations up to the query"
    );
    for (context, heads, kv_heads, head) in [
        (512, 32, 4, 128),
        (2048, 32, 4, 128),
        (4096, 32, 4, 128),
        (512, 64, 8, 64),
        (2048, 64, 8, 64),
        (4096, 64, 8, 64),
        (4096, 32, 32, 96),
        (4096, 16, 8, 256),
    ] {
        if !wanted(context) {
            continue;
        }
        let case = Case { sequences: 1, context, heads, kv_heads, head };
        let seconds = (case.prompt_seconds(device, 17)? - case.prompt_seconds(device, 1)?) / 16.0;
        println!(
            "{context} tokens, {heads} heads of {head} over {kv_heads}: {:.1} us, {:.1} TFLOP/s",
            seconds * 1e6,
            case.operations() as f64 / seconds / 1e12
        );
    }
    Ok(())
}
