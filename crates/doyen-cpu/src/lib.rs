//! doyen-cpu
