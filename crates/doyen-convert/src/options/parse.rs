//! Parsers of option values; each error names the piece that is wrong and what would be accepted.

use super::{Block, LayerOverride, Mxfp4, Setting, WIDEST_BLOCK, Width};
use doyen_tensor::{FloatType, format::Bits};
use std::str::FromStr;

/// An option value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{piece}: {message}")]
pub struct OptionError {
    piece: String,
    message: String,
}

impl OptionError {
    pub(crate) fn new(piece: impl Into<String>, message: impl Into<String>) -> Self {
        Self { piece: piece.into(), message: message.into() }
    }

    fn expected(piece: &str, expected: &str, found: &str) -> Self {
        Self::new(piece, format!("expected {expected}, found {found:?}"))
    }
}

impl FromStr for Width {
    type Err = OptionError;

    fn from_str(s: &str) -> Result<Self, OptionError> {
        match s {
            "float" => Ok(Self::Float),
            "2" => Ok(Self::Bits(Bits::B2)),
            "4" => Ok(Self::Bits(Bits::B4)),
            "8" => Ok(Self::Bits(Bits::B8)),
            _ => Err(OptionError::expected("width", "2, 4, 8 or float", s)),
        }
    }
}

impl FromStr for Block {
    type Err = OptionError;

    fn from_str(s: &str) -> Result<Self, OptionError> {
        match s.parse::<usize>() {
            _ if s == "row" => Ok(Self::Row),
            Ok(n) if n.is_power_of_two() && (16..=WIDEST_BLOCK).contains(&n) => Ok(Self::Columns(n)),
            _ => Err(OptionError::expected("block", "16, 32, 64, 128, 256 or row", s)),
        }
    }
}

impl FromStr for Mxfp4 {
    type Err = OptionError;

    fn from_str(s: &str) -> Result<Self, OptionError> {
        match s {
            "fp4" => Ok(Self::Kept),
            "int8" => Ok(Self::Codes8),
            _ => Err(OptionError::expected("mxfp4", "fp4 or int8", s)),
        }
    }
}

/// Parses `on` or `off`.
///
/// # Errors
/// When it is neither.
pub(super) fn switch(s: &str) -> Result<bool, OptionError> {
    match s {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(OptionError::expected("zero-points", "on or off", s)),
    }
}

/// Parses `f32`, `f16` or `bf16`.
///
/// # Errors
/// When it is none of them.
pub(super) fn float_type(s: &str) -> Result<FloatType, OptionError> {
    match s {
        "f32" => Ok(FloatType::F32),
        "f16" => Ok(FloatType::F16),
        "bf16" => Ok(FloatType::BF16),
        _ => Err(OptionError::expected("dtype", "f32, f16 or bf16", s)),
    }
}

impl FromStr for Setting {
    type Err = OptionError;

    /// Parses `key=value`.
    fn from_str(s: &str) -> Result<Self, OptionError> {
        const KEYS: &str = "experts, fc1, fc2, mlp, shared-experts, router, attention, block or zero-points, then = and a value";
        let (key, value) = s.split_once('=').ok_or_else(|| OptionError::expected("setting", KEYS, s))?;
        let (key, value) = (key.trim(), value.trim());
        let make: fn(Width) -> Self = match key {
            "experts" => Self::Experts,
            "fc1" => Self::Fc1,
            "fc2" => Self::Fc2,
            "mlp" => Self::Mlp,
            "shared-experts" => Self::SharedExperts,
            "router" => Self::Router,
            "attention" => Self::Attention,
            "block" => return value.parse().map(Self::Block),
            "zero-points" => return switch(value).map(Self::ZeroPoints),
            _ => return Err(OptionError::expected("setting", KEYS, s)),
        };
        value.parse().map(make).map_err(|e| OptionError::new(key, e.message))
    }
}

impl Setting {
    /// Parses the value of `--experts`: a width, or `fc1=W,fc2=W`.
    ///
    /// # Errors
    /// Names the piece that is wrong.
    pub fn parse_experts(s: &str) -> Result<Vec<Self>, OptionError> {
        if !s.contains('=') {
            return s.parse().map(|w| vec![Self::Experts(w)]);
        }
        s.split(',')
            .map(|piece| match piece.trim().parse()? {
                setting @ (Self::Fc1(_) | Self::Fc2(_)) => Ok(setting),
                _ => Err(OptionError::expected("experts", "a width, or fc1=W,fc2=W", piece)),
            })
            .collect()
    }

    /// Parses the value of `--zero-points`: `on` or `off`.
    ///
    /// # Errors
    /// When it is neither.
    pub fn parse_zero_points(s: &str) -> Result<Self, OptionError> {
        switch(s).map(Self::ZeroPoints)
    }
}

