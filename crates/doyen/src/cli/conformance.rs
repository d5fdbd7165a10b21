//! `doyen conformance`: operator cases on the reference or on a backend.

use super::{
    Outcome,
    options::{NumericsArg, at_least_one},
};
use crate::{
    conformance::DeviceRunner,
    console,
    device::{DeviceArgs, DeviceName},
};
use anyhow::{Context, Result};
use doyen_graph::{
    device::Numerics,
    testkit::{Case, Exceptions, Reference, Report, Runner, run},
};
use std::{
    num::NonZeroUsize,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Run a folder of operator cases
///
/// Each case is a folder in the layout of ONNX backend tests: model.onnx, test_data_set_0/input_0.pb, output_0.pb, ...,
/// and optionally a case.json with tolerances or an expected error. For anyone who adds an operator or a backend.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  doyen conformance conformance/cases
  doyen conformance conformance/cases --backend cpu
  doyen conformance onnx-node-tests --backend reference --json")]
pub struct Args {
    /// Folder of cases, or of folders of cases
    dir: PathBuf,

    /// What runs the cases: reference, cpu, cuda or cuda:N
    #[arg(long, value_name = "BACKEND", default_value = "reference")]
    backend: Backend,

    /// How a device computes quantized products
    #[arg(long, value_enum, default_value_t = NumericsArg::Exact)]
    numerics: NumericsArg,

    /// Cases that are skipped, with reasons [default: conformance-exceptions.json, if it is there]
    #[arg(long, value_name = "FILE")]
    exceptions: Option<PathBuf>,

    /// Threads of the CPU backend [default: the CPUs this process may use]
    #[arg(value_parser = at_least_one, long, value_name = "N", allow_negative_numbers = true)]
    threads: Option<NonZeroUsize>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// The file of exceptions of a source tree.
const EXCEPTIONS: &str = "conformance-exceptions.json";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Backend {
    /// The scalar reference interpreter.
    #[default]
    Reference,
    /// A device's kernels, on the lowered graph.
    Device(DeviceName),
}

impl FromStr for Backend {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        if s == "reference" {
            return Ok(Self::Reference);
        }
        s.parse().map(Self::Device).map_err(|e: String| e.replace("expected", "expected reference,"))
    }
}

impl Args {
    pub(super) fn run(self) -> Result<Outcome> {
        let cases = Case::find(&self.dir)?;
        let path = self.exceptions.as_deref().or_else(|| Some(Path::new(EXCEPTIONS)).filter(|p| p.exists()));
        let exceptions = match path {
            Some(path) => Exceptions::read(path)
                .with_context(|| format!("cannot read the exceptions {}", path.display()))?,
            None => Exceptions::default(),
        };
        let runner: Box<dyn Runner> = match self.backend {
            Backend::Reference => Box::new(Reference),
            Backend::Device(device) => {
                let args = DeviceArgs { device, ..DeviceArgs::default() };
                let runner = DeviceRunner::new(args.open(self.threads, Numerics::Exact)?.device);
                Box::new(runner.numerics(self.numerics.into()))
            }
        };
        let report = quietly(|| run(&cases, runner.as_ref(), &exceptions));
        if self.json {
            console::print(&format!("{:#}\n", report.to_json()))?;
        } else {
            console::print(&report.to_string())?;
        }
        let failed = report.counts().failed > 0;
        Ok(if failed { Outcome::Different } else { Outcome::Done })
    }
}

/// A panic inside a case is a failure of the case, reported as such; the hook would print it a second time.
fn quietly(f: impl FnOnce() -> Report) -> Report {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let report = f();
    std::panic::set_hook(hook);
    report
}
