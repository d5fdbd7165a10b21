//! The table of kernels: which CUDA file is compiled with which definitions, and the entry points it has.
//!
//! One table for all: the device compiles modules as nodes ask for them, `examples/compile.rs` compiles every one for every
//! supported card.

use doyen_tensor::{
    FloatType,
    format::{Bits, Element},
};
use std::fmt;

/// The header that every module includes.
pub(crate) const HEADER: (&str, &str) = ("doyen.cuh", include_str!("../kernels/doyen.cuh"));

/// Bits of a stored weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Width {
    B2,
    B4,
    B8,
    /// float16 or bfloat16; told apart when a kernel runs.
    F16,
    F32,
}

impl Width {
    /// All widths, narrowest first.
    pub const ALL: [Self; 5] = [Self::B2, Self::B4, Self::B8, Self::F16, Self::F32];

    /// The width of codes.
    pub const fn of_bits(bits: Bits) -> Self {
        match bits {
            Bits::B2 => Self::B2,
            Bits::B4 => Self::B4,
            Bits::B8 => Self::B8,
        }
    }

    /// The width of float weights.
    pub const fn of_float(ty: FloatType) -> Self {
        match ty {
            FloatType::F32 => Self::F32,
            FloatType::F16 | FloatType::BF16 => Self::F16,
        }
    }

    /// The number.
    pub const fn bits(self) -> u32 {
        match self {
            Self::B2 => 2,
            Self::B4 => 4,
            Self::B8 => 8,
            Self::F16 => 16,
            Self::F32 => 32,
        }
    }
}

/// Blocks in a segment of 64 bytes of a row of codes; a block may also be longer than one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Parts {
    One,
    Two,
    Four,
}

impl Parts {
    /// All.
    pub const ALL: [Self; 3] = [Self::One, Self::Two, Self::Four];

    /// The number.
    pub const fn get(self) -> usize {
        match self {
            Self::One => 1,
            Self::Two => 2,
            Self::Four => 4,
        }
    }
}

/// Small floats that are codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Small {
    E2M1,
    E4M3,
}

impl Small {
    /// Both.
    pub const ALL: [Self; 2] = [Self::E2M1, Self::E4M3];

    /// The codes of an element.
    pub const fn of(element: Element) -> Self {
        match element {
            Element::E2M1 => Self::E2M1,
            Element::E4M3 => Self::E4M3,
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::E2M1 => 4,
            Self::E4M3 => 8,
        }
    }
}

/// What the tensor cores multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Operand {
    /// float16: eleven significant bits, at most 65504.
    F16,
    /// bfloat16: eight significant bits, the range of float32.
    #[default]
    Bf16,
}

impl Operand {
    /// Both.
    pub const ALL: [Self; 2] = [Self::F16, Self::Bf16];

