//! Rotary embeddings: both spellings of the parameters, and the frequencies they mean.
//!
//! Formulas follow the released implementations (`llama3`, `yarn`, `longrope` and `linear` rope types), including their
//! f32 roundings: frequencies and angles are rounded to f32 before the cosine is taken.

use super::Fields;
use crate::ConvertError;
use std::{f64::consts::PI, sync::Arc};

const ORIGINAL: &str = "original_max_position_embeddings";

/// Types of layers that `rope_parameters` may hold an object for.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

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
    /// LongRoPE: divisors of every frequency for sequences within the context before stretching, and others for all
    /// positions of longer ones. A package has one of them.
    LongRope {
        /// Up to `original` positions.
        short: Stretch,
        /// Up to `positions`.
        long: Stretch,
        /// Context length before stretching.
        original: usize,
        /// Context length after it.
        positions: usize,
        /// Whether the long side is taken.
        is_long: bool,
    },
}

/// One side of LongRoPE.
#[derive(Debug, Clone, PartialEq)]
pub struct Stretch {
    /// Divisors of the frequencies.
    pub divisors: Arc<[f32]>,
    /// Factor on cosine and sine.
    pub attention_factor: f64,
}

impl Rope {
    /// Reads `rope_parameters`, or `rope_theta` and `rope_scaling`, for all layers. Whole heads are rotated: implementations
    /// differ in what they do with a `partial_rotary_factor` that the architecture does not have, so it is refused.
    pub(super) fn read(f: &Fields, head_dim: usize) -> Result<Self, ConvertError> {
        Self::whole(f, head_dim, Self::partial(f, head_dim)?)
    }

