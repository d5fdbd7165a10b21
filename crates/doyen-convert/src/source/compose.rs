//! Finds the tensors of quantized matrices and puts each set under the name of the matrix, so that recipes ask for
//! `MODULE.weight` whatever it is stored as.

use super::{
    Checkpoint, Entry, RowOrder, SourceType,
    packed::{Packing, Part},
};
use crate::{
    ConvertError,
    config::{CodeGroups, Quantization},
};
use safetensors::Dtype;

impl Entry {
    fn element(&self) -> Option<Dtype> {
        Some(match self.dtype {
            SourceType::F32 => Dtype::F32,
            SourceType::F16 => Dtype::F16,
            SourceType::BF16 => Dtype::BF16,
            SourceType::F64 => Dtype::F64,
            SourceType::Other(ty) => ty,
            SourceType::Blocks(_) | SourceType::Packed(_) => return None,
        })
    }

    /// The tensor as a part of a matrix.
    pub(super) fn part(&self) -> Part {
        let dtype = self.element().unwrap_or(Dtype::U8);
        let width = self.shape.last().copied().unwrap_or(1);
        Part { data: self.data.clone(), offset: self.offset, width, element: dtype.bitsize() / 8, dtype }
    }
}

/// What follows a parameter's name where Olive stores its codes.
const QWEIGHT: &str = "_qweight";

const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

impl Checkpoint {
    /// Puts quantized matrices under their names.
    ///
    /// # Errors
    /// When a part is missing or has another type or shape than the layout's.
    pub(crate) fn compose(&mut self, quantization: &Quantization) -> Result<(), ConvertError> {
        let suffix = match quantization {
            Quantization::Mxfp4 => return Ok(()),
            Quantization::Gptq { .. } | Quantization::Awq { .. } => ".qweight",
            Quantization::Fp8 { .. } => ".weight_scale_inv",
            Quantization::Olive { .. } => QWEIGHT,
        };
        let modules: Vec<String> =
            self.tensors.keys().filter_map(|n| n.strip_suffix(suffix)).map(str::to_owned).collect();
        for module in modules {
            let mut name = format!("{module}.weight");
            let (packing, shape, parts) = match *quantization {
                Quantization::Mxfp4 => continue,
                Quantization::Olive { common, ref overrides } => {
                    name.clone_from(&module);
                    let of_module = module.strip_suffix(".weight").and_then(|m| overrides.get(m));
                    let mut expected = *overrides.get(&module).or(of_module).unwrap_or(&common);
                    // Patterns are not matched: one of those that say so may mean this parameter.
                    expected.symmetric |=
                        overrides.iter().any(|(n, own)| n.starts_with("re:") && own.symmetric);
                    self.olive(&module, expected)?
                }
                Quantization::Gptq { bits, group, shift } => self.gptq(&module, bits, group, shift)?,
                Quantization::Awq { group } => self.awq(&module, group)?,
                Quantization::Fp8 { tile } => self.fp8(&module, tile)?,
            };
            let Some(first) = parts.first() else { continue };
            let entry = Entry {
                dtype: SourceType::Packed(packing),
                shape,
                data: first.data.clone(),
                offset: first.offset,
                stored_name: None,
                order: RowOrder::Stored,
                parts,
            };
            self.tensors.insert(name, entry);
        }
        if matches!(quantization, Quantization::Olive { .. })
            && let Some(old) = self.tensors.keys().find(|n| n.ends_with(".qweight"))
        {
            let message = "is laid out as by early releases of Olive; expected NAME_qweight, NAME_scales and NAME_qzeros, as \
                           later ones write";
            return Err(ConvertError::tensor(old, message));
        }
        Ok(())
    }

