import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORBIDDEN = ["tensorflow", "keras", "pydantic", "typer", "rich", "onnxruntime_extensions"]


def test_serving_needs_only_its_own_packages():
    script = (
        "import sys, serving, serving.onnx_classifier, serving.__main__\n"
        f"print(sorted(set({FORBIDDEN}) & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (out.stdout, out.stderr) == ("[]\n", "")
