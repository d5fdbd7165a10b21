//! Experts of small floats: MXFP4, NVFP4 and FP8. A few routes are multiplied one by one, their codes read as they lie, in float32;
//! many of them densely.

use super::{
    Binder, Context, Kernel, cols,
    dense::{Dense, Job, Matrices, Part, Shape},
    experts::{STORED, activation_of, check_rows},
    ready, rows_at,
};
use crate::{
    driver::{Addr, Function, Gpu, Grid, Uploads},
    error::CudaError,
    mini::MiniBank,
    module::{Module, Operand},
    params,
    session::io::Io,
    weights::{Floats, optional},
};
use doyen_graph::{
    device::{DeviceError, Limits},
    lowered::{Experts, LValue},
    ops::qmoe::{self, QMoe, StoredMatrix},
};
use doyen_tensor::{ExpertId, Tensor};

/// Warps of a block of mini.cu, each with a row of weights.
const WARPS: usize = 4;
/// Routes to an expert, on average, from which on its matrices are written out once for all of them. A route read by itself takes
/// about the time that an eighth of a matrix written and read again does.
const MANY: usize = 8;

struct Projection {
    bank: MiniBank,
    bias: Option<Floats>,
    functions: Option<Functions>,
}

struct Functions {
    routed: Function,
    activated: Function,
    sum: Function,
}

impl Projection {
    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads, k: usize) -> Result<(), DeviceError> {
        self.bank.upload(gpu, constants)?;
        if let Some(b) = &mut self.bias {
            b.upload(gpu, constants)?;
        }
        let module = Module::Mini(self.bank.code());
        self.functions = Some(Functions {
            routed: gpu.function(module, "mini_routed", 0)?,
            activated: gpu.function(module, "mini_activated", 0)?,
            sum: gpu.function(module, "mini_sum", 4 * k)?,
        });
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.bank.bytes() + self.bias.as_ref().map_or(0, Floats::bytes)
    }

    fn part(&self) -> Part<'_> {
        Part { matrices: &self.bank, bias: self.bias.as_ref() }
    }
}

struct MiniExperts {
    kind: &'static str,
    fc1: Projection,
    fc2: Projection,
    fc3: Option<Projection>,
    act: params::Activation,
    experts: usize,
    k: usize,
    inter: usize,
    x: LValue,
    /// Of many routes; without tensor cores there are none that pay.
    dense: Option<Dense>,
    all_dense: bool,
    activate: Option<Function>,
}

impl MiniExperts {
    /// Bytes of the rows that routes leave: FC1, FC3, activated.
    fn parts(&self, routes: usize) -> Option<[usize; 3]> {
        let part =
            |numbers: usize| routes.checked_mul(numbers)?.checked_mul(4)?.checked_next_multiple_of(256);
        let apart = if self.fc3.is_some() { self.inter } else { 0 };
        Some([part(apart)?, part(apart)?, part(self.inter)?])
    }

    /// Whether `tokens` tokens are multiplied densely.
    fn densely(&self, tokens: usize) -> Option<&Dense> {
        let many = tokens.saturating_mul(self.k) > MANY * self.experts;
        self.dense.as_ref().filter(|_| many || self.all_dense)
    }

    fn routed(&self, io: &Io<'_>, cx: &Context<'_>, tokens: usize) -> Result<(), CudaError> {
        let routes = tokens * self.k;
        let parts = self.parts(routes);
        let [first, third, activated] = *ready(parts.as_ref())?;
        let h1 = cx.scratch.at(0, first)?;
        let h3 = cx.scratch.at(first, third)?;
        let a = cx.scratch.at(first + third, activated)?;
        let params =
            |p: &Projection, x: Addr, y: Addr, x_div: usize| -> Result<params::MiniRouted, CudaError> {
                let (bias, bias_float) = optional(p.bias.as_ref());
                Ok(params::MiniRouted {
                    w: p.bank.params()?,
                    x,
                    y,
                    bias,
                    experts: io.input(1)?,
                    mix: io.input(2)?,
                    bias_float,
                    x_div: x_div as u32,
                    k: self.k as u32,
                    act: self.act,
                })
            };
        let (x, threads) = (io.input(0)?, 32 * WARPS as u32);
        if let Some(fc3) = &self.fc3 {
            for (p, h) in [(&self.fc1, h1), (fc3, h3)] {
                let grid = Grid::new([p.bank.rows().div_ceil(WARPS), routes, 1], threads);
                cx.gpu.launch(&ready(p.functions.as_ref())?.routed, grid, params(p, x, h, self.k)?)?;
            }
            let n = routes * self.inter;
            let step =
                params::Activate { h1, h3, y: a, n: n as u64, inter: self.inter as u32, act: self.act };
            cx.gpu.launch(ready(self.activate.as_ref())?, Grid::over(n), step)?;
        } else {
            let grid = Grid::new([self.inter.div_ceil(WARPS), routes, 1], threads);
            let functions = ready(self.fc1.functions.as_ref())?;
            cx.gpu.launch(&functions.activated, grid, params(&self.fc1, x, a, self.k)?)?;
        }
        let grid = Grid::new([self.fc2.bank.rows(), tokens, 1], threads).shared(4 * self.k);
        let functions = ready(self.fc2.functions.as_ref())?;
        cx.gpu.launch(&functions.sum, grid, params(&self.fc2, a, io.output(0)?, 1)?)
    }
}

impl Kernel for MiniExperts {
    fn name(&self) -> String {
        let dense = self.dense.as_ref().map_or_else(String::new, |d| format!(" / {}", d.name()));
        format!("experts {} f32{dense}", self.kind)
    }

