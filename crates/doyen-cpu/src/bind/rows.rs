//! Row selection above the head.

use super::{Binder, Context, Kernel};
use crate::session::io::Io;

struct SelectRows;

impl Kernel for SelectRows {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let x = io.input_tokens(0)?;
        let width = x.len() / io.tokens.max(1);
        for (y, &row) in io.output_bytes(0).chunks_exact_mut(width.max(1)).zip(cx.batch.rows) {
            let start = row as usize * width;
            y.copy_from_slice(&x[start..start + width]);
        }
        Ok(())
    }

    fn name(&self) -> String {
        "select_rows".into()
    }
}

/// Binds a selection; the extents before the token axis must be 1.
pub(super) fn select(b: &Binder<'_>, axis: usize) -> Result<Box<dyn Kernel>, String> {
    use doyen_graph::lowered::Extent;
    let x = b.value(0).ok_or("it selects rows of a constant")?;
    let leading = x.dims[..axis].iter().all(|d| *d == Extent::Fixed(1));
    let tokens = matches!(x.dims.get(axis), Some(Extent::Tokens(_)));
    if leading && tokens {
        Ok(Box::new(SelectRows))
    } else {
        Err(format!("it selects rows along axis {axis} of a value of extents {:?}", x.dims))
    }
}
