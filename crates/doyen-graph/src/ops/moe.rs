//! `com.microsoft::MoE`: mixture of experts over float weights (operator contract, section 2.3).
//!
//! Routing is in [`super::route`], the activation in [`super::activation`], the reference in `super::experts`.

use super::activation::Activation;
use super::args::{ACTIVATIONS, Want, back, dim_of, expect_if, expect_rank, product, same_type};
use super::experts::{self, Expert, Linear, Rows};
use super::qmoe::Projection;
use super::route::Routing;
use super::util::{at_most, check_type, fact_of, optional, outputs_of, required};
use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{ExpertId, FloatView, Shape, Tensor};

/// The operator.
#[derive(Debug, Clone, PartialEq)]
pub struct Moe {
    /// Top-k rule.
    pub routing: Routing,
    /// Between FC1 and FC2.
    pub activation: Activation,
}

/// Names and indices of a projection's weights and bias.
const fn names(p: Projection) -> [(&'static str, usize); 2] {
    match p {
        Projection::Fc1 => [("fc1_experts_weights", 2), ("fc1_experts_bias", 3)],
        Projection::Fc2 => [("fc2_experts_weights", 4), ("fc2_experts_bias", 5)],
        Projection::Fc3 => [("fc3_experts_weights", 6), ("fc3_experts_bias", 7)],
    }
}

/// The checked weight operands of one node.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// Experts E.
    pub experts: usize,
    /// Hidden size H.
    pub hidden: usize,
    /// Intermediate size I.
    pub inter: usize,
    /// Rows of FC1: I, or 2I when gate and linear share it.
    pub fc1_rows: usize,
    banks: [Option<(FloatView<'a>, Option<FloatView<'a>>)>; 3],
}

/// A float matrix `[rows, cols]`, row-major, with its bias.
#[derive(Debug, Clone, Copy)]
pub struct FloatMatrix<'a> {
    /// Output rows.
    pub rows: usize,
    /// Input columns.
    pub cols: usize,
    /// The elements.
    pub values: FloatView<'a>,
    /// One value a row, if there is a bias.
    pub bias: Option<FloatView<'a>>,
}

impl<'a> Operands<'a> {
    /// The matrix of one expert; `None` without that projection or beyond the experts.
    pub fn matrix(&self, projection: Projection, expert: ExpertId) -> Option<FloatMatrix<'a>> {
        let (values, bias) = self.banks[projection as usize]?;
        let (rows, cols) = match projection {
            Projection::Fc1 => (self.fc1_rows, self.hidden),
            Projection::Fc2 => (self.hidden, self.inter),
            Projection::Fc3 => (self.inter, self.hidden),
        };
        let e = expert.index();
        (e < self.experts).then(|| FloatMatrix {
            rows,
            cols,
            values: values.slice(e * rows * cols, rows * cols),
            bias: bias.map(|b| b.slice(e * rows, rows)),
        })
    }

    /// Whether FC3 is there.
    pub const fn has_fc3(&self) -> bool {
        self.banks[2].is_some()
    }

    fn expert(&self, e: usize) -> Result<Expert<'a>, OpError> {
        let linear = |p: Projection| {
            self.matrix(p, ExpertId(e as u32)).map(|m| Linear {
                rows: Rows::Float { rows: m.rows, cols: m.cols, values: m.values },
                bias: m.bias,
            })
        };
        let missing = || OpError::other(format!("expert {e} has no weights"));
        Ok(Expert {
            fc1: linear(Projection::Fc1).ok_or_else(missing)?,
            fc2: linear(Projection::Fc2).ok_or_else(missing)?,
            fc3: linear(Projection::Fc3),
        })
    }
}

/// Extents of a bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Experts E.
    pub experts: usize,
    /// Hidden size H.
    pub hidden: usize,
    /// Intermediate size I.
    pub inter: usize,
    /// Rows of FC1: I, or 2I when gate and linear share it.
    pub fc1_rows: usize,
}

struct Sizes {
    experts: Want,
    hidden: Want,
    inter: Want,
    fc1_rows: Want,
}

