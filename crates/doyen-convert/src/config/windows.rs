//! Which layers see a window of positions only.

use super::Fields;
use crate::ConvertError;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Whether each layer slides, by `layer_types`.
pub(super) fn layer_types(f: &Fields, layers: usize) -> Result<Option<Vec<bool>>, ConvertError> {
    f.layer_kinds("layer_types", layers, [FULL, SLIDING])
}

/// Positions of a window; released files also write 0 for none.
fn window(f: &Fields) -> Result<Option<usize>, ConvertError> {
    Ok(Some(f.count("sliding_window", 0)?).filter(|n| *n > 0))
}

/// Windows of `sliding_window` positions in layers that slide.
pub(super) fn sized(f: &Fields, slides: Vec<bool>) -> Result<Vec<Option<usize>>, ConvertError> {
    let size = window(f)?;
    if size.is_none() && slides.contains(&true) {
        return Err(f.wrong("sliding_window", "absent", "a positive integer, since layers slide"));
    }
    Ok(slides.into_iter().map(|s| size.filter(|_| s)).collect())
}

/// None: a window that is set is refused, unless `layer_types` says that no layer uses it.
pub(super) fn none(f: &Fields, layers: usize) -> Result<Vec<Option<usize>>, ConvertError> {
    let types = layer_types(f, layers)?;
    if let Some(w) = window(f)?
        && types.is_none_or(|t| t.contains(&true))
    {
        return Err(f.wrong("sliding_window", w, "nothing in this architecture"));
    }
    Ok(vec![None; layers])
}

/// Every layer where `sliding_window` is set; `layer_types` that say otherwise are refused.
pub(super) fn all(f: &Fields, layers: usize) -> Result<Vec<Option<usize>>, ConvertError> {
    let size = window(f)?;
    if let Some(other) = layer_types(f, layers)?.and_then(|t| t.into_iter().position(|s| s != size.is_some()))
    {
        let found = format!("{:?} for layer {other}", if size.is_some() { FULL } else { SLIDING });
        return Err(f.wrong("layer_types", found, "what sliding_window says, for all layers"));
    }
    Ok(vec![size; layers])
}

/// Those that `layer_types` names, or else every one where `sliding_window` is set.
pub(super) fn all_or_typed(f: &Fields, layers: usize) -> Result<Vec<Option<usize>>, ConvertError> {
    let set = window(f)?.is_some();
    by_layer(f, layers, |_| set)
}

/// Those that `layer_types` names, or else those that `pattern` does.
pub(super) fn by_layer(
    f: &Fields,
    layers: usize,
    pattern: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>, ConvertError> {
    let slides = layer_types(f, layers)?.unwrap_or_else(|| (0..layers).map(pattern).collect());
    sized(f, slides)
}

/// Qwen's rule: windows from layer `max_window_layers` on, when `use_sliding_window` says so; newer files spell the
/// result out in `layer_types`, which then decides. Releases of the Qwen-MoE code disagree about `max_window_layers`, so
/// with experts windows need `layer_types`.
pub(super) fn qwen(f: &Fields, layers: usize, moe: bool) -> Result<Vec<Option<usize>>, ConvertError> {
    let used = f.flag("use_sliding_window", false)?;
    let first = f.count("max_window_layers", 28)?;
    let slides = match layer_types(f, layers)? {
        Some(types) if !used && types.contains(&true) => {
            return Err(f.wrong("use_sliding_window", used, "true, since layer_types has layers that slide"));
        }
        Some(types) => types,
        None if !used => vec![false; layers],
        None if moe => {
            let expected = "false, or layer_types that name every layer";
            return Err(f.wrong("use_sliding_window", used, expected));
        }
        None => (0..layers).map(|i| i >= first).collect(),
    };
    sized(f, slides)
}

/// None: released code with `use_sliding_window` gives every layer a window, or some, by release.
pub(super) fn unused(f: &Fields, layers: usize) -> Result<Vec<Option<usize>>, ConvertError> {
    if f.flag("use_sliding_window", false)? {
        return Err(f.wrong(
            "use_sliding_window",
            true,
            "false: implementations disagree on which layers slide",
        ));
    }
    match layer_types(f, layers)?.and_then(|t| t.into_iter().position(|slides| slides)) {
        Some(i) => Err(f.wrong("layer_types", format!("{SLIDING:?} for layer {i}"), format!("{FULL:?}"))),
        None => Ok(vec![None; layers]),
    }
}
