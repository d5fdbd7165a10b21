//! Routed experts: how they are chosen and weighted, what they compute, and under which names they are stored.

use super::{Activation, Fields, Mlp};
use crate::ConvertError;

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct Moe {
    /// Modules below the layer that hold router and experts, the first that is there.
    pub modules: &'static [&'static str],
    /// Tensor names of the experts.
    pub names: ExpertNames,
    /// Tensor names of the router.
    pub router: RouterNames,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts a token is sent to.
    pub top_k: usize,
    /// Rows of an expert's gate and up projections.
    pub intermediate: usize,
    /// Whether experts have biases.
    pub bias: bool,
    /// What experts compute between their projections.
    pub activation: SwiGlu,
    /// How experts are chosen and weighted.
    pub routing: Routing,
    /// Experts that see every token.
    pub shared: Option<Shared>,
}

/// `min(g, limit) sigmoid(alpha g) (clamp(l, -limit, limit) + beta)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SwiGlu {
    /// Factor within the sigmoid.
    pub alpha: f32,
    /// Added to the linear half.
    pub beta: f32,
    /// Bound on both halves.
    pub limit: Option<f32>,
}

impl SwiGlu {
    /// As Llama computes it.
    pub const PLAIN: Self = Self { alpha: 1.0, beta: 0.0, limit: None };
}

/// Where the experts' projections are: in tensors of their own, or in one for all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertNames {
    /// Gate, up and down projection of expert `e` below `experts.e`.
    pub each: [&'static str; 3],
    /// Gate and up, and down projection of all experts in tensors of rank 3.
    pub all: [&'static str; 2],
    /// Layout of the tensors of rank 3.
    pub fused: Fused,
}

/// Layout of experts in tensors of rank 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fused {
    /// `[E, 2I, H]`, all gate rows before all up rows, and `[E, H, I]`.
    Halves,
    /// `[E, H, 2I]` and `[E, I, H]`: transposed, gate and up columns in turn.
    TransposedPairs,
    /// `[E, H, 2I]` and `[E, I, H]`: transposed, all gate columns before all up columns; or as [`Halves`](Self::Halves), as
    /// the shapes tell.
    TransposedHalves,
}

impl ExpertNames {
    /// As Qwen has them.
    pub const QWEN: Self = Self {
        each: ["gate_proj", "up_proj", "down_proj"],
        all: ["experts.gate_up_proj", "experts.down_proj"],
        fused: Fused::Halves,
    };
    /// As Mixtral has them.
    pub const MIXTRAL: Self = Self { each: ["w1", "w3", "w2"], ..Self::QWEN };
}

/// The router's tensors below the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterNames {
    /// The projection.
    pub module: &'static str,
    /// Whether it has a bias.
    pub bias: bool,
}

impl RouterNames {
    /// `gate`, without bias.
    pub const GATE: Self = Self { module: "gate", bias: false };
}

/// From router logits to chosen experts and their weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// What a logit means.
    pub score: Score,
    /// Added to the scores for the choice, not for the weights.
    pub correction: Option<Correction>,
    /// Groups of experts that are chosen first.
    pub groups: Option<Groups>,
    /// Whether the chosen experts' weights are divided by their sum.
    pub normalize: bool,
    /// Factor on the weights.
    pub scale: f32,
}

impl Routing {
    /// Softmax, the chosen ones' weights divided by their sum.
    pub const SOFTMAX: Self =
        Self { score: Score::Softmax, correction: None, groups: None, normalize: true, scale: 1.0 };
}

/// The tensor of the score correction below the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Correction {
    /// Its names, of which the first that is there counts.
    pub tensors: &'static [&'static str],
    /// Whether it is stored as one row of a matrix.
    pub row: bool,
}

/// What a router's logit means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Score {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Two rounds, in each of which the best has its weight under the softmax over those close to it (SparseMixer):
    /// others are masked whose distance from the best, relative to the larger magnitude, exceeds twice the jitter.
    SparseMixer {
        /// `router_jitter_noise`.
        jitter: f32,
    },
}

/// Groups of experts that are chosen first; others are not eligible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// How many there are.
    pub count: usize,
    /// How many are chosen.
    pub kept: usize,
    /// A group's score is the sum of this many of its best experts' scores.
    pub best: usize,
}

/// Experts that see every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shared {
    /// The feed-forward; its module is below the layer.
    pub mlp: Mlp,
    /// Module below the layer whose sigmoid is a factor on the output, `[1, H]`.
    pub gate: Option<&'static str>,
}

impl Moe {
    /// Experts as Qwen has them, with counts and extents in these fields.
    pub(super) fn read(f: &Fields, names: [&str; 3]) -> Result<Self, ConvertError> {
        let [experts_field, top_k_field, intermediate_field] = names;
        // What newer releases of the same classes write.
        let experts_field = match experts_field {
            "num_experts" if f.value("num_experts").is_none() => "num_local_experts",
            field => field,
        };
        let (experts, top_k) = (f.size(experts_field)?, f.size(top_k_field)?);
        if top_k > experts {
            return Err(f.wrong(top_k_field, top_k, format!("at most {experts_field} = {experts}")));
        }
        if Activation::read(f)? != Activation::Silu {
            let found = f.string("hidden_act")?.unwrap_or("another activation").to_owned();
            return Err(f.wrong("hidden_act", format!("{found:?}"), "\"silu\", as experts compute it"));
        }
        Ok(Self {
            modules: &["mlp"],
            names: ExpertNames::QWEN,
            router: RouterNames::GATE,
            experts,
            top_k,
            intermediate: f.size(intermediate_field)?,
            bias: false,
            activation: SwiGlu::PLAIN,
            routing: Routing::SOFTMAX,
            shared: None,
        })
    }
}

/// Refuses weights that are not renormalised, where an architecture's always are.
pub(super) fn always_normalized(f: &Fields) -> Result<(), ConvertError> {
    const NAME: &str = "norm_topk_prob";
    if f.flag(NAME, true)? {
        return Ok(());
    }
    Err(f.wrong(
        NAME,
        false,
        "true: the chosen experts' weights are divided by their sum in this architecture",
    ))
}

impl Groups {
    /// Reads `n_group` and `topk_group`; nothing where one group holds all experts or all groups are kept.
    pub(super) fn read(
        f: &Fields,
        experts: usize,
        top_k: usize,
        best: usize,
    ) -> Result<Option<Self>, ConvertError> {
        let count = f.optional_size("n_group")?.unwrap_or(1);
        let kept = f.optional_size("topk_group")?.unwrap_or(count);
        if count == 1 {
            return Ok(None);
        }
        if !experts.is_multiple_of(count) || experts / count < best {
            let expected =
                format!("a divisor of the {experts} experts that leaves {best} or more in a group");
            return Err(f.wrong("n_group", count, expected));
        }
        if kept > count || kept * (experts / count) < top_k {
            let expected =
                format!("at most n_group = {count}, with {top_k} experts or more in the chosen groups");
            return Err(f.wrong("topk_group", kept, expected));
        }
        Ok((kept < count).then_some(Self { count, kept, best }))
    }
}
