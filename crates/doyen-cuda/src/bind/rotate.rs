//! Rotations outside of attention.

use super::{Binder, Context, Kernel, cols, fixed, ready};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    module::Module,
    params,
    session::io::Io,
    weights::{Floats, optional},
};
use doyen_graph::{device::DeviceError, lowered::Extent, ops::Op};
use doyen_tensor::DType;

/// Cosines or sines: a constant with a row for every position, or rows of the step, one a token.
enum Angles {
    Cache(Floats),
    Rows(usize),
}

impl Angles {
    fn new(b: &Binder<'_>, i: usize) -> Result<Option<Self>, String> {
        match b.constant(i)? {
            Some(t) => Ok(Floats::of(&t).ok().map(Self::Cache)),
            None => Ok(b.float_value(i).map(|_| Self::Rows(i))),
        }
    }

    fn addr(&self, io: &Io<'_>) -> Result<(Addr, u32), CudaError> {
        match self {
            Self::Cache(floats) => Ok(optional(Some(floats))),
            Self::Rows(i) => Ok((io.input(*i)?, 0)),
        }
    }

    const fn cache(&self) -> Option<&Floats> {
        match self {
            Self::Cache(floats) => Some(floats),
            Self::Rows(_) => None,
        }
    }
}

struct Rotate {
    cos: Angles,
    sin: Angles,
    /// The input that has the positions, and how often it says them.
    positions: Option<(usize, usize)>,
    heads: usize,
    size: usize,
    half: usize,
    /// Rows of the caches.
    rows: usize,
    by_head: bool,
    interleaved: bool,
    function: Option<Function>,
}

impl Kernel for Rotate {
    fn name(&self) -> String {
        "rotary".into()
    }

    fn resident(&self) -> usize {
        [&self.cos, &self.sin].into_iter().filter_map(Angles::cache).map(Floats::bytes).sum()
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        for angles in [&mut self.cos, &mut self.sin] {
            if let Angles::Cache(floats) = angles {
                floats.upload(gpu, constants)?;
            }
        }
        self.function = Some(gpu.function(Module::Parts, "rotate", 0)?);
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, number: usize) -> Result<(), CudaError> {
        let n = io.input_numel(0);
        let ((cos, cos_float), (sin, sin_float)) = (self.cos.addr(io)?, self.sin.addr(io)?);
        let params = params::Rotate {
            x: io.input(0)?,
            y: io.output(0)?,
            cos,
            sin,
            positions: self.positions.map_or(Ok(Addr::NONE), |(i, _)| io.input(i))?,
            fault: cx.fault,
            n: n as u64,
            tokens: (n / (self.heads * self.size)) as u32,
            heads: self.heads as u32,
            size: self.size as u32,
            half: self.half as u32,
            rows: self.rows as u32,
            streams: self.positions.map_or(0, |(_, streams)| streams as u32),
            by_head: u32::from(self.by_head),
            interleaved: u32::from(self.interleaved),
            cos_float,
            sin_float,
            node: number as u32,
        };
        cx.gpu.launch(ready(self.function.as_ref())?, Grid::over(n), params)
    }

    fn fault(&self) -> String {
        let rows = self.rows;
        format!("position_ids: expected positions below {rows} (rows of cos_cache), equal in all streams")
    }
}

/// Where the operands of a rotation are, and what its attributes say.
struct Rotation {
    positions: usize,
    cos: usize,
    sin: usize,
    heads: Option<usize>,
    interleaved: bool,
}

fn rotate(b: &Binder<'_>, op: &Rotation) -> Result<Option<Box<dyn Kernel>>, String> {
    let Some(x) = b.float_value(0) else { return Ok(None) };
    let (Some(cos), Some(sin)) = (Angles::new(b, op.cos)?, Angles::new(b, op.sin)?) else { return Ok(None) };
    let half = match &cos {
        Angles::Cache(_) => b.constant(op.cos)?.and_then(|t| t.shape().last().copied()),
        Angles::Rows(i) => b.value(*i).and_then(cols),
    };
    let (Some(half), Some(last)) = (half.filter(|&h| h > 0), cols(x)) else { return Ok(None) };
    let one = x.dims.first() == Some(&Extent::Fixed(1));
    let token = |axis: usize| x.dims.get(axis) == Some(&Extent::Tokens(1));
    let (heads, by_head) = match x.dims.len() {
        // Without a number of heads, a head is as wide as its rotation.
        3 if one && token(1) => (op.heads.unwrap_or(last / (2 * half)), false),
        4 if one && token(2) => (fixed(x, 1).unwrap_or(0), true),
        _ => return Ok(None),
    };
    let size = if by_head { last } else { last.checked_div(heads).unwrap_or(0) };
    if heads == 0 || size < 2 * half || (!by_head && heads * size != last) {
        return Ok(None);
    }
    let streams = |dims: &[Extent]| match dims {
        [Extent::Fixed(1), Extent::Tokens(1)] => Some(1),
        [Extent::Fixed(n), Extent::Fixed(1), Extent::Tokens(1)] => Some(*n),
        _ => None,
    };
    let positions = match (b.operand(op.positions), b.value(op.positions)) {
        (None, _) => None,
        (_, Some(v)) if v.dtype == DType::I64 => match streams(&v.dims) {
            Some(streams) => Some((op.positions, streams)),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    // A row for every position with positions, for every token without.
    let rows = cos.cache().map_or(0, |c| c.len() / half);
    if positions.is_some() != cos.cache().is_some()
        || cos.cache().map(Floats::len) != sin.cache().map(Floats::len)
    {
        return Ok(None);
    }
    let interleaved = op.interleaved;
    Ok(Some(Box::new(Rotate {
        cos,
        sin,
        positions,
        heads,
        size,
        half,
        rows,
        by_head,
        interleaved,
        function: None,
    })))
}

/// Binds rotations.
pub(super) fn bind(b: &Binder<'_>, op: &Op) -> Result<Option<Box<dyn Kernel>>, String> {
    let (positions, cos, sin, heads, interleaved) = match op {
        Op::ContribRotary(r) => (1, 2, 3, r.num_heads, r.interleaved),
        Op::OnnxRotary(r) => (3, 1, 2, r.num_heads, r.interleaved),
        _ => return Ok(None),
    };
    rotate(b, &Rotation { positions, cos, sin, heads, interleaved })
}
