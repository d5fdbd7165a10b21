//! Mixture-of-experts feed-forward: a router projection and one `QMoE` (or float `MoE`) for all experts.
//!
//! Gate and up rows are interleaved for the fused SwiGLU of FC1. Checkpoints that do not renormalise the chosen experts'
//! weights (`norm_topk_prob` false) need care with ONNX Runtime 1.31.1 on the CPU. Its QMoE ignores
//! `normalize_routing_weights=0` (operator contract, section 1.6), so it is given the full softmax as `router_weights`,
//! which are used as they are. Its MoE honours 0, but computes in place and overwrites its input whenever the input has
//! no later reader (found by comparing single-node graphs); so it runs normalised, and its result is multiplied by the
//! sum of the chosen weights.

use super::{Builder, Format, MS, Stored, linear::scope, routing::Routed};
use crate::{
    ConvertError,
    config::{Fused, Moe, Shared, SwiGlu},
    job::{Made, Rows},
    options::{Block, ExpertWidths, LayerFormats, Mxfp4, Width},
    quant::QuantSpec,
    report::Part,
    source::{Packing, SourceType, Weight},
    store::{Consumer, Quantized},
};
use doyen_graph::ir::{Attrs, ValueId};
use doyen_tensor::format::Bits;

/// Weights of all experts of a layer.
pub(super) struct Experts {
    /// Gate and up rows `[2I, H]` in turn, one an expert.
    pub fc1: Vec<Rows>,
    /// Down projections `[H, I]`.
    pub fc2: Vec<Rows>,
    /// Biases `[E, 2I]` in the order of the rows, and `[E, H]`.
    pub biases: Option<[ValueId; 2]>,
}

impl Experts {
    fn weights(&self) -> impl Iterator<Item = &Weight> {
        self.fc1.iter().chain(&self.fc2).flat_map(Rows::weights)
    }

    /// Whether all of them are 4-bit floats whose rows are in the operator's order.
    fn are_mxfp4(&self) -> bool {
        let mxfp4 =
            |r: &Rows| matches!(r, Rows::Tensor(w) if w.dtype() == SourceType::Packed(Packing::Mxfp4));
        self.fc1.iter().chain(&self.fc2).all(mxfp4)
    }
}

/// What the experts of a layer are stored as.
#[derive(Debug, Clone, Copy)]
struct Bank {
    fc1: (QuantSpec, Made),
    fc2: (QuantSpec, Made),
    /// Columns that share a scale; `None` for one scale a row.
    block: Option<usize>,
}

