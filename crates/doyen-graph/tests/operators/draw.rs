//! Draws an operator's attributes and inputs: mostly ones it accepts, some that it does not.

use doyen_graph::ir::Attrs;
use doyen_graph::ops::TokenAxis;
use doyen_tensor::{DType, Tensor};

/// Tokens of every input that carries them.
pub const TOKENS: usize = 3;

/// Every plain operator.
pub const OPERATORS: &[&str] = &[
    "Abs",
    "Add",
    "And",
    "ArgMax",
    "ArgMin",
    "Cast",
    "CastLike",
    "Ceil",
    "Clip",
    "Concat",
    "ConstantOfShape",
    "Cos",
    "CumSum",
    "Div",
    "Equal",
    "Erf",
    "Exp",
    "Expand",
    "Flatten",
    "Floor",
    "Gather",
    "GatherElements",
    "GatherND",
    "Gelu",
    "Gemm",
    "Greater",
    "GreaterOrEqual",
    "Identity",
    "IsInf",
    "IsNaN",
    "Less",
    "LessOrEqual",
    "Log",
    "LogSoftmax",
    "MatMul",
    "Max",
    "Mean",
    "Min",
    "Mod",
    "Mul",
    "Neg",
    "Not",
    "Or",
    "Pow",
    "Range",
    "Reciprocal",
    "ReduceL1",
    "ReduceL2",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
    "Relu",
    "Reshape",
    "Round",
    "ScatterElements",
    "ScatterND",
    "Shape",
    "Sigmoid",
    "Sign",
    "Sin",
    "Size",
    "Slice",
    "Softmax",
    "Softplus",
    "Split",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Sum",
    "Swish",
    "Tanh",
    "TensorScatter",
    "Tile",
    "TopK",
    "Transpose",
    "Trilu",
    "Unsqueeze",
    "Where",
    "Xor",
];

/// Operators that never keep a token axis: they have no data to keep, or mix by their nature.
pub const MIXES: &[&str] = &["ConstantOfShape", "Range", "ScatterND", "Size", "TensorScatter"];

const OPSETS: [i64; 9] = [7, 9, 10, 11, 12, 13, 18, 24, 27];

/// A small generator (xorshift64*), so that a seed is all a failure needs.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        let mut dice = Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..4).for_each(|_| _ = dice.next());
        dice
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    fn between(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1) as usize) as i64
    }

    /// Extents that often count tokens.
    fn shape(&mut self, low: usize, high: usize) -> Vec<usize> {
        let rank = low + self.below(high - low + 1);
        (0..rank).map(|_| self.pick(&[1, 2, 3, 3, 6, 4, 0])).collect()
    }
}

/// An input, and where it carries tokens.
#[derive(Debug, Clone)]
pub struct Input {
    pub tensor: Tensor,
    pub tokens: Option<TokenAxis>,
}

/// An operator with attributes and inputs.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: &'static str,
    pub opset: i64,
    pub attrs: Attrs,
    pub inputs: Vec<Option<Input>>,
    pub outputs: usize,
}

/// A tensor of small numbers.
fn numbers(dice: &mut Dice, dtype: DType, shape: &[usize]) -> Tensor {
    let n = shape.iter().product();
    let v: Vec<i64> = (0..n).map(|_| dice.between(-4, 4)).collect();
    let floats = || v.iter().map(|&x| x as f32 * 0.75).collect::<Vec<_>>();
    match dtype {
        DType::Bool => Tensor::from_slice(shape, &v.iter().map(|&x| x > 0).collect::<Vec<_>>()),
        DType::I64 => Tensor::from_slice(shape, &v),
        DType::I32 => Tensor::from_slice(shape, &v.iter().map(|&x| x as i32).collect::<Vec<_>>()),
        DType::U8 => Tensor::from_slice(shape, &v.iter().map(|&x| x as u8).collect::<Vec<_>>()),
        float => Tensor::from_f32(float, shape, &floats()),
    }
    .unwrap()
}

fn ints(v: &[i64]) -> Tensor {
    Tensor::from_slice([v.len()], v).unwrap()
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::F64];

impl Case {
    fn add(&mut self, tensor: Tensor, tokens: Option<TokenAxis>) {
        self.inputs.push(Some(Input { tensor, tokens }));
    }

