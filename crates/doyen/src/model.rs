//! A package on a backend, ready to generate: engine, tokenizer, chat template, search settings.

use crate::{builtin, cli::ModelArgs, console, device::host_notice};
use anyhow::{Context, Result, anyhow, bail};
use doyen_cpu::{
    CpuDevice,
    detect::{Isa, VARIABLE},
    machine::Machine,
};
use doyen_graph::{
    device::{Device, Numerics},
    lowered::Lowered,
    package::{DirSource, EmbeddedSource, MANIFEST, Package, PackageSource, Search},
    pass::{dead, fold, lower},
};
use doyen_runtime::{Engine, Plan, PlanOptions, SamplingParams};
use doyen_tensor::{ByteCount, TokenId};
use doyen_text::{ChatInput, ChatTemplates, Now, Tokenizer, TokenizerFiles};
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, num::NonZeroUsize, path::Path, sync::Arc};

/// Context that is planned when neither the user nor the model says less.
pub const DEFAULT_CONTEXT: usize = 4096;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: content.into() }
    }
}

/// A loaded model.
pub struct Model {
    /// Runs it.
    pub engine: Engine,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Tokens that end a generation.
    pub eos: Vec<TokenId>,
    /// The package's search settings.
    pub sampling: SamplingParams,
    /// What keys and values are kept in.
    pub kv_dtype: String,
    /// Whether they can be read matters only to those who chat.
    templates: Result<Option<ChatTemplates>>,
}

/// Where a package comes from: the directory, or the built-in one.
///
/// # Errors
/// When the directory cannot be opened.
pub fn source(package: Option<&Path>) -> Result<Arc<dyn PackageSource>> {
    Ok(match package {
        Some(path) => Arc::new(DirSource::open(path)?),
        None => Arc::new(EmbeddedSource::new(builtin::NAME, builtin::FILES)),
    })
}

/// Opens and checks a package, the built-in one when no directory is given.
///
/// # Errors
/// Names the package, and what in it is not as it should be.
pub fn open(package: Option<&Path>) -> Result<Package> {
    let source = source(package)?;
    let name = source.describe();
    Package::open(source).with_context(|| format!("cannot use {name}"))
}

/// The CPU with the threads asked for, or all that this process may use, and the instruction set of [`VARIABLE`].
/// Says so when there are more threads than CPUs, and when no vector kernels run.
///
/// # Errors
/// When the threads cannot be started, or the variable names an instruction set that is not there.
pub fn cpu(threads: Option<NonZeroUsize>) -> Result<CpuDevice> {
    let (isa, machine) = (Isa::chosen()?, Machine::read());
    let all = NonZeroUsize::new(machine.threads()).unwrap_or(NonZeroUsize::MIN);
    let device = CpuDevice::with_isa(threads.unwrap_or(all), isa)?;
    if isa == Isa::Scalar {
        console::say(scalar_notice(Isa::detect()));
    }
    if let Some(warning) = threads.and_then(|n| thread_warning(n.get(), &machine)) {
        console::say(warning);
    }
    Ok(device)
}

fn scalar_notice(best: Isa) -> String {
    let why = match best {
        Isa::Scalar => "this CPU has no instruction set that vector kernels are written for".to_owned(),
        best => format!("{VARIABLE} asks for them, the best of this CPU is {best}"),
    };
    format!("note: scalar kernels run, which are many times slower than vector ones: {why}")
}

fn thread_warning(threads: usize, machine: &Machine) -> Option<String> {
    let Machine { online, affinity, quota, .. } = *machine;
    let limit = match quota {
        Some(q) if threads as f64 > q.ceil() => format!("the control group's quota of {q:.1} CPUs"),
        _ if threads > affinity && affinity < online => {
            format!("the {affinity} of {online} CPUs that this process's affinity mask allows")
        }
        _ if threads > affinity => format!("the {affinity} CPUs of this machine"),
        _ => return None,
    };
    Some(format!("warning: --threads {threads} is more than {limit}: threads will wait for each other"))
}

