//! Quantized and float products of `[2048, 2048]` beside a plain read loop of the same run.
//!
//! `cargo run --release -p doyen-cpu --example qlinear_bench -- [THREADS] [ROUNDS] [FILTER] [CACHE]`
//!
//! FILTER keeps the cases whose names contain all of its comma-separated parts (`m=1 ,bits=4`). CACHE is the size in MiB that
//! weights have to be cold for; 0 lets them stay in a cache. `doyen bench --op matmulnbits` measures any other shape.

use doyen_cpu::{
    bench::{Env, FloatMatMul, MatMul, Plan, QuantFormat, Rounds, Subject},
    detect::Isa,
    kernel::linear::{Mode, Orientation},
    machine::Machine,
    pool::Pool,
};
use doyen_tensor::{FloatType, format::Bits};
use std::{error::Error, num::NonZeroUsize};

const N: usize = 2048;
const K: usize = 2048;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let machine = Machine::read();
    let threads = args.next().map_or(Ok(machine.threads()), |a| a.parse())?;
    let samples = args.next().map_or(Ok(50), |a| a.parse())?;
    let filter = args.next().unwrap_or_default();
    let cache =
        args.next().map_or(Ok(machine.last_level_cache()), |a| a.parse().map(|mib: usize| mib << 20))?;
    let pool = Pool::new(NonZeroUsize::new(threads).ok_or("no threads")?, true)?;
    for mode in [Mode::Fast, Mode::Exact] {
        let env = Env { pool: &pool, isa: Isa::chosen()?, mode };
        let mut subjects = quantized();
        if mode == Mode::Exact {
            subjects.extend(floats());
        }
        let plan = Plan::new(&env, subjects, &[1, 2, 4, 8, 16, 128], cache)?;
        println!("{mode:?}: {} to measure in", plan.bytes());
        let mut suite = plan.build(&env)?;
        suite.retain(|name| filter.split(',').all(|f| name.contains(f)));
        println!("{}", suite.measure(Rounds { samples, seconds: 10.0 }, || {}));
    }
    Ok(())
}

fn quantized() -> Vec<Box<dyn Subject>> {
    let formats = [
        (Bits::B4, 32, FloatType::F16, false),
        (Bits::B4, 32, FloatType::F16, true),
        (Bits::B4, 128, FloatType::F16, false),
        (Bits::B4, 32, FloatType::F32, false),
        (Bits::B8, 32, FloatType::F16, false),
        (Bits::B8, 128, FloatType::F16, true),
        (Bits::B2, 32, FloatType::F16, false),
        (Bits::B2, 64, FloatType::F16, true),
        (Bits::B2, 128, FloatType::F16, false),
        (Bits::B4, K, FloatType::F16, false),
    ];
    let subject = |(bits, block, scales, zero_points)| {
        let format = QuantFormat { bits, block, scales, zero_points };
        Box::new(MatMul { rows: N, cols: K, format }) as Box<dyn Subject>
    };
    formats.map(subject).into()
}

fn floats() -> Vec<Box<dyn Subject>> {
    let mut subjects = Vec::new();
    for ty in [FloatType::F32, FloatType::F16, FloatType::BF16] {
        for orientation in [Orientation::RowMajor, Orientation::ColumnMajor] {
            subjects.push(Box::new(FloatMatMul { rows: N, cols: K, ty, orientation }) as Box<dyn Subject>);
        }
    }
    subjects
}