    fn plain(&mut self, tensor: Tensor) {
        self.add(tensor, None);
    }

    /// Data of this shape; tokens on `axis` if its extent counts them.
    fn data(&mut self, dice: &mut Dice, dtype: DType, shape: &[usize], axis: Option<usize>) {
        let tokens = axis.and_then(|axis| {
            let n = *shape.get(axis)?;
            (n > 0 && n.is_multiple_of(TOKENS)).then_some(TokenAxis { axis, inner: n / TOKENS })
        });
        let t = numbers(dice, dtype, shape);
        self.add(t, tokens);
    }

    /// Operands that mostly broadcast to `shape`.
    fn operands(&mut self, dice: &mut Dice, dtypes: &[DType], shape: &[usize]) {
        let axis = dice.below(shape.len() + 1);
        for &dtype in dtypes {
            let cut = if dice.one_in(3) { dice.below(shape.len() + 1) } else { 0 };
            let own: Vec<usize> = shape[cut..].iter().map(|&d| if dice.one_in(5) { 1 } else { d }).collect();
            let at = if dice.one_in(6) { None } else { axis.checked_sub(cut) };
            self.data(dice, dtype, &own, at);
        }
    }

    fn set(&mut self, dice: &mut Dice, name: &str, low: i64, high: i64) {
        if !dice.one_in(3) {
            let v = dice.between(low, high);
            self.attrs.set(name, v);
        }
    }

    /// The same case with some numbers that no model has.
    pub fn hostile(mut self, dice: &mut Dice) -> Self {
        const WILD: [i64; 8] = [i64::MAX, i64::MIN, -1, 1 << 45, i64::MAX - 1, 1 << 62, 0, -(1 << 50)];
        let names: Vec<String> = self.attrs.iter().map(|(k, _)| k.to_owned()).collect();
        for name in names {
            if dice.one_in(3) {
                let v = dice.pick(&WILD);
                if dice.one_in(2) {
                    self.attrs.set(name, v);
                } else {
                    self.attrs.set(name, vec![v, dice.pick(&WILD)]);
                }
            }
        }
        for input in &mut self.inputs {
            let Some(i) = input else { continue };
            match dice.below(6) {
                0 => *input = None,
                1 if i.tensor.dtype() == DType::I64 => {
                    let mut v = i.tensor.to_vec::<i64>().unwrap();
                    for x in v.iter_mut().filter(|_| dice.one_in(2)) {
                        *x = WILD[x.unsigned_abs() as usize % WILD.len()];
                    }
                    i.tensor = Tensor::from_slice(i.tensor.shape().clone(), &v).unwrap();
                }
                2 if i.tensor.dtype().is_float() => {
                    let wild = [f32::NAN, f32::INFINITY, f32::MAX, -0.0, f32::NEG_INFINITY];
                    let v: Vec<f32> = (0..i.tensor.numel()).map(|_| dice.pick(&wild)).collect();
                    i.tensor = Tensor::from_f32(i.tensor.dtype(), i.tensor.shape().clone(), &v).unwrap();
                }
                3 => {
                    let (dtype, shape) = (dice.pick(&[DType::I64, DType::U8, DType::F32]), dice.shape(0, 4));
                    i.tensor = numbers(dice, dtype, &shape);
                }
                _ => {}
            }
        }
        self.outputs = dice.below(4);
        self
    }