impl Builder<'_> {
    /// The mixture of experts of one layer, shared experts included.
    pub(crate) fn moe(
        &mut self,
        layer: &str,
        moe: &Moe,
        x: ValueId,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let name = |module: &&str| format!("{layer}.{module}.{}.weight", moe.router.module);
        let there = moe.modules.iter().find(|m| self.checkpoint.contains(&name(m)));
        let module = format!("{layer}.{}", there.or(moe.modules.first()).copied().unwrap_or_default());
        let at = scope(&module);
        let (width, asked) = (formats.router, formats.asked.router);
        let format = Format { width, asked, layer: formats, part: Part::Router };
        let router = format!("{module}.{}", moe.router.module);
        let input = (x, self.config.hidden);
        let logits = self.project(&router, moe.experts, moe.router.bias, input, format)?;
        let routed = self.route(&module, moe, logits)?;
        let experts = self.experts(&module, moe)?;
        if self.mxfp4 == Mxfp4::Kept && !formats.asked.experts && experts.are_mxfp4() {
            let out = self.mxfp4_experts(&module, moe, (x, routed), experts)?;
            return self.behind_experts(layer, &at, moe, (x, out), formats);
        }
        let bank = match self.carried(&experts, formats) {
            Some(bank) => Some(bank),
            None if !formats.asked.experts && experts.weights().any(|w| w.dtype().is_lost()) => None,
            None => self.rounded(moe, formats)?,
        };
        let out = match bank {
            Some(bank) => self.quantized_experts(&module, moe, (x, routed), experts, bank)?,
            None => self.float_experts(&module, moe, (x, routed), experts)?,
        };
        self.behind_experts(layer, &at, moe, (x, out), formats)
    }

    /// What the routed experts put out, scaled and with that of the shared ones.
    fn behind_experts(
        &mut self,
        layer: &str,
        at: &str,
        moe: &Moe,
        (x, out): (ValueId, ValueId),
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let out = self.scaled(&format!("{at}/routed"), out, moe.routing.scale)?;
        match moe.shared {
            None => Ok(out),
            Some(shared) => {
                let always = self.shared_experts(layer, shared, x, formats)?;
                self.node(at, ("", "Add"), [], &[Some(out), Some(always)])
            }
        }
    }

    /// The experts that see every token, behind their gate if they have one.
    fn shared_experts(
        &mut self,
        layer: &str,
        shared: Shared,
        x: ValueId,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let (width, asked) = (formats.shared_experts, formats.asked.shared_experts);
        let format = Format { width, asked, layer: formats, part: Part::SharedExperts };
        let out = self.mlp(layer, shared.mlp, x, format)?;
        let Some(gate) = shared.gate else { return Ok(out) };
        let gate = format!("{layer}.{gate}");
        let (width, asked) = (formats.router, formats.asked.router);
        let format = Format { width, asked, layer: formats, part: Part::Router };
        let logit = self.project(&gate, 1, false, (x, self.config.hidden), format)?;
        let open = self.node(&scope(&gate), ("", "Sigmoid"), [], &[Some(logit)])?;
        self.node(&scope(&gate), ("", "Mul"), [], &[Some(out), Some(open)])
    }

    /// The bank of the widths that the options name; nothing for float.
    fn rounded(&mut self, moe: &Moe, formats: &LayerFormats) -> Result<Option<Bank>, ConvertError> {
        let ExpertWidths::Bits { fc1, fc2 } = formats.experts else { return Ok(None) };
        self.check_rows(moe, fc1, fc2, formats)?;
        let rounded = |bits| (self.spec(bits, formats), Made::Rounded);
        let block = match formats.block {
            Block::Columns(block) => Some(block),
            Block::Row => None,
        };
        Ok(Some(Bank { fc1: rounded(fc1), fc2: rounded(fc2), block }))
    }

    /// A bank of the source's codes, or of those of one projection: QMoE has one block size for both and no float zero
    /// points. `None` when neither can be kept or another width was asked for.
    fn carried(&self, experts: &Experts, formats: &LayerFormats) -> Option<Bank> {
        let ExpertWidths::Bits { fc1, fc2 } = formats.experts else { return None };
        if formats.asked.experts {
            return None;
        }
        let stored = |rows: &[Rows], bits| {
            let weights: Vec<Weight> = rows.iter().flat_map(Rows::weights).cloned().collect();
            let consumer = Consumer::Experts { row_wise: false };
            match self.stored(&weights, Width::Bits(bits), false, consumer, formats) {
                Stored::Quantized(spec, made) => Some((spec, made)),
                Stored::Float => None,
            }
        };
        // Rows of gate and up are interleaved, group by group.
        let types: Vec<SourceType> = experts.fc1.iter().flat_map(Rows::weights).map(Weight::dtype).collect();
        let (mut fc1, mut fc2) = if types.windows(2).all(|w| w[0] == w[1]) {
            (stored(&experts.fc1, fc1)?, stored(&experts.fc2, fc2)?)
        } else {
            ((self.spec(fc1, formats), Made::Rounded), stored(&experts.fc2, fc2)?)
        };
        if (fc1.1, fc2.1) == (Made::Rounded, Made::Rounded) {
            return None;
        }
        let block = fc1.0.block.min(fc2.0.block);
        (fc1.0.block, fc2.0.block) = (block, block);
        Some(Bank { fc1, fc2, block: Some(block) })
    }

    /// The experts' weights, in whichever layout the checkpoint has them.
    fn experts(&mut self, module: &str, moe: &Moe) -> Result<Experts, ConvertError> {
        let (count, hidden, inner) = (moe.experts, self.config.hidden, moe.intermediate);
        let [gate_up, down] = moe.names.all.map(|name| format!("{module}.{name}"));
        let transposed = match moe.names.fused {
            Fused::Halves => false,
            Fused::TransposedPairs => true,
            // Of the two tensors the square one cannot tell.
            Fused::TransposedHalves if hidden == inner => {
                self.checkpoint.shape(&gate_up) == Some(&[count, hidden, 2 * inner])
            }
            Fused::TransposedHalves => self.checkpoint.shape(&down) == Some(&[count, inner, hidden]),
        };
        let (fc1, fc2) = if self.checkpoint.contains(&format!("{gate_up}_blocks")) {
            let fc1 = self.checkpoint.take_mxfp4(&gate_up, [count, 2 * inner, hidden])?;
            (fc1, self.checkpoint.take_mxfp4(&down, [count, hidden, inner])?)
        } else if self.checkpoint.contains(&gate_up) {
            let fc1 = self.checkpoint.take_stack(&gate_up, [count, 2 * inner, hidden], transposed)?;
            (fc1, self.checkpoint.take_stack(&down, [count, hidden, inner], transposed)?)
        } else {
            return self.single_experts(module, moe);
        };
        let halves = |w: Weight| match moe.names.fused {
            Fused::Halves | Fused::TransposedHalves => {
                Rows::Interleaved(w.part(0..inner, false), w.part(inner..2 * inner, false))
            }
            Fused::TransposedPairs => Rows::Tensor(w),
        };
        let biases = if moe.bias {
            let mut place = |name: &str, width: usize, part| {
                let bias = format!("{name}_bias");
                let rows = vec![Rows::Tensor(self.take(&bias, &[count, width])?)];
                let shape = [count, width];
                Ok::<_, ConvertError>(self.store.float(
                    &mut self.graph,
                    &bias,
                    self.dtype,
                    &shape,
                    rows,
                    part,
                ))
            };
            Some([place(&gate_up, 2 * inner, Part::ExpertsFc1)?, place(&down, hidden, Part::ExpertsFc2)?])
        } else {
            None
        };
        let fc1 = fc1.into_iter().map(halves).collect();
        Ok(Experts { fc1, fc2: fc2.into_iter().map(Rows::Tensor).collect(), biases })
    }

    /// Experts with tensors of their own.
    fn single_experts(&mut self, module: &str, moe: &Moe) -> Result<Experts, ConvertError> {
        let (hidden, inner) = (self.config.hidden, moe.intermediate);
        let [gate, up, down] = moe.names.each;
        let (mut fc1, mut fc2) = (Vec::new(), Vec::new());
        for e in 0..moe.experts {
            let mut take = |name: &str, shape: [usize; 2]| {
                self.checkpoint.take(&format!("{module}.experts.{e}.{name}.weight"), &shape)
            };
            fc1.push(Rows::Interleaved(take(gate, [inner, hidden])?, take(up, [inner, hidden])?));
            fc2.push(Rows::Tensor(take(down, [hidden, inner])?));
        }
        Ok(Experts { fc1, fc2, biases: None })
    }

    /// Rows of packed codes must be whole bytes; blocks that do not divide a row are legal but not portable.
    fn check_rows(
        &mut self,
        moe: &Moe,
        fc1: Bits,
        fc2: Bits,
        formats: &LayerFormats,
    ) -> Result<(), ConvertError> {
        for (field, cols, bits) in
            [("hidden_size", self.config.hidden, fc1), ("moe_intermediate_size", moe.intermediate, fc2)]
        {
            if !cols.is_multiple_of(bits.per_byte()) {
                return Err(ConvertError::config(
                    field,
                    cols,
                    format!("a multiple of {}, to pack experts at {} bits", bits.per_byte(), bits.get()),
                ));
            }
            if let Block::Columns(block) = formats.block
                && !cols.is_multiple_of(block)
            {
                self.notice(format!(
                    "block {block} does not divide {field} = {cols}; the last block of each expert row is short, which \
                     GPU runtimes refuse"
                ));
            }
        }
        Ok(())
    }

    fn quantized_experts(
        &mut self,
        module: &str,
        moe: &Moe,
        (x, routed): (ValueId, Routed),
        experts: Experts,
        bank: Bank,
    ) -> Result<ValueId, ConvertError> {
        let consumer = Consumer::Experts { row_wise: bank.block.is_none() };
        let mut place = |name: &str, stored, rows, part| {
            let name = format!("{module}.experts.{name}");
            self.store.quantized(&mut self.graph, &name, stored, consumer, rows, part)
        };
        let fc1 = place("gate_up_proj", bank.fc1, experts.fc1, Part::ExpertsFc1);
        let fc2 = place("down_proj", bank.fc2, experts.fc2, Part::ExpertsFc2);
        let (bits1, bits2) = (bank.fc1.0.bits, bank.fc2.0.bits);
        let mut attrs = swiglu(moe, moe.routing.normalize);
        attrs.set("expert_weight_bits", bits2.get() as i64);
        if bits1 != bits2 {
            // FC3 inherits the base width, not FC1's, and must equal FC1's although it does not exist.
            attrs.set("fc1_expert_weight_bits", bits1.get() as i64);
            attrs.set("fc2_expert_weight_bits", bits2.get() as i64);
            attrs.set("fc3_expert_weight_bits", bits1.get() as i64);
        }
        if let Some(block) = bank.block {
            attrs.set("block_size", block as i64);
        }
        attrs.set("quant_type", "int");
        self.qmoe(module, moe, (x, routed), (fc1, fc2, experts.biases), (attrs, None))
    }

    /// The operator; `globals` has a factor for each expert.
    pub(super) fn qmoe(
        &mut self,
        module: &str,
        moe: &Moe,
        (x, routed): (ValueId, Routed),
        (fc1, fc2, biases): (Quantized, Quantized, Option<[ValueId; 2]>),
        (mut attrs, globals): (Attrs, Option<ValueId>),
    ) -> Result<ValueId, ConvertError> {
        let at = scope(module);
        let gate = format!("{at}/gate");
        let logits = self.flat(&gate, routed.choice, moe.experts)?;
        let router_weights = match routed.weights {
            None => None,
            Some(w) => Some(self.flat(&format!("{gate}/mixing"), w, moe.experts)?),
        };
        attrs.set("weights_prepacked", 0i64);
        attrs.set("accuracy_level", 4i64);
        let mut inputs = [None; 17];
        (inputs[0], inputs[1]) = (Some(x), Some(logits));
        (inputs[2], inputs[3], inputs[11]) = (Some(fc1.codes), Some(fc1.scales), fc1.zero_points);
        (inputs[5], inputs[6], inputs[12]) = (Some(fc2.codes), Some(fc2.scales), fc2.zero_points);
        (inputs[4], inputs[7]) = (biases.map(|b| b[0]), biases.map(|b| b[1]));
        inputs[14] = router_weights;
        (inputs[15], inputs[16]) = (globals, globals);
        let name = format!("{at}/experts/QMoE");
        let output = format!("{name}/output_0");
        let [out] = self.named_node(&name, (MS, "QMoE"), attrs, &inputs, [&output])?;
        Ok(out)
    }

    fn float_experts(
        &mut self,
        module: &str,
        moe: &Moe,
        (x, routed): (ValueId, Routed),
        experts: Experts,
    ) -> Result<ValueId, ConvertError> {
        let (e, i, h) = (moe.experts, moe.intermediate, self.config.hidden);
        let mut place = |name: &str, shape: [usize; 3], rows, part| {
            let name = format!("{module}.experts.{name}.weight");
            self.store.float(&mut self.graph, &name, self.dtype, &shape, rows, part)
        };
        let fc1 = place("gate_up_proj", [e, 2 * i, h], experts.fc1, Part::ExpertsFc1);
        let fc2 = place("down_proj", [e, h, i], experts.fc2, Part::ExpertsFc2);
        let name = format!("{}/experts/MoE", scope(module));
        let output = format!("{name}/output_0");
        let gate = format!("{}/gate", scope(module));
        let (scores, sum) = self.as_softmax(&gate, moe, routed)?;
        let logits = self.flat(&gate, scores, e)?;
        let biases = experts.biases;
        let inputs =
            [Some(x), Some(logits), Some(fc1), biases.map(|b| b[0]), Some(fc2), biases.map(|b| b[1])];
        let attrs = swiglu(moe, true);
        let [out] = self.named_node(&name, (MS, "MoE"), attrs, &inputs, [&output])?;
        match sum {
            None => Ok(out),
            Some(sum) => self.node(&scope(module), ("", "Mul"), [], &[Some(out), Some(sum)]),
        }
    }
}

/// Attributes that QMoE and MoE share.
pub(super) fn swiglu(moe: &Moe, normalize: bool) -> Attrs {
    let mut attrs: Attrs = [
        ("k", (moe.top_k as i64).into()),
        ("activation_type", "swiglu".into()),
        ("swiglu_fusion", 1i64.into()),
        ("normalize_routing_weights", i64::from(normalize).into()),
    ]
    .into();
    // Alpha 1, beta 0 and no limit, as Llama and Qwen compute SwiGLU, are defaults.
    let SwiGlu { alpha, beta, limit } = moe.activation;
    if moe.activation != SwiGlu::PLAIN {
        attrs.set("activation_alpha", alpha);
        attrs.set("activation_beta", beta);
    }
    if let Some(limit) = limit {
        attrs.set("swiglu_limit", limit);
    }
    attrs
}
