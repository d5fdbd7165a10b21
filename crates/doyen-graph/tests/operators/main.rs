//! Properties that hold for every plain operator, on drawn attributes and inputs:
//!
//! * nothing panics, whatever the numbers are;
//! * what inference says at load, from less than everything, agrees with what evaluation gives;
//! * the token-axis rule is true: one token's slice of the output is what the operator gives for that token alone.

mod draw;

use doyen_graph::ir::{Constant, Dim, Fact};
use doyen_graph::ops::{Op, TokenAxis, Trace, Traced};
use doyen_tensor::{Shape, Tensor};
use draw::{Case, Dice, OPERATORS, TOKENS};
use std::collections::BTreeMap;

const DRAWS: u64 = 400;

fn cases() -> impl Iterator<Item = (u64, Case)> {
    let each = |(n, &name): (usize, &&'static str)| {
        (0..DRAWS).map(move |i| {
            let seed = n as u64 * DRAWS + i;
            (seed, Case::draw(name, &mut Dice::new(seed)))
        })
    };
    OPERATORS.iter().enumerate().flat_map(each).collect::<Vec<_>>().into_iter()
}

fn tensors(case: &Case) -> Vec<Option<&Tensor>> {
    case.inputs.iter().map(|i| i.as_ref().map(|i| &i.tensor)).collect()
}

fn known(t: &Tensor) -> Fact {
    Fact::from(std::sync::Arc::new(Constant::from(t.clone())))
}

/// The fact with some of it forgotten.
fn weaker(fact: Fact, dice: &mut Dice) -> Fact {
    if dice.one_in(4) {
        return fact;
    }
    let mut shape = fact.shape.unwrap_or_default();
    for (i, d) in shape.iter_mut().enumerate() {
        match dice.below(4) {
            0 => *d = Dim::Unknown,
            1 => *d = Dim::from(format!("d{i}_{d}").as_str()),
            _ => {}
        }
    }
    let shape = if dice.one_in(5) { None } else { Some(shape) };
    Fact { dtype: if dice.one_in(5) { None } else { fact.dtype }, shape, constant: None }
}

fn agrees(fact: &Fact, t: &Tensor) -> bool {
    fact.dtype.is_none_or(|d| d == t.dtype())
        && fact.shape.as_ref().is_none_or(|s| {
            s.len() == t.shape().len()
                && s.iter().zip(t.shape().iter()).all(|(d, &n)| d.known().is_none_or(|k| k == n))
        })
        && fact.constant.as_ref().is_none_or(|c| c.to_tensor().is_ok_and(|c| c == *t))
}

#[test]
fn inference_agrees_with_evaluation() {
    let mut ok: BTreeMap<&str, u32> = BTreeMap::new();
    for (seed, case) in cases() {
        let Ok(op) = Op::parse("", case.name, case.opset, &case.attrs) else { continue };
        let Ok(outputs) = op.eval(&tensors(&case), case.outputs) else { continue };
        *ok.entry(case.name).or_default() += 1;
        let mut dice = Dice::new(seed ^ 0x5eed);
        for round in 0..3 {
            let facts: Vec<Option<Fact>> = tensors(&case)
                .into_iter()
                .map(|t| t.map(known).map(|f| if round == 0 { f } else { weaker(f, &mut dice) }))
                .collect();
            let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
            let inferred = op.infer_outputs(&facts, case.outputs);
            let inferred = inferred.unwrap_or_else(|e| panic!("seed {seed}, {case:?}: {e} from {facts:?}"));
            assert!(inferred.len() >= case.outputs.min(outputs.len()), "seed {seed}, {case:?}");
            for (f, t) in inferred.iter().zip(&outputs) {
                assert!(agrees(f, t), "seed {seed}, {case:?}: inferred {f:?} from {facts:?}, computed {t:?}");
            }
        }
    }
    for name in OPERATORS {
        assert!(
            ok.get(name).is_some_and(|&n| n > DRAWS as u32 / 50),
            "{name} was hardly run: {:?}",
            ok.get(name)
        );
    }
}

