"""Writes the listed node tests of the installed onnx package: onnx-node-tests.py LIST OUT (see onnx-node-tests.sh)."""

import sys
from pathlib import Path

import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests


def listed(path: Path) -> list[str]:
    """Test names of lines `Operator: test_a test_b ...`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [name for line in lines if ":" in line for name in line.split(":", 1)[1].split()]


def serialized(value, info: onnx.ValueInfoProto) -> bytes:
    """A value in the proto its port declares."""
    if hasattr(value, "SerializeToString"):
        return value.SerializeToString()
    kind = info.type.WhichOneof("value")
    if kind == "sequence_type":
        return numpy_helper.from_list(value, info.name).SerializeToString()
    if kind == "optional_type":
        return numpy_helper.from_optional(value, info.name).SerializeToString()
    return numpy_helper.from_array(value, info.name).SerializeToString()


def write(case, out: Path) -> None:
    folder = out / case.name
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(case.model.SerializeToString())
    for number, (inputs, outputs) in enumerate(case.data_sets):
        data = folder / f"test_data_set_{number}"
        data.mkdir()
        for kind, values, ports in (
            ("input", inputs, case.model.graph.input),
            ("output", outputs, case.model.graph.output),
        ):
            for i, (value, port) in enumerate(zip(values, ports, strict=True)):
                (data / f"{kind}_{i}.pb").write_bytes(serialized(value, port))


def main() -> int:
    names, out = listed(Path(sys.argv[1])), Path(sys.argv[2])
    cases = {case.name: case for case in load_model_tests(kind="node")}
    missing = [name for name in names if name not in cases]
    if missing:
        print(f"onnx {onnx.__version__} lacks {len(missing)} listed tests: {' '.join(missing)}", file=sys.stderr)
        return 1
    for name in names:
        write(cases[name], out)
    print(f"{len(names)} node tests of onnx {onnx.__version__} in {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