/// Folds and lowers a package's graph.
///
/// # Errors
/// Names the node that cannot be folded or lowered.
pub fn lowered(package: &Package) -> Result<Lowered> {
    let mut graph = package.graph.clone();
    fold::fold(&mut graph, fold::FoldLimits::default())?;
    dead::dead(&mut graph);
    lower::lower(&graph, &package.ports).map_err(|e| anyhow!("{}: {e}", package.model_file))
}

impl Model {
    /// Loads a model for `sequences` sequences at once, showing that it does.
    ///
    /// # Errors
    /// When the package cannot be read, checked, lowered, planned or loaded.
    pub fn load(args: &ModelArgs, sequences: usize) -> Result<Self> {
        let progress = console::spinner("reading the package");
        let package = open(args.package.as_deref())?;
        let tokenizer = tokenizer(&package)?;
        let templates = templates(&package);
        progress.set_message("planning");
        let opened = progress.suspend(|| args.device.open(args.threads, args.numerics.into()))?;
        let device = opened.device.as_ref();
        let graph = Arc::new(lowered(&package)?);
        let options = PlanOptions {
            context: context(args.context, context_length(&package, &graph))?,
            sequences,
            numerics: Numerics::from(args.numerics),
            memory: opened.memory,
            ..PlanOptions::default()
        };
        let plan = Plan::new(graph, device, &options)?;
        if args.verbose {
            progress.suspend(|| console::say(explain(&plan, device)));
        }
        if let Some(notice) = host_notice(&plan) {
            progress.suspend(|| console::say(notice));
        }
        progress.set_message("loading");
        let engine = Engine::new(&plan, device)?;
        progress.finish_and_clear();
        let eos = eos(&package, &tokenizer, engine.vocab())?;
        let sampling = search(&package.manifest.search);
        let kv_dtype = plan.ledger().kv_types().join(" and ");
        Ok(Self { engine, tokenizer, eos, sampling, kv_dtype, templates })
    }

    /// The tokens of a prompt that is continued as it is; the tokenizer's own first token (`<s>`) is added where it
    /// has one.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn raw_prompt(&self, text: &str) -> Result<Vec<TokenId>> {
        self.tokenizer.encode_with_special(text).context("cannot tokenize the prompt")
    }

    /// The tokens of a conversation in the model's chat template, up to where the assistant answers.
    ///
    /// # Errors
    /// When there is no template, the template raises, or the tokenizer fails.
    pub fn chat_prompt(&self, messages: &[Message]) -> Result<Vec<TokenId>> {
        let template = self.require_template()?.pick(false)?;
        let messages = messages.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        let text = template.render(&ChatInput {
            messages: &messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            tokens: self.tokenizer.named(),
            extra: &serde_json::Map::new(),
            now: Now::utc(),
        })?;
        self.tokenizer.encode(&text).context("cannot tokenize the conversation")
    }

    /// The package's chat templates.
    ///
    /// # Errors
    /// When it has none, or none that can be read.
    pub fn require_template(&self) -> Result<&ChatTemplates> {
        match &self.templates {
            Ok(Some(templates)) => Ok(templates),
            Ok(None) => bail!(
                "the package has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); \
                 continue raw text with `doyen run --raw`"
            ),
            Err(e) => bail!("{e:#}; continue raw text with `doyen run --raw`"),
        }
    }
}

/// Positions a model can have: what the manifest says, as far as the rotary caches reach.
pub fn context_length(package: &Package, graph: &Lowered) -> Option<usize> {
    package.manifest.context_length.into_iter().chain(graph.rotary_positions()).min()
}

/// The context to plan. Positions beyond the model's own context length are refused: it has never seen them, and its
/// rotary tables may not have them.
fn context(asked: Option<NonZeroUsize>, model: Option<usize>) -> Result<usize> {
    match (asked.map(NonZeroUsize::get), model) {
        (Some(asked), Some(model)) if asked > model => {
            bail!(
                "{asked} positions are more than the model's context length of {model}; give at most {model} \
                 (--context, and --window of eval)"
            )
        }
        (Some(asked), _) => Ok(asked),
        (None, Some(model)) => Ok(model.clamp(1, DEFAULT_CONTEXT)),
        (None, None) => Ok(DEFAULT_CONTEXT),
    }
}

