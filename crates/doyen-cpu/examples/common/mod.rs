//! What the kernel benchmarks share: random weights, a plain read loop, interleaved timing and its table.

use doyen_cpu::pool::Pool;
use doyen_tensor::{
    FloatType, FloatView,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use half::{bf16, f16};
use std::{hint::black_box, sync::atomic::AtomicU64, sync::atomic::Ordering, time::Instant};

/// A small generator; benchmarks need other numbers every call, not good ones.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(n).collect()
    }
}

/// `values` stored as `ty`.
pub fn store(ty: FloatType, values: &[f32]) -> Vec<u8> {
    match ty {
        FloatType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        FloatType::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        FloatType::BF16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
    }
}

/// Several quantized matrices of one format, one after the other.
pub struct Quantized {
    pub rows: usize,
    pub cols: usize,
    pub bits: Bits,
    pub block: usize,
    pub scale: FloatType,
    pub zero_points: bool,
    codes: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>,
}

impl Quantized {
    /// `count` matrices `[rows, cols]` with random contents and, if asked for, packed zero points.
    pub fn random(
        rng: &mut Rng,
        count: usize,
        (rows, cols): (usize, usize),
        (bits, block): (Bits, usize),
        scale: FloatType,
        zero_points: bool,
    ) -> Self {
        let (n, blocks) = (count * rows, cols.div_ceil(block));
        let scales: Vec<f32> = (0..n * blocks).map(|_| rng.float() * 0.01).collect();
        let zeros = if zero_points { rng.bytes(n * bits.packed_len(blocks)) } else { Vec::new() };
        let codes = rng.bytes(n * bits.packed_len(cols));
        Self { rows, cols, bits, block, scale, zero_points, codes, scales: store(scale, &scales), zeros }
    }

    /// Matrix `i`.
    pub fn get(&self, i: usize) -> QuantMatrix<'_> {
        let blocks = self.cols.div_ceil(self.block);
        let (row, zero_row) = (self.bits.packed_len(self.cols), self.bits.packed_len(blocks));
        let part = |n: usize| i * self.rows * n..(i + 1) * self.rows * n;
        QuantMatrix {
            rows: self.rows,
            cols: self.cols,
            bits: self.bits,
            block: self.block,
            codes: &self.codes[part(row)],
            row_bytes: row,
            scales: FloatView::new(self.scale, &self.scales[part(blocks * self.scale.size())])
                .expect("whole scales"),
            zero_points: if self.zero_points {
                ZeroPoints::PerBlock { packed: &self.zeros[part(zero_row)], row_bytes: zero_row }
            } else {
                ZeroPoints::Default
            },
        }
    }
}

/// Reads every byte of `data` over the pool, as a lower bound for any kernel that has to.
pub fn read(pool: &Pool, data: &[u8]) {
    let sum = AtomicU64::new(0);
    let split = pool.split(data.len(), 4096);
    pool.run(&|worker| {
        let mut lanes = [0u64; 16];
        for chunk in data[split.range(worker)].as_chunks::<128>().0 {
            for (lane, word) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
                *lane = lane.wrapping_add(u64::from_le_bytes(*word));
            }
        }
        sum.fetch_add(lanes.iter().fold(0, |a, b| a.wrapping_add(*b)), Ordering::Relaxed);
    });
    black_box(sum.into_inner());
}

/// Something to time: a name, the bytes it has to read, its multiply-adds, and what it does in repetition `i`.
pub struct Case<'a> {
    pub name: String,
    pub bytes: f64,
    pub macs: f64,
    pub run: Box<dyn FnMut(usize) + 'a>,
}

/// Bytes of one sample of the read loop.
const FLOOR: usize = 8 << 20;

/// Runs all cases and the read loop in turn, `rounds` times, and prints for the fastest round and the median one: time,
/// rate, share of the read loop's rate (fastest to fastest, median to median).
///
/// On a machine that does nothing else the two agree; on a busy one samples of about a millisecond are often enough
/// left alone for the fastest to mean something.
pub fn report(pool: &Pool, rounds: usize, floor: &[u8], cases: &mut [Case<'_>]) {
    let mut times = vec![Vec::new(); cases.len()];
    let mut floors = Vec::new();
    for round in 0..=rounds {
        let pieces = floor.len() / FLOOR;
        // Every round reads four other pieces.
        for piece in 4 * round..4 * round + 4 {
            let piece = &floor[piece % pieces * FLOOR..][..FLOOR];
            floors.push(seconds(|| read(pool, piece)));
        }
        for (case, times) in cases.iter_mut().zip(&mut times) {
            let s = seconds(|| (case.run)(round));
            // Round 0 warms up.
            if round > 0 {
                times.push(s);
            }
        }
    }
    let floor = best_and_median(&mut floors).map(|s| FLOOR as f64 / s);
    println!("{} threads, {rounds} rounds; best | median", pool.threads());
    println!("read loop: {:.1} | {:.1} GB/s", floor[0] / 1e9, floor[1] / 1e9);
    println!("{:55} {:>17} {:>13} {:>11} {:>15}", "case", "ms", "GB/s", "of read", "GMAC/s");
    for (case, times) in cases.iter().zip(&mut times) {
        let [best, median] = best_and_median(times);
        let rate = |s: f64| case.bytes / s;
        let share = |s: f64, floor: f64| 100.0 * rate(s) / floor;
        println!(
            "{:55} {:8.3} {:8.3} {:6.1} {:6.1} {:4.0}% {:4.0}% {:7.1} {:7.1}",
            case.name,
            1e3 * best,
            1e3 * median,
            rate(best) / 1e9,
            rate(median) / 1e9,
            share(best, floor[0]),
            share(median, floor[1]),
            case.macs / best / 1e9,
            case.macs / median / 1e9,
        );
    }
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

fn best_and_median(v: &mut [f64]) -> [f64; 2] {
    v.sort_by(f64::total_cmp);
    [0, v.len() / 2].map(|i| v.get(i).copied().unwrap_or(f64::NAN))
}

/// The instruction set that `DOYEN_CPU` names, or the best one.
pub fn isa() -> doyen_cpu::detect::Isa {
    use doyen_cpu::detect::Isa;
    std::env::var("DOYEN_CPU").ok().and_then(|name| Isa::from_name(&name)).unwrap_or_else(Isa::detect)
}
