//! Values, constants and nodes of the lowered graph under construction; how operators without state become nodes.
//!
//! Knows nothing of where extents come from: `decoder` gives extents that count tokens, `case` gives numbers.

use super::LowerError;
use crate::{
    ir::{Constant, Graph, Node, ValueId},
    lowered::{ConstId, Experts, Extent, LConst, LNode, LOp, LValue, LValueId, Lowered, Operand, Route},
    ops::Op,
};
use doyen_tensor::DType;
use std::{collections::HashMap, sync::Arc};

/// The lowered graph so far, and where the exported values are in it.
pub(super) struct Emitter<'a> {
    graph: &'a Graph,
    pub(super) out: Lowered,
    values: HashMap<ValueId, LValueId>,
    constants: HashMap<ValueId, ConstId>,
}

/// The type a value is computed in: floats are float32, whatever the file declares.
pub(super) const fn compute_type(declared: DType) -> DType {
    if declared.is_float() { DType::F32 } else { declared }
}

impl<'a> Emitter<'a> {
    pub(super) fn new(graph: &'a Graph) -> Self {
        Self { graph, out: Lowered::default(), values: HashMap::new(), constants: HashMap::new() }
    }

    /// A value under a name of its own.
    pub(super) fn fresh(&mut self, name: String, declared: DType, dims: Vec<Extent>) -> LValueId {
        let id = LValueId(self.out.values.len() as u32);
        self.out.values.push(LValue { name, dtype: compute_type(declared), declared, dims });
        id
    }

    /// The value that stands for an exported one.
    pub(super) fn value(&mut self, id: ValueId, declared: DType, dims: Vec<Extent>) -> LValueId {
        let name = self.graph.value(id).name.clone();
        let value = self.fresh(name, declared, dims);
        self.values.insert(id, value);
        value
    }

    /// Where an exported value is.
    pub(super) fn find(&self, id: ValueId) -> Option<LValueId> {
        self.values.get(&id).copied()
    }

    /// The constant that an exported value is, if it is one.
    pub(super) fn constant(&mut self, id: ValueId) -> Option<Operand> {
        if let Some(&c) = self.constants.get(&id) {
            return Some(Operand::Const(c));
        }
        let value = self.graph.value(id);
        let data = Arc::clone(value.fact.constant.as_ref()?);
        Some(Operand::Const(self.keep(id, value.name.clone(), data)))
    }

    /// A constant that stands for no exported value.
    pub(super) fn constant_of(&mut self, name: String, data: Arc<Constant>) -> ConstId {
        let c = ConstId(self.out.constants.len() as u32);
        self.out.constants.push(LConst { name, data });
        c
    }

    /// A constant that an exported value turned out to be.
    pub(super) fn keep(&mut self, id: ValueId, name: String, data: Arc<Constant>) -> ConstId {
        let c = self.constant_of(name, data);
        self.constants.insert(id, c);
        c
    }

    pub(super) fn push(
        &mut self,
        name: &str,
        op: LOp,
        inputs: Vec<Option<Operand>>,
        outputs: Vec<Option<LValueId>>,
    ) {
        self.out.nodes.push(LNode { name: name.to_owned(), op, inputs, outputs });
    }

    /// An operator without state, on operands in its own order. Movements of whole values become views of the first.
    pub(super) fn plain(
        &mut self,
        node: &Node,
        mut inputs: Vec<Option<Operand>>,
        outputs: Vec<Option<LValueId>>,
    ) {
        let op = if self.is_view(node, &inputs, &outputs) {
            inputs.truncate(1);
            LOp::View
        } else {
            LOp::Op(node.op.clone())
        };
        self.push(&node.name, op, inputs, outputs);
    }

    fn is_view(&self, node: &Node, inputs: &[Option<Operand>], outputs: &[Option<LValueId>]) -> bool {
        let (Some(Some(Operand::Value(x))), [Some(y)]) = (inputs.first(), outputs) else { return false };
        match node.op {
            Op::Identity(_) | Op::Reshape(_) | Op::Squeeze(_) | Op::Unsqueeze(_) | Op::Flatten(_) => true,
            Op::Cast(_) => self.out.value(*x).dtype == self.out.value(*y).dtype,
            _ => false,
        }
    }

    /// QMoE or MoE as routing and experts. `logits` are the router's extents `[tokens, experts]`.
    ///
    /// # Errors
    /// When a weight is not constant or the number of experts is not known.
    pub(super) fn experts(
        &mut self,
        node: &Node,
        inputs: &[Option<Operand>],
        output: LValueId,
    ) -> Result<(), LowerError> {
        let (routing, mixing_at) = match &node.op {
            Op::QMoe(op) => (op.routing, Some(14)),
            Op::Moe(op) => (op.routing, None),
            _ => return Err(LowerError::node(node, "it is no mixture of experts")),
        };
        let at = |i: usize| inputs.get(i).copied().flatten();
        let (Some(x), Some(Operand::Value(logits))) = (at(0), at(1)) else {
            return Err(LowerError::node(
                node,
                "input router_probs: expected a value of the run, found a constant",
            ));
        };
        let [tokens, Extent::Fixed(experts)] = self.out.value(logits).dims[..] else {
            return Err(LowerError::node(node, "input router_probs: expected [tokens, experts]"));
        };
        let weights: Vec<Option<Operand>> =
            (2..inputs.len()).map(|i| at(i).filter(|_| Some(i) != mixing_at)).collect();
        if let Some(i) = weights.iter().position(|w| matches!(w, Some(Operand::Value(_)))) {
            let name = node.inputs[i + 2].map(|v| self.graph.value(v).name.clone()).unwrap_or_default();
            return Err(LowerError::node(node, format!("input {} ({name:?}): expected a constant", i + 2)));
        }
        let k = routing.k;
        let dims = vec![tokens, Extent::Fixed(k)];
        let ids = self.fresh(format!("{}/experts", node.name), DType::I32, dims.clone());
        let mix = self.fresh(format!("{}/weights", node.name), DType::F32, dims);
        let route = Route { experts, k, normalize: routing.normalize, sparse_mixer: routing.sparse_mixer };
        let mixing = mixing_at.and_then(at);
        self.push(
            &format!("{}/route", node.name),
            LOp::Route(route),
            vec![Some(Operand::Value(logits)), mixing],
            vec![Some(ids), Some(mix)],
        );
        let mut operands = vec![Some(x), Some(Operand::Value(ids)), Some(Operand::Value(mix))];
        operands.extend(weights);
        let bank = Experts { op: node.op.clone(), experts, k };
        self.push(&node.name, LOp::Experts(bank), operands, vec![Some(output)]);
        Ok(())
    }
}
