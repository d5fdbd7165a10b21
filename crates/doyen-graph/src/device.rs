//! What a backend implements, and the planned program it is given.
//!
//! The runtime asks a [`Device`] which nodes it can run and how much scratch they take, lays the arena out, and
//! hands over a [`Program`]; the device binds kernels once and gives back a [`Session`] that runs steps over ragged
//! batches. Block tables, page allocation and sampling are the runtime's; bytes and kernels are the device's.

mod check;
mod draw;

pub use draw::{Choice, Draw, RANDOM_BITS, argmax};

use crate::lowered::{CacheSlot, LNode, LValueId, Lowered, StateId};
use doyen_tensor::{ByteCount, PageId, Tensor};
use std::{ops::Range, sync::Arc};

/// How quantized products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Numerics {
    /// Float activations.
    Exact,
    /// int8 activations where the node's accuracy level allows them, in two terms where their rounding shows most.
    #[default]
    Fast,
    /// int8 activations in one term wherever the node's accuracy level allows them.
    Int8,
}

impl Numerics {
    /// The name in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
            Self::Int8 => "int8",
        }
    }
}

/// Sizes a program is planned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// New tokens of one step, over all sequences.
    pub tokens: usize,
    /// Logit rows of one step.
    pub rows: usize,
    /// Sequences of one step.
    pub sequences: usize,
    /// Positions of one sequence.
    pub context: usize,
    /// Positions of a KV page; a power of two.
    pub page_size: usize,
}

/// The pages of a cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupPages {
    /// How many there are, for all sequences.
    pub pages: usize,
    /// When a sequence gives pages back that none of its queries can see any more.
    pub window: Option<WindowPages>,
}

/// How a cache group with a window uses its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowPages {
    /// Keys a query sees, its own included.
    pub keys: usize,
    /// Pages set aside for every sequence; the others are shared by the tokens of a step.
    pub per_sequence: usize,
}

/// Where a value lies in the arena. Values whose lives do not overlap may share bytes; a view (Reshape) has the
/// slot of its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Byte offset, 64-aligned.
    pub offset: usize,
    /// Bytes at the limits.
    pub len: usize,
}

/// A planned program: nodes in order, an arena slot per value.
#[derive(Debug, Clone)]
pub struct Program {
    /// The graph.
    pub graph: Arc<Lowered>,
    /// Arena slot of each value, by value index; `None` for values that nothing reads or writes.
    pub slots: Vec<Option<Slot>>,
    /// Bytes of the arena.
    pub arena: usize,
    /// Bytes of scratch that the hungriest node takes.
    pub scratch: usize,
    /// What it was planned for.
    pub limits: Limits,
    /// Pages of each cache group.
    pub pages: Vec<GroupPages>,
    /// Slots of every state of fixed size: two for each sequence, one to read and one to write.
    pub state_slots: usize,
    /// How quantized products are computed.
    pub numerics: Numerics,
}

/// Why a device cannot do something.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// A node it has no kernel for.
    #[error("node {node:?}: {reason}")]
    Node {
        /// Node name.
        node: String,
        /// What is missing or wrong.
        reason: String,
    },
    /// Memory that cannot be had.
    #[error("cannot allocate {bytes} for {what}")]
    Memory {
        /// What for.
        what: String,
        /// How much.
        bytes: ByteCount,
    },
    /// Memory that a program takes and that is not free any more, though it may have been when it was planned.
    #[error(
        "cannot allocate {bytes} for {what}: the program takes {needed} ({parts}), {free} are free; end what else uses the \
         memory, or take less with a shorter context (--context), fewer sequences at once or a narrower cache (--kv-dtype)"
    )]
    NoRoom {
        /// What for.
        what: String,
        /// How much.
        bytes: ByteCount,
        /// What the whole program takes.
        needed: ByteCount,
        /// The parts of that.
        parts: String,
        /// What it may take, nothing of it loaded.
        free: ByteCount,
    },
    /// A step that does not fit the program.
    #[error("{0}")]
    Step(String),
}

/// The kernel a node is bound to and what it takes; printed on request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePlan {
    /// Kernel name, such as `matmul_nbits_4b_fast_avx2`.
    pub kernel: String,
    /// Scratch bytes at the limits.
    pub scratch: usize,
    /// Bytes the device makes of constants at load (repacked or materialised), beside the mapped ones.
    pub resident: ByteCount,
}

/// A backend.
pub trait Device: Send + Sync {
    /// Short name, such as `cpu`.
    fn name(&self) -> &str;

    /// One line on what was found: ISA, threads.
    fn describe(&self) -> String;

    /// Whether and how a node would run.
    ///
    /// # Errors
    /// Says what the device lacks for this node.
    fn plan(
        &self,
        graph: &Lowered,
        node: &LNode,
        limits: &Limits,
        numerics: Numerics,
    ) -> Result<NodePlan, DeviceError>;

    /// What it holds keys and values in where the graph does not quantize them, such as `f16`.
    fn kv_type(&self) -> &'static str;

    /// Runs of nodes that the device may run as one: no two of a run's values share bytes then.
    fn together(&self, graph: &Lowered) -> Vec<Range<usize>> {
        let _ = graph;
        Vec::new()
    }

    /// Bytes of one KV page of each cache group, over all the group's layers.
    fn page_bytes(&self, graph: &Lowered, page_size: usize) -> Vec<ByteCount>;

