//! A decoder from its blocks: ports as ONNX Runtime GenAI's builder names them, one pass over the layers.

use crate::{
    ConvertError,
    blocks::Builder,
    config::{ModelConfig, RopeScaling},
    options::{Block, LayerFormats, Options, WIDEST_BLOCK},
    report::Report,
    source::Checkpoint,
    store::Store,
};
use doyen_graph::ir::{Dim, Fact, Graph};
use doyen_tensor::{ByteCount, DType};

/// Operator sets of the graph: the oldest that have every operator used.
const OPSETS: [(&str, i64); 2] = [("", 21), (crate::blocks::MS, 1)];

/// A decoder whose weights are placed but not yet made.
#[derive(Debug)]
pub(crate) struct Plan {
    pub graph: Graph,
    pub store: Store,
    pub report: Report,
}

/// Lays out the decoder that `config` describes with the tensors of `checkpoint`.
pub(crate) fn assemble(
    config: &ModelConfig,
    checkpoint: &mut Checkpoint,
    options: &Options,
) -> Result<Plan, ConvertError> {
    let base = options.base()?;
    let layers = options.resolve(config.layers.len())?;
    let mut b = Builder {
        graph: Graph::new("decoder", OPSETS),
        store: Store::reporting(checkpoint.is_renamed()),
        checkpoint,
        config,
        dtype: options.dtype,
        notices: Vec::new(),
    };
    tell_limits(&mut b, &layers);
    let tokens = [Dim::from("batch_size"), Dim::from("sequence_length")];
    let input_ids = b.graph.add_input("input_ids", Fact::new(DType::I64, tokens));
    let shared = b.attention_inputs()?;
    let embedding = b.embedding(input_ids, options.embed, &base)?;
    let mut residual = embedding.hidden;
    let mut x = b.norm("model.layers.0.input_layernorm", residual, config.hidden)?;
    for (i, (layer, formats)) in config.layers.iter().zip(&layers).enumerate() {
        let attended = b.attention(i, x, shared, formats)?;
        (x, residual) =
            b.add_norm(&format!("model.layers.{i}.post_attention_layernorm"), residual, attended)?;
        let out = match config.moe.filter(|_| layer.moe) {
            Some(moe) => b.moe(i, moe, x, formats)?,
            None => b.mlp(i, x, formats)?,
        };
        if i + 1 < config.layers.len() {
            (x, residual) = b.add_norm(&format!("model.layers.{}.input_layernorm", i + 1), residual, out)?;
        } else {
            x = b.final_norm("model.norm", residual, out)?;
        }
    }
    b.head(x, &embedding, options.lm_head, &base)?;

    let Builder { graph, store, checkpoint, mut notices, .. } = b;
    check_shapes(graph.clone(), &store)?;
    leftovers(config, checkpoint, &mut notices)?;
    let report = Report {
        architecture: config.architecture.clone(),
        parts: store.parts.clone(),
        data_file: ByteCount(store.file_bytes()),
        fates: Vec::new(),
        notices,
    };
    Ok(Plan { graph, store, report })
}

/// What a user may expect of the options or the checkpoint, and will not get.
fn tell_limits(b: &mut Builder<'_>, layers: &[LayerFormats]) {
    if layers.iter().any(|l| l.block == Block::Row) {
        b.notice(format!(
            "block row: one scale a row is kept for experts; other weights have blocks of {WIDEST_BLOCK} columns, since \
             their operators know no row-wise scales"
        ));
    }
    if let RopeScaling::Yarn { factor, original, .. } = b.config.rope.scaling {
        let (reach, positions) = ((factor * original) as usize, b.config.max_positions);
        if reach > positions {
            b.notice(format!(
                "yarn scaling reaches {reach} positions, max_position_embeddings says {positions}: the package's context \
                 is {positions}; raise it in config.json for more"
            ));
        }
    }
}

/// Checks a copy of the graph in which placed weights, having no bytes yet, are inputs. (On a copy also because the
/// shapes it infers for inner values are of no use to readers of the file.)
fn check_shapes(mut graph: Graph, store: &Store) -> Result<(), ConvertError> {
    graph.inputs.extend(&store.placed);
    Ok(doyen_graph::check::check(&mut graph)?)
}

/// Judges the tensors that no recipe took. Those of a layer that was converted, and those beside the layers in
/// `model.`, belong to something the recipe does not compute; others (vision towers, draft layers past the last) can
/// be left out.
fn leftovers(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    notices: &mut Vec<String>,
) -> Result<(), ConvertError> {
    let (mut fatal, mut left) = (Vec::new(), Vec::new());
    for name in checkpoint.untaken() {
        // Buffers that older releases saved, and the tied head's second name.
        if name.ends_with("rotary_emb.inv_freq") || (config.tied && name == "lm_head.weight") {
            continue;
        }
        let layer = name.strip_prefix("model.layers.").and_then(|n| n.split('.').next()?.parse().ok());
        let beyond = layer.is_some_and(|l: usize| l >= config.layers.len());
        let inside = name.starts_with("model.") || name.starts_with("lm_head.");
        if inside && !beyond { &mut fatal } else { &mut left }.push(name);
    }
    if !fatal.is_empty() {
        return Err(ConvertError::UnusedTensors { count: fatal.len(), names: some(&fatal) });
    }
    if !left.is_empty() {
        notices.push(format!("{} tensors of the checkpoint were left out: {}", left.len(), some(&left)));
    }
    Ok(())
}

/// The first few names.
fn some(names: &[&str]) -> String {
    const SHOWN: usize = 5;
    let more = if names.len() > SHOWN { ", ..." } else { "" };
    format!("{}{more}", names[..names.len().min(SHOWN)].join(", "))
}
