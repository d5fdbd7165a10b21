//! Lowering of a decoder: walks the nodes once, with the token axis of every value at hand.

use super::{
    LowerError, LowerSpec, attention,
    class::{self, Class},
    emit::Emitter,
    meaning::{Meaning, meaning},
    ports::{Ports, Role},
    probe::{self, Lengths, Run},
    recurrent, sdpa,
    sight::{self, Sight},
    written,
};
use crate::{
    ir::{Constant, Dim, Graph, Node, ValueId},
    lowered::{Extent, LValueId, Lowered, Operand},
    ops::{Op, TokenAxis, Trace, Traced},
};
use doyen_tensor::{DType, Shape};
use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

/// A decoder being lowered.
pub(super) struct Decoder<'a> {
    pub(super) graph: &'a Graph,
    pub(super) spec: &'a LowerSpec,
    pub(super) ports: Ports,
    pub(super) emit: Emitter<'a>,
    class: Vec<Class>,
    producers: Vec<Option<crate::ir::NodeId>>,
    /// Runs of all nodes: two numbers of new tokens, then the first again with another past.
    wide: [Run<'a>; 3],
    /// Runs of the nodes that only lengths determine, at many lengths; the wide ones included.
    runs: Vec<Run<'a>>,
    meanings: HashMap<ValueId, Meaning>,
    axes: HashMap<ValueId, TokenAxis>,
    positions: Option<LValueId>,
    /// States that a node has taken.
    pub(super) caches: BTreeSet<usize>,
}

/// Lowers without rewriting.
pub(super) fn lower(graph: &Graph, spec: &LowerSpec) -> Result<Lowered, LowerError> {
    let mut decoder = Decoder::probe(graph, spec)?;
    let written = written::Found::new(&decoder);
    for (n, node) in graph.nodes.iter().enumerate() {
        let is_data = node.outputs.iter().flatten().any(|v| decoder.class[v.index()] == Class::Data);
        if is_data && !written.lower(&mut decoder, n)? {
            decoder.node(node)?;
        }
    }
    decoder.finish()
}

impl<'a> Decoder<'a> {
    fn probe(graph: &'a Graph, spec: &'a LowerSpec) -> Result<Self, LowerError> {
        let ports = Ports::resolve(graph, spec)?;
        let class = class::classify(graph, &ports);
        let some = class::length_nodes(graph, &class);
        let all = vec![true; graph.nodes.len()];
        let run = |nodes: &[bool], at| probe::run(graph, &ports, &class, nodes, at);
        let [t1, t2] = token_counts(graph);
        let wide = [
            run(&all, Lengths::new(t2, t1))?,
            run(&all, Lengths::new(t1, t2))?,
            run(&all, Lengths::new(t1, t1))?,
        ];
        let mut runs = wide.to_vec();
        for at in probe::lengths(graph, &some) {
            runs.push(run(&some, at)?);
        }
        let emit = Emitter::new(graph);
        let producers = graph.producers();
        let (meanings, axes) = (HashMap::new(), HashMap::new());
        let mut out = Self {
            graph,
            spec,
            ports,
            emit,
            class,
            producers,
            wide,
            runs,
            meanings,
            axes,
            positions: None,
            caches: BTreeSet::new(),
        };
        out.tokens();
        Ok(out)
    }

    fn tokens(&mut self) {
        let found = self.ports.roles.iter().find(|(_, role)| **role == Role::Tokens).map(|(id, _)| *id);
        if let Some(id) = found {
            let dims = vec![Extent::Fixed(1), Extent::Tokens(1)];
            self.emit.out.tokens = Some(self.emit.value(id, DType::I64, dims));
            self.axes.insert(id, TokenAxis { axis: 1, inner: 1 });
        }
    }

    /// Running positions, made when first read.
    fn positions(&mut self) -> LValueId {
        if let Some(id) = self.positions {
            return id;
        }
        let dims = vec![Extent::Fixed(1), Extent::Tokens(1)];
        let name = self.spec.position_ids.clone().unwrap_or_else(|| "positions".into());
        let id = self.emit.fresh(name, DType::I64, dims);
        self.emit.out.positions = Some(id);
        self.positions = Some(id);
        id
    }

    pub(super) fn meaning(&mut self, id: ValueId) -> Meaning {
        if let Some(m) = self.meanings.get(&id) {
            return m.clone();
        }
        let m = meaning(&self.runs, id);
        self.meanings.insert(id, m.clone());
        m
    }

    /// What a mask means; see [`sight::sight`].
    pub(super) fn mask_sight(&self, id: ValueId, short: bool) -> Result<Sight, String> {
        sight::sight(&self.runs, id, short)
    }

    pub(super) fn class(&self, id: ValueId) -> Class {
        self.class[id.index()]
    }

