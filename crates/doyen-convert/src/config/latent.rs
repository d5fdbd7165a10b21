//! Multi-head latent attention: its extents, and the fields that name them.

use super::{Fields, Rope, RopeScaling};
use crate::ConvertError;

/// Attention whose keys and values are projections of one small row per token.
#[derive(Debug, Clone, PartialEq)]
pub struct Latent {
    /// Heads.
    pub heads: usize,
    /// Width between the two projections of queries; `None` where there is one.
    pub q_rank: Option<usize>,
    /// Channels of the row that keys and values are made of.
    pub kv_rank: usize,
    /// Channels of a query or key head that are not rotated.
    pub nope: usize,
    /// Channels of a value head.
    pub v_head_dim: usize,
    /// Whether the first projections and the output projection have biases.
    pub bias: bool,
    /// Rotation of the last channels of a query or key head; those of keys are the same for all heads.
    pub rope: Rope,
    /// Factor on the products of queries and keys.
    pub scale: f32,
}

impl Latent {
    /// Epsilon of the norms between projections, which released implementations do not take from the configuration.
    pub const NORM_EPS: f32 = 1e-6;

    /// DeepSeek's attention, rotated by neighbouring pairs.
    pub(super) fn read(f: &Fields) -> Result<Self, ConvertError> {
        let heads = f.size("num_attention_heads")?;
        if let Some(kv_heads) = f.optional_size("num_key_value_heads")?.filter(|&n| n != heads) {
            let expected = format!("num_attention_heads = {heads}: every head has a key of its own");
            return Err(f.wrong("num_key_value_heads", kv_heads, expected));
        }
        let (nope, rope_dim) = (f.size("qk_nope_head_dim")?, f.size("qk_rope_head_dim")?);
        let head_dim = nope + rope_dim;
        for (name, own) in [("head_dim", rope_dim), ("qk_head_dim", head_dim)] {
            if let Some(found) = f.optional_size(name)?.filter(|&n| n != own && n != head_dim) {
                return Err(f.wrong(
                    name,
                    found,
                    format!("{own}, as qk_nope_head_dim and qk_rope_head_dim say"),
                ));
            }
        }
        let rope = Rope { interleaved: f.flag("rope_interleave", true)?, ..Rope::read(f, rope_dim)? };
        let scale = 1.0 / (head_dim as f64).sqrt() * rope.scaling.score_factor();
        Ok(Self {
            heads,
            q_rank: f.optional_size("q_lora_rank")?,
            kv_rank: f.size("kv_lora_rank")?,
            nope,
            v_head_dim: f.size("v_head_dim")?,
            bias: f.flag("attention_bias", false)?,
            rope,
            scale: scale as f32,
        })
    }

    /// Channels of a query or key head.
    pub const fn head_dim(&self) -> usize {
        self.nope + self.rope.dim
    }
}

impl RopeScaling {
    /// Factor on scores that goes with the stretching of frequencies.
    fn score_factor(&self) -> f64 {
        match self {
            Self::Yarn { score_factor, .. } => *score_factor,
            _ => 1.0,
        }
    }
}
