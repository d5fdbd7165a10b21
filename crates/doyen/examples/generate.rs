//! The engine as a library: load the built-in model, submit a prompt, stream its tokens.
//!
//! `cargo run --release --example generate -- "The function returns"`

use doyen::{builtin, model};
use doyen_cpu::CpuDevice;
use doyen_graph::package::{EmbeddedSource, Package};
use doyen_runtime::{Engine, Event, Plan, PlanOptions, Request, SamplingParams};
use doyen_text::Detokenizer;
use std::{error::Error, io::Write, num::NonZeroUsize, sync::Arc};

fn main() -> Result<(), Box<dyn Error>> {
    let prompt = std::env::args().nth(1).unwrap_or_else(|| "The function returns".into());

    // A package is read, checked and lowered; a plan says what it will take before anything is allocated.
    let package = Package::open(Arc::new(EmbeddedSource::new(builtin::NAME, builtin::FILES)))?;
    let tokenizer = model::tokenizer(&package)?;
    let graph = Arc::new(model::lowered(&package)?);
    let device = CpuDevice::new(NonZeroUsize::new(2).unwrap_or(NonZeroUsize::MIN))?;
    let plan = Plan::new(graph, &device, &PlanOptions { context: 512, ..PlanOptions::default() })?;
    eprintln!("{}", plan.ledger());

    // Any number of requests may be submitted; a step advances all of them.
    let mut engine = Engine::new(&plan, &device)?;
    let tokens = tokenizer.encode(&prompt)?;
    let mut text = Detokenizer::continuing(&tokenizer, &tokens);
    let mut request = Request::new(tokens, SamplingParams::default());
    request.max_new_tokens = Some(64);
    engine.submit(request)?;
    print!("{prompt}");
    while !engine.is_idle() {
        for event in engine.step()? {
            if let Event::Token { token, .. } = event {
                print!("{}", text.push(*token));
                std::io::stdout().flush()?;
            }
        }
    }
    println!("{}", text.finish());
    Ok(())
}
