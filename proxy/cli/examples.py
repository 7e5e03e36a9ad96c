"""The example under the help of each command."""

from __future__ import annotations

EXAMPLES = {
    "serve": "kvpin serve --reuse --engine vllm=http://gpu-1:8000 --engine vllm=http://gpu-2:8000",
    "stats": "kvpin stats",
    "warm": "kvpin warm --messages-file chat.json --all-engines",
    "offload": "kvpin offload --messages-file chat.json",
    "restore": "kvpin restore --messages-file chat.json --or-warm",
    "pin": "kvpin pin --messages-file chat.json --ttl 600",
    "unpin": "kvpin unpin pin-1",
    "flush": "kvpin flush --messages-file chat.json",
    "route": "kvpin route --messages-file chat.json",
    "requests": "kvpin requests --limit 5",
    "engines": "kvpin engines",
    "engines list": "kvpin engines list",
    "engines add": "kvpin engines add vllm=http://gpu-3:8000,id=third",
    "engines drain": "kvpin engines drain third",
    "engines remove": "kvpin engines remove third",
    "tables": "kvpin tables",
    "tables put": "kvpin tables put table.safetensors --id support",
    "tables list": "kvpin tables list",
    "tables show": "kvpin tables show support",
    "tables delete": "kvpin tables delete support",
    "top": "kvpin top",
    "bench": "kvpin bench http://127.0.0.1:8000 --num-prompts 4 --prefix-len 100",
    "doctor": "kvpin doctor http://gpu-1:8000 --probe",
    "init": "kvpin init http://gpu-1:8000",
    "config": "kvpin config check --config kvpin.toml",
    "config check": "kvpin config check --config kvpin.toml",
    "replay": "kvpin replay traffic.jsonl --engines 1,2",
}
"""By the words of the command. A test runs them in this order."""