    /// Runs of all nodes.
    pub(super) const fn wide(&self) -> &[Run<'a>; 3] {
        &self.wide
    }

    fn axis(&self, id: ValueId) -> Option<TokenAxis> {
        self.axes.get(&id).copied()
    }

    fn node(&mut self, node: &Node) -> Result<(), LowerError> {
        match &node.op {
            Op::GroupQueryAttention(op) => return attention::lower(self, node, op),
            Op::LinearAttention(op) => return recurrent::linear_attention(self, node, op),
            Op::CausalConv(op) => return recurrent::causal_conv(self, node, op),
            Op::Attention(op) => return sdpa::attention(self, node, op),
            Op::MultiHeadAttention(op) => return sdpa::multi_head(self, node, op),
            _ => {}
        }
        let is_past = |v: &ValueId| matches!(self.ports.roles.get(v), Some(Role::Past(_) | Role::State(_)));
        if let Some(past) = node.inputs.iter().flatten().find(|v| is_past(v)) {
            let name = &self.graph.value(*past).name;
            let reason = format!(
                "it reads the state {name:?}; only an attention, LinearAttention and CausalConvWithState may"
            );
            return Err(LowerError::node(node, reason));
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (i, v) in node.inputs.iter().enumerate() {
            inputs.push(match v {
                None => None,
                Some(v) => self.operand(node, i, *v)?,
            });
        }
        let traces = self.trace(node)?;
        let mut outputs = Vec::with_capacity(node.outputs.len());
        for (v, trace) in node.outputs.iter().zip(traces) {
            outputs.push(match v {
                None => None,
                Some(v) => Some(self.output(node, *v, trace)?),
            });
        }
        if let (Op::QMoe(_) | Op::Moe(_), [Some(y)]) = (&node.op, outputs.as_slice()) {
            return self.emit.experts(node, &inputs, *y);
        }
        self.emit.plain(node, inputs, outputs);
        Ok(())
    }

    /// What a node of the lowered graph reads for an exported input; `None` for a shape that counts tokens (the
    /// extents of the outputs say it).
    pub(super) fn operand(
        &mut self,
        node: &Node,
        index: usize,
        id: ValueId,
    ) -> Result<Option<Operand>, LowerError> {
        let name = &self.graph.value(id).name;
        match self.class(id) {
            Class::Constant => Ok(self.emit.constant(id)),
            Class::Data => match self.emit.find(id) {
                Some(v) => Ok(Some(Operand::Value(v))),
                None => Err(LowerError::node(node, format!("{name:?} is no value of a step"))),
            },
            Class::Length => match self.meaning(id) {
                Meaning::Constant(t) => {
                    let c = self.emit.keep(id, name.clone(), Arc::new(Constant::from(t)));
                    Ok(Some(Operand::Const(c)))
                }
                Meaning::Positions => {
                    self.axes.insert(id, TokenAxis { axis: 1, inner: 1 });
                    Ok(Some(Operand::Value(self.positions())))
                }
                Meaning::Extents if is_shape_operand(node, index) => Ok(None),
                Meaning::Other(found) => self.own_node(node, id, &found),
                m => {
                    let what = match m {
                        Meaning::Extents => "the number of new tokens",
                        _ => "the length of the sequence",
                    };
                    let reason =
                        format!("{name:?} is {what}, which a value of a ragged batch cannot depend on");
                    Err(LowerError::node(node, reason))
                }
            },
        }
    }

    /// Lowers the node that makes a value of no known meaning, in the hope that its inputs have one.
    fn own_node(&mut self, reader: &Node, id: ValueId, found: &str) -> Result<Option<Operand>, LowerError> {
        if let Some(v) = self.emit.find(id) {
            return Ok(Some(Operand::Value(v)));
        }
        let Some(producer) = self.producers[id.index()] else {
            let name = &self.graph.value(id).name;
            return Err(LowerError::node(reader, format!("{name:?} is {found}: no known meaning")));
        };
        let node = &self.graph.nodes[producer.index()];
        let whole = self.graph;
        self.node(node).map_err(|e| match e {
            LowerError::Node { node, op, reason } => LowerError::Node {
                node,
                op,
                reason: format!(
                    "{reason} (its result {:?}, read by {:?}, is {found})",
                    whole.value(id).name,
                    reader.name
                ),
            },
            other => other,
        })?;
        Ok(self.emit.find(id).map(Operand::Value))
    }

    /// The token axis of each output, the same at both numbers of tokens.
    fn trace(&self, node: &Node) -> Result<Vec<Trace>, LowerError> {
        let at = |run: &Run<'_>| -> Result<Vec<Trace>, LowerError> {
            let shape = |id: ValueId| {
                run.shape(id).ok_or_else(|| {
                    let name = &self.graph.value(id).name;
                    LowerError::node(node, format!("the extents of {name:?} are not known"))
                })
            };
            let shapes =
                node.inputs.iter().map(|i| i.map(shape).transpose()).collect::<Result<Vec<_>, _>>()?;
            let outputs = node
                .outputs
                .iter()
                .map(|o| o.map_or(Ok(Shape::default()), shape))
                .collect::<Result<Vec<_>, _>>()?;
            let traced: Vec<Option<Traced<'_>>> = node
                .inputs
                .iter()
                .zip(&shapes)
                .map(|(i, shape)| {
                    let (id, shape) = (i.as_ref()?, shape.as_ref()?);
                    let trace = self.axis(*id).map_or(Trace::Absent, Trace::Tokens);
                    let constant =
                        run.fact(*id).and_then(|f| f.constant.as_deref()).filter(|_| trace == Trace::Absent);
                    Some(Traced { trace, shape, constant })
                })
                .collect();
            node.op.trace(&traced, &outputs).map_err(|reason| LowerError::node(node, reason))
        };
        let (first, second) = (at(&self.wide[0])?, at(&self.wide[1])?);
        if first != second {
            return Err(LowerError::node(node, "where its tokens lie depends on how many there are"));
        }
        Ok(first)
    }