    pub fn draw(name: &'static str, dice: &mut Dice) -> Self {
        let mut c =
            Self { name, opset: dice.pick(&OPSETS), attrs: Attrs::default(), inputs: Vec::new(), outputs: 1 };
        let shape = dice.shape(0, 4);
        let float = dice.pick(&FLOATS);
        let number = dice.pick(&[DType::F32, DType::I64, DType::I32, DType::F16, DType::U8]);
        let any_axis = Some(dice.below(shape.len().max(1)));
        let (r, several) = (shape.len() as i64, 1 + dice.below(3));
        match name {
            "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Equal" | "Greater" | "GreaterOrEqual" | "Less"
            | "LessOrEqual" => {
                c.operands(dice, &[number, number], &shape);
                if name == "Mod" {
                    c.set(dice, "fmod", 0, 1);
                }
            }
            "Pow" => {
                let exponent = dice.pick(&[DType::F32, DType::I64]);
                c.operands(dice, &[number, exponent], &shape);
            }
            "And" | "Or" | "Xor" => c.operands(dice, &[DType::Bool; 2], &shape),
            "Max" | "Min" => c.operands(dice, &vec![number; several], &shape),
            "Sum" | "Mean" => c.operands(dice, &vec![float; several], &shape),
            "Where" => c.operands(dice, &[DType::Bool, number, number], &shape),
            "Identity" | "Sign" | "Abs" | "Shape" | "Size" | "Neg" | "Relu" => {
                c.data(dice, number, &shape, any_axis);
                if name == "Shape" && c.opset >= 15 {
                    c.set(dice, "start", -r, r);
                    c.set(dice, "end", -r, r);
                }
            }
            "Not" => c.data(dice, DType::Bool, &shape, any_axis),
            "Clip" => {
                c.data(dice, number, &shape, any_axis);
                for _ in 0..dice.below(3) {
                    let bound = numbers(dice, number, &[]);
                    c.plain(bound);
                }
            }
            "Cast" | "CastLike" => {
                c.data(dice, number, &shape, any_axis);
                if name == "Cast" {
                    c.set(dice, "to", 1, 16);
                } else {
                    let like = numbers(dice, float, &[2]);
                    c.plain(like);
                }
            }
            "ArgMax" | "ArgMin" | "Softmax" | "LogSoftmax" | "Flatten" | "TopK" => {
                c.data(dice, if name.ends_with("oftmax") { float } else { number }, &shape, any_axis);
                c.set(dice, "axis", -r, r);
                if name.starts_with("Arg") {
                    c.set(dice, "keepdims", 0, 1);
                }
                if name == "TopK" {
                    c.outputs = 2;
                    if c.opset < 10 {
                        c.attrs.set("k", 1);
                    } else {
                        let k = dice.between(0, 2);
                        c.plain(ints(&[k]));
                        c.set(dice, if c.opset < 11 { "axis" } else { "largest" }, 0, 1);
                    }
                }
            }
            "CumSum" => {
                let dtype = dice.pick(&[DType::F32, DType::I64]);
                c.data(dice, dtype, &shape, any_axis);
                let axis = dice.between(-r, r);
                c.plain(Tensor::scalar(axis));
                c.set(dice, "reverse", 0, 1);
                c.set(dice, "exclusive", 0, 1);
            }
            _ if name.starts_with("Reduce") => {
                c.data(dice, dice_reduce(name, number), &shape, any_axis);
                let axes: Vec<i64> = (0..dice.below(3)).map(|_| dice.between(-r, r)).collect();
                if c.opset < if name == "ReduceSum" { 13 } else { 18 } {
                    c.attrs.set("axes", axes);
                } else if !dice.one_in(4) {
                    c.plain(ints(&axes));
                    c.set(dice, "noop_with_empty_axes", 0, 1);
                }
                c.set(dice, "keepdims", 0, 1);
            }
            _ => c.draw_shaped(dice, &shape, number, any_axis),
        }
        c
    }

