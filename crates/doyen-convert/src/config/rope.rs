//! Rotary embeddings: both spellings of the parameters, and the frequencies they mean.
//!
//! Formulas follow the released implementations (`llama3`, `yarn`, `longrope` and `linear` rope types), including their
//! f32 roundings: frequencies and angles are rounded to f32 before the cosine is taken.

use super::Fields;
use crate::ConvertError;
use std::{f64::consts::PI, sync::Arc};

/// Rotary parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Channels that are rotated, the first of a head.
    pub dim: usize,
    /// Whether pairs of the rotation are neighbours instead of half of `dim` apart.
    pub interleaved: bool,
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
        /// Factor on scores beside it, where an architecture has one (`mscale_all_dim`).
        score_factor: f64,
    },
    /// Every frequency divided by a factor of its own, as GGUF files hold them.
    Factors(Arc<[f32]>),
    /// LongRoPE within the context before stretching: a divisor for every frequency, and a factor on cosine and sine.
    /// Beyond it other divisors hold, for all positions of the sequence, which no operator here can choose by length.
    LongRope {
        /// Divisors up to `original` positions.
        short: Arc<[f32]>,
        /// Context length before stretching.
        original: usize,
        /// Factor on cosine and sine.
        attention_factor: f64,
    },
}

impl Rope {
    /// Reads `rope_parameters`, or `rope_theta` and `rope_scaling`, for all layers.
    pub(super) fn read(f: &Fields, head_dim: usize) -> Result<Self, ConvertError> {
        const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
        if let Some(p) = f.object("rope_parameters")?
            && KINDS.iter().any(|kind| p.value(kind).is_some())
        {
            let full = Self::read_kind(f, KINDS[0], head_dim)?;
            if p.value(KINDS[1]).is_some() && Self::read_kind(f, KINDS[1], head_dim)? != full {
                return Err(p.wrong(
                    KINDS[1],
                    "another rotation",
                    "that of full_attention in this architecture",
                ));
            }
            return Ok(full);
        }
        Self::single(f, head_dim)
    }

    fn single(f: &Fields, head_dim: usize) -> Result<Self, ConvertError> {
        let (name, params) = match f.object("rope_parameters")? {
            Some(p) => ("rope_parameters", Some(p)),
            None => ("rope_scaling", f.object("rope_scaling")?),
        };
        Self::of(f, name, params.as_ref(), head_dim)
    }

    /// As [`read`](Self::read), where `rope_parameters` may hold an object for each type of layer: takes that of `kind`.
    pub(super) fn read_kind(f: &Fields, kind: &str, head_dim: usize) -> Result<Self, ConvertError> {
        let outer = f.object("rope_parameters")?;
        match outer.as_ref().map(|p| p.object(kind)).transpose()?.flatten() {
            Some(own) => Self::of(f, &format!("rope_parameters.{kind}"), Some(&own), head_dim),
            None => Self::single(f, head_dim),
        }
    }

    /// Without scaling.
    pub(super) fn unscaled(theta: f64, dim: usize) -> Self {
        Self { theta, dim, interleaved: false, scaling: RopeScaling::Default }
    }

    fn of(f: &Fields, name: &str, params: Option<&Fields>, head_dim: usize) -> Result<Self, ConvertError> {
        let outer = f.float("rope_theta")?;
        let own = params.map(|p| p.float("partial_rotary_factor")).transpose()?.flatten();
        let part = own.or(f.float("partial_rotary_factor")?);
        let dim = match part {
            None => head_dim,
            Some(part) if part > 0.0 && part <= 1.0 => (head_dim as f64 * part) as usize,
            Some(part) => return Err(f.wrong("partial_rotary_factor", part, "above 0, at most 1")),
        };
        // The rotary caches of GroupQueryAttention must have a multiple of 8 columns, half a head each.
        if dim == 0 || !dim.is_multiple_of(16) {
            return Err(match part {
                Some(part) if part != 1.0 => {
                    let expected =
                        format!("a share of head_dim = {head_dim} that is a multiple of 16 channels");
                    f.wrong("partial_rotary_factor", part, expected)
                }
                _ => f.wrong("head_dim", head_dim, "a multiple of 16"),
            });
        }
        let Some(params) = params else {
            return Ok(Self::unscaled(f.positive_float("rope_theta", Some(10000.0))?, dim));
        };
        let theta = params.positive_float("rope_theta", Some(outer.unwrap_or(10000.0)))?;
        if let Some(theta) = stretched(params, theta, dim)? {
            return Ok(Self::unscaled(theta, dim));
        }
        Ok(Self { scaling: RopeScaling::read(f, name, params, dim)?, ..Self::unscaled(theta, dim) })
    }