impl Moe {
    /// The extents of a bank from what is known of its inputs, from index 2 on.
    ///
    /// # Errors
    /// Every check that [`OpDef::infer`] makes of these inputs, and an extent that is not known.
    pub fn extents(&self, inputs: &[Option<&Fact>]) -> Result<Extents, OpError> {
        let facts: Vec<Option<&Fact>> = [None, None].into_iter().chain(inputs.iter().copied()).collect();
        let sizes = self.weights(&facts, None)?;
        let known = |size: Want, what: &str| size.ok_or_else(|| OpError::other(format!("no {what}")));
        Ok(Extents {
            experts: known(sizes.experts, "experts")?,
            hidden: known(sizes.hidden, "hidden size")?,
            inter: known(sizes.inter, "intermediate size")?,
            fc1_rows: known(sizes.fc1_rows, "FC1 rows")?,
        })
    }

    /// The weight operands as views: the inputs from index 2 on, in the operator's order.
    ///
    /// # Errors
    /// Every check that [`OpDef::infer`] makes of these inputs.
    pub fn operands<'a>(&self, inputs: &[Option<&'a Tensor>]) -> Result<Operands<'a>, OpError> {
        let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(fact_of)).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let Extents { experts, hidden, inter, fc1_rows } = self.extents(&facts)?;
        let mut banks = [None; 3];
        for (slot, p) in banks.iter_mut().zip(Projection::ALL) {
            let [w, b] = names(p);
            if let Some(w) = optional(inputs, w.1 - 2) {
                let bias = optional(inputs, b.1 - 2).map(Tensor::float_view).transpose()?;
                *slot = Some((w.float_view()?, bias));
            }
        }
        Ok(Operands { experts, hidden, inter, fc1_rows, banks })
    }

    /// Checks the weight inputs (of all inputs, by index), given the input's hidden size where it is known.
    fn weights(&self, inputs: &[Option<&Fact>], hidden: Want) -> Result<Sizes, OpError> {
        let has_fc3 = optional(inputs, 6).is_some();
        if has_fc3 && self.activation.is_fused(true) {
            let expected = "nothing: with swiglu_fusion 1 or 2 the linear rows are in FC1";
            return Err(OpError::input("fc3_experts_weights", expected, "FC3 weights"));
        }
        if !has_fc3 && optional(inputs, 7).is_some() {
            return Err(OpError::input("fc3_experts_bias", "nothing without fc3_experts_weights", "a value"));
        }
        let w1 = required(inputs, 2, "fc1_experts_weights")?;
        let w2 = required(inputs, 4, "fc2_experts_weights")?;
        expect_rank("fc1_experts_weights", w1, &[3])?;
        expect_rank("fc2_experts_weights", w2, &[3])?;
        let factor = self.activation.fusion(has_fc3).rows_per_value();
        let e = dim_of(Some(w1), 0).or(dim_of(Some(w2), 0));
        let h = hidden.or(dim_of(Some(w2), 1)).or(dim_of(Some(w1), 2));
        let i = dim_of(Some(w2), 2).or(dim_of(Some(w1), 1).map(|n| n / factor));
        let fc1_rows = product("fc1_experts_weights", &[i, Some(factor)])?;
        for p in Projection::ALL {
            let [w, b] = names(p);
            let (n, k) = match p {
                Projection::Fc1 => (fc1_rows, h),
                Projection::Fc2 => (h, i),
                Projection::Fc3 => (i, h),
            };
            let why =
                if p == Projection::Fc1 && factor == 2 { "E, 2*I, H" } else { "experts, rows, columns" };
            expect_if(w.0, optional(inputs, w.1), &[e, n, k], why)?;
            expect_if(b.0, optional(inputs, b.1), &[e, n], "experts, rows")?;
        }
        Ok(Sizes { experts: e, hidden: h, inter: i, fc1_rows })
    }
}

