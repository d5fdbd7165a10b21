//! Attention over long contexts (32 query heads on 8 key heads of 128 channels) beside a plain read loop.
//!
//! `cargo run --release -p doyen-cpu --example attention_bench -- [THREADS] [ROUNDS] [TOKENS]`
//!
//! One sequence whose last TOKENS (1) positions are the queries. `doyen bench --op gqa` measures any other shape.

use doyen_cpu::{
    bench::{CachedAttention, Env, KvType, Plan, Rounds, Subject},
    detect::Isa,
    kernel::linear::Mode,
    machine::Machine,
    pool::Pool,
};
use std::{error::Error, num::NonZeroUsize};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let machine = Machine::read();
    let threads = args.next().map_or(Ok(machine.threads()), |a| a.parse())?;
    let samples = args.next().map_or(Ok(15), |a| a.parse())?;
    let tokens = args.next().map_or(Ok(1), |a| a.parse())?;
    let pool = Pool::new(NonZeroUsize::new(threads).ok_or("no threads")?, true)?;
    let env = Env { pool: &pool, isa: Isa::chosen()?, mode: Mode::Fast };
    let mut subjects: Vec<Box<dyn Subject>> = Vec::new();
    for context in [4096, 32768] {
        for kv in [KvType::F32, KvType::F16, KvType::BF16, KvType::Int8, KvType::Int4] {
            subjects.push(Box::new(CachedAttention { heads: 32, kv_heads: 8, head_size: 128, context, kv }));
        }
    }
    let plan = Plan::new(&env, subjects, &[tokens], machine.last_level_cache())?;
    println!("{}, {} to measure in", env.isa, plan.bytes());
    println!("{}", plan.build(&env)?.measure(Rounds { samples, seconds: 30.0 }, || {}));
    Ok(())
}
