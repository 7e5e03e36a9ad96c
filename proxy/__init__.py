"""kvpin: an OpenAI-compatible reverse proxy that makes the KV caches of serving engines count."""
