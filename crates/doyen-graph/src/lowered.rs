//! The lowered graph: stateful, over ragged tokens; what the runtime plans and devices run.
//!
//! Batch and sequence are gone: the token axis counts all sequences' new tokens of a step (`T`), the row axis the
//! logit rows a step wants (`R`). Attention owns a cache slot and knows the sequence boundaries; past/present
//! plumbing, masks and lengths have disappeared. Operators without state stand as they are in [`crate::ops`].
//! Made by the lowering pass; read by `device`, the planner and the backends.

mod recurrent;

pub use recurrent::{CausalConv, LinearAttention, State, StateId};

use crate::{ir::Constant, ops::Op};
use doyen_tensor::{ByteCount, DType};
use std::sync::Arc;

/// A value of a lowered graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LValueId(pub u32);

/// A constant of a lowered graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConstId(pub u32);

impl LValueId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl ConstId {
    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// One extent of a lowered value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Extent {
    /// A number.
    Fixed(usize),
    /// `n * T`, T the new tokens of the step.
    Tokens(usize),
    /// `n * R`, R the logit rows of the step.
    Rows(usize),
}

impl Extent {
    /// The number for a step of `tokens` tokens and `rows` logit rows.
    pub const fn at(self, tokens: usize, rows: usize) -> usize {
        match self {
            Self::Fixed(n) => n,
            Self::Tokens(n) => n * tokens,
            Self::Rows(n) => n * rows,
        }
    }
}

/// A value computed in a step. Float values are held in the compute type, whatever the file declares.
#[derive(Debug, Clone, PartialEq)]
pub struct LValue {
    /// Name of the exported value it stands for.
    pub name: String,
    /// Compute type.
    pub dtype: DType,
    /// Type the file declares, for display and comparison with the reference.
    pub declared: DType,
    /// Extents.
    pub dims: Vec<Extent>,
}

/// What a node reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A value of the step.
    Value(LValueId),
    /// A constant.
    Const(ConstId),
}

/// A named constant.
#[derive(Debug, Clone)]
pub struct LConst {
    /// Name in the file (of the initializer, or of the folded value).
    pub name: String,
    /// The data, as views into the package.
    pub data: Arc<Constant>,
}

/// A node.
#[derive(Debug, Clone)]
pub struct LNode {
    /// Name of the exported node (of the last one, for a fusion).
    pub name: String,
    /// What it does.
    pub op: LOp,
    /// Operands in the order `op` documents; `None` where absent.
    pub inputs: Vec<Option<Operand>>,
    /// Results.
    pub outputs: Vec<Option<LValueId>>,
}

/// What a lowered node does.
#[derive(Debug, Clone, PartialEq)]
pub enum LOp {
    /// An operator as exported, pointwise along the token axis, with the exported operator's inputs and outputs. A
    /// shape that counts tokens (Expand) is absent: the extents of the output say it.
    Op(Op),
    /// The same elements under other extents: what Reshape, Squeeze, Unsqueeze, Flatten, Identity and casts among
    /// float types become. Input: `x` alone; the planner gives the output the slot of its input.
    View,
    /// Keeps the wanted logit rows. Inputs: `x [.., n*T, ..]`; output `[.., n*R, ..]`; `axis` is the token axis, n
    /// elements of it to a token.
    SelectRows {
        /// The token axis of the input.
        axis: usize,
    },
    /// Attention with a cache. Inputs: `q [1,T,Nq*D]` (or packed QKV), `k`, `v`, `cos`, `sin`, `q_norm`, `k_norm`,
    /// `head_sink`, `k_scale`, `v_scale`, and where they are given, as values of the step: `positions` (`int64 [1,T]`,
    /// the rotary positions of the new tokens; running ones where absent) and `bias` (`[B or 1, Nq or 1, S, total]`,
    /// B the sequences of the step, S at least the new tokens of each; added after the softcap, by absolute key
    /// position). Output `[1,T,Nq*Dv]`.
    Attention(Attention),
    /// Attention over a state of fixed size. Inputs: `query [1,T,Hq*dk]`, `key [1,T,Hk*dk]`, `value [1,T,Hkv*dv]`, `decay`
    /// (`[1,T,Hkv]` or `[1,T,Hkv*dk]`, in log space) and `beta` (`[1,T,Hkv]` or `[1,T,1]`), each where the rule reads it.
    /// Output `[1,T,max(Hq,Hkv)*dv]`.
    LinearAttention(LinearAttention),
    /// Causal convolution with a state. Inputs: `x [1,T,C]` and the constants `weight [C,1,k]` and, where there is one,
    /// `bias [C]`. Output as `x`.
    CausalConv(CausalConv),
    /// Attention over latent rows that keys and values of all heads are projections of. Inputs: `q [1,T,N*(nope+rope)]`,
    /// the new latent rows `[1,T,rank]`, their rotated channels that all heads share `[1,T,rope]`, then the operands of
    /// the up-projection (MatMul or MatMulNBits) from its index 1 on, constants all. Output `[1,T,N*Dv]`.
    LatentAttention(LatentAttention),
    /// Top-k routing. Inputs: router logits `[T,E]`, optional mixing weights `[T,E]`. Outputs: expert ids `i32 [T,k]`,
    /// weights `f32 [T,k]`.
    Route(Route),
    /// Grouped expert feed-forward. Inputs: `x`, ids, weights, then the operands of the QMoE or MoE operator from
    /// its index 2 on (weights, scales, biases, zero points), constants all. Output: the shape of `x`.
    Experts(Experts),
    /// `silu(gate) * up`, element-wise. Inputs: gate, up.
    SiluMul,
}

