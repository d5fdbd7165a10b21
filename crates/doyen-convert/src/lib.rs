//! doyen-convert
