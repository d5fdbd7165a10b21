//! Grouped-query attention: its variations, and the fields that name them.

use super::{Fields, Rope};
use crate::ConvertError;

/// Attention dimensions and variations of one layer.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::struct_excessive_bools, reason = "each is a part of its own that a layer has or has not")]
pub struct Attention {
    /// Tensor names.
    pub names: AttentionNames,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Whether the query, key and value projections have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Where the gate is whose sigmoid is a factor on the output.
    pub gate: Option<Gate>,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Queries, keys and values are limited to this magnitude after projection.
    pub clip: Option<f32>,
    /// Rotation of queries and keys by position.
    pub rope: Option<Rope>,
    /// Positions a query sees, itself included; `None` for all.
    pub window: Option<usize>,
    /// Factor on the products of queries and keys.
    pub scale: f32,
    /// Scores become `c tanh(score / c)`.
    pub softcap: Option<f32>,
    /// Whether every head has a learned score that takes part in the softmax and adds nothing.
    pub sinks: bool,
}

/// Modules below the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionNames {
    /// The attention itself.
    pub module: &'static str,
    /// Query, key and value projections.
    pub qkv: Tensors<3>,
    /// Output projection.
    pub output: &'static str,
    /// Norms of queries and keys.
    pub norms: [&'static str; 2],
}

/// Projections of one input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tensors<const N: usize> {
    /// A tensor for each.
    Each([&'static str; N]),
    /// Rows one after the other in one tensor.
    Fused(&'static str),
}

impl AttentionNames {
    /// As Llama has them.
    pub const LLAMA: Self = Self {
        module: "self_attn",
        qkv: Tensors::Each(["q_proj", "k_proj", "v_proj"]),
        output: "o_proj",
        norms: ["q_norm", "k_norm"],
    };
}

/// Where the projection of a gate on an attention's output is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// In that of queries, head by head, behind each query.
    InQuery,
    /// In a module of its own, without a bias.
    Module(&'static str),
}

/// RMS norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Of every head on its own, one weight for all.
    Heads,
    /// Of all heads together.
    Whole,
    /// Of every head on its own, after the rotation.
    RotatedHeads,
}

impl Attention {
    /// Llama's attention: what families start from.
    pub(super) fn read(f: &Fields) -> Result<Self, ConvertError> {
        Self::rotated(f, Rope::read)
    }

    /// As [`read`](Self::read), rotated in part where `partial_rotary_factor` says so.
    pub(super) fn partly_rotated(f: &Fields) -> Result<Self, ConvertError> {
        Self::rotated(f, Rope::partial)
    }

    /// As [`read`](Self::read), with another reading of the rotation.
    pub(super) fn rotated(
        f: &Fields,
        rope: impl FnOnce(&Fields, usize) -> Result<Rope, ConvertError>,
    ) -> Result<Self, ConvertError> {
        let heads = f.size("num_attention_heads")?;
        let kv_heads = f.optional_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads = {heads}");
            return Err(f.wrong("num_key_value_heads", kv_heads, expected));
        }
        let head_dim = Self::head_dim(f)?;
        Ok(Self {
            names: AttentionNames::LLAMA,
            heads,
            kv_heads,
            head_dim,
            qkv_bias: false,
            output_bias: false,
            gate: None,
            qk_norm: None,
            clip: None,
            rope: Some(rope(f, head_dim)?),
            window: None,
            scale: 1.0 / (head_dim as f64).sqrt() as f32,
            softcap: None,
            sinks: false,
        })
    }

    /// Channels of a head.
    pub(super) fn head_dim(f: &Fields) -> Result<usize, ConvertError> {
        let (hidden, heads) = (f.size("hidden_size")?, f.size("num_attention_heads")?);
        let head_dim = match f.optional_size("head_dim")? {
            Some(d) => d,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let expected = format!("a multiple of num_attention_heads = {heads}, or head_dim given");
                return Err(f.wrong("hidden_size", hidden, expected));
            }
        };
        if head_dim > 1 << 16 {
            return Err(f.wrong("head_dim", head_dim, "at most 65536"));
        }
        Ok(head_dim)
    }

    /// Whether queries and keys are rotated before the operator of attention: norms follow, or it cannot do it, since its
    /// rotary caches have a multiple of 8 columns.
    pub fn rotates_apart(&self) -> bool {
        let normed = self.qk_norm == Some(QkNorm::RotatedHeads);
        self.rope.as_ref().is_some_and(|r| normed || !r.dim.is_multiple_of(16))
    }

    /// Rows of the query, key and value projections.
    pub const fn rows(&self) -> [usize; 3] {
        let kv = self.kv_heads * self.head_dim;
        [self.heads * self.head_dim, kv, kv]
    }
}