/// Elements of token `t` along the axis, or the tensor as it is.
fn only(x: &Tensor, tokens: Option<TokenAxis>, t: usize) -> Tensor {
    let Some(a) = tokens else { return x.clone() };
    let outer: usize = x.shape()[..a.axis].iter().product();
    let size = x.dtype().bits() / 8;
    let row = x.shape()[a.axis + 1..].iter().product::<usize>() * size;
    let mut out = Vec::new();
    for o in 0..outer {
        let start = (o * x.shape()[a.axis] + t * a.inner) * row;
        out.extend_from_slice(&x.bytes()[start..start + a.inner * row]);
    }
    let mut shape = x.shape().to_vec();
    shape[a.axis] = a.inner;
    Tensor::from_bytes(x.dtype(), shape, out.into()).unwrap()
}

const fn axis(t: Trace) -> Option<TokenAxis> {
    match t {
        Trace::Tokens(a) => Some(a),
        Trace::Absent => None,
    }
}

#[test]
fn token_axis_rules_are_true() {
    let mut kept: BTreeMap<&str, u32> = BTreeMap::new();
    for (seed, case) in cases() {
        if case.inputs.iter().flatten().all(|i| i.tokens.is_none()) {
            continue;
        }
        let Ok(op) = Op::parse("", case.name, case.opset, &case.attrs) else { continue };
        let Ok(outputs) = op.eval(&tensors(&case), case.outputs) else { continue };
        let shapes: Vec<Shape> = outputs.iter().map(|t| t.shape().clone()).collect();
        let constants: Vec<Option<Constant>> =
            tensors(&case).into_iter().map(|t| t.map(|t| Constant::from(t.clone()))).collect();
        let traced: Vec<Option<Traced<'_>>> = (case.inputs.iter().zip(&constants))
            .map(|(i, c)| {
                let i = i.as_ref()?;
                let constant = if i.tokens.is_none() { c.as_ref() } else { None };
                Some(Traced {
                    trace: i.tokens.map_or(Trace::Absent, Trace::Tokens),
                    shape: i.tensor.shape(),
                    constant,
                })
            })
            .collect();
        let Ok(traces) = op.trace(&traced, &shapes) else { continue };
        assert!(traces.len() >= outputs.len(), "seed {seed}, {case:?}");
        *kept.entry(case.name).or_default() += 1;
        for t in 0..TOKENS {
            let mut alone: Vec<Option<Tensor>> =
                (case.inputs.iter()).map(|i| i.as_ref().map(|i| only(&i.tensor, i.tokens, t))).collect();
            // The shape that Reshape and Expand are told counts the tokens as well.
            if ["Reshape", "Expand"].contains(&case.name) {
                let own = only(&outputs[0], axis(traces[0]), t);
                let dims: Vec<i64> = own.shape().iter().map(|&d| d as i64).collect();
                alone[1] = Some(Tensor::from_slice([dims.len()], &dims).unwrap());
            }
            let inputs: Vec<Option<&Tensor>> = alone.iter().map(Option::as_ref).collect();
            let own = op.eval(&inputs, case.outputs).unwrap_or_else(|e| panic!("seed {seed}, {case:?}: {e}"));
            for ((own, all), &trace) in own.iter().zip(&outputs).zip(&traces) {
                assert_eq!(own, &only(all, axis(trace), t), "seed {seed}, token {t}, {case:?}, {trace:?}");
                assert_eq!(
                    own.bytes(),
                    only(all, axis(trace), t).bytes(),
                    "seed {seed}, token {t}, {case:?}"
                );
            }
        }
    }
    for name in OPERATORS.iter().filter(|n| !draw::MIXES.contains(n)) {
        assert!(
            kept.get(name).is_some_and(|&n| n >= 3),
            "{name} hardly kept its tokens: {:?}",
            kept.get(name)
        );
    }
}

/// Numbers no model has must be errors, quickly and without panics.
#[test]
fn hostile_numbers_are_refused() {
    for (seed, case) in cases() {
        let mut dice = Dice::new(seed ^ 0xbad);
        let hostile = case.hostile(&mut dice);
        let Ok(op) = Op::parse("", hostile.name, hostile.opset, &hostile.attrs) else { continue };
        let inputs = tensors(&hostile);
        let _ = op.eval(&inputs, hostile.outputs);
        let facts: Vec<Option<Fact>> =
            inputs.iter().map(|t| t.map(known).map(|f| weaker(f, &mut dice))).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let _ = op.infer_outputs(&facts, hostile.outputs);
    }
}