/// Attention over a paged cache.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Where its keys and values live.
    pub slot: CacheSlot,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a query or key head.
    pub head_size: usize,
    /// Channels of a value head.
    pub v_head_size: usize,
    /// Factor on q.k.
    pub scale: f32,
    /// `softcap * tanh(s / softcap)` before the mask, when positive.
    pub softcap: f32,
    /// Visible keys including the query's own, when limited.
    pub window: Option<usize>,
    /// Whether a query sees only keys at or before its position.
    pub causal: bool,
    /// Whether a zero joins the softmax's denominator when there is no `head_sink`.
    pub smooth_softmax: bool,
    /// Whether `q` holds Q, K and V side by side (inputs k and v are absent).
    pub packed_qkv: bool,
    /// Rotary embedding of queries and keys, at the positions given or at running ones.
    pub rotary: Option<Rotary>,
    /// RMS norm of every query and key head before the rotary embedding: its epsilon.
    pub qk_norm: Option<f32>,
}

impl Attention {
    /// Strides in elements of sequence, head, new token and key position of a bias of these extents; an axis of one
    /// sequence or head for all has stride 0.
    ///
    /// # Errors
    /// When the extents do not cover `sequences` of up to `new` tokens and `total` positions.
    pub fn bias_strides(
        &self,
        dims: &[usize],
        sequences: usize,
        (new, total): (usize, usize),
    ) -> Result<[usize; 4], String> {
        if let &[b, h, s, keys] = dims {
            let axis = |extent: usize, full: usize| extent == 1 || extent == full;
            if axis(b, sequences) && axis(h, self.heads) && s >= new && keys >= total {
                let stride = |extent: usize, stride: usize| if extent == 1 { 0 } else { stride };
                return Ok([stride(b, h * s * keys), stride(h, s * keys), keys, 1]);
            }
        }
        let (b, h) = (sequences, self.heads);
        Err(format!("attention_bias: expected [{b} or 1, {h} or 1, {new}, {total}] or more, found {dims:?}"))
    }
}

/// Multi-head latent attention. A cached row is the latent row and the shared channels, `rank + rope` numbers. Key of
/// head `h`: `nope` channels `U_h c` and the shared ones; value: `v_head_size` channels `V_h c`; rows of the
/// up-projection are `U_0, V_0, U_1, ...`.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentAttention {
    /// Where its rows live: a group of one key head of `rank + rope` channels and no values.
    pub slot: CacheSlot,
    /// Heads N.
    pub heads: usize,
    /// Channels of a latent row.
    pub rank: usize,
    /// Channels of a query or key head that come from the latent row.
    pub nope: usize,
    /// Channels of a query or key head after these, which are shared by all key heads.
    pub rope: usize,
    /// Channels of a value head.
    pub v_head_size: usize,
    /// Factor on q.k.
    pub scale: f32,
    /// `softcap * tanh(s / softcap)` before the mask, when positive.
    pub softcap: f32,
    /// Visible keys including the query's own, when limited.
    pub window: Option<usize>,
    /// Whether a query sees only keys at or before its position.
    pub causal: bool,
    /// The up-projection's operator.
    pub up: Op,
}

impl LatentAttention {
    /// The positions that a query at `position` sees, of `rows`.
    pub fn sight(&self, position: usize, rows: usize) -> std::ops::Range<usize> {
        let end = if self.causal { position + 1 } else { rows };
        let start = (position + 1).saturating_sub(self.window.unwrap_or(usize::MAX));
        start.min(end)..end
    }
}

/// Rotary embedding inside attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotary {
    /// Even/odd pairs instead of halves.
    pub interleaved: bool,
    /// Channels that rotate.
    pub dim: usize,
}

/// Top-k routing.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Experts E.
    pub experts: usize,
    /// Experts per token.
    pub k: usize,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// Phi-3.5's sparse mixer instead of top-k and softmax.
    pub sparse_mixer: bool,
}

