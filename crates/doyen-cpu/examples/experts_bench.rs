//! One mixture-of-experts layer (64 experts, 8 per token, hidden 2048, intermediate 768) beside a plain read loop.
//!
//! `cargo run --release -p doyen-cpu --example experts_bench -- [THREADS] [ROUNDS] [FILTER]`
//!
//! FILTER keeps the cases whose names contain all of its comma-separated parts (`m=1 ,fc1=4`). Scales are f16, blocks
//! 32 (64 at 2 bits). `doyen bench --op qmoe` measures any other layer.

use doyen_cpu::{
    bench::{Env, ExpertLayer, Plan, QuantFormat, Rounds, Subject},
    detect::Isa,
    kernel::linear::Mode,
    machine::Machine,
    pool::Pool,
};
use doyen_tensor::{FloatType, format::Bits};
use std::{error::Error, num::NonZeroUsize};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let machine = Machine::read();
    let threads = args.next().map_or(Ok(machine.threads()), |a| a.parse())?;
    let samples = args.next().map_or(Ok(15), |a| a.parse())?;
    let filter = args.next().unwrap_or_default();
    let pool = Pool::new(NonZeroUsize::new(threads).ok_or("no threads")?, true)?;
    for mode in [Mode::Fast, Mode::Exact] {
        let env = Env { pool: &pool, isa: Isa::chosen()?, mode };
        let pairs = [(4, 4), (8, 8), (2, 2), (2, 4), (4, 8)];
        let subjects = pairs.map(|(fc1, fc2)| Box::new(layer(fc1, fc2)) as Box<dyn Subject>);
        let plan = Plan::new(&env, subjects.into(), &[1, 8, 128], machine.last_level_cache())?;
        println!("{mode:?}: {} to measure in", plan.bytes());
        let mut suite = plan.build(&env)?;
        suite.retain(|name| filter.split(',').all(|f| name.contains(f)));
        println!("{}", suite.measure(Rounds { samples, seconds: 30.0 }, || {}));
    }
    Ok(())
}

fn layer(fc1: i64, fc2: i64) -> ExpertLayer {
    let format = |bits| QuantFormat {
        bits: Bits::new(bits).expect("2, 4 or 8"),
        block: if bits == 2 { 64 } else { 32 },
        scales: FloatType::F16,
        zero_points: false,
    };
    ExpertLayer { experts: 64, top_k: 8, hidden: 2048, inter: 768, fc1: format(fc1), fc2: format(fc2) }
}