    const fn type_name(self) -> &'static str {
        match self {
            Self::F16 => "Half",
            Self::Bf16 => "Brain",
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// A compiled unit: a file with definitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Module {
    /// Norms, embeddings, element-wise operators, movements.
    Pointwise,
    /// Routing, the order of routes, activations between the products of experts.
    Route,
    /// Attention over paged caches.
    Attention,
    /// Attention of steps that bring several tokens to a sequence, over caches of an operand.
    Prefill(Operand),
    /// Cuts, joins, reductions, choices, rotations.
    Parts,
    /// Products of few rows, in float32.
    Gemv(Width),
    /// Products of up to 8 rows with codes, on the tensor cores.
    Few(Bits, Operand),
    /// Products of many rows with codes, on the tensor cores.
    Tile(Bits, Operand),
    /// Products of one or a few rows with codes, for decode.
    Stream(Bits, Parts, Operand),
    /// Products of up to 8 rows with codes, 16 bytes a lane, on the tensor cores.
    Eight(Bits, Operand),
    /// Products of up to 8 rows with codes that flow through shared memory, on the tensor cores.
    Flow(Bits, Operand),
    /// Products of many rows with codes on Hopper's warpgroup instructions.
    Wide(Bits, Operand),
    /// Products of many rows with floats, on the tensor cores.
    Gemm(Width, Operand),
    /// Causal convolution and linear attention.
    State,
    /// The gated operators of hybrid models.
    Gated,
    /// Attention over latent rows.
    Latent,
    /// The up-projection on either side of attention over latent rows.
    Absorb(Width),
    /// Experts of small floats.
    Mini(Small),
    /// Whole matrices of a bank as floats.
    Expand(Width),
    /// Dense products of a few experts at a time.
    Dense,
    /// What the tensor cores do at most.
    Peak,
    /// Choice of tokens.
    Sample,
}

impl Module {
    /// Every module, with every variant.
    pub fn all() -> Vec<Self> {
        let mut all = vec![Self::Pointwise, Self::Route, Self::Attention, Self::Parts, Self::Sample];
        all.extend(Operand::ALL.map(Self::Prefill));
        all.extend(Width::ALL.map(Self::Gemv));
        all.extend(Bits::ALL.iter().flat_map(|&b| Operand::ALL.map(|o| Self::Few(b, o))));
        all.extend(Bits::ALL.iter().flat_map(|&b| Operand::ALL.map(|o| Self::Eight(b, o))));
        all.extend(Bits::ALL.iter().flat_map(|&b| Operand::ALL.map(|o| Self::Flow(b, o))));
        all.extend(Bits::ALL.iter().flat_map(|&b| Operand::ALL.map(|o| Self::Tile(b, o))));
        all.extend(Bits::ALL.iter().flat_map(|&b| Operand::ALL.map(|o| Self::Wide(b, o))));
        let streams =
            |b: Bits| Parts::ALL.into_iter().flat_map(move |p| Operand::ALL.map(|o| Self::Stream(b, p, o)));
        all.extend(Bits::ALL.iter().flat_map(|&b| streams(b)));
        all.extend([Width::F16, Width::F32].iter().flat_map(|&w| Operand::ALL.map(|o| Self::Gemm(w, o))));
        all.extend([Self::State, Self::Gated, Self::Latent, Self::Dense, Self::Peak]);
        all.extend(Width::ALL.iter().flat_map(|&w| [Self::Absorb(w), Self::Expand(w)]));
        all.extend(Small::ALL.map(Self::Mini));
        all
    }

    /// Name of the file, and its text.
    pub const fn source(self) -> (&'static str, &'static str) {
        match self {
            Self::Pointwise => ("pointwise.cu", include_str!("../kernels/pointwise.cu")),
            Self::Route => ("route.cu", include_str!("../kernels/route.cu")),
            Self::Attention => ("attention.cu", include_str!("../kernels/attention.cu")),
            Self::Prefill(_) => ("prefill.cu", include_str!("../kernels/prefill.cu")),
            Self::Parts => ("parts.cu", include_str!("../kernels/parts.cu")),
            Self::Gemv(_) => ("gemv.cu", include_str!("../kernels/gemv.cu")),
            Self::Few(..) => ("few.cu", include_str!("../kernels/few.cu")),
            Self::Tile(..) => ("tile.cu", include_str!("../kernels/tile.cu")),
            Self::Eight(..) => ("eight.cu", include_str!("../kernels/eight.cu")),
            Self::Flow(..) => ("flow.cu", include_str!("../kernels/flow.cu")),
            Self::Wide(..) => ("wide.cu", include_str!("../kernels/wide.cu")),
            Self::Stream(..) => ("stream.cu", include_str!("../kernels/stream.cu")),
            Self::Gemm(..) => ("gemm.cu", include_str!("../kernels/gemm.cu")),
            Self::State => ("state.cu", include_str!("../kernels/state.cu")),
            Self::Gated => ("gated.cu", include_str!("../kernels/gated.cu")),
            Self::Latent => ("latent.cu", include_str!("../kernels/latent.cu")),
            Self::Absorb(_) => ("absorb.cu", include_str!("../kernels/absorb.cu")),
            Self::Mini(_) => ("mini.cu", include_str!("../kernels/mini.cu")),
            Self::Expand(_) => ("expand.cu", include_str!("../kernels/expand.cu")),
            Self::Dense => ("dense.cu", include_str!("../kernels/dense.cu")),
            Self::Peak => ("peak.cu", include_str!("../kernels/peak.cu")),
            Self::Sample => ("sample.cu", include_str!("../kernels/sample.cu")),
        }
    }

