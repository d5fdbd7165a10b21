//! The byte ledger: where every byte of a loaded model goes.

use doyen_graph::{
    device::{GroupPages, NodePlan, Program},
    lowered::{LOp, Operand},
};
use doyen_tensor::ByteCount;
use std::{collections::BTreeMap, fmt};

/// One line of the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    /// What the bytes are for.
    pub what: String,
    /// How many.
    pub bytes: ByteCount,
    /// Whether they are pages of the package file, shared and evictable, rather than memory of this process.
    pub mapped: bool,
}

/// Where the bytes go.
#[derive(Debug, Clone, Default)]
pub struct Ledger {
    entries: Vec<LedgerEntry>,
    kv_per_token: ByteCount,
    kv_types: Vec<&'static str>,
    context: usize,
    sequences: usize,
}

impl Ledger {
    pub(super) fn new(
        program: &Program,
        nodes: &[NodePlan],
        page_bytes: &[ByteCount],
        kv: &'static str,
    ) -> Self {
        let limits = &program.limits;
        let caches = || page_bytes.iter().zip(&program.pages);
        let growing: ByteCount = caches().filter(|(_, p)| p.window.is_none()).map(|(&b, _)| b).sum();
        let mut ledger = Self {
            kv_per_token: ByteCount(growing.0 / limits.page_size as u64),
            kv_types: kv_types(program, kv, |_| true),
            context: limits.context,
            sequences: limits.sequences,
            ..Self::default()
        };
        for (what, bytes) in mapped_weights(program) {
            ledger.push(what, bytes, true);
        }
        ledger.push("weights made at load", nodes.iter().map(|n| n.resident).sum(), false);
        for windows in [false, true] {
            let types = kv_types(program, kv, |p| p.window.is_some() == windows).join(" and ");
            if types.is_empty() {
                continue;
            }
            let what = if windows {
                format!("kv cache of windows in {types}, {} sequences", limits.sequences)
            } else {
                format!("kv cache in {types}, {} x {} positions", limits.sequences, limits.context)
            };
            let group = |(bytes, p): (&ByteCount, &GroupPages)| bytes.0.saturating_mul(p.pages as u64);
            let bytes = caches().filter(|(_, p)| p.window.is_some() == windows).map(group);
            ledger.push(what, ByteCount(bytes.fold(0, u64::saturating_add)), false);
        }
        if program.state_slots > 0 {
            let what = format!("recurrent states, {} sequences", limits.sequences);
            let bytes = program.graph.state_bytes().0.saturating_mul(program.state_slots as u64);
            ledger.push(what, ByteCount(bytes), false);
        }
        let what = format!("activations, {} tokens a step", limits.tokens);
        ledger.push(what, ByteCount(program.arena as u64), false);
        ledger.push("scratch", ByteCount(program.scratch as u64), false);
        ledger
    }

    fn push(&mut self, what: impl Into<String>, bytes: ByteCount, mapped: bool) {
        self.entries.push(LedgerEntry { what: what.into(), bytes, mapped });
    }

    /// The lines.
    pub fn entries(&self) -> &[LedgerEntry] {
        &self.entries
    }

    /// Bytes this process allocates.
    pub fn allocated(&self) -> ByteCount {
        self.entries.iter().filter(|e| !e.mapped).map(|e| e.bytes).sum()
    }

    /// Bytes read from the package where they lie.
    pub fn mapped(&self) -> ByteCount {
        self.entries.iter().filter(|e| e.mapped).map(|e| e.bytes).sum()
    }

    /// KV bytes that one more position of one sequence takes, over all layers whose caches grow with the context.
    pub const fn kv_per_token(&self) -> ByteCount {
        self.kv_per_token
    }

    /// How keys and values are stored: one name for all layers, or several where the graph quantizes some.
    pub fn kv_types(&self) -> &[&'static str] {
        &self.kv_types
    }

    /// What this process allocates, in a line.
    pub(super) fn parts(&self) -> String {
        let parts = self.entries.iter().filter(|e| !e.mapped && e.bytes.0 > 0);
        parts.map(|e| format!("{} {}", e.what.replace(',', " of"), e.bytes)).collect::<Vec<_>>().join(", ")
    }

    pub(super) fn hint(&self) -> String {
        let context = if self.sequences > 1 {
            format!(
                "run fewer sequences at once than {}, or a context shorter than {}",
                self.sequences, self.context
            )
        } else {
            format!(
                "a context shorter than {} (--context) takes {} less per position",
                self.context, self.kv_per_token
            )
        };
        if self.kv_types.contains(&"f32") {
            format!("{context}, and --kv-dtype f16 halves the kv cache")
        } else {
            context
        }
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.entries.iter().map(|e| e.what.len()).max().unwrap_or(0);
        for e in &self.entries {
            let how = if e.mapped { "mapped" } else { "allocated" };
            writeln!(f, "{:width$}  {:>12}  {how}", e.what, e.bytes.to_string())?;
        }
        writeln!(f, "{:width$}  {:>12}  mapped", "total", self.mapped().to_string())?;
        write!(f, "{:width$}  {:>12}  allocated", "", self.allocated().to_string())
    }
}

/// The names of how the cache groups whose pages pass `which` are stored, each once.
fn kv_types(program: &Program, kv: &'static str, which: impl Fn(&GroupPages) -> bool) -> Vec<&'static str> {
    let groups = program.graph.groups.iter().zip(&program.pages).filter(|(_, p)| which(p));
    let mut names: Vec<_> = groups.map(|(g, _)| g.format.name(kv)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Bytes of constants by the kind of node that reads them; bytes shared by several constants count once.
fn mapped_weights(program: &Program) -> Vec<(&'static str, ByteCount)> {
    let graph = &program.graph;
    let mut ranges: BTreeMap<(usize, usize), &'static str> = BTreeMap::new();
    for node in &graph.nodes {
        let what = match node.op {
            LOp::Experts(_) => "expert weights",
            _ => "other weights",
        };
        for operand in node.inputs.iter().flatten() {
            if let Operand::Const(c) = operand {
                for part in graph.constant(*c).data.parts() {
                    ranges.entry((part.bytes.as_ptr() as usize, part.bytes.len())).or_insert(what);
                }
            }
        }
    }
    let mut sums: BTreeMap<&'static str, ByteCount> = BTreeMap::new();
    for ((_, len), what) in ranges {
        *sums.entry(what).or_default() += ByteCount(len as u64);
    }
    sums.into_iter().collect()
}

/// What the system says can be allocated without swapping.
pub(super) fn available_memory() -> Option<ByteCount> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ByteCount(kib * 1024))
}
