"""What is measured: cases, the calls of `doyen bench` that measure several of them, and how to read its JSON."""

from dataclasses import dataclass

QMOE = ("--op", "qmoe", "--experts", "16", "--top-k", "4", "--hidden", "1024", "--inter", "512")
MATMUL = ("--op", "matmulnbits", "--n", "2048", "--k", "2048")
GQA = ("--op", "gqa", "--heads", "16", "--kv-heads", "4", "--head-size", "64", "--context", "2048")
MODEL = ("--prompt", "128", "--gen", "32")


@dataclass(frozen=True)
class Call:
    """A call of `doyen bench` for cases that differ in one flag.

    Repetitions take about a third of a second: starting takes as long. A turn is several times as long as a repetition, as one that
    is interrupted takes as long as the turns of the others, and no more than a quarter of them may.
    """

    words: tuple[str, ...]
    repetitions: int
    turn_ms: int
    flag: str | None = None


@dataclass(frozen=True)
class Case:
    """One figure: of one row of an operator's report, or one rate of a model's."""

    name: str
    call: Call
    # Value of the call's flag.
    value: str | None = None
    # What a row says about itself.
    row: tuple[tuple[str, object], ...] = ()
    # The key of a model's rate.
    rate: str | None = None
    quick: bool = False

    def read(self, report: dict) -> float | None:
        """Seconds of a call, or of a token; None where the report has no such figure.

        The quarter of the calls that was least disturbed says most about the program: neighbours only ever add time.
        """
        try:
            if self.rate:
                return 1 / float(report[self.rate]["p75"])
            row = next(r for r in report["cases"] if all(r.get(k) == v for k, v in self.row))
            return float(row["ms"]["p25"]) / 1e3
        except (KeyError, TypeError, ValueError, ZeroDivisionError, StopIteration):
            return None


def qmoe_widths(widths: list[str]) -> list[Case]:
    call = Call((*QMOE, "--tokens", "1"), 150, 10, "--bits")
    out = []
    for width in widths:
        fc1, _, fc2 = width.partition("/")
        row = (("fc1", int(fc1)), ("fc2", int(fc2 or fc1)), ("m", 1))
        out.append(Case(f"qmoe int{width} m=1", call, width, row, quick=width == "4"))
    return out


def qmoe_tokens(tokens: list[int]) -> list[Case]:
    call = Call((*QMOE, "--bits", "4"), 25, 40, "--tokens")
    return [Case(f"qmoe int4 m={m}", call, str(m), (("m", m),)) for m in tokens]


def matmul_widths(widths: list[int]) -> list[Case]:
    call = Call((*MATMUL, "--tokens", "1"), 200, 10, "--bits")
    return [Case(f"matmul int{b} m=1", call, str(b), (("bits", b),), quick=b == 4) for b in widths]


def matmul_tokens(tokens: list[int], numerics: str) -> list[Case]:
    call = Call((*MATMUL, "--bits", "4", "--numerics", numerics), 40, 40, "--tokens")
    name = "matmul exact" if numerics == "exact" else "matmul"
    return [Case(f"{name} int4 m={m}", call, str(m), (("m", m),), quick=numerics == "fast") for m in tokens]


def attention_types(types: list[str]) -> list[Case]:
    call = Call((*GQA, "--tokens", "1"), 100, 10, "--kv")
    return [Case(f"attention {kv} m=1", call, kv, (("kv", kv),), quick=kv == "f16") for kv in types]


def attention_tokens(tokens: list[int]) -> list[Case]:
    call = Call((*GQA, "--kv", "f16"), 25, 40, "--tokens")
    return [Case(f"attention f32 m={m}", call, str(m), (("m", m),)) for m in tokens]


def model() -> list[Case]:
    call = Call(MODEL, 12, 80)
    return [Case(f"model {what}", call, rate=f"{what}_tok_s", quick=True) for what in ("prefill", "decode")]


SUITE = (
    *qmoe_widths(["4", "8", "2", "2/4"]),
    *qmoe_tokens([8, 64]),
    *matmul_widths([4, 8, 2]),
    *matmul_tokens([32], "fast"),
    *matmul_tokens([1, 32], "exact"),
    *attention_types(["f32", "f16", "int8"]),
    *attention_tokens([32]),
    *model(),
)


def chosen(words: str | None, quick: bool) -> list[Case]:
    """The cases whose name holds one of the comma-separated words."""
    cases = [c for c in SUITE if c.quick or not quick]
    if words is None:
        return cases
    wanted = [w.strip().lower() for w in words.split(",") if w.strip()]
    return [c for c in cases if any(w in c.name for w in wanted)]


@dataclass(frozen=True)
class Command:
    """A command line without the program, and how long a turn of it is."""

    words: tuple[str, ...]
    turn_ms: int

    def __str__(self):
        return " ".join(("doyen", *self.words))


def commands(cases: list[Case], threads: int) -> dict[Command, list[Case]]:
    """Command lines, and the cases that each measures."""
    groups: dict[Call, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.call, []).append(case)
    out = {}
    for call, group in groups.items():
        axis = (call.flag, ",".join(c.value for c in group)) if call.flag else ()
        how = ("--repetitions", str(call.repetitions), "--threads", str(threads), "--json")
        out[Command(("bench", *call.words, *axis, *how), call.turn_ms)] = group
    return out