    /// What it is compiled with, as `NAME=VALUE`.
    pub fn defines(self) -> Vec<String> {
        match self {
            Self::Pointwise
            | Self::Route
            | Self::Attention
            | Self::Parts
            | Self::Sample
            | Self::State
            | Self::Gated
            | Self::Latent
            | Self::Dense
            | Self::Peak => Vec::new(),
            Self::Prefill(o) => vec![format!("OPERAND={}", o.type_name())],
            Self::Mini(e) => vec![format!("BITS={}", e.bits())],
            Self::Gemv(w) | Self::Absorb(w) | Self::Expand(w) => vec![format!("BITS={}", w.bits())],
            Self::Few(b, o) | Self::Eight(b, o) | Self::Flow(b, o) | Self::Tile(b, o) | Self::Wide(b, o) => {
                vec![format!("BITS={}", b.get()), format!("OPERAND={}", o.type_name())]
            }
            Self::Stream(b, p, o) => vec![
                format!("BITS={}", b.get()),
                format!("PARTS={}", p.get()),
                format!("OPERAND={}", o.type_name()),
            ],
            Self::Gemm(w, o) => vec![format!("BITS={}", w.bits()), format!("OPERAND={}", o.type_name())],
        }
    }

    /// Whether it is made of instructions that later cards have as well, so that PTX of it is of use.
    pub const fn is_portable(self) -> bool {
        !matches!(self, Self::Wide(..))
    }

    /// Whether there are such kernels for a card.
    pub const fn is_for(self, arch: Arch) -> bool {
        match self {
            Self::Wide(..) => arch.major == 9 && arch.minor == 0,
            // Bulk copies.
            Self::Flow(..) => arch.major >= 9,
            _ => true,
        }
    }

    /// Its kernels.
    pub const fn entries(self) -> &'static [&'static str] {
        match self {
            Self::Pointwise => {
                &["normalize", "embed", "unary", "binary", "choose", "softmax", "select_rows", "transpose"]
            }
            Self::Route => &["route", "group", "activate_rows", "combine", "router"],
            Self::Attention => &["attention_prepare", "attend", "attention_join"],
            Self::Prefill(_) => &["prefill_64", "prefill_96", "prefill_128", "prefill_256"],
            Self::Parts => &["copy_runs", "reduce", "top_k", "pick", "scatter", "rotate"],
            Self::Gemv(_) => &["gemv_1", "gemv_2", "gemv_4", "routed", "routed_activated", "routed_sum"],
            Self::Eight(..) => &["eight", "eight_activated"],
            Self::Flow(..) => &["flow", "flow_activated"],
            Self::Few(..) => &["few", "few_activated", "narrow"],
            Self::Tile(..) => &["tile_64", "tile_128", "grouped_64", "grouped_128"],
            Self::Wide(..) => &[
                "wide_48",
                "wide_64",
                "wide_96",
                "wide_split",
                "wide_activated_48",
                "wide_activated_64",
                "wide_activated_96",
                "tall_64",
                "tall_96",
                "tall_activated_64",
                "tall_activated_96",
                "narrow_wide",
            ],
            Self::Stream(..) => &["stream", "stream_normed", "stream_activated", "stream_sum"],
            Self::Sample => &["sample"],
            Self::Gemm(..) => &["gemm_16", "gemm_64", "grouped_16", "grouped_64"],
            Self::State => {
                &["causal_conv", "linear_64", "linear_128", "linear_256", "linear_512", "linear_any"]
            }
            Self::Gated => &["gated_norm", "gated_add", "gates"],
            Self::Latent => &["latent_append", "latent_256", "latent_512", "latent_1024", "latent_join"],
            Self::Absorb(_) => &["absorb_queries", "absorb_values"],
            Self::Mini(_) => &["mini_routed", "mini_activated", "mini_sum", "mini_expand", "mini_turn"],
            Self::Expand(_) => &["expand"],
            Self::Dense => &["slice_tiles", "dense_rows"],
            Self::Peak => &["peak"],
        }
    }
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pointwise => f.write_str("pointwise"),
            Self::Route => f.write_str("route"),
            Self::Attention => f.write_str("attention"),
            Self::Prefill(o) => write!(f, "prefill_{o}"),
            Self::Parts => f.write_str("parts"),
            Self::Sample => f.write_str("sample"),
            Self::Gemv(w) => write!(f, "gemv_{}b", w.bits()),
            Self::Few(b, o) => write!(f, "few_{}b_{o}", b.get()),
            Self::Eight(b, o) => write!(f, "eight_{}b_{o}", b.get()),
            Self::Flow(b, o) => write!(f, "flow_{}b_{o}", b.get()),
            Self::Tile(b, o) => write!(f, "tile_{}b_{o}", b.get()),
            Self::Wide(b, o) => write!(f, "wide_{}b_{o}", b.get()),
            Self::Stream(b, p, o) => write!(f, "stream_{}b_{}_{o}", b.get(), p.get()),
            Self::Gemm(w, o) => write!(f, "gemm_{}b_{o}", w.bits()),
            Self::State => f.write_str("state"),
            Self::Gated => f.write_str("gated"),
            Self::Latent => f.write_str("latent"),
            Self::Absorb(w) => write!(f, "absorb_{}b", w.bits()),
            Self::Mini(e) => write!(f, "mini_{}b", e.bits()),
            Self::Expand(w) => write!(f, "expand_{}b", w.bits()),
            Self::Dense => f.write_str("dense"),
            Self::Peak => f.write_str("peak"),
        }
    }
}