    /// The parameter `name`, of rank 2, or 3 for experts in one tensor. Where groups have a number of columns the width follows
    /// from the shapes: overrides may be patterns.
    fn olive(
        &mut self,
        name: &str,
        expected: CodeGroups,
    ) -> Result<(Packing, Vec<usize>, Vec<Part>), ConvertError> {
        let place = format!("{name}{QWEIGHT}");
        let rank = self.shape(&place).map_or(2, |s| s.len().clamp(2, 3));
        let codes = self.remove(&place, &[Dtype::U8], rank)?;
        let scales = self.remove(&format!("{name}_scales"), FLOATS, rank)?;
        let (outer, bytes) = (&codes.shape[..rank - 1], codes.shape[rank - 1]);
        let groups = scales.shape[rank - 1];
        let bits = match expected.group {
            None => Some(expected.bits),
            Some(group) => {
                let cols = groups.checked_mul(group);
                [2u8, 4, 8]
                    .into_iter()
                    .find(|&b| cols.is_some_and(|c| c > 0 && c * usize::from(b) == bytes * 8))
            }
        };
        let cols = bits.map_or(0, |b| bytes * 8 / usize::from(b));
        let whole = scales.shape[..rank - 1] == *outer
            && groups > 0
            && cols.is_multiple_of(groups)
            && (cols / groups).is_multiple_of(16)
            && (expected.group.is_some() || groups == 1);
        let Some(bits) = bits.filter(|_| whole) else {
            let group = expected.group.map_or_else(|| "whole rows".to_owned(), |g| g.to_string());
            let message = format!(
                "has shape {:?} and scales {:?}, expected codes of 2, 4 or 8 bits in groups of {group} \
                 (quantization_config), a multiple of 16 columns",
                codes.shape, scales.shape
            );
            return Err(ConvertError::tensor(&place, message));
        };
        let mut parts = vec![codes.part(), scales.part()];
        let zeros = format!("{name}_qzeros");
        let symmetric = !self.contains(&zeros);
        if symmetric && !expected.symmetric {
            let message = "not in the checkpoint, and quantization_config says symmetric: false";
            return Err(ConvertError::tensor(&zeros, message));
        }
        if !symmetric {
            let entry = self.remove(&zeros, &[Dtype::U8], rank)?;
            let width = (groups * usize::from(bits)).div_ceil(8);
            if entry.shape[..rank - 1] != *outer || entry.shape[rank - 1] != width {
                let (found, outer) = (&entry.shape, outer.to_vec());
                let message = format!("expected {width} bytes for each of {outer:?}, found shape {found:?}");
                return Err(ConvertError::tensor(&zeros, message));
            }
            parts.push(entry.part());
        }
        let shape = [outer, &[cols]].concat();
        Ok((Packing::Olive { bits, group: cols / groups, symmetric }, shape, parts))
    }

    /// Takes a part out.
    fn remove(&mut self, name: &str, types: &[Dtype], rank: usize) -> Result<Entry, ConvertError> {
        let Some(entry) = self.tensors.remove(name) else {
            return Err(ConvertError::tensor(
                name,
                "not in the checkpoint, and its module's other parts are",
            ));
        };
        if !entry.element().is_some_and(|ty| types.contains(&ty)) || entry.shape.len() != rank {
            let (ty, shape) = (entry.dtype, &entry.shape);
            let message = format!("expected rank {rank} of {types:?}, found {ty} {shape:?}");
            return Err(ConvertError::tensor(name, message));
        }
        Ok(entry)
    }

    fn gptq(
        &mut self,
        module: &str,
        bits: u8,
        group: Option<usize>,
        shift: u8,
    ) -> Result<(Packing, Vec<usize>, Vec<Part>), ConvertError> {
        let codes = self.remove(&format!("{module}.qweight"), &[Dtype::I32], 2)?;
        let per_word = 32 / usize::from(bits);
        let (rows, cols) = (codes.shape[1], codes.shape[0] * per_word);
        let group = group.unwrap_or(cols);
        let parts = self.scaled(module, &codes, (rows, cols), group, rows.div_ceil(per_word))?;
        self.check_order(module, cols, group)?;
        self.drop_zero_bias(module)?;
        Ok((Packing::Gptq { bits, group, shift }, vec![rows, cols], parts))
    }

