//! Attention that a graph writes out in plain operators over its cache ports, as attention over a paged cache.
//!
//! ```text
//! K = Concat(past_key, k)   V = Concat(past_value, v)          both graph outputs, axis 2 of [batch, heads, tokens, size]
//! s = cap(scale * q K^T) + mask                                  K, V: each head repeated for its group of query heads
//! y = Softmax(s) V     or, with sinks,     y = Softmax(s - max | sink)[.., :-1] V
//! ```
//!
//! Conditions: the masks do not depend on tokens and mean causal sight, with a window or without ([`super::sight`]); the
//! softmax is over the keys; past and present are the two ends of one state; heads are repeated one after the other. Masks
//! are added, or choose between the scores and a very low number. Casts among float types may stand anywhere. Without a mask a query would see tokens after its own, which
//! no step that ends before them can give: refused. What has another structure is not taken for attention, and is then
//! refused where it reads the cache.

use super::{
    LowerError,
    class::Class,
    decoder::Decoder,
    ports::{KvPort, Role},
    sdpa::{self, Heads, part},
    sight::Sight,
};
use crate::{
    ir::{Constant, Graph, Node, NodeId, ValueId},
    lowered::Operand,
    ops::{Op, arith::Binary, reduce::Reduction, unary::Unary},
};
use doyen_tensor::Tensor;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// The attentions of a graph, by the node that makes their result.
#[derive(Debug, Default)]
pub(super) struct Found {
    last: BTreeMap<usize, Written>,
    covered: BTreeSet<usize>,
}

/// One attention.
#[derive(Debug, Clone)]
struct Written {
    /// The product of queries and keys; reads the queries first.
    scores: usize,
    /// Joins past and new keys, and values.
    joins: [usize; 2],
    state: usize,
    scale: f64,
    softcap: f64,
    /// Masks with the nodes that apply them.
    masks: Vec<(usize, ValueId)>,
    sinks: Option<ValueId>,
}

impl Found {
    /// Finds them.
    pub(super) fn new(d: &Decoder<'_>) -> Self {
        let producers = d.graph.producers();
        let mut found = Self::default();
        for (n, node) in d.graph.nodes.iter().enumerate() {
            let mut reader = Reader { d, graph: d.graph, producers: &producers, covered: Vec::new() };
            if let Some(written) = reader.attention(node) {
                found.covered.extend(reader.with_casts());
                found.last.insert(n, written);
            }
        }
        found
    }

    /// Lowers the attention whose result node `n` makes; false when it makes none and is no part of one.
    pub(super) fn lower(&self, d: &mut Decoder<'_>, n: usize) -> Result<bool, LowerError> {
        match self.last.get(&n) {
            Some(written) => written.lower(d, n).map(|()| true),
            None => Ok(self.covered.contains(&n)),
        }
    }
}

impl Written {
    fn lower(&self, d: &mut Decoder<'_>, last: usize) -> Result<(), LowerError> {
        let graph = d.graph;
        let node = &graph.nodes[last];
        let mut sight = Sight::FULL;
        for &(n, mask) in &self.masks {
            let at = &graph.nodes[n];
            let own = d.sight(at, "mask", mask, false)?;
            sight = sight.and(own).map_err(|e| LowerError::node(at, e))?;
        }
        if !sight.causal {
            let why = "queries see keys after their own: only causal attention can be computed in steps";
            return Err(LowerError::node(node, why));
        }
        let [keys, values] = self.joins;
        let q = part(d, &graph.nodes[self.scores], (0, "queries"), None)?;
        let k = part(d, &graph.nodes[keys], (1, "keys"), None)?;
        let v = part(d, &graph.nodes[values], (1, "values"), None)?;
        let sinks = match self.sinks {
            Some(id) => Some(sinks(d, node, id, q.heads)?),
            None => None,
        };
        if !d.caches.insert(self.state) {
            return Err(LowerError::node(node, "its cache already belongs to another node"));
        }
        let heads = Heads {
            q: None,
            kv: None,
            scale: Some(self.scale as f32),
            softcap: self.softcap as f32,
            sight,
            past: [0, 0],
        };
        sdpa::emit(d, node, (self.state, sinks), &heads, [q, k, v])
    }
}

