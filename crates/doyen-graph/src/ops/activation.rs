//! Activations between the two products of an expert, as QMoE and MoE name them (operator contract, section 1.7).
//!
//! The scalar reference; backends read the parameters and write their own.

use super::OpError;
use crate::ir::Attrs;

/// What stands between FC1 and FC2.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub enum Activation {
    Identity,
    Relu,
    /// The tanh form.
    Gelu,
    Silu,
    Swiglu(Swiglu),
}

/// Parameters of SwiGLU: `G = min(g, limit)`, `L = clamp(l, -limit, limit)`, `G * sigmoid(alpha * G) * (L + beta)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Swiglu {
    /// Where FC1 holds gate and linear rows, as the attribute says; see [`Fusion::resolve`].
    pub fusion: Fusion,
    /// Slope inside the sigmoid.
    pub alpha: f32,
    /// Added to the linear part.
    pub beta: f32,
    /// Clamp; infinite when the attribute is absent, zero clamps to zero.
    pub limit: f32,
}

/// Where gate and linear rows lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fusion {
    /// Gate is FC1, linear is FC3.
    Separate,
    /// Gate is FC1 row `2i`, linear row `2i + 1`.
    Interleaved,
    /// Gate is FC1 row `i`, linear row `I + i`.
    Concatenated,
}

impl Fusion {
    /// The layout in effect: `Separate` without FC3 means interleaved (published models leave the attribute out).
    pub const fn resolve(self, has_fc3: bool) -> Self {
        match self {
            Self::Separate if !has_fc3 => Self::Interleaved,
            other => other,
        }
    }

    /// FC1 rows per intermediate value: 2 when gate and linear share FC1.
    pub const fn rows_per_value(self) -> usize {
        match self {
            Self::Separate => 1,
            Self::Interleaved | Self::Concatenated => 2,
        }
    }
}

impl Activation {
    /// Reads `activation_type`, `swiglu_fusion`, `activation_alpha`, `activation_beta` and `swiglu_limit`.
    ///
    /// # Errors
    /// On an unknown activation, an unknown fusion, a fusion without SwiGLU, or a NaN or negative limit.
    pub fn parse(attrs: &mut Attrs) -> Result<Self, OpError> {
        let fusion = match attrs.int("swiglu_fusion")?.unwrap_or(0) {
            0 => Fusion::Separate,
            1 => Fusion::Interleaved,
            2 => Fusion::Concatenated,
            v => return Err(OpError::attribute("swiglu_fusion", "0, 1 or 2", v)),
        };
        let alpha = attrs.finite("activation_alpha")?.unwrap_or(1.0);
        let beta = attrs.finite("activation_beta")?.unwrap_or(0.0);
        let limit = attrs.float("swiglu_limit")?.unwrap_or(f32::INFINITY);
        if limit < 0.0 {
            return Err(OpError::attribute("swiglu_limit", "a limit of 0 or more", limit));
        }
        let name = attrs.string("activation_type")?;
        let activation = match name.as_deref().unwrap_or("relu") {
            "identity" => Self::Identity,
            "relu" => Self::Relu,
            "gelu" => Self::Gelu,
            "silu" => Self::Silu,
            "swiglu" => Self::Swiglu(Swiglu { fusion, alpha, beta, limit }),
            other => {
                return Err(OpError::attribute(
                    "activation_type",
                    "relu, gelu, silu, swiglu or identity",
                    format!("{other:?}"),
                ));
            }
        };
        if fusion != Fusion::Separate && !matches!(activation, Self::Swiglu(_)) {
            let expected = format!("0 with activation_type {:?}", name.as_deref().unwrap_or("relu"));
            return Err(OpError::attribute("swiglu_fusion", expected, fusion.rows_text()));
        }
        Ok(activation)
    }

    /// The gate layout in effect; `Separate` also for activations without a gate.
    pub const fn fusion(self, has_fc3: bool) -> Fusion {
        match self {
            Self::Swiglu(s) => s.fusion.resolve(has_fc3),
            _ => Fusion::Separate,
        }
    }

    /// Whether FC1 holds gate and linear rows.
    pub const fn is_fused(self, has_fc3: bool) -> bool {
        !matches!(self.fusion(has_fc3), Fusion::Separate)
    }