    fn awq(
        &mut self,
        module: &str,
        group: Option<usize>,
    ) -> Result<(Packing, Vec<usize>, Vec<Part>), ConvertError> {
        let codes = self.remove(&format!("{module}.qweight"), &[Dtype::I32], 2)?;
        let (rows, cols) = (codes.shape[1] * 8, codes.shape[0]);
        let group = group.unwrap_or(cols);
        let parts = self.scaled(module, &codes, (rows, cols), group, rows / 8)?;
        Ok((Packing::Awq { group }, vec![rows, cols], parts))
    }

    /// Codes with their scales `[K/group, N]` and zero points `[K/group, words]`.
    fn scaled(
        &mut self,
        module: &str,
        codes: &Entry,
        (rows, cols): (usize, usize),
        group: usize,
        words: usize,
    ) -> Result<Vec<Part>, ConvertError> {
        if group == 0 || !cols.is_multiple_of(group) || !group.is_multiple_of(16) {
            let message =
                format!("has {cols} columns, expected groups of {group}, a multiple of 16 that divides them");
            return Err(ConvertError::tensor(&format!("{module}.qweight"), message));
        }
        let groups = cols / group;
        let mut parts = vec![codes.part()];
        for (suffix, types, width) in [("scales", FLOATS, rows), ("qzeros", &[Dtype::I32][..], words)] {
            let name = format!("{module}.{suffix}");
            let entry = self.remove(&name, types, 2)?;
            if entry.shape != [groups, width] {
                let found = &entry.shape;
                return Err(ConvertError::tensor(
                    &name,
                    format!("expected shape [{groups}, {width}], found {found:?}"),
                ));
            }
            parts.push(entry.part());
        }
        Ok(parts)
    }

    /// Groups must be runs of columns: `g_idx`, if there is one, says so.
    fn check_order(&mut self, module: &str, cols: usize, group: usize) -> Result<(), ConvertError> {
        let name = format!("{module}.g_idx");
        if !self.contains(&name) {
            return Ok(());
        }
        let entry = self.remove(&name, &[Dtype::I32], 1)?;
        let bytes = entry.data.range(entry.offset, 4 * entry.shape[0])?;
        let mut indices = bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b));
        if entry.shape[0] == cols && (0..cols).all(|k| indices.next() == i32::try_from(k / group).ok()) {
            return Ok(());
        }
        let expected = "expected groups of neighbouring columns; columns in the order of their activations (desc_act) \
                        have no stored format here";
        Err(ConvertError::tensor(&name, expected))
    }

    /// Writers of this layout give every module a bias, of zeros where the model has none.
    fn drop_zero_bias(&mut self, module: &str) -> Result<(), ConvertError> {
        let name = format!("{module}.bias");
        let Some(entry) = self.tensors.get(&name) else { return Ok(()) };
        let bytes = entry.shape.iter().product::<usize>() * entry.dtype.row_bytes(1);
        if bytes > 0 && entry.data.range(entry.offset, bytes)?.iter().all(|b| *b == 0) {
            self.zeros.insert(name);
        }
        Ok(())
    }

    fn fp8(
        &mut self,
        module: &str,
        tile: Option<[usize; 2]>,
    ) -> Result<(Packing, Vec<usize>, Vec<Part>), ConvertError> {
        // How others round what comes in says nothing about the weights.
        for suffix in ["activation_scale", "input_scale"] {
            self.tensors.remove(&format!("{module}.{suffix}"));
        }
        let codes = self.remove(&format!("{module}.weight"), &[Dtype::F8_E4M3], 2)?;
        let [rows, cols] = [codes.shape[0], codes.shape[1]];
        let tile = tile.unwrap_or([rows, cols]);
        let name = format!("{module}.weight_scale_inv");
        let rank = self.tensors.get(&name).map_or(2, |e| e.shape.len());
        let scales = self.remove(&name, FLOATS, rank)?;
        let expected = [rows.div_ceil(tile[0]), cols.div_ceil(tile[1])];
        if scales.shape != expected && !(scales.shape.iter().product::<usize>() == 1 && expected == [1, 1]) {
            let found = &scales.shape;
            return Err(ConvertError::tensor(&name, format!("expected shape {expected:?}, found {found:?}")));
        }
        Ok((Packing::Fp8 { tile }, vec![rows, cols], vec![codes.part(), scales.part()]))
    }
}
