//! Routing and experts.

use super::{
    Binder, Context, Kernel, cols, rows_at,
    weights::{Floats, OwnedMini, OwnedQuant, OwnedWeights},
};
use crate::{
    kernel::{
        experts::{self, Activation, Bank, Formats, Gate, Projection, Routes, Shape},
        linear::{Linear, Mode, Weights},
        route::{Router, Weighting},
    },
    session::io::Io,
};
use doyen_graph::{
    device::Limits,
    ir::{Constant, Fact},
    lowered::{Experts, LValue, Route},
    ops::{
        Op, activation as theirs,
        moe::Moe,
        qmoe::{self, StoredMatrix},
    },
    pass::fold::view::slice,
};
use doyen_tensor::{ExpertId, FloatView, Tensor};

struct RouteKernel(Router);

impl Kernel for RouteKernel {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let logits = io.input::<f32>(0);
        let given = io.has_input(1).then(|| io.input::<f32>(1));
        let (ids, weights) = io.output_pair::<u32, f32>(0, 1);
        let weights = weights.ok_or("nobody wants its weights")?;
        self.0.run(cx.pool, logits, given, ids, weights);
        Ok(())
    }

    fn name(&self) -> String {
        format!("route top-{} of {}", self.0.k(), self.0.experts())
    }
}

pub(super) fn route(b: &Binder<'_>, r: &Route) -> Result<Box<dyn Kernel>, String> {
    let given = b.operand(1).is_some();
    if given && b.value(1).is_none() {
        return Err("its router weights are a constant".into());
    }
    let weighting = Weighting::of(r.normalize, given, r.sparse_mixer)
        .ok_or("router weights together with a sparse mixer have no meaning")?;
    let router = Router::new(r.experts, r.k, weighting)
        .ok_or_else(|| format!("{} experts a token out of {}", r.k, r.experts))?;
    Ok(Box::new(RouteKernel(router)))
}

/// The matrices and biases of a layer's experts, `[projection][expert]`.
struct OwnedBank {
    weights: [Vec<OwnedWeights>; 3],
    biases: [Vec<Floats>; 3],
}

impl Bank for OwnedBank {
    fn weights(&self, projection: Projection, expert: usize) -> Weights<'_> {
        self.weights[projection as usize][expert].view()
    }

    fn bias(&self, projection: Projection, expert: usize) -> Option<FloatView<'_>> {
        self.biases[projection as usize].get(expert).map(Floats::view)
    }
}

struct ExpertsKernel {
    experts: experts::Experts,
    bank: OwnedBank,
    k: usize,
    x: LValue,
}

impl Kernel for ExpertsKernel {
    fn run(&self, io: &mut Io<'_>, cx: &mut Context<'_>) -> Result<(), String> {
        let routes = Routes { k: self.k, experts: io.input(1), weights: io.input(2) };
        let x = io.input::<f32>(0);
        self.experts.run(cx.pool, &self.bank, x, routes, io.output(0), cx.scratch);
        Ok(())
    }

    fn name(&self) -> String {
        let name = |p| self.experts.linear(p).map_or_else(String::new, |l: &Linear| l.kernel().to_string());
        format!("experts {} / {}", name(Projection::Fc1), name(Projection::Fc2))
    }

    fn scratch(&self, limits: &Limits) -> usize {
        self.experts.scratch_len(rows_at(&self.x, limits), self.k).unwrap_or(usize::MAX)
    }
}

const PROJECTIONS: [(Projection, qmoe::Projection); 3] = [
    (Projection::Fc1, qmoe::Projection::Fc1),
    (Projection::Fc2, qmoe::Projection::Fc2),
    (Projection::Fc3, qmoe::Projection::Fc3),
];

pub(super) fn bind(b: &mut Binder<'_>, e: &Experts) -> Result<Box<dyn Kernel>, String> {
    let x = b.value(0).ok_or("its input is a constant")?.clone();
    let (bank, shape, activation, mode) = match &e.op {
        Op::QMoe(op) => {
            let (bank, shape) = quantized(b, op)?;
            (bank, shape, op.activation, b.mode(op.accuracy_level.permits_int8()))
        }
        Op::Moe(op) => {
            let (bank, shape) = float(b, op)?;
            (bank, shape, op.activation, Mode::Exact)
        }
        other => return Err(format!("{other:?} is not a bank of experts")),
    };
    if cols(&x) != Some(shape.hidden) {
        return Err(format!("its input has extents {:?}, the experts take {}", x.dims, shape.hidden));
    }
    let has_fc3 = !bank.weights[2].is_empty();
    let (activation, gate) = activation_of(activation, has_fc3);
    let format = |p: Projection| bank.weights[p as usize].first().map(|w| w.view().format());
    let (Some(fc1), Some(fc2)) = (format(Projection::Fc1), format(Projection::Fc2)) else {
        return Err("it has no experts".into());
    };
    let formats = Formats { fc1, fc2, fc3: format(Projection::Fc3) };
    let experts =
        experts::Experts::new(shape, formats, activation, gate, mode, b.isa).map_err(|e| e.to_string())?;
    experts.check(&bank).map_err(|e| e.to_string())?;
    Ok(Box::new(ExpertsKernel { experts, bank, k: e.k, x }))
}