    /// Intermediate values of one token from its FC1 rows and, if there is FC3, its FC3 rows. Without SwiGLU, FC3
    /// rows multiply the activated FC1 rows (`silu` then equals SwiGLU at its default parameters).
    ///
    /// # Panics
    /// When `h3` has another length than the result, or a fused `h1` an odd one.
    pub fn apply(self, h1: &[f64], h3: Option<&[f64]>) -> Vec<f64> {
        let fusion = self.fusion(h3.is_some());
        let n = h1.len() / fusion.rows_per_value();
        (0..n)
            .map(|i| match (self, fusion, h3) {
                (Self::Swiglu(s), Fusion::Interleaved, _) => s.value(h1[2 * i], h1[2 * i + 1]),
                (Self::Swiglu(s), Fusion::Concatenated, _) => s.value(h1[i], h1[n + i]),
                (Self::Swiglu(s), Fusion::Separate, Some(l)) => s.value(h1[i], l[i]),
                (_, _, None) => self.value(h1[i]),
                (_, _, Some(l)) => self.value(h1[i]) * l[i],
            })
            .collect()
    }

    fn value(self, x: f64) -> f64 {
        match self {
            Self::Identity => x,
            Self::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Self::Gelu => {
                let c = (2.0 / std::f64::consts::PI).sqrt();
                0.5 * x * (1.0 + (c * (x + 0.044715 * x * x * x)).tanh())
            }
            Self::Silu | Self::Swiglu(_) => silu(x),
        }
    }
}

impl Fusion {
    const fn rows_text(self) -> &'static str {
        match self {
            Self::Separate => "0 (separate)",
            Self::Interleaved => "1 (interleaved)",
            Self::Concatenated => "2 (concatenated)",
        }
    }
}

impl Swiglu {
    /// One value from a gate and a linear part.
    pub fn value(&self, gate: f64, linear: f64) -> f64 {
        let limit = f64::from(self.limit);
        let g = if gate > limit { limit } else { gate };
        let l = if linear > limit {
            limit
        } else if linear < -limit {
            -limit
        } else {
            linear
        };
        g * sigmoid(f64::from(self.alpha) * g) * (l + f64::from(self.beta))
    }
}

/// `1 / (1 + exp(-x))`.
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`; 0 at minus infinity.
pub(super) fn silu(x: f64) -> f64 {
    if x == f64::NEG_INFINITY { 0.0 } else { x * sigmoid(x) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attr;

    fn swiglu(fusion: Fusion) -> Activation {
        Activation::Swiglu(Swiglu { fusion, alpha: 1.702, beta: 1.0, limit: 7.0 })
    }

    /// The worked example of contract 1.7, in all three layouts.
    #[test]
    fn worked_swiglu_example() {
        let want = [55.99963, 2.434776e-06, -11.61395, 2.903488];
        let (g, l) = ([10.0, -10.0, 2.0, 2.0], [10.0, -10.0, -10.0, 0.5]);
        let pairs: Vec<f64> = g.iter().zip(&l).flat_map(|(&a, &b)| [a, b]).collect();
        let rows: Vec<f64> = g.iter().chain(&l).copied().collect();
        for got in [
            swiglu(Fusion::Interleaved).apply(&pairs, None),
            swiglu(Fusion::Concatenated).apply(&rows, None),
            swiglu(Fusion::Separate).apply(&g, Some(&l)),
            swiglu(Fusion::Separate).apply(&pairs, None),
        ] {
            for (a, b) in got.iter().zip(want) {
                assert!((a - b).abs() <= 1e-6 * b.abs().max(1e-6), "{a} {b}");
            }
        }
    }

    #[test]
    fn limit_zero_clamps_to_zero() {
        let s = Swiglu { fusion: Fusion::Interleaved, alpha: 1.0, beta: 2.0, limit: 0.0 };
        assert_eq!(s.value(3.0, 5.0), 0.0);
        assert!(s.value(-3.0, 5.0) < 0.0);
    }

    #[test]
    fn gelu_is_the_tanh_form() {
        let got = Activation::Gelu.apply(&[1.0], None)[0];
        assert!((got - 0.841_191_990).abs() < 1e-8, "{got}");
    }

    #[test]
    fn fusion_needs_swiglu() {
        let mut a = Attrs::from([("swiglu_fusion", Attr::Int(1)), ("activation_type", "silu".into())]);
        assert!(Activation::parse(&mut a).unwrap_err().to_string().contains("swiglu_fusion"));
        let mut a = Attrs::from([("activation_type", Attr::Str("geglu".into()))]);
        assert!(Activation::parse(&mut a).unwrap_err().to_string().contains("activation_type"));
        let mut a = Attrs::from([("activation_type", Attr::Str("swiglu".into()))]);
        let Activation::Swiglu(s) = Activation::parse(&mut a).unwrap() else { panic!() };
        assert_eq!(s.limit, f32::INFINITY);
    }
}
