//! Mixture-of-experts feed-forward: a router projection and one `QMoE` (or float `MoE`) for all experts.
//!
//! Gate and up rows are interleaved for the fused SwiGLU of FC1. Checkpoints that do not renormalise the chosen experts'
//! weights (`norm_topk_prob` false) need care with ONNX Runtime 1.31.1 on the CPU. Its QMoE ignores
//! `normalize_routing_weights=0` (operator contract, section 1.6), so it is given the full softmax as `router_weights`,
//! which are used as they are. Its MoE honours 0, but computes in place and overwrites its input whenever the input has
//! no later reader (found by comparing single-node graphs); so it runs normalised, and its result is multiplied by the
//! sum of the chosen weights.

use super::{Builder, Format, MS, Stored, linear::scope};
use crate::{
    ConvertError,
    config::Moe,
    job::{Made, Rows},
    options::{Block, ExpertWidths, LayerFormats, Width},
    quant::QuantSpec,
    report::Part,
    source::Weight,
    store::Consumer,
};
use doyen_graph::ir::{Attrs, ValueId};
use doyen_tensor::format::Bits;

/// Weights of all experts of a layer.
struct Experts {
    /// Gate and up projections `[I, H]`.
    fc1: Vec<(Weight, Weight)>,
    /// Down projections `[H, I]`.
    fc2: Vec<Weight>,
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
    /// The mixture of experts of one layer.
    pub(crate) fn moe(
        &mut self,
        layer: usize,
        moe: Moe,
        x: ValueId,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let module = format!("model.layers.{layer}.mlp");
        let at = scope(&module);
        let router = format!("{module}.gate");
        let (width, asked) = (formats.router, formats.asked.router);
        let format = Format { width, asked, layer: formats, part: Part::Router };
        let per_token =
            self.linear(&router.clone(), &[(router, moe.experts)], false, (x, self.config.hidden), format)?;
        let flat =
            self.ints(&format!("/model/constants/ints/-1,{}", moe.experts), &[-1, moe.experts as i64])?;
        let logits = self.node(&format!("{at}/gate"), ("", "Reshape"), [], &[Some(per_token), Some(flat)])?;
        let experts = self.experts(&module, moe)?;
        if let Some(carried) = self.carried(&experts, formats) {
            return self.quantized_experts(&module, moe, (x, logits), experts, carried);
        }
        match formats.experts {
            ExpertWidths::Float => {
                let out = self.float_experts(&module, moe, (x, logits), experts)?;
                if moe.norm_topk { Ok(out) } else { self.unnormalise(&at, moe, out, per_token) }
            }
            ExpertWidths::Bits { fc1, fc2 } => {
                self.check_rows(moe, fc1, fc2, formats)?;
                let rounded = |bits| (self.spec(bits, formats), Made::Rounded);
                let bank = Bank {
                    fc1: rounded(fc1),
                    fc2: rounded(fc2),
                    block: match formats.block {
                        Block::Columns(block) => Some(block),
                        Block::Row => None,
                    },
                };
                self.quantized_experts(&module, moe, (x, logits), experts, bank)
            }
        }
    }