    /// Operators that move elements or contract axes.
    fn draw_shaped(&mut self, dice: &mut Dice, shape: &[usize], number: DType, any_axis: Option<usize>) {
        let r = shape.len() as i64;
        match self.name {
            "Reshape" => {
                self.data(dice, number, shape, any_axis);
                let target = match dice.below(4) {
                    0 => vec![-1],
                    1 => [&[1], shape].concat().iter().map(|&d| d as i64).collect(),
                    2 if shape.len() > 1 => {
                        let mut t: Vec<i64> = shape[1..].iter().map(|&d| d as i64).collect();
                        t[0] = -1;
                        t
                    }
                    _ => {
                        shape.iter().flat_map(|&d| if d == 6 { vec![3, 2] } else { vec![d as i64] }).collect()
                    }
                };
                self.plain(ints(&target));
            }
            "Expand" => {
                self.data(dice, number, shape, any_axis);
                let mut target: Vec<i64> = shape.iter().map(|&d| if d == 1 { 2 } else { d as i64 }).collect();
                if dice.one_in(2) {
                    target.insert(0, 2);
                }
                self.plain(ints(&target));
            }
            "Tile" => {
                self.data(dice, number, shape, any_axis);
                let repeats: Vec<i64> = shape.iter().map(|_| dice.pick(&[1, 1, 2, 0])).collect();
                self.plain(ints(&repeats));
            }
            "Squeeze" | "Unsqueeze" => {
                self.data(dice, number, shape, any_axis);
                let ones: Vec<i64> = (0..r).filter(|&i| shape[i as usize] == 1).collect();
                let axes = if self.name == "Squeeze" { ones } else { vec![dice.between(-r - 1, r)] };
                if self.opset < 13 {
                    self.attrs.set("axes", axes);
                } else {
                    self.plain(ints(&axes));
                }
            }
            "Transpose" => {
                self.data(dice, number, shape, any_axis);
                let mut perm: Vec<i64> = (0..r).collect();
                if r > 1 {
                    perm.swap(0, dice.below(r as usize));
                }
                if !dice.one_in(4) {
                    self.attrs.set("perm", perm);
                }
            }
            "Trilu" => {
                self.data(dice, number, shape, any_axis);
                if dice.one_in(2) {
                    let k = dice.between(-2, 2);
                    self.plain(Tensor::scalar(k));
                }
                self.set(dice, "upper", 0, 1);
            }
            "Concat" => {
                let axis = dice.between(-r, (r - 1).max(-r));
                let at = if axis < 0 { axis + r } else { axis } as usize;
                for _ in 0..=dice.below(3) {
                    let mut own = shape.to_vec();
                    if let Some(d) = own.get_mut(at) {
                        *d = dice.below(3);
                    }
                    self.data(dice, number, &own, any_axis);
                }
                self.attrs.set("axis", axis);
            }
            "Split" => {
                self.data(dice, number, shape, any_axis);
                let axis = dice.between(-r, r);
                self.attrs.set("axis", axis);
                self.outputs = 1 + dice.below(3);
                if self.opset >= 18 && dice.one_in(2) {
                    self.attrs.set("num_outputs", self.outputs as i64);
                }
            }
            "Slice" => self.draw_slice(dice, shape, number, any_axis),
            "ConstantOfShape" => {
                let dims: Vec<i64> = shape.iter().map(|&d| d as i64).collect();
                self.plain(ints(&dims));
            }
            "Range" => {
                for _ in 0..3 {
                    let bound = numbers(dice, dtype_of_range(number), &[]);
                    self.plain(bound);
                }
            }
            "MatMul" | "Gemm" => self.draw_product(dice),
            "Gather" | "GatherElements" | "GatherND" | "ScatterElements" | "ScatterND" | "TensorScatter" => {
                self.draw_indexed(dice, shape, number, any_axis);
            }
            _ => {
                let float = dice.pick(&FLOATS);
                self.data(dice, float, shape, any_axis);
            }
        }
    }

    fn draw_slice(&mut self, dice: &mut Dice, shape: &[usize], number: DType, any_axis: Option<usize>) {
        self.data(dice, number, shape, any_axis);
        let n = dice.below(shape.len() + 1);
        let starts: Vec<i64> = (0..n).map(|_| dice.pick(&[0, 0, 1, -2, 9])).collect();
        let ends: Vec<i64> = (0..n).map(|_| dice.pick(&[i64::MAX, i64::MAX, 2, -1, i64::MIN])).collect();
        let axes: Vec<i64> = (0..n as i64).rev().collect();
        if self.opset < 10 {
            self.attrs.set("starts", starts).set("ends", ends);
        } else {
            let steps: Vec<i64> = (0..n).map(|_| dice.pick(&[1, 1, 1, 2, -1])).collect();
            let given = dice.below(3);
            [starts, ends, axes, steps][..2 + given].iter().for_each(|v| self.plain(ints(v)));
        }
    }

