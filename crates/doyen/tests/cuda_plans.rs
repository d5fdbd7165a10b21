//! What a card would be asked to do, without one: every case and package that the CPU takes can be planned.

#![cfg(feature = "cuda")]

use doyen::model;
use doyen_cuda::{
    CudaOptions, CudaPlanner, Dense, KvType,
    module::{Arch, Operand},
};
use doyen_graph::{
    lowered::Lowered,
    pass::lower::lower_case,
    testkit::{Case, Expect, Runner},
};
use doyen_runtime::{Plan, PlanOptions};
use doyen_tensor::{ByteCount, FloatType, Tensor};
use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
};

fn shared(path: &str) -> PathBuf {
    let root = std::env::var_os("DOYEN_SHARED").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")),
        PathBuf::from,
    );
    let path = root.join(path);
    assert!(
        path.exists(),
        "{} is missing: set DOYEN_SHARED to the folder of shared test data",
        path.display()
    );
    path
}

fn options(operand: Option<Operand>, kv: FloatType) -> CudaOptions {
    CudaOptions {
        ordinal: 0,
        operand,
        kv: KvType::Float(kv),
        cache: None,
        packaged: None,
        dense: Dense::default(),
    }
}

/// The kernels of a graph on every supported card.
fn kernels(graph: &Arc<Lowered>, options: &CudaOptions) -> Vec<String> {
    let plan = |arch| {
        let planner = CudaPlanner::new(options, arch);
        let limits = PlanOptions {
            // Some cases have rotary caches of few rows.
            context: 1,
            page_size: 16,
            memory: Some(ByteCount(64 << 30)),
            ..PlanOptions::default()
        };
        let plan = Plan::new(Arc::clone(graph), &planner, &limits).map_err(|e| format!("{arch}: {e}"))?;
        Ok::<_, String>(plan.nodes().iter().map(|n| n.kernel.clone()).collect::<Vec<_>>())
    };
    let plans: Result<Vec<_>, _> = Arch::SUPPORTED.into_iter().map(plan).collect();
    plans.unwrap_or_else(|e| panic!("{e}")).concat()
}

/// Plans what it is given to run, for cards that are not here.
struct Planned(RefCell<usize>);

impl Runner for Planned {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn run(
        &self,
        model: &doyen_graph::testkit::Model,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, doyen_graph::testkit::CaseError> {
        let case = lower_case(&model.graph, inputs)
            .map_err(|e| doyen_graph::testkit::CaseError::Load(format!("{e:?}")))?;
        let graph = Arc::new(case.graph);
        kernels(&graph, &options(None, FloatType::F32));
        kernels(&graph, &options(Some(Operand::Bf16), FloatType::BF16));
        *self.0.borrow_mut() += 1;
        Err(doyen_graph::testkit::CaseError::Run("planned".into()))
    }
}

#[test]
fn every_case_can_be_planned() {
    let cases = Case::find(&shared("conformance/cases")).unwrap();
    let planned = Planned(RefCell::new(0));
    for case in cases.iter().filter(|c| c.expect == Expect::Ok) {
        let verdict = format!("{:?}", doyen_graph::testkit::run_case(case, &planned));
        assert!(verdict.contains("planned"), "{}: {verdict}", case.name);
    }
    assert!(*planned.0.borrow() >= 300, "{} cases", planned.0.borrow());
}

fn lowered(package: &Path) -> Arc<Lowered> {
    Arc::new(model::lowered(&model::open(Some(package)).unwrap()).unwrap())
}

/// Converts a checkpoint and plans it; every node of its step must have a kernel, so that the step can be recorded.
fn judge_family(checkpoint: &Path, how: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("package");
    let output = Command::new(env!("CARGO_BIN_EXE_doyen"))
        .args(["convert", checkpoint.to_str().unwrap(), "-o", to.to_str().unwrap()])
        .args(how)
        .output()
        .unwrap();
    let name = checkpoint.display();
    assert!(output.status.success(), "{name} {how:?}: {output:?}");
    all_on_the_card(&format!("{name} {how:?}"), &to);
}

fn all_on_the_card(name: &str, package: &Path) {
    let kernels = kernels(&lowered(package), &options(Some(Operand::Bf16), FloatType::BF16));
    let host: std::collections::BTreeSet<_> = kernels.iter().filter(|k| k.contains("host")).collect();
    assert!(host.is_empty(), "{name}: {host:?}");
    assert!(kernels.iter().any(|k| k.contains("attention")), "{name}: {kernels:?}");
}

const FLOATS: &[&str] = &["--float", "--dtype", "f32"];

#[test]
fn every_family_runs_on_the_card_alone() {
    for name in [
        "llama",
        "qwen3_moe",
        "qwen3_moe_tied",
        "gpt_oss",
        "glm4",
        "glm4_moe",
        "deepseek_v2",
        "gemma3",
        "qwen3_next",
    ] {
        for how in [FLOATS, &[]] {
            judge_family(&shared(&format!("goldens/{name}/checkpoint")), how);
        }
    }
}

/// The references of the converter have no tokenizers; any will do.
#[test]
fn every_reference_of_the_converter_runs_on_the_card_alone() {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../doyen-convert/tests/data/families");
    let mut judged = 0;
    for reference in all.read_dir().unwrap() {
        let from = reference.unwrap().path();
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
        }
        let tokenizer = r#"{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}"#;
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
        judge_family(dir.path(), FLOATS);
        judged += 1;
    }
    assert!(judged >= 35, "{judged} references");
}

#[test]
fn packages_of_other_producers_run_on_the_card_alone() {
    for name in [
        "llama/package-mobius",
        "llama/package-genai-int4",
        "qwen3_moe/package-mobius",
        "gemma3/package-mobius",
        "gpt_oss/package-genai-fp32",
        "gpt_oss/package-genai-int4",
        "qwen3_next/package-mobius",
        "deepseek_v2/package-mobius",
    ] {
        all_on_the_card(name, &shared(&format!("goldens/{name}")));
    }
}