    /// As [`read`](Self::read), of the share of a head that `partial_rotary_factor` says.
    pub(super) fn partial(f: &Fields, head_dim: usize) -> Result<Self, ConvertError> {
        if let Some(p) = f.object("rope_parameters")?
            && KINDS.iter().any(|kind| p.value(kind).is_some())
        {
            let full = Self::of_kind(f, KINDS[0], head_dim)?;
            if p.value(KINDS[1]).is_some() && Self::of_kind(f, KINDS[1], head_dim)? != full {
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

    /// The rotation of layers that see everything, and that of layers with windows, which has a base of its own and is
    /// stretched only where `rope_parameters` say so for them.
    pub(super) fn by_kind(f: &Fields, head_dim: usize, local_theta: f64) -> Result<[Self; 2], ConvertError> {
        let whole = |rope| Self::whole(f, head_dim, rope);
        let Some(outer) = f.object("rope_parameters")? else {
            if let Some(p) = f.object("rope_scaling")?
                && let (None, Some(kind)) = (p.string("rope_type")?, p.string("type")?)
            {
                let expected = "the name rope_type: implementations disagree on that one";
                return Err(p.wrong("type", format!("{kind:?}"), expected));
            }
            let global = whole(Self::single(f, head_dim)?)?;
            return Ok([global, Self::unscaled(local_theta, head_dim)]);
        };
        if KINDS.iter().all(|kind| outer.value(kind).is_none()) {
            let expected = "an object for each of full_attention and sliding_attention";
            return Err(f.wrong("rope_parameters", "one rotation", expected));
        }
        let global = f.positive_float("rope_theta", None)?;
        let [full, sliding] = [(KINDS[0], global), (KINDS[1], local_theta)].map(|(kind, theta)| {
            let mut f = f.clone();
            f.set("rope_theta", theta.into());
            match outer.object(kind)? {
                Some(_) => whole(Self::of_kind(&f, kind, head_dim)?),
                None => Ok(Self::unscaled(theta, head_dim)),
            }
        });
        Ok([full?, sliding?])
    }

    /// `rope`, if it rotates whole heads.
    fn whole(f: &Fields, head_dim: usize, rope: Self) -> Result<Self, ConvertError> {
        if rope.dim == head_dim {
            return Ok(rope);
        }
        let share = rope.dim as f64 / head_dim as f64;
        Err(f.wrong("partial_rotary_factor", share, "1: this architecture rotates whole heads"))
    }

    fn of_kind(f: &Fields, kind: &str, head_dim: usize) -> Result<Self, ConvertError> {
        let outer = f.object("rope_parameters")?;
        match outer.as_ref().map(|p| p.object(kind)).transpose()?.flatten() {
            Some(own) => Self::of(f, &format!("rope_parameters.{kind}"), Some(&own), head_dim),
            None => Self::single(f, head_dim),
        }
    }

    /// As [`read`](Self::read), where "dynamic" scaling with an `alpha` is another base, whatever the length; its other fields
    /// say nothing then.
    pub(super) fn stretched(f: &Fields, head_dim: usize) -> Result<Self, ConvertError> {
        for name in ["rope_parameters", "rope_scaling"] {
            let Some(p) = f.object(name)? else { continue };
            let alpha = p.float("alpha")?.filter(|a| *a > 0.0);
            let Some(alpha) = alpha.filter(|_| kind(&p).is_ok_and(|k| k == "dynamic")) else { break };
            let theta =
                p.positive_float("rope_theta", Some(f.positive_float("rope_theta", Some(10000.0))?))?;
            let exponent = head_dim as f64 / (head_dim as f64 - 2.0);
            return Ok(Self::unscaled(theta * alpha.powf(exponent), head_dim));
        }
        Self::read(f, head_dim)
    }

    /// The `partial_rotary_factor` of which `channels` of `head_dim` come out: released code cuts the product off, and that of the
    /// nearest quotient may fall short of a whole number, as 104 (30 / 104) does.
    pub(crate) fn share(channels: usize, head_dim: usize) -> f64 {
        let quotient = channels as f64 / head_dim as f64;
        if (head_dim as f64 * quotient) as usize == channels { quotient } else { quotient.next_up() }
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
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(match part {
                Some(part) if part != 1.0 => {
                    let expected =
                        format!("a share of head_dim = {head_dim} that is an even number of channels");
                    f.wrong("partial_rotary_factor", part, expected)
                }
                _ => f.wrong("head_dim", head_dim, "an even number"),
            });
        }
        let Some(params) = params else {
            return Ok(Self::unscaled(f.positive_float("rope_theta", Some(10000.0))?, dim));
        };
        let theta = params.positive_float("rope_theta", Some(outer.unwrap_or(10000.0)))?;
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
            RopeScaling::LongRope { ref short, ref long, is_long, .. } => {
                let Stretch { divisors, attention_factor } = if is_long { long } else { short };
                (powers.zip(&**divisors).map(|(p, f)| 1.0 / (f * p)).collect(), *attention_factor as f32)
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

/// The type of a rotation; the second name is that of older files.
fn kind(p: &Fields) -> Result<&str, ConvertError> {
    Ok(match p.string("rope_type")? {
        Some(kind) => kind,
        None => p.string("type")?.unwrap_or("default"),
    })
}

impl RopeScaling {
    /// As `rope_type` spells it.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear { .. } => "linear",
            Self::Llama3 { .. } | Self::Factors(_) => "llama3",
            Self::Yarn { .. } => "yarn",
            Self::LongRope { .. } => "longrope",
        }
    }

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
        let kind = kind(p)?;
        let (scaling, own): (Self, &[&str]) = match kind {
            // Positions of time, height and width, which are one and the same in text.
            "default" | "mrope" => (Self::Default, &[]),
            // The base grows with sequences longer than `max_position_embeddings`, which is the package's context.
            "dynamic" => (Self::Default, &["factor", "original_max_position_embeddings"]),
            "linear" => (Self::Linear { factor: p.positive_float("factor", None)? }, &["factor"]),
            "llama3" => (
                Self::read_llama3(config, p)?,
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
                let expected = "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\" or \"longrope\"";
                return Err(ConvertError::config(field, format!("{other:?}"), expected));
            }
        };
        // Fields of other types are harmless only when they say nothing.
        match p.names().find(|n| !COMMON.contains(n) && !own.contains(n) && p.value(n).is_some()) {
            None => Ok(scaling),
            Some(n) => Err(p.wrong(n, "present", format!("nothing with rope type {kind:?}"))),
        }
    }

    /// The context length before stretching, or else all of the context.
    fn original(config: &Fields, p: &Fields) -> Result<usize, ConvertError> {
        match Self::stated_original(config, p)? {
            Some(n) => Ok(n),
            None => config.size("max_position_embeddings"),
        }
    }

    /// The context length before stretching: beside the scaling's fields `p` or among them.
    pub(super) fn stated_original(config: &Fields, p: &Fields) -> Result<Option<usize>, ConvertError> {
        match (config.optional_size(ORIGINAL)?, p.optional_size(ORIGINAL)?) {
            (Some(outer), Some(inner)) if outer != inner => {
                Err(p.wrong(ORIGINAL, inner, format!("{outer}, as {ORIGINAL} beside it says")))
            }
            (outer, inner) => Ok(outer.or(inner)),
        }
    }

    fn read_llama3(config: &Fields, p: &Fields) -> Result<Self, ConvertError> {
        let low = p.positive_float("low_freq_factor", None)?;
        let high = p.positive_float("high_freq_factor", None)?;
        if high <= low {
            return Err(p.wrong("high_freq_factor", high, format!("more than low_freq_factor = {low}")));
        }
        Ok(Self::Llama3 {
            factor: p.positive_float("factor", None)?,
            low,
            high,
            original: Self::original(config, p)? as f64,
        })
    }

    fn read_longrope(config: &Fields, p: &Fields, dim: usize) -> Result<Self, ConvertError> {
        let positions = config.size("max_position_embeddings")?;
        let original = Self::stated_original(config, p)?
            .ok_or_else(|| p.wrong(ORIGINAL, "absent", "the positions that the short factors are for"))?;
        let stretch = positions as f64 / original as f64;
        // Implementations disagree about which of the two counts.
        if let Some(factor) = p.float("factor")?.filter(|f| (f / stretch - 1.0).abs() > 1e-6) {
            let expected =
                format!("{stretch}, max_position_embeddings over original_max_position_embeddings");
            return Err(p.wrong("factor", factor, expected));
        }
        let default = if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / (original as f64).ln()).sqrt() };
        let common = p.positive_float("attention_factor", Some(default))?;
        let side = |divisors: &str, factor: &str| {
            let found = p.floats(divisors)?;
            if found.len() != dim / 2 || found.iter().any(|d| !(d.is_finite() && *d > 0.0)) {
                let expected = format!("{} numbers above 0", dim / 2);
                return Err(p.wrong(divisors, format!("{} numbers", found.len()), expected));
            }
            let divisors = found.into_iter().map(|d| d as f32).collect();
            // Phi-3.5-MoE states the factor for each side.
            Ok(Stretch { divisors, attention_factor: p.positive_float(factor, Some(common))? })
        };
        let (short, long) = (side("short_factor", "short_mscale")?, side("long_factor", "long_mscale")?);
        Ok(Self::LongRope { short, long, original, positions, is_long: false })
    }

    fn read_yarn(config: &Fields, p: &Fields) -> Result<Self, ConvertError> {
        let positions = config.size("max_position_embeddings")? as f64;
        let original = Self::original(config, p)? as f64;
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
