//! Embeddings: rows of a constant table, quantized or float.

use super::{
    Binder, Context, Kernel,
    weights::{Floats, OwnedQuant},
};
use crate::{
    kernel::gather::{CodeType, Table},
    session::io::Io,
};
use doyen_graph::ops::gather_block_quantized::GatherBlockQuantized;
use doyen_tensor::{DType, Tensor};

enum OwnedTable {
    Quantized(OwnedQuant),
    Float { values: Floats, rows: usize, cols: usize },
}

struct Embed {
    table: OwnedTable,
    /// Indices outside the table are an error instead of rows of zeros.
    strict: bool,
    wide: bool,
}

impl Kernel for Embed {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let (table, rows) = match &self.table {
            OwnedTable::Quantized(q) => (Table::quantized(q.view(), CodeType::Packed), q.view().rows),
            OwnedTable::Float { values, rows, cols } => (Table::float(values.view(), *rows, *cols), *rows),
        };
        let table = table.map_err(|e| e.to_string())?;
        if self.wide {
            gather(&table, io.input::<i64>(INDICES), rows, self.strict, io, cx)
        } else {
            gather(&table, io.input::<i32>(INDICES), rows, self.strict, io, cx)
        }
    }

    fn name(&self) -> String {
        match &self.table {
            OwnedTable::Quantized(q) => format!("gather_{}b", q.view().bits.get()),
            OwnedTable::Float { values, .. } => format!("gather_{}", values.view().float_type().dtype()),
        }
    }
}

/// Both operators have their indices second.
const INDICES: usize = 1;

fn gather<I: Copy + Into<i64> + Sync>(
    table: &Table<'_>,
    indices: &[I],
    rows: usize,
    strict: bool,
    io: &mut Io<'_>,
    cx: &Context<'_>,
) -> Result<(), String> {
    if strict {
        let n = rows as i64;
        if let Some(bad) = indices.iter().map(|&i| i.into()).find(|&i: &i64| i < -n || i >= n) {
            return Err(format!("indices: expected -{n} to {}, found {bad}", n - 1));
        }
    }
    table.gather(cx.pool, indices.len(), |i| indices[i].into(), io.output(0));
    Ok(())
}

fn embed(b: &Binder<'_>, table: OwnedTable, strict: bool) -> Result<Option<Box<dyn Kernel>>, String> {
    let indices = b.value(1).ok_or("its indices are a constant")?;
    let wide = match indices.dtype {
        DType::I64 => true,
        DType::I32 => false,
        other => return Err(format!("indices: expected int32 or int64, found {other}")),
    };
    Ok(Some(Box::new(Embed { table, strict, wide })))
}

/// GatherBlockQuantized from a uint8 table gathered by row; other forms are left to the reference.
pub(super) fn quantized(
    b: &mut Binder<'_>,
    op: &GatherBlockQuantized,
) -> Result<Option<Box<dyn Kernel>>, String> {
    if b.value(1).is_none() {
        return Ok(None);
    }
    let (data, scales, zero_points) = (b.constant(0)?, b.constant(2)?, b.constant(3)?);
    let (Some(data), Some(scales)) = (data, scales) else { return Ok(None) };
    // The form of the table does not depend on the indices; any will do for the check.
    let index = Tensor::scalar(0i64);
    let refs = [Some(&data), Some(&index), Some(&scales), zero_points.as_ref()];
    let Ok(m) = op.matrix(&refs) else { return Ok(None) };
    let table = OwnedTable::Quantized(OwnedQuant::new(&m, &data, &scales, zero_points.as_ref()));
    embed(b, table, false)
}

/// Gather of rows of a float table of rank 2; other forms are left to the reference.
pub(super) fn float(b: &mut Binder<'_>, axis: i64) -> Result<Option<Box<dyn Kernel>>, String> {
    if b.value(1).is_none() || axis != 0 {
        return Ok(None);
    }
    let Some(data) = b.constant(0)? else { return Ok(None) };
    let [rows, cols] = data.shape()[..] else { return Ok(None) };
    let Ok(values) = Floats::of(&data) else { return Ok(None) };
    embed(b, OwnedTable::Float { values, rows, cols }, true)
}
