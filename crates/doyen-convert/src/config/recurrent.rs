//! Mixers whose past is a state of fixed size: the gated delta net and the short convolution.

use super::Fields;
use crate::ConvertError;

/// A gated delta net: projections, a causal convolution, linear attention with the gated delta rule, a gated norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNet {
    /// Query and key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of them.
    pub value_heads: usize,
    /// Channels of a query or key head.
    pub key_dim: usize,
    /// Channels of a value head.
    pub value_dim: usize,
    /// Inputs that an output of the convolution sees.
    pub taps: usize,
    /// Where the projections are.
    pub projections: DeltaProjections,
}

/// Where a gated delta net has its input projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaProjections {
    /// `in_proj_qkvz` and `in_proj_ba`: for each key head its query, key, values and gates; its betas and decays.
    ByKeyHead,
    /// `in_proj_qkv` (all queries, all keys, all values), `in_proj_z`, `in_proj_b` and `in_proj_a`.
    Apart,
}

impl DeltaNet {
    /// Reads the `linear_*` fields.
    pub(super) fn read(f: &Fields, projections: DeltaProjections) -> Result<Self, ConvertError> {
        let (key_heads, value_heads) = (f.size("linear_num_key_heads")?, f.size("linear_num_value_heads")?);
        if !value_heads.is_multiple_of(key_heads) {
            let expected = format!("a multiple of linear_num_key_heads = {key_heads}");
            return Err(f.wrong("linear_num_value_heads", value_heads, expected));
        }
        let extent = |name: &str| f.size_up_to(name, MOST);
        Ok(Self {
            key_heads,
            value_heads,
            key_dim: extent("linear_key_head_dim")?,
            value_dim: extent("linear_value_head_dim")?,
            taps: extent("linear_conv_kernel_dim")?,
            projections,
        })
    }

    /// Channels of all queries, and of all keys.
    pub const fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Channels of all values.
    pub const fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Channels of the convolution.
    pub const fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }
}

/// A convolution between two products: `out(C * conv(B * x))` with `B, C, x` three projections of the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConv {
    /// Inputs that an output sees.
    pub taps: usize,
    /// Whether projections and convolution have biases.
    pub bias: bool,
}

impl ShortConv {
    /// Reads `conv_L_cache` and `conv_bias`.
    pub(super) fn read(f: &Fields) -> Result<Self, ConvertError> {
        Ok(Self { taps: f.size_up_to("conv_L_cache", MOST)?, bias: f.flag("conv_bias", false)? })
    }
}

/// Heads' channels and taps at most.
const MOST: usize = 1 << 16;
