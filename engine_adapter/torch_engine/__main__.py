"""`python -m engine_adapter.torch_engine` is `kvpin engine`: `serve` is imported before it could run."""

from engine_adapter.torch_engine.serve import app

app()
