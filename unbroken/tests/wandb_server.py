"""A stand-in for W&B's server: it answers what wandb's client asks for a run and its artifacts, and
keeps what came.
"""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
KEY = "0" * 40


class StandIn:
    """The server. ``fails`` is None, or how it answers every request: 401, 500 or ``garbage``."""

    def __init__(self, fails: int | str | None = None) -> None:
        self.fails = fails
        self.requests = 0
        self.run: Json = {}  # of the latest upsert
        self.lines: dict[str, list[str]] = {}  # file of the stream → lines
        self.files: dict[str, bytes] = {}  # uploaded, also those of artifacts
        self.artifacts: list[str] = []  # committed, by name
        self.exit_code: int | None = None
        self._names: list[str] = []
        self._http = Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"owner": self}))
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What makes wandb's client talk to this server."""
        return {"WANDB_BASE_URL": self.address, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}

    @property
    def history(self) -> list[Json]:
        """The rows of the run."""
        return [json.loads(line) for line in self.lines.get("wandb-history.jsonl", [])]

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def stream(self, sent: Json) -> None:
        """Take lines where they belong: what is sent again replaces what was there."""
        for name, part in (sent.get("files") or {}).items():
            kept = self.lines.setdefault(name, [])
            kept[part["offset"] : part["offset"] + len(part["content"])] = part["content"]
        if sent.get("complete"):
            self.exit_code = sent.get("exitcode")

    def upload(self, name: str) -> Json:
        return {
            "id": "F",
            "name": name,
            "displayName": name,
            "uploadUrl": f"{self.address}/up/{name}",
        }

    def answer(self, query: str, given: Json) -> Json:
        """The data of a GraphQL request."""
        asked = given.get("input", given)
        if "RunResumeStatus" in query:
            return {
                "model": {
                    "id": "P",
                    "name": "p",
                    "entity": {"id": "E", "name": "me"},
                    "bucket": self.bucket(),
                }
            }
        if "mutation UpsertBucket" in query:
            self.run |= {key: value for key, value in given.items() if value is not None}
            return {
                "upsertBucket": {
                    "bucket": {**(self.bucket() or {}), "project": PROJECT},
                    "inserted": True,
                }
            }
        if "viewer" in query:
            return {
                "viewer": {
                    "id": "V",
                    "entity": "me",
                    "username": "me",
                    "flags": "{}",
                    "teams": {"edges": []},
                }
            }
        if "CreateRunFiles" in query:
            files = [self.upload(name) for name in given["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        if "CreateArtifactFiles" in query:
            nodes = [self.upload(file["name"]) | ARTIFACT_FILE for file in asked["artifactFiles"]]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        for word in ("createArtifactManifest", "updateArtifactManifest"):
            if word in query:
                file = self.upload("manifest.json") | {"uploadHeaders": []}
                return {word: {"artifactManifest": {"id": "M", "file": file}}}
        if "CommitArtifact" in query:
            self.artifacts.append(self._names[int(given["artifactID"])])
            return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": "d"}}}
        if "mutation CreateArtifact " in query:
            self._names.append(asked["artifactCollectionName"])
            sequence = {"id": "S", "latestArtifact": None}
            made = {
                "id": str(len(self._names) - 1),
                "state": "PENDING",
                "artifactSequence": sequence,
                "digest": "d",
            }
            return {"createArtifact": {"artifact": made}}
        # the project: an artifact of that name is asked for, and there is none
        return {"serverInfo": {"features": [], "cliVersionInfo": {}}, "project": {"artifact": None}}

    def bucket(self) -> Json | None:
        """The run as the client resumes it."""
        if not self.run:
            return None
        history, events = (
            self.lines.get(f"wandb-{name}.jsonl", []) for name in ("history", "events")
        )
        summary = self.lines.get("wandb-summary.json", ["{}"])[-1]
        known = {
            "id": "R",
            "name": self.run.get("name"),
            "displayName": self.run.get("displayName"),
            "tags": [],
        }
        known |= {
            "config": self.run.get("config") or "{}",
            "summaryMetrics": summary,
            "wandbConfig": "{}",
        }
        known |= {"historyLineCount": len(history), "eventsLineCount": len(events)}
        known |= {"logLineCount": len(self.lines.get("output.log", []))}
        return known | {
            "historyTail": json.dumps(history[-1:]),
            "eventsTail": json.dumps(events[-1:]),
        }


PROJECT = {"id": "P", "name": "mnist-lightning", "entity": {"id": "E", "name": "me"}}
ARTIFACT_FILE = {
    "uploadHeaders": [],
    "storagePath": "x",
    "uploadMultipartUrls": None,
    "artifact": {"id": "A"},
}


class Quiet(ThreadingHTTPServer):
    """A server that says nothing of clients that drop a connection."""

    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Nothing."""


class Handler(BaseHTTPRequestHandler):
    """One request. ``owner`` is its server."""

    owner: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.owner.requests += 1
        if self.owner.fails is not None:
            status = self.owner.fails if isinstance(self.owner.fails, int) else 200
            self.reply(
                b'{"errors": [{"message": "no"}]}' if status != 200 else b"<html>garbage", status
            )
        elif self.path == "/graphql":
            sent = json.loads(body)
            self.reply(
                json.dumps(
                    {"data": self.owner.answer(sent["query"], sent.get("variables") or {})}
                ).encode()
            )
        else:
            if self.path.endswith("/file_stream"):
                self.owner.stream(json.loads(body))
            elif self.path.startswith("/up/"):
                self.owner.files[self.path.removeprefix("/up/")] = body
            self.reply(b"{}")

    do_PUT = do_GET = do_POST  # noqa: N815 - the names that http.server looks up

    def reply(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