/// The kernel's names for the operator's activation.
fn activation_of(a: theirs::Activation, has_fc3: bool) -> (Activation, Gate) {
    let plain = if has_fc3 { Gate::Separate } else { Gate::None };
    match a {
        theirs::Activation::Identity => (Activation::Identity, plain),
        theirs::Activation::Relu => (Activation::Relu, plain),
        theirs::Activation::Gelu => (Activation::Gelu, plain),
        theirs::Activation::Silu => (Activation::Silu, plain),
        theirs::Activation::Swiglu(s) => {
            let gate = match s.fusion.resolve(has_fc3) {
                theirs::Fusion::Separate => Gate::Separate,
                theirs::Fusion::Interleaved => Gate::Interleaved,
                theirs::Fusion::Concatenated => Gate::Concatenated,
            };
            (Activation::SwiGlu { alpha: s.alpha, beta: s.beta, limit: s.limit }, gate)
        }
    }
}

/// QMoE's operands from its index 2 on: weights, scales and bias of each projection, then their zero points. Where they lie
/// apart, one expert's after the other, each expert's are read where they lie.
fn quantized(b: &mut Binder<'_>, op: &qmoe::QMoe) -> Result<(OwnedBank, Shape), String> {
    let mut bank = OwnedBank { weights: Default::default(), biases: Default::default() };
    let data = b.views(FIRST)?;
    let apart = data.first().and_then(Option::as_ref).filter(|c| c.parts().len() > 1);
    let Some(experts) = apart.map(|c| c.shape()[0]) else {
        let tensors = b.constants(FIRST)?;
        let shape = bank.extend(op, &tensors)?;
        return Ok((bank, shape));
    };
    let mut shape = None;
    for e in 0..experts {
        let tensors = data.iter().map(|c| c.as_ref().map(|c| own(b, c, e)).transpose());
        shape = Some(bank.extend(op, &tensors.collect::<Result<Vec<_>, _>>()?)?);
    }
    let one = shape.ok_or("it has no experts")?;
    Ok((bank, Shape { experts, ..one }))
}

/// The constants of a bank start here.
const FIRST: usize = 3;

/// One expert's share of a bank's constant, with an axis of one before.
fn share(c: &Constant, e: usize) -> Result<Constant, String> {
    slice(c, 0, e..e + 1).ok_or_else(|| format!("expert {e}: its weights cannot be told apart"))
}

/// The same as a tensor, read where it lies if it is contiguous there.
fn own(b: &mut Binder<'_>, c: &Constant, e: usize) -> Result<Tensor, String> {
    let share = share(c, e)?;
    let tensor = share.to_tensor().map_err(|e| e.to_string())?;
    b.made(if share.as_tensor().is_some() { 0 } else { tensor.bytes().len() });
    Ok(tensor)
}

impl OwnedBank {
    /// Adds the experts in these operands.
    fn extend(&mut self, op: &qmoe::QMoe, tensors: &[Option<Tensor>]) -> Result<Shape, String> {
        let refs: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
        let operands = op.operands(&refs).map_err(|e| e.to_string())?;
        let at = |i: usize| refs.get(i).copied().flatten();
        for (i, (p, stored)) in PROJECTIONS.into_iter().enumerate() {
            let (Some(codes), scales) = (at(3 * i), at(3 * i + 1)) else { continue };
            for e in (0..operands.experts as u32).map(ExpertId) {
                self.weights[p as usize].push(match (operands.stored(stored, e), scales) {
                    (Some(StoredMatrix::Int(m)), Some(scales)) => {
                        OwnedWeights::Int(OwnedQuant::new(&m, codes, scales, at(9 + i)))
                    }
                    (Some(StoredMatrix::Float(m)), scales) => {
                        OwnedWeights::Mini(OwnedMini::new(&m, codes, scales))
                    }
                    _ => continue,
                });
                if let (Some(view), Some(t)) = (operands.bias(stored, e), at(3 * i + 2)) {
                    self.biases[p as usize].push(Floats::of_view(view, t));
                }
            }
        }
        Ok(Shape { experts: operands.experts, hidden: operands.hidden, inter: operands.inter })
    }
}

/// MoE's operands from its index 2 on: weights and bias of each projection, each expert's read where it lies.
fn float(b: &mut Binder<'_>, op: &Moe) -> Result<(OwnedBank, Shape), String> {
    let data = b.views(FIRST)?;
    let facts: Vec<Option<Fact>> = data.iter().map(|c| c.clone().map(Fact::from)).collect();
    let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
    let extents = op.extents(&facts).map_err(|e| e.to_string())?;
    let at = |i: usize| data.get(i).and_then(Option::as_deref);
    let mut bank = OwnedBank { weights: Default::default(), biases: Default::default() };
    for (i, (p, _)) in PROJECTIONS.into_iter().enumerate() {
        let Some(weights) = at(2 * i) else { continue };
        for e in 0..extents.experts {
            let (matrix, made) = OwnedWeights::float(&share(weights, e)?).map_err(|e| e.to_string())?;
            b.made(made);
            bank.weights[p as usize].push(matrix);
            if let Some(bias) = at(2 * i + 1) {
                let tensor = own(b, bias, e)?;
                bank.biases[p as usize].push(Floats::of(&tensor).map_err(|e| e.to_string())?);
            }
        }
    }
    Ok((bank, Shape { experts: extents.experts, hidden: extents.hidden, inter: extents.inter }))
}
