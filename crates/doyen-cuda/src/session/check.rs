//! A batch against the limits of its program, so that kernels need not look.

use doyen_graph::device::{Program, RaggedBatch};

/// # Errors
/// Says what does not fit the program.
pub(super) fn batch(program: &Program, batch: &RaggedBatch<'_>) -> Result<(), String> {
    let limits = &program.limits;
    let fits = |what: &str, found: usize, most: usize| {
        if found <= most { Ok(()) } else { Err(format!("a step of {found} {what}, planned for {most}")) }
    };
    fits("tokens", batch.tokens.len(), limits.tokens)?;
    fits("logit rows", batch.rows.len(), limits.rows)?;
    fits("sequences", batch.sequences.len(), limits.sequences)?;
    let mut next = 0;
    for s in batch.sequences {
        if s.first != next {
            return Err("the sequences do not tile the tokens".into());
        }
        next += s.len;
        fits("positions", s.past.saturating_add(s.len), limits.context)?;
    }
    let alone = batch.sequences.is_empty() && program.graph.groups.is_empty();
    if !alone && next != batch.tokens.len() {
        return Err("the sequences do not tile the tokens".into());
    }
    if let Some(&r) = batch.rows.iter().find(|&&r| r as usize >= batch.tokens.len()) {
        return Err(format!("logits of token {r} of {}", batch.tokens.len()));
    }
    if batch.tables.len() < program.graph.groups.len() {
        return Err("a cache group has no block tables".into());
    }
    for (g, (table, group)) in batch.tables.iter().zip(&program.pages).enumerate() {
        if table.len() < batch.sequences.len() {
            return Err(format!("cache group {g} has no table for every sequence"));
        }
        for (i, s) in batch.sequences.iter().enumerate() {
            let pages = table.sequence(i);
            let positions = s.past + s.len;
            let need = positions.div_ceil(limits.page_size);
            if pages.len() < need || pages[..need].iter().any(|p| p.index() >= group.pages) {
                return Err(format!("sequence {i} has no pages for {positions} positions"));
            }
        }
    }
    Ok(())
}
