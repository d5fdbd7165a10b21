//! doyen-graph