    /// Binds every node and allocates arena, scratch and KV pages.
    ///
    /// # Errors
    /// When a node cannot be bound or memory cannot be had.
    fn load(&self, program: Program) -> Result<Box<dyn Session>, DeviceError>;
}

/// One sequence of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeqSpan {
    /// Index of its first new token in the step.
    pub first: usize,
    /// Its new tokens.
    pub len: usize,
    /// Positions it has in the caches already.
    pub past: usize,
}

/// Block tables of one cache group in a step: per sequence the pages of positions `0, page_size, ...`, flattened so
/// that the buffers can be reused from step to step. Pages before the first one that a query of the step sees are never
/// read; they may belong to somebody else by then.
#[derive(Debug, Clone, Default)]
pub struct GroupTables {
    pages: Vec<PageId>,
    ends: Vec<usize>,
}

impl GroupTables {
    /// Empty tables with room for `sequences` that have `pages` together.
    pub fn with_capacity(sequences: usize, pages: usize) -> Self {
        Self { pages: Vec::with_capacity(pages), ends: Vec::with_capacity(sequences) }
    }

    /// Forgets all sequences, keeping the buffers.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.ends.clear();
    }

    /// Appends the table of the next sequence.
    pub fn push(&mut self, pages: &[PageId]) {
        self.pages.extend_from_slice(pages);
        self.ends.push(self.pages.len());
    }

    /// Number of sequences.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no sequence.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The pages of sequence `s`.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn sequence(&self, s: usize) -> &[PageId] {
        let start = if s == 0 { 0 } else { self.ends[s - 1] };
        &self.pages[start..self.ends[s]]
    }
}

/// A slot of every state of fixed size at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateSlot(pub u32);

impl StateSlot {
    /// The slot as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a sequence's states of fixed size are before and after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSlots {
    /// The slot that the step reads, and leaves as it is; `None` before the first token, which is zeros.
    pub read: Option<StateSlot>,
    /// The slot that it writes: no other slot of the step.
    pub write: StateSlot,
}

/// A ragged batch: any number of sequences, each with its own new tokens and its own pages.
#[derive(Debug, Clone, Copy)]
pub struct RaggedBatch<'a> {
    /// New token ids of all sequences, in the order of `sequences`.
    pub tokens: &'a [u32],
    /// The sequences; their spans tile `tokens`.
    pub sequences: &'a [SeqSpan],
    /// Block tables of each cache group.
    pub tables: &'a [GroupTables],
    /// State slots of each sequence; empty where the graph has no states of fixed size.
    pub states: &'a [StateSlots],
    /// Tokens whose logits are wanted, as indices into `tokens`, ascending.
    pub rows: &'a [u32],
    /// Values of [`Lowered::inputs`], in order.
    pub inputs: &'a [Tensor],
}

/// A loaded program with its memory.
pub trait Session: Send {
    /// Runs one step: appends to the caches and computes the outputs.
    ///
    /// # Errors
    /// When the batch does not fit the program (too many tokens, rows, sequences, a position without a page).
    fn step(&mut self, batch: &RaggedBatch<'_>) -> Result<(), DeviceError>;

    /// As [`Session::step`], and chooses a token from every row of the first output that has a draw. A device that does this
    /// itself leaves a choice for each of them and copies only the rows without one to where [`Session::output`] finds them;
    /// any other leaves `choices` empty and has all rows there.
    ///
    /// # Errors
    /// As [`Session::step`].
    fn step_choosing(
        &mut self,
        batch: &RaggedBatch<'_>,
        draws: &[Option<Draw>],
        choices: &mut Vec<Option<Choice>>,
    ) -> Result<(), DeviceError> {
        let _ = draws;
        choices.clear();
        self.step(batch)
    }

    /// An output of the last step as f32, such as logits `[rows, vocab]`. Float outputs only.
    fn output(&self, index: usize) -> &[f32];

    /// Any value of the last step that is still in the arena, by copy; the planner keeps values of a taps program.
    ///
    /// # Errors
    /// When the value has no slot.
    fn value(&self, id: LValueId) -> Result<Tensor, DeviceError>;

    /// Rows `0..len` of a sequence's cache as tensors `[kv_heads, len, head_size]` of the stored type: keys, values.
    ///
    /// # Errors
    /// When a page is out of range.
    fn read_cache(
        &self,
        slot: CacheSlot,
        table: &[PageId],
        len: usize,
    ) -> Result<(Tensor, Tensor), DeviceError>;

    /// Writes rows `0..len` of a sequence's cache from tensors `[kv_heads, len, head_size]`.
    ///
    /// # Errors
    /// When a page is out of range or the shapes are not the cache's.
    fn write_cache(
        &mut self,
        slot: CacheSlot,
        table: &[PageId],
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(), DeviceError>;

    /// A state of fixed size in a slot, in float32 and the extents of [`Lowered::states`].
    ///
    /// # Errors
    /// When the device holds no such state.
    fn read_state(&self, id: StateId, slot: StateSlot) -> Result<Tensor, DeviceError> {
        Err(DeviceError::Step(format!("no state {} in slot {}", id.0, slot.0)))
    }

    /// Writes a state of fixed size into a slot.
    ///
    /// # Errors
    /// When the device holds no such state, or the tensor is not float32 of its extents.
    fn write_state(&mut self, id: StateId, slot: StateSlot, state: &Tensor) -> Result<(), DeviceError> {
        Err(DeviceError::Step(format!("no state {} in slot {} for {state:?}", id.0, slot.0)))
    }
}
