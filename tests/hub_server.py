"""A server that answers as the Hugging Face Hub does, and one on another port as the CDN of large files."""

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

PAGE = 3  # entries of a page of a listing
LARGE = 1000  # bytes, from which on the CDN has a file


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, url = self.server.hub, urlsplit(self.path)
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        on_cdn = self.server is hub.servers[1]
        hub.requests.append(("cdn" if on_cdn else "hub", self.command, unquote(url.path), self.token))
        if on_cdn:  # as on S3 and CloudFront, a signed URL is for GET, and no other credentials may come with it
            signed = hub.signed.pop(url.query, None)
            refused = signed is None or self.token or self.command != "GET"
            return self.answer(400) if refused else self.send_file(signed, f'"{uuid.uuid4()}"')
        if hub.throttled:
            hub.throttled -= 1
            return self.answer(429, headers={"Retry-After": "1"})
        kind, *name, what, revision, key = [*url.path.removeprefix("/api").split("/", 6), "", "main", ""][1:7]
        name, revision, key = "/".join(name), unquote(revision), unquote(key)
        if name != "org/name" or self.token != (hub.private_token or self.token):
            return self.answer(404 if self.token else 401, "RepoNotFound")
        if what == "resolve" and hub.gated:
            return self.answer(403, "GatedRepo", b"Visit its page to ask for access.")
        commit = revision if isinstance(hub.commits.get(revision), dict) else hub.commits.get(revision)
        if commit is None:
            return self.answer(404, "RevisionNotFound")
        files = hub.commits[commit]
        if what == "tree":
            return self.send_page(files, key and f"{key}/", parse_qs(url.query))
        if what == "resolve" and key not in files:
            return self.answer(404, "EntryNotFound")
        if what == "resolve" and len(files[key]) >= LARGE:
            hub.signed[signature := f"Expires=1&Signature={uuid.uuid4()}"] = files[key]
            return self.answer(302, headers={"Location": f"{hub.urls[1]}/{uuid.uuid4()}?{signature}"})
        if what == "resolve":
            return self.answer(307, headers={"Location": f"/api/{kind}/{name}/cached/{commit}/{quote(key)}"})
        if what == "cached":
            return self.send_file(files[key], '"of-the-blob"')
        self.answer(200, body=json.dumps({"id": name, "sha": commit}).encode())

    do_HEAD = do_GET

    def send_page(self, files, folder, query):
        inside = [path for path in files if path.startswith(folder)]
        if not inside:
            return self.answer(404, "EntryNotFound")
        if query["recursive"][0].lower() == "false":
            inside = [path for path in inside if "/" not in path.removeprefix(folder)]
        entries = [{"type": "file", "path": path, "size": len(files[path]), "oid": "0" * 40} for path in inside]
        start = int(query.get("cursor", "0")[0])
        following = f"{self.server.hub.urls[0]}{self.path.partition('&cursor')[0]}&cursor={start + PAGE}"
        headers = {"Link": f'<{following}>; rel="next"'} if start + PAGE < len(entries) else {}
        return self.answer(200, body=json.dumps(entries[start : start + PAGE]).encode(), headers=headers)

    def send_file(self, data, etag):
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = data[first : last + 1]
        headers = {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(data)}", "ETag": etag}
        self.answer(206, body=body, headers=headers)

    def answer(self, status, code="", body=b"", headers=()):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), "X-Error-Code": code, **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    log_message = lambda *args: None  # noqa: E731


class HubServer:
    """A hub with the repository org/name: the files of each commit, and the commit of each branch."""

    def __init__(self, commits):
        self.commits, self.private_token, self.gated, self.signed, self.requests = commits, None, False, {}, []
        self.throttled = 0  # how many of the next requests get 429

    def __enter__(self):
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), _Handler) for _ in range(2)]
        self.urls = [f"http://127.0.0.1:{server.server_port}" for server in self.servers]
        for server in self.servers:
            server.hub = self
            threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        return self

    def __exit__(self, *exc_info):
        for server in self.servers:
            server.shutdown()
            server.server_close()
