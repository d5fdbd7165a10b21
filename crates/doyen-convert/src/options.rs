//! Conversion options as types: which weight gets which width, for the whole model and per layer.
//!
//! What a layer's formats may not be is not representable once resolved: experts are float as a whole or have two
//! integer widths. Parsers live here so that every caller words a bad option the same way.

mod parse;

pub use parse::OptionError;

use crate::report::Part;
use doyen_tensor::{ByteCount, FloatType, format::Bits};
use std::{collections::BTreeMap, fmt};

/// Width of a weight: packed integer codes, or the package's float type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// 2, 4 or 8 bits.
    Bits(Bits),
    /// The package's float type.
    Float,
}

/// Widths of the routed experts of a layer, which one operator executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertWidths {
    /// Both projections in the package's float type.
    Float,
    /// Integer codes, a width for each projection.
    Bits {
        /// Gate and up projection.
        fc1: Bits,
        /// Down projection.
        fc2: Bits,
    },
}

/// How many columns share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Block {
    /// 16, 32, 64, 128 or 256 columns.
    Columns(usize),
    /// One scale a row, where the operator knows row-wise scales (QMoE); 256 columns elsewhere.
    Row,
}

/// The widest block that MatMulNBits and GatherBlockQuantized kernels accept.
pub const WIDEST_BLOCK: usize = 256;

impl Block {
    /// Columns of a block for operators without row-wise scales.
    pub const fn columns(self) -> usize {
        match self {
            Self::Columns(n) => n,
            Self::Row => WIDEST_BLOCK,
        }
    }
}

/// Formats of one decoder layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerFormats {
    /// Routed experts.
    pub experts: ExpertWidths,
    /// Dense feed-forward.
    pub mlp: Width,
    /// Shared experts.
    pub shared_experts: Width,
    /// Router of a mixture-of-experts layer.
    pub router: Width,
    /// Query, key, value and output projections.
    pub attention: Width,
    /// Columns per scale.
    pub block: Block,
    /// Whether blocks have zero points.
    pub zero_points: bool,
    /// Which of the widths somebody chose.
    pub asked: Asked,
}

/// Which kinds of weights somebody chose a width for. Those are given it even where the source holds them quantized;
/// others keep the source's codes where a format holds them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, clippy::struct_excessive_bools, reason = "one for each kind of weight")]
pub struct Asked {
    pub experts: bool,
    pub mlp: bool,
    pub shared_experts: bool,
    pub router: bool,
    pub attention: bool,
}

/// One setting of a layer, as `key=value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Both projections of the experts.
    Experts(Width),
    /// Gate and up projection of the experts.
    Fc1(Width),
    /// Down projection of the experts.
    Fc2(Width),
    /// Dense feed-forward.
    Mlp(Width),
    /// Shared experts.
    SharedExperts(Width),
    /// Router.
    Router(Width),
    /// Attention projections.
    Attention(Width),
    /// Columns per scale.
    Block(Block),
    /// Zero points.
    ZeroPoints(bool),
}

/// A layer range with settings that replace the model-wide ones there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerOverride {
    /// First layer.
    pub first: usize,
    /// Last layer, included; `None` is the model's last.
    pub last: Option<usize>,
    /// Settings, later ones win.
    pub settings: Vec<Setting>,
    /// The text it was parsed from, for messages.
    pub text: String,
}

/// Everything a conversion can be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Settings of all layers, applied over the defaults in order.
    pub settings: Vec<Setting>,
    /// Token embedding; without a choice the source's codes where a format holds them, else [`TABLE_WIDTH`].
    pub embed: Option<Width>,
    /// Output projection, likewise.
    pub lm_head: Option<Width>,
    /// Float type of the package: activations, scales, norms and float weights.
    pub dtype: FloatType,
    /// Per-layer settings; later ones win.
    pub layers: Vec<LayerOverride>,
    /// What experts of 4-bit floats become that nobody chose a width for.
    pub mxfp4: Mxfp4,
    /// LongRoPE's long factors and the whole context, instead of the short ones and the context before stretching.
    pub long_context: bool,
}

/// Two ways to keep every value of experts that the source holds in MXFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mxfp4 {
    /// As they are: 4-bit floats with their powers of two.
    Kept,
    /// 8-bit codes for twice the bytes, which every runtime of QMoE reads, and with which long prompts are read faster here.
    #[default]
    Codes8,
}

/// Width of the embedding and the head where nobody chose one.
pub const TABLE_WIDTH: Width = Width::Bits(Bits::B8);

impl Default for Options {
    fn default() -> Self {
        Self {
            settings: Vec::new(),
            embed: None,
            lm_head: None,
            dtype: FloatType::F16,
            layers: Vec::new(),
            mxfp4: Mxfp4::default(),
            long_context: false,
        }
    }
}

impl Options {
    /// The plain model: every weight in `dtype`.
    pub fn float(dtype: FloatType) -> Self {
        let settings = vec![
            Setting::Experts(Width::Float),
            Setting::Mlp(Width::Float),
            Setting::SharedExperts(Width::Float),
            Setting::Router(Width::Float),
            Setting::Attention(Width::Float),
        ];
        let float = Some(Width::Float);
        Self { settings, embed: float, lm_head: float, dtype, ..Self::default() }
    }