    /// A bank of the source's codes, or of those of one projection: QMoE has one block size for both and no float zero
    /// points. `None` when neither can be kept or another width was asked for.
    fn carried(&self, experts: &Experts, formats: &LayerFormats) -> Option<Bank> {
        let ExpertWidths::Bits { fc1, fc2 } = formats.experts else { return None };
        if formats.asked.experts {
            return None;
        }
        let stored = |weights: &[Weight], bits| {
            let consumer = Consumer::Experts { row_wise: false };
            match self.stored(weights, Width::Bits(bits), false, consumer, formats) {
                Stored::Quantized(spec, made) => Some((spec, made)),
                Stored::Float => None,
            }
        };
        let both: Vec<Weight> = experts.fc1.iter().flat_map(|(a, b)| [a.clone(), b.clone()]).collect();
        // Rows of the two are interleaved, group by group.
        let (mut fc1, mut fc2) = if both.windows(2).all(|w| w[0].dtype() == w[1].dtype()) {
            (stored(&both, fc1)?, stored(&experts.fc2, fc2)?)
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

    fn experts(&mut self, module: &str, moe: Moe) -> Result<Experts, ConvertError> {
        let (hidden, inner) = (self.config.hidden, moe.intermediate);
        let mut experts = Experts { fc1: Vec::new(), fc2: Vec::new() };
        for e in 0..moe.experts {
            let mut take = |name: &str, shape: [usize; 2]| {
                self.checkpoint.take(&format!("{module}.experts.{e}.{name}.weight"), &shape)
            };
            experts.fc1.push((take("gate_proj", [inner, hidden])?, take("up_proj", [inner, hidden])?));
            experts.fc2.push(take("down_proj", [hidden, inner])?);
        }
        Ok(experts)
    }

    /// Rows of packed codes must be whole bytes; blocks that do not divide a row are legal but not portable.
    fn check_rows(
        &mut self,
        moe: Moe,
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
        moe: Moe,
        (x, logits): (ValueId, ValueId),
        experts: Experts,
        bank: Bank,
    ) -> Result<ValueId, ConvertError> {
        let at = scope(module);
        let consumer = Consumer::Experts { row_wise: bank.block.is_none() };
        let fc1_rows = experts.fc1.into_iter().map(|(gate, up)| Rows::Interleaved(gate, up)).collect();
        let fc2_rows = experts.fc2.into_iter().map(Rows::Tensor).collect();
        let mut place = |name: &str, stored, rows, part| {
            let name = format!("{module}.experts.{name}");
            self.store.quantized(&mut self.graph, &name, stored, consumer, rows, part)
        };
        let fc1 = place("gate_up_proj", bank.fc1, fc1_rows, Part::ExpertsFc1);
        let fc2 = place("down_proj", bank.fc2, fc2_rows, Part::ExpertsFc2);
        let (bits1, bits2) = (bank.fc1.0.bits, bank.fc2.0.bits);
        let router_weights = if moe.norm_topk {
            None
        } else {
            let axis = [("axis", (-1i64).into())];
            Some(self.node(&format!("{at}/gate"), ("", "Softmax"), axis, &[Some(logits)])?)
        };
        let mut attrs = swiglu(moe, moe.norm_topk);
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
        attrs.set("weights_prepacked", 0i64);
        attrs.set("accuracy_level", 4i64);
        let mut inputs = [None; 15];
        (inputs[0], inputs[1]) = (Some(x), Some(logits));
        (inputs[2], inputs[3], inputs[11]) = (Some(fc1.codes), Some(fc1.scales), fc1.zero_points);
        (inputs[5], inputs[6], inputs[12]) = (Some(fc2.codes), Some(fc2.scales), fc2.zero_points);
        inputs[14] = router_weights;
        let name = format!("{at}/experts/QMoE");
        let output = format!("{name}/output_0");
        let [out] = self.named_node(&name, (MS, "QMoE"), attrs, &inputs, [&output])?;
        Ok(out)
    }

    fn float_experts(
        &mut self,
        module: &str,
        moe: Moe,
        (x, logits): (ValueId, ValueId),
        experts: Experts,
    ) -> Result<ValueId, ConvertError> {
        let (e, i, h) = (moe.experts, moe.intermediate, self.config.hidden);
        let fc1_rows = experts.fc1.into_iter().map(|(gate, up)| Rows::Interleaved(gate, up)).collect();
        let fc2_rows = experts.fc2.into_iter().map(Rows::Tensor).collect();
        let mut place = |name: &str, shape: [usize; 3], rows, part| {
            let name = format!("{module}.experts.{name}.weight");
            self.store.float(&mut self.graph, &name, self.dtype, &shape, rows, part)
        };
        let fc1 = place("gate_up_proj", [e, 2 * i, h], fc1_rows, Part::ExpertsFc1);
        let fc2 = place("down_proj", [e, h, i], fc2_rows, Part::ExpertsFc2);
        let name = format!("{}/experts/MoE", scope(module));
        let output = format!("{name}/output_0");
        let inputs = [Some(x), Some(logits), Some(fc1), None, Some(fc2)];
        let attrs = swiglu(moe, true);
        let [out] = self.named_node(&name, (MS, "MoE"), attrs, &inputs, [&output])?;
        Ok(out)
    }

    /// Multiplies the output of normalised experts by the sum of the chosen experts' weights under the softmax over all
    /// of them.
    fn unnormalise(
        &mut self,
        at: &str,
        moe: Moe,
        out: ValueId,
        logits: ValueId,
    ) -> Result<ValueId, ConvertError> {
        let gate = format!("{at}/gate");
        let last = || [("axis", (-1i64).into())];
        let weights = self.node(&gate, ("", "Softmax"), last(), &[Some(logits)])?;
        let k = self.ints(&format!("/model/constants/ints/{}", moe.top_k), &[moe.top_k as i64])?;
        let name = format!("{gate}/TopK");
        let outputs = [format!("{name}/output_0"), format!("{name}/output_1")];
        let inputs = [Some(weights), Some(k)];
        let [chosen, _] =
            self.named_node(&name, ("", "TopK"), last().into(), &inputs, [&outputs[0], &outputs[1]])?;
        let axis = self.ints("/model/constants/ints/-1", &[-1])?;
        let keep = [("keepdims", 1i64.into())];
        let sum = self.node(&gate, ("", "ReduceSum"), keep, &[Some(chosen), Some(axis)])?;
        self.node(at, ("", "Mul"), [], &[Some(out), Some(sum)])
    }
}

/// Attributes that QMoE and MoE share. Alpha 1, beta 0 and no limit, as Llama and Qwen compute SwiGLU, are defaults.
fn swiglu(moe: Moe, normalize: bool) -> Attrs {
    [
        ("k", (moe.top_k as i64).into()),
        ("activation_type", "swiglu".into()),
        ("swiglu_fusion", 1i64.into()),
        ("normalize_routing_weights", i64::from(normalize).into()),
    ]
    .into()
}
