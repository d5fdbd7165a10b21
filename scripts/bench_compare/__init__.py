"""Two revisions of Doyen, measured in turns with a null arm: started by scripts/bench-compare."""


class Trouble(Exception):
    """Nothing can be compared; its words say why and what to do."""