    /// Frequencies of the `dim / 2` channel pairs, and the factor on cosine and sine.
    pub fn frequencies(&self) -> (Vec<f32>, f32) {
        let dim = self.dim;
        let powers = (0..dim / 2).map(|i| self.theta.powf((2 * i) as f64 / dim as f64) as f32);
        match self.scaling {
            RopeScaling::Default => (powers.map(|p| 1.0 / p).collect(), 1.0),
            RopeScaling::Linear { factor } => (powers.map(|p| 1.0 / p / factor as f32).collect(), 1.0),
            RopeScaling::Factors(ref factors) => {
                (powers.zip(&**factors).map(|(p, f)| 1.0 / p / f).collect(), 1.0)
            }
            RopeScaling::LongRope { ref short, attention_factor, .. } => {
                (powers.zip(&**short).map(|(p, f)| 1.0 / (f * p)).collect(), attention_factor as f32)
            }
            RopeScaling::Llama3 { factor, low, high, original } => (
                powers.map(|p| llama3(f64::from(1.0 / p), factor, low, high, original) as f32).collect(),
                1.0,
            ),
            RopeScaling::Yarn {
                factor, original, beta_fast, beta_slow, truncate, attention_factor, ..
            } => {
                let (start, end) = yarn_ramp(dim, self.theta, original, beta_fast, beta_slow, truncate);
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

/// The base of "dynamic" scaling by a fixed `alpha`, which does not depend on the length. Other fields of such a file say
/// nothing.
fn stretched(p: &Fields, theta: f64, dim: usize) -> Result<Option<f64>, ConvertError> {
    let kind = match p.string("rope_type")? {
        Some(kind) => Some(kind),
        None => p.string("type")?,
    };
    match (kind, p.float("alpha")?) {
        (Some("dynamic"), Some(alpha)) if alpha > 0.0 => {
            Ok(Some(theta * alpha.powf(dim as f64 / (dim as f64 - 2.0))))
        }
        _ => Ok(None),
    }
}

impl RopeScaling {
    fn read(config: &Fields, name: &str, p: &Fields, dim: usize) -> Result<Self, ConvertError> {
        // Sections of the frequencies for positions of time, height and width, which are one and the same in text.
        const COMMON: [&str; 6] = [
            "rope_type",
            "type",
            "rope_theta",
            "partial_rotary_factor",
            "mrope_section",
            "mrope_interleaved",
        ];
        let kind = match p.string("rope_type")? {
            Some(kind) => kind,
            None => p.string("type")?.unwrap_or("default"),
        };
        let (scaling, own): (Self, &[&str]) = match kind {
            // Positions of time, height and width, which are one and the same in text.
            "default" | "mrope" => (Self::Default, &[]),
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
            // The first name is that of early releases.
            "su" | "longrope" => (
                Self::read_longrope(config, p, dim)?,
                &[
                    "factor",
                    "original_max_position_embeddings",
                    "short_factor",
                    "long_factor",
                    "short_mscale",
                    "long_mscale",
                    "attention_factor",
                ],
            ),
            other => {
                let field = format!("{name}.rope_type");
                let expected = "\"default\", \"linear\", \"llama3\", \"yarn\" or \"longrope\"";
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

    fn read_longrope(config: &Fields, p: &Fields, dim: usize) -> Result<Self, ConvertError> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        let positions = config.size("max_position_embeddings")?;
        let original = match p.optional_size(ORIGINAL)? {
            Some(n) => n,
            None => config.size(ORIGINAL)?,
        };
        let divisors = p.floats("short_factor")?;
        if divisors.len() != dim / 2 || divisors.iter().any(|d| !(d.is_finite() && *d > 0.0)) {
            let found = format!("{} numbers", divisors.len());
            return Err(p.wrong("short_factor", found, format!("{} numbers above 0", dim / 2)));
        }
        let stretch = positions as f64 / original as f64;
        let default = if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / (original as f64).ln()).sqrt() };
        let attention_factor = p.positive_float("attention_factor", Some(default))?;
        Ok(Self::LongRope {
            short: divisors.into_iter().map(|d| d as f32).collect(),
            original,
            // Phi-3.5-MoE states the factor for each side.
            attention_factor: p.positive_float("short_mscale", Some(attention_factor))?,
        })
    }

    fn read_yarn(config: &Fields, p: &Fields) -> Result<Self, ConvertError> {
        let positions = config.size("max_position_embeddings")? as f64;
        let original = p.positive_float("original_max_position_embeddings", Some(positions))?;
        let factor = p.positive_float("factor", Some(positions / original))?;
        let mscale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        let all = p.float("mscale_all_dim")?.filter(|&m| m != 0.0);
        let attention_factor = match (p.float("mscale")?, all) {
            (Some(m), Some(all)) if m != 0.0 => mscale(m) / mscale(all),
            _ => mscale(1.0),
        };
        Ok(Self::Yarn {
            factor,
            original,
            beta_fast: p.positive_float("beta_fast", Some(32.0))?,
            beta_slow: p.positive_float("beta_slow", Some(1.0))?,
            truncate: p.flag("truncate", true)?,
            attention_factor: p.positive_float("attention_factor", Some(attention_factor))?,
            score_factor: all.map_or(1.0, |m| mscale(m).powi(2)),
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