/// Sinks `[1,heads,new,1]`, alike for all new tokens, as `[heads]`.
fn sinks(d: &mut Decoder<'_>, node: &Node, id: ValueId, heads: usize) -> Result<Operand, LowerError> {
    let name = d.graph.value(id).name.clone();
    let refuse = |why: String| LowerError::node(node, format!("sinks ({name:?}): {why}"));
    let mut own: Option<Vec<f32>> = None;
    for run in d.wide() {
        let data = run.fact(id).and_then(|f| f.constant.clone());
        let t = data.ok_or_else(|| refuse("depend on the tokens".into()))?.to_tensor();
        let t = t.map_err(|e| refuse(e.to_string()))?;
        let values = t.to_f32().map_err(|e| refuse(e.to_string()))?;
        let new = run.lengths.new;
        if t.shape().dims() != [1, heads, new, 1] {
            return Err(refuse(format!("expected [1, {heads}, {new}, 1], found {}", t.shape())));
        }
        let first: Vec<f32> = values.iter().copied().step_by(new).collect();
        let alike = values.chunks(new).zip(&first).all(|(row, v)| row.iter().all(|r| r == v));
        if !alike || own.as_ref().is_some_and(|o| *o != first) {
            return Err(refuse("change with the tokens".into()));
        }
        own = Some(first);
    }
    let values = own.unwrap_or_default();
    let t = Tensor::from_slice([heads], &values).map_err(|e| refuse(e.to_string()))?;
    Ok(Operand::Const(d.emit.constant_of(name.clone(), Arc::new(Constant::from(t)))))
}

/// Reads the graph upwards from the result, and remembers the nodes that belong to the attention.
struct Reader<'a, 'd> {
    d: &'a Decoder<'d>,
    graph: &'d Graph,
    producers: &'a [Option<NodeId>],
    covered: Vec<usize>,
}

fn input(node: &Node, i: usize) -> Option<ValueId> {
    node.inputs.get(i).copied().flatten()
}

