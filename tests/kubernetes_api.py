"""A Kubernetes API server with one kind of object, EndpointSlices: list and watch, on a socket.

It speaks as kube-apiserver does (API Concepts): versions that grow, watches that go on from one, bookmarks,
label selectors with `=`, and 410 for a version that is too old.
"""

import asyncio
import contextlib
import json

from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from proxy.fleet.discovery import ApiServer
from tests.fakes import serving


class Api:
    """Attributes:
    slices: by name.
    history: all events, by version from 1; watches from before `oldest` are refused.
    tokens: those that requests bore.
    """

    def __init__(self):
        self.slices, self.history, self.oldest = {}, [], 0
        self.tokens, self.lists, self.watches, self.status = [], 0, 0, 0
        self._changed = asyncio.Event()

    def put(self, name, *pods, service="vllm", namespace="llm", port=8000, **more):
        """A slice with pods: (name, address, ready)."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = {
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "endpoints": [
                {
                    "addresses": [address],
                    "conditions": {"ready": ready, "serving": True, "terminating": not ready},
                    "targetRef": {"kind": "Pod", "name": pod, "namespace": namespace},
                }
                for pod, address, ready in pods
            ],
            "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
            **more,
        }
        self._tell(kind, self.slices[name])

    def delete(self, name):
        self._tell("DELETED", self.slices.pop(name))

    def bookmark(self):
        self._tell("BOOKMARK", {"metadata": {}})

    def fail(self, code, message):
        """Ends the watches as the server does when it cannot go on."""
        self._tell("ERROR", {"kind": "Status", "code": code, "message": message})
        self.history.pop()

    def _tell(self, kind, what):
        what["metadata"] = what.get("metadata", {}) | {"resourceVersion": str(len(self.history) + 1)}
        self.history.append((kind, json.loads(json.dumps(what))))
        changed, self._changed = self._changed, asyncio.Event()
        self._last = self.history[-1]
        changed.set()

    async def answer(self, request):
        query = request.query_params
        self.tokens.append(request.headers.get("authorization"))
        if self.status:
            return JSONResponse({"kind": "Status", "message": "not now"}, self.status)
        wanted = query["labelSelector"].partition("=")[2]
        if query.get("watch") == "true":
            self.watches += 1
            version = int(query["resourceVersion"])
            if version < self.oldest:
                return JSONResponse({"kind": "Status", "code": 410, "message": "too old"}, 410)
            events = self._events(version, wanted, self._changed)
            return StreamingResponse(events, media_type="application/json")
        self.lists += 1
        items = [each for each in self.slices.values() if _service(each) == wanted]
        return JSONResponse({"metadata": {"resourceVersion": str(len(self.history))}, "items": items})

    async def _events(self, version, wanted, changed):
        while True:
            told, version = self.history[version:], len(self.history)
            for kind, what in told:
                if kind == "BOOKMARK" or _service(what) == wanted:
                    yield json.dumps({"type": kind, "object": what}) + "\n"
            await changed.wait()
            changed = self._changed
            kind, what = self._last
            if kind == "ERROR":
                yield json.dumps({"type": kind, "object": what}) + "\n"
                return


def _service(what):
    return what["metadata"].get("labels", {}).get("kubernetes.io/service-name")


@contextlib.asynccontextmanager
async def kubernetes(tmp_path, authority):
    """The server, and the cluster as a pod sees it. `authority` is trustme's."""
    api = Api()
    path = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("llm")
    async with serving(Starlette(routes=[Route(path, api.answer)])) as url:
        yield api, ApiServer(url, tmp_path)
