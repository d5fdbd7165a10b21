//! How the checkpoint's weights are quantized, by `quantization_config`.

use super::Fields;
use crate::ConvertError;
use std::collections::BTreeMap;

/// A layout of quantized weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quantization {
    /// Experts of 4-bit floats in `_blocks` and `_scales`.
    Mxfp4,
    /// `qweight`, `qzeros` and `scales`, codes packed along K.
    Gptq {
        /// Bits of a code: 2, 4 or 8.
        bits: u8,
        /// Columns of a group; `None` for one group a row.
        group: Option<usize>,
        /// Added to stored zero points.
        shift: u8,
    },
    /// `qweight`, `qzeros` and `scales`, 4-bit codes packed along N.
    Awq {
        /// Columns of a group; `None` for one group a row.
        group: Option<usize>,
    },
    /// 8-bit floats with `weight_scale_inv`.
    Fp8 {
        /// Rows and columns that share a factor; `None` for one factor a matrix.
        tile: Option<[usize; 2]>,
    },
    /// Olive's `NAME_qweight`, `NAME_scales` and, where zero points are not in the middle, `NAME_qzeros`, all by rows.
    Olive {
        /// Of every tensor but those below.
        common: Groups,
        /// By the name of a parameter or of its module.
        overrides: BTreeMap<String, Groups>,
    },
}

/// Codes and what shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Bits of a code: 2, 4 or 8.
    pub bits: u8,
    /// Columns of a group; `None` for one group a row.
    pub group: Option<usize>,
    /// Whether zero points may be left out, being in the middle.
    pub symmetric: bool,
}

impl Quantization {
    pub(super) fn read(f: &Fields) -> Result<Option<Self>, ConvertError> {
        let Some(q) = f.object("quantization_config")? else { return Ok(None) };
        let quantization = match q.string("quant_method")? {
            Some("mxfp4") => Self::Mxfp4,
            Some("gptq") => Self::gptq(&q)?,
            Some("awq") => Self::awq(&q)?,
            Some("fp8") => Self::fp8(&q)?,
            Some("olive") => Self::olive(&q)?,
            method => {
                let found = method.map_or_else(|| "absent".to_owned(), |m| format!("{m:?}"));
                return Err(q.wrong(
                    "quant_method",
                    found,
                    "\"mxfp4\", \"gptq\", \"awq\", \"fp8\" or \"olive\"",
                ));
            }
        };
        Ok(Some(quantization))
    }

    fn gptq(q: &Fields) -> Result<Self, ConvertError> {
        let bits = bits(q)?;
        let shift = match q.string("checkpoint_format")? {
            None | Some("gptq") => 1,
            Some("gptq_v2") => 0,
            Some(other) => {
                return Err(q.wrong("checkpoint_format", format!("{other:?}"), "\"gptq\" or \"gptq_v2\""));
            }
        };
        Ok(Self::Gptq { bits, group: group(q)?, shift })
    }

    fn awq(q: &Fields) -> Result<Self, ConvertError> {
        for bits in ["bits", "w_bit"] {
            if let Some(n) = q.optional_size(bits)?.filter(|n| *n != 4) {
                return Err(q.wrong(bits, n, "4"));
            }
        }
        if let Some(version) = q.string("version")?.filter(|v| !v.eq_ignore_ascii_case("gemm")) {
            return Err(q.wrong("version", format!("{version:?}"), "\"gemm\""));
        }
        Ok(Self::Awq { group: group(q)? })
    }

    fn fp8(q: &Fields) -> Result<Self, ConvertError> {
        if let Some(kind) = q.string("fmt")?.filter(|f| !matches!(*f, "e4m3" | "float8_e4m3fn")) {
            return Err(q.wrong("fmt", format!("{kind:?}"), "\"e4m3\" or \"float8_e4m3fn\""));
        }
        let tile = match q.indices("weight_block_size")?[..] {
            [] => None,
            [rows, cols] if rows > 0 && cols > 0 => Some([rows, cols]),
            _ => return Err(q.wrong("weight_block_size", "another list", "two positive integers")),
        };
        Ok(Self::Fp8 { tile })
    }

    fn olive(q: &Fields) -> Result<Self, ConvertError> {
        let common = Groups { bits: bits(q)?, group: group(q)?, symmetric: q.flag("symmetric", true)? };
        let mut overrides = BTreeMap::new();
        if let Some(all) = q.object("overrides")? {
            for name in all.names() {
                let Some(own) = all.object(name)? else { continue };
                let bits = if own.value("bits").is_some() { bits(&own)? } else { common.bits };
                let group = if own.value("group_size").is_some() { group(&own)? } else { common.group };
                let symmetric = own.flag("symmetric", common.symmetric)?;
                overrides.insert(name.to_owned(), Groups { bits, group, symmetric });
            }
        }
        Ok(Self::Olive { common, overrides })
    }
}

fn bits(q: &Fields) -> Result<u8, ConvertError> {
    match q.size("bits")? {
        n @ (2 | 4 | 8) => Ok(n as u8),
        n => Err(q.wrong("bits", n, "2, 4 or 8")),
    }
}

/// Columns of a group; -1 stands for all of a row.
fn group(q: &Fields) -> Result<Option<usize>, ConvertError> {
    let name = if q.value("group_size").is_some() { "group_size" } else { "q_group_size" };
    match q.value(name).and_then(serde_json::Value::as_i64) {
        Some(-1) => Ok(None),
        _ => q.size(name).map(Some),
    }
}