    /// What was asked for and has no effect on a model made of `parts`: one sentence each.
    pub(crate) fn without_effect(&self, parts: &BTreeMap<Part, ByteCount>) -> Vec<String> {
        let of_layers = self.layers.iter().flat_map(|l| &l.settings);
        let mut told: Vec<String> = Vec::new();
        for setting in self.settings.iter().chain(of_layers) {
            let (option, what, needs) = match setting {
                Setting::Experts(Width::Bits(_))
                | Setting::Fc1(Width::Bits(_))
                | Setting::Fc2(Width::Bits(_)) => ("experts", "experts", Part::ExpertsFc1),
                Setting::Mlp(Width::Bits(_)) => ("mlp", "dense feed-forward", Part::Mlp),
                Setting::SharedExperts(Width::Bits(_)) => {
                    ("shared-experts", "shared experts", Part::SharedExperts)
                }
                Setting::Router(Width::Bits(_)) => ("router", "routers", Part::Router),
                _ => continue,
            };
            let sentence = format!("the width of {option} has no effect: the model has no {what}");
            if !parts.contains_key(&needs) && !told.contains(&sentence) {
                told.push(sentence);
            }
        }
        told
    }

    /// Formats of the model as a whole (embedding and head use its block and zero points).
    ///
    /// # Errors
    /// When one projection of the experts is float and the other is not.
    pub fn base(&self) -> Result<LayerFormats, OptionError> {
        let mut draft = Draft::default();
        self.settings.iter().for_each(|s| draft.apply(*s));
        draft.finish("--experts")
    }

    /// Formats of every layer of a model of `layers` layers.
    ///
    /// # Errors
    /// When an override names layers that the model does not have, or leaves one projection of the experts float and
    /// the other not.
    pub fn resolve(&self, layers: usize) -> Result<Vec<LayerFormats>, OptionError> {
        for o in &self.layers {
            let last = o.last.unwrap_or(o.first);
            if o.first >= layers || last >= layers {
                let found = o.first.max(last);
                return Err(OptionError::new(
                    format!("--layers {:?}", o.text),
                    format!("the model has layers 0 to {}, found {found}", layers - 1),
                ));
            }
        }
        (0..layers)
            .map(|layer| {
                let mut draft = Draft::default();
                self.settings.iter().for_each(|s| draft.apply(*s));
                let mut origin = "--experts".to_owned();
                for o in &self.layers {
                    if layer >= o.first && o.last.is_none_or(|last| layer <= last) {
                        o.settings.iter().for_each(|s| draft.apply(*s));
                        origin = format!("--layers {:?}", o.text);
                    }
                }
                draft.finish(&origin)
            })
            .collect()
    }
}

/// Formats while settings are applied, before the experts' pair is known to be whole.
struct Draft {
    fc1: Width,
    fc2: Width,
    rest: LayerFormats,
}

impl Default for Draft {
    fn default() -> Self {
        let four = Width::Bits(Bits::B4);
        Self {
            fc1: four,
            fc2: four,
            rest: LayerFormats {
                experts: ExpertWidths::Float,
                mlp: four,
                shared_experts: Width::Bits(Bits::B8),
                router: Width::Float,
                attention: Width::Bits(Bits::B8),
                block: Block::Columns(32),
                zero_points: true,
                asked: Asked::default(),
            },
        }
    }
}

impl Draft {
    fn apply(&mut self, setting: Setting) {
        let asked = &mut self.rest.asked;
        match setting {
            Setting::Experts(_) | Setting::Fc1(_) | Setting::Fc2(_) => asked.experts = true,
            Setting::Mlp(_) => asked.mlp = true,
            Setting::SharedExperts(_) => asked.shared_experts = true,
            Setting::Router(_) => asked.router = true,
            Setting::Attention(_) => asked.attention = true,
            Setting::Block(_) | Setting::ZeroPoints(_) => {}
        }
        match setting {
            Setting::Experts(w) => (self.fc1, self.fc2) = (w, w),
            Setting::Fc1(w) => self.fc1 = w,
            Setting::Fc2(w) => self.fc2 = w,
            Setting::Mlp(w) => self.rest.mlp = w,
            Setting::SharedExperts(w) => self.rest.shared_experts = w,
            Setting::Router(w) => self.rest.router = w,
            Setting::Attention(w) => self.rest.attention = w,
            Setting::Block(b) => self.rest.block = b,
            Setting::ZeroPoints(z) => self.rest.zero_points = z,
        }
    }

    fn finish(self, origin: &str) -> Result<LayerFormats, OptionError> {
        let experts = match (self.fc1, self.fc2) {
            (Width::Float, Width::Float) => ExpertWidths::Float,
            (Width::Bits(fc1), Width::Bits(fc2)) => ExpertWidths::Bits { fc1, fc2 },
            (fc1, fc2) => {
                return Err(OptionError::new(
                    origin,
                    format!(
                        "expected fc1 and fc2 both float or both 2, 4 or 8 bits, found fc1={fc1}, fc2={fc2}"
                    ),
                ));
            }
        };
        Ok(LayerFormats { experts, ..self.rest })
    }
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bits(b) => write!(f, "{}", b.get()),
            Self::Float => f.write_str("float"),
        }
    }
}

impl fmt::Display for ExpertWidths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Float => f.write_str("float"),
            Self::Bits { fc1, fc2 } if fc1 == fc2 => write!(f, "{}", fc1.get()),
            Self::Bits { fc1, fc2 } => write!(f, "fc1={},fc2={}", fc1.get(), fc2.get()),
        }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Columns(n) => write!(f, "{n}"),
            Self::Row => f.write_str("row"),
        }
    }
}
