//! Decode attention over long contexts: GB/s over the key and value bytes, beside a plain read of the same bytes.
//!
//! `cargo run --release -p doyen-cpu --example attention_bench [THREADS]`
//!
//! One sequence, one new token, 32 query heads on 8 key heads of 128 channels, pages of 32 positions in scattered
//! order. Reading and attending alternate, so that both see the same machine; the fastest of each counts.

use doyen_cpu::{
    detect::Isa,
    kernel::attention::{
        Attention, AttentionParams, Batch, KvCodec, KvLayout, KvScales, KvStore, Rows, Sink,
    },
    pool::Pool,
};
use doyen_graph::device::{GroupTables, SeqSpan};
use doyen_tensor::PageId;
use std::{
    error::Error,
    hint::black_box,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

const PAGE: usize = 32;
const REPETITIONS: usize = 15;

/// How a cache is stored in a run.
#[derive(Clone, Copy)]
enum Format {
    F32,
    Coded(KvCodec),
}

fn main() -> Result<(), Box<dyn Error>> {
    let threads = match std::env::args().nth(1) {
        Some(n) => n.parse::<NonZeroUsize>()?,
        None => std::thread::available_parallelism()?,
    };
    let pool = Pool::new(threads, true)?;
    let isa = Isa::detect();
    println!("{isa}, {threads} threads, pinned: {}", pool.is_pinned());
    println!("context  cache   KV bytes     read GB/s  attend GB/s  share  ms");
    for context in [4096, 32768] {
        for format in [Format::F32, Format::Coded(KvCodec::Int8), Format::Coded(KvCodec::Int4)] {
            measure(&pool, isa, context, format)?;
        }
    }
    Ok(())
}

fn measure(pool: &Pool, isa: Isa, context: usize, format: Format) -> Result<(), Box<dyn Error>> {
    let params = AttentionParams {
        heads: 32,
        kv_heads: 8,
        k_head_size: 128,
        v_head_size: 128,
        scale: 0.088,
        softcap: 0.0,
        window: None,
        causal: true,
    };
    let pages = context / PAGE;
    let layout =
        KvLayout { pages, kv_heads: params.kv_heads, page_size: PAGE, head_size: params.k_head_size };
    let numbers = layout.rows() * layout.head_size;
    let (name, row_bytes) = match format {
        Format::F32 => ("f32", 4 * layout.head_size),
        Format::Coded(codec) => {
            (if codec == KvCodec::Int8 { "int8" } else { "int4" }, codec.row_bytes(layout.head_size))
        }
    };
    let bytes = 2 * layout.rows() * row_bytes;
    let floats =
        |seed: usize| (0..numbers).map(|i| ((i * 31 + seed) % 17) as f32 / 17.0 - 0.5).collect::<Vec<_>>();
    let codes = |seed: usize| (0..bytes / 2).map(|i| ((i * 31 + seed) % 251) as u8).collect::<Vec<_>>();
    let is_float = matches!(format, Format::F32);
    let (k, v) = if is_float { (floats(1), floats(2)) } else { (Vec::new(), Vec::new()) };
    let (kc, vc) = if is_float { (Vec::new(), Vec::new()) } else { (codes(1), codes(2)) };
    let stores = match format {
        Format::F32 => (KvStore::f32(layout, &k)?, KvStore::f32(layout, &v)?),
        Format::Coded(codec) => {
            let store = |c| KvStore::coded(layout, codec, c, KvScales::Tensor(0.01));
            (store(&kc)?, store(&vc)?)
        }
    };

    let table: Vec<PageId> = (0..pages).map(|i| PageId((i * 37 % pages) as u32)).collect();
    let mut tables = GroupTables::default();
    tables.push(&table);
    let spans = [SeqSpan { first: 0, len: 1, past: context - 1 }];
    let batch = Batch::new(&spans, &tables, PAGE, pages, None)?;
    let q = vec![0.1; params.heads * params.k_head_size];
    let mut out = vec![0.0; params.heads * params.v_head_size];
    let mut scratch = vec![0.0; Attention::scratch_len(&params, pool.threads(), context)];
    let kernels = Attention::new(isa);

    let (mut read, mut attend) = (Duration::MAX, Duration::MAX);
    for _ in 0..REPETITIONS {
        read = read.min(timed(|| {
            if is_float {
                read_all(pool, &k);
                read_all(pool, &v);
            } else {
                read_all(pool, &kc);
                read_all(pool, &vc);
            }
        }));
        attend = attend.min(timed(|| {
            let rows = Rows::new(&q, q.len());
            kernels.attend(pool, &params, rows, stores, &batch, (Sink::None, None), &mut scratch, &mut out);
            black_box(&out);
        }));
    }
    let rate = |t: Duration| bytes as f64 / t.as_secs_f64() / 1e9;
    println!(
        "{context:7}  {name:5} {:6.1} MiB  {:10.1}  {:11.1}  {:4.0}%  {:.3}",
        bytes as f64 / f64::from(1 << 20),
        rate(read),
        rate(attend),
        100.0 * read.as_secs_f64() / attend.as_secs_f64(),
        1e3 * attend.as_secs_f64(),
    );
    Ok(())
}

fn timed(f: impl FnOnce()) -> Duration {
    let start = Instant::now();
    f();
    start.elapsed()
}

/// Touches every byte, with enough independent sums to be bound by memory.
fn read_all<T: Copy + Sync>(pool: &Pool, data: &[T]) {
    // SAFETY: plain numbers without padding, read as aligned words; the ends that do not fill a word are left out.
    let (_, words, _) = unsafe { data.align_to::<[u64; 16]>() };
    let split = pool.split(words.len(), 1);
    pool.run(&|worker| {
        let mut sums = [0u64; 16];
        for line in &words[split.range(worker)] {
            for (s, w) in sums.iter_mut().zip(line) {
                *s = s.wrapping_add(*w);
            }
        }
        black_box(sums);
    });
}