    /// The lowered value of an output, its extents checked at all wide runs.
    pub(super) fn output(&mut self, node: &Node, id: ValueId, trace: Trace) -> Result<LValueId, LowerError> {
        let name = &self.graph.value(id).name;
        let Trace::Tokens(axis) = trace else {
            return Err(LowerError::node(node, format!("its result {name:?} is the same for all tokens")));
        };
        let dims = self.extents(node, id, axis)?;
        let dtype = self.wide[0].fact(id).and_then(|f| f.dtype);
        let dtype =
            dtype.ok_or_else(|| LowerError::node(node, format!("the type of {name:?} is not known")))?;
        self.axes.insert(id, axis);
        Ok(self.emit.value(id, dtype, dims))
    }

    fn extents(&self, node: &Node, id: ValueId, axis: TokenAxis) -> Result<Vec<Extent>, LowerError> {
        let refuse = |found: &str| {
            LowerError::node(node, format!("the extents of {:?} {found}", self.graph.value(id).name))
        };
        let shapes = self.wide.iter().map(|r| r.shape(id)).collect::<Option<Vec<_>>>();
        let shapes = shapes.ok_or_else(|| refuse("are not known"))?;
        let dims: Vec<Extent> = shapes[0]
            .iter()
            .enumerate()
            .map(|(i, &d)| if i == axis.axis { Extent::Tokens(axis.inner) } else { Extent::Fixed(d) })
            .collect();
        let holds = self
            .wide
            .iter()
            .zip(&shapes)
            .all(|(run, shape)| shape.iter().copied().eq(dims.iter().map(|d| d.at(run.lengths.new, 0))));
        if holds {
            Ok(dims)
        } else {
            Err(refuse(&format!(
                "change with the lengths otherwise than by tokens: {} and {}",
                shapes[0], shapes[1]
            )))
        }
    }

    fn finish(mut self) -> Result<Lowered, LowerError> {
        let name = &self.spec.logits;
        let logits = self.emit.find(self.ports.logits);
        let logits = logits.ok_or_else(|| LowerError::port(name, "does not depend on the tokens"))?;
        let dims = &self.emit.out.value(logits).dims;
        if !matches!(dims[..], [Extent::Fixed(1), Extent::Tokens(1), Extent::Fixed(_)]) {
            return Err(LowerError::port(name, format!("expected [1, tokens, vocabulary], found {dims:?}")));
        }
        attention::check_caches(&self)?;
        self.emit.out.outputs = vec![logits];
        Ok(self.emit.out)
    }
}

/// Inputs that say an extent, by operator.
fn is_shape_operand(node: &Node, index: usize) -> bool {
    index == 1 && matches!(node.op, Op::Reshape(_) | Op::Expand(_))
}

/// Two numbers of tokens that divide no extent of the graph, so that no other axis can be taken for the token axis.
fn token_counts(graph: &Graph) -> [usize; 2] {
    const PRIMES: [usize; 10] = [11, 13, 17, 19, 23, 29, 31, 37, 41, 43];
    let extents: BTreeSet<usize> = graph
        .values()
        .iter()
        .flat_map(|v| v.fact.shape.iter().flatten().filter_map(Dim::known))
        .filter(|&d| d > 0)
        .collect();
    let mut free = PRIMES.into_iter().filter(|p| extents.iter().all(|d| !d.is_multiple_of(*p)));
    let first = free.next().unwrap_or(47);
    [first, free.next().unwrap_or(53)]
}