impl OpDef for Moe {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { routing: Routing::parse(attrs)?, activation: Activation::parse(attrs)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 8)?;
        let x = required(inputs, 0, "input")?;
        let probs = required(inputs, 1, "router_probs")?;
        let dtype = check_type("input", x, ACTIVATIONS)?;
        expect_rank("input", x, &[2, 3])?;
        same_type("router_probs", Some(probs), dtype, "input")?;
        for p in Projection::ALL {
            for (name, i) in names(p) {
                same_type(name, optional(inputs, i), dtype, "input")?;
            }
        }
        let sizes = self.weights(inputs, back(x, 0))?;
        let rows: Vec<Want> =
            x.shape.as_ref().map_or(vec![None], |s| s[..s.len() - 1].iter().map(Dim::known).collect());
        self.routing.check(probs, None, product("input", &rows)?, sizes.experts)?;
        Ok(vec![Fact { constant: None, ..x.clone() }])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        outputs_of(self, inputs)?;
        let x = required(inputs, 0, "input")?;
        let operands = self.operands(&inputs[2..])?;
        let routes = experts::routes(&self.routing, required(inputs, 1, "router_probs")?, None)?;
        let y = experts::run(x, operands.hidden, &routes, operands.experts, self.activation, |e| {
            operands.expert(e)
        })?;
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        experts::trace(inputs, &[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attr;

    fn moe(attrs: &[(&str, Attr)]) -> Moe {
        let mut a = Attrs::default();
        for (k, v) in attrs {
            a.set(*k, v.clone());
        }
        Moe::parse("MoE", 1, &mut a).unwrap()
    }

    fn t(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    /// Two experts that scale by 1 and 10: the routing weights show in the output.
    #[test]
    fn routing_shows_in_the_output() {
        let op = moe(&[("k", Attr::Int(2)), ("activation_type", "identity".into())]);
        let (x, l) = (t(&[1, 1], &[1.0]), t(&[1, 2], &[0.0, 0.0]));
        let (w1, w2) = (t(&[2, 1, 1], &[1.0, 1.0]), t(&[2, 1, 1], &[1.0, 10.0]));
        let y = op.eval(&[Some(&x), Some(&l), Some(&w1), None, Some(&w2)], 1).unwrap();
        assert_eq!(y[0].to_f32().unwrap(), [5.5]);
    }

    /// Interleaved, concatenated and separate rows are the same model.
    #[test]
    fn the_three_layouts_agree() {
        let gate = [0.5f32, -1.0, 2.0];
        let linear = [1.5f32, 0.25, -0.75];
        let pairs: Vec<f32> = gate.iter().zip(&linear).flat_map(|(&a, &b)| [a, b]).collect();
        let rows: Vec<f32> = gate.iter().chain(&linear).copied().collect();
        let (x, l) = (t(&[2, 1], &[1.0, -2.0]), t(&[2, 1], &[0.0, 0.0]));
        let w2 = t(&[1, 1, 3], &[1.0, 2.0, 3.0]);
        let swiglu =
            |fusion: i64| moe(&[("activation_type", "swiglu".into()), ("swiglu_fusion", Attr::Int(fusion))]);
        let run = |op: &Moe, w1: &Tensor, w3: Option<&Tensor>| {
            op.eval(&[Some(&x), Some(&l), Some(w1), None, Some(&w2), None, w3], 1).unwrap().remove(0)
        };
        let interleaved = run(&swiglu(1), &t(&[1, 6, 1], &pairs), None);
        assert_eq!(run(&swiglu(2), &t(&[1, 6, 1], &rows), None), interleaved);
        assert_eq!(run(&swiglu(0), &t(&[1, 6, 1], &pairs), None), interleaved);
        let (w1, w3) = (t(&[1, 3, 1], &gate), t(&[1, 3, 1], &linear));
        assert_eq!(run(&swiglu(0), &w1, Some(&w3)), interleaved);
        assert_eq!(run(&moe(&[("activation_type", "silu".into())]), &w1, Some(&w3)), interleaved);
    }

    #[test]
    fn shapes_are_checked() {
        let op = moe(&[("activation_type", "swiglu".into()), ("k", Attr::Int(3))]);
        let (x, l) = (t(&[1, 1], &[1.0]), t(&[1, 2], &[0.0, 0.0]));
        let (w1, w2) = (t(&[2, 1, 1], &[1.0, 1.0]), t(&[2, 1, 1], &[1.0, 10.0]));
        let e = op.eval(&[Some(&x), Some(&l), Some(&w1), None, Some(&w2)], 1).unwrap_err().to_string();
        assert!(e.contains("fc1_experts_weights"), "{e}");
        let w1 = t(&[2, 2, 1], &[1.0; 4]);
        let e = op.eval(&[Some(&x), Some(&l), Some(&w1), None, Some(&w2)], 1).unwrap_err().to_string();
        assert!(e.starts_with("attribute k:"), "{e}");
    }
}