impl<'d> Reader<'_, 'd> {
    fn attention(&mut self, last: &Node) -> Option<Written> {
        let Op::MatMul(_) = last.op else { return None };
        let (weights, values) = (input(last, 0)?, input(last, 1)?);
        let (weights, with_sinks) = self.without_last(weights);
        let scores = self.softmax(weights)?;
        let scores = self.shifted(scores);
        let (scores, sinks) = if with_sinks {
            let (scores, sinks) = self.joined_sinks(scores)?;
            (scores, Some(sinks))
        } else {
            (scores, None)
        };
        let (scores, masks) = self.masks(scores);
        let (scores, softcap) = self.softcap(scores);
        let (scores, scale) = self.scaled(scores);
        let (at, product) = self.made(scores)?;
        let (Op::MatMul(_), keys) = (&product.op, input(product, 1)?) else { return None };
        self.covered.push(at);
        let (keys, more) = self.transposed_keys(keys)?;
        let (key_join, k) = self.cache(keys)?;
        let values = self.unrepeated(values);
        let (value_join, v) = self.cache(values)?;
        let one_state = k.state == v.state && !k.is_value && v.is_value;
        one_state.then_some(Written {
            scores: at,
            joins: [key_join, value_join],
            state: k.state,
            scale: scale * more,
            softcap,
            masks,
            sinks,
        })
    }

    /// The node that makes a value which depends on tokens, casts among float types left out.
    fn made(&self, mut id: ValueId) -> Option<(usize, &'d Node)> {
        loop {
            let n = self.producers[id.index()].filter(|_| self.is_data(id))?.index();
            match self.cast(&self.graph.nodes[n]) {
                Some(x) => id = x,
                None => return Some((n, &self.graph.nodes[n])),
            }
        }
    }

    /// What a cast among float types reads.
    fn cast(&self, node: &Node) -> Option<ValueId> {
        let float =
            |v: Option<ValueId>| self.d.wide()[0].fact(v?)?.dtype.filter(|t| t.is_float()).map(|_| ());
        let Op::Cast(_) = node.op else { return None };
        float(node.outputs.first().copied().flatten())?;
        float(input(node, 0))?;
        input(node, 0)
    }

    /// The nodes of the attention, with the casts that read their results.
    fn with_casts(self) -> BTreeSet<usize> {
        let mut covered: BTreeSet<usize> = self.covered.iter().copied().collect();
        for (n, node) in self.graph.nodes.iter().enumerate() {
            let of = self.cast(node).and_then(|x| self.producers[x.index()]);
            if of.is_some_and(|p| covered.contains(&p.index())) {
                covered.insert(n);
            }
        }
        covered
    }

    fn is_data(&self, id: ValueId) -> bool {
        self.d.class(id) == Class::Data
    }

    fn rank(&self, id: ValueId) -> Option<usize> {
        self.d.wide()[0].shape(id).map(|s| s.len())
    }

    fn is_last(&self, id: ValueId, axis: i64) -> bool {
        axis == -1 || self.rank(id).is_some_and(|r| axis == r as i64 - 1)
    }

    fn ints(&self, node: &Node, i: usize) -> Option<Vec<i64>> {
        let fact = &self.graph.value(input(node, i)?).fact;
        fact.constant.as_ref()?.to_tensor().ok()?.to_i64().ok()
    }

    fn number(&self, id: ValueId) -> Option<f64> {
        let t = self.graph.value(id).fact.constant.as_ref()?.to_tensor().ok()?;
        t.to_f64().ok().filter(|v| v.len() == 1)?.first().copied()
    }

    /// All but the last of the last axis: the value, and whether it was that.
    fn without_last(&mut self, id: ValueId) -> (ValueId, bool) {
        let found = self.made(id).and_then(|(n, node)| {
            let (Op::Slice(_), x) = (&node.op, input(node, 0)?) else { return None };
            let axes = self.ints(node, 3)?;
            let step = input(node, 4).is_none() || self.ints(node, 4)? == [1];
            let whole = self.ints(node, 1)? == [0] && self.ints(node, 2)? == [-1] && step;
            (whole && matches!(axes[..], [a] if self.is_last(x, a))).then_some((n, x))
        });
        self.take(found, id)
    }

    fn take(&mut self, found: Option<(usize, ValueId)>, id: ValueId) -> (ValueId, bool) {
        match found {
            Some((n, x)) => {
                self.covered.push(n);
                (x, true)
            }
            None => (id, false),
        }
    }

    fn softmax(&mut self, id: ValueId) -> Option<ValueId> {
        let (n, node) = self.made(id)?;
        let Op::Softmax(s) = node.op else { return None };
        let x = input(node, 0).filter(|x| !s.log && self.is_last(*x, s.axis))?;
        self.covered.push(n);
        Some(x)
    }

    /// `x` of `x - max(x)`, which is the same under a softmax.
    fn shifted(&mut self, id: ValueId) -> ValueId {
        let found = self.made(id).and_then(|(n, node)| {
            let (x, max) = match node.op {
                Op::Binary(Binary::Sub) => (input(node, 0)?, input(node, 1)?),
                _ => return None,
            };
            let (m, of) = self.made(max)?;
            let axes = self.ints(of, 1)?;
            let largest = matches!(&of.op, Op::Reduce(r) if r.reduction == Reduction::Max && r.keep_dims);
            let same = input(of, 0) == Some(x) && matches!(axes[..], [a] if self.is_last(x, a));
            (largest && same).then_some((n, m, x))
        });
        match found {
            Some((n, m, x)) => {
                self.covered.extend([n, m]);
                x
            }
            None => id,
        }
    }

    /// Scores and sinks side by side along the last axis.
    fn joined_sinks(&mut self, id: ValueId) -> Option<(ValueId, ValueId)> {
        let (n, node) = self.made(id)?;
        let Op::Concat(c) = &node.op else { return None };
        let (scores, sinks) = match node.inputs[..] {
            [Some(a), Some(b)] if self.is_last(id, c.axis) => (a, b),
            _ => return None,
        };
        let one = self.d.wide()[0].shape(sinks)?.last() == Some(&1);
        if !one || self.is_data(sinks) {
            return None;
        }
        self.covered.push(n);
        Some((scores, sinks))
    }

    /// What masks are applied to, and the masks.
    fn masks(&mut self, mut id: ValueId) -> (ValueId, Vec<(usize, ValueId)>) {
        const LOW: f64 = -9999.0;
        let mut masks = Vec::new();
        while let Some((n, node)) = self.made(id) {
            let found = match node.op {
                Op::Binary(Binary::Add) => [(0, 1), (1, 0)].into_iter().find_map(|(s, m)| {
                    let (s, m) = (input(node, s)?, input(node, m)?);
                    (self.is_data(s) && !self.is_data(m)).then_some((s, m))
                }),
                Op::Where(_) => (|| {
                    let (mask, scores, low) = (input(node, 0)?, input(node, 1)?, input(node, 2)?);
                    let hides = self.number(low).is_some_and(|v| v < LOW);
                    (hides && self.is_data(scores) && !self.is_data(mask)).then_some((scores, mask))
                })(),
                _ => None,
            };
            let Some((scores, mask)) = found else { break };
            self.covered.push(n);
            masks.push((n, mask));
            id = scores;
        }
        (id, masks)
    }

    /// `x` and `c` of `c tanh(x / c)`; 0 where there is none.
    fn softcap(&mut self, id: ValueId) -> (ValueId, f64) {
        let found = (|| {
            let (outer, product) = self.made(id)?;
            let (tanh, cap) = self.factor(product)?;
            let (inner, function) = self.made(tanh)?;
            let Op::Unary(Unary::Tanh) = function.op else { return None };
            let (divided, by) = self.made(input(function, 0)?)?;
            let (x, factor) = self.factor(by)?;
            let one = (cap * factor - 1.0).abs() <= 1e-6;
            (one && cap > 0.0).then_some(([outer, inner, divided], x, cap))
        })();
        match found {
            Some((nodes, x, cap)) => {
                self.covered.extend(nodes);
                (x, cap)
            }
            None => (id, 0.0),
        }
    }

    /// A value and the number it is multiplied with.
    fn factor(&self, node: &Node) -> Option<(ValueId, f64)> {
        let (a, b) = (input(node, 0)?, input(node, 1)?);
        let (x, factor) = match node.op {
            Op::Binary(Binary::Mul) => {
                [(a, b), (b, a)].into_iter().find_map(|(x, c)| Some((x, self.number(c)?)))?
            }
            Op::Binary(Binary::Div) => (a, 1.0 / self.number(b)?),
            _ => return None,
        };
        self.is_data(x).then_some((x, factor))
    }

    fn scaled(&mut self, mut id: ValueId) -> (ValueId, f64) {
        let mut scale = 1.0;
        while let Some((n, node)) = self.made(id) {
            let Some((x, factor)) = self.factor(node) else { break };
            self.covered.push(n);
            (id, scale) = (x, scale * factor);
        }
        (id, scale)
    }

    /// The keys whose transpose a value is, with the number they are multiplied with.
    fn transposed_keys(&mut self, id: ValueId) -> Option<(ValueId, f64)> {
        let (id, scale) = self.scaled(id);
        let (n, node) = self.made(id)?;
        let Op::Transpose(t) = &node.op else { return None };
        let x = input(node, 0).filter(|_| t.perm.as_deref() == Some(&[0, 1, 3, 2]))?;
        self.covered.push(n);
        let (x, more) = self.scaled(x);
        Some((self.unrepeated(x), scale * more))
    }

    /// Heads before each was repeated for its group: `[1,KV,S,D]` over `[1,KV,1,S,D]` and `[1,KV,G,S,D]` to
    /// `[1,KV*G,S,D]`.
    fn unrepeated(&mut self, id: ValueId) -> ValueId {
        let found = (|| {
            let (merge, merged) = self.made(id)?;
            let (repeat, repeated) = self.made(input(merged, 0)?)?;
            let (split, unsqueezed) = self.made(input(repeated, 0)?)?;
            let x = input(unsqueezed, 0)?;
            let views = matches!(merged.op, Op::Reshape(_))
                && matches!(repeated.op, Op::Expand(_))
                && matches!(unsqueezed.op, Op::Unsqueeze(_) | Op::Reshape(_));
            let fits = self.d.wide().iter().all(|run| {
                let shape = |v: Option<ValueId>| v.and_then(|v| run.shape(v));
                let (Some(x), Some(one), Some(all), Some(out)) =
                    (run.shape(x), shape(input(repeated, 0)), shape(input(merged, 0)), run.shape(id))
                else {
                    return false;
                };
                let (&[b, kv, s, d], &[_, _, g, _, _]) = (x.dims(), all.dims()) else { return false };
                one.dims() == [b, kv, 1, s, d]
                    && all.dims() == [b, kv, g, s, d]
                    && out.dims() == [b, kv * g, s, d]
            });
            (views && fits).then_some(([merge, repeat, split], x))
        })();
        match found {
            Some((nodes, x)) => {
                self.covered.extend(nodes);
                x
            }
            None => id,
        }
    }

    /// The node that joins a past and new rows along axis 2, when its result is the present of that past.
    fn cache(&mut self, id: ValueId) -> Option<(usize, KvPort)> {
        let (n, node) = self.made(id)?;
        let Op::Concat(c) = &node.op else { return None };
        let [Some(past), Some(new)] = node.inputs[..] else { return None };
        let Some(Role::Past(port)) = self.d.ports.roles.get(&past).copied() else { return None };
        let ours = self.d.ports.presents.get(&id) == Some(&port);
        if !matches!(c.axis, 2 | -2) || !ours || !self.is_data(new) || self.rank(new) != Some(4) {
            return None;
        }
        self.covered.push(n);
        Some((n, port))
    }
}
