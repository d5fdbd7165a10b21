"""Doyen beside its peers: started by scripts/bench-peers, which makes the virtual environment it runs in."""
