//! `doyen bench --op`: from flags to subjects, and the report.

use super::NumericsArg;
use crate::{
    bench::{fingerprint, spread},
    console,
    model::cpu,
};
use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use doyen_cpu::{
    CpuDevice,
    bench::{
        CachedAttention, CaseReport, Env, ExpertLayer, KvType, MatMul, Plan, QuantFormat, Rounds, Subject,
    },
    kernel::linear::Mode,
    machine::Machine,
};
use doyen_graph::device::Device;
use doyen_tensor::{ByteCount, FloatType, format::Bits};
use serde_json::{Map, Value, json};
use std::{fmt, num::NonZeroUsize, str::FromStr};

/// Seconds after which a case that has a few samples gets no more.
const SECONDS: f64 = 10.0;

/// `--op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Op {
    /// A layer of experts with interleaved SwiGLU
    Qmoe,
    /// A product with a block-quantized weight
    Matmulnbits,
    /// Attention over cached keys and values
    Gqa,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Qmoe => "qmoe",
            Self::Matmulnbits => "matmulnbits",
            Self::Gqa => "gqa",
        })
    }
}

/// The shape of an operator. What is left out has the default of the operator.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Operators")]
pub struct OpArgs {
    /// Rows of activations, a list: tokens of a step [default: 1,8,128 of qmoe and matmulnbits, 1 of gqa]
    #[arg(long, value_name = "M,..", value_delimiter = ',', requires = "op", allow_negative_numbers = true)]
    tokens: Vec<usize>,

    /// qmoe: experts [default: 64]
    #[arg(long, value_name = "E", requires = "op", allow_negative_numbers = true)]
    experts: Option<usize>,

    /// qmoe: experts per token [default: 8]
    #[arg(long, value_name = "K", requires = "op", allow_negative_numbers = true)]
    top_k: Option<usize>,

    /// qmoe: hidden size [default: 2048]
    #[arg(long, value_name = "H", requires = "op", allow_negative_numbers = true)]
    hidden: Option<usize>,

    /// qmoe: intermediate size [default: 768]
    #[arg(long, value_name = "I", requires = "op", allow_negative_numbers = true)]
    inter: Option<usize>,

    /// matmulnbits: rows of the weight, outputs [default: 4096]
    #[arg(long, value_name = "N", requires = "op", allow_negative_numbers = true)]
    n: Option<usize>,

    /// matmulnbits: columns of the weight, inputs [default: 4096]
    #[arg(long, value_name = "K", requires = "op", allow_negative_numbers = true)]
    k: Option<usize>,

    /// qmoe, matmulnbits: widths, a list of 2, 4, 8; of FC1/FC2 for qmoe, as in 2/4 [default: 4]
    #[arg(
        long,
        value_name = "BITS,..",
        value_delimiter = ',',
        requires = "op",
        allow_negative_numbers = true
    )]
    bits: Vec<Widths>,

    /// qmoe, matmulnbits: columns that share a scale, a list of powers of two from 16 on, or row [default: 32]
    #[arg(long, value_name = "B,..", value_delimiter = ',', requires = "op", allow_negative_numbers = true)]
    block: Vec<BlockArg>,

    /// qmoe, matmulnbits: type of the scales [default: f16]
    #[arg(long, value_enum, value_name = "TYPE", requires = "op")]
    scales: Option<ScaleType>,

    /// qmoe, matmulnbits: a zero point for each block
    #[arg(long, requires = "op")]
    zero_points: bool,

    /// gqa: query heads [default: 32]
    #[arg(long, value_name = "N", requires = "op", allow_negative_numbers = true)]
    heads: Option<usize>,

    /// gqa: key and value heads [default: 8]
    #[arg(long, value_name = "N", requires = "op", allow_negative_numbers = true)]
    kv_heads: Option<usize>,

    /// gqa: channels of a head [default: 128]
    #[arg(long, value_name = "N", requires = "op", allow_negative_numbers = true)]
    head_size: Option<usize>,

    /// gqa: positions in the cache, a list [default: 4096]
    #[arg(long, value_name = "N,..", value_delimiter = ',', requires = "op", allow_negative_numbers = true)]
    context: Vec<usize>,

    /// gqa: how keys and values are stored, a list [default: f32]
    #[arg(long, value_enum, value_name = "TYPE,..", value_delimiter = ',', requires = "op")]
    kv: Vec<KvArg>,
}

/// Widths of FC1 and FC2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Widths {
    fc1: Bits,
    fc2: Bits,
}

