"""Argument `weight_transfer` of TRL's `AsyncGRPOTrainer`, and the calls to a vLLM server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from shardckpt import Anchors
from shardckpt.errors import PoisonedError, ServerError, UsageError
from shardckpt.stream.publish.full_tensors import FullTensorPublisher

__all__ = ["StreamTransfer"]

_POLL_S = 0.5
_SHOWN = 500  # characters of a server's answer


class StreamTransfer:
    """Argument `weight_transfer` of `AsyncGRPOTrainer`: it publishes the weights, and lets a vLLM server load them.

    The trainer calls it in its main process with full tensors. To publish each rank's shards without gathering them,
    train with `shardckpt.integrations.transformers.PublishCallback`.

    The server runs with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "shardckpt"}'`. If an
    update fails, the server stays paused: it may have the weights of no version.

    Args:
        url: Folder or URL of the stream, which the server reaches too.
        server_url: Address of the vLLM server; None if servers follow the stream by themselves.
        dtype: As for `Publisher`.
        key_map: As for `Publisher`.
        anchors: As for `Publisher`.
        init_info: More values for the server's `init_info`, such as `mirror`.
        timeout_s: Seconds to wait for each answer of the server, and at the start until it is ready.

    Attributes:
        version: Number of the version that was sent last; None before the first one.

    Raises:
        UsageError: An argument has an unknown value.

    Examples:
        >>> transfer = StreamTransfer("/shared/stream", "http://server:8000")  # doctest: +SKIP
        >>> AsyncGRPOTrainer(model, rewards, weight_transfer=transfer, ...)  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        server_url: str | None = None,
        *,
        dtype: str | None = "bfloat16",
        key_map: Mapping[str, str] | None = None,
        anchors: Anchors = Anchors(),  # noqa: B008  (frozen)
        init_info: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.version: int | None = None
        self._publisher = FullTensorPublisher(url, dtype, key_map, anchors)
        self._server = None if server_url is None else _Server(server_url, timeout_s)
        self._init_info = {**(init_info or {}), "url": self._publisher.url}
        self._has_failed = False

    def init_weight_transfer(self) -> None:
        """Wait for the server, and let it open the stream."""
        if self._server is not None:
            self._server.wait()
            self._server.post("init_weight_transfer_engine", {"init_info": self._init_info})

    def pause(self) -> None:
        """Pause the server; requests wait."""
        if self._server is not None:
            self._server.post("pause?mode=keep")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish a version, and let the server load it.

        After a restart, weights that the newest version has are not published again.

        Args:
            iterator: Names and full tensors.

        Raises:
            ServerError: The server did not load the version. It is paused.
        """
        self._has_failed = True
        self.version = self._publisher.publish(iterator)
        if self._server is not None:
            self._server.post("start_weight_update")
            self._server.post("update_weights", {"update_info": {"version": self.version}})
            self._server.post("finish_weight_update", {"weight_version": str(self.version)})
        self._has_failed = False

    def resume(self) -> None:
        """Let the server continue. Raises PoisonedError after a failed update."""
        if self._has_failed:
            raise PoisonedError("the server may have the weights of no version", fix="Send weights before it resumes.")
        if self._server is not None:
            self._server.post("resume")

    def destroy(self) -> None:
        """Release memory. The server keeps its version."""
        self._publisher.close()


class _Server:
    """The routes of a vLLM server."""

    def __init__(self, url: str, timeout_s: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError("`server_url` must start with http:// or https://", found=repr(url))
        if not 0 < timeout_s < float("inf"):
            raise UsageError("`timeout_s` must be a finite number of seconds", found=repr(timeout_s))
        self._url, self._timeout_s = url.rstrip("/"), timeout_s

    def wait(self) -> None:
        """Wait until the server is ready. Raises ServerError."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            with suppress(OSError), urlopen(f"{self._url}/health", timeout=5):  # noqa: S310  (http or https)
                return
            if time.monotonic() >= deadline:
                raise ServerError("the server did not get ready", where=self._url, found=f"{self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def post(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        """Call a route. Raises ServerError."""
        url = f"{self._url}/{route}"
        data = json.dumps(body or {}).encode()
        request = Request(url, data, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
        try:
            with urlopen(request, timeout=self._timeout_s) as answer:  # noqa: S310
                answer.read()
        except HTTPError as error:
            with error:
                text = error.read(_SHOWN).decode(errors="replace")
            fix = "Start it with VLLM_SERVER_DEV_MODE=1." if error.code == 404 else "Its log says more."
            raise ServerError("the server refused", where=url, found=f"{error.code} {text}", fix=fix) from error
        except OSError as error:
            raise ServerError("the server did not answer", where=url, found=str(error)) from error