/// A bank of experts: the operator whose weights it holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// The exported `QMoE` or `MoE` operator; its own fields say widths, blocks and activation.
    pub op: Op,
    /// Experts E.
    pub experts: usize,
    /// Experts per token.
    pub k: usize,
}

/// A layer's place in the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheSlot {
    /// Index into [`Lowered::groups`].
    pub group: usize,
    /// Index into the group's layers.
    pub layer: usize,
}

/// How a cache stores a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvFormat {
    /// Float rows, in the type the plan chooses.
    Float,
    /// int8 codes with scales given by the graph.
    Int8 {
        /// A scale per channel `[1,Nkv,1,D]` instead of one.
        per_channel: bool,
    },
    /// int4 codes as `code + 8`, even channel in the low nibble.
    Int4 {
        /// A scale per channel `[1,Nkv,1,D]` instead of one.
        per_channel: bool,
    },
}

impl KvFormat {
    /// The name in reports, of a device that holds float rows in `float`.
    pub const fn name(self, float: &'static str) -> &'static str {
        match self {
            Self::Float => float,
            Self::Int8 { .. } => "int8",
            Self::Int4 { .. } => "int4",
        }
    }
}

/// Layers whose caches have the same row layout and lifetime; they share a block table.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheGroup {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a key head.
    pub k_head_size: usize,
    /// Channels of a value head; 0 where values are made of the keys' rows.
    pub v_head_size: usize,
    /// How rows are stored.
    pub format: KvFormat,
    /// Keys that can still be seen, when limited; older pages may be freed.
    pub window: Option<usize>,
    /// The exported ports of each layer: past key, past value, present key, present value.
    pub layers: Vec<CachePorts>,
}

/// Names of the exported state ports a layer's cache replaces; empty where the graph has none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct CachePorts {
    pub past_key: String,
    pub past_value: String,
    pub present_key: String,
    pub present_value: String,
}

/// A lowered graph.
#[derive(Debug, Clone, Default)]
pub struct Lowered {
    /// Values.
    pub values: Vec<LValue>,
    /// Constants.
    pub constants: Vec<LConst>,
    /// Nodes in execution order.
    pub nodes: Vec<LNode>,
    /// Token ids, `int64 [1,T]`.
    pub tokens: Option<LValueId>,
    /// Running positions, `int64 [1,T]`, where the graph reads them outside of attention.
    pub positions: Option<LValueId>,
    /// Other inputs, given with each step (operator cases; none in a language model).
    pub inputs: Vec<LValueId>,
    /// Outputs; in a language model the logits `[1,R,V]` alone.
    pub outputs: Vec<LValueId>,
    /// Cache groups.
    pub groups: Vec<CacheGroup>,
    /// States of fixed size, each of one node.
    pub states: Vec<State>,
}

impl LOp {
    /// Whether it keeps something of a sequence from step to step.
    pub const fn owns_state(&self) -> bool {
        matches!(
            self,
            Self::Attention(_) | Self::LatentAttention(_) | Self::LinearAttention(_) | Self::CausalConv(_)
        )
    }
}

impl Lowered {
    /// Bytes of one slot over all states of fixed size.
    pub fn state_bytes(&self) -> ByteCount {
        ByteCount(self.states.iter().fold(0, |n, s| n.saturating_add(s.bytes().0)))
    }

    /// The value.
    pub fn value(&self, id: LValueId) -> &LValue {
        &self.values[id.index()]
    }

    /// The constant.
    pub fn constant(&self, id: ConstId) -> &LConst {
        &self.constants[id.index()]
    }

    /// Positions that every table read by running positions has rows for: the rotary caches of attentions and of rotary
    /// embeddings, and tables whose rows are gathered. `None` where there is none. A longer context cannot run.
    pub fn rotary_positions(&self) -> Option<usize> {
        const COS: usize = 3;
        const POSITIONS: usize = 10;
        let rows = self.nodes.iter().filter_map(|node| {
            let operand = |i: usize| node.inputs.get(i).copied().flatten();
            let running =
                |i: usize| matches!(operand(i), Some(Operand::Value(v)) if Some(v) == self.positions);
            let table = match &node.op {
                LOp::Attention(Attention { rotary: Some(_), .. }) if operand(POSITIONS).is_none() => COS,
                LOp::Op(Op::Gather(g)) if g.axis == 0 && running(1) => 0,
                LOp::Op(Op::ContribRotary(_)) if running(1) => 2,
                LOp::Op(Op::OnnxRotary(_)) if running(3) => 1,
                _ => return None,
            };
            match operand(table) {
                Some(Operand::Const(c)) => self.constant(c).data.shape().first().copied(),
                _ => None,
            }
        });
        rows.min()
    }
}
