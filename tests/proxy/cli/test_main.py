import subprocess
import sys


def test_importing_it_loads_no_server_and_no_model():
    heavy = ["torch", "transformers", "numpy", "starlette", "httptools", "pydantic", "httpx", "rich"]
    program = f"import sys, proxy.cli; print([m for m in {heavy} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout == "[]\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f"{sys.executable} -m proxy.cli --help | head -1; exit ${{PIPESTATUS[0]}}"
    output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert output.stdout.startswith("Usage:")
    assert "Traceback" not in output.stderr
