//! Loads cases, runs them on a backend and judges what comes out.

use super::{
    case::{Case, DataSet, Expect},
    compare::compare,
    exceptions::Exceptions,
    report::{Outcome, Report, Verdict},
};
use crate::{
    check::check,
    interp::Interpreter,
    ir::Graph,
    onnx::decode,
    package::{DataFiles, DirSource, PackageSource},
};
use doyen_tensor::{ByteCount, Tensor};
use std::{any::Any, panic};

/// Memory a case may take on the reference; the largest honest one takes a few MiB.
const CASE_MEMORY: ByteCount = ByteCount(256 << 20);

/// A case's model, decoded and checked.
#[derive(Debug, Clone)]
pub struct Model {
    /// The graph.
    pub graph: Graph,
}

/// Why a backend did not give outputs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CaseError {
    /// The model was refused before the inputs mattered.
    #[error("{0}")]
    Load(String),
    /// The inputs were refused.
    #[error("{0}")]
    Run(String),
}

/// A backend under test.
pub trait Runner {
    /// Name, as exceptions use it.
    fn name(&self) -> &str;

    /// Prepares the model and runs it once; outputs in the order of the graph's.
    ///
    /// # Errors
    /// Says whether the model or the inputs are refused.
    fn run(&self, model: &Model, inputs: &[Tensor]) -> Result<Vec<Tensor>, CaseError>;
}

/// The reference interpreter.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

impl Runner for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn run(&self, model: &Model, inputs: &[Tensor]) -> Result<Vec<Tensor>, CaseError> {
        let graph = &model.graph;
        if inputs.len() != graph.inputs.len() {
            return Err(CaseError::Run(format!(
                "expected {} graph inputs, found {}",
                graph.inputs.len(),
                inputs.len()
            )));
        }
        let named: Vec<(&str, Tensor)> = graph
            .inputs
            .iter()
            .zip(inputs)
            .map(|(&v, t)| (graph.value(v).name.as_str(), t.clone()))
            .collect();
        Interpreter::new(graph)
            .with_memory_limit(CASE_MEMORY)
            .run(&named)
            .map_err(|e| CaseError::Run(e.to_string()))
    }
}

/// Runs cases on a backend. A case of the exceptions is skipped with its reason.
pub fn run(cases: &[Case], runner: &dyn Runner, exceptions: &Exceptions) -> Report {
    let outcome = |case: &Case| {
        let verdict = match exceptions.find(&case.name, runner.name()) {
            Some(e) => Verdict::Skipped(e.reason.clone()),
            None => run_case(case, runner),
        };
        let op = if case.op.is_empty() { first_operator(case) } else { case.op.clone() };
        Outcome { case: case.name.clone(), op, verdict }
    };
    Report { backend: runner.name().to_owned(), cases: cases.iter().map(outcome).collect() }
}

/// Runs one case; a panic is a failure with its message.
pub fn run_case(case: &Case, runner: &dyn Runner) -> Verdict {
    let result = panic::catch_unwind(panic::AssertUnwindSafe(|| judge(case, runner)));
    match result {
        Ok(Ok(())) => Verdict::Passed,
        Ok(Err(why)) => Verdict::Failed(why),
        Err(payload) => Verdict::Failed(format!("panicked: {}", panic_message(payload.as_ref()))),
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("without a message")
}

fn judge(case: &Case, runner: &dyn Runner) -> Result<(), String> {
    let model = match load(case) {
        Ok(model) => model,
        Err(e) => return refused(case, &CaseError::Load(e)),
    };
    let sets = case.data_sets().map_err(|e| e.to_string())?;
    if case.expect == Expect::Ok && sets.is_empty() {
        return Err("the case has no test_data_set_0".into());
    }
    if case.expect == Expect::LoadError {
        // Loading is done and nothing failed. A backend may still find it when it prepares the model; the inputs, if
        // the case has any, only let it get that far.
        let inputs = sets.first().map_or(&[][..], |s| &s.inputs);
        return match runner.run(&model, inputs) {
            Err(e @ CaseError::Load(_)) => refused(case, &e),
            Err(CaseError::Run(e)) => Err(format!("expected a load error, found a run error: {e}")),
            Ok(_) => Err("expected a load error, the model runs".into()),
        };
    }
    for (i, set) in sets.iter().enumerate() {
        match runner.run(&model, &set.inputs) {
            Err(e) => refused(case, &e)?,
            Ok(_) if case.expect == Expect::RunError => {
                return Err("expected a run error, the model runs".into());
            }
            Ok(outputs) => outputs_match(case, &model, set, &outputs).map_err(|e| at(i, &e))?,
        }
    }
    Ok(())
}

fn at(set: usize, message: &str) -> String {
    if set == 0 { message.to_owned() } else { format!("data set {set}: {message}") }
}

fn load(case: &Case) -> Result<Model, String> {
    let mut graph = read(case)?;
    check(&mut graph).map_err(|e| e.to_string())?;
    Ok(Model { graph })
}

fn read(case: &Case) -> Result<Graph, String> {
    let source = DirSource::open(&case.path).map_err(|e| e.to_string())?;
    let bytes = source.required("model.onnx").map_err(|e| e.to_string())?;
    decode(bytes, &DataFiles::beside(&source, "model.onnx")).map_err(|e| e.to_string())
}

/// The operator of a case that does not say: its model's first.
fn first_operator(case: &Case) -> String {
    read(case).ok().and_then(|g| g.nodes.first().map(crate::ir::Node::op_name)).unwrap_or_else(|| "?".into())
}

/// Judges an error by what the case expects.
fn refused(case: &Case, error: &CaseError) -> Result<(), String> {
    let (stage, message) = match error {
        CaseError::Load(m) => ("load", m),
        CaseError::Run(m) => ("run", m),
    };
    match (case.expect, error) {
        (Expect::Ok, _) => Err(format!("{stage} error: {message}")),
        (Expect::LoadError, CaseError::Run(_)) => {
            Err(format!("expected a load error, found a run error: {message}"))
        }
        _ if names_one(&case.matches, message) => Ok(()),
        _ => Err(format!("the error should name {}: {message}", case.matches)),
    }
}

/// Whether one of the `|`-separated alternatives is a whole word of the message; none at all means any message.
fn names_one(alternatives: &str, message: &str) -> bool {
    let word = |c: char| c.is_alphanumeric() || c == '_';
    alternatives.is_empty()
        || alternatives.split('|').any(|a| {
            message.match_indices(a).any(|(at, _)| {
                !message[..at].chars().next_back().is_some_and(word)
                    && !message[at + a.len()..].chars().next().is_some_and(word)
            })
        })
}

fn outputs_match(case: &Case, model: &Model, set: &DataSet, outputs: &[Tensor]) -> Result<(), String> {
    if outputs.len() != set.outputs.len() {
        return Err(format!("expected {} outputs, found {}", set.outputs.len(), outputs.len()));
    }
    for ((got, want), &id) in outputs.iter().zip(&set.outputs).zip(&model.graph.outputs) {
        compare(got, want, case.tolerance)
            .map_err(|e| format!("output {:?}: {e}", model.graph.value(id).name))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_must_name_a_whole_word() {
        for (alternatives, message, yes) in [
            ("k", "attribute k: expected 1", true),
            ("k", "attribute kk: expected 1", false),
            ("k", "top_k", false),
            ("a|fc1_scales", "input fc1_scales: expected", true),
            ("outside.bin", "in \"../outside.bin\" is", true),
            ("", "anything", true),
        ] {
            assert_eq!(names_one(alternatives, message), yes, "{alternatives} in {message}");
        }
    }
}