/// What a module is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    /// Compute capability.
    pub major: i32,
    /// Minor part.
    pub minor: i32,
}

impl Arch {
    /// The architectures that every module must compile for.
    pub const SUPPORTED: [Self; 6] = [
        Self { major: 8, minor: 0 },
        Self { major: 8, minor: 6 },
        Self { major: 8, minor: 9 },
        Self { major: 9, minor: 0 },
        Self { major: 10, minor: 0 },
        Self { major: 12, minor: 0 },
    ];
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Hopper's own instructions need the target that promises nothing to later cards.
        let own = if (self.major, self.minor) == (9, 0) { "a" } else { "" };
        write!(f, "sm_{}{}{own}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_entry_is_in_its_source_and_the_other_way_round() {
        for module in Module::all() {
            let (file, text) = module.source();
            let declared: HashSet<&str> = text
                .split("extern \"C\" __global__ void ")
                .skip(1)
                .map(|s| s.split(") ").nth(1).unwrap_or_default().split('(').next().unwrap_or_default())
                .collect();
            let listed: HashSet<&str> = module.entries().iter().copied().collect();
            assert_eq!(declared, listed, "{file}");
        }
    }

    /// Launches overlap: a kernel that does not wait for the ones before it reads what they have not written yet.
    #[test]
    fn every_kernel_waits_for_earlier_launches() {
        for (file, text) in Module::all().into_iter().map(Module::source) {
            for kernel in text.split("extern \"C\" __global__ void ").skip(1) {
                let waits =
                    ["in_order();", "await_earlier();", "BY_LAYOUT("].iter().any(|w| kernel.contains(w));
                assert!(waits, "{file}: {}", kernel.lines().next().unwrap_or_default());
            }
        }
    }

    #[test]
    fn modules_have_names_of_their_own() {
        let all = Module::all();
        let names: HashSet<String> = all.iter().map(ToString::to_string).collect();
        assert_eq!(names.len(), all.len());
        assert_eq!(Arch { major: 9, minor: 0 }.to_string(), "sm_90a");
        assert_eq!(Arch { major: 12, minor: 0 }.to_string(), "sm_120");
    }
}
