"""An engine that keeps all kinds of objects, for everybody, as engines do."""

import itertools
from urllib.parse import unquote

from proxy.request.tenants import ApiKey, Tenants
from tests.fakes import CHAT

KEYS = {name: {"authorization": f"Bearer key-{name}"} for name in ("a", "b")}
TENANTS = Tenants(ApiKey.of(f"key-{name}", name) for name in KEYS)
REFUSED = ("conversations", "files", "uploads", "videos", "vector_stores", "containers", "batches", "threads")
REFUSED += ("fine_tuning/jobs", "assistants", "evals", "skills", "audio/voices")
FORMS = "/v1/audio/transcriptions"
COLLECTIONS = (*REFUSED, "responses", "chat/completions")

# What each API's answers to prompts hold.
ANSWER = {"choices": [{"message": {"content": "hi"}}], "output": [], "content": []}


class Objects:
    """The script of an engine. Its objects lie in `kept`, by their path."""

    def __init__(self, mark="a"):
        """`mark`: is in all ids."""
        self.kept, self._mark = {}, mark
        self._numbers = itertools.count(1)

    def make(self, collection, fields=()):
        name = f"{collection.replace('/', '-')}-{self._mark}-{next(self._numbers)}"
        made = {**dict(fields), **ANSWER, "id": name, "object": collection}
        self.kept[f"/v1/{collection}/{name}"] = made
        return made

    async def __call__(self, exchange):
        path = unquote(exchange.target.partition("?")[0]).rstrip("/")
        while "//" in path:
            path = path.replace("//", "/")
        collection = next((each for each in COLLECTIONS if f"{path}/".startswith(f"/v1/{each}/")), None)
        if path == FORMS:
            made = {"text": "ok"}
        elif exchange.method == "POST" and path in (f"/v1/{collection}", CHAT):
            made = self.make(collection)
        elif exchange.method in ("GET", "HEAD") and path == f"/v1/{collection}":
            made = {"object": "list", "data": [v for k, v in self.kept.items() if k.startswith(f"{path}/")]}
        elif (kept := "/".join(path.split("/")[: 4 + (collection or "").count("/")])) in self.kept:
            made = self.kept[kept]
            if exchange.method == "DELETE":
                made = {"id": self.kept.pop(kept)["id"], "deleted": True}
        else:
            await exchange.send({"error": {"message": "there is none"}}, status=404)
            return
        await exchange.send(made)


async def make(client, tenant):
    answer = await client.post("/v1/responses", json={"model": "m", "input": "hi"}, headers=KEYS[tenant])
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]
