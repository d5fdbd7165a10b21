//! Attention over a cache: one sequence, pages in scattered order, the last positions of the context as queries.

use super::{BenchError, Env, Labels, Rng, Subject, Work, data::memory};
use crate::{
    kernel::attention::{Attention, AttentionParams, Batch, KvLayout, KvScales, KvStore, KvType, Rows, Sink},
    pool::Pool,
    session::Memory,
};
use doyen_graph::device::{GroupTables, SeqSpan};
use doyen_tensor::{FloatType, PageId};
use std::sync::Arc;

/// Positions of a page, as the runtime plans them.
const PAGE: usize = 32;

/// GroupQueryAttention of a step's last tokens over a context.
#[derive(Debug, Clone, Copy)]
pub struct CachedAttention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_size: usize,
    /// Positions in the cache, the new tokens' own included.
    pub context: usize,
    /// How they are stored.
    pub kv: KvType,
}

impl CachedAttention {
    const fn params(&self) -> AttentionParams {
        AttentionParams {
            heads: self.heads,
            kv_heads: self.kv_heads,
            k_head_size: self.head_size,
            v_head_size: self.head_size,
            scale: 0.088,
            softcap: 0.0,
            window: None,
            causal: true,
        }
    }

    fn check(&self, tokens: usize) -> Result<(), BenchError> {
        let sizes = [
            ("heads", self.heads),
            ("kv heads", self.kv_heads),
            ("head size", self.head_size),
            ("context", self.context),
        ];
        if let Some((what, _)) = sizes.into_iter().find(|(_, n)| *n == 0) {
            return Err(BenchError::Zero(what));
        }
        self.params().group().map_err(|e| BenchError::Unsupported(e.to_string()))?;
        if self.kv == KvType::Int4 && !self.head_size.is_multiple_of(2) {
            return Err(BenchError::Unsupported(format!(
                "4-bit caches need an even head size, not {}",
                self.head_size
            )));
        }
        if tokens > self.context {
            return Err(BenchError::Unsupported(format!(
                "{tokens} new tokens do not fit a context of {}: give a longer context or fewer tokens",
                self.context
            )));
        }
        Ok(())
    }

    const fn pages(&self) -> usize {
        self.context.div_ceil(PAGE)
    }

    /// Bytes of keys, or of values.
    fn store_bytes(&self) -> Option<usize> {
        let rows = self.pages().checked_mul(PAGE)?.checked_mul(self.kv_heads)?;
        self.head_size.checked_mul(4)?;
        rows.checked_mul(self.kv.row_bytes(self.head_size))
    }

    fn scratch_bytes(&self, threads: usize) -> Option<usize> {
        // An upper bound in checked arithmetic, so that what follows cannot overflow.
        let bound = self.heads.checked_mul(self.head_size.checked_add(2)?)?.checked_mul(self.context)?;
        bound.checked_mul(threads)?.checked_mul(512)?;
        Attention::scratch_len(&self.params(), threads, self.context).checked_mul(4)
    }
}

impl Subject for CachedAttention {
    fn bytes(&self) -> Option<usize> {
        self.store_bytes()?.checked_mul(2)
    }

    fn touched(&self, _tokens: usize) -> usize {
        self.bytes().unwrap_or(usize::MAX)
    }

    fn call_bytes(&self, env: &Env<'_>, tokens: usize) -> Result<Option<usize>, BenchError> {
        self.check(tokens)?;
        let numbers = || {
            let values = self.heads.checked_mul(self.head_size)?.checked_mul(tokens)?.checked_mul(8)?;
            values.checked_add(self.scratch_bytes(env.pool.threads())?)
        };
        Ok(numbers())
    }

