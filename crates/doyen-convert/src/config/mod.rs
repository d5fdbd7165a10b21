//! `config.json` as a typed description of a decoder.
//!
//! | module | what lives there |
//! |---|---|
//! | `family` | the architectures with a recipe, one function each |
//! | `attention`, `latent`, `ffn`, `experts`, `rope` | the parts of a layer: types, and how their fields are read |
//! | `quantization` | how the checkpoint's weights are stored |
//! | `recurrent` | mixers with a state of fixed size |
//! | `windows` | which layers see a window only |
//! | `fields` | typed access, and which fields were read |
//! | `unread` | what is done about fields that no recipe read |
//! | `wrapper` | text models inside of multimodal ones |
//! | `tokens` | special tokens and sampling defaults |
//!
//! Every field that the graph depends on is read, with the defaults of the released implementations; a field whose
//! value the recipes do not implement is refused by name. Nothing else of the crate looks into the JSON.

mod attention;
mod experts;
mod family;
mod ffn;
mod fields;
mod latent;
mod quantization;
mod recurrent;
mod rope;
mod tokens;
mod unread;
mod windows;
mod wrapper;

pub use attention::{Attention, AttentionNames, Gate, QkNorm, Tensors};
pub use experts::{Correction, ExpertNames, Fused, Groups, Moe, RouterNames, Routing, Score, Shared, SwiGlu};
pub(crate) use family::WHOLE_NORMS;
pub use family::architectures;
pub use ffn::{Activation, Inner, Mlp, MlpNames};
pub(crate) use fields::{Fields, Given};
pub use latent::Latent;
pub use quantization::{Groups as CodeGroups, Quantization};
pub use recurrent::{DeltaNet, DeltaProjections, ShortConv};
pub use rope::{Rope, RopeScaling, Stretch};
pub use tokens::SpecialTokens;
pub use wrapper::Wrapper;

use crate::ConvertError;
use std::path::Path;

/// Bounds on what is allocated before any tensor has confirmed it: far above every released model.
pub(crate) const MOST_LAYERS: usize = 1 << 14;
const MOST_POSITIONS: usize = 1 << 26;

/// A decoder as `config.json` describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture name as written.
    pub architecture: String,
    /// The `model.type` that ONNX Runtime GenAI knows for a decoder with these ports.
    pub genai_type: &'static str,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Longest context.
    pub max_positions: usize,
    /// Every norm but those of single heads.
    pub norm: Norm,
    /// Factor on the embedding's rows; 1 for none.
    pub embedding_scale: f32,
    /// Factor on what a mixer or feed-forward adds to the residual stream; 1 for none.
    pub residual_scale: f32,
    /// Module of the norm after the last layer.
    pub final_norm: &'static str,
    /// Output projection.
    pub head: Head,
    /// The layers, first to last.
    pub layers: Vec<Layer>,
    /// Special tokens.
    pub tokens: SpecialTokens,
    /// The multimodal model that this is the text model of.
    pub wrapper: Option<Wrapper>,
    /// How the weights are quantized.
    pub quantization: Option<Quantization>,
    /// Things a user should know.
    pub notices: Vec<String>,
}

/// Kind of a norm over the residual stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Which statistics.
    pub kind: NormKind,
    /// Added to the variance.
    pub eps: f32,
    /// Whether stored weights are the difference to 1.
    pub zero_centred: bool,
}

/// Statistics of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square; a weight.
    Rms,
    /// Mean and variance; a weight.
    MeanVariance {
        /// Whether there is a bias, too.
        bias: bool,
    },
}

/// From normed activations to logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Head {
    /// Whether it reads the embedding's weights.
    pub tied: bool,
    /// Whether it has a bias.
    pub bias: bool,
    /// Logits are divided by this; 1 for nothing.
    pub divisor: f32,
    /// Logits become `c tanh(logits / c)`, after the division.
    pub softcap: Option<f32>,
}

/// One layer: `x += mixer(norm(x))`, `x += ffn(norm(x))`, or `x += mixer(norm(x)) + ffn(norm(x))`.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Where the norms stand.
    pub norms: LayerNorms,
    /// Whether the feed-forward takes what the mixer takes, rather than what comes out behind it.
    pub parallel: bool,
    /// What moves information between tokens.
    pub mixer: Mixer,
    /// What works on each token alone.
    pub ffn: Ffn,
}