impl FromStr for Widths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bits = |t: &str| {
            let bits = t.trim().parse().ok().and_then(Bits::new);
            bits.ok_or_else(|| format!("{t:?} is not a width: give 2, 4 or 8, or FC1/FC2 as in 2/4"))
        };
        let (fc1, fc2) = text.split_once('/').unwrap_or((text, text));
        Ok(Self { fc1: bits(fc1)?, fc2: bits(fc2)? })
    }
}

/// Columns that share a scale, as packages may have them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BlockArg(usize);

impl FromStr for BlockArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "row" => Ok(Self(QuantFormat::ROW)),
            number => {
                let block = number.parse().ok().filter(|&n: &usize| n >= 16 && n.is_power_of_two());
                block.map(Self).ok_or_else(|| {
                    format!("{number:?} is no block of a package: give 16, 32, 64, 128, 256 or a larger power of two, or row")
                })
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScaleType {
    F32,
    F16,
    Bf16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KvArg {
    F32,
    F16,
    Bf16,
    Int8,
    Int4,
}

impl From<KvArg> for KvType {
    fn from(kv: KvArg) -> Self {
        match kv {
            KvArg::F32 => Self::F32,
            KvArg::F16 => Self::F16,
            KvArg::Bf16 => Self::BF16,
            KvArg::Int8 => Self::Int8,
            KvArg::Int4 => Self::Int4,
        }
    }
}

impl OpArgs {
    /// Refuses flags of other operators.
    fn check(&self, op: Op) -> Result<()> {
        use Op::{Gqa, Matmulnbits, Qmoe};
        let flags: [(&str, bool, &[Op]); 14] = [
            ("--experts", self.experts.is_some(), &[Qmoe]),
            ("--top-k", self.top_k.is_some(), &[Qmoe]),
            ("--hidden", self.hidden.is_some(), &[Qmoe]),
            ("--inter", self.inter.is_some(), &[Qmoe]),
            ("--n", self.n.is_some(), &[Matmulnbits]),
            ("--k", self.k.is_some(), &[Matmulnbits]),
            ("--bits", !self.bits.is_empty(), &[Qmoe, Matmulnbits]),
            ("--block", !self.block.is_empty(), &[Qmoe, Matmulnbits]),
            ("--scales", self.scales.is_some(), &[Qmoe, Matmulnbits]),
            ("--zero-points", self.zero_points, &[Qmoe, Matmulnbits]),
            ("--heads", self.heads.is_some(), &[Gqa]),
            ("--kv-heads", self.kv_heads.is_some(), &[Gqa]),
            ("--head-size", self.head_size.is_some(), &[Gqa]),
            ("--context or --kv", !self.context.is_empty() || !self.kv.is_empty(), &[Gqa]),
        ];
        for (flag, given, ops) in flags {
            if given && !ops.contains(&op) {
                let ops: Vec<String> = ops.iter().map(|o| format!("--op {o}")).collect();
                bail!("{flag} belongs to {}, not to --op {op}", ops.join(" and "));
            }
        }
        let uneven = self.bits.iter().find(|w| w.fc1 != w.fc2).filter(|_| op == Matmulnbits);
        if let Some(Widths { fc1, fc2 }) = uneven {
            bail!(
                "--bits {}/{}: a matmulnbits weight has one width; give a list as in 2,4",
                fc1.get(),
                fc2.get()
            );
        }
        Ok(())
    }

    fn subjects(&self, op: Op) -> Vec<Box<dyn Subject>> {
        match op {
            Op::Qmoe => self
                .formats()
                .into_iter()
                .map(|(fc1, fc2)| {
                    Box::new(ExpertLayer {
                        experts: self.experts.unwrap_or(64),
                        top_k: self.top_k.unwrap_or(8),
                        hidden: self.hidden.unwrap_or(2048),
                        inter: self.inter.unwrap_or(768),
                        fc1,
                        fc2,
                    }) as Box<dyn Subject>
                })
                .collect(),
            Op::Matmulnbits => self
                .formats()
                .into_iter()
                .map(|(format, _)| {
                    let (rows, cols) = (self.n.unwrap_or(4096), self.k.unwrap_or(4096));
                    Box::new(MatMul { rows, cols, format }) as Box<dyn Subject>
                })
                .collect(),
            Op::Gqa => {
                let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
                for &context in or(&self.context, &[4096]) {
                    for &kv in or(&self.kv, &[KvArg::F32]) {
                        subjects.push(Box::new(CachedAttention {
                            heads: self.heads.unwrap_or(32),
                            kv_heads: self.kv_heads.unwrap_or(8),
                            head_size: self.head_size.unwrap_or(128),
                            context,
                            kv: kv.into(),
                        }));
                    }
                }
                subjects
            }
        }
    }

    /// Every width at every block, of FC1 and FC2.
    fn formats(&self) -> Vec<(QuantFormat, QuantFormat)> {
        let scales = match self.scales.unwrap_or(ScaleType::F16) {
            ScaleType::F32 => FloatType::F32,
            ScaleType::F16 => FloatType::F16,
            ScaleType::Bf16 => FloatType::BF16,
        };
        let format = |bits, block| QuantFormat { bits, block, scales, zero_points: self.zero_points };
        let widths = or(&self.bits, &[Widths { fc1: Bits::B4, fc2: Bits::B4 }]);
        let at = |&BlockArg(block): &BlockArg| {
            widths.iter().map(move |w| (format(w.fc1, block), format(w.fc2, block)))
        };
        or(&self.block, &[BlockArg(32)]).iter().flat_map(at).collect()
    }
}

/// The list, or the default where it is empty.
const fn or<'a, T>(list: &'a [T], default: &'a [T]) -> &'a [T] {
    if list.is_empty() { default } else { list }
}

/// What was measured.
pub struct Report {
    op: Op,
    device: CpuDevice,
    machine: Machine,
    memory: ByteCount,
    measured: doyen_cpu::bench::Report,
}

/// Measures an operator.
///
/// # Errors
/// When flags do not fit the operator or each other, or take more memory than there is.
pub fn measure(
    op: Op,
    args: &OpArgs,
    threads: Option<NonZeroUsize>,
    numerics: NumericsArg,
    samples: usize,
) -> Result<Report> {
    args.check(op)?;
    let default: &[usize] = if op == Op::Gqa { &[1] } else { &[1, 8, 128] };
    let tokens = or(&args.tokens, default);
    let device = cpu(threads)?;
    let machine = Machine::read();
    let mode = match numerics {
        NumericsArg::Fast | NumericsArg::Int8 => Mode::Fast,
        NumericsArg::Exact => Mode::Exact,
    };
    let env = Env { pool: device.pool(), isa: device.isa(), mode };
    let plan = Plan::new(&env, args.subjects(op), tokens, machine.last_level_cache())?;
    let memory = plan.bytes();
    let available = ByteCount(machine.memory.available.unwrap_or(u64::MAX));
    ensure!(
        memory <= available,
        "measuring this takes {memory}, {available} are available: give smaller sizes or shorter lists"
    );
    console::say(format_args!("{} cases, allocating {memory} of {available} available", plan.cases()));
    let mut suite = plan.build(&env)?;
    let bar = console::bar(
        plan.cases().saturating_mul(samples.saturating_add(1)) as u64,
        "{bar:30} {pos}/{len} calls  {eta} left",
    );
    let measured = suite.measure(Rounds { samples, seconds: SECONDS }, || bar.inc(1));
    bar.finish_and_clear();
    Ok(Report { op, device: device.clone(), machine, memory, measured })
}

impl Report {
    /// For people.
    pub fn text(&self) -> String {
        format!(
            "{}, {}\n{}\n{}\n",
            self.op,
            self.device.describe(),
            self.measured,
            fingerprint::text(&self.machine)
        )
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        json!({
            "op": self.op.to_string(), "device": self.device.describe(), "threads": self.measured.threads,
            "isa": self.device.isa().name(), "memory_bytes": self.memory.0,
            "read_gb_s": spread(&self.measured.read, 1e-9),
            "cases": self.measured.cases.iter().map(case).collect::<Vec<_>>(),
            "machine": fingerprint::json(&self.machine),
        })
    }
}

fn case(c: &CaseReport) -> Value {
    let number = |v: &str| v.parse::<u64>().map_or_else(|_| json!(v), |n| json!(n));
    let mut out: Map<String, Value> = c.labels.iter().map(|(k, v)| ((*k).to_owned(), number(v))).collect();
    out.insert("ms".into(), spread(&c.seconds, 1e3));
    out.insert("gb_s".into(), spread(&c.rate, 1e-9));
    out.insert("share_of_read".into(), spread(&c.share, 1.0));
    out.insert("gmac_s".into(), json!(c.macs / c.seconds.median / 1e9));
    Value::Object(out)
}
