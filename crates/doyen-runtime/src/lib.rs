//! doyen-runtime