/// Modules of a layer's norms below `model.layers.N`; `None` where there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerNorms {
    /// Of the mixer's input.
    pub before_mixer: Option<&'static str>,
    /// Of the mixer's output, before it is added.
    pub after_mixer: Option<&'static str>,
    /// Of the feed-forward's input.
    pub before_ffn: Option<&'static str>,
    /// Of the feed-forward's output, before it is added.
    pub after_ffn: Option<&'static str>,
}

impl LayerNorms {
    /// One norm before each half.
    pub const PRE: Self = Self {
        before_mixer: Some("input_layernorm"),
        after_mixer: None,
        before_ffn: Some("post_attention_layernorm"),
        after_ffn: None,
    };
}

/// What moves information between tokens.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "one a layer, while a checkpoint is converted")]
pub enum Mixer {
    /// Attention over cached keys and values of heads.
    Attention(Attention),
    /// Linear attention with the gated delta rule behind a convolution.
    DeltaNet(DeltaNet),
    /// A convolution between two products.
    ShortConv(ShortConv),
    /// Attention whose keys and values are projections of one row.
    Latent(Latent),
}

impl Mixer {
    /// The rotation of its queries and keys.
    pub const fn rope(&self) -> Option<&Rope> {
        match self {
            Self::Attention(a) => a.rope.as_ref(),
            Self::Latent(a) => Some(&a.rope),
            Self::DeltaNet(_) | Self::ShortConv(_) => None,
        }
    }
}

/// What works on each token alone.
#[derive(Debug, Clone, PartialEq)]
pub enum Ffn {
    /// One gated feed-forward.
    Dense(Mlp),
    /// Routed experts.
    Moe(Box<Moe>),
}

impl ModelConfig {
    /// Reads `config.json` and, for the special tokens, `generation_config.json`.
    ///
    /// # Errors
    /// When a file is missing or malformed, the architecture is not known, or a field has a value that the recipes do
    /// not implement.
    pub fn read(checkpoint: &Path) -> Result<Self, ConvertError> {
        let path = checkpoint.join("config.json");
        if !path.is_file() {
            let needed = "a checkpoint folder holds the model's description in it".into();
            return Err(ConvertError::Missing { path, needed });
        }
        let fields = Fields::read(&path)?;
        let generation = checkpoint.join("generation_config.json");
        let generation = if generation.is_file() { Some(Fields::read(&generation)?) } else { None };
        Self::parse(&fields, generation.as_ref())
    }

    pub(crate) fn parse(f: &Fields, generation: Option<&Fields>) -> Result<Self, ConvertError> {
        let (inner, wrapper) = match family::find(f) {
            Err(ConvertError::Architecture { found, known }) => match wrapper::text_model(f, &found)? {
                Some((inner, wrapper)) => (inner, Some(wrapper)),
                None => return Err(ConvertError::Architecture { found, known }),
            },
            known => known.map(|_| (f.clone(), None))?,
        };
        let family = family::find(&inner)?;
        let f = &inner.with_defaults(family.defaults);
        let mut config = (family.read)(f)?;
        config.wrapper = wrapper;
        config.tokens = SpecialTokens::read(f, generation, config.vocab)?;
        family.architecture.clone_into(&mut config.architecture);
        config.genai_type = family.genai_type;
        unread::judge(f, &mut config.notices)?;
        Ok(config)
    }

    /// A decoder of equal layers with a norm before each half and a dense feed-forward: what families start from.
    fn plain(f: &Fields, attention: Attention, mlp: Mlp) -> Result<Self, ConvertError> {
        Self::with_mixer(f, Mixer::Attention(attention), mlp)
    }

    /// As [`plain`](Self::plain), with another mixer.
    fn with_mixer(f: &Fields, mixer: Mixer, mlp: Mlp) -> Result<Self, ConvertError> {
        let mut notices = Vec::new();
        let max_positions = context(f, mixer.rope(), &mut notices)?;
        let layer = Layer { norms: LayerNorms::PRE, parallel: false, mixer, ffn: Ffn::Dense(mlp) };
        Ok(Self {
            architecture: String::new(),
            genai_type: "",
            hidden: f.size("hidden_size")?,
            vocab: f.size("vocab_size")?,
            max_positions,
            norm: Norm {
                kind: NormKind::Rms,
                eps: f.number("rms_norm_eps", 1e-6)? as f32,
                zero_centred: false,
            },
            final_norm: "model.norm",
            embedding_scale: 1.0,
            residual_scale: 1.0,
            head: Head {
                tied: f.flag("tie_word_embeddings", false)?,
                bias: false,
                divisor: 1.0,
                softcap: None,
            },
            layers: vec![layer; f.size_up_to("num_hidden_layers", MOST_LAYERS)?],
            tokens: SpecialTokens::default(),
            wrapper: None,
            quantization: Quantization::read(f)?,
            notices,
        })
    }

