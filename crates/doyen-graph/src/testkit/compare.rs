//! The tolerance rule: `|got - want| <= atol + rtol * |want|`, types and shapes equal, integers exact.

use doyen_tensor::{DType, Tensor};

/// How near an output must be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Relative to the expected value.
    pub rtol: f64,
    /// Absolute.
    pub atol: f64,
    /// Whether an expected NaN means "not specified"; otherwise it means NaN.
    pub nan_is_free: bool,
}

impl Tolerance {
    /// What ONNX's own backend test runner uses.
    pub const ONNX_NODE: Self = Self { rtol: 1e-3, atol: 1e-7, nan_is_free: false };

    /// ONNX's runner compares bfloat16 outputs at two units in the last place.
    const ONNX_BF16_RTOL: f64 = 1.0 / 64.0;
}

/// Compares an output; the message says where it differs most from what is allowed.
///
/// # Errors
/// When type or shape differ, or an element is too far off.
pub fn compare(got: &Tensor, want: &Tensor, tolerance: Tolerance) -> Result<(), String> {
    if got.dtype() != want.dtype() || got.shape() != want.shape() {
        return Err(format!(
            "expected {}{}, found {}{}",
            want.dtype(),
            want.shape(),
            got.dtype(),
            got.shape()
        ));
    }
    if !want.dtype().is_float() {
        return exact(got, want);
    }
    let (got, want_values) = match (got.to_f64(), want.to_f64()) {
        (Ok(g), Ok(w)) => (g, w),
        (Err(e), _) | (_, Err(e)) => return Err(e.to_string()),
    };
    let rtol = if tolerance.nan_is_free || want.dtype() != DType::BF16 {
        tolerance.rtol
    } else {
        tolerance.rtol.max(Tolerance::ONNX_BF16_RTOL)
    };
    let mut worst: Option<(f64, usize)> = None;
    let mut wrong = 0usize;
    for (i, (&g, &w)) in got.iter().zip(&want_values).enumerate() {
        if w.is_nan() && (tolerance.nan_is_free || g.is_nan()) || g == w {
            continue;
        }
        let allowed = tolerance.atol + rtol * w.abs();
        let excess = (g - w).abs() / allowed;
        // Written so that a NaN is never near enough.
        if !(w.is_finite() && (g - w).abs() <= allowed) {
            wrong += 1;
            let excess = if excess.is_nan() { f64::INFINITY } else { excess };
            if worst.is_none_or(|(e, _)| excess > e) {
                worst = Some((excess, i));
            }
        }
    }
    match worst {
        None => Ok(()),
        Some((_, i)) => Err(format!(
            "{wrong} of {} elements differ; at {} expected {}, found {} (allowed {:.3e})",
            got.len(),
            position(want.shape(), i),
            want_values[i],
            got[i],
            tolerance.atol + rtol * want_values[i].abs()
        )),
    }
}

fn exact(got: &Tensor, want: &Tensor) -> Result<(), String> {
    let (g, w) = (got.bytes(), want.bytes());
    // Any non-zero byte is true.
    let same = |a: u8, b: u8| if want.dtype() == DType::Bool { (a != 0) == (b != 0) } else { a == b };
    match g.iter().zip(w).position(|(&a, &b)| !same(a, b)) {
        None => Ok(()),
        Some(byte) => {
            let i = byte * 8 / want.dtype().bits();
            let show = |t: &Tensor| {
                t.to_i64().map_or_else(|_| format!("byte {:#04x}", t.bytes()[byte]), |v| v[i].to_string())
            };
            Err(format!("at {} expected {}, found {}", position(want.shape(), i), show(want), show(got)))
        }
    }
}

fn position(shape: &[usize], mut i: usize) -> String {
    let mut index = vec![0; shape.len()];
    for (at, &d) in index.iter_mut().zip(shape).rev() {
        *at = i % d.max(1);
        i /= d.max(1);
    }
    format!("{index:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn t(values: &[f32]) -> Tensor {
        Tensor::from_slice([values.len()], values).unwrap()
    }

    #[test]
    fn the_rule() {
        let rule = Tolerance { rtol: 0.1, atol: 0.01, nan_is_free: true };
        compare(&t(&[1.1, 0.0]), &t(&[1.0, 0.009]), rule).unwrap();
        assert!(compare(&t(&[1.2]), &t(&[1.0]), rule).unwrap_err().contains("at [0]"));
        compare(&t(&[f32::INFINITY, 5.0]), &t(&[f32::INFINITY, f32::NAN]), rule).unwrap();
        for (got, want) in
            [(f32::NAN, 1.0), (f32::INFINITY, 1.0), (1.0, f32::INFINITY), (f32::NEG_INFINITY, f32::INFINITY)]
        {
            assert!(compare(&t(&[got]), &t(&[want]), rule).is_err(), "{got} {want}");
        }
        let onnx = Tolerance::ONNX_NODE;
        compare(&t(&[f32::NAN]), &t(&[f32::NAN]), onnx).unwrap();
        assert!(compare(&t(&[1.0]), &t(&[f32::NAN]), onnx).is_err());
    }

    #[test]
    fn integers_are_exact_and_types_must_agree() {
        let rule = Tolerance { rtol: 1.0, atol: 9.0, nan_is_free: true };
        let i = |v: &[i64]| Tensor::from_slice([1, v.len()], v).unwrap();
        let message = compare(&i(&[1, 2, 3]), &i(&[1, 2, 4]), rule).unwrap_err();
        assert_eq!(message, "at [0, 2] expected 4, found 3");
        assert!(compare(&i(&[1]), &t(&[1.0]), rule).is_err());
        assert!(compare(&t(&[1.0]), &t(&[1.0, 2.0]), rule).is_err());
    }
}
