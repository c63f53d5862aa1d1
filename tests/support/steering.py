"""A proxy before a test server that makes a model of random weights answer documented requests as a trained one does.

Requests go on as they came, but for what they leave open: greedy sampling, a short answer, and a ``logit_bias`` under
which answers are printable and end by themselves. ``/v1/messages`` has no such field: answers end at ``max_tokens``.
"""

from __future__ import annotations

import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.support.chat import printable_bias
from tests.support.server import Server

LIKED = 100
"""A logit bias that no logit makes up for, where nothing forbids the token."""
SHORT, THOUGHT, LONG = 4, 24, 200
"""Tokens of an answer before it may end, of one that thinks, and the most."""
EOS, END_THINK, DSML = "<｜end▁of▁sentence｜>", "</think>", "｜DSML｜"
TRUE = ("t", "tr", "tru", "true")

Body = dict[str, Any]


class Steering:
    """What is added to a body, by what it asks for."""

    def __init__(self, server: Server, tokenizer: PreTrainedTokenizerFast):
        self._server, self._tokenizer = server, tokenizer
        self._thinking: dict[str, float] | None = None

    def __call__(self, path: str, body: Body) -> Body:
        """``body`` with what it leaves open."""
        if path == "/v1/messages":
            return {"temperature": 0, **body, "max_tokens": min(body["max_tokens"], SHORT)}
        if path != "/v1/chat/completions":
            return body
        added: Body = {"temperature": 0, "max_tokens": LONG}
        if body.get("tool_choice") == "required":
            # The grammar of calls lets a parameter be text or JSON; a trained model knows which.
            added["logit_bias"] = self._bias(spaces=False, allowed=[DSML], liked=[DSML, *TRUE, EOS])
        elif "response_format" in body or "regex" in body:
            # Close a string, or else an object, as soon as the grammar lets it.
            added["logit_bias"] = self._bias(spaces=False, liked=["}", EOS]) | {self._id('"'): 2 * LIKED}
        elif body.get("reasoning_effort", "none") != "none":
            self._thinking = self._thinking or self._ends_thinking(body)
            added |= {"logit_bias": self._thinking, "min_tokens": THOUGHT}
        else:
            added |= {"logit_bias": self._bias(liked=[EOS]), "min_tokens": min(SHORT, body.get("max_tokens", SHORT))}
        return {**added, **body}

    def _id(self, token: str) -> str:
        return str(self._tokenizer.convert_tokens_to_ids(token))

    def _bias(self, *, liked: list[str], spaces: bool = True, allowed: list[str] | None = None) -> dict[str, float]:
        known = [text for text in liked if text in self._tokenizer.get_vocab()]
        ids = map(str, self._tokenizer.convert_tokens_to_ids(known))
        bias = printable_bias(self._tokenizer, spaces=spaces, allowed=allowed or ())
        return {**bias, **dict.fromkeys(ids, LIKED)}

    def _ends_thinking(self, body: Body) -> dict[str, float]:
        """The bias under which the model thinks for a while, stops thinking and goes on."""
        for strength in itertools.count(2.0, 2.0):
            bias: dict[str, float] = {**self._bias(liked=[EOS], allowed=[END_THINK]), self._id(END_THINK): strength}
            tried = {"temperature": 0, "logit_bias": bias, "min_tokens": THOUGHT, "max_tokens": LONG, **body}
            message = self._server.post("/v1/chat/completions", tried)["choices"][0]["message"]
            if message["reasoning_content"] and message["content"]:
                return bias
            assert strength < 40, "the model never stops thinking"
        raise AssertionError


@contextmanager
def steered(server: Server, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    """The address of a proxy before ``server``."""
    steering = Steering(server, tokenizer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            data = json.dumps(steering(self.path, body)).encode()
            request = urllib.request.Request(server.url + self.path, data, {"Content-Type": "application/json"})
            try:
                answer = urllib.request.urlopen(request, timeout=120)
            except urllib.error.HTTPError as error:
                answer = error
            with answer:
                self.send_response(answer.status)
                self.send_header("Content-Type", answer.headers["Content-Type"])
                self.end_headers()
                while piece := answer.read1():
                    self.wfile.write(piece)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{proxy.server_port}"
        proxy.shutdown()
