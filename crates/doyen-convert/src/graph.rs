//! A decoder from its blocks: ports as ONNX Runtime GenAI's builder names them, one pass over the layers.

use crate::{
    ConvertError,
    blocks::{Builder, Format, linear::scope},
    config::{Ffn, Mixer, ModelConfig},
    options::{Block, LayerFormats, Options, WIDEST_BLOCK},
    report::{Part, Report},
    source::Checkpoint,
    store::Store,
};
use doyen_graph::ir::{Dim, Fact, Graph, ValueId};
use doyen_tensor::{ByteCount, DType};

/// Operator sets of the graph: the oldest that have every operator used.
fn opsets(config: &ModelConfig) -> [(&'static str, i64); 2] {
    let latent = config.layers.iter().any(|l| matches!(l.mixer, Mixer::Latent(_)));
    // Attention came with 23.
    [("", if latent { 23 } else { 21 }), (crate::blocks::MS, 1)]
}

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
        graph: Graph::new("decoder", opsets(config)),
        rotaries: Vec::new(),
        store: Store::reporting(checkpoint.is_quantized()),
        checkpoint,
        config,
        dtype: options.dtype,
        mxfp4: options.mxfp4,
        notices: Vec::new(),
    };
    tell_limits(&mut b, &layers);
    let tokens = [Dim::from("batch_size"), Dim::from("sequence_length")];
    let input_ids = b.graph.add_input("input_ids", Fact::new(DType::I64, tokens));
    let shared = b.attention_inputs(input_ids)?;
    b.place_rotaries();
    let embedding = b.embedding(input_ids, options.embed, &base)?;
    let mut stream = Stream { residual: embedding.hidden, pending: None };
    for (i, (layer, formats)) in config.layers.iter().zip(&layers).enumerate() {
        let at = format!("model.layers.{i}");
        let x = stream.next(&mut b, layer.norms.before_mixer.map(|n| format!("{at}.{n}")))?;
        let mixed = match &layer.mixer {
            Mixer::Attention(a) => b.attention(i, a, x, shared, formats)?,
            Mixer::DeltaNet(d) => b.delta_net(i, d, x, formats)?,
            Mixer::ShortConv(c) => b.short_conv(i, *c, x, formats)?,
            Mixer::Latent(a) => b.latent_attention(i, a, x, shared.positions, formats)?,
        };
        let x = if layer.parallel {
            x
        } else {
            stream.add(&mut b, &at, layer.norms.after_mixer, "mixer", mixed)?;
            stream.next(&mut b, layer.norms.before_ffn.map(|n| format!("{at}.{n}")))?
        };
        let out = match &layer.ffn {
            Ffn::Moe(moe) => b.moe(&at, moe, x, formats)?,
            Ffn::Dense(mlp) => {
                let (width, asked) = (formats.mlp, formats.asked.mlp);
                b.mlp(&at, *mlp, x, Format { width, asked, layer: formats, part: Part::Mlp })?
            }
        };
        let out = if layer.parallel {
            b.node(&scope(&format!("{at}.both")), ("", "Add"), [], &[Some(mixed), Some(out)])?
        } else {
            out
        };
        stream.add(&mut b, &at, layer.norms.after_ffn, "ffn", out)?;
    }
    let x = stream.last(&mut b, config.final_norm)?;
    b.head(x, &embedding, options.lm_head, &base)?;

    let Builder { graph, store, checkpoint, mut notices, .. } = b;
    check_shapes(graph.clone(), &store)?;
    leftovers(config, checkpoint, &mut notices)?;
    notices.extend_from_slice(&config.notices);
    notices.extend(options.without_effect(&store.parts));
    let report = Report {
        architecture: config.architecture.clone(),
        parts: store.parts.clone(),
        data_file: ByteCount(store.file_bytes()),
        fates: Vec::new(),
        notices,
    };
    Ok(Plan { graph, store, report })
}

/// The residual stream, with what is to be added at the next norm.
struct Stream {
    residual: ValueId,
    pending: Option<ValueId>,
}

impl Stream {
    /// The input of the next half of a layer: the stream, normed where `norm` names a module.
    fn next(&mut self, b: &mut Builder<'_>, norm: Option<String>) -> Result<ValueId, ConvertError> {
        match (norm, self.pending.take()) {
            (Some(norm), Some(x)) => {
                let (normed, sum) = b.add_norm(&norm, self.residual, x)?;
                self.residual = sum;
                Ok(normed)
            }
            (Some(norm), None) => b.norm(&norm, self.residual, b.config.hidden, b.config.norm),
            (None, x) => {
                if let Some(x) = x {
                    let at = format!("/model/residual/{}", b.graph.nodes.len());
                    self.residual = b.node(&at, ("", "Add"), [], &[Some(self.residual), Some(x)])?;
                }
                Ok(self.residual)
            }
        }
    }

    /// Adds the output of a half, normed where `norm` names a module.
    fn add(
        &mut self,
        b: &mut Builder<'_>,
        layer: &str,
        norm: Option<&str>,
        half: &str,
        x: ValueId,
    ) -> Result<(), ConvertError> {
        let x = match norm {
            Some(norm) => b.norm(&format!("{layer}.{norm}"), x, b.config.hidden, b.config.norm)?,
            None => x,
        };
        let at = scope(&format!("{layer}.{half}"));
        self.pending = Some(b.scaled(&at, x, b.config.residual_scale)?);
        Ok(())
    }

    /// The normed stream after the last layer.
    fn last(self, b: &mut Builder<'_>, norm: &str) -> Result<ValueId, ConvertError> {
        match self.pending {
            Some(x) => b.final_norm(norm, self.residual, x),
            None => b.norm(norm, self.residual, b.config.hidden, b.config.norm),
        }
    }
}

/// What a user may expect of the options or the checkpoint, and will not get.
fn tell_limits(b: &mut Builder<'_>, layers: &[LayerFormats]) {
    if layers.iter().any(|l| l.block == Block::Row) {
        b.notice(format!(
            "block row: one scale a row is kept for experts; other weights have blocks of {WIDEST_BLOCK} columns, since \
             their operators know no row-wise scales"
        ));
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
        if name.ends_with("rotary_emb.inv_freq") || (config.head.tied && name == "lm_head.weight") {
            continue;
        }
        let layer = name.strip_prefix("model.layers.").and_then(|n| n.split('.').next()?.parse().ok());
        // ERNIE 4.5 keeps the modules that draft further tokens beside the layers.
        let drafts = name.starts_with("model.mtp_") && config.architecture.starts_with("Ernie4_5");
        let beyond = drafts || layer.is_some_and(|l: usize| l >= config.layers.len());
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