    /// The attentions of the layers that have one, first to last, with their layer.
    pub fn attentions(&self) -> impl Iterator<Item = (usize, &Attention)> {
        self.layers.iter().enumerate().filter_map(|(i, l)| match &l.mixer {
            Mixer::Attention(a) => Some((i, a)),
            Mixer::DeltaNet(_) | Mixer::ShortConv(_) | Mixer::Latent(_) => None,
        })
    }

    fn attentions_mut(&mut self) -> impl Iterator<Item = (usize, &mut Attention)> {
        self.layers.iter_mut().enumerate().filter_map(|(i, l)| match &mut l.mixer {
            Mixer::Attention(a) => Some((i, a)),
            Mixer::DeltaNet(_) | Mixer::ShortConv(_) | Mixer::Latent(_) => None,
        })
    }

    fn ropes_mut(&mut self) -> impl Iterator<Item = &mut Rope> {
        self.layers.iter_mut().filter_map(|l| match &mut l.mixer {
            Mixer::Attention(a) => a.rope.as_mut(),
            Mixer::Latent(a) => Some(&mut a.rope),
            Mixer::DeltaNet(_) | Mixer::ShortConv(_) => None,
        })
    }

    /// Takes one side of LongRoPE for the whole package, and says what the other would have been for.
    ///
    /// # Errors
    /// When the long side is asked for and there is none.
    pub(crate) fn choose_context(&mut self, long: bool) -> Result<(), ConvertError> {
        let mut reach = None;
        for rope in self.ropes_mut() {
            if let RopeScaling::LongRope { original, positions, is_long, .. } = &mut rope.scaling
                && *original < *positions
            {
                *is_long = long;
                reach = Some((*original, *positions));
            }
        }
        match reach {
            Some((original, positions)) if long => {
                self.max_positions = positions;
                self.notices.push(format!(
                    "longrope: the package's context is {positions} positions (max_position_embeddings), with the long \
                     factors for sequences of every length; those of up to {original} positions have others in \
                     implementations that choose by length"
                ));
            }
            Some((original, positions)) => self.notices.push(format!(
                "longrope: the package's context is {original} positions (original_max_position_embeddings), within which \
                 the short factors hold; give --long-context for the long factors and {positions} positions"
            )),
            None if long => {
                let scaling = self.layers.iter().find_map(|l| l.mixer.rope()).map(|r| r.scaling.name());
                let found = scaling.unwrap_or("no rotation");
                let expected = "\"longrope\" with max_position_embeddings beyond the original ones, for --long-context";
                return Err(ConvertError::config("rope_scaling.rope_type", found, expected));
            }
            None => {}
        }
        Ok(())
    }

    /// Gives every rotated layer these divisors of the rotary frequencies.
    pub(crate) fn set_rope_factors(&mut self, factors: &std::sync::Arc<[f32]>) {
        for (_, a) in self.attentions_mut() {
            if let Some(rope) = &mut a.rope {
                rope.scaling = RopeScaling::Factors(factors.clone());
            }
        }
    }
}

/// Positions that the rotation is right for.
fn context(f: &Fields, rope: Option<&Rope>, notices: &mut Vec<String>) -> Result<usize, ConvertError> {
    let positions = f.size_up_to("max_position_embeddings", MOST_POSITIONS)?;
    match rope.map(|r| &r.scaling) {
        Some(RopeScaling::LongRope { original, .. }) => Ok(positions.min(*original)),
        Some(RopeScaling::Yarn { factor, original, .. }) if (factor * original) as usize > positions => {
            notices.push(format!(
                "yarn scaling reaches {} positions, max_position_embeddings says {positions}: the package's context is \
                 {positions}; raise it in config.json for more",
                (factor * original) as usize
            ));
            Ok(positions)
        }
        _ => Ok(positions),
    }
}

#[cfg(test)]
mod tests;
