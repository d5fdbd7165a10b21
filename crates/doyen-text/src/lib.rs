//! doyen-text