/// The package's tokenizer.
///
/// # Errors
/// When there is none, or it cannot be read.
pub fn tokenizer(package: &Package) -> Result<Tokenizer> {
    let text = &package.text;
    let json = text.tokenizer.as_ref().with_context(|| {
        format!("{} has no tokenizer.json; copy the model's into it", package.source.describe())
    })?;
    Ok(Tokenizer::from_files(&TokenizerFiles {
        tokenizer: json,
        config: text.tokenizer_config.as_deref(),
        special_tokens_map: text.special_tokens_map.as_deref(),
    })?)
}

fn templates(package: &Package) -> Result<Option<ChatTemplates>> {
    let text = &package.text;
    Ok(ChatTemplates::find(text.chat_template.as_deref(), text.tokenizer_config.as_deref())?)
}

/// The tokens that end a text. One that the model cannot give would never end any.
fn eos(package: &Package, tokenizer: &Tokenizer, vocab: usize) -> Result<Vec<TokenId>> {
    let mut eos = package.manifest.eos_tokens.clone();
    if eos.is_empty() {
        eos.extend(tokenizer.eos());
    }
    match eos.iter().find(|t| t.index() >= vocab) {
        Some(t) => bail!(
            "{}: the end token {t} (model.eos_token_id in {MANIFEST}, or eos_token of the tokenizer) is outside the \
             model's vocabulary of {vocab}",
            package.source.describe()
        ),
        None => Ok(eos),
    }
}

fn search(s: &Search) -> SamplingParams {
    let temperature = if s.do_sample { s.temperature as f32 } else { 0.0 };
    SamplingParams {
        temperature,
        top_k: if s.do_sample { s.top_k } else { 0 },
        top_p: s.top_p.filter(|&p| p > 0.0 && s.do_sample).map_or(1.0, |p| p as f32),
        repetition_penalty: s.repetition_penalty as f32,
        ..SamplingParams::default()
    }
}

/// The plan for people: device, ledger, and how often each kernel is used.
pub fn explain(plan: &Plan, device: &dyn Device) -> String {
    let kernels: Vec<String> = kernels(plan).iter().map(|(k, n)| format!("  {n:>5} x {k}")).collect();
    format!(
        "{} ({:?} numerics)\n{}\n{}",
        device.describe(),
        plan.program().numerics,
        plan.ledger(),
        kernels.join("\n")
    )
}

/// The kernels of a plan and how many nodes each of them has.
pub fn kernels(plan: &Plan) -> BTreeMap<&str, usize> {
    let mut kernels = BTreeMap::new();
    for node in plan.nodes() {
        *kernels.entry(node.kernel.as_str()).or_default() += 1;
    }
    kernels
}

/// The most memory this process has had in RAM, if the system tells.
pub fn peak_memory() -> Option<ByteCount> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(ByteCount(kib * 1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_cpus_are_warned_of_by_the_limit() {
        let machine = Machine { online: 8, affinity: 4, quota: None, ..Machine::read() };
        assert_eq!(thread_warning(4, &machine), None);
        assert!(
            thread_warning(5, &machine)
                .unwrap()
                .contains("the 4 of 8 CPUs that this process's affinity mask")
        );
        let whole = Machine { affinity: 8, ..machine.clone() };
        assert!(thread_warning(9, &whole).unwrap().contains("the 8 CPUs of this machine"));
        let quota = Machine { quota: Some(1.5), ..machine };
        assert_eq!(thread_warning(2, &quota), None);
        assert!(thread_warning(3, &quota).unwrap().contains("quota of 1.5"));
    }

    #[test]
    fn scalar_kernels_are_named_with_the_reason() {
        assert!(scalar_notice(Isa::Scalar).contains("this CPU has no"));
        for best in Isa::all().skip(1) {
            assert!(scalar_notice(best).contains(&format!("is {best}")));
        }
    }
}
