//! Runs a folder of operator cases on the reference interpreter.
//!
//! `cargo run -p doyen-graph --example conformance -- DIR [NAME_PART]`

use doyen_graph::testkit::{Case, Exceptions, Reference, run};
use std::{error::Error, path::Path, process::ExitCode};

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: conformance DIR [NAME_PART]")?;
    let part = args.next().unwrap_or_default();
    let mut cases = Case::find(Path::new(&dir))?;
    cases.retain(|c| c.name.contains(&part));
    let exceptions = Exceptions::read(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../conformance-exceptions.json"
    )))?;
    let report = run(&cases, &Reference, &exceptions);
    print!("{report}");
    Ok(if report.counts().failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
