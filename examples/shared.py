"""What the examples share: kvpin's address and key, its admin API, a model to ask, errors as one line."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from openai import APIConnectionError, APIStatusError, OpenAI, OpenAIError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with one line where a request fails."""
    try:
        yield
    except APIStatusError as error:
        sys.exit(f"{error.request.url} answered {error.status_code}: {message_of(error.response)}")
    except httpx.HTTPStatusError as error:
        sys.exit(f"{error.request.url} answered {error.response.status_code}: {message_of(error.response)}")
    except (APIConnectionError, httpx.TransportError) as error:
        url = error.request.url
        hint = "start kvpin (scripts/serve), or name its address with --base-url"
        sys.exit(f"Nothing answers at {url}: {hint}. ({error})")
    except OpenAIError as error:
        sys.exit(str(error))


def message_of(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape; else the body."""
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the address of kvpin and its key, which may come from the environment as in OpenAI's SDK."""
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY") or "unused")


def add_admin_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the key of the admin API, which may come from the environment as for kvpin's commands."""
    parser.add_argument("--admin-key", default=os.environ.get("KVPIN_ADMIN_KEY"))


def admin_url(base_url: str) -> str:
    """The address of the admin API beside that of clients."""
    return f"{base_url.rstrip('/').removesuffix('/v1')}/admin/v1"


def first_model(client: OpenAI) -> str:
    """The first model that is served."""
    models = client.models.list().data
    if not models:
        sys.exit("No model is served yet: wait until kvpin prints 'ready:', then try again.")
    return models[0].id


def cached_tokens(usage: object) -> int:
    """Prompt tokens that came from cache, 0 where the server does not say."""
    details = getattr(usage, "prompt_tokens_details", None)
    return (details.cached_tokens or 0) if details else 0
