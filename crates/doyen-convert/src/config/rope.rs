//! Rotary embeddings: both spellings of the parameters, and the frequencies they mean.
//!
//! Formulas follow the released implementations (`llama3`, `yarn` and `linear` rope types), including their f32
//! roundings: frequencies and angles are rounded to f32 before the cosine is taken.

use super::Fields;
use crate::ConvertError;
use std::{f64::consts::PI, sync::Arc};

/// Rotary parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How frequencies are stretched for longer contexts.
    pub scaling: RopeScaling,
}

/// A change of the base frequencies.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// Every frequency divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low: f64,
        /// Wavelengths below `original / high` are kept.
        high: f64,
        /// Context length before stretching.
        original: f64,
    },
    /// YaRN: a ramp over dimensions, and a factor on cosine and sine.
    Yarn {
        /// Divisor of the interpolated frequencies.
        factor: f64,
        /// Context length before stretching.
        original: f64,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is divided.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
        /// Factor on cosine and sine.
        attention_factor: f64,
    },
    /// Every frequency divided by a factor of its own, as GGUF files hold them.
    Factors(Arc<[f32]>),
}

impl Rope {
    /// Reads `rope_parameters`, or `rope_theta` and `rope_scaling`.
    pub(super) fn read(f: &Fields) -> Result<Self, ConvertError> {
        check_partial(f)?;
        let (name, params) = match f.object("rope_parameters")? {
            Some(p) => ("rope_parameters", Some(p)),
            None => ("rope_scaling", f.object("rope_scaling")?),
        };
        let outer = f.float("rope_theta")?;
        let Some(params) = params else {
            let theta = f.positive_float("rope_theta", Some(10000.0))?;
            return Ok(Self { theta, scaling: RopeScaling::Default });
        };
        check_partial(&params)?;
        let theta = params.positive_float("rope_theta", Some(outer.unwrap_or(10000.0)))?;
        Ok(Self { theta, scaling: RopeScaling::read(f, name, &params)? })
    }

    /// Frequencies of the `head_dim / 2` channel pairs, and the factor on cosine and sine.
    pub fn frequencies(&self, head_dim: usize) -> (Vec<f32>, f32) {
        let powers = (0..head_dim / 2).map(|i| self.theta.powf((2 * i) as f64 / head_dim as f64) as f32);
        match self.scaling {
            RopeScaling::Default => (powers.map(|p| 1.0 / p).collect(), 1.0),
            RopeScaling::Linear { factor } => (powers.map(|p| 1.0 / p / factor as f32).collect(), 1.0),
            RopeScaling::Factors(ref factors) => {
                (powers.zip(&**factors).map(|(p, f)| 1.0 / p / f).collect(), 1.0)
            }
            RopeScaling::Llama3 { factor, low, high, original } => (
                powers.map(|p| llama3(f64::from(1.0 / p), factor, low, high, original) as f32).collect(),
                1.0,
            ),
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, truncate, attention_factor } => {
                let (start, end) = yarn_ramp(head_dim, self.theta, original, beta_fast, beta_slow, truncate);
                let blend = |(i, p): (usize, f32)| {
                    let divided = ((i as f64 - start) / (end - start)).clamp(0.0, 1.0);
                    let freq = 1.0 / f64::from(p);
                    (freq / factor * divided + freq * (1.0 - divided)) as f32
                };
                (powers.enumerate().map(blend).collect(), attention_factor as f32)
            }
        }
    }
}

/// Partial rotation is read so that it can be refused: the recipes rotate whole heads.
fn check_partial(f: &Fields) -> Result<(), ConvertError> {
    match f.float("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(p) => Err(f.wrong("partial_rotary_factor", p, "1.0 or nothing")),
    }
}

impl RopeScaling {
    fn read(config: &Fields, name: &str, p: &Fields) -> Result<Self, ConvertError> {
        const COMMON: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
        let kind = match p.string("rope_type")? {
            Some(kind) => kind,
            None => p.string("type")?.unwrap_or("default"),
        };
        let (scaling, own): (Self, &[&str]) = match kind {
            "default" => (Self::Default, &[]),
            "linear" => (Self::Linear { factor: p.positive_float("factor", None)? }, &["factor"]),
            "llama3" => (
                Self::read_llama3(p)?,
                &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
            ),
            "yarn" => (
                Self::read_yarn(config, p)?,
                &[
                    "factor",
                    "original_max_position_embeddings",
                    "beta_fast",
                    "beta_slow",
                    "truncate",
                    "attention_factor",
                    "mscale",
                    "mscale_all_dim",
                    "finetuned",
                ],
            ),
            other => {
                let field = format!("{name}.rope_type");
                let expected = "\"default\", \"linear\", \"llama3\" or \"yarn\"";
                return Err(ConvertError::config(field, format!("{other:?}"), expected));
            }
        };
        // Fields of other types are harmless only when they say nothing.
        match p.names().find(|n| !COMMON.contains(n) && !own.contains(n) && p.value(n).is_some()) {
            None => Ok(scaling),
            Some(n) => Err(p.wrong(n, "present", format!("nothing with rope type {kind:?}"))),
        }
    }

    fn read_llama3(p: &Fields) -> Result<Self, ConvertError> {
        let low = p.positive_float("low_freq_factor", None)?;
        let high = p.positive_float("high_freq_factor", None)?;
        if high <= low {
            return Err(p.wrong("high_freq_factor", high, format!("more than low_freq_factor = {low}")));
        }
        Ok(Self::Llama3 {
            factor: p.positive_float("factor", None)?,
            low,
            high,
            original: p.positive_float("original_max_position_embeddings", None)?,
        })
    }

    fn read_yarn(config: &Fields, p: &Fields) -> Result<Self, ConvertError> {
        let positions = config.size("max_position_embeddings")? as f64;
        let original = p.positive_float("original_max_position_embeddings", Some(positions))?;
        let factor = p.positive_float("factor", Some(positions / original))?;
        let mscale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        let attention_factor = match (p.float("mscale")?, p.float("mscale_all_dim")?) {
            (Some(m), Some(all)) if m != 0.0 && all != 0.0 => mscale(m) / mscale(all),
            _ => mscale(1.0),
        };
        Ok(Self::Yarn {
            factor,
            original,
            beta_fast: p.positive_float("beta_fast", Some(32.0))?,
            beta_slow: p.positive_float("beta_slow", Some(1.0))?,
            truncate: p.flag("truncate", true)?,
            attention_factor: p.positive_float("attention_factor", Some(attention_factor))?,
        })
    }
}

fn llama3(freq: f64, factor: f64, low: f64, high: f64, original: f64) -> f64 {
    let wavelength = 2.0 * PI / freq;
    if wavelength > original / low {
        freq / factor
    } else if wavelength < original / high {
        freq
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * freq / factor + smooth * freq
    }
}

/// First and last dimension of the ramp.
fn yarn_ramp(dim: usize, theta: f64, original: f64, fast: f64, slow: f64, truncate: bool) -> (f64, f64) {
    let at = |rotations: f64| dim as f64 * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let (mut start, mut end) = (at(fast), at(slow));
    if truncate {
        (start, end) = (start.floor(), end.ceil());
    }
    let (start, end) = (start.max(0.0), end.min(dim as f64 - 1.0));
    // The released code widens an empty ramp by this much.
    if start == end { (start, end + 0.001) } else { (start, end) }
}
