//! What the name of a state port says.

/// The words of a name: runs of letters or of digits, lower case.
fn words(name: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut previous = None;
    for c in name.chars() {
        let class = if c.is_ascii_digit() { Some('0') } else { c.is_alphabetic().then_some('a') };
        if class.is_some() {
            if class != previous {
                out.push(String::new());
            }
            if let Some(word) = out.last_mut() {
                word.extend(c.to_lowercase());
            }
        }
        previous = class;
    }
    out
}

/// The words of a name without those that only say which end of a run it is: equal for a past and its present.
pub(super) fn signature(name: &str) -> Vec<String> {
    let mut words = words(name);
    // "past_key_values.3.value": the first three words are one prefix.
    for prefix in [["past", "key", "values"], ["present", "key", "values"], ["past", "key", "value"]] {
        // What remains must still say which state it is.
        if words.len() > prefix.len() + 1 && words[..prefix.len()] == prefix {
            words.drain(..prefix.len());
        }
    }
    let end =
        ["past", "present", "in", "out", "input", "output", "new", "updated", "next", "prev", "previous"];
    words.retain(|w| !end.contains(&w.as_str()));
    words
}

/// The one number in a name, the layer.
pub(super) fn layer(name: &str) -> Option<usize> {
    let words = words(name);
    let mut numbers = words.iter().filter_map(|w| w.parse().ok());
    numbers.next().filter(|_| numbers.next().is_none())
}

/// Whether a name says key or value, and not both.
pub(super) fn role(name: &str) -> Option<Role> {
    let words = signature(name);
    let has = |names: [&str; 3]| words.iter().any(|w| names.contains(&w.as_str()));
    match (has(["key", "k", "keys"]), has(["value", "v", "values"])) {
        (true, false) => Some(Role::Key),
        (false, true) => Some(Role::Value),
        _ => None,
    }
}

/// The layer for which a template with `%d` gives this name.
pub(super) fn template_layer(template: &str, name: &str) -> Option<usize> {
    let (head, tail) = template.split_once("%d")?;
    let digits = name.strip_prefix(head)?.strip_suffix(tail)?;
    // No sign, no leading zero: exactly what formatting the number gives.
    digits.parse::<usize>().ok().filter(|n| n.to_string() == digits)
}

/// Half of an attention state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Key,
    Value,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_past_and_its_present_have_one_signature() {
        for (past, present) in [
            ("past_key_values.3.key", "present.3.key"),
            ("past_conv.0", "present_conv.0"),
            ("past_key_self_0", "present_key_self_0"),
            ("past.12.recurrent", "present.12.recurrent"),
            ("past_key_values.0.conv_state", "present.0.conv_state"),
            ("cache_k_1_in", "cache_k_1_out"),
        ] {
            assert_eq!(signature(past), signature(present), "{past}");
        }
        assert_ne!(signature("past_key_values.3.key"), signature("present.3.value"));
    }

    #[test]
    fn layers_and_roles() {
        assert_eq!(layer("past_key_values.13.key"), Some(13));
        assert_eq!(layer("block1.head2.key"), None);
        assert_eq!(role("past_key_values.13.value"), Some(Role::Value));
        assert_eq!(role("cache_k_1_in"), Some(Role::Key));
        assert_eq!(role("past.1.recurrent"), None);
        assert_eq!(template_layer("past_key_values.%d.key", "past_key_values.7.key"), Some(7));
        assert_eq!(template_layer("past_key_values.%d.key", "past_key_values.07.key"), None);
        assert_eq!(template_layer("past_key_values.%d.key", "past_key_values.7.value"), None);
    }
}