impl super::Options {
    /// Parses the value of `--dtype`: `f32`, `f16` or `bf16`.
    ///
    /// # Errors
    /// When it is none of them.
    pub fn parse_dtype(s: &str) -> Result<FloatType, OptionError> {
        float_type(s)
    }
}

impl LayerOverride {
    /// Parses the value of `--layers`: `RANGE:key=value,...;RANGE:...`. A range is `3`, `2-5` (both included), `4-`
    /// (to the last) or `*`.
    ///
    /// # Errors
    /// Names the piece that is wrong.
    pub fn parse_list(s: &str) -> Result<Vec<Self>, OptionError> {
        s.split(';').map(str::trim).filter(|p| !p.is_empty()).map(str::parse).collect()
    }
}

impl FromStr for LayerOverride {
    type Err = OptionError;

    fn from_str(s: &str) -> Result<Self, OptionError> {
        let name = format!("--layers {s:?}");
        let (range, settings) = s
            .split_once(':')
            .ok_or_else(|| OptionError::new(&name, "expected RANGE:key=value, found no colon"))?;
        let (first, last) = parse_range(range.trim()).ok_or_else(|| {
            OptionError::new(&name, format!("expected a range as 3, 2-5, 4- or *, found {range:?}"))
        })?;
        let settings = settings
            .split(',')
            .map(|p| p.trim().parse())
            .collect::<Result<Vec<_>, OptionError>>()
            .map_err(|e| OptionError::new(&name, e.to_string()))?;
        Ok(Self { first, last, settings, text: s.to_owned() })
    }
}

fn parse_range(s: &str) -> Option<(usize, Option<usize>)> {
    if s == "*" {
        return Some((0, None));
    }
    match s.split_once('-') {
        None => s.parse().ok().map(|n| (n, Some(n))),
        Some((first, "")) => first.trim().parse().ok().map(|n| (n, None)),
        Some((first, last)) => {
            let (first, last) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            (first <= last).then_some((first, Some(last)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ExpertWidths, Options};
    use super::*;

    fn options(layers: &str) -> Options {
        Options { layers: LayerOverride::parse_list(layers).unwrap(), ..Options::default() }
    }

    #[test]
    fn later_overrides_win() {
        let o = options("*:experts=2,block=row; 1-2:fc2=8 ;2:attention=float,zero-points=off");
        let l = o.resolve(4).unwrap();
        let pair = |fc1, fc2| ExpertWidths::Bits { fc1, fc2 };
        assert_eq!(l[0].experts, pair(Bits::B2, Bits::B2));
        assert_eq!(l[1].experts, pair(Bits::B2, Bits::B8));
        assert_eq!((l[3].block, l[3].zero_points), (Block::Row, true));
        assert_eq!((l[2].attention, l[2].zero_points), (Width::Float, false));
        assert_eq!(l[1].attention, Width::Bits(Bits::B8));
    }

    #[test]
    fn errors_name_the_piece() {
        let text = |r: Result<Vec<LayerOverride>, OptionError>| r.unwrap_err().to_string();
        assert!(text(LayerOverride::parse_list("0:fc1=4;1:fc1=3")).contains("\"1:fc1=3\""));
        assert!(text(LayerOverride::parse_list("5-2:fc1=4")).contains("\"5-2\""));
        assert!(text(LayerOverride::parse_list("0:depth=4")).contains("depth=4"));
        assert!(text(LayerOverride::parse_list("0")).contains("no colon"));
        assert!(text(LayerOverride::parse_list("0:block=24")).contains("16, 32, 64, 128, 256 or row"));
        let e = options("7:mlp=4").resolve(4).unwrap_err().to_string();
        assert!(e.contains("layers 0 to 3") && e.contains('7'), "{e}");
    }

    #[test]
    fn experts_are_float_as_a_whole() {
        let e = options("1:fc1=float").resolve(2).unwrap_err().to_string();
        assert!(e.contains("fc1=float, fc2=4") && e.contains("1:fc1=float"), "{e}");
        assert_eq!(options("1:experts=float").resolve(2).unwrap()[1].experts, ExpertWidths::Float);
        assert!(Options::float(FloatType::F32).base().unwrap().experts == ExpertWidths::Float);
    }

    #[test]
    fn experts_option() {
        assert_eq!(Setting::parse_experts("2").unwrap(), [Setting::Experts(Width::Bits(Bits::B2))]);
        let pair = [Setting::Fc1(Width::Bits(Bits::B2)), Setting::Fc2(Width::Bits(Bits::B8))];
        assert_eq!(Setting::parse_experts("fc1=2,fc2=8").unwrap(), pair);
        assert!(Setting::parse_experts("mlp=2").is_err());
        assert!(Setting::parse_experts("16").is_err());
    }
}