    fn draw_product(&mut self, dice: &mut Dice) {
        let [m, k, n] = [0; 3].map(|_| dice.pick(&[1, 2, 3, 6]));
        let dtype = dice.pick(&[DType::F32, DType::I32]);
        let lead = dice.shape(0, 2);
        let gemm = self.name == "Gemm";
        let (ta, tb) = (gemm && dice.one_in(2), gemm && dice.one_in(2));
        let side = |lead: &[usize], r, c, t: bool| [lead, &if t { [c, r] } else { [r, c] }].concat();
        let a = if gemm { side(&[], m, k, ta) } else { side(&lead, m, k, false) };
        let b_lead: &[usize] = if gemm || dice.one_in(2) { &[] } else { &lead };
        let b = if !gemm && dice.one_in(5) { vec![k] } else { side(b_lead, k, n, tb) };
        let (on_a, on_b) = (dice.one_in(2), dice.one_in(3));
        let at = dice.below(a.len());
        let at_b = if b_lead.is_empty() { dice.below(b.len()) } else { at };
        self.data(dice, dtype, &a, on_a.then_some(at));
        self.data(dice, dtype, &b, on_b.then_some(at_b));
        if gemm {
            self.attrs.set("transA", i64::from(ta)).set("transB", i64::from(tb));
            if dice.one_in(2) {
                let c = dice.pick(&[[1, n], [m, n], [m, 1]]);
                let on_c = dice.below(3);
                self.data(dice, dtype, &c, on_c.checked_sub(1));
            }
        }
    }

    fn draw_indexed(&mut self, dice: &mut Dice, shape: &[usize], number: DType, any_axis: Option<usize>) {
        let r = shape.len();
        let axis = dice.below(r.max(1));
        let extent = shape.get(axis).copied().unwrap_or(0) as i64;
        let mut index =
            |n: usize| -> Vec<i64> { (0..n).map(|_| dice.between(-extent, (extent - 1).max(0))).collect() };
        match self.name {
            "Gather" => {
                let v = index(6);
                let dims = dice.pick(&[[6usize, 1], [3, 2], [2, 3]]);
                let (on_data, on_indices) = (dice.one_in(2), dice.one_in(2));
                self.data(dice, number, shape, if on_data { any_axis } else { None });
                let at = dice.below(2);
                let tokens = (on_indices && dims[at].is_multiple_of(TOKENS))
                    .then(|| TokenAxis { axis: at, inner: dims[at] / TOKENS });
                self.add(Tensor::from_slice(dims, &v).unwrap(), tokens);
                self.attrs.set("axis", axis as i64);
            }
            "GatherElements" | "ScatterElements" => {
                let v = index(shape.iter().product());
                self.data(dice, number, shape, any_axis);
                let tokens = self.inputs[0].as_ref().and_then(|i| i.tokens);
                let drop = dice.one_in(4);
                self.add(Tensor::from_slice(shape, &v).unwrap(), if drop { None } else { tokens });
                self.attrs.set("axis", axis as i64);
                if self.name == "ScatterElements" {
                    self.data(dice, number, shape, any_axis);
                    if self.opset >= 16 {
                        let how = dice.pick(&["none", "add", "mul", "max"]);
                        self.attrs.set("reduction", how);
                    }
                }
            }
            "TensorScatter" => {
                self.data(dice, number, &[2, 4, 3], None);
                self.data(dice, number, &[2, 2, 3], any_axis);
                let at = [dice.between(0, 4), dice.between(0, 3)];
                self.plain(ints(&at));
                let mode = dice.pick(&["linear", "circular"]);
                self.attrs.set("mode", mode);
            }
            _ => {
                let data = [3, 2, 3];
                let batch = if self.name == "GatherND" { dice.below(2) } else { 0 };
                let v: Vec<i64> = (0..6).map(|_| dice.between(-2, 1)).collect();
                let (on_data, on_indices) = (dice.one_in(2), dice.one_in(2));
                let at = dice.below(3);
                self.data(dice, number, &data, on_data.then_some(at));
                let tokens = on_indices.then_some(TokenAxis { axis: 0, inner: 1 });
                self.add(Tensor::from_slice([3, 2], &v).unwrap(), tokens);
                if self.name == "ScatterND" {
                    self.data(dice, number, &[3, 3], None);
                } else {
                    self.attrs.set("batch_dims", batch as i64);
                }
            }
        }
    }
}

/// Sums are not defined for the narrow integers.
fn dice_reduce(name: &str, number: DType) -> DType {
    if number == DType::U8 && !name.ends_with("Max") && !name.ends_with("Min") { DType::I32 } else { number }
}

fn dtype_of_range(number: DType) -> DType {
    if number == DType::U8 { DType::I64 } else { number }
}