    fn works<'a>(
        &self,
        env: &Env<'a>,
        rng: &mut Rng,
        copies: usize,
        tokens: &[usize],
    ) -> Result<Vec<Box<dyn Work + 'a>>, BenchError> {
        let bytes =
            self.bytes().and_then(|b| b.checked_mul(copies)).ok_or(BenchError::Overflow("the cache"))?;
        let mut caches = memory(bytes, "keys and values")?;
        match self.kv {
            KvType::F32 => rng.fill_stored(FloatType::F32, 1.0, &mut caches),
            KvType::F16 => rng.fill_stored(FloatType::F16, 1.0, &mut caches),
            KvType::BF16 => rng.fill_stored(FloatType::BF16, 1.0, &mut caches),
            KvType::Int8 | KvType::Int4 => rng.fill(&mut caches),
        }
        let caches = Arc::new(caches);
        let table = scattered(rng, self.pages());
        let work = |&tokens: &usize| -> Result<Box<dyn Work + 'a>, BenchError> {
            self.check(tokens)?;
            let mut tables = GroupTables::default();
            tables.push(&table);
            Ok(Box::new(Call {
                pool: env.pool,
                attention: *self,
                kernels: Attention::new(env.isa),
                isa: env.isa.name(),
                caches: Arc::clone(&caches),
                copies,
                copy: 0,
                spans: [SeqSpan { first: 0, len: tokens, past: self.context - tokens }],
                tables,
                q: rng.floats(tokens * self.heads * self.head_size),
                out: vec![0.0; tokens * self.heads * self.head_size],
                scratch: vec![0.0; Attention::scratch_len(&self.params(), env.pool.threads(), self.context)],
            }))
        };
        tokens.iter().map(work).collect()
    }
}

/// All pages in a random order.
fn scattered(rng: &mut Rng, pages: usize) -> Vec<PageId> {
    let mut table: Vec<PageId> = (0..pages as u32).map(PageId).collect();
    for i in (1..table.len()).rev() {
        table.swap(i, rng.below(i + 1));
    }
    table
}

struct Call<'a> {
    pool: &'a Pool,
    attention: CachedAttention,
    kernels: Attention,
    isa: &'static str,
    caches: Arc<Memory>,
    copies: usize,
    copy: usize,
    spans: [SeqSpan; 1],
    tables: GroupTables,
    q: Vec<f32>,
    out: Vec<f32>,
    scratch: Vec<f32>,
}

impl Work for Call<'_> {
    fn labels(&self) -> Labels {
        let CachedAttention { heads, kv_heads, head_size, context, kv } = self.attention;
        vec![
            ("m", self.spans[0].len.to_string()),
            ("context", context.to_string()),
            ("kv", kv.name().to_owned()),
            ("heads", heads.to_string()),
            ("kv_heads", kv_heads.to_string()),
            ("head_size", head_size.to_string()),
            ("isa", self.isa.to_owned()),
        ]
    }

    fn macs(&self) -> f64 {
        let CachedAttention { heads, head_size, .. } = self.attention;
        let SeqSpan { len, past, .. } = self.spans[0];
        // Query i sees past + i + 1 keys.
        let pairs = len as f64 * (past as f64 + f64::midpoint(len as f64, 1.0));
        2.0 * pairs * heads as f64 * head_size as f64
    }

    /// Keys and values of every position, without the unused rest of the last page.
    fn prepare(&mut self, call: usize) -> usize {
        self.copy = call % self.copies;
        let CachedAttention { kv_heads, head_size, context, kv, .. } = self.attention;
        2 * context * kv_heads * kv.row_bytes(head_size)
    }

    fn run(&mut self) {
        let attention = &self.attention;
        let CachedAttention { kv_heads, head_size, kv, .. } = *attention;
        let layout = KvLayout { pages: attention.pages(), kv_heads, page_size: PAGE, head_size };
        let copy = self.caches.len() / self.copies;
        let (keys, values) = self.caches[self.copy * copy..][..copy].split_at(copy / 2);
        let scale = if matches!(kv, KvType::Int8 | KvType::Int4) { 0.01 } else { 1.0 };
        let store = |bytes| KvStore::new(layout, kv, bytes, KvScales::Tensor(scale));
        let stores = store(keys).and_then(|k| Ok((k, store(values)?))).expect("stores of the layout's size");
        let batch = Batch::new(&self.spans, &self.tables, PAGE, layout.pages, None);
        let batch = batch.expect("a table for every position");
        let params = attention.params();
        let q = Rows::new(&self.q, params.heads * head_size);
        let (scratch, out) = (&mut self.scratch, &mut self.out);
        self.kernels.attend(self.pool, &params, q, stores, &batch, (Sink::None, None), scratch, out);
    }
}