    fn scratch(&self, limits: &Limits) -> usize {
        let tokens = rows_at(&self.x, limits);
        let routes = tokens.checked_mul(self.k);
        let few = routes.and_then(|r| self.parts(r)).map_or(usize::MAX, |p| p.iter().sum());
        let dense = self.densely(tokens).map_or(0, |d| d.scratch(routes));
        few.max(dense)
    }

    fn resident(&self) -> usize {
        self.fc1.bytes() + self.fc2.bytes() + self.fc3.as_ref().map_or(0, Projection::bytes)
    }

    fn load(&mut self, gpu: &Gpu, constants: &mut Uploads) -> Result<(), DeviceError> {
        for p in [Some(&mut self.fc1), Some(&mut self.fc2), self.fc3.as_mut()].into_iter().flatten() {
            p.load(gpu, constants, self.k)?;
        }
        self.activate = Some(gpu.function(Module::Route, "activate_rows", 0)?);
        let parts = [Some(&self.fc1), Some(&self.fc2), self.fc3.as_ref()];
        let banks: Vec<&dyn Matrices> =
            parts.into_iter().flatten().map(|p| -> &dyn Matrices { &p.bank }).collect();
        if let Some(dense) = &mut self.dense {
            dense.load(gpu, &banks)?;
        }
        Ok(())
    }

    fn run(&self, io: &mut Io<'_>, cx: &Context<'_>, _: usize) -> Result<(), CudaError> {
        let tokens = io.input_numel(0) / self.fc2.bank.rows().max(1);
        let Some(dense) = self.densely(tokens) else { return self.routed(io, cx, tokens) };
        let job = Job {
            fc1: self.fc1.part(),
            fc2: self.fc2.part(),
            fc3: self.fc3.as_ref().map(Projection::part),
            act: self.act,
            x: io.input(0)?,
            ids: io.input(1)?,
            mix: io.input(2)?,
            y: io.output(0)?,
            tokens,
        };
        dense.run(cx, &job)
    }
}

/// Places of the global scales of FC1 and FC2 among QMoE's operands from its index 2 on.
const GLOBALS: [Option<usize>; 3] = [Some(13), Some(14), None];

fn projections(op: &QMoe, refs: &[Option<&Tensor>]) -> Result<[Option<Projection>; 3], String> {
    let operands = op.operands(refs).map_err(|e| e.to_string())?;
    let at = |i: usize| refs.get(i).copied().flatten();
    let mut found = [const { None }; 3];
    for (i, (slot, p)) in found.iter_mut().zip(STORED).enumerate() {
        let (Some(codes), Some(StoredMatrix::Float(first))) = (at(3 * i), operands.stored(p, ExpertId(0)))
        else {
            continue;
        };
        let globals = GLOBALS[i].and_then(at);
        let bank = MiniBank::new(&first, operands.experts, codes, at(3 * i + 1), globals)?;
        let bias = at(3 * i + 2).map(Floats::of).transpose().map_err(|e| e.to_string())?;
        *slot = Some(Projection { bank, bias, functions: None });
    }
    Ok(found)
}

/// Binds a bank of small floats.
pub(super) fn bind(b: &Binder<'_>, e: &Experts, op: &QMoe) -> Result<Box<dyn Kernel>, String> {
    debug_assert_ne!(op.kind, qmoe::Kind::Int, "codes are integers");
    let x = b.float_value(0).ok_or("its input is a constant")?.clone();
    let tensors = b.constants(3)?;
    let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
    let [fc1, fc2, fc3] = projections(op, &refs)?;
    let (Some(fc1), Some(fc2)) = (fc1, fc2) else { return Err("it has no experts".into()) };
    let (hidden, inter) = (fc2.bank.rows(), fc2.bank.cols());
    if cols(&x) != Some(hidden) || fc1.bank.cols() != hidden {
        return Err(format!("its input has extents {:?}, the experts take {hidden}", x.dims));
    }
    let act = activation_of(op.activation, fc3.is_some());
    let rows = (fc1.bank.rows(), fc3.as_ref().map(|p| p.bank.rows()));
    check_rows(&act, rows, inter)?;
    for p in [Some(&fc1), Some(&fc2), fc3.as_ref()].into_iter().flatten() {
        if p.bias.as_ref().is_some_and(|bias| bias.len() != e.experts * p.bank.rows()) {
            return Err(format!("bias: expected {} x {} numbers", e.experts, p.bank.rows()));
        }
    }
    let shape = Shape { experts: e.experts, k: e.k, hidden, inter, fc1_rows: rows.0, fc3: fc3.is_some() };
    let setting = &b.setting;
    let dense = (setting.operand.is_some() || setting.all_dense).then(|| Dense::new(shape, setting));
    if let Some(p) =
        [Some(&fc1), Some(&fc2), fc3.as_ref()].into_iter().flatten().find(|p| p.bank.largest() > F16_MOST)
        && setting.operand == Some(Operand::F16)
    {
        return Err(format!(
            "its experts' values reach {:.0}, float16 holds {F16_MOST}: give --compute-dtype bf16",
            p.bank.largest()
        ));
    }
    Ok(Box::new(MiniExperts {
        kind: op.kind.name(),
        fc1,
        fc2,
        fc3,
        act,
        experts: e.experts,
        k: e.k,
        inter,
        x,
        dense: dense.transpose()?,
        all_dense: setting.all_dense,
        activate: None,
    }))
}

/// The largest float16.
const F16_MOST: f64 = 65504.0;
